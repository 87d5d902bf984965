"""The vectorised engine, which stacks the clients of a stage and trains them together. Its results
equal those of the serial engine up to rounding.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn

from fedstill.core.errors import on_one_line
from fedstill.core.keys import restoring_global_state
from fedstill.core.method import ClientWork
from fedstill.core.records import ModelSpec, Payload, Plan, Reply, Stage, TrainingStart, View
from fedstill.engines.clients import (
    TrainingSetup,
    stage_examples,
    trained_labels,
    uses_scores,
)
from fedstill.engines.hardware import torch_threads
from fedstill.engines.loop import Trained, Training, on_gpu
from fedstill.engines.passes import activations, step_flops
from fedstill.engines.pooled import PooledEngine, SharedDraw
from fedstill.engines.serial import ClientJob, StartedClient, TimedTraining
from fedstill.engines.stack import Stack, Structures
from fedstill.models import contract
from fedstill.models.adapted import Wrapped
from fedstill.models.building import is_of_library
from fedstill.models.contract import (
    draws_random_numbers,
    freeze_norms,
    joins_last_example,
)

MAX_STACK = 100
"""The maximum number of clients in a stack."""

STACK_BYTES = 1_000_000_000
"""The approximate memory limit for the tensors of a stack, in bytes. It determines the number of
clients in a stack, and thereby the last bits of results.
"""

WITHOUT_VMAP = (nn.EmbeddingBag, nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Layers that ``torch.func.vmap`` runs for one client after another, or not at all."""


