"""The schema of a journal: which events it may have, in which order, and the fields of each.

Every reader relies on this schema and on nothing else, so a journal is checked once, where it is
read (``running.journal.read_journal``). An event has the fields that are listed here, and any
further ones: measures, methods and packages add their own. A further field of a round or of a
measure may hold any JSON, except that a field ``…_by_client`` is a table of clients, and that lists
of fedstill's measures have the forms of ``measures.LIST_FORMS``. Further fields of a client's event
have the form that a client may report (``core.reports``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from fedstill.core.reports import (
    COUNTED,
    MAX_COUNT,
    MAX_NAMES,
    MAX_SECONDS,
    MAX_WORD,
    PROBE,
    has_valid_form,
    is_count,
    is_number,
)
from fedstill.core.stages import SERVER
from fedstill.manifest import Entries
from fedstill.measures import list_forms
from fedstill.metrics.accuracy import wrong_table
from fedstill.metrics.classification import SelectionData
from fedstill.metrics.score_histograms import HISTOGRAMS, wrong_histograms

Event = dict[str, Any]
"""One line of a journal."""

# Forms of values.

LARGEST = 2**31 - 1

Index = Annotated[int, Field(ge=0, le=LARGEST)]
RoundNumber = Annotated[int, Field(ge=1, le=LARGEST)]
Client = Annotated[int, Field(ge=SERVER, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
MeanCount = Annotated[float, Field(ge=0, le=MAX_COUNT)]
"""A count, or the mean of counts over clients."""

Share = Annotated[float, Field(ge=0, le=1 + 1e-9)]
"""A share; versions until 0.2.0 wrote some that are above 1 by rounding."""

Shares = list[Share | None]
"""A share for each class, None for a class without test examples."""

Digits = Annotated[str, Field(pattern=r"^\d{1,9}$")]
"""A whole number as the key of a JSON table."""

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]

Name = Annotated[str, Field(max_length=MAX_WORD, pattern=r"^[[^\p{C}\p{Z}] ]+$")]
"""A text that can be printed on one line."""


# The events.


class SplitOfRun(TypedDict, total=False):
    """What the first event says of the file with the run's split."""

    file: Required[str]
    sha256: Required[str]
    clients: Required[Count]
    examples: Required[Count]
    networks: list[str]


class StreamOfRun(TypedDict, total=False):
    """What the first event says of the run's tasks."""

    kind: str
    classes: Required[list[list[Index]]]
    first_rounds: Required[list[RoundNumber]]
    label_counts: list[list[Count]]
    clients: list[Count]
    names: list[list[str]]


class InputsOfRun(TypedDict, total=False):
    """What the first event says of how inputs are made of examples."""

    shape: list[Count]
    mean: list[float]
    std: list[float]


class SelectionOfRun(TypedDict, total=False):
    """What the first event says of how rounds are compared."""

    on: Required[SelectionData]
    by: Required[str]
    larger_is_better: Required[bool]
    examples: Count | None


class Start(TypedDict, total=False):
    """What is run, on which data, with which software."""

    event: Required[Literal["start"]]
    classes: Required[list[str]]
    seconds_since_1970: float | None
    test_counts: list[Count]
    split: SplitOfRun | None
    stream: StreamOfRun
    selection: SelectionOfRun | None
    inputs: InputsOfRun
    backbone_inputs: dict[str, Any] | None
    client_names: list[str]
    models: list[str]
    notes: list[str]
    sources: dict[str, str]
    examples_sha256: dict[str, str]
    config_sha256: str
    queries: dict[Digits, list[Index]]
    fedstill: str
    torch: str
    numpy: str
    python: str
    card: str


class Evaluated(TypedDict, total=False):
    """What models are worth on the test set; None without a model for all clients."""

    accuracy: Required[Share | None]
    class_accuracy: Required[Shares]
    personal_class_accuracy: Shares | None
    balanced_accuracy: Share | None
    f1: Share | None
    f1_weighted: Share | None
    precision: Share | None
    recall: Share | None
    specificity: Share | None
    auc: Share | None
    average_precision: Share | None
    log_loss: float | None
    brier: float | None
    ece: Share | None
    confusion: list[list[Count]] | None


class Initial(Evaluated, total=False):
    """The models before round 1."""

    event: Required[Literal["initial"]]


class OtherModel(TypedDict, total=False):
    """A further model that is evaluated after each round."""

    accuracy: Required[Share | None]
    class_accuracy: Required[Shares]


