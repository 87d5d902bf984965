"""The census: clients send their label counts, for methods that need them.

It is a stage of its own: before round 1 (as round 0), and at the start of every task. Later stages
compare what clients claim with what they said in the census.

State: labels = (clients, C) int64, the label counts; zeros for a client that did not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.extensions import RoundHook, StageActor, StageProvider
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    KEEP,
    LABELS,
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

CENSUS = "census"
"""The name of the stage."""


class Census(ClientWork):
    """Send the label counts; nothing is trained, and client states stay as they are."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params={})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        return Payload(labels=view.counts), KEEP


@dataclass(frozen=True)
class CensusTaker(Method):
    """The actor of the stage: each client's label counts replace its earlier ones.

    A client that is absent, or fails, has zeros: it has no example that could count.
    """

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        return Payload()

    def work(self, stage: Stage) -> ClientWork:
        return Census()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(labels=torch.zeros(world.classes, dtype=torch.int64))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        labels = torch.zeros(world.clients, world.classes, dtype=torch.int64)
        for reply in replies:
            labels[reply.client] = reply.content.tensor(LABELS)
        return state.next(labels=labels)


class CensusStages(StageProvider):
    """Provides the stage: before round 1 for all clients, then wherever the clients' task
    changes.
    """

    def actors(self) -> Mapping[str, StageActor]:
        """Who takes the census."""
        return {CENSUS: CensusTaker()}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """A round's stages, after a census where one is due."""
        if round == 0:
            return [census_stage(world), *stages]
        if not world.stream.changes(round):
            return stages
        return [Stage(round, 0, CENSUS, everyone(world, round)), *stages]


def census_stage(world: World) -> Stage:
    """The stage before round 1."""
    return Stage(0, 0, CENSUS, tuple(range(world.clients)))


@dataclass(frozen=True)
class CensusChecks(RoundHook):
    """Refuses label counts that cannot be true, and claims that contradict the census.

    ``max_examples``: the most examples that a client may claim.
    """

    max_examples: int

    def check_reply(self, reply: Reply, stage: Stage, needs: Need, state: State) -> str:
        if stage.name == CENSUS:
            return self._check_counts(reply)
        if Need.LABEL_COUNTS not in needs or LABELS not in state.extra or reply.client < 0:
            return ""
        return self._check_claim(reply, state.extra.tensor(LABELS))

    def _check_counts(self, reply: Reply) -> str:
        """Why label counts are no counts of as many examples as the client claims.

        Whether they have the right form is for the screen to judge.
        """
        labels = reply.content.get(LABELS)
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
            return ""
        total = float(labels.double().sum())
        is_negative = bool((labels < 0).any())
        if is_negative or not reply.examples <= total <= self.max_examples:
            return f"its census counts {total:g} examples, and it claims {reply.examples}"
        return ""

    def _check_claim(self, reply: Reply, labels: Tensor) -> str:
        claimed = reply.examples
        counted = int(labels[reply.client].sum())
        if counted > 0:
            if claimed > counted:
                return f"claims {claimed} examples, and {counted} in the census"
            return ""
        # A client with 0 said that it has none, or its answer to the census was refused.
        largest = int(labels.sum(1).max())
        if 0 < largest < claimed:
            return f"claims {claimed} examples, and the largest client {largest} in the census"
        return ""
