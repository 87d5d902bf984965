"""MOON: a contrastive loss keeps a client's features near the global model's features and away from
those of its own previous model.

Source: Li et al., "Model-Contrastive Federated Learning" (2021), eq. 3 and 4.
Symbols: mu = ``mu``; T = ``temperature``.
State: the global parameters, nothing more.
Memory: params = the client's model after its last visit.
Reading: the original network has a projection head below its classifier: give the model one
(``[model] projection``). FedNTD uses MOON without it, on the features before the last layer, with
mu = 1 in its table and 0.1 in its configuration. At mu = 5, a pooled network without it hardly
learned (docs/results/qkt.md). The recipes of QKT's tables have it.
Reading: until a client has trained, its previous model is the initial global one. Frozen models are
in evaluation mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    Payload,
    Stage,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.losses import model_contrast
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.public_logits import own_model


@method("moon")
@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a contrastive loss on features: towards the global model, away from the client's
    previous model.
    """

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES

    mu: NonNegative = 1.0
    """Weight of the contrastive loss."""
    temperature: Positive = 0.5
    """Temperature of the contrastive loss (T)."""

    def work(self, stage: Stage) -> ClientWork:
        return Contrasted(self)


@dataclass(frozen=True)
class Contrasted(ClientWork):
    """Cross-entropy and mu times the contrastive loss; the client stores its final model."""

    method: Moon

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        previous = own_model(client_state, view, world)
        return TrainingStart(
            payload.params, teachers={"global": payload.params, "previous": previous}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        global_features = step.teacher_features("global")  # (B, D)
        previous_features = step.teacher_features("previous")  # (B, D)
        contrast = model_contrast(
            step.features(), global_features, previous_features, self.method.temperature
        )
        return {**super().terms(step, start), "contrast": self.method.mu * contrast}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(params=params), Payload(params=params)
