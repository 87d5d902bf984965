"""What a measure is: a hook after each stage, what it is shown there, what it needs, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor

from fedstill.data.examples import stratified
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import ModelPasses, correct_by_class
from fedstill.engines.serial import Sites
from fedstill.files import make_folder, write_whole
from fedstill.keys import generator, seed_for
from fedstill.metrics import class_accuracy
from fedstill.metrics.values import Values
from fedstill.models import contract
from fedstill.records import SERVER, Examples, ModelSpec, Payload, Reply, Stage, State, Tensors, World

MEASURES = "measures"
"""The folder in a run's directory for what measures keep beside the journal."""

Numbers = Mapping[str, Any]
"""What a journal holds: numbers, strings, None, and lists and mappings of them."""


@dataclass(frozen=True)
class Happened:
    """A stage that is done: its accepted replies, what was sent down, the state before and after it.

    ``ends_round``: no stage comes after it in this round; ``ends_run``: nor in any other. ``previous``: in a chain, the
    client whose model was handed over, None for the very first.
    """

    stage: Stage
    replies: Sequence[Reply]
    downs: Mapping[int, Payload]
    before: State
    after: State
    ends_round: bool
    ends_run: bool
    previous: int | None = None

    @property
    def local_models(self) -> dict[int, Tensors]:
        """What each client's training ended with, where replies hold models; the server is not among them."""
        return {r.client: r.up.params for r in self.replies if r.client != SERVER and "params" in r.up}


@dataclass(frozen=True)
class Room:
    """Where a measure works: the world, the common test set, and, in a simulation only, the clients' own data.

    ``folder``: the run's directory, for what is too large for the journal.
    """

    world: World
    test: Examples
    inputs: Inputs
    sites: Sites
    folder: Path | None = None

    def keep(self, name: str, tensors: Tensors) -> str:
        """Write tensors beside the journal, under ``measures/``, and give the file's name for it; nothing in memory."""
        if self.folder is None:
            return ""
        make_folder(self.folder / MEASURES)
        own = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        write_whole(self.folder / MEASURES / f"{name}.safetensors", safetensors.torch.save(own))
        return f"{name}.safetensors"

    @property
    def spec(self) -> ModelSpec:
        """The architecture of the global model."""
        return self.world.model(SERVER)

    def passes(self) -> ModelPasses:
        """Passes of that architecture over examples."""
        return ModelPasses(self.spec, self.inputs)

    def some(self, size: int) -> Examples:
        """So many test images, the same in every round and run, with the classes' shares kept."""
        return self.test if size >= len(self.test) else self.test.take(stratified(self.test.labels, size, seed=0))

    def accuracy_by_class(self, params: Tensors, data: Examples) -> Values:
        """Accuracy on the examples of each class (C,); NaN for a class without any."""
        totals = torch.bincount(data.labels.cpu(), minlength=self.world.classes)
        predict = contract.predictor(self.spec, params)
        return class_accuracy(correct_by_class(predict, data, self.inputs, self.world.classes), totals)

    def draw(self, purpose: str) -> torch.Generator:
        """Random numbers for a purpose: the same in every round, so that rounds and models can be compared."""
        return generator(seed_for(self.world.seed, 0, 0, SERVER, purpose))


class Measure:
    """A measure: ``look`` is called after each stage of a measured round, and what it gives is written to the journal.

    ``needs``: "chain" (clients one after another), "test" (a common test set), "local_models" (replies that hold models
    of one architecture), "features" (a model with a body), "plane" (features of two numbers), "queries" (clients that
    ask), "client_data" (only a simulation has them), "test_at_clients" (so that clients can measure), "epochs" (clients
    that train on their data).
    ``each_epoch``: it looks once before and once after every local epoch.
    ``only_last``: it looks once, at the end of the run, because it is a picture or takes long.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    only_last: ClassVar[bool] = False
    each_epoch: ClassVar[bool] = False

    def look(self, seen: Happened, room: Room) -> Numbers | None:
        """Numbers for the journal, without times; None where there is nothing to see in this stage."""
        return None

    def images(self, test: int, clients: int, own: int) -> int:
        """About how many images it runs through a network in one look, a gradient counted as three.

        test: images in the test set; clients: how many act in the stage; own: their training images in all.
        """
        return 0


def named_models(seen: Happened, most: int) -> Iterator[tuple[str, Tensors]]:
    """The model that was received, at most so many local ones (lowest ids first), and what was made of them."""
    yield "received", seen.before.params
    for client, params in sorted(seen.local_models.items())[:most]:
        yield f"client {client}", params
    yield "aggregated", seen.after.params


def layers(room: Room, params: Tensors, images: Examples) -> dict[str, Tensor]:
    """Outputs of the last hidden layer, "features" (n, D), and of the classifier, "classifier" (n, C)."""
    passes = room.passes()
    features = passes.features(params, images)
    network = contract.module(room.spec, "frozen").eval()
    with torch.no_grad():
        logits = contract.head(network, {k: v.to(features.device) for k, v in params.items()}, features)
    return {"features": features, "classifier": logits}


def rounded(numbers: Tensor, digits: int) -> list[Any]:
    """A tensor as nested lists of rounded numbers."""

    def each(value: Any) -> Any:
        return [each(v) for v in value] if isinstance(value, list) else round(value, digits)

    found: list[Any] = each(numbers.detach().cpu().double().tolist())
    return found
