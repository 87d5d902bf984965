"""The command that runs a paper's table and prints ours beside it: levels, and differences between
rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.console import RenderableType
from rich.text import Text

from fedstill.benchmark.recipes import Published, Recipe, load_recipe, recipe_names
from fedstill.cli.app import Flag, Jobs, Names, Overwrite, Quiet, Rounds, Settings
from fedstill.cli.comparisons import carry_out
from fedstill.config.overrides import leaf_keys, parse_overrides
from fedstill.core.errors import ConfigError
from fedstill.metrics.accuracy import best_and_recent
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.report.summary import COLUMNS, NONE, package_notes
from fedstill.report.terminal import table
from fedstill.running.compare import Variant
from fedstill.running.runs import Run, Spread, differing, read_run, spread
from fedstill.running.runs import said as as_written
from fedstill.running.same_run import other_settings, settings_by_key

# A paper's table beside ours: for every column the levels, and the difference of each row to the
# first.


COLUMN_TITLES = {m.key: m.title for m in COLUMNS} | {
    "accuracy": "accuracy",
    "forgetting": "F",
    "query_average_accuracy": "average",
}
"""What a measure is called above its columns."""

MANY = 3
"""With so many measures beside the first, differences to the first row are left out: a line would
not hold them.
"""


LAST_TEN = "mean_accuracy_last_10"
"""Beside the accuracy of the last round, where there are more than ten: rounds differ much on
uneven data.
"""


def paper_tables(
    recipe: Recipe,
    cells: Sequence[tuple[str, str]],
    runs: Sequence[Variant],
    changes: Mapping[str, Any],
) -> Iterator[RenderableType]:
    """The title, what makes it a reduced run if anything does, runs that are not the recipe's, a
    table a column.
    """
    yield Text(recipe.paper, style="bold")
    if said := ", ".join(f"{k} = {v}" for k, v in changes.items() if k != "device"):
        yield Text(
            f"REDUCED OR CHANGED against the paper: {said}. Absolute values cannot be compared "
            "with the paper's; "
            "differences between rows may be."
        )
    if others := [other for run in runs if (other := other_settings(run.settings, run.folder))]:
        keys = ", ".join(sorted({key for other in others for key in other}))
        yield Text(
            f"{len(others)} of these runs have OTHER SETTINGS than the recipe has now: {keys}."
        )
    for column in dict.fromkeys(c for _, c in cells):
        yield Text(f"\n{column}", style="bold")
        rows, summaries = [r for r, c in cells if c == column], summaries_by_cell(runs)
        long = recipe.measures[0] == "accuracy" and any(
            s["rounds"] > 10 for own in summaries.values() for s in own
        )
        yield table(_head(recipe, long), _rows(recipe, column, rows, summaries, long))
        asked = any(m.startswith("query_") for m in recipe.measures)
        if asked:
            notes = package_notes({row: runs_of_cell(row, column, runs) for row in rows})
            yield from map(Text, notes)
        for row in rows:
            for text in [
                s["refusals"] for s in summaries.get(f"{row} | {column}", []) if s.get("refusals")
            ]:
                yield Text(f"warning: {row}: {text}")
            yield from map(Text, _unfinished(row, column, runs))
        measured = list(_measured(recipe, column, rows, runs))
        if measured:
            yield table(("", "measure, last round", "ours", "paper", "seeds"), measured, words=2)
        by_client = list(_by_client(recipe, column, rows, summaries))
        if by_client:
            yield Text("\nby client, ours (paper's) [%]")
            count = max(len(line) for line in by_client) - 2
            lines = [line + [NONE] * (count + 2 - len(line)) for line in by_client]
            yield table(("", "", *(f"client {c}" for c in range(count))), lines, words=2)


def by_seed(runs: Sequence[Mapping[str, Any]], measure: str) -> dict[int, float]:
    """{seed: a number of the run's summary}, of the runs that have it."""
    return {s["seed"]: s[measure] for s in runs if s.get(measure) is not None}


def _measured(
    recipe: Recipe, column: str, rows: Sequence[str], runs: Sequence[Variant]
) -> Iterator[list[str]]:
    for row in rows:
        published = recipe.published.get((row, column), Published()).measured
        if not published:  # journals of long runs take seconds to read
            continue
        finished = runs_of_cell(row, column, runs)
        for key, printed in published.items():
            curves = [run.curve(key) for run in finished]
            ours = spread([curve[max(curve)] for curve in curves if curve])
            said = ours.text(1, 3) if ours else NONE
            yield [
                row,
                key.replace("/", " "),
                said,
                f"{printed:.3f}",
                str(ours.runs if ours else 0),
            ]


def runs_of_cell(row: str, column: str, runs: Sequence[Variant]) -> list[Run]:
    """The finished runs of a cell."""
    return [read_run(folder) for folder in _finished(row, column, runs)]


def _finished(row: str, column: str, runs: Sequence[Variant]) -> list[Path]:
    """The directories of the finished runs of a cell."""
    folders = [variant.folder for variant in runs if variant.label == f"{row} | {column}"]
    return [folder for folder in folders if (folder / "summary.json").is_file()]


def _unfinished(row: str, column: str, runs: Sequence[Variant]) -> Iterator[str]:
    """A line for each run of a cell that has begun and is not at its end: how far it came, and who
    was refused then.
    """
    for variant in runs:
        has_begun = (variant.folder / "journal.jsonl").is_file()
        is_finished = (variant.folder / "summary.json").is_file()
        if variant.label != f"{row} | {column}" or not has_begun or is_finished:
            continue
        run = read_run(variant.folder)
        line = f"not finished: {row}, seed {run.seed}: {len(run.rounds)} of {run.asked} rounds"
        accuracies = [value for number, value in run.curve("accuracy").items() if number > 0]
        if accuracies:
            line += f", {100 * accuracies[-1]:.1f} % after the last"
        for event in run.clients:
            if event["round"] > len(run.rounds) and "refused" in event:
                line += f"; then client {event['client']}: {event['refused']}"
                break
        yield line


def _head(recipe: Recipe, long: bool) -> list[str]:
    """Measures in percent; Δ is the difference of the first to the first row, in points, over the
    seeds both have.
    """
    first, *others = (COLUMN_TITLES.get(measure, measure) for measure in recipe.measures)
    name = "" if recipe.measures[0] == "accuracy" else f"{first} "
    head = ["", f"ours {name}[%]", f"paper {name}[%]"]
    if len(others) < MANY:
        head += ["Δ ours", "Δ paper"]
    if long:
        head += ["last 10 [%]", "Δ last 10"]
    for title in others:
        head += [f"{title} ours", f"{title} paper"]
    return [*head, "seeds"]


def summaries_by_cell(runs: Sequence[Variant]) -> dict[str, list[Mapping[str, Any]]]:
    """{"ROW | COLUMN": the summaries of its finished runs}."""
    summaries: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        path = run.folder / "summary.json"
        if path.is_file():
            summaries.setdefault(run.label, []).append(json.loads(path.read_text(encoding="utf-8")))
    return summaries


def _rows(
    recipe: Recipe,
    column: str,
    rows: Sequence[str],
    summaries: Mapping[str, Sequence[Mapping[str, Any]]],
    long: bool,
) -> list[list[str]]:
    ours = {row: summaries.get(f"{row} | {column}", []) for row in rows}
    theirs = {row: recipe.published.get((row, column), Published()).values for row in rows}
    first, *others = recipe.measures
    lines = []
    for row in rows:
        line = [row, _ours(ours[row], first), _printed(theirs[row], first)]
        if len(others) < MANY:
            line += _apart(ours, theirs, row, rows[0], first)
        if long:
            line.append(_ours(ours[row], LAST_TEN))
            line.append(_paired(ours[row], ours[rows[0]], LAST_TEN))
        for measure in others:
            line.append(_ours(ours[row], measure))
            line.append(_printed(theirs[row], measure))
        line.append(str(len(ours[row])))
        lines.append(line)
    return lines


def _ours(runs: Sequence[Mapping[str, Any]], measure: str) -> str:
    return _said(spread([s[measure] for s in runs if s.get(measure) is not None]))


def _by_client(
    recipe: Recipe,
    column: str,
    rows: Sequence[str],
    summaries: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Iterator[list[str]]:
    """A line for each row and measure of which the paper prints a number for each client."""
    for row in rows:
        ours = summaries.get(f"{row} | {column}", [])
        for kind, printed in recipe.published.get((row, column), Published()).clients.items():
            each = [s.get(f"{kind}_by_client", {}) for s in ours]
            means = [
                _said(spread([e[str(c)] for e in each if str(c) in e])) for c in range(len(printed))
            ]
            yield [row, kind, *(f"{m} ({p:.1f})" for m, p in zip(means, printed, strict=True))]


def _said(value: Spread | None) -> str:
    return value.text(100, 1) if value else NONE


def _paired(
    runs: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]], measure: str
) -> str:
    """The mean difference over the seeds that both have: a seed that only one finished would shift
    it.
    """
    apart = paired_difference(by_seed(runs, measure), by_seed(first, measure))
    return f"{100 * apart.mean:+.1f}" if apart else NONE


