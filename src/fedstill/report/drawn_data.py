"""Who has which data, drawn in a terminal: of a run with tasks, for each task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.run_directory.split_file import split_of_sites
from fedstill.experiment.running.task_ends import TaskEnds
from fedstill.report.terminal import drawn_split

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
        split = split_of_sites(prepared.sites)
        counts: Sequence[Sequence[int]] = split.counts(len(classes)) if split else ()
        yield drawn_split(counts, classes, width, names=prepared.names, tests=tests)
        return
    each = TaskEnds(prepared).counts
    for task, line in enumerate(told_of_tasks(prepared)):
        yield Text(line)
        if task < MOST_DRAWN:
            yield drawn_split(
                each[:, task].tolist(), classes, width, names=prepared.names, tests=tests
            )
    if prepared.sites.public is not None:
        yield Text(
            "The public set is the same in all tasks: it may hold classes of tasks to come.\n"
        )


def told_of_tasks(prepared: Prepared) -> Iterator[str]:
    """A line for each task: its rounds, its classes, and how many clients and examples it has."""
    stream, names = prepared.world.stream, prepared.dataset.classes
    counts = TaskEnds(prepared).counts
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
