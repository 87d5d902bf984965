"""MetaFed: clients in a ring keep models of their own, and each learns from the one before it.

Source: Chen et al., "MetaFed: Federated Learning among Federations with Cyclic Knowledge
Distillation for Personalized Healthcare" (2022), and its code.
Symbols: theta_1 = ``keeps_above``, theta_2 = ``listens_below``; lambda = ``strength``.
State: the model of the client that acted last; ring = 1 once there is one.
Memory: params = the client's own model; ready = 1 from when its held-out accuracy has exceeded
theta_1, 0 before.
Reading: a client that is not ready takes over the weights of the one before and trains them; one
that is ready keeps its own, and is drawn to the other's features. The code's last stage goes by the
same rule, and so does this one.
Reading: the code's published commands set theta_1 to 1.1, which no accuracy exceeds: then nothing
is ever distilled. Its default is 0.6; ours, too.
Reading: the code takes the features in a second pass in training mode; here there is one pass.
Reading: a fifth of each client's data is held out for theta_1 and theta_2; a client that is too
small for that never becomes ready.
Reading: the paper's rounds are of federations; here a federation is a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    NOTHING,
    ModelSpec,
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
)
from fedstill.core.registry import method
from fedstill.core.topology import has_links
from fedstill.core.trees import only
from fedstill.methods.public_logits import own_model
from fedstill.models import contract

WARM_UP, LAST = "warm_up", "personalise"

METAFED_PLAN = Plan(epochs=1, batch=32, lr=0.01, validation=0.2)
"""The code's settings: one epoch a visit, batches of 32, a constant learning rate without
momentum.
"""


@method("metafed")
@dataclass(frozen=True)
class MetaFed(Method):
    """Models of each client's own, along a ring: taken over from the client before, and later drawn
    to its features.
    """

    topology: ClassVar[str] = "sequential"
    schedule: ClassVar[Mapping[str, Any]] = {"order": "fixed", "first": WARM_UP, "last": LAST}
    stages: ClassVar[frozenset[str]] = frozenset({WARM_UP, "train", LAST})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES
    plans: ClassVar[Mapping[str, Plan]] = {
        WARM_UP: Plan(epochs=30, batch=32, lr=0.01, validation=0.2),
        "train": METAFED_PLAN,
        LAST: METAFED_PLAN,
    }
    personal: ClassVar[frozenset[str]] = frozenset({WARM_UP, "train", LAST})

    strength: NonNegative = 1.0
    """Weight of the squared distance to the features of the model before (lambda)."""
    keeps_above: NonNegative = 0.6
    """Held-out accuracy above which a client keeps its own model (theta_1); above 1: none ever
    does.
    """
    listens_below: NonNegative = 0.5
    """Accuracy of the ring's model below which, in the last stage, a client as good learns nothing
    of it (theta_2).
    """
    share_norms: bool = True
    """Whether layers that normalise by statistics are taken over with the rest."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_links(stages):
            return "side by side there is no client before; leave topology.kind out"
        blind = [
            s.name for s in stages if s.name in world.plans and not world.plans[s.name].validation
        ]
        return (
            f"accuracy on held-out data decides; set plan.{blind[0]}.validation = 0.2"
            if blind
            else ""
        )

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return (
            Payload(params=state.params)
            if "ring" in state.extra and stage.name != WARM_UP
            else Payload()
        )

    def work(self, stage: Stage) -> ClientWork:
        return InRing(self, stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=world.initial(client)) if stage.sequential else NOTHING

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state.next(params=replies[0].content.params, ring=1) if stage.sequential else state


@dataclass(frozen=True)
class InRing(ClientWork):
    """Training of the model before, or of the client's own near the other's features; of its own
    alone without one.
    """

    method: MetaFed
    stage: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        own, ready = (
            own_model(client_state, view, world),
            int(client_state.number("ready")) if client_state else 0,
        )
        if not payload:
            return TrainingStart(own, constants={"ready": ready})
        if not ready:
            kept = () if self.method.share_norms else statistics(view.model)
            return TrainingStart({**payload.params, **only(own, kept)}, constants={"ready": ready})
        strength = self.method.strength
        if self.stage == LAST:
            strength *= self.listens(self.right(own, view), self.right(payload.params, view))
        return TrainingStart(
            own,
            teachers={"before": payload.params},
            constants={"ready": ready, "strength": strength},
        )

    def listens(self, own: float, other: float) -> float:
        """What lambda is multiplied by in the last stage, from held-out accuracies: 0, or from near
        0 to 1.
        """
        worse = other <= own and other < self.method.listens_below
        return 0.0 if worse else float(10 ** min(1.0, 5 * (other - own)) / 10)

    def right(self, params: Tensors, view: View) -> float:
        """Accuracy on held-out data; 0 without any."""
        return self.validation_score(params, view) or 0.0

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if "before" not in start.teachers:
            return super().terms(step, start)
        apart = (step.features() - step.teacher_features("before")).square().mean(1)  # (B,)
        return {**super().terms(step, start), "features": start["strength"] * apart}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        ready = int(start["ready"] or self.right(params, view) > self.method.keeps_above)
        return Payload(params=params) if self.stage == "train" else NOTHING, Payload(
            params=params, ready=ready
        )


def statistics(spec: ModelSpec) -> list[str]:
    """The entries of layers that normalise by statistics."""
    m = contract.module(spec)
    return [
        k
        for k in m.state_dict()
        if isinstance(m.get_submodule(k.rpartition(".")[0]), contract.NORMS)
    ]
