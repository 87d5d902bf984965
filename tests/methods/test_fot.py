"""FOT: what enters layers, which directions are kept of it, and that no change moves answers along
these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_tasks import experiment_over_tasks, model_hash, run_over_tasks
from torch import Tensor, nn

import toys
from double import NEAR
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import SERVER
from fedstill.core.trees import same_bits
from fedstill.data.dataset import Dataset
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
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

STREAM = {"kind": "classes", "tasks": 3, "head": "task"}
DEEP = {"name": "mlp", "hidden": (6, 4)}
CNN = contract.spec_for("digits_cnn", (1, 8, 8), 5, {})


def no_directions(inputs: int) -> Tensor:
    """The basis before the first task."""
    return torch.zeros(inputs, 0, dtype=torch.float64)


def test_input_products_are_those_of_what_a_layers_weights_are_multiplied_with() -> None:
    """A layer's outputs from the weights and the inputs' products: the sum of squares of W a is
    that of W S W^T.
    """
    params = contract.initial(CNN, 0)
    network = contract.module(CNN, "frozen").eval()
    x = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))

    products = input_products(network, params, x)

    assert {name: len(value) for name, value in products.items()} == body_layers(network)
    first = next(name for name in products if params[name].dim() == 4)
    layer = network.get_submodule(first.removesuffix(".weight"))
    assert isinstance(layer, nn.Conv2d)
    weight = params[first].double()
    outputs = nn.functional.conv2d(x.double(), weight, None, layer.stride, layer.padding)
    rows = weight.flatten(1)
    squares = (rows @ products[first] @ rows.T).diagonal()
    torch.testing.assert_close(squares, outputs.square().sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    assert not layer._forward_pre_hooks, "no hook stays"


def directions_by_svd(basis: np.ndarray, inputs: np.ndarray, keeps: float) -> np.ndarray:
    """The basis with as many singular vectors of the inputs outside of it as keep that share."""
    outside = inputs - basis @ (basis.T @ inputs)
    vectors, values, _ = np.linalg.svd(outside, full_matrices=False)
    share_outside = np.linalg.norm(outside) / np.linalg.norm(inputs)
    may_be_lost = 1 - keeps
    count = 0
    if share_outside > may_be_lost:
        needed = (share_outside - may_be_lost) / share_outside * (values**2).sum()
        while (values[:count] ** 2).sum() < needed:
            count += 1
    return np.column_stack([basis, vectors[:, :count]])


def test_the_directions_are_those_of_the_inputs_outside_of_what_is_kept() -> None:
    """Against a singular value decomposition of the inputs themselves, in two tasks."""
    draw = np.random.default_rng(0)
    scales = np.array([5.0, 3.0, 1.0, 0.5, 0.2, 0.1])[:, None]
    basis = no_directions(6)
    for _ in range(2):
        inputs = draw.normal(size=(6, 40)) * scales
        expected = directions_by_svd(basis.numpy(), inputs, keeps=0.9)

        basis = with_directions(basis, torch.from_numpy(inputs @ inputs.T), 0.9)

        directions = basis.numpy()
        assert directions.shape == expected.shape
        np.testing.assert_allclose(directions.T @ directions, np.eye(basis.shape[1]), atol=1e-12)
        np.testing.assert_allclose(directions @ directions.T, expected @ expected.T, atol=NEAR)


def test_keeping_everything_spans_the_inputs_and_nothing_else() -> None:
    """The same inputs again add no direction, and no inputs have none."""
    inputs = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    products = inputs @ inputs.T

    basis = with_directions(no_directions(6), products, 1.0)

    assert basis.shape == (6, 3)
    torch.testing.assert_close(basis @ (basis.T @ inputs), inputs)
    assert with_directions(basis, products, 1.0).shape == (6, 3)
    assert with_directions(no_directions(6), torch.zeros_like(products), 0.98).shape == (6, 0)


def test_a_projected_change_is_orthogonal_to_the_basis() -> None:
    """So answers to inputs along the basis stay."""
    draw = torch.Generator().manual_seed(2)
    old = torch.randn(4, 2, 3, 3, generator=draw)
    new = torch.randn(4, 2, 3, 3, generator=draw)
    basis, _ = torch.linalg.qr(torch.randn(18, 5, generator=draw, dtype=torch.float64))

    projected = orthogonal(new, old, basis)

    change = (projected - old).flatten(1).double()
    zero = torch.zeros(4, 5, dtype=torch.float64)
    torch.testing.assert_close(change @ basis, zero, rtol=0, atol=1e-5)
    inside = basis @ torch.randn(5, generator=draw, dtype=torch.float64)
    answers = projected.flatten(1).double() @ inside
    torch.testing.assert_close(answers, old.flatten(1).double() @ inside, rtol=0, atol=1e-5)
    assert float(change.norm()) > 1


def test_in_a_run_no_layer_of_the_body_moves_along_its_kept_directions() -> None:
    """Those of the sum of all clients' inputs in the first task."""
    ours = run_over_tasks({"name": "fot", "keeps": 0.8}, stream=STREAM, topology={"clients": 6})

    ready = ours.ready
    after_first, after_second, after_third = ours.states
    stage = ready.settings.schedule(1, ready.world)[-1]
    clients = [
        summed_products(ready.sites.view(client, stage), after_first.params) for client in range(6)
    ]
    bases = after_first.extra.tensors("basis")
    next_bases = after_second.extra.tensors("basis")
    assert bases
    for name, basis in bases.items():
        products = torch.stack([client[name] for client in clients]).sum(0)
        expected = with_directions(basis[:, :0], products, 0.8)
        torch.testing.assert_close(basis @ basis.T, expected @ expected.T)
        change = after_second.params[name] - after_first.params[name]
        along_basis = change @ basis
        torch.testing.assert_close(along_basis, torch.zeros_like(along_basis), rtol=0, atol=NEAR)
        assert float(change.norm()) > 0
        assert next_bases[name].shape[1] >= basis.shape[1]
    assert same_bits(after_third.extra.tensors("basis"), next_bases), "no task follows"


