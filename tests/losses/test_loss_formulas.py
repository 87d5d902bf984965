"""Every loss against its formula, written again in NumPy float64 with plain probabilities, and its
identities.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill import losses

TEMPERATURES = [0.5, 1.0, 4.0]


def draw(seed: int, batch: int = 7, classes: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    z = torch.from_numpy(rng.normal(scale=3.0, size=(2, batch, classes)))
    return z[0], z[1], torch.from_numpy(rng.integers(classes, size=batch))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def reference(name: str, s: np.ndarray, t: np.ndarray, y: int, tau: float) -> float:
    """One example of a loss, from the papers' formulas."""
    q, p = softmax(s / tau), softmax(t / tau)
    others = np.arange(len(s)) != y
    qo, po = softmax(s[others] / tau), softmax(t[others] / tau)
    zs, zt = np.where(others, s, 0.0), np.where(others, t, 0.0)
    qz, pz = softmax(zs / tau), softmax(zt / tau)
    value = {
        "kd": (p * np.log(p / q)).sum(),
        "tckd": p[y] * np.log(p[y] / q[y]) + (1 - p[y]) * np.log((1 - p[y]) / (1 - q[y])),
        "target_kl": p[y] * np.log(p[y] / q[y]),
        "nckd": (po * np.log(po / qo)).sum(),
        "nckd_zero": (pz * np.log(pz / qz)).sum(),
        "nckd_slice": (p * np.log(p / q))[others].sum(),
    }[name]
    return float(tau**2 * value)


def call(name: str, s: Tensor, t: Tensor, y: Tensor, tau: float) -> Tensor:
    return losses.kd(s, t, tau) if name == "kd" else getattr(losses, name)(s, t, y, tau)


