"""Replay: what is kept, what of it is finetuning and what training on all of the past, and its
objective by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_tasks import (
    RunOverTasks,
    experiment_over_tasks,
    in_float32,
    model_hash,
    run_over_tasks,
)
from scipy.special import log_softmax
from single_step import LOGISTIC, logits_by_hand, terms_of
from torch import Tensor
from torch.nn.functional import normalize

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Examples, Payload, TrainingStart
from fedstill.methods.replay import Rehearse, Replay, herded, lowest, merged
from fedstill.models.contract import initial
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

STREAM = {"kind": "classes", "tasks": 3, "head": "seen"}
UNIFORM = {"aggregation": "uniform"}


def run_replay(**fields: Any) -> RunOverTasks:
    """A run of three tasks in float32."""
    return run_over_tasks({"name": "replay", **fields}, precision_of=in_float32, stream=STREAM)


# Equivalent methods.


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_with_no_memory_it_is_fedavg(engine: str, tmp_path: Path) -> None:
    """And with one, it is not."""

    def hash_of(method: dict[str, Any]) -> str:
        return model_hash(tmp_path / str(method), method, stream=STREAM, engine=engine)

    fedavg = hash_of({"name": "fedavg"})
    assert hash_of({"name": "replay", "size": 0}) == fedavg
    assert hash_of({"name": "replay", "size": 5}) != fedavg


def test_in_the_first_task_it_is_fedavg(tmp_path: Path) -> None:
    """Whatever it keeps of it."""
    fedavg = model_hash(tmp_path / "fedavg", "fedavg", stream={})

    for fields in ({}, {"alpha": 0.5, "beta": 0.5}, {"nearest_mean": True}, {"choose": "herding"}):
        replay = model_hash(tmp_path / str(fields), {"name": "replay", **fields}, stream={})
        assert replay == fedavg


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
@pytest.mark.parametrize("head", ["all", "seen"])
def test_a_memory_of_all_examples_is_training_on_all_past_data(
    head: str, engine: str, tmp_path: Path
) -> None:
    """The same examples in the same order: the bound ``past = "kept"``, to the bit."""
    stream = {**STREAM, "head": head}
    with_past = {**stream, "past": "kept"}
    fedavg = {"name": "fedavg", **UNIFORM}
    replay = {"name": "replay", "size": 300, **UNIFORM}

    bound = model_hash(tmp_path / "bound", fedavg, stream=with_past, engine=engine)

    assert model_hash(tmp_path / "replay", replay, stream=stream, engine=engine) == bound
    assert model_hash(tmp_path / "both", replay, stream=with_past, engine=engine) == bound


# What is kept.


def test_the_memory_holds_the_examples_with_the_lowest_keys() -> None:
    """Of the last task nothing is kept: no task follows."""
    run = run_replay(size=12)

    ready = run.ready
    sites = ready.sites
    assert sites.tasks is not None
    for client in range(ready.world.clients):
        keys = []
        values = []
        for task in range(2):
            positions = sites.positions(client)
            of_task = sites.train.take(positions[sites.tasks.of_task(positions, task)])
            draw = generator(seed_for(ready.world.seed, task, 0, client, "reservoir"))
            keys.append(torch.rand(len(of_task), generator=draw, dtype=torch.float64))
            values.append(of_task.values)
        lowest_keys = torch.cat(keys).argsort()[:12].sort().values

        memory = run.memory.load(client)
        assert torch.equal(memory.tensor("values"), torch.cat(values)[lowest_keys])
        assert set(memory.tensor("labels").tolist()) <= set(ready.world.stream.seen(1))


@pytest.mark.parametrize("by_class", [False, True])
def test_merging_groups_one_by_one_is_merging_them_at_once(by_class: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(4, (60,), generator=draw)
    keys = torch.rand(60, generator=draw, dtype=torch.float64)
    examples = Payload(labels=labels, keys=keys, places=torch.arange(60))
    first = Payload({group: examples.tensor(group)[:25] for group in examples})
    second = Payload({group: examples.tensor(group)[25:] for group in examples})

    at_once = merged(Payload(), examples, 13, by_class).tensor("places")
    of_first = merged(Payload(), first, 13, by_class)
    one_by_one = merged(of_first, second, 13, by_class).tensor("places")

    assert torch.equal(at_once, one_by_one)
    assert len(at_once) == 13


def test_by_class_equally_many_of_each_are_kept() -> None:
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(4, (60,), generator=draw)
    keys = torch.rand(60, generator=draw, dtype=torch.float64)

    chosen = labels[lowest(keys, labels, 13, by_class=True)]

    assert sorted(chosen.bincount().tolist()) == [3, 3, 3, 4]


def herded_by_hand(unit_features: np.ndarray, count: int) -> list[int]:
    """The rows that, one after another, bring the mean of the chosen ones nearest to the mean."""
    mean = unit_features.mean(0)
    chosen: list[int] = []
    for _ in range(count):
        distances = {}
        for row in range(len(unit_features)):
            if row not in chosen:
                mean_with_row = unit_features[[*chosen, row]].mean(0)
                distances[row] = float(np.linalg.norm(mean - mean_with_row))
        chosen.append(min(distances, key=distances.__getitem__))
    return chosen


def test_herding_chooses_the_examples_whose_mean_is_nearest() -> None:
    features = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1, 1])

    keys = herded(features, labels, 3)

    unit_features = normalize(features, dim=1).double().numpy()
    for c in (0, 1):
        of_class = (labels == c).nonzero().flatten()
        rows = herded_by_hand(unit_features[of_class.numpy()], 3)
        order = keys[of_class].argsort(stable=True)[:3]
        assert order.tolist() == rows


# The objective.


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_the_objective_by_hand(alpha: float) -> None:
    """Over all batches it is the mean over own examples, and beta and alpha times those over kept
    ones.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, 1, 4, 4, generator=draw)
    y = torch.tensor([3, 4, 3, 3, 4, 4, 0, 2, 0])
    stored_logits = torch.randn(4, 5, generator=draw)
    new = 6  # the last three are kept ones
    is_seen = torch.tensor([True, False, True, True, True])
    constants = {
        "new": new,
        "outputs": is_seen,
        "new_factor": 9 / new,
        "kept_factor": 3.0,
        "logits": stored_logits,
        "stored_outputs": is_seen,
    }
    in_task = torch.tensor([False, False, False, True, True])
    start = TrainingStart(initial(LOGISTIC, 1), constants=constants, head=in_task)

    terms = terms_of(Rehearse(Replay(alpha=alpha, beta=0.7), 2), start, x, y)

    z = logits_by_hand(start.params, x)
    new_losses = -log_softmax(z[:new, 3:], axis=1)[np.arange(new), y[:new].numpy() - 3]
    columns = np.array([0, 2, 3, 4])
    kept_columns = [0, 1, 0]  # those of labels 0, 2 and 0
    kept_losses = -log_softmax(z[new:, columns], axis=1)[np.arange(3), kept_columns]
    gaps = ((z[new:, columns] - stored_logits[:3].numpy()[:, columns]) ** 2).mean(1)
    expected = new_losses.mean() + 0.7 * kept_losses.mean() + alpha * gaps.mean()
    objective = sum(float(losses.detach().mean()) for losses in terms.values())
    assert objective == pytest.approx(expected, rel=1e-5)


