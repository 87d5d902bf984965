"""FedEWC, elastic weight consolidation over tasks: a penalty keeps important parameters of earlier
tasks near the last task's model.

Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (2017), with the
running sum of Schwarz et al., "Progress & Compress" (2018), as Fed-Mammoth's code has it in a
federation.
Symbols: lambda = ``weight``; gamma = ``gamma``; w* = anchor; F = fisher, its diagonal.
Stages: ``train``; after each task except the last one ``importance``, of all available clients,
without training.
State: the global parameters; anchor = the trained parameters at the end of the previous task, from
the second task on; fisher = F, for each trained parameter, from the second task on.
Memory: nothing.
Reading: a client's share of F is the mean over its examples of p(y|x) times the squared gradient of
log p(y|x) for the true label, in evaluation mode. The server weighs clients by their examples. The
code does the same.
Reading: p is the softmax over the outputs that ``stream.head`` trains. The code uses the outputs of
the task: set ``stream.head`` to "task".
Reading: lambda multiplies the sum of weighted squares, as in Fed-Mammoth's code; in the paper,
lambda / 2 does.
Reading: in Fed-Mammoth's code, the last round of a task trains nothing, because the penalty is
returned in place of the loss. We do not follow this.
Reading: in the codes of TARGET, LANDER and STSA, the penalty is computed at the received model,
while a copy of it is trained. So the penalty has no gradient, and the rows called EWC in their
tables are finetuning, to the bit. We do not follow this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.aggregation import weighted_mean
from fedstill.core.capabilities import Permit
from fedstill.core.fields import Count, NonNegative, Share
from fedstill.core.label_counts import Received, StatisticsWork
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NO_TRAINING,
    OFF,
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
)
from fedstill.core.registry import method
from fedstill.core.trees import add, only, scale, zeros_like
from fedstill.losses import quadratic
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.models.contract import trainable_entries

IMPORTANCE = "importance"


@method("fedewc")
@dataclass(frozen=True)
class FedEWC(FedAvg):
    """FedAvg with a penalty on changes since the last task, weighted by each parameter's importance
    for earlier tasks; needs [stream].
    """

    schedule: ClassVar[Mapping[str, Any]] = {"task_end": IMPORTANCE}
    stages: ClassVar[frozenset[str]] = frozenset({"train", IMPORTANCE})
    # Fisher information would need a noise of its own
    permits: ClassVar[Permit] = Permit.NOTHING
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, IMPORTANCE: NO_TRAINING}

    weight: NonNegative = 1.0
    """Weight of the penalty on the distance to the last task's model (lambda)."""
    gamma: Share = 0.9
    """Share of earlier tasks' Fisher information that remains at the end of each task (gamma)."""
    samples: Count = 500
    """Largest number of examples from which a client computes its Fisher information."""

    def setting_warnings(self, world: World) -> str:
        return world.stream.nothing_before

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name != IMPORTANCE:
            past = {g: state.extra.tensors(g) for g in ("anchor", "fisher") if g in state.extra}
            return Payload({"params": state.params, **past})
        last_task = world.stream.task(stage.round) == world.stream.tasks - 1
        if last_task or not self.weight:
            return None  # nothing will use the importance
        return Payload(params=state.params)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == IMPORTANCE:
            return Importance(self, stage)
        return Anchored(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != IMPORTANCE:
            return super().expected_reply(client, stage, world)
        return Payload(fisher=trainable_entries(world.model(client), world.initial(client)))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name != IMPORTANCE:
            return super().aggregate(state, replies, stage, world)
        fisher: Tensors = weighted_mean(replies, "fisher")
        if "fisher" in state.extra:
            fisher = add(scale(state.extra.tensors("fisher"), self.gamma), fisher)
        return state.next(fisher=fisher, anchor=only(state.params, fisher))


@dataclass(frozen=True)
class Anchored(ClientWork):
    """Cross-entropy, and lambda times the sum of F (w - w*)²."""

    method: FedEWC

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if "anchor" not in payload or not self.method.weight:
            return TrainingStart(params=payload.params)
        constants = {"anchor": payload.tensors("anchor"), "fisher": payload.tensors("fisher")}
        return TrainingStart(params=payload.params, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if not start.constants:
            return super().terms(step, start)
        pull = quadratic(step.params, start["anchor"], start["fisher"], self.method.weight)
        return {**super().terms(step, start), "pull": pull}


@dataclass(frozen=True)
class Importance(StatisticsWork):
    """The client sends the diagonal of its Fisher information at the received model."""

    method: FedEWC
    stage: Stage

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        mask = world.stream.mask(self.stage.round, view.client, world.classes)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return surprise(logits, labels, mask)

        gradients = view.gradients(received["params"], loss, batch=1)
        total = zeros_like(trainable_entries(view.model, received["params"]))
        count = 0
        for grads in islice(gradients, min(self.method.samples, len(view.data))):
            total = {k: total[k] + grads[k] ** 2 for k in total}
            count += 1
        return Payload(fisher=scale(total, 1 / max(count, 1)))


def surprise(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """A loss (B,) whose gradient is -sqrt(p) times the gradient of log p, where p is the
    probability of the true class. The squared gradient is a term of F.

    logits: (B, C); labels: (B,); mask: (C,) bool, the outputs of the softmax p; None: all outputs.
    """
    if mask is not None:
        logits = torch.where(mask.to(logits.device), logits, OFF)
    log_p = torch.log_softmax(logits, dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
    return -(log_p.detach() / 2).exp() * log_p
