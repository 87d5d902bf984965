"""The serial engine, which defines the results of all engines. It runs one client after another in
this process.
"""

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
    content_and_state,
    journal_fields,
    place,
)
from fedstill.core.errors import ChangedInPlace, ClientFailed, CorruptFile
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    KEEP,
    NOTHING,
    SERVER,
    Examples,
    Keep,
    Payload,
    Plan,
    Reply,
    Stage,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.reports import METHOD_REPORT
from fedstill.core.trees import dtype_of
from fedstill.engines.clients import TrainingSetup, trained_labels
from fedstill.engines.hardware import Precision, ThreadCounts, keep_freed_memory, torch_threads
from fedstill.engines.loop import Trained, train
from fedstill.engines.step import FrozenModel, frozen

if TYPE_CHECKING:
    from fedstill.core.extensions import ClientHook, Fields, GradientRule
    from fedstill.data.inputs import Inputs

log = logging.getLogger("fedstill.engine")

CARD_FAILED = (
    torch.cuda.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError),
)
"""Errors of the GPU itself, which depend on its load and not on the client."""


class Sites(Protocol):
    """The source of the clients' views."""

    @property
    def inputs(self) -> Inputs: ...

    @property
    def public(self) -> Examples | None:
        """The public set with its labels, which only measures may read."""

    @property
    def common_test(self) -> Examples | None:
        """The test set for local models in a simulation."""

    def view(self, client: int, stage: Stage) -> View:
        """The view of a client in a stage."""

    def size(self, client: int) -> int:
        """The approximate number of a client's examples. It only determines the order in which
        clients start.
        """


class ReplyCache(Protocol):
    """Replies of other runs (``engines.reply_cache``)."""

    @property
    def stages(self) -> frozenset[str]:
        """The stages whose replies may be reused."""

    def reply(self, engine: SerialEngine, job: ClientJob, make: Callable[[], Reply]) -> Reply:
        """The cached reply to a job, or a new reply, which is then cached. In both cases, the
        engine's memory holds the client's state after the stage.
        """


Version = tuple[str, str]
"""The version of a client state: the name of its file and the file's SHA-256."""


class Memory:
    """The states of all clients, in this process. Changes by a stage take effect when the stage is
    committed.

    remembered: initial client states. ``index``: the valid version of each client state that is in
    a file; empty here (see ``running.checkpoint``).
    """

    def __init__(self, remembered: Mapping[int, Payload] | None = None) -> None:
        self.index: dict[int, Version] = {}
        self.named: frozenset[str] = frozenset()
        self._committed = dict(remembered or {})
        self._pending: dict[int, Payload] = {}

    def in_process(self) -> Memory:
        """A copy in this process, whose changes do not affect this memory."""
        return Memory(self._committed)

    def load(self, client: int) -> Payload:
        """The state of a client; initially empty."""
        return self._committed.get(client, NOTHING)

    def hold(self, client: int, client_state: Payload | Keep) -> None:
        """Store a client's state after a stage that is not committed yet. ``KEEP`` stands for the
        state before the stage.
        """
        if client_state is KEEP:
            client_state = self.load(client)
        self._pending[client] = client_state

    def held(self, client: int) -> Payload:
        """A client's state after a stage that is not committed yet; may be empty."""
        return self._pending.get(client, NOTHING)

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Make the states of these clients after a stage valid, and discard those of others."""
        for client in clients:
            self.forget(client)
        states = {client: self.held(client) for client in clients}
        self.write(stage, {client: state for client, state in states.items() if state})
        self._pending.clear()

    def forget(self, client: int) -> None:
        """Delete the state of a client."""
        self._committed.pop(client, None)

    def write(self, stage: Stage, states: Mapping[int, Payload]) -> None:
        """Store non-empty states of clients after a stage."""
        self._committed.update(states)

    def prune(self, names: Collection[str]) -> None:
        """Set the files that checkpoints refer to. A memory in files deletes all other files."""
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
    """A client that has started its work in a stage."""

    job: ClientJob
    view: View
    start: TrainingStart
    seconds: float
    """The seconds that the start took."""
    guard: MutationGuard
    """Detects changes of the payload."""


@dataclass(frozen=True)
class TimedTraining:
    """The outcome of a client's training, and its duration in seconds."""

    trained: Trained | None = None
    """None if the stage trains nothing."""
    seconds: float = 0.0


