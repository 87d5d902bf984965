"""The runner: starts or resumes a run in its directory, and drives the round loop to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedstill.data.examples import Dataset
from fedstill.engines.flower.messages import require_flower
from fedstill.engines.serial import SerialEngine
from fedstill.errors import ConfigError
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.settle import settle
from fedstill.experiment.measures.base import Happened
from fedstill.experiment.on_flower.carried import engine_of
from fedstill.experiment.on_flower.simulated import simulate
from fedstill.experiment.on_flower.submitted import elsewhere, refuse_calls, submit
from fedstill.experiment.preparing.prepared import Prepared, prepare
from fedstill.experiment.progress import Interrupted, OnRound, Progress, Quiet
from fedstill.experiment.run_directory import journal as journals
from fedstill.experiment.run_directory.begun import settings_of
from fedstill.experiment.run_directory.checkpoint import Checkpoints, Restored
from fedstill.experiment.run_directory.claim import locked, new_directory, refuse_used
from fedstill.experiment.run_directory.result import Result, summary_of, write_result
from fedstill.experiment.running.debugging import debugged
from fedstill.experiment.running.measuring import Measuring
from fedstill.experiment.running.own_answers import has_learned
from fedstill.experiment.running.provenance import check_sources, note_versions, versions
from fedstill.files import digest, sweep, write_whole
from fedstill.method import run_census, run_round
from fedstill.origin import returned
from fedstill.records import Payload, Reply, Stage, State
from fedstill.verdicts import part, within
from fedstill.wire.screen import Refusal

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    data: Dataset | None = None,
    watch: Progress | None = None,
    grid: Grid | None = None,
    debug: bool | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Run an experiment in a new directory (``out``, or one under ``runs/``) to its end.

    ``data``: a data set in memory, instead of the one that the config names. ``grid``: for ``engine = "flower"``, the
    Flower grid whose nodes are the clients; without one they work in this process. ``debug``: the first client that
    fails ends the run with ClientFailed, its own exception chained; unset, in tests with ``engine = "serial"`` only.
    ``on_round``: called after every round with what the journal says of it; what it raises ends the run, and ``resume``
    goes on with that round measured again.
    Raises a ConfigError before anything is trained, RunExists for a directory that holds something,
    TooFewReplies, Diverged or MethodFailed while it runs: then the directory keeps the last good state.
    """
    settings = settle(experiment.with_values({"data.name": data.name}, "Python") if data else experiment)
    debug = debugged(debug, settings.engine)
    where = elsewhere(settings) if grid is None else ""
    if data is not None and where == "federation":
        raise ConfigError("data in memory stay in this process: name data that the server has, or leave federation out")
    if settings.engine == "flower":
        require_flower()  # before there is a directory
    prepared = prepare(settings, data)
    folder = new_directory(settings, Path(out) if out else None)
    if where == "ray":
        return simulate(settings, data, folder, lambda ray: run(experiment, folder, data, watch, ray, debug, on_round))
    if where:
        refuse_calls(on_round)
        return submit(settings, folder, False, watch or Quiet())
    with locked(folder):
        refuse_used(folder)
        sweep(folder)
        write_whole(folder / "config.toml", prepared.settings.toml.encode())
        with closing(_Driver(prepared, folder, watch or Quiet(), grid, debug, on_round)) as driver:
            return driver.go()


def resume(
    directory: Path | str,
    data: Dataset | None = None,
    watch: Progress | None = None,
    grid: Grid | None = None,
    debug: bool | None = None,
    on_round: OnRound | None = None,
    **live: Any,
) -> Result:
    """Go on with a run from its last whole checkpoint, to the same bits; a finished run gives its result at once.

    ``debug``, ``on_round``: as for ``run``. ``live``: ``method``, ``model`` or ``partition``, the class, network or
    function that the run was given in Python, where another process began it. Raises CorruptFile if it is another one.
    """
    folder = Path(directory)
    settings = settings_of(folder, **live)
    debug = debugged(debug, settings.engine)
    if grid is None and elsewhere(settings) and not (folder / "summary.json").is_file():
        if elsewhere(settings) == "ray":
            return simulate(settings, data, folder, lambda ray: resume(folder, data, watch, ray, debug, on_round))
        refuse_calls(on_round)
        return submit(settings, folder, True, watch or Quiet())
    with locked(folder):
        if (folder / "summary.json").is_file():
            return Result.of(folder)
        sweep(folder)
        with closing(_Driver(prepare(settings, data), folder, watch or Quiet(), grid, debug, on_round)) as driver:
            return driver.go()


