"""Writes a run to its directory: the journal's events, and a checkpoint after every stage.

The events of a stage, its files, its checkpoint and the deletion of older checkpoints are one
transaction. If a run is killed, it resumes from the last checkpoint and drops everything that was
written after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedstill.core.capabilities import Need
from fedstill.core.errors import Interrupted
from fedstill.core.extensions import Event, Fields, Observer, RoundResult, StageKeeper, StageResult
from fedstill.core.records import State
from fedstill.core.reports import METHOD_REPORT
from fedstill.data.dataset import examples_digest
from fedstill.engines.serial import Memory
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.client_evaluation import ClientAnswers, ClientTests, SiteTests
from fedstill.running.evaluation import Evaluation, tests_by_class
from fedstill.running.extensions import Extensions
from fedstill.running.journal import Journal
from fedstill.running.model_files import inputs_description
from fedstill.running.observers import Forgetting, Measures, TaskEnds, Traffic
from fedstill.running.preparation import Prepared
from fedstill.running.selection import Selection
from fedstill.running.split_file import StoredSplit
from fedstill.running.standardisation import Scaler

OnRound = Callable[[dict[str, Any]], object]
"""Called in Python after each round, with the fields of the journal's event."""


class Progress(Protocol):
    """Is called after each stage and each round, and may stop the run."""

    def started(self, folder: Path, round: int) -> None:
        """Called when a run starts, or resumes with this round."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Called after a stage."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Called after a round and its evaluation, with the journal's event."""

    def stop(self) -> bool:
        """Whether to stop the run after this stage."""


class NoProgress:
    """Shows no progress."""

    def started(self, folder: Path, round: int) -> None:
        """Do nothing."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Do nothing."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Do nothing."""


class Quiet(NoProgress):
    """Shows no progress and never stops a run."""

    def stop(self) -> bool:
        """Return False: the run goes on."""
        return False


# ---- the data, in the journal's first event ------------------------------------------------------

MOST_NAMES = 10_000
"""With more clients than this, the journal leaves out their names."""


def data_fields(prepared: Prepared, has_split: bool) -> Fields:
    """The fields of the first event that describe the data: classes, label counts of the test set,
    inputs, networks, names of clients, and notes.

    has_split: whether the run's directory has a split file. That file names the networks, so the
    event leaves them out.
    """
    data = prepared.dataset
    networks = prepared.world.client_models
    names = prepared.client_names
    fields: Fields = {
        "classes": list(data.classes),
        "inputs": {
            **inputs_description(prepared.sites.inputs, data.train.values),
            **_standardised(prepared.scaler),
        },
        "test_counts": tests_by_class(prepared.sites, prepared.world.classes),
    }
    if data.backbone_inputs is not None:
        fields["backbone_inputs"] = data.backbone_inputs
    if not has_split and len(set(networks)) > 1:
        fields["models"] = [spec.label for spec in networks]
    if 0 < len(names) <= MOST_NAMES:
        fields["client_names"] = list(names)
    if prepared.notes:
        fields["notes"] = list(prepared.notes)
    return fields


def examples_digests(prepared: Prepared) -> Fields:
    """The SHA-256 of the examples of each split.

    Empty for data of real sites, which stay there, and for features of a backbone, whose bits
    depend on the processor.
    """
    data = prepared.dataset
    if prepared.settings.on_sites or data.backbone_inputs is not None:
        return {}
    digests = {"train": examples_digest(data.train), "test": examples_digest(data.test)}
    if prepared.sites.public is not None:
        digests["public"] = examples_digest(prepared.sites.public)
    return {"examples_sha256": digests}


def _standardised(scaler: Scaler) -> Fields:
    """The source of the mean and standard deviation of the inputs; by client, the values."""
    if scaler.origin == "none":
        return {}
    fields: Fields = {"standardise": scaler.origin}
    moments_by_client = scaler.by_client or {}
    if 0 < len(moments_by_client) <= MOST_NAMES:
        fields["by_client"] = {
            str(client): {"mean": list(moments.mean), "std": list(moments.std)}
            for client, moments in sorted(moments_by_client.items())
        }
    return fields


# ---- observers -----------------------------------------------------------------------------------


