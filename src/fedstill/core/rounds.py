"""One round: ``run_round`` loops over its stages and notifies observers of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, Protocol, TypeVar

from fedstill.core import trees
from fedstill.core.errors import (
    TRACEBACK,
    BadPayload,
    BadReturn,
    ClientFailed,
    Diverged,
    FedstillError,
    MethodFailed,
    TooFewReplies,
)
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, World
from fedstill.core.screen import MODELS, Refusal, Rules, other_group, screen
from fedstill.core.stages import acting
from fedstill.core.user_code import bad_return, definition, is_users, reason, returned
from fedstill.core.work import ClientWork
from fedstill.querying.raised import as_asked, noted, with_asks, with_query

# Who is told the result of each stage: of a good one, and of one that ends the run.


class Watch(Protocol):
    """Who is told the result of each stage."""

    def stage(
        self,
        stage: Stage,
        replies: Sequence[Reply],
        refused: Sequence[Refusal],
        downs: Mapping[int, Payload],
        state: State,
    ) -> None:
        """A stage is done: its accepted replies, its refusals, what was sent down, and the state
        after it.
        """

    def failed(
        self,
        stage: Stage,
        replies: Sequence[Reply],
        refused: Sequence[Refusal],
        downs: Mapping[int, Payload],
    ) -> None:
        """A stage ends the run: the error that says why comes next, and the state is still the one
        before the stage.
        """


class Unwatched:
    """A watch that takes no notice."""

    def stage(self, *_: object) -> None:
        """Nothing."""

    def failed(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def told(
    watch: Watch,
    stage: Stage,
    replies: Sequence[Reply],
    refused: Sequence[Refusal],
    downs: Mapping[int, Payload],
) -> Iterator[None]:
    """Where a stage may end the run: the watch is told of its refusals first."""
    try:
        yield
    except Exception:
        watch.failed(stage, replies, refused, downs)
        raise


def place(stage: Stage) -> str:
    """Where in a run a stage is, in words."""
    return f"round {stage.round}, stage {stage.name!r}"


def replies_of(
    run: Callable[[], list[Reply]],
    stage: Stage,
    downs: Mapping[int, Payload],
    rules: Rules,
    watch: Watch,
) -> tuple[list[Reply], dict[int, Payload]]:
    """What an engine's ``run`` gives, and what was sent, both without the clients that had nothing
    to do.

    Raises ClientFailed for a client that failed, unless the rules tolerate that.
    An engine may raise it itself, at the first one. The watch is told before.
    """
    try:
        came = run()
        for reply in came if rules.failures == "stop" else ():
            if reply.failure:
                raise ClientFailed(place(stage), [reply.client], reply.failure)
    except ClientFailed as error:
        watch.failed(
            stage, (), [Refusal(c, f"failed: {error.why}", "failed") for c in error.clients], downs
        )
        raise
    idle = {reply.client for reply in came if reply.idle and not reply.failure}
    return [r for r in came if r.client not in idle], {
        c: down for c, down in downs.items() if c not in idle
    }


# When a stage does not count: too few good replies, parameters that blow up, a mistake in the
# method at the server.


P = ParamSpec("P")
T = TypeVar("T")

GROWTH = 100.0
"""The norm guard: global parameters this many times the norm of the initial ones (at least 1) have
diverged.
"""


@contextmanager
def part(method: object, name: str, where: str) -> Iterator[None]:
    """A call of a part of a method at the server: what a mistake in it raises becomes MethodFailed,
    chained.

    The library's errors that a method raises on purpose stay what they are.
    """
    try:
        yield
    except Exception as error:
        meant = isinstance(error, FedstillError) and not isinstance(error, BadReturn)
        if meant and not (isinstance(error, BadPayload) and is_users(error)):
            raise
        # there, no line of the method raised
        hint = "" if isinstance(error, BadReturn) else TRACEBACK
        text = f"{where}: {type(method).__name__}.{name} failed: {reason(error, method)}"
        raise MethodFailed(text, text + hint) from error


def within(method: object, name: str, where: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that a part of a method gave, to be called later: a mistake in it is named as one
    in the part.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with part(method, name, where):
            return function(*args, **kwargs)

    # inspect.unwrap finds the function
    return functools.update_wrapper(call, function, assigned=(), updated=())


def demand_quorum(
    stage: Stage,
    replies: Sequence[Reply],
    refused: Sequence[Refusal],
    rules: Rules,
    written: str = "",
) -> None:
    """Raises TooFewReplies, or Diverged; ``written``: where a user's code says what is sent and
    what is expected.
    """
    least = math.ceil(rules.quorum * len(stage.clients))
    if len(replies) >= least:
        return
    first = f"client {refused[0].client} {refused[0].reason}" if refused else "no client answered"
    if refused and all(r.diverged for r in refused):
        raise Diverged(
            f"{place(stage)}: {first}; lower plan.lr, or clip gradients with plan.clip_norm"
        )
    if refused and refused[0].kind == "unlike":
        first += written
    text = (
        f"{place(stage)}: {len(replies)} of {len(stage.clients)} clients replied well, {least} are "
        "needed "
        f"(clients.quorum = {rules.quorum:g}); the first refused: {first}"
    )
    failed = bool(refused) and refused[0].kind == "failed"
    raise TooFewReplies(
        text + "; see the traceback with debug=True" * failed, text + TRACEBACK * failed
    )


def refuse_idle(down: Callable[..., Any], stage: Stage) -> None:
    """Raises BadReturn where a user's ``down`` gave nothing to anybody in the whole of round 1."""
    if definition(down):
        many = f"all {len(stage.clients)} clients" if len(stage.clients) > 1 else "every client"
        raise bad_return(
            down,
            f"gives None to {many} in every stage, so nobody does anything: does it lack a return?",
        )


