"""Label counts of all clients, and their uses: the census and class weights.

**The census** is a stage in which clients send their label counts, for methods and class weights
that need them. It takes place before round 1 (as round 0), and at the start of every task. In later
stages, the number of examples that a client claims is compared with the census.

State: labels = (clients, C) int64, the label counts; zeros for a client that did not answer.

**Class weights** (``plan.class_weights``) weigh the losses of labels by class. The weights are a
list in the config, or they are balanced: a class with half as many examples has twice the weight.
Balanced weights are computed from the labels that a client trains on, which stay at the client, or
from the label counts of all clients. The latter need a census, and the server sends its totals to
the clients (group ``label_totals``).

Definition: the weight of class c is n / (k n_c), where n is the number of examples, n_c of them are
of class c, and k is the number of classes that have examples. This is "balanced" in scikit-learn. A
class without examples has weight 0.

The engine averages the weighted losses over the examples of a batch, and does not divide by the
sum of their weights as PyTorch does. So an example has the same weight in every batch, the gradient
of a batch is an unbiased estimate of the gradient of the weighted objective, and single examples
have weighted gradients, which private training needs. Balanced weights have mean 1 over the
examples from which they are computed: the loss keeps its scale relative to other terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import BadPayload
from fedstill.core.extensions import ClientHook, RoundHook, StageActor, StageProvider
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    KEEP,
    LABELS,
    Keep,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.topology import everyone

# ---- the census ----------------------------------------------------------------------------------


CENSUS = "census"
"""The name of the stage."""


class Census(ClientWork):
    """Send the label counts; nothing is trained, and client states stay as they are."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params={})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        return Payload(labels=view.counts), KEEP


@dataclass(frozen=True)
class CensusTaker(Method):
    """The actor of the stage. Each client's label counts replace its earlier ones.

    A client that is absent or fails has zeros.
    """

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        return Payload()

    def work(self, stage: Stage) -> ClientWork:
        return Census()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(labels=torch.zeros(world.classes, dtype=torch.int64))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        labels = torch.zeros(world.clients, world.classes, dtype=torch.int64)
        for reply in replies:
            labels[reply.client] = reply.content.tensor(LABELS)
        return state.next(labels=labels)


class CensusStages(StageProvider):
    """Adds the stage before round 1, for all clients, and when the clients' task changes."""

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the census."""
        return {CENSUS: CensusTaker()}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round, preceded by a census if one is due."""
        if round == 0:
            return [census_stage(world), *stages]
        if not world.stream.changes(round):
            return stages
        return [Stage(round, 0, CENSUS, everyone(world, round)), *stages]


def census_stage(world: World) -> Stage:
    """The stage before round 1."""
    return Stage(0, 0, CENSUS, tuple(range(world.clients)))


@dataclass(frozen=True)
class CensusChecks(RoundHook):
    """Refuses impossible label counts, and claims that contradict the census.

    ``max_examples``: the most examples that a client may claim.
    """

    max_examples: int

    def check_reply(self, reply: Reply, stage: Stage, needs: Need, state: State) -> str:
        if stage.name == CENSUS:
            return self._check_counts(reply)
        if Need.LABEL_COUNTS not in needs or LABELS not in state.extra or reply.client < 0:
            return ""
        return self._check_claim(reply, state.extra.tensor(LABELS))

    def _check_counts(self, reply: Reply) -> str:
        """Why label counts do not match the number of examples that the client claims.

        The screen checks their form.
        """
        labels = reply.content.get(LABELS)
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
            return ""
        total = float(labels.double().sum())
        is_negative = bool((labels < 0).any())
        if is_negative or not reply.examples <= total <= self.max_examples:
            return f"its census counts {total:g} examples, and it claims {reply.examples}"
        return ""

    def _check_claim(self, reply: Reply, labels: Tensor) -> str:
        claimed = reply.examples
        counted = int(labels[reply.client].sum())
        if counted > 0:
            if claimed > counted:
                return f"claims {claimed} examples, and {counted} in the census"
            return ""
        # The client reported no examples, or its reply to the census was refused.
        largest = int(labels.sum(1).max())
        if 0 < largest < claimed:
            return f"claims {claimed} examples, and the largest client {largest} in the census"
        return ""


