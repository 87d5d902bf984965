"""Streams of classes: one task with all of them, or tasks that each bring classes of their own."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError
from fedstill.core.fields import CountOrZero
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER
from fedstill.core.registry import register
from fedstill.core.stream import Cut


@register("stream", "none")
def one_task(labels: NDArray[np.int64], classes: int) -> Cut:
    """One task for the whole run: nothing comes and nothing goes."""
    return Cut(np.zeros(len(labels), dtype=np.int64), (tuple(range(classes)),))


Order = Literal["shuffled", "given", "legacy"]


@register("stream", "classes")
def class_stream(
    labels: NDArray[np.int64],
    tasks: int,
    seed: int,
    classes: int,
    order: Order | tuple[tuple[int, ...], ...] = "shuffled",
    first: CountOrZero = 0,
) -> Cut:
    """New classes in every task: an ordered division of all classes.

    Where the number of classes cannot be divided, the first tasks have one more. ``legacy`` is
    NumPy's old permutation, the order of TARGET's and LANDER's codes, so that their class orders
    can be had again.

    order: Drawn by seed, as the classes are numbered, as older codes draw it, or each task's
    classes written.
    first: How many classes task 1 has; 0: as many as the others.
    """
    if isinstance(order, tuple):
        by_task = _written(order, tasks, classes)
    else:
        by_task = _divided(order, tasks, seed, classes, first)
    task_of_class = np.zeros(classes, dtype=np.int64)
    for task, task_classes in enumerate(by_task):
        task_of_class[list(task_classes)] = task
    return Cut(task_of_class[labels], by_task)


def _divided(
    order: Order, tasks: int, seed: int, classes: int, first: int
) -> tuple[tuple[int, ...], ...]:
    """The classes of each task, from an order of all classes."""
    later_classes = classes - first
    later_tasks = tasks - bool(first)
    if (first and tasks == 1 and first != classes) or later_classes < later_tasks:
        raise ConfigError(
            f"stream.tasks = {tasks} and stream.first = {first} are too many for {classes} classes"
        )
    if order == "given":
        queue = list(range(classes))
    elif order == "legacy":
        queue = np.random.RandomState(seed).permutation(classes).tolist()
    else:
        draw = generator(seed_for(seed, 0, 0, SERVER, "class order"))
        queue = torch.randperm(classes, generator=draw).tolist()
    sizes = [
        later_classes // later_tasks + (t < later_classes % later_tasks) for t in range(later_tasks)
    ]
    if first:
        sizes.insert(0, first)
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(tuple(queue[a:b]) for a, b in pairwise(ends))


def _written(
    order: tuple[tuple[int, ...], ...], tasks: int, classes: int
) -> tuple[tuple[int, ...], ...]:
    if len(order) != tasks:
        raise ConfigError(
            f"stream.order names the classes of {len(order)} tasks, and stream.tasks = {tasks}"
        )
    named = sorted(chain.from_iterable(order))
    if named != list(range(classes)) or not all(order):
        raise ConfigError(
            f"stream.order must have each class from 0 to {classes - 1} once, and some in each task"
        )
    return tuple(map(tuple, order))
