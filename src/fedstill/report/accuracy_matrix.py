"""Accuracy matrices, for the command ``forgetting``: read from CSV files or runs, and compared by
many definitions of forgetting.

An accuracy matrix has a row for the end of each task, and a column for each task or class.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError, DataError
from fedstill.metrics import tasks as task_metrics
from fedstill.metrics.accuracy import Values, float_array
from fedstill.metrics.tasks import TABLE, Definition, by_task
from fedstill.report.summary import NONE
from fedstill.report.table_files import TextTable
from fedstill.running.runs import Run, find

Unit = Literal["percent", "share"]

PLURALS: Mapping[Unit, str] = {"percent": "percentages", "share": "shares"}

LARGEST: Mapping[Unit, int] = {"percent": 100, "share": 1}
"""The largest accuracy in each unit."""

SHAPE = "a row is the end of a task, and a column is a task"
"""The shape of a matrix, for messages."""


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracies in percent (T, K); NaN for blanks.

    name: the file or the run.
    columns: the names of the K tasks or classes.
    class_tasks: the task of each class, from 0; None if columns are tasks.
    initial: the accuracies of the untrained model (K,).
    notes: sentences on how the file was read.
    measured_task_matrix: the accuracies by task, if they were measured. They may differ from the
    means over the classes of a task, which have different numbers of test examples.
    """

    name: str
    percent: Values
    columns: tuple[str, ...]
    class_tasks: tuple[int, ...] | None = None
    initial: Values | None = None
    notes: tuple[str, ...] = ()
    measured_task_matrix: AccuracyMatrix | None = None

    @property
    def task_matrix(self) -> AccuracyMatrix:
        """The accuracies by task; the matrix itself if its columns are tasks."""
        if self.measured_task_matrix is not None:
            return self.measured_task_matrix
        if self.class_tasks is None:
            return self
        percent = by_task(self.percent, self.class_tasks)
        initial = None
        if self.initial is not None:
            initial = by_task([self.initial], self.class_tasks)[0]
        columns = _task_names(percent.shape[1])
        return AccuracyMatrix(
            name=self.name, percent=percent, columns=columns, initial=initial, notes=self.notes
        )

    @property
    def column_tasks(self) -> NDArray[np.int64]:
        """The task of each column, from 0: (K,)."""
        if self.class_tasks is None:
            return np.arange(len(self.columns), dtype=np.int64)
        return np.array(self.class_tasks, dtype=np.int64)


def _task_names(count: int) -> tuple[str, ...]:
    return tuple(f"task {task + 1}" for task in range(count))


# ---- CSV files -----------------------------------------------------------------------------------


BLANKS = frozenset({"", "-", "–", "—", "nan", "none", "null", "na", "n/a"})
"""Texts of a cell without accuracy, in lower case."""

UNTRAINED = frozenset({"0", "untrained", "initial"})
"""Names of the untrained model's row, in lower case."""


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """The cells of a file without names.

    rows: the texts of the cells.
    lines: the line of each row in the file.
    names, labels: the names of the columns and of the rows; empty if the file has none.
    """

    path: Path
    rows: list[list[str]]
    lines: list[int]
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of cells in the longest row."""
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
                f"{self.place(row, column)}: {text!r} is not a number; leave the cell empty if "
                "there is no value"
            )
        return float(text.removesuffix("%"))

    def place(self, row: int, column: int) -> str:
        """Where a cell is, counted as an editor does."""
        number = column + 1
        if self.labels:
            number += 1
        return f"{self.path}, line {self.lines[row]}, column {number}"


def read_matrix(
    path: Path,
    unit: Unit | None = None,
    initial: Sequence[float] = (),
    class_tasks: Sequence[int] = (),
) -> AccuracyMatrix:
    """Read the accuracy matrix in a CSV file.

    Cells are separated by commas, semicolons or tabs. The file may have a line and a column of
    names. Raises DataError for a cell that is not an accuracy, with its place, and ConfigError for
    lists of another length than the file has columns.

    unit: the unit of the numbers; by default, percent if a number is above 1.
    initial: the accuracies of the untrained model, if the file has no row for them.
    class_tasks: the task of each class, counted from 0 or from 1, if columns are classes.
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

    columns = _column_names(cells, is_by_class=bool(class_tasks))
    matrix = AccuracyMatrix(str(path), percent, columns, initial=untrained)
    if class_tasks:
        matrix = _with_class_tasks(matrix, class_tasks)
    _check_rows(matrix)
    notes = _notes(matrix)
    if unit is None:
        notes.insert(0, f"numbers are read as {PLURALS[chosen_unit]}")
    return replace(matrix, notes=tuple(notes))


