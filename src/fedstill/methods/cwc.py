"""CWC: along a chain, a penalty keeps each parameter near its value after the last client, weighted
by its importance so far.

Source: Song, Wang and Wang, "Cyclical Weight Consolidation: Towards Solving Catastrophic Forgetting
in Serial Federated Learning" (2024), and its code; the importance is that of Zenke et al.,
"Continual Learning Through Synaptic Intelligence" (2017).
Symbols: c = ``weight``; a = ``decay``; eps = ``epsilon``; Omega = importance, which is passed on
with the model; omega = the contribution of one client, W / ((w_end - w_start)^2 + eps) with the
path integral W = -sum over steps of gradient * change.
State: the global parameters; importance = Omega, for each trained parameter; cycle = the number of
clients in the round's chain; omega.N = the Nth omega of the last cycle, if ``memory`` is "sliding".
Memory: nothing.
Reading: the code keeps omegas in a queue. When a cycle of clients is complete, it adds them to the
memory and multiplies the memory by a. This equals one sum that is multiplied by a at the end of
every round. If only some of the clients take part in each round (SFedKD), the round is the cycle,
so that omegas decay "on revisitation". ``memory`` "ema" is this rule, "sliding" the sum of the last
cycle's omegas, "sum" the sum of all.
Reading: the code's g in W is the gradient of the complete loss. With its option ``lseg``, it is the
gradient of the cross-entropy alone.
Reading: the code allows negative omegas. ``clamp`` sets them to 0.
Reading: the code trains with one Adam per client, which keeps its state between rounds. SFedKD's
table uses SGD as for the other rows, and so do we. SFedKD states neither c nor a: the code's
defaults are 0.1 and, by class, 0.5; its script has 10 and 1. With 0.1, a reduced version of
SFedKD's setting diverged on three of three seeds. Therefore, ``weight`` is 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedstill.core.fields import NonNegative, Positive, Share
from fedstill.core.method import ClientWork
from fedstill.core.records import (
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
    many,
)
from fedstill.core.registry import method
from fedstill.core.topology import has_chain
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.losses import quadratic
from fedstill.methods.fedseq import FedSeq
from fedstill.models.contract import trainable_entries


@method("cwc")
@dataclass(frozen=True)
class CWC(FedSeq):
    """Sequential training with a consolidation penalty; the importance of each parameter is passed
    on and decays by round.
    """

    weight: NonNegative = 0.01
    """Weight of the consolidation penalty (c)."""
    decay: Share = 0.5
    """Factor by which the importance is multiplied after every round (a), with memory = "ema"."""
    epsilon: Positive = 1e-3
    """Term that keeps the importance of hardly changed parameters finite (eps)."""
    memory: Literal["ema", "sliding", "sum"] = "ema"
    """Which omegas count: all, decayed by rounds ("ema"), those of the last cycle ("sliding"), or
    all with equal weight ("sum").
    """
    clamp: bool = False
    """Whether negative entries of an omega are set to 0."""
    lseg: bool = False
    """Whether the path integral uses the gradient of the cross-entropy instead of that of the whole
    loss.
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return "in parallel rounds, no client passes on the importance; omit topology.kind"
        if self.lseg and world.plans["train"].clip_norm > 0:
            return (
                "method.lseg takes the penalty's gradient out again, which clipping hides; set "
                "plan.clip_norm = 0"
            )
        return ""

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        trained = trainable_entries(world.model(SERVER), start.params)
        return start.next(importance=zeros_like(trained))

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        importance = state.extra.tensors("importance")
        if self.memory == "ema" and state.round > 1:
            importance = scale(importance, self.decay)
        return state.next(importance=importance, cycle=sum(s.sequential for s in stages))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=state.params, importance=state.extra.tensors("importance"))

    def work(self, stage: Stage) -> ClientWork:
        return Consolidated(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        trained = trainable_entries(world.model(client), world.initial(client))
        return Payload(super().expected_reply(client, stage, world), importance=trained)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        trained = super().aggregate(state, replies, stage, world)
        omega = replies[0].content.tensors("importance")
        if self.memory != "sliding":
            return trained.next(importance=add(state.extra.tensors("importance"), omega))

        omegas = state.extra.many("omega")
        omegas[max(omegas, default=-1) + 1] = omega
        cycle = int(state.extra.number("cycle"))
        window = dict(list(omegas.items())[-cycle:])
        total = zeros_like(omega)
        for summand in window.values():
            total = add(total, summand)
        return trained.without("omega.").next(groups=many("omega", window), importance=total)


@dataclass(frozen=True)
class Consolidated(ClientWork):
    """Cross-entropy and the penalty; the path integral is accumulated step by step, and the client
    sends its omega.
    """

    method: CWC

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        importance = payload.tensors("importance")
        anchor = only(payload.params, importance)
        return TrainingStart(
            payload.params,
            trace=zeros_like(anchor),
            constants={"anchor": anchor, "importance": importance},
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        pull = quadratic(step.params, start["anchor"], start["importance"], self.method.weight)
        return {**super().terms(step, start), "consolidation": pull}

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        if self.method.lseg:
            # The gradient of the penalty is taken out again.
            anchor = start["anchor"]
            importance = start["importance"]
            c = self.method.weight
            grads = {k: grads[k] - 2 * c * importance[k] * (before[k] - anchor[k]) for k in trace}
        return after, {k: trace[k] - grads[k] * (after[k] - before[k]) for k in trace}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        moved = sub(only(params, start["anchor"]), start["anchor"])
        omega = {k: w / (moved[k].square() + self.method.epsilon) for k, w in result.trace.items()}
        if self.method.clamp:
            omega = {k: v.clamp(min=0) for k, v in omega.items()}
        return Payload(params=params, importance=omega), Payload()
