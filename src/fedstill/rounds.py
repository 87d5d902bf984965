"""run_round: the one short loop over a round's stages, which hosts every method and topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fedstill.anywhere import acting
from fedstill.keys import drawing_from, seed_for
from fedstill.method import Method
from fedstill.origin import returned
from fedstill.raised import as_asked, noted, with_asks, with_query
from fedstill.records import SERVER, Payload, Reply, Stage, State, World
from fedstill.verdicts import demand_quorum, guard_entries, guard_norm, part, refuse_idle, written
from fedstill.watch import Watch, place, replies_of, told
from fedstill.wire.screen import Rules, screen
from fedstill.work import ClientWork


class Engine(Protocol):
    """Carries a stage out. The method decides what is done, the engine decides how."""

    def run(
        self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that were sent something; a client that fails replies with the
        reason.
        """

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage; what the others remember of it is
        dropped.
        """


def run_round(
    method: Method,
    state: State,
    stages: Sequence[Stage],
    world: World,
    engine: Engine,
    watch: Watch,
    rules: Rules,
) -> State:
    """One round, from the stage that the state names: the same for every method, topology and
    engine.

    Raises ClientFailed if the rules tolerate no failure, TooFewReplies below the quorum (a link of
    a chain is skipped instead, unless the whole chain failed), Diverged if parameters blow up,
    MethodFailed for a mistake in the method. Then ``watch`` has been told of the stage's refusals,
    and the last good state is the one that it was given last. Within a chain's round the state
    holds ``answered``, too: how many of its clients have replied.
    """
    if state.stage == 0:
        draws = drawing_from(seed_for(world.seed, state.round, 0, SERVER, "open"))
        with draws, part(method, "open", f"round {state.round}"):
            state = returned(method.open(state, stages, world), State, method.open, "a State")
    asked_in = set(range(state.stage))
    for stage in stages[state.stage :]:
        with drawing_from(seed_for(world.seed, state.round, stage.index, SERVER, "server")):
            state = _run_stage(method, state, stage, stages, world, engine, watch, rules, asked_in)
    return replace(state.without("answered"), round=state.round + 1, stage=0)


def _run_stage(
    method: Method,
    state: State,
    stage: Stage,
    stages: Sequence[Stage],
    world: World,
    engine: Engine,
    watch: Watch,
    rules: Rules,
    asked_in: set[int],
) -> State:
    """The state after one stage; ``asked_in``: the stages of the round in which clients were sent
    something.
    """
    method, where, world = acting(method, stage), place(stage), as_asked(world, state)
    with part(method, "down", where):
        needs, sent = method.requires(), _sent_down(method, state, stage, world)
        asked_in.update({stage.index} if sent else ())
        if stage.round == 1 and stage.index == stages[-1].index and not asked_in:
            refuse_idle(method.down, stage)
        downs = {c: with_query(d, c, stage, world, needs) for c, d in sent.items()}
    with part(method, "work", where):
        work = returned(method.work(stage), ClientWork, method.work, "a ClientWork")
    came, downs = replies_of(
        lambda: engine.run(work, stage, downs, world.seed), stage, downs, rules, watch
    )
    with part(method, "expects", where):
        labels = state.extra.get("labels") if "label_counts" in needs else None
        expected = with_asks(method.expects, stage, world)
        replies, refused = screen(expected, stage, downs, came, rules, labels)
    done = int(state.extra.get("answered", 0))
    with told(watch, stage, replies, refused, downs):
        onward = any(later.hop for later in stages[stage.index + 1 :])
        if downs and not (stage.hop and (replies or done or onward)):
            asked = replace(stage, clients=tuple(downs))
            demand_quorum(asked, replies, refused, rules, written(work.end, method.expects))
        engine.commit(stage, [r.client for r in replies])
        if replies:
            state = noted(_folded(method, state, replies, stage, world), replies, stage, world)
            if stage.hop:
                state = state.next(answered=done + 1)
    state = replace(state, stage=stage.index + 1)
    watch.stage(stage, replies, refused, downs, state)
    return state


def _sent_down(method: Method, state: State, stage: Stage, world: World) -> dict[int, Payload]:
    """What each client is sent in a stage, without those that are sent nothing."""
    given = {c: method.down(state, c, stage, world) for c in stage.clients}
    return {
        c: returned(d, Payload, method.down, "a Payload") for c, d in given.items() if d is not None
    }


def _folded(
    method: Method, state: State, replies: Sequence[Reply], stage: Stage, world: World
) -> State:
    """The state that a method makes of the accepted replies, and that can be gone on with."""
    with part(method, "fold", place(stage)):
        after = returned(method.fold(state, replies, stage, world), State, method.fold, "a State")
        guard_entries(method.fold, method.predictors, state, after)
        guard_norm(after, stage, replies, world)
    return after
