"""What must hold of the sequential family at its edges, and when something is missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import Federation, assert_same_model, drive, ready_for, run_of
from torch import Tensor

import toys
from fedstill import losses
from fedstill.cli.explain import run_estimate
from fedstill.core.capabilities import Need
from fedstill.core.errors import InfeasiblePartition
from fedstill.core.label_counts import Metric
from fedstill.core.records import NOTHING, Payload, Reply, Stage, TrainingStart, many
from fedstill.core.trees import same_bits, scale
from fedstill.engines import serial
from fedstill.methods.cwc import CWC
from fedstill.methods.sfedkd import SFedKD, discrepancy_weights
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 4}
PARALLEL = {"kind": "parallel", "clients": 6, "sampled": 4}

WITH_TEACHERS = pytest.mark.parametrize("name", ["sfedkd", "aver", "ebkd", "camkd"])
METRICS = pytest.mark.parametrize("metric", ["l1", "l2", "kl", "js"])


def ones(*shape: int) -> Tensor:
    """Ones in float64."""
    return torch.ones(*shape, dtype=torch.float64)


# Equivalent methods.


@WITH_TEACHERS
@pytest.mark.parametrize(
    ("topology", "equivalent"), [(CHAIN, "fedseq"), (PARALLEL, "fedavg")], ids=["chain", "parallel"]
)
def test_without_teachers_it_is_plain_training(
    name: str, topology: dict[str, object], equivalent: str
) -> None:
    """papers.md 13.7: K = 0 is FedSeq."""
    ours = run_of({"name": name, "k": 0}, topology=topology).params

    assert same_bits(ours, run_of(equivalent, topology=topology).params)


@WITH_TEACHERS
def test_the_first_round_has_no_teachers(name: str) -> None:
    """The second one has."""
    ours = run_of(name).states
    fedseq = run_of("fedseq").states

    assert same_bits(ours[1].params, fedseq[1].params)
    assert not same_bits(ours[2].params, fedseq[2].params)


@pytest.mark.parametrize(
    ("at_its_edge", "equivalent"),
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
    ids=str,
)
def test_a_method_at_its_edge_is_another(at_its_edge: object, equivalent: object) -> None:
    changes = {"topology": CHAIN, "plan": {"lr": 0.02}, "rounds": 3}

    assert_same_model(run_of(at_its_edge, **changes).params, run_of(equivalent, **changes).params)


# SFedKD's choice of teachers and their weights.


def test_clients_of_one_class_choose_teachers_of_distinct_classes_first() -> None:
    """papers.md 13.7, with the models of a whole run. All are equally good: it chooses those that
    trained first.
    """
    ready = ready_for(
        {"name": "sfedkd", "k": 3},
        topology={"kind": "sequential", "clients": 5, "sampled": 5},
        partition={"kind": "sharding", "shards": 1},
    )

    state = drive(ready).final

    teachers = list(state.extra.many("teacher"))
    labels = state.extra.tensor("labels")[teachers].argmax(1)
    assert len(teachers) == len(set(labels.tolist())) == 3
    assert teachers == sorted(Federation(ready, sampled=5).chain(1)[:3])


@METRICS
def test_equal_label_distributions_give_equal_weights(metric: Metric) -> None:
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    g, h = discrepancy_weights(shares.expand(4, 3), shares, metric)

    torch.testing.assert_close(g, ones(4) / 4)
    torch.testing.assert_close(h, ones(4) / 4)


def start_with_teachers(
    metric: Metric, student: Tensor, teachers: Sequence[Tensor]
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


@METRICS
def test_a_client_whose_teachers_all_have_its_own_labels_weighs_them_equally(
    metric: Metric,
) -> None:
    counts = torch.tensor([6, 0, 3, 1, 0])

    start = start_with_teachers(metric, counts, teachers=(counts, 3 * counts, 10 * counts))

    for weights in (start["g"], start["h"]):
        torch.testing.assert_close(weights, ones(3, 1) / 3)


def test_a_client_that_missed_the_census_weighs_its_teachers_equally() -> None:
    unknown = torch.zeros(5, dtype=torch.int64)
    teachers = (torch.tensor([6, 0, 3, 1, 0]), torch.tensor([0, 9, 0, 0, 1]))

    start = start_with_teachers("kl", unknown, teachers)

    for weights in (start["g"], start["h"]):
        torch.testing.assert_close(weights, ones(2, 1) / 2)


def test_a_client_that_missed_the_census_does_not_teach() -> None:
    ready = ready_for({"name": "sfedkd", "k": 4})
    method = ready.settings.method
    stages = ready.settings.schedule(2, ready.world)
    state = drive(ready).states[1]
    labels = state.extra.tensor("labels").clone()
    unknown_client = state.extra.tensor("trained").tolist()[0]
    labels[unknown_client] = 0

    opened = method.begin_round(state.next(labels=labels), stages, ready.world)

    teachers = opened.extra.many("teacher")
    assert unknown_client not in teachers
    assert len(teachers) == 3


@pytest.mark.parametrize(
    ("k", "total", "share_of_certain"), [(1, 1, 1), (2, 1, 1 / 2), (5, 4, 4 / 5)]
)
def test_weights_of_several_teachers_have_the_sums_of_the_authors_code(
    k: int, total: float, share_of_certain: float
) -> None:
    """papers.md 13.8, per example: EBKD's to K - 1, CAMKD's to 1. A certain teacher and a lone one
    are no 0/0.
    """
    draw = torch.Generator().manual_seed(k)
    teachers = 4 * torch.randn(k, 7, 5, generator=draw).double()
    labels = torch.arange(7) % 5
    certain_teachers = torch.tensor([1e4, 0.0, 0.0]).double().expand(k, 2, 3)

    ebkd = losses.entropy_weights(teachers).sum(0)
    camkd = losses.confidence_weights(teachers, labels).sum(0)
    of_certain = losses.entropy_weights(certain_teachers)

    torch.testing.assert_close(ebkd, total * ones(7))
    torch.testing.assert_close(camkd, ones(7))
    torch.testing.assert_close(of_certain, share_of_certain * ones(k, 2))


def test_a_warning_says_once_that_there_are_fewer_models_than_teachers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Unless all are wanted anyway."""
    with caplog.at_level(logging.WARNING, "fedstill"):
        state = run_of({"name": "sfedkd", "k": 9}, rounds=4).final
    messages = [record.getMessage() for record in caplog.records]
    about_k = [message for message in messages if "method.k" in message]
    assert about_k == ["method.k = 9, and round 1 left 4 models: all of them teach"]
    assert len(state.extra.many("teacher")) == 4

    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedstill"):
        run_of({"name": "sfedkd", "k": 9, "teacher_choice": "all"}, rounds=3)
    assert not caplog.records


