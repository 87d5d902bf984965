"""The schema of a journal: which events it may have, in which order, and the fields of each.

Every reader relies on this schema and on nothing else, so a journal is checked once, where it is
read (``running.journal.read_journal``). An event has the fields that are listed here, and any
further ones: measures, methods and packages add their own. A further field of a round or of a
measure may hold any JSON, except that a field ``…_by_client`` is a table of clients. Further fields
of a client's event have the form that a client may report (``core.reports``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstill.config.tables import SelectionData
from fedstill.core.records import SERVER
from fedstill.core.reports import (
    COUNTED,
    MAX_COUNT,
    MAX_SECONDS,
    TAKEN,
    has_valid_form,
    is_count,
    is_number,
    wrong_table,
)
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


class EventFields(BaseModel):
    """The fields of an event; further ones are allowed."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    event: str


# The events.


class SplitOfRun(BaseModel):
    """What the first event says of the file with the run's split."""

    model_config = ConfigDict(strict=True)

    file: str
    sha256: str
    clients: Count
    examples: Count
    networks: list[str] = []


class StreamOfRun(BaseModel):
    """What the first event says of the run's tasks."""

    model_config = ConfigDict(strict=True)

    kind: str = ""
    classes: list[list[Index]]
    first_rounds: list[RoundNumber]
    label_counts: list[list[Count]] = []
    clients: list[Count] = []
    names: list[list[str]] = []


class InputsOfRun(BaseModel):
    """What the first event says of how inputs are made of examples."""

    model_config = ConfigDict(strict=True)

    shape: list[Count] = []
    mean: list[float] = []
    std: list[float] = []


class SelectionOfRun(BaseModel):
    """What the first event says of how rounds are compared."""

    model_config = ConfigDict(strict=True)

    on: SelectionData
    by: str
    larger_is_better: bool
    examples: Count | None = None


class Start(EventFields):
    """What is run, on which data, with which software."""

    event: Literal["start"]
    classes: list[str]
    seconds_since_1970: float | None = None
    label_counts: list[list[Count]] = []
    test_counts: list[Count] = []
    split: SplitOfRun | None = None
    stream: StreamOfRun | None = None
    selection: SelectionOfRun | None = None
    inputs: InputsOfRun | None = None
    backbone_inputs: dict[str, Any] | None = None
    client_names: list[str] = []
    models: list[str] = []
    notes: list[str] = []
    sources: dict[str, str] = {}
    examples_sha256: dict[str, str] = {}
    config_sha256: str = ""
    queries: dict[Digits, list[Index]] = {}
    fedstill: str = ""
    torch: str = ""
    numpy: str = ""
    python: str = ""
    card: str = ""


class Evaluated(EventFields):
    """What models are worth on the test set; None without a model for all clients."""

    accuracy: Share | None
    class_accuracy: Shares
    personal_class_accuracy: Shares | None = None
    balanced_accuracy: Share | None = None
    f1: Share | None = None
    f1_weighted: Share | None = None
    precision: Share | None = None
    recall: Share | None = None
    specificity: Share | None = None
    auc: Share | None = None
    average_precision: Share | None = None
    log_loss: float | None = None
    brier: float | None = None
    ece: Share | None = None
    confusion: list[list[Count]] | None = None


class Initial(Evaluated):
    """The models before round 1."""

    event: Literal["initial"]


class OtherModel(BaseModel):
    """A further model that is evaluated after each round."""

    model_config = ConfigDict(strict=True)

    accuracy: Share | None
    class_accuracy: Shares


class Answer(BaseModel):
    """What a client that asked its peers for classes got in a round."""

    model_config = ConfigDict(strict=True, extra="allow")

    client: Client
    query: list[Index]
    average_accuracy: float | None = None
    average_accuracy_before: float | None = None
    uniform_accuracy: float | None = None
    gain: float | None = None
    forgetting: float | None = None
    teachers: Count | list[Client | str] | None = None


class PrivacyOfRound(BaseModel):
    """What clients have spent in privacy so far; None where nothing bounds it."""

    model_config = ConfigDict(strict=True)

    epsilon: list[float | None]
    delta: float
    covers: str


