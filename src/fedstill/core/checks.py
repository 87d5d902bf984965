"""When a stage does not count: too few good replies, a model that diverged, a mistake in a method.

What a method's hook raises at the server becomes an error that names the hook and the line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fedstill.core.extensions import Predictors, of_some_clients
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Reply, Stage, State, World
from fedstill.core.screen import MODELS, Refusal, Rules, other_group
from fedstill.core.user_code import bad_return, definition, is_users, reason, returned

P = ParamSpec("P")
T = TypeVar("T")

LISTED = 6
"""The most clients or predictors that a message lists."""

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
        on_purpose = isinstance(error, FedstillError) and not isinstance(error, BadReturn)
        by_mistake = isinstance(error, BadPayload) and is_users(error)
        if on_purpose and not by_mistake:
            raise
        # A wrong return value has no line of its own, so a traceback would not help.
        hint = "" if isinstance(error, BadReturn) else TRACEBACK
        text = f"{where}: {type(method).__name__}.{name} failed: {reason(error, method)}"
        raise MethodFailed(text, text + hint) from error


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
    if not definition(payload_for_client):
        return
    clients = f"all {len(stage.clients)} clients" if len(stage.clients) > 1 else "every client"
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
    is_free = not definition(aggregate) or bool(definition(predictors))
    if is_free or after.model != before.model or not before.params:
        return
    difference = other_group("params", after.params, before.params)
    if difference:
        raise bad_return(aggregate, f"gives other parameters than the model has: {difference}")


def client_predictors_of(
    method: Method, predictors: Predictors, state: State, world: World
) -> dict[int, str]:
    """The name of the predictor that answers for each client; empty where one answers for all, or
    the clients' own models do.

    Raises BadReturn for a client without a predictor, and for a name that no predictor has.
    """
    declared = returned(
        method.client_predictors(state, world),
        dict,
        method.client_predictors,
        "a dict of clients to names of predictors",
    )
    if declared:
        _check_names(method, declared, predictors, world)
    elif method.personal or not predictors or not of_some_clients(next(iter(predictors))):
        return {}

    names = {client: f"client {client}" for client in range(world.clients)}
    answers = {client: name for client, name in names.items() if name in predictors}
    answers.update(declared)
    missing = [client for client in names if client not in answers]
    if not missing:
        return dict(sorted(answers.items()))
    if not declared and state.round > 1 and all(n.startswith("client ") for n in predictors):
        # Models of single clients may be made one by one, as their clients act.
        return {}
    raise _no_predictor(method, missing, predictors)


def _check_names(
    method: Method, declared: Mapping[Any, Any], predictors: Predictors, world: World
) -> None:
    """Raises BadReturn for keys that are no clients, and for names that no predictor has."""
    hook = method.client_predictors
    if method.personal:
        own = "personal says that clients have models of their own; leave one of both out"
        raise bad_return(hook, f"names predictors for clients, and {own}")
    for client, name in declared.items():
        if client not in range(world.clients):
            known = f"clients are numbered from 0 to {world.clients - 1}"
            raise bad_return(hook, f"names a predictor for client {client!r}; {known}")
        if name not in predictors:
            known = _listed(list(predictors)) or "none"
            raise bad_return(hook, f"names {name!r} for client {client}; predictors gives {known}")


def _no_predictor(method: Method, clients: Sequence[int], predictors: Predictors) -> BadReturn:
    """The error for clients that no predictor answers for."""
    numbers = _listed(clients)
    names = _listed(list(predictors))
    if method.has_client_predictors:
        what = f"names no predictor for {len(clients)} clients ({numbers}); give each of them one"
        return bad_return(method.client_predictors, f"{what} of {names}")
    example = f"return dict.fromkeys(range(world.clients), {next(iter(predictors))!r})"
    return bad_return(
        method.predictors,
        f"gives {names}, and nothing says which answers for {len(clients)} clients ({numbers}); "
        f"add client_predictors(self, state, world) to the method, such as: {example}",
    )


def _listed(values: Sequence[object]) -> str:
    """The first of some values, as a message lists them."""
    end = ", …" if len(values) > LISTED else ""
    return ", ".join(map(str, values[:LISTED])) + end


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
    largest = max(norms, key=lambda client: norms[client]) if norms else stage.clients[0]
    raise Diverged(
        f"{place(stage)}: the parameters' norm is {norm:.3g}, over the guard of {limit:.3g}; the "
        f"largest came from client {largest} ({norms.get(largest, norm):.3g}); lower plan.lr or "
        "set plan.clip_norm"
    )


def written_in(sends: Callable[..., Any], expects: Callable[..., Any]) -> str:
    """Where a user's code says what is sent and what is expected; empty for the library's own."""
    sent = definition(sends)
    expected = definition(expects)
    places = []
    if sent:
        places.append(f"sent by {sent}")
    if expected:
        places.append(f"expected by {expected}")
    return f" ({'; '.join(places)})" if places else ""
