"""Class weights: losses of labels count more for some classes than for others
(``plan.class_weights``).

The weights are a list in the config, or they are balanced: a class with half as many examples has
twice the weight. Balanced weights come from the labels that a client trains on, which stay there,
or from the label counts of all clients. For the latter there is a census, and the server sends its
totals to the clients (group ``label_totals``).

Definition: the weight of class c is n / (k n_c), where n is the number of examples, n_c of them are
of class c, and k is the number of classes that have examples. This is "balanced" in scikit-learn. A
class without examples has weight 0.

The engine takes the mean of the weighted losses over the examples of a batch, and does not divide
by the sum of their weights as PyTorch does. So an example weighs the same in every batch, the
gradient of a batch is an unbiased estimate of that of the weighted objective, and a single example
has a weighted gradient, which private training needs. Balanced weights have mean 1 over the
examples that they come from: the loss keeps its scale beside the other terms of an objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import BadPayload
from fedstill.core.extensions import ClientHook, RoundHook
from fedstill.core.records import LABELS, Payload, Plan, Stage, State, View, World

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
    """The weights (C,) float64 of the losses of a client's labels; None if they have none.

    labels: (n,), of the examples that the client trains on. Examples without labels (-1) have no
    weights. Raises BadPayload if the plan needs the totals of all clients and the server did not
    send them.
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


def are_overall(plans: Mapping[str, Plan]) -> bool:
    """Whether a stage has weights from the label counts of all clients."""
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
        # Before the census, only the size of a payload is computed.
        counts = torch.zeros(world.classes, dtype=torch.int64)
        if totals is not None:
            counts = totals.counts
        return Payload(payload, **{LABEL_TOTALS: counts})


@dataclass(frozen=True)
class TotalsAtClient(ClientHook):
    """Shows a client the label totals that the server sent."""

    def extend_view(self, view: View, payload: Payload, stage: Stage) -> View:
        """The view with the totals. Raises BadPayload unless they are (C,) of the run's classes."""
        if LABEL_TOTALS not in payload:
            return view
        totals = payload.tensor(LABEL_TOTALS)
        if totals.shape != view.counts.shape:
            raise BadPayload(
                f"label totals of shape {tuple(totals.shape)} for {len(view.counts)} classes"
            )
        return replace(view, label_totals=totals)


def without_totals(payload: Payload) -> Payload:
    """The payload that the method made: label totals are not for its work."""
    if LABEL_TOTALS not in payload:
        return payload
    return Payload({name: group for name, group in payload.items() if name != LABEL_TOTALS})