@dataclass
class SerialEngine:
    """Runs the clients of a stage in the order of the schedule.

    ``dataclasses.replace`` returns an engine with other values of some fields and the same memory.
    """

    world: World
    sites: Sites
    memory: Memory = field(default_factory=Memory)
    threads: ThreadCounts = field(default_factory=ThreadCounts)
    precision: Precision = "fp32"
    teacher_precision: Precision = "fp32"
    hooks: tuple[ClientHook, ...] = ()
    """The hooks that extend the clients' work, in order."""
    reply_cache: ReplyCache | None = None
    """Replies of other runs, for the stages that allow them."""
    stops_on_failure: bool = False
    """Whether the first failing client ends the run, with a ClientFailed that is chained to the
    client's exception.
    """

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients with a payload. An exception in a client becomes the failure
        of its reply.

        Raises CorruptFile for a damaged client state, because continuing without the client would
        change the bits.
        """
        replies = []
        with self._set_up(stage):
            for client in stage.clients:
                if client not in payloads:
                    continue
                # torch's global generators are seeded by key, in case the work draws from them.
                with drawing_from(seed_for(seed, stage.round, stage.index, client, "work")):
                    job = ClientJob(work, stage, client, payloads[client], seed)
                    replies.append(self._reply(job))
        return replies

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Make the states of these clients after a stage valid."""
        self.memory.commit(stage, clients)

    def close(self) -> None:
        """Close the engine; no effect here."""

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
                return cache.reply(self, job, lambda: self._new_reply(job))
            return self._new_reply(job)
        except Exception as error:
            return self._failed(job.work, job.stage, [job.client], error)[0]

    def _failed(
        self, work: ClientWork, stage: Stage, clients: Sequence[int], error: Exception
    ) -> list[Reply]:
        """The replies of a failing client, or of several clients that failed together in a stack.

        Raises CorruptFile, ChangedInPlace and KeyboardInterrupt again, because continuing would
        change the bits. Raises ClientFailed if the run stops on failures, or if the GPU failed.
        """
        if isinstance(error, (CorruptFile, ChangedInPlace)):
            raise error
        # After Ctrl-C, torch.func fails in its clean-up with another error.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__
        from fedstill.core.user_code import reason  # lazy, because only errors need it

        failure = reason(error, work)
        if self.stops_on_failure or isinstance(error, CARD_FAILED):
            raise ClientFailed(place(stage), clients, failure) from error
        log.debug("clients %s failed", clients, exc_info=error)
        return [
            Reply(client, NOTHING, 0, {}, stage.round, stage.index, failure=failure)
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
        result = begin(payload, self.memory.load(job.client), view, self.world)
        start = checked_return(result, TrainingStart, begin, "a TrainingStart")
        guard.check(begin, job.client)
        if head is not None:
            start = replace(start, head=head)
        start = self._with_class_weights(start, view, job.stage)
        return StartedClient(job, view, start, time.perf_counter() - began, guard)

    def _with_class_weights(self, start: TrainingStart, view: View, stage: Stage) -> TrainingStart:
        """The start with class weights, if the plan has class weights."""
        plan = self.world.plans.get(stage.name)
        if plan is None or plan.class_weights == "none" or not start.params:
            return start
        from fedstill.core.label_counts import class_weights  # lazy, because few plans need it

        weights = class_weights(plan, trained_labels(start, view, stage), view)
        if weights is None:
            return start
        return replace(start, class_weights=weights.to(dtype_of(start.params)))

    def head(self, stage: Stage, client: int) -> Tensor | None:
        """Whether each output takes part in a client's training on its own data, (C,) bool; None if
        all do.
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
        setup = replace(
            self._training_setup(plan, stage, started.job.seed),
            by_epoch=self._keeps_epochs(stage) and started.start.model is None,
            rule=self._gradient_rule(started.view, stage),
        )
        trained = train(started.job.work, started.start, started.view, setup)
        return TimedTraining(trained, time.perf_counter() - began)

    def _training_setup(self, plan: Plan, stage: Stage, seed: int) -> TrainingSetup:
        """The set-up of a stage that all clients share."""
        return TrainingSetup(
            plan=plan,
            stage=stage,
            inputs=self.sites.inputs,
            seed=seed,
            precision=self.precision,
            teacher_precision=self.teacher_precision,
            by_epoch=self._keeps_epochs(stage),
            lr_round=self.world.stream.within(stage.round),
        )

    def _keeps_epochs(self, stage: Stage) -> bool:
        """Whether a hook needs the parameters after every epoch of a stage."""
        return any(hook.keeps_epochs(stage) for hook in self.hooks)

    def _gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """The rule that combines the gradients of single examples, if a hook has one."""
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

        content, client_state = content_and_state(
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
        """The reports of the work and the hooks about a client with the trained ``params``."""
        work = started.job.work
        view = started.view
        report = work.report(params, started.start, view, self.world)
        fields = dict(journal_fields(work.report, report))
        for hook in self.hooks:
            fields |= hook.report(params, view, started.job.stage, self.world)
        return fields

    def _measured(
        self, started: StartedClient, trained: Trained | None, params: Tensors, sent: frozenset[str]
    ) -> Fields:
        """The measurements of the hooks for a client with the trained ``params``; empty if the
        client has no model, or trains another network than its own.

        sent: the groups of the client's reply.
        """
        if not self.hooks or not params or started.start.model is not None:
            return {}
        # Lazy, because some runs need no hooks.
        from fedstill.engines.client_measures import AtClient

        view = started.view
        before = self._answering(started, started.start.params)
        by_epoch: Sequence[Tensors] = ()
        if trained:
            by_epoch = trained.by_epoch
        visit = AtClient(
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
            measured |= hook.measured(visit)
        return measured

    def _answering(self, started: StartedClient, params: Tensors) -> FrozenModel:
        """The model that the client uses, if its network has the parameters ``params``."""
        spec = started.view.model
        return frozen(started.job.work.answer(params, spec), spec)


def _training_metrics(start: TrainingStart, trained: Trained | None) -> Fields:
    """The numbers that training reports."""
    if trained is None:
        return {}
    metrics: Fields = {
        "loss": dict(trained.losses),
        "steps": trained.steps,
        "epochs": trained.epochs,
    }
    if trained.scores:
        metrics["scores"] = list(trained.scores)
    if start.teachers:
        metrics["teachers"] = list(start.teachers)
    return metrics
