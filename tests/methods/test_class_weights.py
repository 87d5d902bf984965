"""Class weights: what holds of them for every method, and the algorithm written out plainly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import stacking
import torch
from all_methods import METHODS, built
from plain import Federation, Loss, assert_same_model, average, drive, experiment
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

import toys
from double import NEAR, in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, FedstillError
from fedstill.core.label_counts import LABEL_TOTALS, balanced_weights
from fedstill.core.method import ClientWork
from fedstill.core.records import Reply, Step, TrainingStart
from fedstill.core.registry import register
from fedstill.core.trees import same_bits
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from loops import Collecting, context_of, states_after
from run_bits import assert_same_bits, bits, stopped

TRAINED_WITHOUT_LABELS = {"afl"}
"""Methods that train by no loss of labels: their clients send what a head is solved from."""

WITHOUT_PERTURBATION = {
    "fedsam": {"name": "fedsam", "rho": 0.0},
    "fedsol": {"name": "fedsol", "rho": 0.0},
}
"""Methods that take the loss at a point which the weights move, with fields that do not move it."""

ONES = (1.0,) * toys.CLASSES
WEIGHTS = (0.25, 1.0, 0.0, 0.0, 0.5)
COMPLEMENT = tuple(1.0 - weight for weight in WEIGHTS)
"""The two sum to ones."""

ALL_KINDS = pytest.mark.parametrize(
    "weights", ["balanced", "balanced_overall", WEIGHTS], ids=["balanced", "overall", "fixed"]
)


@functools.cache
def unequal() -> Dataset:
    """Blobs of which the first class is the most frequent, and the last the rarest."""
    blobs = toys.blobs(size=160)
    labels = blobs.train.labels
    number_in_class = torch.zeros_like(labels)
    for c in range(toys.CLASSES):
        of_class = labels == c
        number_in_class[of_class] = torch.arange(int(of_class.sum()))
    is_used = number_in_class < torch.tensor([32, 16, 12, 8, 6])[labels]
    train = blobs.train.take(is_used.nonzero().flatten())
    return from_tensors(
        "unequal",
        (train.values, train.labels),
        (blobs.test.values, blobs.test.labels),
        classes=list(blobs.classes),
    )


# Every method.


@dataclass(frozen=True)
class FinishedRounds:
    """What the rounds of a run end with."""

    tensors: dict[str, Tensor]
    """The last state, by name."""
    replies: list[Reply]

    @property
    def losses(self) -> dict[tuple[int, int, int, str], float]:
        """The mean of each term of an objective, by round, stage, client and name."""
        losses = {}
        for reply in self.replies:
            for name, value in reply.metrics.get("loss", {}).items():
                losses[reply.round, reply.stage, reply.client, name] = value
        return losses


def ready(name: str, weights: object, engine: str = "serial", **plan: Any) -> Prepared:
    """A round of a method whose plans all have these class weights, or two where the first one does
    not have all terms.
    """
    changes: dict[str, Any] = {"rounds": 1, "topology": {"clients": 4}}
    if name in WITHOUT_PERTURBATION:
        changes["method"] = WITHOUT_PERTURBATION[name]
    if name == "fedgen":  # from the second round on clients learn from the generator
        changes["rounds"] = 2
    if built(name).schedule.get("task_end"):  # the second task has what is kept of the first
        changes |= {"rounds": 2, "stream": {"kind": "classes", "tasks": 2}}
    base = stacking.experiment(name, engine, **changes)
    plans = {**base.plan, "epochs": 1, "class_weights": weights, **plan}
    if name == "fedgen":
        plans["generate"] = {"lr": plans["lr"]}
    return prepare(resolve(replace(base, plan=plans)), unequal())


def rounds(prepared: Prepared) -> FinishedRounds:
    """Run all rounds; nothing may be refused."""
    recorder = Collecting()
    context = context_of(prepared, recorder=recorder)
    state = states_after(context, prepared.settings.rounds)[-1]
    assert not [refusal for result in recorder.results for refusal in result.refused]
    replies = [reply for result in recorder.results for reply in result.accepted]
    return FinishedRounds(stacking.tensors(state), replies)


@functools.cache
def unweighted(name: str) -> FinishedRounds:
    """A method's run without class weights."""
    return rounds(ready(name, "none"))


@pytest.mark.parametrize("name", METHODS)
def test_class_weights_of_one_change_no_bit(name: str) -> None:
    with_ones = rounds(ready(name, ONES))

    assert same_bits(with_ones.tensors, unweighted(name).tensors)
    assert with_ones.losses == unweighted(name).losses


