"""FedEraser: the kept updates of the other clients are applied again from the start, each with its
old length in a new direction, for which its client trains a little.

Source: Liu, Ma, Yang, Wang and Liu, "FedEraser: Enabling Efficient Client-Level Data Removal from
Federated Learning Models" (2021), the section on the design: calibration training, update
calibrating, calibrated update aggregating, and unlearned model updating; official code,
``Fed_Unlearn_base``, from which the defaults are. The paper's experiments use ``interval`` 2.
Symbols: U = the change of a client in a round of the original run; Û = the change of the same
client from the new model, with fewer epochs; the calibrated change is |U| Û / |Û|; the calibration
ratio r = ``epochs_share``; the interval Delta t = ``interval``.
Keeps: every client's update in every round (``keep_updates``).
Reading: as in the official code, norms are taken tensor by tensor, the first kept round is applied
without calibration, and a client trains the share ``epochs_share`` of its epochs, rounded up.
Reading: the official code calibrates the mean of the updates, the paper each client's; we follow
the paper, and average as the run's method does. The code also measures U from the global model
after the round; in the paper and here, U is measured from the model before it.
Reading: what is not trained, such as statistics of batch normalisation, is averaged from the new
replies, since a direction of them means nothing.
Reading: the learning rate is that of the original round, if it is constant or falls by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.extensions import StageActor, StageProvider, StageResult
from fedstill.core.fields import Count, PositiveShare
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import SERVER, Payload, Plan, Reply, Stage, State, Tensors, World
from fedstill.core.rounds import Schedule
from fedstill.core.topology import Topology
from fedstill.models.contract import trainable_names
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Without
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import (
    TRAIN,
    NewRounds,
    OriginalRun,
    StartPoint,
    Strategy,
    check_averages,
    check_trains_only,
    continued,
    model_of,
    repeated_stages,
    replies_without,
    with_new_stages,
)

CALIBRATE = "calibrate"
"""The name of the stage."""

NORMS = "old_norms"
"""The group of the state with the norms of the original updates: by round and client, (tensors,)
float64 in the order of the names of trained tensors.
"""


@dataclass(frozen=True)
class FedEraser(Strategy):
    """Apply the kept updates of the other clients again, in new directions."""

    stage_plans: ClassVar[Mapping[str, Plan]] = {CALIBRATE: Plan()}

    epochs_share: PositiveShare = 0.5
    """The share of a client's epochs in a calibration."""
    interval: Count = 1
    """The number of original rounds between two that are used."""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise IncompatibleMethod or ConfigError unless clients' models are averaged and kept."""
        check_averages(original, "federaser")
        check_trains_only(original, "federaser")

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """A round for each kept round that is calibrated; at least one."""
        last = original.last_round
        used = self.used_rounds(last)
        return NewRounds(first=last + 1, last=last + len(used))

    def used_rounds(self, last: int) -> list[int]:
        """The original rounds that are calibrated. The first of the run is applied as it is, unless
        it is the only one.
        """
        rounds = list(range(1, last + 1, self.interval))
        return rounds[1:] or rounds

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint:
        """The model after the first round without the client, and the norms of all updates."""
        used = self.used_rounds(original.last_round)
        norms: dict[str, Tensor] = {}
        params = original.prepared.world.initial(SERVER)
        names = sorted(trainable_names(original.prepared.world.model(SERVER)))
        for result in repeated_stages(original):
            number = result.stage.round
            if result.stage.name != TRAIN:
                continue
            if number == 1 and number not in used:
                replies = replies_without(result, request.clients)
                params = dict(model_of(original.prepared, result, replies))
            if number in used:
                norms |= _norms(result, request.clients, names)
        state = replace(original.final_state, params=params).next(groups={NORMS: norms})
        return continued(original, prepared, state)

    def plans(self, original: OriginalRun) -> Mapping[str, Plan]:
        """The run's plan with fewer epochs, and the learning rates of the original rounds.

        Raises IncompatibleMethod if no plan can have these rates.
        """
        plan = original.settings.plans[TRAIN]
        epochs = math.ceil(self.epochs_share * plan.epochs)
        steps = math.ceil(self.epochs_share * plan.steps)
        plan = replace(plan, epochs=epochs, steps=steps)
        if plan.lr_schedule != "constant" or plan.lr_warmup:
            return {CALIBRATE: plan}
        decay = plan.lr_decay**self.interval
        first = self.used_rounds(original.last_round)[0]
        rounds = original.last_round
        try:
            # In the original rounds, this rate falls to that of the first calibrated round.
            lr = plan.lr_at(first) / decay**rounds
            return {CALIBRATE: replace(plan, lr=lr, lr_decay=decay)}
        except (ConfigError, ZeroDivisionError) as error:
            raise IncompatibleMethod(
                f"--strategy federaser is not possible here: in {rounds} rounds, plan.lr_decay "
                "lowers the learning rate too far to repeat its course in further rounds; use "
                "retraining"
            ) from error

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """Each new round is the calibration of an original one."""
        stages = CalibrationStages(
            method=schedule.method,
            topology=schedule.topology,
            first_round=first_round,
            originals=tuple(self.used_rounds(first_round - 1)),
        )
        without = Without(frozenset(request.clients), first_round)
        return with_new_stages(schedule, stages, without)


