"""Chains with other stages around their links, a census or a first fit: what a method takes of
whom.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.label_counts import gini_index, proportions
from fedstill.core.records import Payload, Stage, State, World
from fedstill.methods.sfedkd import discrepancy_weights
from fedstill.running.preparation import prepare
from loops import context_of, states_after

TASKS = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]], "compose": "clients_first"}
SKEWED = {"kind": "dirichlet", "alpha": 0.15, "min_size": 2}
MIXED = {"kind": "dirichlet", "alpha": 0.6, "min_size": 2}
PLAN = {"epochs": 1, "batch": 50, "lr": 0.01}

Sent = tuple[Stage, int, Payload, State]


def sent(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[list[Sent], Any]:
    """What each client of a run was sent in the stage ``train``, with the state it was made of; and
    the run.
    """
    values = {"plan": PLAN, "partition": SKEWED, "rounds": 4, **changes}
    ready = prepare(resolve(toys.toy(method, **values)), toys.blobs())
    world, engine = ready.world, ready.engine()
    kind, all_of = type(ready.settings.method), list[Sent]()
    original = kind.payload_for_client

    def down(self: Any, state: State, client: int, stage: Stage, world: World) -> Payload | None:
        given = original(self, state, client, stage, world)
        if stage.name == "train" and given is not None:
            all_of.append((stage, client, given, state))
        return given

    monkeypatch.setattr(kind, "payload_for_client", down)
    states_after(context_of(ready, engine), world.rounds)
    engine.close()
    return all_of, ready


@pytest.mark.parametrize("first", ["", "fit"])
def test_fedadkd_shares_phi_out_among_the_links_by_the_tasks_own_counts(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = {"kind": "sequential", "clients": 6, "sampled": 3, "first": first}
    exact = {"name": "fedadkd", "phi_timing": "exact"}
    each, ready = sent(exact, monkeypatch, topology=chain, stream=TASKS, partition=MIXED)
    method, world = ready.settings.method, ready.world
    assert len(each) == 12
    seen = set()
    for stage, client, given, state in each:
        cohort = [
            c
            for s in ready.settings.schedule(stage.round, world)
            if s.sequential
            for c in s.clients
        ]
        gini: Tensor = gini_index(proportions(state.extra.tensor("labels")[cohort]))
        expected = float(method.phi(gini)[cohort.index(client)])
        assert given.number("phi") == pytest.approx(expected, abs=1e-12)
        seen.add(round(expected, 3))
    assert len(seen) > 6, "weights differ, between clients and between tasks"


def test_fedadkds_first_phi_does_not_change_with_a_stage_before_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def phis(first: str) -> list[tuple[int, float]]:
        with monkeypatch.context() as patch:
            chain = {"kind": "sequential", "clients": 6, "sampled": 3, "first": first}
            each, _ = sent({"name": "fedadkd"}, patch, topology=chain, rounds=2)
        return [(client, given.number("phi")) for _, client, given, _ in each]

    assert phis("fit") == phis("")


def test_sfedkd_weighs_teachers_by_the_counts_of_the_task_in_which_they_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = {"kind": "sequential", "clients": 6, "sampled": 3}
    each, _ = sent({"name": "sfedkd", "k": 2}, monkeypatch, topology=topology, stream=TASKS, seed=0)
    counted = {stage.round: state.extra.tensor("labels") for stage, _, _, state in each}
    assert not torch.equal(counted[2], counted[3]), "the task changes in round 3"
    lacking = 0
    for stage, client, given, state in each:
        teachers = list(state.extra.many("teacher"))
        if not teachers:
            continue
        shares = proportions(counted[stage.round - 1][teachers])
        g, h = discrepancy_weights(shares, proportions(counted[stage.round][client]))
        torch.testing.assert_close(given.tensor("g"), g)
        torch.testing.assert_close(given.tensor("h"), h)
        lacking += int((counted[stage.round][teachers].sum(1) == 0).sum())
    assert lacking, "a teacher has no data in the new task"


def test_sfedkd_sends_weights_of_teachers_and_not_their_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = {"kind": "sequential", "clients": 6, "sampled": 3}
    each, _ = sent({"name": "sfedkd", "k": 2}, monkeypatch, topology=topology, seed=0)
    for stage, _, given, _ in each:
        if stage.round > 1:
            groups = {group for group in given if not group.startswith("teacher.")}
            assert groups == {"params", "g", "h"}


SIDE_BY_SIDE = ("feddyn", "feddc", "fedavgm", "fednova", "ccvr", "fedproto", "feddf")
IN_A_CHAIN = ("fedseq", "cwc", "metafed")


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
@pytest.mark.parametrize("first", ["", "fit"])
def test_a_method_for_clients_side_by_side_is_refused_on_a_chain(name: str, first: str) -> None:
    chain = {"kind": "sequential", "clients": 6, "first": first}
    settings = resolve(toys.toy(name, topology=chain, data={"public": toys.PUBLIC}))
    with pytest.raises(IncompatibleMethod, match="chain"):
        prepare(settings, toys.blobs())


@pytest.mark.parametrize("name", IN_A_CHAIN)
@pytest.mark.parametrize("first", ["", "fit"])
def test_a_method_for_chains_is_refused_side_by_side_and_taken_on_a_chain(
    name: str, first: str
) -> None:
    base = toys.toy(
        name, plan=PLAN if name != "metafed" else {}, data={}, partition={"kind": "iid"}
    )
    prepare(
        resolve(replace(base, topology={"kind": "sequential", "clients": 6, "first": first})),
        toys.blobs(),
    )
    with pytest.raises(IncompatibleMethod, match=r"topology\.kind"):
        prepare(
            resolve(replace(base, topology={"kind": "parallel", "clients": 6, "first": first})),
            toys.blobs(),
        )


@pytest.mark.parametrize("around", [{}, {"first": "fit"}, {"last": "ridge"}])
def test_cwcs_sliding_memory_is_of_as_many_omegas_as_a_chain_has_links(
    around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = {"kind": "sequential", "clients": 4, "sampled": 3, **around}
    cwc = {"name": "cwc", "memory": "sliding"}
    each, _ = sent(cwc, monkeypatch, topology=chain, rounds=3, partition={"kind": "iid"})
    assert [len(state.extra.many("omega")) for _, _, _, state in each] == [
        0,
        1,
        2,
        3,
        3,
        3,
        3,
        3,
        3,
    ]