def run_observers(
    prepared: Prepared,
    extensions: Extensions,
    evaluation: Evaluation,
    split: StoredSplit | None,
    *,
    selection: Selection | None,
    folder: Path,
    memory: Memory | None,
) -> tuple[Observer, ...]:
    """The observers of a run, in their order.

    Measures come last: they must not return a field that another observer has written.

    split: None if the data are at real sites.
    selection: compares the rounds; None if they are not compared.
    folder: the run's directory.
    memory: the states of clients; None if they are in another process.
    """
    method = prepared.settings.method
    world = prepared.world
    sites = prepared.sites
    label_counts: Sequence[Sequence[int]] = ()
    if split is not None:
        label_counts = split.label_counts(world.classes)

    observers = [
        Forgetting(),
        *extensions.observers,
        ClientAnswers(method.personal, label_counts, tests_by_class(sites, world.classes)),
        ClientTests(sites, method.personal, prepared.metrics),
        SiteTests(prepared.metrics, method.personal),
        TaskEnds(prepared, evaluation),
        Traffic(world, Need.SAME_SHAPES in method.requires()),
    ]
    if selection is not None:
        observers.append(selection)
    observers.append(Measures(prepared, extensions.round_hooks, folder, memory))
    return tuple(observers)


# ---- the transaction -----------------------------------------------------------------------------


@dataclass
class RunRecorder:
    """Writes the events of a run and its checkpoints (``core.extensions.Recorder``).

    memory: the states of clients; checkpoints contain its index.
    start_fields: the fields of the first event that do not come from observers.
    rounds: the number of planned rounds.
    """

    journal: Journal
    checkpoints: Checkpoints
    memory: Memory
    observers: Sequence[Observer]
    progress: Progress
    start_fields: Fields
    rounds: int
    keepers: Sequence[StageKeeper] = ()
    selection: Selection | None = None
    """Compares the rounds; None if they are not compared."""
    stages: int = 1
    """The number of stages in the current round."""
    client_events: list[Event] = field(default_factory=list)
    """The events of clients in the current round."""
    _seconds_saving: float = 0.0
    _seconds_measuring: float = 0.0
    _cpu_seconds: float = field(default_factory=time.process_time)
    """The CPU time of this process at the end of the last round."""

    def start(self) -> None:
        """Write the first event."""
        self.journal.write("start", seconds_since_1970=time.time(), **self.all_start_fields())

    def all_start_fields(self) -> Fields:
        """The fields of the first event, except its time."""
        fields = dict(self.start_fields)
        for observer in self.observers:
            fields |= observer.start_fields()
        return fields

    def initial(self, result: RoundResult) -> None:
        """Write the evaluation of the server's models before round 1."""
        self.journal.write("initial", **result.accuracies)
        self._append_round_events(result)

    def stage(self, result: StageResult) -> None:
        """Write a finished stage, and save the state after it.

        Raises Interrupted if ``progress`` stops the run.
        """
        began = time.perf_counter()
        # Files come before the events that name them, and both before the checkpoint.
        file_fields = self._write_files(result)
        self.append_client_events(result, file_fields)
        measured = self._append_stage_events(result)
        self.save(result.after)
        stage = result.stage
        # The times of a round do not contain those of the stages before round 1.
        if stage.round > 0:
            self._seconds_measuring += measured
            self._seconds_saving += time.perf_counter() - began - measured
        self.progress.stage(stage.round, self.rounds, stage.index, self.stages)
        if self.progress.stop():
            raise Interrupted(str(self.journal.path.parent))

    def failed(self, result: StageResult, error: Exception) -> None:
        """Write a failed stage, which ends the run. It has no checkpoint, so a resumed run drops
        its events.
        """
        if self.journal.is_empty:
            self.start()
        self.append_client_events(result)
        self.journal.sync()

    def round(self, result: RoundResult, elapsed: float, evaluating: float) -> Event:
        """Write a finished round, and return its event as it is in the journal.

        elapsed: the seconds of its stages. evaluating: the seconds of its evaluation.
        """
        began = time.perf_counter()
        fields: Fields = {"round": result.number, **result.accuracies}
        for observer in self.observers:
            fields |= observer.round_fields(result, fields)

        measuring = self._seconds_measuring + evaluating + time.perf_counter() - began
        fields |= self._seconds(elapsed, measuring)
        event = self.journal.write("round", **fields)
        self._append_round_events(result)
        return event

    def append_client_events(
        self, result: StageResult, file_fields: Mapping[int, Fields] | None = None
    ) -> None:
        """Write an event for each client of a stage: accepted, refused or idle.

        file_fields: by accepted client, the fields that describe its files.
        """
        for event in events_of_clients(result, file_fields or {}):
            for observer in self.observers:
                event |= observer.client_fields(event, result)
            self.journal.append(event)

    def save(self, state: State) -> None:
        """Make the journal and a state durable, and delete states of clients that no checkpoint
        needs.
        """
        needed = self.checkpoints.save(
            state,
            dict(self.memory.index),
            self.journal.mark(),
            beside=self.journal.sync,
            rounds=self.kept_rounds,
        )
        self.memory.prune(needed)

    def prune(self, state: State) -> None:
        """Delete files that the last checkpoints up to a state do not need. A killed run may have
        left some.
        """
        self.memory.prune(self.checkpoints.prune(state, self.kept_rounds))

    @property
    def kept_rounds(self) -> list[int]:
        """The rounds whose checkpoints stay until the end: the best round so far, if any."""
        if self.selection is None or self.selection.standing.best is None:
            return []
        return [self.selection.standing.best]

    @property
    def has_stopped(self) -> bool:
        """Whether the run stops before its last planned round."""
        return self.selection is not None and bool(self.selection.stopped_because)

    def cut(self, round: int, stage: int) -> None:
        """Delete the files of this stage and of later ones; the run starts or resumes here."""
        for keeper in self.keepers:
            keeper.cut(round, stage)

    def on_event(self, event: Event) -> None:
        """Update the recorder and its observers with an event, when it is written and when a run
        is resumed.
        """
        if event["event"] == "client":
            self.client_events.append(event)
        elif event["event"] == "round":
            self.client_events = []
        for observer in self.observers:
            observer.on_event(event)

    def _write_files(self, result: StageResult) -> Mapping[int, Fields]:
        """Write the files of a stage; returns the fields that describe them, by accepted client."""
        fields: dict[int, Fields] = {reply.client: {} for reply in result.accepted}
        for keeper in self.keepers:
            for client, keeper_fields in keeper.keep(result).items():
                fields[client] |= keeper_fields
        return fields

    def _append_stage_events(self, result: StageResult) -> float:
        """Write the observers' events of a stage; returns the seconds that this took."""
        began = time.perf_counter()
        for observer in self.observers:
            for event in observer.stage_events(result):
                self.journal.append(dict(event))
        return time.perf_counter() - began

    def _append_round_events(self, result: RoundResult) -> None:
        for observer in self.observers:
            for event in observer.round_events(result):
                self.journal.append(dict(event))

    def _seconds(self, elapsed: float, measuring: float) -> Fields:
        """The times of a round's event; resets the clocks for the next round."""
        training = elapsed - self._seconds_saving - self._seconds_measuring
        cpu_seconds = time.process_time()
        seconds: Fields = {
            "seconds_training": training,
            "seconds_saving": self._seconds_saving,
            "seconds_clients": sum(e.get("seconds_training", 0.0) for e in self.client_events),
            "seconds_measuring": measuring,
            "seconds_cpu": cpu_seconds - self._cpu_seconds,
            "seconds": training + self._seconds_saving + measuring,
        }
        self._cpu_seconds = cpu_seconds
        self._seconds_saving = 0.0
        self._seconds_measuring = 0.0
        return seconds


