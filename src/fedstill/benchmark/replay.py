"""Runs of an entry, repeated here, and how close their journals are."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstill.benchmark.checking import suite_of
from fedstill.benchmark.entries import CPU, ENTRY, Entered, run_place
from fedstill.benchmark.scoring import Do, completed, matrix_of, score_of
from fedstill.benchmark.suites import TEST_SEEDS, Suite
from fedstill.config.experiment import from_tree
from fedstill.core.files import digest
from fedstill.core.keys import numpy_generator, seed_for
from fedstill.running.journal import VERSIONS, Event, read_journal, without_times
from fedstill.running.preparation import read_data
from fedstill.running.provenance import processor, software
from fedstill.running.variants import Variant, seeded

Level = Literal["bits", "tolerance", "outliers", "disagrees"]
LEVELS: tuple[Level, ...] = ("bits", "tolerance", "outliers", "disagrees")
"""From best to worst. ``outliers``: single numbers are beyond their tolerances, and the score is
not.
"""

NUDGES = ((1, -1, 2, -2), (0.5, -0.5, 1.5, -1.5, 0.75, -0.75, 1.25, -1.25))
"""The changes of the repetitions' learning rates, in units of ``NUDGE``; the second ones only
confirm a rejection.
"""

NUDGE = 2.0**-20
"""About a millionth: what a few additions of 32-bit numbers in another order change."""

IMAGES, POINTS = 2, 0.005
"""The least tolerance of an accuracy: two test images or half a point, whichever is more."""

LOSS = 1e-4
"""The least tolerance of a loss, relative to it where it is above 1; vector instructions make up to
4e-5 in round 1.
"""

AHEAD = 2
"""Rounding takes off in one run earlier than in another: a round has the tolerance of so many
rounds later.
"""

OUTLIERS, FAILED = 0.2, 0.05
"""The share of a round's numbers of one kind that may be outliers, and the share of rounds in which
more may be.

