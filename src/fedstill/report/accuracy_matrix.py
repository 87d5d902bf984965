"""Accuracy matrices from files or runs, and the definitions of forgetting side by side."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError, DataError
from fedstill.metrics import tasks as task_metrics
from fedstill.metrics.tasks import TABLE, Definition, by_task
from fedstill.metrics.values import Values, values
from fedstill.running.runs import Run, find

Unit = Literal["percent", "share"]


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracies in percent, (T, K), NaN for blanks; a row for each task's end.

    ``own``: where columns are classes, the task of each, from 0; None where columns are tasks.
    ``initial``: the untrained model's (K,). ``notes``: how the file was read, a sentence each.
    ``joined``: the same by task, where it is known better than as the mean over classes.
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
        if self.joined is not None:
            return self.joined
        if self.own is None:
            return self
        percent = by_task(self.percent, self.own)
        initial = None
        if self.initial is not None:
            initial = by_task([self.initial], self.own)[0]
        columns = _task_names(percent.shape[1])
        return AccuracyMatrix(
            name=self.name, percent=percent, columns=columns, initial=initial, notes=self.notes
        )

    @property
    def column_tasks(self) -> NDArray[np.int64]:
        """The task of each column, from 0: (K,)."""
        if self.own is None:
            return np.arange(len(self.columns), dtype=np.int64)
        return np.array(self.own, dtype=np.int64)


def _task_names(count: int) -> tuple[str, ...]:
    return tuple(f"task {task + 1}" for task in range(count))


# An accuracy matrix in a CSV file, by whomever: a row for each task's end, a column for each task
# or class.


BLANKS = frozenset({"", "-", "–", "—", "nan", "none", "null", "na", "n/a"})
"""What stands for a cell without accuracy, in any case of letters."""

UNTRAINED = frozenset({"0", "untrained", "initial"})
"""What the first cell of the untrained model's row may be."""


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """The body of a file.

    ``rows``: its cells. ``lines``: the line of each row in the file. ``names``: those of the
    columns, and ``labels`` those of the rows; empty where the file has none.
    """

    path: Path
    rows: list[list[str]]
    lines: list[int]
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """How many cells the longest row has."""
        return max(map(len, self.rows), default=0)

    def numbers(self) -> Values:
        """All numbers, (rows, width), NaN for blanks; raises DataError for anything else."""
        width = self.width
        return np.array(
            [[self.number(row, column) for column in range(width)] for row in range(len(self.rows))]
        )

    def number(self, row: int, column: int) -> float:
        """The number in a cell, NaN for a blank; raises DataError with the cell's place for
        anything else.
        """
        cells = self.rows[row]
        text = ""
        if column < len(cells):
            text = cells[column].strip()
        if text.lower() in BLANKS:
            return math.nan
        if not _is_number(text):
            raise DataError(
                f"{self.place(row, column)}: {text!r} is no number; leave a cell empty that has "
                "none"
            )
        return float(text.removesuffix("%"))

    def place(self, row: int, column: int) -> str:
        """Where a cell is, counted as an editor does."""
        number = column + 1
        if self.labels:
            number += 1
        return f"{self.path}, line {self.lines[row]}, column {number}"


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
    cells = _without_labels(_without_names(_read_cells(path)))
    numbers = cells.numbers()
    _check_filled(numbers, cells)
    chosen_unit = unit or _likely_unit(numbers)
    _check_range(numbers, cells, chosen_unit)
    percent = numbers
    if chosen_unit == "share":
        percent = 100 * numbers

    untrained = None
    if initial:
        untrained = _given_initial(cells, initial, chosen_unit)
    elif _has_untrained_row(cells):
        untrained = percent[0]
        percent = percent[1:]

    columns = _column_names(cells, is_by_class=bool(own))
    matrix = AccuracyMatrix(str(path), percent, columns, initial=untrained)
    if own:
        matrix = _with_tasks_of_classes(matrix, own)
    _check_rows(matrix)
    notes = _notes(matrix)
    if unit is None:
        plural = {"percent": "percentages", "share": "shares"}[chosen_unit]
        notes.insert(0, f"numbers are read as {plural}")
    return replace(matrix, notes=tuple(notes))


def _read_cells(path: Path) -> _Cells:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read: it is no text file") from error
    reader = csv.reader(io.StringIO(text), delimiter=_delimiter(text))
    rows = []
    lines = []
    for row in reader:
        if row:
            rows.append(row)
            lines.append(reader.line_num)
    return _Cells(path=path, rows=rows, lines=lines)


