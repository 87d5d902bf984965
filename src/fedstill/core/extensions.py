"""The extension points of the federated loop.

Methods need none of them. Other capabilities (queries, a census, private training, hostile clients,
a budget, measures) plug in here. The loop in ``core.rounds`` and the engines know them only by
these interfaces:

- a ``StageProvider`` adds stages to a round, and a ``StageActor`` defines what happens in a stage;
- a ``RoundHook`` extends the server's part of every stage;
- a ``ClientHook`` extends a client's view, training, reply and report;
- ``Middleware`` wraps the engine;
- a ``SiteGuard`` protects a site that works for a remote server;
- an ``Observer`` adds fields and events to the journal;
- a ``StageKeeper`` keeps files of every stage in the run's directory;
- a ``ClientRemoval`` makes the model of a finished run forget a client that leaves a federation.

The base classes change nothing: override only what you need. The records ``StageResult`` and
``RoundResult`` describe a finished stage and a finished round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Plan, Reply, Stage, State, Tensors, View, World
from fedstill.core.stage_results import NoRecorder as NoRecorder
from fedstill.core.stage_results import Recorder as Recorder
from fedstill.core.stage_results import Requests as Requests
from fedstill.core.stage_results import StageResult as StageResult

Event = Mapping[str, Any]
"""One line of the journal: names and values that JSON can hold."""

Fields = dict[str, Any]
"""Fields that are added to an event of the journal, or to a client's report."""


# ---- results -------------------------------------------------------------------------------------


Predictors = Mapping[str, Callable[[Tensor], Tensor]]
"""Models that the server can evaluate: functions from inputs (B, ...) to logits (B, C), by name."""


def of_some_clients(name: str) -> bool:
    """Whether a predictor answers for one client or one group of clients only. The name of such a
    predictor ends with a number.

    >>> of_some_clients("cluster 0"), of_some_clients("client 3"), of_some_clients("global")
    (True, True, False)
    """
    return name.rpartition(" ")[2].isdecimal()


def common_predictor(predictors: Mapping[str, object]) -> str:
    """The name of the predictor that answers for all clients, which comes first; empty if there is
    none.

    >>> common_predictor({"global": ..., "client 3": ...}), common_predictor({"cluster 0": ...})
    ('global', '')
    """
    first = next(iter(predictors), "")
    if of_some_clients(first):
        return ""
    return first


@dataclass(frozen=True)
class RoundResult:
    """A finished round.

    ``client_events``: the journal's events of its clients, in order. ``accuracies``: the fields of
    the server's evaluation. ``predictors``: the evaluated models. ``client_predictors``: the name
    of the predictor that answers for each client; empty if one answers for all clients, or none of
    the server's models does.
    """

    number: int
    client_events: Sequence[Mapping[str, Any]]
    accuracies: Mapping[str, Any]
    predictors: Predictors = field(default_factory=dict)
    client_predictors: Mapping[int, str] = field(default_factory=dict)


# ---- engines -------------------------------------------------------------------------------------


class Engine(Protocol):
    """Executes stages. A method defines what clients do, an engine how and where they do it."""

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients that have a payload. If a client failed, its reply holds the
        reason.
        """

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep the new states of these clients after a stage, and discard those of all others."""


@runtime_checkable
class Exchanges(Engine, Protocol):
    """An engine whose clients are in other processes. A stage may need several exchanges with them,
    such as the steps of a secure sum.
    """

    def exchange(
        self, stage: Stage, payloads: Mapping[int, Payload], *, remember: bool
    ) -> list[Reply]:
        """The replies of the clients that have a payload, in one step of a stage.

        ``remember``: whether ``commit`` later decides about the client states of this step.
        """


Middleware = Callable[[Engine], Engine]
"""Wraps an engine. The first one in a run's list is the innermost."""


# ---- stages --------------------------------------------------------------------------------------


class StageActor(Protocol):
    """Defines what the server and the clients do in a stage. A ``Method`` is one."""

    def requires(self) -> Need:
        """What it requires of a run."""

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """The payload for a client, or None if the client has no work in this stage."""

    def work(self, stage: Stage) -> ClientWork:
        """What clients do."""

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """A payload with the groups, names, shapes and types of a valid reply."""

    def refuses(self, reply: Reply, stage: Stage) -> str:
        """Why the values of a reply are impossible; empty if they are possible."""
        return ""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The next state, made of the accepted replies, which are sorted by client id."""


class StageProvider:
    """Adds stages to a round, or actors to stages of a topology. The base class adds nothing.

    Its result must depend on the config alone: sites compute the same schedule to check requests.
    """

    def actors(self) -> Mapping[str, StageActor]:
        """The actors by the names of their stages."""
        return {}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round, including those of the provider; round 0 precedes round 1."""
        return stages


# ---- the server ----------------------------------------------------------------------------------


