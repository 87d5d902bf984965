"""Metrics of classification, against scikit-learn and against derivations in plain NumPy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from fedstill.metrics.classification import (
    CALIBRATION_BINS,
    CONFUSION,
    METRICS,
    RECORDED,
    Predictions,
    RunMetrics,
    average_precision,
    best_round,
    better,
    unknown_metric,
)
from fedstill.metrics.score_histograms import (
    LARGEST_LOG_ODDS,
    as_histograms,
    auc_error,
    from_histograms,
    wrong_histograms,
)


def drawn(
    classes: int, count: int = 400, seed: int = 0, share: float | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (n, C) that know something of the labels (n,). share: of the last of two classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=draw)
    if share is not None:
        labels = (torch.rand(count, generator=draw) < share).long()
    logits = 2 * torch.randn(count, classes, generator=draw)
    logits[torch.arange(count), labels] += 1.5
    return logits, labels


def predictions(logits: Tensor, labels: Tensor, positive: int | None = None) -> Predictions:
    classes = logits.shape[1]
    chosen = classes - 1 if positive is None else positive
    return Predictions.of(logits, logits.argmax(1), labels, chosen)


def values(logits: Tensor, labels: Tensor, positive: int | None = None) -> dict[str, Any]:
    chosen = logits.shape[1] - 1 if positive is None else positive
    return RunMetrics(RECORDED, chosen).of(predictions(logits, labels, positive))


def probabilities(logits: Tensor) -> np.ndarray[Any, Any]:
    exponentials = np.exp(logits.double().numpy())
    out: np.ndarray[Any, Any] = exponentials / exponentials.sum(1, keepdims=True)
    return out


@pytest.mark.parametrize("positive", [0, 1])
def test_two_classes_are_as_in_scikit_learn(positive: int) -> None:
    logits, labels = drawn(2, seed=positive, share=0.2)
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    scores = probabilities(logits)
    is_positive, score = truth == positive, scores[:, positive]
    expected = {
        "balanced_accuracy": sk.balanced_accuracy_score(truth, predicted),
        "f1": sk.f1_score(truth, predicted, average="macro"),
        "f1_weighted": sk.f1_score(truth, predicted, average="weighted"),
        "precision": sk.precision_score(truth, predicted, pos_label=positive),
        "recall": sk.recall_score(truth, predicted, pos_label=positive),
        "specificity": sk.recall_score(truth, predicted, pos_label=1 - positive),
        "auc": sk.roc_auc_score(is_positive, score),
        "average_precision": sk.average_precision_score(is_positive, score),
        "log_loss": sk.log_loss(truth, scores),
        "brier": sk.brier_score_loss(is_positive, score),
    }
    measured = values(logits, labels, positive)
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert measured[CONFUSION] == sk.confusion_matrix(truth, predicted).tolist()


@pytest.mark.parametrize("classes", [3, 7])
def test_more_classes_are_as_in_scikit_learn(classes: int) -> None:
    logits, labels = drawn(classes, seed=classes)
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    scores = probabilities(logits)
    one_hot = np.eye(classes)[truth]
    expected = {
        "balanced_accuracy": sk.balanced_accuracy_score(truth, predicted),
        "f1": sk.f1_score(truth, predicted, average="macro"),
        "f1_weighted": sk.f1_score(truth, predicted, average="weighted"),
        "precision": sk.precision_score(truth, predicted, average="macro", zero_division=0),
        "recall": sk.recall_score(truth, predicted, average="macro"),
        "auc": sk.roc_auc_score(truth, scores, multi_class="ovr", average="macro"),
        "average_precision": sk.average_precision_score(one_hot, scores, average="macro"),
        "log_loss": sk.log_loss(truth, scores),
        "brier": ((scores - one_hot) ** 2).sum(1).mean(),
    }
    measured = values(logits, labels)
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert measured[CONFUSION] == sk.confusion_matrix(truth, predicted).tolist()


def test_specificity_is_derived_class_by_class() -> None:
    logits, labels = drawn(4, seed=4)
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    shares = [(predicted[truth != c] != c).mean() for c in range(4)]
    assert values(logits, labels)["specificity"] == pytest.approx(np.mean(shares), abs=1e-12)


def test_the_auc_is_the_share_of_ordered_pairs() -> None:
    logits, labels = drawn(2, count=60, seed=3)
    logits = logits.round()  # so that there are equal scores
    scores = (logits[:, 1] - logits[:, 0]).numpy()
    positives, negatives = scores[labels == 1], scores[labels == 0]
    wins = (positives[:, None] > negatives).mean() + (positives[:, None] == negatives).mean() / 2
    assert values(logits, labels)["auc"] == pytest.approx(wins, abs=1e-12)


def test_the_calibration_error_is_derived_bin_by_bin() -> None:
    logits, labels = drawn(3, seed=5)
    scores = probabilities(logits)
    confidence, is_right = scores.max(1), scores.argmax(1) == labels.numpy()
    expected = 0.0
    for number in range(CALIBRATION_BINS):
        low, high = number / CALIBRATION_BINS, (number + 1) / CALIBRATION_BINS
        own = (low < confidence) & (confidence <= high)
        if own.any():
            expected += own.mean() * abs(is_right[own].mean() - confidence[own].mean())
    assert values(logits, labels)["ece"] == pytest.approx(expected, abs=1e-12)


def test_a_class_without_a_test_example_is_left_out() -> None:
    logits, labels = drawn(4, seed=6)
    there = labels != 2
    logits, labels = logits[there], labels[there]
    truth, predicted = labels.numpy(), logits.argmax(1).numpy()
    assert 2 in predicted
    present = [0, 1, 3]
    measured = values(logits, labels)
    expected = {
        "f1": sk.f1_score(truth, predicted, labels=present, average="macro"),
        "balanced_accuracy": sk.recall_score(truth, predicted, labels=present, average="macro"),
        "auc": np.mean(
            [sk.roc_auc_score(truth == c, probabilities(logits)[:, c]) for c in present]
        ),
    }
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_one_class_has_no_ranking_and_no_example_has_no_metric() -> None:
    logits, _ = drawn(2, count=20)
    one = values(logits, torch.zeros(20, dtype=torch.int64))
    undefined = {name for name, value in one.items() if value is None}
    # Class 1 is positive, and no example is of it.
    assert undefined == {"precision", "recall", "auc", "average_precision"}
    nothing = values(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert all(value is None for name, value in nothing.items() if name != CONFUSION)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_leave_the_metrics_of_classes(bad: float) -> None:
    logits, labels = drawn(3, count=50)
    logits[7, 1] = bad
    measured = values(logits, labels)
    for name, metric in METRICS.items():
        assert (measured[name] is None) == metric.needs_scores


def test_extreme_logits_have_finite_metrics() -> None:
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, -1e4]])
    measured = values(logits, torch.tensor([0, 1, 1]))
    numbers = [value for name, value in measured.items() if name != CONFUSION]
    assert all(value is not None and np.isfinite(value) for value in numbers)
    truth, scores = np.array([0, 1, 1]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert measured["log_loss"] == pytest.approx(sk.log_loss(truth, scores))


def test_of_a_rare_class_accuracy_prefers_the_model_that_finds_fewer() -> None:
    draw = np.random.default_rng(0)
    is_ill = draw.permutation(1000) < 60
    labels = torch.from_numpy(is_ill.astype(np.int64))

    def model(shift: float) -> Tensor:
        score = torch.from_numpy(draw.normal(0, 1, 1000) + 2.6 * is_ill - 2.6 + shift)
        return torch.stack([-score, score], 1)

    cautious, alert = model(-0.4), model(0.9)
    accuracy = [(logits.argmax(1) == labels).double().mean() for logits in (cautious, alert)]
    measured = [values(logits, labels) for logits in (cautious, alert)]
    assert accuracy[0] > accuracy[1]
    assert better("balanced_accuracy", *(m["balanced_accuracy"] for m in reversed(measured)))
    assert better("recall", *(m["recall"] for m in reversed(measured)))


# What real sites send.


@pytest.mark.parametrize(("classes", "share"), [(2, 0.06), (2, 0.5), (5, None)])
def test_histograms_give_the_metrics_within_their_bounds(classes: int, share: float | None) -> None:
    logits, labels = drawn(classes, count=3000, seed=9, share=share)
    exact = predictions(logits, labels)
    report = json.loads(json.dumps(as_histograms(exact)))
    assert wrong_histograms(report, classes) == ""
    binned = from_histograms(report, classes - 1)
    bound = auc_error(binned)
    assert bound is not None
    assert bound < 0.01
    bounds = {name: 1e-12 for name, metric in METRICS.items() if not metric.needs_scores}
    bounds |= {"auc": bound, "log_loss": 0.01, "ece": 1 / 3000 + 1e-9}
    bounds |= {"brier": 0.005 * (1 if classes == 2 else classes)}
    for name, most in bounds.items():
        error = abs(METRICS[name].formula(binned) - METRICS[name].formula(exact))
        assert error <= most, name


def test_the_bound_of_the_auc_is_reached_if_a_bin_holds_ordered_pairs() -> None:
    # Positive scores are a little above negative ones, all in one bin, of which the middle is 0.01.
    scores = torch.cat([torch.full((30,), 0.012), torch.full((70,), 0.008)])
    logits = torch.stack([torch.zeros(100), scores], 1)
    labels = (torch.arange(100) < 30).long()
    exact = predictions(logits, labels)
    binned = from_histograms(as_histograms(exact), 1)
    assert METRICS["auc"].formula(exact) == 1.0
    assert METRICS["auc"].formula(binned) == 0.5
    assert auc_error(binned) == 0.5


def test_log_odds_beyond_the_range_are_in_the_outer_bins() -> None:
    far = 3 * LARGEST_LOG_ODDS
    logits = torch.tensor([[far, 0.0], [0.0, far], [0.0, 0.0]])
    report = as_histograms(predictions(logits, torch.tensor([0, 1, 1])))
    assert report["by_class"][1]["bins"] == [0, 1000, 1999]


def test_histograms_hold_counts_only() -> None:
    report = as_histograms(predictions(*drawn(3)))

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for inner in value.values() for leaf in leaves(inner)]
        if isinstance(value, list):
            return [leaf for inner in value for leaf in leaves(inner)]
        return [value]

    assert all(type(leaf) is int for leaf in leaves(report))


@pytest.mark.parametrize(
    "change",
    [
        {"confusion": [[1, 2], [3]]},
        {"confusion": [[1, -2], [3, 4]]},
        {"by_class": []},
        {"confidence": {"bins": [0], "positives": [1], "negatives": [0]}},
        {"confidence": {"bins": [10**6], "positives": [20], "negatives": [0]}},
        {"further": 1},
    ],
)
def test_histograms_that_no_site_would_send_are_refused(change: dict[str, Any]) -> None:
    report = as_histograms(predictions(*drawn(2, count=20)))
    assert wrong_histograms(report, 2) == ""
    assert wrong_histograms({**report, **change}, 2) != ""
    assert wrong_histograms(report, 3) != ""


# Which value is better.


def test_losses_are_better_if_they_are_smaller() -> None:
    smaller = {name for name, metric in METRICS.items() if not metric.larger_is_better}
    assert smaller == {"log_loss", "brier", "ece"}
    assert not better("auc", None, None)
    assert not better("auc", float("nan"), 0.1)
    assert better("log_loss", 0.3, float("nan"))
    assert best_round("brier", {1: None, 2: 0.3, 3: 0.2, 4: 0.2}) == 3
    assert best_round("auc", {1: 0.6, 2: 0.9, 3: 0.9}) == 2


def test_a_name_that_is_no_metric_has_a_suggestion() -> None:
    assert "'auc'" in unknown_metric("au", RECORDED)
    assert unknown_metric("auc", RECORDED) == ""


@pytest.mark.parametrize("examples", [27, 62, 86, 167])
def test_the_average_precision_of_a_perfect_ranking_is_not_above_1(examples: int) -> None:
    labels = torch.arange(examples) % 2
    logits = torch.stack([-labels.float(), labels.float()], 1)
    logits = logits * (1 + torch.arange(examples).float() / 7).unsqueeze(1)
    predictions = Predictions.of(logits, labels, labels, positive=1)
    assert 1 - 1e-12 < average_precision(predictions) <= 1.0
