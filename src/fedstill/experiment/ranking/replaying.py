"""Runs of an entry, done again here, and how near they come."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedstill.experiment.comparing.variants import Variant
from fedstill.experiment.ranking.carried_out import Do, completed
from fedstill.experiment.ranking.checking import suite_of
from fedstill.experiment.ranking.entries import ENTRY, Entered, run_place
from fedstill.experiment.ranking.nearness import POINTS, Level, Replayed, compared
from fedstill.experiment.ranking.scoring import score_of
from fedstill.experiment.ranking.suites import TEST_SEEDS, Suite
from fedstill.files import digest
from fedstill.keys import numpy_generator, seed_for

T_OF_THREE = 3.182446305284263
"""Student's t of 3 degrees of freedom for 95 of 100 cases: the spread of four seeds."""

T_OF_EIGHT = 2.306004135033371
"""Student's t of 8 degrees of freedom for 95 of 100 cases: two means of five seeds each."""


def drawn_places(
    entry: Entered, suite: Suite, count: int, number: int = 0
) -> list[tuple[str, int]]:
    """Which runs are done again: (column, seed), drawn by the entry's own bytes and a number of
    whoever checks it.

    Who makes an entry could try changes to it until other runs are drawn, if the number were known.
    """
    every = [(column, seed) for column in suite.columns(entry.row) for seed in TEST_SEEDS]
    key = int(digest((entry.folder / ENTRY).read_bytes())[:12], 16)
    draw = numpy_generator(seed_for(key, number, 0, 0, "replay"))
    return [every[i] for i in sorted(draw.permutation(len(every))[: min(count, len(every))])]


def replayed(
    entry: Entered,
    places: Sequence[tuple[str, int]],
    do: Do,
    rounds: int = 0,
) -> Iterator[Replayed]:
    """Do some runs again in a folder that is then deleted, and compare each with the entry's.

    A method's own file is executed here. ``rounds``: only so many of each, from the first; 0: all.
    Of a run that is done to the end and has other bits the score is compared too, of all seeds of a
    column their means. Raises Interrupted where a run was stopped, RunsFailed where one failed but
    did not diverge: half a run has no level.
    """
    with tempfile.TemporaryDirectory(prefix="fedstill-replay-") as folder:
        suite = suite_of(entry, _copied(entry, Path(folder)))
        size = _size(rounds, suite, entry.row)
        changes = {**dict(entry.fields), **size}
        runs = [
            suite.recipe.variants([(entry.row, c)], (s,), changes, Path(folder))[0]
            for c, s in places
        ]
        completed(runs, do)
        for (column, seed), run in zip(places, runs, strict=True):
            one = compared(
                run_place(column, seed), entry.run(column, seed), run.folder, whole=not size
            )
            yield (
                _like_a_seed(one, entry, (column, seed), run)
                if one.level == "tolerance" and not size
                else one
            )
        for column in dict.fromkeys(c for c, _ in places):
            own = [run for (c, _), run in zip(places, runs, strict=True) if c == column]
            if not size and len(own) == len(TEST_SEEDS):
                yield _means(column, entry, own)


def _copied(entry: Entered, folder: Path) -> Path | None:
    """The method's own file, where it may be executed without a trace in the entry."""
    if not entry.file:
        return None
    return Path(shutil.copy(entry.folder / entry.file, folder / entry.file))


def _size(rounds: int, suite: Suite, row: str) -> dict[str, Any]:
    """Fewer rounds, unless the row has a number of its own, or a stage after the last, or tasks
    share them.
    """
    own = suite.recipe.rows[row]
    tasks = any("stream" in suite.recipe.columns[column] for column in suite.columns(row))
    whole = not rounds or rounds >= suite.recipe.common["rounds"]
    return (
        {}
        if whole or tasks or "rounds" in own or own.get("topology", {}).get("last")
        else {"rounds": rounds}
    )


def _like_a_seed(one: Replayed, entry: Entered, at: tuple[str, int], run: Variant) -> Replayed:
    """The score of a whole run: no further from the entry's than two of its other four seeds
    are.
    """
    column, seed = at
    asked = run.settings.rounds
    ours, theirs = (
        score_of(folder, asked).accuracy for folder in (run.folder, entry.run(column, seed))
    )
    others = [score_of(entry.run(column, s), asked).accuracy for s in TEST_SEEDS if s != seed]
    limit = max(POINTS, T_OF_THREE * math.sqrt(2 * statistics.variance(others)))
    said = (
        f"the score of {one.place} is {theirs:.4f} there, and {ours:.4f} here: further apart than "
        "two seeds are"
    )
    return one if abs(ours - theirs) <= limit else Replayed(one.place, "disagrees", said)


def _means(column: str, entry: Entered, runs: Sequence[Variant]) -> Replayed:
    """All seeds of a column: the means within what two times five seeds differ by."""
    asked = runs[0].settings.rounds
    ours = [score_of(run.folder, asked).accuracy for run in runs]
    theirs = [score_of(entry.run(column, seed), asked).accuracy for seed in TEST_SEEDS]
    limit = T_OF_EIGHT * math.sqrt(
        (statistics.variance(ours) + statistics.variance(theirs)) / len(ours)
    )
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    said = (
        f"the means of five seeds differ by {100 * apart:.1f} points, and {100 * limit:.1f} are "
        "within chance"
    )
    if ours == theirs:
        return Replayed(column, "bits")
    return Replayed(
        column, "tolerance" if apart <= limit else "disagrees", "" if apart <= limit else said
    )


def reached(runs: Sequence[Replayed]) -> Level:
    """The level of an entry: that of its worst run."""
    levels = {one.level for one in runs}
    return (
        "disagrees" if "disagrees" in levels else "tolerance" if "tolerance" in levels else "bits"
    )