def _read_cells(path: Path) -> _Cells:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read: it is not a UTF-8 text file") from error
    reader = csv.reader(io.StringIO(text), delimiter=_delimiter(text))
    rows = []
    lines = []
    first_line = 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {first_line}: {error}; check that all quotation marks are closed"
        ) from error
    return _Cells(path=path, rows=rows, lines=lines)


def _delimiter(text: str) -> str:
    for mark in "\t;":
        if mark in text:
            return mark
    return ","


def _without_names(cells: _Cells) -> _Cells:
    """Split off a first line of column names, if there is one."""
    if len(cells.rows) < 2 or any(_is_number(cell.strip()) for cell in cells.rows[0]):
        return cells
    names = tuple(cell.strip() for cell in cells.rows[0])
    return replace(cells, rows=cells.rows[1:], lines=cells.lines[1:], names=names)


def _without_labels(cells: _Cells) -> _Cells:
    """Split off a first column of row names or task numbers, if there is one."""
    labels = [row[0].strip() for row in cells.rows]
    if cells.width < 2 or len(labels) < 2 or not (_are_names(labels) or _count_tasks(labels)):
        return cells
    rows = [row[1:] for row in cells.rows]
    return replace(cells, rows=rows, names=cells.names[1:], labels=tuple(labels))


def _are_names(labels: Sequence[str]) -> bool:
    """Whether all labels are texts; the first one may be the untrained model's."""
    return all(label.lower() not in BLANKS and not _is_number(label) for label in labels[1:])


def _count_tasks(labels: Sequence[str]) -> bool:
    """Whether the labels are the numbers from 1 on; the first one may be the untrained model's."""
    numbers = [str(row + 1) for row in range(len(labels))]
    if list(labels) == numbers:
        return True
    return labels[0].lower() in UNTRAINED and list(labels[1:]) == numbers[:-1]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.removesuffix("%")))
    except ValueError:
        return False


def _check_filled(numbers: Values, cells: _Cells) -> None:
    """Raise DataError if no cell has a number, or no cell of a row."""
    blanks = np.isnan(numbers)
    if blanks.all():
        raise DataError(f"{cells.path} has no numbers; {SHAPE}")
    empty_rows = np.flatnonzero(blanks.all(axis=1))
    if len(empty_rows):
        line = cells.lines[empty_rows[0]]
        raise DataError(f"{cells.path}, line {line}: this row has no numbers; {SHAPE}")


def _likely_unit(numbers: Values) -> Unit:
    if np.nanmax(numbers) > 1:
        return "percent"
    return "share"


def _check_range(numbers: Values, cells: _Cells, unit: Unit) -> None:
    """Raise DataError for the first number outside the range of accuracies, with its place."""
    outside = np.argwhere(_is_outside(numbers, unit))
    if len(outside):
        row, column = outside[0]
        raise DataError(
            f"{cells.place(row, column)}: {numbers[row, column]:g} is outside "
            f"[0, {LARGEST[unit]}], the range of {PLURALS[unit]}"
        )


def _is_outside(numbers: Values, unit: Unit) -> NDArray[np.bool_]:
    """Whether each number is outside the range of accuracies in a unit; blanks are not."""
    outside: NDArray[np.bool_] = (numbers < 0) | (numbers > LARGEST[unit])
    return outside


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
    accuracies = np.array(initial, dtype=np.float64)
    outside = accuracies[_is_outside(accuracies, unit)]
    if len(outside):
        raise ConfigError(
            f"--initial: {outside[0]:g} is outside [0, {LARGEST[unit]}]: {cells.path} has "
            f"{PLURALS[unit]}, and --initial has the same unit; --unit sets it"
        )
    return 100 / LARGEST[unit] * accuracies


def _column_names(cells: _Cells, *, is_by_class: bool) -> tuple[str, ...]:
    """The names of the columns in the file; of one without a name, its number."""
    numbered = [f"task {column + 1}" for column in range(cells.width)]
    if is_by_class:
        numbered = [f"class {column}" for column in range(cells.width)]
    names = cells.names[: cells.width]
    unnamed = [""] * (cells.width - len(names))
    pairs = zip([*names, *unnamed], numbered, strict=True)
    return tuple(name or number for name, number in pairs)


def _with_class_tasks(matrix: AccuracyMatrix, class_tasks: Sequence[int]) -> AccuracyMatrix:
    distinct = sorted(set(class_tasks))
    first = distinct[0]
    are_complete = distinct == list(range(first, first + len(distinct)))
    if len(class_tasks) != len(matrix.columns) or first not in (0, 1) or not are_complete:
        raise ConfigError(
            f"--class-tasks {','.join(map(str, class_tasks))}: give the task of each of the "
            f"{len(matrix.columns)} columns of {matrix.name}, counted from 0 or from 1 without gaps"
        )
    return replace(matrix, class_tasks=tuple(task - first for task in class_tasks))