def written(sends: Callable[..., Any], expects: Callable[..., Any]) -> str:
    """Where a user's code says what is sent, and what is expected; empty for the library's own."""
    sent, expected = definition(sends), definition(expects)
    both = [f"sent by {sent}"] * bool(sent) + [f"expected by {expected}"] * bool(expected)
    return f" ({'; '.join(both)})" if both else ""


def guard_entries(
    fold: Callable[..., Any], predictors: Callable[..., Any], before: State, after: State
) -> None:
    """Raises BadReturn for parameters that a user's ``aggregate`` dropped, added, cut or cast, and
    could not go on with.

    Not where it gave another network, or where the user's code says what is evaluated.
    """
    if not definition(fold) or definition(predictors) or after.model != before.model:
        return
    if before.params and (why := other_group("params", after.params, before.params)):
        raise bad_return(fold, f"gives other parameters than the model has: {why}")


def guard_norm(state: State, stage: Stage, replies: Sequence[Reply], world: World) -> None:
    """Raises Diverged if a fold gave parameters beyond the norm guard; names the client that sent
    the largest.
    """
    norm, limit = trees.norm(state.params), GROWTH * max(1.0, trees.norm(world.initial(SERVER)))
    if norm <= limit:
        return
    sizes = {
        r.client: trees.norm(r.content.tensors(g))
        for r in replies
        for g in MODELS
        if g in r.content
    }
    worst = max(sizes, key=lambda c: sizes[c]) if sizes else stage.clients[0]
    raise Diverged(
        f"{place(stage)}: the parameters' norm is {norm:.3g}, over the guard of {limit:.3g}; the "
        "largest came from "
        f"client {worst} ({sizes.get(worst, norm):.3g}); lower plan.lr or set plan.clip_norm"
    )


# run_round: the one short loop over a round's stages, which hosts every method and topology.


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
        with draws, part(method, "begin_round", f"round {state.round}"):
            state = returned(
                method.begin_round(state, stages, world), State, method.begin_round, "a State"
            )
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
    with part(method, "payload_for_client", where):
        needs, sent = method.requires(), _sent_down(method, state, stage, world)
        asked_in.update({stage.index} if sent else ())
        if stage.round == 1 and stage.index == stages[-1].index and not asked_in:
            refuse_idle(method.payload_for_client, stage)
        downs = {c: with_query(d, c, stage, world, needs) for c, d in sent.items()}
    with part(method, "work", where):
        work = returned(method.work(stage), ClientWork, method.work, "a ClientWork")
    came, downs = replies_of(
        lambda: engine.run(work, stage, downs, world.seed), stage, downs, rules, watch
    )
    with part(method, "expected_reply", where):
        labels = state.extra.get("labels") if "label_counts" in needs else None
        expected = with_asks(method.expected_reply, stage, world)
        replies, refused = screen(expected, stage, downs, came, rules, labels)
    done = int(state.extra.get("answered", 0))
    with told(watch, stage, replies, refused, downs):
        onward = any(later.sequential for later in stages[stage.index + 1 :])
        if downs and not (stage.sequential and (replies or done or onward)):
            asked = replace(stage, clients=tuple(downs))
            demand_quorum(asked, replies, refused, rules, written(work.end, method.expected_reply))
        engine.commit(stage, [r.client for r in replies])
        if replies:
            state = noted(_folded(method, state, replies, stage, world), replies, stage, world)
            if stage.sequential:
                state = state.next(answered=done + 1)
    state = replace(state, stage=stage.index + 1)
    watch.stage(stage, replies, refused, downs, state)
    return state


def _sent_down(method: Method, state: State, stage: Stage, world: World) -> dict[int, Payload]:
    """What each client is sent in a stage, without those that are sent nothing."""
    given = {c: method.payload_for_client(state, c, stage, world) for c in stage.clients}
    return {
        c: returned(d, Payload, method.payload_for_client, "a Payload")
        for c, d in given.items()
        if d is not None
    }


def _folded(
    method: Method, state: State, replies: Sequence[Reply], stage: Stage, world: World
) -> State:
    """The state that a method makes of the accepted replies, and that can be gone on with."""
    with part(method, "aggregate", place(stage)):
        after = returned(
            method.aggregate(state, replies, stage, world), State, method.aggregate, "a State"
        )
        guard_entries(method.aggregate, method.predictors, state, after)
        guard_norm(after, stage, replies, world)
    return after