def losses_of_a_still_model(name: str, weights: object) -> dict[tuple[int, int, int, str], float]:
    """The losses at a learning rate that is so small that models do not change."""
    still = {"lr": 1e-12, "momentum": 0.0, "weight_decay": 0.0, "batch": 32}
    return rounds(in_double(ready(name, weights, **still))).losses


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_labels_is_linear_in_the_weights(name: str) -> None:
    """A class with weight 0 then adds nothing by its labels; the other terms stay as they are."""
    with_ones = losses_of_a_still_model(name, ONES)
    with_weights = losses_of_a_still_model(name, WEIGHTS)
    with_complement = losses_of_a_still_model(name, COMPLEMENT)

    assert with_ones.keys() == with_weights.keys() == with_complement.keys()
    weighted_terms = set()
    for key, value in with_ones.items():
        term = key[-1]
        if (name, term) == ("glfc_local", "old"):
            continue  # of labels in part; test_glfc_local.py has it by hand
        expected = pytest.approx(value, rel=1e-6, abs=1e-9)
        if with_weights[key] == expected and with_complement[key] == expected:
            continue
        weighted_terms.add(term)
        assert with_weights[key] + with_complement[key] == expected, key
    assert bool(weighted_terms) == (name not in TRAINED_WITHOUT_LABELS)
    if name == "fedgen":
        assert "generated" in weighted_terms


@pytest.mark.parametrize("name", sorted(set(METHODS) - TRAINED_WITHOUT_LABELS))
def test_balanced_weights_change_what_is_learnt(name: str) -> None:
    balanced = rounds(ready(name, "balanced"))

    assert not same_bits(balanced.tensors, unweighted(name).tensors)


@ALL_KINDS
@pytest.mark.parametrize("name", ["fedavg", "fedntd", "moon", "fedgen", "hiper_fedkd"])
def test_in_a_stack_each_client_has_its_own_class_weights(name: str, weights: object) -> None:
    serial = rounds(in_double(ready(name, weights, "serial")))
    stacked = rounds(in_double(ready(name, weights, "vectorised")))

    for key, value in serial.tensors.items():
        torch.testing.assert_close(stacked.tensors[key], value, rtol=NEAR, atol=NEAR)


@needs_flower
@pytest.mark.parametrize("weights", ["balanced", "balanced_overall"])
def test_class_weights_give_the_same_bits_over_flower(weights: str, tmp_path: Path) -> None:
    plan = {"epochs": 1, "batch": 20, "class_weights": weights}

    def model_of(engine: str) -> dict[str, Tensor]:
        toy = toys.toy(plan=plan, engine=engine)
        return dict(run(toy, tmp_path / engine, data=unequal()).model)

    assert same_bits(model_of("flower"), model_of("serial"))


# The algorithm written out.