def _norms(result: StageResult, clients: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
    """The norms of the remaining clients' updates in a stage, by round and client."""
    norms = {}
    for reply in replies_without(result, clients):
        change = [
            reply.content.params[name].double() - result.before.params[name].double()
            for name in names
        ]
        key = norm_key(result.stage.round, reply.client)
        norms[key] = torch.stack([tensor.norm() for tensor in change]).cpu()
    return norms


def norm_key(round: int, client: int) -> str:
    """The name of a client's norms of an original round."""
    return f"{round}.{client}"


def calibrated(start: Tensors, trained: Tensors, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model ``start`` + |U| Û / |Û|, tensor by tensor; where Û is 0, ``start``.

    trained: the client's model, ``start`` + Û. norms: () by name, |U|. Tensors without a norm are
    those of ``trained``.
    """
    model = dict(trained)
    for name, norm in norms.items():
        change = trained[name] - start[name]
        length = change.norm()
        if length > 0:
            model[name] = start[name] + (norm / length).to(change) * change
        else:
            model[name] = start[name]
    return model


@dataclass(frozen=True)
class CalibrationStages(StageProvider):
    """Replaces the stages of each new round by the calibration of an original round.

    ``originals``: the original rounds, in order.
    """

    method: Method
    topology: Topology
    first_round: int
    originals: tuple[int, ...]

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the calibration."""
        return {CALIBRATE: Calibration(self.method, self)}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The clients of the original round in one stage."""
        if round < self.first_round:
            return stages
        return [
            Stage(round, 0, CALIBRATE, stage.clients)
            for stage in self.topology(self.original(round), world)
            if stage.name == TRAIN
        ]

    def original(self, round: int) -> int:
        """The original round that a new one calibrates."""
        return self.originals[round - self.first_round]


@dataclass(frozen=True)
class Calibration(StageActor):
    """The actor of the stage."""

    method: Method
    stages: CalibrationStages

    def requires(self) -> Need:
        """What the method requires."""
        return self.method.requires()

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """The payload of the method; None for a client whose original reply was refused."""
        if self._key(client, stage) not in state.extra.tensors(NORMS):
            return None
        return self.method.payload_for_client(state, client, as_training(stage), world)

    def work(self, stage: Stage) -> ClientWork:
        """The work of the method."""
        return self.method.work(as_training(stage))

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """The reply of the method."""
        return self.method.expected_reply(client, as_training(stage), world)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The method's average of the calibrated models."""
        names = sorted(trainable_names(world.model(SERVER)))
        norms = state.extra.tensors(NORMS)
        changed = []
        for reply in replies:
            lengths = norms[self._key(reply.client, stage)]
            by_name = dict(zip(names, lengths, strict=True))
            model = calibrated(state.params, reply.content.params, by_name)
            content = Payload({**reply.content, "params": model})
            changed.append(replace(reply, content=content))
        return self.method.aggregate(state, changed, as_training(stage), world)

    def _key(self, client: int, stage: Stage) -> str:
        return norm_key(self.stages.original(stage.round), client)


def as_training(stage: Stage) -> Stage:
    """The stage as the method knows it."""
    return replace(stage, name=TRAIN)
