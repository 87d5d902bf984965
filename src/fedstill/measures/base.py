"""What a measure is: a hook after each stage, what it sees, what it needs, what it costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from fedstill.core.extensions import StageResult
from fedstill.core.user_code import reject_misspelt_hooks
from fedstill.engines.client_measures import AtClient, ClientMeasures
from fedstill.measures.context import EvaluationContext
from fedstill.metrics.values import Values

LOGITS = "logits"
"""The group of an upload that holds logits on public examples."""

Numbers = Mapping[str, Any]
"""What a journal holds: numbers, strings, None, and lists and mappings of them."""

_FORMER_NAMES = {
    "Room": "fedstill.measures.context.EvaluationContext",
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
