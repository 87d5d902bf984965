"""Rows on replies of clients: malformed ones are refused, missing ones are tolerated, and their
order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import Diverged, FedstillError, TooFewReplies, on_one_line
from fedstill.core.extensions import Engine, NoRecorder, Recorder, StageResult
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import NOTHING, Payload, Reply, Stage, State
from fedstill.core.trees import same_bits
from fedstill.running.preparation import Prepared, prepare
from loops import context_of, first_state, next_state
from scorecard.trials import STEADY, Trials, problem_unless, small_run

Change = Callable[[list[Reply]], list[Reply]]
"""A change of the replies of a stage."""

Spoiling = Callable[[Reply], Reply]
"""A change of one reply."""


@dataclass(frozen=True)
class Tampered:
    """An engine whose replies are changed before the server receives them."""

    engine: Engine
    change: Change

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies, changed in the stages of a round in which clients send any content."""
        replies = self.engine.run(work, stage, payloads, seed)
        if stage.round > 0 and any(reply.content for reply in replies):
            return self.change(replies)
        return replies

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Store the states of clients."""
        self.engine.commit(stage, clients)


@dataclass
class RefusedClients(NoRecorder):
    """Records the clients whose replies were refused."""

    clients: list[int] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Record the refusals."""
        self.clients += [refusal.client for refusal in result.refused]


def _spoilt(change: Callable[[torch.Tensor], Any]) -> Spoiling:
    """A change of the first tensor of a reply."""

    def spoil(reply: Reply) -> Reply:
        groups = [name for name, value in reply.content.items() if isinstance(value, Mapping)]
        tensors: dict[str, Any] = dict(reply.content.tensors(groups[0]))
        first = next(iter(tensors))
        tensors[first] = change(tensors[first])
        return replace(reply, content=Payload(reply.content, **{groups[0]: tensors}))

    return spoil


def _without_groups(reply: Reply) -> Reply:
    return replace(reply, content=Payload())


def _with_extra_group(reply: Reply) -> Reply:
    return replace(reply, content=Payload(reply.content, extra=1.0))


KINDS: Mapping[str, Spoiling] = {
    "NaN": _spoilt(lambda t: t * float("nan")),
    "+Inf": _spoilt(lambda t: t + float("inf")),
    "-Inf": _spoilt(lambda t: t - float("inf")),
    "wrong shape": _spoilt(lambda t: t[..., :1]),
    "zero size": _spoilt(lambda t: t.flatten()[:0]),
    "float64": _spoilt(lambda t: t.double()),
    "complex": _spoilt(lambda t: t.to(torch.complex64)),
    "sparse": _spoilt(lambda t: t.to_sparse()),
    "no tensor": _spoilt(lambda t: 3.0),
    "a thousand times the norm": _spoilt(lambda t: (t + 1) * 1e4),
    "missing group": _without_groups,
    "extra group": _with_extra_group,
    "negative count": lambda reply: replace(reply, examples=-1),
    "huge count": lambda reply: replace(reply, examples=10**12),
    "wrong round": lambda reply: replace(reply, round=99),
    "wrong client": lambda reply: replace(reply, client=77),
    "a report that cannot be": lambda reply: replace(reply, metrics={"steps": float("nan")}),
}
"""Malformed replies, which must be refused."""

PARALLEL = [method for method in STEADY if method != "fedseq"]


