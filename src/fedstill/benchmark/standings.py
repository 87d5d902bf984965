"""The standings of a suite: ranks, differences, costs, and how far the tiers agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from fedstill.benchmark.entries import Entered, rounds_of, run_place
from fedstill.benchmark.scoring import Score, events_of, score_of, task_rows
from fedstill.benchmark.suites import TEST_SEEDS, TIERS, TRACKS, Suite
from fedstill.metrics import ranks as over
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.metrics.values import Values
from fedstill.report.summary import NONE
from fedstill.running.runs import Spread, spread

# The standings of a suite: from the entries' runs to ranks, differences, shares of the gap and what
# they cost.


NOT_REPLAYED = "not replayed"

DIGITS = 5
"""Of accuracies on tasks, which pictures show; of all other numbers all digits are kept."""


@dataclass(frozen=True)
class RankedRow:
    """One row's runs: a score for each (column, seed).

    ``fields``: what was chosen over the suite's settings, of ``tries``
    configurations. ``diverged``: why, by run.
    ``tasks``: by run, the accuracy on each task at each task's end (T, T), where there are tasks.
    ``status``: how near a replay came. ``processor``: what the runs were made on.
    """

    name: str
    scores: Mapping[tuple[str, int], Score]
    fields: Mapping[str, Any] = field(default_factory=dict)
    tries: int = 0
    diverged: Mapping[tuple[str, int], str] = field(default_factory=dict)
    status: str = NOT_REPLAYED
    tasks: Mapping[tuple[str, int], Sequence[Sequence[float]]] = field(default_factory=dict)
    processor: str = ""

    def column(self, column: str, number: str = "accuracy") -> dict[int, float]:
        """A number by seed."""
        return {
            seed: getattr(score, number) for (c, seed), score in self.scores.items() if c == column
        }

    def mean(self, number: str, columns: Sequence[str]) -> float:
        """The mean over columns and seeds; NaN where nothing has it."""
        values = [v for c in columns for v in self.column(c, number).values() if not math.isnan(v)]
        return float(np.mean(values)) if values else float("nan")

    def kept(self, columns: Sequence[str]) -> float:
        """Mean accuracy over mean learned, so that the two multiply to the accuracy shown; NaN if a
        run has no kept.
        """
        if any(math.isnan(v) for c in columns for v in self.column(c, "kept").values()):
            return float("nan")
        learned = self.mean("learned", columns)
        return self.mean("accuracy", columns) / learned if learned else 0.0


@dataclass(frozen=True)
class Placed:
    """A row's place: numbers over all columns. Intervals are those of ``metrics.ranks.interval``,
    95 of 100.

    ``apart``: the mean difference to the row that differences are to, with its interval and Holm's
    p; None for that row itself. ``share``: of the gap between floor and ceiling, the mean over
    columns that have both. ``cpu``: over FedAvg's; NaN where that was made on another processor.
    """

    row: RankedRow
    place: int
    rank: float
    rank_ends: tuple[float, float]
    accuracy: float
    learned: float
    kept: float
    apart: Difference | None
    p_holm: float
    share: float
    wins: float
    cpu: float
    sent: float


@dataclass(frozen=True)
class Standings:
    """One suite's rows, the best mean rank first; ``bounds``: rows that are not ranked, the
    ceilings.

    ``bars``: groups of rows of which no two can be told apart by rank. ``beats``: the share of
    blocks that a row wins against another.
    """

    suite: Suite
    rows: Sequence[RankedRow]
    placed: Sequence[Placed] = ()
    bounds: Sequence[RankedRow] = ()
    bars: Sequence[Sequence[str]] = ()
    beats: Mapping[tuple[str, str], float] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def columns(self) -> list[str]:
        """The suite's columns."""
        return list(self.suite.recipe.columns)

    @property
    def blocks(self) -> int:
        """Columns times seeds."""
        return len(self.columns) * len(TEST_SEEDS)

    @property
    def processors(self) -> dict[str, list[str]]:
        """The rows that were made on each processor; the one with the most rows comes first."""
        of = {
            row.processor: [r.name for r in self.rows if r.processor == row.processor]
            for row in self.rows
        }
        return dict(sorted(of.items(), key=lambda each: -len(each[1])))

    def cell(self, row: RankedRow, column: str, number: str = "accuracy") -> Spread | None:
        """Mean and sample standard deviation over seeds of a cell."""
        return spread([v for v in row.column(column, number).values() if not math.isnan(v)])

    def difference(self, row: RankedRow, column: str) -> Difference | None:
        """How far a cell is from the one that differences are to, paired by seed, with Student's
        interval.
        """
        base = next((r for r in self.rows if r.name == self.suite.against), None)
        return (
            None
            if base is None or row is base
            else paired_difference(row.column(column), base.column(column))
        )

    def ceiling(self, column: str) -> RankedRow | None:
        """The row at share 1 of a column; None where there is none."""
        return next(
            (r for r in self.bounds if r.name in self.suite.ceilings and r.column(column)), None
        )


