"""Class weights: what holds of them for every method, and the algorithm written out plainly."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain
import pytest
import stacking
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import ConfigError, FedstillError, Interrupted
from fedstill.core.label_counts import LABEL_TOTALS, balanced_weights
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import Reply, Step, TrainingStart
from fedstill.core.registry import register
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from loops import Collecting, context_of, states_after
from run_bits import StopAfter, assert_same_bits, bits

METHODS = [name for name in registry.names("method") if not name.startswith("toy_")]

TRAINED_WITHOUT_LABELS = {"afl"}
"""Methods that train by no loss of labels: their clients send what a head is solved from."""

UNMOVED = {"fedsam": {"name": "fedsam", "rho": 0.0}, "fedsol": {"name": "fedsol", "rho": 0.0}}
"""Methods that take the loss at a point which the weights move, with fields that do not move it."""

ONES = (1.0,) * toys.CLASSES
SOME = (0.25, 1.0, 0.0, 0.0, 0.5)
OTHERS = tuple(1.0 - weight for weight in SOME)


@functools.cache
def unequal() -> Dataset:
    """Blobs of which the first class is the most frequent, and the last the rarest."""
    blobs = toys.blobs(size=160)
    labels = blobs.train.labels
    rank = torch.zeros_like(labels)
    for label in range(toys.CLASSES):
        rank[labels == label] = torch.arange(int((labels == label).sum()))
    few = rank < torch.tensor([32, 16, 12, 8, 6])[labels]
    train = blobs.train.take(few.nonzero().flatten())
    return from_tensors(
        "unequal",
        (train.values, train.labels),
        (blobs.test.values, blobs.test.labels),
        classes=list(blobs.classes),
    )


def ready(name: str, weights: object, engine: str = "serial", **plan: Any) -> Prepared:
    """A round of a method whose plans all have these class weights."""
    changes: dict[str, Any] = {"rounds": 1, "topology": {"clients": 4}}
    if name in UNMOVED:
        changes["method"] = UNMOVED[name]
    method: Method = registry.lookup("method", name).build()
    if name == "fedgen":  # from the second round on clients learn from the generator
        changes["rounds"] = 2
    if method.schedule.get("task_end"):  # it needs tasks, and the second has what it keeps
        changes |= {"rounds": 2, "stream": {"kind": "classes", "tasks": 2}}
    asked = stacking.experiment(name, engine, **changes)
    plans = {**asked.plan, "epochs": 1, "class_weights": weights, **plan}
    if name == "fedgen":
        plans["generate"] = {"lr": plans["lr"]}
    return prepare(resolve(replace(asked, plan=plans)), unequal())


def rounds(prepared: Prepared) -> tuple[dict[str, Tensor], list[Reply]]:
    """The last state of a run, and all replies."""
    recorder = Collecting()
    context = context_of(prepared, recorder=recorder)
    state = states_after(context, prepared.settings.rounds)[-1]
    replies = [reply for result in recorder.results for reply in result.accepted]
    assert not [refusal for result in recorder.results for refusal in result.refused]
    return stacking.tensors(state), replies


@functools.cache
def unweighted(name: str) -> tuple[dict[str, Tensor], list[Reply]]:
    """The last state of a method's run without class weights, and all replies."""
    return rounds(ready(name, "none"))