@pytest.mark.parametrize("tau", TEMPERATURES)
@pytest.mark.parametrize("name", ["kd", "tckd", "target_kl", "nckd", "nckd_zero", "nckd_slice"])
def test_distillation_is_its_formula(name: str, tau: float) -> None:
    s, t, y = draw(0)
    expected = [reference(name, s[i].numpy(), t[i].numpy(), int(y[i]), tau) for i in range(len(y))]
    np.testing.assert_allclose(call(name, s, t, y, tau).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_cross_entropy_is_its_formula(tau: float) -> None:
    s, _, y = draw(1)
    expected = [-np.log(softmax(s[i].numpy() / tau)[y[i]]) for i in range(len(y))]
    np.testing.assert_allclose(losses.cross_entropy(s, y, tau).numpy(), expected, rtol=1e-12)
    torch.testing.assert_close(
        losses.cross_entropy(s, y), torch.nn.functional.cross_entropy(s, y, reduction="none")
    )


@pytest.mark.parametrize("floor", [1e-8, 1e-3, 0.5])
@pytest.mark.parametrize("tau", [0.01, 0.5, 4.0])
def test_cross_entropy_over_a_floor_is_its_formula_and_has_its_gradient(
    tau: float, floor: float
) -> None:
    s, _, y = draw(1)
    s.requires_grad_()
    value = losses.cross_entropy(s, y, tau, floor)
    p = np.array([softmax(row / tau) for row in s.detach().numpy()])
    own = p[np.arange(len(y)), y]
    np.testing.assert_allclose(value.detach().numpy(), -np.log(own + floor), rtol=1e-9, atol=1e-12)
    (slope,) = torch.autograd.grad(value.sum(), s)
    hot = np.eye(p.shape[1])[y]
    np.testing.assert_allclose(
        slope.numpy(), (own / (own + floor))[:, None] * (p - hot) / tau, atol=1e-9
    )


def test_a_floor_bounds_the_loss_of_a_cold_client() -> None:
    """At temperature 0.01 a difference of 4 between two logits is one of 400."""
    z, y = torch.tensor([[4.0, 0.0]], dtype=torch.float32, requires_grad=True), torch.tensor([1])
    free, bounded = losses.cross_entropy(z, y, 0.01), losses.cross_entropy(z, y, 0.01, 1e-8)
    assert float(free.detach()) == pytest.approx(400)
    assert float(bounded.detach()) == pytest.approx(-np.log(1e-8))
    slopes = [torch.autograd.grad(v.sum(), z)[0].abs().max() for v in (free, bounded)]
    assert float(slopes[0]) == pytest.approx(100)
    assert float(slopes[1]) == 0


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_masked_kl_is_its_formula(tau: float) -> None:
    s, t, _ = draw(2)
    mask = torch.tensor([1.5, 0.0, 1.0, 0.0, 1.0])
    q, p = (torch.softmax(z / tau, -1).numpy() for z in (s, t))
    expected = tau**2 * (mask.numpy() * p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(losses.masked_kl(s, t, mask, tau).numpy(), expected, rtol=1e-10)
    torch.testing.assert_close(
        losses.masked_kl(s, t, mask.expand(7, 5), tau), losses.masked_kl(s, t, mask, tau)
    )


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_model_contrast_is_its_formula(tau: float) -> None:
    h, near, _ = draw(5)
    far = draw(6)[0]

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    expected = []
    for a, b, c in zip(h.numpy(), near.numpy(), far.numpy(), strict=True):
        to_near, to_far = np.exp(cosine(a, b) / tau), np.exp(cosine(a, c) / tau)
        expected.append(-np.log(to_near / (to_near + to_far)))
    np.testing.assert_allclose(
        losses.model_contrast(h, near, far, tau).numpy(), expected, rtol=1e-10
    )
    np.testing.assert_allclose(
        losses.model_contrast(h, near, near, tau).numpy(), np.log(2), rtol=1e-12
    )
    swapped = losses.model_contrast(h, far, near, tau)  # the two shares add up to 1
    torch.testing.assert_close(
        (-losses.model_contrast(h, near, far, tau)).exp() + (-swapped).exp(), torch.ones(7).double()
    )
    assert (
        losses.model_contrast(h, h, -h, tau).max() < losses.model_contrast(h, near, far, tau).min()
    )


def test_other_mse_is_its_formula() -> None:
    s, t, y = draw(3)
    expected = [np.delete((s[i] - t[i]).numpy() ** 2, int(y[i])).sum() for i in range(len(y))]
    np.testing.assert_allclose(losses.other_mse(s, t, y).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(
        losses.other_mse(s, t, y, "mean").numpy(), np.array(expected) / 4, rtol=1e-12
    )


def test_standardised_logits_have_mean_0_and_unbiased_std_1() -> None:
    s, _, _ = draw(4)
    z = losses.standardize(s).numpy()
    np.testing.assert_allclose(z.mean(-1), 0, atol=1e-12)
    # the formula adds 1e-6 to the spread
    np.testing.assert_allclose(z.std(-1, ddof=1), 1, rtol=1e-5)
    np.testing.assert_allclose(
        z, (s - s.mean(-1, keepdim=True)) / (s.std(-1, keepdim=True) + 1e-6), rtol=1e-12
    )


def test_proximal_is_half_mu_times_the_squared_distance() -> None:
    w = {
        "a": torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True),
        "b": torch.ones(2, 2).double(),
    }
    anchor = {
        "a": torch.zeros(2).double(),
        "b": torch.ones(2, 2).double() * 3,
        "buffer": torch.ones(1),
    }
    penalty = losses.proximal(w, anchor, 0.1)
    assert penalty.shape == ()
    assert penalty.item() == pytest.approx(0.05 * (5 + 16))
    penalty.backward()
    torch.testing.assert_close(w["a"].grad, 0.1 * torch.tensor([1.0, 2.0]).double())
    assert float(losses.proximal({}, {}, 1.0)) == 0


# papers.md 13.1
@pytest.mark.parametrize("name", ["nckd", "nckd_zero", "other_mse"])
def test_the_label_logit_has_no_gradient_and_no_influence(name: str) -> None:
    s, t, y = draw(5)
    term = getattr(losses, name)
    student, teacher = s.clone().requires_grad_(), t.clone().requires_grad_()
    term(student, teacher, y).sum().backward()
    at_label = torch.nn.functional.one_hot(y, 5).bool()
    for grad in (student.grad, teacher.grad):
        assert grad is not None
        assert torch.equal(grad[at_label], torch.zeros(7, dtype=grad.dtype))
        assert (grad[~at_label] != 0).any()
    assert torch.equal(term(s + 50 * at_label, t, y), term(s, t, y))
    assert torch.equal(term(s, t - 50 * at_label, y), term(s, t, y))


# papers.md 13.2
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tau=st.floats(0.5, 8.0), classes=st.integers(2, 20))
def test_kd_is_its_two_parts(seed: int, tau: float, classes: int) -> None:
    s, t, y = draw(seed, 4, classes)
    p_y = torch.softmax(t / tau, -1).gather(1, y[:, None])[:, 0]
    whole = losses.kd(s, t, tau)
    parts = losses.tckd(s, t, y, tau) + (1 - p_y) * losses.nckd(s, t, y, tau)
    # A certain teacher leaves few digits of 1 - p_y.
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-9)
    entries = losses.target_kl(s, t, y, tau) + losses.nckd_slice(s, t, y, tau)
    torch.testing.assert_close(entries, whole, rtol=1e-6, atol=1e-9)
    assert (whole > -1e-9).all()
    assert (losses.tckd(s, t, y, tau) > -1e-9).all()


