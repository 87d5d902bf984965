"""What the clients of a round do: examples, steps of the optimiser, bytes. Nothing is trained to
know it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedstill.experiment.preparing.prepared import Prepared
from fedstill.raised import with_asks
from fedstill.records import SERVER, Payload, Stage


@dataclass(frozen=True)
class RoundWork:
    """A round's clients, their examples, those trained on (each epoch counts), their steps, and
    what is sent.
    """

    clients: int
    examples: int
    trained: int
    steps: int
    bytes_down: int
    bytes_up: int


def round_work(prepared: Prepared, number: int = 1) -> RoundWork:
    """The work of a round, from 1. Rounds differ by who is drawn, and by whom the method addresses
    at the start.
    """
    settings, world = prepared.settings, prepared.world
    state = settings.method.setup(world)
    down = up = steps = examples = trained = 0
    acting: set[int] = set()
    for stage in settings.topology(number, world):
        for client in stage.clients:
            sent = settings.method.down(state, client, stage, world)
            if sent is None:
                continue
            acting.add(client)
            count = _examples(prepared, client, stage)
            if client != SERVER:  # what the server computes itself is not sent
                down, up = (
                    down + sent.nbytes,
                    up + with_asks(settings.method.expects, stage, world)(client).nbytes,
                )
            own = local_steps(prepared, stage, count)
            examples, steps, trained = (
                examples + count,
                steps + own,
                trained + _trained(prepared, stage, count, own),
            )
    return RoundWork(len(acting - {SERVER}), examples, trained, steps, down, up)


def local_steps(prepared: Prepared, stage: Stage, examples: int) -> int:
    """How many steps of the optimiser a client of so many examples does in a stage; 0 where nothing
    is trained.
    """
    plan = prepared.world.plans.get(stage.name)
    if plan is None:
        return 0
    return plan.steps or plan.epochs * math.ceil(examples / plan.batch)


def _examples(prepared: Prepared, client: int, stage: Stage) -> int:
    if stage.view == "public" or client == SERVER:
        return len(prepared.sites.public or Payload())
    return 0 if prepared.settings.on_sites else len(prepared.sites.view(client, stage).data)


def _trained(prepared: Prepared, stage: Stage, examples: int, steps: int) -> int:
    plan = prepared.world.plans.get(stage.name)
    return (
        0
        if plan is None
        else plan.epochs * examples
        if not plan.steps
        else steps * min(plan.batch, examples)
    )
