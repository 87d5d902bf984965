"""A paper's table beside ours: for every column the levels, and the difference of each row to the
first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedstill.experiment.comparing.recipes import Published, Recipe
from fedstill.experiment.comparing.standing import other_settings
from fedstill.experiment.comparing.variants import Variant
from fedstill.metrics.ranks import paired_difference
from fedstill.report.numbers import COLUMNS, Spread, spread
from fedstill.report.runs import Run, read_run
from fedstill.report.summary import NONE
from fedstill.report.terminal import table
from fedstill.report.untaught import untaught

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
    if others := [other for run in runs if (other := other_settings(run))]:
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
        if said := untaught({row: runs_of_cell(row, column, runs) for row in rows if asked}):
            yield Text(said)
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
        own = runs_of_cell(row, column, runs)
        for key, printed in recipe.published.get((row, column), Published()).measured.items():
            curves = [run.curve(key) for run in own]
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
    own = [v.folder for v in runs if v.label == f"{row} | {column}"]
    return [read_run(folder) for folder in own if (folder / "summary.json").is_file()]


def _unfinished(row: str, column: str, runs: Sequence[Variant]) -> Iterator[str]:
    """A line for each run of a cell that has begun and is not at its end: how far it came, and who
    was refused then.
    """
    for variant in runs:
        begun = (variant.folder / "journal.jsonl").is_file() and not (
            variant.folder / "summary.json"
        ).is_file()
        if variant.label == f"{row} | {column}" and begun:
            run = read_run(variant.folder)
            told = [
                f", {100 * v:.1f} % after the last"
                for r, v in run.curve("accuracy").items()
                if r > 0
            ][-1:]
            after = [e for e in run.clients if e["round"] > len(run.rounds) and "refused" in e][:1]
            told += [f"; then client {e['client']}: {e['refused']}" for e in after]
            yield (
                f"not finished: {row}, seed {run.seed}: {len(run.rounds)} of {run.asked} "
                f"rounds{''.join(told)}"
            )


def _head(recipe: Recipe, long: bool) -> list[str]:
    """Measures in percent; Δ is the difference of the first to the first row, in points, over the
    seeds both have.
    """
    first, *others = (COLUMN_TITLES.get(m, m) for m in recipe.measures)
    named = [] if recipe.measures[0] == "accuracy" else [first]
    head = [
        "",
        " ".join(["ours", *named, "[%]"]),
        " ".join(["paper", *named, "[%]"]),
        *(["Δ ours", "Δ paper"] if len(others) < MANY else []),
        *(["last 10 [%]", "Δ last 10"] if long else []),
    ]
    return [
        *head,
        *(f"{title} {whose}" for title in others for whose in ("ours", "paper")),
        "seeds",
    ]


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
    ours = {r: summaries.get(f"{r} | {column}", []) for r in rows}
    theirs = {r: recipe.published.get((r, column), Published()).values for r in rows}
    first, *others = recipe.measures
    return [
        [
            row,
            _ours(ours[row], first),
            _printed(theirs[row], first),
            *([*_apart(ours, theirs, row, rows[0], first)] if len(others) < MANY else []),
            *(
                [_ours(ours[row], LAST_TEN), _paired(ours[row], ours[rows[0]], LAST_TEN)]
                if long
                else []
            ),
            *(cell for m in others for cell in (_ours(ours[row], m), _printed(theirs[row], m))),
            str(len(ours[row])),
        ]
        for row in rows
    ]


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
