"""QKT Light: phase 1 is naive KD, which is independent of the query and can be done once for all
clients; phase 2 is QKT's.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), appendix A.4.
State: no global parameters; model.N = the model that client N trained alone; size.N = its number of
examples; student.N = client N's model after its own last phase; shared = the model of phase 1, if
one client or the server executes it for all.
Memory: peer.N = the model of client N, between the phases, if each client executes phase 1 itself.
Reading: with "student data" (``qkt_light``), each client executes phase 1 on its own data. With
"volunteer client", the client with the most examples executes it for all. With "centralized
server", the server executes it on public images without reading their labels.
Reading: phase 1 is eq. 1, a sum over the teachers, and phase 2 is eq. 4, also a sum; both are the
defaults. With the mean in phase 1, a client loses less accuracy on its own classes, which is closer
to the published rows (docs/results/qkt.md). So the recipes of the paper's tables use it
(``phase1_over``).
Reading: the server starts from the volunteer's model, or (``start``) from the mean of all models.
Reading: phase 2 "replaces the head". But if phase 1 is shared, a client's own head belongs to
another extractor, and the head of phase 1 is refined instead. ``head`` decides; "auto" follows this
reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.core.trees import mean
from fedstill.losses import kd
from fedstill.methods.fit import FIT, FITTING, fitted_models
from fedstill.methods.naive_kd import TRANSFER, TRANSFERRING, Distilled
from fedstill.methods.qkt import QKT, REFINE

TRANSFER_SERVER = "transfer_server"


@method("qkt_light")
@method(
    "qkt_light_volunteer",
    about="QKT Light in which one client runs phase 1 for all clients.",
    phase1="volunteer",
)
@dataclass(frozen=True)
class QKTLight(QKT):
    """Naive KD of all classes, then QKT's refinement of the head for the queried classes."""

    plans: ClassVar[Mapping[str, Plan]] = {
        **QKT.plans,
        REFINE: replace(QKT.plans[REFINE], epochs=5),
    }

    head: Literal["auto", "local", "phase1"] = "auto"  # type: ignore[assignment]
    """The head that phase 2 starts from; "auto" is "local" where each client did phase 1 for
    itself, else "phase1".
    """
    phase1: Literal["student", "volunteer"] = "student"
    """Who runs phase 1: each student for itself, or the student with most examples for all."""
    phase1_over: Literal["sum", "mean", "same"] = "same"
    """Whether phase 1, which is naive KD, is the sum over the teachers or their mean; "same": as
    ``over_teachers``.
    """

    def requires(self) -> Need:
        if self.phase1 == "volunteer":
            return self.needs | Need.SAME_SHAPES
        return self.needs

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == TRANSFER and self.phase1 == "volunteer":
            if client != volunteer(state, stage.clients):
                return None
            return self.with_peers(state, client, world)
        return super().payload_for_client(state, client, stage, world)

    def joined(self, divergences: Tensor) -> Tensor:
        if self.phase1_over == "same":
            return super().joined(divergences)
        if self.phase1_over == "mean":
            return divergences.mean(0)
        return divergences.sum(0)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == TRANSFER:
            return DistilledForQuery(self)
        return super().work(stage)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == TRANSFER and self.phase1 == "volunteer":
            return state.next(shared=replies[0].content.params)
        return super().aggregate(state, replies, stage, world)

    def after_phase1(self, state: State, client: int) -> Tensors | None:
        if "shared" in state.extra:
            return state.extra.tensors("shared")
        return super().after_phase1(state, client)

    @property
    def old_head(self) -> bool:
        return self.head == "local" or (self.head == "auto" and self.phase1 == "student")

    @property
    def keeps_peers(self) -> bool:
        return self.phase1 == "student"


@dataclass(frozen=True)
class DistilledForQuery(Distilled):
    """Naive KD, after which a client stores the models of its peers for phase 2."""

    method: QKTLight

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(params=params), self.method.kept_peers(start)


@method("qkt_light_server")
@dataclass(frozen=True)
class QKTLightServer(QKTLight):
    """QKT Light in which the server runs phase 1 for all clients, on unlabelled public data."""

    schedule: ClassVar[Mapping[str, Any]] = {"server": TRANSFER_SERVER, "transfer": False}
    stages: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER_SERVER, REFINE})
    needs: ClassVar[Need] = QKT.needs | Need.PUBLIC_DATA | Need.SAME_SHAPES
    plans: ClassVar[Mapping[str, Plan]] = {
        FIT: FITTING,
        TRANSFER_SERVER: TRANSFERRING,
        REFINE: QKTLight.plans[REFINE],
    }
    personal: ClassVar[frozenset[str]] = frozenset({FIT, REFINE})

    phase1: Literal["server"] = "server"  # type: ignore[assignment]
    """Who runs phase 1: the server, for all."""
    start: Literal["volunteer", "mean"] = "volunteer"
    """Start of the server's training: the model of the client with most examples, or the mean of
    all models.
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not any(stage.name == TRANSFER_SERVER for stage in stages):
            return f"this method needs a server stage; set topology.server = {TRANSFER_SERVER!r}"
        return super().incompatibility(stages, world)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name != TRANSFER_SERVER:
            return super().payload_for_client(state, client, stage, world)
        models = fitted_models(state)
        if not models:
            return None
        params: Tensors = models[volunteer(state)]
        if self.start == "mean":
            params = mean(list(models.values()), [1.0] * len(models))
        return Payload({"params": params, **many("peer", models)})

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == TRANSFER_SERVER:
            return Unlabelled(self)
        return super().work(stage)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == TRANSFER_SERVER:
            return state.next(shared=replies[0].content.params)
        return super().aggregate(state, replies, stage, world)


@dataclass(frozen=True)
class Unlabelled(Distilled):
    """The sum or the mean of the divergences over all models; no label is read."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        teachers = torch.stack([step.teacher(name) for name in start.teachers])  # (T, B, C)
        divergences = kd(step.logits(), teachers, self.method.temperature)  # (T, B)
        return {"teachers": self.method.joined(divergences)}


def volunteer(state: State, candidates: Sequence[int] | None = None) -> int:
    """The client with the most examples among all clients or some candidates; ties go to the first;
    -1 if none has a trained model.
    """
    sizes = {
        client: state.extra.number(f"size.{client}")
        for client in fitted_models(state)
        if candidates is None or client in candidates
    }
    return max(sizes, key=lambda client: (sizes[client], -client), default=-1)
