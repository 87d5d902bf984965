"""Streams of tasks: new classes in every task, new domains, or a drift of the clients' label
proportions; and the tasks of real sites, which have their own data.

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

# Examples cut into tasks that all have the classes' shares.


def stratified_tasks(labels: NDArray[np.int64], tasks: int, seed: int) -> NDArray[np.int64]:
    """The task of each example (n,), from 0: of each class as many in every task, but for one,
    drawn by key.
    """
    draw = generator(seed_for(seed, 0, 0, SERVER, "task of example"))
    out = np.zeros(len(labels), dtype=np.int64)
    # classes go on where the one before ended, so that small ones do not all fall into the first
    # tasks
    turn = 0
    for c in np.unique(labels):
        of_class = np.flatnonzero(labels == c)
        order = torch.randperm(len(of_class), generator=draw).numpy()
        out[of_class[order]] = (turn + np.arange(len(of_class))) % tasks
        turn = (turn + len(of_class)) % tasks
    return out


# Domain-incremental streams: what examples look like changes.


Change = Literal["rotate90", "permute", "invert", "blur", "noise"]
MOST_TASKS = {"rotate90": 4, "invert": 2}
NOISE_STEP = 32
"""By how much, of 255, the fixed pattern of the change ``noise`` grows from task to task."""


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
    """The same classes in every task, but from another source or in another form: values of a
    column, or transformed images.

    Task 1 shows images as they are. Changes use whole numbers only, so that every machine makes the
    same bytes.

    column: The data's column whose values are the domains, one a task, in their order.
    transform: How images change from task to task, where there is no such column.
    share: Whether each example belongs to one task, or every task shows all of them; without a
    column.
    """
    by_task = tuple(tuple(range(classes)) for _ in range(tasks))
    if bool(column) == bool(transform):
        raise ConfigError("stream.kind = 'domains' needs one of stream.column and stream.transform")
    if transform is None:
        if domains is None:
            raise ConfigError(f"stream.column = {column!r}: these data have no such column")
        count = 0
        if len(domains):
            count = int(domains.max()) + 1
        if share == "all":
            raise ConfigError(
                "stream.share = 'all' has no meaning with stream.column: an example has one value "
                "there"
            )
        if count != tasks:
            raise ConfigError(
                f"stream.column = {column!r} has {count} values; set stream.tasks = {count}"
            )
        return Cut(domains, by_task, by_domain=True)
    if tasks > MOST_TASKS.get(transform, tasks):
        most = MOST_TASKS[transform]
        raise ConfigError(
            f"stream.transform = {transform!r} has {most} forms; set stream.tasks = {most} or fewer"
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
        "rotate90": _turned,
        "permute": _permuted,
        "invert": _inverted,
        "blur": _blurred,
        "noise": _noisy,
    }
    return partial(by_name[name], task=task, seed=change_seed)


def _turned(images: Tensor, task: int, seed: int) -> Tensor:
    if images.shape[-1] != images.shape[-2]:
        raise ConfigError(
            "stream.transform = 'rotate90' needs square images; choose permute, blur or noise"
        )
    return torch.rot90(images, task, (2, 3)).contiguous()


def _permuted(images: Tensor, task: int, seed: int) -> Tensor:
    flat = images.flatten(2)
    order = torch.randperm(flat.shape[2], generator=generator(seed)).to(images.device)
    return flat[:, :, order].view(images.shape)


def _inverted(images: Tensor, task: int, seed: int) -> Tensor:
    return 255 - images


def _blurred(images: Tensor, task: int, seed: int) -> Tensor:
    """The mean of nine pixels, rounded down, once more in every task; edges are repeated."""
    height, width = images.shape[2:]
    rows = torch.arange(-1, height + 1).clamp(0, height - 1)
    columns = torch.arange(-1, width + 1).clamp(0, width - 1)
    for _ in range(task):
        wide = images.to(torch.int32)[:, :, rows][:, :, :, columns]
        parts = [wide[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        images = (torch.stack(parts).sum(0) // 9).to(torch.uint8)
    return images


def _noisy(images: Tensor, task: int, seed: int) -> Tensor:
    """A pattern drawn by key, the same on all images, stronger in every task."""
    top = NOISE_STEP * task
    pattern = torch.randint(
        -top, top + 1, images.shape[1:], generator=generator(seed), dtype=torch.int32
    )
    return (images.to(torch.int32) + pattern.to(images.device)).clamp(0, 255).to(torch.uint8)


# Drift: classes and examples stay what they are, and who has which of them changes with the tasks.


Path = Literal["line", "jump", "return"]


@register("stream", "drift")
def drift_stream(
    labels: NDArray[np.int64], tasks: int, seed: int, classes: int, path: Path = "line"
) -> Cut:
    """The clients' class proportions move from one client split to another; the run's partition
    draws both, with two seeds.

    Each example of a task goes to its client of the second split with the task's probability, else
    of the first. A client may be without examples in a task.

    path: How the share of the second split goes: 0 to 1 evenly, 0 then 1 from the middle on, or 0
    to 1 and back.
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


# Real sites have data of their own, by task.


@register("stream", "sites")
def site_stream(
    tasks: int, classes: int, order: tuple[tuple[int, ...], ...] = (), cuts: tuple[str, ...] = ()
) -> Cut:
    """Tasks of real sites with data of their own: a folder for each task, or dates that divide a
    time column.

    order: The classes of each task, by number, where tasks differ in these; empty: all classes in
    each.
    cuts: The date on which each task but the first begins, for sites with a time column.

    Raises ConfigError where the order is not of as many tasks.
    """
    if order and len(order) != tasks:
        raise ConfigError(
            f"stream.order names the classes of {len(order)} tasks, and stream.tasks = {tasks}"
        )
    return Cut(None, order or (tuple(range(classes)),) * tasks)


@register("stream", "none")
def one_task(labels: NDArray[np.int64], classes: int) -> Cut:
    """One task for the whole run: classes and data do not change."""
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
    """New classes in every task: all classes are divided in a given or random order.

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
