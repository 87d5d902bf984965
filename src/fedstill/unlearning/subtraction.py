"""Subtraction and distillation: the leaving client's updates are subtracted from the model, which
then learns again from the old model on unlabelled public data.

Source: Wu, Zhu and Mitra, "Federated Unlearning with Knowledge Distillation" (2022), the section on
the design. Erasing historical updates: M' = M - sum over rounds of the client's part of the update,
under the assumption that the client stays and sends an update of 0 ("lazy learning"). Remedy: M'
learns at the server from the softened predictions of M on unlabelled data.
Keeps: every client's update in every round (``keep_updates``), and public data ([data] public).
Reading: the client's part of a round is the difference between the model that the server made and
the one that it makes if the client sends an update of 0. For FedAvg it is the client's update times
its weight, as in the paper.
Reading: what is not trained, such as statistics of batch normalisation, stays as it is in M.
Reading: the paper can also mix in true labels of public data, with a small weight; we use none.
Reading: the temperature, the optimiser and the length of the distillation are options, with
defaults of our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.extensions import StageActor, StageResult
from fedstill.core.fields import CountOrZero, Positive
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    SERVER,
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
from fedstill.losses import kd
from fedstill.models.contract import trainable_names
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
    check_trains_only,
    continued,
    model_of,
    repeated_stages,
    with_new_stages,
)

DISTIL = "distil_old_model"
"""The name of the stage in which the server distils."""

OLD_MODEL = "old_model"
"""The group of the state and of the payload with the model of the original run."""


@dataclass(frozen=True)
class Subtraction(Strategy):
    """Subtract the client's updates, and distil from the old model on public data."""

    stage_plans: ClassVar[Mapping[str, Plan]] = {
        DISTIL: Plan(epochs=10, batch=128, optimiser="adam", lr=0.001)
    }

    temperature: Positive = 3.0
    """The temperature of the distillation."""
    repair_rounds: CountOrZero = 0
    """The number of rounds of the remaining clients after the distillation."""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise IncompatibleMethod or ConfigError unless clients' models are averaged and kept, and
        there are public data.
        """
        check_averages(original, "subtraction")
        if not self.repair_rounds:
            check_trains_only(original, "subtraction")
        if original.prepared.sites.public is None:
            raise ConfigError(
                f"--strategy subtraction distils on public data, and {original.folder} has none; "
                "set data.public in a new run, or use --strategy retraining"
            )

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """One round for the distillation, and those of the repair."""
        last = original.last_round
        return NewRounds(first=last + 1, last=last + 1 + self.repair_rounds)

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint:
        """The old model without the client's updates, and the old model as the teacher."""
        old_model = original.final_state.params
        names = sorted(trainable_names(original.prepared.world.model(SERVER)))
        params = {name: tensor.double() for name, tensor in old_model.items() if name in names}
        for result in repeated_stages(original):
            part = part_of(original.prepared, result, request.clients)
            for name in names:
                params[name] = params[name] - part[name].double()
        trained = {name: tensor.to(old_model[name]) for name, tensor in params.items()}
        skewed = {**old_model, **trained}
        state = replace(original.final_state, params=skewed).next(groups={OLD_MODEL: old_model})
        return continued(original, prepared, state)

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """The server distils in the first new round; the clients never act again."""
        stages = SingleStageRound(
            name=DISTIL,
            actor=Distillation(schedule.method, self.temperature),
            round=first_round,
            client=SERVER,
            view="public",
        )
        without = Without(frozenset(request.clients), first_round)
        return with_new_stages(schedule, stages, without)


def part_of(prepared: Prepared, result: StageResult, clients: Sequence[int]) -> Tensors:
    """The clients' part of the change of the global model in a stage.

    Raises IncompatibleMethod for a method whose reply without any change is unknown.
    """
    method = prepared.settings.method
    replies = []
    for reply in result.accepted:
        if reply.client in clients:
            content = method.idle_reply(reply, result.payloads[reply.client])
            if content is None:
                raise IncompatibleMethod(
                    f"method {prepared.settings.named.method.label} does not say what a client "
                    "sends that changed nothing, so its updates cannot be subtracted"
                )
            reply = replace(reply, content=content)
        replies.append(reply)
    without = model_of(prepared, result, replies)
    return {name: tensor - without[name] for name, tensor in result.after.params.items()}


@dataclass(frozen=True)
class Distillation(StageActor):
    """The actor of the stage."""

    method: Method
    temperature: float

    def requires(self) -> Need:
        """What the method requires, and public data."""
        return self.method.requires() | Need.PUBLIC_DATA

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        """The model without the client's updates, and the old model."""
        return Payload({"params": state.params, OLD_MODEL: state.extra.tensors(OLD_MODEL)})

    def work(self, stage: Stage) -> ClientWork:
        """The server's distillation."""
        return LearnFromOldModel(self.temperature)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """A model."""
        return Payload(params=world.initial(client))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The server's model, without the old one."""
        return state.without(OLD_MODEL).next(params=replies[0].content.params)


@dataclass(frozen=True)
class LearnFromOldModel(ClientWork):
    """The divergence from the old model's softmax; no label is read."""

    temperature: float

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        teachers = {OLD_MODEL: payload.tensors(OLD_MODEL)}
        return TrainingStart(payload.params, teachers=teachers)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        return {"kd": kd(step.logits(), step.teacher(OLD_MODEL), self.temperature)}
