"""What every loss must be: finite at any gap, per example, vectorisable, of the student's dtype,
free of its batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from double import NEAR
from fedstill import losses

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

MASK = torch.tensor([1.5, 0.0, 1.0, 0.0, 1.0, 1.0])


def several(t: Tensor) -> Tensor:
    """Three teachers out of one."""
    return torch.stack([t, t.flip(-1), -t])


TABLE: dict[str, Loss] = {
    "cross_entropy": lambda s, t, y: losses.cross_entropy(s, y),
    "cross_entropy, cold": lambda s, t, y: losses.cross_entropy(s, y, 0.01),
    "cross_entropy, cold, over a floor": lambda s, t, y: losses.cross_entropy(s, y, 0.01, 1e-8),
    "kd": lambda s, t, y: losses.kd(s, t),
    "kd, cold": lambda s, t, y: losses.kd(s, t, 0.01),
    "kd, hot": lambda s, t, y: losses.kd(s, t, 4.0),
    "kd, standardised": lambda s, t, y: losses.kd(
        losses.standardize(s), losses.standardize(t), 3.0
    ),
    "masked_ce": lambda s, t, y: losses.masked_ce(s, t, MASK),
    "masked_kl": lambda s, t, y: losses.masked_kl(s, t, MASK),
    "tckd": lambda s, t, y: losses.tckd(s, t, y),
    "tckd, cold": lambda s, t, y: losses.tckd(s, t, y, 0.01),
    "target_kl": lambda s, t, y: losses.target_kl(s, t, y),
    "nckd": lambda s, t, y: losses.nckd(s, t, y),
    "nckd, cold": lambda s, t, y: losses.nckd(s, t, y, 0.01),
    "nckd_zero": lambda s, t, y: losses.nckd_zero(s, t, y),
    "nckd_slice": lambda s, t, y: losses.nckd_slice(s, t, y),
    "other_mse": lambda s, t, y: losses.other_mse(s, t, y),
    "other_mse, mean": lambda s, t, y: losses.other_mse(s, t, y, "mean"),
    "multi_kd": lambda s, t, y: losses.multi_kd(s, several(t), 4.0).sum(0),
    "multi_nckd": lambda s, t, y: losses.multi_nckd(s, several(t), y, 4.0).sum(0),
    "multi_tckd": lambda s, t, y: losses.multi_tckd(s, several(t), y, 4.0).sum(0),
    "entropy_weights": lambda s, t, y: (
        losses.entropy_weights(several(t)) * losses.multi_kd(s, several(t))
    ).sum(0),
    "confidence_weights": lambda s, t, y: (
        losses.confidence_weights(several(t), y) * losses.multi_kd(s, several(t))
    ).sum(0),
    "adjusted_cross_entropy": lambda s, t, y: losses.adjusted_cross_entropy(s, y, 0.5 + MASK, MASK),
    "minority_kd": lambda s, t, y: losses.minority_kd(s, t, y, MASK > 1),
    "minority_kd, cold": lambda s, t, y: losses.minority_kd(s, t, y, MASK > 1, 0.01),
    "soft_cross_entropy": lambda s, t, y: losses.soft_cross_entropy(s, t.softmax(-1)),
    "logit_error": lambda s, t, y: losses.logit_error(s, t),
    "model_contrast": lambda s, t, y: losses.model_contrast(s, t, t.roll(1, -1)),
    "model_contrast, cold": lambda s, t, y: losses.model_contrast(s, t, t.roll(1, -1), 0.01),
}
"""A new loss gets a row here."""

every_loss = pytest.mark.parametrize("loss", TABLE.values(), ids=TABLE.keys())


def draw(
    *shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    s, t = (scale * torch.randn(*shape, 6, generator=source) for _ in range(2))
    return s.to(dtype), t.to(dtype), torch.randint(6, shape, generator=source)


def extremes() -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of extreme logits, each with a label on the peak, beside it, and in a tie."""
    rows = [
        [0.0, 0, 0, 0, 0, 0],
        [1e4, 0, 0, 0, 0, 0],
        [-1e4, 0, 0, 0, 0, 0],
        [1e4, 1e4, -1e4, -1e4, 0, 0],
        [-1e4, 1e4, -1e4, 1e4, -1e4, 1e4],
        [1e4, 1e4, 1e4, 1e4, 1e4, 1e4],
        [5e3, -5e3, 1e-3, 0, 1, 2],
    ]
    z = torch.tensor(rows)
    at = torch.cartesian_prod(torch.arange(len(rows)), torch.arange(len(rows)), torch.arange(6))
    return z[at[:, 0]], z[at[:, 1]], at[:, 2]


