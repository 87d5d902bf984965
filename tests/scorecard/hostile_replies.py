"""Rows on what clients send: replies that must be refused, clients that do not answer, and plain
repetition.
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
from scorecard.trials import STEADY, Trials, small_run

Change = Callable[[list[Reply]], list[Reply]]


@dataclass(frozen=True)
class Tampered:
    """An engine whose replies are changed on their way."""

    engine: Engine
    change: Change

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies, changed in stages of a round in which something is sent."""
        came = self.engine.run(work, stage, payloads, seed)
        return (
            self.change(came) if stage.round > 0 and any(reply.content for reply in came) else came
        )

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what clients remember."""
        self.engine.commit(stage, clients)


@dataclass
class NotesRefusals(NoRecorder):
    """The clients whose replies were refused."""

    clients: list[int] = field(default_factory=list)

    def stage(self, result: StageResult) -> None:
        """Note the refusals."""
        self.clients += [refusal.client for refusal in result.refused]


def _spoilt(change: Callable[[torch.Tensor], Any]) -> Callable[[Reply], Reply]:
    def spoil(reply: Reply) -> Reply:
        group = next(g for g, v in reply.content.items() if isinstance(v, Mapping))
        tensors: dict[str, Any] = dict(reply.content.tensors(group))
        name = next(iter(tensors))
        return replace(
            reply,
            content=Payload(reply.content, **{group: {**tensors, name: change(tensors[name])}}),
        )

    return spoil


def _regrouped(
    change: Callable[[dict[str, object]], dict[str, object]],
) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, content=Payload(change(dict(reply.content))))  # type: ignore[arg-type]


KINDS: Mapping[str, Callable[[Reply], Reply]] = {
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
    "missing group": _regrouped(lambda groups: {}),
    "extra group": _regrouped(lambda groups: {**groups, "extra": 1.0}),
    "negative count": lambda reply: replace(reply, examples=-1),
    "huge count": lambda reply: replace(reply, examples=10**12),
    "wrong round": lambda reply: replace(reply, round=99),
    "wrong client": lambda reply: replace(reply, client=77),
    "a report that cannot be": lambda reply: replace(reply, metrics={"steps": float("nan")}),
}
"""Replies that must be refused, by what is wrong with them."""


def poisoned(trials: int) -> Trials:
    """Each trial: one reply of a round is spoilt; it is refused by name, and the state is that
    without the client.
    """
    kinds, problems = list(KINDS), dict[str, str]()
    for trial in range(trials):
        method = [m for m in STEADY if m != "fedseq"][trial // len(kinds) % (len(STEADY) - 1)]
        kind = kinds[trial % len(kinds)]
        problems[f"{method}, {kind}"] = _taken(prepared(small_run(method, rounds=1)), KINDS[kind])
    return Trials.of(problems)


def _taken(ready: Prepared, spoil: Callable[[Reply], Reply]) -> str:
    """What is wrong with a round in which the last reply is spoilt."""
    watch, without = NotesRefusals(), one_round(ready, lambda came: came[:-1])
    try:
        state = one_round(ready, lambda came: [*came[:-1], spoil(came[-1])], watch)
    except FedstillError as error:
        return f"it ended the round: {on_one_line(error)}"
    if len(watch.clients) != 1:
        return "it was taken"
    return "" if same_bits(state.params, without.params) else "other bits than without it"


def absent(trials: int) -> Trials:
    """Each trial: clients fail with a rate of 0 to 90 %; the round ends the same way twice, with a
    state or by name.
    """
    rates, problems = (0.0, 0.1, 0.3, 0.5, 0.9), dict[str, str]()
    for trial in range(trials):
        method, rate = STEADY[trial // len(rates) % len(STEADY)], rates[trial % len(rates)]
        ready = prepared(small_run(method, rounds=1, seed=trial, clients={"failures": "tolerate"}))

        def lose(came: list[Reply], rate: float = rate, seed: int = trial) -> list[Reply]:
            return [
                replace(r, content=NOTHING, failure="gone") if _lost(r, rate, seed) else r
                for r in came
            ]

        one, other = (_ended(ready, lose) for _ in range(2))
        problems[f"{method}, {rate:.0%}, seed {trial}"] = (
            "" if one == other else f"{one}, then {other}"
        )
    return Trials.of(problems)


def _lost(reply: Reply, rate: float, seed: int) -> bool:
    draw = generator(seed_for(seed, reply.round, reply.stage, reply.client, "gone"))
    return float(torch.rand(1, generator=draw)) < rate


def _ended(ready: Prepared, change: Change) -> str:
    try:
        state = one_round(ready, change)
    except (TooFewReplies, Diverged) as error:
        return type(error).__name__
    return str(sum(float(v.double().sum()) for v in state.params.values()))


def repeated(trials: int) -> Trials:
    """Each trial: a run's rounds twice, client by client and side by side, with replies in
    another order: same bits.
    """
    problems = dict[str, str]()
    for trial in range(trials):
        method = STEADY[trial % len(STEADY)]
        states = [
            one_round(prepared(small_run(method, rounds=1, seed=trial, engine=engine)), change)
            for engine, change in (
                ("serial", lambda came: came),
                ("pooled", lambda came: came[::-1]),
            )
        ]
        same = same_bits(states[0].params, states[1].params)
        problems[f"{method}, seed {trial}"] = "" if same else "other bits"
    return Trials.of(problems)


def diverging(trials: int) -> Trials:
    """Each trial: a learning rate of ten thousand; the run must end by name, with the state of
    before.
    """
    problems = dict[str, str]()
    for trial in range(trials):
        method = STEADY[trial % len(STEADY)]
        ready = prepared(
            small_run(method, rounds=1, seed=trial, plan={"epochs": 2, "batch": 20, "lr": 1e4})
        )
        try:
            one_round(ready, lambda came: came)
            problems[f"{method}, seed {trial}"] = "nothing was said"
        except (Diverged, TooFewReplies):
            problems[f"{method}, seed {trial}"] = ""
        except FedstillError as error:
            problems[f"{method}, seed {trial}"] = on_one_line(error)
    return Trials.of(problems)


def prepared(experiment: Experiment) -> Prepared:
    """A run that is ready to start."""
    return prepare(resolve(experiment))


def one_round(ready: Prepared, change: Change, recorder: Recorder | None = None) -> State:
    """The state after round 1, with replies changed on their way."""
    engine = ready.engine()
    state = first_state(context_of(ready, engine))
    return next_state(state, context_of(ready, Tampered(engine, change), recorder))
