"""The extension points: what a capability can add to the federated loop.

A method needs none of this. A capability (queries, a census, private training, hostile clients, a
budget, measures) plugs in at one of these points, and the loop in ``core.rounds`` and the engines
know it only by these interfaces:

- a ``StageProvider`` adds stages to a round, and a ``StageActor`` says what happens in a stage;
- a ``RoundHook`` extends what the server does in every stage;
- a ``ClientHook`` extends what a client sees, how it trains, and what it sends and reports;
- ``Middleware`` wraps the engine;
- a ``SiteGuard`` protects a site that works for a remote server;
- an ``Observer`` adds fields and events to the journal;
- a ``StageKeeper`` keeps files of every stage in the run's directory.

The base classes change nothing: override only what you need. What a stage and a round came to is
in two records, ``StageResult`` and ``RoundResult``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Payload, Plan, Reply, Stage, State, Tensors, View, World
from fedstill.core.screen import Refusal

Event = Mapping[str, Any]
"""One line of the journal: names and values that JSON can hold."""

Fields = dict[str, Any]
"""Fields to be added to an event of the journal, or to a client's report."""


# ---- results -------------------------------------------------------------------------------------


Predictors = Mapping[str, Callable[[Tensor], Tensor]]
"""What a server can evaluate: functions from inputs (B, ...) to logits (B, C), by name."""


def of_some_clients(name: str) -> bool:
    """Whether a predictor's name ends with a number: then it answers for a client or a group, not
    for all.

    >>> of_some_clients("cluster 0"), of_some_clients("client 3"), of_some_clients("global")
    (True, True, False)
    """
    return name.rpartition(" ")[2].isdecimal()


@dataclass(frozen=True)
class Requests:
    """What the server asks of the clients of a stage.

    ``payloads``: by client id, without the clients that have no work. ``world``: as the hooks of
    the run extend it for this stage.
    """

    stage: Stage
    payloads: Mapping[int, Payload]
    world: World


@dataclass(frozen=True)
class StageResult:
    """A stage that is over.

    ``payloads``: by client id, without the clients that had nothing to do. ``accepted``: replies
    that passed the screen, sorted by client id. ``refused``: all others, with reasons. ``before``,
    ``after``: the state; both are the same if the stage ended the run. ``ends_round``: whether it
    is the round's last stage.
    """

    stage: Stage
    payloads: Mapping[int, Payload]
    accepted: Sequence[Reply]
    refused: Sequence[Refusal]
    before: State
    after: State
    ends_round: bool = True

    @cached_property
    def contents(self) -> Mapping[int, Payload]:
        """What arrived from each client, accepted or refused; an accepted reply counts."""
        contents = {refusal.client: refusal.content for refusal in self.refused}
        for reply in self.accepted:
            contents[reply.client] = reply.content
        return contents

    @property
    def local_models(self) -> dict[int, Tensors]:
        """Each client's parameters after training, if replies hold any; without the server's."""
        return {
            reply.client: reply.content.params
            for reply in self.accepted
            if reply.client != SERVER and "params" in reply.content
        }


@dataclass(frozen=True)
class RoundResult:
    """A round that is over.

    ``client_events``: the journal's events of its clients, in order. ``accuracies``: the fields of
    the server's evaluation. ``predictors``: what was evaluated. ``client_predictors``: which of
    these answers for each client, by name; empty where one answers for all, or the server's for
    none.
    """

    number: int
    client_events: Sequence[Mapping[str, Any]]
    accuracies: Mapping[str, Any]
    predictors: Predictors = field(default_factory=dict)
    client_predictors: Mapping[int, str] = field(default_factory=dict)


# ---- engines -------------------------------------------------------------------------------------


class Engine(Protocol):
    """Executes stages: a method says what clients do, an engine how and where they do it."""

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that got a payload. The reply of a client that failed holds
        the reason.
        """

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep the states of these clients after a stage, and drop those of all others."""


