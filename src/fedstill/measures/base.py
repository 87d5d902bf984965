"""The interface of measures: their functions, needs and costs, and the objects that they may use
(``EvaluationContext``).
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
from fedstill.metrics.accuracy import Values
from fedstill.models import contract
from fedstill.models.predictors import Predictor, predictor

T = TypeVar("T")

MEASURES_FOLDER = "measures"
"""The folder in a run's directory for large results of measures."""

# Measures only run complete models. Otherwise, the module would use its random initial weights for
# missing entries.


def missing_entries(spec: ModelSpec, params: Tensors, part: str = "") -> list[str]:
    """The entries of an architecture, or of a part of it, that a model lacks."""
    entries = contract.entries(spec, contract.module(spec, "frozen"))
    return [name for name in entries if name.startswith(part) and name not in params]


def checked_complete(spec: ModelSpec, params: Tensors, part: str = "") -> Tensors:
    """The model, if it has all entries of an architecture, or of a part of it; raises FedstillError
    if it lacks one.
    """
    missing = missing_entries(spec, params, part)
    if not missing:
        return params
    names = missing[0]
    if len(missing) > 1:
        names += f" and {len(missing) - 1} more entries"
    raise FedstillError(f"a measure cannot run a model of a {spec.label} that lacks {names}")


@dataclass(frozen=True)
class CompleteModelPasses(ModelPasses):
    """Passes of complete models. Raises FedstillError if a model lacks an entry; features only need
    the entries of the body.
    """

    def gradients(
        self, params: Tensors, examples: Examples, loss: Any, batch: int, seed: int | None = None
    ) -> Iterator[Tensors]:
        """As ``ModelPasses.gradients``."""
        return super().gradients(checked_complete(self.model, params), examples, loss, batch, seed)

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
        entries = checked_complete(model or self.model, params, part)
        return super().run(function, entries, examples, model)


@dataclass(frozen=True)
class EvaluationContext:
    """The objects that a measure may use: the world, the common test set and, only in a simulation,
    the clients' data.

    ``folder``: the run's directory, for results that are too large for the journal. ``schedule``:
    the run's schedule. ``tables``: the config tables of outer packages. ``remembered``: a function
    that returns a client's state after the stage; None for clients over Flower. ``previous``: in a
    chain, the previous client, None for the first one of the run; ``previous_round``: the round in
    which it acted.
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
        """Write tensors to a file in ``measures/``, and return the file's name for the journal;
        empty without a folder.
        """
        if self.folder is None:
            return ""
        make_folder(self.folder / MEASURES_FOLDER)
        copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        file_name = f"{name}.safetensors"
        write_whole(self.folder / MEASURES_FOLDER / file_name, safetensors.torch.save(copies))
        return file_name

    def view(self, client: int, stage: Stage) -> View:
        """A client's view in a stage: its data, held-out examples and own test set, each None if
        there is none. Only in a simulation.
        """
        return self.sites.view(client, stage)

    @property
    def spec(self) -> ModelSpec:
        """The architecture of the global model."""
        return self.world.model(SERVER)

    def passes(self) -> ModelPasses:
        """Passes of global models over examples; they raise FedstillError for an incomplete
        model.
        """
        return CompleteModelPasses(self.spec, self.inputs)

    def predictor(self, params: Tensors, client: int = SERVER) -> Predictor:
        """The predictor of a model with a client's architecture; raises FedstillError for an
        incomplete model.
        """
        spec = self.world.model(client)
        return predictor(spec, checked_complete(spec, params))

    def some(self, size: int) -> Examples:
        """A stratified sample of ``size`` test examples, the same in every round and run."""
        if size >= len(self.test):
            return self.test
        return self.test.take(stratified_positions(self.test.labels, size, seed=0))

    def accuracy_by_class(self, params: Tensors, data: Examples, client: int = SERVER) -> Values:
        """The class accuracies (C,) of a model with a client's architecture; NaN for a class
        without examples.
        """
        classes = self.world.classes
        totals = torch.bincount(data.labels.cpu(), minlength=classes)
        correct = correct_by_class(self.predictor(params, client), data, self.inputs, classes)
        return class_accuracy(correct, totals)

    def draw(self, purpose: str) -> torch.Generator:
        """A generator for a purpose. It is the same in every round, so that rounds and models can
        be compared.
        """
        return generator(seed_for(self.world.seed, 0, 0, SERVER, purpose))


# Local models, the received global model, and the aggregated global model of a stage.


def comparable(result: StageResult, context: EvaluationContext) -> dict[int, Tensors]:
    """The local models by client; empty if they cannot be compared with a global model.

    This is so if the server has no global model, or if aggregation has changed its network.
    """
    if not is_global(result.before, context):
        return {}
    return result.local_models


def is_global(state: State, context: EvaluationContext) -> bool:
    """Whether a state has a global model of the run's initial network."""
    return bool(state.params) and state.model in (None, context.spec)


def named_models(
    result: StageResult, context: EvaluationContext, most: int
) -> Iterator[tuple[str, Tensors]]:
    """The received global model, at most ``most`` local models (lowest client ids first), and the
    aggregated global model, if its network is the same; each with a name.
    """
    yield "received", result.before.params
    for client, params in sorted(comparable(result, context).items())[:most]:
        yield f"client {client}", params
    if is_global(result.after, context):
        yield "aggregated", result.after.params


