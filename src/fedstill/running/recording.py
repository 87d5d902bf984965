"""What a run writes: the journal's events, and a checkpoint after every stage.

The events of a stage, the files that are kept of it, the checkpoint after it and the deletion of
older ones are one transaction: a run that is killed goes on from the last checkpoint, and drops all
that was written beyond it.
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
from fedstill.core.reports import event_fields
from fedstill.data.dataset import examples_digest
from fedstill.engines.serial import Memory
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.client_evaluation import ClientAnswers, ClientTests, SiteTests
from fedstill.running.evaluation import Evaluation, tests_by_class
from fedstill.running.extensions import Extensions
from fedstill.running.journal import Journal
from fedstill.running.observers import Forgetting, Measures, TaskEnds, Traffic
from fedstill.running.preparation import Prepared
from fedstill.running.selection import Selection
from fedstill.running.split_file import StoredSplit
from fedstill.running.standardisation import Scaler

OnRound = Callable[[dict[str, Any]], object]
"""Called in Python after each round, with the fields of the journal's event."""


class Progress(Protocol):
    """Is told of every stage and every round that is done, and may ask the run to stop."""

    def started(self, folder: Path, round: int) -> None:
        """The run starts in its directory, or goes on there with a round."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """A stage is done."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """A round is done and measured."""

    def stop(self) -> bool:
        """Whether to end after this stage."""


class Quiet:
    """Shows nothing and never stops a run."""

    def started(self, folder: Path, round: int) -> None:
        """Nothing."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Nothing."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Nothing."""

    def stop(self) -> bool:
        """Never."""
        return False


# ---- what the journal's first event says of the data ---------------------------------------------

MOST_NAMES = 10_000
"""With more clients than this, the journal leaves out their names."""


def data_fields(prepared: Prepared, has_split: bool) -> Fields:
    """What the first event says of the data: classes, label counts of the test set, how inputs are
    made of examples, networks, names, and what was left out.

    has_split: whether a split stands beside the journal, which then says who has which network.
    """
    data = prepared.dataset
    networks = prepared.world.client_models
    names = prepared.client_names
    fields: Fields = {
        "classes": list(data.classes),
        "inputs": {
            **prepared.sites.inputs.description(data.train.values),
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


def examples_seal(prepared: Prepared) -> Fields:
    """The SHA-256 of all examples by split; none of real sites' own, nor of features, which differ
    by the processor.
    """
    data = prepared.dataset
    if prepared.settings.on_sites or data.backbone_inputs is not None:
        return {}
    splits = {"train": data.train, "test": data.test, "public": prepared.sites.public}
    return {
        "examples_sha256": {
            name: examples_digest(each) for name, each in splits.items() if each is not None
        }
    }


def _standardised(scaler: Scaler) -> Fields:
    """Whose mean and spread standardise the data, and the clients' own if they have them."""
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
    selection: Selection | None = None,
    folder: Path | None = None,
    memory: Memory | None = None,
) -> tuple[Observer, ...]:
    """The observers of a run, in their order; measures come last, because they may give no field of
    another.

    split: None where sites keep their data. selection: compares the rounds, if they are compared.
    folder: the run's directory. memory: what clients remember, if it is in this process.
    """
    settings, world, sites = prepared.settings, prepared.world, prepared.sites
    label_counts = split.label_counts(world.classes) if split else ()
    personal = settings.method.personal
    selections = () if selection is None else (selection,)
    return (
        Forgetting(),
        *extensions.observers,
        ClientAnswers(personal, label_counts, tests_by_class(sites, world.classes)),
        ClientTests(sites, personal, prepared.metrics),
        SiteTests(prepared.metrics, personal),
        TaskEnds(prepared, evaluation),
        Traffic(world, Need.SAME_SHAPES in settings.method.requires()),
        *selections,
        Measures(prepared, extensions.round_hooks, folder, memory),
    )


# ---- the transaction -----------------------------------------------------------------------------


