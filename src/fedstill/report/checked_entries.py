"""The verdict on an entry: a line for each check and each replayed run, and what remains
unproven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedstill.errors import CorruptFile, DataAbsent
from fedstill.experiment.ranking.carried_out import Do
from fedstill.experiment.ranking.checking import checked_entry, suite_of
from fedstill.experiment.ranking.entries import Entered, read_entry, run_place
from fedstill.experiment.ranking.replaying import Replay, drawn_places, reached, replayed
from fedstill.experiment.ranking.suites import TEST_SEEDS
from fedstill.experiment.running.provenance import processor
from fedstill.report.ranked import note_level

MOST_PROBLEMS = 5
"""How many problems of a replayed run are printed."""


def check_one(
    place: Path, do: Do, replay: int = 0, rounds: int = 0, note: Path | None = None, number: int = 0
) -> Iterator[tuple[str, bool]]:
    """Lines to print, each with whether it is good, for everything that is checked of an entry.

    ``replay``: so many runs are replayed, drawn by a ``number``; ``rounds``: only the first so many
    rounds of each.
    ``note``: the folder in which the level of complete replays is written down.
    """
    yield f"{place}", True
    try:
        entry = read_entry(place)
    except CorruptFile as error:
        yield f"  REFUSED  {error}", False
        return
    for finding in checked_entry(entry):
        if finding.problem:
            yield f"  REFUSED  {finding.check}: {finding.problem}", False
            return
        yield f"  ok       {finding.check}", True
    if not replay:
        yield "  not replayed: an entry that was invented consistently passes up to here", True
        return
    if entry.file:
        yield f"  executing {entry.folder / entry.file}, which came with the entry", True
    drawn = drawn_places(entry, suite_of(entry), replay, number)
    yield f"  runs drawn with --draw {number}: {', '.join(run_place(*one) for one in drawn)}", True
    try:
        replays = list(replayed(entry, drawn, do, rounds))
    except DataAbsent as error:
        yield f"  not replayed here: its data are missing: {error}", False
        return
    for one in replays:
        yield f"  {one.level:9} {one.place}", one.level != "disagrees"
        for problem in one.problems[:MOST_PROBLEMS]:
            yield f"            {problem}", True
        if len(one.problems) > MOST_PROBLEMS:
            yield f"            and {len(one.problems) - MOST_PROBLEMS} more", True
    level = reached(replays)
    if note is not None and not rounds:
        note_level(note, entry, level, processor())
    yield f"  replayed here: {level}", level != "disagrees"
    for line in _unproven(entry, replays, rounds):
        yield f"  {line}", True


def _unproven(entry: Entered, replays: Sequence[Replay], rounds: int) -> Iterator[str]:
    """What a replay does not show."""
    level = reached(replays)
    if level == "disagrees":
        yield "REFUSED: its numbers do not come from this method in this suite"
        return
    if level != "bits":
        made = entry.made.get("processor", "an unknown processor")
        yield f"it says that it was made on {made}, and this is {processor()}, or versions differ:"
        yield "a replay on the same processor and versions would have to have the same bits"
    if rounds:
        yield f"later rounds than {rounds} were not replayed, and the level is not noted"
    runs = len(suite_of(entry).columns(entry.row)) * len(TEST_SEEDS)
    if len(replays) < runs:
        yield (
            f"{len(replays)} of {runs} runs replayed: nothing shows that the other "
            f"{runs - len(replays)} took place"
        )
    yield "not replayed at all: the scores of the tries, and CPU seconds"
