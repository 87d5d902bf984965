"""Schedules: who acts when, drawn by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from fedstill.core.errors import ConfigError
from fedstill.core.records import SERVER, Stage
from fedstill.core.stream import ONE_TASK, Stream
from fedstill.core.topology import Parallel, PeerToPeer, PublicLogits, Sequential, sample

EVERYONE = tuple(range(20))


@dataclass(frozen=True)
class Small:
    """The fields of a world that schedules read."""

    clients: int = 20
    rounds: int = 5
    seed: int = 3
    stream: Stream = ONE_TASK


def names_of(stages: Sequence[Stage]) -> list[str]:
    """The names of stages, in their order."""
    return [stage.name for stage in stages]


def assert_counted(stages: Sequence[Stage]) -> None:
    """Check that the indices of a round's stages count from 0."""
    assert [stage.index for stage in stages] == list(range(len(stages)))


def single_clients(chain: Sequence[Stage]) -> list[int]:
    """The clients of a chain, whose stages have one client each."""
    return [client for (client,) in (stage.clients for stage in chain)]


def test_sampling_is_a_function_of_seed_and_round_alone() -> None:
    def cohorts(seed: int) -> list[list[int]]:
        return [sample(Small(seed=seed), round, 7) for round in (1, 2, 3)]

    drawn = cohorts(seed=3)
    assert drawn == cohorts(seed=3)
    assert drawn != cohorts(seed=4)
    assert len(set(map(tuple, drawn))) == 3
    for cohort in drawn:
        assert len(set(cohort)) == 7
        assert set(cohort) <= set(EVERYONE)


def test_sampling_is_uniform() -> None:
    world = Small()
    rounds = 2000
    counts = np.zeros(20)
    for round in range(rounds):
        counts[sample(world, round, 5)] += 1
    expected = rounds * 5 / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 45, "19 degrees of freedom"


def test_the_official_cohorts_are_those_of_fedntds_code_whatever_the_seed() -> None:
    for clients, count in ((100, 10), (200, 10), (16, 16)):
        for round in (1, 2, 77, 200):
            np.random.seed(round - 1)  # its rounds count from 0
            theirs = np.random.choice(clients, count, replace=False).tolist()
            for seed in (3, 4):
                assert sample(Small(clients, seed=seed), round, count, "official") == theirs

    cohort = [51, 87, 30, 25, 49, 57, 37, 52, 56, 29]
    assert sample(Small(100), 200, 10, "official") == cohort
    (stage,) = Parallel(sampled=10, cohorts="official")(200, Small(100))
    assert list(stage.clients) == sorted(cohort)
    chain = Sequential(sampled=10, cohorts="official")(200, Small(100))
    assert single_clients(chain) == cohort


def test_by_default_ten_or_all() -> None:
    assert len(sample(Small(), 1, None)) == 10
    assert len(sample(Small(clients=4), 1, None)) == 4


def test_parallel_is_one_stage_in_the_order_of_ids() -> None:
    (stage,) = Parallel(sampled=6)(2, Small())
    assert stage.name == "train"
    assert stage.index == 0
    assert not stage.sequential
    assert list(stage.clients) == sorted(stage.clients)


def test_parallel_takes_stages_before_after_and_on_the_server() -> None:
    schedule = Parallel(sampled=2, server="distil", first="warm", last="finetune")
    first, middle, last = (schedule(round, Small()) for round in (1, 3, 5))
    assert names_of(first) == ["warm", "train", "distil"]
    assert names_of(middle) == ["train", "distil"]
    assert names_of(last) == ["train", "distil", "finetune"]
    assert_counted(last)
    assert first[0].clients == last[2].clients == EVERYONE
    assert middle[1].clients == (SERVER,)
    assert middle[1].view == "public"


def test_a_stage_before_every_rounds_training_is_for_the_rounds_clients() -> None:
    schedule = Parallel(sampled=2, first="warm", before="head")
    first = schedule(1, Small())
    assert names_of(first) == ["warm", "head", "train"]
    assert_counted(first)

    second = schedule(2, Small())
    assert names_of(second) == ["head", "train"]
    cohort = tuple(sorted(sample(Small(), 2, 2)))
    assert second[0].clients == second[1].clients == cohort


def test_the_closing_stage_is_the_servers_and_the_very_last() -> None:
    schedule = Parallel(sampled=2, server="distil", last="finetune", closing="calibrate")
    assert "calibrate" not in names_of(schedule(1, Small()))

    last = schedule(Small().rounds, Small())
    assert names_of(last) == ["train", "distil", "finetune", "calibrate"]
    assert_counted(last)
    assert last[-1].clients == (SERVER,)


def test_sequential_is_a_chain_in_the_order_drawn() -> None:
    stages = Sequential(sampled=5)(4, Small())
    assert len(stages) == 5
    assert_counted(stages)
    assert all(stage.sequential for stage in stages)
    assert single_clients(stages) == sample(Small(), 4, 5)


def test_a_chain_in_fixed_order_is_of_all_clients_by_id() -> None:
    of_all = Sequential(order="fixed")(4, Small())
    assert single_clients(of_all) == list(EVERYONE)
    of_three = Sequential(order="fixed", sampled=3)(4, Small())
    assert single_clients(of_three) == sorted(sample(Small(), 4, 3))


