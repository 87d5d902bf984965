"""The measure ``epochs``: what local models know of their own client's classes and of the others,
epoch by epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedstill.core.registry import register
from fedstill.engines.at_client import AtClient
from fedstill.measures.base import Measure, Numbers, Reports, are_counts
from fedstill.metrics.local_models import by_epoch


@register("measure", "epochs")
class Epochs(Measure):
    """In- and out-local accuracy of local models as received and after every local epoch.

    Each client copies its model when an epoch ends and evaluates the copies on the common test set
    when it has trained, in the stages in which it trains on its own data; training is the same to
    the bit. The numbers come with the clients' replies; the formulas are in
    ``metrics/local_models.py``, and the means stand in the event of the round.
    Source: FedNTD, figure 6. Reading: a client's visit is shown from the model it receives
    (epoch 0) to what it sends.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test_at_clients", "epochs"})
    each_epoch: ClassVar[bool] = True
    gives: ClassVar[tuple[str, ...]] = ("label_counts", "correct_by_epoch")

    def at_client(self, seen: AtClient) -> Numbers | None:
        """``label_counts`` (C,) of the client, and ``correct_by_epoch`` (epochs + 1, C) on the
        common test set.
        """
        if seen.test is None or not seen.by_epoch:
            return None
        right = [
            seen.correct_by_class(params, seen.test) for params in (seen.start, *seen.by_epoch)
        ]
        return {"label_counts": seen.view.counts.tolist(), "correct_by_epoch": right}

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be whole numbers, one a class, for the start and each epoch; they come with
        label counts.
        """
        if "correct_by_epoch" not in report:
            return are_counts(report, ("label_counts",), classes)
        rows = report["correct_by_epoch"]
        if not isinstance(rows, list) or not rows:
            return "correct_by_epoch is not a list of an epoch's counts"
        each = {f"correct_by_epoch[{i}]": row for i, row in enumerate(rows)}
        if why := are_counts({**report, **each}, ("label_counts", *each), classes):
            return why
        if "label_counts" not in report:
            return "correct_by_epoch is without label_counts"
        return (
            f"correct_by_epoch has {len(rows)} epochs"
            if len(rows) > report.get("epochs", 0) + 1
            else ""
        )

    def of_round(self, seen: Reports) -> Numbers:
        """``by_epoch``: for each stage, lists over epochs of means and spreads over clients."""
        return by_epoch(seen.clients, seen.test_counts)

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each client: one look, of which there is one before and one after every
        epoch.
        """
        return test * clients