@dataclass
class VectorisedEngine(PooledEngine):
    """Stacks clients of similar size and equal structure, and trains one stack after another. This
    is fast for many small models.

    A stack has as many torch threads as a single client (the second number of ``threads``). Stacks
    in parallel threads would wait for the interpreter's lock. A single client in a stage, and a
    client whose structure differs from all others, train as in the serial engine.
    """

    max_clients: int = field(default_factory=lambda: MAX_STACK)
    """The maximum number of clients in a stack."""
    stack_bytes: float = STACK_BYTES

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients with a payload, in the order of the schedule."""
        clients = [client for client in stage.clients if client in payloads]
        plan = self.world.plans.get(stage.name)
        if plan is None or not self._can_stack(clients, plan):
            return super().run(work, stage, payloads, seed)
        setup = self._training_setup(plan, stage, seed)
        replies: dict[int, Reply] = {}
        try:
            with self._set_up(stage), self._sharing_generators(stage, seed):
                for cohort in self._cohorts(clients, plan):
                    jobs = [ClientJob(work, stage, c, payloads[c], seed) for c in cohort]
                    replies |= self._cohort_replies(setup, jobs)
            return [replies[client] for client in clients]
        except SharedDraw:
            # Later stages are still stacked if they draw nothing: a resumed run would not know
            # about this stage, and stacking changes the last bits.
            pass
        # Outside the except clause, because otherwise errors of clients would be chained to
        # SharedDraw.
        return self._one_by_one(work, stage, payloads, seed)

    def method_obstacle(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> str:
        """The reason why torch cannot stack this work; empty if it can. To find out, a stack of two
        copies of the smallest client with examples trains for one step; its replies are discarded.
        """
        sizes = {client: self.sites.size(client) for client in payloads}
        clients = [client for client, size in sizes.items() if size > 0]
        if not clients:
            return ""
        client = min(clients, key=lambda c: (sizes[c], c))
        plan = replace(self.world.plans[stage.name], epochs=0, steps=1)
        setup = self._training_setup(plan, stage, seed)
        draws = f"{type(work).__name__} draws from torch's global generator"
        try:
            with self._sharing_generators(stage, seed):
                started = self._begin(ClientJob(work, stage, client, payloads[client], seed))
        except SharedDraw:
            return draws
        if not _is_stackable(started, setup):
            return ""
        try:
            with self._set_up(stage), self._sharing_generators(stage, seed):
                self._train_group(setup, [started, started])
        except SharedDraw:
            return draws
        except Exception as error:
            if _is_draw_under_vmap(error):
                return draws
            # After an interrupt, torch.func fails in its clean-up.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            return f"{type(work).__name__} cannot run under torch.func.vmap: {on_one_line(error)}"
        return ""

    def _can_stack(self, clients: Sequence[int], plan: Plan) -> bool:
        if len(clients) < 2 or not all(hook.stackable for hook in self.hooks):
            return False
        models = {self.world.model(client) for client in clients}
        return not any(stacking_obstacle(model, plan) for model in models)

    def _cohorts(self, clients: Sequence[int], plan: Plan) -> list[list[int]]:
        """Groups of clients of similar size, the largest first. A stack trains as long as its
        largest client.
        """
        cohort_count = -(-len(clients) // self.max_clients)
        even_size = -(-len(clients) // cohort_count)
        cohorts: list[list[int]] = []
        free_bytes = 0.0
        for client in sorted(clients, key=lambda c: (-self.sites.size(c), c)):
            needed = self._bytes(client, plan)
            if not cohorts or needed > free_bytes or len(cohorts[-1]) == even_size:
                cohorts.append([])
                free_bytes = self.stack_bytes
            cohorts[-1].append(client)
            free_bytes -= needed
        return cohorts

    def _bytes(self, client: int, plan: Plan) -> float:
        """The approximate memory of a client in a stack, in bytes: copies of its model, its
        examples and the tensors of a step.
        """
        model = self.world.model(client)
        example = math.prod(model.input_shape)
        examples = 2 * example * self.sites.size(client)
        return 4.0 * (8 * contract.size(model) + examples + _numbers_of_step(model) * plan.batch)

    def _cohort_replies(self, setup: TrainingSetup, jobs: Sequence[ClientJob]) -> dict[int, Reply]:
        """The replies of clients, which are stacked if they have the same structure."""
        replies: dict[int, Reply] = {}
        groups: dict[object, list[StartedClient]] = {}
        structures = Structures()
        for job in jobs:
            try:
                started = self._begin(job)
            except Exception as error:
                (replies[job.client],) = self._failed(job.work, job.stage, [job.client], error)
                continue
            # A client that cannot be stacked is a group of its own.
            structure: object = job.client
            if _is_stackable(started, setup):
                structure = structures.of(started.start, started.view)
            groups.setdefault(structure, []).append(started)

        for group in groups.values():
            replies |= self._group_replies(setup, group)
        return replies

    def _group_replies(
        self, setup: TrainingSetup, group: Sequence[StartedClient]
    ) -> dict[int, Reply]:
        """The replies of clients with the same structure."""
        clients = [started.job.client for started in group]
        work = group[0].job.work
        try:
            outcomes = self._train_group(setup, group)
        except Exception as error:
            if _is_draw_under_vmap(error):
                raise SharedDraw from error
            failures = self._failed(work, setup.stage, clients, error)
            return dict(zip(clients, failures, strict=True))

        replies = {}
        for client, started, outcome in zip(clients, group, outcomes, strict=True):
            try:
                replies[client] = self._end(started, outcome)
            except Exception as error:
                (replies[client],) = self._failed(work, setup.stage, [client], error)
        return replies

    def _train_group(
        self, setup: TrainingSetup, group: Sequence[StartedClient]
    ) -> list[TimedTraining]:
        """Train clients as a stack, or a single client as in the serial engine."""
        if len(group) == 1:
            return [self._train(group[0])]
        began = time.perf_counter()
        starts = [started.start for started in group]
        views = [started.view for started in group]
        with torch_threads(self.threads.alone):
            stack = train_stack(group[0].job.work, starts, views, setup)
        seconds = (time.perf_counter() - began) / len(group)
        return [TimedTraining(trained, seconds) for trained in stack]


def _numbers_of_step(model: ModelSpec) -> int:
    """The approximate number of floating-point numbers that a training step needs per example."""
    if len(model.input_shape) == 3:
        # Images use an older estimate. The last bits depend on the number of clients in a stack,
        # and those of old runs must not change.
        return 40 * math.prod(model.input_shape)
    return 3 * activations(model)


def _is_stackable(started: StartedClient, setup: TrainingSetup) -> bool:
    """Whether a client trains its own network on its own examples, in batches that a ``Timetable``
    supports.
    """
    start = started.start
    if start.model is not None or not start.params:
        return False
    size = len(trained_labels(start, started.view, setup.stage))
    return size > 0 and not joins_last_example(started.view.model, setup.plan, size)


def _is_draw_under_vmap(error: Exception) -> bool:
    """Whether torch raised the error because an objective draws random numbers under ``vmap``."""
    return isinstance(error, RuntimeError) and "random operation" in str(error)


def stacking_obstacle(model: ModelSpec, plan: Plan) -> str:
    """The reason why clients with this model and plan cannot be stacked; empty if they can."""
    if draws_random_numbers(model):
        return f"model {model.label} draws random numbers (dropout)"
    if model.held:
        return "train_only freezes entries of the network"
    if uses_scores(plan):
        return (
            "plan.patience or plan.keep is set, so clients stop, or choose their best epoch, "
            "separately"
        )
    module = contract.module(model)
    for layer in module.modules():
        if reason := _layer_obstacle(layer, model, plan):
            return reason
    body = getattr(module, "body", None)
    if isinstance(body, Wrapped) and (reason := vmap_warning(model)):
        return reason
    if is_of_library(model):
        return ""
    return vmap_failure(model)


def _layer_obstacle(layer: nn.Module, model: ModelSpec, plan: Plan) -> str:
    """The reason why a network with this layer cannot be stacked; empty if it can."""
    kind = type(layer).__name__
    if isinstance(layer, WITHOUT_VMAP):
        return f"model {model.label} has layers that torch.func.vmap does not support ({kind})"
    if isinstance(layer, contract.NORMS):
        uses_stored_statistics = plan.norm == "frozen" and layer.track_running_stats
        if not uses_stored_statistics:
            return f"model {model.label} normalises by batch statistics ({kind})"
    return ""


@functools.lru_cache(maxsize=64)
def vmap_warning(model: ModelSpec) -> str:
    """The reason why a module of another library cannot be stacked; empty if it can.

    This function tries the gradients of two clients. A warning counts as well, because ``vmap``
    warns about operations that it runs for one client after another.
    """
    module = contract.module(model, "frozen")
    x = contract.example(model, 2)
    params = {
        name: torch.stack([value.detach(), value.detach()]).requires_grad_()
        for name, value in module.named_parameters()
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs = torch.func.vmap(lambda entries: contract.forward(module, entries, x))(params)
            outputs.sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return (
            f"model {model.label} runs for one client after another under torch.func.vmap, or not "
            f"at all: {on_one_line(error)}"
        )
    return ""


@functools.lru_cache(maxsize=64)
def vmap_failure(model: ModelSpec) -> str:
    """The reason why a user's network cannot be stacked; empty if it can.

    This function tries a step of two clients with their own examples.
    """
    module = contract.module(model, "frozen").train()
    freeze_norms(module)
    x = contract.example(model, 2)
    trainable = contract.trainable_names(model)
    params = {
        name: torch.stack([value.detach(), value.detach()]).requires_grad_(name in trainable)
        for name, value in contract.entries(model, module).items()
    }
    try:
        with warnings.catch_warnings(), restoring_global_state(cuda=True):
            warnings.simplefilter("ignore")
            forward = torch.func.vmap(partial(contract.forward, module))
            outputs = forward(params, torch.stack([x, x]))
            outputs.sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"model {model.label} cannot run under torch.func.vmap: {on_one_line(error)}"
    finally:
        # Other passes expect a frozen module in evaluation mode.
        module.eval()
    return ""


def train_stack(
    work: ClientWork,
    starts: Sequence[TrainingStart],
    views: Sequence[View],
    setup: TrainingSetup,
) -> list[Trained]:
    """Train several clients with the same structure (``Structures``) together. Up to rounding, the
    outcomes are those of ``train``.
    """
    device = stage_examples(views[0], setup.stage).labels.device
    with (
        on_gpu(device, setup.precision),
        closing(Training(work, Stack(starts, views, setup))) as training,
    ):
        return training.run()


# The choice of the engine with ``engine = "auto"``, from the cost of a step. It depends on an
# estimate of the cost, not on measured times. Measured times vary, and the engines differ in their
# last bits, so the results would vary too.


CROSSOVER = {"cpu": 30e6, "cuda": 6e9}
"""By kind of device, the number of floating-point operations in a client's step up to which stacked
clients are faster than clients in parallel on a few cores, or in turn on a GPU.

