"""A run's numbers as tables: pandas frames of events, and files of rounds and clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import ConfigError
from fedstill.core.files import RUN_TABLE, as_named, refuse_other_kind, write_over
from fedstill.running.archive import readable
from fedstill.running.journal import Event, read_journal
from fedstill.running.same_run import check_journal

if TYPE_CHECKING:
    import pandas


# Events of a journal as a table of pandas: one row an event, one column a number, nested names
# joined by dots.


IDS = ("query", "teachers")
"""Fields that name classes or clients: one cell of text, ``7, 9``, whatever their number."""

BY_CLASS = frozenset(
    {
        "class_accuracy",
        "personal_class_accuracy",
        "label_counts",
        "correct_by_class",
        "correct_by_epoch",
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
"""Fields that hold a number for each class: their columns end with the names of the classes."""


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Rows as a data frame; what a row lacks is missing there. Raises ConfigError if pandas is not
    installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"a data frame needs pandas: pip install 'fedstill[pandas]' ({error})"
        ) from error
    columns = list(dict.fromkeys(k for row in rows for k in row))
    return pandas.DataFrame([dict(row) for row in rows], columns=columns)


def frame_of_events(events: Sequence[Event], classes: Sequence[str]) -> pandas.DataFrame:
    """Events of one kind, in their order. classes: their names, for what is measured of each
    class.
    """
    return data_frame(
        [dict(_flat("", {k: v for k, v in e.items() if k != "event"}, classes)) for e in events]
    )


def frame_of_clients(events: Sequence[Event], classes: Sequence[str]) -> pandas.DataFrame:
    """Events of clients: ``refused`` is empty for a reply that was accepted, ``idle`` says who had
    nothing to do.
    """
    whole = [{**e, "refused": e.get("refused", ""), "idle": e.get("idle", False)} for e in events]
    return frame_of_events(whole, classes)


def _flat(name: str, value: Any, classes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The cells of a value: (column, number, text or truth); None is not a number.

    >>> dict(_flat("", {"loss": {"ce": 0.5}, "label_counts": [1, 2]}, ["cat", "dog"]))
    {'loss.ce': 0.5, 'label_counts.cat': 1, 'label_counts.dog': 2}
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner, classes)
    elif isinstance(value, (list, tuple)):
        if name.rpartition(".")[2] in IDS:
            yield name, ", ".join(map(str, value))
            return
        for key, inner in zip(_keys(name, value, classes), value, strict=True):
            yield from _flat(f"{name}.{key}", inner, classes)
    else:
        yield name, math.nan if value is None else value


def _keys(name: str, values: Sequence[Any], classes: Sequence[str]) -> Sequence[Any]:
    """What the entries of a list are called: by their client, by their class, or else by their
    number.
    """
    if values and all(isinstance(v, Mapping) and "client" in v for v in values):
        return [v["client"] for v in values]
    nested = any(isinstance(v, (Mapping, list, tuple)) for v in values)
    by_class = (
        not nested and len(values) == len(classes) and not BY_CLASS.isdisjoint(name.split("."))
    )
    return classes if by_class else range(len(values))


# A run's numbers as files for other programs: one table of its rounds, one of its clients.


def run_frames(run: Path) -> dict[str, pandas.DataFrame]:
    """The tables ``rounds`` and ``clients`` of a run, finished or not, with the columns of
    ``Result``'s.

    Raises ConfigError without pandas, CorruptFile for a journal that is damaged or not there.
    """
    folder = readable(run)
    events = read_journal(folder / "journal.jsonl")
    check_journal(folder, events)
    classes = [str(name) for event in events[:1] for name in event.get("classes", [])]
    rounds, clients = ([e for e in events if e["event"] == kind] for kind in ("round", "client"))
    return {
        "rounds": frame_of_events(rounds, classes),
        "clients": frame_of_clients(clients, classes),
    }


def write_run_tables(run: Path, kind: str, folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Write these tables to a folder as ``parquet`` or ``csv``, over older ones: (file, rows,
    columns) of each.

    Raises what ``run_frames`` raises, and ConfigError if the folder cannot be made, or has other
    files of these names.
    """
    frames = run_frames(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from as_named(
            error, folder
        )
    paths = {name: folder / f"{name}.{kind}" for name in frames}
    for path in paths.values():
        refuse_other_kind(path, RUN_TABLE)
    for name, frame in frames.items():
        data = (
            frame.to_parquet(index=False)
            if kind == "parquet"
            else frame.to_csv(index=False).encode()
        )
        write_over(paths[name], data, RUN_TABLE)
        yield paths[name], *frame.shape
