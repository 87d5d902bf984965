"""FedNova: normalise each client's change by its number of effective steps, so that long runners do
not pull harder.

Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (2020).
Symbols: tau_i = local steps; rho = momentum; a_i = effective steps; p_i = share of examples; d_i =
mean direction.
State: the global parameters; direction = the control variate's global term, for each trained
parameter, unless ``ccvr`` is "off"; labels = the census's label counts (clients, C), where ``ccvr``
is "full".
Memory: direction = d_i of the client's last run, for each trained parameter, unless ``ccvr`` is
"off".
Reading: ``ccvr`` is what the FedNTD repository adds to it, a control variate: "repo" as it runs
there, with a global term that stays 0, so that a client is pushed away from its own last direction;
"full" with the update of the global term that the repository defines and never calls. The published
sharding rows of FedNTD cannot come from plain FedNova, which is FedAvg where sizes and steps are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedstill.core.aggregation import effective_steps, normalised_mean
from fedstill.core.capabilities import Need, Permit
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Payload,
    Plan,
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
from fedstill.core.topology import has_links
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_names


@method("fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg with changes normalised by effective steps."""

    # each client's change is divided by its own steps
    permits: ClassVar[Permit] = Permit.NOTHING

    ccvr: Literal["off", "repo", "full"] = "off"
    """The FedNTD repository's control variate: none, as it runs there, or with its global term
    updated as well.
    """

    def requires(self) -> Need:
        if self.ccvr == "full":
            return self.needs | Need.LABEL_COUNTS
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        return (
            "it evens out steps between clients whose changes are averaged, and in a chain none "
            "are; "
            "choose method fedseq, or scaffold for control variates, or topology.kind = 'parallel'"
            if has_links(stages)
            else ""
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        if self.ccvr == "off":
            return start
        return start.next(
            direction=zeros_like(only(start.params, sorted(trainable_names(world.model(SERVER)))))
        )

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if self.ccvr == "off":
            return Payload(params=state.params)
        return Payload(params=state.params, direction=state.extra.tensors("direction"))

    def work(self, stage: Stage) -> ClientWork:
        return Counted(stage.name) if self.ccvr == "off" else Corrected(stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(super().expected_reply(client, stage, world), steps=0.0)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        sent = only(state.params, sorted(trainable_names(world.model(SERVER))))
        steps = [max(r.content.number("steps"), 0.0) for r in replies]
        mean = super().aggregate(state, replies, stage, world).params  # for buffers
        moved = state.next(
            params={**mean, **normalised_mean(sent, replies, steps, self.aggregation)}
        )
        if self.ccvr != "full":
            return moved
        lr = world.plans[stage.name].lr_at(world.stream.within(stage.round))
        everyone = float(state.extra.tensor("labels").sum())
        direction = scale(
            state.extra.tensors("direction"), 1 - sum(r.examples for r in replies) / everyone
        )
        for reply, a in zip(replies, steps, strict=True):
            own = direction_of(sent, reply.content.params, lr, a)
            direction = add(direction, scale(own, reply.examples / everyone))
        return moved.next(direction=direction)


def reach(result: TrainingResult, plan: Plan) -> float:
    """a_i: the effective steps of a run under its plan; steps of Adam are counted plainly."""
    return effective_steps(result.steps, plan.momentum if plan.optimiser == "sgd" else 0.0)


def direction_of(sent: Tensors, got: Tensors, lr: float, steps: float) -> dict[str, Tensor]:
    """d_i: the mean gradient that leads from ``sent`` to ``got`` in so many effective steps; zeros
    for none.
    """
    change = sub(sent, only(got, sent))
    return scale(change, 1 / (lr * steps)) if steps > 0 else zeros_like(change)


@dataclass(frozen=True)
class Counted(ClientWork):
    """Plain local training that sends its effective steps along."""

    stage: str

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(params=params, steps=reach(result, world.plans[self.stage])), NOTHING


@dataclass(frozen=True)
class Corrected(Counted):
    """The same with the control variate: the global direction minus the client's own last one."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        everyone = payload.tensors("direction")
        correction = sub(everyone, client_state.tensors("direction")) if client_state else everyone
        return TrainingStart(
            payload.params, constants={"sent": payload.params, "correction": correction}
        )

    def adjust_gradients(self, grads: Tensors, start: TrainingStart) -> Tensors:
        return add(grads, start["correction"])

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        up, _ = super().end(params, start, result, view, world)
        sent = only(start["sent"], start["correction"])
        return up, Payload(direction=direction_of(sent, params, result.lr, up.number("steps")))
