"""The clients' data: partition, tasks, test sets and the public set, standardised."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.tables import NO_STREAM
from fedstill.core.errors import ConfigError, DataError, FedstillError, InfeasiblePartition
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.core.stream import Cut, Stream
from fedstill.core.user_code import definition, of_kind, reason
from fedstill.data.client_split import DealtOut, FlatParts, counts_table
from fedstill.data.dataset import Dataset, stratified
from fedstill.data.partition import Parts, cached
from fedstill.data.partition.column import column
from fedstill.data.sources.held_out import TEST_SHARE
from fedstill.data.views import TaskData
from fedstill.running.data_sums import Moments
from fedstill.running.public_data import NOISE, set_apart
from fedstill.running.standardisation import PLAIN, Standard, standard

# Which client has which examples: the partition that a config names, applied and checked.


def split(
    settings: Settings, train: Examples, seed: int | None = None
) -> FlatParts[NDArray[np.int64]]:
    """Positions of each client's examples.

    Raises InfeasiblePartition if a client would have none, ConfigError for a partition of yours
    that fails.

    ``seed``: what a partition that draws draws from; unset: its own, or the run's.
    """
    partition, labels = settings.named.partition, to_read(train.labels)
    entry, fields = partition.entry, dict(partition.values)
    own = fields.pop("seed", None) if seed is None else seed
    fields.pop("seed", None)
    if "seed" in inspect.signature(entry.target).parameters:
        fields["seed"] = settings.seed if own is None else own
    if "groups" in inspect.signature(entry.target).parameters:
        fields["groups"] = None if train.owners is None else to_read(train.owners)
    try:
        apply = (
            entry.target
            if partition.name in settings.lives
            else functools.partial(cached, entry.target)
        )
        parts = apply(labels=labels, clients=settings.clients, **fields)
        parts = (
            parts
            if isinstance(parts, FlatParts)
            else _arrays(f"partition {entry.name}", parts, entry.target)
        )
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"partition {entry.name} failed: {reason(error, entry.target)}"
        ) from error
    if len(parts) != settings.clients:
        raise ConfigError(
            f"partition {entry.name} gave {len(parts)} parts for {settings.clients} clients"
        )
    return _checked(f"partition {entry.name}", parts, len(labels))


def to_read(values: Tensor) -> NDArray[np.int64]:
    """The same numbers for NumPy, which nobody may write into: they are the run's."""
    view = values.numpy().view()
    view.flags.writeable = False
    return view


def _arrays(what: str, given: object, partition: Callable[..., object]) -> list[NDArray[Any]]:
    """What a user's partition gave, a part a client; raises ConfigError for what has no parts in an
    order.
    """
    if isinstance(given, Iterable) and not isinstance(given, (Mapping, Set, str)):
        return [np.asarray(part) for part in given]
    where = f" ({definition(partition)})" if definition(partition) else ""
    raise ConfigError(
        f"{what} gives {of_kind(given)}, not a list with an array of positions for each "
        f"client{where}"
    )


def _checked(what: str, parts: Parts, examples: int) -> FlatParts[NDArray[np.int64]]:
    """The parts in one array; raises InfeasiblePartition or ConfigError where they are no split of
    so many examples.
    """
    must = f"positions from 0 to {examples - 1}"
    for client, part in enumerate([] if isinstance(parts, FlatParts) else parts):
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            of = (
                f"numbers of type {part.dtype}"
                if part.ndim == 1
                else f"an array of shape {part.shape}"
            )
            got = (
                "a mask; np.flatnonzero makes of it the"
                if part.dtype == bool
                else f"{of}, not an array of"
            )
            raise ConfigError(f"{what}: client {client} gets {got} {must}")
    flat = FlatParts.of(parts)
    for client in np.flatnonzero(flat.sizes == 0)[:1]:
        raise InfeasiblePartition(f"{what}: client {client} gets no examples; use fewer clients")
    for place in np.flatnonzero((flat.order < 0) | (flat.order >= examples))[:1]:
        raise ConfigError(
            f"{what}: client {_owner(flat, place)} gets example {flat.order[place]}, not {must}"
        )
    for example in np.flatnonzero(np.bincount(flat.order) > 1)[:1]:
        one, other = (_owner(flat, place) for place in np.flatnonzero(flat.order == example)[:2])
        whose = f"client {one} twice" if one == other else f"two clients, {one} and {other}"
        raise ConfigError(
            f"{what} gives an example to {whose}: that at {example}; each goes to one client, once"
        )
    return flat


def _owner(flat: FlatParts[NDArray[np.int64]], place: np.int64) -> int:
    """The client that has what stands at a place of the order."""
    return int(np.searchsorted(flat.ends, place, side="right"))


