"""In which order examples come: against one epoch loop written plainly, for one client and for many
side by side.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from fedstill.core.records import Plan
from fedstill.engines.clients import epoch_batches
from fedstill.engines.stack import Timetable

CPU = torch.device("cpu")

PLANS = [
    Plan(epochs=epochs, steps=steps, batch=batch, shuffle=shuffle)
    for epochs, steps, batch, shuffle in itertools.product(
        (1, 3), (0, 1, 7), (1, 4, 5, 100), (True, False)
    )
]

SIZES = [(1,), (5,), (5, 5), (1, 12, 4), (3, 8, 20, 8, 5)]


def order(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plainly(n: int, plan: Plan, seed: int) -> list[tuple[int, list[int], bool]]:
    """One client's steps as anybody would write them: (epoch, positions of the batch, whether the
    epoch ends).
    """
    generator, steps = order(seed), []
    epoch = 0
    while (len(steps) < plan.steps) if plan.steps else (epoch < plan.epochs):
        positions = (
            torch.randperm(n, generator=generator).tolist() if plan.shuffle else list(range(n))
        )
        for start in range(0, n, plan.batch):
            steps.append((epoch, positions[start : start + plan.batch], start + plan.batch >= n))
            if len(steps) == plan.steps:
                break
        epoch += 1
    last_epoch, batch, _ = steps[-1]
    # the last epoch ends with the training, be it whole or not
    steps[-1] = (last_epoch, batch, True)
    return steps


@pytest.mark.parametrize("n", [1, 4, 9, 10])
def test_one_clients_batches_are_those_of_a_plain_loop(n: int) -> None:
    for plan in PLANS:
        epochs = list(epoch_batches(n, plan, order(3), CPU))
        got = [
            (epoch, batch.tolist(), i + 1 == len(batches))
            for epoch, batches in enumerate(epochs)
            for i, batch in enumerate(batches)
        ]
        assert got == plainly(n, plan, 3), plan


def test_of_no_examples_and_in_no_epochs_there_are_no_batches() -> None:
    for n, plan in ((0, Plan(epochs=3)), (0, Plan(steps=3)), (5, Plan(epochs=0))):
        assert list(epoch_batches(n, plan, order(3), CPU)) == []


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_of_many_clients_does_what_it_would_do_alone(sizes: tuple[int, ...]) -> None:
    for plan in PLANS:
        check_alone(sizes, plan, Timetable.of(sizes, plan, [order(k) for k in range(len(sizes))]))


def check_alone(sizes: tuple[int, ...], plan: Plan, table: Timetable) -> None:
    for k, n in enumerate(sizes):
        alone = plainly(n, plan, k)
        acted = int((table.sizes[:, k] > 0).sum())
        got = [
            (
                int(table.epoch[t, k]),
                table.positions[t, k, : table.sizes[t, k]].tolist(),
                bool(table.ends[t, k]),
            )
            for t in range(acted)
        ]
        assert got == alone, plan
        assert table.progress[k] == (len(alone), alone[-1][0] + 1)
    assert len(table.positions) == max(steps for steps, _ in table.progress)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_padded_is_a_batchs_own_first_and_a_client_that_has_finished_is_at_its_first(
    sizes: tuple[int, ...],
) -> None:
    for plan in PLANS:
        check_padding(sizes, Timetable.of(sizes, plan, [order(k) for k in range(len(sizes))]))


def check_padding(sizes: tuple[int, ...], table: Timetable) -> None:
    assert table.positions.shape[2] == table.sizes.max(), "no wider than the widest batch"
    for t, k in itertools.product(range(len(table.positions)), range(len(sizes))):
        real = int(table.sizes[t, k])
        first = int(table.positions[t, k, 0]) if real else 0
        assert set(table.positions[t, k, real:].tolist()) <= {first}
        if not real:
            assert t >= table.progress[k][0]
            assert (int(table.epoch[t, k]), bool(table.ends[t, k])) == (0, False)


def test_each_epoch_has_an_order_of_its_own_that_depends_on_the_generator_alone() -> None:
    plan = Plan(epochs=2, batch=50)
    first, second = (batch.tolist() for (batch,) in epoch_batches(50, plan, order(1), CPU))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [b.tolist() for (b,) in epoch_batches(50, plan, order(1), CPU)] == [first, second]
    assert [b.tolist() for (b,) in epoch_batches(50, plan, order(2), CPU)] != [first, second]