class Round(Evaluated):
    """A round that is done.

    ``of_measures``: by measure of the user's own, the fields that it gave this event.
    """

    event: Literal["round"]
    round: RoundNumber
    forgetting: float | None = None
    consistency: float | None = None
    task: RoundNumber | None = None
    replies: Count | None = None
    refused: Count | None = None
    bytes_up: Count
    bytes_down: Count
    bytes_as_weights: Count | None = None
    personal_clients: Count | None = None
    personal_accuracy: Share | None = None
    personal_forgetting: float | None = None
    own_test_accuracy: Share | None = None
    own_test_worst: Share | None = None
    in_local_accuracy: Share | None = None
    out_local_accuracy: Share | None = None
    selection_score: float | None = None
    best_round: RoundNumber | None = None
    best_round_score: float | None = None
    best_round_accuracy: Share | None = None
    stopped_because: str = ""
    others: dict[str, OtherModel] = {}
    client_predictors: dict[Digits, str] = {}
    of_measures: dict[str, list[str]] = {}
    answers: list[Answer] = []
    privacy: PrivacyOfRound | None = None
    seconds: Seconds | None = None
    # Negative where an earlier version subtracted the times of a census before round 1.
    seconds_training: float | None = None
    seconds_measuring: Seconds | None = None
    seconds_saving: Seconds | None = None
    seconds_clients: Seconds | None = None
    seconds_cpu: Seconds | None = None


class ClientOfStage(EventFields):
    """What a client did in a stage: it was accepted or refused, or had nothing to do."""

    event: Literal["client"]
    round: Index
    stage: Index
    name: str
    client: Client
    examples: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    refused: str = ""
    idle: bool = False
    noised_rows: Count = 0
    private_steps: Count = 0
    private_rate: Share = 0.0
    steps: Count = 0
    epochs: Count = 0
    loss: dict[str, float | None] = {}
    seconds: Seconds = 0.0
    seconds_training: Seconds = 0.0
    seconds_measuring: Seconds = 0.0


class Look(EventFields):
    """What a measure saw after a stage."""

    event: Literal["measure"]
    measure: str
    round: RoundNumber
    stage: Index
    seconds: Seconds | None = None


class TaskEnd(EventFields):
    """The accuracies at the end of a task; of the untrained model at the end of task 0.

    ``row``: accuracy on each task. ``correct``, ``totals``: test examples by task and class, None
    where sites test; ``correct`` is a mean over clients where several models answer.
    """

    event: Literal["task"]
    task: Index
    round: Index
    row: Shares
    correct: list[list[MeanCount]] | None = None
    totals: list[list[Count]] | None = None
    clients: dict[Digits, Shares] = {}


class Resumed(EventFields):
    """The run goes on with other software."""

    event: Literal["resumed"]
    round: Index
    stage: Index
    before: dict[str, str]
    versions: dict[str, str]


MODELS: Mapping[str, type[EventFields]] = {
    "start": Start,
    "initial": Initial,
    "round": Round,
    "client": ClientOfStage,
    "measure": Look,
    "task": TaskEnd,
    "resumed": Resumed,
}
"""The schema of each event. Observers may add others, which no reader of runs relies on."""


REASONS = {"model_type": "Input should be a table", "dict_type": "Input should be a table"}
"""What is said of errors whose message names a class of Python."""


def structure_problem(event: Any) -> str:
    """Why a line is no event, or which of an event's fields is not what its schema says; empty if
    it is as it should be.

    >>> structure_problem({"event": "resumed", "round": 1, "stage": 0, "before": {}})
    "the event 'resumed' is wrong at versions: Field required"
    """
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return "is not an event"
    name = event["event"]
    model = MODELS.get(name)
    if model is None:
        return ""
    try:
        model.model_validate(event)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = REASONS.get(first["type"], first["msg"])
        return f"the event {name!r} is wrong at {place}: {reason}"
    return ""


# What the fields of several events say together.


