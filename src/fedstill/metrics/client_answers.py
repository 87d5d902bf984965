"""What clients' own models are worth to them: the numbers of methods that leave each client a model
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstill.labels import TensorLike
from fedstill.metrics.accuracy import in_local_accuracy
from fedstill.metrics.forgetting import forgetting
from fedstill.metrics.values import values


def personal_accuracies(
    class_accuracy: Mapping[int, TensorLike], label_counts: Sequence[Sequence[int]]
) -> dict[int, float]:
    """{client: accuracy of its answer on test examples whose classes are distributed as its own
    data}.

    class_accuracy: (C,) by client; label_counts: (clients, C). A client without data, or none of
    whose classes has a test image, is left out.

    >>> personal_accuracies({0: [1.0, 0.5], 1: [0.0, 0.0]}, [[3, 1], [0, 0]])
    {0: 0.875}
    """
    out: dict[int, float] = {}
    for client, accuracy in class_accuracy.items():
        counts = np.asarray(label_counts[client], dtype=np.float64)
        mine = in_local_accuracy(accuracy, counts / counts.sum()) if counts.sum() else float("nan")
        out |= {} if np.isnan(mine) else {client: mine}
    return out


def personal_answers(
    class_accuracy: Mapping[int, TensorLike],
    best: Mapping[int, TensorLike],
    label_counts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """What the clients' own models can do, over the clients whose models were measured.

    class_accuracy: (C,) by client, of its own model; best: by client, the best of its earlier looks
    for each class;
    label_counts: (clients, C). Gives ``personal_accuracy`` (``personal_accuracies``, the mean over
    clients) and its population spread ``personal_accuracy_std``, ``personal_by_client``,
    ``personal_class_accuracy`` (C,), the mean over clients, ``personal_clients``, how many they
    are, and ``personal_forgetting``: how far a client's own classes are below its best earlier
    look, the mean over these classes and then over clients; 0 before the second look. Empty if no
    client was measured.

    >>> personal_answers({0: [0.5, 0.0]}, {0: [0.75, 0.25]}, [[4, 0]])["personal_forgetting"]
    0.25
    """
    by_client = personal_accuracies(class_accuracy, label_counts)
    if not by_client:
        return {}
    table = np.stack([values(class_accuracy[c], 1, "class accuracies") for c in by_client])
    means = [
        float(np.nanmean(column)) if not np.isnan(column).all() else None for column in table.T
    ]
    lost = [_lost(class_accuracy[c], best[c], label_counts[c]) for c in by_client if c in best]
    numbers = list(by_client.values())
    return {
        "personal_accuracy": float(np.mean(numbers)),
        "personal_accuracy_std": float(np.std(numbers)),
        "personal_by_client": {str(client): value for client, value in sorted(by_client.items())},
        "personal_class_accuracy": means,
        "personal_clients": len(by_client),
        "personal_forgetting": float(np.mean(lost)) if lost else 0.0,
    }


def _lost(now: TensorLike, best: TensorLike, counts: Sequence[int]) -> float:
    own = [c for c, count in enumerate(counts) if count > 0]
    before, after = (values(accuracy, 1, "class accuracies").take(own) for accuracy in (best, now))
    return forgetting(np.stack([before, after]))