@runtime_checkable
class Exchanges(Engine, Protocol):
    """An engine whose clients are elsewhere: a stage may take several exchanges with them.

    The steps of a secure sum are such exchanges.
    """

    def exchange(
        self, stage: Stage, payloads: Mapping[int, Payload], *, remember: bool
    ) -> list[Reply]:
        """The replies of the clients that got a payload, to one step of a stage.

        ``remember``: whether ``commit`` is about the client states that this step leaves.
        """


Middleware = Callable[[Engine], Engine]
"""Wraps an engine. The first one in a run's list is the innermost."""


# ---- stages --------------------------------------------------------------------------------------


class StageActor(Protocol):
    """Says what the server and the clients do in a stage. A ``Method`` is one."""

    def requires(self) -> Need:
        """What it cannot do without."""

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """The payload for a client, or None if the client has no work in this stage."""

    def work(self, stage: Stage) -> ClientWork:
        """What clients do."""

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """A payload with the groups, names, shapes and types of a valid reply."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The next state, made of the accepted replies, which are sorted by client id."""


class StageProvider:
    """Adds stages to a round, or actors to stages of a topology. The base class adds nothing.

    It depends on the config alone: sites compute the same schedule to check what they are asked.
    """

    def actors(self) -> Mapping[str, StageActor]:
        """Who acts in its stages, by the stage's name."""
        return {}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round with its own among them; round 0 comes before the first round."""
        return stages


# ---- the server ----------------------------------------------------------------------------------


class RoundHook:
    """Extends every stage at the server. The base class changes nothing."""

    def extend_world(self, world: World, state: State) -> World:
        """The world as the stage's actor sees it in a state."""
        return world

    def extend_payload(
        self, payload: Payload, client: int, stage: Stage, needs: Need, world: World
    ) -> Payload:
        """The payload for a client; ``needs``: of the stage's actor."""
        return payload

    def extend_expected(
        self, expected: Payload, client: int, stage: Stage, world: World
    ) -> Payload:
        """The form of a valid reply."""
        return expected

    def check_reply(self, reply: Reply, stage: Stage, needs: Need, state: State) -> str:
        """Why a reply cannot be true; empty if it can."""
        return ""

    def extend_state(
        self, state: State, accepted: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The state after the aggregation; called if at least one reply was accepted."""
        return state


# ---- clients -------------------------------------------------------------------------------------


class GradientRule(Protocol):
    """How the gradients of single examples combine to the gradient of a step.

    Differentially private training (DP-SGD) is such a rule: it samples each step's examples by
    itself, clips the gradient of each example, and adds noise to their sum.
    """

    def batches(
        self, n: int, plan: Plan, order: torch.Generator, device: torch.device
    ) -> Iterator[list[Tensor]]:
        """The positions of each step's examples among n, epoch by epoch. A step may have none."""

    def combined(
        self, gradients: Tensors, like: Tensors, size: int, draws: torch.Generator
    ) -> Tensors:
        """The gradient of a step, in the form of ``like``.

        gradients: (B, ...) by entry; empty if the step has no examples. size: the number of
        examples that a step has on average. draws: the generator of the rule's random numbers.
        """


class ClientHook:
    """Extends what a client does. The base class changes nothing.

    A hook is a frozen dataclass: a site builds it from the config that it accepted, and its
    ``repr`` identifies it. ``stackable``: whether clients with this hook can be trained in one
    stack.
    """

    stackable: ClassVar[bool] = True

    def extend_view(self, view: View, payload: Payload, stage: Stage) -> View:
        """What the client sees."""
        return view

    def payload_for_work(self, payload: Payload) -> Payload:
        """The payload that the method's work gets: without groups that are for this hook alone."""
        return payload

    def extend_reply(
        self, content: Payload, params: Tensors, view: View, stage: Stage, world: World
    ) -> Payload:
        """What the client sends; ``params``: the model after its work."""
        return content

    def gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """How the gradients of single examples combine; at most one hook of a run has a rule."""
        return None

    def report(self, params: Tensors, view: View, stage: Stage, world: World) -> Fields:
        """Further fields of the client's report."""
        return {}

    def keeps_epochs(self, stage: Stage) -> bool:
        """Whether ``measured`` needs the parameters after every epoch of this stage."""
        return False

    def reads_test_set(self, stage: Stage) -> bool:
        """Whether ``measured`` reads the common test set in this stage."""
        return False

    def measured(self, seen: Any) -> Fields:
        """Fields measured on the trained model (``engines.client_measures.AtClient``)."""
        return {}

    def cache_key(self, stage: Stage) -> str:
        """Identifies everything in this hook that affects a reply in this stage."""
        return repr(self)


# ---- sites ---------------------------------------------------------------------------------------


class SiteRequest(Protocol):
    """What a server asks of a site in a stage, as guards see it."""

    @property
    def client(self) -> int:
        """The client that the site is."""

    @property
    def stage(self) -> Stage:
        """The stage: it is in the run's schedule."""

    @property
    def payload(self) -> Payload:
        """What the server sends."""

    def with_payload(self, payload: Payload) -> SiteRequest:
        """The same request with another payload."""

    def digest(self) -> str:
        """Identifies the whole request: the same request has the same answer."""


@dataclass(frozen=True)
class SiteNotebook:
    """Where the guards of a site keep notes, and what its operator allows.

    ``folder``: of the client in this run. ``memory``: of the site, for all runs. ``run``: the run's
    identity. ``repeat_sums``: whether the site takes part in secure sums of several runs on the
    same data.
    """

    folder: Path
    memory: Path
    run: str
    repeat_sums: bool = False


class SiteGuard:
    """Protects a site: its data, its budget, and the config that it accepted.

    A site builds its guards for every request, from that config. All that a guard must know later,
    it notes on the site's disk. The base class lets everything pass.
    """

    def answer(self, request: SiteRequest, respond: Callable[[Payload], Reply]) -> Reply:
        """The reply that leaves the site.

        ``respond``: gives the reply to a payload; it does the work, or finds the reply that is
        kept. A guard that lets no reply leave as it is (secure sums) answers in its place.
        """
        return respond(request.payload)

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        """Raises Refused for work that the site must not do; called before new work."""

    def work_seed(self, seed: int) -> int:
        """The seed of new work; ``seed``: that of the run."""
        return seed

    def check(self, request: SiteRequest, work: ClientWork, reply: Reply) -> None:
        """Raises Refused for a reply that must not leave; called before it is kept."""

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        """Takes note of a reply before it leaves, be it new or kept."""


# ---- the journal ---------------------------------------------------------------------------------


class Observer:
    """Adds fields and events to the journal. The base class adds nothing.

    Its state follows from the events alone: ``on_event`` is called with every event, when it is
    written and again when a run is resumed, and it is the only method that may change the state.
    """

    def start_fields(self) -> Fields:
        """Fields of the run's first event."""
        return {}

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """Fields of a client's event in a stage."""
        return {}

    def stage_events(self, result: StageResult) -> Iterable[Event]:
        """Events after the clients' events of a stage."""
        return ()

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """Fields of a round's event; ``so_far``: those of the observers before this one."""
        return {}

    def round_events(self, result: RoundResult) -> Iterable[Event]:
        """Events after a round's event."""
        return ()

    def on_event(self, event: Event) -> None:
        """Take notice of an event."""


class StageKeeper(Protocol):
    """Keeps files of every stage in the run's directory, as a part of the run's transaction."""

    def keep(self, result: StageResult) -> Mapping[int, Fields]:
        """Make the files of a finished stage durable; its checkpoint is written afterwards.

        Returns fields for the events of accepted clients, by id.
        """

    def cut(self, round: int, stage: int) -> None:
        """Delete the files of this stage and of all later ones: the run begins or goes on here."""


class Recorder(Protocol):
    """The run's transaction: it writes the journal and the checkpoint of a stage."""

    def stage(self, result: StageResult) -> None:
        """Record a finished stage."""

    def failed(self, result: StageResult, error: Exception) -> None:
        """Record the refusals of a stage that ends the run; the error is raised afterwards."""


class NoRecorder:
    """A recorder that keeps nothing."""

    def stage(self, result: StageResult) -> None:
        """Nothing."""

    def failed(self, result: StageResult, error: Exception) -> None:
        """Nothing."""
