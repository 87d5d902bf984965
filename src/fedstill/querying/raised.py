"""Queries that clients raise in a run: what comes up with the stage ``fit``, what is asked then,
and how clients know.

Where a query needs more than label counts that are known before (a model's accuracy, new data, data
of real sites), the world has a rule, ``World.asking``. At the end of the stage ``fit`` each client
says for which classes it has reason to ask (``fitting.Fit``, group ``asks``). The server keeps
which of them each client asks for, as state ``asked``; from then on the world of the methods has
these queries, and what a client is sent has its own (group ``query``).

State: asked = (clients, C) int8, 1 for a class that a client asks for, until the next stage
``fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedstill.core.errors import BadPayload
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, View, World
from fedstill.core.stages import ASKS, FIT
from fedstill.querying.queries import Queries, picked

ASKED, QUERY = "asked", "query"


def raises(stage: Stage, world: World) -> bool:
    """Whether clients raise their queries in a stage."""
    return world.asking is not None and stage.name == FIT


def with_asks(
    expects: Callable[[int, Stage, World], Payload], stage: Stage, world: World
) -> Callable[[int], Payload]:
    """What a client's reply must be like in a stage: what ``Method.expected_reply``
    returns, and for which classes it may ask.
    """
    if not raises(stage, world):
        return lambda client: expects(client, stage, world)
    asks = {ASKS: torch.zeros(world.classes, dtype=torch.int8)}
    return lambda client: Payload(expects(client, stage, world), **asks)


def queries_raised(replies: Sequence[Reply], stage: Stage, world: World) -> Queries:
    """What the clients of a stage ask for, of the classes for which they have reason; empty in
    other stages.
    """
    if world.asking is None or not raises(stage, world):
        return {}
    wanted = {r.client: r.content.tensor(ASKS).nonzero().flatten().tolist() for r in replies}
    asked = {c: picked(world.asking, c, classes, stage.round) for c, classes in wanted.items()}
    return {client: classes for client, classes in asked.items() if classes}


def noted(state: State, replies: Sequence[Reply], stage: Stage, world: World) -> State:
    """The state after a stage, with what its clients ask for if they raised queries there."""
    if not raises(stage, world):
        return state
    asked = torch.zeros(world.clients, world.classes, dtype=torch.int8)
    for client, classes in queries_raised(replies, stage, world).items():
        asked[client, list(classes)] = 1
    return state.next(groups={ASKED: asked})


def as_asked(world: World, state: State) -> World:
    """The world with the queries that clients have raised so far; as it is where they are known
    before.
    """
    if world.asking is None or ASKED not in state.extra:
        return world
    rows = enumerate(state.extra.tensor(ASKED))
    return world.with_queries(
        {c: tuple(row.nonzero().flatten().tolist()) for c, row in rows if bool(row.any())}
    )


def with_query(
    payload: Payload, client: int, stage: Stage, world: World, needs: Collection[str]
) -> Payload:
    """What a client is sent, with the query that it raised before; ``needs``: of the method, which
    may not read it.
    """
    if world.asking is None or client == SERVER or stage.name == FIT or "queries" not in needs:
        return payload
    query = torch.zeros(world.classes, dtype=torch.int8)
    query[list(world.queries.get(client, ()))] = 1
    return Payload(payload, **{QUERY: query})


def as_sent(view: View, payload: Payload) -> View:
    """What a client sees, with the query that it was sent, if it was sent one.

    Raises BadPayload for a query that is not (C,) of the run's classes.
    """
    if QUERY not in payload:
        return view
    query: Tensor = payload.tensor(QUERY)
    if query.shape != view.counts.shape:
        raise BadPayload(f"a query of shape {tuple(query.shape)} for {len(view.counts)} classes")
    return replace(view, query=tuple(query.nonzero().flatten().tolist()))
