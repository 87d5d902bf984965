"""Measures of models and their surroundings: formulas in float64 against NumPy, closed forms,
identities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def random_params(*shapes: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Normal parameters ``w0``, ``w1``, … in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{number}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for number, shape in enumerate(shapes)
    }


def negative(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with the opposite sign."""
    return {name: -value for name, value in params.items()}


def test_a_units_class_is_that_of_its_largest_class_mean() -> None:
    activations = RNG.random((40, 7))
    labels = RNG.integers(0, 4, 40)
    means = np.stack([activations[labels == label].mean(0) for label in range(4)])

    preferred = preferred_classes(torch.from_numpy(activations), torch.from_numpy(labels), 4)

    np.testing.assert_array_equal(preferred, means.argmax(0))


def test_a_class_that_was_not_tested_is_preferred_by_no_unit() -> None:
    activations = -torch.ones(4, 3)
    labels = torch.tensor([1, 1, 2, 2])

    assert preferred_classes(activations, labels, 5).tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="one example"):
        preferred_classes(activations[:0], labels[:0], 5)


def test_many_examples_of_a_class_do_not_make_it_preferred() -> None:
    """By the sum of activations it would be class 0."""
    activations = torch.tensor([[1.0], [1.0], [1.0], [2.0]])
    labels = torch.tensor([0, 0, 0, 1])

    assert preferred_classes(activations, labels, 2).tolist() == [1]


def test_alignment_is_one_with_itself_and_refuses_other_layers() -> None:
    classes = torch.tensor([0, 1, 2, 0])

    assert alignment(classes, classes) == 1
    assert alignment(classes, (classes + 1) % 3) == 0
    with pytest.raises(ConfigError, match="cannot be compared"):
        alignment(classes[:2], classes)
    with pytest.raises(ConfigError, match="cannot be compared"):
        alignment(classes[:0], classes[:0])


def test_weight_divergence_is_both_norms_of_the_difference() -> None:
    first = random_params((3, 2), (4,))
    second = random_params((3, 2), (4,), seed=1)
    difference = np.concatenate([(first[name] - second[name]).numpy().ravel() for name in first])

    l1, l2 = weight_divergence(first, second)

    assert l1 == pytest.approx(np.linalg.norm(difference, 1), rel=1e-12)
    assert l2 == pytest.approx(np.linalg.norm(difference, 2), rel=1e-12)
    assert weight_divergence(first, first) == (0, 0)
    with pytest.raises(ConfigError, match="'w1'"):
        weight_divergence(first, {"w0": second["w0"]})


def test_distribution_distance_normalises_accuracies_to_shares() -> None:
    """A common factor of all accuracies does not matter, nor does a class without accuracy."""
    accuracy = RNG.random(6)
    shares = RNG.dirichlet(np.ones(6))
    expected = np.abs(accuracy / accuracy.sum() - shares).sum()

    assert distribution_distance(accuracy, shares) == pytest.approx(expected, rel=1e-12)
    assert distribution_distance(3 * accuracy / 4, shares) == pytest.approx(expected, rel=1e-12)
    assert distribution_distance([0.0, 0.4], [1.0, 0.0]) == 2
    assert distribution_distance([0.2, 0.4, None], [0.25, 0.5, 0.25]) == pytest.approx(0)
    assert math.isnan(distribution_distance([0.0, 0.0], [0.5, 0.5]))


def skewed_shares(classes: int, clients: int) -> np.ndarray:
    """Shares of classes by client, of which the mean over clients is uniform."""
    main_class = np.eye(classes)[np.arange(clients) % classes]
    shares = 0.6 * main_class + 0.4 / classes
    next_shares = np.roll(shares[::2], 1, axis=1)
    shares[::2] = (shares[::2] + next_shares) / 2
    return shares + 1 / classes - shares.mean(0)


# papers.md 10.8 and 13.14
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 9.0])
def test_gradient_diversity_has_its_closed_form(beta: float) -> None:
    """The gradients of classes are orthonormal. A client's gradient has its share of each of them,
    and beta times the mean share of the others.
    """
    classes = 10
    shares = skewed_shares(classes, clients=20)
    class_gradients = np.linalg.qr(RNG.normal(size=(classes, classes)))[0]
    weights = shares + beta * (1 - shares) / (classes - 1)
    gradients = [{"w": torch.from_numpy(row @ class_gradients)} for row in weights]

    diversity = gradient_diversity(gradients)

    factor = classes**2 * (1 - beta / (classes - 1)) ** 2 / (1 + beta) ** 2
    mean_variance = shares.var(axis=1).mean()
    assert diversity == pytest.approx(1 + factor * mean_variance, rel=1e-10)


def test_clients_that_agree_have_a_gradient_diversity_of_one() -> None:
    """Opposite gradients have the mean 0, by which their norms cannot be divided."""
    gradient = random_params((3, 2), (4,))
    tripled = {name: 3 * value for name, value in gradient.items()}

    assert gradient_diversity([gradient] * 4) == pytest.approx(1, rel=1e-12)
    # The mean of squares is (1 + 9) / 2 times the squared norm, the square of the mean is 4 times.
    assert gradient_diversity([gradient, tripled]) == pytest.approx(5 / 4, rel=1e-12)
    assert math.isnan(gradient_diversity([]))
    assert math.isnan(gradient_diversity([gradient, negative(gradient)]))


LABEL_COUNTS = np.array([[30, 10, 0], [0, 5, 5]])
CORRECT = np.array([[9, 4, 1], [2, 6, 3]])
TOTALS = [10, 10, 10]
"""Of two clients and three classes: the training examples, the correct test examples, and all test
examples.
"""


