"""The common part of methods whose clients send logits on public images instead of weights, so that
their networks may differ.

In a round, every client trains its own model on its own data and sends the model's logits on the
public images. The server averages these logits; then the server, and after it every client, learns
from the mean on the public images. The server distils by the same work as a client: it is the
client whose data are the public set. A client never sends its model.

A client that fails in a stage is left out of the mean; in the next stage, it learns from the mean
of the others like all clients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need, Permit
from fedstill.core.errors import BadPayload
from fedstill.core.fields import CountOrZero
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.trees import dtype_of
from fedstill.losses import cross_entropy

LOCAL = "local"
"""The stage in which clients train on their own data, and send logits on the public images."""

TEACH = "teach_server"
"""The stage in which the server learns from the consensus."""

DISTIL = "distil"
"""The stage in which clients learn from the consensus."""


@dataclass(frozen=True)
class LogitExchange(Method):
    """The server's part. A method defines the logits that are sent, the consensus and the loss."""

    topology: ClassVar[str] = "public_logits"
    stages: ClassVar[frozenset[str]] = frozenset({LOCAL, TEACH, DISTIL})
    needs: ClassVar[Need] = Need.PUBLIC_DATA
    permits: ClassVar[Permit] = Permit.NOISY_LOGITS
    personal: ClassVar[frozenset[str]] = frozenset({DISTIL})

    subset: CountOrZero = 0
    """Number of public images in a round, drawn anew in each round; 0, or more than there are: all.
    """

    @abstractmethod
    def sent_logits(self, logits: Tensor) -> Tensor:
        """The logits (P, C) to send, given the client's logits (P, C) on the public images."""

    def consensus(self, mean: Tensor) -> Tensor:
        """The consensus (P, C), given the mean of the clients' logits."""
        return mean

    @abstractmethod
    def distance(self, logits: Tensor, target: Tensor) -> Tensor:
        """The distance (B,) of a learner's logits (B, C) from the consensus on these images."""

    def temperature_of(self, state: State, client: int) -> float:
        """The temperature of a client's cross-entropy."""
        return 1.0

    def from_labels(self, logits: Tensor, labels: Tensor, temperature: float | Tensor) -> Tensor:
        """The loss of local training, one value per example."""
        return cross_entropy(logits, labels, temperature)

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        if not 0 < self.subset < world.public:
            return state
        draw = generator(seed_for(world.seed, state.round, 0, SERVER, "public subset"))
        order = torch.randperm(world.public, generator=draw)
        return state.next(subset=order[: self.subset].sort().values)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        payload = Payload()
        if "subset" in state.extra:
            payload = Payload(subset=state.extra["subset"])
        if stage.name not in (TEACH, DISTIL):
            return Payload(payload, temperature=self.temperature_of(state, client))
        if client == SERVER:
            payload = Payload(payload, params=state.params)
        return Payload(payload, target=state.extra.get("target", self._blank(world)))

    def work(self, stage: Stage) -> ClientWork:
        if stage.name in (TEACH, DISTIL):
            return Distil(self)
        return TrainThenPredict(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name not in (TEACH, DISTIL):
            return Payload(logits=self._blank(world))
        if client == SERVER:
            return Payload(params=world.initial(SERVER))
        return NOTHING

    def _blank(self, world: World) -> Tensor:
        """Zeros with the shape of a client's logits, for ``explain``, before the round runs."""
        rows = min(self.subset or world.public, world.public)
        return torch.zeros(rows, world.classes, dtype=dtype_of(world.initial(SERVER)))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == TEACH:
            return state.next(params=replies[0].content.params)
        if stage.name == DISTIL:
            return state.without("target", "subset")
        mean = torch.stack([reply.content.tensor("logits") for reply in replies]).mean(0)
        return state.next(target=self.consensus(mean))


def own_model(client_state: Payload, view: View, world: World) -> Tensors:
    """The model in a client's state; initially, the initial model of its architecture."""
    if "params" in client_state:
        return client_state.params
    return world.initial(view.client)


@dataclass(frozen=True)
class TrainThenPredict(ClientWork):
    """A client trains its own model on its own data, and sends its logits on the public images."""

    method: LogitExchange

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if len(view.data) == 0:
            raise BadPayload(f"client {view.client} has no examples: its logits would mean nothing")
        constants = {"temperature": payload.number("temperature"), "subset": payload.get("subset")}
        return TrainingStart(own_model(client_state, view, world), constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        losses = self.method.from_labels(step.logits(), step.y, start["temperature"])  # (B,)
        return {"ce": step.weighted(losses)}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        logits = view.logits(params, "public", start["subset"])
        return Payload(logits=self.method.sent_logits(logits)), Payload(params=params)


@dataclass(frozen=True)
class Distil(ClientWork):
    """The server or a client learns from the consensus; no label is read."""

    method: LogitExchange

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = own_model(client_state, view, world)
        if view.client == SERVER:
            params = payload.params
        return TrainingStart(
            params, constants={"target": payload.tensor("target")}, only=payload.get("subset")
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        return {"distil": self.method.distance(step.logits(), start["target"][step.index])}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        if view.client == SERVER:
            return Payload(params=params), NOTHING
        return NOTHING, Payload(params=params)
