"""FedDKD and FedADKD: separate distillation of the true class and of the other classes from the
global model. FedADKD adapts the weight of the true class to each client's label skew.

Source: Jang & Chou, "Mitigating Global Knowledge Forgetting via Adaptive Decoupled Knowledge
Distillation", after Zhao et al., "Decoupled Knowledge Distillation" (DKD, 2022).
Symbols: alpha, beta = weights of true-class (TCKD) and not-true-class distillation (NCKD, eq. 2);
tau = ``temperature``; delta = spread of the heterogeneity map f(G) = log(1 + delta G) (eq. 6); phi
= per-client weight (eq. 7); G = Gini index of a client's labels (eq. 5).
State: the global parameters; gini = with FedADKD, the last G that each client sent (clients,),
initially 1; phi = with FedADKD on a chain, the weights (clients,) of the round's clients, 0 for the
others; labels = with FedADKD and ``phi_timing`` "exact", the census's label counts (clients, C);
cohort = in this case, on a chain, the ids (n,) of the round's clients, instead of phi.
Memory: nothing.
Reading: the paper's "original" NCKD keeps the dimension of the true class and does worse. But DKD's
published formula equals removing it. ``nckd_mode`` "zero" (the true logit set to 0) stands in for
the original. "mask1000" is DKD's formula, "slice" the not-true part of the divergence over all
classes.
Reading: figure 4 varies alpha either for the IID clients or for the other clients of a hybrid
split, without details. Here one group consists of the first clients, as the partition ``hybrid``
numbers them, and each group has its own alpha (``feddkd_groups``).
Reading: eq. 3 sums over classes a quantity that is defined for the label only. ``tckd`` "target" is
this quantity for the label, "binary" DKD's two-way divergence, "full" the divergence over all
classes, which the sum suggests. "binary" is the default of ``feddkd``, "target" of
``feddkd_groups`` and ``fedadkd``. When we ran both, FedADKD was above FedNTD only with "target"
(docs/results/fedadkd.md).
Reading: no temperature is given. Both terms are multiplied by tau^2, as in DKD's code.
Reading: eq. 7 prints G where Algorithm 1 asks for f(G). ``phi_source`` decides; the default is
f(G).
Reading: Algorithm 1 computes phi before any client has sent its G, which starts at 1.
``phi_timing`` "stale" follows it literally: a client's G is the last one that it sent, or 1.
"exact" collects all label counts before round 1.
Reading: on a chain, the cohort is the round's clients, and phi is computed before the first of them
trains.
Reading: Algorithm 1 prints the uniform mean of models. ``aggregation`` decides, as in FedAvg; the
default is by size.
Reading: the paper gives no alpha, delta and tau for its tables. beta = 1 and tau = 1 follow from
the ablation without TCKD. On five seeds that were not used for this choice, alpha = 3 was always
better than 1; delta from 0.5 to 5 made no difference (docs/results/fedadkd.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.capabilities import Need, Permit
from fedstill.core.errors import ConfigError
from fedstill.core.fields import NonNegative, Positive, Share
from fedstill.core.label_counts import TensorLike, as_floats, gini_index
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Payload,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.losses import kd, nckd, nckd_slice, nckd_zero, target_kl, tckd
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import FromGlobal

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
NCKD: dict[str, Loss] = {"removed": nckd, "mask1000": nckd, "zero": nckd_zero, "slice": nckd_slice}


def all_classes(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Knowledge distillation over all classes, which needs no labels; one value per example."""
    return kd(student, teacher, temperature)


TCKD: dict[str, Loss] = {"target": target_kl, "binary": tckd, "full": all_classes}
TrueClassTerm = Literal["target", "binary", "full"]


@method("feddkd")
@dataclass(frozen=True)
class FedDKD(FedAvg):
    """FedAvg with true-class and not-true-class distillation from the global model, with the same
    weights on all clients.
    """

    alpha: NonNegative = 1.0
    """Weight of the true-class distillation (TCKD)."""
    beta: NonNegative = 1.0
    """Weight of the not-true-class distillation (NCKD)."""
    temperature: Positive = 1.0
    """Temperature of both distillations (tau)."""
    tckd: TrueClassTerm = "binary"
    """The true-class term: the label's part of FedADKD's eq. 3 ("target"), the divergence of true
    class and rest ("binary"), or the divergence over all classes ("full").
    """
    nckd_mode: Literal["removed", "mask1000", "zero", "slice"] = "removed"
    """How NCKD treats the true class: removes it (also "mask1000"), sets its logit to 0, or omits
    its part of the sum.
    """

    def work(self, stage: Stage) -> ClientWork:
        return Decoupled(self)


@method("feddkd_groups")
@dataclass(frozen=True)
class FedDKDOfGroups(FedDKD):
    """FedDKD in which the first clients have a different true-class weight than the others.

    Source: FedADKD's paper, section II.B and figure 4.
    """

    tckd: TrueClassTerm = "target"
    first: Share = 0.1
    """Share of all clients in the first group, rounded to whole clients; for example the IID share
    of the partition hybrid.
    """
    alpha_first: NonNegative = 1.0
    """Weight of the true-class distillation on clients of the first group."""

    def work(self, stage: Stage) -> ClientWork:
        return OfGroups(self)


