"""FedBABU: only the body is trained and averaged, with a fixed random head; at the end, each client
fine-tunes the network.

Source: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification"
(2022), and its code.
State: the global parameters, of which the head does not change; nothing more.
Memory: params = the client's fine-tuned model, after the last round.
Reading: the code keeps the head in the optimiser with a learning rate of 0. Here it is not trained,
which is the same.
Reading: the paper's clients train at 0.1, and at a tenth of it after half and after three quarters
of the rounds. Here they train as in the other methods' tables. Fine-tuning takes five epochs, as in
the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Payload,
    Plan,
    Stage,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.methods.fedavg import FEDNTD_PLAN
from fedstill.methods.fit import LAST
from fedstill.methods.partly_shared import KeepsItsOwn, PartlyShared, in_head


@method("fedbabu")
@dataclass(frozen=True)
class FedBABU(PartlyShared):
    """Averages bodies that are trained under a fixed random head; at the end, every client
    fine-tunes the whole network.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"last": LAST}
    stages: ClassVar[frozenset[str]] = frozenset({"train", LAST})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.HEAD
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, LAST: FEDNTD_PLAN}
    personal: ClassVar[frozenset[str]] = frozenset({LAST})
    silent: ClassVar[frozenset[str]] = frozenset({LAST})
    has_global_model: ClassVar[bool] = True
    """The averaged body with the common head."""

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        return [name for name in entries if not in_head(name)]

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == LAST:
            return KeepsItsOwn(self, LAST)
        return BodyAlone(self, stage.name)


@dataclass(frozen=True)
class BodyAlone(KeepsItsOwn):
    """Local training of the body; all clients have the same head, and no state."""

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        content, _ = super().end(params, start, result, view, world)
        return content, NOTHING

    def trainable(self, name: str) -> bool:
        return not in_head(name)
