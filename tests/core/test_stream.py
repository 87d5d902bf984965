"""The clock of a stream: the task of a round, the clients that are present, the outputs that take
part, and the round that a schedule counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedstill.core.stream import ONE_TASK, Stream

THREE_TASKS = Stream(starts=(1, 3, 6), rounds=8, by_task=((0, 3), (1,), (2, 4)), clients=10, seed=5)
ROUNDS = range(1, 9)


def test_a_run_without_tasks_has_one() -> None:
    assert ONE_TASK.tasks == 1
    assert ONE_TASK.task(0) == 0
    assert ONE_TASK.task(9, 3) == 0
    assert [ONE_TASK.within(round) for round in (1, 2, 7)] == [1, 2, 7]
    assert ONE_TASK.mask(4, 2, 10) is None
    assert not ONE_TASK.changes(4)


def test_the_clock() -> None:
    assert THREE_TASKS.task(0) == 0
    assert list(map(THREE_TASKS.task, ROUNDS)) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert list(filter(THREE_TASKS.begins, ROUNDS)) == [1, 3, 6]
    assert list(filter(THREE_TASKS.ends, ROUNDS)) == [2, 5, 8]
    assert list(filter(THREE_TASKS.changes, ROUNDS)) == [3, 6]
    assert list(map(THREE_TASKS.within, ROUNDS)) == [1, 2, 1, 2, 3, 1, 2, 3]

    over_the_run = Stream(starts=(1, 3), rounds=4, restarts=False)
    assert list(map(over_the_run.within, (1, 2, 3, 4))) == [1, 2, 3, 4]


ALL_FIVE = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("head", "outputs_by_task"),
    [
        ("all", [ALL_FIVE, ALL_FIVE, ALL_FIVE]),
        ("seen", [[0, 3], [0, 1, 3], ALL_FIVE]),
        ("task", [[0, 3], [1], [2, 4]]),
    ],
)
def test_outputs_that_take_part(head: Any, outputs_by_task: list[list[int]]) -> None:
    """There is no mask where all outputs take part."""
    stream = replace(THREE_TASKS, head=head)
    for round, outputs in zip(THREE_TASKS.starts, outputs_by_task, strict=True):
        mask = stream.mask(round, 0, 5)
        if outputs == ALL_FIVE:
            assert mask is None
        else:
            assert mask is not None
            assert mask.nonzero().flatten().tolist() == outputs


def test_a_late_client_is_in_the_task_of_an_earlier_round_without_lag() -> None:
    late = replace(THREE_TASKS, lag=2)
    tasks_by_lag = {}
    for lag in range(3):
        tasks_by_lag[lag] = [THREE_TASKS.task(round - lag) for round in ROUNDS]

    lags = set()
    for client in range(10):
        tasks = [late.task(round, client) for round in ROUNDS]
        assert tasks in tasks_by_lag.values()
        lags |= {lag for lag in range(3) if tasks_by_lag[lag] == tasks}

    assert lags == {0, 1, 2}
    assert list(filter(late.changes, ROUNDS)) == [3, 4, 5, 6, 7, 8]


def test_clients_enter_evenly_and_never_leave() -> None:
    joining = replace(THREE_TASKS, join=0.4)
    first, second, third = (set(joining.present(round)) for round in joining.starts)
    assert [len(first), len(second), len(third)] == [4, 7, 10]
    assert first < second < third
    late_client = min(third - first)
    assert joining.task(1, late_client) == -1
    assert joining.task(8, late_client) == 2


def test_the_share_that_stays_is_in_its_old_task_until_the_next_change() -> None:
    staying = replace(THREE_TASKS, stay=0.3)

    def tasks_of_clients(round: int) -> list[int]:
        return [staying.task(round, client) for client in range(10)]

    assert tasks_of_clients(1) == [0] * 10
    assert sorted(tasks_of_clients(3)) == [0] * 3 + [1] * 7
    assert tasks_of_clients(4) == tasks_of_clients(3)
    assert sum(task < 2 for task in tasks_of_clients(6)) == 3


def test_the_tasks_that_a_client_has_been_in() -> None:
    """They are those of all rounds until then. A client that stays in its task may pass over the
    next one, and one that joins late has none of the earlier ones.
    """
    moving = replace(THREE_TASKS, clients=30, lag=2, join=0.6, stay=0.4)
    for client in range(30):
        tasks: set[int] = set()
        for round in range(9):
            tasks.add(moving.task(round, client))
            assert moving.tasks_until(client, round) == sorted(tasks - {-1})
    assert [0, 2] in [moving.tasks_until(client, 8) for client in range(30)]


def test_clients_without_examples_are_not_there() -> None:
    stream = replace(THREE_TASKS, clients=3, absent=frozenset({(1, 2)}))
    assert stream.present(2) == [0, 1, 2]
    assert stream.present(3) == [0, 1]
    assert stream.present(6) == [0, 1, 2]
