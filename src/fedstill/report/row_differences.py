"""How far rows of a paper's table are apart, with intervals: from one row, from other runs, and by
round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedstill.errors import ConfigError
from fedstill.experiment.comparing.recipes import Published, Recipe
from fedstill.experiment.comparing.standing import as_settled
from fedstill.experiment.comparing.variants import Variant
from fedstill.metrics.accuracy import best_and_recent
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.report.groups import differing
from fedstill.report.groups import said as as_written
from fedstill.report.numbers import spread
from fedstill.report.reproduced import (
    COLUMN_TITLES,
    LAST_TEN,
    by_seed,
    runs_of_cell,
    summaries_by_cell,
)
from fedstill.report.runs import Run
from fedstill.report.summary import NONE
from fedstill.report.terminal import table

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
    pairs = [
        ((row, column), (against, column)) for row, column in _by_column(cells) if row != against
    ]
    lines = [
        _line(recipe, *pair, m, there, there) for pair in pairs for m in _measures(recipe, there)
    ]
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
    here, there = summaries_by_cell(runs), summaries_by_cell(others)
    pairs = [((row, column), (against or row, column)) for row, column in _by_column(cells)]
    named = against or "the same rows"
    yield Text(
        f"\nDifferences to {named} in {where}, in points, with the 95 % interval of differences "
        "paired by seed"
    )
    differ: dict[str, list[str]] = {}
    for one, other in pairs:
        said = _other_settings(
            runs_of_cell(*one, runs), runs_of_cell(*other, others), bool(against)
        )
        differ.setdefault(said, []).append(", ".join(one))
    yield from (Text(f"{'; '.join(rows)}: {said}") for said, rows in differ.items() if said)
    lines = [
        _line(recipe, *pair, m, here, there)[:-1] for pair in pairs for m in _measures(recipe, here)
    ]
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
    head = [
        "",
        "round",
        "ours [%]",
        "seeds",
        *([f"to {against}", "95 % interval", ""] if against else []),
    ]
    lines = []
    for column in dict.fromkeys(c for _, c in cells):
        rows = [r for r, c in cells if c == column]
        curves = {
            row: {run.seed: run.curve("accuracy") for run in runs_of_cell(row, column, runs)}
            for row in rows
        }
        for row in rows:
            for number in rounds:
                own, base = (_recent(curves.get(name, {}), number) for name in (row, against))
                level = spread(list(own.values()))
                line = [
                    f"{row}, {column}",
                    str(number),
                    level.text(100, 1) if level else NONE,
                    str(len(own)),
                ]
                apart = _apart(None if row == against else paired_difference(own, base))
                lines.append([*line, *((apart[0], apart[1], apart[3]) if against else ())])
    yield Text("\nMeans of the ten rounds up to a round")
    yield table(head, lines, words=2)


def _recent(curves: Mapping[int, Mapping[int, float]], number: int) -> dict[int, float]:
    """{seed: the mean of the ten rounds up to ``number``}, of the runs that came so far."""
    means = {
        seed: best_and_recent([v for r, v in curve.items() if 0 < r <= number])[LAST_TEN]
        for seed, curve in curves.items()
        if number in curve
    }
    return {seed: mean for seed, mean in means.items() if mean is not None}


def _check_row(row: str, cells: Cells, whose: str = "among the cells") -> None:
    if row and row not in {r for r, _ in cells}:
        raise ConfigError(
            f"there is no row {row!r} {whose}; name one of {', '.join({r: 0 for r, _ in cells})}"
        )


def _by_column(cells: Cells) -> list[tuple[str, str]]:
    return [
        (row, column)
        for column in dict.fromkeys(c for _, c in cells)
        for row, c in cells
        if c == column
    ]


def _measures(recipe: Recipe, summaries: Found) -> list[str]:
    long = recipe.measures[0] == "accuracy" and any(
        s["rounds"] > 10 for own in summaries.values() for s in own
    )
    return [recipe.measures[0], *([LAST_TEN] if long else []), *recipe.measures[1:]]


def _line(
    recipe: Recipe,
    one: tuple[str, str],
    other: tuple[str, str],
    measure: str,
    ours: Found,
    theirs: Found,
) -> list[str]:
    apart = paired_difference(
        by_seed(ours.get(" | ".join(one), []), measure),
        by_seed(theirs.get(" | ".join(other), []), measure),
    )
    first, second = (
        recipe.published.get(cell, Published()).values.get(measure) for cell in (one, other)
    )
    printed = NONE if first is None or second is None else f"{first - second:+.1f}"
    title = "last 10" if measure == LAST_TEN else COLUMN_TITLES.get(measure, measure)
    return [", ".join(one), title, *_apart(apart), printed]


def _apart(apart: Difference | None) -> tuple[str, str, str, str]:
    """The difference, its interval, the seeds that both have, and whether it tells the two
    apart.
    """
    if apart is None:
        return NONE, NONE, "0", ""
    if apart.pairs < 2:
        return f"{100 * apart.mean:+.1f}", NONE, str(apart.pairs), ""
    told = "told apart" if apart.told_apart else "not told apart"
    return (
        f"{100 * apart.mean:+.1f}",
        f"{100 * apart.low:+.1f} to {100 * apart.high:+.1f}",
        str(apart.pairs),
        told,
    )


def _other_settings(ours: Sequence[Run], theirs: Sequence[Run], other_row: bool) -> str:
    if not ours or not theirs:
        return f"no finished run {'there' if ours else 'here'}"
    here, there = (as_settled(run.folder) for run in (ours[0], theirs[0]))
    keys = [k for k in differing([here, there]) if k in here and k in there and k not in OF_A_RUN]
    keys = [k for k in keys if not (other_row and k.startswith("method."))]
    return ", ".join(f"{k} = {as_written(here[k])}, there {as_written(there[k])}" for k in keys)
