"""Rounds of a run gone through again, in memory: all draws are keyed, so they come out as they did,
or without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedstill.core.errors import ConfigError
from fedstill.core.files import digest
from fedstill.core.process_settings import process_settings, torch_threads
from fedstill.core.records import Stage, State
from fedstill.core.results import StageResult
from fedstill.core.rounds import run_round
from fedstill.data.dataset import Dataset
from fedstill.engines.client_measures import ClientMeasures
from fedstill.engines.client_memory import Memory
from fedstill.engines.precision import steady
from fedstill.engines.serial import SerialEngine
from fedstill.measures.base import Measure, Room
from fedstill.metrics.shapley import MOST_EXACT
from fedstill.running.checkpoint import Checkpoints, Restored
from fedstill.running.context import run_context, world_in
from fedstill.running.directory import settings_of
from fedstill.running.evaluation import evaluated, evaluated_answers
from fedstill.running.observers import look
from fedstill.running.preparation import Prepared, prepare_again

OnAgain = Callable[[int, int], None]
"""Called before each round that is gone through again: the round, and the last."""


@dataclass(frozen=True)
class TakenUp:
    """A run and where it can be taken up: before round ``start``."""

    folder: Path
    prepared: Prepared
    restored: Restored | None

    @property
    def start(self) -> int:
        """The first round that has to be gone through again."""
        if self.restored is None:
            return 1
        state, settings = self.restored.state, self.prepared.settings
        return state.round + (
            state.stage >= len(settings.schedule(state.round, self.prepared.world))
        )

    def memory(self) -> Memory:
        """What clients remembered then, in this process."""
        if self.restored is None:
            return Memory()
        there = Memory(self.folder / "memory", dict(self.restored.memory))
        return there.in_process()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Meanwhile this process has the settings and the torch threads of the run."""
        settings = self.prepared.settings
        with process_settings(), torch_threads(settings.threads[1]):
            steady(settings.device)
            yield


@process_settings()
def taken_up(folder: Path, before: int, data: Dataset | None = None) -> TakenUp:
    """A run with its last checkpoint at or before a round. Raises ConfigError for real sites or
    secure sums.
    """
    settings = settings_of(folder)
    if settings.on_sites:
        raise ConfigError(
            f"{folder} was trained on real sites, whose rounds cannot be gone through again here"
        )
    if settings.hides_client_models:
        raise ConfigError(
            f"{folder} has secure sums: its server knew no single client's part in a round"
        )
    config = digest((folder / "config.toml").read_bytes())
    restored = Checkpoints(folder / "checkpoints", config, folder / "memory").before(before)
    engine = "auto" if settings.engine == "flower" else settings.engine
    prepared = prepare_again(replace(settings, engine=engine), folder, data)
    return TakenUp(folder, prepared, restored)


@dataclass(frozen=True)
class Without:
    """A client that is left out: from a round on, or in that round alone."""

    client: int
    since: int
    once: bool = False

    def leave_out(self, stages: Sequence[Stage], round: int) -> Sequence[Stage]:
        """A round's stages without the client; those of which nobody is left are skipped."""
        if round < self.since or (self.once and round > self.since):
            return stages
        left = [replace(s, clients=tuple(c for c in s.clients if c != self.client)) for s in stages]
        return [stage for stage in left if stage.clients]


