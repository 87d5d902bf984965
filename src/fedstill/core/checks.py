"""Checks of a stage at the server: enough good replies, a model that has not diverged, and hooks
that return what they should.

An exception in a method's hook becomes an error that names the hook and the line.
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
from fedstill.core.fields import kind_text
from fedstill.core.records import SERVER, Reply, Stage, State, World
from fedstill.core.screen import MODELS, Refusal, Rules, group_difference

P = ParamSpec("P")
T = TypeVar("T")


GROWTH = 100.0
"""The global parameters have diverged if their norm exceeds the initial norm (at least 1) this many
times.
"""


def place(stage: Stage) -> str:
    """A stage's place in a run, for messages."""
    return f"round {stage.round}, stage {stage.name!r}"


@contextmanager
def in_hook(method: object, name: str, moment: str) -> Iterator[None]:
    """Turn an exception in a method's hook into MethodFailed, chained.

    Errors of the library that a method raises on purpose are not changed. ``moment``: when in the
    run the hook is called, for the message.
    """
    try:
        yield
    except Exception as error:
        if _is_deliberate(error):
            raise
        from fedstill.core.user_code import reason  # for errors alone

        text = f"{moment}: {type(method).__name__}.{name} failed: {reason(error, method)}"
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


def checked_return(value: object, kind: type[T], function: Callable[..., Any], expected: str) -> T:
    """The value that a method's function returned.

    Raises BadReturn, with the function's name and line, if the value is not of the kind.
    ``expected``: the kind in words.
    """
    if isinstance(value, kind):
        return value
    raise bad_return(function, f"gives {kind_text(value)}, not {expected}")


def bad_return(function: Callable[..., Any], problem: str) -> BadReturn:
    """The error for a method's function with a wrong return value."""
    from fedstill.core.user_code import definition  # for errors alone

    text = f"{function.__qualname__} {problem}"
    line = definition(function)
    if line:
        text += f" ({line})"
    return BadReturn(text)


def users_definition(function: Callable[..., Any]) -> str:
    """The file and line of a user's function (``user_code.definition``); empty for functions of
    the library.
    """
    if str(getattr(function, "__module__", "")).startswith("fedstill."):
        return ""
    from fedstill.core.user_code import definition  # for users' functions alone

    return definition(function)


def as_hook(method: object, name: str, moment: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that a hook returned, so that an exception in a later call names the hook."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with in_hook(method, name, moment):
            return function(*args, **kwargs)

    # inspect.unwrap finds the function.
    return functools.update_wrapper(call, function, assigned=(), updated=())


def check_quorum(
    stage: Stage,
    accepted: Sequence[Reply],
    refused: Sequence[Refusal],
    rules: Rules,
    code_lines: str = "",
) -> None:
    """Raise TooFewReplies if the stage has fewer accepted replies than the quorum; Diverged if
    divergence is the reason for all refusals.

    ``code_lines``: the lines of a user's code that make and expect replies (``reply_code``).
    """
    least = math.ceil(rules.quorum * len(stage.clients))
    if len(accepted) >= least:
        return
    if not refused:
        raise TooFewReplies(_too_few(stage, accepted, least, rules, "no client answered"))

    first = refused[0]
    example = f"client {first.client}: {first.reason}"
    if all(refusal.diverged for refusal in refused):
        raise Diverged(
            f"{place(stage)}: {example}; lower plan.lr, or clip gradients with plan.clip_norm"
        )
    if first.kind == "unlike":
        example += code_lines
    text = _too_few(stage, accepted, least, rules, example)
    if first.kind == "failed":
        raise TooFewReplies(text + "; see the traceback with debug=True", text + TRACEBACK)
    raise TooFewReplies(text)


def _too_few(stage: Stage, accepted: Sequence[Reply], least: int, rules: Rules, first: str) -> str:
    return (
        f"{place(stage)}: {len(accepted)} of {len(stage.clients)} clients replied well, {least} "
        f"are needed (clients.quorum = {rules.quorum:g}); the first refused: {first}"
    )


def check_round_has_work(payload_for_client: Callable[..., Any], stage: Stage) -> None:
    """Raise BadReturn if a user's hook made no payload in round 1, of which ``stage`` is the last
    stage.
    """
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
    aggregate: Callable[..., Any], predictors: Callable[..., Any], old: State, new: State
) -> None:
    """Raise BadReturn if a user's ``aggregate`` dropped or added parameters, or changed their
    shapes or types.

    A method may do so if it changes the network, or has its own ``predictors``.
    """
    is_free = not users_definition(aggregate) or bool(users_definition(predictors))
    if is_free or new.model != old.model or not old.params:
        return
    difference = group_difference("params", new.params, old.params)
    if difference:
        raise bad_return(aggregate, f"gives other parameters than the model has: {difference}")


def check_norm(state: State, stage: Stage, accepted: Sequence[Reply], world: World) -> None:
    """Raise Diverged if the parameters' norm exceeds the limit of ``GROWTH``. The message names the
    client with the largest parameters.
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


def reply_code(end: Callable[..., Any], expected_reply: Callable[..., Any]) -> str:
    """The lines of a user's code that make a reply and that expect one, in brackets; empty for code
    of the library.
    """
    lines = []
    if sender := users_definition(end):
        lines.append(f"sent by {sender}")
    if receiver := users_definition(expected_reply):
        lines.append(f"expected by {receiver}")
    if not lines:
        return ""
    return f" ({'; '.join(lines)})"
