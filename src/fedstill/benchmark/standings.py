"""The standings of a suite: ranks, differences, shares of the gap and costs, from entries' runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.benchmark.entries import (
    Entry,
    check_entry,
    find_entries,
    planned_rounds,
    read_entry,
    run_path,
    suite_of,
)
from fedstill.benchmark.replays import recorded_levels
from fedstill.benchmark.scoring import Score, read_events, score_of, task_rows
from fedstill.benchmark.suites import TEST_SEEDS, Suite, load_suite, suite_names
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.metrics import ranks as rank_metrics
from fedstill.metrics.accuracy import Values
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.running.journal import JOURNAL
from fedstill.running.runs import Spread, spread

NOT_REPLAYED = "not replayed"

TASK_DIGITS = 5
"""Decimals of accuracies on tasks, which only pictures show; all other numbers keep all digits."""

FEDAVG = "FedAvg"
"""The row whose CPU seconds are the unit, if it is ranked."""

RunKey = tuple[str, int]
"""A column and a seed."""


@dataclass(frozen=True)
class RankedRow:
    """The scores of one row's runs.

    ``fields``: the chosen configuration, out of ``try_count``. ``diverged``: the reasons of runs
    that diverged. ``status``: the level of its replay. ``tasks``: the accuracy on each task at each
    task's end, (T, T), by run; empty without tasks. ``processor``: the one that made the runs.
    """

    name: str
    scores: Mapping[RunKey, Score]
    fields: Mapping[str, Any] = field(default_factory=dict)
    try_count: int = 0
    diverged: Mapping[RunKey, str] = field(default_factory=dict)
    status: str = NOT_REPLAYED
    tasks: Mapping[RunKey, Sequence[Sequence[float]]] = field(default_factory=dict)
    processor: str = ""

    def column(self, column: str, number: str = "accuracy") -> dict[int, float]:
        """One of the score's numbers in a column, by seed."""
        return {
            seed: getattr(score, number)
            for (score_column, seed), score in self.scores.items()
            if score_column == column
        }

    def mean(self, number: str, columns: Sequence[str]) -> float:
        """The mean of a number over columns and seeds; NaN if no run has it."""
        values = [value for value in self._values(number, columns) if not math.isnan(value)]
        if not values:
            return math.nan
        return float(np.mean(values))

    def kept(self, columns: Sequence[str]) -> float:
        """Mean accuracy over mean learned accuracy, so that learned × kept is the accuracy shown.

        NaN if ``kept`` is unknown for a run.
        """
        if any(math.isnan(value) for value in self._values("kept", columns)):
            return math.nan
        learned = self.mean("learned", columns)
        if not learned:
            return 0.0
        return self.mean("accuracy", columns) / learned

    def _values(self, number: str, columns: Sequence[str]) -> Iterator[float]:
        for column in columns:
            yield from self.column(column, number).values()


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A row's place and its numbers over all columns; intervals are those of
    ``metrics.ranks.interval``, at 95 %.

    ``difference``: the mean difference to the baseline; None for the baseline itself. ``p_holm``:
    its p-value after Holm's correction; NaN for the baseline. ``share``: of the gap between floor
    and ceiling, the mean over columns that have both. ``wins``: the mean share of blocks won
    against another row. ``cpu``: CPU seconds relative to the unit row; NaN if that was made on
    another processor. ``sent``: bytes of a run.
    """

    row: RankedRow
    place: int
    rank: float
    rank_interval: tuple[float, float]
    accuracy: float
    learned: float
    kept: float
    difference: Difference | None
    p_holm: float
    share: float
    wins: float
    cpu: float
    sent: float


@dataclass(frozen=True, kw_only=True)
class Standings:
    """The rows of a suite.

    ``placed``: the ranked rows, best mean rank first. ``bounds``: the rows that are not ranked.
    ``bars``: groups of rows, by name, whose mean ranks differ by less than the critical difference
    in every pair.
    ``missing``: rows of the suite without an entry.
    """

    suite: Suite
    rows: Sequence[RankedRow]
    placed: Sequence[Placed] = ()
    bounds: Sequence[RankedRow] = ()
    bars: Sequence[Sequence[str]] = ()
    missing: Sequence[str] = ()

    @property
    def columns(self) -> list[str]:
        """The suite's columns."""
        return list(self.suite.recipe.columns)

    @property
    def block_count(self) -> int:
        """The number of blocks in which rows are ranked: columns × seeds."""
        return len(self.columns) * len(TEST_SEEDS)

    @property
    def critical_difference(self) -> float:
        """The difference of two mean ranks that is significant by Nemenyi's test, at 0.05 for all
        pairs of ranked rows together; NaN for fewer than two rows.
        """
        if len(self.placed) < 2:
            return math.nan
        return rank_metrics.nemenyi_width(len(self.placed), self.block_count)

    @property
    def rows_by_processor(self) -> dict[str, list[str]]:
        """The names of the rows made on each processor, the one with the most rows first."""
        names: dict[str, list[str]] = {}
        for row in self.rows:
            names.setdefault(row.processor, []).append(row.name)
        return dict(sorted(names.items(), key=lambda item: -len(item[1])))

    def cell(self, row: RankedRow, column: str) -> Spread | None:
        """Mean and sample standard deviation of the accuracy over seeds; None for no runs."""
        values = row.column(column).values()
        return spread([value for value in values if not math.isnan(value)])

    def difference(self, row: RankedRow, column: str) -> Difference | None:
        """The difference of a cell to the baseline, paired by seed, with Student's interval.

        None for the baseline itself, and if it has no entry.
        """
        baseline = _find(self.rows, self.suite.baseline)
        if baseline is None or row is baseline:
            return None
        return paired_difference(row.column(column), baseline.column(column))

    def ceiling(self, column: str) -> RankedRow | None:
        """The row at share 1 of a column; None if there is none."""
        for row in self.bounds:
            if row.name in self.suite.ceilings and row.column(column):
                return row
        return None


