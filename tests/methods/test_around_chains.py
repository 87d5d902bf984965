"""Chains with other stages around their links, a census or a first fit: what a method sends to its
clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.label_counts import gini_index, proportions
from fedstill.core.records import Payload, Stage, State, World
from fedstill.methods.sfedkd import discrepancy_weights
from fedstill.running.preparation import Prepared, prepare
from loops import context_of, states_after

TASKS = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]], "compose": "clients_first"}
VERY_SKEWED = {"kind": "dirichlet", "alpha": 0.15, "min_size": 2}
SKEWED = {"kind": "dirichlet", "alpha": 0.6, "min_size": 2}
PLAN = {"epochs": 1, "batch": 50, "lr": 0.01}
CHAIN = {"kind": "sequential", "clients": 6, "sampled": 3}
SFEDKD = {"name": "sfedkd", "k": 2}

STAGES_BEFORE = pytest.mark.parametrize("first", ["", "fit"])


@dataclass(frozen=True)
class Delivery:
    """What a client was sent in the stage ``train``."""

    stage: Stage
    client: int
    payload: Payload
    state: State
    """The server's, from which the payload was made."""


class WatchedRun:
    """A run of four rounds, and everything that its clients were sent in the stage ``train``."""

    def __init__(
        self, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **changes: Any
    ) -> None:
        values = {"plan": PLAN, "partition": VERY_SKEWED, "rounds": 4, **changes}
        self.ready: Prepared = prepare(resolve(toys.toy(method, **values)), toys.blobs())
        self.deliveries: list[Delivery] = []
        cls = type(self.ready.settings.method)
        original = cls.payload_for_client

        def record_payload(
            method: Any, state: State, client: int, stage: Stage, world: World
        ) -> Payload | None:
            payload = original(method, state, client, stage, world)
            if stage.name == "train" and payload is not None:
                self.deliveries.append(Delivery(stage, client, payload, state))
            return payload

        engine = self.ready.engine()
        with monkeypatch.context() as patch:
            patch.setattr(cls, "payload_for_client", record_payload)
            states_after(context_of(self.ready, engine), self.ready.world.rounds)
        engine.close()

    def links(self, round_index: int) -> list[int]:
        """The clients of a round's chain, in their order."""
        stages = self.ready.settings.schedule(round_index, self.ready.world)
        return [client for stage in stages if stage.sequential for client in stage.clients]


@STAGES_BEFORE
def test_fedadkd_shares_phi_out_among_the_links_by_the_tasks_own_counts(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So weights differ, between clients and between tasks."""
    run = WatchedRun(
        {"name": "fedadkd", "phi_timing": "exact"},
        monkeypatch,
        topology={**CHAIN, "first": first},
        stream=TASKS,
        partition=SKEWED,
    )

    assert len(run.deliveries) == 12
    different_values = set()
    for delivery in run.deliveries:
        links = run.links(delivery.stage.round)
        counts = delivery.state.extra.tensor("labels")[links]
        phi = run.ready.settings.method.phi(gini_index(proportions(counts)))
        expected = float(phi[links.index(delivery.client)])
        assert delivery.payload.number("phi") == pytest.approx(expected, abs=1e-12)
        different_values.add(round(expected, 3))
    assert len(different_values) > 6


def test_fedadkds_first_phi_does_not_change_with_a_stage_before_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def phis(first: str) -> list[tuple[int, float]]:
        topology = {**CHAIN, "first": first}
        run = WatchedRun({"name": "fedadkd"}, monkeypatch, topology=topology, rounds=2)
        return [(d.client, d.payload.number("phi")) for d in run.deliveries]

    assert phis("fit") == phis("")


def test_sfedkd_weighs_teachers_by_the_counts_of_the_task_in_which_they_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a teacher that has no data in the new task, which begins in round 3."""
    run = WatchedRun(SFEDKD, monkeypatch, topology=CHAIN, stream=TASKS, seed=0)

    counts = {d.stage.round: d.state.extra.tensor("labels") for d in run.deliveries}
    assert not torch.equal(counts[2], counts[3])
    teachers_without_data = 0
    for delivery in run.deliveries:
        teachers = list(delivery.state.extra.many("teacher"))
        if not teachers:
            continue
        round_index = delivery.stage.round
        teacher_shares = proportions(counts[round_index - 1][teachers])
        student_shares = proportions(counts[round_index][delivery.client])
        g, h = discrepancy_weights(teacher_shares, student_shares)
        torch.testing.assert_close(delivery.payload.tensor("g"), g)
        torch.testing.assert_close(delivery.payload.tensor("h"), h)
        teachers_without_data += int((counts[round_index][teachers].sum(1) == 0).sum())
    assert teachers_without_data


def test_sfedkd_sends_weights_of_teachers_and_not_their_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = WatchedRun(SFEDKD, monkeypatch, topology=CHAIN, seed=0)

    for delivery in run.deliveries:
        if delivery.stage.round > 1:
            groups = {g for g in delivery.payload if not g.startswith("teacher.")}
            assert groups == {"params", "g", "h"}


@pytest.mark.parametrize(
    "name", ["feddyn", "feddc", "fedavgm", "fednova", "ccvr", "fedproto", "feddf"]
)
@STAGES_BEFORE
def test_a_method_for_parallel_rounds_is_refused_on_a_chain(name: str, first: str) -> None:
    topology = {"kind": "sequential", "clients": 6, "first": first}
    settings = resolve(toys.toy(name, topology=topology, data={"public": toys.PUBLIC}))

    with pytest.raises(IncompatibleMethod, match="chain"):
        prepare(settings, toys.blobs())


@pytest.mark.parametrize(
    ("name", "plan"), [("fedseq", PLAN), ("cwc", PLAN), ("metafed", {})], ids=str
)
@STAGES_BEFORE
def test_a_method_for_chains_is_accepted_on_a_chain_and_refused_in_parallel_rounds(
    name: str, plan: dict[str, object], first: str
) -> None:
    topology = {"kind": "sequential", "clients": 6, "first": first}
    on_a_chain = toys.toy(name, plan=plan, topology=topology, partition={"kind": "iid"})
    in_parallel = replace(on_a_chain, topology={**topology, "kind": "parallel"})

    prepare(resolve(on_a_chain), toys.blobs())

    with pytest.raises(IncompatibleMethod, match=r"topology\.kind"):
        prepare(resolve(in_parallel), toys.blobs())


@pytest.mark.parametrize("stages_around", [{}, {"first": "fit"}, {"last": "ridge"}])
def test_cwcs_sliding_memory_holds_one_importance_for_each_link_of_a_chain(
    stages_around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WatchedRun(
        {"name": "cwc", "memory": "sliding"},
        monkeypatch,
        topology={"kind": "sequential", "clients": 4, "sampled": 3, **stages_around},
        rounds=3,
        partition={"kind": "iid"},
    )

    omegas = [len(delivery.state.extra.many("omega")) for delivery in run.deliveries]
    assert omegas == [0, 1, 2, 3, 3, 3, 3, 3, 3]
