"""What local models know of their own clients' classes and of the others': knowledge outside of
local data (KOLD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstill.labels import TensorLike
from fedstill.metrics.accuracy import class_accuracy, in_local_accuracy, out_local_accuracy
from fedstill.metrics.values import mean_over_classes, values


def local_accuracies(
    clients: Sequence[Mapping[str, Any]],
    received: Sequence[Any],
    aggregated: Sequence[Any],
    totals: Sequence[int],
) -> dict[str, float]:
    """In- and out-local accuracy of local models, and of the global model before and after the
    round.

    clients: events with ``correct_by_class`` and ``label_counts`` (C,), others are passed over;
    received, aggregated: class accuracies (C,) of the global models; totals: test examples by class
    (C,). Gives means over clients, plain and weighted by size, the spread (population) over
    clients, and the global models' accuracy on the mean of the clients' label distributions. Keys
    with ``_seen`` are the plain means over classes that a client has, or does not have; a client
    that has them all has no such out-local accuracy. Empty if no client was measured.

    Source: FedNTD, section 2.2 and figure 4; the form ``_seen``: FedADKD, figure 6.
    """
    measured = [e for e in clients if "correct_by_class" in e]
    if not measured:
        return {}
    counts = np.asarray([e["label_counts"] for e in measured], dtype=np.float64)
    shares, sizes = counts / counts.sum(1, keepdims=True), counts.sum(1)
    local = [class_accuracy(e["correct_by_class"], totals) for e in measured]
    out: dict[str, float] = {}
    for form, seen in (("", False), ("_seen", True)):
        for side, accuracy in (("in", in_local_accuracy), ("out", out_local_accuracy)):
            by_client = [accuracy(a, p, seen) for a, p in zip(local, shares, strict=True)]
            out |= {
                f"{side}_local_accuracy{form}{k}": v
                for k, v in over_clients(by_client, sizes).items()
            }
    mean_share = shares.mean(0)
    for model, accuracy_by_class in (("received", received), ("global", aggregated)):
        out[f"{model}_in_local_accuracy"] = in_local_accuracy(accuracy_by_class, mean_share)
        out[f"{model}_out_local_accuracy"] = out_local_accuracy(accuracy_by_class, mean_share)
    return out


def by_epoch(
    clients: Sequence[Mapping[str, Any]], totals: Sequence[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """In- and out-local accuracy of models in training: as received, and after each local epoch.

    clients: events with their stage's ``name``, ``correct_by_epoch`` (epochs + 1, C) and
    ``label_counts`` (C,), others are passed over; totals: test examples by class (C,). Gives
    ``{"by_epoch": {stage: {...}}}`` with lists over epochs of the means over clients, plain and
    weighted by size, and of the spread (population); a client that stopped earlier is left out from
    there on. Empty if no client was measured. Source: FedNTD, figure 6.
    """
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for event in clients:
        if "correct_by_epoch" in event:
            stages.setdefault(event["name"], []).append(event)
    by_stage = {name: _epochs(events, totals) for name, events in stages.items()}
    return {"by_epoch": by_stage} if by_stage else {}


def _epochs(events: Sequence[Mapping[str, Any]], totals: Sequence[int]) -> dict[str, Any]:
    out: dict[str, Any] = {"clients": len(events)}
    for epoch in range(max(len(e["correct_by_epoch"]) for e in events)):
        there = [e for e in events if epoch < len(e["correct_by_epoch"])]
        local = [class_accuracy(e["correct_by_epoch"][epoch], totals) for e in there]
        counts = np.asarray([e["label_counts"] for e in there], dtype=np.float64)
        shares, sizes = counts / counts.sum(1, keepdims=True), counts.sum(1)
        for side, accuracy in (("in", in_local_accuracy), ("out", out_local_accuracy)):
            by_client = [accuracy(a, p) for a, p in zip(local, shares, strict=True)]
            for key, value in over_clients(by_client, sizes).items():
                out.setdefault(f"{side}_local_accuracy{key}", []).append(value)
    return out


def over_clients(by_client: Sequence[float], sizes: TensorLike) -> dict[str, float]:
    """Mean and population spread over clients, plain (keys "" and "_std") and weighted by size
    ("_weighted", ...).

    by_client: a number for each client; NaN, where it has none, is left out; sizes: as many
    weights. NaN if nothing is left.

    >>> over_clients([0.0, 1.0], [1, 3])["_weighted"]
    0.75
    """
    numbers, weights = (
        values(by_client, 1, "numbers of clients"),
        values(sizes, 1, "sizes of clients"),
    )
    out: dict[str, float] = {}
    for key, weight in (("", np.ones_like(weights)), ("_weighted", weights)):
        mean = mean_over_classes(numbers, weight)
        out |= {key: mean, f"{key}_std": mean_over_classes((numbers - mean) ** 2, weight) ** 0.5}
    return out
