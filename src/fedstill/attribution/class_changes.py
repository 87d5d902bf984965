"""Changes of a class's accuracy in a round, their attribution to clients, and texts about both."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from fedstill.core.errors import ConfigError
from fedstill.methods.fit import FIT
from fedstill.metrics.shapley import culprits
from fedstill.report.table_files import TextTable
from fedstill.running.directory import settings_of
from fedstill.running.numbers import Look, RunNumbers
from fedstill.running.runs import Run, read_run

MEASURE = "contributions"
"""The measure that divides changes among clients."""

# ---- the changes in a run ------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassChange:
    """The accuracy of a class before and after a round, as shares."""

    round: int
    label: int
    accuracy_before: float
    accuracy_after: float

    @property
    def change(self) -> float:
        """The difference; negative if the class was forgotten."""
        return self.accuracy_after - self.accuracy_before


def class_changes(numbers: RunNumbers) -> list[ClassChange]:
    """The changes of every class in every round of a run, largest loss first.

    Changes in round 1 come last, because the untrained model usually predicts a single class, whose
    initial accuracy was not learned.
    """
    accuracies = numbers.by_class("class_accuracy")
    changes = []
    for round_before, round in pairwise([0, *numbers.rounds]):
        changes += changes_between(
            round, accuracies.get(round_before, ()), accuracies.get(round, ())
        )
    return sorted(changes, key=lambda item: (item.round == 1, item.change, item.round, item.label))


def changes_between(
    round: int, accuracies_before: Sequence[float | None], accuracies: Sequence[float | None]
) -> list[ClassChange]:
    """The changes of all classes with test examples; none if a round was not evaluated."""
    changes = []
    pairs = zip(accuracies_before, accuracies, strict=False)
    for label, (accuracy_before, accuracy_after) in enumerate(pairs):
        if accuracy_before is not None and accuracy_after is not None:
            changes.append(ClassChange(round, label, accuracy_before, accuracy_after))
    return changes


def find_changes(folder: Path, label: int | None, round: int | None) -> list[ClassChange]:
    """The changes of a class, or in a round, or all changes of a run; largest loss first.

    Raises ConfigError if there is none.
    """
    run = read_run(folder)
    if any(event.get("client_predictors") for event in run.rounds):
        raise ConfigError(
            f"{folder} has several models at the server; fedstill why explains the changes of a "
            "single global model"
        )
    changes = class_changes(run.numbers)
    if not changes:
        hint = ""
        if FIT in settings_of(folder).plans:
            hint = "; to see what a client learned from its peers, use --client 0"
        raise ConfigError(f"{folder} did not measure the classes of a global model{hint}")
    matching = [
        item for item in changes if label in (None, item.label) and round in (None, item.round)
    ]
    if label is not None and label >= len(run.classes):
        raise ConfigError(f"--class {label}: the run has classes 0 to {len(run.classes) - 1}")
    if not matching:
        last = max(item.round for item in changes)
        raise ConfigError(
            f"{folder} did not measure this class in this round; it has rounds 1 to {last}"
        )
    return matching


# ---- attribution to clients ----------------------------------------------------------------------


@dataclass(frozen=True)
class TaskData:
    """The data of a client in a run with tasks: its task, and the number of its examples of the
    class and of all classes in this task.
    """

    task: int
    of_class: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The attribution of a class's change in a round.

    ``parts``: the change by part of the round, in order. The parts sum to the change on the test
    examples of the measure.
    ``clients``: the contribution of each client in soft accuracy; empty if the change was not
    divided among clients. ``error``: the uncertainty of a contribution.
    ``server``: the server's change if all clients are idle, for example by momentum.
    ``game``, ``rule``: the behaviour of clients outside a coalition, and the rule of the division.
    ``sampled_share``: the class's share of the data of the round's clients, relative to its share
    of all clients' data; None if unknown.
    ``task_data``: the data by client, in a run with tasks.
    """

    change: ClassChange
    parts: Mapping[str, float]
    clients: Mapping[int, float]
    error: float
    game: str
    rule: str
    sampled_share: float | None
    task_data: Mapping[int, TaskData] = field(default_factory=dict)
    server: float = 0.0


