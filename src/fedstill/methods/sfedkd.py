"""SFedKD: distillation from models of the last round, which are chosen to cover all classes
together, and weighted by label distance.

Source: Xu et al., "SFedKD: Sequential Federated Learning with Discrepancy-Aware Multi-Teacher
Knowledge Distillation", eq. 2 to 5 and Algorithm 1.
Symbols: K = ``k``; gamma, beta = weights of not-true-class (NCKD) and true-class distillation
(TCKD), in the opposite order to FedADKD; tau = ``temperature``; d = ``distance`` of label shares;
g_k, h_k = weights of teacher k (eq. 5), enabled by ``g`` and ``h``; otherwise 1/K.
State: the global parameters; trained = ids (n,) of the clients that trained in this round, in
order; snapshot.N = the model of client N after its training; teacher.N = the model of client N, if
it is a teacher in this round; labels = the census's label counts (clients, C), if they determine
the choice or the weights of teachers; teacher_labels = the teachers' label counts (K, C) in the
task in which they trained, if teachers are weighted; fewer = true once there were fewer than K
teachers.
Memory: nothing.
Reading: the paper names no temperature; we use DKD's 4. Like eq. 3, 4 and 7, we do not multiply the
terms by tau^2, as DKD does (``tau2_scale``).
Reading: KL is infinite if a class is absent. Both sides are smoothed by the paper's only constant
(``smoothing``).
Reading: Algorithm 1 adds label shares without normalising them. Here the sum is normalised (see
``complementary``).
Reading: teachers are the models right after a client's training. The server stores them, and knows
every client's labels from a census. It computes g and h and sends them with the teachers, so that
no client receives the labels of another client. Round 1 has no teachers. If the last round had
fewer than K models, all of them teach.
Reading: on the topology "parallel", the teachers are the last round's local models, and clients'
models are averaged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, DataError
from fedstill.core.fields import CountOrZero, NonNegative, Positive
from fedstill.core.keys import generator, seed_for
from fedstill.core.label_counts import (
    SMOOTHING,
    Metric,
    TensorLike,
    as_floats,
    distance,
    proportions,
)
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    Step,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import multi_nckd, multi_tckd
from fedstill.methods.fedseq import FedSeq

log = logging.getLogger("fedstill.methods")

Choice = Literal["greedy", "random", "all"]


@dataclass(frozen=True)
class TaughtByLastRound(FedSeq):
    """The server's part of methods whose teachers are K of the last round's client models.

    The server stores the models of a round as ``snapshot.CLIENT``, in the order ``trained``. In the
    next round, it stores the selected ones as ``teacher.CLIENT``.
    """

    k: CountOrZero = 5
    """Number of teachers among the models of the last round (K); with teacher_choice = "all", all
    of them.
    """
    teacher_choice: Choice = "greedy"
    """Which models are teachers: those that together cover most classes, random ones, or all."""
    distance: Metric = "kl"
    """Distance between label shares, which selects and weights teachers."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        return ""

    def requires(self) -> Need:
        if self.teacher_choice == "greedy":
            return self.needs | Need.LABEL_COUNTS
        return self.needs

    def initial_state(self, world: World) -> State:
        return super().initial_state(world).next(trained=torch.zeros(0, dtype=torch.int64))

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        models = state.extra.many("snapshot")
        trained = state.extra.tensor("trained").tolist()
        candidates = [client for client in trained if self._has_labels(state, client)]
        chosen = self.chosen(candidates, state, world)
        if self._lacks_teachers(len(chosen)) and "fewer" not in state.extra:
            log.warning(
                "method.k = %d, and round %d left %d models: all of them teach",
                self.k,
                state.round - 1,
                len(chosen),
            )
            state = state.next(fewer=True)

        emptied = state.without("teacher.", "snapshot.")
        emptied = emptied.next(trained=torch.zeros(0, dtype=torch.int64))
        return emptied.next(groups=many("teacher", {client: models[client] for client in chosen}))

    def _lacks_teachers(self, count: int) -> bool:
        """Whether there are teachers, but fewer than K."""
        return self.teacher_choice != "all" and 0 < count < self.k

    def chosen(self, candidates: Sequence[int], state: State, world: World) -> list[int]:
        """The clients whose models are teachers in this round, among those that trained in the last
        round, in order.
        """
        if self.teacher_choice == "all":
            return list(candidates)
        if self.teacher_choice == "random":
            draw = generator(seed_for(world.seed, state.round, 0, SERVER, "teachers"))
            order = torch.randperm(len(candidates), generator=draw).tolist()
            return [candidates[i] for i in order[: self.k]]
        if not candidates:
            return []
        shares = proportions(state.extra.tensor("labels")[list(candidates)])
        return [candidates[i] for i in complementary(shares, self.k, self.distance)]

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload({"params": state.params, **many("teacher", state.extra.many("teacher"))})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        aggregated = super().aggregate(state, replies, stage, world)
        if self.k == 0 and self.teacher_choice != "all":
            return aggregated
        clients = torch.tensor([reply.client for reply in replies])
        trained = torch.cat([state.extra.tensor("trained"), clients])
        models = many("snapshot", {reply.client: reply.content.params for reply in replies})
        return aggregated.next(groups=models, trained=trained)

    def _has_labels(self, state: State, client: int) -> bool:
        """Whether the server knows a client's label counts, if it needs them. A client that missed
        the census cannot be weighted.
        """
        if Need.LABEL_COUNTS not in self.requires():
            return True
        return bool(state.extra.tensor("labels")[client].sum() > 0)