def _printed(cell: Mapping[str, float], measure: str) -> str:
    if measure not in cell:
        return NONE
    own = f" ± {cell['spread']:.1f}" if "spread" in cell and measure == "accuracy" else ""
    return f"{cell[measure]:.1f}{own}"


def _apart(
    ours: Mapping[str, Sequence[Mapping[str, Any]]],
    theirs: Mapping[str, Mapping[str, float]],
    row: str,
    first: str,
    measure: str,
) -> tuple[str, str]:
    """How far a row is from the first one, ours and the paper's."""
    one, other = theirs[row].get(measure), theirs[first].get(measure)
    printed = NONE if one is None or other is None else f"{one - other:+.1f}"
    return _paired(ours[row], ours[first], measure), printed


# How far rows of a paper's table are apart, with intervals: from one row, from other runs, and by
# round.


Cells = Sequence[tuple[str, str]]
Found = Mapping[str, Sequence[Mapping[str, Any]]]

OF_A_RUN = ("seed", "threads", "engine", "start_from")
"""Settings that say nothing of what is compared: of two runs of one seed they may differ."""


def asked_for(
    recipe: Recipe,
    cells: Cells,
    runs: Sequence[Variant],
    against: str = "",
    beside: Path | None = None,
    others: Sequence[Variant] = (),
    at: Sequence[int] = (),
) -> Iterator[RenderableType]:
    """What of the tables below is asked for: ``beside`` is the folder of ``others``, ``at`` names
    rounds.
    """
    if beside is not None:
        yield from apart_from_others(recipe, cells, runs, others, beside, against)
    elif against:
        yield from apart_from(recipe, cells, runs, against)
    if at:
        yield from by_round(cells, runs, at, "" if beside else against)