# CWC's importance.


def test_cwcs_importance_is_zero_for_the_first_client_and_halves_over_a_round() -> None:
    """papers.md 13.6."""
    ready = ready_for("cwc", plan={"lr": 0.02})
    method = ready.settings.method
    world = ready.world
    stages = ready.settings.schedule(1, world)

    opened = method.begin_round(method.initial_state(world), stages, world)
    first_client = stages[0].clients[0]
    payload = method.payload_for_client(opened, first_client, stages[0], world)
    final = run_of("cwc", rounds=1, plan={"lr": 0.02}).final
    next_opened = method.begin_round(final, stages, world)

    assert payload is not None
    assert not any(value.any() for value in payload.tensors("importance").values())
    importance = final.extra.tensors("importance")
    assert all(value.any() for value in importance.values())
    assert same_bits(next_opened.extra.tensors("importance"), scale(importance, 1 / 2))


def test_the_penalty_is_nothing_at_the_anchor() -> None:
    """A unit away, its gradient is 2 lambda times the importance. Other entries have none."""
    anchor = {"w": torch.randn(3, 2).double(), "b": torch.randn(2).double()}
    importance = {name: torch.rand_like(value) for name, value in anchor.items()}
    moved = {name: (value + 1).requires_grad_() for name, value in anchor.items()}

    at_anchor = losses.quadratic(anchor, anchor, importance, 7.0)
    with_other_entry = {**moved, "other": torch.ones(1)}
    losses.quadratic(with_other_entry, anchor, importance, 0.5).backward()

    assert float(at_anchor) == 0
    for name, value in moved.items():
        torch.testing.assert_close(value.grad, 2 * 0.5 * importance[name])
    assert float(losses.quadratic({}, {}, {}, 1.0)) == 0


def test_a_sliding_memory_holds_the_last_cycle() -> None:
    """A cycle is four clients; the last of seven have the importances 4 to 7."""
    ready = ready_for(CWC(memory="sliding"))
    method = ready.settings.method
    world = ready.world
    stages = ready.settings.schedule(1, world)
    state = method.begin_round(method.initial_state(world), stages, world)
    like = state.extra.tensors("importance")

    for number in range(1, 8):
        importance = {key: torch.full_like(value, float(number)) for key, value in like.items()}
        content = Payload(params=world.initial(0), importance=importance)
        state = method.aggregate(state, [Reply(0, content, 5)], stages[0], world)

    assert len(state.extra.many("omega")) == len(stages) == 4
    for value in state.extra.tensors("importance").values():
        assert bool((value == 4 + 5 + 6 + 7).all())


# Clients that fail.


