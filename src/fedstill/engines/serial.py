"""The serial engine, the reference: one client after another, in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedstill.core.checks import (
    MutationGuard,
    checked_return,
    journal_fields,
    place,
    sent_and_remembered,
)
from fedstill.core.errors import ChangedInPlace, ClientFailed, CorruptFile
from fedstill.core.extensions import ClientHook, Fields, GradientRule
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    KEEP,
    NOTHING,
    SERVER,
    Examples,
    Keep,
    Payload,
    Reply,
    Stage,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.screen import METHOD_REPORT
from fedstill.core.trees import dtype_of
from fedstill.engines.clients import TrainingSetup, trained_labels
from fedstill.engines.hardware import Precision, ThreadCounts, keep_freed_memory, torch_threads
from fedstill.engines.loop import Trained, train
from fedstill.engines.step import FrozenModel, frozen

if TYPE_CHECKING:
    from fedstill.data.inputs import Inputs

log = logging.getLogger("fedstill.engine")

CARD_FAILED = (
    torch.cuda.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError),
)
"""Errors of the card itself. Whether one occurs depends on the card's load, not on the client."""


class Sites(Protocol):
    """Where the data are: one view for each client and stage."""

    @property
    def inputs(self) -> Inputs: ...

    @property
    def public(self) -> Examples | None:
        """The public set with its labels, which only measures may look at."""

    @property
    def common_test(self) -> Examples | None:
        """The test set on which, in a simulation, local models are measured."""

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage."""

    def size(self, client: int) -> int:
        """About how many examples a client has: only the order in which clients begin depends on
        it.
        """


class ReplyCache(Protocol):
    """Replies of other runs (``engines.reply_cache``)."""

    @property
    def stages(self) -> frozenset[str]:
        """The stages whose replies may serve again."""

    def key(self, engine: SerialEngine, job: ClientJob) -> str:
        """The key of the reply to a job: it identifies everything that the reply depends on."""

    def reply(self, key: str, stage: Stage, make: Callable[[], Reply]) -> Reply:
        """The cached reply of a key, or a new one that is cached from now on."""


Version = tuple[str, str]
"""A client's memory of a stage: the name of its file, and that file's SHA-256."""


class Memory:
    """The memories of all clients, in this process. What a stage changes takes effect when it is
    committed.

    remembered: what some clients remember already. ``index``: the version that counts of each
    client whose memory is a file; none here (``running.checkpoint``).
    """

    def __init__(self, remembered: Mapping[int, Payload] | None = None) -> None:
        self.index: dict[int, Version] = {}
        self.named: frozenset[str] = frozenset()
        self._committed = dict(remembered or {})
        self._pending: dict[int, Payload] = {}

    def in_process(self) -> Memory:
        """The same in this process, to go on from without changing this one."""
        return Memory(self._committed)

    def load(self, client: int) -> Payload:
        """What a client remembers; nothing at first."""
        return self._committed.get(client, NOTHING)

    def hold(self, client: int, client_state: Payload | Keep) -> None:
        """Take a client's state after a stage that is not committed yet; ``KEEP``: the one before
        the stage.
        """
        if client_state is KEEP:
            client_state = self.load(client)
        self._pending[client] = client_state

    def held(self, client: int) -> Payload:
        """What a client remembers of a stage that is not committed yet; nothing, if it remembers
        nothing.
        """
        return self._pending.get(client, NOTHING)

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage, and drop what the others do."""
        for client in clients:
            self.forget(client)
        states = {client: self.held(client) for client in clients}
        self.write(stage, {client: state for client, state in states.items() if state})
        self._pending.clear()

    def forget(self, client: int) -> None:
        """Drop what a client remembers."""
        self._committed.pop(client, None)

    def write(self, stage: Stage, states: Mapping[int, Payload]) -> None:
        """Keep the states of clients after a stage, none of which is empty."""
        self._committed.update(states)

    def prune(self, names: Collection[str]) -> None:
        """Take note of the files that checkpoints name; a memory in files deletes all others."""
        self.named = frozenset(names)


@dataclass(frozen=True)
class ClientJob:
    """One client's work in one stage."""

    work: ClientWork
    stage: Stage
    client: int
    payload: Payload
    seed: int
    """The run's seed."""


@dataclass(frozen=True)
class StartedClient:
    """A client that has begun its work in a stage."""

    job: ClientJob
    view: View
    start: TrainingStart
    seconds: float
    """How long it took to begin."""
    guard: MutationGuard
    """Detects changes of the payload."""