On the CPU, a stack uses one torch thread unless ``threads`` is set. In CPU seconds, 16 clients one
after another took 1.7 to 3.5 times as long as their stack for 3.3 to 28 MFLOP; 1.2 to 1.5 times for
60 to 112 MFLOP, which is less than the gain of a second core; and 0.9 to 1.1 times above 500 MFLOP.
On an NVIDIA H200, one after another took 1.7 to 6.8 times as long as a stack at all sizes that were
tried, from 3 MFLOP to 5.3 GFLOP (results/cards/nvidia-h200-crossover.txt).
``python -m benchmarks.crossover`` compares stages of the two engines in wall-clock seconds.
"""

FEWEST = 4
"""The smallest number of clients in a stage for which stacking can be faster."""

LITTLE_PADDING = 1.25
"""Padding up to this value is not mentioned in the reason for a choice."""


@dataclass(frozen=True)
class StageWork:
    """A stage in the cost model: its plan, the number of clients, their architectures, and the
    average number of examples per client.

    ``padding``: the number of examples that a stack of these clients processes for each real
    example, because it trains as long as its largest client; 1 if all clients are equally large.
    """

    plan: Plan
    clients: int
    specs: Collection[ModelSpec]
    examples: float
    padding: float = 1.0

    @property
    def flops(self) -> float:
        """The floating-point operations in a step of the most expensive client, forward and
        backward, without teachers.
        """
        batch = max(1.0, min(self.plan.batch, self.examples))
        return max(step_flops(spec, batch) for spec in self.specs)

    def crossover(self, kind: str) -> float:
        """The number of operations in a step up to which stacking these clients is faster, for a
        kind of device.

        The speed-up of a stack is divided by its padding, and decreases with about the cube root of
        the operations in a step.
        """
        return CROSSOVER[kind] / self.padding**3


class EngineChoice(NamedTuple):
    """The engine for a run, and a readable reason."""

    engine: Literal["pooled", "vectorised"]
    reason: str


def suited_engine(work: Collection[StageWork], device: str) -> EngineChoice:
    """Choose the engine for a run with these stages."""
    parallel_stages = [stage for stage in work if stage.clients > 1]
    if not parallel_stages:
        reason = "one client acts at a time, so there is nothing to stack"
        return EngineChoice("pooled", reason)
    for stage in parallel_stages:
        for spec in stage.specs:
            if reason := stacking_obstacle(spec, stage.plan):
                return EngineChoice("pooled", reason)
    kind = device.partition(":")[0]
    if kind not in CROSSOVER:
        reason = (
            f"there are no measurements of stacking on {kind}; try it with engine = 'vectorised'"
        )
        return EngineChoice("pooled", reason)

    clients = min(stage.clients for stage in parallel_stages)
    if clients < FEWEST:
        reason = f"{clients} clients in a stage: stacking needs at least {FEWEST}"
        return EngineChoice("pooled", reason)
    costliest = max(parallel_stages, key=lambda stage: stage.flops * stage.padding**3)
    limit = costliest.crossover(kind)
    reason = (
        f"{_mflop(costliest.flops)} in a client's step, {clients} clients in a stage: "
        f"stacking is faster up to {_mflop(limit)}"
    )
    if costliest.padding > LITTLE_PADDING:
        reason += " for clients of such unequal size"
    if costliest.flops > limit:
        return EngineChoice("pooled", reason)
    return EngineChoice("vectorised", reason)


def _mflop(flops: float) -> str:
    return f"{flops / 1e6:.3g} MFLOP"