@pytest.mark.parametrize("tau", [1.0, 4.0])
def test_subtracting_1000_from_the_label_is_removing_it_and_zeroing_it_is_not(tau: float) -> None:
    s, t, y = draw(6)
    far = 1000.0 * torch.nn.functional.one_hot(y, 5)
    q, p = torch.log_softmax(s / tau - far, -1), torch.softmax(t / tau - far, -1)
    masked = tau**2 * torch.nn.functional.kl_div(q, p, reduction="none").sum(-1)
    torch.testing.assert_close(losses.nckd(s, t, y, tau), masked)
    assert (losses.nckd_zero(s, t, y, tau) - masked).abs().max() > 0.01


def test_zeroing_keeps_the_mass_the_paper_notes_name() -> None:
    z = torch.tensor([[3.0, 1.0, -2.0, 0.5]]).double()
    assert float(
        torch.softmax(torch.where(torch.arange(4) == 0, 0.0, z), -1)[0, 0]
    ) == pytest.approx(0.18, abs=0.005), "two digits are printed"
    # Other logits all moved by one constant: nothing for the label removed, something for the label
    # at 0.
    moved, y = z + 1, torch.tensor([0])
    assert float(losses.nckd(moved, z, y)) == pytest.approx(0, abs=1e-12)
    assert float(losses.nckd_zero(moved, z, y)) > 1e-3


def test_target_kl_pulls_up_where_the_binary_form_holds_back() -> None:
    s, t = (
        torch.tensor([[4.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True),
        torch.zeros(1, 3).double(),
    )
    y = torch.tensor([0])
    (up,) = torch.autograd.grad(losses.target_kl(s, t, y).sum(), s)
    (back,) = torch.autograd.grad(losses.tckd(s, t, y).sum(), s)
    assert float(up[0, 0]) < 0 < float(back[0, 0])
    (ce,) = torch.autograd.grad(losses.cross_entropy(s, y).sum(), s)
    torch.testing.assert_close(up, ce / 3)


# papers.md 13.12
def test_masked_kl_has_the_gradient_of_masked_cross_entropy_and_is_kd_under_ones() -> None:
    s, t, _ = draw(7)
    s.requires_grad_()
    mask = torch.tensor([2.0, 1.0, 0.0, 1.0, 0.0]).double()
    (kl,) = torch.autograd.grad(losses.masked_kl(s, t, mask).sum(), s)
    (ce,) = torch.autograd.grad(-(mask * torch.softmax(t, -1) * torch.log_softmax(s, -1)).sum(), s)
    torch.testing.assert_close(kl, ce)
    torch.testing.assert_close(losses.masked_kl(s, t, torch.ones(5)), losses.kd(s, t))
    assert torch.equal(losses.masked_kl(s, t, torch.zeros(5)), torch.zeros(7).double())


def test_confidence_survives_where_probabilities_round_to_one() -> None:
    s, t, y = (
        torch.tensor([[60.0, 0.0]]).double(),
        torch.tensor([[50.0, 0.0]]).double(),
        torch.tensor([0]),
    )
    # log p_y - log q_y, of two probabilities that are both 1 in float64
    gap = np.exp(-60.0) - np.exp(-50.0)
    assert float(losses.target_kl(s, t, y)) == pytest.approx(gap, rel=1e-12)
