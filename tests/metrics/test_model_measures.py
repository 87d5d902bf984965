"""Measures of models and their surroundings: formulas in float64 against NumPy, closed forms,
identities.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.measures import landscape
from fedstill.metrics.local_models import (
    alignment,
    distribution_distance,
    gradient_diversity,
    local_accuracies,
    over_clients,
    preferred_classes,
    weight_divergence,
)

RNG = np.random.default_rng(1)


def tree(*shapes: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        f"w{i}": torch.randn(s, generator=draw, dtype=torch.float64) for i, s in enumerate(shapes)
    }


def test_a_units_class_is_that_of_its_largest_class_mean() -> None:
    activations, labels = RNG.random((40, 7)), RNG.integers(0, 4, 40)
    means = np.stack([activations[labels == c].mean(0) for c in range(4)])
    found = preferred_classes(torch.from_numpy(activations), torch.from_numpy(labels), 4)
    np.testing.assert_array_equal(found, means.argmax(0))


def test_a_class_that_was_not_tested_is_preferred_by_no_unit() -> None:
    activations = -torch.ones(4, 3)
    assert preferred_classes(activations, torch.tensor([1, 1, 2, 2]), 5).tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="one example"):
        preferred_classes(activations[:0], torch.tensor([], dtype=torch.int64), 5)


def test_many_examples_of_a_class_do_not_make_it_preferred() -> None:
    activations, labels = torch.tensor([[1.0], [1.0], [1.0], [2.0]]), torch.tensor([0, 0, 0, 1])
    assert preferred_classes(activations, labels, 2).tolist() == [1], (
        "by the sum it would be class 0"
    )


def test_alignment_is_one_with_itself_and_refuses_other_layers() -> None:
    a = torch.tensor([0, 1, 2, 0])
    assert alignment(a, a) == 1
    assert alignment(a, (a + 1) % 3) == 0
    for other in (a[:2], a[:0]):
        with pytest.raises(ConfigError, match="cannot be compared"):
            alignment(other, a) if len(other) else alignment(other, other)


def test_weight_divergence_is_both_norms_of_the_difference() -> None:
    a, b = tree((3, 2), (4,)), tree((3, 2), (4,), seed=1)
    gap = np.concatenate([(a[k] - b[k]).numpy().ravel() for k in a])
    l1, l2 = weight_divergence(a, b)
    assert l1 == pytest.approx(np.linalg.norm(gap, 1), rel=1e-12)
    assert l2 == pytest.approx(np.linalg.norm(gap, 2), rel=1e-12)
    assert weight_divergence(a, a) == (0, 0)
    with pytest.raises(ConfigError, match="'w1'"):
        weight_divergence(a, {"w0": b["w0"]})


def test_distribution_distance_normalises_accuracies_to_shares() -> None:
    accuracy, shares = RNG.random(6), RNG.dirichlet(np.ones(6))
    expected = np.abs(accuracy / accuracy.sum() - shares).sum()
    assert distribution_distance(accuracy, shares) == pytest.approx(expected, rel=1e-12)
    assert distribution_distance(3 * accuracy / 4, shares) == pytest.approx(expected, rel=1e-12), (
        "a scale is nothing"
    )
    assert distribution_distance([0.0, 0.4], [1.0, 0.0]) == 2
    assert distribution_distance([0.2, 0.4, None], [0.25, 0.5, 0.25]) == pytest.approx(0)
    assert math.isnan(distribution_distance([0.0, 0.0], [0.5, 0.5]))


# papers.md 10.8 and 13.14
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 9.0])
def test_gradient_diversity_has_its_closed_form(beta: float) -> None:
    classes, clients = 10, 20
    shares = np.eye(classes)[np.arange(clients) % classes] * 0.6 + 0.4 / classes
    shares[::2] = np.roll(shares[::2], 1, axis=1) / 2 + shares[::2] / 2
    shares += np.full(classes, 1 / classes) - shares.mean(0)  # the global distribution is uniform
    # orthonormal gradients of the classes
    basis = np.linalg.qr(RNG.normal(size=(classes, classes)))[0]
    gradients = [
        {"w": torch.from_numpy((p + beta * (1 - p) / (classes - 1)) @ basis)} for p in shares
    ]
    factor = classes**2 * (1 - beta / (classes - 1)) ** 2 / (1 + beta) ** 2
    expected = 1 + factor * np.mean([p.var() for p in shares])
    assert gradient_diversity(gradients) == pytest.approx(expected, rel=1e-10)


def test_clients_that_agree_have_a_gradient_diversity_of_one() -> None:
    one = tree((3, 2), (4,))
    assert gradient_diversity([one] * 4) == pytest.approx(1, rel=1e-12)
    assert gradient_diversity([one, {k: -v for k, v in one.items()}]) != gradient_diversity([one])
    assert math.isnan(gradient_diversity([]))
    assert math.isnan(gradient_diversity([one, {k: -v for k, v in one.items()}]))


def test_in_and_out_local_accuracy_in_both_forms_plain_and_weighted() -> None:
    counts, right = np.array([[30, 10, 0], [0, 5, 5]]), np.array([[9, 4, 1], [2, 6, 3]])
    totals = [10, 10, 10]
    shares, accuracy = counts / counts.sum(1, keepdims=True), right / 10
    events = [
        {"label_counts": c, "correct_by_class": r}
        for c, r in zip(counts.tolist(), right.tolist(), strict=True)
    ]
    others = [{"idle": True}, {"label_counts": [0, 0, 0], "correct_by_class": [0, 0, 0]}]
    found = local_accuracies([*events, *others], [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], totals)
    forms = {
        "in_local_accuracy": (accuracy * shares).sum(1),
        "out_local_accuracy": (accuracy * (1 - shares) / 2).sum(1),
        "in_local_accuracy_seen": np.array([accuracy[0, :2].mean(), accuracy[1, 1:].mean()]),
        "out_local_accuracy_seen": np.array([accuracy[0, 2], accuracy[1, 0]]),
    }
    sizes = np.array([40, 10])
    for key, each in forms.items():
        mean = np.average(each, weights=sizes)
        assert found[key] == pytest.approx(each.mean(), rel=1e-12)
        assert found[f"{key}_std"] == pytest.approx(each.std(), rel=1e-12)
        assert found[f"{key}_weighted"] == pytest.approx(mean, rel=1e-12)
        assert found[f"{key}_weighted_std"] == pytest.approx(
            np.average((each - mean) ** 2, weights=sizes) ** 0.5
        )
    joint = shares.mean(0)
    assert found["received_in_local_accuracy"] == pytest.approx(np.array([0.1, 0.2, 0.3]) @ joint)
    assert found["global_out_local_accuracy"] == pytest.approx(
        np.array([0.3, 0.2, 0.1]) @ (1 - joint) / 2
    )
    assert local_accuracies(others, [], [], totals) == {}


def test_a_client_with_all_classes_has_no_unseen_ones_and_is_left_out() -> None:
    assert over_clients([math.nan, 0.5], [3, 1])[""] == 0.5
    assert math.isnan(over_clients([math.nan], [1])["_std"])


def test_filters_of_a_random_direction_have_the_models_norms() -> None:
    params = tree((4, 3, 2, 2), (5, 6), (5,))
    found = landscape.filter_normalised(params, params, torch.Generator().manual_seed(0))
    for name in ("w0", "w1"):
        flat = (found[name].flatten(1), params[name].flatten(1))
        torch.testing.assert_close(flat[0].norm(dim=1), flat[1].norm(dim=1))
    assert not found["w2"].any(), "biases stay"
    again = landscape.filter_normalised(params, params, torch.Generator().manual_seed(0))
    assert all(torch.equal(found[k], again[k]) for k in found)


def test_the_top_of_the_hessian_is_found_of_a_quadratic() -> None:
    basis = torch.linalg.qr(torch.from_numpy(RNG.normal(size=(6, 6))))[0]
    hessian = (
        basis
        @ torch.diag(torch.tensor([9.0, -5.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64))
        @ basis.T
    )

    def loss(params: dict[str, Tensor]) -> Tensor:
        x = torch.cat([params["w0"].flatten(), params["w1"]])
        return x @ hessian @ x / 2 + x.sum()

    params = {**tree((2, 2), (2,)), "buffer": torch.zeros(3)}
    found = landscape.curvature(
        loss, params, ["w0", "w1"], torch.Generator().manual_seed(0), most=200
    )  # type: ignore[arg-type]
    # The iteration ends where a step moves the size by less than a thousandth; some such steps are
    # still to come.
    assert [size for size, _ in found] == pytest.approx([9, -5], rel=1e-2)
    for i, (_, vector) in enumerate(found):
        flat = torch.cat([vector["w0"].flatten(), vector["w1"]])
        assert float((flat @ basis[:, i]).abs()) == pytest.approx(1, rel=1e-2)


def test_the_hessian_of_a_line_is_nothing() -> None:
    found = landscape.curvature(
        lambda p: p["w0"].sum(), tree((2, 2)), ["w0"], torch.Generator().manual_seed(0)
    )
    assert [size for size, _ in found] == [0, 0]


def test_a_plane_and_noise_are_the_loss_at_moved_parameters() -> None:
    params, a, b = tree((3,)), tree((3,), seed=1), tree((3,), seed=2)

    def loss(p: object) -> Tensor:
        return (p["w0"] ** 2).sum()  # type: ignore[index]

    axis = (-1.0, 0.0, 2.0)
    found = landscape.plane(loss, params, a, b, axis)
    for i, y in enumerate(axis):
        for j, x in enumerate(axis):
            assert found[i][j] == pytest.approx(
                float(((params["w0"] + x * a["w0"] + y * b["w0"]) ** 2).sum())
            )
    noisy = landscape.under_noise(loss, params, [a, b], [0.0, 0.5])
    assert noisy[0] == pytest.approx(float((params["w0"] ** 2).sum()))
    assert noisy[1] == pytest.approx(
        sum(float(((params["w0"] + 0.5 * n["w0"]) ** 2).sum()) for n in (a, b)) / 2
    )