class SiteIsGone(Exception):
    """What a failing client raises."""


class WatchedTraining:
    """The training of all clients, of which the second one in round 1 fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received: dict[tuple[int, int], dict[str, Tensor]] = {}
        """The model that training started from, by round and stage."""
        original = serial.train

        def train(work, start: TrainingStart, view, setup):  # type: ignore[no-untyped-def]
            position = (setup.stage.round, setup.stage.index)
            self.received[position] = {key: value.clone() for key, value in start.params.items()}
            if position == (1, 1):
                raise SiteIsGone("the disk of this site is gone")
            return original(work, start, view, setup)

        monkeypatch.setattr(serial, "train", train)


@pytest.mark.parametrize("name", ["sfedkd", "cwc", "fedseq"])
def test_a_failing_client_is_skipped_and_named_and_the_chain_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next client gets the last good model. In the next round three models teach, not four."""
    training = WatchedTraining(monkeypatch)
    toy = toys.toy(
        name,
        rounds=2,
        topology=CHAIN,
        plan={"epochs": 1, "batch": 10, "lr": 0.02},
        clients=toys.TOLERANT,
    )

    run(toy, tmp_path / "run", data=toys.blobs())

    events = read_journal(tmp_path / "run" / "journal.jsonl")
    client_events = [e for e in events if e["event"] == "client" and e["round"] > 0]
    accepted = [event for event in client_events if "refused" not in event]
    (refused,) = [event for event in client_events if "refused" in event]
    assert (refused["round"], refused["stage"]) == (1, 1)
    assert "the disk of this site is gone" in refused["refused"]
    last_good_model = training.received[1, 1]
    assert same_bits(training.received[1, 2], last_good_model)

    if name == "sfedkd":
        assert len({event["client"] for event in accepted if event["round"] == 1}) == 3
        (bytes_down,) = {event["bytes_down"] for event in accepted if event["round"] == 2}
        model_bytes = sum(value.nbytes for value in last_good_model.values())
        assert bytes_down // (1 + 3) >= model_bytes


# What is sent, and what is needed.


@pytest.mark.parametrize(
    ("method", "models_at_first", "models_down", "numbers_down", "models_up"),
    [
        ({"name": "fedseq"}, 1, 1, 0, 1),
        ({"name": "cwc"}, 2, 2, 0, 2),
        ({"name": "sfedkd", "k": 3}, 1, 4, 6, 1),
        ({"name": "aver", "k": 3}, 1, 4, 0, 1),
    ],
    ids=["fedseq", "cwc", "sfedkd", "aver"],
)
def test_a_round_sends_as_much_as_the_method_says(
    method: dict[str, object],
    models_at_first: int,
    models_down: int,
    numbers_down: int,
    models_up: int,
) -> None:
    """papers.md 14: a model a hop, twice for CWC; from round 2 on also the teachers and, for
    SFedKD, their weights.
    """
    ready = ready_for(method)
    world = ready.world
    model_bytes = sum(value.nbytes for value in world.initial(0).values())
    stages = ready.settings.schedule(2, world)
    after_round_1 = run_of(method, rounds=1).final

    estimate = run_estimate(ready).work
    opened = ready.settings.method.begin_round(after_round_1, stages, world)
    client = stages[0].clients[0]
    payload = ready.settings.method.payload_for_client(opened, client, stages[0], world)

    assert estimate.bytes_down == 4 * models_at_first * model_bytes
    assert estimate.bytes_up == 4 * models_up * model_bytes
    assert payload is not None
    assert payload.nbytes == models_down * model_bytes + 8 * numbers_down


@pytest.mark.parametrize(
    ("method", "needs_counts"),
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
def test_label_counts_are_required_only_where_they_matter(
    method: dict[str, object], needs_counts: bool
) -> None:
    ready = ready_for(method)

    assert (Need.LABEL_COUNTS in ready.settings.method.requires()) == needs_counts
    assert len(drive(ready).states) == 3


def test_camkd_requires_features_only_with_its_feature_term() -> None:
    without = ready_for("camkd").settings.method
    with_features = ready_for({"name": "camkd", "feature_weight": 50.0}).settings.method

    assert Need.FEATURES not in without.requires()
    assert Need.FEATURES in with_features.requires()


def test_an_infeasible_extended_dirichlet_split_names_client_and_class() -> None:
    split = {
        "kind": "extended_dirichlet",
        "classes_per_client": 1,
        "alpha": 0.05,
        "min_size": 15,
        "max_tries": 20,
    }
    message = r"client \d+ only \d+ \(class \d+: 30 examples for \d+ clients\)"
    with pytest.raises(InfeasiblePartition, match=message):
        ready_for("sfedkd", partition=split)