class Answer(TypedDict, total=False):
    """What a client that asked its peers for classes got in a round."""

    client: Required[Client]
    query: Required[list[Index]]
    average_accuracy: float | None
    average_accuracy_before: float | None
    uniform_accuracy: float | None
    gain: float | None
    forgetting: float | None
    teachers: Count | list[Client | str] | None


class PrivacyOfRound(TypedDict, total=False):
    """What clients have spent in privacy so far; None where nothing bounds it."""

    epsilon: Required[list[float | None]]
    delta: Required[float]
    covers: Required[str]


class Round(Evaluated, total=False):
    """A round that is done.

    ``of_measures``: by measure of the user's own, the fields that it gave this event.
    """

    event: Required[Literal["round"]]
    round: Required[RoundNumber]
    forgetting: float | None
    consistency: float | None
    task: RoundNumber | None
    replies: Count | None
    refused: Count | None
    bytes_up: Required[Count]
    bytes_down: Required[Count]
    bytes_as_weights: Count
    personal_clients: Count | None
    personal_accuracy: Share | None
    personal_forgetting: float | None
    own_test_accuracy: Share | None
    own_test_worst: Share | None
    own_test_weighted: Share | None
    in_local_accuracy: Share | None
    out_local_accuracy: Share | None
    selection_score: float | None
    best_round: RoundNumber | None
    best_round_score: float | None
    best_round_accuracy: Share | None
    stopped_because: str
    others: dict[str, OtherModel]
    client_predictors: dict[Digits, str]
    of_measures: dict[str, list[str]]
    answers: list[Answer]
    privacy: PrivacyOfRound | None
    seconds: Seconds | None
    seconds_training: Seconds | None
    seconds_measuring: Seconds | None
    seconds_saving: Seconds | None
    seconds_clients: Seconds | None
    seconds_cpu: Seconds | None


class ClientOfStage(TypedDict, total=False):
    """What a client did in a stage: it was accepted or refused, or had nothing to do."""

    event: Required[Literal["client"]]
    round: Required[Index]
    stage: Required[Index]
    name: Required[str]
    client: Required[Client]
    examples: Count
    bytes_up: Count
    bytes_down: Count
    refused: str
    idle: bool
    noised_rows: Count
    private_steps: Count | None
    private_rate: Share
    steps: Count
    epochs: Count
    loss: dict[str, float | None]
    teachers: Annotated[list[Count | Name], Field(max_length=MAX_NAMES)]
    seconds: Seconds
    seconds_training: Seconds
    seconds_measuring: Seconds


class Look(TypedDict, total=False):
    """What a measure saw after a stage; of one client's model, if the measure names a client."""

    event: Required[Literal["measure"]]
    measure: Required[str]
    round: Required[RoundNumber]
    stage: Required[Index]
    client: Client
    seconds: Seconds | None


class Contributions(Look, total=False):
    """What the measure ``contributions`` saw: a change of each class, and what clients gave to it.

    Its lists are those of ``measures.LIST_FORMS``.
    """

    clients: Required[list[Client]]
    model: str
    game: Literal["idle", "absent"]
    rule: Literal["path", "exact", "two ends"]


class TaskEnd(TypedDict, total=False):
    """The accuracies at the end of a task; of the untrained model at the end of task 0.

    ``row``: accuracy on each task. ``correct``, ``totals``: test examples by task and class, None
    where sites test; ``correct`` is a mean over clients where several models answer.
    """

    event: Required[Literal["task"]]
    task: Required[Index]
    round: Required[Index]
    row: Required[Shares]
    correct: list[list[MeanCount]] | None
    totals: list[list[Count]] | None
    clients: dict[Digits, Shares]


class Resumed(TypedDict, total=False):
    """The run goes on with other software."""

    event: Required[Literal["resumed"]]
    round: Required[Index]
    stage: Required[Index]
    before: Required[dict[str, str]]
    versions: Required[dict[str, str]]


CONTRIBUTIONS = "contributions"
"""The measure whose events are read field by field."""

_CHECKS = ConfigDict(strict=True, allow_inf_nan=False)