def row_of(entry: Entered, suite: Suite, status: str = NOT_REPLAYED) -> RankedRow:
    """The scores of an entry's runs; the suite has its row."""
    places = [(c, s) for c in suite.columns(entry.row) for s in TEST_SEEDS]
    scores = {(c, s): score_of(entry.run(c, s), rounds_of(entry.run(c, s))) for c, s in places}
    diverged = {
        (c, s): entry.diverged[run_place(c, s)]
        for c, s in scores
        if run_place(c, s) in entry.diverged
    }
    ends = {(c, s): task_rows(events_of(entry.run(c, s) / "journal.jsonl")) for c, s in scores}
    tasks = {
        run: [[round(v, DIGITS) for v in row] for row in own] for run, own in ends.items() if own
    }
    made_on = str(entry.made.get("processor", ""))
    return RankedRow(
        entry.row, scores, entry.fields, len(entry.tries), diverged, status, tasks, made_on
    )


def standings(suite: Suite, rows: Sequence[RankedRow]) -> Standings:
    """Who is where in a suite, from rows that have all of its columns."""
    ranked = [row for row in rows if row.name in suite.tries or row.name not in suite.recipe.rows]
    bounds = [row for row in rows if row not in ranked]
    missing = [name for name in suite.recipe.rows if name not in {row.name for row in rows}]
    bare = Standings(suite, rows, (), bounds, (), {}, missing)
    if not ranked:
        return bare
    scores = np.array(
        [[[row.scores[c, s].accuracy for s in TEST_SEEDS] for c in bare.columns] for row in ranked]
    )
    placed = _places(bare, ranked, scores)
    names, order = [row.name for row in ranked], {p.row.name: p.rank for p in placed}
    groups = [[names[i] for i in group] for group in over.bars(over.told_apart(over.ranks(scores)))]
    by_order = [sorted(group, key=lambda n: order[n]) for group in groups]
    bars = sorted(by_order, key=lambda group: (order[group[0]], order[group[-1]]))
    both = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j]
    beats = {(names[i], names[j]): over.win_rate(scores[i], scores[j]) for i, j in both}
    return Standings(suite, rows, placed, bounds, bars, beats, missing)


def _places(bare: Standings, ranked: Sequence[RankedRow], scores: Values) -> list[Placed]:
    base = next((i for i, row in enumerate(ranked) if row.name == bare.suite.against), None)
    apart = [
        None if base is None or i == base else _apart(own - scores[base])
        for i, own in enumerate(scores)
    ]
    adjusted = iter(over.holm([a.p for a in apart if a]))
    by_rank = over.ranks(scores)
    means, columns = by_rank.mean(axis=(1, 2)), bare.columns
    order = sorted(range(len(ranked)), key=lambda i: (means[i], ranked[i].name))
    floor = next(
        (row for row in ranked if row.name == "FedAvg"), None if base is None else ranked[base]
    )
    holm = [next(adjusted) if a else math.nan for a in apart]
    wins = [
        [over.win_rate(own, other) for j, other in enumerate(scores) if j != i]
        for i, own in enumerate(scores)
    ]
    return [
        Placed(
            ranked[i],
            place + 1,
            float(means[i]),
            over.interval(by_rank[i]),
            float(scores[i].mean()),
            ranked[i].mean("learned", columns),
            ranked[i].kept(columns),
            apart[i],
            holm[i],
            _share(bare, ranked, i),
            float(np.mean(wins[i])) if wins[i] else math.nan,
            _cpu(ranked[i], floor, columns),
            ranked[i].mean("sent", columns),
        )
        for place, i in enumerate(order)
    ]


