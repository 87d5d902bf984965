"""What a finished run leaves: its final model, a summary, and the Result that Python hands back."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import CorruptFile
from fedstill.core.files import digest, in_shell, named_path, write_whole
from fedstill.core.records import SERVER, State
from fedstill.core.registry import short_name
from fedstill.core.reports import json_value
from fedstill.metrics.classification import METRICS, RECORDED
from fedstill.metrics.forgetting import forgetting_by_class
from fedstill.metrics.queries import QUERY_MEASURES, UNTAUGHT
from fedstill.models.model_file import FINAL, MODEL_SEAL, read_final
from fedstill.running import journal as journals
from fedstill.running.cautions import frequent_class_warning
from fedstill.running.frame import frame_of_clients, frame_of_events
from fedstill.running.journal import Event
from fedstill.running.numbers import RunNumbers
from fedstill.running.same_run import check_journal
from fedstill.running.selection import STOP_REASON, selection_summary
from fedstill.running.split_file import read_label_counts

if TYPE_CHECKING:
    import pandas


# Which clients were left out of a run, how often, and why the first: what must not stand in the
# journal alone.


@dataclass(frozen=True)
class Refusals:
    """The replies of a run that were refused.

    ``refused``, ``accepted``: the events of clients whose reply was, in order. ``clients``: how
    many the run has.
    ``rounds``: how many rounds are done.
    """

    refused: Sequence[Mapping[str, Any]]
    accepted: Sequence[Mapping[str, Any]]
    clients: int
    rounds: int

    @staticmethod
    def of(events: Sequence[Mapping[str, Any]], clients: int, rounds: int) -> Refusals:
        """From a journal's events of clients."""
        refused = [e for e in events if "refused" in e]
        return Refusals(
            refused, [e for e in events if "refused" not in e and "idle" not in e], clients, rounds
        )

    @property
    def who(self) -> list[int]:
        """The clients that were refused at least once."""
        return sorted({e["client"] for e in self.refused})

    @property
    def said(self) -> str:
        """All of it in a sentence; empty where nothing was refused.

        >>> no = {"client": 1, "round": 1, "refused": "failed: OSError: gone"}
        >>> Refusals.of([no, {"client": 0, "round": 1}, {**no, "round": 2}], 6, 2).said
        '1 of 6 clients refused in every round, first: client 1 in round 1: failed: OSError: gone'
        >>> Refusals.of([no, {"client": 1, "round": 2}], 6, 2).said
        '1 of 2 replies refused, of 1 of 6 clients, in 1 of 2 rounds, first: client 1 in round 1: failed: OSError: gone'
        """  # noqa: E501
        if not self.refused:
            return ""
        first, rounds = self.refused[0], {e["round"] for e in self.refused if e["round"] > 0}
        who = f"{len(self.who)} of {self.clients} clients"
        if self._always(rounds):
            every = "in every round" if len(rounds) == self.rounds else "whenever they took part"
            how = f"{who} refused {every}"
        else:
            replies = f"{len(self.refused)} of {len(self.refused) + len(self.accepted)} replies"
            how = f"{replies} refused, of {who}, in {len(rounds)} of {self.rounds} rounds"
        name = "the server" if first["client"] == SERVER else f"client {first['client']}"
        when = (
            f"round {first['round']}"
            if first["round"]
            else f"the stage {first.get('name', 'census')!r} before round 1"
        )
        return f"{how}, first: {name} in {when}: {first['refused']}"

    @property
    def summary(self) -> dict[str, Any]:
        """The keys of a run's summary: how many replies, and of whom and why if there are any."""
        more = {"refused_clients": self.who, "refusals": self.said}
        return {"refused": len(self.refused), **(more if self.refused else {})}

    def _always(self, rounds: set[int]) -> bool:
        """Whether none of these clients ever gave a reply that was taken, in a run that has gone
        on.
        """
        return bool(rounds) and not {e["client"] for e in self.accepted if e["round"] > 0} & set(
            self.who
        )


# How results look in a notebook: a small table of HTML without scripts, readable on light and on
# dark pages.


