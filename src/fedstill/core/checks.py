"""Checks of a stage: enough accepted replies, no divergence, and users' functions that return
values of the right types and do not change shared tensors.

An exception in a method's function becomes an error that names the function and the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import (
    TRACEBACK,
    BadPayload,
    BadReturn,
    ChangedInPlace,
    Diverged,
    FedstillError,
    MethodFailed,
    TooFewReplies,
)
from fedstill.core.fields import kind_text
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Keep, Payload, Reply, Stage, State, World
from fedstill.core.screen import MODELS, Rules, group_difference
from fedstill.core.stage_results import StageResult

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
    raise bad_return(function, f"returns {kind_text(value)} instead of {expected}")


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


def check_quorum(
    result: StageResult, rules: Rules, code_lines: str = "", *, is_remote: bool = False
) -> None:
    """Raise TooFewReplies if a stage has fewer accepted replies than the quorum; Diverged if
    divergence is the reason for all refusals.

    ``code_lines``: the lines of a user's code that make and expect replies (``reply_code``).
    ``is_remote``: whether the clients have their tracebacks, so that ``debug`` shows none.
    """
    client_count = len(result.payloads)
    least = math.ceil(rules.quorum * client_count - 1e-9)  # in floats, 0.55 * 100 > 55
    if len(result.accepted) >= least:
        return
    text = (
        f"{place(result.stage)}: {len(result.accepted)} of {client_count} clients replied well, "
        f"{least} are needed (clients.quorum = {rules.quorum:g}); the first refused: "
    )
    if not result.refused:
        raise TooFewReplies(text + "no client answered")

    first = result.refused[0]
    example = f"client {first.client}: {first.reason}"
    if all(refusal.diverged for refusal in result.refused):
        advice = "lower plan.lr, or clip gradients with plan.clip_norm"
        raise Diverged(f"{place(result.stage)}: {example}; {advice}")
    text += example
    if first.kind == "unlike":
        text += code_lines
    if first.kind == "failed" and not is_remote:
        raise TooFewReplies(text + "; see the traceback with debug=True", text + TRACEBACK)
    raise TooFewReplies(text)


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
        f"returns None for {clients} in every stage, so no client has work; is a return missing?",
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
        raise bad_return(aggregate, f"returns parameters that do not match the model: {difference}")


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


# ---- functions that an engine calls --------------------------------------------------------------


class _Guarded(NamedTuple):
    """A tensor with its name, and torch's count of writes to it when the guard was created."""

    name: str
    tensor: Tensor
    version: int


class MutationGuard:
    """Detects that a user's code changes shared tensors.

    Nothing is copied, because torch counts the writes to each tensor.
    """

    def __init__(self, value: Any) -> None:
        """value: a tensor, or mappings and sequences of tensors."""
        self._guarded = [
            _Guarded(name, tensor, tensor._version) for name, tensor in _named_tensors(value, "")
        ]

    def check(self, function: Callable[..., Any], client: int | None = None) -> None:
        """Raises ChangedInPlace if a tensor has changed. The message names the called function or
        class, and the client.
        """
        for guarded in self._guarded:
            if guarded.tensor._version != guarded.version:
                raise ChangedInPlace(_changed_in_place(guarded.name, function, client))


def _changed_in_place(name: str, function: Callable[..., Any], client: int | None) -> str:
    owner = ""
    if client == SERVER:
        owner = " at the server"
    elif client is not None:
        owner = f" at client {client}"
    message = (
        f"{function.__qualname__} changes {name}{owner}, which is shared: create a new tensor (x + "
        "1 instead of x.add_(1)), or change x.clone()"
    )
    line = users_definition(function)
    if line:
        message += f" ({line})"
    return message


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors whose writes torch counts, with their names."""
    if isinstance(value, Tensor):
        # Torch forbids writes to inference tensors, and does not count them.
        if not value.is_inference():
            yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    prefix = ""
    if name:
        prefix = f"{name}."
    for key, item in items:
        yield from _named_tensors(item, f"{prefix}{key}")


def terms_of(function: Callable[..., object], value: object, batch: int) -> Mapping[str, Tensor]:
    """The return value of ``terms`` or ``ascent_terms`` for a batch. Raises BadReturn if it is not
    a mapping of names to tensors of shape (batch,) or ().
    """
    if not isinstance(value, Mapping):
        raise bad_return(
            function, f"returns {kind_text(value)} instead of a dict of tensors by name"
        )
    if not value:
        raise bad_return(function, "returns no terms, so there is nothing to train")
    for name, term in value.items():
        if not isinstance(term, Tensor):
            raise bad_return(function, f"returns {kind_text(term)} instead of a tensor as {name!r}")
        if term.shape not in ((), (batch,)):
            shape = tuple(term.shape)
            raise bad_return(
                function,
                f"returns {name!r} with shape {shape}; it must have shape ({batch},), one value "
                "per example, or ()",
            )
    return value


def content_and_state(work: ClientWork, value: object) -> tuple[Payload, Payload | Keep]:
    """The return value of ``end``. Raises BadReturn unless it consists of two payloads, of which
    the second may be ``KEEP``.
    """
    if isinstance(value, tuple) and len(value) == 2:
        content, client_state = value
        if isinstance(content, Payload) and isinstance(client_state, (Payload, Keep)):
            return content, client_state
    kinds = kind_text(value)
    if isinstance(value, tuple) and value:
        kinds = f"a tuple of {', '.join(map(kind_text, value))}"
    raise bad_return(
        work.end, f"returns {kinds} instead of two Payloads: the content and the client state"
    )


def journal_fields(
    function: Callable[..., object], value: object, reserved: Collection[str] = ()
) -> dict[str, Any]:
    """The return value of ``report`` or of a measure as fields for a journal. Numbers of NumPy and
    torch become Python numbers.

    reserved: the names of the run's fields. Raises BadReturn for a reserved name, for a value that
    is not a mapping, and for values that a journal cannot contain.
    """
    if not isinstance(value, Mapping):
        raise bad_return(
            function, f"returns {kind_text(value)} instead of a dict of numbers and texts by name"
        )
    for name in value:
        if not isinstance(name, str):
            raise bad_return(
                function, f"returns a field with the name {name!r:.40}; names must be texts"
            )
        if name in reserved:
            raise bad_return(
                function, f"returns {name!r}, which is a field of the run; choose another name"
            )
    return {name: _plain(item, function, name) for name, item in value.items()}


def _plain(value: object, function: Callable[..., object], name: str) -> Any:
    """A value that consists of Python's numbers, texts, lists and dictionaries."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, function, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, function, name) for item in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _plain(value.tolist(), function, name)
    raise bad_return(
        function,
        f"returns {kind_text(value)} as {name!r}; allowed are numbers, texts, and lists and dicts "
        "of them",
    )
