"""The vectorised engine: clients of a stage stacked and trained as one; equal to the serial engine up to rounding."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedstill.engines.alone import How, examples_of, scores_count
from fedstill.engines.loop import Trained, train_stack
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.serial import Begun, failed
from fedstill.engines.stack import structure
from fedstill.models import contract
from fedstill.records import ModelSpec, Payload, Plan, Reply, Stage
from fedstill.work import ClientWork

MOST = 50
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
    """Stacks clients of like size and one structure, and trains stacks side by side on the cores: many small models.

    ``most`` clients in a stack, or as many as ``stack_bytes`` hold. A client that fits with no other, and a stage of
    one client, trains as in the serial engine. Which clients are stacked does not depend on the number of workers.
    """

    most: int = field(default_factory=lambda: MOST)
    stack_bytes: float = STACK_BYTES

    def run(self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int) -> list[Reply]:
        """The replies of the clients that were sent something, in the order of the schedule."""
        clients = [c for c in stage.clients if c in downs]
        plan = self.world.plans.get(stage.name)
        if plan is None or len(clients) < 2 or any(why_not(self.world.model(c), plan) for c in clients):
            return super().run(work, stage, downs, seed)
        self._set_up(stage)
        how = How(plan, stage, self.sites.inputs, seed, self.precision, self._epoch_by_epoch(stage))
        cohorts = self._cohorts(clients, plan)
        done = self._side_by_side(lambda cohort: self._cohort(work, how, cohort, downs), cohorts)
        replies = {client: reply for cohort in done for client, reply in cohort.items()}
        return [replies[c] for c in clients]

    def _cohorts(self, clients: Sequence[int], plan: Plan) -> list[list[int]]:
        """Clients of like size together, the largest first: a stack trains as long as its largest client."""
        count = -(-len(clients) // self.most)
        even = -(-len(clients) // count)
        cohorts: list[list[int]] = []
        room = 0.0
        for client in sorted(clients, key=lambda c: (-self.sites.size(c), c)):
            need = self._bytes(client, plan)
            if not cohorts or need > room or len(cohorts[-1]) == even:
                cohorts.append([])
                room = self.stack_bytes
            cohorts[-1].append(client)
            room -= need
        return cohorts

    def _bytes(self, client: int, plan: Plan) -> float:
        """About what a client takes in a stack: copies of its model, its images, and the numbers of a step."""
        model = sum(v.numel() for v in self.world.initial(client).values())
        spec = self.world.model(client)
        image = spec.input_shape[0] * spec.input_shape[1] * spec.input_shape[2]
        return 4.0 * (8 * model + 2 * image * self.sites.size(client) + 40 * image * plan.batch)

    def _cohort(
        self, work: ClientWork, how: How, clients: Sequence[int], downs: Mapping[int, Payload]
    ) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        groups: dict[object, list[Begun]] = {}
        for client in clients:
            try:
                begun = self._begin(work, how.stage, client, downs[client])
            except Exception as error:
                replies[client] = failed(how.stage, client, error)
                continue
            alone = not begun.carry.params or not len(examples_of(begun.view, how.stage))
            groups.setdefault(client if alone else structure(begun.carry, begun.view), []).append(begun)
        for group in groups.values():
            replies |= self._group(work, how, group)
        return replies

    def _group(self, work: ClientWork, how: How, group: Sequence[Begun]) -> dict[int, Reply]:
        trained: Sequence[Trained | None]
        try:
            if len(group) == 1:
                one, seconds = self._train(work, how.stage, group[0], how.seed)
                trained = [one]
            else:
                start = time.perf_counter()
                trained = train_stack(work, [b.carry for b in group], [b.view for b in group], how)
                seconds = (time.perf_counter() - start) / len(group)
        except Exception as error:
            return {b.view.client: failed(how.stage, b.view.client, error) for b in group}
        replies = {}
        for begun, result in zip(group, trained, strict=True):
            client = begun.view.client
            try:
                replies[client] = self._end(work, how.stage, begun, result, seconds)
            except Exception as error:
                replies[client] = failed(how.stage, client, error)
        return replies
