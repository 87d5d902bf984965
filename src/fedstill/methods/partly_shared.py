"""What methods share whose clients send a part of their model and keep the rest.

A client goes on with its own entries and the server's in place of those that travel, and remembers
the whole of what it ends with: that is its model. The server averages what travels. If all entries
do, it is federated averaging to the bit; if none do, clients train alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstill.core.aggregation import Aggregation
from fedstill.core.capabilities import Permit
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.trees import only
from fedstill.core.work import ClientWork
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_names


@dataclass(frozen=True)
class PartlyShared(FedAvg):
    """The server's half that all share; each method says which entries travel."""

    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE  # what is sent is no whole model
    personal: ClassVar[frozenset[str]] = frozenset({"train"})
    silent: ClassVar[frozenset[str]] = frozenset()
    """The stages in which a client trains what is its own, and sends nothing."""

    aggregation: Aggregation = "uniform"

    @abstractmethod
    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        """Which of a model's entries, named in its order, travel."""

    def shared(self, params: Tensors) -> dict[str, Tensor]:
        """The entries of a model that travel."""
        return only(params, self.shares(list(params)))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(shared=self.shared(state.params))

    def work(self, stage: Stage) -> ClientWork:
        return KeepsItsOwn(self, stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return (
            NOTHING
            if stage.name in self.silent
            else Payload(shared=self.shared(world.initial(client)))
        )

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """Entries that do not travel keep their bits."""
        if stage.name in self.silent:
            return state
        return state.next(
            params={**state.params, **self.averaged(replies, self.shared(state.params), "shared")}
        )

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        """A global model, only if all that is trained travels."""
        whole = trainable_names(world.model(SERVER)) <= set(self.shared(state.params))
        return super().predictors(state, world) if whole else {}


@dataclass(frozen=True)
class KeepsItsOwn(ClientWork):
    """Local training of the client's own model with the shared entries received; it remembers what
    it ends with.
    """

    method: PartlyShared
    stage: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        own = client_state.params if client_state else {}
        return TrainingStart({**world.initial(view.client), **own, **payload.tensors("shared")})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        up = (
            NOTHING
            if self.stage in self.method.silent
            else Payload(shared=self.method.shared(params))
        )
        return up, Payload(params=params)


def in_head(name: str) -> bool:
    """Whether an entry belongs to the last layer of a model with body and head."""
    return name.startswith("head.")