def apart_from(
    recipe: Recipe, cells: Cells, runs: Sequence[Variant], against: str
) -> Iterator[RenderableType]:
    """For every column, how far each row is from the row ``against``, paired by seed, with a 95 %
    interval.

    Raises ConfigError if no column has such a row.
    """
    _check_row(against, cells)
    there = summaries_by_cell(runs)
    yield Text(
        f"\nDifferences to {against}, in points, with the 95 % interval of differences paired by "
        "seed"
    )
    head = ("", "", "ours", "95 % interval", "seeds", "", "paper")
    measures = _measures(recipe, there)
    lines = []
    for row, column in _by_column(cells):
        if row != against:
            comparison = Comparison((row, column), (against, column), there, there)
            lines += [comparison.line(recipe, measure) for measure in measures]
    yield table(head, lines, words=2)


def apart_from_others(
    recipe: Recipe,
    cells: Cells,
    runs: Sequence[Variant],
    others: Sequence[Variant],
    where: Path,
    against: str = "",
) -> Iterator[RenderableType]:
    """How far each row is from other runs, those of the folder ``where``: of the row of its name,
    or of ``against``.

    First it says which settings that both have are not the same, of the method only where the row
    is. Raises ConfigError where the others have none of these runs, and for a row that is not
    there.
    """
    _check_row(against, recipe.cells(), "of the recipe")
    if not any(run.folder.is_dir() for run in others):
        raise ConfigError(
            f"--beside: {where} holds no run of these rows; name a folder, or a pack, of this "
            "recipe's runs"
        )
    here = summaries_by_cell(runs)
    there = summaries_by_cell(others)
    comparisons = [
        Comparison((row, column), (against or row, column), here, there)
        for row, column in _by_column(cells)
    ]
    named = against or "the same rows"
    yield Text(
        f"\nDifferences to {named} in {where}, in points, with the 95 % interval of differences "
        "paired by seed"
    )
    differ: dict[str, list[str]] = {}
    for comparison in comparisons:
        ours = _finished(*comparison.cell, runs)
        theirs = _finished(*comparison.other, others)
        settings = _other_settings(ours, theirs, other_row=bool(against))
        differ.setdefault(settings, []).append(", ".join(comparison.cell))
    for settings, rows in differ.items():
        if settings:
            yield Text(f"{'; '.join(rows)}: {settings}")
    # The paper has no column here: these are two runs of ours.
    measures = _measures(recipe, here)
    lines = [comparison.line(recipe, m)[:-1] for comparison in comparisons for m in measures]
    yield table(("", "", "ours", "95 % interval", "seeds", ""), lines, words=2)


