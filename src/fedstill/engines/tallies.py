"""What training keeps account of: the best epoch so far, and the sums of an objective's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedstill import trees
from fedstill.engines.how import scores_count
from fedstill.engines.step import Batch
from fedstill.records import Plan, Tensors


@dataclass
class BestEpoch:
    """The best epoch so far, and how long ago it was."""

    plan: Plan
    score: float = float("-inf")
    params: dict[str, Tensor] = field(default_factory=dict)
    stale: int = 0
    scores: list[float] = field(default_factory=list)

    @property
    def asked(self) -> bool:
        """Whether the plan does anything with a score: it is not computed for nothing."""
        return scores_count(self.plan)

    def seen(self, score: float | None, params: Tensors) -> bool:
        """Take an epoch's score, None where there is nothing to score by; True if training should
        stop.
        """
        if score is None:
            return False
        self.scores.append(score)
        if score > self.score:
            self.score, self.params, self.stale = score, trees.clone(params), 0
        else:
            self.stale += 1
        return 0 < self.plan.patience <= self.stale


class RunningSums:
    """Running sums of the objective's terms in an epoch, kept as tensors so that no step waits for
    a number.
    """

    def __init__(self) -> None:
        self.terms: dict[str, Tensor] = {}
        self.counts: int | Tensor = 0

    def add(self, terms: Mapping[str, Tensor], batch: Batch) -> None:
        """Add a step's terms; those of an epoch before are dropped."""
        more = {k: v.detach() * batch.sizes for k, v in terms.items()}
        if isinstance(batch.first, Tensor):
            zero = torch.zeros((), device=batch.first.device)
            old = {k: torch.where(batch.first, zero.to(v.dtype), v) for k, v in self.terms.items()}
            self.counts = torch.where(batch.first, 0, self.counts) + batch.sizes
        else:
            old = {} if batch.first else self.terms
            self.counts = batch.sizes if batch.first else self.counts + batch.sizes
        self.terms = {k: old[k] + v if k in old else v for k, v in more.items()}

    def means(self, clients: int) -> list[dict[str, float]]:
        """The mean of each term over the examples of the last epoch, for each client."""
        by_term = {k: (v / self.counts).reshape(-1).tolist() for k, v in self.terms.items()}
        return [{k: v[i] for k, v in by_term.items()} for i in range(clients)]
