"""Tables and the drawn split in a terminal."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Literal, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from fedstill.metrics.classification import METRICS
from fedstill.report.summary import (
    COLUMNS,
    PERSONAL,
    Column,
    best_first,
    own_columns,
    rounds_note,
)
from fedstill.running.observers import task_label_counts
from fedstill.running.preparation import Prepared
from fedstill.running.runs import Group, differing_schedule, schedule_cells
from fedstill.running.split_file import StoredSplit

SHADES = " ░▒▓█"

MOST_OF_NAME = 30
"""Letters of a client's name that are shown beside its row of a split."""

GAP = 2
"""Columns between two columns of a table."""

LEAST = 20
"""Columns that a text has in a table at least; it is broken between words."""


UNBROKEN, SENTENCES = 1000, 100
"""Columns of a standard output that is no terminal: rows of numbers and paths stay whole there,
sentences don't.
"""


class _Trimmed(io.TextIOBase):
    """The standard output without the spaces that a table has at the end of its lines."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def console(sentences: bool = False) -> Console:
    """Where people look: the standard output, as wide as the terminal is, or as ``COLUMNS`` says.

    sentences: what is printed is text more than numbers; in a file or a pipe its lines are broken
    to be read.
    """
    here = Console(highlight=False, markup=False)
    if here.is_terminal:
        return here
    width = None if "COLUMNS" in os.environ else SENTENCES if sentences else UNBROKEN
    return Console(highlight=False, markup=False, file=cast("IO[str]", _Trimmed()), width=width)


def tell(screen: Console, text: str) -> None:
    """Print a sentence: a terminal's lines are broken between words; in a file or a pipe it is one
    line.
    """
    screen.print(text, soft_wrap=not screen.is_terminal)


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.2f} %"


@dataclass(frozen=True)
class PlainTable:
    """A table in a terminal, in as many parts as its width needs: each begins with the first
    column.

    words: so many columns hold text, which is broken between words; the others hold numbers, which
    stay whole.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        whole = [max(cell_len(head), self._longest(i)) for i, head in enumerate(self.head)]
        if sum(whole) + GAP * (len(whole) - 1) <= options.max_width:
            yield self._part(list(range(len(whole))), whole)
            return
        needs = self._needs(options.max_width)
        parts: list[list[int]] = [[0]]
        for i in range(1, len(needs)):
            if len(parts[-1]) > 1 and _together(needs, [*parts[-1], i]) > options.max_width:
                parts.append([0])
            parts[-1].append(i)
        for part in parts:
            yield self._part(part, self._filled(part, needs, whole, options.max_width))

    def _longest(self, column: int) -> int:
        return max((cell_len(row[column]) for row in self.rows), default=0)

    def _needs(self, width: int) -> list[int]:
        """The least width of each column, so that any of them has room beside the first."""
        longest = list(map(self._longest, range(len(self.head))))
        least = [min(n, LEAST) if 0 < i < self.words else n for i, n in enumerate(longest)]
        needs = [
            max([n, *map(cell_len, head.split())]) for n, head in zip(least, self.head, strict=True)
        ]
        others = [min(n, width - GAP - min(needs[0], width // 2)) for n in needs[1:]]
        return [min(needs[0], width - GAP - max(others, default=0)), *others]

    def _filled(
        self, part: Sequence[int], needs: Sequence[int], whole: Sequence[int], width: int
    ) -> list[int]:
        """The widths of all columns: what a part's line has left goes to heads that it has room
        for, then to texts.
        """
        widths = list(needs)
        more = [a - b for a, b in zip(whole, needs, strict=True)]
        for i in part:
            if not 0 < i < self.words and more[i] <= width - _together(widths, part):
                widths[i] = whole[i]
        texts = sorted((i for i in part if 0 < i < self.words), key=more.__getitem__)
        for left, i in zip(range(len(texts), 0, -1), texts, strict=True):
            widths[i] += min(more[i], (width - _together(widths, part)) // left)
        return widths

    def _part(self, part: Sequence[int], widths: Sequence[int]) -> Table:
        out = Table(box=None, pad_edge=False, header_style="bold")
        for i in part:
            side: Literal["left", "right"] = "left" if i < self.words else "right"
            out.add_column(self.head[i], justify=side, overflow="fold", width=widths[i])
        for row in self.rows:
            out.add_row(*(row[i] for i in part))
        return out


def _together(widths: Sequence[int], part: Sequence[int]) -> int:
    return sum(widths[i] for i in part) + GAP * (len(part) - 1)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> PlainTable:
    """A plain table; the first ``words`` columns hold text and are left-aligned, the others
    numbers.
    """
    return PlainTable(columns, rows, words)


def drawn_split(
    counts: Sequence[Sequence[int]],
    classes: Sequence[str],
    width: int = 80,
    most: int = 40,
    names: Sequence[str] = (),
    tests: Mapping[int, int] = MappingProxyType({}),
) -> Text:
    """The split drawn: a row for each client, a mark for each class (or a few), darker where the
    client has more.

    Of more clients than ``most`` the first are drawn, and the others counted. names: what clients
    are called in the data. tests: how many examples their own test sets have.
    """
    labels = [str(name)[:MOST_OF_NAME] for name in names[:most]]
    if not labels:
        labels = [str(client) for client in range(min(most, len(counts)))]
    label_width = max(6, *map(len, labels)) if labels else 6
    room = width - label_width - 34
    if tests:
        room -= 20
    room = max(10, room)
    by_mark = -(-len(classes) // room)
    mark_width = 2 if 2 * len(classes) <= room else 1
    starts = range(0, len(classes), by_mark)
    rows = [[sum(row[start : start + by_mark]) for start in starts] for row in counts[:most]]
    largest = max((max(row) for row in rows), default=0) or 1

    class_names = ", ".join(classes)
    if len(class_names) >= width:
        class_names = f"0 to {len(classes) - 1}"
    mark = "a class" if by_mark == 1 else f"{by_mark} classes"
    text = Text(f"classes {class_names}; ", no_wrap=True, overflow="ellipsis")
    text.append(f"each mark is {mark}; a full mark is {largest:,} examples\n")
    for client, row in enumerate(rows):
        cells = "".join(mark_width * SHADES[min(4, -(-4 * count // largest))] for count in row)
        size = f"{sum(row):,} examples, {_classes(counts[client])}"
        if client in tests:
            size += f", own test {tests[client]:,}"
        elif tests:
            size += ", no own test"
        text.append(f"{labels[client]:>{label_width}}  {cells}  {size}\n")
    if len(counts) > most:
        text.append(f"{'…':>{label_width}}  and {len(counts) - most:,} more clients\n")
    return text


def _classes(counts: Sequence[int]) -> str:
    present = sum(count > 0 for count in counts)
    return "1 class" if present == 1 else f"{present} classes"


def comparison_table(compared: Sequence[Group]) -> PlainTable:
    """The table of a comparison: mean ± spread over seeds; best first where answers are each
    client's own.
    """
    known = [column for column in COLUMNS if any(g.values(column.key) for g in compared)]

    def among(*keys: str) -> list[Column]:
        return [column for column in known if column.key in keys]

    shown = [
        column
        for column in COLUMNS
        if column.key.startswith("query_") and any(g.mean_spread(column.key) for g in compared)
    ]
    if not shown:
        shown = among("own_test_accuracy", "own_test_worst")
        shown += among(*(f"own_test_{metric}" for metric in METRICS))
        if any(group.own_models for group in compared):
            shown += PERSONAL
        shown += among(
            "accuracy",
            "best_round_accuracy",
            "mean_accuracy_last_10",
            "best_accuracy",
            "forgetting",
        )
        shown += among(*METRICS)
    shown += own_columns(compared)
    shown += among("epsilon")
    shown += [column for column in COLUMNS if column.key == "seconds"]

    schedule = differing_schedule(compared)
    rows = []
    for group in best_first(compared)[0]:
        cells = schedule_cells(group, schedule)
        for column in shown:
            spread = group.mean_spread(column.key)
            digits = 1 if column.unit == "%" else column.digits
            cells.append(spread.text(column.scale, digits) if spread else "–")
        note = rounds_note(group) if group.finished else "unfinished"
        label = f"{group.label}, {note}" if note else group.label
        rows.append([label, *cells, group.counted])
    titles = [f"{column.title} [{column.unit}]" for column in shown]
    return table(["", *schedule.values(), *titles, "seeds"], rows)


def leak_table(compared: Sequence[Group]) -> PlainTable | None:
    """How well members are told from what clients sent, without intervals; None if it was not
    measured.
    """
    # Imports plotly and jinja2, which a run without a report does not need.
    from fedstill.report.leaks import HEAD, leak_rows

    rows = [[row.group.label, *row.plain_cells] for row in leak_rows(compared)]
    return table(HEAD, rows, words=3) if rows else None


# Who has which data, drawn in a terminal: of a run with tasks, for each task.


MOST_CLASSES = 12
"""Of a task with more classes than these their number is said, and no names."""

MOST_DRAWN = 10
"""Of later tasks than these only a line is said."""


def drawn_data(prepared: Prepared, width: int) -> Iterator[Text]:
    """The split of a run, clients × classes; with tasks a line and a split for each task."""
    classes, tests = (
        prepared.dataset.classes,
        {c: len(own) for c, own in prepared.sites.own_tests.items()},
    )
    if prepared.sites.tasks is None:
        split = StoredSplit.of_sites(prepared.sites)
        counts: Sequence[Sequence[int]] = split.label_counts(len(classes)) if split else ()
        yield drawn_split(counts, classes, width, names=prepared.client_names, tests=tests)
        return
    each = task_label_counts(prepared)
    for task, line in enumerate(told_of_tasks(prepared)):
        yield Text(line)
        if task < MOST_DRAWN:
            yield drawn_split(
                each[:, task].tolist(), classes, width, names=prepared.client_names, tests=tests
            )
    if prepared.sites.public is not None:
        yield Text(
            "The public set is the same in all tasks: it may hold classes of tasks to come.\n"
        )


def told_of_tasks(prepared: Prepared) -> Iterator[str]:
    """A line for each task: its rounds, its classes, and how many clients and examples it has."""
    stream, names = prepared.world.stream, prepared.dataset.classes
    counts = task_label_counts(prepared)
    ends = [*(first - 1 for first in stream.starts[1:]), stream.rounds]
    for task, (first, last) in enumerate(zip(stream.starts, ends, strict=True)):
        own = stream.classes(task)
        if len(own) == len(names):
            said = "all classes"
        else:
            said = (
                f"classes {', '.join(names[c] for c in own)}"
                if len(own) <= MOST_CLASSES
                else f"{len(own)} classes"
            )
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
        there = sum(
            stream.task(last, c) == task and bool(counts[c, task].sum())
            for c in range(stream.clients)
        )
        late = (
            f", {there} of {stream.clients} clients in it by its end"
            if there < stream.clients
            else ""
        )
        yield f"task {task + 1}, {rounds}: {said}; {int(counts[:, task].sum()):,} examples{late}"
