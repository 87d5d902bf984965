"""The rounds of a run, repeated at the server from the updates that it kept: nothing is trained.

So strategies know every global model, and which model the server would have made of other replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedstill.core.errors import CorruptFile
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, Tensors
from fedstill.core.rounds import run_round
from fedstill.core.trees import same_bits
from fedstill.running.checkpoint import KeptUpdate, kept_updates
from fedstill.running.extensions import run_context
from fedstill.running.preparation import Prepared
from fedstill.unlearning.strategy import OriginalRun


@dataclass(frozen=True)
class KeptReplies:
    """An engine whose clients reply with their kept updates (``core.extensions.Engine``).

    ``updates``: by round, index of the stage, and client.
    """

    updates: Mapping[tuple[int, int, int], KeptUpdate]

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The kept replies of a stage; a client whose reply was refused has none."""
        replies = []
        for client in payloads:
            update = self.updates.get((stage.round, stage.index, client))
            if update is not None:
                reply = Reply(
                    client=client,
                    content=update.content(),
                    examples=update.examples,
                    round=stage.round,
                    stage=stage.index,
                )
                replies.append(reply)
        return replies

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Nothing: clients remember nothing here."""


@dataclass
class _Results(NoRecorder):
    """Collects the results of one round."""

    results: list[StageResult] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Collect a finished stage."""
        self.results.append(result)


def repeated_stages(original: OriginalRun) -> Iterator[StageResult]:
    """The result of each stage of a run, in order.

    Raises CorruptFile if the updates do not lead to the run's model.
    """
    prepared = original.prepared
    settings = prepared.settings
    updates = {
        (update.round, update.stage, update.client): update
        for update in kept_updates(original.folder)
    }
    recorder = _Results()
    context = run_context(prepared, KeptReplies(updates), recorder)
    state = replace(settings.method.initial_state(prepared.world), round=1)
    for round in range(1, original.last_round + 1):
        state = run_round(state, settings.schedule(round, prepared.world), context)
        yield from recorder.results
        recorder.results.clear()
    if not same_bits(state.params, original.final_state.params):
        raise CorruptFile(
            f"the updates in {original.folder} do not lead to its model; use --strategy retraining"
        )


def model_of(prepared: Prepared, result: StageResult, replies: Sequence[Reply]) -> Tensors:
    """The global model that the server would have made of these replies in a stage; without any
    reply, the one before the stage.
    """
    if not replies:
        return result.before.params
    stage = result.stage
    actor = prepared.settings.schedule.actor(stage)
    with drawing_from(seed_for(prepared.world.seed, stage.round, stage.index, SERVER, "server")):
        state: State = actor.aggregate(result.before, replies, stage, prepared.world)
    return state.params


def replies_without(result: StageResult, clients: Sequence[int]) -> list[Reply]:
    """The accepted replies of a stage, except those of some clients."""
    return [reply for reply in result.accepted if reply.client not in clients]