def test_a_chain_takes_stages_before_and_after() -> None:
    schedule = Sequential(sampled=2, first="warm", last="alone")
    first, middle, last = (schedule(round, Small()) for round in (1, 3, 5))
    assert names_of(first) == ["warm", "train", "train"]
    assert [stage.sequential for stage in first] == [False, True, True]
    assert_counted(first)
    assert names_of(middle) == ["train", "train"]
    assert names_of(last) == ["train", "train", "alone"]
    assert [stage.sequential for stage in last] == [True, True, False]
    assert first[0].clients == last[2].clients == EVERYONE


def test_a_stage_after_every_rounds_training_is_for_the_rounds_clients() -> None:
    schedule = Parallel(sampled=2, before="head", after="own", server="distil", last="finetune")
    stages = schedule(5, Small())
    assert names_of(stages) == ["head", "train", "own", "distil", "finetune"]
    assert stages[0].clients == stages[1].clients == stages[2].clients


def test_public_logits_takes_stages_before_and_after() -> None:
    schedule = PublicLogits(sampled=2, first="pretrain", start="transfer", last="revisit")
    first, middle, last = (schedule(round, Small()) for round in (1, 3, 5))
    assert names_of(first) == ["pretrain", "transfer", "teach_server", "distil"]
    assert names_of(middle) == ["local", "teach_server", "distil"]
    assert names_of(last) == ["local", "teach_server", "distil", "revisit"]
    assert_counted(last)
    assert [stage.view for stage in first] == ["public", "private", "public", "public"]
    for stage in (first[0], first[1], first[3], last[3]):
        assert stage.clients == EVERYONE
    assert len(last[0].clients) == 2


def test_public_logits_goes_to_the_server_and_back() -> None:
    local, server, distil = PublicLogits(sampled=3)(1, Small())
    assert local.view == "private"
    assert server.view == "public"
    assert distil.view == "public"
    assert server.clients == (SERVER,)
    assert local.clients == distil.clients


def test_peer_to_peer_fits_once() -> None:
    assert names_of(PeerToPeer()(1, Small())) == ["fit", "transfer", "refine"]
    assert names_of(PeerToPeer()(2, Small())) == ["fit", "transfer", "refine"]
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
    """Clients 0 to 11 are absent in the second task, which begins in round 3."""
    absent = frozenset((1, client) for client in range(12))
    world = Small(stream=Stream((1, 3), 5, ((0,), (1,)), clients=20, absent=absent))
    assert sample(world, 2, 7) == sample(Small(), 2, 7)

    order_of_all = sample(Small(), 4, 20)
    present = [client for client in order_of_all if client >= 12]
    assert sample(world, 4, 7) == present[:7]

    _, last_stage = Parallel(sampled=7, last="tune")(5, world)
    assert last_stage.clients == tuple(range(12, 20))


TWO_TASKS = Stream(starts=(1, 3), rounds=5, by_task=((0,), (1,)), clients=20, join=0.5)


@pytest.mark.parametrize("kind", [Parallel, Sequential, PublicLogits])
def test_a_stage_follows_the_last_round_of_every_task(kind: type[Parallel]) -> None:
    """Its clients are all that are present, whoever was sampled."""
    schedule = kind(sampled=2, last="finetune", task_end="remember")
    clients_of_stage = {}
    for round in range(1, 6):
        for stage in schedule(round, Small(stream=TWO_TASKS)):
            if stage.name == "remember":
                clients_of_stage[round] = stage.clients

    assert list(clients_of_stage) == [2, 5]
    for round, count in ((2, 10), (5, 20)):
        assert clients_of_stage[round] == tuple(TWO_TASKS.present(round))
        assert len(clients_of_stage[round]) == count

    last_round = schedule(5, Small(stream=TWO_TASKS))
    assert names_of(last_round)[-2:] == ["remember", "finetune"]
    assert_counted(last_round)


def test_of_one_task_the_end_is_the_runs() -> None:
    schedule = Parallel(sampled=2, task_end="remember")
    assert names_of(schedule(1, Small())) == ["train"]
    assert names_of(schedule(5, Small())) == ["train", "remember"]


@pytest.mark.parametrize(
    ("students", "first_stages"),
    [
        ((2, 15), {"transfer": (2,), "refine": (2,)}),
        ((15, 16), {}),
    ],
)
def test_students_who_are_absent_in_a_task_learn_when_they_are_present(
    students: tuple[int, ...], first_stages: dict[str, tuple[int, ...]]
) -> None:
    """Clients 12 to 19 are absent in the first task."""
    absent = frozenset((0, client) for client in range(12, 20))
    world = Small(stream=Stream((1, 3), 5, ((0,), (1,)), clients=20, absent=absent))
    peers = PeerToPeer(students=students)

    clients_by_stage = {stage.name: stage.clients for stage in peers(1, world)}
    assert clients_by_stage == {"fit": tuple(range(12)), **first_stages}

    _, transfer, refine = peers(4, world)
    assert transfer.clients == refine.clients == students