def by_round(
    cells: Cells, runs: Sequence[Variant], rounds: Sequence[int], against: str = ""
) -> Iterator[RenderableType]:
    """Each row's accuracy at some rounds, as the mean of the ten that end there, and how far it is
    from a row.

    Of finished runs, those that are long enough. Raises ConfigError for a round below 1, and for a
    row ``against`` that is not there.
    """
    if wrong := [number for number in rounds if number < 1]:
        raise ConfigError(f"--at: rounds are counted from 1, and {wrong[0]} is none")
    _check_row(against, cells)
    head = ["", "round", "ours [%]", "seeds"]
    if against:
        head += [f"to {against}", "95 % interval", ""]
    lines = []
    for column in dict.fromkeys(column for _, column in cells):
        rows = [row for row, of_column in cells if of_column == column]
        curves = {row: _curves_by_seed(row, column, runs) for row in rows}
        for row in rows:
            for number in rounds:
                recent = _recent(curves[row], number)
                level = spread(list(recent.values()))
                line = [
                    f"{row}, {column}",
                    str(number),
                    level.text(100, 1) if level else NONE,
                    str(len(recent)),
                ]
                if against:
                    difference = None
                    if row != against:
                        baseline = _recent(curves.get(against, {}), number)
                        difference = paired_difference(recent, baseline)
                    cell = _difference_cells(difference)
                    line += [cell.difference, cell.interval, cell.verdict]
                lines.append(line)
    yield Text("\nMeans of the ten rounds up to a round")
    yield table(head, lines, words=2)


def _curves_by_seed(
    row: str, column: str, runs: Sequence[Variant]
) -> dict[int, Mapping[int, float]]:
    """The accuracy by round of each run of a cell, by its seed."""
    return {run.seed: run.curve("accuracy") for run in runs_of_cell(row, column, runs)}


