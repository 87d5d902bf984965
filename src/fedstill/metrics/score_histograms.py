"""Predictions as counts and histograms of scores, which real sites send instead of scores.

The server computes every metric from them, for each site and for all sites together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.reports import is_count
from fedstill.metrics.accuracy import Values
from fedstill.metrics.classification import CALIBRATION_BINS, Predictions, Scores

HISTOGRAMS = ("held_out_histograms", "site_scores")
"""The fields of a client's report with histograms of scores: on its held-out examples and on its
test set.
"""

SCORE_BINS = 2000
"""The number of bins of the log-odds of a class's probability, of equal width from -20 to 20."""

LARGEST_LOG_ODDS = 20.0
"""Larger log-odds (probabilities within 2e-9 of 0 or 1) are in the first or last bin."""

CONFIDENCE_BINS = 100 * CALIBRATION_BINS
"""The number of bins of the confidence, of equal width; they subdivide those of the calibration
error.
"""


def as_histograms(predictions: Predictions) -> dict[str, Any]:
    """Predictions as counts for a journal: the confusion matrix, a histogram of each class's
    probability, and a histogram of the confidence.

    A histogram lists the non-empty bins and their numbers of positive and negative examples.
    """
    report: dict[str, Any] = {"confusion": predictions.confusion.tolist()}
    if predictions.confidence is None:
        return report
    report["by_class"] = [
        _histogram(scores, _score_bins(scores.scores)) for scores in predictions.by_class
    ]
    confidence = predictions.confidence
    report["confidence"] = _histogram(confidence, _confidence_bins(confidence.scores))
    return report


def from_histograms(report: Mapping[str, Any], positive: int) -> Predictions:
    """Predictions from histograms. Each example has the score of the middle of its bin.

    The AUC differs from the exact one by at most half the share of pairs of a positive and a
    negative example in the same bin (``auc_error``). The log loss differs by at most 0.01 if no
    log-odds exceeds 20, the Brier score by 0.005 per class, and the calibration error by 1/3000.
    """
    confusion = np.array(report["confusion"], np.int64)
    if "by_class" not in report:
        return Predictions(confusion=confusion, positive=positive)
    middles = _probabilities_of_bins()
    by_class = [_scores(histogram, middles) for histogram in report["by_class"]]
    confidences = (np.arange(CONFIDENCE_BINS) + 0.5) / CONFIDENCE_BINS
    return Predictions(
        confusion=confusion,
        positive=positive,
        by_class=by_class,
        confidence=_scores(report["confidence"], confidences),
    )


def concatenated(parts: Sequence[Predictions]) -> Predictions:
    """The predictions on at least one test set as predictions on the union of the test sets."""
    first = parts[0]
    confusion = sum((part.confusion for part in parts), np.zeros_like(first.confusion))
    confidences = [part.confidence for part in parts if part.confidence is not None]
    if len(confidences) < len(parts):
        return Predictions(confusion=confusion, positive=first.positive)
    by_class = [
        _concatenated_scores([part.by_class[label] for part in parts])
        for label in range(first.classes)
    ]
    return Predictions(
        confusion=confusion,
        positive=first.positive,
        by_class=by_class,
        confidence=_concatenated_scores(confidences),
    )


def _concatenated_scores(parts: Sequence[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.is_positive for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def auc_error(predictions: Predictions) -> float | None:
    """The largest possible error of the AUC from histograms: half the share of pairs of a positive
    and a negative example with equal scores, averaged over the classes of the AUC. None if the AUC
    is undefined.
    """
    if not predictions.by_class:
        return None
    by_class = [predictions.by_class[label] for label in predictions.averaged]
    bounds = [_tied_pairs(scores) / 2 for scores in by_class if scores.has_two_classes]
    if not bounds:
        return None
    return sum(bounds) / len(bounds)


def _tied_pairs(scores: Scores) -> float:
    """The share of pairs of a positive and a negative example with equal scores."""
    values, places = np.unique(scores.scores, return_inverse=True)
    positives = np.bincount(places, scores.weights * scores.is_positive, len(values))
    negatives = np.bincount(places, scores.weights * ~scores.is_positive, len(values))
    return float(positives @ negatives / (positives.sum() * negatives.sum()))


def _score_bins(probabilities: Values) -> NDArray[np.int64]:
    from scipy.special import logit

    width = 2 * LARGEST_LOG_ODDS / SCORE_BINS
    bins: Values = np.floor((logit(probabilities) + LARGEST_LOG_ODDS) / width)
    return np.clip(bins, 0, SCORE_BINS - 1).astype(np.int64)


def _probabilities_of_bins() -> Values:
    from scipy.special import expit

    width = 2 * LARGEST_LOG_ODDS / SCORE_BINS
    middles: Values = expit((np.arange(SCORE_BINS) + 0.5) * width - LARGEST_LOG_ODDS)
    return middles


def _confidence_bins(confidences: Values) -> NDArray[np.int64]:
    edges = np.arange(1, CONFIDENCE_BINS) / CONFIDENCE_BINS
    bins: NDArray[np.int64] = np.digitize(confidences, edges, right=True)
    return bins


def _histogram(scores: Scores, bins: NDArray[np.int64]) -> dict[str, list[int]]:
    filled, places = np.unique(bins, return_inverse=True)
    positives = np.bincount(places[scores.is_positive], minlength=len(filled))
    negatives = np.bincount(places[~scores.is_positive], minlength=len(filled))
    return {
        "bins": filled.tolist(),
        "positives": positives.tolist(),
        "negatives": negatives.tolist(),
    }


def _scores(histogram: Mapping[str, Sequence[int]], middles: Values) -> Scores:
    bins = np.array(histogram["bins"], np.int64)
    counts = np.array([*histogram["positives"], *histogram["negatives"]], np.float64)
    is_positive = np.repeat([True, False], len(bins))
    return Scores(is_positive, np.tile(middles[bins], 2), counts)


def wrong_histograms(report: Any, classes: int) -> str:
    """The reason why a report is not a valid output of ``as_histograms``; empty for a valid report.

    classes: the number of classes; 0 if it is unknown.
    """
    if not isinstance(report, Mapping):
        return "it is not a table"
    confusion = report.get("confusion")
    if not isinstance(confusion, list) or not _is_square(confusion, classes or len(confusion)):
        return "its confusion matrix is malformed"
    if report.keys() == {"confusion"}:
        return ""
    by_class = report.get("by_class")
    if report.keys() != {"confusion", "by_class", "confidence"} or not isinstance(by_class, list):
        return "it has other fields"
    examples = int(np.sum(confusion))
    histograms = [(histogram, SCORE_BINS) for histogram in by_class]
    histograms.append((report["confidence"], CONFIDENCE_BINS))
    are_wellformed = all(_is_histogram(table, bins, examples) for table, bins in histograms)
    if len(by_class) != len(confusion) or not are_wellformed:
        return "a histogram is malformed"
    return ""


def _is_square(matrix: list[Any], rows: int) -> bool:
    return len(matrix) == rows and all(_are_counts(row) and len(row) == rows for row in matrix)


def _is_histogram(histogram: Any, bins: int, examples: int) -> bool:
    if not isinstance(histogram, Mapping):
        return False
    if histogram.keys() != {"bins", "positives", "negatives"}:
        return False
    if not all(map(_are_counts, histogram.values())):
        return False
    filled = histogram["bins"]
    counts = [*histogram["positives"], *histogram["negatives"]]
    if len(counts) != 2 * len(filled) or len(histogram["positives"]) != len(filled):
        return False
    return all(number < bins for number in filled) and sum(counts) == examples


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(is_count(value) for value in values)
