"""Runs of an entry, done again here, and how near they come: the same bits, or within what rounding does."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstill.experiment.comparing.variants import Variant
from fedstill.experiment.ranking.carried_out import Do, completed
from fedstill.experiment.ranking.checking import suite_of
from fedstill.experiment.ranking.entries import ENTRY, Entered, run_place
from fedstill.experiment.ranking.scoring import score_of
from fedstill.experiment.ranking.suites import TEST_SEEDS, Suite
from fedstill.experiment.run_directory.journal import Event, read_journal, without_times
from fedstill.files import digest
from fedstill.keys import numpy_generator, seed_for
from fedstill.records import SERVER

Level = Literal["bits", "tolerance", "disagrees"]

EARLY = 3
"""In so many rounds rounding has not grown yet: they are compared one by one."""

IMAGES, POINTS = 2, 0.005
"""By how many test images, or which share of them, whichever is more, the accuracy of an early round may differ."""

LOSS = (1e-3, 1e-2, 5e-2)
"""By how much a loss of rounds 1, 2 and 3 may differ: of itself, or as a number where it is below 1.

Measured on digits with other vector instructions (none, AVX2): 4e-5, 2e-3 and 7e-3; the difference grows tenfold with
each round, while no image's answer changed in three rounds.
"""

STEPS = 70
"""As many steps of one client after another, and no more, those bounds hold for; then a run is as another seed's is.

