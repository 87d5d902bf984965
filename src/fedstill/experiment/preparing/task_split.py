"""Tasks of a run: the training set cut by the stream's kind, split over clients, and put on the
stream's clock.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.data.partition.column import column
from fedstill.data.partition.flat import FlatParts
from fedstill.data.task_data import TaskData
from fedstill.errors import ConfigError, FedstillError, InfeasiblePartition
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.stream_table import NO_STREAM
from fedstill.experiment.preparing.split import split, to_read
from fedstill.keys import generator, seed_for
from fedstill.origin import reason
from fedstill.records import SERVER, Examples
from fedstill.stream import Cut, Stream

Parts = FlatParts[NDArray[np.int64]]


def cut_of(settings: Settings, train: Examples, classes: int) -> Cut | None:
    """The training set cut into tasks; None for a run without. Raises ConfigError where the kind
    gave no cut.
    """
    named, tasks = settings.named.stream, settings.stream.tasks
    if named.name == NO_STREAM:
        return None
    images = train.values.dtype == torch.uint8
    given = {
        "labels": to_read(train.labels),
        "domains": None if train.owners is None else to_read(train.owners),
        "tasks": tasks,
        "seed": _seed(settings),
        "classes": classes,
    }
    takes = inspect.signature(named.entry.target).parameters
    try:
        cut = named.entry.target(**{k: v for k, v in given.items() if k in takes}, **named.values)
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"stream {named.entry.name} failed: {reason(error, named.entry.target)}"
        ) from error
    if not isinstance(cut, Cut):
        raise ConfigError(
            f"stream {named.entry.name} gave a {type(cut).__name__}, not a fedstill.stream.Cut"
        )
    if why := _no_cut(cut, len(train), tasks, classes):
        raise ConfigError(f"stream {named.entry.name}: {why}")
    if any(cut.transforms) and not images:
        raise ConfigError(
            f"stream {named.entry.name} changes images, and these examples are none; choose a "
            "column"
        )
    for change in filter(None, cut.transforms):
        change(train.values[:1])  # refuses images of a shape that it cannot change
    return cut


def split_by_task(settings: Settings, train: Examples, cut: Cut) -> Parts:
    """Each client's positions in the training set, over all tasks; raises InfeasiblePartition,
    ConfigError.
    """
    whole = split(settings, train)
    if cut.mix:
        return _drifting(settings, train, cut, whole)
    if settings.stream.compose == "clients_first" or settings.stream.tasks == 1 or cut.task is None:
        return whole
    each = [np.flatnonzero(cut.task == t) for t in range(settings.stream.tasks)]
    by_task, by_owner = [], settings.named.partition.entry.target is column
    for task, own in enumerate(each):
        seed = None if task == 0 else seed_for(_split_seed(settings), task, 0, SERVER, "task split")
        owners = None if train.owners is None else train.owners[own]
        some = Examples(torch.zeros(len(own), 0), train.labels[own], owners)
        try:
            parts = (
                _of_owners(settings, train, some, seed) if by_owner else split(settings, some, seed)
            )
            by_task.append([own[part] for part in parts])
        except InfeasiblePartition as error:
            raise InfeasiblePartition(
                f"task {task + 1}: {error}; or set stream.compose = 'clients_first', which splits "
                "all data once"
            ) from error
    return FlatParts.of([np.concatenate(own) for own in zip(*by_task, strict=True)])


def _of_owners(
    settings: Settings, train: Examples, some: Examples, seed: int | None
) -> list[NDArray[np.int64]]:
    """The positions of each client's among some examples: none for one whose column's value is not
    among these.

    ``train``: all examples, which say whose values are clients; ``seed``: as in ``split``.
    """
    assert train.owners is not None
    assert some.owners is not None
    rules, codes = settings.named.partition.values, to_read(some.owners)
    clients = np.flatnonzero(np.bincount(to_read(train.owners)) >= rules.get("least", 1))
    own = np.flatnonzero(np.isin(codes, clients))
    seed = _split_seed(settings) if seed is None else seed
    dealt = column(
        to_read(some.labels)[own], len(clients), codes[own], alpha=rules.get("alpha"), seed=seed
    )
    there = dict(zip(np.unique(codes[own]).tolist(), dealt, strict=True))
    return [own[there[owner]] if owner in there else own[:0] for owner in clients.tolist()]


def stream_of(settings: Settings, cut: Cut, parts: object) -> Stream:
    """The schedule of a run's tasks; raises ConfigError for a task in which nobody has an example.

    parts: who has which examples; of real sites nobody knows it, and all are taken to be there.
    """
    table, clients = settings.stream, settings.clients
    there = np.ones((table.tasks, clients), dtype=bool)
    if cut.task is not None and isinstance(parts, FlatParts):
        owners, task = np.repeat(np.arange(clients), parts.sizes), cut.task[parts.order.numpy()]
        there = (
            np.bincount(task * clients + owners, minlength=table.tasks * clients).reshape(
                -1, clients
            )
            > 0
        )
    absent = frozenset((int(t), int(c)) for t, c in np.argwhere(~there))
    stream = Stream(
        table.starts(settings.rounds),
        settings.rounds,
        cut.classes,
        table.head,
        table.lr == "restart",
        clients,
        table.lag,
        table.join,
        table.stay,
        table.past == "kept",
        _seed(settings),
        absent,
    )
    for round in range(1, settings.rounds + 1):
        if not stream.present(round):
            raise ConfigError(
                f"[stream]: in round {round} no client has an example of its task; change the "
                "partition"
            )
    return stream


def task_data(stream: Stream, cut: Cut, tests: Mapping[int, Examples]) -> TaskData:
    """The cut on the clock of the stream; ``tests``: a real site's own, by task."""
    task_of = None if cut.task is None else torch.from_numpy(np.array(cut.task, dtype=np.int64))
    return TaskData(stream, task_of, cut.transforms, cut.by_domain, tests)


