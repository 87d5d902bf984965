"""The clock of a stream: which task, who is there, which outputs take part, and the round that a
schedule counts.
"""

from __future__ import annotations

import pytest

from fedstill.core.stream import ONE_TASK, Stream

SIX = Stream(starts=(1, 3, 6), rounds=8, by_task=((0, 3), (1,), (2, 4)), clients=10, seed=5)


def test_a_run_without_tasks_has_one() -> None:
    assert (ONE_TASK.tasks, ONE_TASK.task(0), ONE_TASK.task(9, 3)) == (1, 0, 0)
    assert [ONE_TASK.within(r) for r in (1, 2, 7)] == [1, 2, 7]
    assert ONE_TASK.mask(4, 2, 10) is None
    assert not ONE_TASK.changes(4)


def test_the_clock() -> None:
    assert [SIX.task(r) for r in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [r for r in range(1, 9) if SIX.begins(r)] == [1, 3, 6]
    assert [r for r in range(1, 9) if SIX.ends(r)] == [2, 5, 8]
    assert [r for r in range(1, 9) if SIX.changes(r)] == [3, 6]
    assert [SIX.within(r) for r in range(1, 9)] == [1, 2, 1, 2, 3, 1, 2, 3]
    over_the_run = Stream(starts=(1, 3), rounds=4, restarts=False)
    assert [over_the_run.within(r) for r in (1, 2, 3, 4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("head", "on"), [("all", [None] * 3), ("seen", [[0, 3], [0, 1, 3], None]), ("task", None)]
)
def test_outputs_that_take_part(head: str, on: list[list[int] | None] | None) -> None:
    stream = Stream(SIX.starts, 8, SIX.by_task, head, clients=10)  # type: ignore[arg-type]
    masks = [stream.mask(r, 0, 5) for r in (1, 3, 6)]
    taking_part = [None if m is None else m.nonzero().flatten().tolist() for m in masks]
    assert taking_part == (on or [[0, 3], [1], [2, 4]])


def test_a_late_client_sees_what_it_saw_so_many_rounds_before_without_lag() -> None:
    late = Stream(SIX.starts, 8, SIX.by_task, clients=10, lag=2, seed=5)
    lags = [
        next(by for by in range(3) if all(late.task(r, c) == SIX.task(r - by) for r in range(1, 9)))
        for c in range(10)
    ]
    assert set(lags) == {0, 1, 2}
    assert [r for r in range(1, 9) if late.changes(r)] == [3, 4, 5, 6, 7, 8]


def test_clients_enter_evenly_and_never_leave() -> None:
    joining = Stream(SIX.starts, 8, SIX.by_task, clients=10, join=0.4, seed=5)
    assert [len(joining.present(r)) for r in (1, 3, 6)] == [4, 7, 10]
    assert set(joining.present(1)) < set(joining.present(3)) < set(joining.present(6))
    gone = next(c for c in range(10) if c not in joining.present(1))
    assert joining.task(1, gone) == -1
    assert joining.task(8, gone) == 2


def test_the_share_that_stays_is_in_its_old_task_until_the_next_change() -> None:
    staying = Stream(SIX.starts, 8, SIX.by_task, clients=10, stay=0.3, seed=5)
    assert [staying.task(1, c) for c in range(10)] == [0] * 10
    assert sorted(staying.task(3, c) for c in range(10)) == [0] * 3 + [1] * 7
    assert sum(staying.task(6, c) < 2 for c in range(10)) == 3
    assert all(staying.task(4, c) == staying.task(3, c) for c in range(10))


def test_the_tasks_that_a_client_has_been_in() -> None:
    """Counted round by round; who stays for a change may pass over a task, and who joins late has
    none of before.
    """
    moving = Stream(SIX.starts, 8, SIX.by_task, clients=30, lag=2, join=0.6, stay=0.4, seed=5)
    for client in range(30):
        by_round = [moving.task(r, client) for r in range(9)]
        for r in range(9):
            assert moving.tasks_until(client, r) == sorted({t for t in by_round[: r + 1] if t >= 0})
    assert [0, 2] in [moving.tasks_until(client, 8) for client in range(30)]


def test_clients_without_examples_are_not_there() -> None:
    stream = Stream(SIX.starts, 8, SIX.by_task, clients=3, absent=frozenset({(1, 2)}))
    assert [stream.present(r) for r in (2, 3, 6)] == [[0, 1, 2], [0, 1], [0, 1, 2]]
