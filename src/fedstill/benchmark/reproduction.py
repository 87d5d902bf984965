"""A paper's table next to ours: for every column the levels, and the differences between rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedstill.benchmark.recipes import Cell, Recipe
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import read_file
from fedstill.metrics.accuracy import best_and_recent
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.report import terminal
from fedstill.report.summary import COLUMNS, NONE, package_notes, share_text
from fedstill.running.compare import Variant
from fedstill.running.journal import JOURNAL, SUMMARY, is_finished
from fedstill.running.runs import Run, differing, read_run, spread, value_text
from fedstill.running.same_run import other_settings, settings_by_key

MEASURE_TITLES = {column.key: column.title for column in COLUMNS} | {
    "accuracy": "accuracy",
    "forgetting": "F",
    "query_average_accuracy": "average",
}
"""The titles of measures in tables."""

MAX_MEASURES_WITH_DIFFERENCES = 3
"""With more measures there is no room for the differences to the first row."""

RECENT_ACCURACY = "mean_accuracy_last_10"
"""The mean accuracy of the last ten rounds. It is shown for runs with more rounds, because single
rounds differ much on uneven data.
"""

RECENT_ROUNDS = 10

RESTORE = "restore it, or delete it and run the command again"
"""What to do about a damaged summary: a run without one continues from its last checkpoint."""

Summary = Mapping[str, Any]
"""The summary of a finished run."""


@dataclass(frozen=True)
class RecipeRuns:
    """The runs of some cells of a recipe."""

    recipe: Recipe
    cells: Sequence[Cell]
    variants: Sequence[Variant]

    @property
    def columns(self) -> list[str]:
        """The columns of the cells, in order."""
        return list(dict.fromkeys(column for _, column in self.cells))

    @property
    def cells_by_column(self) -> list[Cell]:
        """The cells, one column after another."""
        cells = []
        for column in self.columns:
            cells += self.cells_of(column)
        return cells

    def cells_of(self, column: str) -> list[Cell]:
        """The cells of a column."""
        return [cell for cell in self.cells if cell[1] == column]

    def variants_of(self, cell: Cell) -> list[Variant]:
        """The runs of a cell."""
        return [variant for variant in self.variants if variant.label == " | ".join(cell)]

    def finished_folders(self, cell: Cell) -> list[Path]:
        """The directories of the finished runs of a cell."""
        folders = [variant.folder for variant in self.variants_of(cell)]
        return [folder for folder in folders if is_finished(folder)]

    def finished_runs(self, cell: Cell) -> list[Run]:
        """The finished runs of a cell."""
        return [read_run(folder) for folder in self.finished_folders(cell)]

    def summaries(self, cell: Cell) -> list[Summary]:
        """The summaries of the finished runs of a cell."""
        return self._summaries.get(cell, [])

    @cached_property
    def _summaries(self) -> dict[Cell, list[Summary]]:
        return {cell: list(map(_read_summary, self.finished_folders(cell))) for cell in self.cells}

    @property
    def has_long_runs(self) -> bool:
        """Whether any finished run has more rounds than ``RECENT_ROUNDS``."""
        for summaries in self._summaries.values():
            if any(summary["rounds"] > RECENT_ROUNDS for summary in summaries):
                return True
        return False

    @property
    def shows_recent_accuracy(self) -> bool:
        """Whether the tables have a column for ``RECENT_ACCURACY``."""
        return self.recipe.measures[0] == "accuracy" and self.has_long_runs


def _read_summary(folder: Path) -> Summary:
    """The summary of a run; raises CorruptFile for a damaged file."""
    path = folder / SUMMARY
    try:
        summary = json.loads(read_file(path))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}; {RESTORE}") from error
    if not isinstance(summary, dict) or not {"seed", "rounds"} <= summary.keys():
        raise CorruptFile(f"{path} is not the summary of a run; {RESTORE}")
    return summary


def by_seed(summaries: Sequence[Summary], measure: str) -> dict[int, float]:
    """A number of the summaries by seed, of the runs that have it."""
    return {
        summary["seed"]: summary[measure]
        for summary in summaries
        if summary.get(measure) is not None
    }


# ---- levels --------------------------------------------------------------------------------------


def paper_tables(runs: RecipeRuns, changes: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The title, notes on settings that differ from the recipe's, and the tables of each column.

    ``changes``: the values that the command sets over the recipe, by dotted key.
    """
    yield Text(runs.recipe.paper, style="bold")
    values = [f"{key} = {value}" for key, value in changes.items() if key != "device"]
    if values:
        yield Text(
            f"REDUCED OR CHANGED against the paper: {', '.join(values)}. Absolute values cannot be "
            "compared with the paper's; differences between rows may be."
        )
    yield from _other_settings_note(runs.variants)
    for column in runs.columns:
        yield Text(f"\n{column}", style="bold")
        yield from _column_tables(runs, column)


