"""Analytic learning: whatever the split and the order of tasks, the layer is that of ridge
regression on all data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_tasks import THREE_TASKS, experiment_over_tasks, run_over_tasks
from plain import assert_same_model
from torch import Tensor

import toys
from double import NEAR
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.trees import only
from fedstill.methods import ridge
from fedstill.methods.analytic import without_negative
from fedstill.models import contract
from fedstill.models.adapted import random_directions
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

RIDGE = 3.0
ANALYTIC = {"name": "analytic", "width": 24, "ridge": RIDGE}
SIX_CLIENTS = {"topology": {"clients": 6}}
UNTRAINED = {"plan": {"epochs": 0}}

HEAD = ("head.weight", "head.bias")


def expanded_features(ready: Prepared, params: Mapping[str, Tensor], width: int) -> np.ndarray:
    """The random features of all training data; with width 0, the body's features."""
    body = {name: value for name, value in params.items() if "body" in name}
    if width:  # the library's network has a layer of random features after its body
        body = {name.replace("body.0.", "body.", 1): value for name, value in body.items()}
    network = contract.build(ready.world.model(0)).double()
    network.load_state_dict({**network.state_dict(), **body})
    inputs = ready.sites.inputs.plain(ready.sites.train.values)
    features = network.get_submodule("body")(inputs).detach().numpy()
    if not width:
        return features
    directions = random_directions(features.shape[1], width).double().numpy()
    return np.maximum(features @ directions, 0)


def ridge_head(features: np.ndarray, labels: Tensor) -> dict[str, Tensor]:
    """The layer and its bias by the normal equations of centred features."""
    targets = np.eye(toys.CLASSES)[labels.numpy()]
    centred = features - features.mean(0)
    gram = centred.T @ centred + RIDGE * np.eye(features.shape[1])
    weight = np.linalg.solve(gram, centred.T @ (targets - targets.mean(0)))
    bias = targets.mean(0) - features.mean(0) @ weight
    return {"head.weight": torch.from_numpy(weight.T), "head.bias": torch.from_numpy(bias)}


@pytest.mark.parametrize("width", [0, 24])
def test_the_layer_after_all_tasks_is_the_ridge_solution_of_all_data(width: int) -> None:
    method = {**ANALYTIC, "width": width, "cosine": False}

    ours = run_over_tasks(method, **SIX_CLIENTS)

    features = expanded_features(ours.ready, ours.final.params, width)
    expected = ridge_head(features, ours.ready.sites.train.labels)
    assert_same_model(only(ours.final.params, HEAD), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"partition": {"kind": "dirichlet", "alpha": 0.5, "min_size": 1}},
        {"topology": {"clients": 3}},
        {"stream": {**THREE_TASKS, "order": [[4, 2], [1], [3, 0]]}},
        {"stream": {**THREE_TASKS, "past": "kept"}},
        {"topology": {"kind": "sequential", "clients": 6}},
    ],
    ids=["split", "clients", "order", "kept", "chain"],
)
def test_the_layer_depends_neither_on_the_split_nor_on_the_order_of_tasks_or_clients(
    changes: dict[str, Any],
) -> None:
    """Of an untrained body, which is the same in all."""
    expected = run_over_tasks(ANALYTIC, **SIX_CLIENTS, **UNTRAINED).final

    ours = run_over_tasks(ANALYTIC, **{**SIX_CLIENTS, **UNTRAINED, **changes}).final

    assert_same_model(ours.params, expected.params)


def test_without_random_features_and_training_it_is_afl() -> None:
    afl = run_over_tasks({"name": "afl", "ridge": RIDGE}, **SIX_CLIENTS)
    without_features = {**ANALYTIC, "width": 0, "cosine": False}

    ours = run_over_tasks(without_features, **SIX_CLIENTS, **UNTRAINED)

    assert_same_model(only(ours.final.params, afl.final.params), afl.final.params)


def test_cosine_scales_the_column_of_each_class_to_length_one() -> None:
    """The column and its bias."""

    def columns(cosine: bool) -> Tensor:
        params = run_over_tasks({**ANALYTIC, "cosine": cosine}, **SIX_CLIENTS).final.params
        return torch.cat([params["head.weight"], params["head.bias"].unsqueeze(1)], 1)

    plain_columns = columns(cosine=False)
    expected = plain_columns / plain_columns.norm(dim=1, keepdim=True)
    torch.testing.assert_close(columns(cosine=True), expected, rtol=1e-7, atol=NEAR)


