"""Accuracy over a test set, by class, and weighted by a client's label distribution and query; and
the forgetting of classes over rounds.

Accuracies are in [0, 1]. The accuracy of a class without test examples is NaN; such classes are
ignored, and results are NaN if there are no others. ``None`` in a list stands for NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError
from fedstill.core.reports import counts as are_all_counts

if TYPE_CHECKING:
    from fedstill.core.label_counts import TensorLike

Values = NDArray[np.float64]


def share_of(count: float, total: int) -> float | None:
    """The share of a count in a total; None if the total is 0."""
    if not total:
        return None
    return count / total


def float_array(numbers: TensorLike, dims: int, name: str) -> Values:
    """Numbers as a float64 array with ``dims`` axes, ``None`` as NaN. For another number of axes,
    raises ConfigError, whose message contains ``name``.

    >>> float_array([0.5, None], 1, "accuracies")
    array([0.5, nan])
    """
    if hasattr(numbers, "detach"):
        # A tensor; readers of runs have none, and do not import torch.
        numbers = numbers.detach().cpu().double().numpy()
    array = np.array(numbers, dtype=np.float64)
    if array.ndim != dims:
        raise ConfigError(f"{name} must have {dims} axes, but have shape {array.shape}")
    return array


def check_same_classes(*arrays: Values) -> None:
    """Raise ConfigError unless all arrays have the same number of classes (their last axis)."""
    if len({a.shape[-1] for a in arrays}) > 1:
        raise ConfigError(
            f"arrays have different numbers of classes: shapes {[a.shape for a in arrays]}"
        )


def weighted_mean(numbers: Values, weights: Values) -> float:
    """The mean of numbers (C,) with weights (C,) >= 0; NaN numbers are ignored. NaN if the sum of
    the weights is 0.

    >>> weighted_mean(np.array([1.0, np.nan, 0.0]), np.array([1.0, 5.0, 3.0]))
    0.25
    """
    is_measured = ~np.isnan(numbers)
    measured = numbers[is_measured]
    weights = weights[is_measured]
    total = float(weights.sum())
    if not total > 0:
        return float("nan")
    mean = float(weights @ measured) / total
    # By rounding, the mean of equal numbers can differ from them, and then be above 1.
    return float(np.clip(mean, measured.min(), measured.max()))


def top1(correct: TensorLike, total: TensorLike) -> float:
    """The accuracy on all examples, from counts by class.

    correct, total: (C,) counts, 0 <= correct <= total. Returns NaN without examples.

    >>> top1([3, 0], [4, 1])
    0.6
    """
    correct_counts = float_array(correct, 1, "correct counts")
    total_counts = float_array(total, 1, "total counts")
    check_same_classes(correct_counts, total_counts)
    examples = total_counts.sum()
    if not examples > 0:
        return float("nan")
    return float(correct_counts.sum() / examples)


def class_accuracy(correct: TensorLike, total: TensorLike) -> Values:
    """The accuracy of each class (C,), from counts (C,) by class; NaN where total is 0.

    >>> class_accuracy([3, 0], [4, 0])
    array([0.75,  nan])
    """
    correct_counts = float_array(correct, 1, "correct counts")
    total_counts = float_array(total, 1, "total counts")
    check_same_classes(correct_counts, total_counts)
    undefined = np.full_like(correct_counts, np.nan)
    return np.divide(correct_counts, total_counts, out=undefined, where=total_counts > 0)


def in_local_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, unweighted: bool = False
) -> float:
    """The accuracy on test examples with the client's label distribution: ``sum_c p_c A_c``.

    class_accuracy, proportions: (C,). With ``unweighted``, the mean over the classes of the client.

    Source: FedNTD, sec. 2.2; ``unweighted`` is FedADKD's description of its fig. 6.

    >>> in_local_accuracy([1.0, 0.5], [0.75, 0.25])
    0.875
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    weights = shares
    if unweighted:
        weights = (shares > 0).astype(np.float64)
    return weighted_mean(accuracy, weights)


