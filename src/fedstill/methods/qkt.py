"""QKT: a client queries its peers for classes that it lacks, learns them from peers with knowledge
of them, and refines its head.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(2025), eq. 2 to 4; selective weight masking from appendix A.5; var-E from appendix A.6.4.
Symbols: Q = the client's query; Y_S = its own classes; lambda = ``query_weight``; alpha, tau as in
naive KD; T_Q = the teachers whose mean softmax on ``samples`` examples of noise reaches
``threshold`` for a class of Q; Z = ``frozen``.
State: no global parameters; model.N = the model that client N trained alone; size.N = its number of
examples; student.N = client N's model after its last phase.
Memory: peer.N = the model of client N, between the phases.
Reading: eq. 4 prints p_t log p_s, which falls as the student gets worse. The objective is its
negative. It has the same gradient as ``masked_kl``, which cannot be negative.
Reading: lambda "defaults to 1", but the CIFAR-10 entry of the main table is the ablation's row of
1.5. We use 1.5, and 3 for CIFAR-100 (``query_weight``).
Reading: eq. 4 prints a sum over T_Q, the default of ``over_teachers``. On a network with batch
statistics, as in the paper, and with a threshold at which the filter works, the sum is closer to
QKT's rows. With the small CNN, the mean is closer, except for the gain (docs/results/qkt.md).
Reading: ``threshold`` is 0.01, as in the paper. If a network with batch statistics was trained on
few images, half of the peers that lack the class pass this threshold; 1 / C separates them
(``python -m benchmarks.probes``).
Reading: ``threshold`` is for images. Random signals and token ids separate known classes from
others as well. However, a model then predicts the other classes with 0.05 to 0.12, so that all
peers pass 0.01. Choose the threshold on other data, in units of 1 / C.
Reading: Y_S contains the classes with at least one example at the client. A class in Q and Y_S has
weight lambda.
Reading: without a teacher in T_Q, the sum of eq. 4 is empty: the client continues with
cross-entropy alone in both phases. The journal's ``teachers`` is then empty, and tables show how
many queries had none.
Reading: in phase 2 the extractor is frozen: it has no gradient, and its normalisation is in
evaluation mode.
Reading: importance is "L2 norm-based, averaged over batches", but the paper does not state the
loss. We use the root mean square of the batches' gradients of cross-entropy at the start of phase
2. ``importance`` also offers their mean absolute value, and gradients of eq. 4, which select over
half of the row of the queried class. Z counts the entries of the head, weights and biases. Frozen
entries are restored after every step, because weight decay and Adam would move them without a
gradient.
Reading: the peers' models are sent once, for phase 1. A client keeps them for phase 2.
Reading: with var-E (``qkt_var_e``), each client stops each phase at its best epoch on a validation
set of 1 % (CINIC-10) or 10 % (other data) of the training set. The paper gives no grid: every epoch
up to QKT's is a candidate, scored by Average Accuracy. The set must contain the queried classes, so
it is drawn from all clients: it is ``data.public``, whose labels this method reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import Count, Positive, Share
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Examples,
    Payload,
    Plan,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import cross_entropy, masked_ce
from fedstill.methods.fit import FIT, FITTING, Fit, probed, queries_of, student_models
from fedstill.methods.naive_kd import (
    TRANSFER,
    TRANSFERRING,
    NaiveKD,
    peer_teachers,
    peers_of,
)
from fedstill.metrics import average_accuracy, class_accuracy

REFINE = "refine"
"""The stage of phase 2, in which clients train their heads."""

HEAD = "head."

IndexedLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss (B,), given logits (B, C) and the examples' positions (B,) in the client's data."""


