"""The measure ``private_public``: what each client's own model knows of its held-out data and of
the public images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fedstill.core.registry import register
from fedstill.core.reports import wrong_table
from fedstill.engines.at_client import AtClient
from fedstill.measures.base import Measure, Numbers, Reports
from fedstill.metrics.local_models import private_public


@register("measure", "private_public")
class PrivatePublic(Measure):
    """Accuracy of each client's own model on its held-out examples and on the public images; the
    server's on these.

    Before and after every stage on public data, after every other. Held out is what
    ``plan.validation`` says. The numbers come with the clients' replies; the formulas are in
    ``metrics/local_models.py``, and the accuracies by client stand in the event of the round.
    Source:     HiPer-FedKD, table 1 and its notebooks.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"held_out"})
    gives: ClassVar[tuple[str, ...]] = ("private", "public")

    def at_client(self, seen: AtClient) -> Numbers | None:
        """``private`` and ``public``: ``counts`` (C,) of labels, and right ones (C,) ``before`` and
        ``after``.
        """
        on_public = seen.stage.view == "public"
        models = {"before": seen.start, "after": seen.end} if on_public else {"after": seen.end}
        report = {}
        for name, data in (("private", seen.view.validation), ("public", seen.public)):
            if data is not None and len(data) and bool((data.labels >= 0).all()):
                counts = torch.bincount(data.labels, minlength=seen.classes).tolist()
                right = {k: seen.correct_by_class(params, data) for k, params in models.items()}
                report[name] = {"counts": counts, **right}
        return report

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be whole numbers, one a class; ``after`` is there where counts are, and is
        not above them.
        """
        tables = {name: report[name] for name in self.gives if report.get(name, {}) != {}}
        return next(
            (why for name, table in tables.items() if (why := wrong_table(name, table, classes))),
            "",
        )

    def of_round(self, seen: Reports) -> Numbers:
        """Accuracies by client, their means, and the server's."""
        return private_public(seen.clients)

    def examples(self, test: int, clients: int, own: int) -> int:
        """Public and held-out images are taken to be as many as the test set's, at each client."""
        return test * clients
