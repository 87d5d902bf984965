"""FedAvg: clients train the global model on their own data, and the server averages their models.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(2017), Algorithm 1; training settings from Lee et al., "Preservation of the Global Knowledge by
Not-True Distillation" (FedNTD, 2022), appendix B.3.
State: the global parameters, nothing more.
Memory: nothing.
Reading: FedNTD's section 4.1 states an initial learning rate of 0.1; its appendix and code have
0.01. We use 0.01.
Reading: eq. 2 weighs clients by size; Algorithm 1 prints the uniform mean. ``aggregation`` decides;
the default is by size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Interval
from torch import Tensor

from fedstill.core.aggregation import Aggregation, weighted_mean
from fedstill.core.capabilities import Permit
from fedstill.core.method import Method
from fedstill.core.records import Plan, Reply, Stage, State, Tensors, World
from fedstill.core.registry import method

FEDNTD_PLAN = Plan(epochs=5, batch=50, lr=0.01, lr_decay=0.99, momentum=0.9, weight_decay=1e-5)
"""FedNTD's settings: five epochs, batches of 50, momentum 0.9, the learning rate 1% smaller after
every round.
"""


Suspected = Annotated[float, Interval(gt=0, lt=0.5)]


@method("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Averages the models that clients train on their own data."""

    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN}
    permits: ClassVar[Permit] = (
        Permit.LINEAR_AGGREGATE
        | Permit.CENTRAL_NOISE
        | Permit.ROBUST_AGGREGATE
        | Permit.PRIVATE_TRAINING
    )

    aggregation: Aggregation = "examples"
    """How models are averaged: weighted by numbers of examples, uniformly, or by a robust rule that
    limits the influence of hostile clients.
    """
    suspected: Suspected | None = field(default=None, kw_only=True)
    """The share of clients that may be hostile, for trimmed_mean and krum; unset: 0.3."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state.next(params=self.averaged(replies, state.params))

    def averaged(
        self,
        replies: Sequence[Reply],
        start: Tensors | None,
        group: str = "params",
        weighting: Aggregation | None = None,
    ) -> dict[str, Tensor]:
        """The mean of one group of the replies, by ``weighting``; by ``aggregation`` if it is None.

        start: the entries that the clients received; None: the group is a change.
        """
        return weighted_mean(replies, group, weighting or self.aggregation, start, self.suspected)