SCHEMAS: Mapping[str, TypeAdapter[Any]] = {
    "start": TypeAdapter(list[Start], config=_CHECKS),
    "initial": TypeAdapter(list[Initial], config=_CHECKS),
    "round": TypeAdapter(list[Round], config=_CHECKS),
    "client": TypeAdapter(list[ClientOfStage], config=_CHECKS),
    "measure": TypeAdapter(list[Look], config=_CHECKS),
    "measure contributions": TypeAdapter(list[Contributions], config=_CHECKS),
    "task": TypeAdapter(list[TaskEnd], config=_CHECKS),
    "resumed": TypeAdapter(list[Resumed], config=_CHECKS),
}
"""The schema of the events of each name. Observers may add others, which no reader relies on.

Each checks a list of events: one call for all events of a name takes a third of the time that a
call for each event takes, and a journal may have hundreds of thousands.
"""


def malformed_events(events: Sequence[Any]) -> dict[int, str]:
    """The problems with the fields of some events, by position; empty if there are none.

    Fields are compared with the schema of the event's name, one event at a time. ``JournalChecker``
    checks relations between the fields of several events.
    """
    problems: dict[int, str] = {}
    positions_by_name: defaultdict[str, list[int]] = defaultdict(list)
    for position, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            problems[position] = "is not an event"
            continue
        name = event["event"]
        if name == "measure" and event.get("measure") == CONTRIBUTIONS:
            name = f"measure {CONTRIBUTIONS}"
        positions_by_name[name].append(position)

    for name, positions in positions_by_name.items():
        schema = SCHEMAS.get(name)
        if schema is None:
            continue
        try:
            schema.validate_python([events[position] for position in positions])
        except ValidationError as error:
            for details in error.errors(include_url=False, include_input=False):
                index = int(details["loc"][0])
                problems.setdefault(positions[index], _sentence(name, details))
    return problems


def structure_problem(event: Any, classes: int = 0) -> str:
    """What is wrong with the fields of one event; empty if nothing is.

    classes: the number of the run's classes; 0 if unknown.

    >>> structure_problem({"event": "resumed", "round": 1, "stage": 0, "before": {}})
    "the event 'resumed' is wrong at versions: Field required"
    """
    problem = malformed_events([event]).get(0, "")
    if not problem and event["event"] == "measure":
        problem = problem_of_lists(event, classes)
    return problem


def _sentence(name: str, details: ErrorDetails) -> str:
    place = ".".join(map(str, details["loc"][1:]))
    reason = details["msg"]
    if details["type"] == "dict_type":
        # JSON has tables; a dictionary is a thing of Python.
        reason = "Input should be a table"
    return f"the event {name!r} is wrong at {place}: {reason}"


# What the fields of several events say together.


