"""The results of a run: its final model, its summary, and the ``Result`` for Python."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import CorruptFile
from fedstill.core.files import (
    counted,
    digest,
    in_shell,
    named_path,
    neutral,
    read_file,
    write_whole,
)
from fedstill.core.records import SERVER, State
from fedstill.core.registry import short_name
from fedstill.core.reports import json_value
from fedstill.metrics.accuracy import forgetting_by_class
from fedstill.metrics.classification import METRICS, RECORDED
from fedstill.metrics.local_models import QUERY_MEASURES, UNTAUGHT
from fedstill.running import journal as journals
from fedstill.running.frame import frame_of_clients, frame_of_events
from fedstill.running.journal import (
    JOURNAL,
    STOP_REASON,
    SUMMARY,
    Event,
    check_journal,
    events_by_name,
    first_event,
)
from fedstill.running.model_files import FINAL, MODEL_SHA256, read_final
from fedstill.running.numbers import ReplyOutcome, RunNumbers
from fedstill.running.selection import selection_summary
from fedstill.running.setting_warnings import frequent_class_warning
from fedstill.running.split_file import read_label_counts

if TYPE_CHECKING:
    import pandas

MOST_CLASSES = 12
"""The largest number of classes in a table; those with the greatest forgetting are shown."""

FAINTEST = 0.005
"""Losses and gains below this value are not coloured."""

STRONGEST = 0.6
"""The largest opacity of a background, at which text remains legible."""

LOSS_COLOUR = "200,60,40"
GAIN_COLOUR = "40,140,80"


@dataclass(frozen=True)
class Shade:
    """A cell of a table with a red background for a loss or a green one for a gain.

    ``loss``: from -1 to 1; its absolute value determines the opacity of the background.
    """

    text: str
    loss: float = 0.0


def share(value: float | None) -> str:
    """A share in percent; a dash for None and NaN."""
    if value is None or np.isnan(value):
        return "–"
    return f"{100 * value:.1f} %"


def shaded(loss: float) -> Shade:
    """A cell with a loss of accuracy; no background for NaN."""
    text = share(loss)
    if np.isnan(loss):
        return Shade(text)
    return Shade(text, loss)


def class_history(history: Sequence[Event]) -> list[list[float | None]]:
    """Accuracies by class (rounds, C), from the events of all rounds.

    These are accuracies of the server's model. Without such a model, they are means over the
    clients' own models, in the rounds that measured them.
    """
    if not history:
        return []
    classes = len(history[0]["class_accuracy"])
    return list(RunNumbers.of(history, classes).class_accuracy.values())


def lost_by_class(history: Sequence[Event]) -> list[float]:
    """The forgetting of each class since its best earlier round, given the events of all rounds;
    NaN for a class that was not measured.
    """
    rows = np.array(class_history(history), np.float64)
    if not len(rows):
        return []
    losses: list[float] = forgetting_by_class(rows).tolist()
    return losses


def most_forgotten(lost: Sequence[float]) -> list[int]:
    """The classes to show in a table, in order: all, or those with the greatest forgetting."""
    losses = np.nan_to_num(np.array(lost), nan=-np.inf)
    order = np.argsort(-losses, kind="stable")
    return sorted(order[:MOST_CLASSES].tolist())


def forgotten_table(classes: Sequence[str], history: Sequence[Event]) -> str:
    """A table of the last accuracy, best earlier accuracy and forgetting of each class; empty if
    they were not measured.
    """
    losses = lost_by_class(history)
    if np.isnan(losses).all() or len(losses) != len(classes):
        return ""
    accuracies = class_history(history)[-1]
    chosen = most_forgotten(losses)
    rows: list[list[str | Shade]] = []
    for index in chosen:
        loss = losses[index]
        accuracy = accuracies[index]
        best_accuracy = loss + (accuracy or 0)
        rows.append([classes[index], share(accuracy), share(best_accuracy), shaded(loss)])
    head = ["class", "accuracy", "best earlier round", "forgotten"]
    return notebook_table(head, rows, note_on_classes(chosen, losses))


def note_on_classes(chosen: Sequence[int], classes: Sequence[object]) -> str:
    """A note on the selection of classes; empty if the table shows all of them."""
    if len(chosen) == len(classes):
        return ""
    return f"the {len(chosen)} of {len(classes)} classes with the greatest forgetting"


def notebook(title: str, facts: Mapping[str, str], *tables: str) -> str:
    """The HTML of a title, a line of facts and tables."""
    line = " · ".join(
        f"{html.escape(name)} <b>{html.escape(fact)}</b>" for name, fact in facts.items()
    )
    head = f'<div style="margin-bottom:0.4em"><b>{html.escape(title)}</b><br>{line}</div>'
    text = f'<div style="font-variant-numeric:tabular-nums">{head}{"".join(tables)}</div>'
    return neutral(text, "html")


def notebook_table(
    head: Sequence[str], rows: Sequence[Sequence[str | Shade]], note: str = ""
) -> str:
    """The HTML of a table with one column of text and columns of numbers, and a note below it."""
    titles = "".join(
        f'<th style="{_style(column)}">{html.escape(title)}</th>'
        for column, title in enumerate(head)
    )
    body = "".join(_table_row(row) for row in rows)
    small = ""
    if note:
        small = f'<div style="opacity:0.7;font-size:smaller">{html.escape(note)}</div>'
    style = "border-collapse:collapse;font-size:inherit;margin:0 0 0.4em 0"
    table = f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="{style}">{table}</table>{small}'


def _table_row(row: Sequence[str | Shade]) -> str:
    cells = [_cell(column, cell) for column, cell in enumerate(row)]
    return f"<tr>{''.join(cells)}</tr>"


def _style(column: int) -> str:
    alignment = "right"
    if column == 0:
        alignment = "left"
    return f"padding:0.15em 0.6em;text-align:{alignment}"


def _cell(column: int, cell: str | Shade) -> str:
    if isinstance(cell, str):
        cell = Shade(cell)
    style = f"{_style(column)};white-space:nowrap{_background(cell.loss)}"
    return f'<td style="{style}">{html.escape(cell.text)}</td>'


def _background(loss: float) -> str:
    """The CSS of a cell's background; empty for a loss near 0."""
    colour = GAIN_COLOUR
    if loss > 0:
        colour = LOSS_COLOUR
    strength = min(STRONGEST, abs(loss))
    if strength < FAINTEST:
        return ""
    return f";background:rgba({colour},{strength:.2f})"


