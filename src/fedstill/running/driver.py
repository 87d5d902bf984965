"""The main loop of a run, from the last checkpoint in its directory to the end."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, Protocol, TypeVar

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.checks import checked_return, in_hook
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import Engine, Event, RoundResult, StageResult
from fedstill.core.files import digest, read_file, write_whole
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.records import SERVER, Payload, State
from fedstill.core.rounds import RunContext, run_round
from fedstill.data.dataset import Dataset
from fedstill.engines.hardware import ThreadCounts, torch_threads
from fedstill.engines.serial import Memory, SerialEngine, Version
from fedstill.running.checkpoint import Checkpoints, Restored, StoredMemory
from fedstill.running.evaluation import Evaluation, answering_models, client_predictors_of
from fedstill.running.extensions import run_context, run_extensions
from fedstill.running.journal import (
    CONFIG,
    CONFIG_SHA256,
    EMPTY_MARK,
    JOURNAL,
    Journal,
    read_journal,
)
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.recording import (
    OnRound,
    Progress,
    Quiet,
    RunRecorder,
    data_fields,
    examples_digests,
    run_observers,
)
from fedstill.running.result import Result, summary_of, write_result
from fedstill.running.same_run import check_same, name_for_clients, note_versions, start_fields
from fedstill.running.selection import selection_of
from fedstill.running.split_file import StoredSplit, restore_split, write_split
from fedstill.running.standardisation import run_sums, sums_work
from fedstill.running.trackers import Named, Tracking
from fedstill.running.world import first_state

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("fedstill.run")

P = ParamSpec("P")
T = TypeVar("T")
Driven = TypeVar("Driven")

ServerLocation = Literal["here", "ray", "federation"]
"""The location of a run's server: this process, Flower's simulation, or a federation."""


class RunEngine(Engine, Protocol):
    """An engine of a run. It stores the client states, or at least their index."""

    @property
    def memory(self) -> Memory:
        """The client states."""

    def close(self) -> None:
        """Stop the engine's threads and close its connections."""


class RemoteEngine(Protocol):
    """The interface of a package whose engine reaches clients in other processes."""

    def require(self) -> None:
        """Raise ConfigError if a package that the engine needs is not installed."""

    def simulate(
        self,
        settings: Settings,
        data: Dataset | None,
        folder: Path,
        drive: Callable[[Grid], Driven],
    ) -> Driven:
        """Start a simulation, call ``drive`` with its grid of clients, and return the result.

        ``folder``: the run's directory.
        """

    def connect(
        self, prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
    ) -> RunEngine:
        """The engine of a run whose clients are reached over a grid; without one, over a grid
        inside this process.

        ``identity``: returns the run's identity, which is part of every message.
        """

    def informed(self, engine: RunEngine, prepared: Prepared) -> RunEngine:
        """The engine for the same run after its data were prepared again, with the same
        connection.
        """

    def submit(self, settings: Settings, folder: Path, resume: bool, watch: Progress) -> Result:
        """Submit a run in a directory to a federation's server, and wait until it ends."""

    def client_memory(self, folder: Path, client: int, version: Version) -> Payload:
        """The state of a run's client; raises ConfigError if the state is at the client's site."""


def remote_engine(settings: Settings) -> RemoteEngine | None:
    """The interface of the outer package that provides the run's engine; None if the engine runs in
    this process.

    Raises ConfigError if the package is not installed.
    """
    if settings.engine != "flower":
        return None
    engines = manifest.engines()
    if settings.engine not in engines:
        raise ConfigError(
            f"engine = {settings.engine!r} needs the package fedstill.{settings.engine}, which is "
            "not installed; use another engine"
        )
    kind = engines[settings.engine].load()
    engine: RemoteEngine = kind()
    return engine


def server_location(settings: Settings) -> ServerLocation:
    """The location of a run's server: this process, a simulation, or a federation."""
    if settings.engine != "flower":
        return "here"
    if settings.flower.federation:
        return "federation"
    if settings.flower.grid == "ray":
        return "ray"
    return "here"


NAME_BEFORE_START = "sums-name"
"""The file with the name that identifies a run for sites before its journal has a first line."""


def engine_of(
    prepared: Prepared, folder: Path, identity: Callable[[], str], grid: Grid | None
) -> RunEngine:
    """The engine in a run's settings.

    folder: the run's directory. identity: returns the run's identity. grid: a Flower grid whose
    nodes are the clients; without a grid, Flower's clients work in this process.
    """
    remote = remote_engine(prepared.settings)
    if remote is None:
        return prepared.engine(StoredMemory(folder / "memory"))
    return remote.connect(prepared, folder, identity, grid)