def of_global_model(looks: Sequence[Look]) -> list[Look]:
    """The measurements of the global model, in the order of their stages.

    Stages in which clients train their own models in addition to the global one are left out.
    Without a global model, the result contains the measurements of each round's first stage, and of
    later stages with the same clients.
    """
    of_global = [look for look in looks if look.texts.get("model") != "own"]
    if of_global:
        return of_global
    first_clients: dict[int, Sequence[int]] = {}
    for look in looks:
        first_clients.setdefault(look.round, look.clients)
    return [look for look in looks if look.clients == first_clients[look.round]]


def is_divided(look: Look) -> bool:
    """Whether changes were divided among clients; no class may have changed enough for it."""
    return "game" in look.texts


def attribute(change: ClassChange, looks: Sequence[Look]) -> Attribution | None:
    """The attribution of a change, from the measurements of its round's stages.

    None if the round was not measured, or if the change of this class was not divided.
    """
    of_round = [look for look in of_global_model(looks) if look.round == change.round]
    if not of_round:
        return None
    with_clients = [look for look in of_round if is_divided(look)]
    divided = [look for look in with_clients if look.of_class("values", change.label)]
    if with_clients and not divided:
        return None

    game = ""
    rule = ""
    if divided:
        game = divided[0].texts.get("game", "")
        rule = divided[0].texts.get("rule", "")
    sampled_share = None
    if with_clients:
        sampled_share = with_clients[0].number_of_class("drawn", change.label)
    by_server = [look.number_of_class("nobody", change.label) for look in divided]
    return Attribution(
        change=change,
        parts=_parts(change.label, of_round),
        clients=_contributions(change.label, divided),
        error=sum(_error(change.label, look) for look in divided),
        game=game,
        rule=rule,
        sampled_share=sampled_share,
        task_data=_task_data(change.label, divided),
        server=sum(value for value in by_server if value is not None),
    )


