"""FedProto: clients, whose networks may differ, align their features with the mean features of each
class.

Source: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (2022),
Algorithm 1, and its code.
Symbols: lambda = ``strength``; D = features; C = classes.
State: no global parameters; values = the prototypes, mean features by class, (C, D); seen = 1 for a
class with a prototype, else 0, (C,).
Memory: params = the client's own model.
Reading: means are computed after training, in evaluation mode. The code computes them during
training, while the weights change.
Reading: the text weighs clients by their examples of a class, the code weighs them equally.
``aggregation`` decides; the default is equal weights.
Reading: the distance is the mean, not the sum, of squares over features, as in the code. An example
of a class without a prototype has no distance, but counts in the mean over the batch.
Reading: the code predicts the class of the nearest prototype among the client's own classes. Here
the client's head predicts. If the client has its own test set, the journal also has the accuracy of
the nearest prototype over all classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.aggregation import Weighting
from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    ModelSpec,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.methods.class_values import ClassValues, TowardsValues, mean_by_class
from fedstill.methods.fedavg import FEDNTD_PLAN
from fedstill.models.contract import width


@dataclass(frozen=True)
class WithPrototypes(ClassValues):
    """The server's part of methods whose values are features. A method defines the computation of
    the prototypes.
    """

    needs: ClassVar[Need] = Need.SAME_FEATURES
    plans: ClassVar[Mapping[str, Plan]] = {"train": replace(FEDNTD_PLAN, epochs=1)}

    def width(self, spec: ModelSpec) -> int:
        return width(spec)

    def values(self, params: Tensors, view: View) -> Tensor:
        return view.features(params)

    def distance(self, step: Step, target: Tensor) -> Tensor:
        return (step.features() - target).square().mean(1)

    def work(self, stage: Stage) -> ClientWork:
        return TowardsPrototypes(self)


@method("fedproto")
@dataclass(frozen=True)
class FedProto(WithPrototypes):
    """Clients pull their features towards the mean features of each class; networks may differ."""

    aggregation: Weighting = "uniform"
    """Weights of the clients that have a class: by their examples of it, or equal."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        values, has_mean = mean_by_class(replies, state.extra.tensor("values"), self.aggregation)
        has_prototype = torch.maximum(state.extra.tensor("seen"), has_mean.float())
        return state.next(values=values, seen=has_prototype)


class TowardsPrototypes(TowardsValues):
    """Training towards prototypes; on a client's own test set, it reports the accuracy of the
    nearest prototype.
    """

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``nearest_prototype``: the accuracy in [0, 1] of the nearest received prototype, over all
        classes with a prototype.
        """
        test = view.test
        has_prototype = start["seen"] > 0
        if test is None or len(test) == 0 or not bool(has_prototype.any()):
            return {}
        features = view.passes.features(params, test).cpu()
        distances = torch.cdist(features, start["values"])  # (n, C)
        predicted = distances.masked_fill(~has_prototype, torch.inf).argmin(1)
        accuracy = (predicted == test.labels.cpu()).double().mean()
        return {"nearest_prototype": float(accuracy)}
