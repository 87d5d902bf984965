"""Streams of tasks: new classes or new domains in every task, a drift of the clients' label
proportions, or tasks that real sites define with their data.

A run without tasks has a stream of one task with all classes.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.fields import CountOrZero
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER
from fedstill.core.registry import register
from fedstill.core.stream import Cut, Transform

# Tasks with equal class proportions.


def stratified_tasks(labels: NDArray[np.int64], tasks: int, seed: int) -> NDArray[np.int64]:
    """The task of each example (n,), counted from 0.

    Tasks are drawn by key. The numbers of a class's examples in two tasks differ by at most one.
    """
    draw = generator(seed_for(seed, 0, 0, SERVER, "task of example"))
    out = np.zeros(len(labels), dtype=np.int64)
    # Each class continues with the task after the last one of the previous class. Otherwise, the
    # examples of small classes would all belong to the first tasks.
    next_task = 0
    for c in np.unique(labels):
        positions = np.flatnonzero(labels == c)
        order = torch.randperm(len(positions), generator=draw).numpy()
        out[positions[order]] = (next_task + np.arange(len(positions))) % tasks
        next_task = (next_task + len(positions)) % tasks
    return out


# Domain-incremental streams: the distribution of the inputs changes, the classes do not.


Change = Literal["rotate90", "permute", "invert", "blur", "noise"]
MAX_TASKS = {"rotate90": 4, "invert": 2}
NOISE_STEP = 32
"""The amplitude, out of 255, by which the noise pattern of ``noise`` grows with every task."""


@register("stream", "domains")
def domain_stream(
    labels: NDArray[np.int64],
    domains: NDArray[np.int64] | None,
    tasks: int,
    seed: int,
    classes: int,
    *,
    column: str = "",
    transform: Change | None = None,
    share: Literal["own", "all"] = "own",
) -> Cut:
    """The same classes in every task, from another domain: a value of a column, or a transformation
    of the images.

    Task 1 has the original images. Transformations use integer arithmetic, so that every machine
    computes the same bytes.

    column: The column of the data whose values are the domains. Each value is a task, in the order
    of the values.
    transform: The transformation of images from task to task; not together with column.
    share: Whether each example belongs to one task ("own"), or every task has all examples ("all");
    only with transform.
    """
    by_task = tuple(tuple(range(classes)) for _ in range(tasks))
    if bool(column) == bool(transform):
        raise ConfigError(
            "stream.kind = 'domains' needs either stream.column or stream.transform; set one of "
            "them"
        )
    if transform is None:
        if domains is None:
            raise ConfigError(f"stream.column = {column!r}: the data have no such column")
        count = 0
        if len(domains):
            count = int(domains.max()) + 1
        if share == "all":
            raise ConfigError(
                "stream.share = 'all' cannot be combined with stream.column, because an example "
                "has only one value there"
            )
        if count != tasks:
            raise ConfigError(
                f"stream.column = {column!r} has {count} values; set stream.tasks = {count}"
            )
        return Cut(domains, by_task, by_domain=True)
    if tasks > MAX_TASKS.get(transform, tasks):
        raise ConfigError(
            f"stream.transform = {transform!r} allows at most {MAX_TASKS[transform]} tasks; lower "
            "stream.tasks"
        )
    changes = tuple(_change(transform, t, seed) for t in range(tasks))
    if share == "all":
        return Cut(None, by_task, changes)
    return Cut(stratified_tasks(labels, tasks, seed), by_task, changes)


def _change(name: Change, task: int, seed: int) -> Transform | None:
    if task == 0:
        return None
    change_seed = seed_for(seed, task, 0, SERVER, f"transform {name}")
    by_name = {
        "rotate90": _rotate,
        "permute": _permute,
        "invert": _invert,
        "blur": _blur,
        "noise": _add_noise,
    }
    return partial(by_name[name], task=task, seed=change_seed)


def _rotate(images: Tensor, task: int, seed: int) -> Tensor:
    if images.shape[-1] != images.shape[-2]:
        raise ConfigError(
            "stream.transform = 'rotate90' needs square images; set permute, blur or noise"
        )
    return torch.rot90(images, task, (2, 3)).contiguous()


def _permute(images: Tensor, task: int, seed: int) -> Tensor:
    flat = images.flatten(2)
    order = torch.randperm(flat.shape[2], generator=generator(seed)).to(images.device)
    return flat[:, :, order].view(images.shape)


def _invert(images: Tensor, task: int, seed: int) -> Tensor:
    return 255 - images


def _blur(images: Tensor, task: int, seed: int) -> Tensor:
    """Apply a 3 x 3 mean filter ``task`` times; means are rounded down, and edges are repeated."""
    height, width = images.shape[2:]
    rows = torch.arange(-1, height + 1).clamp(0, height - 1)
    columns = torch.arange(-1, width + 1).clamp(0, width - 1)
    for _ in range(task):
        wide = images.to(torch.int32)[:, :, rows][:, :, :, columns]
        parts = [wide[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        images = (torch.stack(parts).sum(0) // 9).to(torch.uint8)
    return images


def _add_noise(images: Tensor, task: int, seed: int) -> Tensor:
    """Add a pattern to all images. It is drawn by key, and its amplitude grows with every task."""
    amplitude = NOISE_STEP * task
    pattern = torch.randint(
        -amplitude, amplitude + 1, images.shape[1:], generator=generator(seed), dtype=torch.int32
    )
    return (images.to(torch.int32) + pattern.to(images.device)).clamp(0, 255).to(torch.uint8)


# Drift: classes and examples stay the same, but the clients' shares of them change with the tasks.


Path = Literal["line", "jump", "return"]


@register("stream", "drift")
def drift_stream(
    labels: NDArray[np.int64], tasks: int, seed: int, classes: int, path: Path = "line"
) -> Cut:
    """The clients' class proportions move from one client split to another. The run's partition
    draws both splits, with two seeds.

    Each task has a probability. With this probability, an example of the task belongs to its client
    of the second split, and otherwise to its client of the first split. A client may have no
    examples of a task.

    path: The probability by task: from 0 to 1 in equal steps ("line"), 0 and from the middle on 1
    ("jump"), or from 0 to 1 and back ("return").
    """
    positions = [t / max(tasks - 1, 1) for t in range(tasks)]  # from 0 to 1
    if path == "jump":
        mix = [float(2 * t >= tasks and tasks > 1) for t in range(tasks)]
    elif path == "line":
        mix = positions
    else:
        mix = [1 - abs(2 * x - 1) for x in positions]
    by_task = tuple(tuple(range(classes)) for _ in range(tasks))
    return Cut(stratified_tasks(labels, tasks, seed), by_task, mix=tuple(mix))


# Tasks of real sites, which store the data of each task themselves.


@register("stream", "sites")
def site_stream(
    tasks: int, classes: int, order: tuple[tuple[int, ...], ...] = (), cuts: tuple[str, ...] = ()
) -> Cut:
    """Tasks of real sites with their own data: a folder for each task, or dates that divide a time
    column.

    order: The classes of each task, by number; empty if every task has all classes.
    cuts: For sites with a time column, the date on which each task after the first begins.

    Raises ConfigError if order has another number of tasks.
    """
    if order and len(order) != tasks:
        raise ConfigError(
            f"stream.order has the classes of {len(order)} tasks, but stream.tasks = {tasks}"
        )
    return Cut(None, order or (tuple(range(classes)),) * tasks)


@register("stream", "none")
def one_task(labels: NDArray[np.int64], classes: int) -> Cut:
    """A single task: classes and data do not change during the run."""
    return Cut(np.zeros(len(labels), dtype=np.int64), (tuple(range(classes)),))


Order = Literal["shuffled", "given", "legacy"]


@register("stream", "classes")
def class_stream(
    labels: NDArray[np.int64],
    tasks: int,
    seed: int,
    classes: int,
    *,
    order: Order | tuple[tuple[int, ...], ...] = "shuffled",
    first: CountOrZero = 0,
) -> Cut:
    """New classes in every task: the stream divides all classes, in a given or random order.

    If the number of classes is not a multiple of the number of tasks, the first tasks have one
    class more.

    order: "shuffled": drawn from the seed. "given": in the order of the class numbers. "legacy":
    drawn by NumPy's legacy generator, which reproduces the class orders of the official code of
    TARGET and LANDER. Or the list of the classes of each task.
    first: The number of classes of task 1; with 0, tasks are equally large.
    """
    if isinstance(order, tuple):
        by_task = _checked_order(order, tasks, classes)
    else:
        by_task = _divided_classes(order, tasks, seed, classes, first)
    task_of_class = np.zeros(classes, dtype=np.int64)
    for task, task_classes in enumerate(by_task):
        task_of_class[list(task_classes)] = task
    return Cut(task_of_class[labels], by_task)


def _divided_classes(
    order: Order, tasks: int, seed: int, classes: int, first: int
) -> tuple[tuple[int, ...], ...]:
    """The classes of each task: consecutive parts of the ordered classes."""
    later_classes = classes - first
    later_tasks = tasks - bool(first)
    if (first and tasks == 1 and first != classes) or later_classes < later_tasks:
        raise ConfigError(
            f"stream.tasks = {tasks} and stream.first = {first} do not fit {classes} classes; "
            "lower them"
        )
    if order == "given":
        ordered_classes = list(range(classes))
    elif order == "legacy":
        ordered_classes = np.random.RandomState(seed).permutation(classes).tolist()
    else:
        draw = generator(seed_for(seed, 0, 0, SERVER, "class order"))
        ordered_classes = torch.randperm(classes, generator=draw).tolist()
    sizes = [
        later_classes // later_tasks + (t < later_classes % later_tasks) for t in range(later_tasks)
    ]
    if first:
        sizes.insert(0, first)
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(tuple(ordered_classes[a:b]) for a, b in pairwise(ends))


def _checked_order(
    order: tuple[tuple[int, ...], ...], tasks: int, classes: int
) -> tuple[tuple[int, ...], ...]:
    """The classes of each task as the config lists them; raises ConfigError for an invalid list."""
    if len(order) != tasks:
        raise ConfigError(
            f"stream.order has the classes of {len(order)} tasks, but stream.tasks = {tasks}"
        )
    listed_classes = sorted(chain.from_iterable(order))
    if listed_classes != list(range(classes)) or not all(order):
        raise ConfigError(
            f"stream.order must contain each class from 0 to {classes - 1} exactly once, and no "
            "empty task"
        )
    return tuple(map(tuple, order))
