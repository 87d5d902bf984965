"""Metrics of classification other than accuracy, from a confusion matrix and from scores.

``METRICS`` is the table of all metrics. Classes without test examples are ignored. A metric is None
if there are no other classes, if it needs two classes and the test set has only one, and if it
needs scores and a score is not finite.

With two classes, precision, recall, specificity, ROC AUC, average precision and Brier score are
those of the positive class, as in scikit-learn. With more classes, they are means of one-vs-rest
values; the Brier score is the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import suggestion
from fedstill.metrics.accuracy import Values

if TYPE_CHECKING:
    from torch import Tensor

CALIBRATION_BINS = 15
"""The number of bins of the expected calibration error, of equal width in confidence."""

SelectionData = Literal["held_out", "public", "test"]
"""The data that compare rounds: held-out examples, labelled public examples, or the test set."""

LEAST_PROBABILITY = float(np.finfo(np.float64).eps)
"""The log loss replaces lower probabilities by this one, as in scikit-learn."""

ACCURACY = "accuracy"
"""The metric that every run has; it is not in ``METRICS``."""

CONFUSION = "confusion"
"""The name of the confusion matrix in a run's records. It is not a number, so runs cannot be ranked
by it.
"""


@dataclass(frozen=True)
class Scores:
    """Scores of positive and negative examples, (m,) each.

    ``weights``: the number of examples that each entry represents.
    """

    is_positive: NDArray[np.bool_]
    scores: Values
    weights: Values

    @property
    def has_two_classes(self) -> bool:
        """Whether there are positive and negative examples."""
        positives = self.weights[self.is_positive].sum()
        return bool(0 < positives < self.weights.sum())


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A model's predictions on a test set.

    ``confusion``: (C, C) counts of examples; rows are labels, columns are predicted classes.
    ``positive``: the positive class of two classes. ``by_class``: for each class, the scores are
    its probabilities, and its examples are positive. ``confidence``: the scores are the
    probabilities of the predicted classes, and right predictions are positive. Without scores,
    ``by_class`` is empty and ``confidence`` is None.
    """

    confusion: NDArray[np.int64]
    positive: int
    by_class: Sequence[Scores] = ()
    confidence: Scores | None = None

    @staticmethod
    def of(logits: Tensor, predicted: Tensor, labels: Tensor, positive: int) -> Predictions:
        """Predictions from logits (n, C), predicted classes (n,) and labels (n,), on the CPU.

        Probabilities are the softmax of the logits in float64; there are no scores if a logit is
        not finite.
        """
        import torch  # lazy, because readers of runs only need the names of metrics

        classes = logits.shape[1]
        cells = torch.bincount(labels * classes + predicted, minlength=classes * classes)
        confusion = cells.reshape(classes, classes).numpy()
        if not logits.isfinite().all():
            return Predictions(confusion=confusion, positive=positive)
        probabilities = torch.softmax(logits.double(), 1)
        weights = np.ones(len(labels))
        by_class = [
            Scores((labels == c).numpy(), probabilities[:, c].numpy(), weights)
            for c in range(classes)
        ]
        is_right = (predicted == labels).numpy()
        highest = probabilities.gather(1, predicted[:, None])[:, 0].numpy()
        confidence = Scores(is_right, highest, weights)
        return Predictions(
            confusion=confusion, positive=positive, by_class=by_class, confidence=confidence
        )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.confusion)

    @property
    def present(self) -> list[int]:
        """The classes with a test example."""
        present: list[int] = np.flatnonzero(self.confusion.sum(1)).tolist()
        return present

    @property
    def averaged(self) -> list[int]:
        """The classes over which metrics by class are averaged: those with test examples, or only
        the positive class of two classes.
        """
        if self.classes == 2:
            return [c for c in self.present if c == self.positive]
        return self.present


# ---- formulas on the confusion matrix ------------------------------------------------------------


def balanced_accuracy(predictions: Predictions) -> float:
    """The mean of the class accuracies."""
    return _mean_of_classes("recall_score", predictions, predictions.present)


def f1(predictions: Predictions) -> float:
    """The mean over classes of F1, the harmonic mean of precision and recall; also for two
    classes.
    """
    return _mean_of_classes("f1_score", predictions, predictions.present)


def f1_weighted(predictions: Predictions) -> float:
    """The mean over classes of F1, weighted by their numbers of test examples."""
    return _mean_of_classes("f1_score", predictions, predictions.present, "weighted")


def precision(predictions: Predictions) -> float:
    """The share of correct predictions among all predictions of a class; 0 if it is never
    predicted.
    """
    return _mean_of_classes("precision_score", predictions, predictions.averaged)