def _find(rows: Sequence[RankedRow], name: str) -> RankedRow | None:
    for row in rows:
        if row.name == name:
            return row
    return None


# ---- ranking the rows of a suite -----------------------------------------------------------------


def standings(suite: Suite, rows: Sequence[RankedRow]) -> Standings:
    """The standings of a suite, from rows that have runs in all of its columns."""
    ranked = [row for row in rows if row.name in suite.tries or row.name not in suite.recipe.rows]
    names = [row.name for row in rows]
    unranked = Standings(
        suite=suite,
        rows=rows,
        bounds=[row for row in rows if row not in ranked],
        missing=[name for name in suite.recipe.rows if name not in names],
    )
    if not ranked:
        return unranked
    scores = _accuracies(ranked, unranked.columns)
    ranking = replace(unranked, placed=_places(unranked, ranked, scores))
    return replace(ranking, bars=_bars(ranking.placed, ranking.critical_difference))


def _accuracies(rows: Sequence[RankedRow], columns: Sequence[str]) -> Values:
    """Accuracies (rows, columns, seeds)."""
    keys = list(itertools.product(columns, TEST_SEEDS))
    flat = np.array([[row.scores[key].accuracy for key in keys] for row in rows])
    return flat.reshape(len(rows), len(columns), len(TEST_SEEDS))


def _bars(placed: Sequence[Placed], critical_difference: float) -> list[list[str]]:
    """The groups of rows that do not differ, rows and groups in the order of their mean ranks.

    A test of each pair on its own would find differences among many equal rows.
    """
    ranks = np.array([place.rank for place in placed])
    distances = np.abs(ranks[:, None] - ranks)
    differ = (distances >= critical_difference).tolist()
    names = [place.row.name for place in placed]
    return [[names[index] for index in indices] for indices in rank_metrics.bars(differ)]


def _places(unranked: Standings, ranked: Sequence[RankedRow], scores: Values) -> list[Placed]:
    columns = unranked.columns
    ranks = rank_metrics.ranks(scores)
    mean_ranks = ranks.mean(axis=(1, 2))
    baseline = _find(ranked, unranked.suite.baseline)
    differences = _differences(ranked, scores, baseline)
    p_values = _holm(differences)
    cpu_unit = _find(ranked, FEDAVG) or baseline
    order = sorted(range(len(ranked)), key=lambda i: (mean_ranks[i], ranked[i].name))
    return [
        Placed(
            row=ranked[i],
            place=place,
            rank=float(mean_ranks[i]),
            rank_interval=rank_metrics.interval(ranks[i]),
            accuracy=float(scores[i].mean()),
            learned=ranked[i].mean("learned", columns),
            kept=ranked[i].kept(columns),
            difference=differences[i],
            p_holm=p_values[i],
            share=_share_of_gap(unranked, ranked, ranked[i]),
            wins=_mean_win_rate(scores, i),
            cpu=_relative_cpu(ranked[i], cpu_unit, columns),
            sent=ranked[i].mean("sent", columns),
        )
        for place, i in enumerate(order, 1)
    ]


def _differences(
    ranked: Sequence[RankedRow], scores: Values, baseline: RankedRow | None
) -> list[Difference | None]:
    """The mean difference of each row to the baseline, over all columns and seeds."""
    if baseline is None:
        return [None] * len(ranked)
    baseline_scores = scores[ranked.index(baseline)]
    differences: list[Difference | None] = []
    for row, row_scores in zip(ranked, scores, strict=True):
        if row is baseline:
            differences.append(None)
        else:
            differences.append(_mean_difference(row_scores - baseline_scores))
    return differences


def _mean_difference(differences: Values) -> Difference:
    low, high = rank_metrics.interval(differences)
    return Difference(
        mean=float(differences.mean()),
        low=low,
        high=high,
        p=rank_metrics.sign_flips(differences),
        pairs=differences.size,
    )


def _holm(differences: Sequence[Difference | None]) -> list[float]:
    """The p-values of the differences after Holm's correction; NaN for the baseline."""
    corrected = iter(rank_metrics.holm([item.p for item in differences if item]))
    return [next(corrected) if item else math.nan for item in differences]