def _recent(curves: Mapping[int, Mapping[int, float]], number: int) -> dict[int, float]:
    """{seed: the mean of the ten rounds up to ``number``}, of the runs that came so far."""
    means = {
        seed: best_and_recent([v for r, v in curve.items() if 0 < r <= number])[LAST_TEN]
        for seed, curve in curves.items()
        if number in curve
    }
    return {seed: mean for seed, mean in means.items() if mean is not None}


def _check_row(row: str, cells: Cells, whose: str = "among the cells") -> None:
    rows = dict.fromkeys(row_of_cell for row_of_cell, _ in cells)
    if row and row not in rows:
        raise ConfigError(f"there is no row {row!r} {whose}; name one of {', '.join(rows)}")


def _by_column(cells: Cells) -> list[tuple[str, str]]:
    """The cells, one column after another."""
    columns = list(dict.fromkeys(column for _, column in cells))
    return sorted(cells, key=lambda cell: columns.index(cell[1]))


def _measures(recipe: Recipe, summaries: Found) -> list[str]:
    """The measures that are compared: the recipe's, and for long runs the mean of the last ten
    rounds after the accuracy.
    """
    first, *others = recipe.measures
    is_long = any(summary["rounds"] > 10 for cell in summaries.values() for summary in cell)
    if first == "accuracy" and is_long:
        return [first, LAST_TEN, *others]
    return [first, *others]


@dataclass(frozen=True)
class Comparison:
    """A cell, the cell that it is compared with, and the runs' summaries by cell of both."""

    cell: tuple[str, str]
    other: tuple[str, str]
    summaries: Found
    other_summaries: Found

    def line(self, recipe: Recipe, measure: str) -> list[str]:
        """The line of a table for one measure, with the paper's difference at its end."""
        difference = paired_difference(
            by_seed(self.summaries.get(" | ".join(self.cell), []), measure),
            by_seed(self.other_summaries.get(" | ".join(self.other), []), measure),
        )
        cells = _difference_cells(difference)
        title = COLUMN_TITLES.get(measure, measure)
        if measure == LAST_TEN:
            title = "last 10"
        return [
            ", ".join(self.cell),
            title,
            cells.difference,
            cells.interval,
            cells.seeds,
            cells.verdict,
            self._published(recipe, measure),
        ]

    def _published(self, recipe: Recipe, measure: str) -> str:
        """The difference of the paper's two numbers, if it has both."""
        first = recipe.published.get(self.cell, Published()).values.get(measure)
        second = recipe.published.get(self.other, Published()).values.get(measure)
        if first is None or second is None:
            return NONE
        return f"{first - second:+.1f}"