def _delimiter(text: str) -> str:
    for mark in "\t;":
        if mark in text:
            return mark
    return ","


def _without_names(cells: _Cells) -> _Cells:
    """The cells below a first line of names, if there is one."""
    if len(cells.rows) < 2 or any(_is_number(cell.strip()) for cell in cells.rows[0]):
        return cells
    names = tuple(cell.strip() for cell in cells.rows[0])
    return replace(cells, rows=cells.rows[1:], lines=cells.lines[1:], names=names)


def _without_labels(cells: _Cells) -> _Cells:
    """The cells beside a first column of names, or of numbers that count the tasks, if there is
    one.
    """
    labels = [row[0].strip() for row in cells.rows]
    if cells.width < 2 or len(labels) < 2 or not (_are_names(labels) or _count_tasks(labels)):
        return cells
    rows = [row[1:] for row in cells.rows]
    return replace(cells, rows=rows, names=cells.names[1:], labels=tuple(labels))


def _are_names(labels: Sequence[str]) -> bool:
    """Whether all but the first, which may be that of an untrained model, are texts."""
    return all(label.lower() not in BLANKS and not _is_number(label) for label in labels[1:])


def _count_tasks(labels: Sequence[str]) -> bool:
    """Whether they are the numbers from 0 or from 1 on."""
    from_zero = [str(row) for row in range(len(labels))]
    from_one = [str(row + 1) for row in range(len(labels))]
    counts = [from_zero, from_one]
    return list(labels) in counts


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.removesuffix("%")))
    except ValueError:
        return False


def _check_filled(numbers: Values, cells: _Cells) -> None:
    """Raises DataError where no cell, or none of a row, has a number."""
    blanks = np.isnan(numbers)
    if blanks.all():
        raise DataError(f"{cells.path}: no number in it; a row is a task's end, a column a task")
    empty_rows = np.flatnonzero(blanks.all(axis=1))
    if len(empty_rows):
        line = cells.lines[empty_rows[0]]
        raise DataError(f"{cells.path}, line {line}: no number in this row; a row is a task's end")


def _likely_unit(numbers: Values) -> Unit:
    if np.nanmax(numbers) > 1:
        return "percent"
    return "share"


def _check_range(numbers: Values, cells: _Cells, unit: Unit) -> None:
    """Raises DataError with the place of the first number that is no accuracy."""
    largest = {"percent": 100, "share": 1}[unit]
    outside = np.argwhere((numbers < 0) | (numbers > largest))
    if len(outside):
        row, column = outside[0]
        raise DataError(
            f"{cells.place(row, column)}: {numbers[row, column]:g} is outside [0, {largest}], as "
            f"{unit}"
        )


def _has_untrained_row(cells: _Cells) -> bool:
    return bool(cells.labels) and cells.labels[0].lower() in UNTRAINED


def _given_initial(cells: _Cells, initial: Sequence[float], unit: Unit) -> Values:
    """The untrained model's accuracies from the command line, in percent."""
    if len(initial) != cells.width:
        raise ConfigError(
            f"--initial has {len(initial)} numbers, and {cells.path} has {cells.width} columns"
        )
    if _has_untrained_row(cells):
        raise ConfigError(
            f"{cells.path} has the untrained model in its first row; leave --initial out"
        )
    scale = {"percent": 1.0, "share": 100.0}[unit]
    return scale * np.array(initial, dtype=np.float64)


def _column_names(cells: _Cells, *, is_by_class: bool) -> tuple[str, ...]:
    """The names of the columns in the file; of one without a name, its number."""
    numbered = [f"task {column + 1}" for column in range(cells.width)]
    if is_by_class:
        numbered = [f"class {column}" for column in range(cells.width)]
    names = cells.names[: cells.width]
    unnamed = [""] * (cells.width - len(names))
    pairs = zip([*names, *unnamed], numbered, strict=True)
    return tuple(name or number for name, number in pairs)


def _with_tasks_of_classes(matrix: AccuracyMatrix, own: Sequence[int]) -> AccuracyMatrix:
    first = min(own)
    are_complete = set(own) == set(range(first, max(own) + 1))
    if len(own) != len(matrix.columns) or first not in (0, 1) or not are_complete:
        raise ConfigError(
            f"--class-tasks {','.join(map(str, own))}: give the task of each of the "
            f"{len(matrix.columns)} columns of {matrix.name}, counted from 0 or from 1, none left "
            "out"
        )
    return replace(matrix, own=tuple(task - first for task in own))


