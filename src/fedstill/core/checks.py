"""When a stage does not count: too few good replies, a model that diverged, a mistake in a method.

What a method's hook raises at the server becomes an error that names the hook and the line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from fedstill.core import trees
from fedstill.core.errors import (
    TRACEBACK,
    BadPayload,
    BadReturn,
    Diverged,
    FedstillError,
    MethodFailed,
    TooFewReplies,
)
from fedstill.core.fields import of_kind
from fedstill.core.records import SERVER, Reply, Stage, State, World
from fedstill.core.screen import MODELS, Refusal, Rules, other_group

P = ParamSpec("P")
T = TypeVar("T")


GROWTH = 100.0
"""The global parameters have diverged if their norm is this many times that of the initial ones (at
least 1).
"""


def place(stage: Stage) -> str:
    """Where in a run a stage is, in words."""
    return f"round {stage.round}, stage {stage.name!r}"


@contextmanager
def in_hook(method: object, name: str, where: str) -> Iterator[None]:
    """A call of a method's hook at the server: an error in it becomes MethodFailed, chained.

    Errors of the library that a method raises on purpose stay as they are.
    """
    try:
        yield
    except Exception as error:
        if _is_deliberate(error):
            raise
        from fedstill.core.user_code import reason  # for errors alone

        text = f"{where}: {type(method).__name__}.{name} failed: {reason(error, method)}"
        hint = TRACEBACK
        if isinstance(error, BadReturn):
            # A wrong return value has no line of its own, so a traceback would not help.
            hint = ""
        raise MethodFailed(text, text + hint) from error


def _is_deliberate(error: Exception) -> bool:
    """Whether a method raised an error of the library on purpose."""
    if isinstance(error, BadReturn):
        return False
    if isinstance(error, BadPayload):
        from fedstill.core.user_code import is_users  # for errors alone

        return not is_users(error)
    return isinstance(error, FedstillError)


def returned(value: object, kind: type[T], function: Callable[..., Any], expected: str) -> T:
    """The return value of a method's function; raises BadReturn, naming the function and its place,
    if it is not of a kind.
    """
    if isinstance(value, kind):
        return value
    raise bad_return(function, f"gives {of_kind(value)}, not {expected}")


def bad_return(function: Callable[..., Any], problem: str) -> BadReturn:
    """The error for a method's function that gave something else than it is asked for."""
    from fedstill.core.user_code import definition  # for errors alone

    text = f"{function.__qualname__} {problem}"
    place = definition(function)
    if place:
        text += f" ({place})"
    return BadReturn(text)


def users_definition(function: Callable[..., Any]) -> str:
    """Where a user's function is written, as ``user_code.definition`` says it; empty for the
    library's own.
    """
    if str(getattr(function, "__module__", "")).startswith("fedstill."):
        return ""
    from fedstill.core.user_code import definition  # for users' functions alone

    return definition(function)


def as_hook(method: object, name: str, where: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that a hook returned and that is called later: an error in it names the hook."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with in_hook(method, name, where):
            return function(*args, **kwargs)

    # inspect.unwrap finds the function.
    return functools.update_wrapper(call, function, assigned=(), updated=())


def check_quorum(
    stage: Stage,
    accepted: Sequence[Reply],
    refused: Sequence[Refusal],
    rules: Rules,
    written: str = "",
) -> None:
    """Raises TooFewReplies or Diverged; ``written``: where a user's code says what is sent and what
    is expected.
    """
    least = math.ceil(rules.quorum * len(stage.clients))
    if len(accepted) >= least:
        return
    if not refused:
        raise TooFewReplies(_too_few(stage, accepted, least, rules, "no client answered"))

    first = refused[0]
    said = f"client {first.client} {first.reason}"
    if all(refusal.diverged for refusal in refused):
        raise Diverged(
            f"{place(stage)}: {said}; lower plan.lr, or clip gradients with plan.clip_norm"
        )
    if first.kind == "unlike":
        said += written
    text = _too_few(stage, accepted, least, rules, said)
    if first.kind == "failed":
        raise TooFewReplies(text + "; see the traceback with debug=True", text + TRACEBACK)
    raise TooFewReplies(text)


def _too_few(stage: Stage, accepted: Sequence[Reply], least: int, rules: Rules, first: str) -> str:
    return (
        f"{place(stage)}: {len(accepted)} of {len(stage.clients)} clients replied well, {least} "
        f"are needed (clients.quorum = {rules.quorum:g}); the first refused: {first}"
    )


def check_anyone_asked(payload_for_client: Callable[..., Any], stage: Stage) -> None:
    """Raises BadReturn where a user's hook gave no client a payload in the whole of round 1."""
    if not users_definition(payload_for_client):
        return
    clients = "every client"
    if len(stage.clients) > 1:
        clients = f"all {len(stage.clients)} clients"
    raise bad_return(
        payload_for_client,
        f"gives None to {clients} in every stage, so nobody does anything: does it lack a return?",
    )


def check_entries(
    aggregate: Callable[..., Any], predictors: Callable[..., Any], before: State, after: State
) -> None:
    """Raises BadReturn for parameters that a user's ``aggregate`` dropped, added, cut or cast.

    Not where it returned another network, nor where the user's code says what is evaluated.
    """
    is_free = not users_definition(aggregate) or bool(users_definition(predictors))
    if is_free or after.model != before.model or not before.params:
        return
    difference = other_group("params", after.params, before.params)
    if difference:
        raise bad_return(aggregate, f"gives other parameters than the model has: {difference}")


def check_norm(state: State, stage: Stage, accepted: Sequence[Reply], world: World) -> None:
    """Raises Diverged for parameters beyond the limit of ``GROWTH``; names the client that sent the
    largest ones.
    """
    norm = trees.norm(state.params)
    limit = GROWTH * max(1.0, trees.norm(world.initial(SERVER)))
    if norm <= limit:
        return
    norms = {
        reply.client: trees.norm(reply.content.tensors(group))
        for reply in accepted
        for group in MODELS
        if group in reply.content
    }
    largest = stage.clients[0]
    if norms:
        largest = max(norms, key=lambda client: norms[client])
    raise Diverged(
        f"{place(stage)}: the parameters' norm is {norm:.3g}, over the guard of {limit:.3g}; the "
        f"largest came from client {largest} ({norms.get(largest, norm):.3g}); lower plan.lr or "
        "set plan.clip_norm"
    )


def written_in(sends: Callable[..., Any], expects: Callable[..., Any]) -> str:
    """Where a user's code says what is sent and what is expected; empty for the library's own."""
    sent = users_definition(sends)
    expected = users_definition(expects)
    places = []
    if sent:
        places.append(f"sent by {sent}")
    if expected:
        places.append(f"expected by {expected}")
    if not places:
        return ""
    return f" ({'; '.join(places)})"