class RoundHook:
    """Extends every stage at the server. The base class changes nothing."""

    def extend_world(self, world: World, state: State) -> World:
        """The world that the stage's actor gets."""
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
        """Why a reply is impossible, such as a claim of too many examples; empty if it is not."""
        return ""

    def extend_state(
        self, state: State, accepted: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The state after the aggregation; called if at least one reply was accepted."""
        return state


# ---- clients -------------------------------------------------------------------------------------


class GradientRule(Protocol):
    """Combines the gradients of single examples into the gradient of a step.

    Differentially private training (DP-SGD) is such a rule: it samples the examples of each step,
    clips the gradient of each example, and adds noise to their sum.

    ``secret``: whether random numbers come from the operating system, so that nobody can repeat
    them.
    """

    @property
    def secret(self) -> bool:
        """Whether random numbers come from the operating system."""

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
    """Extends a client's part of a stage. The base class changes nothing.

    A hook is a frozen dataclass: a site builds it from the accepted config, and its ``repr``
    identifies it. ``stackable``: whether clients with this hook can be trained in one stack.
    """

    stackable: ClassVar[bool] = True

    def extend_view(self, view: View, payload: Payload, stage: Stage) -> View:
        """The client's view."""
        return view

    def payload_for_work(self, payload: Payload) -> Payload:
        """The payload for the method's work, without groups that only this hook uses."""
        return payload

    def extend_reply(
        self, content: Payload, params: Tensors, view: View, stage: Stage, world: World
    ) -> Payload:
        """The content of the client's reply; ``params``: the model after its work."""
        return content

    def gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """The rule that combines gradients of single examples; at most one hook has one."""
        return None

    def report(self, params: Tensors, view: View, stage: Stage, world: World) -> Fields:
        """Further fields of the client's report."""
        return {}

    def keeps_epochs(self, stage: Stage) -> bool:
        """Whether ``measured`` needs the parameters after every epoch of this stage."""
        return False

    def measures(self, stage: Stage) -> bool:
        """Whether ``measured`` reads the common test set or the public set in this stage."""
        return False

    def measured(self, visit: Any) -> Fields:
        """Fields measured on the trained model; visit: ``engines.client_measures.AtClient``."""
        return {}

    def cache_key(self, stage: Stage) -> str:
        """Identifies everything in this hook that affects a reply in this stage."""
        return repr(self)


# ---- sites ---------------------------------------------------------------------------------------


class SiteRequest(Protocol):
    """A server's request to a site in a stage, as guards see it."""

    @property
    def client(self) -> int:
        """The client id of the site."""

    @property
    def stage(self) -> Stage:
        """The stage, which is in the run's schedule."""

    @property
    def payload(self) -> Payload:
        """The server's payload."""

    def with_payload(self, payload: Payload) -> SiteRequest:
        """The same request with another payload."""

    def digest(self) -> str:
        """Identifies the request with its payload: equal requests have equal replies."""


@dataclass(frozen=True)
class SiteNotebook:
    """Where the guards of a site keep notes, and what its operator allows.

    ``folder``: of the client in this run. ``memory``: of the site, for all runs. ``run``: the run's
    identity. ``repeat_sums``: whether the site takes part in secure sums of several runs on the
    same data. ``data_digests``: returns SHA-256 that identify the site's data, regardless of how
    a config reads them; empty if the data have none.
    """

    folder: Path
    memory: Path
    run: str
    repeat_sums: bool = False
    data_digests: Callable[[], Sequence[str]] = tuple


class SiteGuard:
    """Protects a site: its data, its budget, and the config that it accepted.

    A site builds its guards anew for every request, from that config. So a guard stores what it
    must remember on the site's disk. The base class permits everything.
    """

    def answer(self, request: SiteRequest, respond: Callable[[Payload], Reply]) -> Reply:
        """The reply that leaves the site.

        ``respond``: returns the reply to a payload; it does the work, or loads a stored reply. A
        guard that must not send the reply itself (secure sums) returns another one.
        """
        return respond(request.payload)

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        """Raise Refused for work that the site must not do; called before new work."""

    def work_seed(self, seed: int) -> int:
        """The seed of new work; ``seed``: that of the run."""
        return seed

    def check(self, request: SiteRequest, work: ClientWork, reply: Reply) -> None:
        """Raise Refused for a reply that must not leave the site; called before it is stored."""

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        """Called before a reply leaves the site, whether it is new or stored."""


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
        """Fields of a round's event; ``so_far``: those of earlier observers."""
        return {}

    def round_events(self, result: RoundResult) -> Iterable[Event]:
        """Events after a round's event."""
        return ()

    def on_event(self, event: Event) -> None:
        """Update the state; called with every event."""


class StageKeeper(Protocol):
    """Keeps files of every stage in the run's directory, as a part of the run's transaction."""

    def keep(self, result: StageResult) -> Mapping[int, Fields]:
        """Write the files of a finished stage to disk; its checkpoint is written afterwards.

        Returns fields for the events of accepted clients, by client id.
        """

    def cut(self, round: int, stage: int) -> None:
        """Delete the files of this stage and of all later ones; the run begins or resumes here."""


class ClientRemoval(Protocol):
    """Makes the model of a finished run in a federation forget a client that leaves it."""

    def __call__(self, directory: Path, client: int) -> Path:
        """Train a new model with the clients that remain; return the directory of the new run.

        If the new run was interrupted, it is continued. Raises ConfigError for a run that is not
        finished or that cannot forget the client, and the errors of a run.
        """
