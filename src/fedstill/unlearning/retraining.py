"""Retraining: the run once more without the forgotten data. It is exact.

Reading: "as if the data had never been used" is read as the run with the same config and the table
``[unlearning]``. Client ids, the split of all other data, samples of clients and all draws stay the
same; forgotten clients do not act. Training starts at the last kept checkpoint before a client with
forgotten data was scheduled, if there is one, because nothing before it depends on these data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import CorruptFile
from fedstill.core.extensions import Event
from fedstill.core.files import read_file
from fedstill.core.rounds import Schedule, Without
from fedstill.data.client_split import ClientSplit
from fedstill.running.checkpoint import Restored
from fedstill.running.preparation import Prepared
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import NewRounds, OriginalRun, StartPoint, Strategy


@dataclass(frozen=True)
class Retraining(Strategy):
    """Train again without the forgotten data."""

    is_exact: ClassVar[bool] = True
    whole_clients_only: ClassVar[bool] = False

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """All rounds of the original run, none of them with the forgotten data."""
        return NewRounds(first=1, last=original.settings.rounds)

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint | None:
        """The last kept checkpoint that does not depend on the forgotten data."""
        if _depends_from_the_start(original, prepared):
            return None
        first = first_round_of(original, original.affected(request))
        restored = _last_before(original, first)
        if restored is None:
            return None
        return StartPoint(
            state=restored.state,
            memory=restored.memory,
            events=_events_before(original, restored),
        )

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """The schedule without the forgotten clients, also before round 1."""
        return replace(schedule, change=Without(frozenset(request.clients), first=0))

    def changed_split(
        self, split: ClientSplit, labels: NDArray[np.int64], request: UnlearningRequest
    ) -> ClientSplit:
        """The split without all forgotten examples."""
        return request.remaining(split, labels)


def first_round_of(original: OriginalRun, clients: frozenset[int]) -> int:
    """The first round of which one of these clients is a part; behind the last one if none is.

    A client that was scheduled counts even if it had no work, or if its reply was refused: the
    method knew of it when the round began.
    """
    settings = original.settings
    world = original.prepared.world
    for round in range(settings.rounds + 1):
        for stage in settings.schedule(round, world):
            if clients.intersection(stage.clients):
                return round
    return settings.rounds + 1


def _depends_from_the_start(original: OriginalRun, prepared: Prepared) -> bool:
    """Whether something before round 1 depends on the forgotten data: the mean and spread of all
    rows, or the round that was selected as the best one, of which the new run needs a checkpoint.
    """
    scales_differ = original.prepared.scaler != prepared.scaler
    return scales_differ or original.settings.selects_round


def _last_before(original: OriginalRun, round: int) -> Restored | None:
    """The last checkpoint before a round that is not damaged."""
    checkpoints = original.checkpoints
    for position in reversed(checkpoints.positions()):
        if position.round > round or (position.round == round and position.stage > 0):
            continue
        try:
            return checkpoints.at(position)
        except CorruptFile:
            continue
    return None


def _events_before(original: OriginalRun, restored: Restored) -> Sequence[Event]:
    """The events of the original journal up to a checkpoint, without the event ``start``."""
    data = read_file(original.folder / "journal.jsonl")[: restored.journal.length]
    events: list[Event] = [json.loads(line) for line in data.splitlines()]
    return events[1:]
