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

from fedstill.core.aggregation import alike
from fedstill.core.records import (
    SERVER,
    Carry,
    Payload,
    Ran,
    Reply,
    Stage,
    State,
    Tensors,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.core.work import ClientWork
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fednova import direction_of, reach
from fedstill.models.contract import trainable_names


@method("scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates on the server and on every client."""

    permits: ClassVar[frozenset[str]] = frozenset({"robust_fold"})  # two sums, weighted differently

    divide_by: Literal["effective_steps", "steps"] = "effective_steps"
    """What a client's change is divided by: effective steps, in which momentum counts, or steps."""

    def setup(self, world: World) -> State:
        start = super().setup(world)
        return start.next(
            control=zeros_like(only(start.params, sorted(trainable_names(world.model(SERVER)))))
        )

    def down(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=state.params, control=state.extra.tensors("control"))

    def work(self, stage: Stage) -> ClientWork:
        return Controlled(stage.name, self.divide_by)

    def expects(self, client: int, stage: Stage, world: World) -> Payload:
        trained = only(world.initial(client), sorted(trainable_names(world.model(client))))
        return Payload(super().expects(client, stage, world), change=trained)

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        mean = self.averaged(replies, None, "change", alike(self.aggregation))
        control = add(state.extra.tensors("control"), scale(mean, len(replies) / world.clients))
        return super().fold(state, replies, stage, world).next(control=control)


@dataclass(frozen=True)
class Controlled(ClientWork):
    """Local training on g - c_i + c; the client remembers its c_i and sends how it changed."""

    stage: str
    divide_by: str

    def begin(self, down: Payload, memory: Payload, view: View, world: World) -> Carry:
        everyone = down.tensors("control")
        own = memory.tensors("control") if memory else zeros_like(everyone)
        return Carry(down.params, constants={"sent": down.params, "own": own, "everyone": everyone})

    def adjust(self, grads: Tensors, carry: Carry) -> Tensors:
        return add(sub(grads, carry["own"]), carry["everyone"])

    def end(
        self, params: Tensors, carry: Carry, ran: Ran, view: View, world: World
    ) -> tuple[Payload, Payload]:
        steps = float(ran.steps)
        if self.divide_by == "effective_steps":
            steps = reach(ran, world.plans[self.stage])
        own, everyone = carry["own"], carry["everyone"]
        control = own
        if steps > 0:
            control = add(
                sub(own, everyone), direction_of(only(carry["sent"], own), params, ran.lr, steps)
            )
        return Payload(params=params, change=sub(control, own)), Payload(control=control)