def test_the_network_is_trained_in_the_first_task_and_then_frozen(tmp_path: Path) -> None:
    """Clients are idle in the later tasks' training."""
    ours = run_over_tasks("analytic", **SIX_CLIENTS)
    fedavg = run_over_tasks("fedavg", **SIX_CLIENTS)
    for name, value in fedavg.states[0].params.items():
        if name.startswith("body."):
            our_name = name.replace("body.", "body.0.", 1)
            assert torch.equal(ours.states[0].params[our_name], value)
            assert torch.equal(ours.final.params[our_name], value)

    run(experiment_over_tasks({"name": "analytic", "width": 24}), tmp_path / "run", toys.blobs())
    for event in read_journal(tmp_path / "run/journal.jsonl"):
        if event["event"] == "client" and event["name"] == "train":
            assert ("idle" in event) == (event["round"] > 1)


def test_classes_of_later_tasks_have_columns_of_zeros() -> None:
    ours = run_over_tasks({"name": "analytic", "width": 24}, **SIX_CLIENTS)

    to_come = sorted(set(range(toys.CLASSES)) - set(ours.ready.world.stream.seen(0)))
    assert to_come
    assert not ours.states[0].params["head.weight"][to_come].any()
    assert (ours.final.params["head.weight"] != 0).any(1).all()


def test_a_network_without_a_linear_head_is_refused() -> None:
    experiment = experiment_over_tasks("analytic", model=toys.on_simplex())
    with pytest.raises(IncompatibleMethod, match="linear layer"):
        prepare(resolve(experiment), toys.blobs())


# Groups of examples, whose sums hide single ones.


def test_groups_of_one_example_give_the_exact_layer() -> None:
    method = {"name": "analytic", "width": 6, "ridge": RIDGE, "cosine": False}

    exact = run_over_tasks(method, **SIX_CLIENTS).final
    of_ones = run_over_tasks({**method, "groups": 60}, **SIX_CLIENTS).final

    assert_same_model(of_ones.params, exact.params)
    for group in ("gram", "cross"):
        torch.testing.assert_close(
            of_ones.extra.tensor(group), exact.extra.tensor(group), rtol=1e-10, atol=NEAR
        )


def test_the_estimate_from_groups_is_unbiased() -> None:
    """Within four standard errors."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(12, 3, generator=draw, dtype=torch.float64) + 1
    labels = torch.arange(12) % 2
    expected = ridge.feature_sums(features, labels, 2).tensor("gram")

    estimates = []
    for _ in range(4000):
        groups = torch.randperm(12, generator=draw) % 4
        sums = ridge.group_sums(features, labels, 2, groups, 4)
        estimates.append(ridge.estimated_gram(*sums.values()))

    values = torch.stack(estimates)
    standard_error = (values.std(0) / len(values) ** 0.5).clamp(min=1e-9)
    errors = (values.mean(0) - expected).abs() / standard_error
    assert float(errors.max()) < 4


def test_groups_are_counted_once_and_refuse_streams_that_repeat_examples() -> None:
    """Also where clients come to a task late."""
    late = {**SIX_CLIENTS, "stream": {**THREE_TASKS, "lag": 2}}
    method = {"name": "analytic", "width": 0}

    without = run_over_tasks({**method, "groups": 0}, **late).final.extra
    in_groups = run_over_tasks({**method, "groups": 200}, **late).final.extra

    cross = in_groups.tensor("cross")
    torch.testing.assert_close(cross, without.tensor("cross"), rtol=1e-10, atol=NEAR)
    with_past = {**SIX_CLIENTS, "stream": {**THREE_TASKS, "past": "kept"}}
    with pytest.raises(IncompatibleMethod, match="each example once"):
        run_over_tasks({"name": "analytic", "groups": 5}, **with_past)


def test_negative_eigenvalues_of_an_estimate_are_set_to_zero() -> None:
    """Its eigenvalues are 3 and -1."""
    estimate = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)

    expected = torch.full((2, 2), 1.5, dtype=torch.float64)
    torch.testing.assert_close(without_negative(estimate), expected)
