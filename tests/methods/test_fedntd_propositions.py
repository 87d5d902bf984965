"""What FedNTD's paper proves: propositions 1 to 3 and equation 14, in float64, with the gradients
of autograd.
"""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from double import NEAR
from fedstill.losses import kd, nckd_slice, target_kl
from fedstill.metrics.local_models import gradient_diversity

CLASSES = 10
CLIENTS = 20
EXAMPLE = Path(__file__).parents[2] / "examples" / "even_model.py"


# Proposition 1.


def label_shares() -> Tensor:
    """Label shares (K, C) of uneven clients whose mean is uniform: all turns of two clients'."""
    draw = torch.Generator().manual_seed(3)
    scores = torch.rand(2, CLASSES, generator=draw, dtype=torch.float64) ** 4
    shares = []
    for row in scores / scores.sum(1, keepdim=True):
        shares.extend(row.roll(shift) for shift in range(CLASSES))
    assert len(shares) == CLIENTS
    return torch.stack(shares)


def out_local(shares: Tensor) -> Tensor:
    """The out-local distribution p~ of label shares p."""
    return (1 - shares) / (CLASSES - 1)


def class_weights(shares: Tensor, beta: float | Tensor) -> Tensor:
    """The weights p + beta p~ of the class gradients in the clients' gradients."""
    return shares + beta * out_local(shares)


def mean_variance(shares: Tensor) -> float:
    """The variance over clients, the mean over classes."""
    return float(shares.var(1, correction=0).mean())


def diversity(shares: Tensor, beta: float | Tensor) -> Tensor:
    """Lambda of equation 8, where the class gradients are orthonormal."""
    weights = class_weights(shares, beta)
    return weights.square().sum(1).mean() / weights.mean(0).square().sum()


def slope_of_diversity(shares: Tensor, beta: float) -> float:
    """The derivative of Lambda with respect to beta."""
    variable = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(diversity(shares, variable), variable)
    return float(slope)


def constant(shares: Tensor) -> float:
    """M of equation 30, for equation 8 as it is printed."""
    return 2 * CLASSES**3 / (CLASSES - 1) ** 2 * mean_variance(shares)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 4.0, 9.0, 20.0])
def test_proposition_1_lambda_of_real_gradients_has_the_closed_form(beta: float) -> None:
    """A network whose class losses have orthogonal gradients of one length; autograd takes the
    clients' gradients. At C - 1 alone all clients agree.
    """
    shares = label_shares()
    draw = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(CLASSES, CLASSES, generator=draw).double())
    w = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True)
    gradients = []
    for weights in class_weights(shares, beta):
        class_losses = 0.7 * rotation @ w  # linear: the gradient of each is a row of ``rotation``
        (gradient,) = torch.autograd.grad((weights * class_losses).sum(), w)
        gradients.append({"w": gradient})

    skew = (1 - beta / (CLASSES - 1)) ** 2 / (1 + beta) ** 2
    closed_form = 1 + CLASSES**2 * skew * mean_variance(shares)
    assert gradient_diversity(gradients) == pytest.approx(closed_form, rel=NEAR)
    assert float(diversity(shares, beta)) == pytest.approx(closed_form, rel=NEAR)
    assert (closed_form == 1) == (beta == CLASSES - 1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0, 3.999, 4.0])
def test_proposition_1_more_beta_lowers_lambda_at_least_as_fast_as_equation_9_says(
    beta: float,
) -> None:
    """At C / 2 - 1 exactly as fast."""
    shares = label_shares()

    slope = slope_of_diversity(shares, beta)

    equation_30 = -constant(shares) * (CLASSES / (1 + beta) ** 3 - 1 / (1 + beta) ** 2)
    assert slope == pytest.approx(equation_30, rel=NEAR, abs=NEAR)
    bound = -constant(shares) / (1 + beta) ** 2
    if beta < CLASSES / 2 - 1:
        assert slope <= bound * (1 - NEAR)
    else:
        assert slope == pytest.approx(bound)


def test_proposition_1_the_bound_fails_above_half_the_classes_and_the_slope_turns_below() -> None:
    shares = label_shares()

    assert slope_of_diversity(shares, 4.5) > -constant(shares) / 5.5**2
    slopes = [slope_of_diversity(shares, beta) for beta in (4.5, 8.9, 9.1)]
    assert slopes[0] < slopes[1] < 0 < slopes[2]


def test_equations_20_and_25_as_they_are_printed() -> None:
    """Without 1/K under the sum, equation 20 is Lambda / K^2; equation 23 has (1 + beta)^2 where it
    is over C^2.
    """
    shares = label_shares()
    beta = 0.8
    weights = class_weights(shares, beta)

    equation_20 = weights.square().sum(1).mean() / weights.sum(0).square().sum()

    expected = diversity(shares, beta) / CLIENTS**2
    torch.testing.assert_close(equation_20, expected, rtol=NEAR, atol=NEAR)
    skew = (1 - beta / (CLASSES - 1)) ** 2 / (1 + beta) ** 2
    sum_of_variances = float(shares.var(1, correction=0).sum())
    varying_part = CLASSES**2 / CLIENTS**3 * skew * sum_of_variances
    assert float(equation_20) == pytest.approx(varying_part + 1 / CLIENTS**2, rel=NEAR)
    with_printed_constant = varying_part + CLASSES**2 / CLIENTS**2
    assert with_printed_constant > 2 * float(equation_20)


