"""What an unlearning strategy is, what it gets, and what it returns.

A strategy does not train: it says from which state the new run starts, which stages its rounds
have, and which data they use. ``unlearn.unlearn`` writes that state into a new run directory, from
which the run continues like any other: with journal, checkpoints, resume and result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.config.settings import PEERS, Settings
from fedstill.core.errors import ConfigError, CorruptFile, IncompatibleMethod
from fedstill.core.extensions import Event, NoRecorder, StageActor, StageProvider, StageResult
from fedstill.core.files import in_shell
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Payload, Plan, Reply, Stage, State, Tensors, World
from fedstill.core.rounds import ANSWERED, Schedule, run_round
from fedstill.core.trees import same_bits
from fedstill.data.client_split import ClientSplit
from fedstill.data.dataset import Dataset
from fedstill.running.checkpoint import Checkpoints, KeptUpdate, Restored, kept_updates
from fedstill.running.directory import settings_of
from fedstill.running.extensions import run_context, run_extensions
from fedstill.running.journal import JOURNAL, STOP_REASON, is_finished, read_journal
from fedstill.running.model_files import FINAL
from fedstill.running.preparation import Prepared, prepare_again
from fedstill.running.replay import Without, checkpoints_of
from fedstill.running.world import first_state
from fedstill.unlearning.request import UnlearningRequest, UnlearningTable

TRAIN = "train"
"""The stage in which clients train a model that is averaged."""

# ---- what a strategy gets ------------------------------------------------------------------------


@dataclass(frozen=True)
class OriginalRun:
    """The finished run whose model must forget.

    ``data``: its data set, if it is in memory.
    """

    folder: Path
    settings: Settings
    events: Sequence[Event]
    data: Dataset | None = None

    @classmethod
    def of(cls, folder: Path, data: Dataset | None = None) -> OriginalRun:
        """The run in a directory. Raises ConfigError if it is not finished, has no model, or is on
        real sites.
        """
        settings = settings_of(folder)
        if not is_finished(folder):
            raise ConfigError(
                f"{folder} is not finished; `fedstill resume {in_shell(str(folder))}` first, then "
                "unlearn"
            )
        if settings.on_sites:
            raise ConfigError(
                f"{folder} was trained on real sites, which this process cannot reach; use "
                "`fedstill deploy unlearn`"
            )
        if not (folder / FINAL).is_file():
            # The certificate of the new run contains the digest of this file.
            raise ConfigError(
                f"{folder} has no {FINAL}: a pack contains no models; unlearn from the directory "
                "that was packed"
            )
        return cls(folder, settings, read_journal(folder / JOURNAL), data)

    @cached_property
    def prepared(self) -> Prepared:
        """The run with its data, ready to start."""
        settings = self.settings
        if settings.engine == "flower":
            settings = replace(settings, engine="auto")
        return prepare_again(settings, self.folder, self.data)

    @property
    def last_round(self) -> int:
        """The last round that was trained; a run may have stopped early."""
        return int(max(event["round"] for event in self.events if event["event"] == "round"))

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints that the run kept."""
        return checkpoints_of(self.folder)

    @property
    def earlier_request(self) -> UnlearningRequest:
        """What the run itself has forgotten, if it is the result of unlearning."""
        return self.settings.package_table(UnlearningTable).request

    @cached_property
    def last_checkpoint(self) -> Restored:
        """The checkpoint after the last stage; raises CorruptFile if there is none."""
        restored = self.checkpoints.latest()
        if restored is None:
            raise CorruptFile(f"{self.folder} has no checkpoints; unlearn from its directory")
        return restored

    @property
    def final_state(self) -> State:
        """The server's state after the last stage."""
        return self.last_checkpoint.state

    def affected(self, request: UnlearningRequest) -> frozenset[int]:
        """The clients that a request names, and those that hold a forgotten example."""
        return request.affected(self.split, self.labels)

    @property
    def split(self) -> ClientSplit:
        """The examples of each client."""
        split = self.prepared.sites.split
        assert split is not None  # real sites were rejected
        return split

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of the training set (n,)."""
        labels: NDArray[np.int64] = self.prepared.sites.train.labels.cpu().numpy()
        return labels


# ---- the rounds of the original run, repeated from its kept updates: nothing is trained ----------


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
    # The kept updates are what the middleware returned, such as an attack's changes.
    extensions = replace(run_extensions(prepared), middleware=())
    context = run_context(prepared, KeptReplies(updates), recorder, extensions)
    state = replace(first_state(settings.method, prepared.world), round=1)
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


# ---- what a strategy returns ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where the new run starts.

    ``state``: before its first round. ``state_files``: by client, the file of its state in the
    original run, and the file's SHA-256. ``events``: of the original journal up to there, without
    the event ``start``.
    """

    state: State
    state_files: Mapping[int, tuple[str, str]]
    events: Sequence[Event]

    def without_clients(self, clients: Collection[int]) -> StartPoint:
        """The start point without the states of some clients."""
        state_files = {
            client: file for client, file in self.state_files.items() if client not in clients
        }
        return replace(self, state_files=state_files)