def recall(predictions: Predictions) -> float:
    """The share of a class's examples that are predicted correctly (sensitivity)."""
    return _mean_of_classes("recall_score", predictions, predictions.averaged)


def specificity(predictions: Predictions) -> float:
    """The share of the other classes' examples that are not predicted as the class."""
    counts = predictions.confusion
    negatives = counts.sum() - counts.sum(1)
    false_positives = counts.sum(0) - counts.diagonal()
    chosen = predictions.present
    if predictions.classes == 2:
        chosen = [predictions.positive]
    shares = [1 - false_positives[c] / negatives[c] for c in chosen if negatives[c] > 0]
    return _mean(shares)


def _mean_of_classes(
    score: str, predictions: Predictions, classes: Sequence[int], average: str = "macro"
) -> float:
    """A score of scikit-learn, averaged over some classes."""
    from sklearn import metrics

    if not classes:
        return math.nan
    labels, predicted = np.indices(predictions.confusion.shape)
    function: Any = getattr(metrics, score)
    value = function(
        labels.ravel(),
        predicted.ravel(),
        labels=classes,
        average=average,
        sample_weight=predictions.confusion.ravel(),
        zero_division=0,
    )
    return float(value)


# ---- formulas on scores --------------------------------------------------------------------------


def auc(predictions: Predictions) -> float:
    """The area under the ROC curve: the share of pairs of a positive and a negative example in
    which the positive one has the higher score; equal scores count one half.
    """
    from sklearn.metrics import roc_auc_score

    return _mean_of_rankings(roc_auc_score, predictions)


def average_precision(predictions: Predictions) -> float:
    """The mean of the precisions at all thresholds, weighted by the increase in recall."""
    from sklearn.metrics import average_precision_score

    # The sum of a perfect ranking can be above 1 by rounding.
    return float(np.minimum(_mean_of_rankings(average_precision_score, predictions), 1.0))


def log_loss(predictions: Predictions) -> float:
    """The mean over examples of the negative log probability of their label."""
    total = 0.0
    for scores in predictions.by_class:
        probabilities = scores.scores[scores.is_positive]
        losses = -np.log(np.maximum(probabilities, LEAST_PROBABILITY))
        total += float(scores.weights[scores.is_positive] @ losses)
    return _divided(total, float(predictions.confusion.sum()))


def brier(predictions: Predictions) -> float:
    """The mean over examples of the squared error of the probabilities, summed over the classes.
    For two classes, the squared error of the positive class.
    """
    chosen = list(predictions.by_class)
    if predictions.classes == 2:
        chosen = [predictions.by_class[predictions.positive]]
    total = 0.0
    for scores in chosen:
        errors = (scores.scores - scores.is_positive) ** 2
        total += float(scores.weights @ errors)
    return _divided(total, float(predictions.confusion.sum()))


def ece(predictions: Predictions) -> float:
    """The expected calibration error: the mean over examples of the difference between confidence
    and accuracy in 15 bins of equal width.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (2017).
    """
    scores = predictions.confidence
    if scores is None:
        return math.nan
    # A bin includes its upper end, as in the source.
    edges = np.arange(1, CALIBRATION_BINS) / CALIBRATION_BINS
    bins = np.digitize(scores.scores, edges, right=True)
    confidence = np.bincount(bins, scores.weights * scores.scores, CALIBRATION_BINS)
    right = np.bincount(bins, scores.weights * scores.is_positive, CALIBRATION_BINS)
    return _divided(float(np.abs(right - confidence).sum()), float(scores.weights.sum()))


def _mean_of_rankings(score: Callable[..., float], predictions: Predictions) -> float:
    """The mean over classes of a one-vs-rest score of scikit-learn. Classes without positive or
    without negative examples are ignored.
    """
    values = []
    for label in predictions.averaged:
        scores = predictions.by_class[label]
        if scores.has_two_classes:
            values.append(score(scores.is_positive, scores.scores, sample_weight=scores.weights))
    return _mean(values)


def _mean(values: Sequence[float]) -> float:
    return _divided(float(sum(values)), len(values))


def _divided(total: float, count: float) -> float:
    if count <= 0:
        return math.nan
    return total / count


