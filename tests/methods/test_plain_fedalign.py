"""FedAlign against a plain implementation, and the slim passes that it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain import (
    PLAN,
    Federation,
    Loss,
    assert_same_model,
    average,
    drive,
    largest_gap,
    ready_for,
    run_of,
)
from torch import Tensor, nn
from torch.func import functional_call

from double import NEAR, widened
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.trees import floats
from fedstill.methods.fedalign import steepness
from fedstill.models import contract, resnet

MU = 0.45


def narrow_stage(model: nn.Module, x: Tensor, norm: str) -> Tensor:
    """The last stage at a quarter of its widths: the corner of each of its weights."""
    narrow = resnet.SlimStage(resnet.bottleneck(16, 8, 2, norm)).double().train()  # type: ignore[arg-type]
    wide_weights = dict(model.get_submodule("body.stage2").named_parameters())
    weights = {}
    for name, weight in narrow.named_parameters():
        corner = tuple(slice(size) for size in weight.shape)
        weights[name] = wide_weights[name][corner]
    return functional_call(narrow, weights, (x,))


def largest_singular_value(a: Tensor, b: Tensor) -> Tensor:
    """Ten steps of the power method, from ones, on the transition matrix between one example's
    feature maps.
    """
    matrix = a.flatten(1) @ b.flatten(1).T / a.flatten(1).shape[1]
    v = torch.ones_like(matrix[:, 0])
    for _ in range(10):
        u = matrix @ (matrix.T @ v)
        v = u / u.norm()
    return u.norm().sqrt()


def singular_values(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The largest singular value of each example; inputs are pooled to the size of outputs."""
    pooled = nn.functional.avg_pool2d(inputs, 2)
    pairs = zip(pooled, outputs, strict=True)
    return torch.stack([largest_singular_value(a, b) for a, b in pairs])


def aligned(norm: str) -> Loss:
    """Cross-entropy, and the difference of the singular values of the slim stage and the whole
    one.
    """

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        stem = model.get_submodule("body.stem")(x)
        x2 = model.get_submodule("body.stage1")(stem)
        x3 = model.get_submodule("body.stage2")(x2)
        logits = model.get_submodule("head")(x3.mean((2, 3)))
        ce = nn.functional.cross_entropy(logits, y)

        slim_input = x2[:, :16].detach()
        slim_values = singular_values(slim_input, narrow_stage(model, slim_input, norm))
        wide_values = singular_values(x2.detach(), x3.detach())
        gap = ((slim_values - wide_values) ** 2).mean()
        return ce + MU * (ce.item() / gap.item()) * gap

    return loss


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_fedalign(norm: str) -> None:
    """The slim stage is drawn to be as steep as the whole one."""
    model = {"name": "toy_slim", "norm": norm}
    plan = {"epochs": 1, "lr": 0.02, "clip_norm": 0.0}
    ready = ready_for("fedalign", model=model, plan=plan)
    fed = Federation(ready, plan={**PLAN, **plan})
    params = fed.start
    for round_index in (1, 2):
        params = average(fed.fit_cohort(params, aligned(norm), round_index))
    expected = {
        name: value for name, value in params.items() if not name.endswith("num_batches_tracked")
    }

    ours = floats(drive(ready).params)

    assert_same_model(ours, expected)
    if norm == "group":
        fedavg = run_of("fedavg", model=model, plan=plan).params
        assert largest_gap(ours, fedavg) > 1e-3


def test_steepness_is_the_largest_singular_value() -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.rand(3, 6, 4, 4, generator=draw).double()
    b = torch.rand(3, 5, 2, 2, generator=draw).double()

    values = steepness(a, b, 40)

    for inputs, outputs, value in zip(a, b, values, strict=True):
        pooled = inputs.reshape(6, 2, 2, 2, 2).mean((2, 4)).reshape(6, 4)
        matrix = (pooled @ outputs.reshape(5, 4).T / 4).numpy()
        expected = np.linalg.svd(matrix, compute_uv=False)[0]
        assert float(value) == pytest.approx(expected, rel=NEAR)


def test_steepness_of_zeros_is_finite_with_a_finite_gradient() -> None:
    outputs = torch.zeros(2, 5, 2, 2, requires_grad=True)

    values = steepness(torch.ones(2, 6, 4, 4), outputs, 10)
    values.sum().backward()

    assert values.isfinite().all()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize("name", ["resnet10", "resnet56"])
@pytest.mark.parametrize("norm", ["group", "batch_stats", "batch"])
def test_a_residual_network_runs_its_last_stage_at_a_quarter(name: str, norm: str) -> None:
    """The slim pass changes neither the logits nor the running statistics."""
    spec = contract.spec_for(name, (3, 16, 16), 5, {"norm": norm})
    assert Need.SLIM in contract.capabilities(spec)
    network = contract.module(spec).train()
    params = widened(contract.initial(spec, 0))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    forward_params = {key: value.clone() for key, value in params.items()}

    logits, whole, slim = resnet.run_slim(network, params, x, 0.25)

    expected = contract.forward(network, forward_params, x)
    torch.testing.assert_close(logits, expected, rtol=NEAR, atol=NEAR)
    assert slim.input.shape[1] * 4 == whole.input.shape[1]
    assert slim.output.shape[1] * 4 == whole.output.shape[1]
    assert slim.output.shape[2:] == whole.output.shape[2:]
    statistics = [key for key in params if "running" in key or "tracked" in key]
    assert all(torch.equal(params[key], forward_params[key]) for key in statistics)


def test_at_full_width_a_slim_block_is_the_block() -> None:
    spec = contract.spec_for("toy_slim", (1, 4, 4), 5, {})
    network = contract.build(spec).double().eval()
    block = network.get_submodule("body.stage2")[0]  # type: ignore[index]
    x = torch.randn(2, 64, 4, 4, generator=torch.Generator().manual_seed(0)).double()

    torch.testing.assert_close(block.slim(x, 1.0), block(x), rtol=NEAR, atol=NEAR)
    quarters = [resnet.slim_width(width, 0.25) for width in (8, 16, 32, 64, 100)]
    assert quarters == [8, 8, 8, 16, 24]


@pytest.mark.parametrize("model", ["mlp", "cnn", "toy_batchnorm"])
def test_a_model_that_cannot_be_slimmed_is_refused_by_name(model: str) -> None:
    with pytest.raises(IncompatibleMethod, match=rf"fedalign .*{model}.*resnet56"):
        ready_for("fedalign", model=model)


def test_only_residual_networks_are_slimmable() -> None:
    """All of these have features and a head."""
    for name in ("resnet10", "resnet56", "cnn", "alexnet", "lenet5", "mlp"):
        spec = contract.spec_for(name, (3, 32, 32), 5)
        capabilities = contract.capabilities(spec)
        assert (Need.SLIM in capabilities) == name.startswith("resnet")
        assert (Need.FEATURES | Need.HEAD) in capabilities