# ---- the result for Python -----------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a finished run. ``accuracy`` and ``forgetting`` refer to the last round.

    ``history``: the event of each round. ``model``: the parameters of the global model by name;
    ``fedstill.load_model`` returns it as a module. ``measures``: the events of the run's measures,
    in order. ``classes``: the names of the classes.
    """

    accuracy: float
    forgetting: float
    history: list[dict[str, Any]]
    model: dict[str, Tensor]
    directory: Path
    summary: Mapping[str, Any]
    measures: list[dict[str, Any]]
    classes: tuple[str, ...] = ()

    @staticmethod
    def of(folder: Path | str) -> Result:
        """Read the result from the directory of a finished run; raises CorruptFile if the run is
        not finished, and if a file is damaged or missing.
        """
        folder = named_path(folder)
        events = journals.read_journal(folder / JOURNAL)
        check_journal(folder, events)
        by_name = events_by_name(events)
        start = first_event(by_name, "start")
        summary = _read_summary(folder)
        model = _read_model(folder)
        return Result(
            accuracy=summary["accuracy"],
            forgetting=summary["forgetting"],
            history=by_name.get("round", []),
            model=model,
            directory=folder,
            summary=summary,
            measures=by_name.get("measure", []),
            classes=tuple(start.get("classes", ())),
        )

    def rounds(self) -> pandas.DataFrame:
        """The numbers in ``history`` as a data frame, with a row per round and a column per number.

        Nested names are joined by dots. A list over classes becomes one column per class, such as
        ``class_accuracy.3``.
        """
        return frame_of_events(self.history, self.classes)

    def clients(self) -> pandas.DataFrame:
        """The journal's numbers about clients as a data frame: one row per client and stage, with
        examples, bytes, losses, seconds and refusals.

        Raises CorruptFile if the run's directory is missing.
        """
        events = journals.read_journal(self.directory / JOURNAL)
        return frame_of_clients(events_by_name(events).get("client", []), self.classes)

    def label_counts(self) -> NDArray[np.int64]:
        """The number of training examples by client and class, (clients, C). It is (0, C) for real
        sites, which keep these numbers secret.

        Raises CorruptFile if the run's directory is missing or its split is damaged.
        """
        start = journals.read_journal(self.directory / JOURNAL, limit=1)
        return read_label_counts(self.directory, start[0]).table().astype(np.int64)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value}" for name, value in self._numbers.items())
        rounds = counted(len(self.history), "round")
        return f"<Result: {self._title}: {numbers}; {rounds}, in {self.directory}>"

    @property
    def _title(self) -> str:
        method = self.summary.get("method", "a run")
        dataset = self.summary.get("dataset", "data")
        return f"{method} on {dataset}, seed {self.summary.get('seed', '?')}"

    @property
    def _numbers(self) -> dict[str, str]:
        """The main numbers of the result, starting with those of clients' own models, if any."""
        numbers = {
            title: share(self.summary[key])
            for title, key in NUMBERS_OF_CLIENTS.items()
            if self.summary.get(key) is not None
        }
        if self.accuracy is not None or not numbers:
            numbers["accuracy"] = share(self.accuracy)
            numbers["forgetting"] = share(self.forgetting)
        for name, metric in METRICS.items():
            if self.summary.get(name) is not None:
                numbers[metric.title] = metric.text(self.summary[name])
        return numbers

    def _repr_html_(self) -> str:
        """The result as HTML for a notebook, with the forgetting of each class."""
        facts = {**self._numbers, "rounds": str(len(self.history)), "in": str(self.directory)}
        return notebook(self._title, facts, forgotten_table(self.classes, self.history))