def test_stored_logits_are_those_of_the_model_at_the_tasks_end() -> None:
    run = run_over_tasks(
        {"name": "replay", "size": 300, "alpha": 0.5},
        precision_of=in_float32,
        rounds=2,
        stream={**STREAM, "tasks": 2},
    )

    ready = run.ready
    view = ready.sites.view(0, ready.settings.schedule(1, ready.world)[-1])
    logits = view.logits(run.states[0].params)
    assert torch.equal(run.memory.load(0).tensor("logits"), logits)


# Answers by the nearest class mean.


def class_means_by_hand(run: RunOverTasks) -> np.ndarray:
    """The mean unit feature of each class, over all clients' data and memories."""
    ready = run.ready
    stage = ready.settings.schedule(3, ready.world)[-1]
    unit_features = []
    labels = []
    for client in range(6):
        view = ready.sites.view(client, stage)
        memory = run.memory.load(client)
        remembered = Examples(memory.tensor("values"), memory.tensor("labels"))
        for examples in (view.data, remembered):
            features = view.passes.features(run.final.params, examples)
            unit_features.append(normalize(features, dim=1).double())
            labels.append(examples.labels)
    all_features = torch.cat(unit_features)
    all_labels = torch.cat(labels)
    means = [all_features[all_labels == c].mean(0) for c in range(toys.CLASSES)]
    return torch.stack(means).numpy()


