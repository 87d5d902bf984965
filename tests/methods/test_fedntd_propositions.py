"""What FedNTD's paper proves: propositions 1 to 3 and equation 14, in float64, with the gradients
of autograd.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from double import NEAR
from fedstill.losses import kd, nckd_slice, target_kl
from fedstill.metrics.local_models import gradient_diversity

CLASSES, CLIENTS = 10, 20
EXAMPLE = Path(__file__).parents[2] / "examples" / "even_model.py"


def even_overall() -> Tensor:
    """Label shares (K, C) of uneven clients whose mean is uniform."""
    draw = torch.Generator().manual_seed(3)
    one = torch.rand(2, CLASSES, generator=draw, dtype=torch.float64) ** 4
    turns = torch.stack(
        [row.roll(i) for row in one / one.sum(1, keepdim=True) for i in range(CLASSES)]
    )
    assert turns.shape[0] == CLIENTS
    return turns


def out_local(shares: Tensor) -> Tensor:
    return (1 - shares) / (CLASSES - 1)


def diversity(shares: Tensor, beta: float | Tensor) -> Tensor:
    """Equation 8 where the class gradients are orthonormal and client k's gradient is p^k + beta
    p~^k.
    """
    each = shares + beta * out_local(shares)
    return each.square().sum(1).mean() / each.mean(0).square().sum()


def constant(shares: Tensor) -> Tensor:
    """M of equation 30, for equation 8 as it is printed."""
    spread = shares.var(1, correction=0).mean()
    return 2 * CLASSES**3 / (CLASSES - 1) ** 2 * spread


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 4.0, 9.0, 20.0])
def test_proposition_1_lambda_of_real_gradients_has_the_closed_form(beta: float) -> None:
    """A network whose class losses have orthogonal gradients of one length; autograd takes the
    clients' gradients.
    """
    shares, length = even_overall(), 0.7
    turn, _ = torch.linalg.qr(
        torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(0)).double()
    )
    w = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
    gradients = []
    for p in shares:
        by_class = length * (turn @ w)  # L_c(w), linear, so that its gradient is a row of ``turn``
        (gradient,) = torch.autograd.grad(((p + beta * out_local(p)) * by_class).sum(), w)
        gradients.append({"w": gradient})
    spread = float(shares.var(1, correction=0).mean())
    closed = 1 + CLASSES**2 * (1 - beta / (CLASSES - 1)) ** 2 / (1 + beta) ** 2 * spread
    assert gradient_diversity(gradients) == pytest.approx(closed, rel=NEAR)
    assert float(diversity(shares, beta)) == pytest.approx(closed, rel=NEAR)
    assert (closed == 1) == (beta == CLASSES - 1), "only there do all clients agree"


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0, 3.999, 4.0])
def test_proposition_1_more_beta_lowers_lambda_at_least_as_fast_as_equation_9_says(
    beta: float,
) -> None:
    shares = even_overall()
    at = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(diversity(shares, at), at)
    expected = -constant(shares) * (CLASSES / (1 + at) ** 3 - 1 / (1 + at) ** 2)  # equation 30
    torch.testing.assert_close(slope, expected.detach(), rtol=NEAR, atol=NEAR)
    bound = float(-constant(shares) / (1 + beta) ** 2)
    assert (
        float(slope) <= bound * (1 - NEAR)
        if beta < CLASSES / 2 - 1
        else float(slope) == pytest.approx(bound)
    )


def test_proposition_1_the_bound_fails_above_half_the_classes_and_the_slope_turns_below() -> None:
    shares = even_overall()
    slopes = {}
    for beta in (4.5, 8.9, 9.1):
        at = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(diversity(shares, at), at)
        slopes[beta] = float(slope)
    assert -constant(shares) / 5.5**2 < slopes[4.5] < slopes[8.9] < 0 < slopes[9.1]


def test_equations_20_and_25_as_they_are_printed() -> None:
    """Without 1/K under the sum, equation 20 is Lambda / K^2; equation 23 has (1 + beta)^2 where it
    is over C^2.
    """
    shares, beta = even_overall(), 0.8
    each = shares + beta * out_local(shares)
    printed = each.square().sum(1).mean() / each.sum(0).square().sum()
    torch.testing.assert_close(printed, diversity(shares, beta) / CLIENTS**2, rtol=NEAR, atol=NEAR)
    factor = CLASSES**2 / CLIENTS**3 * (1 - beta / (CLASSES - 1)) ** 2 / (1 + beta) ** 2
    varies = factor * shares.var(1, correction=0).sum()
    torch.testing.assert_close(printed, varies + 1 / CLIENTS**2, rtol=NEAR, atol=NEAR)
    assert float(varies) + CLASSES**2 / CLIENTS**2 > 2 * float(printed)


def examples(labels: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (
        3 * torch.randn(len(labels), 4, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    return student, teacher, torch.tensor(labels)


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2, 3], [1, 1, 3, 1], [2, 2]])
@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_proposition_2_the_divergence_is_one_over_in_local_and_one_over_out_local_classes(
    labels: list[int], tau: float
) -> None:
    """Equation 14: its left sides by the library's losses, its right sides class by class."""
    student, teacher, y = examples(labels, seed=len(labels))
    log_q, log_p = (
        np.log(np.exp(z) / np.exp(z).sum(1, keepdims=True))
        for z in (student.numpy() / tau, teacher.numpy() / tau)
    )
    entries = np.exp(log_p) * (log_p - log_q)  # -q^g(c) log(q^l(c) / q^g(c))
    p = np.bincount(labels, minlength=4) / len(labels)
    true = not_true = misprinted = 0.0
    for c in range(4):
        inside = np.array(labels) == c
        if inside.any():
            true += p[c] * entries[inside, c].mean()
        if not inside.all():
            not_true += (1 - p[c]) / 3 * entries[~inside, c].mean()
            misprinted += p[c] * entries[~inside, c].mean()
    left = {
        "true": target_kl(student, teacher, y, tau),
        "not": nckd_slice(student, teacher, y, tau),
    }
    assert float(left["true"].mean()) / tau**2 == pytest.approx(true, abs=NEAR)
    assert float(left["not"].mean()) / tau**2 / 3 == pytest.approx(not_true, abs=NEAR)
    assert abs(not_true - misprinted) > 1e-3, "its second line prints p for p~"
    whole = left["true"] + left["not"]
    torch.testing.assert_close(whole, kd(student, teacher, tau), rtol=NEAR, atol=NEAR)


