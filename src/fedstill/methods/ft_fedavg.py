"""FT-FedAvg: after the last round of FedAvg, every client trains the global model on its own data
once more.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), appendix A.2: 100 rounds of two epochs, then four; Adam as in local training.
State: the global parameters; student.N = client N's fine-tuned model, after the last round.
Memory: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedstill.core.capabilities import Permit
from fedstill.core.records import Plan, Reply, Stage, State, World
from fedstill.core.registry import method
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fit import FIT, FITTING
from fedstill.methods.local_only import with_students

LAST = "finetune"

PARALLEL = replace(FITTING, epochs=2, validation=0.0, patience=0, keep="last")
"""QKT's settings for a client in a round of federated averaging."""


@method("ft_fedavg")
@dataclass(frozen=True)
class FTFedAvg(FedAvg):
    """FedAvg, and in the end every client fine-tunes the global model on its own data."""

    schedule: ClassVar[Mapping[str, Any]] = {"last": LAST}
    stages: ClassVar[frozenset[str]] = frozenset({"train", LAST})
    # the fine-tuned models are each client's own
    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE
    plans: ClassVar[Mapping[str, Plan]] = {"train": PARALLEL, LAST: replace(PARALLEL, epochs=4)}
    personal: ClassVar[frozenset[str]] = frozenset({LAST})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == LAST:
            return with_students(state, replies)
        return super().aggregate(state, replies, stage, world)
