"""Accuracy: over a test set, by class, and weighted by what one client holds or asks for.

Accuracies are in [0, 1]; a class without a test example is NaN and is left out (see ``values``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedstill.core.errors import ConfigError
from fedstill.core.labels import TensorLike
from fedstill.metrics.values import Values, mean_over_classes, same_classes, values


def top1(correct: TensorLike, total: TensorLike) -> float:
    """The share of all examples whose most likely class is their label, from counts per class.

    correct, total: (C,) counts, 0 <= correct <= total. NaN without examples.

    >>> top1([3, 0], [4, 1])
    0.6
    """
    correct_counts = values(correct, 1, "correct counts")
    total_counts = values(total, 1, "total counts")
    same_classes(correct_counts, total_counts)
    examples = total_counts.sum()
    if not examples > 0:
        return float("nan")
    return float(correct_counts.sum() / examples)


def class_accuracy(correct: TensorLike, total: TensorLike) -> Values:
    """Accuracy of each class from counts per class: (C,) counts, gives a (C,) array, NaN where
    total is 0.

    >>> class_accuracy([3, 0], [4, 0])
    array([0.75,  nan])
    """
    correct_counts = values(correct, 1, "correct counts")
    total_counts = values(total, 1, "total counts")
    same_classes(correct_counts, total_counts)
    undefined = np.full_like(correct_counts, np.nan)
    return np.divide(correct_counts, total_counts, out=undefined, where=total_counts > 0)


def in_local_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, unweighted: bool = False
) -> float:
    """Accuracy on a test set whose labels are distributed as the client's own: ``sum_c p_c A_c``.

    class_accuracy, proportions: (C,). With ``unweighted``, the plain mean over the classes that the
    client has.

    Source: FedNTD, sec. 2.2; ``unweighted`` is FedADKD's description of its fig. 6.

    >>> in_local_accuracy([1.0, 0.5], [0.75, 0.25])
    0.875
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    weights = shares
    if unweighted:
        weights = (shares > 0).astype(np.float64)
    return mean_over_classes(accuracy, weights)


def out_local_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, unweighted: bool = False
) -> float:
    """Accuracy outside of the client's label distribution: ``sum_c p~_c A_c`` with
    ``p~_c = (1 - p_c) / (C - 1)``.

    class_accuracy, proportions: (C,). With ``unweighted``, the plain mean over the classes that the
    client does not have.

    Source: FedNTD, sec. 2.2; ``unweighted`` is FedADKD's description of its fig. 6.

    >>> out_local_accuracy([0.9, 0.1], [1.0, 0.0])
    0.1
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    weights = 1 - shares
    if unweighted:
        weights = (shares <= 0).astype(np.float64)
    return mean_over_classes(accuracy, weights)


def average_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, query: Iterable[int]
) -> float:
    """Accuracy over a client's local and queried classes: a local class weighs its share, a queried
    one weighs 1.

    class_accuracy, proportions: (C,); query: class ids. Without a query this is
    ``in_local_accuracy``. Raises ConfigError for a class id outside [0, C).

    Source: QKT, sec. 4.1 and appendix A.2 (Average Accuracy).
    Reading: a class both local and queried is counted once, with weight 1.

    >>> # Perfect at home, nothing learned.
    >>> average_accuracy([1.0, 1.0, 0.0], [0.5, 0.5, 0.0], query=[2])
    0.5
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    is_queried = _is_queried(query, len(accuracy))
    return mean_over_classes(accuracy, np.where(is_queried, 1.0, shares))


def uniform_accuracy(
    class_accuracy: TensorLike, proportions: TensorLike, query: Iterable[int]
) -> float:
    """The plain mean accuracy over a client's local and queried classes.

    class_accuracy, proportions: (C,); query: class ids. Raises ConfigError for a class id outside
    [0, C).

    Source: QKT, appendix (uniform accuracy).

    >>> uniform_accuracy([1.0, 0.5, 0.0], [0.9, 0.1, 0.0], query=[2])
    0.5
    """
    accuracy, shares = _accuracy_and_shares(class_accuracy, proportions)
    counts = _is_queried(query, len(accuracy)) | (shares > 0)
    return mean_over_classes(accuracy, counts.astype(np.float64))


def best_and_recent(accuracies: Sequence[float | None]) -> dict[str, float | None]:
    """The best round's accuracy, and the mean accuracy of the last ten rounds, which some papers
    report in place of the last round's.

    accuracies: one for each round, in order; rounds without accuracy (None) are left out. Gives
    None where no round is left.

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
    accuracy = values(class_accuracy, 1, "class accuracies")
    shares = values(proportions, 1, "label shares")
    same_classes(accuracy, shares)
    return accuracy, shares


def _is_queried(query: Iterable[int], classes: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    ids = [int(c) for c in query]
    for c in ids:
        if not 0 <= c < classes:
            raise ConfigError(f"query class {c} is outside [0, {classes})")
    return np.isin(np.arange(classes), ids)
