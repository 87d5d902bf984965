"""FedAvgM: momentum on the server, over the rounds' mean changes.

Source: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification".
Symbols: beta = ``momentum``; eta = ``server_lr``; v = the running sum.
State: the global parameters; velocity = v, for each trained parameter, 0 at first.
Memory: nothing.
Reading: the paper has eta = 1 throughout. Only trained entries have momentum. Buffers are averaged,
because momentum could make running variances negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from fedstill.core.fields import Positive
from fedstill.core.records import SERVER, Reply, Stage, State, World
from fedstill.core.registry import method
from fedstill.core.topology import has_chain
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_entries


@method("fedavgm")
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server: v = beta v + (w - mean), w = w - eta v."""

    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Factor by which the running sum of changes is multiplied in every round (beta)."""
    server_lr: Positive = 1.0
    """Learning rate of the server (eta)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return ""
        return (
            "in a chain, the server's momentum would change the model between two clients; set "
            "plan.momentum for momentum at the clients, or topology.kind = 'parallel'"
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        trained = trainable_entries(world.model(SERVER), start.params)
        return start.next(velocity=zeros_like(trained))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        mean = super().aggregate(state, replies, stage, world).params
        previous = state.extra.tensors("velocity")
        sent = only(state.params, previous)
        velocity = add(scale(previous, self.momentum), sub(sent, mean))
        moved = sub(sent, scale(velocity, self.server_lr))
        return state.next(params={**mean, **moved}, velocity=velocity)
