"""How a training set is split over clients: by the partition that the config names, and by task.

A partition gives each client positions in the training set. In a run with tasks, a kind of stream
cuts the training set into tasks, and each task is split alone unless the config says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.tables import NO_STREAM
from fedstill.core.errors import ConfigError, FedstillError, InfeasiblePartition
from fedstill.core.fields import kind_text
from fedstill.core.files import counted
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.core.stream import Cut, Stream
from fedstill.core.user_code import definition, reason
from fedstill.data.client_split import ClientSplit, Positions
from fedstill.data.partition import cached_split
from fedstill.data.partition.sharding import column
from fedstill.data.views import TaskData

# The partition that a config names, applied and checked.


def draw_split(settings: Settings, train: Examples, seed: int | None = None) -> ClientSplit:
    """Split a training set over the run's clients.

    seed: of a random partition; by default the partition's own seed, or else the run's. Raises
    InfeasiblePartition if a client would have no examples, ConfigError for a partition of yours
    that fails.
    """
    partition = settings.named.partition
    function = partition.entry.target
    label = f"partition {partition.entry.name}"
    arguments = {
        "labels": read_only(train.labels),
        "clients": settings.clients,
        **_fields(settings, train, seed),
    }
    try:
        parts = cached_split(function, **arguments)
        if not isinstance(parts, ClientSplit):
            parts = _as_arrays(label, parts, function)
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(f"{label} failed: {reason(error, function)}") from error

    if len(parts) != settings.clients:
        raise ConfigError(
            f"{label} gave {counted(len(parts), 'part')} for {counted(settings.clients, 'client')}"
        )
    if not isinstance(parts, ClientSplit):
        _check_types(label, parts, len(train))
    split = ClientSplit.of_parts(parts)
    _check_split(label, split, len(train))
    return split


def partition_seed(settings: Settings) -> int:
    """The seed of a run's split: that of the partition, or else the run's."""
    seed = settings.named.partition.values.get("seed")
    if seed is None:
        return settings.seed
    return int(seed)


def read_only(values: Tensor) -> NDArray[np.int64]:
    """A view of a tensor that cannot be written to, for functions of users."""
    view = values.numpy().view()
    view.flags.writeable = False
    return view


def _fields(settings: Settings, train: Examples, seed: int | None) -> dict[str, Any]:
    """A partition's fields, with the seed and the owners of examples if it takes them."""
    partition = settings.named.partition
    parameters = inspect.signature(partition.entry.target).parameters
    fields = dict(partition.values)
    fields.pop("seed", None)
    if "seed" in parameters:
        fields["seed"] = partition_seed(settings) if seed is None else seed
    if "groups" in parameters:
        fields["groups"] = None
        if train.owners is not None:
            fields["groups"] = read_only(train.owners)
    return fields


def _as_arrays(label: str, parts: object, function: Callable[..., object]) -> list[NDArray[Any]]:
    """What a user's partition returned as one array a client; raises ConfigError for anything
    without an order.
    """
    if isinstance(parts, Iterable) and not isinstance(parts, (Mapping, Set, str)):
        return [np.asarray(part) for part in parts]
    place = definition(function)
    location = ""
    if place:
        location = f" ({place})"
    raise ConfigError(
        f"{label} returns {kind_text(parts)}, not a list with an array of positions for each "
        f"client{location}"
    )


def _check_types(label: str, parts: Sequence[NDArray[Any]], examples: int) -> None:
    """Raise ConfigError for a part that is no array of whole numbers."""
    for client, part in enumerate(parts):
        is_whole = part.dtype.kind in "iu" or not len(part)
        if part.ndim == 1 and is_whole:
            continue
        if part.dtype == bool:
            kind = "a mask; np.flatnonzero makes of it the"
        elif part.ndim == 1:
            kind = f"numbers of type {part.dtype}, not an array of"
        else:
            kind = f"an array of shape {part.shape}, not an array of"
        raise ConfigError(
            f"{label}: client {client} gets {kind} positions from 0 to {examples - 1}"
        )


def _check_split(label: str, split: ClientSplit, examples: int) -> None:
    """Raise for a client without examples, for a position that no example has, and for an example
    that two clients get.
    """
    empty = np.flatnonzero(split.sizes == 0)
    if len(empty):
        raise InfeasiblePartition(f"{label}: client {empty[0]} gets no examples; use fewer clients")
    positions = split.positions
    outside = np.flatnonzero((positions < 0) | (positions >= examples))
    if len(outside):
        index = outside[0]
        raise ConfigError(
            f"{label}: client {split.owners[index]} gets example {positions[index]}, not positions "
            f"from 0 to {examples - 1}"
        )
    repeated = np.flatnonzero(np.bincount(positions) > 1)
    if len(repeated):
        example = repeated[0]
        first, second = split.owners[positions == example][:2]
        clients = f"two clients, {first} and {second}"
        if first == second:
            clients = f"client {first} twice"
        raise ConfigError(
            f"{label} assigns example {example} to {clients}; assign each example to one client, "
            "once"
        )


