"""FedNova: each client's change is normalised by its number of effective steps, so that clients
with more steps have no larger weight.

Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (2020).
Symbols: tau_i = local steps; rho = momentum; a_i = effective steps; p_i = share of examples; d_i =
mean direction.
State: the global parameters; direction = the control variate's global term, for each trained
parameter, unless ``ccvr`` is "off"; labels = the census's label counts (clients, C), where ``ccvr``
is "full".
Memory: direction = d_i of the client's last visit, for each trained parameter, unless ``ccvr`` is
"off".
Reading: ``ccvr`` is the control variate that FedNTD's repository adds. "repo" is the actual
behaviour of the code: its global term is always 0, so a client is pushed away from its own last
direction. "full" includes the update of the global term, which the repository defines but never
calls. FedNTD's published sharding rows cannot come from plain FedNova, which equals FedAvg if sizes
and steps are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedstill.core import trees
from fedstill.core.aggregation import Aggregation
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
from fedstill.core.topology import has_chain
from fedstill.core.trees import add, only, scale, sub, zeros_like
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_entries


@method("fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg that divides each client's change by its effective number of steps."""

    # each client's change is divided by its own steps
    permits: ClassVar[Permit] = Permit.NOTHING

    ccvr: Literal["off", "repo", "full"] = "off"
    """Control variate of the FedNTD repository: none, as it runs there, or with its global term
    updated as well.
    """

    def requires(self) -> Need:
        if self.ccvr == "full":
            return self.needs | Need.LABEL_COUNTS
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return ""
        return (
            "it normalises the changes that the server averages, and a chain averages nothing; "
            "choose method fedseq, or scaffold for control variates, or topology.kind = 'parallel'"
        )

    def initial_state(self, world: World) -> State:
        start = super().initial_state(world)
        if self.ccvr == "off":
            return start
        trained = trainable_entries(world.model(SERVER), start.params)
        return start.next(direction=zeros_like(trained))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if self.ccvr == "off":
            return Payload(params=state.params)
        return Payload(params=state.params, direction=state.extra.tensors("direction"))

    def work(self, stage: Stage) -> ClientWork:
        if self.ccvr == "off":
            return Counted(stage.name)
        return Corrected(stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(super().expected_reply(client, stage, world), steps=0.0)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        sent = trainable_entries(world.model(SERVER), state.params)
        steps = [max(reply.content.number("steps"), 0.0) for reply in replies]
        mean = super().aggregate(state, replies, stage, world).params  # for buffers
        normalised = normalised_mean(sent, replies, steps, self.aggregation)
        moved = state.next(params={**mean, **normalised})
        if self.ccvr != "full":
            return moved

        # The global direction: each client's last one, weighted by its share of all examples. The
        # census gives the shares; the numbers in replies leave out held-out examples.
        counts = state.extra.tensor("labels").sum(1).tolist()
        total = sum(counts)
        if total == 0:  # no client answered the census
            return moved
        lr = world.plans[stage.name].lr_at(world.stream.within(stage.round))
        absent_share = 1 - sum(counts[reply.client] for reply in replies) / total
        direction = scale(state.extra.tensors("direction"), absent_share)
        for reply, client_steps in zip(replies, steps, strict=True):
            client_direction = direction_of(sent, reply.content.params, lr, client_steps)
            direction = add(direction, scale(client_direction, counts[reply.client] / total))
        return moved.next(direction=direction)


def reach(result: TrainingResult, plan: Plan) -> float:
    """a_i: the effective steps of local training under its plan; for Adam, the number of steps."""
    momentum = 0.0
    if plan.optimiser == "sgd":
        momentum = plan.momentum
    return effective_steps(result.steps, momentum)


def direction_of(sent: Tensors, trained: Tensors, lr: float, steps: float) -> dict[str, Tensor]:
    """d_i: the mean gradient that leads from ``sent`` to ``trained`` in the given number of
    effective steps; zeros without steps.
    """
    change = sub(sent, only(trained, sent))
    if steps > 0:
        return scale(change, 1 / (lr * steps))
    return zeros_like(change)


@dataclass(frozen=True)
class Counted(ClientWork):
    """Plain local training; the reply also contains the effective steps."""

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
    """The same with the control variate: the global direction minus the client's own last
    direction.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        correction: Tensors = payload.tensors("direction")
        if client_state:
            correction = sub(correction, client_state.tensors("direction"))
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
        content, _ = super().end(params, start, result, view, world)
        sent = only(start["sent"], start["correction"])
        direction = direction_of(sent, params, result.lr, content.number("steps"))
        return content, Payload(direction=direction)


def effective_steps(steps: int, momentum: float) -> float:
    """FedNova's a_i, the effective number of a client's steps with momentum; without momentum, the
    number of steps.

    steps: tau >= 0; momentum: rho in [0, 1). Source: Wang et al. (2020), FedNova, section 4.

    >>> effective_steps(10, 0.0), round(effective_steps(2, 0.5), 3)
    (10.0, 2.5)
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def normalised_mean(
    start: Tensors,
    replies: Sequence[Reply],
    steps: Sequence[float],
    weighting: Aggregation = "examples",
) -> dict[str, Tensor]:
    """``start`` plus the mean of the clients' changes, each divided by its effective steps, times
    the mean of the effective steps.

    start: the trained entries that were sent; steps: a_i >= 0 of each reply, in order; clients
    without steps do not contribute. With p_i the share of a client's examples: ``w - (sum_j p_j
    a_j) sum_i p_i (w - w_i) / a_i``.

    Source: Wang et al. (2020), FedNova, eq. 6.
    """
    total = sum(r.examples for r in replies)
    shares = [1 / len(replies)] * len(replies)
    if weighting == "examples" and total > 0:
        shares = [r.examples / total for r in replies]
    mean_steps = sum(p * a for p, a in zip(shares, steps, strict=True))
    out = dict(start)
    for reply, p, a in zip(replies, shares, steps, strict=True):
        if a > 0:
            change = trees.sub(start, trees.only(reply.content.params, start))
            out = trees.sub(out, trees.scale(change, mean_steps * p / a))
    return out
