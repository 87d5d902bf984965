"""Stages in which real sites only test the global model on their own data.

``task_test``: at each task's end, on their test sets of the tasks so far. ``held_out_test``: after
every round, on the examples that they hold out, to compare rounds by. ``site_test``: after every
round, on their test sets, for the metrics of the run; ``held_out_test`` does that, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstill.core.extensions import StageActor, StageProvider
from fedstill.core.method import Method
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
from fedstill.core.work import ClientWork

TASK_TEST = "task_test"
"""The name of the stage at a task's end."""

HELD_OUT_TEST = "held_out_test"
"""The name of the stage after every round in a run that compares rounds."""

SITE_TEST = "site_test"
"""The name of the stage after every round in a run that only records metrics."""

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
    """The actor of the stage, for any method with a global model. A client with a network of its
    own is not asked.
    """

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        same = world.model(client) == (state.model or world.model(SERVER))
        return Payload(params=state.params) if state.params and same else None

    def work(self, stage: Stage) -> ClientWork:
        return BeTested()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return NOTHING

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state


class TaskTests(StageProvider):
    """Provides the stage, as the last one of the round in which a task ends."""

    def actors(self) -> Mapping[str, StageActor]:
        """Who acts in the stage."""
        return {TASK_TEST: OnlyTest()}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """A round's stages, before a test where a task ends."""
        if round == 0 or not world.stream.ends(round):
            return stages
        return [*stages, Stage(round, 0, TASK_TEST, everyone(world, round))]


class _TestStage(StageProvider):
    """Provides a stage as the last one of every round. ``name``: that of the stage."""

    name: ClassVar[str]

    def actors(self) -> Mapping[str, StageActor]:
        """Who acts in the stage."""
        return {self.name: OnlyTest()}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """A round's stages, before a test by all clients."""
        if round == 0:
            return stages
        return [*stages, Stage(round, 0, self.name, everyone(world, round))]


class HeldOutTestStage(_TestStage):
    """Provides the stage ``held_out_test``."""

    name = HELD_OUT_TEST


class SiteTestStage(_TestStage):
    """Provides the stage ``site_test``."""

    name = SITE_TEST
