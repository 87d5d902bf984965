"""Analytic learning: whatever the split and the order of tasks, the layer is that of ridge
regression on all data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from double import in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import State
from fedstill.methods import ridge
from fedstill.methods.analytic import without_negative
from fedstill.models import contract
from fedstill.models.adapted import random_directions
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from loops import context_of, states_after

STREAM = {"kind": "classes", "tasks": 3}
UNTRAINED = {"plan": {"epochs": 0}}


def gone_through(method: Any, **more: Any) -> tuple[Prepared, list[State]]:
    """A run of three tasks in float64: the state after each round."""
    values = {"partition": {"kind": "iid"}, "stream": STREAM, "topology": {"clients": 6}, **more}
    ready = in_double(prepare(resolve(toys.toy(method, engine="serial", **values)), toys.blobs()))
    return ready, states_after(context_of(ready), ready.world.rounds)[1:]


def central(ready: Prepared, state: State, width: int, ridge: float) -> tuple[Any, Any]:
    """The layer (C, M) and its bias (C,) of all training data at once, by the normal equations of
    centred features.
    """
    body = {
        k.replace("body.0.", "body.", 1) if width else k: v
        for k, v in state.params.items()
        if "body" in k
    }
    spec, train = ready.world.model(0), ready.sites.train
    net = contract.build(spec).double()
    net.load_state_dict({**net.state_dict(), **body})
    x = ready.sites.inputs.plain(train.values)
    h = net.get_submodule("body")(x).detach().numpy()
    e = np.maximum(h @ random_directions(h.shape[1], width).double().numpy(), 0) if width else h
    y = np.eye(toys.CLASSES)[train.labels.numpy()]
    centred = e - e.mean(0)
    weight = np.linalg.solve(
        centred.T @ centred + ridge * np.eye(e.shape[1]), centred.T @ (y - y.mean(0))
    )
    return weight.T, y.mean(0) - e.mean(0) @ weight


@pytest.mark.parametrize("width", [0, 24])
def test_the_layer_after_all_tasks_is_that_of_all_data_at_once(width: int) -> None:
    ready, after = gone_through({"name": "analytic", "width": width, "ridge": 3.0, "cosine": False})
    weight, bias = central(ready, after[-1], width, 3.0)
    np.testing.assert_allclose(after[-1].params["head.weight"].numpy(), weight, atol=1e-9)
    np.testing.assert_allclose(after[-1].params["head.bias"].numpy(), bias, atol=1e-9)


@pytest.mark.parametrize(
    "other",
    [
        {"partition": {"kind": "dirichlet", "alpha": 0.5, "min_size": 1}},
        {"topology": {"clients": 3}},
        {"stream": {**STREAM, "order": [[4, 2], [1], [3, 0]]}},
        {"stream": {**STREAM, "past": "kept"}},
        {"topology": {"kind": "sequential", "clients": 6}},
    ],
    ids=["split", "clients", "order", "kept", "chain"],
)
def test_neither_split_nor_order_of_tasks_or_clients_changes_it(other: dict[str, Any]) -> None:
    """Of an untrained body, which is the same in all."""
    method = {"name": "analytic", "width": 24, "ridge": 3.0}
    (_, one), (_, two) = (
        gone_through(method, **UNTRAINED),
        gone_through(method, **UNTRAINED, **other),
    )
    for name, value in one[-1].params.items():
        torch.testing.assert_close(two[-1].params[name], value, rtol=0, atol=1e-9)


def test_without_random_features_and_training_it_is_afl() -> None:
    (_, afl) = gone_through({"name": "afl", "ridge": 3.0})
    (_, ours) = gone_through(
        {"name": "analytic", "width": 0, "ridge": 3.0, "cosine": False}, **UNTRAINED
    )
    for name, value in afl[-1].params.items():
        torch.testing.assert_close(ours[-1].params[name], value, rtol=0, atol=1e-9)


def test_by_the_cosine_each_class_has_a_column_of_length_one() -> None:
    method = {"name": "analytic", "width": 24, "ridge": 3.0}
    (_, plain), (_, cosine) = (gone_through({**method, "cosine": c}) for c in (False, True))
    both = [
        np.column_stack([s[-1].params["head.weight"], s[-1].params["head.bias"]])
        for s in (plain, cosine)
    ]
    np.testing.assert_allclose(
        both[1], both[0] / np.linalg.norm(both[0], axis=1, keepdims=True), atol=1e-9
    )


def test_the_network_is_trained_in_the_first_task_and_then_frozen(tmp_path: Path) -> None:
    _, after = gone_through("analytic")
    _, fedavg = gone_through("fedavg")
    for name, value in fedavg[0].params.items():
        if name.startswith("body."):
            assert torch.equal(after[0].params[name.replace("body.", "body.0.", 1)], value)
            assert torch.equal(after[-1].params[name.replace("body.", "body.0.", 1)], value)
    method = {"name": "analytic", "width": 24}
    run(toys.toy(method, partition={"kind": "iid"}, stream=STREAM), tmp_path / "run", toys.blobs())
    events = [
        e
        for e in read_journal(tmp_path / "run/journal.jsonl")
        if e.get("name") == "train" and "client" in e
    ]
    assert {e["round"] for e in events if "idle" in e} == {2, 3}
    assert all("idle" in e for e in events if e["round"] > 1)


def test_classes_that_have_not_come_have_no_column() -> None:
    ready, after = gone_through({"name": "analytic", "width": 24})
    unseen = sorted(set(range(toys.CLASSES)) - set(ready.world.stream.seen(0)))
    assert (after[0].params["head.weight"][unseen] == 0).all()
    assert not (after[-1].params["head.weight"] == 0).all(1).any()


def test_a_network_without_a_linear_head_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match="linear layer"):
        prepare(resolve(toys.toy("analytic", model=toys.on_simplex(), stream=STREAM)), toys.blobs())


def test_groups_of_one_give_the_exact_layer_and_few_groups_one_that_is_near_on_average() -> None:
    alike = {"width": 6, "ridge": 3.0, "cosine": False}
    exact = gone_through({"name": "analytic", **alike})[1][-1]
    ones = gone_through({"name": "analytic", "groups": 60, **alike})[1][-1]
    for name, value in exact.params.items():
        torch.testing.assert_close(ones.params[name], value, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        ones.extra.tensor("gram"), exact.extra.tensor("gram"), rtol=1e-10, atol=1e-9
    )
    torch.testing.assert_close(
        ones.extra.tensor("cross"), exact.extra.tensor("cross"), rtol=1e-10, atol=1e-9
    )


def test_the_estimate_is_right_on_average_over_random_groups() -> None:
    draw = torch.Generator().manual_seed(0)
    h, labels = torch.randn(12, 3, generator=draw, dtype=torch.float64) + 1, torch.arange(12) % 2
    want, tries = ridge.feature_sums(h, labels, 2).tensor("gram"), 4000
    groups = [torch.randperm(12, generator=draw) % 4 for _ in range(tries)]
    each = torch.stack(
        [ridge.estimated_gram(*ridge.group_sums(h, labels, 2, g, 4).values()) for g in groups]
    )
    wrong = (each.mean(0) - want).abs() / (each.std(0) / tries**0.5).clamp(min=1e-9)
    assert float(wrong.max()) < 4, "within four standard errors"


def test_groups_are_counted_once_and_need_tasks_of_their_own() -> None:
    late = {"stream": {**STREAM, "lag": 2}}
    a, b = (
        gone_through({"name": "analytic", "groups": g, "width": 0}, **late)[1][-1] for g in (0, 200)
    )
    torch.testing.assert_close(
        b.extra.tensor("cross"), a.extra.tensor("cross"), rtol=1e-10, atol=1e-9
    )
    with pytest.raises(IncompatibleMethod, match="each example once"):
        gone_through({"name": "analytic", "groups": 5}, stream={**STREAM, "past": "kept"})


def test_an_estimate_with_negative_eigenvalues_is_cut() -> None:
    cut = without_negative(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(cut, torch.full((2, 2), 1.5, dtype=torch.float64))
