"""The federated loop without a run's directory: stages and rounds of a prepared run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedstill.core.extensions import Engine, NoRecorder, Observer, Recorder, StageResult
from fedstill.core.records import Payload, Reply, Stage, State
from fedstill.core.rounds import RunContext, run_round
from fedstill.running.extensions import run_context
from fedstill.running.preparation import Prepared


class Collecting(NoRecorder):
    """Keeps the results of all stages, and of one that ended the run."""

    def __init__(self) -> None:
        self.results: list[StageResult] = []
        self.failure: StageResult | None = None

    def stage(self, result: StageResult) -> None:
        self.results.append(result)

    def failed(self, result: StageResult, error: Exception) -> None:
        self.failure = result


def context_of(
    ready: Prepared, engine: Engine | None = None, recorder: Recorder | None = None, **changes: Any
) -> RunContext:
    """The context of a prepared run without middleware.

    engine: a new one by default.
    """
    engine = engine or ready.engine()
    return replace(run_context(ready, engine, recorder), engine=engine, **changes)


def first_state(context: RunContext) -> State:
    """The state before round 1, after the stages that come before it."""
    state = context.method.initial_state(context.world)
    stages = context.schedule(0, context.world)
    if not stages:
        return state
    return run_round(replace(state, round=0), stages, context)


def next_state(state: State, context: RunContext) -> State:
    """The state after one more round."""
    return run_round(state, context.schedule(state.round, context.world), context)


def states_after(context: RunContext, rounds: int) -> list[State]:
    """The state before round 1, and after each of the first rounds."""
    states = [first_state(context)]
    for _ in range(rounds):
        states.append(next_state(states[-1], context))
    return states


def record(
    observer: Observer,
    stage: Stage,
    events: Sequence[dict[str, Any]],
    contents: Mapping[int, Payload] | None = None,
) -> None:
    """Pass the events of a stage's clients to an observer, as a run does.

    contents: the replies of clients, by client.
    """
    replies = [Reply(client, content, 0) for client, content in (contents or {}).items()]
    state = State({})
    result = StageResult(
        stage=stage, payloads={}, accepted=replies, refused=(), before=state, after=state
    )
    for event in events:
        event["event"] = "client"
        event |= observer.client_fields(event, result)
    for event in events:
        observer.on_event(event)