def nearest_mean_answers(run: RunOverTasks) -> Tensor:
    """The answers to the test images by the library's predictor."""
    ready = run.ready
    predictors = ready.settings.method.predictors(run.final, ready.world)
    inputs = ready.sites.inputs.plain(ready.dataset.test.values)
    return predictors["nearest_mean"](inputs).argmax(1)


def test_class_means_are_those_of_all_clients_data_and_memories() -> None:
    run = run_replay(size=9, nearest_mean=True)

    means = class_means_by_hand(run)
    np.testing.assert_allclose(run.final.extra.tensor("means").numpy(), means, atol=1e-6)

    ready = run.ready
    view = ready.sites.view(0, ready.settings.schedule(3, ready.world)[-1])
    test_features = view.passes.features(run.final.params, ready.dataset.test)
    unit_features = normalize(test_features, dim=1).double().numpy()
    unit_means = means / np.linalg.norm(means, axis=1, keepdims=True)
    distances = ((unit_features[:, None] - unit_means) ** 2).sum(2)
    assert nearest_mean_answers(run).tolist() == distances.argmin(1).tolist()


def test_the_accuracy_matrix_of_a_run_is_that_of_the_nearest_means(tmp_path: Path) -> None:
    """The accuracy in each task at the end is that of the nearest means."""
    method = {"name": "replay", "size": 0, "answers": "nearest_mean"}
    run(experiment_over_tasks(method, stream=STREAM), tmp_path / "run", toys.blobs())
    events = read_journal(tmp_path / "run/journal.jsonl")
    classes_by_task = events[0]["stream"]["classes"]
    last_row = [event["row"] for event in events if event["event"] == "task"][-1]

    driven = run_replay(size=0, answers="nearest_mean")

    labels = driven.ready.dataset.test.labels
    is_correct = nearest_mean_answers(driven) == labels
    accuracies = []
    for classes in classes_by_task:
        of_task = torch.isin(labels, torch.tensor(classes))
        accuracies.append(float(is_correct[of_task].double().mean()))
    assert last_row == pytest.approx(accuracies)
    predictors = driven.ready.settings.method.predictors(driven.final, driven.ready.world)
    assert next(iter(predictors)) == "nearest_mean"


def test_a_class_without_a_mean_is_never_answered() -> None:
    run = run_replay(nearest_mean=True)
    ready = run.ready
    known = torch.tensor([True, False, True, False, False])

    state = run.final.next(known=known)
    predictors = ready.settings.method.predictors(state, ready.world)

    inputs = ready.sites.inputs.plain(ready.dataset.test.values)
    answers = predictors["nearest_mean"](inputs).argmax(1)
    assert set(answers.tolist()) <= {0, 2}


# Runs.


def test_the_journal_counts_kept_examples_and_names_idle_clients(tmp_path: Path) -> None:
    """After the last task, nobody keeps anything."""
    experiment = experiment_over_tasks({"name": "replay", "size": 7}, stream=STREAM)

    run(experiment, tmp_path / "run", toys.blobs())

    events = read_journal(tmp_path / "run/journal.jsonl")
    remembering = [e for e in events if e["event"] == "client" and e["name"] == "remember"]
    numbers = [event["kept"] for event in remembering if event["round"] < 3]
    assert numbers == [7] * 12
    assert all(event["idle"] for event in remembering if event["round"] == 3)


def test_clients_of_a_chain_remember_too() -> None:
    chain = {"kind": "sequential", "clients": 6, "sampled": 3}

    run = run_over_tasks(
        {"name": "replay", "size": 5}, precision_of=in_float32, stream=STREAM, topology=chain
    )

    sizes = [len(run.memory.load(client).tensor("labels")) for client in range(6)]
    assert sizes == [5] * 6


def test_unsuited_settings_are_refused() -> None:
    held_out = toys.toy("replay", stream=STREAM, plan={"train": {"validation": 0.1}})
    with pytest.raises(IncompatibleMethod, match=r"set validation = 0.1 in \[plan.remember\]"):
        prepare(resolve(held_out), toys.blobs())

    without_stage = toys.toy("replay", stream=STREAM, topology={"clients": 6, "task_end": ""})
    with pytest.raises(IncompatibleMethod, match=r"set topology.task_end = 'remember'"):
        prepare(resolve(without_stage), toys.blobs())