def losses(replies: list[Reply]) -> dict[tuple[int, int, int, str], float]:
    """The mean of each term of an objective, by round, stage, client and name."""
    return {
        (reply.round, reply.stage, reply.client, name): value
        for reply in replies
        for name, value in reply.metrics.get("loss", {}).items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_weights_of_one_have_the_bits_of_none(name: str) -> None:
    without, expected = unweighted(name)
    with_ones, got = rounds(ready(name, ONES))
    assert without.keys() == with_ones.keys()
    for key, value in without.items():
        assert torch.equal(value, with_ones[key]), key
    assert losses(expected) == losses(got)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_labels_is_linear_in_the_weights(name: str) -> None:
    """A class with weight 0 then adds nothing by its labels; the other terms stay as they are.

    The learning rate is so small that models do not change.
    """
    by_weights = []
    for weights in (ONES, SOME, OTHERS):
        still = {"lr": 1e-12, "momentum": 0.0, "weight_decay": 0.0, "batch": 32}
        slow = in_double(ready(name, weights, **still))
        by_weights.append(losses(rounds(slow)[1]))
    whole, part, rest = by_weights
    assert whole.keys() == part.keys() == rest.keys()
    weighted = set()
    for key, value in whole.items():
        if (name, key[-1]) == ("glfc_local", "old"):
            continue  # of labels in part; test_glfc_local.py has it by hand
        one_value = pytest.approx(value, rel=1e-6, abs=1e-9)
        if part[key] == one_value and rest[key] == one_value:
            continue
        weighted.add(key)
        assert part[key] + rest[key] == one_value, key
    assert bool(weighted) == (name not in TRAINED_WITHOUT_LABELS)
    if name == "fedgen":
        assert "generated" in {key[-1] for key in weighted}


@pytest.mark.parametrize("name", sorted(set(METHODS) - TRAINED_WITHOUT_LABELS))
def test_balanced_weights_change_what_is_learnt(name: str) -> None:
    without, _ = unweighted(name)
    balanced, _ = rounds(ready(name, "balanced"))
    assert any(not torch.equal(value, balanced[key]) for key, value in without.items())


@pytest.mark.parametrize("weights", ["balanced", "balanced_overall", SOME], ids=str)
@pytest.mark.parametrize("name", ["fedavg", "fedntd", "moon", "fedgen", "hiper_fedkd"])
def test_a_stack_of_clients_has_the_weights_of_each(name: str, weights: object) -> None:
    serial, stacked = (
        rounds(in_double(ready(name, weights, engine)))[0] for engine in ("serial", "vectorised")
    )
    for key, value in serial.items():
        torch.testing.assert_close(stacked[key], value, rtol=NEAR, atol=NEAR)


@needs_flower
@pytest.mark.parametrize("weights", ["balanced", "balanced_overall"])
def test_over_flower_the_weights_have_the_same_bits(weights: str, tmp_path: Path) -> None:
    models = []
    for engine in ("serial", "flower"):
        plan = {"epochs": 1, "batch": 20, "class_weights": weights}
        result = run(toys.toy(plan=plan, engine=engine), tmp_path / engine, data=unequal())
        models.append(result.model)
    serial, flower = models
    assert all(torch.equal(value, flower[key]) for key, value in serial.items())


def weighted_ce(weights: Tensor) -> plain.Loss:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(model(x), y, reduction="none")
        return (each * weights[y]).sum() / len(y)

    return loss


def by_scikit_learn(labels: Tensor) -> Tensor:
    """The balanced weights, 0 for a class without examples."""
    present = labels.unique().numpy()
    weights = torch.zeros(toys.CLASSES, dtype=torch.float64)
    weights[present] = torch.from_numpy(
        compute_class_weight("balanced", classes=present, y=labels.numpy())
    )
    return weights


@pytest.mark.parametrize("name", ["fedavg", "fedseq"])
@pytest.mark.parametrize("weights", ["balanced", "balanced_overall", SOME], ids=str)
def test_two_rounds_are_those_of_the_algorithm_written_out(name: str, weights: object) -> None:
    plan = {"class_weights": weights}
    prepared = in_double(prepare(resolve(plain.experiment(name, plan=plan)), unequal()))
    fed = plain.Federation(prepared)
    everything = torch.cat([fed.data(client)[1] for client in range(6)])

    def loss(client: int) -> plain.Loss:
        if weights == "balanced":
            return weighted_ce(by_scikit_learn(fed.data(client)[1]))
        if weights == "balanced_overall":
            return weighted_ce(by_scikit_learn(everything))
        return weighted_ce(torch.tensor(weights, dtype=torch.float64))

    params = fed.start
    for round in (1, 2):
        if name == "fedseq":
            for stage, client in enumerate(fed.chain(round)):
                params = fed.fit(params, loss(client), round, client, stage=stage).params
        else:
            sent = [fed.fit(params, loss(c), round, c) for c in fed.cohort(round)]
            params = plain.average(sent)
    plain.assert_same_model(plain.drive(prepared).params, params)


def test_balanced_weights_have_mean_one_over_the_examples() -> None:
    counts = torch.tensor([7, 0, 2, 1])
    weights = balanced_weights(counts)
    assert float((weights * counts).sum() / counts.sum()) == pytest.approx(1)
    assert float(weights[1]) == 0
    assert balanced_weights(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("weights", ["balanced", "balanced_overall", list(SOME)], ids=str)
def test_a_resumed_run_has_the_same_bits(weights: object, tmp_path: Path) -> None:
    asked = toys.toy("fedntd", plan={"epochs": 1, "batch": 20, "class_weights": weights})
    run(asked, tmp_path / "whole", data=unequal())
    with pytest.raises(Interrupted):
        run(asked, tmp_path / "stopped", unequal(), watch=StopAfter(2))
    other = tmp_path / "stopped"
    resume(other, data=unequal())
    assert_same_bits(bits(other), bits(tmp_path / "whole"))


def test_label_totals_are_sent_where_they_are_needed() -> None:
    """And clients' work does not see them."""
    seen = defaultdict(set)

    class Watching(ClientWork):
        def begin(self, payload: Any, client_state: Any, view: Any, world: Any) -> TrainingStart:
            seen["groups"].update(payload)
            seen["totals"].add(tuple(view.label_totals.tolist()))
            return super().begin(payload, client_state, view, world)

    class Watched(FedAvg):
        def work(self, stage: object) -> ClientWork:
            return Watching()

    register("method", "toy_watched")(Watched)
    recorder = Collecting()
    asked = plain.experiment("toy_watched", plan={"class_weights": "balanced_overall"})
    prepared = prepare(resolve(asked), unequal())
    states_after(context_of(prepared, recorder=recorder), 2)
    counts = torch.bincount(prepared.sites.train.labels, minlength=toys.CLASSES)
    assert seen == {"groups": {"params"}, "totals": {tuple(counts.tolist())}}
    census, *stages = recorder.results
    assert census.stage.name == "census"
    assert not any(LABEL_TOTALS in payload for payload in census.payloads.values())
    for result in stages:
        assert all(LABEL_TOTALS in payload for payload in result.payloads.values())


class Unweighted(ClientWork):
    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        return {"ce": cross_entropy(step.logits(), step.y)}


@register("method", "toy_unweighted")
class OfUnweighted(FedAvg):
    """A method whose loss of labels does not call ``step.weighted``."""

    def work(self, stage: object) -> ClientWork:
        return Unweighted()


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_a_loss_of_labels_without_the_weights_is_refused(engine: str, tmp_path: Path) -> None:
    def asked(weights: str) -> Any:
        plan = {"epochs": 1, "class_weights": weights}
        return toys.toy("toy_unweighted", engine=engine, plan=plan)

    with pytest.raises(FedstillError, match=r"class_weights"):
        run(asked("balanced"), tmp_path / "refused", data=unequal())
    run(asked("none"), tmp_path / "run", data=unequal())


@pytest.mark.parametrize(
    "weights",
    [[1.0, 2.0], [0.0] * toys.CLASSES, [-1.0] * toys.CLASSES, "balance", [1.0], True],
    ids=str,
)
def test_weights_that_fit_no_class_are_refused(weights: object) -> None:
    with pytest.raises(ConfigError, match=r"class_weights"):
        prepare(resolve(toys.toy("fedavg", plan={"class_weights": weights})), unequal())


def test_a_config_without_weights_does_not_mention_them(tmp_path: Path) -> None:
    assert "class_weights" not in resolve(toys.toy("fedavg")).toml
    assert "class_weights" in resolve(toys.toy(plan={"class_weights": "balanced"})).toml
