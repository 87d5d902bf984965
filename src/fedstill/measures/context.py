"""What a measure may use: the run's world, its data, models that it runs over them, and a place for
large results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from fedstill.core.errors import FedstillError
from fedstill.core.extensions import StageResult
from fedstill.core.files import make_folder, write_whole
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import Method
from fedstill.core.records import (
    SERVER,
    Examples,
    ModelSpec,
    Payload,
    Stage,
    State,
    Tensors,
    View,
    World,
)
from fedstill.core.rounds import Schedule
from fedstill.data.dataset import stratified_positions
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import ModelPasses, correct_by_class
from fedstill.engines.serial import Sites
from fedstill.metrics import class_accuracy
from fedstill.metrics.values import Values
from fedstill.models import contract

T = TypeVar("T")

MEASURES_FOLDER = "measures"
"""The folder in a run's directory for what measures keep beside the journal."""

# Models that measures run: whole ones. A module fills in what a model lacks, with random weights of
# its own.


def lacking(spec: ModelSpec, params: Tensors, part: str = "") -> list[str]:
    """The entries of an architecture, below a part of it, that a model is without."""
    entries = contract.entries(spec, contract.module(spec, "frozen"))
    return [name for name in entries if name.startswith(part) and name not in params]


def whole(spec: ModelSpec, params: Tensors, part: str = "") -> Tensors:
    """A model that has all entries of an architecture, or of a part of it. Raises FedstillError for
    another.
    """
    missing = lacking(spec, params, part)
    if not missing:
        return params
    names = missing[0]
    if len(missing) > 1:
        names += f" and {len(missing) - 1} more entries"
    raise FedstillError(f"a measure cannot run a model of a {spec.label} that lacks {names}")


@dataclass(frozen=True)
class WholePasses(ModelPasses):
    """Passes of whole models. Raises FedstillError for one that lacks an entry: of features, one of
    the body.
    """

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """As ``ModelPasses.gradients``."""
        return super().gradients(whole(self.model, params), examples, loss, batch, seed)

    def run(
        self,
        function: Callable[[nn.Module, Tensors, Tensor], T],
        params: Tensors,
        examples: Examples,
        model: ModelSpec | None = None,
    ) -> Iterator[T]:
        """As ``ModelPasses.run``."""
        part = ""
        if function is contract.features:
            part = "body."
        entries = whole(model or self.model, params, part)
        return super().run(function, entries, examples, model)


# What a measure may use.


@dataclass(frozen=True)
class EvaluationContext:
    """What a measure may use: the world, the common test set, and, in a simulation only, the
    clients' own data.

    ``folder``: the run's directory, for what is too large for the journal.
    ``schedule``: the run's. ``tables``: the tables of outer packages in its config.
    ``remembered``: what a client remembers after the stage; None where clients are reached over
    Flower. ``previous``: in a chain, the client whose model was handed over, None for the very
    first; ``previous_round``: in which round it acted.
    """

    world: World
    test: Examples
    inputs: Inputs
    sites: Sites
    schedule: Schedule
    folder: Path | None = None
    tables: Mapping[str, object] = field(default_factory=dict)
    remembered: Callable[[int], Payload] | None = None
    previous: int | None = None
    previous_round: int | None = None

    @property
    def method(self) -> Method:
        """The run's method."""
        return self.schedule.method

    def keep(self, name: str, tensors: Tensors) -> str:
        """Write tensors to a file under ``measures/`` and return its name for the journal; empty
        without a folder.
        """
        if self.folder is None:
            return ""
        make_folder(self.folder / MEASURES_FOLDER)
        copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        file_name = f"{name}.safetensors"
        write_whole(self.folder / MEASURES_FOLDER / file_name, safetensors.torch.save(copies))
        return file_name

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage: its data, its held-out examples and its own test set, each
        None where there is none. In a simulation only.
        """
        return self.sites.view(client, stage)

    @property
    def spec(self) -> ModelSpec:
        """The architecture of the global model."""
        return self.world.model(SERVER)

    def passes(self) -> ModelPasses:
        """Passes of that architecture over examples. They refuse a model that lacks an entry."""
        return WholePasses(self.spec, self.inputs)

    def predictor(self, params: Tensors, client: int = SERVER) -> contract.Predictor:
        """What a model answers, of a client's architecture. Raises FedstillError for one that lacks
        an entry.
        """
        spec = self.world.model(client)
        return contract.predictor(spec, whole(spec, params))

    def some(self, size: int) -> Examples:
        """``size`` test examples, the same in every round and run, with the classes' shares
        kept.
        """
        if size >= len(self.test):
            return self.test
        return self.test.take(stratified_positions(self.test.labels, size, seed=0))

    def accuracy_by_class(self, params: Tensors, data: Examples, client: int = SERVER) -> Values:
        """Accuracy of a model of a client's architecture on the examples of each class (C,); NaN
        for a class without any.
        """
        classes = self.world.classes
        totals = torch.bincount(data.labels.cpu(), minlength=classes)
        correct = correct_by_class(self.predictor(params, client), data, self.inputs, classes)
        return class_accuracy(correct, totals)

    def draw(self, purpose: str) -> torch.Generator:
        """Random numbers for a purpose: the same in every round, so that rounds and models can be
        compared.
        """
        return generator(seed_for(self.world.seed, 0, 0, SERVER, purpose))


# Local models beside the global one that clients received, and the one that was made of them.


def comparable(result: StageResult, context: EvaluationContext) -> dict[int, Tensors]:
    """Each client's trained model, if the server had a global model of the same network before;
    else none.

    Without such a model, because the server has none or aggregation has changed the network, there
    is nothing to compare local models with.
    """
    if not is_global(result.before, context):
        return {}
    return result.local_models


def is_global(state: State, context: EvaluationContext) -> bool:
    """Whether a state holds a global model of the network that a run began with."""
    return bool(state.params) and state.model in (None, context.spec)


def named_models(
    result: StageResult, context: EvaluationContext, most: int
) -> Iterator[tuple[str, Tensors]]:
    """The model that was received, at most ``most`` local ones (lowest ids first), and the new
    global one.

    The new one only where it is of the same network.
    """
    yield "received", result.before.params
    for client, params in sorted(comparable(result, context).items())[:most]:
        yield f"client {client}", params
    if is_global(result.after, context):
        yield "aggregated", result.after.params


def layers(context: EvaluationContext, params: Tensors, images: Examples) -> dict[str, Tensor]:
    """Outputs of the last hidden layer, "features" (n, D), and of the classifier, "classifier" (n,
    C).
    """
    passes = context.passes()
    features = passes.features(whole(context.spec, params), images)
    network = contract.module(context.spec, "frozen").eval()
    on_device = {k: v.to(features.device) for k, v in params.items()}
    with torch.no_grad():
        logits = contract.head(network, on_device, features)
    return {"features": features, "classifier": logits}
