"""MetaFed: clients in a ring have personal models, and each client learns from the previous one.

Source: Chen et al., "MetaFed: Federated Learning among Federations with Cyclic Knowledge
Distillation for Personalized Healthcare" (2022), and its code.
Symbols: theta_1 = ``keeps_above``, theta_2 = ``listens_below``; lambda = ``strength``.
State: the model of the last client; ring = 1 once there is such a model.
Memory: params = the client's own model; ready = 1 once its held-out accuracy has exceeded theta_1,
0 before.
Reading: a client that is not ready starts from the weights of the previous client. A client that is
ready starts from its own weights, and aligns its features with those of the previous client. The
last stage follows the same rule, as in the code.
Reading: the code's published commands set theta_1 to 1.1, which no accuracy exceeds, so that
nothing is ever distilled. Its default is 0.6, and so is ours.
Reading: the code computes the features in a second pass in training mode. Here there is one pass.
Reading: a fifth of each client's data is held out for theta_1 and theta_2. A client that is too
small for that never becomes ready.
Reading: the members of the paper's ring are federations. Here they are clients.
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
from fedstill.core.topology import has_chain
from fedstill.core.trees import only
from fedstill.methods.public_logits import own_model
from fedstill.models import contract

WARM_UP = "warm_up"
"""The stage before round 1, in which every client trains a model alone."""

LAST = "personalise"
"""The stage after the last round, in which no model is passed on."""

METAFED_PLAN = Plan(epochs=1, batch=32, lr=0.01, validation=0.2)
"""The code's settings: one epoch a visit, batches of 32, a constant learning rate without
momentum.
"""


@method("metafed")
@dataclass(frozen=True)
class MetaFed(Method):
    """Clients in a ring train personal models: each starts from the previous client's model, and
    later aligns its features with it.
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
    """Weight of the squared distance to the features of the previous client's model (lambda)."""
    keeps_above: NonNegative = 0.6
    """Held-out accuracy above which a client keeps its own model (theta_1); above 1: no client ever
    does.
    """
    listens_below: NonNegative = 0.5
    """Accuracy of the ring's model below which, in the last stage, a client that is at least as
    good learns nothing from it (theta_2).
    """
    share_norms: bool = True
    """Whether normalisation layers with statistics are also copied."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return "in parallel rounds, there is no previous client; omit topology.kind"
        for stage in stages:
            if stage.name in world.plans and not world.plans[stage.name].validation:
                return f"accuracy on held-out data decides; set plan.{stage.name}.validation = 0.2"
        return ""

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == WARM_UP or "ring" not in state.extra:
            return Payload()
        return Payload(params=state.params)

    def work(self, stage: Stage) -> ClientWork:
        return InRing(self, stage.name)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if not stage.sequential:
            return NOTHING
        return Payload(params=world.initial(client))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if not stage.sequential:
            return state
        return state.next(params=replies[0].content.params, ring=1)


@dataclass(frozen=True)
class InRing(ClientWork):
    """Training of the previous client's model, or of the client's own model near the other model's
    features. The first client of the ring trains its own model alone.
    """

    method: MetaFed
    stage: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = own_model(client_state, view, world)
        ready = 0
        if client_state:
            ready = int(client_state.number("ready"))
        if not payload:
            return TrainingStart(params, constants={"ready": ready})
        if not ready:
            received = dict(payload.params)
            if not self.method.share_norms:
                # Entries that are not trained (train_only) are not sent.
                own_norms = [name for name in statistics(view.model) if name in params]
                received |= only(params, own_norms)
            return TrainingStart(received, constants={"ready": ready})

        strength = self.method.strength
        if self.stage == LAST:
            accuracy = self.held_out_accuracy(params, view)
            strength *= self.strength_factor(accuracy, self.held_out_accuracy(payload.params, view))
        return TrainingStart(
            params,
            teachers={"before": payload.params},
            constants={"ready": ready, "strength": strength},
        )

    def strength_factor(self, accuracy: float, previous_accuracy: float) -> float:
        """The factor of lambda in the last stage, from the held-out accuracies of the client's
        model and the previous client's: 0, or from near 0 to 1.
        """
        gain = previous_accuracy - accuracy
        if gain <= 0 and previous_accuracy < self.method.listens_below:
            return 0.0
        return float(10 ** min(1.0, 5 * gain) / 10)

    def held_out_accuracy(self, params: Tensors, view: View) -> float:
        """The accuracy on held-out data; 0 without held-out data."""
        return self.validation_score(params, view) or 0.0

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if "before" not in start.teachers:
            return super().terms(step, start)
        distance = step.features() - step.teacher_features("before")  # (B, D)
        error = distance.square().mean(1)  # (B,)
        return {**super().terms(step, start), "features": start["strength"] * error}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        ready = start["ready"] or self.held_out_accuracy(params, view) > self.method.keeps_above
        client_state = Payload(params=params, ready=int(ready))
        if self.stage != "train":
            return NOTHING, client_state
        return Payload(params=params), client_state


def statistics(spec: ModelSpec) -> list[str]:
    """The entries of layers that normalise by statistics."""
    network = contract.module(spec)
    names = []
    for name in network.state_dict():
        layer, _, _ = name.rpartition(".")
        if isinstance(network.get_submodule(layer), contract.NORMS):
            names.append(name)
    return names
