"""The table ``[query]`` of a config: which classes clients ask for, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fedstill.config.resolve import PEERS
from fedstill.config.settings import Settings
from fedstill.config.tables import NO_STREAM
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.fields import (
    Count,
    CountOrZero,
    PackageTable,
    PositiveShare,
    Seed,
    Typed,
    read_record,
)
from fedstill.data.views import Order
from fedstill.querying.queries import Trigger


@dataclass(frozen=True)
class QueryTable(PackageTable):
    """``[query]``: which classes clients ask for: drawn, or written in ``[query.classes]``,
    ``client = [classes]``.
    """

    draw: Literal["none", "single", "multi", "all"] = "none"
    """Whether clients ask for classes, and for how many of those they have reason to: none, one,
    several, or all.
    """
    fewer_than: Count = 50
    """A client lacks a class of which it has fewer examples than this."""
    least: Count = 2
    """The fewest classes in a query of several."""
    most: Count = 3
    """The most classes in a query of several."""
    seed: Seed | None = None
    """What the queries are drawn from; unset: the run's seed."""
    classes: Mapping[str, tuple[CountOrZero, ...]] = field(default_factory=dict)
    """The queries written out: the classes that each client asks for."""
    by: tuple[Trigger, ...] | None = None
    """What is reason to ask for a class: that the client lacks it (unset), its model's accuracy on
    it, or a need.
    """
    accuracy_under: PositiveShare | None = None
    """By accuracy: a client asks for classes on which its local model is less accurate, on its
    held-out examples.
    """
    needs: Mapping[str, tuple[CountOrZero, ...]] | None = None
    """By need: the classes that each client says it will need, whatever it has of them."""
    again: Order | None = None
    """In what order new data come with which clients ask again in every round; unset: they ask
    once, with all data.
    """
    data_at_first: PositiveShare | None = None
    """The share of its data with which a client asks first; the rest comes in equal parts; unset: 1
    / rounds.
    """

    @property
    def asks(self) -> bool:
        """Whether any client may ask."""
        return self.draw != "none" or bool(self.classes)

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """What is reason to ask for a class."""
        return self.by or ("lack",)

    @property
    def exchange_each_round(self) -> bool:
        """Whether clients ask again in every round."""
        return self.again is not None

    @classmethod
    def read(cls, given: Mapping[str, Any], name: str) -> Self:
        """The table that a config gives; raises ConfigError, in one line, for values that are wrong
        or cannot be meant together.
        """
        table = dict(given)
        for key in ("classes", "needs"):
            if key in table:
                table[key] = _lists(table[key])
        # one trigger may be written without a list
        by = table.get("by")
        if isinstance(by, str) and not isinstance(by, Typed):
            table["by"] = (by,)
        query = read_record(cls, table, name)
        for key in ("classes", "needs"):
            for client in getattr(query, key) or ():
                if not client.isdecimal():
                    raise ConfigError(
                        f"query.{key}.{client}: a client is a whole number, e.g. [query.{key}] 3 = "
                        "[7, 9]"
                    )
        if why := _contradiction(query):
            raise ConfigError(f"query{why}")
        return query


def _lists(written: Any) -> Any:
    """Classes by client as tuples."""
    if not isinstance(written, Mapping):
        return written
    return {str(k): tuple(v) if isinstance(v, list) else v for k, v in written.items()}


def _contradiction(query: QueryTable) -> str:
    """What in the table cannot be meant together, as the end of a message; empty if nothing."""
    by = query.by or ()
    if query.classes and query.draw != "none":
        return ": [query.classes] names the classes and query.draw would draw them; leave one out"
    if query.by is not None and query.draw == "none":
        return (
            ".by says what raises a query; say with query.draw for how many classes: 'single', "
            "'multi' or 'all'"
        )
    if query.by is not None and (not by or len(set(by)) < len(by)):
        return (
            f".by = {list(by)}: name each of 'lack', 'accuracy' and 'need' at most once, and one "
            "of them at least"
        )
    if ("accuracy" in by) != (query.accuracy_under is not None):
        if "accuracy" in by:
            return ".by names 'accuracy': set query.accuracy_under, e.g. 0.6"
        return (
            ".accuracy_under is read where query.by names 'accuracy'; add it there, or leave this "
            "out"
        )
    if ("need" in by) != bool(query.needs):
        if "need" in by:
            return (
                ".by names 'need': write which classes each client will need, [query.needs] 3 = "
                "[7, 9]"
            )
        return (
            ".needs is read where query.by names 'need'; add it there, or leave [query.needs] out"
        )
    if query.again and not query.asks:
        return ".again: nobody asks; set query.draw, or write [query.classes]"
    if query.data_at_first is not None and not query.again:
        return (
            ".data_at_first applies only where clients ask more than once; set query.again, or "
            "leave it out"
        )
    return ""


def check_config(settings: Settings) -> None:
    """Raises ConfigError where clients cannot ask with the rounds, topology, method or stream of a
    config.
    """
    query = settings.table(QueryTable)
    if query.asks and settings.named.stream.name != NO_STREAM:
        raise ConfigError("[stream] and [query] both say when data come; leave one of them out")
    if not query.again:
        return
    kind = settings.named.topology.name
    method = settings.named.method.name
    if kind != PEERS:
        raise ConfigError(
            f"query.again: with topology.kind = {kind!r} clients do not ask again; leave it out, "
            f"or choose a method on {PEERS!r} (qkt, naive_kd, local_only)"
        )
    if settings.rounds == 1:
        raise ConfigError(
            "query.again: in rounds = 1 clients ask once; set rounds to how often they ask"
        )
    if Need.LABEL_COUNTS in settings.method.requires():
        raise ConfigError(
            f"query.again: method {method} counts labels once, before round 1, and data grow; "
            "leave it out, or choose another method"
        )