def poisoned(trials: int) -> Trials:
    """Each trial: one reply of a round is malformed. It is refused by name, and the state is that
    without the client.
    """
    problems = dict[str, str]()
    kinds = list(KINDS)
    for trial in range(trials):
        method = PARALLEL[trial // len(kinds) % len(PARALLEL)]
        kind = kinds[trial % len(kinds)]
        ready = prepared(small_run(method, rounds=1))
        problems[f"{method}, {kind}"] = _accepted(ready, KINDS[kind])
    return Trials.of(problems)


def _accepted(ready: Prepared, spoil: Spoiling) -> str:
    """The problem of a round in which the last reply is malformed."""
    without_last = one_round(ready, lambda replies: replies[:-1])

    def spoil_last(replies: list[Reply]) -> list[Reply]:
        return [*replies[:-1], spoil(replies[-1])]

    refused = RefusedClients()
    try:
        state = one_round(ready, spoil_last, refused)
    except FedstillError as error:
        return f"it ended the round: {on_one_line(error)}"
    if len(refused.clients) != 1:
        return "it was taken"
    is_same = same_bits(state.params, without_last.params)
    return problem_unless(is_same, "other bits than without it")


RATES = (0.0, 0.1, 0.3, 0.5, 0.9)
"""Rates at which clients fail, in turn."""


def absent(trials: int) -> Trials:
    """Each trial: clients fail at a rate of 0 to 90 %. A round ends in the same way twice, with a
    state or an error by name.
    """
    problems = dict[str, str]()
    for trial in range(trials):
        method = STEADY[trial // len(RATES) % len(STEADY)]
        rate = RATES[trial % len(RATES)]
        ready = prepared(small_run(method, rounds=1, seed=trial, clients={"failures": "tolerate"}))
        change = _failing(rate, trial)
        first = _end_of_round(ready, change)
        second = _end_of_round(ready, change)
        problems[f"{method}, {rate:.0%}, seed {trial}"] = problem_unless(
            first == second, f"{first}, then {second}"
        )
    return Trials.of(problems)


def _failing(rate: float, seed: int) -> Change:
    """A change by which clients fail at a rate."""

    def fail(replies: list[Reply]) -> list[Reply]:
        changed = []
        for reply in replies:
            draw = generator(seed_for(seed, reply.round, reply.stage, reply.client, "gone"))
            if float(torch.rand(1, generator=draw)) < rate:
                reply = replace(reply, content=NOTHING, failure="gone")
            changed.append(reply)
        return changed

    return fail


def _end_of_round(ready: Prepared, change: Change) -> str:
    """The name of the error that ends round 1, or else the sum of all parameters."""
    try:
        state = one_round(ready, change)
    except (TooFewReplies, Diverged) as error:
        return type(error).__name__
    return str(sum(float(parameter.double().sum()) for parameter in state.params.values()))


def repeated(trials: int) -> Trials:
    """Each trial: a round with clients one by one and side by side, whose replies are reversed, has
    the same bits.
    """
    problems = dict[str, str]()
    for trial in range(trials):
        method = STEADY[trial % len(STEADY)]
        serial = prepared(small_run(method, rounds=1, seed=trial, engine="serial"))
        pooled = prepared(small_run(method, rounds=1, seed=trial, engine="pooled"))
        in_order = one_round(serial, unchanged)
        reversed_order = one_round(pooled, lambda replies: replies[::-1])
        is_same = same_bits(in_order.params, reversed_order.params)
        problems[f"{method}, seed {trial}"] = problem_unless(is_same, "other bits")
    return Trials.of(problems)


def diverging(trials: int) -> Trials:
    """Each trial: a round with a learning rate of ten thousand ends with an error that names the
    divergence.
    """
    problems = dict[str, str]()
    plan = {"epochs": 2, "batch": 20, "lr": 1e4}
    for trial in range(trials):
        method = STEADY[trial % len(STEADY)]
        ready = prepared(small_run(method, rounds=1, seed=trial, plan=plan))
        try:
            one_round(ready, unchanged)
            problem = "nothing was said"
        except (Diverged, TooFewReplies):
            problem = ""
        except FedstillError as error:
            problem = on_one_line(error)
        problems[f"{method}, seed {trial}"] = problem
    return Trials.of(problems)


def unchanged(replies: list[Reply]) -> list[Reply]:
    """The replies as clients send them."""
    return replies


def prepared(experiment: Experiment) -> Prepared:
    """A run that is ready to start."""
    return prepare(resolve(experiment))


def one_round(ready: Prepared, change: Change, recorder: Recorder | None = None) -> State:
    """The state after round 1, with changed replies."""
    engine = ready.engine()
    state = first_state(context_of(ready, engine))
    return next_state(state, context_of(ready, Tampered(engine, change), recorder))
