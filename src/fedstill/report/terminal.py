"""Tables in the terminal, and a drawing of the split of the data."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Literal, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fedstill.core.files import counted, neutral
from fedstill.metrics.classification import METRICS
from fedstill.report.summary import (
    COLUMNS,
    NONE,
    PERSONAL,
    Column,
    differing_schedule,
    is_measured,
    own_columns,
    ranked,
    rounds_note,
    schedule_cells,
)
from fedstill.running.observers import task_label_counts
from fedstill.running.preparation import Prepared
from fedstill.running.runs import Group
from fedstill.running.split_file import StoredSplit

SHADES = " ░▒▓█"
"""The marks of a drawn split, from no examples to many."""

MAX_NAME_LENGTH = 30
"""The largest number of characters of a client's name next to its row of a split."""

GAP = 2
"""The width between two columns of a table."""

LEAST_TEXT = 20
"""The minimum width of a column of text, which is broken between words."""

NUMBERS_WIDTH = 1000
"""The width of tables of numbers if the output is not a terminal, so that rows are not broken."""

SENTENCES_WIDTH = 100
"""The width of sentences if the output is not a terminal."""


class _Trimmed(io.TextIOBase):
    """The standard output without trailing spaces in the lines of tables."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


class SafeConsole(Console):
    """A console that replaces control characters in names."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(neutral(segment.text, "terminal"), segment.style)


def console(sentences: bool = False) -> Console:
    """The standard output, with the width of the terminal or of the variable ``COLUMNS``.

    sentences: whether the output is text rather than numbers. In a file or a pipe, only the lines
    of text are broken.
    """
    terminal = SafeConsole(highlight=False, markup=False)
    if terminal.is_terminal:
        return terminal
    width: int | None = NUMBERS_WIDTH
    if "COLUMNS" in os.environ:
        width = None
    elif sentences:
        width = SENTENCES_WIDTH
    return SafeConsole(highlight=False, markup=False, file=cast("IO[str]", _Trimmed()), width=width)


def tell(screen: Console, text: str) -> None:
    """Print a sentence; only a terminal breaks it into lines."""
    screen.print(text, soft_wrap=not screen.is_terminal)


def percent(value: float | None) -> str:
    """A share as a percentage; a dash for None."""
    if value is None:
        return NONE
    return f"{100 * value:.2f} %"


# Tables


