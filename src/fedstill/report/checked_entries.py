"""An entry checked and replayed, a line for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedstill.errors import CorruptFile
from fedstill.experiment.ranking.carried_out import Do
from fedstill.experiment.ranking.checking import Finding, checked_entry, suite_of
from fedstill.experiment.ranking.entries import read_entry, run_place
from fedstill.experiment.ranking.replaying import drawn_places, reached, replayed
from fedstill.experiment.running.provenance import processor
from fedstill.report.ranked import note_level


def check_one(
    place: Path, do: Do, replay: int = 0, rounds: int = 0, note: Path | None = None, number: int = 0
) -> Iterator[tuple[str, bool]]:
    """(what to print, whether it is good) for all that was checked of one entry.

    ``replay``: so many runs are done again, drawn by a ``number``.
    """
    yield f"{place}", True
    try:
        entry = read_entry(place)
    except CorruptFile as error:
        yield f"  REFUSED  {error}", False
        return
    lines = []
    for line in checked_entry(entry):
        lines.append(line)
        state, said = _said(line)
        yield f"  {state:8} {line.what}{f': {said}' if said else ''}", line.good
    if not replay or not all(line.good for line in lines):
        return
    if any(line.absent for line in lines):
        yield "  not replayed here: its data are missing", False
        return
    if entry.file:
        yield f"  executing {entry.folder / entry.file}, which came with the entry", True
    done, drawn = [], drawn_places(entry, suite_of(entry), replay, number)
    yield f"  runs drawn with --draw {number}: {', '.join(run_place(*one) for one in drawn)}", True
    for one in replayed(entry, drawn, do, rounds):
        done.append(one)
        yield (
            f"  {one.level:9} {one.place}{f': {one.beyond}' if one.beyond else ''}",
            one.level != "disagrees",
        )
    level = reached(done)
    if note is not None:
        note_level(note, entry, level, processor())
    yield f"  replayed here: {level}", level != "disagrees"


def _said(line: Finding) -> tuple[str, str]:
    if line.absent:
        return "not seen", line.absent
    return ("ok", "") if line.good else ("REFUSED", line.wrong)