# Proposition 2.


@dataclass(frozen=True)
class Examples:
    """Logits of four classes and labels."""

    student: Tensor
    teacher: Tensor
    labels: Tensor

    def divergences(self, tau: float) -> Tensor:
        """Each class's term of the divergence (B, C), at a temperature: -q^g log(q^l / q^g)."""
        log_q = (self.student / tau).log_softmax(1)
        log_p = (self.teacher / tau).log_softmax(1)
        return log_p.exp() * (log_p - log_q)

    @property
    def shares(self) -> list[float]:
        """The share of each class among the labels."""
        return (self.labels.bincount(minlength=4).double() / len(self.labels)).tolist()


def examples_of(labels: list[int], seed: int) -> Examples:
    """Drawn logits of examples with these labels."""
    draw = torch.Generator().manual_seed(seed)
    student = 3 * torch.randn(len(labels), 4, generator=draw, dtype=torch.float64)
    teacher = 3 * torch.randn(len(labels), 4, generator=draw, dtype=torch.float64)
    return Examples(student, teacher, torch.tensor(labels))


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2, 3], [1, 1, 3, 1], [2, 2]])
@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_proposition_2_the_divergence_is_one_over_in_local_and_one_over_out_local_classes(
    labels: list[int], tau: float
) -> None:
    """Equation 14: its left sides by the library's losses, its right sides class by class. Its
    second line prints p for p~.
    """
    examples = examples_of(labels, seed=len(labels))
    in_local = 0.0
    out_local = 0.0
    misprinted = 0.0
    divergences = examples.divergences(tau)
    for c, share in enumerate(examples.shares):
        of_class = divergences[examples.labels == c, c]
        of_others = divergences[examples.labels != c, c]
        if len(of_class):
            in_local += share * float(of_class.mean())
        if len(of_others):
            out_local += (1 - share) / 3 * float(of_others.mean())
            misprinted += share * float(of_others.mean())

    arguments = (examples.student, examples.teacher, examples.labels, tau)
    true_losses = target_kl(*arguments)
    not_true_losses = nckd_slice(*arguments)

    assert float(true_losses.mean()) / tau**2 == pytest.approx(in_local, abs=NEAR)
    assert float(not_true_losses.mean()) / tau**2 / 3 == pytest.approx(out_local, abs=NEAR)
    assert abs(out_local - misprinted) > 1e-3
    all_losses = kd(examples.student, examples.teacher, tau)
    torch.testing.assert_close(true_losses + not_true_losses, all_losses, rtol=NEAR, atol=NEAR)


def test_proposition_2_the_gradients_of_both_sides_agree() -> None:
    examples = examples_of([0, 0, 1, 2, 2, 2, 3], seed=5)
    student = examples.student.requires_grad_()
    divergences = examples.divergences(1.0)
    terms = []
    for c, share in enumerate(examples.shares):
        terms.append((1 - share) / 3 * divergences[examples.labels != c, c].mean())

    left_side = nckd_slice(student, examples.teacher, examples.labels).mean() / 3

    (left_gradient,) = torch.autograd.grad(left_side, student)
    (right_gradient,) = torch.autograd.grad(sum(terms), student)
    torch.testing.assert_close(left_gradient, right_gradient, rtol=NEAR, atol=NEAR)


# Proposition 3.

PRINTED_ROW = re.compile(r"^  (\D+?) +([\d.]+) +shares ([\d.]+) to ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class PrintedRow:
    """A row of the example's table."""

    shares: str
    distance: float
    smallest_share: float
    largest_share: float


def rows_of(text: str) -> list[PrintedRow]:
    """The rows that the example printed."""
    rows = []
    for shares, distance, smallest, largest in PRINTED_ROW.findall(text):
        rows.append(PrintedRow(shares, float(distance), float(smallest), float(largest)))
    return rows


@pytest.mark.parametrize("classes", [3, 10])
def test_proposition_3_in_the_numbers_that_the_example_prints(
    classes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a mean over any two classes, e_a / 2 + e_b / 2, the uniform one is sqrt(1/2 - 1/C)
    away. The search finds equal shares.
    """
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(classes)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = rows_of(capsys.readouterr().out)
    equal, increasing, one_class, searched, equal_of_pair, searched_of_pair = rows

    increasing_shares = np.arange(1, classes + 1) / (classes * (classes + 1) / 2)
    first_two_classes = np.array([0.5, 0.5, *np.zeros(classes - 2)])
    largest = np.linalg.norm(first_two_classes - increasing_shares)
    smallest = np.sqrt(1 / 2 - 1 / classes)
    assert equal.distance == pytest.approx(smallest, abs=1e-3)
    assert increasing.distance == pytest.approx(largest, abs=5e-4)
    assert one_class.distance == pytest.approx(np.sqrt(1.5), abs=5e-4)
    assert searched.distance == equal.distance
    assert searched.smallest_share == equal.smallest_share
    assert searched.largest_share == equal.largest_share

    # Two of three classes have the same best model, so the proposition does not apply.
    assert equal_of_pair.distance == 0.667
    assert searched_of_pair.distance == 0.5
