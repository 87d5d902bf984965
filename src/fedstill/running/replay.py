"""A run replayed from a checkpoint that it kept: its rounds once more, in this process.

All random draws are keyed. So a replay without changes has the run's own bits, and a replay with
other clients shows what would have been, all else being equal. A replay writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import ClientHook, Recorder
from fedstill.core.files import digest, read_file
from fedstill.core.process_settings import process_settings, steady
from fedstill.core.records import Stage, State, World
from fedstill.core.rounds import StageChange, extended_world, run_round, unchanged
from fedstill.data.dataset import Dataset
from fedstill.engines.hardware import ThreadCounts, torch_threads
from fedstill.engines.serial import Memory, SerialEngine
from fedstill.running.checkpoint import Checkpoints, Position, Restored, StoredMemory
from fedstill.running.directory import settings_of
from fedstill.running.extensions import Extensions, run_context, run_extensions
from fedstill.running.journal import STOP_REASON, read_journal
from fedstill.running.preparation import Prepared, prepare_again

# ---- rounds with other clients -------------------------------------------------------------------


@dataclass(frozen=True)
class Without:
    """A ``StageChange`` that leaves clients out of the rounds from ``first`` to ``last``.

    ``last``: None for the end of the run.
    """

    clients: frozenset[int]
    first: int = 1
    last: int | None = None

    def __call__(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """The stages without these clients; a stage without any client is dropped."""
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
"""Called before each round that is replayed: its number, and that of the last one."""


def silent(round: int, last: int) -> None:
    """Announce nothing."""


@dataclass(frozen=True)
class Replay:
    """A run, taken up at one of its checkpoints.

    ``restored``: the checkpoint; None for the beginning of the run.
    """

    folder: Path
    prepared: Prepared
    restored: Restored | None

    @classmethod
    def of_round(cls, folder: Path, round: int, data: Dataset | None = None) -> Replay:
        """A run at its last whole checkpoint before a round; at its beginning if it kept none.

        Raises ConfigError for a run that cannot be replayed: on real sites, or with secure sums.
        """
        with process_settings():
            settings = _replayable_settings(folder)
            restored = checkpoints_of(folder).before(round)
            return cls(folder, _prepared(settings, folder, data), restored)

    @classmethod
    def at_checkpoint(cls, folder: Path, position: Position, data: Dataset | None = None) -> Replay:
        """A run at one of the checkpoints that it kept (``checkpoints_of(folder).positions()``).

        Raises CorruptFile if this one is not there or damaged, ConfigError as ``of_round`` does.
        """
        with process_settings():
            settings = _replayable_settings(folder)
            restored = checkpoints_of(folder).at(position)
            return cls(folder, _prepared(settings, folder, data), restored)

    @property
    def start(self) -> int:
        """The first round that is replayed."""
        if self.restored is None:
            return 1
        state = self.restored.state
        stages = self.prepared.settings.schedule(state.round, self.prepared.world)
        if not stages or state.stage > stages[-1].index:
            return state.round + 1
        return state.round

    @property
    def last(self) -> int:
        """The last round of the run; the one in which it stopped, if it stopped early."""
        events = read_journal(self.folder / "journal.jsonl")
        stopped: list[int] = [event["round"] for event in events if STOP_REASON in event]
        if stopped:
            return stopped[-1]
        return self.prepared.settings.rounds

    @contextmanager
    def session(
        self, *, hooks: Sequence[ClientHook] = (), reuse_replies: bool = False
    ) -> Iterator[Session]:
        """What replays rounds from the checkpoint on. Meanwhile this process has the settings and
        the torch threads of the run.

        ``hooks``: further ones of clients, after those of the run. ``reuse_replies``: whether
        replies may come from the cache that runs share.
        """
        settings = self.prepared.settings
        memory = self._memory()
        with (
            process_settings(),
            torch_threads(ThreadCounts(*settings.threads).alone),
            closing(self.prepared.engine(memory, measured=False)) as run_engine,
        ):
            steady(settings.device)
            engine = replace(run_engine, hooks=(*run_engine.hooks, *hooks))
            if not reuse_replies:
                engine = replace(engine, reply_cache=None)
            extensions = run_extensions(self.prepared)
            yield Session(self, engine, extensions, self._first_state(engine, extensions))

    def _memory(self) -> Memory:
        """What clients remember at the checkpoint, in this process."""
        if self.restored is None:
            return Memory()
        stored = StoredMemory(self.folder / "memory", self.restored.memory)
        return stored.in_process()

    def _first_state(self, engine: SerialEngine, extensions: Extensions) -> State:
        """The state of the checkpoint, or the one before round 1."""
        if self.restored is not None:
            return self.restored.state
        settings = self.prepared.settings
        state = settings.method.initial_state(self.prepared.world)
        stages = settings.schedule(0, self.prepared.world)
        if not stages:
            return state
        context = run_context(self.prepared, engine, extensions=extensions)
        return run_round(replace(state, round=0), stages, context)


def checkpoints_of(folder: Path) -> Checkpoints:
    """The checkpoints of a run's directory, to read."""
    config = digest(read_file(folder / "config.toml"))
    return Checkpoints(folder / "checkpoints", config, folder / "memory")