def _other_settings_note(variants: Sequence[Variant]) -> Iterator[Text]:
    """A note on existing runs that were made with other settings than the recipe has now."""
    keys: set[str] = set()
    count = 0
    for variant in variants:
        other_keys = other_settings(variant.settings, variant.folder)
        if other_keys:
            count += 1
            keys.update(other_keys)
    if count:
        yield Text(
            f"{count} of these runs have OTHER SETTINGS than the recipe has now: "
            f"{', '.join(sorted(keys))}."
        )


def _column_tables(runs: RecipeRuns, column: str) -> Iterator[RenderableType]:
    cells = runs.cells_of(column)
    yield _level_table(runs, cells)
    if any(measure.startswith("query_") for measure in runs.recipe.measures):
        notes = package_notes({cell[0]: runs.finished_runs(cell) for cell in cells})
        yield from map(Text, notes)
    for cell in cells:
        for summary in runs.summaries(cell):
            if summary.get("refusals"):
                yield Text(f"warning: {cell[0]}: {summary['refusals']}")
        yield from map(Text, _unfinished_lines(runs, cell))
    measured = list(_measured_lines(runs, cells))
    if measured:
        head = ("", "measure, last round", "ours", "paper", "seeds")
        yield terminal.PlainTable(head, measured, words=2)
    yield from _client_table(runs, cells)


def _level_table(runs: RecipeRuns, cells: Sequence[Cell]) -> RenderableType:
    """Measures in percent, ours and the paper's.

    Δ is the difference of the first measure to the first row, in points, over the seeds that both
    rows have: a seed that only one of them finished would shift it.
    """
    first, *others = runs.recipe.measures
    has_differences = len(others) < MAX_MEASURES_WITH_DIFFERENCES
    name = ""
    if first != "accuracy":
        name = f"{MEASURE_TITLES.get(first, first)} "
    head = ["", f"ours {name}[%]", f"paper {name}[%]"]
    if has_differences:
        head += ["Δ ours", "Δ paper"]
    if runs.shows_recent_accuracy:
        head += ["last 10 [%]", "Δ last 10"]
    for measure in others:
        title = MEASURE_TITLES.get(measure, measure)
        head += [f"{title} ours", f"{title} paper"]
    head.append("seeds")

    lines = []
    for cell in cells:
        summaries = runs.summaries(cell)
        to_first_row = Comparison(cell, cells[0], runs, runs)
        line = [cell[0], _level(summaries, first), _published_level(runs.recipe, cell, first)]
        if has_differences:
            line += [to_first_row.points(first), to_first_row.published(first)]
        if runs.shows_recent_accuracy:
            line += [_level(summaries, RECENT_ACCURACY), to_first_row.points(RECENT_ACCURACY)]
        for measure in others:
            line += [_level(summaries, measure), _published_level(runs.recipe, cell, measure)]
        lines.append([*line, str(len(summaries))])
    return terminal.PlainTable(head, lines)


def _level(summaries: Sequence[Summary], measure: str) -> str:
    """A measure of some runs, mean and deviation in percent."""
    return share_text(spread(list(by_seed(summaries, measure).values())))


def _published_level(recipe: Recipe, cell: Cell, measure: str) -> str:
    values = recipe.published_in(cell).values
    if measure not in values:
        return NONE
    text = f"{values[measure]:.1f}"
    if "spread" in values and measure == "accuracy":
        text += f" ± {values['spread']:.1f}"
    return text


