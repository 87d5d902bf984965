"""The serial engine, the reference: one client after another, in this process."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedstill.core.checks import place
from fedstill.core.errors import ChangedInPlace, ClientFailed, CorruptFile
from fedstill.core.extensions import ClientHook, Fields, GradientRule
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.process_settings import torch_threads
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Examples,
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
from fedstill.core.reports import OWN
from fedstill.core.user_code import reason, returned
from fedstill.core.work import ClientWork
from fedstill.engines.client_memory import Memory
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.frozen_teachers import FrozenModel, frozen
from fedstill.engines.loop import Trained, train
from fedstill.engines.precision import Precision
from fedstill.engines.user_functions import (
    MutationGuard,
    journal_fields,
    sent_and_remembered,
)

if TYPE_CHECKING:
    from fedstill.data.inputs import Inputs

# A batch's activations and gradients are allocated and freed in every step. If the C library
# returns their pages, these must be found, cleared and mapped again. ``python -m
# benchmarks.allocator`` prints what keeping them is worth.

KEEP_FREED = "FEDSTILL_KEEP_FREED"
"""The environment variable that, at 0, leaves the C library as it is, with less memory held between
stages.
"""

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them
LARGEST = 32 * 2**20  # the largest that the library takes for what is mapped on its own


@functools.cache
def keep_freed() -> bool:
    """Have this process keep what is freed, once; whether it does: only glibc can be asked."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or os.environ.get(KEEP_FREED) == "0":
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, 2**31 - 1))


log = logging.getLogger("fedstill.engine")

CARD_FAILED = (
    torch.cuda.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError),
)
"""A card without memory, and one that computes nothing more: what else was going on decides when,
not the client.
"""


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


@dataclass(frozen=True)
class ReplyInputs:
    """Everything that a client's reply depends on, beside the library and the processor.

    ``test``: the common test set, if a hook reads it in this stage.
    """

    work: ClientWork
    stage: Stage
    view: View
    plan: Plan | None
    seed: int
    payload: Payload
    client_state: Payload
    test: Examples | None
    further: tuple[object, ...]


class ReplyCache(Protocol):
    """Replies of other runs (``engines.reply_cache``)."""

    @property
    def stages(self) -> frozenset[str]:
        """The stages whose replies may serve again."""

    def key(self, inputs: ReplyInputs) -> str:
        """The key of a reply."""

    def reply(self, key: str, stage: Stage, make: Callable[[], Reply]) -> Reply:
        """The cached reply of a key, or a new one that is cached from now on."""


@dataclass(frozen=True)
class StartedClient:
    """A client that has begun its work in a stage.

    ``seconds``: how long that took. ``guard``: detects changes of the payload that it was sent.
    """

    view: View
    start: TrainingStart
    seconds: float
    guard: MutationGuard


