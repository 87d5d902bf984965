"""AFL and the stage ``ridge`` against ridge regression in NumPy on the data of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain import (
    HEAD,
    Federation,
    LibraryRun,
    Params,
    all_finite,
    assert_same_model,
    drive,
    experiment,
    ready_for,
    run_of,
)
from torch import Tensor

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.trees import only, same_bits
from fedstill.data.dataset import Dataset
from fedstill.methods.ridge import feature_sums, solved
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

ALL = {"topology": {"clients": 6}}
RIDGE_LAST = {"topology": {"clients": 6, "sampled": 4, "last": "ridge"}}


def ridge_head(
    ready: Prepared,
    body: Mapping[str, Tensor],
    clients: Iterable[int],
    ridge: float = 1.0,
    balanced: bool = False,
) -> Params:
    """The last layer by the normal equations of centred features: the bias has no penalty then."""
    fed = Federation(ready)
    data = [fed.data(client) for client in sorted(clients)]
    inputs = torch.cat([examples.inputs for examples in data])
    labels = torch.cat([examples.labels for examples in data]).numpy()
    features = fed.net(body).body(inputs).detach().numpy()
    targets = np.eye(toys.CLASSES)[labels]
    weights = np.full(len(labels), 1.0)
    if balanced:
        weights = 1 / np.bincount(labels)[labels]
    weights = (weights * len(labels) / weights.sum())[:, None]

    mean_features = (weights * features).sum(0) / len(labels)
    mean_targets = (weights * targets).sum(0) / len(labels)
    centred = features - mean_features
    gram = centred.T @ (weights * centred) + ridge * np.eye(features.shape[1])
    cross = centred.T @ (weights * (targets - mean_targets))
    weight = np.linalg.solve(gram, cross)
    return {
        "head.weight": torch.from_numpy(weight.T.copy()),
        "head.bias": torch.from_numpy(mean_targets - mean_features @ weight),
    }


def head_of(params: Mapping[str, Tensor]) -> Params:
    """The last layer."""
    return only(params, HEAD)


def body_of(params: Mapping[str, Tensor]) -> Params:
    """All but the last layer."""
    return {name: value for name, value in params.items() if name not in HEAD}


# AFL.


@pytest.mark.parametrize(("ridge", "balanced"), [(1.0, False), (100.0, False), (1.0, True)])
def test_afl(ridge: float, balanced: bool) -> None:
    ready = ready_for({"name": "afl", "ridge": ridge, "balanced": balanced}, rounds=1, **ALL)
    start = ready.world.initial(0)

    ours = drive(ready).params

    assert_same_model(head_of(ours), ridge_head(ready, start, range(6), ridge, balanced))
    assert same_bits(body_of(ours), body_of(start))


def test_any_two_splits_of_the_same_data_give_one_layer() -> None:
    skewed = {"kind": "dirichlet", "alpha": 0.1, "min_size": 4}
    of_six = run_of("afl", rounds=1, topology={"clients": 6}, partition=skewed)
    of_three = run_of("afl", rounds=1, topology={"clients": 3}, partition="iid")

    assert_same_model(of_six.params, of_three.params)


def test_clients_add_their_examples_once_whenever_they_take_part() -> None:
    ready = ready_for("afl", rounds=4, topology={"clients": 6, "sampled": 2})
    fed = Federation(ready, sampled=2)

    ours = drive(ready)

    for round_index in (1, 2, 3, 4):
        expected = ridge_head(ready, fed.start, fed.participants(round_index))
        assert_same_model(head_of(ours.states[round_index].params), expected)
    participants = fed.participants(4)
    assert len(participants) < 8, "some came again"
    assert {client for client in range(6) if ours.remembered(client)} == participants


def test_a_client_that_has_sent_everything_adds_nothing() -> None:
    states = run_of("afl", rounds=2, **ALL).states

    assert same_bits(states[1].params, states[2].params)


@pytest.mark.parametrize(("past", "task"), [("gone", 1.0), ("kept", 0.0)])
def test_tasks_one_after_another_give_the_layer_of_all_at_once(past: str, task: float) -> None:
    """Clients remember the task whose examples they have sent."""
    stream = {"kind": "classes", "tasks": 2, "past": past}
    ours = run_of("afl", rounds=4, **ALL, stream=stream)
    at_once = run_of("afl", rounds=1, **ALL).params

    assert_same_model(ours.params, at_once)
    after_first_task = ours.states[2].params["head.weight"]
    assert float((after_first_task - at_once["head.weight"]).norm()) > 0.01
    assert {ours.remembered(client).number("task") for client in range(6)} == {task}


def unbalanced_blobs() -> Dataset:
    """60 examples of class 0, and fewer of each further class: 12 of class 4."""
    blobs = toys.blobs()
    number_in_class = torch.arange(300) // 5
    is_used = number_in_class % (1 + blobs.train.labels) == 0
    return replace(blobs, train=blobs.train.take(is_used.nonzero().flatten()))


@pytest.mark.parametrize("fields", [{}, {"past": "kept"}, {"join": 0.5, "past": "gone"}], ids=str)
def test_balanced_classes_have_equal_weights_over_all_tasks(
    fields: dict[str, object],
) -> None:
    """The head at the end is that of all examples that were sent, balanced at once, with the
    penalty of that many.
    """
    data = unbalanced_blobs()
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 4], [1, 2, 3]], **fields}

    def ready_afl(data: Dataset, **changes: object) -> Prepared:
        afl = {"name": "afl", "balanced": True}
        return in_double(prepare(resolve(experiment(afl, partition="iid", **ALL, **changes)), data))

    ready = ready_afl(data, stream=stream)
    tasks = ready.sites.tasks
    assert tasks is not None
    sent_positions = []
    for client, positions in enumerate(ready.sites.split.tensors()):
        tasks_of_client = tasks.stream.tasks_until(client, 2)
        sent_positions += [positions[tasks.of_task(positions, task)] for task in tasks_of_client]
    sent_data = replace(data, train=data.train.take(torch.cat(sent_positions)))

    ours = drive(ready).params
    at_once = drive(ready_afl(sent_data, rounds=1)).params

    assert_same_model(head_of(ours), head_of(at_once))


@pytest.mark.parametrize(
    "stream",
    [
        {"kind": "drift"},
        {"kind": "domains", "transform": "invert"},
        {"kind": "classes", "stay": 0.5},
    ],
)
def test_balanced_classes_are_refused_where_streams_remove_examples(
    stream: dict[str, object],
) -> None:
    """Where they stay, they are accepted."""
    afl = {"name": "afl", "balanced": True}
    with pytest.raises(IncompatibleMethod, match=r"method\.balanced = false"):
        ready_for(afl, **ALL, stream={"tasks": 2, **stream})

    ready_for(afl, **ALL, stream={"tasks": 2, "past": "kept", **stream})


# Sums of features.


def test_the_papers_law_of_merging_two_solved_layers_is_a_sum() -> None:
    """Theorem 1 of AFL, for clients a and b."""
    draw = torch.Generator().manual_seed(0)
    inverse = torch.linalg.inv
    identity = torch.eye(6, dtype=torch.float64)
    x_a = torch.randn(40, 6, generator=draw, dtype=torch.float64)
    x_b = torch.randn(40, 6, generator=draw, dtype=torch.float64)
    y_a = torch.eye(3, dtype=torch.float64)[torch.randint(3, (40,), generator=draw)]
    y_b = torch.eye(3, dtype=torch.float64)[torch.randint(3, (40,), generator=draw)]
    c_a = x_a.T @ x_a + identity
    c_b = x_b.T @ x_b + identity
    w_a = torch.linalg.solve(c_a, x_a.T @ y_a)
    w_b = torch.linalg.solve(c_b, x_b.T @ y_b)

    u = identity - inverse(c_a) @ c_b @ (identity - inverse(c_a + c_b) @ c_b)
    v = identity - inverse(c_b) @ c_a @ (identity - inverse(c_a + c_b) @ c_a)
    merged = u @ w_a + v @ w_b

    of_sums = torch.linalg.solve(c_a + c_b, x_a.T @ y_a + x_b.T @ y_b)
    torch.testing.assert_close(merged, of_sums, rtol=NEAR, atol=NEAR)


def test_more_features_than_examples_have_a_solution_for_every_penalty_and_none_without() -> None:
    """A client without examples adds nothing to the sums."""
    features = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 2])

    sums = feature_sums(features, labels, 3)
    sums_of_nothing = feature_sums(features[:0], labels[:0], 3)

    assert sums.tensor("cross")[-1].tolist() == [1.0, 1.0, 2.0]
    assert all_finite(solved(**sums, ridge=1e-3))
    with pytest.raises(ConfigError, match=r"method\.ridge"):
        solved(**sums, ridge=0.0)
    for group in sums:
        assert not sums_of_nothing.tensor(group).any()
        total = sums_of_nothing.tensor(group) + sums.tensor(group)
        assert torch.equal(total, sums.tensor(group))


def test_impossible_sums_are_refused_without_advice_that_is_followed_already() -> None:
    """A penalty is advised only where none is set."""
    sums = feature_sums(torch.eye(3), torch.tensor([0, 1, 1]), 2)
    negative_sums = [-value for value in sums.values()]

    with pytest.raises(ConfigError, match="ridge") as without_penalty:
        solved(*negative_sums, ridge=0.0)
    with pytest.raises(ConfigError, match="ridge") as with_penalty:
        solved(*negative_sums, ridge=1.0)

    assert "method.ridge above 0" in str(without_penalty.value)
    assert "above 0" not in str(with_penalty.value)


# The stage ``ridge`` after other methods.


@pytest.mark.parametrize("method", ["fedavg", "feddc"])
def test_any_method_may_end_with_a_ridge_stage(method: str) -> None:
    """Only the head differs, and the server's state has nothing new."""
    ready = ready_for(method, **RIDGE_LAST)

    ours = drive(ready).final
    without = run_of(method).final

    assert same_bits(body_of(ours.params), body_of(without.params))
    assert_same_model(head_of(ours.params), ridge_head(ready, without.params, range(6)))
    assert ours.extra.keys() == without.extra.keys()


