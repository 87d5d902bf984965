"""DS-FL: clients send class probabilities on public images; the server sharpens their mean, and all
learn from it.

Source: Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for
Communication-Efficient Collaborative Training With Non-IID Private Data" (2021): entropy reduction
aggregation (ERA), a softmax of the mean at a low temperature.
Symbols: T = ``temperature`` of the aggregation; o_r = the public images of a round, ``subset``
many.
State: the parameters of the server's model; subset = positions (o_r,) of the round's public images,
if ``subset`` is smaller than their number; target = the common target on these images, (o_r, C),
until the clients have learned from it.
Memory: params = the client's own model.
Reading: the paper exchanges 1,000 of its 20,000 public images each round. Here the default is all;
``subset`` sets the number.
Reading: there is no official code. Five epochs in batches of 100 with plain SGD at 0.1 are our
reading of the paper's setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedstill.core.fields import Positive
from fedstill.core.records import Plan
from fedstill.core.registry import method
from fedstill.losses import soft_cross_entropy
from fedstill.methods.public_logits import DISTIL, LOCAL, TEACH, LogitExchange

DSFL_PLAN = Plan(epochs=5, batch=100, lr=0.1)


@method("dsfl")
@dataclass(frozen=True)
class DSFL(LogitExchange):
    """Clients and server learn from the sharpened mean of the clients' probabilities on public
    images.
    """

    plans: ClassVar[dict[str, Plan]] = {LOCAL: DSFL_PLAN, TEACH: DSFL_PLAN, DISTIL: DSFL_PLAN}

    aggregation: Literal["era", "mean"] = "era"
    """How the clients' probabilities are combined into the target: their sharpened mean ("era"), or
    their mean.
    """
    temperature: Positive = 0.1
    """Temperature of the sharpening (T)."""

    def sent_logits(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def consensus(self, mean: Tensor) -> Tensor:
        if self.aggregation == "mean":
            return mean
        return (mean / self.temperature).softmax(-1)

    def distance(self, logits: Tensor, target: Tensor) -> Tensor:
        return soft_cross_entropy(logits, target)
