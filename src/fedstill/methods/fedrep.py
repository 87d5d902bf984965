"""FedRep: each client trains its own head on the common body, and then the body under its head;
bodies are averaged.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning"
(2021), Algorithm 1, and its code.
State: the global parameters, of which the head does not change; nothing more.
Memory: params = the client's complete model.
Reading: after the last round, the code trains all clients' heads once more: the stage ``finetune``.
Reading: the code has one optimiser for both parts and keeps its momentum in between. Here each part
starts a new one.
Reading: the normalisation statistics of the body do not change while the head is trained.
Reading: the numbers of epochs are the code's for two classes per client (ten for the head, one for
the body). The code trains at 0.01 with momentum 0.5 in batches of 10. Here clients train as in the
other methods' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedstill.core.aggregation import Aggregation
from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import Plan, Stage, World
from fedstill.core.registry import method
from fedstill.methods.fedavg import FEDNTD_PLAN
from fedstill.methods.fit import LAST
from fedstill.methods.partly_shared import KeepsItsOwn, PartlyShared, in_head

HEAD = "head"
"""The stage in which a client only trains its head."""

HEAD_PLAN = replace(FEDNTD_PLAN, epochs=10, norm="frozen")


@method("fedrep")
@dataclass(frozen=True)
class FedRep(PartlyShared):
    """Clients train a personal head, then the shared body; the server averages the bodies."""

    schedule: ClassVar[Mapping[str, Any]] = {"before": HEAD, "last": LAST}
    stages: ClassVar[frozenset[str]] = frozenset({HEAD, "train", LAST})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.HEAD
    plans: ClassVar[Mapping[str, Plan]] = {
        HEAD: HEAD_PLAN,
        "train": replace(FEDNTD_PLAN, epochs=1),
        LAST: HEAD_PLAN,
    }
    personal: ClassVar[frozenset[str]] = frozenset({"train", LAST})
    silent: ClassVar[frozenset[str]] = frozenset({HEAD, LAST})

    aggregation: Aggregation = "examples"

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if any(stage.name == HEAD for stage in stages):
            return ""
        return (
            "clients train their heads in an earlier stage; set topology.kind = 'parallel' and "
            f"topology.before = {HEAD!r}"
        )

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        return [name for name in entries if not in_head(name)]

    def work(self, stage: Stage) -> ClientWork:
        return OnePart(self, stage.name)


@dataclass(frozen=True)
class OnePart(KeepsItsOwn):
    """Local training of the body in the stage ``train``, and of the head in all other stages."""

    def trainable(self, name: str) -> bool:
        return in_head(name) == (self.stage != "train")
