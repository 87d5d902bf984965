"""FedAvg(1): the mean of the models that clients trained alone; one exchange, no more.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), Table 2.
State: the global parameters, nothing more: the initial ones, then the mean.
Memory: params = the client's own model, where rounds follow, from which it goes on.
Reading: the paper says one round of FedAvg; we average the models trained to their end, for those
are what one exchange between peers can give. Models that started equal and trained apart average to
about chance, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fedstill.core.aggregation import Aggregation, weighted_mean
from fedstill.core.capabilities import Need, Permit
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, World
from fedstill.core.registry import method
from fedstill.methods.fedavg import Suspected
from fedstill.methods.fit import GOES_ON
from fedstill.methods.local_only import LocalOnly


@method("fedavg_once")
@dataclass(frozen=True)
class FedAvgOnce(LocalOnly):
    """The mean, once, of models that clients trained alone."""

    needs: ClassVar[Need] = Need.SAME_SHAPES
    permits: ClassVar[Permit] = (
        Permit.LINEAR_AGGREGATE | Permit.CENTRAL_NOISE | Permit.ROBUST_AGGREGATE
    )
    personal: ClassVar[frozenset[str]] = frozenset()

    aggregation: Aggregation = "examples"
    """How models are averaged: by numbers of examples, all alike, or so that hostile clients cannot
    move it far.
    """
    suspected: Suspected | None = field(default=None, kw_only=True)
    """The share of clients that may be hostile, for trimmed_mean and krum; unset: 0.3."""

    def initial_state(self, world: World) -> State:
        return State(params=world.initial(SERVER))

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """In a later round a client goes on from its own model, which it keeps: the server may see
        the mean alone.
        """
        return Payload(params=world.initial(client), **({GOES_ON: 1} if world.rounds > 1 else {}))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state.next(
            params=weighted_mean(replies, "params", self.aggregation, state.params, self.suspected)
        )
