"""The measure ``personal``: how good a local model is for its own client, on its training data and
on new images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedstill.core.registry import register
from fedstill.engines.at_client import AtClient
from fedstill.measures.base import Measure, Numbers, Reports, are_counts
from fedstill.metrics import class_accuracy
from fedstill.metrics.local_models import over_clients, personal_accuracies


@register("measure", "personal")
class Personal(Measure):
    """Accuracy of local models on their client's training data, and on test examples in its
    proportions of classes.

    After every stage on a client's own data. The numbers come with the clients' replies, so that
    they exist where no server sees a local model; the means over clients stand in the event of the
    round.
    Source: FedNTD, appendices H and I, figures 11 and 12 ("local train", "personalised").
    Reading: the code measures training data as augmented for training; here they are as they are.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test_at_clients"})
    gives: ClassVar[tuple[str, ...]] = (
        "label_counts",
        "trained_counts",
        "trained_right",
        "tested_right",
    )

    def at_client(self, seen: AtClient) -> Numbers | None:
        """``trained_counts`` (C,) of the images it trained on, ``trained_right`` and
        ``tested_right`` of its model.
        """
        if seen.test is None or seen.is_server or seen.stage.view == "public":
            return None
        return {
            "label_counts": seen.view.counts.tolist(),
            "trained_counts": np.bincount(
                seen.view.data.labels.cpu().numpy(), minlength=seen.classes
            ).tolist(),
            "trained_right": seen.correct_by_class(seen.end, seen.view.data),
            "tested_right": seen.correct_by_class(seen.end, seen.test),
        }

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be whole numbers, one a class, and all of them are there or none; nothing is
        right twice.
        """
        there = [name for name in self.gives[1:] if name in report]
        if there and (len(there) < len(self.gives) - 1 or "label_counts" not in report):
            return f"{there[0]} is without the rest"
        if why := are_counts(report, self.gives, classes):
            return why
        right, counts = (report.get(name, []) for name in ("trained_right", "trained_counts"))
        return (
            "trained_right is above trained_counts"
            if any(a > b for a, b in zip(right, counts, strict=True))
            else ""
        )

    def of_round(self, seen: Reports) -> Numbers:
        """Both accuracies, their mean and spread over clients."""
        events = [e for e in seen.clients if "trained_right" in e and sum(e["trained_counts"])]
        tested = {
            i: class_accuracy(e["tested_right"], seen.test_counts) for i, e in enumerate(events)
        }
        personal = personal_accuracies(tested, [e["label_counts"] for e in events])
        trained = [sum(e["trained_right"]) / sum(e["trained_counts"]) for e in events]
        sizes = [float(sum(e["trained_counts"])) for e in events]
        each = {
            "local_train": trained,
            "personalised": [personal.get(i, float("nan")) for i in tested],
        }
        means = {k: over_clients(by_client, sizes) for k, by_client in each.items() if by_client}
        return {f"{k}_accuracy{suffix}": v for k, by in means.items() for suffix, v in by.items()}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set and its own data at each client."""
        return test * clients + own
