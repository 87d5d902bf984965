"""Queries that clients raise in a run: what clients send in the stage ``fit``, what is asked then,
how clients know, and what the journal gets.

Where a query needs more than label counts that are known before (a model's accuracy, new data, data
of real sites), the run has a rule (``Asking``). At the end of the stage ``fit`` each client says
for which classes it has reason to ask (group ``asks``). The server keeps which of them each client
asks for, as state ``asked``; from then on the world of the methods has these queries, and what a
client is sent has its own (group ``query``).

State: asked = (clients, C) int8, 1 for a class that a client asks for, until the next stage
``fit``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.errors import BadPayload
from fedstill.core.extensions import (
    ClientHook,
    Event,
    Fields,
    Observer,
    RoundHook,
    RoundResult,
    StageResult,
)
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, Tensors, View, World
from fedstill.core.screen import REASONS
from fedstill.methods.fit import FIT, Queries, anyone_asks, queries_of
from fedstill.metrics.local_models import answers
from fedstill.querying.queries import (
    Asking,
    QueryTable,
    Standing,
    Why,
    picked,
    reasons,
    without_numbers,
)
from fedstill.querying.rules import reasons_before
from fedstill.running.evaluation import tests_by_class
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared

ASKED = "asked"
"""The state that holds what all clients ask for."""

ASKS = "asks"
"""The group of a reply, (C,) int8, that is 1 for the classes that a client has reason to ask
for.
"""

QUERY = "query"
"""The group of a payload, (C,) int8, that is 1 for the classes that the client asks for."""


@dataclass(frozen=True)
class QueriesAtServer(RoundHook):
    """Keeps what clients ask for, and tells each client its own query."""

    asking: Asking

    def extend_world(self, world: World, state: State) -> World:
        """The world with the queries that clients have raised so far."""
        return with_queries_of(state, world)

    def extend_payload(
        self, payload: Payload, client: int, stage: Stage, needs: Need, world: World
    ) -> Payload:
        if client == SERVER or stage.name == FIT or Need.QUERIES not in needs:
            return payload
        query = torch.zeros(world.classes, dtype=torch.int8)
        query[list(queries_of(world).get(client, ()))] = 1
        return Payload(payload, **{QUERY: query})

    def extend_expected(
        self, expected: Payload, client: int, stage: Stage, world: World
    ) -> Payload:
        if stage.name != FIT:
            return expected
        return Payload(expected, **{ASKS: torch.zeros(world.classes, dtype=torch.int8)})

    def extend_state(
        self, state: State, accepted: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name != FIT:
            return state
        query_matrix = torch.zeros(world.clients, world.classes, dtype=torch.int8)
        for reply in accepted:
            query = query_raised(self.asking, reply.client, reply.content, stage)
            query_matrix[reply.client, list(query)] = 1
        return state.next(groups={ASKED: query_matrix})


@dataclass(frozen=True)
class QueriesAtClient(ClientHook):
    """Raises a client's query when it has trained alone, and shows the client its query later."""

    asking: Asking

    def extend_view(self, view: View, payload: Payload, stage: Stage) -> View:
        """The view with the query that the client was sent, if there is one.

        Raises BadPayload for a query that is not (C,) of the run's classes.
        """
        if QUERY not in payload:
            return view
        query = payload.tensor(QUERY)
        if query.shape != view.counts.shape:
            raise BadPayload(
                f"a query of shape {tuple(query.shape)} for {len(view.counts)} classes"
            )
        return replace(view, query=tuple(query.nonzero().flatten().tolist()))

    def extend_reply(
        self, content: Payload, params: Tensors, view: View, stage: Stage, world: World
    ) -> Payload:
        if stage.name != FIT:
            return content
        asks = torch.zeros(world.classes, dtype=torch.int8)
        asks[list(why_asked(self.asking, params, view))] = 1
        return Payload(content, **{ASKS: asks})

    def report(self, params: Tensors, view: View, stage: Stage, world: World) -> Fields:
        """``why_asked``: by class, as text, why the client has reason to ask for it."""
        if stage.name != FIT:
            return {}
        reasons_by_class = why_asked(self.asking, params, view)
        return {REASONS: {str(label): reason for label, reason in reasons_by_class.items()}}

    def cache_key(self, stage: Stage) -> str:
        """The rule decides what is sent in the stage ``fit`` alone."""
        if stage.name != FIT:
            return ""
        return repr(self.asking)


def query_raised(asking: Asking, client: int, content: Payload, stage: Stage) -> tuple[int, ...]:
    """What a client asks for, of the classes for which its reply says that it has reason."""
    classes = content.tensor(ASKS).nonzero().flatten().tolist()
    return picked(asking, client, classes, stage.round)


