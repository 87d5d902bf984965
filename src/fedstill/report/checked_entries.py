"""An entry checked and replayed, a line for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedstill.errors import CorruptFile
from fedstill.experiment.ranking.carried_out import Do
from fedstill.experiment.ranking.checking import checked_entry, suite_of
from fedstill.experiment.ranking.entries import read_entry
from fedstill.experiment.ranking.replaying import drawn_places, reached, replayed
from fedstill.experiment.running.provenance import processor
from fedstill.report.ranked import note_level


def check_one(
    place: Path, do: Do, replay: int = 0, rounds: int = 0, note: Path | None = None
) -> Iterator[tuple[str, bool]]:
    """(what to print, whether it is good) for all that was checked of one entry; ``replay``: runs done again."""
    yield f"{place}", True
    try:
        entry = read_entry(place)
    except CorruptFile as error:
        yield f"  REFUSED  {error}", False
        return
    good = True
    for line in checked_entry(entry):
        good &= line.good
        said = f": {line.wrong}" if line.wrong else ""
        yield f"  {'ok      ' if line.good else 'REFUSED '} {line.what}{said}", line.good
    if not replay or not good:
        return
    if entry.file:
        yield f"  executing {entry.folder / entry.file}, which came with the entry", True
    done = []
    for one in replayed(entry, drawn_places(entry, suite_of(entry), replay), do, rounds):
        done.append(one)
        yield f"  {one.level:9} {one.place}{f': {one.beyond}' if one.beyond else ''}", one.level != "disagrees"
    level = reached(done)
    if note is not None:
        note_level(note, entry, level, processor())
    yield f"  replayed here: {level}", level != "disagrees"
