"""What local models know of their own clients' classes and of the others': the measure ``local``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstill.metrics.accuracy import class_accuracy, in_local_accuracy, out_local_accuracy
from fedstill.registry import register


@register("measure", "local")
def local_accuracies(
    clients: Sequence[Mapping[str, Any]], received: Sequence[Any], aggregated: Sequence[Any], totals: Sequence[int]
) -> dict[str, float]:
    """In- and out-local accuracy of local models, and of the global model before and after the round.

    clients: events with ``correct_by_class`` and ``label_counts`` (C,), others are passed over; received, aggregated:
    class accuracies (C,) of the global models; totals: test examples by class (C,). Gives means over clients, plain and
    weighted by size, the spread (population) over clients, and the global models' accuracy on the mean of the clients'
    label distributions. Empty if no client was measured. Source: FedNTD, section 2.2 and figure 4.
    """
    measured = [e for e in clients if "correct_by_class" in e]
    if not measured:
        return {}
    counts = np.asarray([e["label_counts"] for e in measured], dtype=np.float64)
    shares = counts / counts.sum(1, keepdims=True)
    local = [class_accuracy(e["correct_by_class"], totals) for e in measured]
    inside = [in_local_accuracy(a, p) for a, p in zip(local, shares, strict=True)]
    outside = [out_local_accuracy(a, p) for a, p in zip(local, shares, strict=True)]
    mean_share = shares.mean(0)
    return {
        "in_local_accuracy": float(np.mean(inside)),
        "in_local_accuracy_weighted": float(np.average(inside, weights=counts.sum(1))),
        "in_local_accuracy_std": float(np.std(inside)),
        "out_local_accuracy": float(np.mean(outside)),
        "out_local_accuracy_weighted": float(np.average(outside, weights=counts.sum(1))),
        "out_local_accuracy_std": float(np.std(outside)),
        "received_in_local_accuracy": in_local_accuracy(received, mean_share),
        "received_out_local_accuracy": out_local_accuracy(received, mean_share),
        "global_in_local_accuracy": in_local_accuracy(aggregated, mean_share),
        "global_out_local_accuracy": out_local_accuracy(aggregated, mean_share),
    }
