"""What clients, server and tests have of a run's data: split, and then scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, DataError
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.core.stream import Cut
from fedstill.data.client_split import ClientSplit
from fedstill.data.dataset import Dataset, stratified_positions
from fedstill.data.sources.splits import TEST_SHARE
from fedstill.data.views import concatenated
from fedstill.running.data_sums import Moments
from fedstill.running.public_data import NOISE, set_public_apart
from fedstill.running.split_file import StoredSplit
from fedstill.running.splitting import cut_into_tasks, draw_split, draw_split_by_task
from fedstill.running.standardisation import UNSCALED, Scaler, fit_scaler

OWN_TEST = "own test"
"""The purpose for which clients' own test examples are drawn."""


@dataclass(frozen=True)
class ClientData:
    """What clients, server and tests have of a run's data.

    train: the examples that clients train on. split: which client has which of them; None where
    sites keep their data. public: the public set. test: the common test set. client_tests: of the
    clients that have a test set of their own. client_names: what the data call the clients.
    tasks: the tasks of the training examples. task_tests: a real site's test sets by task. scaler:
    how the values of all these were scaled.
    """

    train: Examples
    split: ClientSplit | None
    public: Examples | None = None
    test: Examples | None = None
    client_tests: Mapping[int, Examples] = field(default_factory=dict)
    client_names: tuple[str, ...] = ()
    tasks: Cut | None = None
    task_tests: Mapping[int, Examples] = field(default_factory=dict)
    scaler: Scaler = UNSCALED

    def label_table(self, classes: int) -> Tensor:
        """Label counts (clients, C); (0, C) where sites keep their data."""
        if self.split is None:
            return torch.zeros(0, classes, dtype=torch.int64)
        return self.split.label_table(self.train.labels, classes)


def split_data(
    settings: Settings, dataset: Dataset, stored: StoredSplit | None = None
) -> ClientData:
    """Split a data set into the clients' training and test examples, the public set and the common
    test set.

    stored: the split that a run began with, which is used instead of a new one. Raises ConfigError,
    DataError or InfeasiblePartition.
    """
    trainable, tests = training_and_test_sets(settings, dataset)
    trainable = subset(trainable, settings.data.train_size, "train_size")
    public_split = set_public_apart(settings, dataset, trainable)
    train = public_split.train
    common_test = subset(tests, settings.data.test_size, "test_size")

    owners = client_owners(settings, dataset, train)
    tasks = cut_into_tasks(settings, train, len(dataset.classes))
    data = ClientData(
        train=train,
        split=None,
        public=public_split.public,
        test=common_test,
        client_names=tuple(dataset.about.owners[owner] for owner in owners),
        tasks=tasks,
    )
    if settings.on_sites:
        return data

    if stored is not None and not stored.fits(train.labels.numpy(), settings.clients):
        raise DataError(
            "the training data are not those that the run began with: the labels in its split "
            "differ"
        )
    if settings.named.partition.values.get("own_test") is None:
        return replace(data, split=_split_without_tests(settings, data, stored))
    return _with_client_tests(settings, data, tests, owners, stored)


def scale_data(
    settings: Settings, dataset: Dataset, data: ClientData, sent: Moments | None = None
) -> ClientData:
    """Scale the values of all examples, as ``data.standardise`` says.

    sent: the mean and spread from the sums that real sites sent. Raises ConfigError for a public
    set that has no common unit.
    """
    # Noise is drawn in the units of the network's inputs, so it is never scaled.
    is_noise = settings.data.public_from == NOISE
    public = None if is_noise else data.public
    scaler = fit_scaler(settings, dataset, data.train, data.split, public=public, sent=sent)
    if public is not None and scaler.by_client is not None:
        raise ConfigError(
            "data.standardise = 'own' leaves no common units for a public set: set "
            "data.public_from = 'noise', or data.standardise = 'server' (the public set's mean and "
            "spread)"
        )
    if public is not None:
        public = scaler.transform(public)
    client_tests = {
        client: scaler.transform_client(client, examples)
        for client, examples in data.client_tests.items()
    }
    test = None
    if data.test is not None and len(data.test) and scaler.by_client is None:
        test = scaler.transform(data.test)
    return replace(
        data,
        train=scaler.transform_clients(data.train, data.split),
        public=data.public if is_noise else public,
        test=test,
        client_tests=client_tests,
        scaler=scaler,
    )


def training_and_test_sets(settings: Settings, dataset: Dataset) -> tuple[Examples, Examples]:
    """The examples that clients may have, and those on which models are tested.

    ``partition.pool`` puts both splits of the data set together, and leaves tests to the clients.
    ``data.test_from`` holds out training examples: ``test_size`` of them, or a fifth of all, with
    the same shares of classes; they are the same for every seed and every ``train_size``. Raises
    ConfigError where they leave nothing to train on.
    """
    pool = settings.named.partition.values.get("pool")
    if settings.data.test_from is None:
        if pool:
            nothing = dataset.test.take(torch.arange(0))
            return concatenated([dataset.train, dataset.test]), nothing
        return dataset.train, dataset.test

    if settings.on_sites or pool:
        key = "flower.data = 'sites'" if settings.on_sites else "partition.pool = true"
        raise ConfigError(
            f"data.test_from = 'held_out' has no meaning with {key}; leave one of them out"
        )
    labels = dataset.train.labels
    size = settings.data.test_size or round(TEST_SHARE * len(labels))
    if not 0 < size < len(labels):
        raise ConfigError(
            f"data.test_from = 'held_out': data.test_size = {size} leaves nothing of {len(labels)} "
            "training examples"
        )
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    is_held_out[stratified_positions(labels, size, seed=seed_for(0, 0, 0, SERVER, "held out"))] = (
        True
    )
    train = dataset.train.take((~is_held_out).nonzero().flatten())
    test = dataset.train.take(is_held_out.nonzero().flatten())
    return train, test


