"""Every loss against its formula, written again in NumPy float64 with plain probabilities, and its
identities.

In formulas, q are the student's probabilities, and p are the teacher's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_batches import Batch, random_batch
from torch import Tensor

from fedstill import losses

CLASSES = 5
BATCH = random_batch(7, classes=CLASSES)
IS_LABEL = torch.nn.functional.one_hot(BATCH.labels, CLASSES).bool()
TEMPERATURES = [0.5, 1.0, 4.0]


def softmax(logits: np.ndarray) -> np.ndarray:
    """The probabilities of one example."""
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """The Kullback-Leibler divergence of q from p."""
    return float((p * np.log(p / q)).sum())


def expected_loss(
    name: str, student: np.ndarray, teacher: np.ndarray, label: int, tau: float
) -> float:
    """One example of a loss, from the papers' formulas."""
    p = softmax(teacher / tau)
    q = softmax(student / tau)
    not_label = np.arange(CLASSES) != label
    match name:
        case "kd":
            loss = divergence(p, q)
        case "tckd":
            binary_p = np.array([p[label], 1 - p[label]])
            binary_q = np.array([q[label], 1 - q[label]])
            loss = divergence(binary_p, binary_q)
        case "target_kl":
            loss = p[label] * np.log(p[label] / q[label])
        case "nckd":
            loss = divergence(softmax(teacher[not_label] / tau), softmax(student[not_label] / tau))
        case "nckd_zero":
            zeroed_teacher = np.where(not_label, teacher, 0.0)
            zeroed_student = np.where(not_label, student, 0.0)
            loss = divergence(softmax(zeroed_teacher / tau), softmax(zeroed_student / tau))
        case "nckd_slice":
            loss = divergence(p[not_label], q[not_label])
        case _:
            raise ValueError(name)
    return float(tau**2 * loss)


def distillation(name: str, batch: Batch, tau: float) -> Tensor:
    """A loss of the package by its name."""
    if name == "kd":
        return losses.kd(batch.student, batch.teacher, tau)
    loss = getattr(losses, name)
    return loss(batch.student, batch.teacher, batch.labels, tau)


@pytest.mark.parametrize("tau", TEMPERATURES)
@pytest.mark.parametrize("name", ["kd", "tckd", "target_kl", "nckd", "nckd_zero", "nckd_slice"])
def test_distillation_is_its_formula(name: str, tau: float) -> None:
    expected = [
        expected_loss(name, student, teacher, int(label), tau)
        for student, teacher, label in zip(
            BATCH.student.numpy(), BATCH.teacher.numpy(), BATCH.labels, strict=True
        )
    ]

    np.testing.assert_allclose(distillation(name, BATCH, tau).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_cross_entropy_is_its_formula(tau: float) -> None:
    logits = BATCH.student
    labels = BATCH.labels
    expected = [
        -np.log(softmax(row / tau)[label])
        for row, label in zip(logits.numpy(), labels, strict=True)
    ]

    np.testing.assert_allclose(
        losses.cross_entropy(logits, labels, tau).numpy(), expected, rtol=1e-12
    )
    torch_loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses.cross_entropy(logits, labels), torch_loss)


@pytest.mark.parametrize("floor", [1e-8, 1e-3, 0.5])
@pytest.mark.parametrize("tau", [0.01, 0.5, 4.0])
def test_cross_entropy_over_a_floor_is_its_formula_and_has_its_gradient(
    tau: float, floor: float
) -> None:
    logits = BATCH.student.clone().requires_grad_()
    labels = BATCH.labels

    loss = losses.cross_entropy(logits, labels, tau, floor)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)

    q = np.array([softmax(row / tau) for row in BATCH.student.numpy()])
    q_label = q[np.arange(len(labels)), labels][:, None]
    expected = -np.log(q_label + floor)[:, 0]
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    expected_gradient = q_label / (q_label + floor) * (q - IS_LABEL.numpy()) / tau
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, atol=1e-9)