NUMBERS_OF_CLIENTS = {
    "for the clients": "personal_accuracy",
    "forgetting at clients": "personal_forgetting",
}
"""The main numbers about clients' own models, and their keys in the summary."""


def _read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a finished run; raises CorruptFile if it is invalid."""
    path = folder / SUMMARY
    if not journals.is_finished(folder):
        raise CorruptFile(
            f"{folder} has no {SUMMARY}, so the run is not finished; continue with "
            f"`fedstill resume {in_shell(folder)}`, or use fedstill.load_runs"
        )
    try:
        summary = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(summary, dict) or not summary.keys() >= {"accuracy", "forgetting"}:
        raise _damaged(path, "it has no accuracy or no forgetting")
    return summary


def _read_model(folder: Path) -> dict[str, Tensor]:
    """Read the final model of a finished run; raises CorruptFile if the file has changed."""
    path = folder / FINAL
    try:
        return safetensors.torch.load(read_final(path))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, problem: object) -> CorruptFile:
    """The error for a damaged file of a finished run, with advice."""
    todo = f"delete summary.json, then `fedstill resume {in_shell(path.parent)}`"
    if not (path.parent / "checkpoints").is_dir():
        todo = "restore it from a copy: without checkpoints, it cannot be recreated"
    return CorruptFile(f"{path} is damaged: {problem}; {todo}")


# ---- the summary ---------------------------------------------------------------------------------


QUERIED = (*(f"query_{name}" for name in QUERY_MEASURES), UNTAUGHT)
"""Fields of the summary of a run with queries."""

PERSONAL = ("personal_accuracy", "personal_accuracy_std", "personal_forgetting", "personal_clients")
"""Fields of the summary of a run whose clients have their own models."""

OWN_TESTS = (
    "own_test_accuracy",
    "own_test_worst",
    "own_test_weighted",
    "own_test_by_client",
    *(f"own_test_{metric}" for metric in METRICS),
    *(f"own_test_{metric}_by_client" for metric in METRICS),
    "own_test_confusions",
)
"""Fields of the summary of a run whose clients have test sets of their own."""

LAST_ROUND_FIELDS = (
    *QUERIED,
    *PERSONAL,
    *OWN_TESTS,
    *RECORDED,
    "private_by_client",
    "public_by_client",
    "server_public_accuracy",
    "privacy",
)
"""Fields that a summary copies from the last round, if the round has them."""


def summary_from_journal(events: Sequence[Event]) -> dict[str, Any]:
    """The fields of a summary that are derived from a journal's events, without durations.

    They include the last accuracy, the best accuracy and the mean over the last ten rounds, because
    papers report any of these.
    """
    by_name = events_by_name(events)
    start = first_event(by_name, "start")
    rounds = by_name.get("round", [])
    numbers = RunNumbers.of([event for event in events if event["event"] != "client"])
    summary = numbers.summary
    last_round = rounds[-1]
    stop_reason = last_round.get(STOP_REASON, "")
    selection = selection_summary(start, numbers, stop_reason)

    if stop_reason:
        # Measures and tests are taken in the last planned round, which a run that stops early does
        # not reach.
        last_round = {**_latest(rounds, PERSONAL), **_latest(rounds, OWN_TESTS), **last_round}
    last_fields = {key: last_round[key] for key in LAST_ROUND_FIELDS if key in last_round}
    return {
        "accuracy": summary.get("accuracy"),
        "best_accuracy": summary.get("best_accuracy"),
        "mean_accuracy_last_10": summary.get("mean_accuracy_last_10"),
        "forgetting": summary.get("forgetting"),
        **last_fields,
        **numbers.best_metrics,
        **selection,
        "bytes_up": int(summary["bytes_up"]),
        "bytes_down": int(summary["bytes_down"]),
        **numbers.over_tasks,
    }


def _latest(rounds: Sequence[Event], fields: Sequence[str]) -> dict[str, Any]:
    """These fields of the latest round that has the first one; empty if no round has it."""
    for event in reversed(rounds):
        if fields[0] in event:
            return {key: event[key] for key in fields if key in event}
    return {}


def summary_of(settings: Settings, events: Sequence[Event]) -> dict[str, Any]:
    """The summary of a run."""
    by_name = events_by_name(events)
    rounds = by_name.get("round", [])

    journal_fields = summary_from_journal(events)
    numbers = RunNumbers(by_name)
    refusals = Refusals.of(numbers, settings.clients)
    return {
        "method": settings.named.method.label,
        "dataset": short_name(settings.data.name),
        "partition": settings.named.partition.label,
        "topology": settings.named.topology.label,
        "clients": settings.clients,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "answer": _answering(rounds[-1], journal_fields),
        **journal_fields,
        **_frequent_class(settings, events[0]),
        **refusals.summary,
        **_seconds(rounds),
        "seconds_measures": _seconds_of_measures(settings, numbers),
    }


def _seconds_of_measures(settings: Settings, numbers: RunNumbers) -> dict[str, float]:
    """The total seconds of each measure that took time."""
    names = [PurePath(name).name for name in settings.measure]
    seconds = numbers.seconds_by_measure(names)
    return {name: value for name, value in seconds.items() if value > 0}


def _answering(last_round: Event, journal_fields: Mapping[str, Any]) -> str:
    """The models that clients use: the server's, one of several server models, or their own."""
    if last_round.get("client_predictors"):
        return "server models"
    if "personal_clients" in journal_fields:
        return "clients"
    return "server"


