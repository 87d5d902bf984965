"""FedNTD: distil only the not-true classes from the global model, so that local training forgets
less of them.

Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning" (2022), eq. 10.
Symbols: beta = weight of not-true distillation; tau = ``temperature``.
State: the global parameters, nothing more.
Memory: nothing.
Reading: eq. 10 has no tau^2, but the authors' code has. We keep it; it matters only if tau is not
1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import nckd
from fedstill.methods.fedavg import FedAvg


@method("fedntd")
@dataclass(frozen=True)
class FedNTD(FedAvg):
    """FedAvg with not-true distillation from the global model."""

    beta: NonNegative = 1.0
    """Weight of the not-true distillation."""
    temperature: Positive = 1.0
    """Temperature of the distillation (tau)."""

    def setting_warnings(self, world: World) -> str:
        return no_other_classes(world)

    def work(self, stage: Stage) -> ClientWork:
        return NotTrue(self)


def no_other_classes(world: World) -> str:
    """Returns a warning if the divergence over the not-true classes is always 0 because there is
    only one such class. Empty for more than two classes.
    """
    stream = world.stream
    if max(len(stream.outputs(task, world.classes)) for task in range(stream.tasks)) > 2:
        return ""
    classes = "two classes"
    if world.classes > 2:
        classes = f"two classes in each task (stream.head = {stream.head!r})"
    return (
        f"with {classes}, only one class is not the true one, so nothing is distilled and the "
        "method trains as fedavg; choose kd"
    )


class FromGlobal(ClientWork):
    """Local training with the received parameters as frozen teacher ``global``."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params=payload.params, teachers={"global": payload.params})


@dataclass(frozen=True)
class NotTrue(FromGlobal):
    """Cross-entropy and beta times the divergence over the not-true classes."""

    method: FedNTD

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        divergence = nckd(step.logits(), step.teacher("global"), step.y, m.temperature)  # (B,)
        return {**super().terms(step, start), "not_true": m.beta * divergence}