MOST_CLASSES = 12
"""How many classes are shown: those that were forgotten most."""


@dataclass(frozen=True)
class Shade:
    """A cell of a table, and how strong its background is, from 0 to 1: red for a loss, green for a
    gain.
    """

    text: str
    loss: float = 0.0


def share(value: float | None) -> str:
    """A share in percent, with a dash for none."""
    return "–" if value is None or np.isnan(value) else f"{100 * value:.1f} %"


def shaded(loss: float) -> Shade:
    """A cell with what was lost of an accuracy."""
    return Shade(share(loss), 0.0 if np.isnan(loss) else loss)


def class_history(history: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    """Accuracies by class (rounds, C), from the events of all rounds: of the server's model, else
    of the clients' own.

    Of the latter, the mean over clients, in the rounds in which they were measured.
    """
    for key in ("class_accuracy", "personal_class_accuracy"):
        rows = [e[key] for e in history if any(v is not None for v in e.get(key) or ())]
        if rows:
            return rows
    return []


def lost_by_class(history: Sequence[Mapping[str, Any]]) -> list[float]:
    """What each class lost of its best earlier round, from the events of all rounds; NaN where it
    was not measured.
    """
    rows = [[np.nan if v is None else v for v in row] for row in class_history(history)]
    lost: list[float] = forgetting_by_class(rows).tolist() if rows else []
    return lost


def most_forgotten(lost: Sequence[float]) -> list[int]:
    """The classes to show, in their order: all if they are few, else those with the greatest
    loss.
    """
    order = sorted(
        range(len(lost)), key=lambda c: -np.inf if np.isnan(lost[c]) else lost[c], reverse=True
    )
    return sorted(order[:MOST_CLASSES])


def forgotten_table(classes: Sequence[str], history: Sequence[Mapping[str, Any]]) -> str:
    """For each class its last accuracy, its best earlier one, and what it lost; empty if that was
    not measured.
    """
    lost = lost_by_class(history)
    if np.isnan(lost).all() or len(lost) != len(classes):
        return ""
    last, chosen = class_history(history)[-1], most_forgotten(lost)
    rows: list[list[str | Shade]] = [
        [classes[c], share(last[c]), share(lost[c] + (last[c] or 0)), shaded(lost[c])]
        for c in chosen
    ]
    return notebook_table(
        ["class", "accuracy", "best earlier round", "forgotten"], rows, few(chosen, lost)
    )


def few(chosen: Sequence[int], classes: Sequence[object]) -> str:
    """Which classes are shown; empty if all are."""
    return (
        f"the {len(chosen)} of {len(classes)} classes that were forgotten most"
        if len(chosen) < len(classes)
        else ""
    )


def notebook(title: str, facts: Mapping[str, str], *tables: str) -> str:
    """A title, facts in one line, and tables."""
    line = " · ".join(f"{html.escape(k)} <b>{html.escape(v)}</b>" for k, v in facts.items())
    head = f'<div style="margin-bottom:0.4em"><b>{html.escape(title)}</b><br>{line}</div>'
    return f'<div style="font-variant-numeric:tabular-nums">{head}{"".join(tables)}</div>'


def notebook_table(
    head: Sequence[str], rows: Sequence[Sequence[str | Shade]], note: str = ""
) -> str:
    """A table whose first column holds text and the others numbers; below it, a note."""
    top = "".join(f'<th style="{_style(i)}">{html.escape(c)}</th>' for i, c in enumerate(head))
    body = "".join(f"<tr>{''.join(_cell(i, c) for i, c in enumerate(row))}</tr>" for row in rows)
    small = f'<div style="opacity:0.7;font-size:smaller">{html.escape(note)}</div>' if note else ""
    table = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return (
        '<table style="border-collapse:collapse;font-size:inherit;margin:0 0 0.4em '
        f'0">{table}</table>{small}'
    )


def _style(column: int) -> str:
    return f"padding:0.15em 0.6em;text-align:{'right' if column else 'left'}"


def _cell(column: int, cell: str | Shade) -> str:
    shade = cell if isinstance(cell, Shade) else Shade(cell)
    colour = "200,60,40" if shade.loss > 0 else "40,140,80"
    depth = min(0.6, abs(shade.loss))
    ground = f";background:rgba({colour},{depth:.2f})" if depth >= 0.005 else ""
    return f'<td style="{_style(column)};white-space:nowrap{ground}">{html.escape(shade.text)}</td>'


QUERIED = (*(f"query_{name}" for name in QUERY_MEASURES), UNTAUGHT)
"""What a summary says of a run whose clients asked for classes."""


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run. ``accuracy`` and ``forgetting`` are the last round's; ``history`` has one
    mapping a round.

    ``model``: the global model's parameters by name; ``fedstill.load_model`` makes a module of
    them. ``measures``: what the run's measures gave, one mapping a measure and stage, in
    order. ``classes``: their names.
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
        """The result of a finished run's directory; raises CorruptFile for a file that is damaged
        or gone.
        """
        folder = named_path(folder)
        path = folder / "summary.json"
        events = journals.read_journal(folder / "journal.jsonl")
        check_journal(folder, events)
        try:
            summary = json.loads(path.read_bytes())
            accuracy, forgetting = summary["accuracy"], summary["forgetting"]
            path = folder / FINAL
            model = safetensors.torch.load(read_final(path))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            todo = f"delete summary.json, then `fedstill resume {in_shell(folder)}`"
            if not (folder / "checkpoints").is_dir():
                todo = (
                    "put it back: there are no checkpoints to make it from (a pack keeps neither)"
                )
            raise CorruptFile(f"{path} is damaged: {error}; {todo}") from error
        history, measures = (
            [e for e in events if e["event"] == kind] for kind in ("round", "measure")
        )
        classes = tuple(str(c) for e in events[:1] for c in e.get("classes", []))
        return Result(accuracy, forgetting, history, model, folder, summary, measures, classes)

    def rounds(self) -> pandas.DataFrame:
        """One row a round: what ``history`` has, with a column for each number.

        Names inside names are joined by a dot, and a list over the classes has a column for each:
        ``class_accuracy.3``.
        """
        return frame_of_events(self.history, self.classes)

    def clients(self) -> pandas.DataFrame:
        """One row for each client and stage, from the journal: examples, bytes, losses, seconds,
        who was refused.

        Raises CorruptFile if the run's directory is gone.
        """
        events = journals.read_journal(self.directory / "journal.jsonl")
        return frame_of_clients([e for e in events if e["event"] == "client"], self.classes)

    def label_counts(self) -> NDArray[np.int64]:
        """How many training examples of each class each client has: (clients, C); (0, C) of real
        sites, which keep it.

        Raises CorruptFile if the run's directory is gone or its split is damaged.
        """
        start = journals.read_journal(self.directory / "journal.jsonl", 1)
        return read_label_counts(self.directory, start[0]).table().astype(np.int64)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{what} {value}" for what, value in self._numbers.items())
        rounds = f"{len(self.history)} round{'' if len(self.history) == 1 else 's'}"
        return f"<Result: {self._title}: {numbers}; {rounds}, in {self.directory}>"

    @property
    def _title(self) -> str:
        s = self.summary
        return (
            f"{s.get('method', 'a run')} on {s.get('dataset', 'data')}, seed {s.get('seed', '?')}"
        )

    @property
    def _numbers(self) -> dict[str, str]:
        """The result in a few numbers, those of the clients' own models first where they are the
        answer.
        """
        s = self.summary
        own = {
            "for the clients": "personal_accuracy",
            "forgetting at clients": "personal_forgetting",
        }
        numbers = {name: share(s[key]) for name, key in own.items() if s.get(key) is not None}
        if self.accuracy is not None or not numbers:
            numbers |= {"accuracy": share(self.accuracy), "forgetting": share(self.forgetting)}
        measured = [metric for name, metric in METRICS.items() if s.get(name) is not None]
        numbers |= {metric.title: metric.text(s[metric.name]) for metric in measured}
        return numbers

    def _repr_html_(self) -> str:
        """The result in a notebook, with what each class has lost."""
        facts = {**self._numbers, "rounds": str(len(self.history)), "in": str(self.directory)}
        return notebook(self._title, facts, forgotten_table(self.classes, self.history))


PERSONAL = ("personal_accuracy", "personal_accuracy_std", "personal_forgetting", "personal_clients")
"""What a summary says of a run whose clients have models of their own: the last round's."""

OF_LAST = (
    *PERSONAL,
    "own_test_accuracy",
    "own_test_worst",
    "own_test_by_client",
    *RECORDED,
    *(f"own_test_{metric}" for metric in METRICS),
    *(f"own_test_{metric}_by_client" for metric in METRICS),
    "own_test_confusions",
    "private_by_client",
    "public_by_client",
    "server_public_accuracy",
    "privacy",
)
"""What a summary has of the last round, where it is there."""


def summary_from_journal(events: Sequence[Event]) -> dict[str, Any]:
    """What a summary says that follows from a journal's events, apart from times.

    It has the last and the best accuracy and the mean of the last ten, as papers print any of them.
    """
    start = next((event for event in events if event["event"] == "start"), {})
    rounds = [event for event in events if event["event"] == "round"]
    numbers = RunNumbers.of([event for event in events if event["event"] != "client"])
    summary = numbers.summary
    last = rounds[-1]
    selection = selection_summary(start, rounds)
    if STOP_REASON in selection:
        # Measures look in the last round, and a run that stops early does not reach it.
        last = {**_last_personal(rounds), **last}
    return {
        "accuracy": summary.get("accuracy"),
        "best_accuracy": summary.get("best_accuracy"),
        "mean_accuracy_last_10": summary.get("mean_accuracy_last_10"),
        "forgetting": summary.get("forgetting"),
        **{key: last[key] for key in (*QUERIED, *OF_LAST) if key in last},
        **numbers.best_metrics,
        **selection,
        "bytes_up": int(summary["bytes_up"]),
        "bytes_down": int(summary["bytes_down"]),
        **numbers.over_tasks,
    }


def _last_personal(rounds: Sequence[Event]) -> dict[str, Any]:
    """What was last measured of the clients' own models; empty if they were not measured."""
    for event in reversed(rounds):
        if "personal_clients" in event:
            return {key: event[key] for key in PERSONAL}
    return {}


def summary_of(
    settings: Settings,
    events: Sequence[Event],
    measures: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The run in one mapping; ``measures``: the seconds of each measure in all rounds."""
    rounds = [event for event in events if event["event"] == "round"]
    clients = [event for event in events if event["event"] == "client"]

    of_journal = summary_from_journal(events)
    answer = "server"
    if rounds[-1].get("client_predictors"):
        answer = "server models"
    elif "personal_clients" in of_journal:
        answer = "clients"
    seconds = {key: sum(event[key] for event in rounds) for key in ("seconds", "seconds_training")}
    if all("seconds_cpu" in event for event in rounds):
        seconds["seconds_cpu"] = sum(event["seconds_cpu"] for event in rounds)

    return {
        "method": settings.named.method.label,
        "dataset": short_name(settings.data.name),
        "partition": settings.named.partition.label,
        "topology": settings.named.topology.label,
        "clients": settings.clients,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "answer": answer,
        **of_journal,
        **_frequent_class(settings, events[0]),
        **Refusals.of(clients, settings.clients, len(rounds)).summary,
        **seconds,
        "seconds_measures": dict(measures or {}),
    }


def _frequent_class(settings: Settings, start: Event) -> dict[str, Any]:
    """A warning where a class is so frequent in the test set that accuracy says little."""
    warning = frequent_class_warning(
        settings, start.get("classes", ()), start.get("test_counts", ())
    )
    return {"frequent_class": warning} if warning else {}


def write_result(folder: Path, state: State, summary: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` and then ``summary.json``, with its SHA-256; a run with that file
    is finished.
    """
    params = {k: v.detach().contiguous().clone() for k, v in state.params.items()}
    write_whole(folder / FINAL, data := safetensors.torch.save(params))
    sealed = {**summary, MODEL_SEAL: digest(data)}
    write_whole(folder / "summary.json", json.dumps(json_value(sealed), indent=2).encode())