@dataclass
class SerialEngine:
    """Runs the clients of a stage in the order of the schedule.

    ``threads``: torch threads in a stage of many clients, and in one of a single client or a stack
    of them; part of a run's definition, because the last bit of a sum depends on them. ``kept``:
    replies that other runs have kept, for the stages that allow it. ``hooks``: extensions of what
    clients do, in their order. ``stops``: the first client that fails ends the run, with
    ClientFailed, to which its own exception is chained. ``dataclasses.replace`` gives an engine
    that differs in some of this and has threads of its own; the memory is the same one.
    """

    world: World
    sites: Sites
    memory: Memory = field(default_factory=Memory)
    threads: tuple[int, int] = (1, 1)
    precision: Precision = "fp32"
    hooks: tuple[ClientHook, ...] = ()
    kept: ReplyCache | None = None
    stops: bool = False

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
                    replies.append(self._reply(work, stage, client, payloads[client], seed))
        return replies

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage."""
        self.memory.commit(stage, clients)

    def close(self) -> None:
        """There is nothing to close."""

    @contextmanager
    def _set_up(self, stage: Stage) -> Iterator[None]:
        """Meanwhile this thread computes a stage."""
        keep_freed()
        beside_others, alone = self.threads
        count = alone if len(stage.clients) == 1 else beside_others
        with torch_threads(count):
            yield

    def _reply(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int
    ) -> Reply:
        try:
            if self.kept is not None and stage.name in self.kept.stages:
                key = self.kept.key(self._inputs_of_reply(work, stage, client, payload, seed))
                return self.kept.reply(
                    key, stage, lambda: self._new(work, stage, client, payload, seed)
                )
            return self._new(work, stage, client, payload, seed)
        except Exception as error:
            return self._failed(work, stage, [client], error)[0]

    def _failed(
        self, work: ClientWork, stage: Stage, clients: Sequence[int], error: Exception
    ) -> list[Reply]:
        """The replies of clients that failed together, in a stack, or of one: why, and where in its
        author's code.

        Raises a CorruptFile again, and a ChangedInPlace: to go on would give other bits. Ctrl-C
        stays that. If it ``stops``, or the card failed and not the client, raises ClientFailed.
        """
        if isinstance(error, (CorruptFile, ChangedInPlace)):
            raise error
        # torch.func, interrupted, fails at its own clearing up
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__
        why = reason(error, work)
        if self.stops or isinstance(error, CARD_FAILED):
            raise ClientFailed(place(stage), clients, why) from error
        log.debug("clients %s failed", clients, exc_info=error)
        return [
            Reply(client, NOTHING, 0, {}, stage.round, stage.index, failure=why)
            for client in clients
        ]

    def _new(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int
    ) -> Reply:
        started = self._begin(work, stage, client, payload)
        return self._end(work, stage, started, *self._train(work, stage, started, seed))

    def _inputs_of_reply(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int
    ) -> ReplyInputs:
        """Everything that a client's reply depends on."""
        further: list[object] = [
            self.sites.inputs,
            torch.get_num_threads(),
            self.precision,
            tuple(hook.cache_key(stage) for hook in self.hooks),
        ]
        if self.world.stream.tasks > 1:
            head = self._head(stage, client)
            further.append(self.world.stream.within(stage.round))
            further.append("all" if head is None else head.tolist())
        is_test_read = any(hook.reads_test_set(stage) for hook in self.hooks)
        return ReplyInputs(
            work=work,
            stage=stage,
            view=self.sites.view(client, stage),
            plan=self.world.plans.get(stage.name),
            seed=seed,
            payload=payload,
            client_state=self.memory.load(client),
            test=self.sites.common_test if is_test_read else None,
            further=tuple(further),
        )

    def _begin(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload
    ) -> StartedClient:
        began = time.perf_counter()
        guard = MutationGuard(payload)
        view = self.sites.view(client, stage)
        for hook in self.hooks:
            view = hook.extend_view(view, payload, stage)
        head = self._head(stage, client)
        if head is not None:
            view = replace(view, head=head)

        begun = work.begin(payload, self.memory.load(client), view, self.world)
        start = returned(begun, TrainingStart, work.begin, "a TrainingStart")
        guard.check(work.begin, client)
        if head is not None:
            start = replace(start, head=head)
        return StartedClient(view, start, time.perf_counter() - began, guard)

    def _head(self, stage: Stage, client: int) -> Tensor | None:
        """Which outputs take part in a client's training on its own data, (C,) bool; None where all
        do.
        """
        if client == SERVER or stage.view == "public":
            return None
        return self.world.stream.mask(stage.round, client, self.world.classes)

    def _train(
        self, work: ClientWork, stage: Stage, started: StartedClient, seed: int
    ) -> tuple[Trained | None, float]:
        plan = self.world.plans.get(stage.name)
        if plan is None or not started.start.params:
            return None, 0.0
        began = time.perf_counter()
        setup = TrainingSetup(
            plan=plan,
            stage=stage,
            inputs=self.sites.inputs,
            seed=seed,
            precision=self.precision,
            by_epoch=self._keeps_epochs(stage) and started.start.model is None,
            lr_round=self.world.stream.within(stage.round),
            rule=self._gradient_rule(started.view, stage),
        )
        trained = train(work, started.start, started.view, setup)
        return trained, time.perf_counter() - began

    def _keeps_epochs(self, stage: Stage) -> bool:
        """Whether a hook needs the parameters after every epoch of a stage."""
        return any(hook.keeps_epochs(stage) for hook in self.hooks)

    def _gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """How single examples' gradients combine, if a hook has a rule."""
        rules = (hook.gradient_rule(view, stage) for hook in self.hooks)
        return next((rule for rule in rules if rule is not None), None)

    def _end(
        self,
        work: ClientWork,
        stage: Stage,
        started: StartedClient,
        trained: Trained | None,
        seconds: float,
    ) -> Reply:
        """The reply of a client, given what it began with, what training gave, and how long that
        took.
        """
        began = time.perf_counter()
        view = started.view
        start = started.start
        params = start.params
        result = TrainingResult(0, 0.0, start.trace)
        if trained is not None:
            params = trained.params
            result = trained.result

        content, client_state = sent_and_remembered(
            work, work.end(params, start, result, view, self.world)
        )
        for hook in self.hooks:
            content = hook.extend_reply(content, params, view, stage, self.world)
        self.memory.hold(view.client, client_state)

        metrics = _training_metrics(start, trained)
        report = self._report(work, params, start, view, stage)
        if report:
            metrics[OWN] = report
        started.guard.check(type(work), view.client)
        metrics["seconds_training"] = seconds
        if self.hooks and params and start.model is None:
            by_epoch = trained.by_epoch if trained else ()
            models = [start.params, params, *by_epoch]
            answers = [frozen(work.answer(model, view.model), view.model) for model in models]
            metrics |= self._measured(stage, view, answers, frozenset(content))
        metrics["seconds"] = started.seconds + seconds + time.perf_counter() - began
        return Reply(view.client, content, len(view.data), metrics, stage.round, stage.index)

    def _report(
        self, work: ClientWork, params: Tensors, start: TrainingStart, view: View, stage: Stage
    ) -> Fields:
        """What the work and the hooks report."""
        report = dict(journal_fields(work.report, work.report(params, start, view, self.world)))
        for hook in self.hooks:
            report |= hook.report(params, view, stage, self.world)
        return report

    def _measured(
        self, stage: Stage, view: View, models: Sequence[FrozenModel], sent: frozenset[str]
    ) -> Fields:
        """What the hooks measure. ``models``: what the client answers with before and after its
        work, and after each epoch if that is kept; ``sent``: the groups of its reply.
        """
        from fedstill.engines.at_client import AtClient  # not every run measures

        before, after, *by_epoch = (model.params for model in models)
        seen = AtClient(
            stage=stage,
            view=replace(view, model=models[0].spec),
            start=before,
            end=after,
            by_epoch=by_epoch,
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
