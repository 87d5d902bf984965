"""The table of what people call forgetting over time, for one matrix or several, and in which way
they part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fedstill.metrics import tasks as over
from fedstill.metrics.published import TABLE, Definition
from fedstill.report.matrix_file import AccuracyMatrix

DIGITS = 2
CHAUDHRY = next(d for d in TABLE if d.name == "average_forgetting")
SHOWN_ROWS = 30
"""Of a matrix with more rows or columns, none is printed."""


def definition_rows(matrices: Sequence[AccuracyMatrix]) -> list[list[str]]:
    """A row for each definition: its name, its number for each matrix and unit, its formula in
    words, its source.
    """
    rows = [
        [d.name, *(_number(d, m, by_class) for m, by_class in in_units(matrices)), d.says, d.source]
        for d in TABLE
    ]
    forward = [_forward(m, by_class) for m, by_class in in_units(matrices)]
    says = "row before a task's own - untrained model; tasks after the first"
    rows.insert(5, ["forward_transfer", *forward, says, "Lopez-Paz & Ranzato 2017, FWT"])
    return rows


def definition_heads(matrices: Sequence[AccuracyMatrix]) -> list[str]:
    """The heads of those columns."""
    several = len(matrices) > 1
    units = ["by class" if by_class else "by task" for _, by_class in in_units(matrices)]
    named = [f"{m.name} {unit}" for (m, _), unit in zip(in_units(matrices), units, strict=True)]
    return ["number [%]", *(named if several else units), "formula in words", "source"]


def in_units(matrices: Sequence[AccuracyMatrix]) -> list[tuple[AccuracyMatrix, bool]]:
    """Each matrix by task, and by class where its columns are classes; the second says which."""
    return [
        (m, by_class)
        for m in matrices
        for by_class in ([False, True] if m.own is not None else [False])
    ]


def how_they_differ(matrix: AccuracyMatrix) -> Iterator[str]:
    """How each other definition of forgetting differs from Chaudhry's on this matrix, by task: a
    line each.
    """
    usual = CHAUDHRY.of(matrix.tasks.percent, None)
    for definition in TABLE:
        value = definition.of(matrix.tasks.percent, None) if definition.differs else math.nan
        if math.isnan(value) or math.isnan(usual):
            continue
        away = round(value - usual, DIGITS)
        how = (
            f"{abs(away):.{DIGITS}f} {'above' if away > 0 else 'below'} it"
            if away
            else "the same here"
        )
        yield f"{definition.name}: {_plain(value)}, {how}; {definition.differs}"


def matrix_rows(matrix: AccuracyMatrix) -> list[list[str]]:
    """The matrix itself, a row for each task's end, the untrained model's first; nothing of a large
    one.
    """
    if max(matrix.percent.shape) > SHOWN_ROWS:
        return []
    untrained = [] if matrix.initial is None else [["untrained", *map(_plain, matrix.initial)]]
    return untrained + [
        [f"after task {t + 1}", *map(_plain, row)] for t, row in enumerate(matrix.percent)
    ]


def _number(definition: Definition, matrix: AccuracyMatrix, by_class: bool) -> str:
    if by_class and not definition.by_class:
        return "–"
    shown = matrix if by_class else matrix.tasks
    value = definition.of(shown.percent, shown.own)
    if definition.name == "worst_forgetting":
        column = over.worst_forgetting(shown.percent, shown.own)[1]
        return _plain(value) if column is None else f"{_plain(value)} ({_at(shown, column)})"
    return _plain(100 * value if definition.name == "kept" else value)


def _at(matrix: AccuracyMatrix, column: int) -> str:
    """The name of a column among those whose task has come."""
    own = np.arange(len(matrix.columns)) if matrix.own is None else np.array(matrix.own)
    return matrix.columns[int(np.flatnonzero(own < len(matrix.percent))[column])]


def _forward(matrix: AccuracyMatrix, by_class: bool) -> str:
    shown = matrix if by_class else matrix.tasks
    return (
        "–"
        if shown.initial is None
        else _plain(over.forward_transfer(shown.percent, shown.initial, shown.own))
    )


def _plain(value: float) -> str:
    return "–" if math.isnan(value) else f"{value + 0.0:.{DIGITS}f}"
