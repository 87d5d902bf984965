"""Methods at the edges of the interface, for ``tools/golden.py``.

They draw random numbers at the server, pass state from client to client, have clients without work,
fail, or drop entries. They work with the names that the hooks of ``Method`` and ``ClientWork`` have
today, and with those of earlier commits (``NAMES``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fedstill

NAMES = {
    "initial_state": "setup",
    "begin_round": "open",
    "payload_for_client": "down",
    "expected_reply": "expects",
    "aggregate": "fold",
    "idle_reply": "idle",
    "after_step": "settle",
    "adjust_gradients": "adjust",
}
"""New names of hooks, with their old names."""

EDGES = {
    "golden_server_draws": "parallel",
    "golden_chain": "sequential",
    "golden_idle": "parallel",
    "golden_failing": "parallel",
    "golden_dropping": "parallel",
    "golden_dropping_answer": "parallel",
}
"""The methods of this file, with the topology of each."""

Hooks = dict[str, Callable[..., Any]]


def spelled(base: type, name: str) -> str:
    """The name under which a base class has a hook: the new one, or the old one."""
    if hasattr(base, name):
        return name
    return NAMES.get(name, name)


def subclass(name: str, base: type, hooks: Hooks) -> Any:
    """A frozen dataclass with some hooks of a base class replaced."""
    members: dict[str, Any] = {spelled(base, hook): body for hook, body in hooks.items()}
    members["__module__"] = __name__
    return dataclass(frozen=True)(type(name, (base,), members))


def server_default(hook: str) -> Callable[..., Any]:
    """What ``Method`` does in a hook."""
    default: Callable[..., Any] = getattr(fedstill.Method, spelled(fedstill.Method, hook))
    return default


def content_of(reply: Any) -> Any:
    """The payload of a reply."""
    if hasattr(reply, "content"):
        return reply.content
    return reply.up


def training_start(*args: Any, **fields: Any) -> Any:
    """A record of the class that ``ClientWork.begin`` returns."""
    record: Any = getattr(fedstill, "TrainingStart", None) or getattr(fedstill, "Carry")  # noqa: B009
    return record(*args, **fields)


def noisy(params: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Parameters with noise from torch's global generator."""
    return {name: value + scale * torch.randn_like(value) for name, value in params.items()}


# ---- random draws at the server -----------------------------------------------------------------


def drawn_initial_state(self: Any, world: Any) -> Any:
    """A start that depends on the server's random numbers."""
    state = server_default("initial_state")(self, world)
    return state.next(params=noisy(state.params, 0.1))


def drawn_begin_round(self: Any, state: Any, stages: Any, world: Any) -> Any:
    """A random number that the state remembers."""
    return state.next(drawn=torch.rand(3))


def drawn_aggregate(self: Any, state: Any, replies: Any, stage: Any, world: Any) -> Any:
    """A mean with noise."""
    following = server_default("aggregate")(self, state, replies, stage, world)
    return following.next(params=noisy(following.params, 0.01))


# ---- a chain that hands on a trace and counts visits --------------------------------------------


def chain_initial_state(self: Any, world: Any) -> Any:
    """A trace of zeros beside the model."""
    state = server_default("initial_state")(self, world)
    return state.next(trace={k: torch.zeros_like(v) for k, v in state.params.items()})


def chain_payload(self: Any, state: Any, client: int, stage: Any, world: Any) -> Any:
    """The model and the trace."""
    return fedstill.Payload(params=state.params, trace=state.extra.tensors("trace"))


def chain_expected(self: Any, client: int, stage: Any, world: Any) -> Any:
    """The form of a client's reply."""
    initial = world.initial(client)
    return fedstill.Payload(params=initial, trace=initial, visits=0)


def chain_aggregate(self: Any, state: Any, replies: Any, stage: Any, world: Any) -> Any:
    """The last client's model and trace."""
    content = content_of(replies[-1])
    return state.next(params=content.params, trace=content.tensors("trace"))