# ---- class weights -------------------------------------------------------------------------------


BALANCED = "balanced"
"""Weights from the labels that a client trains on."""

BALANCED_OVERALL = "balanced_overall"
"""Weights from the label counts of all clients."""

LABEL_TOTALS = "label_totals"
"""The group of a payload, (C,) int64: the label counts of all clients together."""


def balanced_weights(counts: Tensor) -> Tensor:
    """The balanced weight of each class, (C,) float64, from label counts (C,).

    >>> balanced_weights(torch.tensor([3, 1, 0])).tolist()
    [0.6666666666666666, 2.0, 0.0]
    """
    present = counts > 0
    balanced_count = counts.sum().double() / present.sum().clamp(min=1)
    return torch.where(present, balanced_count / counts.clamp(min=1), 0.0)


def class_weights(plan: Plan, labels: Tensor, view: View) -> Tensor | None:
    """The class weights (C,) float64 of a client's losses; None if all classes weigh the same.

    labels: (n,), of the examples that the client trains on. Examples without labels (-1) have no
    weights. Raises BadPayload if the plan needs the label totals and the server did not send them.
    """
    setting = plan.class_weights
    if setting == "none" or not len(labels) or int(labels.min()) < 0:
        return None
    if isinstance(setting, tuple):
        return torch.tensor(setting, dtype=torch.float64)
    counts = torch.bincount(labels.cpu(), minlength=len(view.counts))
    if setting == BALANCED:
        return balanced_weights(counts)
    if view.label_totals is None:
        raise BadPayload("class_weights = 'balanced_overall' needs the server's label totals")
    # The census may lack this client's answer.
    return balanced_weights(view.label_totals.maximum(counts))


def needs_label_totals(plans: Mapping[str, Plan]) -> bool:
    """Whether any stage has weights from the label counts of all clients."""
    return any(plan.class_weights == BALANCED_OVERALL for plan in plans.values())


@dataclass(frozen=True)
class LabelTotals:
    """The label counts (C,) of all clients together, as the server's world has them."""

    counts: Tensor


class TotalsAtServer(RoundHook):
    """Sends the label totals with the payloads of stages that have weights from them."""

    def extend_world(self, world: World, state: State) -> World:
        if LABELS not in state.extra:
            return world
        return world.extend(LabelTotals(state.extra.tensor(LABELS).sum(0)))

    def extend_payload(
        self, payload: Payload, client: int, stage: Stage, needs: Need, world: World
    ) -> Payload:
        plan = world.plans.get(stage.name)
        if plan is None or plan.class_weights != BALANCED_OVERALL:
            return payload
        totals = world.get(LabelTotals)
        # Without a census, payloads are only made to compute their size.
        counts = torch.zeros(world.classes, dtype=torch.int64)
        if totals is not None:
            counts = totals.counts
        return Payload(payload, **{LABEL_TOTALS: counts})


@dataclass(frozen=True)
class TotalsAtClient(ClientHook):
    """Shows a client the label totals that the server sent."""

    def extend_view(self, view: View, payload: Payload, stage: Stage) -> View:
        """The view with the totals. Raises BadPayload unless they are (C,)."""
        if LABEL_TOTALS not in payload:
            return view
        totals = payload.tensor(LABEL_TOTALS)
        if totals.shape != view.counts.shape:
            raise BadPayload(
                f"label totals of shape {tuple(totals.shape)} for {len(view.counts)} classes"
            )
        return replace(view, label_totals=totals)

    def payload_for_work(self, payload: Payload) -> Payload:
        """The payload without the totals."""
        groups = {name: group for name, group in payload.items() if name != LABEL_TOTALS}
        return Payload(groups)
