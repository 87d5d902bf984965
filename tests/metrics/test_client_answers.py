"""Accuracies of clients' personal models, against plain loops and identities."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.metrics.local_models import personal_accuracies, personal_answers

GENERATOR = np.random.default_rng(3)
COUNTS = GENERATOR.integers(0, 4, (6, 5)).tolist()
COUNTS[4] = [0, 0, 0, 0, 0]
"""Training examples by client and class; client 4 has none."""

ACCURACY = GENERATOR.random((6, 5))
NAN = float("nan")


def accuracy_on_own_classes(accuracy: np.ndarray, counts: list[int]) -> float:
    """The accuracy on a test set with as many images of each class as the client has."""
    correct = 0.0
    for class_accuracy, count in zip(accuracy, counts, strict=True):
        correct += count * class_accuracy
    return correct / sum(counts)


def test_each_client_is_weighted_by_its_own_classes() -> None:
    accuracies = personal_accuracies(dict(enumerate(ACCURACY)), COUNTS)

    assert sorted(accuracies) == [0, 1, 2, 3, 5], "a client without data has no proportions"
    for client, value in accuracies.items():
        expected = accuracy_on_own_classes(ACCURACY[client], COUNTS[client])
        assert value == pytest.approx(expected, abs=1e-14)


def test_means_over_clients_by_class_and_what_each_forgot_of_its_own_classes() -> None:
    """Client 0 has no best accuracies, so it does not count in the forgetting."""
    current = {0: ACCURACY[0], 2: ACCURACY[2]}
    best = {2: ACCURACY[3]}

    numbers = personal_answers(current, best, COUNTS)

    first = accuracy_on_own_classes(ACCURACY[0], COUNTS[0])
    second = accuracy_on_own_classes(ACCURACY[2], COUNTS[2])
    assert numbers["personal_clients"] == 2
    assert numbers["personal_accuracy"] == pytest.approx((first + second) / 2, abs=1e-14)
    assert numbers["personal_accuracy_std"] == pytest.approx(abs(first - second) / 2, abs=1e-14)
    assert numbers["personal_by_client"] == pytest.approx({"0": first, "2": second})
    mean_by_class = (ACCURACY[0] + ACCURACY[2]) / 2
    assert numbers["personal_class_accuracy"] == pytest.approx(mean_by_class.tolist())
    is_own_class = np.array(COUNTS[2]) > 0
    losses = (ACCURACY[3] - ACCURACY[2])[is_own_class]
    assert numbers["personal_forgetting"] == pytest.approx(losses.mean())


def test_classes_without_test_images_are_left_out() -> None:
    numbers = personal_answers({0: [0.5, NAN, 0.0]}, {0: [1.0, NAN, 1.0]}, [[1, 7, 0]])

    assert numbers["personal_class_accuracy"] == [0.5, None, 0.0]
    assert numbers["personal_accuracy"] == 0.5
    assert numbers["personal_forgetting"] == 0.5


def test_without_a_measured_client_there_are_no_numbers() -> None:
    assert personal_answers({}, {}, COUNTS) == {}
    assert personal_answers({4: ACCURACY[4]}, {}, COUNTS) == {}
