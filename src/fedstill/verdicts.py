"""When a stage does not count: too few good replies, parameters that blow up, a mistake in the
method at the server.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from fedstill import trees
from fedstill.errors import (
    TRACEBACK,
    BadPayload,
    BadReturn,
    Diverged,
    FedstillError,
    MethodFailed,
    TooFewReplies,
)
from fedstill.origin import bad_return, definition, is_users, reason
from fedstill.records import SERVER, Reply, Stage, State, World
from fedstill.watch import place
from fedstill.wire.screen import MODELS, Refusal, Rules, other_group

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
    """Raises BadReturn for parameters that a user's ``fold`` dropped, added, cut or cast, and could
    not go on with.

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
    sizes = {r.client: trees.norm(r.up.tensors(g)) for r in replies for g in MODELS if g in r.up}
    worst = max(sizes, key=lambda c: sizes[c]) if sizes else stage.clients[0]
    raise Diverged(
        f"{place(stage)}: the parameters' norm is {norm:.3g}, over the guard of {limit:.3g}; the "
        "largest came from "
        f"client {worst} ({sizes.get(worst, norm):.3g}); lower plan.lr or set plan.clip_norm"
    )
