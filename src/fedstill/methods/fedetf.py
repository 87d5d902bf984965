"""FedETF: all clients learn features for a fixed simplex of class vectors, with a loss that
accounts for their label counts.

Source: Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier" (2023), and its code.
Symbols: V = the simplex, the head of model ``etf``; n_c = the client's examples of class c.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the code counts a class without examples as one with a single example.
Reading: the paper's scale of the cosines starts at 10 for a small network and at 1 for ResNets:
``model.scale``.
Reading: this is the first of the paper's two parts, the global model. The second part, which
fine-tunes projection and simplex in turn at each client, is not included.
Reading: the code trains for 3 epochs at 0.04 in batches of 128. Here clients train as in the other
methods' tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstill.core.capabilities import Need, Permit
from fedstill.core.label_counts import trained_counts
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import adjusted_cross_entropy
from fedstill.methods.fedavg import FedAvg


@method("fedetf")
@dataclass(frozen=True)
class FedETF(FedAvg):
    """FedAvg with a fixed simplex as the last layer, and balanced softmax."""

    # its objective has label counts
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.ETF

    def work(self, stage: Stage) -> ClientWork:
        return BalancedSoftmax()


class BalancedSoftmax(ClientWork):
    """Cross-entropy of logits shifted by the log of the client's label counts."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        logs = trained_counts(view).clamp(min=1).double().log()  # (C,)
        shift = logs.to(dtype_of(payload.params))
        return TrainingStart(payload.params, constants={"shift": shift})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        losses = adjusted_cross_entropy(step.logits(), step.y, shift=start["shift"])  # (B,)
        return {"balanced": step.weighted(losses)}
