"""The table ``[query]`` of a config: read, and what in it cannot be meant together is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.errors import ConfigError
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.tables import QueryTable
from fedstill.fields import Typed, read_record

PEERS = "peer_to_peer"


def read_query(given: Mapping[str, Any]) -> QueryTable:
    """The table ``[query]``; raises ConfigError, in one line, for values that are wrong or cannot
    be meant together.
    """
    one = isinstance(given.get("by"), str) and not isinstance(given["by"], Typed)
    table = {
        k: _lists(v) if k in ("classes", "needs") else (v,) if k == "by" and one else v
        for k, v in given.items()
    }
    query = read_record(QueryTable, table, "query")
    for name in ("classes", "needs"):
        for client in getattr(query, name) or ():
            if not client.isdecimal():
                raise ConfigError(
                    f"query.{name}.{client}: a client is a whole number, e.g. [query.{name}] 3 = "
                    "[7, 9]"
                )
    if why := _odd(query):
        raise ConfigError(f"query{why}")
    return query


def _lists(written: Any) -> Any:
    if not isinstance(written, Mapping):
        return written
    return {str(k): tuple(v) if isinstance(v, list) else v for k, v in written.items()}


def _odd(query: QueryTable) -> str:
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


def refuse_rounds(settings: Settings) -> None:
    """Raises ConfigError where rounds, topology and ``query.again`` do not go together."""
    query, kind, rounds = settings.query, settings.named.topology.name, settings.rounds
    if query.again and kind != PEERS:
        raise ConfigError(
            f"query.again: with topology.kind = {kind!r} clients do not ask again; leave it out, "
            "or choose a method on "
            f"{PEERS!r} (qkt, naive_kd, local_only)"
        )
    if kind == PEERS and settings.stream.tasks > 1 and rounds != settings.stream.tasks:
        tasks = settings.stream.tasks
        raise ConfigError(
            f"rounds: peer_to_peer has one exchange a task; set rounds = {tasks}, as stream.tasks "
            "says"
        )
    if kind == PEERS and rounds > 1 and not query.again and settings.stream.tasks == 1:
        raise ConfigError(
            "rounds: peer_to_peer is one shot; set rounds = 1, or query.again = 'mixed' to ask "
            "again with new data"
        )
    if query.again and rounds == 1:
        raise ConfigError(
            "query.again: in rounds = 1 clients ask once; set rounds to how often they ask"
        )
    if query.again and "label_counts" in settings.method.requires():
        raise ConfigError(
            f"query.again: method {settings.named.method.name} counts labels once, before round 1, "
            "and data grow; "
            "leave it out, or choose another method"
        )
