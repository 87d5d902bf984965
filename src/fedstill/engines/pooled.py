"""The pooled engine: the clients of a stage run in parallel threads. Its results are bit-identical
to those of the serial engine.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fedstill.core.keys import GLOBAL_GENERATOR_LOCK, drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, ModelSpec, Payload, Reply, Stage
from fedstill.engines.hardware import workers
from fedstill.engines.passes import activations, step_flops
from fedstill.engines.serial import ClientJob, SerialEngine, StartedClient, TimedTraining
from fedstill.models import contract
from fedstill.models.contract import draws_random_numbers

log = logging.getLogger("fedstill.engine")

LIGHT_FLOPS = 1e6
"""The approximate number of floating-point operations in a step up to which threads are not worth
while, because they would wait for the interpreter longer than they compute.
"""


class SharedDraw(Exception):
    """A client drew random numbers from torch's global generators while other clients shared them.
    The bits would depend on which client came first.
    """


class GeneratorWatch:
    """Checks that nothing draws from torch's global generators."""

    def __init__(self) -> None:
        self._state = global_state()

    def check(self) -> None:
        """Raise SharedDraw if a generator has been used."""
        if has_moved(self._state):
            raise SharedDraw


@functools.cache
def warn_of_draws(work: str) -> None:
    """Warn that clients do not train in parallel; once per process for each kind of work."""
    log.warning(
        "%s draws random numbers from torch's global generator, which parallel or stacked clients "
        "would share: "
        "its clients are trained one after another; set engine = 'serial' to skip the attempt",
        work,
    )


@dataclass
class PooledEngine(SerialEngine):
    """Runs the clients of a stage in threads, which compute in parallel because torch's kernels
    release the interpreter's lock.

    Every client has its own torch threads, modules and random numbers, so the bits do not depend on
    the number of workers. Some stages run as in the serial engine: stages with one client, with
    models too small for threads, and with models that draw from torch's global generators, for
    example for dropout. If a method draws from them unexpectedly, its stage is repeated serially,
    and all later stages run serially.
    """

    workers: int = field(default_factory=workers)
    """The number of clients that run in parallel."""
    light_flops: float = field(default_factory=lambda: LIGHT_FLOPS)
    # dataclasses.replace does not copy fields without init, so each engine has its own threads.
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    _watch: GeneratorWatch | None = field(default=None, init=False, repr=False)
    """Set while clients share the global generators."""
    _method_draws: bool = field(default=False, init=False, repr=False)

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients with a payload, in the order of the schedule."""
        clients = [client for client in stage.clients if client in payloads]
        if not self._uses_threads(stage, clients):
            return super().run(work, stage, payloads, seed)

        def reply(client: int) -> Reply:
            return self._reply(ClientJob(work, stage, client, payloads[client], seed))

        try:
            with self._set_up(stage), self._sharing_generators(stage, seed):
                return self._parallel_replies(reply, clients)
        except SharedDraw:
            self._method_draws = True
        # Outside the except clause, because otherwise errors of clients would be chained to
        # SharedDraw.
        return self._one_by_one(work, stage, payloads, seed)

    def _uses_threads(self, stage: Stage, clients: Sequence[int]) -> bool:
        if min(self.workers, len(clients)) < 2:
            return False
        models = {self.world.model(client) for client in clients}
        if self._method_draws or any(draws_random_numbers(model) for model in models):
            return False
        plan = self.world.plans.get(stage.name)
        if plan is None:
            return True
        return max(step_cost(model, plan.batch) for model in models) > self.light_flops

    def _parallel_replies(
        self, reply: Callable[[int], Reply], clients: Sequence[int]
    ) -> list[Reply]:
        """The reply of each client, computed in threads.

        An exception cancels the clients that have not started. If several clients raise an
        exception, the first one in the schedule is reported, as in the serial engine.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "client")

        def run(client: int) -> Reply:
            # The number of torch threads is a setting of each thread.
            torch.set_num_threads(self.threads.several)
            return reply(client)

        # The largest clients start first, so that none of them runs alone at the end.
        longest_first = sorted(clients, key=self.sites.size, reverse=True)
        futures = {client: self._pool.submit(run, client) for client in longest_first}
        try:
            return [futures[client].result() for client in clients]
        except SharedDraw:
            # The stage is repeated, so nothing of this attempt may still run.
            wait([future for future in futures.values() if not future.cancel()])
            raise
        finally:
            for future in futures.values():
                future.cancel()

    @contextmanager
    def _sharing_generators(self, stage: Stage, seed: int) -> Iterator[None]:
        """A context in which clients share torch's global generators. Raises SharedDraw if anything
        draws from them.
        """
        with drawing_from(seed_for(seed, stage.round, stage.index, SERVER, "work")):
            watch = GeneratorWatch()
            self._watch = watch
            try:
                yield
            finally:
                self._watch = None
            watch.check()

    def _one_by_one(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """Run the stage serially, with seeded global generators for every client."""
        warn_of_draws(type(work).__name__)
        return SerialEngine.run(self, work, stage, payloads, seed)

    def _new_reply(self, job: ClientJob) -> Reply:
        reply = super()._new_reply(job)
        if self._watch is not None:
            # Checked here because the caller may cache the reply for other runs.
            self._watch.check()
        return reply

    def _train(self, started: StartedClient) -> TimedTraining:
        model = started.start.model
        if self._watch is not None and model is not None and draws_random_numbers(model):
            raise SharedDraw
        return super()._train(started)

    def _failed(
        self, work: ClientWork, stage: Stage, clients: Sequence[int], error: Exception
    ) -> list[Reply]:
        if isinstance(error, SharedDraw):
            raise error
        return super()._failed(work, stage, clients, error)

    def close(self) -> None:
        """Stop the threads after the current clients have finished."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def step_cost(model: ModelSpec, batch: int) -> float:
    """The approximate number of floating-point operations in a step: for images, six for each
    parameter and image, and sixty for each pixel. It decides whether clients train in threads, and
    does not affect results.
    """
    if len(model.input_shape) == 3:
        return 6.0 * batch * (contract.size(model) + 10 * math.prod(model.input_shape))
    return step_flops(model, batch) + 6 * activations(model) * batch


def global_state() -> list[torch.Tensor]:
    """The states of torch's global generators: the CPU's and, if CUDA is in use, the current
    device's.
    """
    with GLOBAL_GENERATOR_LOCK:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states.append(torch.cuda.get_rng_state())
        return states


def has_moved(since: list[torch.Tensor]) -> bool:
    """Whether anything has drawn from the global generators since ``global_state``.

    If CUDA was initialised in between, only the CPU's generator is compared.
    """
    return any(not torch.equal(a, b) for a, b in zip(global_state(), since, strict=False))
