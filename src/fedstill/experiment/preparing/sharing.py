"""Who has which examples: the public set apart, the clients' parts and own tests, all standardised
as the run says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.data.dealt_out import DealtOut, counts_table
from fedstill.data.examples import Dataset, stratified
from fedstill.data.partition.flat import FlatParts
from fedstill.data.sources.held_out import TEST_SHARE
from fedstill.errors import ConfigError, DataError
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.moments import Moments
from fedstill.experiment.preparing.public_data import NOISE, set_apart
from fedstill.experiment.preparing.split import some_of, split
from fedstill.experiment.preparing.standardising import PLAIN, Standard, standard
from fedstill.experiment.preparing.task_split import cut_of, split_by_task
from fedstill.keys import generator, seed_for
from fedstill.records import SERVER, Examples
from fedstill.stream import Cut

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
