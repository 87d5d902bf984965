"""Metrics of classification, against scikit-learn and against derivations in plain NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
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

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Scored:
    """Logits (n, C) and labels (n,) of test examples."""

    logits: Tensor
    labels: Tensor

    def predictions(self, positive: int | None = None) -> Predictions:
        """The predictions of the likeliest class; the last class is positive by default."""
        if positive is None:
            positive = self.logits.shape[1] - 1
        return Predictions.of(self.logits, self.predicted_labels, self.labels, positive)

    def metrics(self, positive: int | None = None) -> dict[str, Any]:
        """All metrics of the package, by name."""
        predictions = self.predictions(positive)
        return RunMetrics(RECORDED, predictions.positive).of(predictions)

    @property
    def truth(self) -> Array:
        """The labels in NumPy."""
        return self.labels.numpy()

    @property
    def predicted(self) -> Array:
        """The likeliest classes in NumPy."""
        return self.predicted_labels.numpy()

    @property
    def predicted_labels(self) -> Tensor:
        return self.logits.argmax(1)

    @property
    def probabilities(self) -> Array:
        """The softmax of the logits, in NumPy."""
        exponentials = np.exp(self.logits.double().numpy())
        return exponentials / exponentials.sum(1, keepdims=True)


def random_scores(
    classes: int, count: int = 400, seed: int = 0, share: float | None = None
) -> Scored:
    """Logits that are higher for the labels. ``share``: of the last of two classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    if share is not None:
        labels = (torch.rand(count, generator=generator) < share).long()
    logits = 2 * torch.randn(count, classes, generator=generator)
    logits[torch.arange(count), labels] += 1.5
    return Scored(logits, labels)


def assert_metrics(measured: dict[str, Any], expected: dict[str, float]) -> None:
    """The metrics have these values."""
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("positive", [0, 1])
def test_metrics_of_two_classes_are_those_of_scikit_learn(positive: int) -> None:
    scored = random_scores(2, seed=positive, share=0.2)
    truth = scored.truth
    predicted = scored.predicted
    is_positive = truth == positive
    score = scored.probabilities[:, positive]

    measured = scored.metrics(positive)

    assert_metrics(
        measured,
        {
            "balanced_accuracy": sk.balanced_accuracy_score(truth, predicted),
            "f1": sk.f1_score(truth, predicted, average="macro"),
            "f1_weighted": sk.f1_score(truth, predicted, average="weighted"),
            "precision": sk.precision_score(truth, predicted, pos_label=positive),
            "recall": sk.recall_score(truth, predicted, pos_label=positive),
            "specificity": sk.recall_score(truth, predicted, pos_label=1 - positive),
            "auc": sk.roc_auc_score(is_positive, score),
            "average_precision": sk.average_precision_score(is_positive, score),
            "log_loss": sk.log_loss(truth, scored.probabilities),
            "brier": sk.brier_score_loss(is_positive, score),
        },
    )
    assert measured[CONFUSION] == sk.confusion_matrix(truth, predicted).tolist()


@pytest.mark.parametrize("classes", [3, 7])
def test_metrics_of_more_classes_are_those_of_scikit_learn(classes: int) -> None:
    scored = random_scores(classes, seed=classes)
    truth = scored.truth
    predicted = scored.predicted
    scores = scored.probabilities
    one_hot = np.eye(classes)[truth]
    squared_errors = ((scores - one_hot) ** 2).sum(1)

    measured = scored.metrics()

    assert_metrics(
        measured,
        {
            "balanced_accuracy": sk.balanced_accuracy_score(truth, predicted),
            "f1": sk.f1_score(truth, predicted, average="macro"),
            "f1_weighted": sk.f1_score(truth, predicted, average="weighted"),
            "precision": sk.precision_score(truth, predicted, average="macro", zero_division=0),
            "recall": sk.recall_score(truth, predicted, average="macro"),
            "auc": sk.roc_auc_score(truth, scores, multi_class="ovr", average="macro"),
            "average_precision": sk.average_precision_score(one_hot, scores, average="macro"),
            "log_loss": sk.log_loss(truth, scores),
            "brier": squared_errors.mean(),
        },
    )
    assert measured[CONFUSION] == sk.confusion_matrix(truth, predicted).tolist()


