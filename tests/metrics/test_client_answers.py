"""What clients' own models are worth to them, against plain loops and identities."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.metrics.local_models import personal_accuracies, personal_answers

DRAW = np.random.default_rng(3)
COUNTS = DRAW.integers(0, 4, (6, 5)).tolist()
COUNTS[4] = [0, 0, 0, 0, 0]
ACCURACY = DRAW.random((6, 5))
NAN = float("nan")


def plain(accuracy: np.ndarray, counts: list[int]) -> float:
    """The accuracy on a test set with as many images of each class as the client has."""
    pairs = [(n, a) for n, a in zip(counts, accuracy, strict=True) if not np.isnan(a)]
    return sum(n * a for n, a in pairs) / sum(n for n, _ in pairs)


def test_each_client_is_weighed_by_its_own_classes() -> None:
    got = personal_accuracies(dict(enumerate(ACCURACY)), COUNTS)
    assert sorted(got) == [0, 1, 2, 3, 5], "a client without data has no proportions"
    for client, value in got.items():
        assert value == pytest.approx(plain(ACCURACY[client], COUNTS[client]), abs=1e-14)


def test_means_over_clients_by_class_and_what_each_lost_of_its_own_classes() -> None:
    now, best = {0: ACCURACY[0], 2: ACCURACY[2]}, {2: ACCURACY[3]}
    got = personal_answers(now, best, COUNTS)
    mine = [plain(ACCURACY[c], COUNTS[c]) for c in (0, 2)]
    assert got["personal_accuracy"] == pytest.approx(np.mean(mine), abs=1e-14)
    assert got["personal_accuracy_std"] == pytest.approx(np.std(mine), abs=1e-14)
    assert got["personal_by_client"] == {"0": pytest.approx(mine[0]), "2": pytest.approx(mine[1])}
    assert got["personal_class_accuracy"] == pytest.approx(
        ((ACCURACY[0] + ACCURACY[2]) / 2).tolist()
    )
    own = [c for c, n in enumerate(COUNTS[2]) if n]
    assert got["personal_forgetting"] == pytest.approx(
        np.mean([ACCURACY[3][c] - ACCURACY[2][c] for c in own])
    )
    assert got["personal_clients"] == 2


def test_classes_without_test_images_are_left_out() -> None:
    got = personal_answers({0: [0.5, NAN, 0.0]}, {0: [1.0, NAN, 1.0]}, [[1, 7, 0]])
    assert got["personal_class_accuracy"] == [0.5, None, 0.0]
    assert got["personal_accuracy"] == got["personal_forgetting"] == 0.5


def test_without_a_measured_client_nothing_is_said() -> None:
    assert personal_answers({}, {}, COUNTS) == {}
    assert personal_answers({4: ACCURACY[4]}, {}, COUNTS) == {}