def _check_rows(matrix: AccuracyMatrix) -> None:
    """Raise DataError if there are more rows than tasks."""
    rows = len(matrix.percent)
    tasks = int(matrix.column_tasks.max()) + 1
    if rows > tasks:
        raise DataError(
            f"{matrix.name}: {rows} rows for {tasks} tasks; {SHAPE}. Use --class-tasks if columns "
            "are classes. Begin an untrained model's row with 0, and the others with 1, 2, ..."
        )


def _notes(matrix: AccuracyMatrix) -> list[str]:
    """Sentences on cells that the reader may have meant otherwise."""
    notes = []
    rows = len(matrix.percent)
    tasks = int(matrix.column_tasks.max()) + 1
    if rows < tasks:
        notes.append(
            f"{rows} rows for {tasks} tasks: tasks after task {rows} are left out, because they "
            "have not been trained. If columns are classes, use --class-tasks"
        )
    has_come = matrix.column_tasks[None] <= np.arange(rows)[:, None]
    later = matrix.percent[~has_come]
    if later.size and not later.any():
        notes.append(
            "zeros of future tasks count as accuracies; leave these cells empty if they were not "
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


# ---- runs with tasks -----------------------------------------------------------------------------


def run_matrices(directory: Path) -> list[AccuracyMatrix]:
    """Read the matrix of each run in a directory.

    Columns are classes if each class belongs to one task, else tasks. Raises ConfigError if no run
    has ended a task, and CorruptFile for a run that cannot be read.
    """
    runs = [run for run in find([directory]) if any(end["task"] for end in run.task_ends)]
    if not runs:
        raise ConfigError(
            f"no run in {directory} has finished a task; give a run with [stream], or a CSV file "
            "with a row for the end of each task"
        )
    return [_matrix(run) for run in runs]


def _matrix(run: Run) -> AccuracyMatrix:
    task_matrix = _task_matrix(run)
    classes: Sequence[Sequence[int]] = run.start["stream"]["classes"]
    ends = _ends(run)
    has_one_test_set = len(ends[0].get("totals", ())) == 1
    # Tasks may share classes, or have none of some classes.
    listed_classes = sorted(chain.from_iterable(classes))
    if not has_one_test_set or listed_classes != list(range(len(run.classes))):
        return task_matrix
    task_of_class = {}
    for task, task_classes in enumerate(classes):
        task_of_class.update(dict.fromkeys(task_classes, task))
    initial = None
    if not run.task_ends[0]["task"]:
        initial = _class_accuracy(run.task_ends[0])
    return AccuracyMatrix(
        name=task_matrix.name,
        percent=_class_matrix(ends, len(run.classes)),
        columns=tuple(run.classes),
        class_tasks=tuple(task_of_class[c] for c in range(len(run.classes))),
        initial=initial,
        measured_task_matrix=task_matrix,
    )


def _task_matrix(run: Run) -> AccuracyMatrix:
    percent = 100 * run.numbers.task_rows
    initial = None
    if not run.task_ends[0]["task"]:
        initial = 100 * float_array(run.task_ends[0]["row"], 1, "the untrained model's row")
    columns = _task_names(percent.shape[1])
    return AccuracyMatrix(str(run.display_path), percent, columns, initial=initial)


def _ends(run: Run) -> list[dict[str, Any]]:
    """The events of the ends of tasks, without the untrained model's event, which has task 0."""
    return [end for end in run.task_ends if end["task"]]


def _class_matrix(ends: Sequence[dict[str, Any]], classes: int) -> Values:
    """The accuracy of each class at the end of each task, in percent; NaN where no model was
    tested.
    """
    percent = np.full((ends[-1]["task"], classes), np.nan)
    for end in ends:
        percent[end["task"] - 1] = _class_accuracy(end)
    return percent


def _class_accuracy(end: dict[str, Any]) -> Values:
    """The accuracy of each class at a task's end (C,), in percent; NaN without test examples."""
    correct = np.array(end["correct"][0], dtype=np.float64)
    totals = np.array(end["totals"][0], dtype=np.float64)
    unknown = np.full_like(correct, np.nan)
    return 100 * np.divide(correct, totals, out=unknown, where=totals > 0)


# ---- the table of definitions of forgetting ------------------------------------------------------


DIGITS = 2
"""Decimals of a number."""

CHAUDHRY = next(d for d in TABLE if d.name == "average_forgetting")
"""The usual definition, with which the others are compared."""

FORWARD_TRANSFER = (
    "forward_transfer",
    "row before a task's own - untrained model; tasks after the first",
    "Lopez-Paz & Ranzato 2017, FWT",
)
"""Name, formula and source of forward transfer. It is not a ``Definition``, because it needs the
untrained model.
"""

MAX_ROWS = 30
"""A matrix with more rows or columns than these is not printed."""


@dataclass(frozen=True)
class MatrixColumn:
    """A column of the table: a matrix by task, or by class."""

    matrix: AccuracyMatrix
    is_by_class: bool

    @property
    def accuracies(self) -> AccuracyMatrix:
        """The matrix from which the numbers of the column are computed."""
        if self.is_by_class:
            return self.matrix
        return self.matrix.task_matrix

    @property
    def unit(self) -> str:
        """In words, whether the numbers are means over tasks or over classes."""
        if self.is_by_class:
            return "by class"
        return "by task"

    def number(self, definition: Definition) -> str:
        """The cell of a definition."""
        if self.is_by_class and not definition.by_class:
            return NONE
        matrix = self.accuracies
        value = definition.of(matrix.percent, matrix.class_tasks)
        if definition.name == "kept":
            return _text(100 * value)
        if definition.name == "worst_forgetting":
            return f"{_text(value)}{_worst_column(matrix)}"
        return _text(value)

    @property
    def forward_transfer(self) -> str:
        """The cell of forward transfer."""
        matrix = self.accuracies
        if matrix.initial is None:
            return NONE
        value = task_metrics.forward_transfer(matrix.percent, matrix.initial, matrix.class_tasks)
        return _text(value)


def matrix_columns(matrices: Sequence[AccuracyMatrix]) -> list[MatrixColumn]:
    """A column by task for each matrix, and a column by class if the matrix has classes."""
    columns = []
    for matrix in matrices:
        columns.append(MatrixColumn(matrix, is_by_class=False))
        if matrix.class_tasks is not None:
            columns.append(MatrixColumn(matrix, is_by_class=True))
    return columns


def definitions_table(matrices: Sequence[AccuracyMatrix]) -> TextTable:
    """A line for each definition: its name, its formula in words, its source, and its values in the
    ``matrix_columns``.
    """
    columns = matrix_columns(matrices)
    titles = [column.unit for column in columns]
    if len(matrices) > 1:
        titles = [f"{column.matrix.name} {column.unit}" for column in columns]
    lines = []
    for definition in TABLE:
        numbers = [column.number(definition) for column in columns]
        lines.append([definition.name, definition.says, definition.source, *numbers])
        if definition.name == "backward_transfer":
            lines.append([*FORWARD_TRANSFER, *(column.forward_transfer for column in columns)])
    return TextTable(["number [%]", "formula in words", "source", *titles], lines)


def how_they_differ(matrix: AccuracyMatrix) -> Iterator[str]:
    """Lines on how the other definitions of forgetting differ from Chaudhry's on this matrix, by
    task.
    """
    percent = matrix.task_matrix.percent
    usual = CHAUDHRY.of(percent, None)
    if math.isnan(usual):
        return
    for definition in TABLE:
        value = definition.of(percent, None)
        if definition.differs and not math.isnan(value):
            distance = _distance(value - usual)
            yield f"{definition.name}: {_text(value)}, {distance}; {definition.differs}"


def _distance(difference: float) -> str:
    """How far a number is from the usual one."""
    shown = round(difference, DIGITS)
    if shown > 0:
        return f"{shown:.{DIGITS}f} above it"
    if shown < 0:
        return f"{-shown:.{DIGITS}f} below it"
    return "the same here"


def matrix_rows(matrix: AccuracyMatrix) -> list[list[str]]:
    """The rows of a matrix as texts, the untrained model's first; none for a large matrix."""
    if max(matrix.percent.shape) > MAX_ROWS:
        return []
    rows = []
    if matrix.initial is not None:
        rows.append(["untrained", *map(_text, matrix.initial)])
    for task, row in enumerate(matrix.percent, 1):
        rows.append([f"after task {task}", *map(_text, row)])
    return rows


def _worst_column(matrix: AccuracyMatrix) -> str:
    """The name of the column with the worst forgetting, in brackets; empty without any."""
    worst = task_metrics.worst_forgetting(matrix.percent, matrix.class_tasks)[1]
    if worst is None:
        return ""
    # The index counts only the columns whose task has come.
    has_come = np.flatnonzero(matrix.column_tasks < len(matrix.percent))
    return f" ({matrix.columns[int(has_come[worst])]})"


def _text(value: float) -> str:
    if math.isnan(value):
        return NONE
    # Adding 0 removes the sign of a negative zero.
    return f"{value + 0.0:.{DIGITS}f}"