def _mean_win_rate(scores: Values, index: int) -> float:
    rates = [
        rank_metrics.win_rate(scores[index], opponent)
        for number, opponent in enumerate(scores)
        if number != index
    ]
    if not rates:
        return math.nan
    return float(np.mean(rates))


def _relative_cpu(row: RankedRow, unit: RankedRow | None, columns: Sequence[str]) -> float:
    """CPU seconds relative to the unit row; NaN without one, and on another processor."""
    if unit is None or unit.processor != row.processor:
        return math.nan
    unit_seconds = unit.mean("seconds_cpu", columns)
    if not unit_seconds:
        return math.nan
    return row.mean("seconds_cpu", columns) / unit_seconds


def _share_of_gap(unranked: Standings, ranked: Sequence[RankedRow], row: RankedRow) -> float:
    """The mean share of the gap, over the columns with a floor and a ceiling; NaN without any."""
    floor = _find(ranked, unranked.suite.floor)
    if floor is None:
        return math.nan
    shares = []
    for column in unranked.columns:
        ceiling = unranked.ceiling(column)
        if ceiling is not None:
            means = [_mean_accuracy(bound, column) for bound in (row, floor, ceiling)]
            shares.append(rank_metrics.share_of_gap(*means))
    known = [share for share in shares if not math.isnan(share)]
    if not known:
        return math.nan
    return float(np.mean(known))


def _mean_accuracy(row: RankedRow, column: str) -> float:
    return float(np.mean(list(row.column(column).values())))


# ---- rows from entries ---------------------------------------------------------------------------


@dataclass(frozen=True)
class EnteredRows:
    """The rows of some entries.

    ``rows``: by suite. ``suites``: by name, with rows for new methods. ``skipped``: a line for
    each entry that failed a check.
    """

    rows: Mapping[str, Sequence[RankedRow]]
    suites: Mapping[str, Suite]
    skipped: Sequence[str] = ()


def read_rows(folders: Sequence[Path]) -> EnteredRows:
    """The rows of all entries below some folders that pass the checks that execute nothing.

    Raises ConfigError for a folder without an entry.
    """
    rows: dict[str, list[RankedRow]] = {}
    suites: dict[str, Suite] = {}
    skipped = []
    for folder, place in places_of_entries(folders):
        try:
            entry = read_entry(place)
            check_entry(entry)
            suite = suite_of(entry)
            level = recorded_levels(folder).get((entry.suite, entry.row, entry.sha), NOT_REPLAYED)
            row = row_of(entry, suite, level)
        except (ConfigError, CorruptFile) as error:
            skipped.append(f"{place.name}: {error}")
            continue
        # In ``suite``, FedAvg stands in for a method with a file.
        known_suite = suites.setdefault(suite.name, load_suite(suite.name))
        if entry.row not in known_suite.recipe.rows:
            suites[suite.name] = known_suite.with_row(
                entry.row, entry.method, entry.tries, entry.topology
            )
        rows.setdefault(suite.name, []).append(row)
    return EnteredRows(rows, suites, skipped)


def places_of_entries(folders: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Each entry with the folder in which it was found.

    Raises ConfigError for a folder without an entry.
    """
    for folder in folders:
        places = find_entries(folder)
        if not places:
            raise ConfigError(
                f"{folder} contains no entry; name a folder of entries, such as runs/rank/entries"
            )
        yield from ((folder, place) for place in places)


def row_of(entry: Entry, suite: Suite, status: str = NOT_REPLAYED) -> RankedRow:
    """The scores of an entry's runs; the suite must have its row."""
    scores: dict[RunKey, Score] = {}
    diverged: dict[RunKey, str] = {}
    tasks: dict[RunKey, list[list[float]]] = {}
    for key in itertools.product(suite.columns_of(entry.row), TEST_SEEDS):
        folder = entry.run_folder(*key)
        scores[key] = score_of(folder, planned_rounds(folder))
        if run_path(*key) in entry.diverged:
            diverged[key] = entry.diverged[run_path(*key)]
        accuracies = task_rows(read_events(folder / JOURNAL))
        if accuracies:
            tasks[key] = [[round(value, TASK_DIGITS) for value in row] for row in accuracies]
    return RankedRow(
        name=entry.row,
        scores=scores,
        fields=entry.fields,
        try_count=len(entry.tries),
        diverged=diverged,
        status=status,
        tasks=tasks,
        processor=str(entry.made_with.get("processor", "")),
    )


def all_standings(
    rows: Mapping[str, Sequence[RankedRow]], suites: Mapping[str, Suite]
) -> list[Standings]:
    """The standings of all suites that have rows, in order.

    If two rows of a suite have the same name, the last one counts.
    """
    shipped = suite_names()
    names = [*shipped, *(name for name in rows if name not in shipped)]
    result = []
    for name in names:
        by_name = {row.name: row for row in rows.get(name, ())}
        if by_name:
            suite = suites.get(name) or load_suite(name)
            order = {row: index for index, row in enumerate(suite.recipe.rows)}
            in_order = sorted(by_name.values(), key=lambda row: order.get(row.name, len(order)))
            result.append(standings(suite, in_order))
    return result
