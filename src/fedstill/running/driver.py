"""The drive through a run: its stages and rounds, what is written when, and how it goes on after a
stop.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedstill.core.checks import as_hook, in_hook
from fedstill.core.errors import Interrupted
from fedstill.core.files import digest, write_whole
from fedstill.core.process_settings import torch_threads
from fedstill.core.records import Stage, State
from fedstill.core.results import StageResult
from fedstill.core.rounds import RunContext, run_round
from fedstill.core.user_code import returned
from fedstill.engines.serial import SerialEngine
from fedstill.flower.run_engine import engine_of, informed
from fedstill.privacy.budget import WithinBudget
from fedstill.privacy.compatibility import with_masking
from fedstill.privacy.noised_sums import sums_work
from fedstill.running import journal as journals
from fedstill.running.checkpoint import Checkpoints, Restored
from fedstill.running.context import run_context
from fedstill.running.data_sums import run_sums
from fedstill.running.evaluation import evaluated_answers
from fedstill.running.hostile_clients import with_hostile
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.progress import OnRound, Progress, Quiet
from fedstill.running.provenance import check_same, note_versions, versions
from fedstill.running.recording import Measuring
from fedstill.running.result import Result, summary_of, write_result
from fedstill.running.split_file import restore_split, write_split
from fedstill.running.tracking import Named, Tracking

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("fedstill.run")

BEFORE = "sums-name"
"""The file with the name by which real sites know a run while they send their sums."""


@dataclass
class Driver:
    """One run from where its directory stands to its end; ``watch`` is told of stages and
    rounds.
    """

    prepared: Prepared
    folder: Path
    watch: Progress
    grid: Grid | None = None
    debug: bool = False
    on_round: OnRound | None = None
    trackers: Named = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.prepared.settings
        self.settings, self.world, self.method = settings, self.prepared.world, settings.method
        self.tracking = Tracking(self.folder, settings, self.trackers)
        self.journal = journals.Journal(self.folder / "journal.jsonl", self.tracking.take)
        config, memory = digest((self.folder / "config.toml").read_bytes()), self.folder / "memory"
        self.token = ""
        self.engine = engine_of(self.prepared, self.folder, self._identity, self.grid)
        # on Flower, memories are on the clients' disks
        local = isinstance(self.engine, SerialEngine)
        if isinstance(self.engine, SerialEngine):
            self.engine = replace(
                self.engine, stops=self.debug or settings.rules.failures == "stop"
            )
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            config,
            memory if local else None,
            settings.keep_checkpoints_every or 0,
        )
        self.measuring = Measuring(
            self.prepared, folder=self.folder, memory=self.engine.memory if local else None
        )
        self.saving = 0.0
        self.stages: Sequence[Stage] = ()

    def go(self) -> Result:
        """From the last whole checkpoint; from the beginning if there is none."""
        with self.tracking, torch_threads(self.settings.threads[1]):
            restored = self.checkpoints.latest()
            if restored is None:
                self.journal.cut(journals.START)
                return self._start()
            return self._resume(restored)

    def _start(self) -> Result:
        summed = self._sums()
        with in_hook(self.method, "initial_state", "before round 1"):
            state = returned(
                self.method.initial_state(self.world), State, self.method.initial_state, "a State"
            )
        told = self._told() | (
            {"split": write_split(self.folder, s)} if (s := self.measuring.split) else {}
        )
        self.journal.write("start", seconds_since_1970=time.time(), **told)
        self.journal.write("initial", **self.measuring.initial(asked := self._predictors(state)))
        self._task_end(0, asked)
        if summed is not None:
            self._append(summed)
        first = self.settings.schedule(0, self.world)
        if first:
            state = run_round(replace(state, round=0), first, self._context())
        else:
            self._save(state)
        return self._rounds(state)

    def _sums(self) -> StageResult | None:
        """What real sites' sums came to, where they are standardised by these; the run then goes on
        with them as facts.

        It is the first that happens, so that the journal's first line says by what inputs are
        standardised. Until there is one, sites know the run by a name of its own.
        """
        ready = self.prepared
        if not (self.settings.on_sites and ready.scaler.origin == "summed"):
            return None
        if ready.scaler.mean:
            # The run was stopped before its first checkpoint, and begins anew.
            ready = prepare(self.settings, ready.dataset)
            self.engine = informed(self.engine, ready)
        self.token = self._named_before()
        work = sums_work(self.settings, ready.dataset.about, ready.dataset.input_shape)
        moments, summed = run_sums(work, self._context())
        self.token = ""
        self.prepared = prepare(self.settings, ready.dataset, sent=moments)
        self.world, self.engine = self.prepared.world, informed(self.engine, self.prepared)
        self.measuring = replace(self.measuring, prepared=self.prepared)
        return summed

    def _resume(self, restored: Restored) -> Result:
        self.journal.cut(restored.journal)
        events = journals.read_journal(self.journal.path)
        check_same(self.settings, events[0], self.measuring.about())
        if self.measuring.split is not None:
            restore_split(self.folder, events[0], self.measuring.split)
        self.measuring.replay(events)
        for event in events:
            self.tracking.take(event)
        note_versions(self.journal, events, restored.state, self.settings.device)
        self.engine.memory.index.update(restored.memory)
        self.engine.memory.prune(self.checkpoints.prune(restored.state))
        return self._rounds(restored.state)

    def close(self) -> None:
        """Close the journal, and end the engine's threads."""
        self.journal.close()
        self.engine.close()

    def _rounds(self, state: State) -> Result:
        last = self.settings.rounds
        self.watch.started(self.folder, max(1, state.round))
        while state.round <= last:
            self.stages = self.settings.schedule(state.round, self.world)
            began, measured = time.perf_counter(), self.measuring.spent
            state = run_round(state, self.stages, self._context())
            saving, self.saving = self.saving, 0.0
            training = time.perf_counter() - began - saving - (self.measuring.spent - measured)
            event = self.measuring.round(
                state.round - 1, asked := self._predictors(state), training, saving
            )
            self.journal.write("round", **event)
            self._task_end(state.round - 1, asked)
            self.watch.round(event, last)
            if self.on_round is not None:
                self.on_round(dict(event))
        self.journal.sync()
        events = journals.read_journal(self.journal.path)
        summary = summary_of(self.settings, events, self.measuring.seconds)
        write_result(self.folder, state, summary)
        self.tracking.finished(summary)
        # whoever watches the run shows it
        if "refusals" in summary and isinstance(self.watch, Quiet):
            log.warning("%s: %s", self.folder, summary["refusals"])
        return Result.of(self.folder)

    def _context(self) -> RunContext:
        """What the rounds share; the engine asks nobody for more than the budget has left."""
        masked = with_masking(with_hostile(self.engine, self.settings), self.settings, self.folder)
        return run_context(self.prepared, WithinBudget(masked, self.measuring.budget), self)

    def stage(self, result: StageResult) -> None:
        """Journal, measure and save a stage that is done (``core.extensions.Recorder``)."""
        stage = result.stage
        began = time.perf_counter()
        self._append(result)
        measured = self.measuring.spent
        for event in self.measuring.look(result):
            self.journal.append(event)
        self._save(result.after)
        self.saving += time.perf_counter() - began - (self.measuring.spent - measured)
        self.watch.stage(stage.round, self.settings.rounds, stage.index, len(self.stages))
        if self.watch.stop():
            raise Interrupted(str(self.folder))

    def failed(self, result: StageResult, error: Exception) -> None:
        """Journal a stage that ends the run. No checkpoint: a resume cuts the journal to the
        last.
        """
        if self.token:  # of a stage before the journal's first line
            self.journal.write("start", seconds_since_1970=time.time(), **self._told())
        self._append(result)
        self.journal.sync()

    def _task_end(self, round: int, predictors: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        if event := self.measuring.tasks.event(round, predictors):
            self.journal.append(event)

    def _append(self, result: StageResult) -> None:
        for event in self.measuring.stage(result):
            self.journal.append(event)

    def _told(self) -> dict[str, Any]:
        seal = {journals.CONFIG_SEAL: self.checkpoints.config}
        return {**versions(self.settings, self.world), **seal, **self.measuring.about()}

    def _save(self, state: State) -> None:
        memory, journal = self.engine.memory, self.journal
        memory.prune(
            self.checkpoints.save(state, dict(memory.index), journal.mark(), beside=journal.sync)
        )

    def _predictors(self, state: State) -> dict[str, Callable[[Tensor], Tensor]]:
        where = f"after round {state.round - 1}" if state.round > 1 else "before round 1"
        with in_hook(self.method, "predictors", where):
            named = evaluated_answers(self.method, state, self.world)
        return {
            name: as_hook(self.method, "predictors", where, predict)
            for name, predict in named.items()
        }

    def _named_before(self) -> str:
        """What sites call the run before its journal begins: one name, so that sums with noise are
        not drawn twice.
        """
        path = self.folder / BEFORE
        if not path.is_file():
            write_whole(path, secrets.token_hex(8).encode())
        return path.read_text(encoding="utf-8")

    def _identity(self) -> str:
        """Which run this is, for its clients: the same after a resume, another for every run."""
        if self.token:
            return self.token
        with self.journal.path.open("rb") as file:
            return digest(file.readline())[:16]