@dataclass(frozen=True)
class NewRounds:
    """The rounds of the new run: ``first`` is the first one without the forgotten data; ``last``
    is the last one of the run.
    """

    first: int
    last: int


class Strategy(ABC):
    """How a model forgets. A subclass is a frozen dataclass; its fields are the strategy's options.

    ``is_exact``: whether the result is, to the bit, that of a run that never had the data.
    ``whole_clients_only``: whether it can only forget clients, not single examples or classes.
    ``stage_plans``: the default plans of the stages that it adds. ``farewell_stage``: the stage of
    the first new round in which a forgotten client acts a last time; "" for none.
    """

    is_exact: ClassVar[bool] = False
    whole_clients_only: ClassVar[bool] = True
    stage_plans: ClassVar[Mapping[str, Plan]] = {}
    farewell_stage: ClassVar[str] = ""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise ConfigError or IncompatibleMethod, with a reason, for a run that the strategy
        cannot unlearn from. By default, it can from any.
        """
        return None

    @abstractmethod
    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """The rounds of the new run."""

    @abstractmethod
    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint | None:
        """Where the new run starts; None for the beginning. ``prepared``: the new run."""

    def plans(self, original: OriginalRun) -> Mapping[str, Plan]:
        """The plans of the stages that the strategy adds, in an unlearning of this run."""
        return self.stage_plans

    def statement(self, original: OriginalRun, request: UnlearningRequest) -> Mapping[str, Any]:
        """Further numbers for the certificate, such as a bound. By default, there are none."""
        return {}

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """The schedule of the new run. By default, forgotten clients do not act from
        ``first_round`` on.
        """
        return replace(schedule, change=Without(frozenset(request.clients), first_round))

    def changed_split(
        self, split: ClientSplit, labels: NDArray[np.int64], request: UnlearningRequest
    ) -> ClientSplit:
        """The examples of each client in the new run.

        By default, a forgotten client that acts no more keeps its examples, because the original
        run was standardised with them.
        """
        return replace(request, clients=()).remaining(split, labels)


# ---- the stages of the new run -------------------------------------------------------------------


@dataclass(frozen=True)
class SingleStageRound(StageProvider):
    """Replaces the stages of one round by a single stage with one client or the server.

    ``view``: which data it sees.
    """

    name: str
    actor: StageActor
    round: int
    client: int
    view: Literal["private", "public"] = "private"

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the stage."""
        return {self.name: self.actor}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round."""
        if round != self.round:
            return stages
        return [Stage(round, 0, self.name, (self.client,), self.view)]


def with_new_stages(schedule: Schedule, stages: StageProvider, change: Without) -> Schedule:
    """A schedule with the stages of a strategy. ``change``: which clients do not act, and when."""
    return replace(schedule, providers=(*schedule.providers, stages), change=change)


# ---- strategies that continue from the original model --------------------------------------------


def check_continues(original: OriginalRun, strategy: str) -> None:
    """Raise IncompatibleMethod for a run that has no rounds after its last one.

    ``strategy``: its name, for messages.
    """
    settings = original.settings
    if settings.stream.tasks > 1:
        raise _unsuitable(strategy, "a run with tasks has no rounds after its last task")
    if settings.named.topology.name == PEERS:
        raise _unsuitable(strategy, "topology peer_to_peer has no rounds after its exchange")
    network = original.final_state.model
    if network not in (None, original.prepared.world.model(SERVER)):
        raise _unsuitable(
            strategy,
            f"method {settings.named.method.label} ends with a network that clients do not train",
        )
    if settings.method.personal:
        raise _unsuitable(
            strategy,
            f"method {settings.named.method.label} leaves each client a model of its own, which "
            "the server cannot change",
        )


def check_averages(original: OriginalRun, strategy: str) -> None:
    """Raise IncompatibleMethod or ConfigError unless every round averages the models of clients
    that act side by side, and the server keeps nothing but the average.
    """
    check_continues(original, strategy)
    settings = original.settings
    world = original.prepared.world
    label = settings.named.method.label
    for stage in settings.schedule(1, world):
        if stage.sequential:
            raise _unsuitable(
                strategy,
                "in a chain, a client's model is not averaged with others: all later clients "
                "build on it",
            )
        if SERVER in stage.clients:
            raise _unsuitable(strategy, f"method {label} also trains at the server")
    extras = [name for name in original.final_state.extra if name != ANSWERED]
    if extras:
        raise _unsuitable(
            strategy,
            f"method {label} keeps {', '.join(sorted(extras))} at the server, in which the "
            "client's updates would remain",
        )
    if not original.settings.keep_updates:
        raise ConfigError(
            f"{strategy} needs all updates of clients, and {original.folder} keeps none; run it "
            "again with keep_updates = true, or use --strategy retraining"
        )


def check_trains_only(original: OriginalRun, strategy: str) -> None:
    """Raise IncompatibleMethod for a run with other stages than training, which new rounds lack."""
    settings = original.settings
    last = settings.schedule(settings.rounds, original.prepared.world)
    others = [stage.name for stage in last if stage.name != TRAIN]
    if others:
        raise _unsuitable(
            strategy,
            f"method {settings.named.method.label} also needs the stage {others[0]!r}, which the "
            "new rounds do not have",
        )


def _unsuitable(strategy: str, reason: str) -> IncompatibleMethod:
    return IncompatibleMethod(
        f"--strategy {strategy} is not possible here: {reason}; use retraining"
    )


def continued(original: OriginalRun, prepared: Prepared, state: State | None = None) -> StartPoint:
    """The start point after the last round of the original run.

    ``prepared``: the new run. ``state``: instead of the final one. Raises IncompatibleMethod if
    the new run would scale its data in another way.
    """
    if prepared.scaler != original.prepared.scaler:
        raise IncompatibleMethod(
            "the mean and standard deviation of the data were also computed from the forgotten "
            "examples, and the model depends on them; use --strategy retraining"
        )
    if state is None:
        state = original.final_state
    return StartPoint(
        state=replace(state.without(ANSWERED), round=original.last_round + 1, stage=0),
        state_files=original.last_checkpoint.state_files,
        events=events_through(original, original.last_round),
    )


def events_through(original: OriginalRun, round: int) -> list[Event]:
    """The events of the original journal up to the end of a round, without the event ``start``.

    They have no reason to stop: the new run continues.
    """
    return [
        {key: value for key, value in event.items() if key != STOP_REASON}
        for event in original.events[1:]
        if event.get("round", 0) <= round
    ]
