"""SCAFFOLD: every local gradient is corrected by the difference between the client's direction and
the mean direction.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning"
(2020), option II, in the form of the FedNTD repository: the correction enters before momentum and
weight decay.
Symbols: c, c_i = control variates of the server and of a client; K = local steps.
State: the global parameters; control = c, for each trained parameter, 0 at first.
Memory: control = c_i, for each trained parameter.
Reading: the repository divides by effective steps (which count momentum, like FedNova's a_i),
others by K. ``divide_by`` decides.
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
from fedstill.models.contract import trainable_entries


@method("scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates on the server and on every client."""

    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE  # two sums, weighted differently

    divide_by: Literal["effective_steps", "steps"] = "effective_steps"
    """Divisor of a client's change: effective steps, which include momentum, or steps."""

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        trained = trainable_entries(world.model(SERVER), start.params)
        return start.next(control=zeros_like(trained))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=state.params, control=state.extra.tensors("control"))

    def work(self, stage: Stage) -> ClientWork:
        return Controlled(stage.name, self.divide_by)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        trained = trainable_entries(world.model(client), world.initial(client))
        return Payload(super().expected_reply(client, stage, world), change=trained)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        mean = self.averaged(replies, None, "change", uniform_unless_robust(self.aggregation))
        control = add(state.extra.tensors("control"), scale(mean, len(replies) / world.clients))
        return super().aggregate(state, replies, stage, world).next(control=control)


@dataclass(frozen=True)
class Controlled(ClientWork):
    """Local training with the gradient g - c_i + c; the client stores its c_i and sends the change
    of it.
    """

    stage: str
    divide_by: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        server_control = payload.tensors("control")
        client_control: Tensors = zeros_like(server_control)
        if client_state:
            client_control = client_state.tensors("control")
        constants = {
            "sent": payload.params,
            "client_control": client_control,
            "server_control": server_control,
        }
        return TrainingStart(payload.params, constants=constants)

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        return add(sub(grads, start["client_control"]), start["server_control"])

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
        previous = start["client_control"]
        control = previous
        if steps > 0:
            sent = only(start["sent"], previous)
            direction = direction_of(sent, params, result.lr, steps)
            control = add(sub(previous, start["server_control"]), direction)
        return Payload(params=params, change=sub(control, previous)), Payload(control=control)
