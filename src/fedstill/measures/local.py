"""The measure ``local``: what local models know of their own client's classes and of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedstill.core.registry import register
from fedstill.engines.at_client import AtClient
from fedstill.measures.base import Measure, Numbers, Reports, are_counts
from fedstill.metrics.local_models import local_accuracies


@register("measure", "local")
class Local(Measure):
    """In- and out-local accuracy of local models; each client evaluates its own on the common test
    set.

    The numbers come with the clients' replies, so that they exist where no server sees a local
    model; the formulas are in ``metrics/local_models.py``, and the means stand in the event of the
    round.
    """

    gives: ClassVar[tuple[str, ...]] = ("label_counts", "correct_by_class")

    def at_client(self, seen: AtClient) -> Numbers | None:
        """``label_counts`` (C,) of the client, and ``correct_by_class`` (C,) of its model on the
        common test set.
        """
        if seen.test is None or seen.is_server:
            return None
        right = seen.correct_by_class(seen.end, seen.test)
        return {"label_counts": seen.view.counts.tolist(), "correct_by_class": right}

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be whole numbers, one a class; right answers come with label counts."""
        if "correct_by_class" in report and "label_counts" not in report:
            return "correct_by_class is without label_counts"
        return are_counts(report, self.gives, classes)

    def of_round(self, seen: Reports) -> Numbers:
        """Means and spreads over clients, and the global models' accuracy on the clients' mean
        label shares.
        """
        return local_accuracies(seen.clients, seen.received, seen.aggregated, seen.test_counts)

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each client."""
        return test * clients
