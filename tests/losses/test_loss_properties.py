"""Properties of every loss: finite at any gap, one value of the student's dtype per example,
vectorisable, independent of the rest of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from logit_batches import Batch, random_batch
from torch import Tensor
from torch.func import grad, vmap

from double import NEAR
from fedstill import losses

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

CLASSES = 6
MASK = torch.tensor([1.5, 0.0, 1.0, 0.0, 1.0, 1.0])


def three_teachers(teacher: Tensor) -> Tensor:
    """Three teachers made of one."""
    return torch.stack([teacher, teacher.flip(-1), -teacher])


def weighted_by_entropy(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Distillation from three teachers, weighted by their entropies."""
    teachers = three_teachers(teacher)
    weighted = losses.entropy_weights(teachers) * losses.multi_kd(student, teachers)
    return weighted.sum(0)


def weighted_by_confidence(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Distillation from three teachers, weighted by their confidence in the labels."""
    teachers = three_teachers(teacher)
    weighted = losses.confidence_weights(teachers, labels) * losses.multi_kd(student, teachers)
    return weighted.sum(0)


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
    "multi_kd": lambda s, t, y: losses.multi_kd(s, three_teachers(t), 4.0).sum(0),
    "multi_nckd": lambda s, t, y: losses.multi_nckd(s, three_teachers(t), y, 4.0).sum(0),
    "multi_tckd": lambda s, t, y: losses.multi_tckd(s, three_teachers(t), y, 4.0).sum(0),
    "entropy_weights": weighted_by_entropy,
    "confidence_weights": weighted_by_confidence,
    "adjusted_cross_entropy": lambda s, t, y: losses.adjusted_cross_entropy(s, y, 0.5 + MASK, MASK),
    "minority_kd": lambda s, t, y: losses.minority_kd(s, t, y, MASK > 1),
    "minority_kd, cold": lambda s, t, y: losses.minority_kd(s, t, y, MASK > 1, 0.01),
    "soft_cross_entropy": lambda s, t, y: losses.soft_cross_entropy(s, t.softmax(-1)),
    "logit_error": lambda s, t, y: losses.logit_error(s, t),
    "model_contrast": lambda s, t, y: losses.model_contrast(s, t, t.roll(1, -1)),
    "model_contrast, cold": lambda s, t, y: losses.model_contrast(s, t, t.roll(1, -1), 0.01),
}
"""Losses of student s, teacher t and labels y. A new loss gets a row here."""

every_loss = pytest.mark.parametrize("loss", TABLE.values(), ids=TABLE.keys())


def loss_of(loss: Loss, batch: Batch) -> Tensor:
    """The loss of a batch."""
    return loss(batch.student, batch.teacher, batch.labels)


EXTREME_LOGITS = torch.tensor(
    [
        [0.0, 0, 0, 0, 0, 0],
        [1e4, 0, 0, 0, 0, 0],
        [-1e4, 0, 0, 0, 0, 0],
        [1e4, 1e4, -1e4, -1e4, 0, 0],
        [-1e4, 1e4, -1e4, 1e4, -1e4, 1e4],
        [1e4, 1e4, 1e4, 1e4, 1e4, 1e4],
        [5e3, -5e3, 1e-3, 0, 1, 2],
    ]
)


def extreme_pairs() -> Batch:
    """All pairs of extreme logits, each with every label."""
    rows = torch.arange(len(EXTREME_LOGITS))
    combinations = torch.cartesian_prod(rows, rows, torch.arange(CLASSES))
    student_rows, teacher_rows, labels = combinations.unbind(1)
    return Batch(EXTREME_LOGITS[student_rows], EXTREME_LOGITS[teacher_rows], labels)


@every_loss
def test_value_and_gradient_are_finite_at_gaps_of_1e4(loss: Loss) -> None:
    batch = extreme_pairs()
    logits = (batch.student.requires_grad_(), batch.teacher.requires_grad_())

    value = loss_of(loss, batch)
    gradients = torch.autograd.grad(value.sum(), logits, allow_unused=True)

    assert value.shape == batch.labels.shape
    assert value.isfinite().all()
    for gradient in gradients:
        assert gradient is None or gradient.isfinite().all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_value_per_example_of_the_students_dtype(loss: Loss, dtype: torch.dtype) -> None:
    """A teacher may run in lower precision."""
    batch = random_batch(9, classes=CLASSES, dtype=dtype)
    low_precision_teacher = replace(batch, teacher=batch.teacher.to(torch.bfloat16))

    assert loss_of(loss, batch).shape == (9,)
    assert loss_of(loss, batch).dtype == dtype
    assert loss_of(loss, low_precision_teacher).dtype == dtype
    assert loss_of(loss, batch[:0]).shape == (0,)


@every_loss
def test_an_example_does_not_depend_on_its_batch(loss: Loss) -> None:
    batch = random_batch(9, classes=CLASSES, dtype=torch.float32)
    reversed_batch = Batch(batch.student.flip(0), batch.teacher.flip(0), batch.labels.flip(0))

    values = loss_of(loss, batch)

    assert torch.equal(loss_of(loss, batch[2:5]), values[2:5])
    assert torch.equal(loss_of(loss, reversed_batch), values.flip(0))


@every_loss
def test_clients_can_be_stacked(loss: Loss) -> None:
    def summed_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return loss(student, teacher, labels).sum()

    stacked = random_batch(4, 9, classes=CLASSES)
    clients = [stacked[client] for client in range(4)]

    values = torch.stack([loss_of(loss, client) for client in clients])
    gradients = torch.stack([loss_of(grad(summed_loss), client) for client in clients])

    assert_near(loss_of(vmap(loss), stacked), values)
    assert_near(loss_of(vmap(vmap(loss)), stacked), values)
    assert_near(loss_of(vmap(grad(summed_loss)), stacked), gradients)


def assert_near(value: Tensor, expected: Tensor) -> None:
    """Two ways of computing a number agree."""
    torch.testing.assert_close(value, expected, rtol=NEAR, atol=NEAR)


@every_loss
def test_the_gradient_is_the_slope(loss: Loss) -> None:
    batch = random_batch(3, classes=CLASSES, scale=0.3)

    assert torch.autograd.gradcheck(
        lambda student: loss(student, batch.teacher, batch.labels), batch.student.requires_grad_()
    )


@every_loss
def test_inputs_are_not_changed(loss: Loss) -> None:
    batch = random_batch(9, classes=CLASSES, dtype=torch.float32)
    copy = Batch(batch.student.clone(), batch.teacher.clone(), batch.labels.clone())

    loss_of(loss, batch)

    assert torch.equal(batch.student, copy.student)
    assert torch.equal(batch.teacher, copy.teacher)
    assert torch.equal(batch.labels, copy.labels)


def test_a_temperature_may_be_a_tensor_and_differ_between_stacked_clients() -> None:
    batch = random_batch(4, 9, classes=CLASSES)
    taus = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)

    stacked = vmap(losses.cross_entropy)(batch.student, batch.labels, taus)

    for client in range(4):
        tau = float(taus[client])
        expected = losses.cross_entropy(batch.student[client], batch.labels[client], tau)
        assert_near(stacked[client], expected)
    student = batch.student[0].float()
    teacher = batch.student[1].float()
    assert losses.kd(student, teacher, taus[0]).dtype == torch.float32


def test_standardised_equal_logits_are_zeros_with_a_finite_gradient() -> None:
    logits = torch.full((2, 5), 1e4, requires_grad=True)

    standardised = losses.standardize(logits)
    (gradient,) = torch.autograd.grad(2 * standardised[:, 0].sum(), logits)

    assert torch.equal(standardised, torch.zeros(2, 5))
    assert gradient.isfinite().all()


def test_every_loss_of_logits_has_a_row() -> None:
    functions = {row.split(",")[0] for row in TABLE}
    functions |= {"standardize", "proximal", "quadratic"}

    assert functions == set(losses.__all__)


def test_penalties_of_stacked_clients() -> None:
    stacked_params = {
        "a": torch.arange(6.0).reshape(3, 2).double(),
        "b": torch.ones(3, 4).double(),
    }
    anchor = {"a": torch.zeros(2).double(), "b": torch.zeros(4).double()}

    stacked = vmap(lambda params: losses.proximal(params, anchor, 0.5))(stacked_params)

    for client in range(3):
        params = {name: values[client] for name, values in stacked_params.items()}
        assert_near(stacked[client], losses.proximal(params, anchor, 0.5))