@method("qkt")
@dataclass(frozen=True)
class QKT(NaiveKD):
    """A client learns the queried classes from peers that know them, then refines its old head on
    the new features.
    """

    schedule: ClassVar[Mapping[str, Any]] = {}
    stages: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER, REFINE})
    needs: ClassVar[Need] = Need.HEAD | Need.QUERIES
    plans: ClassVar[Mapping[str, Plan]] = {
        FIT: FITTING,
        TRANSFER: TRANSFERRING,
        REFINE: replace(TRANSFERRING, norm="frozen"),
    }
    personal: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER, REFINE})

    query_weight: Positive = 1.5
    """Weight of the queried classes; the client's other classes have weight 1 (lambda)."""
    threshold: Share = 0.01
    """Mean softmax on noise above which a peer counts as knowing a class. 0.01 suits images only:
    on other data, all peers pass.
    """
    samples: Count = 20
    """Number of noise examples on which the peers' models are probed."""
    teachers: Literal["filtered", "all"] = "filtered"
    """Which peers are teachers: those that know a queried class, or all."""
    classes: Literal["masked", "all"] = "masked"
    """Classes that are distilled: the client's own and the queried ones, or all with equal weight.
    """
    phases: Literal[1, 2] = 2
    """Whether there is a second phase, in which the head is refined."""
    head: Literal["local", "phase1"] = "local"
    """The head that phase 2 starts from: the client's own, from before phase 1, or that of
    phase 1.
    """
    frozen: Share = 0.0
    """Share of the head's entries, the most important ones, that phase 2 does not change (Z)."""
    importance: Literal["rms", "mean", "objective"] = "rms"
    """How batches' gradients of cross-entropy make an importance: their rms, mean size, or rms of
    eq. 4's gradients.
    """

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if client not in queries_of(world) and stage.name != FIT:
            return None
        if stage.name != REFINE:
            return super().payload_for_client(state, client, stage, world)
        learned = self.after_phase1(state, client)
        payload = self.with_peers(state, client, world)
        if self.phases == 1 or learned is None or payload is None:
            return None
        params = dict(learned)
        if self.old_head:
            params |= head_of(payload.params)
        if self.keeps_peers:
            return Payload(params=params)
        return Payload({**payload, "params": params})

    def after_phase1(self, state: State, client: int) -> Tensors | None:
        """The model with the extractor for a client's phase 2; None if there is none."""
        return student_models(state).get(client)

    @property
    def old_head(self) -> bool:
        """Whether phase 2 starts from the client's head before phase 1."""
        return self.head == "local"

    @property
    def keeps_peers(self) -> bool:
        """Whether each client executes phase 1 itself, and therefore has its peers' models."""
        return True

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == REFINE:
            return self.refinement()
        if stage.name == FIT:
            return Fit()
        return Queried(self)

    def refinement(self) -> ClientWork:
        """The work of phase 2."""
        if self.frozen:
            return PartlyRefined(self)
        return Refined(self)

    def mask(self, view: View, world: World) -> Tensor:
        """M (C,): lambda for queried classes, 1 for the client's other classes, 0 for the rest."""
        if self.classes == "all":
            return torch.ones(world.classes)
        mask = (view.counts > 0).to(dtype_of(world.initial(view.client)))
        mask[list(view.query)] = self.query_weight
        return mask

    def teacher_weights(self, use: Tensor) -> Tensor:
        """The weight of each teacher, given whether it is in T_Q (0 or 1, any shape); all zeros if
        T_Q is empty.
        """
        if self.over_teachers == "sum":
            return use
        return use / use.sum().clamp(min=1)

    def useful(self, probe: Tensor, query: Sequence[int]) -> bool:
        """Whether a teacher with this mean softmax (C,) on noise is in T_Q."""
        return self.teachers == "all" or bool((probe[list(query)] >= self.threshold).any())

    def kept_peers(self, start: TrainingStart) -> Payload:
        """The models of the peers in phase 1, if the client keeps them for phase 2."""
        if self.phases == 1 or not self.keeps_peers:
            return NOTHING
        models = {client: params for client, (_, params) in peers_of(start).items()}
        return Payload(many("peer", models))


