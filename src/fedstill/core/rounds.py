"""The federated loop: ``run_round`` runs the stages of a round, and ``run_stage`` a single stage.

The loop is the same for every method, topology and engine. The steps of a stage:

1. The server makes a payload for each client (``build_requests``).
2. The engine runs the clients' work and brings their replies.
3. The screen accepts or refuses each reply. The number of accepted replies must reach the quorum.
4. The engine commits the states of the accepted clients.
5. The actor of the stage aggregates the accepted replies into the next state.
6. The recorder writes the journal and a checkpoint.

Capabilities extend these steps through the hooks of ``core.extensions``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fedstill.core.checks import (
    check_entries,
    check_norm,
    check_quorum,
    check_round_has_work,
    checked_return,
    in_hook,
    place,
    reply_code,
)
from fedstill.core.errors import ClientFailed
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, World
from fedstill.core.screen import Refusal, Rules, screen
from fedstill.core.stage_results import NoRecorder, Recorder, Requests, StageResult

if TYPE_CHECKING:
    # The loop calls extensions, but it does not need their base classes.
    from fedstill.core.extensions import Engine, RoundHook, StageActor, StageProvider
    from fedstill.core.topology import Topology


StageChange = Callable[[Sequence[Stage]], Sequence[Stage]]
"""Changes who acts in the stages of a round. Stages may be dropped; the others keep their index."""


def unchanged(stages: Sequence[Stage]) -> Sequence[Stage]:
    """The stages of the run."""
    return stages


@dataclass(frozen=True)
class Schedule:
    """The stages and actors of a run.

    ``topology``: the stages of a round, to which the ``providers`` add stages in their order.
    ``change``: of the stages when they are numbered. All draws have the number of their stage as a
    key, so the other clients draw the same numbers as without the change.
    """

    method: Method
    topology: Topology
    providers: tuple[StageProvider, ...] = ()
    change: StageChange = unchanged

    def __call__(self, round: int, world: World) -> list[Stage]:
        """The stages of a round, numbered from 0. Round 0 precedes round 1 and has only stages of
        providers.
        """
        stages: Sequence[Stage] = self.topology(round, world) if round > 0 else ()
        for provider in self.providers:
            stages = provider.schedule(stages, round, world)
        numbered = [replace(stage, index=index) for index, stage in enumerate(stages)]
        return list(self.change(numbered))

    def actor(self, stage: Stage) -> StageActor:
        """The actor of a stage: the method, if it knows the stage, or else the provider's actor."""
        if stage.name in self.method.stages:
            return self.method
        return self._actors.get(stage.name, self.method)

    @property
    def provided_stages(self) -> frozenset[str]:
        """The names of the stages that providers know."""
        return frozenset(self._actors)

    @cached_property
    def _actors(self) -> Mapping[str, StageActor]:
        actors: dict[str, StageActor] = {}
        for provider in self.providers:
            actors.update(provider.actors())
        return actors


ANSWERED = "answered"
"""State during a round with a chain: the number of its clients that have replied."""


@dataclass(frozen=True)
class RunContext:
    """The parts that all rounds of a run share. It is built once.

    ``hooks``: the extensions of the server's part, in their order. ``is_remote``: whether the
    clients are in other processes, which have the tracebacks of their failures.
    """

    schedule: Schedule
    world: World
    engine: Engine
    rules: Rules = field(default_factory=Rules)
    recorder: Recorder = field(default_factory=NoRecorder)
    hooks: Sequence[RoundHook] = ()
    is_remote: bool = False

    @property
    def method(self) -> Method:
        """The run's method."""
        return self.schedule.method


