"""FedAlign against a plain implementation, and the slim passes it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain import Federation, average, check, drive, ready_for
from torch import Tensor, nn
from torch.func import functional_call

from double import NEAR
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.methods.fedalign import steepness
from fedstill.models import contract, resnet

MU = 0.45


def narrow_stage(model: nn.Module, x: Tensor, norm: str) -> Tensor:
    """A block of a quarter of the widths, on the corner of each weight of the whole one."""
    small = resnet.SlimStage(resnet.bottleneck(16, 8, 2, norm)).double().train()  # type: ignore[arg-type]
    whole = dict(model.get_submodule("body.stage2").named_parameters())
    corner = {k: whole[k][tuple(slice(n) for n in p.shape)] for k, p in small.named_parameters()}
    return functional_call(small, corner, (x,))


def largest(a: Tensor, b: Tensor) -> Tensor:
    """Ten steps of the power method on TM TM^T of one example, from ones; a (D, h, w) is pooled
    already.
    """
    tm = a.flatten(1) @ b.flatten(1).T / a.flatten(1).shape[1]
    v = torch.ones_like(tm[:, 0])
    for _ in range(10):
        u = tm @ (tm.T @ v)
        v = u / u.norm()
    return u.norm().sqrt()


def aligned(norm: str):
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x2 = model.get_submodule("body.stage1")(model.get_submodule("body.stem")(x))
        x3 = model.get_submodule("body.stage2")(x2)
        ce = nn.functional.cross_entropy(model.get_submodule("head")(x3.mean((2, 3))), y)
        slim_in = x2[:, :16].detach()
        slim_out = narrow_stage(model, slim_in, norm)
        pooled, slim_pooled = (nn.functional.avg_pool2d(v, 2) for v in (x2.detach(), slim_in))
        s = torch.stack([largest(a, b) for a, b in zip(slim_pooled, slim_out, strict=True)])
        t = torch.stack([largest(a, b) for a, b in zip(pooled, x3.detach(), strict=True)])
        lip = ((s - t) ** 2).mean()
        return ce + MU * (ce.item() / lip.item()) * lip

    return loss


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_fedalign(norm: str) -> None:
    model = {"name": "toy_slim", "norm": norm}
    short = {"epochs": 1, "lr": 0.02, "clip_norm": 0.0}
    ready = ready_for("fedalign", model=model, plan=short)
    fed = Federation(ready)
    fed.lr = lambda round: 0.02 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    fed.epochs = 1
    params = fed.start
    for round in (1, 2):
        params = average([fed.fit(params, aligned(norm), round, c) for c in fed.cohort(round)])
    states, _ = drive(ready)
    ours = states[-1].params
    floats = [k for k in params if not k.endswith("num_batches_tracked")]
    check({k: ours[k] for k in floats}, {k: params[k] for k in floats})
    if norm == "group":
        fed_ready = ready_for("fedavg", model=model, plan=short)
        one = drive(fed_ready)[0][-1].params
        assert max(float((one[k] - ours[k]).abs().max()) for k in floats) > 1e-3


def test_steepness_is_the_largest_singular_value() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (
        torch.rand(3, 6, 4, 4, generator=draw).double(),
        torch.rand(3, 5, 2, 2, generator=draw).double(),
    )
    for i, s in enumerate(steepness(a, b, 40)):
        pooled = a[i].reshape(6, 2, 2, 2, 2).mean((2, 4)).reshape(6, 4)
        expected = np.linalg.svd((pooled @ b[i].reshape(5, 4).T / 4).numpy(), compute_uv=False)[0]
        assert float(s) == pytest.approx(expected, rel=NEAR)


def test_steepness_of_nothing_is_finite_with_a_finite_gradient() -> None:
    b = torch.zeros(2, 5, 2, 2, requires_grad=True)
    s = steepness(torch.ones(2, 6, 4, 4), b, 10)
    s.sum().backward()
    assert s.isfinite().all()
    assert b.grad is not None
    assert b.grad.isfinite().all()


@pytest.mark.parametrize("name", ["resnet10", "resnet56"])
@pytest.mark.parametrize("norm", ["group", "batch_stats", "batch"])
def test_a_residual_network_runs_its_last_stage_at_a_quarter(name: str, norm: str) -> None:
    spec = contract.spec_for(name, (3, 16, 16), 5, {"norm": norm})
    assert Need.SLIM in contract.capabilities(spec)
    m, params = contract.module(spec).train(), contract.initial(spec, 0)
    params = {k: v.double() if v.is_floating_point() else v for k, v in params.items()}
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    still = {k: v.clone() for k, v in params.items()}
    logits, whole, slim = resnet.run_slim(m, params, x, 0.25)
    torch.testing.assert_close(logits, contract.forward(m, still, x), rtol=NEAR, atol=NEAR)
    assert slim.input.shape[1] * 4 == whole.input.shape[1]
    assert slim.output.shape[1] * 4 == whole.output.shape[1]
    assert slim.output.shape[2:] == whole.output.shape[2:]
    # the slim pass leaves no trace in them
    for key in (k for k in params if "running" in k or "tracked" in k):
        assert torch.equal(params[key], still[key])


def test_at_full_width_the_slim_layers_are_the_layers() -> None:
    spec = contract.spec_for("toy_slim", (1, 4, 4), 5, {})
    m = contract.build(spec).double().eval()
    stage = m.get_submodule("body.stage2")
    x = torch.randn(2, 64, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    block = stage[0]  # type: ignore[index]
    torch.testing.assert_close(block.slim(x, 1.0), block(x), rtol=NEAR, atol=NEAR)
    assert [resnet.slim_width(n, 0.25) for n in (8, 16, 32, 64, 100)] == [8, 8, 8, 16, 24]


@pytest.mark.parametrize("model", ["mlp", "cnn", "toy_batchnorm"])
def test_a_model_that_cannot_be_slimmed_is_refused_by_name(model: str) -> None:
    with pytest.raises(
        IncompatibleMethod,
        match=rf"fedalign .*{model}.*resnet56",
    ):
        ready_for("fedalign", model=model)


def test_only_residual_networks_are_slimmable() -> None:
    for name in ("resnet10", "resnet56", "cnn", "alexnet", "lenet5", "mlp"):
        spec = contract.spec_for(name, (3, 32, 32), 5)
        assert (Need.SLIM in contract.capabilities(spec)) == name.startswith("resnet")
        assert (Need.FEATURES | Need.HEAD) in contract.capabilities(spec)
