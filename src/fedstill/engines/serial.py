"""The serial engine, the reference: one client after another, in this process."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedstill.core.codec import encode
from fedstill.core.errors import ChangedInPlace, ClientFailed, CorruptFile
from fedstill.core.files import digest
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.records import (
    NOTHING,
    SERVER,
    Examples,
    Payload,
    Reply,
    Stage,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.reports import OWN
from fedstill.core.rounds import place
from fedstill.core.user_code import reason
from fedstill.core.work import ClientWork
from fedstill.data.dataset import examples_digest
from fedstill.data.inputs import Inputs
from fedstill.engines.client_measures import AtClient, ClientMeasures, tested_by_task
from fedstill.engines.client_memory import Memory
from fedstill.engines.frozen_teachers import FrozenModel, frozen
from fedstill.engines.loop import Trained, train
from fedstill.engines.precision import Precision
from fedstill.engines.reply_cache import KeptReplies, class_identity, key_of
from fedstill.engines.user_functions import Lent, carry_of, journal_fields, sent_and_remembered
from fedstill.privacy.noise import Privacy
from fedstill.privacy.private_training import Private
from fedstill.querying.raised import as_sent, raises

# What the C library does with memory that was freed: kept for the next batch, not returned and
# requested again.
#
# A batch's activations and gradients are allocated and freed in every step. Handed back, their
# pages must be found, cleared and mapped again the next time. What that is worth here, ``python -m
# benchmarks.allocator`` prints.


KEEP = "FEDSTILL_KEEP_FREED"
"""The environment variable that, at 0, leaves the C library as it is, with less memory held between
stages.
"""

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them
LARGEST = 32 * 2**20  # the largest that the library takes for what is mapped on its own


@functools.cache
def keep_freed() -> bool:
    """Have this process keep what is freed, once; whether it does: only glibc can be asked."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or os.environ.get(KEEP) == "0":
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
class Begun:
    """A client that has read what it was sent: what it sees, what it starts with, and the seconds
    that took.

    ``sent``: what it was sent, as it was before.
    """

    view: View
    carry: TrainingStart
    seconds: float
    sent: Lent