@dataclass
class RunRecorder:
    """Writes the events of a run and its checkpoints (``core.extensions.Recorder``).

    ``memory``: what clients remember, of which checkpoints keep the index. ``start_fields``: the
    fields of the first event that do not come from observers. ``rounds``: how many the run has.
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
    """How many stages the round under way has."""
    client_events: list[Event] = field(default_factory=list)
    """The events of clients in the round under way."""
    _seconds_saving: float = 0.0
    _seconds_measuring: float = 0.0
    _cpu_seconds: float = field(default_factory=time.process_time)
    """What this process had spent when the last round ended."""

    def start(self) -> None:
        """Write the first event."""
        self.journal.write("start", seconds_since_1970=time.time(), **self.all_start_fields())

    def all_start_fields(self) -> Fields:
        """What the first event says, without its time."""
        fields = dict(self.start_fields)
        for observer in self.observers:
            fields |= observer.start_fields()
        return fields

    def initial(self, result: RoundResult) -> None:
        """Write what the server's models are worth before round 1."""
        self.journal.write("initial", **result.accuracies)
        self._append_round_events(result)

    def stage(self, result: StageResult) -> None:
        """Write a finished stage, and save the state after it. Raises Interrupted if the run is
        asked to stop.
        """
        began = time.perf_counter()
        # Files come before the events that name them, and both before the checkpoint.
        kept = self._keep(result)
        self.append_client_events(result, kept)
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
        """Write a stage that ends the run. It has no checkpoint, so a resumed run drops it."""
        if self.journal.is_empty:
            self.start()
        self.append_client_events(result)
        self.journal.sync()

    def round(self, result: RoundResult, elapsed: float, evaluating: float) -> Fields:
        """Write a finished round, and return its event.

        elapsed: seconds of its stages; evaluating: seconds of its evaluation.
        """
        began = time.perf_counter()
        fields: Fields = {"round": result.number, **result.accuracies}
        for observer in self.observers:
            fields |= observer.round_fields(result, fields)

        measuring = self._seconds_measuring + evaluating + time.perf_counter() - began
        fields |= self._seconds(elapsed, measuring)
        self.journal.write("round", **fields)
        self._append_round_events(result)
        return fields

    def append_client_events(
        self, result: StageResult, kept: Mapping[int, Fields] | None = None
    ) -> None:
        """Write one event for each client of a stage: accepted, refused, or without work.

        ``kept``: fields of accepted clients on what was kept of their replies.
        """
        for event in events_of_clients(result, kept or {}):
            for observer in self.observers:
                event |= observer.client_fields(event, result)
            self.journal.append(event)

    def save(self, state: State) -> None:
        """Make the journal and a state durable, and delete what no checkpoint needs any more."""
        needed = self.checkpoints.save(
            state,
            dict(self.memory.index),
            self.journal.mark(),
            beside=self.journal.sync,
            rounds=self.kept_rounds,
        )
        self.memory.prune(needed)

    def prune(self, state: State) -> None:
        """Delete what no checkpoint up to a state needs any more; a killed run may have left it."""
        self.memory.prune(self.checkpoints.prune(state, self.kept_rounds))

    @property
    def kept_rounds(self) -> list[int]:
        """The rounds of which a checkpoint is kept to the end: the best one so far."""
        if self.selection is None or self.selection.standing.best is None:
            return []
        return [self.selection.standing.best]

    @property
    def has_stopped(self) -> bool:
        """Whether the run ends before its last round."""
        return self.selection is not None and bool(self.selection.stopped_because)

    def cut(self, round: int, stage: int) -> None:
        """Delete what was kept of this stage and of later ones; the run begins or goes on here."""
        for keeper in self.keepers:
            keeper.cut(round, stage)

    def on_event(self, event: Event) -> None:
        """Take notice of an event: when it is written, and when a run is resumed."""
        if event["event"] == "client":
            self.client_events.append(event)
        elif event["event"] == "round":
            self.client_events = []
        for observer in self.observers:
            observer.on_event(event)

    def _keep(self, result: StageResult) -> Mapping[int, Fields]:
        """Keep files of a stage; fields for the events of accepted clients."""
        fields: dict[int, Fields] = {reply.client: {} for reply in result.accepted}
        for keeper in self.keepers:
            for client, of_keeper in keeper.keep(result).items():
                fields[client] |= of_keeper
        return fields

    def _append_stage_events(self, result: StageResult) -> float:
        """Write what observers see in a stage; the seconds that it took."""
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
        """The times of a round's event; the clocks of the next round start."""
        training = elapsed - self._seconds_saving - self._seconds_measuring
        cpu_before = self._cpu_seconds
        self._cpu_seconds = time.process_time()
        seconds: Fields = {
            "seconds_training": training,
            "seconds_saving": self._seconds_saving,
            "seconds_clients": sum(e.get("seconds_training", 0.0) for e in self.client_events),
            "seconds_measuring": measuring,
            "seconds_cpu": self._cpu_seconds - cpu_before,
            "seconds": training + self._seconds_saving + measuring,
        }
        self._seconds_saving = 0.0
        self._seconds_measuring = 0.0
        return seconds


def events_of_clients(result: StageResult, update_fields: Mapping[int, Fields]) -> Iterator[Fields]:
    """The events of a stage's clients, without the fields of observers.

    ``update_fields``: fields of accepted clients on what was kept of their replies.
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
            **update_fields.get(reply.client, {}),
        }
    for refusal in result.refused:
        payload = result.payloads.get(refusal.client)
        yield {
            **position,
            "client": refusal.client,
            "refused": refusal.reason,
            "bytes_down": 0 if payload is None else payload.nbytes,
        }
    for client in stage.clients:
        if client not in result.payloads:
            yield {**position, "client": client, "idle": True}