@dataclass(frozen=True)
class Decoupled(FromGlobal):
    """Cross-entropy, alpha times TCKD (times phi, if it was received), and beta times NCKD."""

    method: FedDKD

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        student = step.logits()  # (B, C)
        teacher = step.teacher("global")  # (B, C)
        # First, since the order of terms decides the last bits of gradients.
        terms = super().terms(step, start)
        m = self.method
        alpha = start.constants.get("phi", 1.0) * start.constants.get("alpha", m.alpha)
        true_class = TCKD[m.tckd](student, teacher, step.y, m.temperature)  # (B,)
        other_classes = NCKD[m.nckd_mode](student, teacher, step.y, m.temperature)  # (B,)
        return {
            **terms,
            "true_class": alpha * true_class,
            "other_classes": m.beta * other_classes,
        }


@dataclass(frozen=True)
class OfGroups(Decoupled):
    """FedDKD's objective with the alpha of the client's group."""

    method: FedDKDOfGroups

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        alpha = self.method.alpha
        if view.client < round(self.method.first * world.clients):
            alpha = self.method.alpha_first
        return replace(start, constants={"alpha": alpha})


@method("fedadkd")
@dataclass(frozen=True)
class FedADKD(FedDKD):
    """FedDKD with a true-class weight that adapts to each client's label heterogeneity."""

    # The server stores the Gini index of each client, which a secure sum would hide.
    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE

    alpha: NonNegative = 3.0
    tckd: TrueClassTerm = "target"
    delta: Positive = 1.0
    """Slope of the heterogeneity map f(G) = log(1 + delta G)."""
    phi_timing: Literal["stale", "exact"] = "stale"
    """Which Gini indices are used: the last that clients sent ("stale"), or those of a census
    ("exact").
    """
    phi_source: Literal["f", "G"] = "f"
    """Whether phi is proportional to the map f(G), or to the Gini index G."""

    def requires(self) -> Need:
        if self.phi_timing == "exact":
            return self.needs | Need.LABEL_COUNTS
        return self.needs

    def initial_state(self, world: World) -> State:
        gini = torch.ones(world.clients, dtype=torch.float64)
        return super().initial_state(world).next(gini=gini)

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        cohort = [c for stage in stages if stage.sequential for c in stage.clients]
        if not cohort:
            return state
        # A census of a new task may still come, and no link of the chain changes its counts.
        if self.phi_timing == "exact":
            return state.next(cohort=torch.tensor(cohort))
        phi = torch.zeros(world.clients, dtype=torch.float64)
        phi[cohort] = self._phi(state, cohort)
        return state.next(phi=phi)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.sequential and "phi" in state.extra:
            return Payload(params=state.params, phi=float(state.extra.tensor("phi")[client]))
        cohort = list(stage.clients)
        if stage.sequential and "cohort" in state.extra:
            cohort = state.extra.tensor("cohort").tolist()
        phi = self._phi(state, cohort)[cohort.index(client)]
        return Payload(params=state.params, phi=float(phi))

    def work(self, stage: Stage) -> ClientWork:
        return Adaptive(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(super().expected_reply(client, stage, world), gini=0.0)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        gini = state.extra.tensor("gini").clone()
        for reply in replies:
            gini[reply.client] = min(max(reply.content.number("gini"), 0.0), 1.0)
        return super().aggregate(state, replies, stage, world).next(gini=gini)

    def _phi(self, state: State, cohort: list[int]) -> Tensor:
        return self.phi(self._gini(state)[cohort])

    def phi(self, gini: Tensor) -> Tensor:
        """Weights (n,) of one cohort, mean 1 (eq. 6, 7); ones if every client has a single
        class.
        """
        if self.phi_source == "f":
            return adaptive_weights(gini, self.delta)
        if not bool(gini.sum() > 0):
            return torch.ones_like(gini)
        return len(gini) * gini / gini.sum()

    def _gini(self, state: State) -> Tensor:
        if self.phi_timing == "stale" or "labels" not in state.extra:  # before the census
            return state.extra.tensor("gini")
        counts = state.extra.tensor("labels").double()
        return gini_index(counts / counts.sum(1, keepdim=True).clamp(min=1))


@dataclass(frozen=True)
class Adaptive(Decoupled):
    """FedDKD's objective with the received phi; the client sends its Gini index."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        return replace(start, constants={"phi": payload.number("phi")})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        gini = float(gini_index(view.proportions))
        return Payload(params=params, gini=gini), NOTHING


def adaptive_weights(gini: TensorLike, delta: float) -> Tensor:
    """The weights phi of the true-class distillation in a cohort, proportional to ``log(1 + delta
    G)``, with mean 1.

    gini: (n,) in [0, 1], one value per client of the cohort; delta > 0, a larger value makes
    weights more equal. Returns (n,) >= 0; ones if all are 0. Raises ConfigError if delta <= 0.

    Source: FedADKD, eq. 6 and 7.
    Reading: eq. 7 prints G where Algorithm 1 asks for f(G) of eq. 6; we use f(G). A cohort in which
    all clients have a single class has f(G) = 0, and gets phi = 1.

    >>> adaptive_weights([0.0, 0.5, 0.5], delta=1.0)
    tensor([0.0000, 1.5000, 1.5000], dtype=torch.float64)
    """
    if not delta > 0:
        raise ConfigError(f"delta = {delta!r} must be > 0; it spreads the weights of the cohort")
    spread = torch.log1p(delta * as_floats(gini))
    total = spread.sum()
    is_positive = total > 0
    shares = spread / torch.where(is_positive, total, torch.ones_like(total))
    return torch.where(is_positive, len(spread) * shares, torch.ones_like(spread))
