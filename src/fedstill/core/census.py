"""The census: the stage before round 1 in which clients send label counts, for methods that need
them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedstill.core.records import Payload, Reply, Stage, State, World
from fedstill.core.rounds import Engine, Watch, demand_quorum, replies_of, told
from fedstill.core.screen import Rules, screen
from fedstill.core.topology import CENSUS
from fedstill.core.work import Census


def census_stage(world: World) -> Stage:
    """The stage before round 1 in which every client sends its label counts."""
    return Stage(0, 0, CENSUS, tuple(range(world.clients)))


def run_census(state: State, world: World, engine: Engine, watch: Watch, rules: Rules) -> State:
    """The state with every client's label counts in ``extra["labels"]`` (clients, C); a missing
    client's are zeros.
    """
    stage, work = census_stage(world), Census()
    downs = {c: Payload() for c in stage.clients}
    expected = Payload(labels=torch.zeros(world.classes, dtype=torch.int64))
    came, downs = replies_of(
        lambda: engine.run(work, stage, downs, world.seed), stage, downs, rules, watch
    )
    came = [_counted(reply, rules) for reply in came]
    replies, refused = screen(lambda _: expected, stage, downs, came, rules)
    with told(watch, stage, replies, refused, downs):
        demand_quorum(replace(stage, clients=tuple(downs)), replies, refused, rules)
    labels = torch.zeros(world.clients, world.classes, dtype=torch.int64)
    for reply in replies:
        labels[reply.client] = reply.content.tensor("labels")
    state = replace(state.next(labels=labels), round=1, stage=0)
    watch.stage(stage, replies, refused, downs, state)
    return state


def _counted(reply: Reply, rules: Rules) -> Reply:
    """The reply, or a failure where its label counts are no counts of as many examples as it
    claims.

    One that is of another form is for the screen to judge.
    """
    labels = reply.content.get("labels")
    if reply.failure or not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        return reply
    total = float(labels.double().sum())
    if bool((labels < 0).any()) or not reply.examples <= total <= rules.max_examples:
        return replace(
            reply, failure=f"its census counts {total:g} examples, and it claims {reply.examples}"
        )
    return reply