def _check_rows(matrix: AccuracyMatrix) -> None:
    """Raises DataError for more rows than tasks."""
    rows = len(matrix.percent)
    tasks = int(matrix.column_tasks.max()) + 1
    if rows > tasks:
        raise DataError(
            f"{matrix.name}: {rows} rows for {tasks} tasks; a row is a task's end, a column a "
            "task. Say --class-tasks if columns are classes; begin an untrained model's row with "
            "0, and the others with 1, 2, ..."
        )


def _notes(matrix: AccuracyMatrix) -> list[str]:
    """What is remarkable about the cells, as sentences."""
    notes = []
    rows = len(matrix.percent)
    tasks = int(matrix.column_tasks.max()) + 1
    if rows < tasks:
        notes.append(
            f"{rows} rows for {tasks} tasks: those after task {rows} have not come, and are left "
            "out. If columns are classes, say --class-tasks"
        )
    has_come = matrix.column_tasks[None] <= np.arange(rows)[:, None]
    later = matrix.percent[~has_come]
    if later.size and not later.any():
        notes.append(
            "zeros of tasks to come count as accuracies; leave those cells empty if they were not "
            "measured"
        )
    gaps = np.argwhere(np.isnan(matrix.percent) & has_come)
    if len(gaps):
        row, column = gaps[0]
        more = ""
        if len(gaps) > 1:
            more = f", and {len(gaps) - 1} more"
        notes.append(
            f"no accuracy after task {row + 1} in {matrix.columns[column]}{more}: left out of "
            "every mean"
        )
    return notes


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
            "with a row for each task's end"
        )
    return [_matrix(run) for run in runs]


def _matrix(run: Run) -> AccuracyMatrix:
    """The matrix by class, joined with that by task; or that by task alone."""
    tasks = _task_matrix(run)
    classes: Sequence[Sequence[int]] = run.start["stream"]["classes"]
    ends = _ends(run)
    has_one_test_set = len(ends[0].get("totals", ())) == 1
    distinct = {tuple(of_task) for of_task in classes}
    if not has_one_test_set or len(distinct) < len(classes):
        return tasks
    task_of_class = {c: task for task, of_task in enumerate(classes) for c in of_task}
    initial = None
    if not run.task_ends[0]["task"]:
        initial = _class_accuracy(run.task_ends[0])
    return AccuracyMatrix(
        name=tasks.name,
        percent=np.array([_class_accuracy(end) for end in ends]),
        columns=tuple(run.classes),
        own=tuple(task_of_class[c] for c in range(len(run.classes))),
        initial=initial,
        joined=tasks,
    )


def _task_matrix(run: Run) -> AccuracyMatrix:
    percent = 100 * values([end["row"] for end in _ends(run)], 2, "rows of task ends")
    initial = None
    if not run.task_ends[0]["task"]:
        initial = 100 * values(run.task_ends[0]["row"], 1, "the untrained model's row")
    columns = _task_names(percent.shape[1])
    return AccuracyMatrix(str(run.display_path), percent, columns, initial=initial)


def _ends(run: Run) -> list[dict[str, Any]]:
    """The events of the ends of tasks; the untrained model's is none."""
    return [end for end in run.task_ends if end["task"]]


def _class_accuracy(end: dict[str, Any]) -> Values:
    """The accuracy of each class at a task's end (C,), in percent; NaN without test examples."""
    correct = np.array(end["correct"][0], dtype=np.float64)
    totals = np.array(end["totals"][0], dtype=np.float64)
    unknown = np.full_like(correct, np.nan)
    return 100 * np.divide(correct, totals, out=unknown, where=totals > 0)


# The table of what people call forgetting over time, for one matrix or several, and in which way
# they part.


DIGITS = 2
CHAUDHRY = next(d for d in TABLE if d.name == "average_forgetting")
FORWARD_PLACE = 5
"""The row of forward transfer, which needs the untrained model and so is no ``Definition``."""
SHOWN_ROWS = 30
"""Of a matrix with more rows or columns, none is printed."""
UNKNOWN = "–"


