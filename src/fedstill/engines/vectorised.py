"""The vectorised engine: clients of a stage stacked and trained as one; equal to the serial engine
up to rounding.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fedstill.core.errors import on_one_line
from fedstill.core.keys import put_aside
from fedstill.core.process_settings import torch_threads
from fedstill.core.records import ModelSpec, Payload, Plan, Reply, Stage
from fedstill.core.work import ClientWork
from fedstill.engines.clients import (
    TrainingSetup,
    replaces_model_or_data,
    stage_examples,
    uses_scores,
)
from fedstill.engines.footprint import activations
from fedstill.engines.loop import Trained, train_stack
from fedstill.engines.pooled import Drew, PooledEngine, drew_under_vmap
from fedstill.engines.serial import Begun
from fedstill.engines.stack import Structures
from fedstill.models import contract
from fedstill.models.contract import (
    draws_random_numbers,
    freeze_norms,
    is_of_library,
    joins_last_example,
)
from fedstill.models.wrapped import Wrapped

MOST = 100
"""The most clients in a stack."""

STACK_BYTES = 1_000_000_000
"""About what the tensors of a stack may take; the number of clients in one depends on it, and on
that the last bit.
"""

NO_RULE = (nn.EmbeddingBag, nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Layers without a rule under ``torch.func.vmap``, which would run them client after client, or not
at all.
"""


def why_not(spec: ModelSpec, plan: Plan) -> str:
    """Why clients of this model and plan cannot be stacked; empty if they can."""
    if draws_random_numbers(spec):
        return f"model {spec.label} draws random numbers (dropout)"
    if spec.held:
        return "train_only keeps entries of the network as they are"
    if uses_scores(plan):
        return (
            "plan.patience or plan.keep is set: each client would stop, or choose its best epoch, "
            "by itself"
        )
    for layer in contract.module(spec).modules():
        if isinstance(layer, NO_RULE):
            return (
                f"model {spec.label} has layers for which torch knows no stack "
                f"({type(layer).__name__})"
            )
        if isinstance(layer, contract.NORMS) and not (
            plan.norm == "frozen" and layer.track_running_stats
        ):
            return (
                f"model {spec.label} normalises by statistics of the batch ({type(layer).__name__})"
            )
    if isinstance(getattr(contract.module(spec), "body", None), Wrapped) and (why := _tried(spec)):
        return why
    return "" if is_of_library(spec) else _stack_fails(spec)