def test_without_kept_directions_it_is_fedavg(tmp_path: Path) -> None:
    def hash_of(method: dict[str, Any]) -> str:
        return model_hash(tmp_path / str(method), method, stream=STREAM)

    fedavg = hash_of({"name": "fedavg"})
    assert hash_of({"name": "fot", "keeps": 0.0}) == fedavg
    assert hash_of({"name": "fot", "keeps": 0.9}) != fedavg


def test_in_the_first_task_it_is_fedavg(tmp_path: Path) -> None:
    fedavg = model_hash(tmp_path / "fedavg", "fedavg", stream={})

    assert model_hash(tmp_path / "fot", "fot", stream={}) == fedavg


def test_networks_that_it_cannot_protect_are_refused() -> None:
    with pytest.raises(IncompatibleMethod, match="no trained layer"):
        prepare(resolve(toys.toy("fot", model="logistic", stream=STREAM)), toys.blobs())
    wide = {"name": "mlp", "hidden": (5001, 4)}
    with pytest.raises(IncompatibleMethod, match=r"body\.3 has 5001 inputs"):
        prepare(resolve(toys.toy("fot", model=wide, stream=STREAM)), toys.blobs())


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose model others start from."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    run(toys.toy(model=DEEP, rounds=1), folder, toys.blobs(seed=3))
    return folder


def partly_trained(start: Path, train_only: tuple[str, ...]) -> Experiment:
    """A run that starts from a model and trains the entries whose names begin so."""
    return experiment_over_tasks(
        "fot", model=DEEP, stream=STREAM, start_from=str(start), train_only=train_only
    )


def test_of_a_body_that_is_trained_in_part_the_trained_layers_are_protected(
    pretrained: Path, tmp_path: Path
) -> None:
    experiment = partly_trained(pretrained, ("body.3.", "head."))
    ready = prepare(resolve(experiment), toys.blobs())

    products = no_products(ready.world.model(SERVER))
    result = run(experiment, tmp_path / "run", toys.blobs())

    assert {name: len(value) for name, value in products.items()} == {"body.3.weight": 6}
    assert len(result.history) == 3


def test_a_body_of_which_nothing_is_trained_is_refused(pretrained: Path) -> None:
    experiment = partly_trained(pretrained, ("head.",))
    with pytest.raises(IncompatibleMethod, match=r"no trained layer.*train_only"):
        prepare(resolve(experiment), toys.blobs())


def texts() -> Dataset:
    """60 texts of three classes."""
    ids = torch.randint(1, 9, (60, 6), generator=torch.Generator().manual_seed(0)).int()
    labels = torch.arange(60) % 3
    return from_tensors("texts", (ids, labels), (ids, labels), vocabulary=9)


def warning_of(data: Dataset, **changes: Any) -> str:
    """What the method says about a run before it starts."""
    ready = prepare(resolve(toys.toy("fot", **changes)), data)
    return ready.settings.method.setting_warnings(ready.world)


def test_a_warning_names_unprotected_entries_of_the_body() -> None:
    """Of the toy images' network all is protected."""
    stream = {"kind": "classes", "tasks": 3}
    bag = {"name": "bag", "hidden": (4,)}
    attention = {"name": "tiny_transformer", "width": 4, "heads": 2, "blocks": 1}
    protected = "only linear layers and convolutions are protected, and"

    of_bag = warning_of(texts(), model=bag, partition="iid", stream=stream)
    of_attention = warning_of(texts(), model=attention, partition="iid", stream=stream)

    assert of_bag.startswith(f"{protected} body.0.tokens.weight of model bag")
    unprotected = "body.places, body.tokens.weight of model tiny_transformer"
    assert of_attention.startswith(f"{protected} {unprotected}")
    assert warning_of(toys.blobs(), stream=STREAM) == ""


def test_a_share_of_zero_keeps_no_direction_however_sums_are_rounded() -> None:
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        inputs = torch.rand(30, 20, generator=draw, dtype=torch.float64)
        assert with_directions(no_directions(20), inputs.T @ inputs, 0.0).shape == (20, 0)
