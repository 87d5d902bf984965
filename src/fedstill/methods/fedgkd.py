"""FedGKD: distillation from the global models of the last rounds reduces forgetting in local
training.

Source: Yao et al., "FedGKD: Towards Heterogeneous Federated Learning via Global Knowledge
Distillation" (2021), and its code.
Symbols: c = ``weight``; M = ``models``; tau = ``temperature``; omega = votes, T_v =
``vote_temperature``.
State: the global parameters; past.N = the model at the start of round N, for the last M - 1 rounds
except round 1; teacher = the mean of these models and of this round's model, if there are at least
two; votes = with votes, omega of each teacher; loss.N = with votes, the loss on public data of the
model at the start of round N.
Memory: nothing.
Reading: the paper's weight is gamma / 2 with gamma = 0.2. ``weight`` is the complete factor.
Reading: only averaged models are teachers, as in the code, but not the initial model. The first
round has no teacher.
Reading: with M = 1, the code's teacher stays that of the first round. Here it is the current global
model.
Reading: the code's vote cannot run, and its divergences would have no gradient. Here they have one.
The weights of the teachers follow from the server's losses on labelled public data by the paper's
formula, with a temperature of 1.
Reading: the code weighs clients equally. ``aggregation`` decides; the default is by size. The code
trains for 20 epochs at 0.05 with momentum 0.9. Here clients train as in the other methods' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.capabilities import Need
from fedstill.core.errors import BadPayload
from fedstill.core.fields import Count, NonNegative, Positive
from fedstill.core.label_counts import Received, StatisticsWork
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NO_TRAINING,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import cross_entropy, kd
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg

WEIGH = "weigh"
"""The stage in which the server measures its model on labelled public data."""


@method("fedgkd")
@dataclass(frozen=True)
class FedGKD(FedAvg):
    """FedAvg with distillation from the mean of the last global models."""

    weight: NonNegative = 0.1
    """Weight of the distillation (c)."""
    models: Count = 5
    """Number of the last global models that are teachers, including this round's (M)."""
    temperature: Positive = 1.0
    """Temperature of the distillation (tau)."""
    from_round: Count = 2
    """The first round in which clients distil; in round 1 the teacher is the initial model."""

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        """The teacher of a round, which is fixed at its start and equal for all clients."""
        teachers = list(self.teachers(state).values())
        if len(teachers) > 1 and state.round >= self.from_round:
            state = state.next(teacher=trees.mean(teachers, [1.0] * len(teachers)))
        return self.remember(state)

    def teachers(self, state: State) -> dict[int, Tensors]:
        """The teachers of a round, by the round that started with them."""
        return {**state.extra.many("past"), state.round: state.params}

    def remember(self, state: State) -> State:
        """The state in which the initial model of the round has been added to the past models, and
        the oldest one removed.
        """
        oldest = max(1, state.round + 1 - self.models)
        past = {round: params for round, params in self.teachers(state).items() if round > oldest}
        return state.without("past.").next(groups=many("past", past))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if "teacher" not in state.extra:
            return Payload(params=state.params)
        return Payload(params=state.params, teacher=state.extra.tensors("teacher"))

    def work(self, stage: Stage) -> ClientWork:
        if stage.round < self.from_round:
            return ClientWork()
        return FromPast(self)


@method("fedgkd_vote")
@dataclass(frozen=True)
class FedGKDVote(FedGKD):
    """FedGKD with one distillation term for each of the last models, weighted by the server's
    losses on labelled public data.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"server": WEIGH}
    stages: ClassVar[frozenset[str]] = frozenset({"train", WEIGH})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.PUBLIC_DATA
    labelled: ClassVar[frozenset[str]] = frozenset({WEIGH})
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, WEIGH: NO_TRAINING}

    vote_temperature: Positive = 1.0
    """Temperature of the votes (T_v); a larger value makes them more equal."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if any(stage.name == WEIGH for stage in stages):
            return ""
        return (
            "it needs a server stage; set topology.kind = 'parallel' and topology.server = "
            f"{WEIGH!r}"
        )

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        if state.round < self.from_round:
            return state
        rounds = sorted(self.teachers(state))
        losses = torch.tensor(
            [float(state.extra.get(f"loss.{round}", 0.0)) for round in rounds], dtype=torch.float64
        )
        votes = torch.softmax(-losses / self.vote_temperature, 0)
        return state.next(votes=votes.to(dtype_of(state.params)))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == WEIGH or "votes" not in state.extra:
            return Payload(params=state.params)  # in the first round nobody votes
        past = many("past", state.extra.many("past"))
        return Payload({"params": state.params, "votes": state.extra["votes"], **past})

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == WEIGH:
            return PublicLoss()
        if stage.round < self.from_round:
            return ClientWork()
        return FromVoters(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == WEIGH:
            return Payload(loss=0.0)
        return super().expected_reply(client, stage, world)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name != WEIGH:
            return super().aggregate(self.remember(state), replies, stage, world)
        losses = {
            f"loss.{round}": state.extra[f"loss.{round}"] for round in state.extra.many("past")
        }
        losses[f"loss.{state.round + 1}"] = replies[0].content["loss"]
        return state.without("loss.").next(groups=losses)


@dataclass(frozen=True)
class FromPast(ClientWork):
    """Cross-entropy and the divergence from the mean of the last global models, the frozen teacher
    ``global``.
    """

    method: FedGKD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(
            payload.params, teachers={"global": payload.get("teacher", payload.params)}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        divergence = kd(step.logits(), step.teacher("global"), self.method.temperature)  # (B,)
        return {**super().terms(step, start), "past": self.method.weight * divergence}


@dataclass(frozen=True)
class FromVoters(ClientWork):
    """Cross-entropy and the divergences from each of the last global models, weighted by their
    votes.
    """

    method: FedGKDVote

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        teachers = {f"past.{r}": p for r, p in payload.many("past").items()}
        return TrainingStart(
            payload.params,
            teachers={**teachers, "global": payload.params},
            constants={"votes": payload.tensor("votes")},
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        student = step.logits()  # (B, C)
        divergences = torch.stack(
            [kd(student, step.teacher(name), m.temperature) for name in start.teachers]
        )  # (M, B)
        weighted = (start["votes"].unsqueeze(1) * divergences).sum(0)  # (B,)
        return {**super().terms(step, start), "past": m.weight * weighted}


class PublicLoss(StatisticsWork):
    """The server computes the loss of its new model on labelled public data."""

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        if view.public is None:
            raise BadPayload("the server has no public data; set [data] public")
        loss = cross_entropy(view.logits(received["params"], "public"), view.public.labels.cpu())
        return Payload(loss=float(loss.double().mean()))