def test_a_floor_bounds_the_loss_of_a_cold_client() -> None:
    """At temperature 0.01 a difference of 4 between two logits is one of 400."""
    logits = torch.tensor([[4.0, 0.0]], dtype=torch.float32, requires_grad=True)
    labels = torch.tensor([1])

    unbounded = losses.cross_entropy(logits, labels, 0.01)
    bounded = losses.cross_entropy(logits, labels, 0.01, 1e-8)
    (unbounded_gradient,) = torch.autograd.grad(unbounded.sum(), logits)
    (bounded_gradient,) = torch.autograd.grad(bounded.sum(), logits)

    assert float(unbounded.detach()) == pytest.approx(400)
    assert float(bounded.detach()) == pytest.approx(-np.log(1e-8))
    assert float(unbounded_gradient.abs().max()) == pytest.approx(100)
    assert float(bounded_gradient.abs().max()) == 0


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_masked_kl_is_its_formula(tau: float) -> None:
    """A mask may be one for all examples, or have a row for each."""
    mask = torch.tensor([1.5, 0.0, 1.0, 0.0, 1.0])
    p = torch.softmax(BATCH.teacher / tau, -1).numpy()
    q = torch.softmax(BATCH.student / tau, -1).numpy()

    loss = losses.masked_kl(BATCH.student, BATCH.teacher, mask, tau)
    by_row = losses.masked_kl(BATCH.student, BATCH.teacher, mask.expand(7, CLASSES), tau)

    terms = mask.numpy() * p * np.log(p / q)
    np.testing.assert_allclose(loss.numpy(), tau**2 * terms.sum(-1), rtol=1e-10)
    torch.testing.assert_close(by_row, loss)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    norms = np.sqrt((first @ first) * (second @ second))
    return float(first @ second / norms)


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_model_contrast_is_its_formula(tau: float) -> None:
    features = BATCH.student
    near = BATCH.teacher
    far = random_batch(7, classes=CLASSES, seed=6).student

    loss = losses.model_contrast(features, near, far, tau)

    expected = []
    for row in range(7):
        to_near = np.exp(cosine(features[row].numpy(), near[row].numpy()) / tau)
        to_far = np.exp(cosine(features[row].numpy(), far[row].numpy()) / tau)
        expected.append(-np.log(to_near / (to_near + to_far)))
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-10)

    between_equals = losses.model_contrast(features, near, near, tau)
    np.testing.assert_allclose(between_equals.numpy(), np.log(2), rtol=1e-12)
    swapped = losses.model_contrast(features, far, near, tau)
    shares = (-loss).exp() + (-swapped).exp()
    torch.testing.assert_close(shares, torch.ones(7).double())
    smallest = losses.model_contrast(features, features, -features, tau)
    assert smallest.max() < loss.min()


def test_other_mse_is_its_formula() -> None:
    squares = (BATCH.student - BATCH.teacher).numpy() ** 2
    squares[IS_LABEL.numpy()] = 0
    sums = squares.sum(1)

    total = losses.other_mse(BATCH.student, BATCH.teacher, BATCH.labels)
    mean = losses.other_mse(BATCH.student, BATCH.teacher, BATCH.labels, "mean")

    np.testing.assert_allclose(total.numpy(), sums, rtol=1e-12)
    np.testing.assert_allclose(mean.numpy(), sums / (CLASSES - 1), rtol=1e-12)


def test_standardised_logits_have_mean_0_and_unbiased_std_1() -> None:
    """The formula adds 1e-6 to the standard deviation."""
    logits = BATCH.student

    standardised = losses.standardize(logits).numpy()

    np.testing.assert_allclose(standardised.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(standardised.std(-1, ddof=1), 1, rtol=1e-5)
    centred = logits - logits.mean(-1, keepdim=True)
    expected = centred / (logits.std(-1, keepdim=True) + 1e-6)
    np.testing.assert_allclose(standardised, expected, rtol=1e-12)


def test_proximal_is_half_mu_times_the_squared_distance() -> None:
    """Entries of the anchor that are not trained, such as buffers, do not count."""
    weight = torch.tensor([1.0, 2.0]).double().requires_grad_()
    params = {"a": weight, "b": torch.ones(2, 2).double()}
    anchor = {
        "a": torch.zeros(2).double(),
        "b": 3 * torch.ones(2, 2).double(),
        "buffer": torch.ones(1),
    }

    penalty = losses.proximal(params, anchor, 0.1)
    (gradient,) = torch.autograd.grad(penalty, weight)

    squared_distance = (1 + 4) + 4 * 2**2
    assert penalty.shape == ()
    assert penalty.item() == pytest.approx(0.1 / 2 * squared_distance)
    torch.testing.assert_close(gradient, 0.1 * torch.tensor([1.0, 2.0]).double())
    assert float(losses.proximal({}, {}, 1.0)) == 0


# papers.md 13.1
@pytest.mark.parametrize("name", ["nckd", "nckd_zero", "other_mse"])
def test_the_label_logit_has_no_gradient_and_no_influence(name: str) -> None:
    loss = getattr(losses, name)
    labels = BATCH.labels
    student = BATCH.student.clone().requires_grad_()
    teacher = BATCH.teacher.clone().requires_grad_()

    value = loss(student, teacher, labels)
    gradients = torch.autograd.grad(value.sum(), (student, teacher))

    for gradient in gradients:
        assert not gradient[IS_LABEL].any()
        assert gradient[~IS_LABEL].any()
    higher_student = BATCH.student + 50 * IS_LABEL
    lower_teacher = BATCH.teacher - 50 * IS_LABEL
    assert torch.equal(loss(higher_student, BATCH.teacher, labels), value)
    assert torch.equal(loss(BATCH.student, lower_teacher, labels), value)


# papers.md 13.2
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tau=st.floats(0.5, 8.0), classes=st.integers(2, 20))
def test_kd_is_its_two_parts(seed: int, tau: float, classes: int) -> None:
    """A certain teacher leaves few digits of 1 - p_label, hence the tolerance."""
    batch = random_batch(4, classes=classes, seed=seed)
    p = torch.softmax(batch.teacher / tau, -1)
    p_label = p.gather(1, batch.labels[:, None])[:, 0]

    kd = distillation("kd", batch, tau)
    tckd = distillation("tckd", batch, tau)
    decoupled = tckd + (1 - p_label) * distillation("nckd", batch, tau)
    sliced = distillation("target_kl", batch, tau) + distillation("nckd_slice", batch, tau)

    torch.testing.assert_close(decoupled, kd, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sliced, kd, rtol=1e-6, atol=1e-9)
    assert (kd > -1e-9).all()
    assert (tckd > -1e-9).all()


