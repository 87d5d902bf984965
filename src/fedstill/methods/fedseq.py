"""FedSeq: clients train one after another, each starting from the previous client's model.

Source: Li & Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data"
(2023), Algorithm 1; training settings from Xu et al., "SFedKD: Sequential Federated Learning with
Discrepancy-Aware Multi-Teacher Knowledge Distillation".
State: the global parameters, nothing more.
Memory: nothing.
Reading: the first paper's code counts steps, with batches of 20 and gradients clipped at 50. SFedKD
states five epochs, batches of 64, a learning rate of 0.01 and a weight decay of 1e-4, and mentions
neither momentum, clipping nor a decay of the learning rate. We use none of the latter three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstill.core.method import Method
from fedstill.core.records import Plan, Stage, World
from fedstill.core.registry import method
from fedstill.core.topology import has_chain

FEDSEQ_PLAN = Plan(epochs=5, batch=64, lr=0.01, weight_decay=1e-4)
"""SFedKD's settings: five epochs, batches of 64, a constant learning rate without momentum."""


@method("fedseq")
@dataclass(frozen=True)
class FedSeq(Method):
    """Plain training along a chain: the last client's model is the result of the round."""

    topology: ClassVar[str] = "sequential"
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDSEQ_PLAN}

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if has_chain(stages):
            return ""
        return "in parallel rounds, it equals method fedavg; choose that, or omit topology.kind"
