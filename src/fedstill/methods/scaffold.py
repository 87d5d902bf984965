"""SCAFFOLD: correct every local gradient by the difference between the client's direction and the
mean direction.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning"
(2020), option II, in the form of the FedNTD repository: the correction enters before momentum and
weight decay.
Symbols: c, c_i = control variates of the server and of a client; K = local steps.
State: the global parameters; control = c, for each trained parameter, 0 at first.
Memory: control = c_i, for each trained parameter.
Reading: the repository divides by effective steps (momentum counted, as FedNova's a_i), others by
K; ``divide_by``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedstill.core.aggregation import uniform_unless_robust
from fedstill.core.capabilities import Permit
from fedstill.core.method import ClientWork
from fedstill.core.records import (
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
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fednova import direction_of, reach
from fedstill.models.contract import trainable_names


@method("scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates on the server and on every client."""

    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE  # two sums, weighted differently

    divide_by: Literal["effective_steps", "steps"] = "effective_steps"
    """What a client's change is divided by: effective steps, in which momentum counts, or steps."""

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        return start.next(
            control=zeros_like(only(start.params, sorted(trainable_names(world.model(SERVER)))))
        )

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=state.params, control=state.extra.tensors("control"))

    def work(self, stage: Stage) -> ClientWork:
        return Controlled(stage.name, self.divide_by)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        trained = only(world.initial(client), sorted(trainable_names(world.model(client))))
        return Payload(super().expected_reply(client, stage, world), change=trained)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        mean = self.averaged(replies, None, "change", uniform_unless_robust(self.aggregation))
        control = add(state.extra.tensors("control"), scale(mean, len(replies) / world.clients))
        return super().aggregate(state, replies, stage, world).next(control=control)


@dataclass(frozen=True)
class Controlled(ClientWork):
    """Local training on g - c_i + c; the client remembers its c_i and sends how it changed."""

    stage: str
    divide_by: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        everyone = payload.tensors("control")
        own = client_state.tensors("control") if client_state else zeros_like(everyone)
        return TrainingStart(
            payload.params, constants={"sent": payload.params, "own": own, "everyone": everyone}
        )

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        return add(sub(grads, start["own"]), start["everyone"])

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        steps = float(result.steps)
        if self.divide_by == "effective_steps":
            steps = reach(result, world.plans[self.stage])
        own, everyone = start["own"], start["everyone"]
        control = own
        if steps > 0:
            control = add(
                sub(own, everyone), direction_of(only(start["sent"], own), params, result.lr, steps)
            )
        return Payload(params=params, change=sub(control, own)), Payload(control=control)