@method("sfedkd")
@dataclass(frozen=True)
class SFedKD(TaughtByLastRound):
    """Sequential training with several complementary teachers from the last round, weighted by
    label discrepancy.
    """

    gamma: NonNegative = 1.0
    """Weight of the not-true-class distillation (NCKD)."""
    beta: NonNegative = 3.0
    """Weight of the true-class distillation (TCKD)."""
    temperature: Positive = 4.0
    """Temperature of both distillations (tau)."""
    tau2_scale: bool = False
    """Whether both terms are multiplied by the square of the temperature."""
    g: bool = True
    """Whether NCKD weights teachers by label distance (g_k) instead of equally."""
    h: bool = True
    """Whether TCKD weights teachers by label distance (h_k) instead of equally."""
    smoothing: Annotated[float, Interval(gt=0, le=1)] = SMOOTHING
    """Number by which both sides of a KL distance are smoothed."""

    @property
    def weights_teachers(self) -> bool:
        """Whether a term weights teachers by label distance."""
        return self.g or self.h

    def requires(self) -> Need:
        if self.weights_teachers:
            return super().requires() | Need.LABEL_COUNTS
        return super().requires()

    def begin_round(self, state: State, stages: Sequence[Stage], world: World) -> State:
        begun_state = super().begin_round(state, stages, world)
        if not self.weights_teachers:
            return begun_state
        # The label counts are still those of the round in which the teachers trained.
        teachers = list(begun_state.extra.many("teacher"))
        return begun_state.next(teacher_labels=state.extra.tensor("labels")[teachers])

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        payload = super().payload_for_client(state, client, stage, world)
        if not payload.many("teacher") or not self.weights_teachers:
            return payload
        counts = state.extra.tensor("labels")[client]
        if not bool(counts.sum() > 0):  # it missed the census: all teachers count alike
            return payload
        teachers = proportions(state.extra.tensor("teacher_labels"))
        g, h = discrepancy_weights(teachers, proportions(counts), self.distance, self.smoothing)
        weights = {}
        if self.g:
            weights["g"] = g
        if self.h:
            weights["h"] = h
        return Payload(payload, **weights)

    def work(self, stage: Stage) -> ClientWork:
        return Discrepant(self)


def start_with_teachers(payload: Payload) -> TrainingStart:
    """A start with the received parameters, and with the received models as teachers, by client."""
    teachers = {str(client): params for client, params in payload.many("teacher").items()}
    return TrainingStart(payload.params, teachers=teachers)


def teacher_logits(step: Step, start: TrainingStart) -> Tensor:
    """The teachers' logits (K, B, C), in the order of their clients' ids."""
    return torch.stack([step.teacher(name) for name in start.teachers])