def layers(context: EvaluationContext, params: Tensors, images: Examples) -> dict[str, Tensor]:
    """The outputs of the last hidden layer, "features" (n, D), and of the head, "classifier"
    (n, C).
    """
    passes = context.passes()
    features = passes.features(checked_complete(context.spec, params), images)
    network = contract.module(context.spec, "frozen").eval()
    on_device = {k: v.to(features.device) for k, v in params.items()}
    with torch.no_grad():
        logits = contract.head(network, on_device, features)
    return {"features": features, "classifier": logits}


LOGITS = "logits"
"""The group of a reply's content with logits on public examples."""

Numbers = Mapping[str, Any]
"""Values for the journal: numbers, strings, None, and lists and mappings of them."""

_FORMER_NAMES = {
    "Room": "fedstill.measures.base.EvaluationContext",
    "Reports": "fedstill.measures.base.RoundReports",
}
"""The new names of objects that this module contained."""


def __getattr__(name: str) -> Any:
    """Raises ImportError for a former name; its message contains the new name."""
    if name in _FORMER_NAMES:
        raise ImportError(f"{__name__}.{name} is now {_FORMER_NAMES[name]}: import that")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class RoundReports:
    """The clients' reports in a round, which a measure summarises.

    ``clients``: the events of clients in the journal, in order, including refused and idle clients.
    ``received``, ``aggregated``: class accuracies (C,) of the global model before and after the
    round, None for a class without test examples. ``test_counts``: test examples by class (C,).
    """

    clients: Sequence[Mapping[str, Any]]
    received: Sequence[Any]
    aggregated: Sequence[Any]
    test_counts: Sequence[int]


@runtime_checkable
class SendsLogits(Protocol):
    """A method whose clients send ``logits`` on public examples, and store their model as
    ``params`` in their client state.
    """

    def sent_logits(self, logits: Tensor) -> Tensor:
        """The logits (n, C) that a client sends if its model has the logits (n, C)."""


class Measure:
    """The base class of measures, whose numbers are written to the journal.

    A measure overrides ``look``, ``at_client`` or both. The server calls ``look`` after each stage
    of a measured round. Clients call ``at_client`` after their work, for measures of models that a
    server does not see; the returned fields become part of the client's event, and ``of_round``
    summarises them in the event of the round.

    ``needs``: requirements on the run. "chain": clients act one after another. "side_by_side": two
    or more clients of a stage send models. "test": a common test set. "global_model": a server with
    a model from the start. "no_client_predictors": a server without different models for clients.
    "local_models": replies with models of one architecture. "features": a model with a body.
    "plane": two-dimensional features. "queries": querying clients. "client_data": access to
    clients' data, as in a simulation. "test_at_clients": clients that have the common test set.
    "epochs": clients that train on their data. "held_out": held-out examples of clients, or public
    examples with labels. "uploads": replies with models, or with logits of models whose client
    state is in this process. ``each_epoch``: whether the measure also evaluates the model after
    every local epoch. ``only_last``: whether it is computed only once, because it is a picture or
    takes long: after the last stage of the run or, with "local_models", after the last stage in
    which clients send models. ``at_sites``: whether real sites compute it on their own data, and
    send the result of ``at_client``. ``gives``: the names of the fields that ``at_client`` returns.
    A server rejects other fields from a network, unless a measure of the run names none.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    only_last: ClassVar[bool] = False
    at_sites: ClassVar[bool] = False
    gives: ClassVar[tuple[str, ...]] = ()
    each_epoch: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Raises ConfigError for names that resemble those of functions or attributes of a measure.

        ``images``, the former name of ``examples``, is accepted for one more version.
        """
        super().__init_subclass__()
        reject_misspelt_hooks(cls)
        if "images" in vars(cls) and "examples" not in vars(cls):
            text = f"{cls.__name__}.images is now called examples; rename it"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            cls.examples = vars(cls)["images"]  # type: ignore[method-assign]

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """Numbers for the journal, without times; None if there is nothing to measure in this
        stage.
        """
        return None

    def at_client(self, visit: AtClient) -> Numbers | None:
        """Fields of the client's event, without times; None if there is nothing to measure."""
        return None

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """The reason why a client's report (the fields of its event) is invalid; empty if it is
        valid.

        The server calls this function for reports from a network before it uses them.
        """
        return ""

    def of_round(self, reports: RoundReports) -> Numbers:
        """Fields of the round's event, computed from the clients' reports."""
        return {}

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """The approximate number of examples in the forward passes of one measurement; the gradient
        of an example counts as three.

        test: examples in the test set; clients: clients of the stage; client_examples: the sum of
        their training examples.
        """
        return 0


def at_clients(
    measures: Mapping[str, Measure], rounds: frozenset[int], real_site: bool = False
) -> ClientMeasures:
    """The measures that clients compute in some rounds; for a real site, those with
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


def wrong_counts(report: Mapping[str, Any], fields: Sequence[str], classes: int) -> str:
    """The reason why a report's fields of counts are invalid; empty if they are valid.

    A field may be missing. Otherwise, it must be a list with a non-negative integer for each class.
    """
    for name in fields:
        value = report.get(name, [0] * classes)
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 2**53 for v in value):
            return f"{name} is not a list of counts"
        if len(value) != classes:
            return f"{name} has {len(value)} numbers for {classes} classes"
    return ""


def rounded_lists(numbers: Tensor, digits: int) -> list[Any]:
    """A tensor as nested lists of rounded numbers."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return round(value, digits)

    lists: list[Any] = rounded(numbers.detach().cpu().double().tolist())
    return lists


def none_for_nan(numbers: Values) -> list[float | None]:
    """Numbers (n,) as a list for a journal, with None instead of NaN."""
    finite: list[float | None] = []
    for number in numbers.tolist():
        if math.isnan(number):
            finite.append(None)
        else:
            finite.append(number)
    return finite
