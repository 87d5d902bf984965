"""A run's numbers as files for other programs: one table of its rounds, one of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.errors import ConfigError
from fedstill.experiment.run_directory.cut_short import refuse_cut
from fedstill.experiment.run_directory.evidence import readable
from fedstill.experiment.run_directory.frames import frame_of_clients, frame_of_events
from fedstill.experiment.run_directory.journal import read_journal
from fedstill.files import as_named
from fedstill.written_over import RUN_TABLE, refuse_other_kind, write_over

if TYPE_CHECKING:
    import pandas


def run_frames(run: Path) -> dict[str, pandas.DataFrame]:
    """The tables ``rounds`` and ``clients`` of a run, finished or not, with the columns of
    ``Result``'s.

    Raises ConfigError without pandas, CorruptFile for a journal that is damaged or not there.
    """
    folder = readable(run)
    events = read_journal(folder / "journal.jsonl")
    refuse_cut(folder, events)
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
