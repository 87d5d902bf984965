"""New data: of its examples a client has some in round 1, and the rest comes with the rounds, by a
stated rule.

Source: QKT, section 5, leaves "real-time and highly dynamic scenarios" to future work, without a
rule.
Reading: what arrives is the client's own part of the split, in equal parts; what has arrived stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.keys import generator, seed_for

Order = Literal["mixed", "by_class"]
"""In which order a client's examples arrive: drawn evenly, or one class after another."""


@dataclass(frozen=True)
class Arrival:
    """In which order a client's examples arrive, the share ``at_first`` in (0, 1] of round 1, in
    how many rounds.
    """

    order: Order
    at_first: float
    rounds: int
    seed: int

    def share(self, round: int) -> float:
        """The share of its examples that a client has in a round; the census, round 0, is before
        round 1.

        >>> [Arrival("mixed", 0.5, rounds=3, seed=0).share(r) for r in (0, 1, 2, 3)]
        [0.5, 0.5, 0.75, 1.0]
        """
        if round >= self.rounds:
            return 1.0
        return self.at_first + (1 - self.at_first) * (max(round, 1) - 1) / (self.rounds - 1)

    def turns(self, client: int, labels: Tensor) -> Tensor:
        """When each of a client's examples arrives, given its labels (n,): (n,) int64, 0 for the
        first.
        """
        draw = generator(seed_for(self.seed, 0, 0, client, "arrival"))
        order = torch.randperm(len(labels), generator=draw)
        if self.order == "by_class":
            ids = labels.cpu()[order]
            classes = torch.randperm(int(ids.max()) + 1 if len(ids) else 0, generator=draw)
            order = order[classes[ids].argsort(stable=True)]
        return order.argsort()

    def there(self, turns: Tensor, some: Tensor, round: int) -> Tensor:
        """Those of some of a client's examples (k,), given by number, that have arrived by a round,
        in their order.

        turns: (n,) of all its examples. At least one of them: the first to arrive, if the round has
        none of them yet.
        """
        count = max(1, int(self.share(round) * len(turns) + 0.5))
        arrived = some[turns[some] < count]
        return arrived if len(arrived) else some[turns[some].argsort()[:1]]
