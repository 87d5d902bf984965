"""The common part of methods whose clients send a part of their model and keep the rest, and the
simplest of these methods, LG-FedAvg, with personal lower layers and averaged top layers.

A client's model consists of its own entries and of the shared entries from the server. The client
stores its complete model after training, and the server averages the shared entries. If all entries
are shared, this is bit-identical to federated averaging; if none are shared, clients train alone.

Source: of LG-FedAvg, Liang et al., "Think Locally, Act Globally: Federated Learning with Local and
Global Representations" (2020), and its code.
Symbols: ``layers`` = the number of global layers, from the top.
State: the global parameters, of which only the top layers are trained; nothing more.
Memory: params = the client's complete model.
Reading: the code starts from a model after 1,200 rounds of federated averaging, and then averages
the last two layers of one convolutional network, or three of the other, for 200 rounds: set
``start_from`` and ``layers``.
Reading: a layer is a part of the network that has its own entries; normalisation layers count.
Reading: for each client, the code keeps the model with the best test accuracy. Here it is the last
model.
Reading: the paper's clients train for one epoch at 0.1 with momentum 0.5. Here they train as in the
other methods' tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstill.core.aggregation import Aggregation
from fedstill.core.capabilities import Permit
from fedstill.core.fields import CountOrZero
from fedstill.core.method import ClientWork
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
from fedstill.core.registry import method
from fedstill.core.trees import only
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_names


@dataclass(frozen=True)
class PartlyShared(FedAvg):
    """The server's part. A method defines the shared entries."""

    # Private training and secure sums are for whole models.
    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE
    personal: ClassVar[frozenset[str]] = frozenset({"train"})
    silent: ClassVar[frozenset[str]] = frozenset()
    """The stages in which a client trains its own entries, and sends nothing."""
    has_global_model: ClassVar[bool] = False
    """Whether the server's entries are a model that predicts, though some are not shared."""

    aggregation: Aggregation = "uniform"

    @abstractmethod
    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        """The names of the shared entries, given all entries of a model in order."""

    def shared(self, params: Tensors) -> dict[str, Tensor]:
        """The shared entries of a model."""
        return only(params, self.shares(list(params)))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(shared=self.shared(state.params))

    def work(self, stage: Stage) -> ClientWork:
        return KeepsItsOwn(self, stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name in self.silent:
            return NOTHING
        return Payload(shared=self.shared(world.initial(client)))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """Average the shared entries; other entries keep their bits."""
        if stage.name in self.silent:
            return state
        averaged = self.averaged(replies, self.shared(state.params), "shared")
        return state.next(params={**state.params, **averaged})

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        """The global model, if there is one, or if all trained entries are shared."""
        shared = set(self.shared(state.params))
        if self.has_global_model or trainable_names(world.model(SERVER)) <= shared:
            return super().predictors(state, world)
        return {}


@dataclass(frozen=True)
class KeepsItsOwn(ClientWork):
    """Local training of the client's own model with the received shared entries. The client stores
    its model.
    """

    method: PartlyShared
    stage: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = dict(world.initial(view.client))
        if client_state:
            params |= client_state.params
        return TrainingStart({**params, **payload.tensors("shared")})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        client_state = Payload(params=params)
        if self.stage in self.method.silent:
            return NOTHING, client_state
        return Payload(shared=self.method.shared(params)), client_state


def in_head(name: str) -> bool:
    """Whether an entry belongs to the last layer of a model with body and head."""
    return name.startswith("head.")


@method("lg_fedavg")
@dataclass(frozen=True)
class LGFedAvg(PartlyShared):
    """Clients keep their lower layers; the server averages the upper layers."""

    layers: CountOrZero = 1
    """Number of layers that are averaged, from the top; 0: none, clients train alone."""

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        layer_of = {name: name.rpartition(".")[0] for name in entries}
        layers = list(dict.fromkeys(layer_of.values()))
        top = layers[max(0, len(layers) - self.layers) :]
        return [name for name in entries if layer_of[name] in top]
