"""FedROD: a generic head is trained as if classes were balanced, and averaged; each client adds a
personal head.

Source: Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image
Classification" (2022).
Symbols: gamma = ``gamma``, the power of label counts in the balanced softmax; the personal head =
``own.*``.
State: the global parameters, in which the personal head is zero; nothing more.
Memory: params = the client's complete model, including its personal head.
Reading: there is no official code. The personal head is initially zero, so that a client's first
prediction is the generic one. In one implementation, it is a copy of the generic head.
Reading: a class without examples counts as one with a single example; log 0 would leave it without
a gradient.
Reading: the prediction is the sum of both heads' logits, as in the paper. One implementation only
uses the personal head.
Reading: one optimiser trains both heads. The gradients are independent, except that ``clip_norm``
bounds their joint norm.
Reading: the variant in which a network computes the personal head from label counts is not
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedstill.core.aggregation import Aggregation
from fedstill.core.capabilities import Addition, Need
from fedstill.core.fields import NonNegative
from fedstill.core.label_counts import trained_counts
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    SERVER,
    ModelSpec,
    Payload,
    Stage,
    Step,
    Teacher,
    Tensors,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import adjusted_cross_entropy, cross_entropy
from fedstill.methods.partly_shared import KeepsItsOwn, PartlyShared
from fedstill.models.building import ADDED, personal_logits, with_both_heads


@method("fedrod")
@dataclass(frozen=True)
class FedROD(PartlyShared):
    """FedAvg with balanced softmax; each client also trains a second head for its own class
    proportions.
    """

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    adds: ClassVar[Addition] = Addition.OWN_HEAD
    has_global_model: ClassVar[bool] = True
    """The model with the generic head."""

    aggregation: Aggregation = "examples"
    gamma: NonNegative = 1.0
    """Exponent of the label counts in the balanced softmax; 0: plain cross-entropy."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        entries = world.initial(SERVER)
        prefix = ADDED["own_head"]
        for name in entries:
            first_head = f"head.{name.removeprefix(prefix)}"
            if name.startswith(prefix) and first_head not in entries:
                return (
                    f"train_only keeps {first_head} as it is, and the second head adds to the "
                    "first as it is trained; add 'head.' to train_only"
                )
        return ""

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        return [name for name in entries if not name.startswith(ADDED["own_head"])]

    def work(self, stage: Stage) -> ClientWork:
        return BothHeads(self, stage.name, self.gamma)


@dataclass(frozen=True)
class BothHeads(KeepsItsOwn):
    """Balanced softmax for the body and the generic head; cross-entropy of the sum of both heads
    for the personal head.
    """

    gamma: float

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        logs = self.gamma * trained_counts(view).clamp(min=1).double().log()  # (C,)
        return replace(start, constants={"shift": logs.to(dtype_of(start.params))})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        h = step.features()  # (B, D)
        z = step.logits()  # (B, C)
        personal = z.detach() + personal_logits(step.params, h.detach())  # (B, C)
        balanced = adjusted_cross_entropy(z, step.y, shift=start["shift"])
        return {
            "balanced": step.weighted(balanced),
            "own": step.weighted(cross_entropy(personal, step.y)),
        }

    def answer(self, params: Tensors, model: ModelSpec) -> Teacher:
        return with_both_heads(params)
