"""Queries that clients raise in a run, and the fields of the journal about queries.

If queries depend on more than known label counts (on a model's accuracy, on new data, or on the
data of real sites), the run has a rule (``QueryRule``). At the end of the stage ``fit``, each
client sends its eligible classes (group ``asks``). The server draws the client's query from them
and stores all queries in the state ``asked``. From then on, the methods' world contains these
queries, and each payload contains the query of its client (group ``query``).

State: asked = (clients, C) int8, 1 for a class that a client asks for; replaced in each stage
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
from fedstill.core.reports import REASONS
from fedstill.methods.fit import FIT, Queries, anyone_asks, queries_of
from fedstill.metrics.local_models import answers
from fedstill.querying.queries import (
    ClientKnowledge,
    QueryRule,
    QueryTable,
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
"""The group of the state with the queries of all clients."""

ASKS = "asks"
"""The group of a reply, (C,) int8: 1 for the classes that are eligible for the client's query."""

QUERY = "query"
"""The group of a payload, (C,) int8: 1 for the classes that the client asks for."""


@dataclass(frozen=True)
class QueriesAtServer(RoundHook):
    """Stores the queries of clients in the state, and sends each client its query."""

    rule: QueryRule

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
            query = query_raised(self.rule, reply.client, reply.content, stage)
            query_matrix[reply.client, list(query)] = 1
        return state.next(groups={ASKED: query_matrix})


@dataclass(frozen=True)
class QueriesAtClient(ClientHook):
    """Sends a client's eligible classes after local training, and adds its query to its later
    views.
    """

    rule: QueryRule

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
        asks[list(query_reasons(self.rule, params, view))] = 1
        return Payload(content, **{ASKS: asks})

    def report(self, params: Tensors, view: View, stage: Stage, world: World) -> Fields:
        """``why_asked``: the reasons for each eligible class, by class id as text."""
        if stage.name != FIT:
            return {}
        reasons_by_class = query_reasons(self.rule, params, view)
        return {REASONS: {str(label): reason for label, reason in reasons_by_class.items()}}

    def cache_key(self, stage: Stage) -> str:
        """The rule affects replies of the stage ``fit`` only."""
        if stage.name != FIT:
            return ""
        return repr(self.rule)


def query_raised(rule: QueryRule, client: int, content: Payload, stage: Stage) -> tuple[int, ...]:
    """A client's query, from the eligible classes in its reply."""
    classes = content.tensor(ASKS).nonzero().flatten().tolist()
    return picked(rule, client, classes, stage.round)


def with_queries_of(state: State, world: World) -> World:
    """The world with the queries of a state, if it has any."""
    if ASKED not in state.extra:
        return world
    rows = enumerate(state.extra.tensor(ASKED))
    by_client = {
        client: tuple(row.nonzero().flatten().tolist()) for client, row in rows if row.any()
    }
    queries = world.get(Queries) or Queries()
    return world.extend(replace(queries, by_client=by_client))


def query_reasons(rule: QueryRule, params: Tensors, view: View) -> dict[int, Why]:
    """The classes that are eligible for a client's query, with reasons. params: its local model.

    Raises ConfigError if accuracy is a trigger and the client holds out no examples.
    """
    knowledge = ClientKnowledge(view.counts)
    if "accuracy" in rule.by and view.validation is not None:
        labels = view.validation.labels.cpu()
        is_correct = view.passes.logits(params, view.validation).argmax(1).cpu() == labels
        classes = len(view.counts)
        knowledge = ClientKnowledge(
            counts=view.counts,
            correct=torch.bincount(labels[is_correct], minlength=classes),
            held_out=torch.bincount(labels, minlength=classes),
        )
    reasons_by_class = reasons(rule, view.client, knowledge)
    if not rule.discreet:
        return reasons_by_class
    return {label: without_numbers(reason) for label, reason in reasons_by_class.items()}


# ---- journal -------------------------------------------------------------------------------------


ReasonFields = dict[str, Any]
"""Reasons by class id as text."""


@dataclass
class RunQueries(Observer):
    """Writes queries and their effects to the journal.

    The queries are those known before the run, or those of the last stage ``fit``. ``personal``:
    the stages after which a client's own model is the answer to its query.
    """

    prepared: Prepared
    personal: Collection[str] = ()
    _alone: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Each client's event of the last stage ``fit``, the baseline of its gain and forgetting."""
    _why: dict[int, ReasonFields] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.prepared.settings
        world = self.prepared.world
        sites = self.prepared.sites
        self.personal = settings.method.personal
        self._rule = world.get(QueryRule)
        self._queries = {c: tuple(query) for c, query in queries_of(world).items()}
        if settings.package_table(QueryTable).by is not None and sites.split is not None:
            reasons = reasons_before(settings, world, sites.all_counts)
            for client, by_class in reasons.items():
                self._why[client] = {
                    str(label): dict(class_reasons) for label, class_reasons in by_class.items()
                }

    def start_fields(self) -> Fields:
        """``queries``: the queries that are known before the run. ``why_asked``: their reasons, if
        ``query.by`` is set. Empty if no client asks.
        """
        if not self._queries and self._rule is None:
            return {}
        fields: Fields = {"queries": {str(c): list(query) for c, query in self._queries.items()}}
        if self._why:
            fields[REASONS] = {
                str(client): reasons_by_class for client, reasons_by_class in self._why.items()
            }
        return fields

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``query``: the classes that the client asks for, in the stage ``fit``."""
        if self._rule is None or result.stage.name != FIT or "refused" in event:
            return {}
        client = event["client"]
        if client not in result.contents:
            return {"query": []}
        content = result.contents[client]
        return {"query": list(query_raised(self._rule, client, content, result.stage))}

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """The gain and forgetting of clients by their queries."""
        sites = self.prepared.sites
        if not self._queries or sites.split is None:
            return {}
        label_counts = {
            client: sites.label_counts(client, result.number).tolist() for client in self._queries
        }
        fields = answers(
            queries=self._queries,
            label_counts=label_counts,
            fit_events=self._alone,
            client_events=result.client_events,
            server=result.accuracies,
            totals=tests_by_class(sites, self.prepared.world.classes),
            personal=self.personal,
        )
        for answer in fields["answers"]:
            if answer["client"] in self._why:
                answer[REASONS] = self._why[answer["client"]]
        return fields

    def on_event(self, event: Event) -> None:
        """Store a client's accuracy after local training, and its query."""
        if event["event"] != "client" or event["name"] != FIT:
            return
        client = event["client"]
        self._alone[client] = event
        if self._rule is None:
            return
        self._queries.pop(client, None)
        if event.get("query"):
            self._queries[client] = tuple(event["query"])
            reasons = event.get(REASONS, {})
            self._why[client] = {
                str(label): reasons.get(str(label), {}) for label in event["query"]
            }


def run_extensions(prepared: Prepared, folder: Path | None) -> Extensions:
    """The hooks and observers for queries at the server, if a client asks."""
    if not anyone_asks(prepared.world):
        return Extensions()
    rule = prepared.world.get(QueryRule)
    hooks: tuple[RoundHook, ...] = ()
    if rule is not None:
        hooks = (QueriesAtServer(rule),)
    return Extensions(round_hooks=hooks, observers=(RunQueries(prepared),))


def client_extensions(
    settings: Settings, world: World, is_real_site: bool
) -> tuple[ClientHook, ...]:
    """The client hooks for queries that are raised in the run."""
    rule = world.get(QueryRule)
    if rule is None:
        return ()
    return (QueriesAtClient(rule),)