@dataclass(frozen=True, kw_only=True)
class DifferenceCells:
    """A difference in a table: in points, its interval, the number of seeds that both have, and
    whether it tells the two apart.
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
    return DifferenceCells(
        difference=points,
        interval=f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        seeds=seeds,
        verdict="told apart" if difference.told_apart else "not told apart",
    )


def _other_settings(ours: Sequence[Path], theirs: Sequence[Path], other_row: bool) -> str:
    """The settings in which the first of some runs differs from the first of others.

    other_row: whether the others are of another row; then their methods differ anyway.
    """
    if not ours:
        return "no finished run here"
    if not theirs:
        return "no finished run there"
    here = settings_by_key(ours[0])
    there = settings_by_key(theirs[0])
    texts = []
    for key in differing([here, there]):
        is_of_both = key in here and key in there and key not in OF_A_RUN
        if is_of_both and not (other_row and key.startswith("method.")):
            texts.append(f"{key} = {as_written(here[key])}, there {as_written(there[key])}")
    return ", ".join(texts)


RecipeText = Annotated[str, Parameter(show_default=False)]
SeedCount = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1000))]


def reproduce(
    recipe: RecipeText = "",
    *,
    cells: Names = (),
    rounds: int | None = None,
    seeds: SeedCount = 3,
    data: RecipeText = "",
    out: Path | None = None,
    jobs: Jobs = None,
    set_: Settings = (),
    table: Flag = False,
    against: str = "",
    beside: Path | None = None,
    at: Rounds = (),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> int:
    """Run a paper's table or figure, going on where it stopped, and print ours beside the paper's;
    no name: list them.

    Pictures are in the report that it writes; docs/papers.md says which recipe and which section is
    which figure.

    Args:
        recipe: A table or figure by name, e.g. fedadkd/table2.
        cells: Only these, as ROW:COLUMN with * and ?, e.g. --cells "Fed*:CIFAR-10 .1". Unset, all.
        rounds: Other than the paper's; where cells start from another run's model, the rounds of
            that run.
        seeds: A count: 3 stands for seeds 1, 2, 3.
        data: Another data set than the paper's, in all columns.
        out: The directory of all runs. Unset, one under runs/ named after the recipe and what was
            changed.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        set_: A value over the recipe's, as key=value, e.g. -s data.train_size=10000. May be
            repeated.
        table: Run nothing; print the table of what is there.
        against: Also print how far each row is from this one, paired by seed, with a 95 % interval.
        beside: Other runs of this table, made with other settings: print how far each row is from
            the row of its name there, or from the row --against there.
        at: Also print each row at these rounds, as the mean of the ten that end there, e.g. --at
            50,100,200.
        overwrite: Begin anew where a run is in the way: damaged, of other settings, or of other
            files or data.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.report import terminal
    from fedstill.running.directory import readable

    if not recipe:
        return _list_recipes()
    screen = terminal.console()
    paper_table = load_recipe(recipe)
    changes = changes_of(paper_table, set_, rounds, data)
    folder = out or paper_table.folder(changes)
    folder = readable(folder) if table else folder
    chosen = paper_table.cells(cells)
    runs_of = partial(paper_table.variants, seeds=range(1, seeds + 1), changes=changes)
    runs = runs_of(chosen, out=folder)
    code = (
        0 if table else carry_out(runs, folder, jobs, quiet=quiet, overwrite=overwrite, show=False)
    )
    if table and not any(run.folder.is_dir() for run in runs):
        screen.print(f"{folder} holds none of these runs; without --table they are done.")
    others = (
        ()
        if beside is None
        else runs_of(paper_table.with_row(chosen, against), out=readable(beside))
    )
    apart = asked_for(paper_table, chosen, runs, against, beside, others, at)
    for line in (*paper_tables(paper_table, chosen, runs, changes), *apart):
        screen.print(line)
    return code


def changes_of(
    recipe: Recipe, overrides: Sequence[str], rounds: int | None, data: str
) -> dict[str, Any]:
    """What a command sets over a recipe, by dotted key.

    Raises ConfigError for what two options set, and for what the recipe's cells decide themselves.
    """
    changes = parse_overrides(tuple(overrides))
    keys = leaf_keys(changes)
    if "method.name" in keys:
        raise ConfigError(
            "-s method.name: the rows of a recipe are its methods; choose rows with --cells, or "
            "compare another method with fedstill compare"
        )
    if recipe.starts and "start_from" in keys:
        raise ConfigError(
            f"-s start_from: cells of {recipe.name} start from runs of their own; leave it out"
        )
    options: dict[str, tuple[str, Any]] = {}
    if rounds is not None:
        options["rounds"] = ("--rounds", rounds)
    if data:
        options["data.name"] = ("--data", data)
    for key, (option, value) in options.items():
        if key in keys:
            raise ConfigError(f"{key} is set twice, by -s and by {option}; leave one of them out")
        changes[key] = value
    return changes


def _list_recipes() -> int:
    from fedstill.report import terminal

    rows = [(name, load_recipe(name).paper) for name in recipe_names()]
    terminal.console(sentences=True).print(terminal.table(["recipe", "what it is"], rows, words=2))
    return 0