def _unfinished_lines(runs: RecipeRuns, cell: Cell) -> Iterator[str]:
    """A line for each run of a cell that has begun and is not finished."""
    for variant in runs.variants_of(cell):
        has_begun = (variant.folder / JOURNAL).is_file()
        if has_begun and not is_finished(variant.folder):
            yield _unfinished_line(cell[0], read_run(variant.folder))


def _unfinished_line(row: str, run: Run) -> str:
    """The progress of a run, and the first refusal in the round after it."""
    line = f"not finished: {row}, seed {run.seed}: {len(run.rounds)} of {run.planned_rounds} rounds"
    accuracies = [value for number, value in run.curve("accuracy").items() if number > 0]
    if accuracies:
        line += f", {100 * accuracies[-1]:.1f} % after the last"
    for event in run.clients:
        if event["round"] > len(run.rounds) and "refused" in event:
            return f"{line}; then client {event['client']}: {event['refused']}"
    return line


def _measured_lines(runs: RecipeRuns, cells: Sequence[Cell]) -> Iterator[list[str]]:
    """A line for each published number that is not in percent, with ours in the last round."""
    for cell in cells:
        published = runs.recipe.published_in(cell).measured
        if not published:
            # The journals of long runs take seconds to read.
            continue
        finished = runs.finished_runs(cell)
        for key, printed in published.items():
            curves = [run.curve(key) for run in finished]
            ours = spread([curve[max(curve)] for curve in curves if curve])
            text = NONE
            seeds = "0"
            if ours is not None:
                text = ours.text(1, 3)
                seeds = str(ours.runs)
            yield [cell[0], key.replace("/", " "), text, f"{printed:.3f}", seeds]


def _client_table(runs: RecipeRuns, cells: Sequence[Cell]) -> Iterator[RenderableType]:
    """The numbers by client, ours with the paper's in brackets; nothing if it prints none."""
    lines = list(_client_lines(runs, cells))
    if not lines:
        return
    width = max(map(len, lines))
    padded = [line + [NONE] * (width - len(line)) for line in lines]
    head = ["", "", *(f"client {client}" for client in range(width - 2))]
    yield Text("\nby client, ours (paper's) [%]")
    yield terminal.PlainTable(head, padded, words=2)


