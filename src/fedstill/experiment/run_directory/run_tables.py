"""A run's numbers as files for other programs: one table of its rounds, one of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.errors import ConfigError
from fedstill.experiment.run_directory.evidence import readable
from fedstill.experiment.run_directory.frames import frame_of_clients, frame_of_events
from fedstill.experiment.run_directory.journal import read_journal
from fedstill.files import as_named, write_whole

if TYPE_CHECKING:
    import pandas


def run_frames(run: Path) -> dict[str, pandas.DataFrame]:
    """The tables ``rounds`` and ``clients`` of a run, finished or not, with the columns of ``Result``'s.

    Raises ConfigError without pandas, CorruptFile for a journal that is damaged or not there.
    """
    events = read_journal(readable(run) / "journal.jsonl")
    classes = [str(name) for event in events[:1] for name in event.get("classes", [])]
    rounds, clients = ([e for e in events if e["event"] == kind] for kind in ("round", "client"))
    return {"rounds": frame_of_events(rounds, classes), "clients": frame_of_clients(clients, classes)}


def write_run_tables(run: Path, kind: str, folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Write these tables to a folder as ``parquet`` or ``csv``, over older ones: (file, rows, columns) of each.

    Raises what ``run_frames`` raises, and ConfigError if the folder cannot be made.
    """
    frames = run_frames(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from as_named(error, folder)
    for name, frame in frames.items():
        path = folder / f"{name}.{kind}"
        write_whole(path, frame.to_parquet(index=False) if kind == "parquet" else frame.to_csv(index=False).encode())
        yield path, *frame.shape
