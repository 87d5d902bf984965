"""New data: by a stated rule, once there always there, and what is held out once is held out for
good.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.records import Stage
from fedstill.data.views import Arrival, TaskData
from fedstill.running.preparation import Prepared, prepare

LABELS = torch.arange(60) % 4


@pytest.mark.parametrize("order", ["mixed", "by_class"])
def test_what_has_arrived_stays_and_in_the_last_round_all_is_there(order: str) -> None:
    arrival = Arrival(order, 0.1, rounds=4, seed=3)  # type: ignore[arg-type]

    turns = arrival.ranks(1, LABELS)

    assert sorted(turns.tolist()) == list(range(60))
    assert torch.equal(turns, arrival.ranks(1, LABELS)), "a function of the seed"
    assert not torch.equal(turns, arrival.ranks(2, LABELS)), "and of the client"

    everything = torch.arange(60)
    by_round = [arrival.arrived(turns, everything, r).tolist() for r in range(6)]
    assert by_round[0] == by_round[1], "the census is before round 1"
    shares = (0.1, 0.4, 0.7, 1.0)
    assert [len(arrived) for arrived in by_round[1:5]] == [round(60 * share) for share in shares]
    for arrived, arrived_next in itertools.pairwise(by_round):
        assert set(arrived) <= set(arrived_next)
    assert all(arrived == sorted(arrived) for arrived in by_round), "in the order that they have"
    assert by_round[5] == everything.tolist()


def test_class_after_class_comes_one_class_before_the_next() -> None:
    turns = Arrival("by_class", 0.25, rounds=4, seed=0).ranks(0, LABELS)
    quarters = LABELS[turns.argsort()].reshape(4, 15)
    assert (quarters == quarters[:, :1]).all(), "one class in each quarter"
    assert sorted(quarters[:, 0].tolist()) == [0, 1, 2, 3]

    first_classes = set()
    for seed in range(20):
        turns = Arrival("by_class", 0.25, 4, seed).ranks(0, LABELS)
        first_classes.add(int(LABELS[turns.argmin()]))
    assert first_classes == {0, 1, 2, 3}, "which class comes first is drawn"


def test_evenly_drawn_data_have_all_classes_early() -> None:
    turns = Arrival("mixed", 0.25, rounds=4, seed=0).ranks(0, LABELS)
    assert set(LABELS[turns.argsort()][:15].tolist()) == {0, 1, 2, 3}


def test_one_example_at_least_is_there_of_whatever_is_asked() -> None:
    arrival = Arrival("mixed", 0.01, rounds=3, seed=0)
    turns = arrival.ranks(0, LABELS)
    last_five = turns.argsort()[-5:]
    assert arrival.arrived(turns, torch.arange(60), 1).tolist() == [int(turns.argmin())]
    first_of_them = [int(last_five[0])]
    assert arrival.arrived(turns, last_five, 1).tolist() == first_of_them
    assert arrival.arrived(turns, torch.arange(0), 1).tolist() == []


def prepared(**query: object) -> Prepared:
    """A run of four rounds in which new data arrive, with changes of its table ``[query]``."""
    table = {"draw": "all", "again": "mixed", **query}
    experiment = toys.asking_again(rounds=4, query=table)
    return prepare(resolve(experiment), toys.blobs())


def test_a_clients_views_grow_in_equal_parts_by_default() -> None:
    ready = prepared()
    for client in range(6):
        total = len(ready.sites.positions(client))
        for round in (1, 2, 3, 4):
            view = ready.sites.view(client, Stage(round, 0, "fit", (client,)))
            assert view.validation is not None
            share = math.floor(total * round / 4 + 0.5)
            assert len(view.data) + len(view.validation) in (share, share + 1), (
                "one is held out at least"
            )
            assert view.counts.tolist() == ready.sites.label_counts(client, round).tolist()
            assert int(view.counts.sum()) == share
        assert view.counts.tolist() == ready.sites.label_counts(client).tolist()


def test_what_is_held_out_once_is_never_trained_on() -> None:
    ready = prepared(data_at_first=0.4)
    marks = torch.arange(len(ready.sites.train))
    for client in range(6):
        trained_on = set[int]()
        held_out = set[int]()
        for round in (1, 2, 3, 4):
            for name in ("fit", "transfer", "refine"):
                share = ready.settings.plans[name].validation
                division = ready.sites.division(client, share, round)
                trained_on |= set(marks[division.train].tolist())
                held_out |= set(marks[division.held_out].tolist())
        assert not trained_on & held_out
        assert trained_on | held_out == set(ready.sites.positions(client).tolist())


def test_without_new_data_views_are_as_ever() -> None:
    ready = prepare(resolve(toys.toy("qkt", **toys.suited("qkt"))), toys.blobs())
    assert ready.sites.arrival is None
    assert ready.sites.label_counts(0, 1).tolist() == ready.sites.label_counts(0).tolist()


def test_data_change_by_arrival_or_by_tasks_but_not_by_both() -> None:
    ready = prepared()
    tasks = TaskData(ready.world.stream, task_of=None)
    with pytest.raises(ValueError):
        replace(ready.sites, tasks=tasks)
    assert replace(ready.sites, tasks=tasks, arrival=None).tasks == tasks
