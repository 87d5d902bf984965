"""What must hold of the sequential family at its edges, and when something is missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import Federation, check, drive, ready_for

import toys
from fedstill import losses
from fedstill.cli.explain import run_estimate
from fedstill.core.capabilities import Need
from fedstill.core.errors import InfeasiblePartition
from fedstill.core.label_counts import Metric
from fedstill.core.records import NOTHING, Payload, Reply, Stage, TrainingStart, many
from fedstill.methods.cwc import CWC
from fedstill.methods.sfedkd import SFedKD, discrepancy_weights
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 4}
SIDE_BY_SIDE = {"kind": "parallel", "clients": 6, "sampled": 4}
ONE_CLASS_EACH = {"partition": {"kind": "sharding", "shards": 1}}


def same(one: object, other: object, changes: dict[str, object], exactly: bool = True) -> None:
    a, b = (drive(ready_for(m, **changes))[0] for m in (one, other))
    if exactly:
        assert all(torch.equal(x, b[-1].params[k]) for k, x in a[-1].params.items())
    else:
        check(a[-1].params, b[-1].params)


@pytest.mark.parametrize("name", ["sfedkd", "aver", "ebkd", "camkd"])
@pytest.mark.parametrize(("topology", "like"), [(CHAIN, "fedseq"), (SIDE_BY_SIDE, "fedavg")])
def test_without_teachers_it_is_plain_training(
    name: str, topology: dict[str, object], like: str
) -> None:
    """papers.md 13.7: K = 0 is FedSeq."""
    same({"name": name, "k": 0}, like, {"topology": topology})


@pytest.mark.parametrize("name", ["sfedkd", "aver", "ebkd", "camkd"])
def test_the_first_round_has_no_teachers(name: str) -> None:
    ours, theirs = (drive(ready_for(m))[0] for m in (name, "fedseq"))
    assert all(torch.equal(ours[1].params[k], theirs[1].params[k]) for k in theirs[1].params)
    assert any(not torch.equal(ours[2].params[k], theirs[2].params[k]) for k in theirs[2].params)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "sfedkd", "gamma": 0.0, "beta": 0.0}, "fedseq"),
        ({"name": "aver", "weight": 0.0}, "fedseq"),
        ({"name": "cwc", "weight": 0.0}, "fedseq"),
        ({"name": "ebkd", "k": 1}, {"name": "aver", "k": 1}),
        ({"name": "camkd", "k": 1}, {"name": "aver", "k": 1}),
        ({"name": "cwc", "memory": "ema", "decay": 1.0}, {"name": "cwc", "memory": "sum"}),
        ({"name": "sfedkd", "teacher_choice": "all"}, {"name": "sfedkd", "k": 4}),
        ({"name": "sfedkd", "k": 4, "teacher_choice": "random"}, {"name": "sfedkd", "k": 4}),
    ],
    ids=lambda m: "-".join(f"{v}" for v in m.values()) if isinstance(m, dict) else m,
)
def test_a_method_at_its_edge_is_another(one: object, other: object) -> None:
    same(one, other, {"topology": CHAIN, "plan": {"lr": 0.02}, "rounds": 3}, exactly=False)


def test_clients_of_one_class_choose_teachers_of_distinct_classes_first() -> None:
    """papers.md 13.7, with the models of a whole run."""
    changes = {"topology": {"kind": "sequential", "clients": 5, "sampled": 5}, **ONE_CLASS_EACH}
    ready = ready_for({"name": "sfedkd", "k": 3}, **changes)
    state = drive(ready)[0][-1]
    chosen = list(state.extra.many("teacher"))
    assert len(chosen) == 3
    assert len({int(state.extra.tensor("labels")[c].argmax()) for c in chosen}) == 3
    assert chosen == sorted(Federation(ready, 5).chain(1)[:3]), (
        "all are equally good: those that trained first"
    )


def test_equal_label_distributions_give_equal_weights() -> None:
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for metric in ("l1", "l2", "kl", "js"):
        g, h = discrepancy_weights(share.expand(4, 3), share, metric)  # type: ignore[arg-type]
        torch.testing.assert_close(g, torch.full((4,), 0.25).double())
        torch.testing.assert_close(h, torch.full((4,), 0.25).double())


@pytest.mark.parametrize("metric", ["l1", "l2", "kl", "js"])
def test_a_client_whose_teachers_all_have_its_own_labels_weighs_them_equally(metric: str) -> None:
    counts = torch.tensor([6, 0, 3, 1, 0])
    start = _start_with_teachers(metric, student=counts, teachers=(counts, 3 * counts, 10 * counts))
    for weights in (start["g"], start["h"]):
        torch.testing.assert_close(weights, torch.full((3, 1), 1 / 3, dtype=torch.float64))


def test_a_client_that_missed_the_census_weighs_its_teachers_equally() -> None:
    nothing = torch.zeros(5, dtype=torch.int64)
    teachers = (torch.tensor([6, 0, 3, 1, 0]), torch.tensor([0, 9, 0, 0, 1]))
    start = _start_with_teachers("kl", student=nothing, teachers=teachers)
    for weights in (start["g"], start["h"]):
        torch.testing.assert_close(weights, torch.full((2, 1), 1 / 2, dtype=torch.float64))


def _start_with_teachers(
    metric: Metric, student: torch.Tensor, teachers: Sequence[torch.Tensor]
) -> TrainingStart:
    """How client 0 starts with the models of clients 1, 2, ... and these label counts."""
    world = ready_for("sfedkd").world
    method = SFedKD(distance=metric)
    stage = Stage(2, 0, "train", (0,))
    models = {client: world.initial(0) for client, _ in enumerate(teachers, start=1)}
    labels = torch.zeros(world.clients, len(student), dtype=torch.int64)
    labels[0] = student
    state = method.initial_state(world).next(
        groups=many("teacher", models), labels=labels, teacher_labels=torch.stack(list(teachers))
    )
    payload = method.payload_for_client(state, 0, stage, world)
    view: Any = SimpleNamespace(client=0)
    return method.work(stage).begin(payload, NOTHING, view, world)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_weights_of_several_teachers_sum_to_what_the_code_has(k: int) -> None:
    """papers.md 13.8, per example; a certain teacher and a lone one are no 0/0."""
    draw = torch.Generator().manual_seed(k)
    teachers = 4 * torch.randn(k, 7, 5, generator=draw).double()
    labels = torch.arange(7) % 5
    ebkd, camkd = (
        losses.entropy_weights(teachers).sum(0),
        losses.confidence_weights(teachers, labels).sum(0),
    )
    torch.testing.assert_close(ebkd, torch.full((7,), float(max(k - 1, 1))).double())
    torch.testing.assert_close(camkd, torch.ones(7).double())
    certain = losses.entropy_weights(torch.tensor([1e4, 0.0, 0.0]).double().expand(k, 2, 3))
    torch.testing.assert_close(certain, torch.full((k, 2), 1 - 1 / k if k > 1 else 1.0).double())


def test_cwcs_importance_is_zero_for_the_first_client_and_halves_over_a_round() -> None:
    """papers.md 13.6."""
    ready = ready_for("cwc", plan={"lr": 0.02})
    method, world, stages = (
        ready.settings.method,
        ready.world,
        ready.settings.schedule(1, ready.world),
    )
    state = method.begin_round(method.initial_state(world), stages, world)
    first = method.payload_for_client(state, stages[0].clients[0], stages[0], world)
    assert first is not None
    assert all(float(v.abs().sum()) == 0 for v in first.tensors("importance").values())
    end = drive(ready_for("cwc", rounds=1, plan={"lr": 0.02}))[0][-1]
    kept = method.begin_round(end, stages, world).extra.tensors("importance")
    for name, value in end.extra.tensors("importance").items():
        assert float(value.abs().max()) > 0
        assert torch.equal(kept[name], value / 2)


def test_the_penalty_is_nothing_at_the_anchor() -> None:
    anchor = {"w": torch.randn(3, 2).double(), "b": torch.randn(2).double()}
    importance = {k: torch.rand_like(v) for k, v in anchor.items()}
    assert float(losses.quadratic(anchor, anchor, importance, 7.0)) == 0
    moved = {k: (v + 1).requires_grad_() for k, v in anchor.items()}
    losses.quadratic({**moved, "more": torch.ones(1)}, anchor, importance, 0.5).backward()
    for k, v in moved.items():
        torch.testing.assert_close(v.grad, importance[k])  # 2 * 0.5 * Omega * 1
    assert float(losses.quadratic({}, {}, {}, 1.0)) == 0


def test_a_sliding_memory_holds_the_last_cycle() -> None:
    method = CWC(memory="sliding")
    ready = ready_for(method)
    world, stages = ready.world, ready.settings.schedule(1, ready.world)
    state = method.begin_round(method.initial_state(world), stages, world)
    zeros = state.extra.tensors("importance")
    for i in range(1, 8):
        up = Payload(
            params=world.initial(0),
            importance={k: torch.full_like(v, float(i)) for k, v in zeros.items()},
        )
        state = method.aggregate(state, [Reply(0, up, 5)], stages[0], world)
    assert len(state.extra.many("omega")) == len(stages) == 4
    assert all(bool((v == 4 + 5 + 6 + 7).all()) for v in state.extra.tensors("importance").values())


def test_more_teachers_than_there_are_models_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedstill"):
        states = drive(ready_for({"name": "sfedkd", "k": 9}, rounds=4))[0]
    said = [r.getMessage() for r in caplog.records if "method.k" in r.getMessage()]
    assert said == ["method.k = 9, and round 1 left 4 models: all of them teach"]
    assert len(states[-1].extra.many("teacher")) == 4
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedstill"):
        drive(ready_for({"name": "sfedkd", "k": 9, "teacher_choice": "all"}, rounds=3))
    assert not caplog.records


class Broken(Exception):
    """A client that raises."""


@pytest.mark.parametrize("name", ["sfedkd", "cwc", "fedseq"])
def test_a_failing_client_is_skipped_and_named_and_the_chain_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.engines import serial

    train, seen = serial.train, {}

    def failing(work, start: TrainingStart, view, setup):  # type: ignore[no-untyped-def]
        stage = setup.stage
        seen[stage.round, stage.index] = {k: v.clone() for k, v in start.params.items()}
        if stage.index == 1 and stage.round == 1:
            raise Broken("the disk of this site is gone")
        return train(work, start, view, setup)

    monkeypatch.setattr(serial, "train", failing)
    plan = {"epochs": 1, "batch": 10, "lr": 0.02}
    run(
        toys.toy(name, rounds=2, topology=CHAIN, plan=plan, clients=toys.TOLERANT),
        tmp_path / "run",
        data=toys.blobs(),
    )
    events = [
        e
        for e in read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "client" and e["round"] > 0
    ]
    (refused,) = [e for e in events if "refused" in e]
    assert (refused["round"], refused["stage"]) == (1, 1)
    assert "the disk of this site is gone" in refused["refused"]
    before, after = seen[1, 1], seen[1, 2]
    assert all(torch.equal(before[k], after[k]) for k in before), (
        "the next client gets the last good model"
    )
    if name == "sfedkd":
        sizes = {e["bytes_down"] for e in events if e["round"] == 2 and "refused" not in e}
        models = {e["client"] for e in events if e["round"] == 1 and "refused" not in e}
        assert len(models) == 3
        assert len(sizes) == 1
        assert sizes.pop() // (1 + 3) >= sum(v.nbytes for v in before.values()), (
            "three models teach, not four"
        )


@pytest.mark.parametrize(
    ("name", "k", "down", "up"),
    [("fedseq", 0, 1, 1), ("cwc", 0, 2, 2), ("sfedkd", 3, 4, 1), ("aver", 3, 4, 1)],
)
def test_a_round_sends_as_much_as_the_method_says(name: str, k: int, down: int, up: int) -> None:
    """papers.md 14: a model a hop, twice for CWC; teachers and their label counts for the
    distilling ones.
    """
    ready = ready_for({"name": name, **({"k": k} if k else {})})
    size = sum(v.nbytes for v in ready.world.initial(0).values())
    sums = run_estimate(ready)
    assert (sums.work.bytes_down, sums.work.bytes_up) == (
        4 * (2 if name == "cwc" else 1) * size,
        4 * up * size,
    )
    method, world = ready.settings.method, ready.world
    stages = ready.settings.schedule(2, world)
    state = method.begin_round(
        drive(ready_for({"name": name, **({"k": k} if k else {})}, rounds=1))[0][-1], stages, world
    )
    sent = method.payload_for_client(state, stages[0].clients[0], stages[0], world)
    assert sent is not None
    assert sent.nbytes == down * size + (8 * 2 * k if name == "sfedkd" else 0)


@pytest.mark.parametrize(
    ("method", "asks"),
    [
        ({"name": "sfedkd"}, True),
        ({"name": "sfedkd", "teacher_choice": "random"}, True),
        ({"name": "sfedkd", "teacher_choice": "random", "g": False, "h": False}, False),
        ({"name": "aver"}, True),
        ({"name": "aver", "teacher_choice": "all"}, False),
        ({"name": "fedseq"}, False),
    ],
    ids=str,
)
def test_labels_are_asked_for_only_where_they_matter(method: dict[str, object], asks: bool) -> None:
    ready = ready_for(method)
    assert (Need.LABEL_COUNTS in ready.settings.method.requires()) == asks
    assert len(drive(ready)[0]) == 3


def test_a_client_that_missed_the_census_does_not_teach() -> None:
    ready = ready_for({"name": "sfedkd", "k": 4})
    method, world = ready.settings.method, ready.world
    states = drive(ready)[0]
    state, stages = states[1], ready.settings.schedule(2, world)
    labels = state.extra.tensor("labels").clone()
    (gone, *_) = state.extra.tensor("trained").tolist()
    labels[gone] = 0
    opened = method.begin_round(state.next(labels=labels), stages, world)
    assert gone not in opened.extra.many("teacher")
    assert len(opened.extra.many("teacher")) == 3


def test_camkd_asks_for_features_only_with_its_feature_term() -> None:
    assert Need.FEATURES not in ready_for("camkd").settings.method.requires()
    assert (
        Need.FEATURES
        in ready_for({"name": "camkd", "feature_weight": 50.0}).settings.method.requires()
    )


def test_an_extended_dirichlet_split_that_cannot_be_says_which_class_and_why() -> None:
    split = {
        "kind": "extended_dirichlet",
        "classes_per_client": 1,
        "alpha": 0.05,
        "min_size": 15,
        "max_tries": 20,
    }
    with pytest.raises(
        InfeasiblePartition, match=r"client \d+ only \d+ \(class \d+: 30 examples for \d+ clients\)"
    ):
        ready_for("sfedkd", partition=split)