def run_round(state: State, stages: Sequence[Stage], context: RunContext) -> State:
    """Run a round, from the state's next stage.

    Raises ClientFailed if the rules tolerate no failure, TooFewReplies below the quorum (in a chain
    only if all its clients failed), Diverged if parameters blow up, and MethodFailed for a mistake
    in the method. Before that, the recorder gets the refusals of the stage. The last valid state is
    the one that it got last.
    """
    number = state.round
    state = _begin_round(state, stages, context)
    # The earlier stages of a resumed round had work for clients.
    has_work = state.stage > 0

    # By index, not by position: a replay may leave out stages.
    remaining = [stage for stage in stages if stage.index >= state.stage]
    for stage in remaining:
        with drawing_from(seed_for(context.world.seed, number, stage.index, SERVER, "server")):
            requests = build_requests(state, stage, context)
            has_work = has_work or bool(requests.payloads)
            is_last = stage.index == stages[-1].index
            if number == 1 and is_last and not has_work:
                actor = context.schedule.actor(stage)
                with in_hook(actor, "payload_for_client", place(stage)):
                    check_round_has_work(actor.payload_for_client, stage)

            result = run_stage(
                state,
                requests,
                context,
                optional=_is_optional(stage, stages, state),
                ends_round=is_last,
            )
            context.recorder.stage(result)
            state = result.after
    return replace(state.without(ANSWERED), round=number + 1, stage=0)


def build_requests(state: State, stage: Stage, context: RunContext) -> Requests:
    """The server's requests to the clients of a stage."""
    actor = context.schedule.actor(stage)
    world = extended_world(context.world, state, context.hooks)
    needs = actor.requires()
    with in_hook(actor, "payload_for_client", place(stage)):
        payloads = _payloads(actor, state, stage, world)
    for client, payload in payloads.items():
        for hook in context.hooks:
            payload = hook.extend_payload(payload, client, stage, needs, world)
        payloads[client] = payload
    return Requests(stage, payloads, world)


def extended_world(world: World, state: State, hooks: Sequence[RoundHook]) -> World:
    """The world with the extensions of a run's hooks."""
    for hook in hooks:
        world = hook.extend_world(world, state)
    return world


def run_stage(
    state: State,
    requests: Requests,
    context: RunContext,
    *,
    optional: bool = False,
    ends_round: bool = True,
) -> StageResult:
    """Run a stage: work, replies, screen, quorum, commit, aggregation.

    ``optional``: whether the run can continue without an accepted reply. Raises the errors of
    ``run_round``.
    """
    stage = requests.stage
    actor = context.schedule.actor(stage)
    result = StageResult(
        stage=stage,
        payloads=requests.payloads,
        accepted=(),
        refused=(),
        before=state,
        after=state,
        ends_round=ends_round,
    )

    with in_hook(actor, "work", place(stage)):
        work = checked_return(actor.work(stage), ClientWork, actor.work, "a ClientWork")
    with _recording_failures(result, context):
        replies = context.engine.run(work, stage, requests.payloads, context.world.seed)
        if context.rules.failures == "stop":
            _check_failures(replies, stage, context)

    idle = {reply.client for reply in replies if reply.idle and not reply.failure}
    result = replace(result, payloads=_without(requests.payloads, idle))
    replies = [reply for reply in replies if reply.client not in idle]
    result = _screened(result, replies, actor, requests.world, context)
    with _recording_refusals(result, context):
        if result.payloads and not optional:
            code_lines = reply_code(work.end, actor.expected_reply)
            check_quorum(result, context.rules, code_lines, is_remote=context.is_remote)
        context.engine.commit(stage, [reply.client for reply in result.accepted])
        new_state = state
        if result.accepted:
            new_state = _aggregated(result, actor, requests.world, context)
    return replace(result, after=_at_next_stage(new_state, stage))


def expected_reply(
    client: int, stage: Stage, world: World, schedule: Schedule, hooks: Sequence[RoundHook]
) -> Payload:
    """A payload with the groups, names, shapes and types of a client's valid reply."""
    actor = schedule.actor(stage)
    with in_hook(actor, "expected_reply", place(stage)):
        payload = actor.expected_reply(client, stage, world)
    for hook in hooks:
        payload = hook.extend_expected(payload, client, stage, world)
    return payload


