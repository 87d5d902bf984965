"""What clients asked for in a run, why, and what they gained and lost: all from the journal's
events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstill.core.reports import WHY
from fedstill.methods.fit import FIT
from fedstill.metrics.queries import answers
from fedstill.querying.rules import reasons_before
from fedstill.running.preparation import Prepared

Whys = dict[str, Any]
"""Reasons by class id, as text."""


@dataclass
class RunQueries:
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
        self._queries = {c: tuple(query) for c, query in world.queries.items()}
        if settings.query.by is not None and sites.split is not None:
            before = reasons_before(settings, world, sites.all_counts)
            self._why = {
                c: {str(q): dict(why) for q, why in each.items()} for c, each in before.items()
            }

    @property
    def anyone(self) -> bool:
        """Whether any client asks, or may yet."""
        return bool(self._queries) or self.prepared.world.asking is not None

    def before(self) -> dict[str, Any]:
        """For the event ``start``: the queries that are known before the run, and why, where a
        config says by what.
        """
        why = {"why_asked": {str(c): each for c, each in self._why.items()}} if self._why else {}
        return {"queries": {str(c): list(query) for c, query in self._queries.items()}, **why}

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients trained alone can do, and what they asked for."""
        for event in (e for e in events if e["name"] == FIT):
            client = event["client"]
            self._alone[client] = event
            if self.prepared.world.asking is not None:
                self._queries.pop(client, None)
                if event.get("query"):
                    self._queries[client] = tuple(event["query"])
                    self._why[client] = {
                        str(q): event.get(WHY, {}).get(str(q), {}) for q in event["query"]
                    }

    def answers(
        self,
        round: int,
        replies: Sequence[Mapping[str, Any]],
        measured: Mapping[str, Any],
        totals: Sequence[int],
    ) -> dict[str, Any]:
        """What clients gained and lost by their queries of a round, given its client events; with
        ``why_asked``.
        """
        sites = self.prepared.sites
        if not self._queries or sites.split is None:
            return {}
        counts = {c: sites.counts(c, round).tolist() for c in self._queries}
        told = answers(self._queries, counts, self._alone, replies, measured, totals, self.personal)
        for answer in told["answers"]:
            answer |= {WHY: self._why[answer["client"]]} if answer["client"] in self._why else {}
        return told
