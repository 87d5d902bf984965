"""What clients asked for in a run, why, and what they gained and lost: all from the journal's
events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.config.settings import Settings
from fedstill.core.extensions import ClientHook, Event, Fields, Observer, RoundResult, StageResult
from fedstill.core.records import World
from fedstill.core.reports import WHY
from fedstill.methods.fit import FIT, anyone_asks, queries_of
from fedstill.metrics.local_models import answers
from fedstill.querying.hooks import QueriesAtClient, QueriesAtServer, query_raised
from fedstill.querying.queries import Asking
from fedstill.querying.rules import reasons_before
from fedstill.querying.table import QueryTable
from fedstill.running.evaluation import tests_by_class
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared

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
        settings, world, sites = self.prepared.settings, self.prepared.world, self.prepared.sites
        self.personal = settings.method.personal
        self._asking = world.get(Asking)
        self._queries = {c: tuple(query) for c, query in queries_of(world).items()}
        if settings.table(QueryTable).by is not None and sites.split is not None:
            before = reasons_before(settings, world, sites.all_counts)
            self._why = {
                c: {str(q): dict(why) for q, why in each.items()} for c, each in before.items()
            }

    def start_fields(self) -> Fields:
        """``queries``: those that are known before the run; ``why_asked``: why, where a config says
        by what. Nothing if no client asks.
        """
        if not self._queries and self._asking is None:
            return {}
        fields: Fields = {"queries": {str(c): list(query) for c, query in self._queries.items()}}
        if self._why:
            fields[WHY] = {str(client): why for client, why in self._why.items()}
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
        fields = answers(
            self._queries,
            {client: sites.counts(client, result.number).tolist() for client in self._queries},
            self._alone,
            result.client_events,
            result.accuracies,
            tests_by_class(sites, self.prepared.world.classes),
            self.personal,
        )
        for answer in fields["answers"]:
            if answer["client"] in self._why:
                answer[WHY] = self._why[answer["client"]]
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
            reasons = event.get(WHY, {})
            self._why[client] = {
                str(label): reasons.get(str(label), {}) for label in event["query"]
            }


def run_extensions(prepared: Prepared, folder: Path | None) -> Extensions:
    """What queries add to a run at the server, if a client asks."""
    if not anyone_asks(prepared.world):
        return Extensions()
    asking = prepared.world.get(Asking)
    hooks = () if asking is None else (QueriesAtServer(asking),)
    return Extensions(round_hooks=hooks, observers=(RunQueries(prepared),))


def client_extensions(
    settings: Settings, world: World, is_real_site: bool
) -> tuple[ClientHook, ...]:
    """What queries add to a run's clients."""
    asking = world.get(Asking)
    if asking is None:
        return ()
    return (QueriesAtClient(asking),)