@dataclass
class _Looking:
    """What each stage of one round shows a measure."""

    measure: Measure | None
    round: int
    room: Room | None
    prepared: Prepared
    seen: list[dict[str, object]] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Look at a stage that is done (``core.extensions.Recorder``)."""
        stage = result.stage
        if self.measure is None or self.room is None or stage.round != self.round:
            return
        room = replace(self.room, world=world_in(self.prepared, result.after))
        told = look("contributions", self.measure, result, room)
        if told is not None:
            where = {"round": stage.round, "stage": stage.index, "name": stage.name}
            event = {"event": "measure", "measure": "contributions", **where, **told}
            self.seen.append({**event, "seconds": 0.0})

    def failed(self, result: StageResult, error: Exception) -> None:
        """Nothing: the error that comes next says it."""


def refuse_many(kept: TakenUp, round: int) -> None:
    """Raise ConfigError if a stage that makes the global model has more clients than all coalitions
    are asked of.
    """
    settings, world = kept.prepared.settings, kept.prepared.world
    stages = [
        s
        for s in settings.schedule(round, world)
        if not s.sequential and s.name not in settings.method.personal
    ]
    if (many := max((len(s.clients) for s in stages), default=0)) > MOST_EXACT:
        raise ConfigError(
            f"--exact: round {round} has {many} clients, and all coalitions of at most "
            f"{MOST_EXACT} are asked; "
            "leave it out"
        )


def looked_at(
    kept: TakenUp, round: int, measure: Measure, again: OnAgain
) -> list[dict[str, object]]:
    """What a measure sees in a round, after the rounds since the checkpoint have been gone through
    again.

    Raises ConfigError for a run without a common test set.
    """
    memory = kept.memory()
    room = kept.prepared.room(None, memory)
    if room is None:
        raise ConfigError(
            f"{kept.folder} has no common test set, and contributions are measured on one"
        )
    looking = _Looking(measure, round, room, kept.prepared)
    with kept.computing(), closing(kept.prepared.engine(memory, measured=False)) as made:
        engine = replace(
            made,
            hooks=(*made.hooks, ClientMeasures({"contributions": measure}, frozenset({round}))),
            kept=None,
        )
        _through(kept, engine, round, looking, again)
    return looking.seen


def accuracies(
    kept: TakenUp, first: int, last: int, without: Without | None, again: OnAgain
) -> dict[int, list[float | None]]:
    """The global model's class accuracies (C,) after rounds ``first`` to ``last``, gone through
    again.

    Raises ConfigError for a method without a global model, or a run without a common test set.
    """
    known: dict[int, list[float | None]] = {}

    def after(state: State) -> None:
        round = state.round - 1
        if round >= first:
            named = evaluated_answers(kept.prepared.settings.method, state, kept.prepared.world)
            known[round] = evaluated(named, kept.prepared.sites, kept.prepared.world.classes)[
                "class_accuracy"
            ]

    memory = kept.memory()
    with kept.computing(), closing(kept.prepared.engine(memory, measured=False)) as engine:
        _through(
            kept,
            replace(engine, kept=None),
            last,
            _Looking(None, 0, None, kept.prepared),
            again,
            without,
            after,
        )
    if not any(a is not None for row in known.values() for a in row):
        raise ConfigError(f"{kept.folder} has no global model on a common test set to compare")
    return known


def as_in_company(engine: SerialEngine) -> SerialEngine:
    """The engine that gives a client that acts alone the threads, and so the bits, that it has
    beside others.
    """
    return replace(engine, threads=(engine.threads[0], engine.threads[0]))


def _is_left_alone(before: Sequence[Stage], after: Sequence[Stage]) -> bool:
    """Whether a client acts alone now that acted beside others."""
    least = [
        min((len(s.clients) for s in stages if not s.sequential), default=0)
        for stages in (before, after)
    ]
    return least[1] == 1 < least[0]


def gone_to(kept: TakenUp, engine: SerialEngine, round: int, again: OnAgain) -> State:
    """The state before a round, after the rounds since the checkpoint have been gone through
    again.
    """
    return _through(kept, engine, round - 1, _Looking(None, 0, None, kept.prepared), again)


def _through(
    kept: TakenUp,
    engine: SerialEngine,
    last: int,
    watch: _Looking,
    again: OnAgain,
    without: Without | None = None,
    after: Callable[[State], None] = lambda state: None,
) -> State:
    settings, world = kept.prepared.settings, kept.prepared.world
    state = (
        kept.restored.state if kept.restored is not None else settings.method.initial_state(world)
    )
    first = settings.schedule(0, world)
    if kept.restored is None and first:
        context = run_context(kept.prepared, engine)
        state = run_round(replace(state, round=0), first, context)
    while state.round <= last:
        if state.round >= kept.start:
            again(state.round, last)
        stages: Sequence[Stage] = settings.schedule(state.round, world)
        acts = engine
        if without is not None:
            every, stages = stages, without.leave_out(stages, state.round)
            acts = as_in_company(engine) if _is_left_alone(every, stages) else engine
        state = run_round(state, stages, run_context(kept.prepared, acts, watch))
        after(state)
    return state
