"""Stages in which real sites evaluate their answer (the model that they would use) on their own
data, without training.

``task_test`` is the stage at the end of a task; it uses the test sets of all tasks so far.
``held_out_test`` takes place after every round and uses the held-out examples, to compare rounds.
``site_test`` takes place every few rounds and uses the test sets. The first two stages also
evaluate on the test sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedstill.core.extensions import StageActor, StageProvider
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    KEEP,
    NOTHING,
    SERVER,
    Keep,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.topology import everyone
from fedstill.models.predictors import Predictor

TASK_TEST = "task_test"
"""The stage at the end of a task."""

HELD_OUT_TEST = "held_out_test"
"""The stage after every round, in a run that compares rounds."""

SITE_TEST = "site_test"
"""The stage every few rounds, in a run that does not compare rounds."""

TEST_STAGES = frozenset({TASK_TEST, HELD_OUT_TEST, SITE_TEST})
"""The names of all stages that only evaluate."""


class ModelTestWork(ClientWork):
    """The client evaluates the model that it received. It trains and sends nothing, and reports the
    accuracy.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params=payload.params)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        return NOTHING, KEEP


@dataclass(frozen=True)
class ModelTest(Method):
    """The server's part of the stage, for any method whose server has the clients' answers.

    It sends each client its answer. A client with another network than the server does not take
    part. ``run_method`` is the method of the run.
    """

    run_method: Method = field(default_factory=Method)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        network = state.model or world.model(SERVER)
        params = state.params
        if self.run_method.has_client_predictors:
            name = self.run_method.client_predictors(state, world)[client]
            predict = self.run_method.predictors(state, world)[name]
            if not isinstance(predict, Predictor):
                return None
            network = predict.spec
            params = predict.params
        if not params or world.model(client) != network:
            return None
        return Payload(params=params)

    def work(self, stage: Stage) -> ClientWork:
        return ModelTestWork()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return NOTHING

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state


@dataclass(frozen=True)
class TaskTests(StageProvider):
    """Adds the stage ``task_test`` to the end of every round in which a task ends."""

    method: Method

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the stage, by the stage's name."""
        return {TASK_TEST: ModelTest(self.method)}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round, followed by a test if a task ends."""
        if round == 0 or not world.stream.ends(round):
            return stages
        return [*stages, Stage(round, 0, TASK_TEST, everyone(world, round))]


@dataclass(frozen=True)
class RoundInterval:
    """Every ``interval``-th round, and the last one."""

    interval: int
    last: int

    def __contains__(self, round: int) -> bool:
        return round > 0 and (round % self.interval == 0 or round == self.last)


@dataclass(frozen=True)
class RoundTests(StageProvider):
    """Adds a stage in which sites evaluate their answers to the end of a round.

    ``name`` is the name of the stage, ``held_out_test`` or ``site_test``. ``rounds`` are the rounds
    with this stage; None means all.
    """

    method: Method
    name: str
    rounds: RoundInterval | None = None

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the stage, by the stage's name."""
        return {self.name: ModelTest(self.method)}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round, followed by a test by all clients.

        A ``site_test`` is left out at the end of a task, because ``task_test`` uses the same sets.
        """
        if round == 0 or (self.rounds is not None and round not in self.rounds):
            return stages
        if self.name == SITE_TEST and any(stage.name == TASK_TEST for stage in stages):
            return stages
        return [*stages, Stage(round, 0, self.name, everyone(world, round))]