def subset(examples: Examples, size: int, key: str) -> Examples:
    """``size`` of the examples with the same shares of classes, or all for 0.

    Raises ConfigError naming ``data.KEY`` if there are fewer.
    """
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(
            f"data.{key} = {size} is more than the {len(examples.labels)} examples there are"
        )
    return examples.take(stratified_positions(examples.labels, size, seed=0))


def client_owners(settings: Settings, dataset: Dataset, train: Examples) -> list[int]:
    """The owners that are clients 0, 1, …, by their numbers: those with enough training examples.

    Empty where no column says whose an example is. Raises ConfigError where there are more or fewer
    than clients.
    """
    fields = settings.named.partition.values
    if train.owners is None or "column" not in fields:
        return []
    counts = torch.bincount(train.owners, minlength=len(dataset.about.owners))
    least = max(1, int(fields.get("least", 1)))
    owners: list[int] = (counts >= least).nonzero().flatten().tolist()
    if len(owners) != settings.clients:
        raise ConfigError(
            f"partition.column = {fields['column']!r} has {len(owners)} values with enough "
            f"training examples, and topology.clients is {settings.clients}; set topology.clients "
            f"= {len(owners)}"
        )
    return owners


def _draw(settings: Settings, data: ClientData) -> ClientSplit:
    if data.tasks is None:
        return draw_split(settings, data.train)
    return draw_split_by_task(settings, data.train, data.tasks)


def _split_without_tests(
    settings: Settings, data: ClientData, stored: StoredSplit | None
) -> ClientSplit:
    """The split where clients have no tests of their own."""
    if settings.named.partition.values.get("pool"):
        raise ConfigError(
            "partition.pool = true needs partition.own_test, the share that each client keeps for "
            "it"
        )
    # Some splits take minutes to draw, so a run that goes on uses the one in its directory.
    return _draw(settings, data) if stored is None else stored.clients


def _with_client_tests(
    settings: Settings,
    data: ClientData,
    tests: Examples,
    owners: Sequence[int],
    stored: StoredSplit | None,
) -> ClientData:
    """The data in which each client has test examples of its own."""
    fields = settings.named.partition.values
    split = _draw(settings, data)
    if fields["own_test"] == "column":
        if fields.get("pool") or tests.owners is None:
            raise ConfigError(
                "partition.own_test = 'column' needs a test split with that column; give a share "
                "instead"
            )
        client_tests = _tests_by_owner(tests, owners)
    else:
        held_out = _hold_out_tests(
            split, share=float(fields["own_test"]), take_last=fields.get("own_test_take") == "last"
        )
        split = held_out.train
        client_tests = {
            client: data.train.take(positions) for client, positions in held_out.tests.items()
        }

    # The file of a run has the training examples alone, so a resume draws both anew.
    if stored is not None and not np.array_equal(stored.clients.positions, split.positions):
        raise DataError(
            "the training data are not those that the run began with: the split differs"
        )
    test = data.test
    if fields.get("pool"):
        test = concatenated(list(client_tests.values()))
    return replace(data, split=split, client_tests=client_tests, test=test)


def _tests_by_owner(tests: Examples, owners: Sequence[int]) -> dict[int, Examples]:
    """The rows of the test split that belong to each client's owner, if there are any."""
    assert tests.owners is not None
    codes = tests.owners.numpy()
    highest = max([*owners, *codes.tolist()])
    by_owner = ClientSplit.of_owners(np.arange(len(codes)), codes, highest + 1)
    positions = {client: by_owner[owner] for client, owner in enumerate(owners)}
    return {
        client: tests.take(torch.from_numpy(rows))
        for client, rows in positions.items()
        if len(rows)
    }


@dataclass(frozen=True)
class _HeldOut:
    """A split without the examples that clients test on, and the positions of these by client."""

    train: ClientSplit
    tests: Mapping[int, Tensor]


def _hold_out_tests(split: ClientSplit, share: float, take_last: bool) -> _HeldOut:
    """A share of each client's examples for tests: drawn, or the last.

    One example of each client remains to train on.
    """
    train = []
    tests = {}
    for client, positions in enumerate(split.tensors()):
        size = len(positions)
        count = min(max(1, round(share * size)), size - 1)
        order = torch.arange(size)
        if not take_last:
            # The same test examples for every seed of a run, so that runs can be compared.
            draw = generator(seed_for(0, 0, 0, client, OWN_TEST))
            order = torch.randperm(size, generator=draw)
        border = size - count
        train.append(positions[order[:border].sort().values].numpy())
        if count:
            tests[client] = positions[order[border:].sort().values]
    return _HeldOut(ClientSplit.of_parts(train), tests)