class JournalChecker:
    """Checks the events of one journal in their order: what several of their fields, or several
    events, must have in common. The fields of each agree with their schema (``malformed_events``).
    """

    def __init__(self) -> None:
        self.classes = 0
        """How many classes the run has, as its first event says."""
        self._tasks: list[list[int]] = []
        self._has_started = False
        self._last_round = 0
        self._last_task = -1

    def problem(self, event: Event) -> str:
        """What is wrong with the next event; empty if nothing is."""
        name = event["event"]
        if name == "client" and self._has_started:
            # Most events are of clients, whose order is free.
            return self._problem_of_report(event)
        problem = self._problem_of_order(event)
        if problem:
            return problem
        if name == "start":
            return self._begin(event)
        if name in ("initial", "round"):
            return self._problem_of_classes(event) or _problem_of_tables(event)
        if name == "task":
            return self._problem_of_task(event)
        if name == "measure":
            return _problem_of_client_tables(event) or problem_of_lists(event, self.classes)
        return ""

    def _problem_of_order(self, event: Event) -> str:
        """The problem with an event's position after the earlier ones; empty if there is none."""
        name = event["event"]
        if (name == "start") == self._has_started:
            self._has_started = True
            return "the event 'start' must be the first, and the only one of this name"
        self._has_started = True
        if name == "round":
            previous_round, self._last_round = self._last_round, event["round"]
            if event["round"] <= previous_round:
                return f"round {event['round']} does not follow round {previous_round}"
        return ""

    def _begin(self, start: Event) -> str:
        self.classes = len(start["classes"])
        stream = start.get("stream", {})
        self._tasks = stream.get("classes", [])
        if len(stream.get("first_rounds", [])) != len(self._tasks):
            return "stream.first_rounds does not have a round for each task"
        if len(start.get("test_counts", ())) not in (0, self.classes):
            return f"test_counts does not have {self.classes} classes"
        class_lists = [*self._tasks, *start.get("queries", {}).values()]
        if any(number >= self.classes for classes in class_lists for number in classes):
            return f"the event 'start' names a class that is not one of {self.classes}"
        return ""

    def _problem_of_classes(self, event: Event) -> str:
        """Which accuracies are not those of the run's classes."""
        models = {"": event, **event.get("others", {})}
        for name, model in models.items():
            for key in ("class_accuracy", "personal_class_accuracy"):
                accuracies = model.get(key)
                if accuracies is not None and len(accuracies) != self.classes:
                    place = key
                    if name:
                        place = f"others.{name}.{key}"
                    return f"{place} does not have {self.classes} classes"
        matrix = event.get("confusion")
        if matrix is not None and [len(row) for row in matrix] != [self.classes] * self.classes:
            return f"confusion is not a matrix of {self.classes} classes"
        for answer in event.get("answers", ()):
            if any(number >= self.classes for number in answer["query"]):
                return f"answers names a class that is not one of {self.classes}"
        return ""

    def _problem_of_report(self, event: Event) -> str:
        """The problem with a field that a client may not report; empty if there is none."""
        if event.keys() <= KNOWN_OF_CLIENT:
            return ""
        for name in sorted(event.keys() - KNOWN_OF_CLIENT):
            if not is_readable_report(name, event[name], self.classes):
                return f"what client {event['client']} reported as {name!r} is malformed"
        return ""

    def _problem_of_task(self, event: Event) -> str:
        """Why the end of a task does not belong to the run's stream; empty if it does."""
        # The end of a task at which no model was tested is missing. Task 0 is the untrained model.
        if not self._last_task < event["task"] <= len(self._tasks):
            return f"the end of task {event['task']} does not follow that of {self._last_task}"
        self._last_task = event["task"]
        if len(event["row"]) != len(self._tasks):
            return f"row does not have {len(self._tasks)} tasks"
        correct = event.get("correct") or []
        totals = event.get("totals") or []
        if len(correct) != len(totals):
            return "correct and totals are not of the same test sets"
        if any(len(row) != self.classes for row in (*correct, *totals)):
            return f"correct and totals do not have {self.classes} classes"
        if not correct and "clients" not in event:
            return "neither the server's counts nor those of sites are in it"
        return ""


def _problem_of_tables(event: Event) -> str:
    """Which field of a round is not a table of clients, or not lists over epochs."""
    problem = _problem_of_client_tables(event)
    if problem:
        return problem
    stages = event.get("by_epoch", {})
    if not isinstance(stages, dict) or not all(map(_is_by_epoch, stages.values())):
        return "by_epoch is not lists of numbers of one length"
    return ""


def _problem_of_client_tables(event: Event) -> str:
    for name, table in event.items():
        if name.endswith("_by_client") and not _is_by_client(table):
            return f"{name} is not a number for each client"
    return ""


def _is_by_client(table: Any) -> bool:
    """Whether a value is a table of numbers by client; None for a client without one."""
    if not isinstance(table, dict):
        return False
    if not all(client.isdecimal() and len(client) < 10 for client in table):
        return False
    return all(value is None or is_number(value) for value in table.values())


EPOCHS = (
    "in_local_accuracy",
    "in_local_accuracy_std",
    "out_local_accuracy",
    "out_local_accuracy_std",
)
"""What is read of a stage that was measured epoch by epoch."""


def _is_by_epoch(stage: Any) -> bool:
    if not isinstance(stage, dict) or not stage.keys() >= set(EPOCHS):
        return False
    curves = [stage[key] for key in EPOCHS]
    if not all(isinstance(curve, list) and len(curve) == len(curves[0]) for curve in curves):
        return False
    numbers = [value for curve in curves for value in curve if value is not None]
    return bool(curves[0]) and all(map(is_number, numbers))


# The lists of measures.

MISSING = object()
"""Stands for a field that an event does not have."""


@dataclass(frozen=True)
class FieldValue:
    """A value in an event, and its path, such as "models.aggregated.noise"."""

    path: str
    value: Any


def problem_of_lists(event: Event, classes: int) -> str:
    """What is wrong with the lists of a measure's event; empty if nothing is.

    classes: how many there are; 0 if unknown.
    """
    for path, form in list_forms(event["measure"]).items():
        lists = _Lists(event, classes, form.entries)
        for field in _field_values(event, path.split("/")):
            problem = ""
            if field.value is not MISSING:
                problem = lists.problem(field, form.axes)
            elif not form.is_optional:
                problem = f"it has no {field.path}"
            if problem:
                return f"the measure {event['measure']!r} is wrong: {problem}"
    return ""