@dataclass
class _Driver:
    """One run from here to its end."""

    prepared: Prepared
    folder: Path
    watch: Progress
    grid: Grid | None = None
    debug: bool = False
    on_round: OnRound | None = None

    def __post_init__(self) -> None:
        settings = self.prepared.settings
        self.settings, self.world, self.method = settings, self.prepared.world, settings.method
        self.journal = journals.Journal(self.folder / "journal.jsonl")
        config, memory = digest((self.folder / "config.toml").read_bytes()), self.folder / "memory"
        self.engine = engine_of(self.prepared, self.folder, self._identity, self.grid)
        local = isinstance(self.engine, SerialEngine)  # on Flower, memories are on the clients' disks
        if isinstance(self.engine, SerialEngine):
            self.engine = replace(self.engine, debug=self.debug)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config, memory if local else None)
        self.measuring = Measuring(self.prepared, folder=self.folder, memory=self.engine.memory if local else None)
        self.saving = 0.0
        self.before: State | None = None
        self.stages: Sequence[Stage] = ()

    def go(self) -> Result:
        """From the last whole checkpoint; from the beginning if there is none."""
        restored = self.checkpoints.latest()
        if restored is None:
            self.journal.cut(journals.START)
            return self._start()
        return self._resume(restored)

    def _start(self) -> Result:
        with part(self.method, "setup", "before round 1"):
            state = self.before = returned(self.method.setup(self.world), State, self.method.setup, "a State")
        self.journal.write(
            "start", seconds_since_1970=time.time(), **versions(self.settings, self.world), **self.measuring.split()
        )
        self.journal.write("initial", **self.measuring.initial(self._predictors(state)))
        if "label_counts" in self.method.requires():
            state = run_census(state, self.world, self.engine, self, self.settings.rules)
        else:
            self._save(state)
        return self._rounds(state)

    def _resume(self, restored: Restored) -> Result:
        self.journal.cut(restored.journal)
        events = journals.read_journal(self.journal.path)
        check_sources(self.settings, events[0])
        self.measuring.replay(events)
        note_versions(self.journal, events, restored.state)
        self.engine.memory.index.update(restored.memory)
        self.engine.memory.prune(self.checkpoints.prune(restored.state))
        self.before = restored.state
        return self._rounds(restored.state)

    def close(self) -> None:
        """Close the journal, and end the engine's threads."""
        self.journal.close()
        self.engine.close()

    def _rounds(self, state: State) -> Result:
        last = self.settings.rounds
        while state.round <= last:
            self.stages = self.settings.topology(state.round, self.world)
            began, measured = time.perf_counter(), self.measuring.spent
            state = run_round(self.method, state, self.stages, self.world, self.engine, self, self.settings.rules)
            saving, self.saving = self.saving, 0.0
            training = time.perf_counter() - began - saving - (self.measuring.spent - measured)
            event = self.measuring.round(state.round - 1, self._predictors(state), training, saving)
            self.journal.write("round", **event)
            self.watch.round(event, last)
            if self.on_round is not None:
                self.on_round(dict(event))
        self.journal.sync()
        rounds = [e for e in journals.read_journal(self.folder / "journal.jsonl") if e["event"] == "round"]
        write_result(self.folder, state, summary_of(self.settings, rounds, self.measuring.seconds))
        return Result.of(self.folder)

    def stage(
        self,
        stage: Stage,
        replies: Sequence[Reply],
        refused: Sequence[Refusal],
        downs: Mapping[int, Payload],
        state: State,
    ) -> None:
        """Journal, measure and save a stage that is done (``watch.Watch``)."""
        began = time.perf_counter()
        for event in self.measuring.stage(stage, replies, refused, downs):
            self.journal.append(event)
        measured = self.measuring.spent
        for event in self.measuring.look(self._happened(stage, replies, downs, state)):
            self.journal.append(event)
        self.before = state
        self._save(state)
        self.saving += time.perf_counter() - began - (self.measuring.spent - measured)
        self.watch.stage(stage.round, self.settings.rounds, stage.index, len(self.stages))
        if self.watch.stop():
            raise Interrupted(str(self.folder))

    def failed(
        self, stage: Stage, replies: Sequence[Reply], refused: Sequence[Refusal], downs: Mapping[int, Payload]
    ) -> None:
        """Journal a stage that ends the run. No checkpoint: a resume cuts the journal to the last."""
        for event in self.measuring.stage(stage, replies, refused, downs):
            self.journal.append(event)
        self.journal.sync()

    def _happened(self, stage: Stage, replies: Sequence[Reply], downs: Mapping[int, Payload], state: State) -> Happened:
        ends_round = stage.index + 1 == len(self.stages)
        ends_run = ends_round and stage.round == self.settings.rounds
        return Happened(stage, replies, downs, self.before or state, state, ends_round, ends_run)

    def _save(self, state: State) -> None:
        named = self.checkpoints.save(state, dict(self.engine.memory.index), self.journal.sync())
        self.engine.memory.prune(named)

    def _predictors(self, state: State) -> dict[str, Callable[[Tensor], Tensor]]:
        torch.set_num_threads(self.settings.threads[1])
        where = f"after round {state.round - 1}" if state.round > 1 else "before round 1"
        with part(self.method, "predictors", where):
            learned = has_learned(self.method, state, self.world)
            named = dict(self.method.predictors(state, self.world)) if learned else {}
        return {name: within(self.method, "predictors", where, predict) for name, predict in named.items()}

    def _identity(self) -> str:
        """Which run this is, for its clients: the same after a resume, another for every run."""
        with self.journal.path.open("rb") as file:
            return digest(file.readline())[:16]