@pytest.mark.parametrize("tau", [1.0, 4.0])
def test_subtracting_1000_from_the_label_is_removing_it_and_zeroing_it_is_not(tau: float) -> None:
    penalty = 1000.0 * IS_LABEL
    log_q = torch.log_softmax(BATCH.student / tau - penalty, -1)
    p = torch.softmax(BATCH.teacher / tau - penalty, -1)
    masked = tau**2 * torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)

    torch.testing.assert_close(distillation("nckd", BATCH, tau), masked)
    assert (distillation("nckd_zero", BATCH, tau) - masked).abs().max() > 0.01


def test_zeroing_keeps_the_mass_the_paper_notes_name() -> None:
    """If all logits but the label's move by one constant, nothing changes for a label that is
    removed, and something for a label at 0.
    """
    logits = torch.tensor([[3.0, 1.0, -2.0, 0.5]]).double()
    labels = torch.tensor([0])
    zeroed = torch.tensor([[0.0, 1.0, -2.0, 0.5]]).double()
    moved = logits + 1

    mass_of_label = float(torch.softmax(zeroed, -1)[0, 0])

    assert mass_of_label == pytest.approx(0.18, abs=0.005), "two digits are printed"
    assert float(losses.nckd(moved, logits, labels)) == pytest.approx(0, abs=1e-12)
    assert float(losses.nckd_zero(moved, logits, labels)) > 1e-3


def test_target_kl_raises_a_label_that_the_binary_form_lowers() -> None:
    """The student is more certain than the teacher. The gradient of target_kl is that of
    cross-entropy, times the teacher's probability of a third.
    """
    student = torch.tensor([[4.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.zeros(1, 3).double()
    labels = torch.tensor([0])

    target_kl = losses.target_kl(student, teacher, labels).sum()
    binary = losses.tckd(student, teacher, labels).sum()
    cross_entropy = losses.cross_entropy(student, labels).sum()
    (raising,) = torch.autograd.grad(target_kl, student)
    (lowering,) = torch.autograd.grad(binary, student)
    (of_cross_entropy,) = torch.autograd.grad(cross_entropy, student)

    assert float(raising[0, 0]) < 0 < float(lowering[0, 0])
    torch.testing.assert_close(raising, of_cross_entropy / 3)


# papers.md 13.12
def test_masked_kl_has_the_gradient_of_masked_cross_entropy_and_is_kd_under_ones() -> None:
    student = BATCH.student.clone().requires_grad_()
    teacher = BATCH.teacher
    mask = torch.tensor([2.0, 1.0, 0.0, 1.0, 0.0]).double()

    divergence = losses.masked_kl(student, teacher, mask)
    cross_entropy = -(mask * torch.softmax(teacher, -1) * torch.log_softmax(student, -1))
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    (expected,) = torch.autograd.grad(cross_entropy.sum(), student)

    torch.testing.assert_close(gradient, expected)
    kd = losses.kd(student, teacher)
    torch.testing.assert_close(losses.masked_kl(student, teacher, torch.ones(5)), kd)
    without_classes = losses.masked_kl(student, teacher, torch.zeros(5))
    assert torch.equal(without_classes, torch.zeros(7).double())


def test_confidence_survives_where_probabilities_round_to_one() -> None:
    """The probabilities of the label, 1 / (1 + exp(-60)) and 1 / (1 + exp(-50)), are both 1 in
    float64; the difference of their logarithms is not 0.
    """
    student = torch.tensor([[60.0, 0.0]]).double()
    teacher = torch.tensor([[50.0, 0.0]]).double()

    loss = losses.target_kl(student, teacher, torch.tensor([0]))

    assert float(loss) == pytest.approx(np.exp(-60.0) - np.exp(-50.0), rel=1e-12)
