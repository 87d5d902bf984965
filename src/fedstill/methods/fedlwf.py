"""FedLwF, learning without forgetting over tasks: earlier classes are distilled from the model at
the end of the last task.

Source: Li & Hoiem, "Learning without Forgetting" (2016), as TARGET's and LANDER's codes run it in a
federation.
Symbols: lambda = ``weight``; tau = ``temperature``; O = the classes of the tasks before the
client's current task.
State: the global parameters; old = the global model at the end of the previous task, from the
second task on.
Memory: nothing.
Reading: the codes use 3 times the cross-entropy of the old columns, softened with tau 2 and without
tau^2. With tau^2, a weight of 0.75 has the same gradient.
Reading: old and new outputs are only compared over O, regardless of the outputs that
``stream.head`` trains. The codes train only the outputs of the task: set ``stream.head`` to "task".
Reading: Fed-Mammoth's LwF distils the columns of the new classes, which the old model never
trained. We do not follow this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, State, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import kd
from fedstill.methods.fedavg import FedAvg


@method("fedlwf")
@dataclass(frozen=True)
class FedLwF(FedAvg):
    """FedAvg with distillation of earlier tasks' classes from the model at the end of the last
    task; needs [stream].
    """

    weight: NonNegative = 0.75
    """Weight of the distillation (lambda)."""
    temperature: Positive = 2.0
    """Temperature of the distillation (tau)."""

    def setting_warnings(self, world: World) -> str:
        return world.stream.nothing_before

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        """The model at the end of a task is the teacher during the whole next task."""
        if world.stream.task(state.round) > 0 and world.stream.begins(state.round):
            return state.next(old=state.params)
        return state

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        in_first_task = world.stream.task(stage.round, client) == 0
        if in_first_task or "old" not in state.extra:
            return Payload(params=state.params)
        return Payload(params=state.params, old=state.extra.tensors("old"))

    def work(self, stage: Stage) -> ClientWork:
        return Remembered(self, stage.round)


@dataclass(frozen=True)
class Remembered(ClientWork):
    """Cross-entropy, and lambda times the divergence over the classes of earlier tasks."""

    method: FedLwF
    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if "old" not in payload or not self.method.weight:
            return TrainingStart(params=payload.params)
        task = world.stream.task(self.round, view.client)
        old_classes = torch.tensor(world.stream.seen(task - 1))
        return TrainingStart(
            params=payload.params,
            teachers={"old": payload.tensors("old")},
            constants={"old_classes": old_classes},
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if not start.teachers:
            return super().terms(step, start)
        old_classes = start["old_classes"]
        student = step.logits(raw=True).index_select(1, old_classes)  # (B, |O|)
        teacher = step.teacher("old", raw=True).index_select(1, old_classes)  # (B, |O|)
        divergence = kd(student, teacher, self.method.temperature)  # (B,)
        return {**super().terms(step, start), "old": self.method.weight * divergence}