@dataclass(frozen=True)
class Queried(ClientWork):
    """Cross-entropy, and the masked cross-entropy with each teacher that knows a queried class."""

    method: QKT

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        m = self.method
        teachers = peer_teachers(payload, world)
        probes = [probed(spec, params, world, m.samples) for spec, params in teachers.values()]
        useful = [m.useful(probe, view.query) for probe in probes]
        use = torch.tensor(useful, dtype=dtype_of(payload.params)).reshape(-1, 1)  # (T, 1)
        constants = {"use": m.teacher_weights(use), "mask": m.mask(view, world)}
        return TrainingStart(payload.params, teachers, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        if start.teachers:
            teachers = torch.stack([step.teacher(name) for name in start.teachers])  # (T, B, C)
            terms["teachers"] = self.distillation(
                step.logits(), teachers, start["mask"], start["use"]
            )
        return terms

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(params=params), self.method.kept_peers(start)

    def distillation(self, logits: Tensor, teachers: Tensor, mask: Tensor, use: Tensor) -> Tensor:
        """The distillation term of eq. 4, (B,), without cross-entropy: logits (B, C), teachers (T,
        B, C), mask (C,), use (T, 1).
        """
        losses = masked_ce(logits, teachers, mask, self.method.temperature)  # (T, B)
        return self.method.alpha * (use * losses).sum(0)

    def validation_score(self, params: Tensors, view: View) -> float | None:
        """Average Accuracy on public labels, for plans that keep the best epoch; accuracy on
        held-out data if there are none.
        """
        if view.public is None or bool((view.public.labels < 0).any()):
            return super().validation_score(params, view)
        labels = view.public.labels.cpu()
        is_correct = view.logits(params, "public").argmax(1) == labels
        classes = len(view.counts)
        correct = torch.bincount(labels[is_correct], minlength=classes)
        total = torch.bincount(labels, minlength=classes)
        return average_accuracy(class_accuracy(correct, total), view.proportions, view.query)

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        weights = start["use"].flatten().tolist()
        teachers = [int(c) for c, weight in zip(start.teachers, weights, strict=True) if weight]
        return {"query": list(view.query), "teachers": teachers}


@dataclass(frozen=True)
class Refined(Queried):
    """The same objective for only the head, with the peers' models that the client stored in phase
    1.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return super().begin(Payload({**client_state, **payload}), NOTHING, view, world)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(params=params), NOTHING

    def trainable(self, name: str) -> bool:
        return name.startswith(HEAD)


@dataclass(frozen=True)
class PartlyRefined(Refined):
    """The same without the most important share Z of the head's entries, which do not change in any
    bit.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        loss = self.label_loss(view)
        if self.method.importance == "objective" and start.teachers:
            peers = [view.logits(params, model=spec) for spec, params in peers_of(start).values()]
            loss = self.objective(start, view, torch.stack(peers))
        scores = self.importances(payload.params, loss, view, world.plans[REFINE].batch)
        frozen = self.most_important(scores)
        return replace(start, constants={**start.constants, "frozen": frozen})

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        return {k: torch.where(start["frozen"][k], before[k], v) for k, v in after.items()}, trace

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """Also the frozen share of each class's row of the head, (C,)."""
        rows = start["frozen"][f"{HEAD}weight"].flatten(1).double().mean(1)
        return {**super().report(params, start, view, world), "frozen_rows": rows.tolist()}

    def importances(
        self, params: Tensors, loss: IndexedLoss, view: View, batch: int
    ) -> dict[str, Tensor]:
        """The importance of every entry of the head, from the gradients of batches of the client's
        own data.
        """
        size = torch.square
        if self.method.importance == "mean":
            size = torch.abs
        positions = torch.arange(len(view.data), device=view.data.labels.device)
        examples = Examples(view.data.values, positions)

        total: dict[str, Tensor] = {}
        for grads in view.passes.gradients(params, examples, loss, batch):
            sizes = {name: size(grad) for name, grad in head_of(grads).items()}
            if total:
                sizes = {name: total[name] + value for name, value in sizes.items()}
            total = sizes
        return total

    def label_loss(self, view: View) -> IndexedLoss:
        """The cross-entropy with the labels of the client's examples, by their positions."""
        labels = view.data.labels
        return lambda logits, index: cross_entropy(logits, labels[index])

    def objective(self, start: TrainingStart, view: View, peers: Tensor) -> IndexedLoss:
        """Eq. 4 for the logits (T, n, C) of peers on the client's data."""
        labels = view.data.labels
        teachers = peers.to(labels.device)
        mask = start["mask"].to(labels.device)
        use = start["use"].to(labels.device)

        def loss(logits: Tensor, index: Tensor) -> Tensor:
            distillation = self.distillation(logits, teachers[:, index], mask, use)
            return cross_entropy(logits, labels[index]) + distillation

        return loss

    def most_important(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whether each entry is in the share Z with the highest scores; ties go to the first
        entries.
        """
        flat = torch.cat([v.flatten() for v in scores.values()])
        top = highest(flat, round(self.method.frozen * len(flat)))
        parts = torch.split(top, [v.numel() for v in scores.values()])
        return {
            name: part.reshape(scores[name].shape) for name, part in zip(scores, parts, strict=True)
        }


def highest(scores: Tensor, count: int) -> Tensor:
    """Whether each score (n,) is among the highest ``count``; ties go to the first scores."""
    top = torch.zeros(len(scores), dtype=torch.bool)
    top[scores.argsort(descending=True, stable=True)[:count]] = True
    return top


def head_of(params: Tensors) -> dict[str, Tensor]:
    """The entries of a model's head."""
    return {k: v for k, v in params.items() if k.startswith(HEAD)}


@method("qkt_var_e")
@dataclass(frozen=True)
class QKTVarE(QKT):
    """QKT with early stopping: a validation set determines when each client ends each phase."""

    needs: ClassVar[Need] = QKT.needs | Need.PUBLIC_DATA
    labelled: ClassVar[frozenset[str]] = frozenset({TRANSFER, REFINE})
    plans: ClassVar[Mapping[str, Plan]] = {
        FIT: FITTING,
        TRANSFER: replace(QKT.plans[TRANSFER], keep="best"),
        REFINE: replace(QKT.plans[REFINE], keep="best"),
    }