def out_local_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, unweighted: bool = False
) -> float:
    """The accuracy outside of the client's label distribution: ``sum_c p~_c A_c`` with
    ``p~_c = (1 - p_c) / (C - 1)``.

    class_accuracy, proportions: (C,). With ``unweighted``, the mean over the classes that the
    client does not have.

    Source: FedNTD, sec. 2.2; ``unweighted`` is FedADKD's description of its fig. 6.

    >>> out_local_accuracy([0.9, 0.1], [1.0, 0.0])
    0.1
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    weights = 1 - shares
    if unweighted:
        weights = (shares <= 0).astype(np.float64)
    return weighted_mean(accuracy, weights)


def average_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, query: Iterable[int]
) -> float:
    """The weighted mean accuracy on a client's local and queried classes. The weight of a local
    class is its share, and that of a queried class is 1.

    class_accuracy, proportions: (C,); query: class ids. Without a query this is
    ``in_local_accuracy``. Raises ConfigError for a class id outside [0, C).

    Source: QKT, sec. 4.1 and appendix A.2 (Average Accuracy).
    Reading: a class that is both local and queried counts once, with weight 1.

    >>> # All local classes are right, the queried class is wrong.
    >>> average_accuracy([1.0, 1.0, 0.0], [0.5, 0.5, 0.0], query=[2])
    0.5
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    is_queried = query_mask(query, len(accuracy))
    return weighted_mean(accuracy, np.where(is_queried, 1.0, shares))


def uniform_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, query: Iterable[int]
) -> float:
    """The unweighted mean accuracy on a client's local and queried classes.

    class_accuracy, proportions: (C,); query: class ids. Raises ConfigError for a class id outside
    [0, C).

    Source: QKT, appendix (uniform accuracy).

    >>> uniform_accuracy([1.0, 0.5, 0.0], [0.9, 0.1, 0.0], query=[2])
    0.5
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    counts = query_mask(query, len(accuracy)) | (shares > 0)
    return weighted_mean(accuracy, counts.astype(np.float64))


def best_and_recent(accuracies: Sequence[float | None]) -> dict[str, float | None]:
    """The accuracy of the best round and the mean of the last ten rounds, which some papers report
    instead of the accuracy of the last round.

    accuracies: by round, in order; None is ignored. The values are None if no round has an
    accuracy.

    >>> best_and_recent([0.5, None, 0.7, 0.6])["best_accuracy"]
    0.7
    """
    measured = [accuracy for accuracy in accuracies if accuracy is not None]
    if not measured:
        return {"best_accuracy": None, "mean_accuracy_last_10": None}
    recent = measured[-10:]
    mean = sum(recent) / len(recent)
    return {"best_accuracy": max(measured), "mean_accuracy_last_10": mean}


def _accuracy_and_shares(
    class_accuracy: TensorLike, proportions: TensorLike
) -> tuple[Values, Values]:
    accuracy = float_array(class_accuracy, 1, "class accuracies")
    shares = float_array(proportions, 1, "label shares")
    check_same_classes(accuracy, shares)
    return accuracy, shares


def query_mask(query: Iterable[int], classes: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each class (C,) is queried. Raises ConfigError for a class id outside [0, C)."""
    ids = [int(c) for c in query]
    for c in ids:
        if not 0 <= c < classes:
            raise ConfigError(f"query class {c} is outside [0, {classes})")
    return np.isin(np.arange(classes), ids)


# Forgetting: the difference between the best and the last accuracy of each class.


def forgetting(class_accuracy: TensorLike) -> float:
    """Forgetting F: the mean over classes of (best accuracy of an earlier round - accuracy of the
    last round).

    class_accuracy: (rounds, C) in [0, 1], oldest round first. Returns a number in [-1, 1], lower is
    better. The term of a class is negative only if its last round is better than all earlier ones.
    0 for fewer than two rounds. Classes without accuracy in the last round, or in all earlier ones,
    are ignored; NaN if there are no others.

    Source: FedNTD, eq. 5.

    >>> forgetting([[0.75, 0.25], [0.25, 0.5]])    # the mean of 0.5 and -0.25
    0.125
    """
    running = running_forgetting(class_accuracy)
    if not running:
        return 0.0
    return running[-1]