def _client_lines(runs: RecipeRuns, cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in cells:
        for kind, published in runs.recipe.published_in(cell).clients.items():
            by_client = [summary.get(f"{kind}_by_client", {}) for summary in runs.summaries(cell)]
            line = [cell[0], kind]
            for client, printed in enumerate(published):
                values = [numbers[str(client)] for numbers in by_client if str(client) in numbers]
                line.append(f"{share_text(spread(values))} ({printed:.1f})")
            yield line


# ---- differences ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherRuns:
    """Runs of the same recipe in another folder, to compare with.

    Raises ConfigError if the folder has none of them.
    """

    runs: RecipeRuns
    folder: Path

    def __post_init__(self) -> None:
        if not any(variant.folder.is_dir() for variant in self.runs.variants):
            raise ConfigError(
                f"--beside: {self.folder} contains no run of these rows; name a folder, or a pack, "
                "of this recipe's runs"
            )


def find_row(name: str, cells: Sequence[Cell], place: str) -> str:
    """The row of some cells with a name, whatever its case; empty for an empty name.

    Raises ConfigError for an unknown row. ``place``: where the cells are, in words.
    """
    rows = {row.lower(): row for row, _ in cells}
    if name and name.lower() not in rows:
        raise ConfigError(
            f"--against: there is no row {name!r} {place}; name one of {', '.join(rows.values())}"
        )
    return rows.get(name.lower(), "")


def check_rounds(rounds: Sequence[int]) -> None:
    """Raise ConfigError for a round of --at that has too few rounds before it for its mean."""
    for number in rounds:
        if number < RECENT_ROUNDS:
            raise ConfigError(
                f"--at {number}: name rounds from {RECENT_ROUNDS} on, because each number is the "
                f"mean of the {RECENT_ROUNDS} rounds up to it"
            )


def difference_tables(
    runs: RecipeRuns, against: str, other_runs: OtherRuns | None, rounds: Sequence[int]
) -> Iterator[RenderableType]:
    """The tables of differences that options of the command ask for; none by default.

    ``against``: the row that all rows are compared with. ``other_runs``: runs that they are
    compared with; then ``against`` is one of their rows. ``rounds``: at which accuracies are shown.
    """
    baseline = against
    if other_runs is not None:
        yield from differences_to_other_runs(runs, other_runs, against)
        baseline = ""
    elif against:
        yield from differences_to_row(runs, against)
    if rounds:
        yield from accuracies_at_rounds(runs, rounds, baseline)


def differences_to_row(runs: RecipeRuns, against: str) -> Iterator[RenderableType]:
    """For every column, the difference of each row to the row ``against``, paired by seed."""
    yield Text(_difference_title(against))
    lines = []
    for row, column in runs.cells_by_column:
        if row != against:
            comparison = Comparison((row, column), (against, column), runs, runs)
            lines += [comparison.line(measure) for measure in _compared_measures(runs)]
    head = ("", "", "ours", "95 % interval", "seeds", "", "paper")
    yield terminal.PlainTable(head, lines, words=2)


def differences_to_other_runs(
    runs: RecipeRuns, other_runs: OtherRuns, against: str = ""
) -> Iterator[RenderableType]:
    """The difference of each row to other runs: those of the same row, or those of ``against``.

    The settings in which the two differ come first.
    """
    comparisons = [
        Comparison((row, column), (against or row, column), runs, other_runs.runs)
        for row, column in runs.cells_by_column
    ]
    yield Text(_difference_title(f"{against or 'the same rows'} in {other_runs.folder}"))
    yield from _differing_settings(comparisons, other_row=bool(against))
    lines: list[list[str]] = []
    for comparison in comparisons:
        # The last cell is the paper's, which has no such difference.
        lines += [comparison.line(measure)[:-1] for measure in _compared_measures(runs)]
    yield terminal.PlainTable(("", "", "ours", "95 % interval", "seeds", ""), lines, words=2)


def _difference_title(baseline: str) -> str:
    return (
        f"\nDifferences to {baseline}, in points, with the 95 % interval of differences paired by "
        "seed"
    )


def _differing_settings(
    comparisons: Sequence[Comparison], other_row: bool
) -> Iterator[RenderableType]:
    """A line for each set of differing settings, with the cells that have it."""
    cells_by_text: dict[str, list[str]] = {}
    for comparison in comparisons:
        text = comparison.differing_settings(other_row)
        cells_by_text.setdefault(text, []).append(", ".join(comparison.cell))
    for text, cells in cells_by_text.items():
        if text:
            yield Text(f"{'; '.join(cells)}: {text}")


def accuracies_at_rounds(
    runs: RecipeRuns, rounds: Sequence[int], against: str = ""
) -> Iterator[RenderableType]:
    """The accuracy of each row at some rounds, as the mean of the last ten rounds there, and its
    difference to the row ``against``.

    Finished runs that are too short are left out.
    """
    head = ["", "round", "ours [%]", "seeds"]
    if against:
        head += [f"to {against}", "95 % interval", ""]
    lines = []
    for column in runs.columns:
        cells = runs.cells_of(column)
        curves = {cell: _accuracy_curves(runs, cell) for cell in cells}
        for cell in cells:
            for number in rounds:
                line = _round_line(cell, number, curves[cell])
                if against:
                    baseline = curves.get((against, column), {})
                    line += _round_difference(curves[cell], baseline, number)
                lines.append(line)
    yield Text("\nMeans of the ten rounds up to a round")
    yield terminal.PlainTable(head, lines, words=2)


Curves = Mapping[int, Mapping[int, float]]
"""The accuracy by round of some runs, by seed."""


def _accuracy_curves(runs: RecipeRuns, cell: Cell) -> Curves:
    return {run.seed: run.curve("accuracy") for run in runs.finished_runs(cell)}


def _round_line(cell: Cell, number: int, curves: Curves) -> list[str]:
    recent = _recent_accuracies(curves, number)
    level = share_text(spread(list(recent.values())))
    return [", ".join(cell), str(number), level, str(len(recent))]


def _round_difference(curves: Curves, baseline: Curves, number: int) -> list[str]:
    """The cells of a difference; empty ones for the baseline itself."""
    difference = None
    if curves is not baseline:
        difference = paired_difference(
            _recent_accuracies(curves, number), _recent_accuracies(baseline, number)
        )
    cells = _difference_cells(difference)
    return [cells.difference, cells.interval, cells.verdict]


def _recent_accuracies(curves: Curves, number: int) -> dict[int, float]:
    """The mean accuracy of the last ten rounds up to ``number`` by seed, of runs that got there."""
    means = {}
    for seed, curve in curves.items():
        if number in curve:
            accuracies = [value for round_, value in curve.items() if 0 < round_ <= number]
            mean = best_and_recent(accuracies)[RECENT_ACCURACY]
            if mean is not None:
                means[seed] = mean
    return means


def _compared_measures(runs: RecipeRuns) -> list[str]:
    """The recipe's measures; for long runs also the mean of the last ten rounds."""
    first, *others = runs.recipe.measures
    if runs.shows_recent_accuracy:
        return [first, RECENT_ACCURACY, *others]
    return [first, *others]


SETTINGS_OF_ONE_RUN = ("seed", "threads", "engine", "engine_reason", "start_from")
"""Settings in which two runs of one cell may differ."""


@dataclass(frozen=True)
class Comparison:
    """A cell, and the cell that it is compared with, with the runs of both."""

    cell: Cell
    baseline: Cell
    runs: RecipeRuns
    baseline_runs: RecipeRuns

    def difference(self, measure: str) -> Difference | None:
        """The difference over the seeds that both cells have; None without such a seed."""
        return paired_difference(
            by_seed(self.runs.summaries(self.cell), measure),
            by_seed(self.baseline_runs.summaries(self.baseline), measure),
        )

    def points(self, measure: str) -> str:
        """The mean difference in points."""
        return _difference_cells(self.difference(measure)).difference

    def published(self, measure: str) -> str:
        """The difference of the paper's two numbers, if it has both."""
        recipe = self.runs.recipe
        value = recipe.published_in(self.cell).values.get(measure)
        baseline_value = recipe.published_in(self.baseline).values.get(measure)
        if value is None or baseline_value is None:
            return NONE
        return f"{value - baseline_value:+.1f}"

    def line(self, measure: str) -> list[str]:
        """The line of a table for one measure; the paper's difference comes last."""
        cells = _difference_cells(self.difference(measure))
        title = MEASURE_TITLES.get(measure, measure)
        if measure == RECENT_ACCURACY:
            title = "last 10"
        return [
            ", ".join(self.cell),
            title,
            cells.difference,
            cells.interval,
            cells.seeds,
            cells.verdict,
            self.published(measure),
        ]

    def differing_settings(self, other_row: bool) -> str:
        """The settings in which the first finished runs of the two cells differ.

        ``other_row``: whether the cells are of different rows; then their methods differ anyway.
        """
        folders = self.runs.finished_folders(self.cell)
        baseline_folders = self.baseline_runs.finished_folders(self.baseline)
        if not folders:
            return "no finished run here"
        if not baseline_folders:
            return "no finished run there"
        here = settings_by_key(folders[0])
        there = settings_by_key(baseline_folders[0])
        texts = []
        for key in differing([here, there]):
            is_shared = key in here and key in there and key not in SETTINGS_OF_ONE_RUN
            if is_shared and not (other_row and key.startswith("method.")):
                texts.append(f"{key} = {value_text(here[key])}, there {value_text(there[key])}")
        return ", ".join(texts)


@dataclass(frozen=True, kw_only=True)
class DifferenceCells:
    """The cells of a table for a difference: in points, its interval, the number of seeds that both
    runs have, and whether it is significant.
    """

    difference: str = NONE
    interval: str = NONE
    seeds: str = "0"
    verdict: str = ""


def _difference_cells(difference: Difference | None) -> DifferenceCells:
    if difference is None:
        return DifferenceCells()
    points = f"{100 * difference.mean:+.1f}"
    seeds = str(difference.pairs)
    if difference.pairs < 2:
        return DifferenceCells(difference=points, seeds=seeds)
    verdict = "not told apart"
    if difference.told_apart:
        verdict = "told apart"
    return DifferenceCells(
        difference=points,
        interval=f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        seeds=seeds,
        verdict=verdict,
    )