def _parts(label: int, looks: Sequence[Look]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for look in looks:
        for name in look.names("parts"):
            change = look.number_of_class(f"parts/{name}", label)
            parts[name] = parts.get(name, 0.0) + (change or 0.0)
    return parts


def _contributions(label: int, looks: Sequence[Look]) -> dict[int, float]:
    """The contributions of clients, summed over stages."""
    clients: dict[int, float] = {}
    for look in looks:
        for client, value in look.of_class("values", label).items():
            clients[client] = clients.get(client, 0.0) + value
    return clients


def _error(label: int, look: Look) -> float:
    """The error of a contribution: a common error, or the largest error of all clients."""
    common = look.number_of_class("gap", label)
    if common is not None:
        return common
    return max(look.of_class("gap", label).values(), default=0.0)


def _task_data(label: int, looks: Sequence[Look]) -> dict[int, TaskData]:
    data: dict[int, TaskData] = {}
    for look in looks:
        for client, task in look.by_client("tasks").items():
            counts = look.of_client("had", client)
            data[client] = TaskData(
                task=int(task),
                of_class=int(counts.get(label, 0)),
                examples=int(sum(counts.values())),
            )
    return data


# ---- the attribution in words --------------------------------------------------------------------

MAX_NAMED = 3
"""The largest number of clients in a sentence."""

MIN_ERROR = 0.005
"""Contributions below half a point are not mentioned in a sentence."""

RARELY_SAMPLED = 0.7
"""A class is rare among the sampled clients if its ``sampled_share`` is below this."""

HOLDS_CLASS = 0.25
"""A client holds a class if its share of it is at least this much of the share over all clients."""

SERVER_ROW = "server, with all clients idle"
"""The row of the server's change without any client."""

GAMES = {
    "idle": "a client that received the model and sent it back without training",
    "absent": "a client that did not reply",
}
"""The baseline of a client's contribution, by game."""

RULES = {
    "path": "Aumann-Shapley values",
    "exact": "Shapley values, all coalitions",
    "two ends": "means of two effects: the client alone, and its removal",
}
"""Descriptions of the computation of contributions, by rule."""


def client_name(run: Run, client: int) -> str:
    """A client's name in the data with its number, or the number alone."""
    names = run.client_names
    if client < len(names):
        return f"{names[client]} ({client})"
    return f"client {client}"


def points(value: float) -> str:
    """A share as signed percentage points.

    >>> points(-0.314), points(0.02), points(0.0)
    ('-31.4', '+2.0', '0.0')
    """
    if not round(1000 * value):
        return "0.0"
    return f"{100 * value:+.1f}"


def sentence_of(run: Run, attribution: Attribution) -> str:
    """The change, its parts, and the clients that contributed most."""
    change = attribution.change
    end = f"{100 * change.accuracy_after:.1f} %"
    if change.change == 0:
        movement = f"stayed at {end}"
    else:
        verb = "fell"
        if change.change > 0:
            verb = "rose"
        movement = f"{verb} from {100 * change.accuracy_before:.1f} % to {end}"
    parts = ", ".join(f"{name} {points(value)}" for name, value in attribution.parts.items())
    return (
        f"Class {run.classes[change.label]!r}{_tasks_of_class(run, change)} {movement} in round "
        f"{change.round}{_task_of_round(run, change)}: {parts}"
        f"{_largest_contributions(run, attribution)}."
    )


def _tasks_of_class(run: Run, change: ClassChange) -> str:
    """A note on the tasks that contain the class, if some of them do."""
    classes: Sequence[Sequence[int]] = run.start.get("stream", {}).get("classes", ())
    tasks = [str(task) for task, labels in enumerate(classes, 1) if change.label in labels]
    if not tasks or len(tasks) == len(classes):
        return ""
    return f" (of task {' and '.join(tasks)})"


def _task_of_round(run: Run, change: ClassChange) -> str:
    """A note on the run's task in the round, if there are several tasks."""
    first_rounds: Sequence[int] = run.start.get("stream", {}).get("first_rounds", ())
    if len(first_rounds) < 2:
        return ""
    task = bisect.bisect_right(first_rounds, change.round)
    begins = ""
    if change.round in first_rounds:
        begins = ", which begins here"
    return f" (task {task} of {len(first_rounds)}{begins})"


def _largest_contributions(run: Run, attribution: Attribution) -> str:
    if not attribution.clients or attribution.change.change == 0:
        return ""
    clients = _main_clients(attribution)
    if not clients:
        return "; no client's contribution is above its error"
    texts = [f"{client_name(run, c)} {points(attribution.clients[c])}" for c in clients]
    return f"; of the clients, {', '.join(texts)} contributed most"


def _main_clients(attribution: Attribution) -> list[int]:
    """The clients with the largest contributions in the direction of the change; contributions
    below the error are left out.
    """
    contributions = attribution.clients
    lowest_first = culprits(contributions, max(attribution.error, MIN_ERROR))
    if attribution.change.change < 0:
        return [client for client in lowest_first if contributions[client] < 0][:MAX_NAMED]
    highest_first = lowest_first[::-1]
    return [client for client in highest_first if contributions[client] > 0][:MAX_NAMED]


def no_loss_note(run: Run, largest: ClassChange, label: int | None, round: int | None) -> str:
    """A sentence if no class lost accuracy, else empty.

    ``label``, ``round``: the class and the round in the user's question.
    """
    if largest.change < 0:
        return ""
    subject = "No class lost accuracy"
    if label is not None:
        subject = f"Class {run.classes[label]!r} did not lose accuracy"
    # Changes in round 1 come last, so there are no others.
    if round is not None or largest.round == 1:
        return f"{subject} in round {largest.round}."
    return f"{subject} in any round after the first."


def contribution_table(run: Run, attribution: Attribution) -> TextTable:
    """A table of each client's contribution and its examples of the class; the server's share and
    the sum come last.
    """
    data_cells = _held_examples(run, attribution)
    titles = []
    if data_cells:
        titles = ["of the class", "examples"]
    if attribution.task_data:
        titles.insert(0, "in task")
    contributions = attribution.clients
    lines = [
        [client_name(run, client), points(contributions[client]), *data_cells.get(client, ())]
        for client in sorted(contributions, key=lambda client: (contributions[client], client))
    ]
    empty = [""] * len(titles)
    if points(attribution.server) != "0.0":
        lines.append([SERVER_ROW, points(attribution.server), *empty])
    if contributions:
        total = sum(contributions.values()) + attribution.server
        lines.append(["together", points(total), *empty])
    return TextTable(["client", "contribution [points]", *titles], lines)


def _held_examples(run: Run, attribution: Attribution) -> dict[int, list[str]]:
    """The cells about each client's data: its task (if there are tasks), its examples of the class,
    and all its examples. Empty if unknown.
    """
    if attribution.task_data:
        return {
            client: [str(data.task), str(data.of_class), str(data.examples)]
            for client, data in attribution.task_data.items()
        }
    if not run.label_counts:
        return {}
    counts = {client: run.label_counts[client] for client in attribution.clients}
    label = attribution.change.label
    return {client: [str(row[label]), str(sum(row))] for client, row in counts.items()}


def advice(run: Run, attribution: Attribution) -> str:
    """Advice against a loss of this kind; empty for other changes."""
    if attribution.change.change >= 0:
        return ""
    task_data = attribution.task_data
    if task_data and not any(data.of_class for data in task_data.values()):
        return (
            "None of the round's clients has the class in its task. A method for tasks (fedlwf) or "
            "kept data (stream.past) may help."
        )
    share = attribution.sampled_share
    if share is not None and share < RARELY_SAMPLED:
        return (
            f"The round's clients hold {share:.2f} times the usual share of the class: the sample "
            "of clients explains much of the loss, and --draws 10 shows how much. More clients per "
            "round (topology.sampled) may help."
        )
    if not {"local training", "averaging"} <= attribution.parts.keys():
        if all(name.startswith("client ") for name in attribution.parts):
            return (
                "The clients of a chain train in the order shown. A method with teachers (sfedkd) "
                "may preserve knowledge from earlier clients."
            )
        return ""
    suspect = _holder(run, attribution)
    if suspect is not None:
        return (
            f"{client_name(run, suspect)} is among the clients that contributed most, although it "
            "holds the class, and a client rarely forgets a class that it trains on. Check its "
            "labels of this class: wrong labels have this effect. To see the effect of leaving it "
            "out, use --without."
        )
    if attribution.parts["local training"] > attribution.parts["averaging"]:
        return (
            "Averaging caused more of the loss than local training: the local models predict the "
            "class, but their mean does not. Methods that keep local models closer to each other "
            "may help (scaffold, fedprox, fewer local steps)."
        )
    remedy = (
        "Distillation against forgetting (fedntd, fedadkd) or fewer or smaller local steps "
        "(plan.epochs, plan.lr) may help."
    )
    main = _main_clients(attribution)
    if main and not run.label_counts and main[0] not in attribution.task_data:
        name = client_name(run, main[0])
        return (
            "Local training caused more of the loss than averaging. The server does not know which "
            f"classes a site holds. If {name} holds the class, check its labels of this class. If "
            f"it does not, it forgot the class while it trained on others: {_uncapitalised(remedy)}"
        )
    return (
        "Local training caused more of the loss than averaging: clients forget classes that they "
        f"do not hold. {remedy}"
    )


def _uncapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _holder(run: Run, attribution: Attribution) -> int | None:
    """Among the clients that contributed most to a loss, the first one that holds the class; None
    if none of them does.

    The clients considered contributed at least half as much as the largest contributor.
    """
    main = _main_clients(attribution)
    if not main:
        return None
    contributions = attribution.clients
    largest = contributions[main[0]]
    strong = [client for client in main if contributions[client] <= largest / 2]
    holders = [client for client in strong if _holds_class(run, attribution, client)]
    return next(iter(holders), None)


def _holds_class(run: Run, attribution: Attribution, client: int) -> bool:
    """Whether a client has a fair share of the class, compared with all clients together."""
    label = attribution.change.label
    if client in attribution.task_data:
        return attribution.task_data[client].of_class > 0
    if not run.label_counts:
        return False
    of_class = sum(counts[label] for counts in run.label_counts)
    share = of_class / sum(sum(counts) for counts in run.label_counts)
    counts = run.label_counts[client]
    return counts[label] > 0 and counts[label] >= HOLDS_CLASS * share * sum(counts)


def method_note(attribution: Attribution) -> str:
    """A note on the computation and limits of contributions; empty without contributions."""
    if not attribution.clients:
        return ""
    return (
        "How to read: a contribution is the number of points of accuracy on the class that a "
        "client's training removed (negative) or added (positive) in this round, compared with "
        f"{GAMES[attribution.game]}. Contributions sum to the change of the soft accuracy, ± "
        f"{100 * attribution.error:.1f} points ({RULES[attribution.rule]}). A large contribution "
        "does not prove a mistake: all clients that lack a class contribute to its decline. "
        "Contributions do not explain the final model."
    )
