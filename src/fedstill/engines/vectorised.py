"""The vectorised engine: clients of a stage stacked and trained as one; equal to the serial engine up to rounding."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedstill.engines.alone import How, examples_of, scores_count
from fedstill.engines.cores import torch_threads
from fedstill.engines.loop import Trained, train_stack
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.serial import Begun, failed
from fedstill.engines.stack import Structures
from fedstill.models import contract
from fedstill.records import ModelSpec, Payload, Plan, Reply, Stage
from fedstill.work import ClientWork

MOST = 100
"""The most clients in a stack."""

STACK_BYTES = 1_000_000_000
"""About what the tensors of a stack may take; the number of clients in one depends on it, and on that the last bit."""


def why_not(spec: ModelSpec, plan: Plan) -> str:
    """Why clients of this model and plan cannot be stacked; empty if they can."""
    if contract.draws_random_numbers(spec):
        return f"model {spec} draws random numbers (dropout)"
    if scores_count(plan):
        return "plan.patience or plan.keep is set: each client would stop, or choose its best epoch, by itself"
    for layer in contract.module(spec).modules():
        if isinstance(layer, contract.NORMS) and not (plan.norm == "frozen" and layer.track_running_stats):
            return f"model {spec} normalises by statistics of the batch ({type(layer).__name__})"
    return ""


@dataclass
class VectorisedEngine(PooledEngine):
    """Stacks clients of like size and one structure, and trains one stack after another: for many small models.

    ``most`` clients in a stack, or as many as ``stack_bytes`` hold. A stack has all torch threads, as a lone client has
    (the second of ``threads``): stacks side by side would wait for the interpreter's lock. A client that fits with no
    other, and a stage of one client, trains as in the serial engine.
    """

    most: int = field(default_factory=lambda: MOST)
    stack_bytes: float = STACK_BYTES

    def run(self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int) -> list[Reply]:
        """The replies of the clients that were sent something, in the order of the schedule."""
        clients = [c for c in stage.clients if c in downs]
        plan = self.world.plans.get(stage.name)
        if plan is None:
            return super().run(work, stage, downs, seed)
        self._set_up(stage)
        how = How(plan, stage, self.sites.inputs, seed, self.precision, self._epoch_by_epoch(stage))
        fits = not any(why_not(spec, plan) for spec in {self.world.model(c) for c in clients})
        own = [Member(self, work, how, c, downs[c]) for c in clients] if fits else []
        if len(own) < 2:
            return super().run(work, stage, downs, seed)
        replies = {member.client: reply for cohort in self._cohorts(own) for member, reply in _cohort(cohort)}
        return [replies[c] for c in clients]

    def _cohorts(self, members: Sequence[Member]) -> list[list[Member]]:
        """Clients of like size together, the largest first: a stack trains as long as its largest client."""
        count = -(-len(members) // self.most)
        even = -(-len(members) // count)
        cohorts: list[list[Member]] = []
        room = 0.0
        for member in sorted(members, key=lambda m: (-m.size, m.client)):
            if not cohorts or member.bytes > room or len(cohorts[-1]) == even:
                cohorts.append([])
                room = self.stack_bytes
            cohorts[-1].append(member)
            room -= member.bytes
        return cohorts


@dataclass(frozen=True, eq=False)
class Member:
    """A client that is to be stacked: whose engine it belongs to, what it does, how, and what it was sent."""

    engine: VectorisedEngine
    work: ClientWork
    how: How
    client: int
    down: Payload

    @property
    def size(self) -> int:
        """About how many examples it has."""
        return self.engine.sites.size(self.client)

    @property
    def bytes(self) -> float:
        """About what it takes in a stack: copies of its model, its images, and the numbers of a step."""
        spec = self.engine.world.model(self.client)
        image = math.prod(spec.input_shape)
        return 4.0 * (8 * contract.size(spec) + 2 * image * self.size + 40 * image * self.how.plan.batch)

    @property
    def does(self) -> tuple[type, str]:
        """Its work, equal for members that do the same in runs of their own."""
        return type(self.work), repr(sorted(vars(self.work).items()))

    def begin(self) -> Begun:
        """Read what it was sent."""
        return self.engine._begin(self.work, self.how.stage, self.client, self.down)

    def alone(self, begun: Begun) -> tuple[Trained | None, float]:
        """Train as the serial engine does."""
        return self.engine._train(self.work, self.how.stage, begun, self.how.seed)

    def end(self, begun: Begun, trained: Trained | None, seconds: float) -> Reply:
        """Its reply."""
        return self.engine._end(self.work, self.how.stage, begun, trained, seconds)

    def failed(self, error: Exception) -> Reply:
        """The reply that says why there is none."""
        return failed(self.how.stage, self.client, error)


Answers = list[tuple[Member, Reply]]


def _cohort(members: Sequence[Member]) -> Answers:
    """The replies of clients that are stacked as far as they fit on each other."""
    answers: Answers = []
    groups: dict[object, list[tuple[Member, Begun]]] = {}
    structures = Structures()
    for member in members:
        try:
            begun = member.begin()
        except Exception as error:
            answers.append((member, member.failed(error)))
            continue
        alone = not begun.carry.params or not len(examples_of(begun.view, member.how.stage))
        key = member if alone else (structures.of(begun.carry, begun.view), *member.does)
        groups.setdefault(key, []).append((member, begun))
    return answers + [answer for group in groups.values() for answer in _group(group)]


def _group(group: Sequence[tuple[Member, Begun]]) -> Answers:
    first, trained = group[0][0], list[Trained | None]()
    try:
        if len(group) == 1:
            one, seconds = first.alone(group[0][1])
            trained = [one]
        else:
            start = time.perf_counter()
            carries, views, hows = zip(*((b.carry, b.view, m.how) for m, b in group), strict=True)
            with torch_threads(first.engine.threads[1]):
                trained = [*train_stack(first.work, carries, views, hows)]
            seconds = (time.perf_counter() - start) / len(group)
    except Exception as error:
        return [(member, member.failed(error)) for member, _ in group]
    answers = []
    for (member, begun), result in zip(group, trained, strict=True):
        try:
            answers.append((member, member.end(begun, result, seconds)))
        except Exception as error:
            answers.append((member, member.failed(error)))
    return answers
