"""FML: each client trains a personal network and a shared network (the "meme"), which learn from
each other.

Source: Shen et al., "Federated Mutual Learning" (2020), and its code.
Symbols: P = ``own``, the client's own network; M = ``shared``; alpha = ``alpha``, beta = ``beta``.
State: the parameters of a pair, of which the shared network is averaged; nothing more.
Memory: params = the client's complete pair.
Reading: the published code never calls the functions that exchange and average models. Here both
are done, as in the paper.
Reading: neither network's gradient flows through the distillation of the other, as in the code.
Reading: the code has an optimiser for each network. Here one optimiser trains both, which is the
same except for ``clip_norm``.
Reading: the code weighs clients equally, which is the default of ``aggregation``. It trains in
batches of 128 with a weight decay of 5e-4. Here clients train as in the other methods' tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import Share
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    ModelSpec,
    Stage,
    Step,
    Teacher,
    Tensors,
    TrainingStart,
    World,
)
from fedstill.core.registry import method
from fedstill.losses import cross_entropy, kd
from fedstill.methods.partly_shared import KeepsItsOwn, PartlyShared
from fedstill.models.adapted import personal_network
from fedstill.models.functional import run_part


@method("fml")
@dataclass(frozen=True)
class FML(PartlyShared):
    """At every client, a personal network of any architecture and the shared network learn from
    each other.
    """

    needs: ClassVar[Need] = Need.PAIR
    has_global_model: ClassVar[bool] = True
    """The shared network."""

    alpha: Share = 0.5
    """Weight of the labels in the loss of the personal network; the remainder is the weight of the
    shared network's predictions.
    """
    beta: Share = 0.5
    """Weight of the labels in the loss of the shared network; the remainder is the weight of the
    personal network's predictions.
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        clients = {client for stage in stages for client in stage.clients}
        models = {world.model(client): world.initial(client) for client in sorted(clients)}
        shapes = {
            tuple((name, value.shape) for name, value in self.shared(params).items())
            for params in models.values()
        }
        if len(shapes) == 1:
            return ""
        return "all share one network; set the same model.shared in clients.models"

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        return [name for name in entries if name.startswith("shared.")]

    def work(self, stage: Stage) -> ClientWork:
        return Mutual(self, stage.name, self.alpha, self.beta)


@dataclass(frozen=True)
class Mutual(KeepsItsOwn):
    """Cross-entropy of both networks, and the divergence of each from the other's predictions."""

    alpha: float
    beta: float

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        private = step.on(step.run(run_part, "own"))  # (B, C)
        shared = step.logits()  # (B, C)
        return {
            "own": self.alpha * step.weighted(cross_entropy(private, step.y)),
            "own_kd": (1 - self.alpha) * kd(private, shared.detach()),
            "shared": self.beta * step.weighted(cross_entropy(shared, step.y)),
            "shared_kd": (1 - self.beta) * kd(shared, private.detach()),
        }

    def answer(self, params: Tensors, model: ModelSpec) -> Teacher:
        return personal_network(model, params)