def test_proposition_2_the_gradients_of_both_sides_agree() -> None:
    student, teacher, y = examples([0, 0, 1, 2, 2, 2, 3], seed=5)
    student.requires_grad_()
    (ours,) = torch.autograd.grad(nckd_slice(student, teacher, y).mean() / 3, student)
    entries = teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))
    p = torch.bincount(y, minlength=4).double() / len(y)
    right = sum((1 - p[c]) / 3 * entries[y != c, c].mean() for c in range(4))
    (theirs,) = torch.autograd.grad(right, student)
    torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("classes", [3, 10])
def test_proposition_3_in_the_numbers_that_the_example_prints(
    classes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a mean over any two classes, e_a / 2 + e_b / 2, the uniform one is sqrt(1/2 - 1/C)
    away.
    """
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(classes)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = re.findall(
        r"^  (\D+?) +([\d.]+) +shares ([\d.]+) to ([\d.]+)$", capsys.readouterr().out, re.M
    )
    equal, increasing, one_class, searched, equal_of_pair, searched_of_pair = printed

    increasing_shares = np.arange(1, classes + 1) / (classes * (classes + 1) / 2)
    first_two_classes = np.array([0.5, 0.5, *np.zeros(classes - 2)])
    largest = np.linalg.norm(first_two_classes - increasing_shares)
    smallest = np.sqrt(1 / 2 - 1 / classes)
    assert float(equal[1]) == pytest.approx(smallest, abs=1e-3)
    assert float(increasing[1]) == pytest.approx(largest, abs=5e-4)
    assert float(one_class[1]) == pytest.approx(np.sqrt(1.5), abs=5e-4)
    assert searched[1:] == equal[1:], "the search finds equal shares"

    # Two of three classes have the same best model, so the proposition does not apply.
    assert float(equal_of_pair[1]) == 0.667
    assert float(searched_of_pair[1]) == 0.5