def test_specificity_is_derived_class_by_class() -> None:
    scored = random_scores(4, seed=4)
    specificities = []
    for label in range(4):
        predicted_of_others = scored.predicted[scored.truth != label]
        specificities.append((predicted_of_others != label).mean())

    specificity = scored.metrics()["specificity"]

    assert specificity == pytest.approx(np.mean(specificities), abs=1e-12)


def test_the_auc_is_the_share_of_ordered_pairs() -> None:
    """Rounded logits have equal scores, which count as half."""
    rounded = random_scores(2, count=60, seed=3)
    rounded = Scored(rounded.logits.round(), rounded.labels)
    scores = (rounded.logits[:, 1] - rounded.logits[:, 0]).numpy()
    positives = scores[rounded.truth == 1][:, None]
    negatives = scores[rounded.truth == 0]

    share = (positives > negatives).mean() + (positives == negatives).mean() / 2

    assert rounded.metrics()["auc"] == pytest.approx(share, abs=1e-12)


def test_the_calibration_error_is_derived_bin_by_bin() -> None:
    scored = random_scores(3, seed=5)
    confidence = scored.probabilities.max(1)
    is_correct = scored.predicted == scored.truth

    expected = 0.0
    for number in range(CALIBRATION_BINS):
        low = number / CALIBRATION_BINS
        high = (number + 1) / CALIBRATION_BINS
        is_in_bin = (low < confidence) & (confidence <= high)
        if is_in_bin.any():
            error = is_correct[is_in_bin].mean() - confidence[is_in_bin].mean()
            expected += is_in_bin.mean() * abs(error)

    assert scored.metrics()["ece"] == pytest.approx(expected, abs=1e-12)


def test_a_class_without_a_test_example_is_left_out() -> None:
    """Although it is predicted."""
    complete = random_scores(4, seed=6)
    is_tested = complete.labels != 2
    scored = Scored(complete.logits[is_tested], complete.labels[is_tested])
    truth = scored.truth
    predicted = scored.predicted
    assert 2 in predicted
    tested = [0, 1, 3]
    areas = [sk.roc_auc_score(truth == label, scored.probabilities[:, label]) for label in tested]

    assert_metrics(
        scored.metrics(),
        {
            "f1": sk.f1_score(truth, predicted, labels=tested, average="macro"),
            "balanced_accuracy": sk.recall_score(truth, predicted, labels=tested, average="macro"),
            "auc": np.mean(areas),
        },
    )


def test_one_class_has_no_ranking_and_no_example_has_no_metric() -> None:
    """Class 1 is positive, and no example is of it."""
    logits = random_scores(2, count=20).logits
    one_class = Scored(logits, torch.zeros(20, dtype=torch.int64)).metrics()
    no_example = Scored(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).metrics()

    undefined = {name for name, value in one_class.items() if value is None}
    assert undefined == {"precision", "recall", "auc", "average_precision"}
    del no_example[CONFUSION]
    assert set(no_example.values()) == {None}


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_leave_the_metrics_of_classes(logit: float) -> None:
    scored = random_scores(3, count=50)
    scored.logits[7, 1] = logit

    measured = scored.metrics()

    for name, metric in METRICS.items():
        assert (measured[name] is None) == metric.needs_scores


def test_extreme_logits_have_finite_metrics() -> None:
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, -1e4]])
    probabilities = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    labels = [0, 1, 1]

    measured = Scored(logits, torch.tensor(labels)).metrics()

    assert measured["log_loss"] == pytest.approx(sk.log_loss(labels, probabilities))
    del measured[CONFUSION]
    assert all(value is not None and np.isfinite(value) for value in measured.values())