class JournalChecker:
    """Checks the events of one journal, in their order."""

    def __init__(self) -> None:
        self.classes = 0
        """How many classes the run has, as its first event says."""
        self._tasks: list[list[int]] = []
        self._has_started = False
        self._last_round = 0
        self._task_ends: list[int] = []

    def problem(self, event: Event) -> str:
        """What is wrong with the next event; empty if nothing is."""
        problem = structure_problem(event) or self._problem_of_order(event)
        if problem:
            return problem
        name = event["event"]
        if name == "start":
            return self._begin(event)
        if name in ("initial", "round"):
            return self._problem_of_classes(event) or _problem_of_tables(event)
        if name == "client":
            return self._problem_of_report(event)
        if name == "task":
            return self._problem_of_task(event)
        return ""

    def _problem_of_order(self, event: Event) -> str:
        """In what an event does not follow those before it."""
        name = event["event"]
        if (name == "start") == self._has_started:
            self._has_started = True
            return "the event 'start' must be the first, and the only one of this name"
        self._has_started = True
        if name == "round":
            before, self._last_round = self._last_round, event["round"]
            if event["round"] <= before:
                return f"round {event['round']} does not follow round {before}"
        return ""

    def _begin(self, start: Event) -> str:
        self.classes = len(start["classes"])
        self._tasks = start.get("stream", {}).get("classes", [])
        if any(len(row) != self.classes for row in start.get("label_counts", ())):
            return f"label_counts does not have {self.classes} classes for each client"
        if len(start.get("test_counts", ())) not in (0, self.classes):
            return f"test_counts does not have {self.classes} classes"
        named = [*self._tasks, *start.get("queries", {}).values()]
        if any(number >= self.classes for classes in named for number in classes):
            return f"the event 'start' names a class that is not one of {self.classes}"
        return ""

    def _problem_of_classes(self, event: Event) -> str:
        """Which accuracies are not those of the run's classes."""
        models = {"": event, **event.get("others", {})}
        for name, model in models.items():
            for key in ("class_accuracy", "personal_class_accuracy"):
                accuracies = model.get(key)
                if accuracies is not None and len(accuracies) != self.classes:
                    place = f"others.{name}.{key}" if name else key
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
        further = event.keys() - KNOWN_OF_CLIENT
        for name in sorted(further):
            if not is_readable_report(name, event[name], self.classes):
                return f"what client {event['client']} reported as {name!r} is malformed"
        return ""

    def _problem_of_task(self, event: Event) -> str:
        """In what the end of a task is not one of the run's stream."""
        # Without a model of the server before round 1 there is no end of task 0.
        expected = [self._task_ends[-1] + 1] if self._task_ends else [0, 1]
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

KNOWN_OF_CLIENT = frozenset(ClientOfStage.model_fields)
"""The fields of a client's event that its schema checks."""


def without_malformed(event: Event, classes: int) -> tuple[Event, list[str]]:
    """A client's event without its malformed fields, and the names of what was left out.

    Before reports were checked, a client could write anything into the journals of its runs.
    """
    malformed = {
        name
        for name, value in event.items()
        if name not in TAKEN and not is_readable_report(name, value, classes)
    }
    # These fields are read together.
    if malformed & COUNTED.keys():
        malformed |= COUNTED.keys() & event.keys()
    if not is_count(event.get("noised_rows", 0)):
        malformed.add("noised_rows")
    if not is_count(event.get("private_steps", 0)) or not 0 <= event.get("private_rate", 0.0) <= 1:
        malformed |= {"private_steps", "private_rate"}
    fields = {name: value for name, value in event.items() if name not in malformed}
    return fields, sorted(malformed)


def is_readable_report(name: str, value: Any, classes: int) -> bool:
    """Whether a client may have reported a field; ``classes``: how many there are, 0 if unknown."""
    if not has_valid_form(name, value, depth=100, word=1 << 20):
        return False
    if name in ("private", "public") and not is_number(value):
        return value == {} or not wrong_table(name, value, classes)
    if name in HISTOGRAMS:
        return not wrong_histograms(value, classes)
    rows: list[Any] = []
    if name == "correct_by_epoch":
        rows = value
    elif name in COUNTED:
        rows = [value]
    return classes == 0 or all(len(row) == classes for row in rows)
