"""What a measure is: a hook after each stage, what it may use (``EvaluationContext``), what it
needs, and what it costs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

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
from fedstill.core.user_code import reject_misspelt_hooks
from fedstill.data.dataset import stratified_positions
from fedstill.data.inputs import Inputs
from fedstill.engines.client_measures import AtClient, ClientMeasures
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


LOGITS = "logits"
"""The group of an upload that holds logits on public examples."""

Numbers = Mapping[str, Any]
"""What a journal holds: numbers, strings, None, and lists and mappings of them."""

_FORMER_NAMES = {
    "Room": "fedstill.measures.base.EvaluationContext",
    "Reports": "fedstill.measures.base.RoundReports",
}
"""Names that this module had, and their new ones."""


def __getattr__(name: str) -> Any:
    """Raises ImportError for a former name, so that an import of it says the new one."""
    if name in _FORMER_NAMES:
        raise ImportError(f"{__name__}.{name} is now {_FORMER_NAMES[name]}: import that")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class RoundReports:
    """What clients reported in a round, for a measure to sum up.

    ``clients``: their events in the journal, in order, those of refused and idle clients among
    them. ``received``,
    ``aggregated``: class accuracies (C,) of the global model before and after the round, None for a
    class without test images. ``test_counts``: test examples by class (C,).
    """

    clients: Sequence[Mapping[str, Any]]
    received: Sequence[Any]
    aggregated: Sequence[Any]
    test_counts: Sequence[int]


@runtime_checkable
class SaysLogits(Protocol):
    """A method whose clients send ``logits`` on public images, and remember their own model as
    ``params``.
    """

    def sent_logits(self, logits: Tensor) -> Tensor:
        """What a client sends of its model's logits (n, C): (n, C)."""


class Measure:
    """A measure of one of two kinds, or both; what it gives is written to the journal.

    On the server ``look`` is called after each stage of a measured round. At clients ``at_client``
    is called when their work is done, where a common server would not see their models; its fields
    are in the clients' events, and ``of_round`` sums them up in the event of the round.

    ``needs``: "chain" (clients one after another), "side_by_side" (two or more in a stage, which
    send models), "test" (a common test set), "global_model" (a server that has one from the start),
    "no_client_predictors" (a server without several models), "local_models" (replies that hold
    models of one architecture), "features" (a model with a body), "plane" (features of two
    numbers), "queries" (clients that ask), "client_data" (only a simulation has them),
    "test_at_clients" (so that clients can measure), "epochs" (clients that train on their data),
    "held_out" (examples that clients hold out, or public ones with labels), "uploads" (replies with
    models, or with logits of models that clients keep in this process).
    ``each_epoch``: it looks once before and once after every local epoch.
    ``only_last``: it looks once, because it is a picture or takes long: after the run's last stage,
    or with "local_models" after the last one in which clients send models.
    ``at_sites``: real sites take it too, on data of their own; what ``at_client`` gives then leaves
    the site.
    ``gives``: the names of the fields that ``at_client`` gives. A server takes no others over a
    network; from a run with a measure that does not name its own, any.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    only_last: ClassVar[bool] = False
    at_sites: ClassVar[bool] = False
    gives: ClassVar[tuple[str, ...]] = ()
    each_epoch: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Raises ConfigError for a name that resembles a hook's or a declaration's.

        ``images``, as ``examples`` was called before, is taken for one version more.
        """
        super().__init_subclass__()
        reject_misspelt_hooks(cls)
        if "images" in vars(cls) and "examples" not in vars(cls):
            text = f"{cls.__name__}.images is now called examples; rename it"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            cls.examples = vars(cls)["images"]  # type: ignore[method-assign]

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """Numbers for the journal, without times; None where there is nothing to see in this
        stage.
        """
        return None

    def at_client(self, visit: AtClient) -> Numbers | None:
        """Fields of the client's event, without times; None where there is nothing to measure at
        this client.
        """
        return None

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Why a client's report, its event's fields, cannot have come from ``at_client``; empty if
        it can.

        Called for reports that came over a network, before they are used.
        """
        return ""

    def of_round(self, reports: RoundReports) -> Numbers:
        """Fields of the round's event, made of what clients reported."""
        return {}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """About how many examples it runs through a network in one look, a gradient counted as
        three.

        test: examples in the test set; clients: how many act in the stage; own: their training
        examples in all.
        """
        return 0


def at_clients(
    measures: Mapping[str, Measure], rounds: frozenset[int], real_site: bool = False
) -> ClientMeasures:
    """Those of a run's measures that clients take, in these rounds; a real site only those with
    ``at_sites``.
    """
    client_measures = {
        name: measure
        for name, measure in measures.items()
        if type(measure).at_client is not Measure.at_client and (measure.at_sites or not real_site)
    }
    if not client_measures:
        return ClientMeasures({}, frozenset())
    return ClientMeasures(client_measures, rounds)


def are_counts(report: Mapping[str, Any], fields: Sequence[str], classes: int) -> str:
    """Returns what is wrong with a report's fields of counts, or an empty string. A field that is
    present must have a whole number from 0 for each class.
    """
    for name in fields:
        value = report.get(name, [0] * classes)
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 2**53 for v in value):
            return f"{name} is not a list of counts"
        if len(value) != classes:
            return f"{name} has {len(value)} numbers for {classes} classes"
    return ""


def seconds_at_clients(
    events: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, float]:
    """Seconds that each of these measures took at clients; measures that took no time are left
    out.

    events: those of clients.
    """
    seconds = {name: sum(e.get(f"seconds_{name}") or 0.0 for e in events) for name in names}
    return {name: value for name, value in seconds.items() if value > 0}


def rounded_lists(numbers: Tensor, digits: int) -> list[Any]:
    """A tensor as nested lists of rounded numbers."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return round(value, digits)

    lists: list[Any] = rounded(numbers.detach().cpu().double().tolist())
    return lists


def none_for_nan(numbers: Values) -> list[float | None]:
    """Numbers (n,) for a journal, which has None in place of NaN."""
    finite: list[float | None] = []
    for number in numbers.tolist():
        if math.isnan(number):
            finite.append(None)
        else:
            finite.append(number)
    return finite
