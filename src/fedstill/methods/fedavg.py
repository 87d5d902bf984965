"""FedAvg: clients train the global model on their own data; the server averages what they send.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), Algorithm 1;
training settings from Lee et al., "Preservation of the Global Knowledge by Not-True Distillation" (2022), appendix B.3.
State: the global parameters, nothing more.
Memory: nothing.
Reading: FedNTD's section 4.1 says an initial learning rate of 0.1, its appendix and code 0.01; we take 0.01.
Reading: eq. 2 weighs clients by size, Algorithm 1 prints the uniform mean; ``aggregation`` chooses, by size as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstill.aggregate import Weighting, weighted_mean
from fedstill.method import Method
from fedstill.records import Plan, Reply, Stage, State, World
from fedstill.registry import method

FEDNTD_PLAN = Plan(epochs=5, batch=50, lr=0.01, lr_decay=0.99, momentum=0.9, weight_decay=1e-5)
"""FedNTD's settings: five epochs, batches of 50, momentum 0.9, the learning rate 1% smaller after every round."""


@method("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Average the models that clients trained on their own data."""

    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN}
    permits: ClassVar[frozenset[str]] = frozenset({"linear_fold", "central_noise"})

    aggregation: Weighting = "examples"
    """How clients are weighed in the mean: by their numbers of examples, or all alike."""

    def fold(self, state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
        return state.next(params=weighted_mean(replies, weighting=self.aggregation))