@functools.lru_cache(maxsize=64)
def _tried(spec: ModelSpec) -> str:
    """Why modules of others cannot be stacked; empty if they can. Two clients' gradients tell; a
    warning counts.
    """
    m, x = contract.module(spec, "frozen"), contract.example(spec, 2)
    params = {
        k: torch.stack([v.detach(), v.detach()]).requires_grad_() for k, v in m.named_parameters()
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.func.vmap(lambda own: contract.forward(m, own, x))(params).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return (
            f"model {spec.label} runs client after client under torch.func.vmap, or not at all: "
            f"{on_one_line(error)}"
        )
    return ""


@functools.lru_cache(maxsize=64)
def _stack_fails(spec: ModelSpec) -> str:
    """Why a user's network cannot be stacked; empty if it can. A step of two clients tells, each
    with its examples.
    """
    m, x = contract.module(spec, "frozen").train(), contract.example(spec, 2)
    freeze_norms(m)
    entries = {
        k: torch.stack([v.detach(), v.detach()]) for k, v in contract.entries(spec, m).items()
    }
    params = {k: v.requires_grad_(k in contract.trainable_names(spec)) for k, v in entries.items()}
    try:
        with warnings.catch_warnings(), put_aside(card=True):
            warnings.simplefilter("ignore")
            out = torch.func.vmap(partial(contract.forward, m))(params, torch.stack([x, x]))
            out.sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"model {spec.label} cannot run under torch.func.vmap: {on_one_line(error)}"
    finally:
        m.eval()
    return ""


def _is_stackable(begun: Begun, setup: TrainingSetup) -> bool:
    """Whether a client trains the site's network on examples, in batches as ``Timetable`` has
    them.
    """
    carry = begun.carry
    if replaces_model_or_data(carry) or not carry.params:
        return False
    stored = len(stage_examples(begun.view, setup.stage))
    size = stored
    if carry.only is not None:
        size = len(carry.only)
    if carry.more is not None:
        stored += len(carry.more)
        size += len(carry.more)
    return stored > 0 and not joins_last_example(begun.view.model, setup.plan, size)


@dataclass
class VectorisedEngine(PooledEngine):
    """Stacks clients of like size and one structure, and trains one stack after another: for many
    small models.

    ``most`` clients in a stack, or as many as ``stack_bytes`` hold. A stack has all torch threads,
    as a lone client has (the second of ``threads``): stacks side by side would wait for the
    interpreter's lock. A client that fits with no other, and a stage of one client, trains as in
    the serial engine.
    """

    most: int = field(default_factory=lambda: MOST)
    stack_bytes: float = STACK_BYTES

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that were sent something, in the order of the schedule."""
        clients = [c for c in stage.clients if c in downs]
        plan = self.world.plans.get(stage.name)
        specs = {self.world.model(c) for c in clients}
        if (
            plan is None
            or len(clients) < 2
            or not all(hook.stackable for hook in self.hooks)
            or any(why_not(spec, plan) for spec in specs)
        ):
            return super().run(work, stage, downs, seed)
        setup = TrainingSetup(
            plan=plan,
            stage=stage,
            inputs=self.sites.inputs,
            seed=seed,
            precision=self.precision,
            by_epoch=self._keeps_epochs(stage),
            lr_round=self.world.stream.within(stage.round),
        )
        replies: dict[int, Reply] = {}
        with self._set_up(stage), suppress(Drew), self._sharing(stage, seed):
            for cohort in self._cohorts(clients, plan):
                replies |= self._cohort(work, setup, {c: downs[c] for c in cohort})
            return [replies[c] for c in clients]
        return self._one_by_one(work, stage, downs, seed)

    def _cohorts(self, clients: Sequence[int], plan: Plan) -> list[list[int]]:
        """Clients of like size together, the largest first: a stack trains as long as its largest
        client.
        """
        count = -(-len(clients) // self.most)
        even = -(-len(clients) // count)
        cohorts: list[list[int]] = []
        room = 0.0
        for client in sorted(clients, key=lambda c: (-self.sites.size(c), c)):
            takes = self._bytes(client, plan)
            if not cohorts or takes > room or len(cohorts[-1]) == even:
                cohorts.append([])
                room = self.stack_bytes
            cohorts[-1].append(client)
            room -= takes
        return cohorts

    def _bytes(self, client: int, plan: Plan) -> float:
        """About what a client takes in a stack: copies of its model, its examples, and the numbers
        of a step.
        """
        spec = self.world.model(client)
        example = math.prod(spec.input_shape)
        # Of images no other number than this: how many clients fit into a stack decides the last
        # bit of old runs.
        step = 40 * example if len(spec.input_shape) == 3 else 3 * activations(spec)
        return 4.0 * (
            8 * contract.size(spec) + 2 * example * self.sites.size(client) + step * plan.batch
        )

    def _cohort(
        self, work: ClientWork, setup: TrainingSetup, downs: Mapping[int, Payload]
    ) -> dict[int, Reply]:
        """The replies of clients that are stacked as far as they fit on each other."""
        replies: dict[int, Reply] = {}
        groups: dict[object, list[Begun]] = {}
        structures = Structures()
        for client, down in downs.items():
            try:
                begun = self._begin(work, setup.stage, client, down)
            except Exception as error:
                (replies[client],) = self._failed(work, setup.stage, [client], error)
                continue
            fits_on = (
                structures.of(begun.carry, begun.view) if _is_stackable(begun, setup) else client
            )
            groups.setdefault(fits_on, []).append(begun)
        for group in groups.values():
            replies |= self._group(work, setup, group)
        return replies

    def _group(
        self, work: ClientWork, setup: TrainingSetup, group: Sequence[Begun]
    ) -> dict[int, Reply]:
        """The replies of clients of one structure: trained as one, or one alone as in the serial
        engine.
        """
        try:
            trained, seconds = self._train_group(work, setup, group)
        except Exception as error:
            if drew_under_vmap(error):
                raise Drew from error
            clients = [begun.view.client for begun in group]
            return dict(zip(clients, self._failed(work, setup.stage, clients, error), strict=True))
        replies = {}
        for begun, result in zip(group, trained, strict=True):
            client = begun.view.client
            try:
                replies[client] = self._end(work, setup.stage, begun, result, seconds)
            except Exception as error:
                (replies[client],) = self._failed(work, setup.stage, [client], error)
        return replies

    def _train_group(
        self, work: ClientWork, setup: TrainingSetup, group: Sequence[Begun]
    ) -> tuple[Sequence[Trained | None], float]:
        """What training gave each client, and the seconds that one of them took."""
        if len(group) == 1:
            trained, seconds = self._train(work, setup.stage, group[0], setup.seed)
            return [trained], seconds
        start = time.perf_counter()
        with torch_threads(self.threads[1]):
            each = train_stack(
                work, [begun.carry for begun in group], [begun.view for begun in group], setup
            )
        return each, (time.perf_counter() - start) / len(group)
