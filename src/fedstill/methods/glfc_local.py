"""GLFC's clients: kept examples, classes weighed by how badly they are known, and the last task's
model as a teacher.

Source: Dong et al., "Federated Class-Incremental Learning" (GLFC, 2022), and its code.
Symbols: m = ``size``; sigma = sigmoid; g = |sigma(z_y) - 1| of an example of class y.
Stages: ``train``; after each task ``remember``, of all clients that are there: nothing is trained.
State: the global parameters; old = the global model at the end of the task before, from the second
task on; means = the mean of each class's features at length 1, (C, D), where ``nearest_mean`` is
set; known = which classes have one, (C,), there.
Memory: values, labels, tasks, places, keys = of each kept example what it is, its label, its task,
its place among the client's examples of that, and its key.
Reading: which classes are old, and which task is the first, is by the task that the client itself
is in.
Reading: the loss is half the binary cross-entropy of all outputs in training, weighed by g over the
batch's mean of g, old and new classes apart; and half that to targets in which the old classes' are
the old model's sigmoids. In the first task it is the first half alone, whole. The weights have no
gradient.
Reading: the paper's clients find out that the task has changed by a rise of the model's mean
entropy over 1.2; the stream says so here. They choose the old model with a proxy server, which
rebuilds images of clients from gradients; here it is the last task's, and nothing is rebuilt.
Reading: training is as FedAvg's here; the code's learning rate is 2.0, in steps, in ten rounds a
task.
Reading: kept examples are chosen by herding under the model at their task's end, as many of each
class.
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
    """Kept examples, sigmoid losses weighed by class, and the last task's model as a teacher; needs
    [stream].
    """

    size: CountOrZero = 2000
    """The most examples that a client keeps (m)."""
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
        """The model of a task's end teaches the whole next task."""
        if world.stream.task(state.round) > 0 and world.stream.begins(state.round):
            return state.next(old=state.params)
        return state

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        given = super().payload_for_client(state, client, stage, world)
        first = world.stream.task(stage.round, client) == 0
        if given is None or stage.name == REMEMBER or first or "old" not in state.extra:
            return given
        return Payload(given, old=state.extra.tensors("old"))

    def work(self, stage: Stage) -> ClientWork:
        return super().work(stage) if stage.name == REMEMBER else OfGLFC(self, stage.round)


@dataclass(frozen=True)
class OfGLFC(Rehearse):
    """Half a loss weighed by class, half one to the old model's answers for old classes."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        carry, task = (
            super().begin(payload, client_state, view, world),
            world.stream.task(self.round, view.client),
        )
        old = torch.zeros(world.classes, dtype=torch.bool)
        old[list(world.stream.seen(task - 1) if task > 0 else ())] = True
        teachers = {"old": payload.tensors("old")} if "old" in payload else {}
        mask = world.stream.mask(self.round, view.client, world.classes)
        on = torch.ones(world.classes, dtype=torch.bool) if mask is None else mask | old
        return replace(
            carry, teachers=teachers, constants={**carry.constants, "old": old, "on": on}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        # (B, C), (C,), (C,)
        z, old, on = step.logits(raw=True), start["old"], start["on"].to(step.mask.dtype)
        y = torch.zeros_like(z).scatter(1, step.y.unsqueeze(1), 1.0)
        far = (1 - z.gather(1, step.y.unsqueeze(1)).squeeze(1).sigmoid()).detach()  # (B,)
        weight = by_group(far, old[step.y], step)
        all_outputs = binary_cross_entropy_with_logits(z, y, reduction="none") * on  # (B, C)
        now = step.weighted(weight * all_outputs.sum(1) / on.sum())
        if not start.teachers:
            return {"bce": now}
        target = torch.where(old, step.teacher("old", raw=True).sigmoid().to(z.dtype), y)
        # The targets of new classes are labels, those of old classes are not.
        of_labels = step.weighted(torch.ones_like(far)).unsqueeze(1)  # (B, 1)
        weights = torch.where(old, 1.0, of_labels)  # (B, C)
        losses = binary_cross_entropy_with_logits(z, target, reduction="none") * weights * on
        kept = losses.sum(1) / on.sum()
        return {"bce": 0.5 * now, "old": 0.5 * kept}


def by_group(values: Tensor, group: Tensor, step: Step) -> Tensor:
    """Values (B,) over the mean of those of their own group, of two, among a batch's real examples:
    (B,).
    """
    means = []
    for one in (group, ~group):
        here = one.to(values.dtype)
        means.append(step.mean(values * here) / step.mean(here).clamp(min=1e-12))
    mean = torch.where(group, means[0], means[1])  # (B,)
    return values / mean.clamp(min=1e-12)