def weighted_ce(weights: Tensor) -> Loss:
    """Cross-entropy in which each example counts by its label's weight."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        return (losses * weights[y]).sum() / len(y)

    return loss


def by_scikit_learn(labels: Tensor) -> Tensor:
    """The balanced weights, 0 for a class without examples."""
    classes = labels.unique().numpy()
    weights = torch.zeros(toys.CLASSES, dtype=torch.float64)
    values = compute_class_weight("balanced", classes=classes, y=labels.numpy())
    weights[classes] = torch.from_numpy(values)
    return weights


def loss_by_client(fed: Federation, weights: object) -> Callable[[int], Loss]:
    """The loss of each client."""
    all_labels = torch.cat([fed.data(client).labels for client in fed.clients])

    def loss_of(client: int) -> Loss:
        if weights == "balanced":
            return weighted_ce(by_scikit_learn(fed.data(client).labels))
        if weights == "balanced_overall":
            return weighted_ce(by_scikit_learn(all_labels))
        return weighted_ce(torch.tensor(weights, dtype=torch.float64))

    return loss_of


@ALL_KINDS
@pytest.mark.parametrize("name", ["fedavg", "fedseq"])
def test_two_rounds_are_those_of_the_algorithm_written_out(name: str, weights: object) -> None:
    """In parallel rounds, and on a chain."""
    toy = experiment(name, plan={"class_weights": weights})
    prepared = in_double(prepare(resolve(toy), unequal()))
    fed = Federation(prepared)
    loss_of = loss_by_client(fed, weights)
    params = fed.start
    for round_index in (1, 2):
        if name == "fedseq":
            for link, client in enumerate(fed.chain(round_index)):
                loss = loss_of(client)
                params = fed.fit(params, loss, round_index, client, stage=link).params
        else:
            cohort = fed.cohort(round_index)
            results = [fed.fit(params, loss_of(c), round_index, c) for c in cohort]
            params = average(results)

    assert_same_model(drive(prepared).params, params)


def test_balanced_weights_have_mean_one_over_the_examples() -> None:
    """A class without examples has weight 0."""
    counts = torch.tensor([7, 0, 2, 1])

    weights = balanced_weights(counts)

    assert float((weights * counts).sum() / counts.sum()) == pytest.approx(1)
    assert float(weights[1]) == 0
    assert balanced_weights(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


# Runs.


@ALL_KINDS
def test_a_resumed_run_has_the_same_bits(weights: object, tmp_path: Path) -> None:
    toy = toys.toy("fedntd", plan={"epochs": 1, "batch": 20, "class_weights": weights})
    run(toy, tmp_path / "uninterrupted", data=unequal())

    folder = stopped(toy, tmp_path / "stopped", stages=2, data=unequal())
    resume(folder, data=unequal())

    assert_same_bits(bits(folder), bits(tmp_path / "uninterrupted"))


@dataclass(frozen=True)
class WatchedWork(ClientWork):
    """Training that records what a client is sent and sees."""

    groups: set[str] = field(default_factory=set)
    label_totals: set[tuple[int, ...]] = field(default_factory=set)

    def begin(self, payload: Any, client_state: Any, view: Any, world: Any) -> TrainingStart:
        self.groups.update(payload)
        self.label_totals.add(tuple(view.label_totals.tolist()))
        return super().begin(payload, client_state, view, world)


def test_label_totals_are_sent_where_they_are_needed() -> None:
    """After the census. The work of clients does not see them in its payload."""
    work = WatchedWork()

    class Watched(FedAvg):
        def work(self, stage: object) -> ClientWork:
            return work

    register("method", "toy_watched")(Watched)
    toy = experiment("toy_watched", plan={"class_weights": "balanced_overall"})
    prepared = prepare(resolve(toy), unequal())
    recorder = Collecting()

    states_after(context_of(prepared, recorder=recorder), 2)

    counts = torch.bincount(prepared.sites.train.labels, minlength=toys.CLASSES)
    assert work.groups == {"params"}
    assert work.label_totals == {tuple(counts.tolist())}
    census, *stages = recorder.results
    assert census.stage.name == "census"
    assert not any(LABEL_TOTALS in payload for payload in census.payloads.values())
    for result in stages:
        assert all(LABEL_TOTALS in payload for payload in result.payloads.values())


class Unweighted(ClientWork):
    """Training whose loss of labels does not call ``step.weighted``."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        return {"ce": cross_entropy(step.logits(), step.y)}


@register("method", "toy_unweighted")
class OfUnweighted(FedAvg):
    """FedAvg with such training."""

    def work(self, stage: object) -> ClientWork:
        return Unweighted()


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_a_loss_of_labels_without_the_weights_is_refused(engine: str, tmp_path: Path) -> None:
    """Where no weights are set, it is accepted."""

    def toy(weights: str) -> Experiment:
        plan = {"epochs": 1, "class_weights": weights}
        return toys.toy("toy_unweighted", engine=engine, plan=plan)

    with pytest.raises(FedstillError, match=r"class_weights"):
        run(toy("balanced"), tmp_path / "refused", data=unequal())
    run(toy("none"), tmp_path / "run", data=unequal())


@pytest.mark.parametrize(
    "weights",
    [[1.0, 2.0], [0.0] * toys.CLASSES, [-1.0] * toys.CLASSES, "balance", [1.0], True],
    ids=str,
)
def test_weights_that_fit_no_class_are_refused(weights: object) -> None:
    with pytest.raises(ConfigError, match=r"class_weights"):
        prepare(resolve(toys.toy("fedavg", plan={"class_weights": weights})), unequal())


def test_a_config_without_weights_does_not_mention_them() -> None:
    assert "class_weights" not in resolve(toys.toy("fedavg")).toml
    assert "class_weights" in resolve(toys.toy(plan={"class_weights": "balanced"})).toml


def test_ccvr_weighs_the_classes_that_have_examples_in_the_last_task() -> None:
    def head_after(weights: tuple[float, ...]) -> dict[str, Tensor]:
        toy = toys.toy(
            "ccvr",
            rounds=2,
            stream={"kind": "classes", "tasks": 2, "order": ((0, 1), (2, 3, 4))},
            plan={"epochs": 1, "batch": 20, "calibrate": {"class_weights": weights}},
        )
        state = states_after(context_of(prepare(resolve(toy), toys.blobs())), 2)[-1]
        return {name: state.params[name] for name in ("head.weight", "head.bias")}

    head = head_after((1.0, 1.0, 4.0, 1.0, 0.5))
    assert same_bits(head_after((7.0, 0.0, 4.0, 1.0, 0.5)), head)
    assert not same_bits(head_after((1.0, 1.0, 4.0, 1.0, 2.0)), head)
