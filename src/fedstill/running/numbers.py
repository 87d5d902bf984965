"""The numbers of a run, by metric: the source of every table, figure, tracker and data frame.

Only this module turns a journal's events into numbers. A number belongs to a metric, such as
``accuracy`` or ``loss/ce``, and to a round, a stage of it, a client, a class, a task, an epoch or a
point. A number without a client is about the whole federation, and one without a stage about the
whole round.

Each field of an event is a metric of the same name. A table has a metric for each of its fields
(``divergence/mean_l2``). A list over classes, epochs or tasks has a number for each of them. A
confusion matrix has a metric for each predicted class (``confusion/2``), with a number for each
label. Lists of teachers and of queried classes are counted. Texts and other lists are left out,
except in what a measure records after a stage, its looks: there ``measures.LIST_FORMS`` names the
axes of lists, and any other list of numbers has a number for each point.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.stages import Plan
from fedstill.measures import list_forms
from fedstill.metrics import tasks
from fedstill.metrics.accuracy import Values, best_and_recent
from fedstill.metrics.classification import CONFUSION, METRICS, best_round
from fedstill.running.journal import Event, events_by_name, first_event

Indices = NDArray[np.int64]

Coordinates = Mapping[str, Indices]
"""By axis, the index of each number. Axes that do not apply to the numbers are missing."""

AXES = ("stage", "round", "epoch", "task", "client", "class", "point")
"""The axes of numbers. Tasks count from 1, all others from 0; client -1 is the server."""

ROUND_AXES = frozenset({"round"})
"""The axes of a number that is about a whole round."""

ALWAYS_SUMMED = ("seconds", "bytes_up", "bytes_down")
"""Metrics that every run has in its summary; 0 if they were not recorded."""

SUMMED_METRICS = frozenset(
    {
        *ALWAYS_SUMMED,
        "seconds_training",
        "seconds_measuring",
        "seconds_saving",
        "seconds_clients",
        "seconds_cpu",
        "bytes_as_weights",
        "replies",
        "refused",
    }
)
"""Metrics that a summary sums over rounds. All others are those of a round."""

LAST_ROUND_METRICS = ("accuracy", "forgetting", "epsilon", *METRICS)
"""Metrics that a run has in its summary only if the last round has them."""

ROUND_CLIENT_AXES = frozenset({"round", "client"})
"""The axes of a number that is about a client after a whole round."""

STAGE_CLIENT_AXES = frozenset({"round", "stage", "client"})
"""The axes of a number that is about a client in a stage, and those of what a measure recorded
after a stage.
"""

SECONDS = "seconds"
"""The last part of a metric with a duration."""

OF_USER_MEASURES = "of_measures"
"""The field of a round that lists the fields of the user's own measures, by measure."""

REFUSED = "refused"
"""The field of a reply with the reason why it was refused. As a metric of a client in a stage, it
is 1 for a refused reply and 0 for an accepted one; rounds have the number of refused replies.
"""

COUNTED_LISTS = frozenset({"teachers", "query"})
"""Lists whose metric is their length: the number of teachers, and of queried classes."""

INDEX_LISTS: Mapping[str, str] = {"clients": "client", "classes": "class"}
"""Lists of a look that name the clients or classes of its other lists, and the axes of these."""

NOT_NUMBERS = frozenset({"event", "round", "stage", "name", "client", "measure", "previous"})
"""Fields of an event that name its place in the run."""

BY_CLASS = frozenset(
    {
        "class_accuracy",
        "personal_class_accuracy",
        "label_counts",
        "correct_by_class",
        "correct_before",
        "correct_after",
        "counts",
        "before",
        "after",
        "probe",
        "trained_counts",
        "trained_right",
        "tested_right",
    }
)
"""Fields that hold a number for each class."""

BY_EPOCH = "by_epoch/"
"""How the names of metrics after each local epoch begin; the names of stage and key follow."""