def forgetting_by_class(class_accuracy: TensorLike) -> Values:
    """The forgetting of each class (C,): best accuracy of an earlier round - accuracy of the last
    round. The mean over classes is F.

    class_accuracy: (rounds, C) in [0, 1], oldest round first. Zeros for one round; NaN for a class
    without accuracy in the last round, or in all earlier ones.

    Source: FedNTD, eq. 5.

    >>> forgetting_by_class([[0.75, 0.25], [0.25, 0.5]])
    array([ 0.5 , -0.25])
    """
    accuracy = float_array(class_accuracy, 2, "class accuracies of all rounds")
    earlier = accuracy
    if len(accuracy) > 1:
        earlier = accuracy[:-1]
    lost: Values = np.fmax.reduce(earlier, axis=0) - accuracy[-1]
    return lost


def running_forgetting(class_accuracy: TensorLike) -> list[float]:
    """The forgetting after each round, as if it were the last one; 0 for the first round.

    class_accuracy: (rounds, C), oldest round first.

    Source: FedADKD, fig. 7.

    >>> running_forgetting([[0.5], [0.25], [0.75]])
    [0.0, 0.25, -0.25]
    """
    accuracy = float_array(class_accuracy, 2, "class accuracies of all rounds")
    if len(accuracy) == 0:
        return []
    best = np.fmax.accumulate(accuracy, axis=0)  # fmax ignores NaN
    drops = best[:-1] - accuracy[1:]
    weights = np.ones(accuracy.shape[1])
    return [0.0, *(weighted_mean(drop, weights) for drop in drops)]


# Prediction consistency: the similarity of the class accuracies of consecutive models.


def consistency(previous: TensorLike, current: TensorLike) -> float:
    """The cosine similarity of two models' class accuracies: 1 for proportional accuracies, 0 if no
    class has a positive accuracy in both.

    previous, current: (C,) in [0, 1]. Classes without accuracy in one of them are ignored; NaN if
    all accuracies of a model are 0.

    Source: FedNTD, fig. 2(b) (consecutive rounds); SFedKD, fig. 1(b) (consecutive clients).

    >>> consistency([0.6, 0.0], [0.3, 0.0])
    1.0
    """
    old = float_array(previous, 1, "accuracies before")
    new = float_array(current, 1, "accuracies after")
    check_same_classes(old, new)
    measured = ~(np.isnan(old) | np.isnan(new))
    old = old[measured]
    new = new[measured]
    lengths = float(np.linalg.norm(old) * np.linalg.norm(new))
    if not lengths > 0:
        return float("nan")
    return float(old @ new) / lengths


def running_consistency(class_accuracy: TensorLike) -> list[float]:
    """The consistency of each round with the previous one; NaN for the first round.

    class_accuracy: (rounds, C), oldest round first.

    >>> running_consistency([[1.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    [nan, 0.0, 1.0]
    """
    accuracy = float_array(class_accuracy, 2, "class accuracies of all rounds")
    if len(accuracy) == 0:
        return []
    return [float("nan"), *(consistency(old, new) for old, new in pairwise(accuracy))]


def wrong_table(label: str, table: Any, classes: int) -> str:
    """The reason why a table of correct predictions is invalid; empty if it is valid.

    The table has ``counts`` of examples by class (C,), and the correct predictions ``before``
    (optional) and ``after``. label: the table's name, for the message. classes: C; 0 if unknown.
    """
    required = {"counts", "after"}
    if not isinstance(table, Mapping) or not required <= table.keys() <= {*required, "before"}:
        return f"{label} is not a table with counts and after"
    for name, value in table.items():
        if not are_all_counts(value):
            return f"{label}: {name} is not a list of counts"
        if len(value) != (classes or len(table["counts"])):
            return f"{label}: {name} has {len(value)} numbers for {classes} classes"
    for name in ("before", "after"):
        if any(right > n for right, n in zip(table.get(name, ()), table["counts"], strict=False)):
            return f"{label}: {name} has more correct predictions than examples"
    return ""