def _seconds(rounds: Sequence[Event]) -> dict[str, float]:
    """The total seconds of all rounds; CPU seconds only if all rounds have them."""
    seconds = {key: sum(event[key] for event in rounds) for key in ("seconds", "seconds_training")}
    if all("seconds_cpu" in event for event in rounds):
        seconds["seconds_cpu"] = sum(event["seconds_cpu"] for event in rounds)
    return seconds


def _frequent_class(settings: Settings, start: Event) -> dict[str, Any]:
    """A warning if a class is so frequent in the test set that accuracy is hardly informative."""
    classes = start.get("classes", ())
    test_counts = start.get("test_counts", ())
    warning = frequent_class_warning(settings, classes, test_counts)
    if not warning:
        return {}
    return {"frequent_class": warning}


def write_result(folder: Path, state: State, summary: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` and then ``summary.json``, which contains the model's SHA-256. A
    run is finished once it has a summary.
    """
    params = {name: entry.detach().contiguous().clone() for name, entry in state.params.items()}
    data = safetensors.torch.save(params)
    write_whole(folder / FINAL, data)
    fields = {**summary, MODEL_SHA256: digest(data)}
    write_whole(folder / SUMMARY, json.dumps(json_value(fields), indent=2).encode())


# ---- refused replies, which a summary must mention -----------------------------------------------


@dataclass(frozen=True)
class Refusals:
    """The refused replies of a run.

    ``refused``, ``accepted``: the replies, in order. ``clients``: the number of clients.
    ``rounds``: the number of finished rounds.
    """

    refused: Sequence[ReplyOutcome]
    accepted: Sequence[ReplyOutcome]
    clients: int
    rounds: int

    @staticmethod
    def of(numbers: RunNumbers, clients: int) -> Refusals:
        """The refusals of a run with some clients, from its numbers."""
        replies = numbers.replies
        return Refusals(
            refused=[reply for reply in replies if reply.refused],
            accepted=[reply for reply in replies if not reply.refused],
            clients=clients,
            rounds=len(numbers.rounds),
        )

    @property
    def refused_clients(self) -> list[int]:
        """The clients with at least one refused reply."""
        return sorted({reply.client for reply in self.refused})

    @property
    def sentence(self) -> str:
        """A sentence about the refusals; empty if there are none.

        >>> refused = ReplyOutcome(round=1, stage="train", client=1, refused="failed: OSError")
        >>> Refusals([refused], [], clients=6, rounds=1).sentence
        '1 of 6 clients refused in every round, first: client 1 in round 1: failed: OSError'
        """
        if not self.refused:
            return ""
        rounds = {reply.round for reply in self.refused if reply.round > 0}
        clients = f"{len(self.refused_clients)} of {counted(self.clients, 'client')}"
        if self._refused_always(rounds):
            extent = f"{clients} refused whenever they took part"
            if len(rounds) == self.rounds:
                extent = f"{clients} refused in every round"
        else:
            received = counted(len(self.refused) + len(self.accepted), "reply", "replies")
            replies = f"{len(self.refused)} of {received}"
            run_rounds = counted(self.rounds, "round")
            extent = f"{replies} refused, of {clients}, in {len(rounds)} of {run_rounds}"
        return f"{extent}, first: {self._first}"

    @property
    def summary(self) -> dict[str, Any]:
        """Fields of the summary: the number of refused replies, and the clients and reasons."""
        summary: dict[str, Any] = {"refused": len(self.refused)}
        if self.refused:
            summary["refused_clients"] = self.refused_clients
            summary["refusals"] = self.sentence
        return summary

    @property
    def _first(self) -> str:
        """A description of the first refusal: client, round and reason."""
        reply = self.refused[0]
        client = f"client {reply.client}"
        if reply.client == SERVER:
            client = "the server"
        place = f"round {reply.round}"
        if reply.round == 0:
            place = f"the stage {reply.stage!r} before round 1"
        return f"{client} in {place}: {reply.refused}"

    def _refused_always(self, rounds: set[int]) -> bool:
        """Whether some replies were refused, and no reply of these clients was ever accepted."""
        accepted = {reply.client for reply in self.accepted if reply.round > 0}
        return bool(rounds) and accepted.isdisjoint(self.refused_clients)
