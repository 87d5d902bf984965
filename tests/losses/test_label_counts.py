"""Objectives that know a client's label counts: their values in extreme cases, and their
gradients.
"""

from __future__ import annotations

import torch
from logit_batches import random_batch
from torch import nn

from fedstill.losses import adjusted_cross_entropy, minority_kd, nckd

CLASSES = 6
BATCH = random_batch(20, classes=CLASSES)


def test_adjusted_cross_entropy_is_that_of_the_adjusted_logits() -> None:
    """Without an adjustment, it is cross-entropy."""
    labels = BATCH.labels
    logits = BATCH.student.clone().requires_grad_()
    scale = torch.linspace(0.1, 1, CLASSES).double()
    shift = torch.linspace(-3, 3, CLASSES).double()

    loss = adjusted_cross_entropy(logits, labels, scale, shift)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    unadjusted_loss = adjusted_cross_entropy(BATCH.student, labels)

    adjusted = scale * BATCH.student + shift
    cross_entropy = nn.CrossEntropyLoss(reduction="none")
    torch.testing.assert_close(loss.detach(), cross_entropy(adjusted, labels))
    # The gradient of cross-entropy, times the derivative of the adjustment.
    error = adjusted.softmax(1) - nn.functional.one_hot(labels, CLASSES)
    torch.testing.assert_close(gradient, scale * error)
    assert torch.equal(unadjusted_loss, cross_entropy(BATCH.student, labels))


def test_without_a_majority_all_classes_but_the_label_are_distilled() -> None:
    """Whether the label is in the majority does not matter."""
    student = BATCH.student
    teacher = BATCH.teacher
    labels = BATCH.labels
    nobody = torch.zeros(CLASSES, dtype=torch.bool)
    label_only = nn.functional.one_hot(labels, CLASSES).bool()

    expected = nckd(student, teacher, labels, 2.0)

    assert torch.equal(minority_kd(student, teacher, labels, nobody, 2.0), expected)
    assert torch.equal(minority_kd(student, teacher, labels, label_only, 2.0), expected)


def test_the_teacher_is_used_on_the_minority_and_the_label_is_left_out() -> None:
    """The student's probabilities are those among all classes but the label; the teacher's are
    those among the minority.
    """
    tau = 3.0
    majority = torch.tensor([True, False, False, True, False, False])
    student = BATCH.student.clone().requires_grad_()

    loss = minority_kd(student, BATCH.teacher, BATCH.labels, majority, tau)
    (gradients,) = torch.autograd.grad(loss.sum(), student)

    for row in range(len(BATCH.labels)):
        is_candidate = torch.arange(CLASSES) != BATCH.labels[row]
        is_minority = is_candidate & ~majority
        q = torch.zeros(CLASSES).double()
        q[is_candidate] = (BATCH.student[row, is_candidate] / tau).softmax(0)
        p = torch.zeros(CLASSES).double()
        p[is_minority] = (BATCH.teacher[row, is_minority] / tau).softmax(0)

        ratio = p[is_minority] / q[is_minority]
        expected = tau**2 * (p[is_minority] * ratio.log()).sum()
        torch.testing.assert_close(loss[row].detach(), expected)
        torch.testing.assert_close(gradients[row], tau * (q - p))
        assert gradients[row, BATCH.labels[row]] == 0


def test_without_minority_classes_besides_the_label_loss_and_gradient_are_zero() -> None:
    """However large the logits are."""
    labels = torch.tensor([2, 2])
    majority = torch.tensor([True, True, False])
    student = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 5.0]]).double().requires_grad_()
    teacher = torch.tensor([[-1e4, 1e4, 0.0], [1.0, 2.0, 3.0]])

    loss = minority_kd(student, teacher, labels, majority)
    (gradient,) = torch.autograd.grad(loss.sum(), student)

    assert loss.tolist() == [0, 0]
    assert not gradient.any()


def test_equal_logits_of_a_teacher_are_met_by_a_student_that_is_uniform_on_the_minority() -> None:
    majority = torch.tensor([True, False, False, False])
    student = torch.tensor([[-1e4, 2.0, 2.0, 7.0]], dtype=torch.float64)

    loss = minority_kd(student, torch.zeros(1, 4), torch.tensor([3]), majority)

    torch.testing.assert_close(loss, torch.zeros(1).double())
