"""AVER, EBKD and CA-MKD: the divergences from several teachers are averaged, or weighted for each
example.

Source: Zhang et al., "Confidence-Aware Multi-Teacher Knowledge Distillation" (2022) and its code,
which also contains the plain average and Kwon et al., "Adaptive Knowledge Distillation Based on
Entropy" (2020); on FedSeq as in Xu et al., "SFedKD". Teachers are chosen as in SFedKD.
Symbols: K = ``k``; a = ``weight``; tau = ``temperature``; b = ``feature_weight``.
State: the global parameters; trained = ids (n,) of the clients that trained in this round, in
order; snapshot.N = the model of client N after its training; teacher.N = the model of client N, if
it is a teacher in this round; labels = the census's label counts (clients, C), if teachers are
chosen by them; fewer = true once there were fewer than K teachers.
Memory: nothing.
Reading: EBKD and CA-MKD divide by K again, although their weights sum to K - 1 and to 1. So CA-MKD
is K times weaker than AVER at the same a. We keep this, as in the code.
Reading: with one teacher, the code's weights are 0 (EBKD) or 0/0 (CA-MKD). Here it is plain
distillation.
Reading: SFedKD states neither the choice of teachers nor the feature term of CA-MKD. Here teachers
are chosen as in SFedKD, and the term is off (the code's b is 50). Equal architectures need no
adapter: their features are compared directly. As in the code, the term starts with a client's
second epoch, and its weights have gradients.
Reading: the code leaves out an incomplete last batch. Here it is kept, because a small client may
have no other.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import confidence_weights, entropy_weights, multi_kd
from fedstill.methods.sfedkd import TaughtByLastRound, start_with_teachers, teacher_logits
from fedstill.models import contract


@dataclass(frozen=True)
class Averaged(TaughtByLastRound):
    """The server's part of the three methods, which differ in the weight of a teacher for an
    example.
    """

    weight: NonNegative = 1.0
    """Weight of the distillation from the teachers (a)."""
    temperature: Positive = 4.0
    """Temperature of the distillation (tau)."""

    def work(self, stage: Stage) -> ClientWork:
        return Distilled(self)

    @abstractmethod
    def weights(self, teachers: Tensor, labels: Tensor) -> Tensor:
        """The weights (K, B) of teachers with logits (K, B, C), on examples with labels (B,)."""


@method("aver")
@dataclass(frozen=True)
class AVER(Averaged):
    """Sequential training that distils several models of the last round, with equal weights."""

    def weights(self, teachers: Tensor, labels: Tensor) -> Tensor:
        return torch.full_like(teachers[..., 0], 1 / len(teachers))


@method("ebkd")
@dataclass(frozen=True)
class EBKD(Averaged):
    """Sequential training that distils several models; for each example, more certain models have
    larger weights.
    """

    def weights(self, teachers: Tensor, labels: Tensor) -> Tensor:
        return entropy_weights(teachers) / len(teachers)


@method("camkd")
@dataclass(frozen=True)
class CAMKD(Averaged):
    """Sequential training that distils several models; for each example, models that predict its
    label well have larger weights.
    """

    feature_weight: NonNegative = 0.0
    """Weight of the squared error of features (b); 0 leaves it out."""

    def requires(self) -> Need:
        if self.feature_weight > 0:
            return super().requires() | Need.FEATURES
        return super().requires()

    def work(self, stage: Stage) -> ClientWork:
        if self.feature_weight > 0:
            return DistilledWithFeatures(self)
        return Distilled(self)

    def weights(self, teachers: Tensor, labels: Tensor) -> Tensor:
        return confidence_weights(teachers, labels) / len(teachers)


@dataclass(frozen=True)
class Distilled(ClientWork):
    """Cross-entropy and the weighted sum of the divergences from each teacher."""

    method: Averaged

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return start_with_teachers(payload)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        if not start.teachers:
            return terms
        m = self.method
        teachers = teacher_logits(step, start)  # (K, B, C)
        divergences = multi_kd(step.logits(), teachers, m.temperature)  # (K, B)
        weighted = (m.weights(teachers, step.y) * divergences).sum(0)  # (B,)
        return {**terms, "teachers": m.weight * weighted}


@dataclass(frozen=True)
class DistilledWithFeatures(Distilled):
    """The same, and the squared error of features, weighted by how well a teacher's head classifies
    the student's features.
    """

    method: CAMKD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return replace(
            super().begin(payload, client_state, view, world), constants={"model": view.model}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        z = step.features()  # (B, D)
        # Features first: the same pass of a teacher then gives its logits, too.
        teacher_features = [step.teacher_features(name) for name in start.teachers]
        terms = super().terms(step, start)
        if not start.teachers:
            return terms

        module = contract.module(start["model"], "frozen")
        teachers = [t for t in start.teachers.values() if not isinstance(t, tuple)]
        logits = torch.stack([contract.head(module, params, z) for params in teachers])  # (K, B, C)
        errors = (z - torch.stack(teacher_features)).square().mean(-1)  # (K, B)
        weighted = (self.method.weights(logits, step.y) * errors).sum(0)  # (B,)
        # A product, not a condition: the clients of a stack differ in epoch.
        weight = (step.epoch > 0) * self.method.feature_weight
        return {**terms, "features": weight * weighted}
