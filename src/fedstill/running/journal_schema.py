"""The schema of a journal: which events it may have, in which order, and the fields of each.

Every reader relies on this schema and on nothing else, so a journal is checked once, where it is
read (``running.journal.read_journal``). An event has the fields that are listed here, and any
further ones: measures, methods and packages add their own. A further field of a round or of a
measure may hold any JSON, except that a field ``…_by_client`` is a table of clients. Further fields
of a client's event have the form that a client may report (``core.reports``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    is_number,
)
from fedstill.core.stages import SERVER
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

Share = Annotated[float, Field(ge=0, le=1)]

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
    private_steps: Count
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

    ``before``, ``after``: accuracies by class. ``parts``: changes by class, by part of the round.
    ``values``: by class of ``classes``, the
    contribution of each client; ``gap``: their error, of all clients or of each; ``nobody``: the
    change without clients. ``had``: each client's examples by class in its task.
    """

    clients: Required[list[Client]]
    before: Required[Shares]
    after: Required[Shares]
    parts: Required[dict[str, list[float | None]]]
    classes: list[Index]
    values: list[list[float]]
    gap: list[float | list[float]]
    nobody: list[float]
    drawn: list[float | None]
    tasks: list[Index]
    had: list[list[Count]]
    game: str
    rule: str


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


def structure_problem(event: Any) -> str:
    """What is wrong with the fields of one event; empty if nothing is.

    >>> structure_problem({"event": "resumed", "round": 1, "stage": 0, "before": {}})
    "the event 'resumed' is wrong at versions: Field required"
    """
    return malformed_events([event]).get(0, "")


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
        self._task_ends: list[int] = []

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
        if name == "measure" and event["measure"] == CONTRIBUTIONS:
            return self._problem_of_contributions(event)
        return ""

    def _problem_of_order(self, event: Event) -> str:
        """In what an event does not follow those before it."""
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
        """Which of a client's further fields no client may report."""
        if event.keys() <= KNOWN_OF_CLIENT:
            return ""
        for name in sorted(event.keys() - KNOWN_OF_CLIENT):
            if not is_readable_report(name, event[name], self.classes):
                return f"what client {event['client']} reported as {name!r} is malformed"
        return ""

    def _problem_of_contributions(self, event: Event) -> str:
        """Which list of a look at contributions has another length than it should."""
        clients = len(event["clients"])
        divided = len(event.get("classes", ()))
        expected = [
            *((f"parts.{name}", changes, self.classes) for name, changes in event["parts"].items()),
            *(("values", row, clients) for row in event.get("values", ())),
            *(("had", row, self.classes) for row in event.get("had", ())),
        ]
        by_name = {
            "values": divided,
            "gap": divided,
            "nobody": divided,
            "before": self.classes,
            "after": self.classes,
            "drawn": self.classes,
            "tasks": clients,
            "had": clients,
        }
        expected += [(name, event[name], n) for name, n in by_name.items() if name in event]
        for name, values, length in expected:
            if len(values) != length:
                return f"{name} does not have {length} entries"
        if any(number >= self.classes for number in event.get("classes", ())):
            return f"classes names a class that is not one of {self.classes}"
        return ""

    def _problem_of_task(self, event: Event) -> str:
        """Why the end of a task does not belong to the run's stream; empty if it does."""
        # Without a model of the server before round 1 there is no end of task 0.
        expected = [0, 1]
        if self._task_ends:
            expected = [self._task_ends[-1] + 1]
        if event["task"] not in expected:
            return f"the end of task {event['task']} does not follow that of {expected[0] - 1}"
        self._task_ends.append(event["task"])
        if len(event["row"]) != len(self._tasks):
            return f"row does not have {len(self._tasks)} tasks"
        correct = event.get("correct") or []
        totals = event.get("totals") or []
        if len(correct) != len(totals):
            return "correct and totals are not of the same test sets"
        if any(len(row) != self.classes for row in (*correct, *totals)):
            return f"correct and totals do not have {self.classes} classes"
        if not correct and not event.get("clients"):
            return "neither the server's counts nor those of sites are in it"
        return ""


def _problem_of_tables(event: Event) -> str:
    """Which field of a round is not a table of clients, or not lists over epochs."""
    for name, table in event.items():
        if name.endswith("_by_client") and not _is_by_client(table):
            return f"{name} is not a number for each client"
    stages = event.get("by_epoch", {})
    if not isinstance(stages, dict) or not all(map(_is_by_epoch, stages.values())):
        return "by_epoch is not lists of numbers of one length"
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


# What clients reported.

KNOWN_OF_CLIENT = frozenset(ClientOfStage.__annotations__)
"""The fields of a client's event that its schema checks."""


def is_readable_report(name: str, value: Any, classes: int) -> bool:
    """Whether a client may have reported a field; ``classes``: how many there are, 0 if unknown."""
    if not has_valid_form(name, value, depth=100, word=1 << 20):
        return False
    if name in ("private", "public") and not is_number(value):
        return value == {} or not wrong_table(name, value, classes)
    if name == PROBE and not all(0 <= probability <= 1 for probability in value):
        return False
    if name in HISTOGRAMS:
        return not wrong_histograms(value, classes)
    rows: list[Any] = []
    if name == "correct_by_epoch":
        rows = value
    elif name in COUNTED:
        rows = [value]
    return classes == 0 or all(len(row) == classes for row in rows)
