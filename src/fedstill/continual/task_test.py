"""Stages in which real sites only test the model that answers for them on their own data.

``task_test``: at each task's end, on their test sets of the tasks so far. ``held_out_test``: after
every round, on the examples that they hold out, to compare rounds by. ``site_test``: every few
rounds, on their test sets; the two other stages do that, too.
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
from fedstill.models.contract import Predictor

TASK_TEST = "task_test"
"""The name of the stage at a task's end."""

HELD_OUT_TEST = "held_out_test"
"""The name of the stage after every round in a run that compares rounds."""

SITE_TEST = "site_test"
"""The name of the stage every few rounds in a run that does not compare rounds."""

TEST_STAGES = frozenset({TASK_TEST, HELD_OUT_TEST, SITE_TEST})
"""The names of all three."""


class BeTested(ClientWork):
    """Test the model that was sent: nothing is trained or sent; the client reports the accuracy."""

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
class OnlyTest(Method):
    """The actor of the stage, for any method whose server has the model that answers for a client.
    A client with a network of its own is not asked.

    ``tested``: the method of the run.
    """

    tested: Method = field(default_factory=Method)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        network = state.model or world.model(SERVER)
        params = state.params
        if self.tested.has_client_predictors:
            name = self.tested.client_predictors(state, world)[client]
            predict = self.tested.predictors(state, world)[name]
            if not isinstance(predict, Predictor):
                return None
            network = predict.spec
            params = predict.params
        if not params or world.model(client) != network:
            return None
        return Payload(params=params)

    def work(self, stage: Stage) -> ClientWork:
        return BeTested()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return NOTHING

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state


@dataclass(frozen=True)
class TaskTests(StageProvider):
    """Provides the stage, as the last one of the round in which a task ends."""

    method: Method

    def actors(self) -> Mapping[str, StageActor]:
        """Who acts in the stage."""
        return {TASK_TEST: OnlyTest(self.method)}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """A round's stages, before a test where a task ends."""
        if round == 0 or not world.stream.ends(round):
            return stages
        return [*stages, Stage(round, 0, TASK_TEST, everyone(world, round))]


@dataclass(frozen=True)
class RoundInterval:
    """Every ``every`` rounds, and the last one."""

    every: int
    last: int

    def __contains__(self, round: int) -> bool:
        return round > 0 and (round % self.every == 0 or round == self.last)


@dataclass(frozen=True)
class RoundTests(StageProvider):
    """Provides a stage in which sites test, as the last one of a round.

    ``name``: the name of the stage, ``held_out_test`` or ``site_test``. ``rounds``: those with the
    stage; None for all.
    """

    method: Method
    name: str
    rounds: RoundInterval | None = None

    def actors(self) -> Mapping[str, StageActor]:
        """Who acts in the stage."""
        return {self.name: OnlyTest(self.method)}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """A round's stages, before a test by all clients.

        At the end of a task, sites test their test sets anyway.
        """
        if round == 0 or (self.rounds is not None and round not in self.rounds):
            return stages
        if self.name == SITE_TEST and any(stage.name == TASK_TEST for stage in stages):
            return stages
        return [*stages, Stage(round, 0, self.name, everyone(world, round))]