@dataclass(frozen=True)
class TimedTraining:
    """The outcome of a client's training, and the seconds that it took."""

    trained: Trained | None = None
    """None if the stage trains nothing."""
    seconds: float = 0.0


@dataclass
class SerialEngine:
    """Runs the clients of a stage in the order of the schedule.

    ``dataclasses.replace`` gives an engine that differs in some of its fields and shares the
    memory.
    """

    world: World
    sites: Sites
    memory: Memory = field(default_factory=Memory)
    threads: ThreadCounts = field(default_factory=ThreadCounts)
    precision: Precision = "fp32"
    hooks: tuple[ClientHook, ...] = ()
    """What extends the clients' work, in order."""
    reply_cache: ReplyCache | None = None
    """Replies of other runs, for the stages that allow them."""
    stops_on_failure: bool = False
    """Whether the first client that fails ends the run: with ClientFailed, chained to the client's
    own exception.
    """

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that were sent something; an exception in a client becomes its
        reply's failure.

        Raises CorruptFile for a damaged memory: to go on without that client would give other bits
        than before.
        """
        replies = []
        with self._set_up(stage):
            for client in stage.clients:
                if client not in payloads:
                    continue
                # What its work draws from torch's global generators is drawn by key.
                with drawing_from(seed_for(seed, stage.round, stage.index, client, "work")):
                    job = ClientJob(work, stage, client, payloads[client], seed)
                    replies.append(self._reply(job))
        return replies

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage."""
        self.memory.commit(stage, clients)

    def close(self) -> None:
        """There is nothing to close."""

    @contextmanager
    def _set_up(self, stage: Stage) -> Iterator[None]:
        """Set the number of torch threads for a stage."""
        keep_freed_memory()
        count = self.threads.several
        if len(stage.clients) == 1:
            count = self.threads.alone
        with torch_threads(count):
            yield

    def _reply(self, job: ClientJob) -> Reply:
        cache = self.reply_cache
        try:
            if cache is not None and job.stage.name in cache.stages:
                key = cache.key(self, job)
                return cache.reply(key, job.stage, lambda: self._new_reply(job))
            return self._new_reply(job)
        except Exception as error:
            return self._failed(job.work, job.stage, [job.client], error)[0]

    def _failed(
        self, work: ClientWork, stage: Stage, clients: Sequence[int], error: Exception
    ) -> list[Reply]:
        """The replies of a client that failed, or of several that failed together in a stack.

        Raises CorruptFile, ChangedInPlace and KeyboardInterrupt again, because going on would give
        other bits. Raises ClientFailed if the run stops on failures, or if the card failed.
        """
        if isinstance(error, (CorruptFile, ChangedInPlace)):
            raise error
        # torch.func, interrupted, fails at its own clearing up
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__
        from fedstill.core.user_code import reason  # for errors alone

        why = reason(error, work)
        if self.stops_on_failure or isinstance(error, CARD_FAILED):
            raise ClientFailed(place(stage), clients, why) from error
        log.debug("clients %s failed", clients, exc_info=error)
        return [
            Reply(client, NOTHING, 0, {}, stage.round, stage.index, failure=why)
            for client in clients
        ]

    def _new_reply(self, job: ClientJob) -> Reply:
        started = self._begin(job)
        return self._end(started, self._train(started))

    def _begin(self, job: ClientJob) -> StartedClient:
        began = time.perf_counter()
        guard = MutationGuard(job.payload)
        view = self.sites.view(job.client, job.stage)
        payload = job.payload
        for hook in self.hooks:
            view = hook.extend_view(view, job.payload, job.stage)
            payload = hook.payload_for_work(payload)
        head = self.head(job.stage, job.client)
        if head is not None:
            view = replace(view, head=head)

        begin = job.work.begin
        begun = begin(payload, self.memory.load(job.client), view, self.world)
        start = checked_return(begun, TrainingStart, begin, "a TrainingStart")
        guard.check(begin, job.client)
        if head is not None:
            start = replace(start, head=head)
        start = self._with_class_weights(start, view, job.stage)
        return StartedClient(job, view, start, time.perf_counter() - began, guard)

    def _with_class_weights(self, start: TrainingStart, view: View, stage: Stage) -> TrainingStart:
        """The start with the weights of the classes in training, if its plan has some."""
        plan = self.world.plans.get(stage.name)
        if plan is None or plan.class_weights == "none" or not start.params:
            return start
        from fedstill.core.label_counts import class_weights  # few plans have class weights

        weights = class_weights(plan, trained_labels(start, view, stage), view)
        if weights is None:
            return start
        return replace(start, class_weights=weights.to(dtype_of(start.params)))

    def head(self, stage: Stage, client: int) -> Tensor | None:
        """Which outputs take part in a client's training on its own data, (C,) bool; None where all
        do.
        """
        if client == SERVER or stage.view == "public":
            return None
        return self.world.stream.mask(stage.round, client, self.world.classes)

    def _train(self, started: StartedClient) -> TimedTraining:
        stage = started.job.stage
        plan = self.world.plans.get(stage.name)
        if plan is None or not started.start.params:
            return TimedTraining()
        began = time.perf_counter()
        setup = TrainingSetup(
            plan=plan,
            stage=stage,
            inputs=self.sites.inputs,
            seed=started.job.seed,
            precision=self.precision,
            by_epoch=self._keeps_epochs(stage) and started.start.model is None,
            lr_round=self.world.stream.within(stage.round),
            rule=self._gradient_rule(started.view, stage),
        )
        trained = train(started.job.work, started.start, started.view, setup)
        return TimedTraining(trained, time.perf_counter() - began)

    def _keeps_epochs(self, stage: Stage) -> bool:
        """Whether a hook needs the parameters after every epoch of a stage."""
        return any(hook.keeps_epochs(stage) for hook in self.hooks)

    def _gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """How single examples' gradients combine, if a hook has a rule."""
        rules = (hook.gradient_rule(view, stage) for hook in self.hooks)
        return next((rule for rule in rules if rule is not None), None)

    def _end(self, started: StartedClient, training: TimedTraining) -> Reply:
        """The reply of a client after its training."""
        began = time.perf_counter()
        work = started.job.work
        stage = started.job.stage
        view = started.view
        start = started.start
        params = start.params
        result = TrainingResult(0, 0.0, start.trace)
        if training.trained is not None:
            params = training.trained.params
            result = training.trained.result

        content, client_state = sent_and_remembered(
            work, work.end(params, start, result, view, self.world)
        )
        for hook in self.hooks:
            content = hook.extend_reply(content, params, view, stage, self.world)
        self.memory.hold(view.client, client_state)

        metrics = _training_metrics(start, training.trained)
        report = self._report(started, params)
        if report:
            metrics[METHOD_REPORT] = report
        started.guard.check(type(work), view.client)
        metrics["seconds_training"] = training.seconds
        metrics |= self._measured(started, training.trained, params, frozenset(content))
        seconds_ending = time.perf_counter() - began
        metrics["seconds"] = started.seconds + training.seconds + seconds_ending
        return Reply(view.client, content, len(view.data), metrics, stage.round, stage.index)

    def _report(self, started: StartedClient, params: Tensors) -> Fields:
        """What the work and the hooks report of a client whose training ended with ``params``."""
        work = started.job.work
        view = started.view
        report = work.report(params, started.start, view, self.world)
        fields = dict(journal_fields(work.report, report))
        for hook in self.hooks:
            fields |= hook.report(params, view, started.job.stage, self.world)
        return fields

    def _measured(
        self,
        started: StartedClient,
        trained: Trained | None,
        params: Tensors,
        sent: frozenset[str],
    ) -> Fields:
        """What the hooks measure of a client whose training ended with ``params``; nothing if the
        client has no model, or trains another network than its own.

        sent: the groups of the client's reply.
        """
        if not self.hooks or not params or started.start.model is not None:
            return {}
        from fedstill.engines.client_measures import AtClient  # not every run measures

        view = started.view
        before = self._answering(started, started.start.params)
        by_epoch = trained.by_epoch if trained else ()
        seen = AtClient(
            stage=started.job.stage,
            view=replace(view, model=before.spec),
            start=before.params,
            end=self._answering(started, params).params,
            by_epoch=[self._answering(started, p).params for p in by_epoch],
            test=self.sites.common_test,
            public=self.sites.public,
            inputs=self.sites.inputs,
            world=self.world,
            sent=sent,
        )
        measured: Fields = {}
        for hook in self.hooks:
            measured |= hook.measured(seen)
        return measured

    def _answering(self, started: StartedClient, params: Tensors) -> FrozenModel:
        """The model with which a client answers, if these are its network's parameters."""
        spec = started.view.model
        return frozen(started.job.work.answer(params, spec), spec)


def _training_metrics(start: TrainingStart, trained: Trained | None) -> Fields:
    """What training itself reports."""
    if trained is None:
        return {}
    metrics: Fields = {
        "loss": dict(trained.losses),
        "steps": trained.result.steps,
        "epochs": trained.epochs,
    }
    if trained.scores:
        metrics["scores"] = list(trained.scores)
    if start.teachers:
        metrics["teachers"] = list(start.teachers)
    return metrics
