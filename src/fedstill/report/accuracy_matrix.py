"""Accuracy matrices from files or runs, and the definitions of forgetting side by side."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedstill.core.errors import ConfigError, DataError
from fedstill.metrics import tasks as over
from fedstill.metrics.published import TABLE, Definition
from fedstill.metrics.tasks import by_task
from fedstill.metrics.values import Values, values
from fedstill.running.runs import Run, find

# An accuracy matrix in a CSV file, by whomever: a row for each task's end, a column for each task
# or class.


Unit = Literal["percent", "share"]

BLANKS = frozenset({"", "-", "–", "—", "nan", "none", "null", "na", "n/a"})
"""What stands for a cell without accuracy, in any case of letters."""

UNTRAINED = frozenset({"0", "untrained", "initial"})
"""What the first cell of the untrained model's row may be."""


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracies in percent, (T, K), NaN for blanks; where columns are classes, ``own`` is the task
    of each, from 0.

    ``initial``: the untrained model's (K,). ``notes``: how the file was read, a sentence
    each. ``joined``: the same by task, where it is known better than as the mean over classes.
    """

    name: str
    percent: Values
    columns: tuple[str, ...]
    own: tuple[int, ...] | None = None
    initial: Values | None = None
    notes: tuple[str, ...] = ()
    joined: AccuracyMatrix | None = None

    @property
    def tasks(self) -> AccuracyMatrix:
        """The same by task; itself where columns are tasks."""
        if self.own is None or self.joined is not None:
            return self.joined or self
        joined = by_task(self.percent, self.own)
        initial = None if self.initial is None else by_task([self.initial], self.own)[0]
        names = tuple(f"task {t + 1}" for t in range(joined.shape[1]))
        return AccuracyMatrix(self.name, joined, names, None, initial, self.notes)


@dataclass(frozen=True)
class _Cells:
    """The body of a file: its cells, the line of each row, the first column's place, and the
    columns' names.
    """

    path: Path
    rows: list[list[str]]
    lines: list[int]
    first: int = 0
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def number(self, row: int, column: int) -> float:
        """The number in a cell, NaN for a blank; raises DataError with the cell's place for
        anything else.
        """
        text = self.rows[row][column].strip() if column < len(self.rows[row]) else ""
        if text.lower() in BLANKS:
            return float("nan")
        if not _is_number(text):
            raise DataError(
                f"{self.place(row, column)}: {text!r} is no number; leave a cell empty that has "
                "none"
            )
        return float(text.removesuffix("%"))

    def place(self, row: int, column: int) -> str:
        """Where a cell is, counted as an editor does."""
        return f"{self.path}, line {self.lines[row]}, column {column + self.first + 1}"


def read_matrix(
    path: Path, unit: Unit | None = None, initial: Sequence[float] = (), own: Sequence[int] = ()
) -> AccuracyMatrix:
    """The accuracy matrix in a CSV file: commas, semicolons or tabs; with or without a line and a
    column of names.

    ``unit``: of the numbers; left out, percent where one is above 1. ``initial``: the untrained
    model's accuracies, if the file has no row for them. ``own``: where columns are classes, the
    task of each, counted from 0 or from 1. Raises DataError with the cell's place for what is no
    accuracy, ConfigError for lists that do not fit.
    """
    body = _named(_read_cells(path))
    wide = max(map(len, body.rows), default=0)
    numbers = np.array([[body.number(i, j) for j in range(wide)] for i in range(len(body.rows))])
    if not numbers.size or np.isnan(numbers).all():
        raise DataError(f"{path}: no number in it; a row is a task's end, a column a task")
    for row in np.flatnonzero(np.isnan(numbers).all(axis=1))[:1]:
        raise DataError(
            f"{path}, line {body.lines[row]}: no number in this row; a row is a task's end"
        )
    largest = np.nanmax(numbers)
    taken: Unit = unit or ("percent" if largest > 1 else "share")
    _check_range(numbers, body, taken)
    scale = 1.0 if taken == "percent" else 100.0
    before = _initial(body, numbers, initial, path)
    rows = numbers[1:] if before is not None and not initial else numbers
    notes = (
        [] if unit else [f"numbers are read as {'percentages' if taken == 'percent' else 'shares'}"]
    )
    matrix = AccuracyMatrix(str(path), scale * rows, _columns(body, wide, own))
    matrix = replace(matrix, initial=None if before is None else scale * before)
    return _told(_with_own(matrix, own), notes)


def _read_cells(path: Path) -> _Cells:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise DataError(f"{path}: cannot be read: {why}") from error
    mark = next((m for m in "\t;" if m in text), ",")
    reader = csv.reader(io.StringIO(text), delimiter=mark)
    rows = [(row, reader.line_num) for row in reader if row]
    return _Cells(path, [row for row, _ in rows], [line for _, line in rows])


def _named(cells: _Cells) -> _Cells:
    """Without a first line of names and a first column of names or of numbers that count the
    tasks.
    """
    rows, lines, names = cells.rows, cells.lines, tuple[str, ...]()
    if rows and not any(_is_number(c.strip()) for c in rows[0]) and len(rows) > 1:
        names, rows, lines = tuple(c.strip() for c in rows[0]), rows[1:], lines[1:]
    side = [row[0].strip() if row else "" for row in rows]
    texts = all(s.lower() not in BLANKS and not _is_number(s) for s in side[1:] or side[:1])
    counted = (
        any(side == [str(k + start) for k in range(len(side))] for start in (0, 1))
        and len(side) > 1
    )
    wide = max(map(len, rows), default=0)
    if wide > 1 and ((texts and len(side) > 1) or counted):
        return _Cells(cells.path, [row[1:] for row in rows], lines, 1, names[1:], tuple(side))
    return _Cells(cells.path, rows, lines, 0, names)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.removesuffix("%")))
    except ValueError:
        return False


def _check_range(numbers: Values, body: _Cells, unit: Unit) -> None:
    top = 100 if unit == "percent" else 1
    for row, column in np.argwhere((numbers < 0) | (numbers > top))[:1]:
        raise DataError(
            f"{body.place(row, column)}: {numbers[row, column]:g} is outside [0, {top}], as {unit}"
        )


def _initial(body: _Cells, numbers: Values, given: Sequence[float], path: Path) -> Values | None:
    if given and len(given) != numbers.shape[1]:
        raise ConfigError(
            f"--initial has {len(given)} numbers, and {path} has {numbers.shape[1]} columns"
        )
    if body.labels and body.labels[0].lower() in UNTRAINED:
        if given:
            raise ConfigError(
                f"{path} has the untrained model in its first row; leave --initial out"
            )
        if len(numbers) == 1:
            raise DataError(f"{path}: only the untrained model is in it; a row is a task's end")
        return np.array(numbers[0])
    return np.array(given, dtype=np.float64) if given else None


def _columns(body: _Cells, wide: int, own: Sequence[int]) -> tuple[str, ...]:
    what = "class" if own else "task"
    start = 0 if own else 1
    return tuple(
        body.names[j] if j < len(body.names) and body.names[j] else f"{what} {j + start}"
        for j in range(wide)
    )


def _with_own(matrix: AccuracyMatrix, own: Sequence[int]) -> AccuracyMatrix:
    rows, columns = matrix.percent.shape
    if own:
        start = min(own)
        if (
            len(own) != columns
            or start not in (0, 1)
            or set(own) != set(range(start, max(own) + 1))
        ):
            raise ConfigError(
                f"--class-tasks {','.join(map(str, own))}: give the task of each of the {columns} "
                "columns of "
                f"{matrix.name}, counted from 0 or from 1, none left out"
            )
        matrix = replace(matrix, own=tuple(t - start for t in own))
    tasks = columns if matrix.own is None else max(matrix.own) + 1
    if rows > tasks:
        raise DataError(
            f"{matrix.name}: {rows} rows for {tasks} tasks; a row is a task's end, a column a "
            "task. Say --class-tasks "
            "if columns are classes; begin an untrained model's row with 0, and the others with 1, "
            "2, ..."
        )
    return matrix


def _told(matrix: AccuracyMatrix, notes: list[str]) -> AccuracyMatrix:
    rows, tasks = len(matrix.percent), matrix.tasks.percent.shape[1]
    if rows < tasks:
        notes.append(
            f"{rows} rows for {tasks} tasks: those after task {rows} have not come, and are left "
            "out. "
            "If columns are classes, say --class-tasks"
        )
    own = np.arange(matrix.percent.shape[1]) if matrix.own is None else np.array(matrix.own)
    later = matrix.percent[own[None] > np.arange(rows)[:, None]]
    if later.size and not later.any():
        notes.append(
            "zeros of tasks to come count as accuracies; leave those cells empty if they were not "
            "measured"
        )
    gaps = np.argwhere(np.isnan(matrix.percent) & (own[None] <= np.arange(rows)[:, None]))
    for row, column in gaps[:1]:
        more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        notes.append(
            f"no accuracy after task {row + 1} in {matrix.columns[column]}{more}: left out of "
            "every mean"
        )
    return replace(matrix, notes=tuple(notes))


# The accuracy matrices of runs with tasks: of a run, or of all runs in a folder.


def run_matrices(directory: Path) -> list[AccuracyMatrix]:
    """The matrix of each run in a directory, by task, and by class where tasks differ in these.

    Raises ConfigError where no run in it has tasks that ended, CorruptFile for a run that cannot be
    read.
    """
    runs = [run for run in find([directory]) if any(end["task"] for end in run.task_ends)]
    if not runs:
        raise ConfigError(
            f"{directory}: no run in it has ended a task; give a run with [stream], or a CSV file "
            "with a row for each "
            "task's end"
        )
    return [_matrix(run, str(run.named)) for run in runs]


def _matrix(run: Run, name: str) -> AccuracyMatrix:
    ends = [end for end in run.task_ends if end["task"]]
    before = run.task_ends[0] if not run.task_ends[0]["task"] else None
    by_task = 100 * values([e["row"] for e in ends], 2, "rows of task ends")
    initial = (
        None if before is None else 100 * values(before["row"], 1, "the untrained model's row")
    )
    columns = tuple(f"task {t + 1}" for t in range(by_task.shape[1]))
    tasks = AccuracyMatrix(name, by_task, columns, initial=initial)
    told: Sequence[Sequence[int]] = run.start["stream"]["classes"]
    if len(ends[0].get("totals", ())) != 1 or len({tuple(own) for own in told}) < len(told):
        return tasks
    own = {c: t for t, classes in enumerate(told) for c in classes}
    return AccuracyMatrix(
        name,
        np.array([_of_classes(e) for e in ends]),
        tuple(run.classes),
        tuple(own[c] for c in range(len(run.classes))),
        None if before is None else _of_classes(before),
        joined=tasks,
    )


def _of_classes(end: dict[str, list[list[float]]]) -> Values:
    """The accuracy of each class at a task's end (C,), in percent; NaN without test examples."""
    right, totals = (np.array(end[k][0], dtype=np.float64) for k in ("correct", "totals"))
    return 100 * np.divide(right, totals, out=np.full_like(right, np.nan), where=totals > 0)


# The table of what people call forgetting over time, for one matrix or several, and in which way
# they part.


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