def chain_begin(self: Any, payload: Any, memory: Any, view: Any, world: Any) -> Any:
    """The model that was received; the number of visits is remembered."""
    visits = 0
    if memory:
        visits = int(memory.number("visits"))
    trace = payload.tensors("trace")
    return training_start(payload.params, trace=trace, constants={"visits": visits})


def chain_after_step(
    self: Any, old_params: Any, gradients: Any, new_params: Any, *arguments: Any
) -> Any:
    """Adds each step's work to the trace."""
    trace = dict(arguments[0])
    for name, gradient in gradients.items():
        movement = new_params[name] - old_params[name]
        trace[name] = trace[name] + (gradient * movement).abs()
    return new_params, trace


def chain_end(self: Any, params: Any, start: Any, result: Any, *arguments: Any) -> Any:
    """The model, the trace and the number of visits."""
    visits = start["visits"] + 1
    content = fedstill.Payload(params=params, trace=result.trace, visits=visits)
    return content, fedstill.Payload(visits=visits)


# ---- clients without work -----------------------------------------------------------------------


def idle_payload(self: Any, state: Any, client: int, stage: Any, world: Any) -> Any:
    """No client has work in round 2, and every other client has some in the other rounds."""
    if stage.round == 2 or client % 2:
        return None
    return server_default("payload_for_client")(self, state, client, stage, world)


# ---- clients that fail --------------------------------------------------------------------------


def failing_end(self: Any, params: Any, start: Any, result: Any, *arguments: Any) -> Any:
    """Client 1 raises an error, client 2 sends numbers that are not finite, client 3 too many."""
    view = arguments[0]
    if view.client == 1:
        raise RuntimeError("this client fails")
    if view.client == 2:
        params = {name: value * float("nan") for name, value in params.items()}
    content = fedstill.Payload(params=params)
    if view.client == 3:
        content = fedstill.Payload(content, more=1)
    return content, fedstill.Payload()


# ---- entries that disappear ---------------------------------------------------------------------


def dropping_aggregate(self: Any, state: Any, replies: Any, stage: Any, world: Any) -> Any:
    """A mean that forgets the last entry from round 2 on."""
    following = server_default("aggregate")(self, state, replies, stage, world)
    if stage.round < 2:
        return following
    last = list(following.params)[-1]
    return following.next(params={k: v for k, v in following.params.items() if k != last})


def constant_predictors(self: Any, state: Any, world: Any) -> Any:
    """An answer that does not need the model."""

    def predictor(x: Tensor) -> Tensor:
        classes = x.flatten(1).argmax(1) % 5
        return torch.nn.functional.one_hot(classes, 5).float()

    return {"global": predictor}


def method_with(name: str, work: Hooks, **hooks: Any) -> Any:
    """A method with hooks at the server, and clients with hooks of their own."""
    client_class = subclass(f"{name}_work", fedstill.ClientWork, work)
    if work:
        hooks["work"] = lambda self, stage: client_class()
    return subclass(name, fedstill.Method, hooks)


def register_edges() -> None:
    """Register the methods of this file under their names in ``EDGES``."""
    chain_work: Hooks = {"begin": chain_begin, "after_step": chain_after_step, "end": chain_end}
    methods = {
        "golden_server_draws": method_with(
            "ServerDraws",
            {},
            initial_state=drawn_initial_state,
            begin_round=drawn_begin_round,
            aggregate=drawn_aggregate,
        ),
        "golden_chain": method_with(
            "Chain",
            chain_work,
            initial_state=chain_initial_state,
            payload_for_client=chain_payload,
            expected_reply=chain_expected,
            aggregate=chain_aggregate,
        ),
        "golden_idle": method_with("Idle", {}, payload_for_client=idle_payload),
        "golden_failing": method_with("Failing", {"end": failing_end}),
        "golden_dropping": method_with("Dropping", {}, aggregate=dropping_aggregate),
        "golden_dropping_answer": method_with(
            "DroppingAnswer", {}, aggregate=dropping_aggregate, predictors=constant_predictors
        ),
    }
    for name, method in methods.items():
        fedstill.register("method", name)(method)