@dataclass
class SerialEngine:
    """Runs the clients of a stage in the order of the schedule.

    ``threads``: torch threads in a stage of many clients, and in one of a single client or a stack
    of them; part of a run's definition, because the last bit of a sum depends on
    them. ``measures``: what clients measure of their own models, in float32 whatever the
    ``precision`` of training is. ``kept``: replies that other runs have kept, for the stages that
    allow it. ``privacy``: what is done to logits before they leave a client; ``secret``: with noise
    that no seed repeats, as on real sites. ``stops``: the first client that fails ends the run,
    with ClientFailed, to which its own exception is chained. ``dataclasses.replace`` gives an
    engine that differs in some of this and has threads of its own; the memory is the same one.
    """

    world: World
    sites: Sites
    memory: Memory = field(default_factory=Memory)
    threads: tuple[int, int] = (1, 1)
    precision: Precision = "fp32"
    measures: ClientMeasures = field(default_factory=ClientMeasures)
    kept: KeptReplies | None = None
    privacy: Privacy = field(default_factory=Privacy)
    secret: bool = False
    stops: bool = False

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that were sent something; an exception in a client becomes its
        reply's failure.

        Raises CorruptFile for a damaged memory: to go on without that client would give other bits
        than before.
        """
        self._set_up(stage)
        return [
            self._alone(work, stage, client, downs[client], seed)
            for client in stage.clients
            if client in downs
        ]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage."""
        self.memory.commit(stage, clients)

    def close(self) -> None:
        """There is nothing to close."""

    def _set_up(self, stage: Stage) -> None:
        keep_freed()
        torch.set_num_threads(self.threads[1] if len(stage.clients) == 1 else self.threads[0])

    def _alone(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int
    ) -> Reply:
        """A client's reply; what its work draws from torch's global generators is drawn by key."""
        with drawing_from(seed_for(seed, stage.round, stage.index, client, "work")):
            return self._reply(work, stage, client, payload, seed)

    def _reply(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int
    ) -> Reply:
        try:
            if self.kept is not None and stage.name in self.kept.stages:
                key = self._key(work, stage, client, payload, seed)
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
        begun = self._begin(work, stage, client, payload)
        return self._end(work, stage, begun, *self._train(work, stage, begun, seed))

    def _key(self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int) -> str:
        """Everything that a client's reply depends on, as a key."""
        view, test = self.sites.view(client, stage), self.sites.common_test
        remembered = digest(encode(self.memory.load(client)))
        taken = [(name, class_identity(type(m))) for name, m in self.measures.named.items()]
        measured = (
            (taken, examples_digest(test) if test is not None else "")
            if self.measures.due(stage)
            else ()
        )
        how = (
            self.sites.inputs,
            torch.get_num_threads(),
            self.precision,
            remembered,
            measured,
            self.privacy,
        )
        head, now = self._head(stage, client), self.world.stream.within(stage.round)
        tasks = (
            (now, "all" if head is None else head.tolist()) if self.world.stream.tasks > 1 else ()
        )
        more = (*how, self.world.asking if raises(stage, self.world) else "", *tasks)
        return key_of(work, stage, view, self.world.plans.get(stage.name), seed, payload, *more)

    def _begin(self, work: ClientWork, stage: Stage, client: int, payload: Payload) -> Begun:
        start = time.perf_counter()
        view, sent, head = (
            as_sent(self.sites.view(client, stage), payload),
            Lent(payload),
            self._head(stage, client),
        )
        view = view if head is None else replace(view, head=head)
        carry = carry_of(work, work.begin(payload, self.memory.load(client), view, self.world))
        sent.check(work.begin, client)
        carry = carry if head is None else replace(carry, head=head)
        return Begun(view, carry, time.perf_counter() - start, sent)

    def _head(self, stage: Stage, client: int) -> Tensor | None:
        """Which outputs take part in a client's training on its own data, (C,) bool; None where all
        do.
        """
        if client == SERVER or stage.view == "public":
            return None
        return self.world.stream.mask(stage.round, client, self.world.classes)

    def _train(
        self, work: ClientWork, stage: Stage, begun: Begun, seed: int
    ) -> tuple[Trained | None, float]:
        plan = self.world.plans.get(stage.name)
        if plan is None or not begun.carry.params:
            return None, 0.0
        start = time.perf_counter()
        view, inputs = begun.view, self.sites.inputs
        by_epoch = self.measures.each_epoch(stage) and begun.carry.model is None
        within = self.world.stream.within(stage.round)
        own = view.client != SERVER and stage.view == "private"
        private = Private.of(self.privacy, self.secret) if own else None
        how = (self.precision, by_epoch, within, private)
        trained = train(work, begun.carry, plan, stage, view, inputs, seed, *how)
        return trained, time.perf_counter() - start

    def _end(
        self, work: ClientWork, stage: Stage, begun: Begun, trained: Trained | None, seconds: float
    ) -> Reply:
        """The reply of a client, given what it began with, what training gave, and how long that
        took.
        """
        start, view, carry = time.perf_counter(), begun.view, begun.carry
        metrics: dict[str, object] = {}
        params, ran = carry.params, TrainingResult(0, 0.0, carry.trace)
        if trained is not None:
            params, ran = trained.params, trained.ran
            metrics |= {"loss": dict(trained.losses), "steps": ran.steps, "epochs": trained.epochs}
            metrics |= {"scores": list(trained.scores)} if trained.scores else {}
            metrics |= {"teachers": list(carry.teachers)} if carry.teachers else {}
        content, memory = sent_and_remembered(work, work.end(params, carry, ran, view, self.world))
        seed = seed_for(self.world.seed, stage.round, stage.index, view.client, "privacy")
        content = self.privacy.protect(content, None if self.secret else seed)
        self.memory.hold(view.client, memory)
        own = journal_fields(work.report, work.report(params, carry, view, self.world))
        metrics |= {OWN: own} if own else {}
        begun.sent.check(type(work), view.client)
        metrics["seconds_training"] = seconds
        models = (
            [carry.params, params, *(trained.by_epoch if trained else ())]
            if params and carry.model is None
            else []
        )
        answers = [frozen(work.answer(m, view.model), view.model) for m in models]
        metrics |= self._measure(stage, view, answers, frozenset(content))
        metrics["seconds"] = begun.seconds + seconds + time.perf_counter() - start
        return Reply(view.client, content, len(view.data), metrics, stage.round, stage.index)

    def _measure(
        self, stage: Stage, view: View, models: Sequence[FrozenModel], sent: frozenset[str]
    ) -> dict[str, object]:
        """What this client measures: as the measures say, and at a real site on its own test set.

        models: what it answers with before and after its work, and after each epoch where that is
        asked for. sent: the groups of its reply.
        """
        if not models:
            return {}
        sites, classes, view = self.sites, self.world.classes, replace(view, model=models[0].spec)
        start, params, *by_epoch = (model.params for model in models)
        common = (sites.common_test, sites.public, sites.inputs, classes)
        seen = AtClient(stage, view, start, params, by_epoch, *common, sent)
        taken = self.measures.take(seen) if self.measures.due(stage) else {}
        if view.tests:
            taken |= tested_by_task(seen, params, self.world.stream)
        elif view.test is not None and len(view.test):
            taken["site_accuracy"] = sum(seen.correct_by_class(params, view.test)) / len(view.test)
        return taken