def events_of_clients(result: StageResult, file_fields: Mapping[int, Fields]) -> Iterator[Fields]:
    """The events of a stage's clients, without the fields of observers.

    file_fields: by accepted client, the fields that describe its files.
    """
    stage = result.stage
    position = {"event": "client", "round": stage.round, "stage": stage.index, "name": stage.name}
    for reply in result.accepted:
        yield {
            **position,
            "client": reply.client,
            "examples": reply.examples,
            "bytes_up": reply.content.nbytes,
            "bytes_down": result.payloads[reply.client].nbytes,
            **event_fields(reply.metrics),
            **file_fields.get(reply.client, {}),
        }
    for refusal in result.refused:
        bytes_down = 0
        if refusal.client in result.payloads:
            bytes_down = result.payloads[refusal.client].nbytes
        yield {
            **position,
            "client": refusal.client,
            "refused": refusal.reason,
            "bytes_down": bytes_down,
        }
    for client in stage.clients:
        if client not in result.payloads:
            yield {**position, "client": client, "idle": True}


def event_fields(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A reply's metrics as fields of its event; the method's report becomes fields, too.

    >>> event_fields({"steps": 3, "report": {"helper": 2}, "seconds": 0.5})
    {'steps': 3, 'helper': 2, 'seconds': 0.5}
    """
    fields: dict[str, Any] = {}
    for name, value in metrics.items():
        if name == METHOD_REPORT:
            fields |= value
        else:
            fields[name] = value
    return fields
