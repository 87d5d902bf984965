"""What answers are worth on the clients' own test sets, where a simulation has such."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedstill.data.views import SiteViews
from fedstill.engines.cores import workers
from fedstill.engines.passes import right_by_example
from fedstill.records import Examples

Predictors = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass
class OwnTests:
    """The clients' own test sets of a run, and what the last answers were worth there.

    ``stages``: those after which a client's own model is its answer, as the method says.
    """

    sites: SiteViews
    stages: Collection[str]
    _personal: dict[int, float] = field(default_factory=dict)

    @cached_property
    def everyone(self) -> tuple[Examples, Tensor]:
        """All own test examples, and whose each is (n,): one pass of a common model then serves all
        clients.
        """
        tests = self.sites.own_tests
        values, labels = (
            torch.cat([getattr(own, name) for own in tests.values()])
            for name in ("values", "labels")
        )
        owners = torch.repeat_interleave(
            torch.tensor([*tests]), torch.tensor([len(own) for own in tests.values()])
        )
        return Examples(values, labels), owners

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients with models of their own reported."""
        for event in events:
            if event["name"] in self.stages and "site_accuracy" in event:
                self._personal[event["client"]] = event["site_accuracy"]

    def round(self, predictors: Predictors) -> dict[str, Any]:
        """Fields of a round's event; empty where clients have no tests of their own.

        ``own_test_accuracy``: each client's answer on its own test set, the mean over
        clients; ``own_test_worst``: the least of them; ``own_test_by_client``: by client, as text.
        """
        if not self.sites.own_tests:
            return {}
        by_client = self._by_client(predictors)
        if not by_client:
            return {}
        return {
            "own_test_accuracy": sum(by_client.values()) / len(by_client),
            "own_test_worst": min(by_client.values()),
            "own_test_by_client": {
                str(client): value for client, value in sorted(by_client.items())
            },
        }

    def _by_client(self, predictors: Predictors) -> dict[int, float]:
        if self.stages and self._personal:
            return dict(self._personal)
        single = {f"client {c}": c for c in self.sites.own_tests if f"client {c}" in predictors}
        if single:
            tests = {c: self.sites.own_tests[c] for c in single.values()}
            return {c: self._shares(predictors[name], tests[c]) for name, c in single.items()}
        if not predictors:
            return {}
        examples, owners = self.everyone
        right = right_by_example(
            next(iter(predictors.values())), examples, self.sites.inputs, workers()
        ).double()
        most = int(owners.max()) + 1
        hits, counts = torch.bincount(owners, right, most), torch.bincount(owners, minlength=most)
        return {c: float(hits[c] / counts[c]) for c in self.sites.own_tests}

    def _shares(self, predict: Callable[[Tensor], Tensor], examples: Examples) -> float:
        return float(right_by_example(predict, examples, self.sites.inputs).double().mean())