def _field_values(
    table: Mapping[str, Any], names: Sequence[str], above: str = ""
) -> Iterator[FieldValue]:
    """The values at a path in nested tables; the name ``*`` stands for all names of a table."""
    name, *further = names
    keys = [name]
    if name == "*":
        keys = list(table)
    for key in keys:
        value = table.get(key, MISSING)
        path = f"{above}{key}"
        if not further:
            yield FieldValue(path, value)
        elif isinstance(value, dict):
            yield from _field_values(value, further, f"{path}.")
        elif name != "*":
            yield FieldValue(".".join([path, *further]), MISSING)


@dataclass(frozen=True)
class _Lists:
    """Compares lists of an event with their forms. ``entries``: as in ``ListForm``."""

    event: Event
    classes: int
    entries: Entries

    def problem(self, field: FieldValue, axes: Sequence[str | int]) -> str:
        """What is wrong with a value that should be a list over these axes; empty if nothing is."""
        if not axes:
            return self._problem_of_entries(field.path, [field.value])
        axis, *inner_axes = axes
        values = field.value
        if isinstance(axis, str) and axis.startswith("["):
            if not isinstance(values, list):
                return self._problem_of_entries(field.path, [values])
            axis = axis.strip("[]")
        if not isinstance(values, list):
            return f"{field.path} is not a list"
        problem = self._problem_of_length(field.path, values, axis)
        if problem:
            return problem
        if not inner_axes:
            return self._problem_of_entries(field.path, values)
        for position, value in enumerate(values):
            problem = self.problem(FieldValue(f"{field.path}[{position}]", value), inner_axes)
            if problem:
                return problem
        lengths = {len(value) for value in values if isinstance(value, list)}
        if len(lengths) > 1:
            return f"the lists in {field.path} differ in length"
        return ""

    def _problem_of_length(self, path: str, values: Sequence[Any], axis: str | int) -> str:
        """Why a list does not have an entry for each index of an axis; empty if it does."""
        if axis == "point" or (axis == "class" and not self.classes):
            return ""
        if axis == "class":
            length = self.classes
        elif isinstance(axis, int):
            length = axis
        else:
            indices = self.event.get(axis)
            is_index = INDICES.get(axis, is_number)
            if not isinstance(indices, list) or not all(map(is_index, indices)):
                return f"{axis} is not a list of the entries of {path}"
            length = len(indices)
        if len(values) != length:
            return f"{path} does not have {length} entries"
        return ""

    def _problem_of_entries(self, path: str, values: Sequence[Any]) -> str:
        if all(map(self._is_entry, values)):
            return ""
        return f"{path} has an entry that does not belong to {self.entries}"

    def _is_entry(self, value: Any) -> bool:
        if self.entries == "numbers or null":
            return value is None or is_number(value)
        if self.entries == "numbers":
            return is_number(value)
        if self.entries == "counts":
            return is_count(value)
        return is_count(value) and (self.classes == 0 or value < self.classes)


def _is_client(value: Any) -> bool:
    return type(value) is int and SERVER <= value <= LARGEST


INDICES: Mapping[str, Callable[[Any], bool]] = {
    "clients": _is_client,
    "models": lambda name: isinstance(name, str),
}
"""By list, the check of its entries where these are the indices of other lists."""


# What clients reported.

KNOWN_OF_CLIENT = frozenset(ClientOfStage.__annotations__)
"""The fields of a client's event that its schema checks."""


def is_readable_report(name: str, value: Any, classes: int) -> bool:
    """Whether a client may have reported a field; ``classes``: how many there are, 0 if unknown."""
    if not has_valid_form(name, value, depth=100, word=1 << 20):
        return False
    if name in ("private", "public") and not is_number(value):
        return value == {} or not wrong_table(name, value, classes)
    if name == PROBE:
        has_classes = len(value) == classes or classes == 0
        return has_classes and all(0 <= probability <= 1 for probability in value)
    if name in HISTOGRAMS:
        return not wrong_histograms(value, classes)
    rows: list[Any] = []
    if name == "correct_by_epoch":
        rows = value
    elif name in COUNTED:
        rows = [value]
    return classes == 0 or all(len(row) == classes for row in rows)
