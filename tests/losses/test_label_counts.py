"""Objectives that know a client's label counts: what they are at their edges, and their
gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedstill.losses import adjusted_cross_entropy, minority_kd, nckd


def logits(seed: int, classes: int = 6) -> Tensor:
    return 3 * torch.randn(
        20, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def test_adjusted_cross_entropy_is_that_of_the_adjusted_logits() -> None:
    z, y = logits(0).requires_grad_(), torch.arange(20) % 6
    scale, shift = torch.linspace(0.1, 1, 6).double(), torch.linspace(-3, 3, 6).double()
    loss = adjusted_cross_entropy(z, y, scale, shift)
    torch.testing.assert_close(
        loss, nn.functional.cross_entropy(scale * z + shift, y, reduction="none")
    )
    assert torch.equal(
        adjusted_cross_entropy(z, y), nn.functional.cross_entropy(z, y, reduction="none")
    )
    (slope,) = torch.autograd.grad(loss.sum(), z)
    p = (scale * z).add(shift).softmax(1).detach()
    torch.testing.assert_close(slope, scale * (p - nn.functional.one_hot(y, 6)))


def test_without_a_majority_every_other_class_is_distilled() -> None:
    s, t, y = logits(0), logits(1), torch.arange(20) % 6
    assert torch.equal(
        minority_kd(s, t, y, torch.zeros(6, dtype=torch.bool), 2.0), nckd(s, t, y, 2.0)
    )
    own = nn.functional.one_hot(y, 6).bool()
    assert torch.equal(minority_kd(s, t, y, own), nckd(s, t, y)), "the label itself does not count"


def test_the_teacher_says_nothing_of_majority_classes_and_the_label_nothing_at_all() -> None:
    y, majority, tau = torch.arange(20) % 6, torch.tensor([1, 0, 0, 1, 0, 0]).bool(), 3.0
    s, t = logits(0).requires_grad_(), logits(1)
    far = minority_kd(s, t, y, majority, tau)
    (slope,) = torch.autograd.grad(far.sum(), s)
    for i in range(20):
        others = [c for c in range(6) if c != y[i]]
        small = [c for c in others if not majority[c]]
        p, q = (t[i, small] / tau).softmax(0), (s[i, others] / tau).softmax(0).detach()
        kept = torch.stack([q[others.index(c)] for c in small])
        torch.testing.assert_close(far[i].detach(), tau**2 * (p * (p / kept).log()).sum())
        expected = tau * q
        for c, v in zip(small, p, strict=True):
            expected[others.index(c)] -= tau * v
        torch.testing.assert_close(slope[i, others], expected)
        assert slope[i, y[i]] == 0


def test_a_lone_minority_label_costs_nothing_and_moves_nothing_however_sure_the_logits() -> None:
    y, majority = torch.tensor([2, 2]), torch.tensor([True, True, False])
    s = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 5.0]], dtype=torch.float64, requires_grad=True)
    far = minority_kd(s, torch.tensor([[-1e4, 1e4, 0.0], [1.0, 2.0, 3.0]]), y, majority)
    (slope,) = torch.autograd.grad(far.sum(), s)
    assert far.tolist() == [0, 0]
    assert not slope.any()


def test_a_target_of_equal_logits_is_met_by_a_student_that_is_uniform_on_the_minority() -> None:
    majority = torch.tensor([True, False, False, False])
    student = torch.tensor([[-1e4, 2.0, 2.0, 7.0]], dtype=torch.float64)
    far = minority_kd(student, torch.zeros(1, 4), torch.tensor([3]), majority)
    torch.testing.assert_close(far, torch.zeros(1).double())