@every_loss
def test_value_and_gradient_are_finite_at_gaps_of_1e4(loss: Loss) -> None:
    s, t, y = extremes()
    s.requires_grad_()
    t.requires_grad_()
    value = loss(s, t, y)
    assert value.shape == y.shape
    assert value.isfinite().all()
    for g in torch.autograd.grad(value.sum(), (s, t), allow_unused=True):
        assert g is None or g.isfinite().all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_value_per_example_of_the_students_dtype(loss: Loss, dtype: torch.dtype) -> None:
    s, t, y = draw(9, dtype=dtype)
    assert loss(s, t, y).shape == (9,)
    assert loss(s, t, y).dtype == dtype
    assert loss(s, t.to(torch.bfloat16), y).dtype == dtype  # a teacher may run in lower precision
    assert loss(s[:0], t[:0], y[:0]).shape == (0,)


@every_loss
def test_an_example_does_not_know_its_batch(loss: Loss) -> None:
    s, t, y = draw(9)
    whole = loss(s, t, y)
    assert torch.equal(loss(s[2:5], t[2:5], y[2:5]), whole[2:5])
    assert torch.equal(loss(s.flip(0), t.flip(0), y.flip(0)), whole.flip(0))


@every_loss
def test_clients_can_be_stacked(loss: Loss) -> None:
    s, t, y = draw(4, 9, dtype=torch.float64)
    each = torch.stack([loss(s[k], t[k], y[k]) for k in range(4)])
    torch.testing.assert_close(vmap(loss)(s, t, y), each, rtol=NEAR, atol=NEAR)
    torch.testing.assert_close(vmap(vmap(loss))(s, t, y), each, rtol=NEAR, atol=NEAR)
    slopes = vmap(grad(lambda a, b, c: loss(a, b, c).sum()))(s, t, y)
    one_by_one = torch.stack(
        [grad(lambda a, k=k: loss(a, t[k], y[k]).sum())(s[k]) for k in range(4)]
    )
    torch.testing.assert_close(slopes, one_by_one, rtol=NEAR, atol=NEAR)


@every_loss
def test_the_gradient_is_the_slope(loss: Loss) -> None:
    s, t, y = draw(3, scale=0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: loss(z, t, y), s.requires_grad_())


@every_loss
def test_inputs_are_left_alone(loss: Loss) -> None:
    s, t, y = draw(9)
    before = s.clone(), t.clone(), y.clone()
    loss(s, t, y)
    assert all(torch.equal(a, b) for a, b in zip((s, t, y), before, strict=True))


def test_a_temperature_may_be_a_tensor_and_differ_between_stacked_clients() -> None:
    s, _, y = draw(4, 9, dtype=torch.float64)
    taus = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
    stacked = vmap(losses.cross_entropy)(s, y, taus)
    each = torch.stack([losses.cross_entropy(s[k], y[k], float(taus[k])) for k in range(4)])
    torch.testing.assert_close(stacked, each, rtol=NEAR, atol=NEAR)
    assert losses.kd(s[0].float(), s[1].float(), taus[0]).dtype == torch.float32


def test_standardised_equal_logits_are_zeros_with_a_finite_gradient() -> None:
    z = torch.full((2, 5), 1e4, requires_grad=True)
    (2 * losses.standardize(z)[:, 0]).sum().backward()
    assert torch.equal(losses.standardize(z), torch.zeros(2, 5))
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_every_loss_of_logits_has_a_row() -> None:
    named = {name.split(",")[0] for name in TABLE} | {"standardize", "proximal", "quadratic"}
    assert named == set(losses.__all__)


def test_penalties_of_stacked_clients() -> None:
    w = {"a": torch.arange(6.0).reshape(3, 2).double(), "b": torch.ones(3, 4).double()}
    start = {"a": torch.zeros(2).double(), "b": torch.zeros(4).double()}
    stacked = vmap(lambda p: losses.proximal(p, start, 0.5))(w)
    each = [losses.proximal({k: v[i] for k, v in w.items()}, start, 0.5) for i in range(3)]
    torch.testing.assert_close(stacked, torch.stack(each), rtol=NEAR, atol=NEAR)