@dataclass(frozen=True)
class PlainTable:
    """A table in the terminal. A wide table is split into parts, which all begin with the first
    column.

    words: the number of leading columns with text, which is aligned on the left and broken between
    words. The other columns contain numbers, which are not broken.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        full_widths = [
            max(cell_len(head), self._longest(column)) for column, head in enumerate(self.head)
        ]
        all_columns = list(range(len(full_widths)))
        if _total_width(full_widths, all_columns) <= options.max_width:
            yield self._part(all_columns, full_widths)
            return
        least_widths = self._least_widths(options.max_width)
        for part in _parts(least_widths, options.max_width):
            yield self._part(part, self._filled(part, least_widths, full_widths, options.max_width))

    def _longest(self, column: int) -> int:
        return max((cell_len(row[column]) for row in self.rows), default=0)

    def _is_broken(self, column: int) -> bool:
        """Whether the cells of a column may be broken. Those of the first column may not."""
        return 0 < column < self.words

    def _least_widths(self, width: int) -> list[int]:
        """The minimum width of each column, so that any column fits next to the first one."""
        widths = []
        for column, head in enumerate(self.head):
            least = self._longest(column)
            if self._is_broken(column):
                least = min(least, LEAST_TEXT)
            widths.append(max([least, *map(cell_len, head.split())]))
        room = width - GAP - min(widths[0], width // 2)
        others = [min(least, room) for least in widths[1:]]
        first = min(widths[0], width - GAP - max(others, default=0))
        return [first, *others]

    def _filled(
        self,
        part: Sequence[int],
        least_widths: Sequence[int],
        full_widths: Sequence[int],
        width: int,
    ) -> list[int]:
        """The widths of all columns. Heads get the free width of a part first, then texts."""
        widths = list(least_widths)
        missing = [full - least for full, least in zip(full_widths, least_widths, strict=True)]
        for column in part:
            free = width - _total_width(widths, part)
            if not self._is_broken(column) and missing[column] <= free:
                widths[column] = full_widths[column]

        texts = sorted(filter(self._is_broken, part), key=missing.__getitem__)
        for index, column in enumerate(texts):
            free = width - _total_width(widths, part)
            widths[column] += min(missing[column], free // (len(texts) - index))
        return widths

    def _part(self, part: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in part:
            side: Literal["left", "right"] = "right"
            if column < self.words:
                side = "left"
            table.add_column(self.head[column], justify=side, overflow="fold", width=widths[column])
        for row in self.rows:
            table.add_row(*(row[column] for column in part))
        return table


def _parts(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each part of a table; every part begins with the first column."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        has_others = len(parts[-1]) > 1
        if has_others and _total_width(widths, [*parts[-1], column]) > width:
            parts.append([0])
        parts[-1].append(column)
    return parts


def _total_width(widths: Sequence[int], columns: Sequence[int]) -> int:
    """The width of some columns with the gaps between them."""
    gaps = GAP * (len(columns) - 1)
    return sum(widths[column] for column in columns) + gaps


def comparison_table(compared: Sequence[Group]) -> PlainTable:
    """The table of a comparison: mean ± standard deviation over seeds, the best group first."""
    columns = _shown_columns(compared)
    schedule = differing_schedule(compared)
    rows = []
    for group in ranked(compared):
        numbers = [
            column.text(group.mean_spread(column.key), _digits(column)) for column in columns
        ]
        rows.append(
            [_row_label(group), *schedule_cells(group, schedule), *numbers, group.run_count_text]
        )
    titles = [f"{column.title} [{column.unit}]" for column in columns]
    return PlainTable(["", *schedule.values(), *titles, "seeds"], rows)


SERVER_KEYS = (
    "accuracy",
    "best_round_accuracy",
    "mean_accuracy_last_10",
    "best_accuracy",
    "forgetting",
)


def _shown_columns(compared: Sequence[Group]) -> list[Column]:
    """The columns of the table in a terminal: fewer than those of the page."""
    columns = [
        column
        for column in COLUMNS
        if column.key.startswith("query_") and is_measured(column, compared)
    ]
    if not columns:
        columns = _accuracy_columns(compared)
    columns += own_columns(compared)
    columns += _measured_columns(compared, ["epsilon"])
    columns += [column for column in COLUMNS if column.key == "seconds"]
    return columns


def _accuracy_columns(compared: Sequence[Group]) -> list[Column]:
    """Accuracies and metrics on clients' own tests, of clients' models, and of the server's."""
    own_metrics = [f"own_test_{metric}" for metric in METRICS]
    columns = _measured_columns(
        compared, ["own_test_accuracy", "own_test_worst", "own_test_weighted"]
    )
    columns += _measured_columns(compared, own_metrics)
    if any(group.has_personal_models for group in compared):
        columns += PERSONAL
    columns += _measured_columns(compared, SERVER_KEYS)
    columns += _measured_columns(compared, METRICS)
    return columns


def _measured_columns(compared: Sequence[Group], keys: Collection[str]) -> list[Column]:
    """The columns of these keys that any group has, in the order of ``COLUMNS``."""
    columns = [column for column in COLUMNS if column.key in keys]
    return [column for column in columns if is_measured(column, compared)]


def _digits(column: Column) -> int:
    """The decimals of a column in the terminal: one for percentages."""
    if column.unit == "%":
        return 1
    return column.digits


def _row_label(group: Group) -> str:
    """The label of a group, with a note if its runs lack rounds."""
    note = "unfinished"
    if group.finished:
        note = rounds_note(group)
    if not note:
        return group.label
    return f"{group.label}, {note}"


def leak_table(compared: Sequence[Group]) -> PlainTable | None:
    """The results of attacks on privacy, without intervals; None if they were not measured."""
    # Imports jinja2, which a run without a report does not need.
    from fedstill.report.leaks import HEAD, leak_rows

    rows = [[row.group.label, *row.plain_cells] for row in leak_rows(compared)]
    if not rows:
        return None
    return PlainTable(HEAD, rows, words=3)


# The split of data over clients