Measured on digits with AVX2: 71 steps a round (joint training) have losses 0.011 apart in round 2, accuracies up to
eleven images of 360 in round 3; 175 steps in round 1 at a high rate (FedMD's) 18 images, and losses 0.4 in round 2.
"""

STRAYS = 0.2
"""The share of a round's clients whose losses may be further apart all the same: what trains on few examples at a high
rate can be unstable, and then the last bit decides. From such a round on a run is as another seed's is.

Measured on digits on another processor (AVX2), five runs of twenty clients that train alone for 38 to 342 steps: one to
three a run have losses 0.004 to 0.6 apart, in three runs one of them after no more than 38; all others are within 5e-4.
"""

T_OF_FOUR = 2.7764451051977987
"""Student's t of 4 degrees of freedom for 95 of 100 cases: the spread of five seeds."""

T_OF_EIGHT = 2.306004135033371
"""Student's t of 8 degrees of freedom for 95 of 100 cases: two means of five seeds each."""

NOT_SAME = ("versions", "fedstill", "torch", "numpy", "python", "sources", "split", "examples_sha256")
"""What of the event ``start`` is not compared: the split's format may change, its draws are checked elsewhere; entries
of earlier versions say nothing of the examples, and where these are others no round has the same bits.
"""


@dataclass(frozen=True)
class Replayed:
    """One run done again: where it stands in the entry, the level that it reached, and what is beyond it."""

    place: str
    level: Level
    beyond: str = ""


def drawn_places(entry: Entered, suite: Suite, count: int) -> list[tuple[str, int]]:
    """Which runs are done again: (column, seed), drawn by the entry's own bytes, so that nobody can choose them."""
    every = [(column, seed) for column in suite.columns(entry.row) for seed in TEST_SEEDS]
    key = int(digest((entry.folder / ENTRY).read_bytes())[:12], 16)
    draw = numpy_generator(seed_for(key, 0, 0, 0, "replay"))
    return [every[i] for i in sorted(draw.permutation(len(every))[: min(count, len(every))])]


def replayed(
    entry: Entered,
    places: Sequence[tuple[str, int]],
    do: Do,
    rounds: int = 0,
) -> Iterator[Replayed]:
    """Do some runs again in a folder that is then deleted, and compare each with the entry's.

    A method's own file is executed here. ``rounds``: only so many of each, from the first; 0: all. Of a run that is
    done to the end and has other bits the score is compared too, of all seeds of a column their means. Raises
    Interrupted where a run was stopped, RunsFailed where one failed but did not diverge: half a run has no level.
    """
    with tempfile.TemporaryDirectory(prefix="fedstill-replay-") as folder:
        suite = suite_of(entry, _copied(entry, Path(folder)))
        size = _size(rounds, suite, entry.row)
        changes = {**dict(entry.fields), **size}
        runs = [suite.recipe.variants([(entry.row, c)], (s,), changes, Path(folder))[0] for c, s in places]
        completed(runs, do)
        for (column, seed), run in zip(places, runs, strict=True):
            one = compared(run_place(column, seed), entry.run(column, seed), run.folder)
            yield _like_a_seed(one, entry, (column, seed), run) if one.level == "tolerance" and not size else one
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
    """Fewer rounds, unless the row has a number of its own, or a stage after the last, or tasks share them."""
    own = suite.recipe.rows[row]
    tasks = any("stream" in suite.recipe.columns[column] for column in suite.columns(row))
    whole = not rounds or rounds >= suite.recipe.common["rounds"]
    return {} if whole or tasks or "rounds" in own or own.get("topology", {}).get("last") else {"rounds": rounds}


def compared(place: str, theirs: Path, ours: Path) -> Replayed:
    """One run beside another: as many rounds as both have."""
    here, there = (_rounds(folder) for folder in (ours, theirs))
    both = sorted(here.keys() & there.keys())
    if not both:
        return Replayed(place, "disagrees", "it has no round here")
    if all(here[r] == there[r] for r in both) and _start(ours) == _start(theirs):
        return Replayed(place, "bits")
    behind = 0.0
    for number in both[:EARLY]:
        why, strays = _apart(number, there[number], here[number], _images(theirs), behind)
        if why:
            return Replayed(place, "disagrees", why)
        behind += math.inf if strays else _steps(there[number])
    return Replayed(place, "tolerance")


def _steps(events: Sequence[Event]) -> float:
    """The mean number of steps that a client did in some events of a round."""
    done: dict[int, int] = {}
    for event in events:
        if event.get("steps"):
            done[event["client"]] = done.get(event["client"], 0) + event["steps"]
    return statistics.fmean(done.values()) if done else 0.0


def _led_to(events: Sequence[Event], at: int) -> float:
    """How many steps of one client after another led to an event, of its round: its own, and those of stages before."""
    one = events[at]
    before = [e for e in events[:at] if one["event"] == "round" or e.get("stage") != one.get("stage")]
    return float(one.get("steps") or 0) + _steps(before)


def _apart(
    number: int, theirs: Sequence[Event], ours: Sequence[Event], images: int, behind: float
) -> tuple[str, set[int]]:
    """What of a round is further apart than rounding makes it, with so many steps behind it; and whose losses are."""
    if len(theirs) != len(ours):
        return f"round {number} has {len(theirs)} events there, and {len(ours)} here", set()
    strays, clients = set[int](), {e["client"] for e in theirs if "client" in e}
    for at, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        who = f"client {one['client']} in round {number}" if "client" in one else f"round {number}"
        for key in ("client", "stage", "examples", "steps"):
            if one.get(key) != other.get(key):
                return f"{who} has {key} {one.get(key)} there, and {other.get(key)} here", strays
        if behind + _led_to(theirs, at) > STEPS:
            continue
        if beyond := _losses_apart(one, other, LOSS[min(number, len(LOSS)) - 1]):
            strays.add(one.get("client", SERVER))
            if len(strays) > STRAYS * len(clients):
                return f"the loss {beyond[0]} of {who} is {beyond[1]:.6g} there, and {beyond[2]} here", strays
        most = max(IMAGES / max(images, 1), POINTS)
        off = one["event"] == "round" and abs((one["accuracy"] or 0) - (other["accuracy"] or 0)) > most + 1e-12
        if off and not strays:
            return f"the accuracy of {who} is {one['accuracy']:.4f} there, and {other['accuracy']:.4f} here", strays
    return "", strays


def _losses_apart(one: Event, other: Event, within: float) -> tuple[str, float, float | None] | None:
    """A term of a client's loss that is further apart than that: its name, and both values."""
    for term, value in one.get("loss", {}).items():
        here = other.get("loss", {}).get(term)
        if not math.isclose(value, math.nan if here is None else here, rel_tol=within, abs_tol=within):
            return term, value, here
    return None


def _like_a_seed(one: Replayed, entry: Entered, at: tuple[str, int], run: Variant) -> Replayed:
    """The score of a whole run: from the entry's no further than two seeds are apart, this run and the other four."""
    column, seed = at
    ours, theirs = (score_of(f, run.settings.rounds).accuracy for f in (run.folder, entry.run(column, seed)))
    others = [score_of(entry.run(column, s), run.settings.rounds).accuracy for s in TEST_SEEDS if s != seed]
    limit = max(POINTS, T_OF_FOUR * math.sqrt(2 * statistics.variance([ours, *others])))
    said = f"the score of {one.place} is {theirs:.4f} there, and {ours:.4f} here: further apart than two seeds are"
    return one if abs(ours - theirs) <= limit else Replayed(one.place, "disagrees", said)


def _means(column: str, entry: Entered, runs: Sequence[Variant]) -> Replayed:
    """All seeds of a column: the means within what two times five seeds differ by."""
    asked = runs[0].settings.rounds
    ours = [score_of(run.folder, asked).accuracy for run in runs]
    theirs = [score_of(entry.run(column, seed), asked).accuracy for seed in TEST_SEEDS]
    limit = T_OF_EIGHT * math.sqrt((statistics.variance(ours) + statistics.variance(theirs)) / len(ours))
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    said = f"the means of five seeds differ by {100 * apart:.1f} points, and {100 * limit:.1f} are within chance"
    if ours == theirs:
        return Replayed(column, "bits")
    return Replayed(column, "tolerance" if apart <= limit else "disagrees", "" if apart <= limit else said)


def reached(runs: Sequence[Replayed]) -> Level:
    """The level of an entry: that of its worst run."""
    levels = {one.level for one in runs}
    return "disagrees" if "disagrees" in levels else "tolerance" if "tolerance" in levels else "bits"


def _rounds(folder: Path) -> dict[int, list[Event]]:
    """A journal's events by round, those of clients and rounds, without times."""
    events: dict[int, list[Event]] = {}
    done: set[int] = set()
    for event in read_journal(folder / "journal.jsonl"):
        if event["event"] in ("client", "round") and event["round"] > 0:
            events.setdefault(event["round"], []).append(without_times(event))
            done |= {event["round"]} if event["event"] == "round" else set()
    return {number: own for number, own in events.items() if number in done}


def _start(folder: Path) -> Event:
    start = read_journal(folder / "journal.jsonl", 1)[0]
    return {k: v for k, v in without_times(start).items() if k not in NOT_SAME}


def _images(folder: Path) -> int:
    counts = read_journal(folder / "journal.jsonl", 1)[0].get("test_counts", [])
    return int(sum(counts))