def identity_of(folder: Path) -> str:
    """The identity of the run in a directory, for its clients. It is unique for each run, and a
    resumed run keeps it.

    Before the journal has a first line, the identity is a name in a file. A resumed run then has
    the same identity, so that clients do not add noise to their sums twice.
    """
    if (folder / JOURNAL).stat().st_size > 0:
        return name_for_clients(folder)
    path = folder / NAME_BEFORE_START
    if not path.is_file():
        write_whole(path, secrets.token_hex(8).encode())
    return read_file(path).decode()


@dataclass
class Driver:
    """Executes a run.

    ``progress``: notified of stages and rounds. ``grid``: for an engine over Flower. ``debug``:
    whether the first failing client ends the run. ``on_round``: called with every round's event.
    """

    prepared: Prepared
    folder: Path
    progress: Progress
    grid: Grid | None = None
    debug: bool = False
    on_round: OnRound | None = None
    trackers: Named = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tracking = Tracking(self.folder, self.prepared.settings, self.trackers)
        self.journal = Journal(self.folder / JOURNAL, self._on_event)
        self.engine: RunEngine = engine_of(
            self.prepared, self.folder, lambda: identity_of(self.folder), self.grid
        )
        # Over Flower, client states are stored by the clients.
        memory_folder = None
        if isinstance(self.engine, SerialEngine):
            memory_folder = self.folder / "memory"
            stops = self.debug or self.prepared.settings.rules.failures == "stop"
            self.engine = replace(self.engine, stops_on_failure=stops)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            digest(read_file(self.folder / CONFIG)),
            memory_folder,
            self.prepared.settings.keep_checkpoints_every or 0,
        )
        self._assemble(self.prepared)

    def go(self) -> Result:
        """Run from the last intact checkpoint, or from the beginning, to the end."""
        with self.tracking, torch_threads(ThreadCounts(*self.prepared.settings.threads).alone):
            state = self._run_rounds(self._first_state())
            return self._finish(state)

    def _first_state(self) -> State:
        """The state of the last intact checkpoint, or the initial state."""
        restored = self.checkpoints.latest()
        if restored is None:
            return self._start()
        return self._resume(restored)

    def begin_from(self, restored: Restored, events: Sequence[Event]) -> None:
        """Store the state of another run as a checkpoint of this run, from which ``go`` continues.

        restored: the state; its memory files must be in this run's directory. events: the events of
        the other run's journal up to this state, without the event ``start``.
        """
        self._write_start()
        for event in events:
            self.journal.append(dict(event))
        self.engine.memory.index.update(restored.state_files)
        self.recorder.save(restored.state)

    def close(self) -> None:
        """Close the journal, and stop the engine's threads."""
        self.journal.close()
        self.engine.close()

    def _assemble(self, prepared: Prepared) -> None:
        """Create what depends on the data: extensions, observers, recorder and context."""
        settings, world = prepared.settings, prepared.world
        self.prepared = prepared
        self.split = StoredSplit.of_sites(prepared.sites, world.client_models)
        self.evaluation = Evaluation(prepared)
        extensions = run_extensions(prepared, self.folder)
        selection = selection_of(settings, world, prepared.sites, prepared.metrics)
        memory = self.engine.memory
        local_memory = None
        if isinstance(self.engine, SerialEngine):
            local_memory = memory
        self.recorder = RunRecorder(
            journal=self.journal,
            checkpoints=self.checkpoints,
            memory=memory,
            observers=run_observers(
                prepared,
                extensions,
                self.evaluation,
                self.split,
                selection=selection,
                folder=self.folder,
                memory=local_memory,
            ),
            progress=self.progress,
            start_fields={
                **start_fields(settings, world),
                CONFIG_SHA256: self.checkpoints.config,
                **data_fields(prepared, has_split=self.split is not None),
                **examples_digests(prepared),
            },
            rounds=settings.rounds,
            keepers=extensions.keepers,
            selection=selection,
        )
        self.context: RunContext = run_context(prepared, self.engine, self.recorder, extensions)

    def _start(self) -> State:
        """Start a new run, and return the state before round 1."""
        self.journal.cut(EMPTY_MARK)
        self.recorder.cut(0, 0)
        preliminary = self._complete_preparation()
        method, world = self.context.method, self.context.world
        with in_hook(method, "initial_state", "before round 1"):
            state = checked_return(
                first_state(method, world), State, method.initial_state, "a State"
            )
        self._write_start()
        with self._evaluation_draws(0):
            self.recorder.initial(self._evaluate(state, 0))
        if preliminary is not None:
            self.recorder.append_client_events(preliminary)

        stages = self.context.schedule(0, world)
        if stages:
            return run_round(replace(state, round=0), stages, self.context)
        self.recorder.save(state)
        return state

    def _write_start(self) -> None:
        """Write the client split and the journal's first event."""
        if self.split is not None:
            self.recorder.start_fields["split"] = write_split(self.folder, self.split)
        self.recorder.start()

    def _complete_preparation(self) -> StageResult | None:
        """Collect sums of the data at real sites, and prepare the run again with the resulting
        means and standard deviations. Returns the result of that stage; None if the run does not
        standardise by sums.

        This happens first, so that the journal's first event describes the data as they are used.
        """
        prepared = self.prepared
        settings = prepared.settings
        if not settings.on_sites or prepared.scaler.origin != "summed":
            return None
        remote = remote_engine(settings)
        assert remote is not None  # real sites are reached over a network
        context = self.context
        if prepared.scaler.mean:
            # The run was stopped before its first checkpoint, so it starts again.
            prepared = prepare(settings, prepared.dataset)
            self.engine = remote.informed(self.engine, prepared)
            context = replace(context, world=prepared.world, engine=self.engine)
        sums = sums_work(settings, prepared.dataset.about, prepared.dataset.input_shape)
        moments, result = run_sums(sums, context)
        prepared = prepare(settings, prepared.dataset, moments=moments)
        self.engine = remote.informed(self.engine, prepared)
        self._assemble(prepared)
        return result

    def _resume(self, restored: Restored) -> State:
        """Restore the state of a checkpoint, and pass all earlier events to the observers."""
        self.journal.cut(restored.journal)
        self.recorder.cut(restored.state.round, restored.state.stage)
        events = read_journal(self.journal.path)
        check_same(self.prepared.settings, events[0], self.recorder.all_start_fields())
        if self.split is not None:
            restore_split(self.folder, events[0], self.split)
        for event in events:
            self._on_event(event)
        note_versions(self.journal, events, restored.state, self.prepared.settings.device)
        self.engine.memory.index.update(restored.state_files)
        self.recorder.prune(restored.state)
        return restored.state

    def _run_rounds(self, state: State) -> State:
        last = self.prepared.settings.rounds
        self.progress.started(self.folder, max(1, state.round))
        while state.round <= last and not self.recorder.has_stopped:
            number = state.round
            began = time.perf_counter()
            stages = self.context.schedule(number, self.context.world)
            self.recorder.stages = len(stages)
            state = run_round(state, stages, self.context)
            event = self._record_round(state, number, began)
            self.progress.round(event, last)
            if self.on_round is not None:
                self.on_round(deepcopy(dict(event)))
        return state

    def _record_round(self, state: State, number: int, began: float) -> Event:
        ended = time.perf_counter()
        with self._evaluation_draws(number):
            result = self._evaluate(state, number)
            evaluating = time.perf_counter() - ended
            return self.recorder.round(result, elapsed=ended - began, evaluating=evaluating)

    def _evaluation_draws(self, number: int) -> AbstractContextManager[None]:
        """A context with keyed random numbers for an evaluation, so that a resumed run draws the
        same missing entries of a model.
        """
        return drawing_from(seed_for(self.context.world.seed, number, 0, SERVER, "evaluation"))

    def _evaluate(self, state: State, number: int) -> RoundResult:
        """Evaluate the server's models after a round; 0 is before round 1."""
        method, world = self.context.method, self.context.world
        moment = "before round 1"
        if number:
            moment = f"after round {number}"
        with in_hook(method, "predictors", moment):
            acted = bool(self.recorder.client_events)
            answers = answering_models(method, state, world, clients_acted=acted)
        hook = "predictors"
        if method.has_client_predictors:
            hook = "client_predictors"
        with in_hook(method, hook, moment):
            client_predictors = client_predictors_of(method, answers, state, world)

        predictors = {
            name: as_hook(method, "predictors", moment, predict)
            for name, predict in answers.items()
        }
        client_events: list[Event] = []
        if number:
            client_events = self.recorder.client_events
        return RoundResult(
            number=number,
            client_events=client_events,
            accuracies=self.evaluation.accuracies(number, predictors, client_predictors),
            predictors=predictors,
            client_predictors=client_predictors,
        )

    def _finish(self, state: State) -> Result:
        self.journal.sync()
        settings = self.prepared.settings
        summary = summary_of(settings, read_journal(self.journal.path))
        write_result(self.folder, state, summary)
        self.tracking.finished(summary)
        # Other progress displays also show refusals.
        if "refusals" in summary and isinstance(self.progress, Quiet):
            log.warning("%s: %s", self.folder, summary["refusals"])
        return Result.of(self.folder)

    def _on_event(self, event: Event) -> None:
        """Called with each event of the journal when it is written or when a run is resumed."""
        self.tracking.on_event(dict(event))
        self.recorder.on_event(event)


def as_hook(method: object, name: str, moment: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that a hook returned, so that an exception in a later call names the hook."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with in_hook(method, name, moment):
            return function(*args, **kwargs)

    # inspect.unwrap finds the function.
    return functools.update_wrapper(call, function, assigned=(), updated=())