def some_of(examples: Examples, size: int, key: str) -> Examples:
    """``size`` of the examples, stratified, or all for 0; raises ConfigError naming ``data.KEY``
    for more than all.
    """
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(
            f"data.{key} = {size} is more than the {len(examples.labels)} examples there are"
        )
    return examples.take(stratified(examples.labels, size, seed=0))


# Tasks of a run: the training set cut by the stream's kind, split over clients, and put on the
# stream's clock.


_TaskParts = FlatParts[NDArray[np.int64]]


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
            f"stream {named.entry.name} gave a {type(cut).__name__}, not a fedstill.core.stream.Cut"
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


def split_by_task(settings: Settings, train: Examples, cut: Cut) -> _TaskParts:
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


def _drifting(settings: Settings, train: Examples, cut: Cut, first: _TaskParts) -> _TaskParts:
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


# Who has which examples: the public set apart, the clients' parts and own tests, all standardised
# as the run says.


OWN_TEST = "own test"
"""The purpose for which clients' own test examples are drawn."""


@dataclass(frozen=True)
class Shared:
    """A run's examples. ``parts``: positions in ``train`` of each client's; ``test``: common to
    all, if there is one.

    ``own_tests``: of clients that have one. ``names``: what clients are called in the data. ``by``:
    how the examples were standardised. ``cut``: the tasks; ``tests_by_task``: of a real site, its
    own test sets of those so far.
    ``notes``: what was left out or taken as it was, a sentence each.
    """

    train: Examples
    parts: FlatParts[Tensor] | Mapping[int, Tensor] | tuple[()]
    public: Examples | None = None
    test: Examples | None = None
    own_tests: Mapping[int, Examples] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    by: Standard = PLAIN
    notes: tuple[str, ...] = ()
    cut: Cut | None = None
    tests_by_task: Mapping[int, Examples] = field(default_factory=dict)

    def counts(self, classes: int) -> Tensor:
        """Label counts (clients, C); (0, C) where sites keep them."""
        return counts_table(
            self.train.labels, self.parts if isinstance(self.parts, Sequence) else (), classes
        )


def divided(
    settings: Settings, dataset: Dataset, begun: DealtOut | None = None, sent: Moments | None = None
) -> Shared:
    """What clients, the server and tests have of a data set; raises ConfigError, DataError or
    InfeasiblePartition.

    begun: the split that a run began with, which is taken as it is. sent: what the sums of real
    sites came to.
    """
    rules = settings.named.partition.values
    everyone, tests = trained_and_tested(settings, dataset)
    if rules.get("pool"):
        everyone, tests = _all([dataset.train, dataset.test]), dataset.test.take(torch.arange(0))
    train, public = set_apart(
        settings, dataset, some_of(everyone, settings.data.train_size, "train_size")
    )
    test = some_of(tests, settings.data.test_size, "test_size")
    owners = client_owners(settings, dataset, train)
    cut = cut_of(settings, train, len(dataset.classes))
    own, parts = _dealt_out(settings, train, tests, owners, begun, cut)
    noise = settings.data.public_from == NOISE
    by = standard(settings, dataset, train, parts, None if noise else public, sent)
    if public is not None and not noise:
        if by.by_client is not None:
            raise ConfigError(
                "data.standardise = 'own' leaves no common units for a public set: set "
                "data.public_from = 'noise', or "
                "data.standardise = 'server' (the public set's mean and spread)"
            )
        public = by.of(public)
    own = {client: by.of_one(client, examples) for client, examples in own.items()}
    if rules.get("pool"):
        test = _all(list(own.values()))
    names = tuple(dataset.about.owners[k] for k in owners)
    common = (
        None
        if by.by_client is not None or not len(test)
        else by.of(test)
        if not rules.get("pool")
        else test
    )
    notes = (*dataset.about.notes, *by.notes, *_of_all_tasks(settings, by))
    return Shared(by.of_clients(train, parts), parts, public, common, own, names, by, notes, cut)


def _of_all_tasks(settings: Settings, by: Standard) -> list[str]:
    """What is said of a mean and a spread that a simulation takes of training rows of tasks to
    come, too.
    """
    if (
        settings.on_sites
        or settings.stream.tasks == 1
        or by.origin not in ("pooled", "summed", "own")
    ):
        return []
    return [
        "mean and spread are of the rows of all tasks, those to come too; declare data.mean and "
        "data.std instead"
    ]