def test_a_ridge_stage_leaves_clients_memories_as_they_are() -> None:
    def memory_groups(run: LibraryRun) -> list[set[str]]:
        return [set(run.remembered(client)) for client in range(6)]

    assert memory_groups(run_of("feddyn", **RIDGE_LAST)) == memory_groups(run_of("feddyn"))


def test_a_run_with_a_ridge_stage_records_its_plan_and_learns(tmp_path: Path) -> None:
    toy = toys.toy("fedavg", **RIDGE_LAST, plan={"epochs": 1, "lr": 0.05})

    result = run(toy, tmp_path / "run", toys.blobs())

    assert result.history[-1]["accuracy"] > 0.5
    assert "[plan.ridge]" in (tmp_path / "run/config.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "lg_fedavg"},
            "topology.last = 'ridge' with method lg_fedavg: its clients have models of their own",
        ),
        ({"method": "fd"}, "its clients have models of their own"),
        ({"model": {"name": "sphere_mlp", "hidden": (8,)}}, "is no linear layer with a bias"),
    ],
)
def test_a_ridge_stage_without_a_linear_head_is_refused(
    changes: dict[str, object], message: str
) -> None:
    topology = {"clients": 6, "last": "ridge"}
    toy = toys.toy(**{"method": "fedavg", **changes, "topology": topology})
    with pytest.raises(IncompatibleMethod, match=message):
        prepare(resolve(toy), toys.blobs())


def test_a_head_without_a_bias_is_refused_by_afl_too() -> None:
    toy = toys.toy("afl", model={"name": "sphere_mlp", "hidden": (8,)})
    with pytest.raises(IncompatibleMethod, match=r"afl .*linear layer"):
        prepare(resolve(toy), toys.blobs())
