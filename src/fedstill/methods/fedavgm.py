"""FedAvgM: momentum on the server, over the rounds' mean changes.

Source: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification".
Symbols: beta = ``momentum``; eta = ``server_lr``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from fedstill.fields import Positive
from fedstill.methods.fedavg import FedAvg
from fedstill.records import Reply, Stage, State, World
from fedstill.registry import method
from fedstill.trees import add, floats, scale, sub, zeros_like


@method("fedavgm")
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg whose server moves by a running sum of changes: v = beta v + (w - mean), w = w - eta v."""

    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    server_lr: Positive = 1.0

    def setup(self, world: World) -> State:
        start = super().setup(world)
        return start.next(velocity=zeros_like(floats(start.params)))

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        mean = super().fold(state, replies, stage, world).params
        change = sub(floats(state.params), mean)
        velocity = add(scale(state.extra.tensors("velocity"), self.momentum), change)
        moved = sub(floats(state.params), scale(velocity, self.server_lr))
        return state.next(params={**mean, **moved}, velocity=velocity)
