"""Projected gradient ascent: the leaving client raises the loss on its own data, near the model of
the other clients; these then repair the model in a few rounds.

Source: Halimi, Kadhe, Rawat and Baracaldo, "Federated Unlearning: How to Efficiently Erase a Client
in FL?" (2022), the section on unlearning with projected gradient ascent; official code,
IBM/federated-unlearning, from which the defaults are.
Symbols: w_ref = the average of the other clients' models in the last round, from which the ascent
starts; delta = the radius of the ball around w_ref to which every step is projected.
Keeps: the updates of the last round, and the last update of the leaving client (``keep_updates``).
Reading: the paper computes w_ref from the global model, which is the mean of all clients' models.
We average the kept models as the run's method does; that is the same where all clients act in every
round. If the client did not act in the last round, w_ref is the global model.
Reading: delta is a hyperparameter of the paper. As in the code, its square is a third of the mean
squared distance between w_ref and ten random models, which are drawn as initial models are.
Reading: the paper stops when the accuracy on validation data falls below a threshold, the code when
the squared distance to the client's last model exceeds 2.2; we follow the code, whose threshold
suits its network and data. The distance is looked at after each step, so there is at least one
step; later steps that begin beyond it change nothing.
Reading: distances are over trained tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.extensions import StageActor
from fedstill.core.fields import Count, Positive
from fedstill.core.keys import seed_for
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    SERVER,
    Group,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingStart,
    View,
    World,
)
from fedstill.core.rounds import Schedule
from fedstill.losses import cross_entropy
from fedstill.models import contract
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Without
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import (
    NewRounds,
    OriginalRun,
    SingleStageRound,
    StartPoint,
    Strategy,
    check_averages,
    continued,
    model_of,
    repeated_stages,
    replies_without,
    with_new_stages,
)

ASCEND = "ascend"
"""The name of the stage in which the leaving client acts."""

LAST_MODEL = "last_model"
"""The group of the state and of the payload with the last model of the leaving client."""

RADIUS = "radius"
"""The number delta in the state and in the payload."""

RANDOM_MODELS = 10
"""How many random models the radius is computed from."""

STOP_DISTANCE = math.sqrt(2.2)
"""The distance of the official code, which squares it."""


@dataclass(frozen=True)
class GradientAscent(Strategy):
    """The client raises its own loss near the model of the others, who then repair the model."""

    stage_plans: ClassVar[Mapping[str, Plan]] = {
        ASCEND: Plan(epochs=5, batch=128, lr=0.01, momentum=0.9, clip_norm=5.0)
    }

    farewell_stage: ClassVar[str] = ASCEND

    repair_rounds: Count = 5
    """The number of rounds of the remaining clients after the ascent."""
    stop_distance: Positive = STOP_DISTANCE
    """The distance from the client's last model at which the ascent stops."""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise IncompatibleMethod or ConfigError unless one client leaves a run that averages."""
        check_averages(original, "gradient_ascent")
        if len(request.clients) > 1:
            raise IncompatibleMethod(
                "--strategy gradient_ascent forgets one client, which raises its own loss; use "
                "another --strategy for several"
            )

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """One round for the ascent, and those of the repair."""
        last = original.last_round
        return NewRounds(first=last + 1, last=last + 1 + self.repair_rounds)

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint:
        """The model of the other clients, with what the ascent needs."""
        last_model: Tensors | None = None
        reference: Tensors = original.final_state.params
        for result in repeated_stages(original):
            for reply in result.accepted:
                if reply.client in request.clients:
                    last_model = reply.content.params
            if result.stage.round == original.last_round:
                others = replies_without(result, request.clients)
                reference = model_of(original.prepared, result, others)
        if last_model is None:
            raise IncompatibleMethod(
                f"client {request.clients[0]} never took part in {original.folder}; the model has "
                "nothing to forget"
            )
        radius = radius_around(reference, original.prepared.world)
        extras: dict[str, Group] = {LAST_MODEL: last_model, RADIUS: radius}
        state = replace(original.final_state, params=reference).next(groups=extras)
        return continued(original, prepared, state)

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """The client acts in the first new round, and never again."""
        stages = SingleStageRound(
            name=ASCEND,
            actor=Ascent(schedule.method, self.stop_distance),
            round=first_round,
            client=request.clients[0],
        )
        without = Without(frozenset(request.clients), first_round + 1)
        return with_new_stages(schedule, stages, without)


def radius_around(reference: Tensors, world: World) -> float:
    """The radius whose square is a third of the mean squared distance between a model and ten
    random models of its architecture.
    """
    spec = world.model(SERVER)
    names = contract.trainable_names(spec)
    squares = []
    for number in range(RANDOM_MODELS):
        seed = seed_for(world.seed, 0, number, SERVER, "random model")
        random_model = contract.initial(spec, seed)
        squares.append(float(distance(reference, random_model, names)) ** 2)
    return math.sqrt(sum(squares) / len(squares) / 3)


def distance(model: Tensors, centre: Tensors, names: Sequence[str] | set[str]) -> Tensor:
    """The L2 distance () of two models over some tensors, in float64."""
    squares = [(model[name].double() - centre[name].double()).square().sum() for name in names]
    return torch.stack(squares).sum().sqrt()


def projected(model: Tensors, centre: Tensors, radius: float) -> dict[str, Tensor]:
    """The point of the ball around ``centre`` that is nearest to a model."""
    length = distance(model, centre, list(model))
    factor = (radius / length.clamp(min=radius)).float()
    return {
        name: centre[name] + factor.to(tensor) * (tensor - centre[name])
        for name, tensor in model.items()
    }


@dataclass(frozen=True)
class Ascent(StageActor):
    """The actor of the stage."""

    method: Method
    stop_distance: float

    def requires(self) -> Need:
        """What the method requires."""
        return self.method.requires()

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        """The model of the other clients, the client's last model and the radius."""
        return Payload(
            {
                "params": state.params,
                LAST_MODEL: state.extra.tensors(LAST_MODEL),
                RADIUS: state.extra.number(RADIUS),
            }
        )

    def work(self, stage: Stage) -> ClientWork:
        """The client's ascent."""
        return RaiseLoss(self.stop_distance)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """A model."""
        return Payload(params=world.initial(client))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The client's model, without what the ascent needed."""
        return state.without(LAST_MODEL, RADIUS).next(params=replies[0].content.params)


@dataclass(frozen=True)
class RaiseLoss(ClientWork):
    """Raise the cross-entropy inside a ball around the received model."""

    stop_distance: float

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        names = sorted(contract.trainable_names(view.model))
        last_model = payload.tensors(LAST_MODEL)
        constants = {
            "reference": {name: payload.params[name] for name in names},
            LAST_MODEL: {name: last_model[name] for name in names},
            RADIUS: payload.number(RADIUS),
        }
        return TrainingStart(params=payload.params, constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        return {"ascent": -step.weighted(cross_entropy(step.logits(), step.y))}

    def after_step(
        self, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors, start: TrainingStart
    ) -> tuple[Tensors, Tensors]:
        nearest = projected(after, start["reference"], start[RADIUS])
        is_far = distance(before, start[LAST_MODEL], list(before)) > self.stop_distance
        has_moved = distance(before, start["reference"], list(before)) > 0
        is_over = is_far & has_moved
        stopped = {name: torch.where(is_over, before[name], nearest[name]) for name in after}
        return stopped, trace
