"""The pooled engine: clients of a stage side by side on the cores, one torch thread each; the
serial engine's bits.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fedstill.core.keys import drawing_from, global_state, has_moved, seed_for
from fedstill.core.records import SERVER, ModelSpec, Payload, Reply, Stage
from fedstill.core.work import ClientWork
from fedstill.engines.cores import workers
from fedstill.engines.footprint import activations, step_flops
from fedstill.engines.loop import Trained
from fedstill.engines.serial import Begun, SerialEngine
from fedstill.models import contract
from fedstill.models.contract import draws_random_numbers

# Clients that share torch's global generators, side by side or in a stack: whether anything has
# drawn from them.


log = logging.getLogger("fedstill.engine")


class Drew(Exception):
    """A client has drawn from a generator that it shares with others: the bits would depend on
    which came first.
    """


class Unmoved:
    """Generators that are to stay where they stand now."""

    def __init__(self) -> None:
        self._since = global_state()

    def check(self) -> None:
        """Raises Drew if they have moved."""
        if has_moved(self._since):
            raise Drew


def drew_under_vmap(error: Exception) -> bool:
    """Whether an error is torch's, of an objective that draws random numbers for a stack of
    clients.
    """
    return isinstance(error, RuntimeError) and "random operation" in str(error)


@functools.cache
def say_drawn(work: str) -> None:
    """Once a process: clients of one method are alike."""
    log.warning(
        "%s draws random numbers from torch's global generator, which clients side by side or in a "
        "stack would share: "
        "its clients are trained one after another; set engine = 'serial' to save the first try",
        work,
    )


LIGHT = 1e6
"""About so many floating-point operations in a step, or fewer, and threads side by side wait for
the interpreter more than they compute.
"""

A = TypeVar("A")
T = TypeVar("T")


@dataclass
class PooledEngine(SerialEngine):
    """Runs the clients of a stage in threads: torch's kernels release the interpreter's lock.

    ``workers``: clients side by side; the bits do not depend on it, for each client has its
    threads, its modules and its random numbers to itself. A stage of one client, of models so small
    that the interpreter is what takes the time, or with a model that draws from torch's one
    generator in a process (dropout), runs as in the serial engine. So does a stage, once more, in
    which a method is seen to draw from it, and all that follow.
    """

    workers: int = field(default_factory=workers)
    light: float = field(default_factory=lambda: LIGHT)
    # no copy shares it
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    # while clients share the generator
    _shared: Unmoved | None = field(default=None, init=False, repr=False)
    _drawn: bool = field(default=False, init=False, repr=False)

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that were sent something, in the order of the schedule."""
        clients = [c for c in stage.clients if c in downs]
        if (
            min(self.workers, len(clients)) < 2
            or self._draws(clients)
            or self._light(stage, clients)
        ):
            return super().run(work, stage, downs, seed)

        def reply(client: int) -> Reply:
            return self._reply(work, stage, client, downs[client], seed)

        longest_first = sorted(clients, key=self.sites.size, reverse=True)
        with self._set_up(stage), suppress(Drew), self._sharing(stage, seed):
            return self._side_by_side(reply, clients, longest_first)
        self._drawn = True
        return self._one_by_one(work, stage, downs, seed)

    @contextmanager
    def _sharing(self, stage: Stage, seed: int) -> Iterator[None]:
        """While clients share torch's global generators; raises Drew if anything has drawn from
        them.
        """
        with drawing_from(seed_for(seed, stage.round, stage.index, SERVER, "work")):
            self._shared = shared = Unmoved()
            try:
                yield
            finally:
                self._shared = None
            shared.check()

    def _one_by_one(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The stage once more, as in the serial engine: then all draws are by key."""
        say_drawn(type(work).__name__)
        return SerialEngine.run(self, work, stage, downs, seed)

    def _new(
        self, work: ClientWork, stage: Stage, client: int, payload: Payload, seed: int
    ) -> Reply:
        reply = super()._new(work, stage, client, payload, seed)
        if self._shared is not None:
            self._shared.check()  # before the reply is kept for other runs
        return reply

    def _train(
        self, work: ClientWork, stage: Stage, begun: Begun, seed: int
    ) -> tuple[Trained | None, float]:
        own = begun.carry.model
        if self._shared is not None and own is not None and draws_random_numbers(own):
            raise Drew
        return super()._train(work, stage, begun, seed)

    def _failed(
        self, work: ClientWork, stage: Stage, clients: Sequence[int], error: Exception
    ) -> list[Reply]:
        if isinstance(error, Drew):
            raise error
        return super()._failed(work, stage, clients, error)

    def _side_by_side(self, act: Callable[[A], T], on: Sequence[A], begun: Sequence[A]) -> list[T]:
        """``act`` on each, as many at once as there are workers, in the order in which they are
        ``begun``.

        An exception ends what has not begun; of several the first on the list counts, as if one
        followed the other.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "client")

        def one(what: A) -> T:
            torch.set_num_threads(self.threads[0])  # a thread's own setting
            return act(what)

        running = {what: self._pool.submit(one, what) for what in begun}
        try:
            return [running[what].result() for what in on]
        except Drew:
            wait([future for future in running.values() if not future.cancel()])
            raise
        finally:
            for future in running.values():
                future.cancel()

    def close(self) -> None:
        """End the threads, and wait for the clients that they are at."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _light(self, stage: Stage, clients: Sequence[int]) -> bool:
        """Whether a step is little work: of images about six operations a parameter and image, and
        sixty a pixel.
        """
        plan = self.world.plans.get(stage.name)
        if plan is None:
            return False
        return max(_work(self.world.model(c), plan.batch) for c in clients) <= self.light

    def _draws(self, clients: Sequence[int]) -> bool:
        return self._drawn or any(
            draws_random_numbers(spec) for spec in {self.world.model(c) for c in clients}
        )


def _work(spec: ModelSpec, batch: int) -> float:
    """About the floating-point operations in a step; whether threads train clients depends on it,
    never a bit.
    """
    if len(spec.input_shape) == 3:
        return 6.0 * batch * (contract.size(spec) + 10 * math.prod(spec.input_shape))
    return step_flops(spec, batch) + 6 * activations(spec) * batch