def test_accuracy_prefers_a_model_that_finds_fewer_examples_of_a_rare_class() -> None:
    """Balanced accuracy and recall prefer the model that finds more."""
    generator = np.random.default_rng(0)
    is_ill = generator.permutation(1000) < 60
    labels = torch.from_numpy(is_ill.astype(np.int64))

    def model(shift: float) -> Scored:
        noise = generator.normal(0, 1, 1000)
        score = torch.from_numpy(noise + 2.6 * is_ill - 2.6 + shift)
        return Scored(torch.stack([-score, score], 1), labels)

    cautious = model(-0.4)
    alert = model(0.9)

    assert accuracy(cautious) > accuracy(alert)
    for name in ("balanced_accuracy", "recall"):
        assert better(name, alert.metrics()[name], cautious.metrics()[name])


def accuracy(scored: Scored) -> float:
    """The share of correct predictions."""
    return float((scored.predicted == scored.truth).mean())


# What real sites send.


@pytest.mark.parametrize(("classes", "share"), [(2, 0.06), (2, 0.5), (5, None)])
def test_histograms_give_the_metrics_within_their_bounds(classes: int, share: float | None) -> None:
    exact = random_scores(classes, count=3000, seed=9, share=share).predictions()

    report = json.loads(json.dumps(as_histograms(exact)))
    binned = from_histograms(report, classes - 1)

    assert wrong_histograms(report, classes) == ""
    auc_bound = auc_error(binned)
    assert auc_bound is not None
    assert auc_bound < 0.01
    bounds = {name: 1e-12 for name, metric in METRICS.items() if not metric.needs_scores}
    bounds |= {"auc": auc_bound, "log_loss": 0.01, "ece": 1 / 3000 + 1e-9, "brier": 0.005}
    if classes > 2:
        # The sum over classes, of which each has the bound of two.
        bounds["brier"] = 0.005 * classes
    for name, bound in bounds.items():
        error = abs(METRICS[name].formula(binned) - METRICS[name].formula(exact))
        assert error <= bound, name


def test_the_bound_of_the_auc_is_reached_if_a_bin_has_ordered_pairs() -> None:
    """Positive scores are a little above negative ones, all in the bin from 0 to 0.02."""
    is_positive = torch.arange(100) < 30
    scores = torch.where(is_positive, 0.012, 0.008)
    logits = torch.stack([torch.zeros(100), scores], 1)
    exact = Scored(logits, is_positive.long()).predictions()

    binned = from_histograms(as_histograms(exact), 1)

    assert METRICS["auc"].formula(exact) == 1.0
    assert METRICS["auc"].formula(binned) == 0.5
    assert auc_error(binned) == 0.5


def test_log_odds_beyond_the_range_are_in_the_outer_bins() -> None:
    beyond = 3 * LARGEST_LOG_ODDS
    logits = torch.tensor([[beyond, 0.0], [0.0, beyond], [0.0, 0.0]])

    report = as_histograms(Scored(logits, torch.tensor([0, 1, 1])).predictions())

    assert report["by_class"][1]["bins"] == [0, 1000, 1999]


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested dictionaries and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        yield from chain.from_iterable(map(leaves, value))
    else:
        yield value


def test_histograms_have_counts_only() -> None:
    report = as_histograms(random_scores(3).predictions())

    assert {type(leaf) for leaf in leaves(report)} == {int}


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
    report = as_histograms(random_scores(2, count=20).predictions())

    assert wrong_histograms(report, 2) == ""
    assert wrong_histograms({**report, **change}, 2) != ""
    assert wrong_histograms(report, 3) != ""


# Which value is better.


def test_losses_are_better_if_they_are_smaller() -> None:
    """An undefined value is never better; of equal rounds, the first is the best."""
    losses = {name for name, metric in METRICS.items() if not metric.larger_is_better}

    assert losses == {"log_loss", "brier", "ece"}
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
    sizes = 1 + torch.arange(examples).float() / 7
    signed = torch.where(labels == 1, sizes, -sizes)
    perfect = Predictions.of(torch.stack([-signed, signed], 1), labels, labels, positive=1)

    assert 1 - 1e-12 < average_precision(perfect) <= 1.0