def _cpu(row: RankedRow, floor: RankedRow | None, columns: Sequence[str]) -> float:
    """CPU seconds over the floor's; NaN without one, and where it was made on another processor."""
    if (
        floor is None
        or floor.processor != row.processor
        or not (least := floor.mean("seconds_cpu", columns))
    ):
        return math.nan
    return row.mean("seconds_cpu", columns) / least


def _apart(differences: Values) -> Difference:
    low, high = over.interval(differences)
    return Difference(
        float(differences.mean()), low, high, over.sign_flips(differences), differences.size
    )


def _share(bare: Standings, ranked: Sequence[RankedRow], i: int) -> float:
    floor = next((row for row in ranked if row.name == bare.suite.floor), None)
    shares = []
    for column in bare.columns:
        ceiling = bare.ceiling(column)
        if floor is not None and ceiling is not None:
            ends = [
                float(np.mean(list(r.column(column).values()))) for r in (ranked[i], floor, ceiling)
            ]
            shares.append(over.share_of_gap(*ends))
    known = [s for s in shares if not math.isnan(s)]
    return float(np.mean(known)) if known else math.nan


# How far the tiers agree: what the small settings of a track say against what the larger ones do.


TITLE = "Do the tiers agree?"

MEANS = (
    "For each track, the table compares the mean ranks of the methods in both tiers. Kendall's "
    "tau is 1 for the same order and -1 for the reverse. p is the probability that a random order "
    "is as far from 0. Ranks that cannot be told apart change tau, too. So the last columns count "
    "the pairs that both tiers tell apart, and those in the same order. The other pairs are named "
    "as the larger tier orders them."
)

PAIRS = ("pairs", "both tell apart", "same order", "other order")

HEAD = ("track", "tiers", "methods in both", "Kendall's tau", "p", *PAIRS)


def agreement_lines(every: Sequence[Standings]) -> list[list[str]]:
    """A line for each track of which two tiers rank at least two methods alike in name."""
    lines = []
    for track in TRACKS:
        tiers = [
            one
            for one in every
            if one.suite.track == track and one.suite.tier in TIERS and one.placed
        ]
        for one, other in itertools.pairwise(tiers):
            if len(both := _in_both(one, other)) > 1:
                names = f"{one.suite.tier} and {other.suite.tier}"
                lines.append(
                    [
                        track,
                        names,
                        str(len(both)),
                        *_tau(one, other, both),
                        *_pairs(one, other, both),
                    ]
                )
    return lines


def _in_both(one: Standings, other: Standings) -> list[str]:
    names = {p.row.name for p in other.placed}
    return [p.row.name for p in one.placed if p.row.name in names]


def _tau(one: Standings, other: Standings, both: Sequence[str]) -> tuple[str, str]:
    """Kendall's tau and its p; a dash where all ranks of a tier are alike."""
    first, second = _ranks(one), _ranks(other)
    tau, p = kendalltau([first[n] for n in both], [second[n] for n in both])
    return (NONE, NONE) if math.isnan(tau) else (f"{tau:.2f}", f"{p:.3f}")


def _pairs(one: Standings, other: Standings, both: Sequence[str]) -> tuple[str, str, str, str]:
    """How many pairs of methods there are, how many both tiers tell apart, how many of these alike;
    the others.
    """
    first, second = _ranks(one), _ranks(other)
    pairs = list(itertools.combinations(both, 2))
    apart = [
        (a, b) for a, b in pairs if not _on_one_bar(one, a, b) and not _on_one_bar(other, a, b)
    ]
    alike = [(a, b) for a, b in apart if (first[a] < first[b]) == (second[a] < second[b])]
    unlike = [(a, b) if second[a] < second[b] else (b, a) for a, b in apart if (a, b) not in alike]
    names = ", ".join(f"{above} above {below}" for above, below in unlike)
    return str(len(pairs)), str(len(apart)), str(len(alike)), names or NONE


def _ranks(one: Standings) -> dict[str, float]:
    return {p.row.name: p.rank for p in one.placed}


def _on_one_bar(one: Standings, a: str, b: str) -> bool:
    return any(a in bar and b in bar for bar in one.bars)