def drawn_split(
    counts: Sequence[Sequence[int]],
    classes: Sequence[str],
    *,
    width: int = 80,
    most: int = 40,
    names: Sequence[str] = (),
    tests: Mapping[int, int] = MappingProxyType({}),
) -> Text:
    """A drawing of a split: a row for each client, with a mark for each class or several classes.

    A mark is darker if the client has more examples. Clients after the first ``most`` are only
    counted. names: the names of clients in the data. tests: the sizes of clients' own test sets.
    """
    labels = _client_labels(names[:most], min(most, len(counts)))
    label_width = max([6, *map(len, labels)])
    room = width - label_width - 34
    if tests:
        room -= 20
    room = max(10, room)
    classes_per_mark = -(-len(classes) // room)
    mark_width = 1
    if 2 * len(classes) <= room:
        mark_width = 2
    starts = range(0, len(classes), classes_per_mark)
    rows = [
        [sum(row[start : start + classes_per_mark]) for start in starts] for row in counts[:most]
    ]
    largest = max((max(row) for row in rows), default=0) or 1

    text = Text(f"classes {_class_list(classes, width)}; ", no_wrap=True, overflow="ellipsis")
    mark = "a class"
    if classes_per_mark > 1:
        mark = f"{classes_per_mark} classes"
    text.append(f"each mark is {mark}; the darkest mark is {counted(largest, 'example')}\n")
    for client, row in enumerate(rows):
        marks = "".join(mark_width * SHADES[min(4, -(-4 * count // largest))] for count in row)
        size = _size_text(client, counts[client], tests)
        text.append(f"{labels[client]:>{label_width}}  {marks}  {size}\n")
    if len(counts) > most:
        left_out = counted(len(counts) - most, "more client")
        text.append(f"{'…':>{label_width}}  and {left_out}\n")
    return text


def _client_labels(names: Sequence[str], clients: int) -> list[str]:
    """The names of clients, cut if they are long; or their numbers if they have no names."""
    if names:
        return [str(name)[:MAX_NAME_LENGTH] for name in names]
    return [str(client) for client in range(clients)]


def _class_list(classes: Sequence[str], width: int) -> str:
    """The names of classes, or their numbers if the names are too long for a line."""
    names = ", ".join(classes)
    if len(names) < width:
        return names
    return f"0 to {len(classes) - 1}"


def _size_text(client: int, counts: Sequence[int], tests: Mapping[int, int]) -> str:
    """The numbers of examples and classes of a client, in words."""
    present = sum(count > 0 for count in counts)
    classes = counted(present, "class", "classes")
    text = f"{counted(sum(counts), 'example')}, {classes}"
    if client in tests:
        return f"{text}, own test {tests[client]:,}"
    if tests:
        return f"{text}, no own test"
    return text


MAX_CLASSES = 12
"""For a task with more classes than this, their number is printed instead of their names."""

MAX_DRAWN = 10
"""The largest number of tasks whose splits are drawn."""


def drawn_data(prepared: Prepared, width: int) -> Iterator[Text]:
    """The drawn split of a run; with tasks, a line and a split for each task."""
    classes = prepared.dataset.classes
    tests = {client: len(examples) for client, examples in prepared.sites.own_tests.items()}
    names = prepared.client_names
    if prepared.sites.tasks is None:
        split = StoredSplit.of_sites(prepared.sites)
        counts: Sequence[Sequence[int]] = ()
        if split:
            counts = split.label_counts(len(classes))
        yield drawn_split(counts, classes, width=width, names=names, tests=tests)
        return

    task_counts = task_label_counts(prepared)
    for task, line in enumerate(task_lines(prepared)):
        yield Text(line)
        if task < MAX_DRAWN:
            counts = task_counts[:, task].tolist()
            yield drawn_split(counts, classes, width=width, names=names, tests=tests)
    if prepared.sites.public is not None:
        yield Text(
            "The public set is the same in all tasks: it may contain classes of future tasks.\n"
        )


def task_lines(prepared: Prepared) -> Iterator[str]:
    """A line for each task: its rounds, its classes, and its numbers of clients and examples."""
    stream = prepared.world.stream
    counts = task_label_counts(prepared)
    last_rounds = [*(first - 1 for first in stream.starts[1:]), stream.rounds]
    for task, (first, last) in enumerate(zip(stream.starts, last_rounds, strict=True)):
        rounds = f"round {first}"
        if last > first:
            rounds = f"rounds {first} to {last}"
        classes = _task_classes(stream.classes(task), prepared.dataset.classes)
        examples = int(counts[:, task].sum())
        number = task + 1
        line = f"task {number}, {rounds}: {classes}; {counted(examples, 'example')}"

        clients = range(stream.clients)
        taking_part = sum(
            stream.task(last, client) == task and bool(counts[client, task].sum())
            for client in clients
        )
        if taking_part < stream.clients:
            line += f", {taking_part} of {stream.clients} clients have reached it by its end"
        yield line


def _task_classes(task_classes: Sequence[int], names: Sequence[str]) -> str:
    if len(task_classes) == len(names):
        return "all classes"
    if len(task_classes) > MAX_CLASSES:
        return f"{len(task_classes)} classes"
    return f"classes {', '.join(names[number] for number in task_classes)}"
