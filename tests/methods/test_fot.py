"""FOT: what enters layers, which directions are kept of it, and that no change moves answers along
these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import toys
from double import in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import SERVER, State
from fedstill.data.sources import from_tensors
from fedstill.methods.fot import (
    body_layers,
    input_products,
    no_products,
    orthogonal,
    summed_products,
    with_directions,
)
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from loops import context_of, states_after
from run_bits import bits

STREAM = {"kind": "classes", "tasks": 3, "head": "task"}
BAG, ATTENTION = (
    {"name": "bag", "hidden": (4,)},
    {"name": "tiny_transformer", "width": 4, "heads": 2, "blocks": 1},
)
DEEP = {"name": "mlp", "hidden": (6, 4)}
CNN = contract.spec_for("digits_cnn", (1, 8, 8), 5, {})


def gone_through(method: Any, **more: Any) -> tuple[Prepared, list[State]]:
    """A run of three tasks in float64: the state after each round."""
    values = {"partition": {"kind": "iid"}, "stream": STREAM, "topology": {"clients": 6}, **more}
    ready = in_double(prepare(resolve(toys.toy(method, engine="serial", **values)), toys.blobs()))
    return ready, states_after(context_of(ready), ready.world.rounds)[1:]


def test_what_enters_layers_is_what_their_weights_are_multiplied_with() -> None:
    """A layer's outputs from the weights and the inputs' products: the sum of squares of W a is
    that of W S W^T.
    """
    params = contract.initial(CNN, 0)
    x = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    m = contract.module(CNN, "frozen").eval()
    sums = input_products(m, params, x)
    assert {k: len(v) for k, v in sums.items()} == body_layers(m)
    first = next(k for k in sums if params[k].dim() == 4)
    layer = m.get_submodule(first.removesuffix(".weight"))
    assert isinstance(layer, nn.Conv2d)
    out = nn.functional.conv2d(
        x.double(), params[first].double(), None, layer.stride, layer.padding
    )
    w = params[first].double().flatten(1)
    torch.testing.assert_close(
        (w @ sums[first] @ w.T).diagonal(), out.square().sum((0, 2, 3)), rtol=1e-5, atol=1e-5
    )
    assert not m.get_submodule(first.removesuffix(".weight"))._forward_pre_hooks, "no hook stays"


def test_the_directions_are_those_of_the_inputs_outside_of_what_is_kept() -> None:
    """Against a singular value decomposition of the inputs themselves."""
    draw = np.random.default_rng(0)
    spread = np.diag([5.0, 3.0, 1.0, 0.5, 0.2, 0.1])
    first, then = (draw.normal(size=(6, 40)) * spread.diagonal()[:, None] for _ in range(2))
    basis = with_directions(
        torch.zeros(6, 0, dtype=torch.float64), torch.from_numpy(first @ first.T), 0.9
    )
    for a, u in ((first, np.zeros((6, 0))), (then, basis.numpy())):
        r = a - u @ (u.T @ a)
        left, s, _ = np.linalg.svd(r, full_matrices=False)
        q = np.linalg.norm(r) / np.linalg.norm(a)
        count = 0
        while q > 0.1 and (s[:count] ** 2).sum() < (q - 0.1) / q * (s**2).sum():
            count += 1
        got = with_directions(torch.from_numpy(u), torch.from_numpy(a @ a.T), 0.9).numpy()
        assert got.shape[1] == u.shape[1] + count
        np.testing.assert_allclose(got.T @ got, np.eye(got.shape[1]), atol=1e-12)
        want = np.column_stack([u, left[:, :count]])
        np.testing.assert_allclose(got @ got.T, want @ want.T, atol=1e-9)


def test_all_inputs_are_kept_where_that_is_asked_for_and_no_more() -> None:
    a = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = with_directions(a[:, :0], a @ a.T, 1.0)
    assert u.shape == (6, 3)
    torch.testing.assert_close(u @ (u.T @ a), a)
    assert with_directions(u, a @ a.T, 1.0).shape == (6, 3)
    assert with_directions(a[:, :0], torch.zeros(6, 6, dtype=torch.float64), 0.98).shape == (6, 0)


def test_a_change_is_kept_orthogonal_and_answers_along_the_basis_stay() -> None:
    draw = torch.Generator().manual_seed(2)
    old, new = (torch.randn(4, 2, 3, 3, generator=draw) for _ in range(2))
    u, _ = torch.linalg.qr(torch.randn(18, 5, generator=draw, dtype=torch.float64))
    after = orthogonal(new, old, u)
    change = (after - old).flatten(1).double()
    torch.testing.assert_close(
        change @ u, torch.zeros(4, 5, dtype=torch.float64), rtol=0, atol=1e-5
    )
    inside = u @ torch.randn(5, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(
        after.flatten(1).double() @ inside, old.flatten(1).double() @ inside, rtol=0, atol=1e-5
    )
    assert float(change.norm()) > 1


def test_in_a_run_no_layer_of_the_body_moves_along_its_kept_directions() -> None:
    ready, after = gone_through({"name": "fot", "keeps": 0.8})
    stage = ready.settings.schedule(1, ready.world)[-1]
    each = [summed_products(ready.sites.view(c, stage), after[0].params) for c in range(6)]
    for name, u in after[0].extra.tensors("basis").items():
        whole = torch.stack([own[name] for own in each]).sum(0)
        torch.testing.assert_close(u @ u.T, (v := with_directions(u[:, :0], whole, 0.8)) @ v.T)
        moved = after[1].params[name] - after[0].params[name]
        torch.testing.assert_close(moved @ u, torch.zeros_like(moved @ u), rtol=0, atol=1e-9)
        assert float(moved.norm()) > 0
        assert after[1].extra.tensors("basis")[name].shape[1] >= u.shape[1]
    assert after[0].extra.tensors("basis")
    assert torch.equal(after[2].extra.tensors("basis")[name], after[1].extra.tensors("basis")[name])


def test_with_nothing_kept_it_is_fedavg(tmp_path: Path) -> None:
    model = []
    for method in ("fedavg", {"name": "fot", "keeps": 0.0}, {"name": "fot", "keeps": 0.9}):
        folder = tmp_path / str(len(model))
        run(toys.toy(method, partition={"kind": "iid"}, stream=STREAM), folder, toys.blobs())
        model.append(bits(folder)["model.safetensors"])
    assert model[0] == model[1] != model[2]


def test_in_the_first_task_it_is_fedavg(tmp_path: Path) -> None:
    model = []
    for method in ("fedavg", "fot"):
        run(toys.toy(method), tmp_path / method, toys.blobs())
        model.append(bits(tmp_path / method)["model.safetensors"])
    assert model[0] == model[1]


def test_networks_that_it_cannot_protect_are_refused() -> None:
    with pytest.raises(IncompatibleMethod, match="no trained layer"):
        prepare(resolve(toys.toy("fot", model="logistic", stream=STREAM)), toys.blobs())
    wide = {"name": "mlp", "hidden": (5001, 4)}
    with pytest.raises(IncompatibleMethod, match=r"body\.3 has 5001 inputs"):
        prepare(resolve(toys.toy("fot", model=wide, stream=STREAM)), toys.blobs())


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    run(toys.toy(model=DEEP, rounds=1), folder, toys.blobs(seed=3))
    return folder


def partly_trained(start: Path, train_only: tuple[str, ...]) -> Any:
    return toys.toy(
        "fot",
        model=DEEP,
        stream=STREAM,
        start_from=str(start),
        train_only=train_only,
        partition={"kind": "iid"},
    )


def test_of_a_body_that_is_trained_in_part_the_trained_layers_are_protected(
    pretrained: Path, tmp_path: Path
) -> None:
    experiment = partly_trained(pretrained, ("body.3.", "head."))
    ready = prepare(resolve(experiment), toys.blobs())
    sums = no_products(ready.world.model(SERVER))
    assert {name: len(products) for name, products in sums.items()} == {"body.3.weight": 6}
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert len(result.history) == 3


def test_a_body_of_which_nothing_is_trained_is_refused(pretrained: Path) -> None:
    experiment = partly_trained(pretrained, ("head.",))
    with pytest.raises(IncompatibleMethod, match=r"no trained layer.*train_only"):
        prepare(resolve(experiment), toys.blobs())


def test_what_of_the_body_is_not_protected_is_said() -> None:
    ids = torch.randint(1, 9, (60, 6), generator=torch.Generator().manual_seed(0)).int()
    texts = from_tensors("texts", *[(ids, torch.arange(60) % 3)] * 2, vocabulary=9)
    stream = {"kind": "classes", "tasks": 3}
    for model, free in (
        (BAG, "body.0.tokens.weight"),
        (ATTENTION, "body.places, body.tokens.weight"),
    ):
        ready = prepare(
            resolve(toys.toy("fot", model=model, partition="iid", stream=stream)), texts
        )
        said = (
            f"only linear layers and convolutions are protected, and {free} of model "
            f"{model['name']}"
        )
        assert ready.settings.method.setting_warnings(ready.world).startswith(said)
    images = prepare(resolve(toys.toy("fot", stream=STREAM)), toys.blobs())
    assert images.settings.method.setting_warnings(images.world) == ""


def test_a_share_of_nothing_keeps_no_direction_however_sums_are_rounded() -> None:
    for seed in range(200):
        inputs = torch.rand(
            30, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        assert with_directions(
            torch.zeros(20, 0, dtype=torch.float64), inputs.T @ inputs, 0.0
        ).shape == (20, 0)