def _begin_round(state: State, stages: Sequence[Stage], context: RunContext) -> State:
    """The state at the start of a round. Round 0 belongs to capabilities, not to the method."""
    if state.stage > 0 or state.round == 0:
        return state
    method = context.method
    seed = seed_for(context.world.seed, state.round, 0, SERVER, "open")
    with drawing_from(seed), in_hook(method, "begin_round", f"round {state.round}"):
        first_state = method.begin_round(state, stages, context.world)
        return checked_return(first_state, State, method.begin_round, "a State")


def _payloads(actor: StageActor, state: State, stage: Stage, world: World) -> dict[int, Payload]:
    """The payloads of the clients that have work."""
    payloads = {}
    for client in stage.clients:
        payload = actor.payload_for_client(state, client, stage, world)
        if payload is not None:
            payloads[client] = checked_return(
                payload, Payload, actor.payload_for_client, "a Payload"
            )
    return payloads


def _is_optional(stage: Stage, stages: Sequence[Stage], state: State) -> bool:
    """Whether the round can continue without replies in a stage. It can in a chain, if another
    client of the chain has replied, or comes later.
    """
    if not stage.sequential:
        return False
    later_stages = [later for later in stages if later.index > stage.index]
    return ANSWERED in state.extra or any(later.sequential for later in later_stages)


def _check_failures(replies: Sequence[Reply], stage: Stage, context: RunContext) -> None:
    """Raise ClientFailed for the first client that failed."""
    for reply in replies:
        if reply.failure:
            failed = [reply.client]
            raise ClientFailed(place(stage), failed, reply.failure, is_remote=context.is_remote)


@contextmanager
def _recording_failures(result: StageResult, context: RunContext) -> Iterator[None]:
    """Give a client's failure to the recorder before it ends the run."""
    try:
        yield
    except ClientFailed as error:
        failed = [Refusal(c, f"failed: {error.reason}", "failed") for c in error.clients]
        context.recorder.failed(replace(result, refused=failed), error)
        raise


@contextmanager
def _recording_refusals(result: StageResult, context: RunContext) -> Iterator[None]:
    """Give the refusals of a stage to the recorder before an error ends the run."""
    try:
        yield
    except Exception as error:
        context.recorder.failed(result, error)
        raise


def _without(payloads: Mapping[int, Payload], clients: Collection[int]) -> dict[int, Payload]:
    """The payloads except those of some clients."""
    return {client: payload for client, payload in payloads.items() if client not in clients}


def _screened(
    result: StageResult,
    replies: Sequence[Reply],
    actor: StageActor,
    world: World,
    context: RunContext,
) -> StageResult:
    """The result with its accepted and refused replies."""
    stage = result.stage
    needs = actor.requires()

    def expected(client: int) -> Payload:
        return expected_reply(client, stage, world, context.schedule, context.hooks)

    def refusal(reply: Reply) -> str:
        reasons = (hook.check_reply(reply, stage, needs, result.before) for hook in context.hooks)
        return next(filter(None, reasons), "") or actor.refuses(reply, stage)

    accepted, refused = screen(
        expected, stage, result.payloads, replies, context.rules, refusal=refusal
    )
    return replace(result, accepted=accepted, refused=refused)


def _aggregated(result: StageResult, actor: StageActor, world: World, context: RunContext) -> State:
    """The state after the aggregation of the accepted replies. Raises Diverged or MethodFailed."""
    stage = result.stage
    old = result.before
    accepted = result.accepted
    with in_hook(actor, "aggregate", place(stage)):
        aggregated = actor.aggregate(old, accepted, stage, world)
        new = checked_return(aggregated, State, actor.aggregate, "a State")
        predictors = getattr(actor, "predictors", Method.predictors)
        check_entries(actor.aggregate, predictors, old, new)
        if new.params is not old.params:
            check_norm(new, stage, accepted, world)

    for hook in context.hooks:
        new = hook.extend_state(new, accepted, stage, world)
    if stage.sequential:
        new = new.next(answered=int(old.extra.get(ANSWERED, 0)) + 1)
    return new


def _at_next_stage(state: State, stage: Stage) -> State:
    """The state with the index of the next stage; round 1 follows round 0."""
    if stage.round == 0:
        return replace(state, round=1, stage=0)
    return replace(state, stage=stage.index + 1)