@dataclass(frozen=True)
class Discrepant(ClientWork):
    """Cross-entropy, gamma times the weighted not-true-class distillation, and beta times the
    weighted true-class distillation.
    """

    method: SFedKD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = start_with_teachers(payload)
        dtype = dtype_of(start.params)
        count = len(start.teachers)
        uniform = torch.full((count, 1), 1 / max(count, 1), dtype=dtype)
        weights = {"g": uniform, "h": uniform}
        for name in ("g", "h"):
            if name in payload:
                weights[name] = payload.tensor(name).to(dtype).unsqueeze(1)  # (K, 1)
        return replace(start, constants=weights)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        if not start.teachers:
            return terms
        m = self.method
        student = step.logits()  # (B, C)
        teachers = teacher_logits(step, start)  # (K, B, C)
        scale = 1.0
        if not m.tau2_scale:
            scale = m.temperature**-2
        not_true = multi_nckd(student, teachers, step.y, m.temperature)  # (K, B)
        true = multi_tckd(student, teachers, step.y, m.temperature)  # (K, B)
        return {
            **terms,
            "other_classes": m.gamma * scale * (start["g"] * not_true).sum(0),
            "true_class": m.beta * scale * (start["h"] * true).sum(0),
        }


TIE = 1e-9
"""Distances that differ by less than this are equal, because the sum over a permuted histogram may
differ in the last bit.
"""


def complementary(proportions: TensorLike, k: int, metric: Metric = "kl") -> list[int]:
    """The positions of k teachers whose combined labels are most uniform, chosen greedily, in the
    order of choice.

    proportions: (n, C) label shares of the candidates; k >= 0, all n are returned if n <= k; metric
    as in ``distance``. Each step adds the candidate that brings the mean of the chosen shares
    nearest to uniform; ties go to the lower position. Raises ConfigError if k < 0, and DataError
    for invalid shares.

    Source: SFedKD, Algorithm 1.
    Reading: the paper sums the chosen shares without normalising. For KL and L2, the choice is the
    same; for L1 and JS, only a normalised sum is comparable with uniform shares. We always
    normalise. The distance is d(chosen, uniform), for which KL is finite without smoothing (0 log 0
    = 0), so it is not smoothed.

    >>> complementary([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], k=2)
    [2, 1]
    """
    shares = as_floats(proportions).to(torch.float64)
    if k < 0:
        raise ConfigError(f"cannot choose k = {k} teachers; k must be >= 0")
    if (
        shares.dim() != 2
        or not bool((shares.isfinite() & (shares >= 0)).all())
        or not bool((shares.sum(-1) > 0).all())
    ):
        raise DataError(
            "label shares must be (clients, classes), >= 0, with a sum > 0; got "
            f"{tuple(shares.shape)}"
        )
    uniform = torch.full_like(shares[:1], 1 / max(shares.shape[1], 1))
    chosen: list[int] = []
    candidates = list(range(len(shares)))
    while candidates and len(chosen) < k:
        sums = shares[chosen].sum(0) + shares[candidates]
        distances = distance(sums / sums.sum(-1, keepdim=True), uniform, metric, smoothing=0.0)
        first_of_ties = int((distances <= distances.min() + TIE).to(torch.int8).argmax())
        chosen.append(candidates.pop(first_of_ties))
    return chosen


def discrepancy_weights(
    teachers: TensorLike, student: TensorLike, metric: Metric = "kl", smoothing: float = SMOOTHING
) -> tuple[Tensor, Tensor]:
    """The weights of K teachers for a student: g for the other classes and h for the true class,
    each summing to 1.

    teachers: (K, C), student: (C,) label shares; smoothing: as in ``distance``. With d_k =
    distance(teacher k, student): ``g_k = d_k / sum d`` (1/K if all are 0), ``h_k`` in proportion to
    ``1 / (d_k + 1e-4)``. Returns (g, h), each (K,) >= 0.

    Source: SFedKD, eq. 5.
    Reading: for KL, the teacher is the first argument, and both are smoothed. A teacher with the
    student's own labels has g = 0.

    >>> g, h = discrepancy_weights([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
    >>> g.round(decimals=3), h.round(decimals=3)
    (tensor([0., 1.], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    d = distance(teachers, student, metric, smoothing)
    total = d.sum()
    differ = total > 0
    divisor = torch.where(differ, total, torch.ones_like(total))
    g = torch.where(differ, d / divisor, torch.ones_like(d) / max(len(d), 1))
    nearness = 1 / (d + SMOOTHING)
    return g, nearness / nearness.sum()