# Tasks: the cut of the training set, the split of each task, and the schedule.


def cut_into_tasks(settings: Settings, train: Examples, classes: int) -> Cut | None:
    """The task of each training example; None for a run without tasks.

    Raises ConfigError if the kind of stream cannot cut these examples.
    """
    named = settings.named.stream
    if named.name == NO_STREAM:
        return None
    label = f"stream {named.entry.name}"
    try:
        cut = named.entry.target(**_stream_arguments(settings, train, classes), **named.values)
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(f"{label} failed: {reason(error, named.entry.target)}") from error

    if not isinstance(cut, Cut):
        raise ConfigError(f"{label} gave a {type(cut).__name__}, not a fedstill.core.stream.Cut")
    problem = _problem_of_cut(cut, len(train), settings.stream.tasks, classes)
    if problem:
        raise ConfigError(f"{label}: {problem}")

    transforms = [transform for transform in cut.transforms if transform is not None]
    if transforms and train.values.dtype != torch.uint8:
        raise ConfigError(f"{label} changes images, and these examples are none; choose a column")
    for transform in transforms:
        transform(train.values[:1])  # raises for images of a shape that it cannot change
    return cut


def draw_split_by_task(settings: Settings, train: Examples, cut: Cut) -> ClientSplit:
    """Split the training set over clients: each task for itself, or all data at once.

    Raises InfeasiblePartition or ConfigError.
    """
    # The whole set is split first in any case, since that checks the partition.
    split = draw_split(settings, train)
    if cut.mix:
        return _with_drift(settings, train, cut, split)
    stream = settings.stream
    if cut.task is None or stream.tasks == 1 or stream.compose == "clients_first":
        return split

    by_task = []
    for task in range(stream.tasks):
        positions = np.flatnonzero(cut.task == task)
        try:
            parts = _split_of_task(settings, train, positions, task)
        except InfeasiblePartition as error:
            raise InfeasiblePartition(
                f"task {task + 1}: {error}; or set stream.compose = 'clients_first', which splits "
                "all data once"
            ) from error
        by_task.append(parts)
    return ClientSplit.of_parts([np.concatenate(parts) for parts in zip(*by_task, strict=True)])


def stream_of(settings: Settings, cut: Cut, split: ClientSplit | None) -> Stream:
    """The schedule of a run's tasks; raises ConfigError for a round in which no client has an
    example of its task.

    split: which client has which examples; None where sites keep their data: then every client is
    taken to have examples of every task.
    """
    table = settings.stream
    absent: frozenset[tuple[int, int]] = frozenset()
    if cut.task is not None and split is not None:
        absent = _absent(cut.task, split, table.tasks)
    stream = Stream(
        starts=table.starts(settings.rounds),
        rounds=settings.rounds,
        by_task=cut.classes,
        head=table.head,
        restarts=table.lr == "restart",
        clients=settings.clients,
        lag=table.lag,
        join=table.join,
        stay=table.stay,
        keeps_data=table.past == "kept",
        seed=_stream_seed(settings),
        absent=absent,
    )
    for round in range(1, settings.rounds + 1):
        if not stream.present(round):
            raise ConfigError(
                f"[stream]: in round {round} no client has an example of its task; change the "
                "partition"
            )
    return stream


def task_data(stream: Stream, cut: Cut, tests: Mapping[int, Examples]) -> TaskData:
    """The cut on the clock of the stream; ``tests``: a real site's test sets by task."""
    task_of = None
    if cut.task is not None:
        task_of = torch.from_numpy(np.array(cut.task, dtype=np.int64))
    return TaskData(
        stream=stream,
        task_of=task_of,
        transforms=cut.transforms,
        by_domain=cut.by_domain,
        tests=tests,
    )


def _stream_seed(settings: Settings) -> int:
    if settings.stream.seed is None:
        return settings.seed
    return settings.stream.seed