@dataclass(frozen=True)
class MatrixColumn:
    """A column of the table: a matrix by task, or by class."""

    matrix: AccuracyMatrix
    is_by_class: bool

    @property
    def shown(self) -> AccuracyMatrix:
        """The matrix whose numbers stand in the column."""
        if self.is_by_class:
            return self.matrix
        return self.matrix.tasks

    @property
    def unit(self) -> str:
        """What the numbers are means over."""
        if self.is_by_class:
            return "by class"
        return "by task"

    def number(self, definition: Definition) -> str:
        """The cell of a definition."""
        if self.is_by_class and not definition.by_class:
            return UNKNOWN
        matrix = self.shown
        value = definition.of(matrix.percent, matrix.own)
        if definition.name == "kept":
            return _plain(100 * value)
        if definition.name == "worst_forgetting":
            return f"{_plain(value)}{_worst_column(matrix)}"
        return _plain(value)

    @property
    def forward_transfer(self) -> str:
        """The cell of forward transfer."""
        matrix = self.shown
        if matrix.initial is None:
            return UNKNOWN
        value = task_metrics.forward_transfer(matrix.percent, matrix.initial, matrix.own)
        return _plain(value)


def matrix_columns(matrices: Sequence[AccuracyMatrix]) -> list[MatrixColumn]:
    """Each matrix by task, and by class where its columns are classes."""
    columns = []
    for matrix in matrices:
        columns.append(MatrixColumn(matrix, is_by_class=False))
        if matrix.own is not None:
            columns.append(MatrixColumn(matrix, is_by_class=True))
    return columns


@dataclass(frozen=True)
class DefinitionRow:
    """A line of the table: a number's name, its formula in words, its source, and its value in each
    of the ``matrix_columns``.
    """

    name: str
    formula: str
    source: str
    numbers: Sequence[str]

    @property
    def cells(self) -> list[str]:
        """The line below ``definition_head``."""
        return [self.name, self.formula, self.source, *self.numbers]


def definition_head(matrices: Sequence[AccuracyMatrix]) -> list[str]:
    """The head of the table of definitions."""
    columns = matrix_columns(matrices)
    heads = [column.unit for column in columns]
    if len(matrices) > 1:
        heads = [f"{column.matrix.name} {column.unit}" for column in columns]
    return ["number [%]", "formula in words", "source", *heads]


def definition_rows(matrices: Sequence[AccuracyMatrix]) -> list[DefinitionRow]:
    """A line for each definition."""
    columns = matrix_columns(matrices)
    rows = []
    for definition in TABLE:
        numbers = [column.number(definition) for column in columns]
        rows.append(DefinitionRow(definition.name, definition.says, definition.source, numbers))
    forward = DefinitionRow(
        "forward_transfer",
        "row before a task's own - untrained model; tasks after the first",
        "Lopez-Paz & Ranzato 2017, FWT",
        [column.forward_transfer for column in columns],
    )
    rows.insert(FORWARD_PLACE, forward)
    return rows


def how_they_differ(matrix: AccuracyMatrix) -> Iterator[str]:
    """How each other definition of forgetting differs from Chaudhry's on this matrix, by task: a
    line each.
    """
    percent = matrix.tasks.percent
    usual = CHAUDHRY.of(percent, None)
    if math.isnan(usual):
        return
    for definition in TABLE:
        if definition.differs:
            value = definition.of(percent, None)
            if not math.isnan(value):
                distance = _distance(value - usual)
                yield f"{definition.name}: {_plain(value)}, {distance}; {definition.differs}"


def _distance(difference: float) -> str:
    """How far a number is from the usual one."""
    shown = round(difference, DIGITS)
    if shown > 0:
        return f"{shown:.{DIGITS}f} above it"
    if shown < 0:
        return f"{-shown:.{DIGITS}f} below it"
    return "the same here"


def matrix_rows(matrix: AccuracyMatrix) -> list[list[str]]:
    """The matrix itself, a row for each task's end, the untrained model's first; nothing of a large
    one.
    """
    if max(matrix.percent.shape) > SHOWN_ROWS:
        return []
    rows = []
    if matrix.initial is not None:
        rows.append(["untrained", *map(_plain, matrix.initial)])
    for task, row in enumerate(matrix.percent, 1):
        rows.append([f"after task {task}", *map(_plain, row)])
    return rows


def _worst_column(matrix: AccuracyMatrix) -> str:
    """The name of the column with the worst forgetting, in brackets; empty without any."""
    worst = task_metrics.worst_forgetting(matrix.percent, matrix.own)[1]
    if worst is None:
        return ""
    # it is counted among the columns whose task has come
    has_come = np.flatnonzero(matrix.column_tasks < len(matrix.percent))
    return f" ({matrix.columns[int(has_come[worst])]})"


def _plain(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    # no minus before a zero
    return f"{value + 0.0:.{DIGITS}f}"