def _replayable_settings(folder: Path) -> Settings:
    settings = settings_of(folder)
    if settings.on_sites:
        raise ConfigError(
            f"{folder} was trained on real sites, whose rounds cannot be gone through again here"
        )
    if settings.hides_client_models:
        raise ConfigError(
            f"{folder} has secure sums: its server knew no single client's part in a round"
        )
    return settings


def _prepared(settings: Settings, folder: Path, data: Dataset | None) -> Prepared:
    """The run, ready; a run over Flower is replayed by an engine with the same bits."""
    if settings.engine == "flower":
        settings = replace(settings, engine="pooled")
    return prepare_again(settings, folder, data)


# ---- rounds --------------------------------------------------------------------------------------


@dataclass
class Session:
    """A replay under way: rounds move its state and its clients' memories on."""

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
        """Replay rounds up to ``last``, by default to the end of the run, and yield the state after
        each.

        ``change``: who acts instead. ``recorder``: gets every stage.
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
            # A checkpoint after the last stage of a round only has to be moved to the next one.
            if not is_over:
                yield self.state

    def go_to(self, round: int, announce: Announce = silent) -> None:
        """Replay the rounds before a round."""
        for _ in self.rounds(round - 1, announce=announce):
            pass

    def run(self, stages: Sequence[Stage], recorder: Recorder | None = None) -> State:
        """The next round, or what is left of it, with these stages; the state after it."""
        context = run_context(self.replay.prepared, self.engine, recorder, self.extensions)
        self.state = run_round(self.state, stages, context)
        return self.state

    def world_in(self, state: State) -> World:
        """The run's world in a state, as its extensions make it."""
        return extended_world(self.replay.prepared.world, state, self.extensions.round_hooks)

    def fork(self, state: State | None = None) -> Session:
        """A copy that moves on by itself, from another state if one is given."""
        if state is None:
            state = self.state
        engine = replace(self.engine, memory=self.engine.memory.in_process())
        return replace(self, engine=engine, state=state)

    def in_company(self) -> Session:
        """The same session, in which a client that acts alone has the torch threads, and so the
        bits, that it has beside others.
        """
        count = self.engine.threads.several
        threads = ThreadCounts(several=count, alone=count)
        return replace(self, engine=replace(self.engine, threads=threads))


def _is_left_alone(scheduled: Sequence[Stage], stages: Sequence[Stage]) -> bool:
    """Whether a client acts alone that acted beside others in the run."""
    return _smallest_group(stages) == 1 < _smallest_group(scheduled)


def _smallest_group(stages: Sequence[Stage]) -> int:
    """The fewest clients of a stage in which clients act side by side; 0 without such a stage."""
    return min((len(stage.clients) for stage in stages if not stage.sequential), default=0)
