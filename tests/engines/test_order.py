"""In which order examples come: against one epoch loop written plainly, for one client and for many
side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from fedstill.core.records import Plan
from fedstill.engines.clients import epoch_batches
from fedstill.engines.stack import Timetable

CPU = torch.device("cpu")

COMBINATIONS = itertools.product((1, 3), (0, 1, 7), (1, 4, 5, 100), (True, False))
PLANS = [
    Plan(epochs=epochs, steps=steps, batch=batch, shuffle=shuffle)
    for epochs, steps, batch, shuffle in COMBINATIONS
]

SIZES = [(1,), (5,), (5, 5), (1, 12, 4), (3, 8, 20, 8, 5)]


@dataclass(frozen=True)
class PlainStep:
    """A step of one client."""

    epoch: int
    positions: list[int]
    ends_epoch: bool


def order(seed: int) -> torch.Generator:
    """A generator of orders."""
    return torch.Generator().manual_seed(seed)


def timetable(sizes: tuple[int, ...], plan: Plan) -> Timetable:
    """The steps of clients with so many examples; each client's seed is its number."""
    return Timetable.of(sizes, plan, [order(client) for client in range(len(sizes))])


def plain_steps(n: int, plan: Plan, seed: int) -> list[PlainStep]:
    """One client's steps in a plain loop; the last epoch ends with the training, complete or
    not.
    """
    generator = order(seed)
    max_steps = plan.steps or math.inf
    epochs: Iterable[int] = range(plan.epochs)
    if plan.steps:
        epochs = itertools.count()

    steps: list[PlainStep] = []
    for epoch in epochs:
        positions = list(range(n))
        if plan.shuffle:
            positions = torch.randperm(n, generator=generator).tolist()
        for start in range(0, n, plan.batch):
            end = start + plan.batch
            steps.append(PlainStep(epoch, positions[start:end], ends_epoch=end >= n))
            if len(steps) == max_steps:
                break
        if len(steps) == max_steps:
            break
    steps[-1] = replace(steps[-1], ends_epoch=True)
    return steps


@pytest.mark.parametrize("n", [1, 4, 9, 10])
def test_one_clients_batches_are_those_of_a_plain_loop(n: int) -> None:
    for plan in PLANS:
        steps = []
        for epoch, batches in enumerate(epoch_batches(n, plan, order(3), CPU)):
            *first_batches, last_batch = batches
            steps += [PlainStep(epoch, batch.tolist(), False) for batch in first_batches]
            steps.append(PlainStep(epoch, last_batch.tolist(), True))
        assert steps == plain_steps(n, plan, 3), plan


def test_of_no_examples_and_in_no_epochs_there_are_no_batches() -> None:
    for n, plan in ((0, Plan(epochs=3)), (0, Plan(steps=3)), (5, Plan(epochs=0))):
        assert list(epoch_batches(n, plan, order(3), CPU)) == []


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_of_many_clients_does_what_it_would_do_alone(sizes: tuple[int, ...]) -> None:
    for plan in PLANS:
        check_alone(sizes, plan, timetable(sizes, plan))


def check_alone(sizes: tuple[int, ...], plan: Plan, table: Timetable) -> None:
    """Check that the clients of a timetable have the steps of plain loops."""
    for client, n in enumerate(sizes):
        steps = []
        for t in range(int((table.sizes[:, client] > 0).sum())):
            positions = table.positions[t, client, : table.sizes[t, client]].tolist()
            epoch = int(table.epoch[t, client])
            steps.append(PlainStep(epoch, positions, bool(table.ends[t, client])))

        alone = plain_steps(n, plan, client)
        assert steps == alone, plan
        assert table.progress[client] == (len(alone), alone[-1].epoch + 1)
    assert len(table.positions) == max(steps for steps, _ in table.progress)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_padded_is_a_batchs_own_first_and_a_client_that_has_finished_is_at_its_first(
    sizes: tuple[int, ...],
) -> None:
    for plan in PLANS:
        check_padding(sizes, timetable(sizes, plan))


def check_padding(sizes: tuple[int, ...], table: Timetable) -> None:
    """Check that positions behind a batch repeat its first one, or that of the client."""
    assert table.positions.shape[2] == table.sizes.max(), "no wider than the widest batch"
    for t, client in itertools.product(range(len(table.positions)), range(len(sizes))):
        positions = table.positions[t, client].tolist()
        size = int(table.sizes[t, client])
        if size:
            assert set(positions[size:]) <= {positions[0]}
            continue

        steps, _ = table.progress[client]
        assert t >= steps
        assert set(positions) == {0}
        assert int(table.epoch[t, client]) == 0
        assert not table.ends[t, client]


def test_each_epoch_has_an_order_of_its_own_that_depends_on_the_generator_alone() -> None:
    def orders(seed: int) -> list[list[int]]:
        plan = Plan(epochs=2, batch=50)
        return [batch.tolist() for (batch,) in epoch_batches(50, plan, order(seed), CPU)]

    first, second = orders(1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert orders(1) == [first, second]
    assert orders(2) != [first, second]
