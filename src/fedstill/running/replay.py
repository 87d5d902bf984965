"""Replays rounds of a run in this process, starting from one of its checkpoints.

All random draws are keyed. Therefore, a replay without changes reproduces the run bit by bit, and a
replay with other clients shows their effect while everything else stays the same. A replay writes
no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fedstill.config.settings import Settings
from fedstill.config.validation import WrongConfig
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import ClientHook, Recorder
from fedstill.core.files import digest, read_file
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Stage, State, World
from fedstill.core.rounds import StageChange, extended_world, run_round, unchanged
from fedstill.data.dataset import Dataset
from fedstill.engines.devices import make_deterministic
from fedstill.engines.hardware import ThreadCounts, torch_threads
from fedstill.engines.serial import Memory, SerialEngine
from fedstill.running.checkpoint import Checkpoints, Restored, StoredMemory
from fedstill.running.directory import settings_of
from fedstill.running.extensions import Extensions, run_context, run_extensions
from fedstill.running.journal import CONFIG, JOURNAL, STOP_REASON, read_journal
from fedstill.running.preparation import Prepared, prepare_again
from fedstill.running.world import first_state

# ---- rounds with other clients -------------------------------------------------------------------


@dataclass(frozen=True)
class Without:
    """A ``StageChange`` that removes clients from the rounds ``first`` to ``last``.

    ``last``: None for all rounds from ``first`` on.
    """

    clients: frozenset[int]
    first: int = 1
    last: int | None = None

    def __call__(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """Remove these clients from the stages, and drop stages that have no clients left."""
        changed = [self._remaining(stage) for stage in stages]
        return [stage for stage in changed if stage.clients]

    def _remaining(self, stage: Stage) -> Stage:
        is_over = self.last is not None and stage.round > self.last
        if stage.round < self.first or is_over:
            return stage
        clients = tuple(client for client in stage.clients if client not in self.clients)
        return replace(stage, clients=clients)


# ---- the run and its checkpoint ------------------------------------------------------------------

Announce = Callable[[int, int], None]
"""Called before each replayed round, with its number and the number of the last one."""


def silent(round: int, last: int) -> None:
    """Announce nothing."""


@dataclass(frozen=True)
class Replay:
    """A run with the checkpoint from which it is replayed.

    ``restored``: the checkpoint; None to start at the beginning of the run.
    """

    folder: Path
    prepared: Prepared
    restored: Restored | None

    @classmethod
    def of_round(cls, folder: Path, round: int, data: Dataset | None = None) -> Replay:
        """Start at the last intact checkpoint before a round, or at the beginning if there is none.

        Raises ConfigError for a run that cannot be replayed because it used real sites or secure
        sums, or because it continued another run and has no checkpoint before the round.
        """
        with process_settings():
            settings = _replayable_settings(folder)
            restored = checkpoints_of(folder).before(round)
            if restored is None:
                _check_beginning(folder, settings, round)
            return cls(folder, prepare_again(settings, folder, data), restored)

    @property
    def start(self) -> int:
        """The first replayed round."""
        if self.restored is None:
            return 1
        state = self.restored.state
        stages = self.prepared.settings.schedule(state.round, self.prepared.world)
        if not stages or state.stage > stages[-1].index:
            return state.round + 1
        return state.round

    @property
    def last(self) -> int:
        """The last round of the run, which may have stopped early."""
        events = read_journal(self.folder / JOURNAL)
        stopped: list[int] = [event["round"] for event in events if STOP_REASON in event]
        if stopped:
            return stopped[-1]
        return self.prepared.settings.rounds

    @contextmanager
    def session(
        self, *, hooks: Sequence[ClientHook] = (), reuse_replies: bool = False
    ) -> Iterator[Session]:
        """A context that yields a session at the checkpoint. Inside it, this process has the run's
        process settings and torch threads.

        ``hooks``: client hooks to apply after those of the run. ``reuse_replies``: whether replies
        may be taken from the cache that runs share.
        """
        settings = self.prepared.settings
        memory = self._memory()
        with (
            process_settings(),
            torch_threads(ThreadCounts(*settings.threads).alone),
            closing(self.prepared.engine(memory, measured=False)) as run_engine,
        ):
            make_deterministic(settings.device)
            engine = replace(run_engine, hooks=(*run_engine.hooks, *hooks))
            if not reuse_replies:
                engine = replace(engine, reply_cache=None)
            extensions = run_extensions(self.prepared)
            yield Session(self, engine, extensions, self._first_state(engine, extensions))

    def _memory(self) -> Memory:
        """The client states at the checkpoint, held in this process."""
        if self.restored is None:
            return Memory()
        stored = StoredMemory(self.folder / "memory", self.restored.state_files)
        return stored.in_process()

    def _first_state(self, engine: SerialEngine, extensions: Extensions) -> State:
        """The state of the checkpoint, or the state before round 1."""
        if self.restored is not None:
            return self.restored.state
        settings = self.prepared.settings
        state = first_state(settings.method, self.prepared.world)
        stages = settings.schedule(0, self.prepared.world)
        if not stages:
            return state
        context = run_context(self.prepared, engine, extensions=extensions)
        return run_round(replace(state, round=0), stages, context)


def checkpoints_of(folder: Path) -> Checkpoints:
    """The checkpoints of a run directory, for reading."""
    config = digest(read_file(folder / CONFIG))
    return Checkpoints(folder / "checkpoints", config, folder / "memory")


def _replayable_settings(folder: Path) -> Settings:
    """The settings of a run; one over Flower is replayed by an engine that computes the same bits.

    Raises ConfigError for a run that cannot be replayed.
    """
    settings = settings_of(folder)
    if settings.on_sites:
        raise ConfigError(
            f"{folder} was trained at real sites, so its rounds cannot be replayed on this machine"
        )
    if settings.hides_client_models:
        raise ConfigError(
            f"{folder} used secure sums, so its server never received the replies of single clients"
        )
    if settings.engine == "flower":
        return replace(settings, engine="pooled")
    return settings


def _check_beginning(folder: Path, settings: Settings, round: int) -> None:
    """Raise ConfigError for a run that continued another run, whose state is not in its folder."""
    try:
        for table in settings.packages.values():
            table.check_new_run()
    except WrongConfig as error:
        raise ConfigError(
            f"{folder} continued another run, and no checkpoint before round {round} is left, from "
            "which the round could be replayed; choose a later round"
        ) from error


# ---- rounds --------------------------------------------------------------------------------------


@dataclass
class Session:
    """A replay in progress. Each round updates its state and its client states."""

    replay: Replay
    engine: SerialEngine
    extensions: Extensions
    state: State

    def rounds(
        self,
        last: int | None = None,
        *,
        change: StageChange = unchanged,
        recorder: Recorder | None = None,
        announce: Announce = silent,
    ) -> Iterator[State]:
        """Replay rounds up to ``last`` (default: the end of the run), and yield the state after
        each of them.

        ``change``: replaces the clients of stages. ``recorder``: is called with every stage.
        """
        prepared = self.replay.prepared
        if last is None:
            last = self.replay.last
        while self.state.round <= last:
            number = self.state.round
            is_over = number < self.replay.start
            if not is_over:
                announce(number, last)
            scheduled = prepared.settings.schedule(number, prepared.world)
            stages = change(scheduled)
            session = self
            if _is_left_alone(scheduled, stages):
                session = self.in_company()
            self.state = session.run(stages, recorder)
            # A checkpoint after the last stage of a round continues with the next round.
            if not is_over:
                yield self.state

    def go_to(self, round: int, announce: Announce = silent) -> None:
        """Replay all rounds before the given one."""
        for _ in self.rounds(round - 1, announce=announce):
            pass

    def run(self, stages: Sequence[Stage], recorder: Recorder | None = None) -> State:
        """Run the next round, or the rest of it, with these stages; return the state after it."""
        context = run_context(self.replay.prepared, self.engine, recorder, self.extensions)
        self.state = run_round(self.state, stages, context)
        return self.state

    def world_in(self, state: State) -> World:
        """The run's world in a state, with the records of its extensions."""
        return extended_world(self.replay.prepared.world, state, self.extensions.round_hooks)

    def fork(self, state: State | None = None) -> Session:
        """An independent copy of the session, optionally with another state."""
        if state is None:
            state = self.state
        engine = replace(self.engine, memory=self.engine.memory.in_process())
        return replace(self, engine=engine, state=state)

    def in_company(self) -> Session:
        """A copy in which a client that acts alone uses the torch threads of a client in a group,
        so that it computes the same bits.
        """
        count = self.engine.threads.several
        threads = ThreadCounts(several=count, alone=count)
        return replace(self, engine=replace(self.engine, threads=threads))


def _is_left_alone(scheduled: Sequence[Stage], stages: Sequence[Stage]) -> bool:
    """Whether a client acts alone now, although it acted in a group in the run."""
    return _smallest_group(stages) == 1 < _smallest_group(scheduled)


def _smallest_group(stages: Sequence[Stage]) -> int:
    """The smallest number of clients in a stage with several clients; 0 without such a stage."""
    return min((len(stage.clients) for stage in stages if not stage.sequential), default=0)