LIST_AXES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(BY_CLASS, ("class",)),
    "correct_by_epoch": ("epoch", "class"),
    "scores": ("epoch",),
    "epsilon": ("client",),
    "site_by_task": ("task",),
    "task_accuracy": ("task",),
    "task_accuracy_by_client": ("task",),
}
"""The axes of lists, by the field's name."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of one metric.

    ``values``: (n,), without values that were not measured. ``coordinates``: by axis, an index for
    each number, (n,).
    """

    metric: str
    values: Values
    coordinates: Coordinates

    def by_index(self, axis: str) -> dict[int, float]:
        """The values by their indices on an axis; of several at an index, the last one."""
        return dict(zip(self.coordinates[axis].tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True)
class EpochNumbers:
    """Accuracies of local models in a round and a stage: by key, a number after each epoch, None
    if it was not measured. Epoch 0 is the received model.
    """

    round: int
    stage: str
    by_key: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class ClientNumbers:
    """Numbers of one metric that a client reported in a stage: one, or one for each class or epoch;
    None for an epoch that was not measured.
    """

    round: int
    stage: str
    client: int
    values: Sequence[float | None]


@dataclass(frozen=True)
class ReplyOutcome:
    """Whether the reply of a client in a stage was accepted.

    ``refused``: why it was refused; empty if it was accepted.
    """

    round: int
    stage: str
    client: int
    refused: str


class RunNumbers:
    """The numbers of one run, by metric.

    Beside the numbers in events, there are three numbers of a whole round: ``loss/TERM``, the mean
    over accepted clients, weighted by their examples; the mean over a measure's looks; and
    ``epsilon``, the largest privacy loss of any client.

    ``by_name``: the events of a journal or of its latest round, grouped by their names. ``rounds``:
    the finished rounds. ``classes``: the number of classes; by default, from the event ``start``,
    or else 0. The numbers of clients are computed on demand, because they are most of a run's
    numbers, and few readers need them.
    """

    def __init__(self, by_name: Mapping[str, Sequence[Event]], classes: int | None = None) -> None:
        if classes is None:
            start = first_event(by_name, "start")
            classes = len(start.get("classes", ()))
        self.rounds: Sequence[int] = [event["round"] for event in by_name.get("round", ())]
        self.classes = classes
        self._events = by_name
        self._federation = list(_federation_numbers(by_name, classes))
        self._derived: list[Numbers] = []
        self._by_metric = _by_metric(self._federation)

    @staticmethod
    def of(events: Sequence[Event], classes: int | None = None) -> RunNumbers:
        """The numbers in a journal, or in some of its events."""
        return RunNumbers(events_by_name(events), classes)

    def add(self, derived: Iterable[Numbers]) -> None:
        """Add numbers that are derived from the journal's."""
        self._derived += derived
        self._by_metric = _by_metric([*self._federation, *self._derived])

    def columns(self, metrics: Collection[str] | None = None) -> Iterator[Numbers]:
        """All numbers, or those of some metrics (``is_chosen``), metric by metric."""
        client_numbers = _event_numbers(self._clients, self.classes, metrics=metrics)
        refusals = _refusals(self._clients)
        columns = chain(self._federation, client_numbers, refusals, self._derived)
        chosen = [column for column in columns if is_chosen(column.metric, metrics)]
        return chain.from_iterable(_by_metric(chosen).values())

    def by_round(self, metric: str) -> dict[int, float]:
        """A metric of the whole federation by round; round 0 is before training."""
        curve: dict[int, float] = {}
        for column in self._with_axes(metric, ROUND_AXES):
            curve |= column.by_index("round")
        return dict(sorted(curve.items()))

    @property
    def last_round(self) -> int:
        """The last finished round; 0 if there is none."""
        return max(self.rounds, default=0)

    def in_last_round(self, metric: str) -> float | None:
        """A metric of the whole federation in the last round; None if this round has none."""
        return self.by_round(metric).get(self.last_round)

    def by_client(self, metric: str) -> dict[int, dict[int, float]]:
        """A metric that rounds have by client: by round, the number of each client that has one."""
        rounds: dict[int, dict[int, float]] = {}
        for column in self._with_axes(metric, ROUND_CLIENT_AXES):
            numbers = column.coordinates["round"].tolist()
            clients = column.coordinates["client"].tolist()
            for number, client, value in zip(numbers, clients, column.values.tolist(), strict=True):
                rounds.setdefault(number, {})[client] = value
        return dict(sorted(rounds.items()))

    def by_epoch(self) -> list[EpochNumbers]:
        """The accuracies of local models after each epoch, by round and stage of the run."""
        by_stage: dict[tuple[int, str], dict[str, list[float | None]]] = {}
        for metric in self._by_metric:
            if not metric.startswith(BY_EPOCH):
                continue
            stage, _, key = metric.removeprefix(BY_EPOCH).rpartition("/")
            columns = self._with_axes(metric, {"round", "epoch"})
            length = 1 + max(
                (int(column.coordinates["epoch"].max()) for column in columns), default=0
            )
            for number, row in self._rows(metric, "epoch", length).items():
                by_stage.setdefault((number, stage), {})[key] = row
        return [EpochNumbers(number, stage, keys) for (number, stage), keys in by_stage.items()]

    def by_class(self, metric: str) -> dict[int, list[float | None]]:
        """A metric by round, a number for each class, (C,); None for a class without a number."""
        return self._rows(metric, "class", self.classes)

    def client_reports(self, metric: str) -> list[ClientNumbers]:
        """The numbers that clients reported in stages, in the order of the journal."""
        field = metric.partition("/")[0]
        reports = []
        for event in self._clients:
            if field not in event:
                continue
            for column in _event_numbers([event], self.classes, metrics=[metric]):
                if column.metric == metric:
                    values = _values_in_order(column)
                    report = ClientNumbers(event["round"], event["name"], event["client"], values)
                    reports.append(report)
        return reports

    def client_values(self, metric: str) -> list[float]:
        """A metric that has one number for each client and stage: all of them."""
        columns = _event_numbers(self._clients, self.classes, metrics=[metric])
        of_metric = [column for column in columns if column.metric == metric]
        single = [c for c in of_metric if c.coordinates.keys() == STAGE_CLIENT_AXES]
        return list(chain.from_iterable(column.values.tolist() for column in single))

    @property
    def replies(self) -> list[ReplyOutcome]:
        """The replies of clients, in the order of the journal."""
        return [
            ReplyOutcome(
                round=event["round"],
                stage=event["name"],
                client=event["client"],
                refused=event.get(REFUSED, ""),
            )
            for event in _replies(self._clients)
        ]

    def looks(self, measure: str) -> list[Look]:
        """What a measure recorded after each stage, in the order of the journal."""
        events = self._events.get("measure", ())
        return [Look(event, self.classes) for event in events if event["measure"] == measure]

    @property
    def stages_in_round(self) -> int:
        """The largest number of stages in a round in which clients act."""
        return max((e["stage"] + 1 for e in self._clients if e["round"] > 0), default=0)

    def seconds_by_measure(self, names: Iterable[str]) -> dict[str, float]:
        """The seconds that each measure took in the run, at the server and at clients.

        ``names``: the measures of the run's settings. A measure that took no time is left out,
        unless it recorded something.
        """
        events = self._events.get("measure", ())
        seconds = {event["measure"]: 0.0 for event in events}
        for measure in seconds:
            for column in self._by_metric.get(f"{measure}/{SECONDS}", ()):
                if "stage" in column.coordinates:
                    seconds[measure] += sum(column.values.tolist())
        for name in names:
            at_clients = sum(self.client_values(f"{SECONDS}_{name}"))
            if at_clients > 0:
                seconds[name] = seconds.get(name, 0.0) + at_clients
        return seconds

    @property
    def user_metrics(self) -> list[str]:
        """The metrics of the user's measures, without the times that these measures took."""
        fields: set[str] = set()
        prefixes: set[str] = set()
        for event in self._events.get("round", ()):
            for measure, names in event.get(OF_USER_MEASURES, {}).items():
                prefixes.add(f"{measure}/")
                fields.update(names)
        times = {f"{prefix}{SECONDS}" for prefix in prefixes}
        metrics = []
        for metric in self.summary:
            is_of_measure = metric.startswith(tuple(prefixes)) and metric not in times
            if is_of_measure or metric in fields:
                metrics.append(metric)
        return metrics

    @functools.cached_property
    def class_accuracy(self) -> dict[int, list[float | None]]:
        """The accuracy of each class by round, (C,) shares; None for a class without test examples.

        The accuracies are the server model's. If there are none after training, they are means over
        the clients' own models, in the rounds that evaluated these.
        """
        server = self._rows("class_accuracy", "class", self.classes)
        clients = self._rows("personal_class_accuracy", "class", self.classes)
        has_only_round_0 = not server.keys() - {0}
        if clients and has_only_round_0:
            return clients
        return server

    def confusion(self) -> list[list[float | None]]:
        """The confusion matrix of the last round, (C, C): rows are labels, columns are predicted
        classes; empty if it was not recorded.
        """
        columns = []
        for predicted in range(self.classes):
            rows = self._rows(f"{CONFUSION}/{predicted}", "class", self.classes)
            columns.append(rows.get(max(rows, default=0), []))
        return [list(row) for row in zip(*columns, strict=True)]

    @functools.cached_property
    def task_rows(self) -> Values:
        """The accuracy matrix, (T', T): a row for the end of each task up to the last one that has
        ended. NaN where no model was tested.
        """
        ends = [event for event in self._events.get("task", ()) if event["task"] > 0]
        if not ends:
            return np.empty((0, 0))
        rows = np.full((ends[-1]["task"], len(ends[-1]["row"])), np.nan)
        for event in ends:
            rows[event["task"] - 1] = np.array(event["row"], np.float64)
        return rows

    @functools.cached_property
    def over_tasks(self) -> dict[str, float | None]:
        """The numbers of the run's accuracy matrix, (T, T); empty before the end of a task."""
        rows = self.task_rows
        if not len(rows):
            return {}
        numbers = {
            "final_accuracy": tasks.final_accuracy(rows),
            "incremental_accuracy": tasks.incremental_accuracy(rows),
            "average_forgetting": tasks.average_forgetting(rows),
            "backward_transfer": tasks.backward_transfer(rows),
            "learned": tasks.learned(rows),
            "kept": tasks.kept_share(rows),
        }
        return {name: none_if_undefined(value) for name, value in numbers.items()}

    @functools.cached_property
    def summary(self) -> dict[str, float]:
        """One number for each metric of the whole federation; empty before the first round.

        Seconds, bytes and replies are sums over rounds. ``accuracy``, ``forgetting``, ``epsilon``
        and the metrics of ``metrics.classification`` are the last round's, all others the latest
        that was measured. In addition, it has ``best_accuracy``, ``mean_accuracy_last_10``, the
        best round's value of each metric and, for runs with tasks, ``over_tasks``.
        """
        if not self.rounds:
            return {}
        numbers: dict[str, float] = {}
        for metric in (*ALWAYS_SUMMED, *self._by_metric):
            if metric.startswith(LEARNING_RATE):
                continue  # It is a setting, not a result.
            curve = self.by_round(metric)
            if metric in LAST_ROUND_METRICS:
                curve = {number: curve[number] for number in self.rounds[-1:] if number in curve}
            if metric in ALWAYS_SUMMED or (curve and metric in SUMMED_METRICS):
                numbers[metric] = sum(curve.values())
            elif curve:
                numbers[metric] = curve[max(curve)]

        accuracies = [v for number, v in self.by_round("accuracy").items() if number > 0]
        further = {**best_and_recent(accuracies), **self.best_metrics, **self.over_tasks}
        return numbers | {name: value for name, value in further.items() if value is not None}

    @property
    def best_metrics(self) -> dict[str, float | None]:
        """The best value of each metric of ``metrics.classification`` in any round."""
        best: dict[str, float | None] = {}
        for metric in METRICS:
            curve = {number: v for number, v in self.by_round(metric).items() if number > 0}
            number = best_round(metric, curve)
            if number is not None:
                best[f"best_{metric}"] = curve[number]
        return best

    @property
    def _clients(self) -> Sequence[Event]:
        return self._events.get("client", ())

    def _with_axes(self, metric: str, axes: Set[str]) -> list[Numbers]:
        """The numbers of a metric that are about these axes and no others."""
        return [c for c in self._by_metric.get(metric, ()) if c.coordinates.keys() == axes]

    def _rows(self, metric: str, axis: str, length: int) -> dict[int, list[float | None]]:
        """By round, a number for each index of an axis; None if it was not measured."""
        rows: dict[int, list[float | None]] = {}
        for column in self._with_axes(metric, {"round", axis}):
            rounds = column.coordinates["round"].tolist()
            indices = column.coordinates[axis].tolist()
            for number, index, value in zip(rounds, indices, column.values.tolist(), strict=True):
                row = rows.setdefault(number, [None] * length)
                row[index] = value
        return dict(sorted(rows.items()))


def _values_in_order(column: Numbers) -> list[float | None]:
    """The values of a column; by epoch, with None for an epoch that was not measured."""
    if "epoch" not in column.coordinates:
        return list(column.values.tolist())
    by_epoch = column.by_index("epoch")
    return [by_epoch.get(epoch) for epoch in range(1 + max(by_epoch, default=-1))]


class Look:
    """What a measure recorded after one stage: numbers by metric, without the measure's name.

    ``client``: the client that the numbers are about; None if they are about the whole stage.
    ``clients``, ``classes``: the clients and classes of its lists, in order. ``texts``: texts and
    lists of texts, such as the names of models, by field.
    """

    def __init__(self, event: Event, classes: int) -> None:
        self.round: int = event["round"]
        self.stage: int = event["stage"]
        self.client: int | None = event.get("client")
        self.clients: Sequence[int] = event.get("clients", ())
        self.classes: Sequence[int] = event.get("classes", ())
        self.texts: Mapping[str, Any] = {k: v for k, v in event.items() if _is_text(v)}
        self._class_count = classes
        self._axes = {axis for axis in STAGE_CLIENT_AXES if axis in event}
        self._by_metric = _by_metric(_event_numbers(_look_fields([event]), classes))

    def number(self, metric: str) -> float | None:
        """A single number; None if it was not measured."""
        for column in self._with_axes(metric):
            return float(column.values[0])
        return None

    def by_client(self, metric: str) -> dict[int, float]:
        """A number of each client that has one."""
        return self._by_index(metric, "client")

    def by_class(self, metric: str) -> list[float | None]:
        """A number for each class, (C,); None for a class without one."""
        return self._row(metric, "class", self._class_count)

    def number_of_class(self, metric: str, label: int) -> float | None:
        """The number of one class; None if it has none."""
        return self._by_index(metric, "class").get(label)

    def of_class(self, metric: str, label: int) -> dict[int, float]:
        """The numbers of one class by client."""
        return self._by_other_index(metric, "class", label, "client")

    def of_client(self, metric: str, client: int) -> dict[int, float]:
        """The numbers of one client by class."""
        return self._by_other_index(metric, "client", client, "class")

    def points(self, metric: str, length: int = 0) -> list[float | None]:
        """A number for each point, None if it was not measured; at least ``length`` points."""
        by_point = self._by_index(metric, "point")
        return self._row(metric, "point", max([length - 1, *by_point]) + 1)

    def rows(self, metric: str) -> list[list[float | None]]:
        """A matrix of points, whose rows are metrics of their own."""
        return [self.points(f"{metric}/{row}") for row in self.names(metric)]

    def by_class_and_point(self, metric: str) -> list[list[float]]:
        """The points of each class, (C, points); 0 for a point without a number."""
        rows = [[0.0] for _ in range(self._class_count)]
        for column in self._with_axes(metric, "class", "point"):
            points = column.coordinates["point"]
            counts = np.zeros((self._class_count, int(points.max(initial=-1)) + 1))
            counts[column.coordinates["class"], points] = column.values
            rows = counts.tolist()
        return rows

    def names(self, above: str = "") -> list[str]:
        """The names of metrics and tables directly below a name; at the top by default."""
        prefix = ""
        if above:
            prefix = f"{above}/"
        below = [metric for metric in self._by_metric if metric.startswith(prefix)]
        return list(dict.fromkeys(metric[len(prefix) :].partition("/")[0] for metric in below))

    def _with_axes(self, metric: str, *axes: str) -> list[Numbers]:
        """The numbers of a metric with these axes, beside those of the look."""
        columns = self._by_metric.get(metric, ())
        return [c for c in columns if c.coordinates.keys() == self._axes | {*axes}]

    def _by_index(self, metric: str, axis: str) -> dict[int, float]:
        numbers: dict[int, float] = {}
        for column in self._with_axes(metric, axis):
            numbers |= column.by_index(axis)
        return numbers

    def _by_other_index(self, metric: str, axis: str, index: int, other: str) -> dict[int, float]:
        """The numbers at one index of an axis, by their indices on another axis."""
        numbers: dict[int, float] = {}
        for column in self._with_axes(metric, axis, other):
            is_chosen = column.coordinates[axis] == index
            indices = column.coordinates[other][is_chosen].tolist()
            numbers |= zip(indices, column.values[is_chosen].tolist(), strict=True)
        return numbers

    def _row(self, metric: str, axis: str, length: int) -> list[float | None]:
        by_index = self._by_index(metric, axis)
        return [by_index.get(index) for index in range(length)]


def _is_text(value: Any) -> bool:
    """Whether a value is a text or a list of texts."""
    if isinstance(value, list):
        return all(isinstance(entry, str) for entry in value)
    return isinstance(value, str)


def is_chosen(metric: str, chosen: Collection[str] | None) -> bool:
    """Whether a metric, or a name above it, is among the chosen ones; None stands for all.

    >>> is_chosen("loss/ce", ["loss"]), is_chosen("loss/ce", ["loss/proximal"])
    (True, False)
    """
    if chosen is None or metric in chosen:
        return True
    above = metric.rpartition("/")[0]
    return bool(above) and is_chosen(above, chosen)


def _by_metric(columns: Iterable[Numbers]) -> dict[str, list[Numbers]]:
    by_metric: dict[str, list[Numbers]] = {}
    for column in columns:
        by_metric.setdefault(column.metric, []).append(column)
    return by_metric


def _federation_numbers(by_name: Mapping[str, Sequence[Event]], classes: int) -> Iterator[Numbers]:
    """All numbers in the events of a run, except the numbers in the events of clients."""
    rounds = [{**event, "round": 0} for event in by_name.get("initial", ())]
    rounds += map(_with_epsilon, by_name.get("round", ()))
    yield from _event_numbers(list(map(_with_confusion, rounds)), classes)
    yield from _mean_losses(by_name.get("client", ()))
    yield from _measure_numbers(by_name.get("measure", ()), classes)
    yield from _event_numbers([_task_end(event) for event in by_name.get("task", ())], classes)


# The learning rates of rounds.


LEARNING_RATE = "learning_rate/"
"""How the names of learning rates begin; the name of a stage follows."""


@dataclass(frozen=True)
class LearningRates:
    """The learning rate of each stage and round, as training uses it.

    ``plans``: by stage. ``first_rounds``: of the tasks, if rates restart with each task; else 1.
    """

    plans: Mapping[str, Plan]
    first_rounds: Sequence[int] = (1,)

    @staticmethod
    def of(settings: Mapping[str, Any], start: Event) -> LearningRates:
        """The rates of a run, from its settings by dotted key and its first event."""
        tables: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            table, _, stage_key = key.partition(".")
            stage, _, name = stage_key.rpartition(".")
            if table == "plan" and name.startswith("lr"):
                tables.setdefault(stage, {})[name] = value
        plans = {stage: Plan(**table) for stage, table in tables.items()}
        if settings.get("stream.lr", "restart") != "restart" or "stream" not in start:
            return LearningRates(plans)
        return LearningRates(plans, start["stream"]["first_rounds"])

    def numbers(self, clients: Iterable[Event]) -> Iterator[Numbers]:
        """``learning_rate/STAGE`` of each round in which clients took steps in the stage."""
        rounds_by_stage: dict[str, dict[int, None]] = {}
        for event in clients:
            if event.get("steps") and event["name"] in self.plans:
                rounds_by_stage.setdefault(event["name"], {})[event["round"]] = None
        for stage, rounds in rounds_by_stage.items():
            rates = [self.plans[stage].lr_at(self._within_task(number)) for number in rounds]
            coordinates = {"round": np.array(list(rounds), np.int64)}
            yield Numbers(f"{LEARNING_RATE}{stage}", np.array(rates), coordinates)

    def _within_task(self, number: int) -> int:
        """A round counted from the first round of its task, from 1."""
        task = bisect_right(self.first_rounds, number) - 1
        return number - self.first_rounds[max(task, 0)] + 1


# Fields of events as numbers.


def _event_numbers(
    events: Sequence[Event],
    classes: int,
    prefix: str = "",
    metrics: Collection[str] | None = None,
) -> Iterator[Numbers]:
    """The numbers in the fields of some events of one kind, which have a round each.

    metrics: fields that cannot hold any of these are left out; None: all are read.
    """
    reader = _Fields(classes)
    fields = None
    if metrics is not None:
        fields = {metric.partition("/")[0] for metric in metrics}
        events = [event for event in events if not fields.isdisjoint(event)]
    for keys, events_with_axes in _by_axes(events).items():
        cells_by_field = _transposed(events_with_axes)
        coordinates = {key: np.array(cells_by_field[key], np.int64) for key in keys}
        for name, cells in cells_by_field.items():
            if name in NOT_NUMBERS or (fields is not None and name not in fields):
                continue
            metric = name
            if prefix:
                metric = f"{prefix}/{name}"
            yield from reader.numbers(metric, cells, coordinates)


def none_if_undefined(value: float) -> float | None:
    """A number, or None for NaN."""
    if math.isnan(value):
        return None
    return value


def _transposed(events: Sequence[Event]) -> dict[str, Sequence[Any]]:
    """By field, the values of all events; None for an event without the field."""
    distinct_fields = set(map(tuple, events))
    if len(distinct_fields) == 1:
        # Most events of a kind have the same fields in the same order.
        (fields,) = distinct_fields
        columns = zip(*map(dict.values, events), strict=True)
        return dict(zip(fields, columns, strict=True))
    names = dict.fromkeys(chain.from_iterable(events))
    return {name: [event.get(name) for event in events] for name in names}


def _measure_numbers(events: Iterable[Event], classes: int) -> Iterator[Numbers]:
    """The numbers of measures: those of each look, and the means over the looks of a round."""
    by_measure: dict[str, list[Event]] = {}
    for event in events:
        by_measure.setdefault(event["measure"], []).append(event)
    for measure, looks in by_measure.items():
        for axes, looks_with_axes in _by_axes(looks).items():
            fields = _look_fields(looks_with_axes)
            for column in _event_numbers(fields, classes, measure):
                yield column
                if _is_averaged(column, set(axes)):
                    equal = np.ones_like(column.values)
                    yield _mean_by_round(
                        column.metric, column.coordinates["round"], column.values, equal
                    )


def _is_averaged(column: Numbers, axes: Set[str]) -> bool:
    """Whether a round has the mean of these numbers of looks: of single numbers, and of tables by
    client. ``axes``: those of the looks.
    """
    if column.metric.endswith("_by_client"):
        return column.coordinates.keys() <= STAGE_CLIENT_AXES
    return column.coordinates.keys() == axes


# The lists of looks.


@dataclass(frozen=True)
class _IndexedList:
    """A list whose entries have an index on an axis each."""

    axis: str
    indices: Sequence[int]
    entries: Sequence[Any]


def _look_fields(looks: Sequence[Event]) -> list[Event]:
    """Looks of one measure whose lists have axes."""
    fields = []
    for look in looks:
        forms = list_forms(look["measure"])
        axes_by_path = {tuple(path.split("/")): form.axes for path, form in forms.items()}
        lists = _LookLists(look, axes_by_path)
        index_lists = lists.index_lists
        fields.append(
            {
                name: lists.with_axes((name,), value)
                for name, value in look.items()
                if name not in index_lists
            }
        )
    return fields


@dataclass(frozen=True)
class _LookLists:
    """Gives the lists of a look their axes. ``axes``: by path, as in ``manifest.ListForm``."""

    look: Event
    axes: Mapping[tuple[str, ...], Sequence[str | int]]

    @property
    def index_lists(self) -> Set[str]:
        """The lists that only say which clients or classes other lists are about."""
        axes = set(chain.from_iterable(self.axes.values())) | {"clients"}
        return {name for name in INDEX_LISTS if name in axes}

    def with_axes(self, path: tuple[str, ...], value: Any) -> Any:
        """A field, whose lists have become tables or have an axis."""
        if isinstance(value, dict):
            return {name: self.with_axes((*path, name), inner) for name, inner in value.items()}
        if not isinstance(value, list):
            return value
        for names, axes in self.axes.items():
            is_path = len(names) == len(path) and all(map(_is_name, names, path))
            if is_path:
                return self._indexed(value, axes)
        if path[-1] in LIST_AXES or path[-1] in COUNTED_LISTS or _is_of_clients(value):
            return value
        return self._indexed(value, ())

    def _indexed(self, value: Any, axes: Sequence[str | int]) -> Any:
        """A list with its axes; without any axes, each list is one over rows or points."""
        if not isinstance(value, list):
            return value
        axis = str(next(iter(axes), "point")).strip("[]")
        entries = [self._indexed(entry, axes[1:]) for entry in value]
        if axis == "class":
            return _IndexedList("class", range(len(value)), entries)
        if axis in INDEX_LISTS:
            return _IndexedList(INDEX_LISTS[axis], self.look[axis], entries)
        if axis == "models":
            return dict(zip(self.look["models"], entries, strict=True))
        if any(isinstance(entry, list) for entry in value):
            return {str(row): entry for row, entry in enumerate(entries)}
        return _IndexedList("point", range(len(value)), entries)


def _is_name(pattern: str, name: str) -> bool:
    return pattern in ("*", name)


def _is_of_clients(cells: Sequence[Any]) -> bool:
    """Whether entries of a list are tables that each name their client."""
    return bool(cells) and all(type(c) is dict and type(c.get("client")) is int for c in cells)


def _by_axes(events: Sequence[Event]) -> dict[tuple[str, ...], list[Event]]:
    """Events by the axes that they name."""
    by_axes: dict[tuple[bool, ...], list[Event]] = {}
    for event in events:
        is_named = ("round" in event, "stage" in event, "client" in event)
        by_axes.setdefault(is_named, []).append(event)
    axes = ("round", "stage", "client")
    return {
        tuple(compress(axes, is_named)): events_with_axes
        for is_named, events_with_axes in by_axes.items()
    }


@dataclass(frozen=True)
class _Fields:
    """Turns a field of some events into numbers. ``classes``: how many there are."""

    classes: int

    def numbers(
        self,
        metric: str,
        cells: Sequence[Any],
        coordinates: Coordinates,
        axes: Sequence[str] | None = None,
    ) -> Iterator[Numbers]:
        """The numbers in one field.

        cells: the values of all events; None for an event without the field. axes: the axes of
        lists in the field; by default, those of the field's name.
        """
        kinds = set(map(type, cells))
        if kinds & {int, float}:
            selected = _of_kinds({int, float}, cells, kinds, coordinates)
            yield Numbers(metric, np.array(selected.cells, np.float64), selected.coordinates)
        if dict in kinds:
            selected = _of_kinds({dict}, cells, kinds, coordinates)
            yield from self._table_numbers(metric, selected.cells, selected.coordinates)
        if _IndexedList in kinds:
            selected = _of_kinds({_IndexedList}, cells, kinds, coordinates)
            yield from self._indexed_list_numbers(metric, selected.cells, selected.coordinates)
        if list in kinds:
            selected = _of_kinds({list}, cells, kinds, coordinates)
            if axes is None:
                axes = self._axes(metric)
            yield from self._list_numbers(metric, selected.cells, selected.coordinates, axes)

    def _table_numbers(
        self, metric: str, tables: Sequence[Mapping[str, Any]], coordinates: Coordinates
    ) -> Iterator[Numbers]:
        """The numbers of a table: by field, or by client if the keys are clients."""
        is_by_client = all(map(str.isdecimal, chain.from_iterable(tables)))
        if metric.endswith("_by_client") and is_by_client:
            clients = [int(client) for table in tables for client in table]
            cells = list(chain.from_iterable(table.values() for table in tables))
            repeated = _repeated(coordinates, list(map(len, tables)))
            yield from self.numbers(metric, cells, {**repeated, "client": np.array(clients)})
            return
        for key in dict.fromkeys(chain.from_iterable(tables)):
            cells = [table.get(key) for table in tables]
            yield from self.numbers(f"{metric}/{key}", cells, coordinates)

    def _indexed_list_numbers(
        self, metric: str, lists: Sequence[_IndexedList], coordinates: Coordinates
    ) -> Iterator[Numbers]:
        """The numbers of lists that have axes."""
        for axis in dict.fromkeys(one.axis for one in lists):
            positions = [i for i, one in enumerate(lists) if one.axis == axis]
            chosen = [lists[i] for i in positions]
            indices = list(chain.from_iterable(one.indices for one in chosen))
            entries = list(chain.from_iterable(one.entries for one in chosen))
            of_chosen = {name: numbers[positions] for name, numbers in coordinates.items()}
            repeated = _repeated(of_chosen, [len(one.entries) for one in chosen])
            entry_coordinates = {**repeated, axis: np.array(indices, np.int64)}
            yield from self.numbers(metric, entries, entry_coordinates)

    def _list_numbers(
        self,
        metric: str,
        lists: Sequence[Sequence[Any]],
        coordinates: Coordinates,
        axes: Sequence[str],
    ) -> Iterator[Numbers]:
        """The numbers of lists over an axis or over clients; other lists have none."""
        if metric.rpartition("/")[2] in COUNTED_LISTS:
            yield Numbers(metric, np.array(list(map(len, lists)), np.float64), coordinates)
            return
        cells = list(chain.from_iterable(lists))
        is_of_clients = _is_of_clients(cells)
        if not axes and not is_of_clients:
            return
        lengths = list(map(len, lists))
        repeated = _repeated(coordinates, lengths)
        if is_of_clients:
            clients = np.array([cell["client"] for cell in cells])
            tables = [{k: v for k, v in cell.items() if k != "client"} for cell in cells]
            yield from self._table_numbers(metric, tables, {**repeated, "client": clients})
            return
        if axes[0] == "class" and set(lengths) != {self.classes}:
            return
        indices = np.concatenate([np.arange(length) for length in lengths])
        if axes[0] == "task":
            indices += 1
        yield from self.numbers(metric, cells, {**repeated, axes[0]: indices}, axes[1:])

    def _axes(self, metric: str) -> Sequence[str]:
        if metric.startswith(BY_EPOCH):
            return ("epoch",)
        if metric.startswith(f"{CONFUSION}/"):
            return ("class",)
        return LIST_AXES.get(metric.rpartition("/")[2], ())


@dataclass(frozen=True)
class _Cells:
    """Values of some events, and their indices by axis."""

    cells: Sequence[Any]
    coordinates: Coordinates


def _of_kinds(
    kinds: Set[type], cells: Sequence[Any], present: Set[type], coordinates: Coordinates
) -> _Cells:
    """The cells of some types, of cells that are of the types ``present``."""
    if present <= kinds:
        return _Cells(cells, coordinates)
    positions = [i for i, cell in enumerate(cells) if type(cell) in kinds]
    return _Cells(
        [cells[i] for i in positions],
        {axis: indices[positions] for axis, indices in coordinates.items()},
    )


def _repeated(coordinates: Coordinates, lengths: Sequence[int]) -> Coordinates:
    return {axis: np.repeat(indices, lengths) for axis, indices in coordinates.items()}


def _task_end(event: Event) -> Event:
    """The end of a task, with the names of metrics for its fields."""
    end = {"round": event["round"], "task_accuracy": event.get("row")}
    if "clients" in event:
        end["task_accuracy_by_client"] = event["clients"]
    return end


# Numbers of a whole round that are derived from the numbers of clients and looks.


def _with_epsilon(event: Event) -> Event:
    """A round with the largest epsilon of its clients; unchanged if a client has no bound."""
    privacy = event.get("privacy")
    if not isinstance(privacy, Mapping):
        return event
    epsilons = privacy.get("epsilon")
    if not epsilons or None in epsilons:
        return event
    return {**event, "epsilon": float(max(epsilons))}


def _with_confusion(event: Event) -> Event:
    """A round whose confusion matrix is a table: by predicted class, the examples by label."""
    matrix = event.get(CONFUSION)
    if not isinstance(matrix, list):
        return event
    columns = {str(number): list(column) for number, column in enumerate(zip(*matrix, strict=True))}
    return {**event, CONFUSION: columns}


def _replies(clients: Iterable[Event]) -> list[Event]:
    """The events of clients that had work."""
    return [event for event in clients if not event.get("idle")]


def _refusals(clients: Iterable[Event]) -> Iterator[Numbers]:
    """Whether each reply was refused: 1 or 0."""
    for axes, replies in _by_axes(_replies(clients)).items():
        is_refused = np.array([REFUSED in event for event in replies], np.float64)
        coordinates = {
            axis: np.array([event[axis] for event in replies], np.int64) for axis in axes
        }
        yield Numbers(REFUSED, is_refused, coordinates)


def _mean_losses(clients: Sequence[Event]) -> Iterator[Numbers]:
    """By term and round, the mean over the accepted clients, weighted by their examples."""
    trained = [event for event in clients if "loss" in event and REFUSED not in event]
    rounds = np.array([event["round"] for event in trained], np.int64)
    examples = np.array([event.get("examples") or 0 for event in trained], np.float64)
    losses_by_term = _transposed([event["loss"] for event in trained])
    for term, losses in losses_by_term.items():
        # None becomes NaN, which no event has: JSON has no such number.
        values = np.array(losses, np.float64)
        is_measured = ~np.isnan(values)
        yield _mean_by_round(
            f"loss/{term}", rounds[is_measured], values[is_measured], examples[is_measured]
        )


def _mean_by_round(metric: str, rounds: Indices, values: Values, weights: Values) -> Numbers:
    """The weighted mean of each round; none of a round without weight."""
    # Rounds are numbered anew: a journal may name any, and an array up to it could fill the memory.
    distinct, positions = np.unique(rounds, return_inverse=True)
    # Sums are in the order of the journal, so that they have the same bits everywhere.
    sums = np.bincount(positions, weights * values)
    weight = np.bincount(positions, weights)
    is_weighted = weight > 0
    means = sums[is_weighted] / weight[is_weighted]
    return Numbers(metric, means, {"round": distinct[is_weighted]})