def with_queries_of(state: State, world: World) -> World:
    """The world with the queries that a state holds, if it holds any."""
    if ASKED not in state.extra:
        return world
    rows = enumerate(state.extra.tensor(ASKED))
    by_client = {
        client: tuple(row.nonzero().flatten().tolist()) for client, row in rows if row.any()
    }
    queries = world.get(Queries) or Queries()
    return world.extend(replace(queries, by_client=by_client))


def why_asked(asking: Asking, params: Tensors, view: View) -> dict[int, Why]:
    """The classes that a client has reason to ask for, and why, given the model that it trained
    alone.

    Raises ConfigError if accuracy is a reason and the client holds out no example.
    """
    standing = Standing(view.counts)
    if "accuracy" in asking.by and view.validation is not None:
        labels = view.validation.labels.cpu()
        is_right = view.passes.logits(params, view.validation).argmax(1).cpu() == labels
        classes = len(view.counts)
        standing = Standing(
            counts=view.counts,
            right=torch.bincount(labels[is_right], minlength=classes),
            held=torch.bincount(labels, minlength=classes),
        )
    reasons_by_class = reasons(asking, view.client, standing)
    if not asking.discreet:
        return reasons_by_class
    return {label: without_numbers(reason) for label, reason in reasons_by_class.items()}


# ---- what the journal gets -----------------------------------------------------------------------


Whys = dict[str, Any]
"""Reasons by class id, as text."""


@dataclass
class RunQueries(Observer):
    """The queries of a run: those known before, or those that clients raised in their last stage
    ``fit``.

    It also keeps each client's event of that stage, by which its answer is measured.
    """

    prepared: Prepared
    personal: Collection[str] = ()  # after which stages a client's own model is its answer
    _alone: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _why: dict[int, Whys] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.prepared.settings
        world = self.prepared.world
        sites = self.prepared.sites
        self.personal = settings.method.personal
        self._asking = world.get(Asking)
        self._queries = {c: tuple(query) for c, query in queries_of(world).items()}
        if settings.table(QueryTable).by is not None and sites.split is not None:
            reasons = reasons_before(settings, world, sites.all_counts)
            for client, by_class in reasons.items():
                self._why[client] = {
                    str(label): dict(class_reasons) for label, class_reasons in by_class.items()
                }

    def start_fields(self) -> Fields:
        """``queries``: those that are known before the run; ``why_asked``: why, where a config says
        by what. Nothing if no client asks.
        """
        if not self._queries and self._asking is None:
            return {}
        fields: Fields = {"queries": {str(c): list(query) for c, query in self._queries.items()}}
        if self._why:
            fields[REASONS] = {
                str(client): reasons_by_class for client, reasons_by_class in self._why.items()
            }
        return fields

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``query``: the classes that the client asks for, in the stage in which it raises its
        query.
        """
        if self._asking is None or result.stage.name != FIT or "refused" in event:
            return {}
        client = event["client"]
        if client not in result.contents:
            return {"query": []}
        content = result.contents[client]
        return {"query": list(query_raised(self._asking, client, content, result.stage))}

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """What clients gained and lost by their queries of a round."""
        sites = self.prepared.sites
        if not self._queries or sites.split is None:
            return {}
        label_counts = {
            client: sites.counts(client, result.number).tolist() for client in self._queries
        }
        fields = answers(
            queries=self._queries,
            label_counts=label_counts,
            alone=self._alone,
            acted=result.client_events,
            server=result.accuracies,
            totals=tests_by_class(sites, self.prepared.world.classes),
            personal=self.personal,
        )
        for answer in fields["answers"]:
            if answer["client"] in self._why:
                answer[REASONS] = self._why[answer["client"]]
        return fields

    def on_event(self, event: Event) -> None:
        """Remember what clients trained alone can do, and what they ask for."""
        if event["event"] != "client" or event["name"] != FIT:
            return
        client = event["client"]
        self._alone[client] = event
        if self._asking is None:
            return
        self._queries.pop(client, None)
        if event.get("query"):
            self._queries[client] = tuple(event["query"])
            reasons = event.get(REASONS, {})
            self._why[client] = {
                str(label): reasons.get(str(label), {}) for label in event["query"]
            }


def run_extensions(prepared: Prepared, folder: Path | None) -> Extensions:
    """What queries add to a run at the server, if a client asks."""
    if not anyone_asks(prepared.world):
        return Extensions()
    asking = prepared.world.get(Asking)
    hooks: tuple[RoundHook, ...] = ()
    if asking is not None:
        hooks = (QueriesAtServer(asking),)
    return Extensions(round_hooks=hooks, observers=(RunQueries(prepared),))


def client_extensions(
    settings: Settings, world: World, is_real_site: bool
) -> tuple[ClientHook, ...]:
    """What queries add to a run's clients."""
    asking = world.get(Asking)
    if asking is None:
        return ()
    return (QueriesAtClient(asking),)