With other vector instructions, 3 of 20 clients that train alone on few examples at a high rate
ended at other losses.
"""

NOT_COMPARED = (*VERSIONS, "sources", "examples_sha256")
"""Fields of the event ``start`` that say with what a run was made; earlier versions do not name the
examples.
"""


@dataclass(frozen=True)
class Replay:
    """The comparison of one run of an entry with its replay: its place, its level, and the numbers
    that lower it.
    """

    place: str
    level: Level
    problems: tuple[str, ...] = ()


def drawn_places(
    entry: Entered, suite: Suite, count: int, number: int = 0
) -> list[tuple[str, int]]:
    """The runs to replay, (column, seed), drawn by the entry's own bytes and a number of the person
    who checks it.

    If authors knew the number, they could change an entry until it draws an honest run.
    """
    runs = [(column, seed) for column in suite.columns(entry.row) for seed in TEST_SEEDS]
    key = int(digest((entry.folder / ENTRY).read_bytes())[:12], 16)
    draw = numpy_generator(seed_for(key, number, 0, 0, "replay"))
    return [runs[i] for i in sorted(draw.permutation(len(runs))[: min(count, len(runs))])]


def made_here(entry: Entered) -> bool:
    """Whether an entry names this machine's processor and versions: then only identical bits
    pass.
    """
    made = {key: value for key, value in entry.made.items() if key != CPU}
    return made == {**software(), "processor": processor(), "threads": 1}


def replayed(
    entry: Entered, places: Sequence[tuple[str, int]], do: Do, rounds: int = 0
) -> Iterator[Replay]:
    """Replay runs in a folder that is then deleted, and compare each with the entry's. A method's
    file is executed.

    ``rounds``: only the first so many of each; 0: all, and the score too. Raises DataAbsent,
    Interrupted where a run was stopped, and RunsFailed where one failed but did not diverge.
    """
    with tempfile.TemporaryDirectory(prefix="fedstill-replay-") as name:
        folder = Path(name)
        file = Path(shutil.copy(entry.folder / entry.file, folder)) if entry.file else None
        suite = suite_of(entry, file)
        shortened = _first_rounds(rounds, suite, entry.row)
        changes = {**entry.fields, **shortened}
        runs = [
            suite.recipe.variants([(entry.row, c)], (seed,), changes, folder)[0]
            for c, seed in places
        ]
        for run in runs:
            read_data(run.settings)
        completed(runs, do)
        for place, run in zip(places, runs, strict=True):
            yield _verdict(entry, run_place(*place), run, do, not shortened)


def _verdict(entry: Entered, place: str, run: Variant, do: Do, complete: bool) -> Replay:
    """The level of a replayed run; on another processor, repetitions of it give the tolerances."""
    if _same_bits(entry.folder / place, run.folder, complete):
        return Replay(place, "bits")
    verdict = Replay(
        place,
        "disagrees",
        ("it names this processor and these versions, and has not the same bits",),
    )
    if made_here(entry):
        return verdict
    runs = [run]
    for steps in NUDGES:
        repeated = [_nudged(run, step) for step in steps]
        completed(repeated, do)
        runs += repeated
        verdict = _compared(entry, place, runs, complete)
        if verdict.level != "disagrees":
            break
    return verdict


def _first_rounds(rounds: int, suite: Suite, row: str) -> dict[str, Any]:
    """Fewer rounds, unless the row has a number of its own, or a stage after the last, or tasks
    share them.
    """
    settings = suite.recipe.rows[row]
    tasks = any("stream" in suite.recipe.columns[column] for column in suite.columns(row))
    if not rounds or rounds >= suite.recipe.common["rounds"] or tasks:
        return {}
    if "rounds" in settings or settings.get("topology", {}).get("last"):
        return {}
    return {"rounds": rounds}


def _nudged(run: Variant, step: float) -> Variant:
    """The same run with all learning rates changed by a rounding error."""
    tree = tomllib.loads(run.settings.toml)
    rates = {f"plan.{stage}.lr": plan["lr"] for stage, plan in tree["plan"].items() if "lr" in plan}
    nudged = {key: rate * (1 + step * NUDGE) for key, rate in rates.items()}
    experiment = from_tree(tree, {}, None).with_values(nudged, "replay")
    return seeded(run.label, experiment, run.seed, run.folder.parent / f"nudged {step}")


def _same_bits(entered: Path, replay: Path, complete: bool) -> bool:
    """Whether all events are identical except for times, in the same order: a score depends on
    it.
    """
    events, replayed_events = _events(entered), _events(replay)
    if not complete:
        last = max(_round(event) for event in replayed_events)
        events = [event for event in events if _round(event) <= last]
    return events == replayed_events and _start(entered) == _start(replay)


def _events(folder: Path) -> list[Event]:
    return [without_times(event) for event in read_journal(folder / "journal.jsonl")[1:]]


def _round(event: Event) -> int:
    return int(event.get("round", 0))


def _completed_rounds(folder: Path) -> dict[int, list[Event]]:
    """The events of each round that was completed; 0 is before round 1."""
    rounds: dict[int, list[Event]] = {0: []}
    for event in _events(folder):
        rounds.setdefault(_round(event), []).append(event)
    ends = ("initial", "round")
    return {
        n: events for n, events in rounds.items() if any(event["event"] in ends for event in events)
    }


def _start(folder: Path) -> Event:
    start = read_journal(folder / "journal.jsonl", 1)[0]
    return {key: value for key, value in without_times(start).items() if key not in NOT_COMPARED}


def _compared(entry: Entered, place: str, runs: Sequence[Variant], complete: bool) -> Replay:
    entered, folders = entry.folder / place, [run.folder for run in runs]
    if _start(entered) != _start(folders[0]):
        return Replay(
            place, "disagrees", ("its start (classes, test labels, split or tasks) is another",)
        )
    comparison = _Comparison(_start(entered)["test_counts"])
    journals = [_completed_rounds(folder) for folder in (entered, *folders)]
    for number in sorted(set.intersection(*map(set, journals))):
        comparison.add(
            f"round {number}", journals[0][number], [journal[number] for journal in journals[1:]]
        )
    outliers = comparison.outliers()
    rejected = comparison.rejected
    if complete:
        rejected = [*_differing_scores([entered, *folders], runs[0].settings.rounds), *rejected]
    if rejected:
        return Replay(place, "disagrees", tuple(rejected))
    return Replay(place, "outliers" if outliers else "tolerance", tuple(outliers))


@dataclass(frozen=True)
class _Numbers:
    """The numbers of one kind in a round: the width of the replays' range, and how far outside it
    each number is.
    """

    width: float
    outside: np.ndarray
    least: float
    lines: Sequence[str]


class _Comparison:
    """An entry's numbers beside those of replays, by kind: an event and its field, such as a
    client's loss.
    """

    def __init__(self, test_counts: Sequence[int]) -> None:
        self.test_counts = test_counts
        self.numbers: dict[tuple[str, str], list[_Numbers]] = {}
        self.rejected: list[str] = []

    def add(self, where: str, entered: Sequence[Event], replays: Sequence[Sequence[Event]]) -> None:
        """Take in all values of a round; the order of events, their fields and all texts must be
        those of a replay.
        """
        values = dict(_leaves(entered))
        versions = [dict(_leaves(events)) for events in replays]
        versions = [version for version in versions if version.keys() == values.keys()]
        if not versions:
            self.rejected.append(f"{where}: it has other events or fields than the replays")
            return
        kinds: dict[tuple[str, str], list[Any]] = {}
        for path, value in values.items():
            others = [version[path] for version in versions]
            if all(type(number) in (int, float) for number in (value, *others)):
                kinds.setdefault((entered[path[0]]["event"], path[1]), []).append(path)
            elif value not in others:
                self.rejected.append(_line(where, entered, path, value, others))
        for kind, paths in kinds.items():
            ranges = np.array([[version[path] for path in paths] for version in versions], float)
            low, high = ranges.min(0), ranges.max(0)
            scale = np.ones(len(paths))
            if kind[1] == "loss":
                scale = np.maximum(1, abs(ranges).max(0))
            entry = np.array([values[path] for path in paths], float)
            numbers = _Numbers(
                width=float(((high - low) / scale).max()),
                outside=np.maximum(low - entry, entry - high) / scale,
                least=self._least(kind, versions[0][paths[0]]),
                lines=[
                    _line(where, entered, p, values[p], [v[p] for v in versions]) for p in paths
                ],
            )
            self.numbers.setdefault(kind, []).append(numbers)

    def _least(self, kind: tuple[str, str], value: float) -> float:
        """The least tolerance of a kind of number; counts have none, but those of right answers."""
        _, name = kind
        if name == "loss":
            return LOSS
        if name in ("correct", "correct_by_class"):
            return IMAGES
        if isinstance(value, int):
            return 0.0
        if name == "accuracy":
            return max(POINTS, IMAGES / sum(self.test_counts))
        return max(POINTS, IMAGES / min(count for count in self.test_counts if count))

    def outliers(self) -> list[str]:
        """Numbers beyond their tolerances; kinds with more of them than rounding makes are added to
        ``rejected``.
        """
        outliers: list[str] = []
        for rounds in self.numbers.values():
            exact = rounds[0].least == 0
            failed = 0
            lines: list[str] = []
            for index, numbers in enumerate(rounds):
                tolerance = max(numbers.least, *(one.width for one in rounds[: index + AHEAD + 1]))
                beyond = [
                    line
                    for line, gap in zip(numbers.lines, numbers.outside, strict=True)
                    if gap > tolerance
                ]
                failed += len(beyond) > OUTLIERS * len(numbers.lines)
                lines += beyond
            if failed > FAILED * len(rounds) or (exact and lines):
                self.rejected += lines
            else:
                outliers += lines
        return outliers


def _differing_scores(folders: Sequence[Path], rounds: int) -> Iterator[str]:
    """The numbers that the ranking shows, of the entry's run (the first folder), that the replays'
    do not confirm.

    The final accuracy is a mean of five rounds, or a task's end: five replays show their width, and
    all those before.
    """
    matrices = [matrix_of(read_journal(folder / "journal.jsonl"), rounds) for folder in folders]
    means = np.array([np.nanmean(matrix, axis=1) for matrix in matrices[1:]])
    swing = float(np.ptp(means, axis=0).max())
    entry, *replays = (score_of(folder, rounds).table for folder in folders)
    for name, value in entry.items():
        others = [score[name] for score in replays]
        if name == CPU or value in others or np.isnan([value, *others]).all():
            continue
        width = max(others) - min(others)
        tolerance = width if isinstance(others[0], int) else max(POINTS, width, swing)
        if not max(min(others) - value, value - max(others)) <= tolerance:
            yield (
                f"the score: {name} is {value:.6g}, and in the replays {min(others):.6g} to "
                f"{max(others):.6g}"
            )


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values within tables and lists, each with the keys and indices that lead to it; NaN is
    None.
    """
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, (*path, key))
    else:
        yield path, None if value != value else value


def _line(
    where: str, events: Sequence[Event], path: tuple[Any, ...], value: Any, others: Sequence[Any]
) -> str:
    event = events[path[0]]
    found = f"{others[0]!r}"
    if all(type(number) in (int, float) for number in others):
        found = f"{min(others):.6g} to {max(others):.6g}"
    client = f", client {event['client']}" if "client" in event else ""
    return (
        f"{where}{client}: {'.'.join(map(str, path[1:]))} is {value!r}, and in the replays {found}"
    )


def reached(replays: Sequence[Replay]) -> Level:
    """The level of an entry: that of its worst run."""
    return max((replay.level for replay in replays), key=LEVELS.index)