def _stream_arguments(settings: Settings, train: Examples, classes: int) -> dict[str, Any]:
    """The arguments of a kind of stream: those facts about the data that its signature asks for."""
    arguments = {
        "labels": read_only(train.labels),
        "domains": None,
        "tasks": settings.stream.tasks,
        "seed": _stream_seed(settings),
        "classes": classes,
    }
    if train.owners is not None:
        arguments["domains"] = read_only(train.owners)
    parameters = inspect.signature(settings.named.stream.entry.target).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _problem_of_cut(cut: Cut, examples: int, tasks: int, classes: int) -> str:
    """The problem of a cut that does not fit these examples; empty if it fits."""
    problem = _problem_of_tasks(cut.task, examples, tasks)
    if problem:
        return problem
    if len(cut.classes) != tasks:
        return f"Cut.classes has {len(cut.classes)} entries for {tasks} tasks"
    if cut.transforms and len(cut.transforms) != tasks:
        return f"Cut.transforms has {len(cut.transforms)} entries for {tasks} tasks"
    if cut.mix and (len(cut.mix) != tasks or cut.task is None):
        return "Cut.mix needs a share for each task, and Cut.task"
    for class_ids in cut.classes:
        if not class_ids or min(class_ids) < 0 or max(class_ids) >= classes:
            return f"Cut.classes must name classes from 0 to {classes - 1} in each task"
    return ""


def _problem_of_tasks(task: NDArray[np.int64] | None, examples: int, tasks: int) -> str:
    """The problem of tasks that do not fit these examples; empty if they fit."""
    if task is None:
        return ""
    if task.shape != (examples,) or task.dtype.kind not in "iu":
        return f"Cut.task must be {examples} whole numbers, the task of each example"
    if task.min() < 0 or task.max() >= tasks:
        return f"Cut.task must have numbers from 0 to {tasks - 1}"
    counts = np.bincount(task, minlength=tasks)
    if not counts.all():
        return f"task {int(np.argmin(counts)) + 1} has no examples; set fewer stream.tasks"
    return ""


def _split_of_task(
    settings: Settings, train: Examples, positions: Positions, task: int
) -> list[Positions]:
    """The examples of one task, given by their positions, split over clients."""
    seed = partition_seed(settings)
    if task > 0:
        seed = seed_for(seed, task, 0, SERVER, "task split")
    owners = train.owners
    if owners is not None:
        owners = owners[positions]
    # Partitions read labels and owners only, so the values of a task are not copied.
    examples = Examples(torch.zeros(len(positions), 0), train.labels[positions], owners)
    parts: ClientSplit | list[Positions]
    if settings.named.partition.entry.target is column:
        parts = _split_by_owner(settings, train, examples, seed)
    else:
        parts = draw_split(settings, examples, seed)
    return [positions[part] for part in parts]


def _split_by_owner(
    settings: Settings, train: Examples, task: Examples, seed: int
) -> list[Positions]:
    """The positions among a task's examples of each value of ``partition.column``.

    The values that are clients follow from all training examples, since a client may have none of a
    task.
    """
    assert train.owners is not None
    assert task.owners is not None
    fields = settings.named.partition.values
    counts = np.bincount(read_only(train.owners))
    clients = np.flatnonzero(counts >= fields.get("least", 1))

    codes = read_only(task.owners)
    positions = np.flatnonzero(np.isin(codes, clients))
    parts = column(
        read_only(task.labels)[positions],
        len(clients),
        codes[positions],
        alpha=fields.get("alpha"),
        seed=seed,
    )
    present = np.unique(codes[positions]).tolist()
    by_owner = {owner: positions[part] for owner, part in zip(present, parts, strict=True)}
    return [by_owner.get(owner, positions[:0]) for owner in clients.tolist()]


def _with_drift(settings: Settings, train: Examples, cut: Cut, first: ClientSplit) -> ClientSplit:
    """Each example at its client of a first split, or of a second split with the probability of its
    task.
    """
    assert cut.task is not None
    if "seed" not in inspect.signature(settings.named.partition.entry.target).parameters:
        raise ConfigError(
            "[stream] drift moves from one drawn split to another, and this partition draws nothing"
        )
    seed = seed_for(partition_seed(settings), 1, 0, SERVER, "drift split")
    second = draw_split(settings, train, seed)

    drift_seed = seed_for(_stream_seed(settings), 0, 0, SERVER, "drift")
    chance = torch.rand(len(train), generator=generator(drift_seed)).numpy()
    moves = chance < np.asarray(cut.mix)[cut.task]
    stays_in_first = ~moves[first.positions]
    moves_to_second = moves[second.positions]
    return ClientSplit.of_owners(
        np.concatenate([first.positions[stays_in_first], second.positions[moves_to_second]]),
        np.concatenate([first.owners[stays_in_first], second.owners[moves_to_second]]),
        settings.clients,
    )


def _absent(task: NDArray[np.int64], split: ClientSplit, tasks: int) -> frozenset[tuple[int, int]]:
    """The pairs (task, client) of clients that have no example of a task."""
    clients = len(split)
    cells = task[split.positions] * clients + split.owners
    counts = np.bincount(cells, minlength=tasks * clients).reshape(tasks, clients)
    return frozenset((int(t), int(c)) for t, c in np.argwhere(counts == 0))
