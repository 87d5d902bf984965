"""FedLC: logits are calibrated by margins, which are larger for classes with fewer examples at the
client.

Source: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration"
(2022).
Symbols: tau = ``margin``, the scale of margins (not a temperature); n_c = the client's examples of
class c.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the printed loss leaves the label out of its denominator and has no lower bound, and its
training was reported to collapse. By default, the label is included, which gives the calibrated
softmax. ``denominator`` = "others" is the printed loss.
Reading: tau n_c^(-1/4) is infinite for a class without examples. Its margin is 100 tau.
Reading: there is no official code. tau is 1 in two implementations and 0.1 in a third. We use 1.
Reading: n_c are the client's own counts. One implementation uses the counts of all clients, so that
all have the same margins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedstill.core.capabilities import Permit
from fedstill.core.fields import NonNegative
from fedstill.core.label_counts import trained_counts
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import adjusted_cross_entropy
from fedstill.losses.decoupled import label_margin
from fedstill.methods.fedavg import FedAvg

ABSENT = 100.0
"""The margin of a class without examples, in multiples of tau."""


@method("fedlc")
@dataclass(frozen=True)
class FedLC(FedAvg):
    """FedAvg with calibrated logits: the fewer examples of a class, the larger its margin."""

    # its objective has label counts
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    margin: NonNegative = 1.0
    """Scale of the margins (tau): a class of n examples has tau n^(-1/4)."""
    denominator: Literal["all", "others"] = "all"
    """Classes in the denominator of the label's probability: all, or all others as printed in the
    paper.
    """

    def work(self, stage: Stage) -> ClientWork:
        return Calibrated(self)


@dataclass(frozen=True)
class Calibrated(ClientWork):
    """Cross-entropy of the logits minus the margins."""

    method: FedLC

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        scaled_counts = trained_counts(view).double().pow(-0.25).clamp(max=ABSENT)
        margins = self.method.margin * scaled_counts  # (C,)
        return TrainingStart(
            payload.params, constants={"shift": -margins.to(dtype_of(payload.params))}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if self.method.denominator == "others":
            losses = -label_margin(step.logits() + start["shift"], step.y)  # (B,)
        else:
            losses = adjusted_cross_entropy(step.logits(), step.y, shift=start["shift"])
        return {"calibrated": step.weighted(losses)}
