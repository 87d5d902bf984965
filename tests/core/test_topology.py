"""Schedules: who acts when, drawn by key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fedstill.core.errors import ConfigError
from fedstill.core.records import SERVER
from fedstill.core.stream import ONE_TASK, Stream
from fedstill.core.topology import Parallel, PeerToPeer, PublicLogits, Sequential, sample


@dataclass(frozen=True)
class Small:
    """As much of a world as a schedule looks at."""

    clients: int = 20
    rounds: int = 5
    seed: int = 3
    stream: Stream = ONE_TASK


def test_sampling_is_a_function_of_seed_and_round_alone() -> None:
    world = Small()
    drawn = [sample(world, r, 7) for r in (1, 2, 3)]
    assert drawn == [sample(world, r, 7) for r in (1, 2, 3)]
    assert len({tuple(d) for d in drawn}) == 3
    assert all(len(set(d)) == 7 and set(d) <= set(range(20)) for d in drawn)
    assert drawn != [sample(Small(seed=4), r, 7) for r in (1, 2, 3)], (
        "another run seed gives another schedule"
    )


def test_sampling_is_uniform() -> None:
    world, rounds = Small(), 2000
    counts = [0] * 20
    for r in range(rounds):
        for client in sample(world, r, 5):
            counts[client] += 1
    expected = rounds * 5 / 20
    assert sum((c - expected) ** 2 / expected for c in counts) < 45, (
        "chi-square, 19 degrees of freedom"
    )


def test_the_official_cohorts_are_those_of_fedntds_code_whatever_the_seed() -> None:
    for clients, many in ((100, 10), (200, 10), (16, 16)):
        for r in (1, 2, 77, 200):
            np.random.seed(r - 1)  # its rounds count from 0
            theirs = np.random.choice(clients, many, replace=False).tolist()
            for seed in (3, 4):
                assert sample(Small(clients, seed=seed), r, many, "official") == theirs
    assert sample(Small(100), 200, 10, "official") == [51, 87, 30, 25, 49, 57, 37, 52, 56, 29]
    (stage,) = Parallel(sampled=10, cohorts="official")(200, Small(100))
    assert stage.clients == (25, 29, 30, 37, 49, 51, 52, 56, 57, 87)
    chain = Sequential(sampled=10, cohorts="official")(200, Small(100))
    assert [s.clients[0] for s in chain] == [51, 87, 30, 25, 49, 57, 37, 52, 56, 29]


def test_by_default_ten_or_all() -> None:
    assert len(sample(Small(), 1, None)) == 10
    assert len(sample(Small(clients=4), 1, None)) == 4


def test_parallel_is_one_stage_in_the_order_of_ids() -> None:
    (stage,) = Parallel(sampled=6)(2, Small())
    assert (stage.name, stage.index, stage.sequential) == ("train", 0, False)
    assert list(stage.clients) == sorted(stage.clients)


def test_parallel_takes_stages_before_after_and_on_the_server() -> None:
    schedule = Parallel(sampled=2, server="distil", first="warm", last="finetune")
    everyone = tuple(range(20))
    first, middle, last = (schedule(r, Small()) for r in (1, 3, 5))
    assert [s.name for s in first] == ["warm", "train", "distil"]
    assert [s.name for s in middle] == ["train", "distil"]
    assert [s.name for s in last] == ["train", "distil", "finetune"]
    assert [s.index for s in last] == [0, 1, 2]
    assert first[0].clients == last[2].clients == everyone
    assert middle[1].clients == (SERVER,)
    assert middle[1].view == "public"


def test_a_stage_before_every_rounds_training_is_for_the_rounds_clients() -> None:
    schedule = Parallel(sampled=2, first="warm", before="head")
    first, second = (schedule(r, Small()) for r in (1, 2))
    assert [(s.name, s.index) for s in first] == [("warm", 0), ("head", 1), ("train", 2)]
    assert [s.name for s in second] == ["head", "train"]
    assert second[0].clients == second[1].clients == tuple(sorted(sample(Small(), 2, 2)))


def test_the_closing_stage_is_the_servers_and_the_very_last() -> None:
    schedule = Parallel(sampled=2, server="distil", last="finetune", closing="calibrate")
    assert "calibrate" not in [s.name for s in schedule(1, Small())]
    end = schedule(Small().rounds, Small())
    assert [(s.name, s.index) for s in end] == [
        ("train", 0),
        ("distil", 1),
        ("finetune", 2),
        ("calibrate", 3),
    ]
    assert end[-1].clients == (SERVER,)


def test_sequential_is_a_chain_in_the_order_drawn() -> None:
    stages = Sequential(sampled=5)(4, Small())
    assert [s.index for s in stages] == list(range(5))
    assert all(s.sequential and len(s.clients) == 1 for s in stages)
    assert [s.clients[0] for s in stages] == sample(Small(), 4, 5)


def test_a_chain_in_fixed_order_is_of_all_clients_by_id() -> None:
    assert [s.clients[0] for s in Sequential(order="fixed")(4, Small())] == list(range(20))
    assert [s.clients[0] for s in Sequential(order="fixed", sampled=3)(4, Small())] == sorted(
        sample(Small(), 4, 3)
    )


def test_a_chain_takes_stages_before_and_after() -> None:
    schedule = Sequential(sampled=2, first="warm", last="alone")
    first, middle, last = (schedule(r, Small()) for r in (1, 3, 5))
    assert [(s.name, s.index, s.sequential) for s in first] == [
        ("warm", 0, False),
        ("train", 1, True),
        ("train", 2, True),
    ]
    assert [s.name for s in middle] == ["train", "train"]
    assert [(s.name, s.sequential) for s in last] == [
        ("train", True),
        ("train", True),
        ("alone", False),
    ]
    assert first[0].clients == last[2].clients == tuple(range(20))


def test_a_stage_after_every_rounds_training_is_for_the_rounds_clients() -> None:
    stages = Parallel(sampled=2, before="head", after="own", server="distil", last="finetune")(
        5, Small()
    )
    assert [s.name for s in stages] == ["head", "train", "own", "distil", "finetune"]
    assert stages[0].clients == stages[1].clients == stages[2].clients


def test_public_logits_takes_stages_before_and_after() -> None:
    schedule = PublicLogits(sampled=2, first="pretrain", start="transfer", last="revisit")
    everyone = tuple(range(20))
    first, middle, last = (schedule(r, Small()) for r in (1, 3, 5))
    assert [s.name for s in first] == ["pretrain", "transfer", "teach_server", "distil"]
    assert [s.name for s in middle] == ["local", "teach_server", "distil"]
    assert [s.name for s in last] == ["local", "teach_server", "distil", "revisit"]
    assert [s.index for s in last] == [0, 1, 2, 3]
    assert [s.view for s in first] == ["public", "private", "public", "public"]
    assert first[0].clients == first[1].clients == first[3].clients == last[3].clients == everyone
    assert len(last[0].clients) == 2


def test_public_logits_goes_to_the_server_and_back() -> None:
    local, server, distil = PublicLogits(sampled=3)(1, Small())
    assert (local.view, server.view, distil.view) == ("private", "public", "public")
    assert server.clients == (SERVER,)
    assert local.clients == distil.clients


def test_peer_to_peer_fits_once() -> None:
    assert [s.name for s in PeerToPeer()(1, Small())] == ["fit", "transfer", "refine"]
    assert [s.name for s in PeerToPeer()(2, Small())] == ["fit", "transfer", "refine"]
    fit, transfer, _ = PeerToPeer(students=(7, 2))(1, Small())
    assert len(fit.clients) == 20
    assert transfer.clients == (2, 7)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Parallel(sampled=21), "topology.sampled"),
        (PeerToPeer(students=(0, -3)), "names -3"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(schedule: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule(1, Small())  # type: ignore[operator]


def test_clients_that_are_not_there_are_passed_over_and_the_others_keep_their_order() -> None:
    stream = Stream(
        (1, 3), 5, ((0,), (1,)), clients=20, absent=frozenset((1, c) for c in range(12))
    )
    later = sample(Small(stream=stream), 4, 7)
    everyone = sample(Small(), 4, 20)
    assert later == [c for c in everyone if c >= 12][:7]
    assert sample(Small(stream=stream), 2, 7) == sample(Small(), 2, 7)
    assert [s.clients for s in Parallel(sampled=7, last="tune")(5, Small(stream=stream))][
        1
    ] == tuple(range(12, 20))


TWO_TASKS = Stream(starts=(1, 3), rounds=5, by_task=((0,), (1,)), clients=20, join=0.5)


@pytest.mark.parametrize("kind", [Parallel, Sequential, PublicLogits])
def test_a_stage_follows_the_last_round_of_every_task(kind: type[Parallel]) -> None:
    schedule = kind(sampled=2, last="finetune", task_end="remember")
    names = [[s.name for s in schedule(r, Small(stream=TWO_TASKS))] for r in range(1, 6)]
    assert ["remember" in of_round for of_round in names] == [False, True, False, False, True]
    assert names[4][-2:] == ["remember", "finetune"]
    ends = [
        next(s for s in schedule(r, Small(stream=TWO_TASKS)) if s.name == "remember")
        for r in (2, 5)
    ]
    assert [s.clients for s in ends] == [tuple(TWO_TASKS.present(r)) for r in (2, 5)]
    assert len(ends[0].clients) == 10
    assert len(ends[1].clients) == 20, "all that are there, whoever was sampled"
    assert [s.index for s in schedule(5, Small(stream=TWO_TASKS))] == list(range(len(names[4])))


def test_of_one_task_the_end_is_the_runs() -> None:
    schedule = Parallel(sampled=2, task_end="remember")
    assert [[s.name for s in schedule(r, Small())] for r in (1, 5)] == [
        ["train"],
        ["train", "remember"],
    ]


@pytest.mark.parametrize("students", [(2, 15), (15, 16)])
def test_students_who_are_not_there_in_a_task_learn_when_they_are(
    students: tuple[int, ...],
) -> None:
    stream = Stream(
        (1, 3), 5, ((0,), (1,)), clients=20, absent=frozenset((0, c) for c in range(12, 20))
    )
    peers, world = PeerToPeer(students=students), Small(stream=stream)
    now = {s.name: s.clients for s in peers(1, world)}
    there = tuple(c for c in students if c < 12)
    assert now == {
        "fit": tuple(range(12)),
        **({"transfer": there, "refine": there} if there else {}),
    }
    assert [s.clients for s in peers(4, world)][1:] == [students, students]
