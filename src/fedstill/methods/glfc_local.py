"""GLFC's client part: stored examples, class weights by prediction error, and the last task's model
as a teacher.

Source: Dong et al., "Federated Class-Incremental Learning" (GLFC, 2022), and its code.
Symbols: m = ``size``; sigma = sigmoid; g = |sigma(z_y) - 1| of an example of class y.
Stages: ``train``; after each task ``remember``, of all available clients, without training.
State: the global parameters; old = the global model at the end of the previous task, from the
second task on; means = with ``nearest_mean``, the mean of each class's normalised features, (C, D);
known = with ``nearest_mean``, whether a class has a mean, (C,).
Memory: values, labels, tasks, places, keys = of each stored example, its values, its label, its
task, its position among the client's examples of the task, and its key.
Reading: the client's current task decides which classes are old and which task is the first.
Reading: the loss is half of the binary cross-entropy of all outputs in training, with weights g
over the batch's mean of g, separately for old and new classes, plus half of the binary
cross-entropy to targets in which the old classes have the old model's sigmoids. In the first task,
it is only the first term, with a factor of 1. The weights have no gradient.
Reading: the paper's clients detect a new task when the model's mean entropy rises above 1.2; here
it is known from the stream. They choose the old model with a proxy server, which reconstructs
images of clients from gradients. Here the old model is the last task's model, and nothing is
reconstructed.
Reading: clients train as in FedAvg. The code's learning rate is 2.0, decreased in steps, with ten
rounds per task.
Reading: kept examples are chosen by herding with the model at the end of their task, equally many
of each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedstill.core.fields import CountOrZero
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, State, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.methods.replay import REMEMBER, Rehearse, Replay


@method("glfc_local")
@dataclass(frozen=True)
class GLFCLocal(Replay):
    """The client part of GLFC: stored examples, class-balanced losses, and the last task's model as
    a teacher; needs [stream].
    """

    size: CountOrZero = 2000
    """Largest number of examples that a client stores (m)."""
    choose: Literal["reservoir", "herding"] = "herding"
    """Which are kept: drawn evenly, or as many of each class, those whose features come nearest to
    its mean (iCaRL).
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if self.beta is not None or self.alpha:
            return "its losses have weights of their own; leave method.alpha and method.beta out"
        return super().incompatibility(stages, world)

    def setting_warnings(self, world: World) -> str:
        if world.stream.tasks > 1:
            return ""
        return (
            "without [stream] there is no earlier task, and only its first task's loss acts; add "
            "[stream]"
        )

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        """The model at the end of a task is the teacher during the whole next task."""
        if world.stream.task(state.round) > 0 and world.stream.begins(state.round):
            return state.next(old=state.params)
        return state

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        payload = super().payload_for_client(state, client, stage, world)
        if payload is None or stage.name == REMEMBER or "old" not in state.extra:
            return payload
        if world.stream.task(stage.round, client) == 0:
            return payload
        return Payload(payload, old=state.extra.tensors("old"))

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == REMEMBER:
            return super().work(stage)
        return LocalGLFC(self, stage.round)


@dataclass(frozen=True)
class LocalGLFC(Rehearse):
    """Half the sum of a loss weighted by class, and of a loss whose targets for old classes are the
    old model's outputs.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        task = world.stream.task(self.round, view.client)
        old = torch.zeros(world.classes, dtype=torch.bool)
        if task > 0:
            old[list(world.stream.seen(task - 1))] = True

        active = torch.ones(world.classes, dtype=torch.bool)
        mask = world.stream.mask(self.round, view.client, world.classes)
        if mask is not None:
            active = mask | old

        constants = {**start.constants, "old": old, "active": active}
        if "old" not in payload:
            return replace(start, constants=constants)
        return replace(start, teachers={"old": payload.tensors("old")}, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        z = step.logits(raw=True)  # (B, C)
        old = start["old"]  # (C,)
        active = start["active"].to(step.mask.dtype)  # (C,)

        # Cross-entropy of the labels, weighted by how badly the classes are known.
        label = step.y.unsqueeze(1)
        one_hot = torch.zeros_like(z).scatter(1, label, 1.0)  # (B, C)
        error = (1 - z.gather(1, label).squeeze(1).sigmoid()).detach()  # (B,)
        weight = relative_to_group(error, old[step.y], step)
        losses = binary_cross_entropy_with_logits(z, one_hot, reduction="none") * active
        label_loss = step.weighted(weight * losses.sum(1) / active.sum())
        if not start.teachers:
            return {"bce": label_loss}

        # The targets of new classes are labels, and have class weights. Targets of old classes are
        # the old model's outputs.
        old_outputs = step.teacher("old", raw=True).sigmoid().to(z.dtype)
        target = torch.where(old, old_outputs, one_hot)
        class_weight = step.weighted(torch.ones_like(error)).unsqueeze(1)  # (B, 1)
        weights = torch.where(old, 1.0, class_weight)  # (B, C)
        losses = binary_cross_entropy_with_logits(z, target, reduction="none") * weights * active
        old_loss = losses.sum(1) / active.sum()
        return {"bce": 0.5 * label_loss, "old": 0.5 * old_loss}


def relative_to_group(values: Tensor, is_old: Tensor, step: Step) -> Tensor:
    """Values (B,) divided by the mean over the batch's real examples of the same group, old or new:
    (B,).
    """
    mean = torch.where(is_old, group_mean(values, is_old, step), group_mean(values, ~is_old, step))
    return values / mean.clamp(min=1e-12)


def group_mean(values: Tensor, group: Tensor, step: Step) -> Tensor:
    """The mean () of values (B,) over the real examples in a group (B,)."""
    in_group = group.to(values.dtype)
    return step.mean(values * in_group) / step.mean(in_group).clamp(min=1e-12)