def _drifting(settings: Settings, train: Examples, cut: Cut, first: Parts) -> Parts:
    """Each example at its client of the first split, or of a second one with the probability of its
    task.
    """
    assert cut.task is not None
    if "seed" not in inspect.signature(settings.named.partition.entry.target).parameters:
        raise ConfigError(
            "[stream] drift moves from one drawn split to another, and this partition draws nothing"
        )
    second = split(settings, train, seed_for(_split_seed(settings), 1, 0, SERVER, "drift split"))
    chance = torch.rand(
        len(train), generator=generator(seed_for(_seed(settings), 0, 0, SERVER, "drift"))
    ).numpy()
    moved = chance < np.asarray(cut.mix)[cut.task]
    owners = np.repeat(np.arange(settings.clients), first.sizes)
    later = np.repeat(np.arange(settings.clients), second.sizes)
    stays, goes = ~moved[first.order], moved[second.order]
    order = np.concatenate([first.order[stays], second.order[goes]])
    return FlatParts.dealt(order, np.concatenate([owners[stays], later[goes]]), settings.clients)


def _seed(settings: Settings) -> int:
    return settings.seed if settings.stream.seed is None else settings.stream.seed


def _split_seed(settings: Settings) -> int:
    own = settings.named.partition.values.get("seed")
    return settings.seed if own is None else int(own)


def _no_cut(cut: Cut, examples: int, tasks: int, classes: int) -> str:
    """Why a cut cannot be one of these examples; empty if it can."""
    if cut.task is not None and (cut.task.shape != (examples,) or cut.task.dtype.kind not in "iu"):
        return f"Cut.task must be {examples} whole numbers, the task of each example"
    if cut.task is not None:
        there = np.bincount(np.clip(cut.task, 0, tasks), minlength=tasks)
        if cut.task.min() < 0 or len(there) > tasks:
            return f"Cut.task must have numbers from 0 to {tasks - 1}"
        if not there.all():
            return f"task {int(np.argmin(there)) + 1} has no examples; set fewer stream.tasks"
    for what, value in (("classes", cut.classes), ("transforms", cut.transforms or [None] * tasks)):
        if len(value) != tasks:
            return f"Cut.{what} has {len(value)} entries for {tasks} tasks"
    if cut.mix and (len(cut.mix) != tasks or cut.task is None):
        return "Cut.mix needs a share for each task, and Cut.task"
    if any(not own or not all(0 <= c < classes for c in own) for own in cut.classes):
        return f"Cut.classes must name classes from 0 to {classes - 1} in each task"
    return ""