# ---- the table of metrics ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric: its name in a config and a journal, its title in tables, and its formula.

    ``needs_scores``: whether it needs probabilities in addition to predicted classes. ``unit``: the
    unit in tables, which show shares in [0, 1] in percent.
    """

    name: str
    title: str
    formula: Callable[[Predictions], float]
    larger_is_better: bool = True
    needs_scores: bool = False
    unit: str = "%"

    @property
    def scale(self) -> float:
        """The factor of a value in tables."""
        if self.unit == "%":
            return 100.0
        return 1.0

    @property
    def digits(self) -> int:
        """The number of decimals in tables."""
        if self.unit == "%":
            return 2
        return 4

    def text(self, value: float) -> str:
        """A value with its unit, for tables and messages.

        >>> METRICS["auc"].text(0.875), METRICS["log_loss"].text(0.5)
        ('87.50 %', '0.5000 nat')
        """
        return f"{self.scale * value:.{self.digits}f} {self.unit}".removesuffix(" 1")

    @property
    def description(self) -> str:
        """The first paragraph of the formula's docstring, without the full stop."""
        first = (self.formula.__doc__ or "").split("\n\n")[0]
        return " ".join(first.split()).removesuffix(".")

    def value(self, predictions: Predictions) -> float | None:
        """The value of the metric; None if it is undefined."""
        if self.needs_scores and not predictions.by_class:
            return None
        value = self.formula(predictions)
        if not math.isfinite(value):
            return None
        return value


_ALL = (
    Metric(name="balanced_accuracy", title="balanced accuracy", formula=balanced_accuracy),
    Metric(name="f1", title="macro F1", formula=f1),
    Metric(name="f1_weighted", title="weighted F1", formula=f1_weighted),
    Metric(name="precision", title="precision", formula=precision),
    Metric(name="recall", title="recall", formula=recall),
    Metric(name="specificity", title="specificity", formula=specificity),
    Metric(name="auc", title="ROC AUC", formula=auc, needs_scores=True),
    Metric(
        name="average_precision",
        title="average precision",
        formula=average_precision,
        needs_scores=True,
    ),
    Metric(
        name="log_loss",
        title="log loss",
        formula=log_loss,
        larger_is_better=False,
        needs_scores=True,
        unit="nat",
    ),
    Metric(
        name="brier",
        title="Brier score",
        formula=brier,
        larger_is_better=False,
        needs_scores=True,
        unit="1",
    ),
    Metric(
        name="ece",
        title="calibration error",
        formula=ece,
        larger_is_better=False,
        needs_scores=True,
    ),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
"""All metrics except accuracy, by name."""

RECORDED = (*METRICS, CONFUSION)
"""The allowed values of the key ``metrics``."""

RANKING = (ACCURACY, *METRICS)
"""The allowed values of the key ``rank_by``."""


@dataclass(frozen=True)
class RunMetrics:
    """The metrics that a run records. ``names``: some of ``RECORDED``. ``positive``: the positive
    class of two classes.
    """

    names: Sequence[str] = ()
    positive: int = 0

    @property
    def numbers(self) -> list[str]:
        """The metrics that are numbers."""
        return [name for name in self.names if name != CONFUSION]

    def of_logits(self, logits: Tensor, predicted: Tensor, labels: Tensor) -> dict[str, Any]:
        """The metrics by name, from the arguments of ``Predictions.of``."""
        return self.of(Predictions.of(logits, predicted, labels, self.positive))

    def of(self, predictions: Predictions) -> dict[str, Any]:
        """The metrics by name in the form of a journal: numbers, None for undefined metrics, and
        the confusion matrix as lists.
        """
        values: dict[str, Any] = {}
        for name in self.names:
            if name == CONFUSION:
                values[name] = predictions.confusion.tolist()
            else:
                values[name] = METRICS[name].value(predictions)
        return values


NO_METRICS = RunMetrics()
"""The metrics of a run that only records accuracy."""


def unknown_metric(name: str, allowed: Sequence[str]) -> str:
    """Advice for a name that is not allowed; empty for an allowed name."""
    if name in allowed:
        return ""
    if name == ACCURACY:
        return "remove it: every run records accuracy"
    return suggestion(name, allowed)


def larger_is_better(metric: str) -> bool:
    """Whether larger values of a metric are better, as for accuracy."""
    return metric not in METRICS or METRICS[metric].larger_is_better


def better(metric: str, new: float | None, old: float | None) -> bool:
    """Whether a new value of a metric is better than an old one. Any number is better than None and
    NaN.

    >>> better("auc", 0.9, 0.8), better("log_loss", 0.9, 0.8), better("auc", 0.5, None)
    (True, False, True)
    """
    if new is None or math.isnan(new):
        return False
    if old is None or math.isnan(old):
        return True
    if larger_is_better(metric):
        return new > old
    return new < old


def best_round(metric: str, values: Mapping[int, float | None]) -> int | None:
    """The round with the best value of a metric; None if there is no value. Among equal values, the
    first round is the best.

    values: by round, in order.

    >>> best_round("log_loss", {1: 0.9, 2: 0.4, 3: 0.4}), best_round("auc", {1: None})
    (2, None)
    """
    best: int | None = None
    best_value: float | None = None
    for number, value in values.items():
        if better(metric, value, best_value):
            best = number
            best_value = value
    return best