def trained_and_tested(settings: Settings, dataset: Dataset) -> tuple[Examples, Examples]:
    """The examples that clients may have, and those on which models are tested, as
    ``[data] test_from`` says.

    Of held-out training examples there are ``test_size``, or a fifth of all, the classes' shares
    kept; they are the same for every seed and every ``train_size``. Raises ConfigError where they
    leave nothing to train on.
    """
    if settings.data.test_from is None:
        return dataset.train, dataset.test
    if settings.on_sites or settings.named.partition.values.get("pool"):
        what = "flower.data = 'sites'" if settings.on_sites else "partition.pool = true"
        raise ConfigError(
            f"data.test_from = 'held_out' has no meaning with {what}; leave one of them out"
        )
    labels = dataset.train.labels
    size = settings.data.test_size or round(TEST_SHARE * len(labels))
    if not 0 < size < len(labels):
        raise ConfigError(
            f"data.test_from = 'held_out': data.test_size = {size} leaves nothing of {len(labels)} "
            "training examples"
        )
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[stratified(labels, size, seed=seed_for(0, 0, 0, SERVER, "held out"))] = True
    return dataset.train.take((~held).nonzero().flatten()), dataset.train.take(
        held.nonzero().flatten()
    )


def client_owners(settings: Settings, dataset: Dataset, train: Examples) -> list[int]:
    """The numbers of the owners that are clients 0, 1, …: those with enough training examples, in
    order; else none.

    Raises ConfigError where there are more or fewer than clients.
    """
    rules = settings.named.partition.values
    if train.owners is None or "column" not in rules:
        return []
    counts = torch.bincount(train.owners, minlength=len(dataset.about.owners))
    enough = (counts >= max(1, int(rules.get("least", 1)))).nonzero().flatten().tolist()
    if len(enough) != settings.clients:
        raise ConfigError(
            f"partition.column = {rules['column']!r} has {len(enough)} values with enough training "
            "examples, and "
            f"topology.clients is {settings.clients}; set topology.clients = {len(enough)}"
        )
    return enough


def _dealt_out(
    settings: Settings,
    train: Examples,
    tests: Examples,
    owners: Sequence[int],
    begun: DealtOut | None,
    cut: Cut | None,
) -> tuple[dict[int, Examples], FlatParts[Tensor] | tuple[()]]:
    """Each client's own test examples, and the positions of its training examples."""
    if settings.on_sites:
        return {}, ()
    labels = train.labels.numpy()
    if begun is not None and not begun.fits(labels, settings.clients):
        raise DataError(
            "the training data are not those that the run began with: the labels in its split "
            "differ"
        )
    rules = settings.named.partition.values
    if rules.get("own_test") is None:
        if rules.get("pool"):
            raise ConfigError(
                "partition.pool = true needs partition.own_test, the share that each client keeps "
                "for it"
            )
        return {}, (_split(settings, train, cut) if begun is None else begun.parts).tensors()
    own, kept = _own_tests(rules, train, tests, _split(settings, train, cut).tensors(), owners)
    if begun is not None and not np.array_equal(begun.parts.order, kept.order):
        raise DataError(
            "the training data are not those that the run began with: the split differs"
        )
    return own, kept


def _split(settings: Settings, train: Examples, cut: Cut | None) -> FlatParts[NDArray[np.int64]]:
    return split(settings, train) if cut is None else split_by_task(settings, train, cut)


def _own_tests(
    rules: Mapping[str, Any],
    train: Examples,
    tests: Examples,
    parts: FlatParts[Tensor],
    owners: Sequence[int],
) -> tuple[dict[int, Examples], FlatParts[Tensor]]:
    """Each client's own test examples, and the parts without them."""
    own = rules["own_test"]
    if own == "column":
        if rules.get("pool") or tests.owners is None:
            raise ConfigError(
                "partition.own_test = 'column' needs a test split with that column; give a share "
                "instead"
            )
        codes = tests.owners.numpy()
        by_owner = FlatParts.dealt(
            np.arange(len(codes)), codes, max([*owners, *codes.tolist()]) + 1
        ).tensors()
        return {c: tests.take(by_owner[k]) for c, k in enumerate(owners) if len(by_owner[k])}, parts
    kept, held = list[NDArray[np.int64]](), dict[int, Examples]()
    for client, part in enumerate(parts):
        count = min(max(1, round(float(own) * len(part))), len(part) - 1)
        order = torch.arange(len(part))
        if rules.get("own_test_take") != "last":
            order = torch.randperm(
                len(part), generator=generator(seed_for(0, 0, 0, client, OWN_TEST))
            )
        kept.append(part[order[: len(part) - count].sort().values].numpy())
        if count:
            held[client] = train.take(part[order[len(part) - count :].sort().values])
    return held, FlatParts.of(kept).tensors()


def _all(each: Sequence[Examples]) -> Examples:
    """Examples, one below another."""
    codes = [own.owners for own in each if own.owners is not None]
    owners = torch.cat(codes) if len(codes) == len(each) else None
    return Examples(
        torch.cat([own.values for own in each]), torch.cat([own.labels for own in each]), owners
    )