def test_in_and_out_local_accuracy_in_both_forms_plain_and_weighted() -> None:
    """Clients that are idle or have no data are left out."""
    events = [
        {"label_counts": counts, "correct_by_class": correct}
        for counts, correct in zip(LABEL_COUNTS.tolist(), CORRECT.tolist(), strict=True)
    ]
    without_data = [{"idle": True}, {"label_counts": [0, 0, 0], "correct_by_class": [0, 0, 0]}]
    received_accuracy = [0.1, 0.2, 0.3]
    global_accuracy = [0.3, 0.2, 0.1]

    numbers = local_accuracies([*events, *without_data], received_accuracy, global_accuracy, TOTALS)

    shares = LABEL_COUNTS / LABEL_COUNTS.sum(1, keepdims=True)
    accuracy = CORRECT / 10
    by_client = {
        "in_local_accuracy": (accuracy * shares).sum(1),
        "out_local_accuracy": (accuracy * (1 - shares) / 2).sum(1),
        "in_local_accuracy_seen": np.array([accuracy[0, :2].mean(), accuracy[1, 1:].mean()]),
        "out_local_accuracy_seen": np.array([accuracy[0, 2], accuracy[1, 0]]),
    }
    sizes = LABEL_COUNTS.sum(1)
    for key, values in by_client.items():
        weighted_mean = np.average(values, weights=sizes)
        weighted_variance = np.average((values - weighted_mean) ** 2, weights=sizes)
        assert numbers[key] == pytest.approx(values.mean(), rel=1e-12)
        assert numbers[f"{key}_std"] == pytest.approx(values.std(), rel=1e-12)
        assert numbers[f"{key}_weighted"] == pytest.approx(weighted_mean, rel=1e-12)
        assert numbers[f"{key}_weighted_std"] == pytest.approx(weighted_variance**0.5)

    joint_shares = shares.mean(0)
    received_in_local = received_accuracy @ joint_shares
    global_out_local = global_accuracy @ (1 - joint_shares) / 2
    assert numbers["received_in_local_accuracy"] == pytest.approx(received_in_local)
    assert numbers["global_out_local_accuracy"] == pytest.approx(global_out_local)
    assert local_accuracies(without_data, [], [], TOTALS) == {}


def test_a_client_with_all_classes_has_no_unseen_ones_and_is_left_out() -> None:
    assert over_clients([math.nan, 0.5], [3, 1])[""] == 0.5
    assert math.isnan(over_clients([math.nan], [1])["_std"])


def generator() -> torch.Generator:
    """The same random numbers at each call."""
    return torch.Generator().manual_seed(0)


def test_filters_of_a_random_direction_have_the_models_norms() -> None:
    """Biases, of one dimension, stay as they are."""
    params = random_params((4, 3, 2, 2), (5, 6), (5,))

    direction = landscape.filter_normalised(params, params, generator())
    repeated = landscape.filter_normalised(params, params, generator())

    for name in ("w0", "w1"):
        norms = direction[name].flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, params[name].flatten(1).norm(dim=1))
    assert not direction["w2"].any()
    for name in params:
        assert torch.equal(direction[name], repeated[name])


def test_the_largest_eigenvalues_of_the_hessian_are_found_for_a_quadratic() -> None:
    """The iteration ends where a step moves the size by less than a thousandth, so the error can be
    larger than that.
    """
    eigenvectors = torch.linalg.qr(torch.from_numpy(RNG.normal(size=(6, 6))))[0]
    eigenvalues = torch.tensor([9.0, -5.0, 2.0, 1.0, 0.5, 0.1]).double()
    hessian = eigenvectors @ torch.diag(eigenvalues) @ eigenvectors.T

    def joined(params: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([params["w0"].flatten(), params["w1"]])

    def loss(params: Mapping[str, Tensor]) -> Tensor:
        x = joined(params)
        return x @ hessian @ x / 2 + x.sum()

    params = {**random_params((2, 2), (2,)), "buffer": torch.zeros(3)}

    largest, second = landscape.curvature(loss, params, ["w0", "w1"], generator(), most=200)

    assert largest[0] == pytest.approx(9, rel=1e-2)
    assert second[0] == pytest.approx(-5, rel=1e-2)
    for index, (_, vector) in enumerate([largest, second]):
        cosine = float(joined(vector) @ eigenvectors[:, index])
        assert abs(cosine) == pytest.approx(1, rel=1e-2)


def test_the_hessian_of_a_linear_function_is_zero() -> None:
    directions = landscape.curvature(
        lambda params: params["w0"].sum(), random_params((2, 2)), ["w0"], generator()
    )

    assert [size for size, _ in directions] == [0, 0]


def test_a_plane_and_noise_are_the_loss_at_moved_parameters() -> None:
    params = random_params((3,))
    right = random_params((3,), seed=1)
    up = random_params((3,), seed=2)

    def loss(params: Mapping[str, Tensor]) -> Tensor:
        return (params["w0"] ** 2).sum()

    def moved_loss(x: float, y: float) -> float:
        moved = params["w0"] + x * right["w0"] + y * up["w0"]
        return float((moved**2).sum())

    axis = (-1.0, 0.0, 2.0)

    plane = landscape.plane(loss, params, right, up, axis)
    without_noise, with_noise = landscape.under_noise(loss, params, [right, up], [0.0, 0.5])

    for row, y in enumerate(axis):
        assert plane[row] == pytest.approx([moved_loss(x, y) for x in axis])
    assert without_noise == pytest.approx(moved_loss(0, 0))
    assert with_noise == pytest.approx((moved_loss(0.5, 0) + moved_loss(0, 0.5)) / 2)
