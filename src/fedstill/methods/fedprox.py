"""FedProx: a quadratic penalty keeps local models near the global model.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (2020), eq. 2.
Symbols: mu = weight of the penalty.
State: the global parameters, nothing more.
Memory: nothing.
Reading: FedNTD's table 5 has mu = 0.1, its configuration 1.0. We use the value of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.core.trees import only
from fedstill.losses import proximal
from fedstill.methods.fedavg import FedAvg
from fedstill.models.contract import trainable_entries


@method("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with (mu/2) ||w - w_global||^2 added to each client's loss."""

    mu: NonNegative = 0.1
    """Weight of the proximal penalty."""

    def work(self, stage: Stage) -> ClientWork:
        return LocalTraining(self.mu)


@dataclass(frozen=True)
class LocalTraining(ClientWork):
    """Cross-entropy and the distance to the received parameters, over the trained entries."""

    mu: float

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        anchor = trainable_entries(view.model, payload.params)
        return TrainingStart(params=payload.params, constants={"anchor": anchor})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        params = only(step.params, start["anchor"])
        penalty = proximal(params, start["anchor"], self.mu)
        return {**super().terms(step, start), "proximal": penalty}
