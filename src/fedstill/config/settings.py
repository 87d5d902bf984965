"""Settings: an experiment with every value resolved and checked, before any data are read; and what
configs of earlier versions lack or have too much, so that their runs go on as they began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import tomli_w

from fedstill.config.named_tables import Named
from fedstill.config.tables import (
    NO_STREAM,
    SITES,
    ClientsTable,
    DataTable,
    FlowerTable,
    StopTable,
    StreamTable,
    TopKeys,
    with_package_tables,
)
from fedstill.config.validation import PackageTable
from fedstill.continual.task_test import HeldOutTestStage
from fedstill.core.fields import Count, as_table
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.registry import LIVE
from fedstill.core.rounds import Schedule
from fedstill.core.screen import Rules
from fedstill.measures.choice import measured_rounds

CAME_LATER = {
    f.name: f.default
    for f in fields(Plan)
    if f.name == "class_weights" or (f.name.startswith("lr_") and f.name != "lr_decay")
}
"""Fields of a plan that earlier versions did not have, and their defaults."""

Table = TypeVar("Table", bound=PackageTable)

WRITTEN_IF_SET = (
    "start_from",
    "start_from_partial",
    "train_only",
    "keep_updates",
    "metrics",
    "rank_by",
    "positive_class",
    "select_on",
)
"""Keys that stand in a config only where they are set."""


@dataclass(frozen=True)
class NamedTables:
    """The tables that name registered things."""

    method: Named
    model: Named
    partition: Named
    topology: Named
    stream: Named


@dataclass(frozen=True, kw_only=True)
class Settings(TopKeys):
    """Every value of a run, resolved and checked, and the things built from them.

    ``method``, ``schedule``: built from what ``named`` names. ``clients``: how many there
    are; ``of_clients``: the table ``[clients]``. ``plans``: by stage. ``tables``: of outer
    packages, by name. ``origins``: where a dotted key came from.
    """

    threads: tuple[Count, Count]
    data: DataTable
    named: NamedTables
    clients: int
    of_clients: ClientsTable
    flower: FlowerTable
    stream: StreamTable
    stop: StopTable
    tables: Mapping[str, PackageTable]
    plans: Mapping[str, Plan]
    method: Method
    schedule: Schedule
    origins: Mapping[str, str]

    def table(self, kind: type[Table]) -> Table:
        """The table of an outer package, by its record."""
        return next(table for table in self.tables.values() if isinstance(table, kind))

    @property
    def exchange_each_round(self) -> bool:
        """Whether every round is a whole exchange between clients."""
        return any(table.exchange_each_round for table in self.tables.values())

    @property
    def hides_client_models(self) -> bool:
        """Whether the server sees no single client's model."""
        return any(table.hides_client_models for table in self.tables.values())

    @property
    def rules(self) -> Rules:
        """Which replies the server accepts."""
        return self.of_clients.rules

    @property
    def on_sites(self) -> bool:
        """Whether clients train on data of their own, which the server never sees, and nothing is
        split here.
        """
        return self.engine == "flower" and self.flower.data == "sites"

    @property
    def on_tasks(self) -> bool:
        """Whether sites' own data come in tasks."""
        return self.on_sites and self.named.stream.name == SITES

    @property
    def selects_round(self) -> bool:
        """Whether rounds are compared: to keep the best one, or to end the run early."""
        return self.select_on is not None or self.stop.is_active

    @property
    def sites_test_rounds(self) -> bool:
        """Whether real sites test the global model on what they hold out, to compare rounds by."""
        return any(isinstance(provider, HeldOutTestStage) for provider in self.schedule.providers)

    @property
    def measured_in(self) -> frozenset[int]:
        """The rounds in which measures look: every so many, at task ends; all where each
        is an exchange of its own.
        """
        interval = 1 if self.exchange_each_round else self.measure_every
        rounds = measured_rounds(self.rounds, interval)
        return rounds | {first - 1 for first in self.stream.starts(self.rounds)[1:]}

    @property
    def deployed(self) -> bool:
        """Whether its clients are machines of a federation, not parts of a simulation."""
        return self.engine == "flower" and bool(self.flower.federation)

    @property
    def lives(self) -> list[str]:
        """Names of what was handed over in Python, and exists in this process only."""
        named = self.named
        return [
            n.name for n in (named.method, named.model, named.partition) if n.name.startswith(LIVE)
        ]

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Every value by table, in the order of a run's config.toml, whose bytes are hashed: it
        must not change.
        """
        names = [f.name for f in fields(TopKeys) if f.name not in WRITTEN_IF_SET]
        top = {name: getattr(self, name) for name in names}
        set_keys = {
            name: getattr(self, name)
            for name in WRITTEN_IF_SET
            if getattr(self, name) != getattr(TopKeys, name)
        }
        named = self.named
        tables = {
            "data": self.data.table,
            "partition": named.partition.table,
            "topology": {**named.topology.table, "clients": self.clients},
            "model": named.model.table,
            "method": named.method.table,
            "clients": {k: v for k, v in self.of_clients.written.items() if not self._unwritten(k)},
            "flower": self.flower.table,
            "stream": self._stream,
            "stop": self.stop.table,
            "plan": {name: as_table(plan) for name, plan in self.plans.items()},
        }
        outer = {name: table.table for name, table in self.tables.items()}
        written = with_package_tables(tables, outer)
        if self.engine != "flower":
            del written["flower"]
        if named.stream.name == NO_STREAM:
            del written["stream"]
        if not self.stop.is_active:
            del written["stop"]
        return {**top, **set_keys, **written}

    @property
    def _stream(self) -> dict[str, Any]:
        return {**self.named.stream.table, **self.stream.table}

    def _unwritten(self, key: str) -> bool:
        """Whether a key of [clients] is left out: sites have accepted configs, by SHA-256, that had
        no such key.
        """
        return key == "failures" and self.deployed and self.of_clients.failures == "tolerate"

    @property
    def toml(self) -> str:
        """The text of a run's config.toml; what came later to plans stands there only where it is
        not the default.
        """
        plans = {
            stage: {k: v for k, v in table.items() if k not in CAME_LATER or v != CAME_LATER[k]}
            for stage, table in self.tree["plan"].items()
        }
        return as_toml({**self.tree, "plan": plans})


def as_toml(tree: Mapping[str, Any]) -> str:
    """A resolved config as TOML text; values that are None are left out."""
    return tomli_w.dumps(_without_none(tree))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (tuple, list)) else value


# Configs of runs that an earlier version began.


DID: Mapping[str, Mapping[str, Any]] = {
    "naive_kd": {"over_teachers": "sum"},
    **{f"qkt_light{of}": {"phase1_over": "same"} for of in ("", "_volunteer", "_server")},
}
"""By method: fields that came later with another default, and what was done before there was a
choice.
"""

UNSAID: Mapping[str, Any] = {"clients.failures": "tolerate"}
"""Dotted keys that came later with another default, and what was done before; a whole run's numbers
don't tell.
"""


def as_it_began(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config with what its version did.

    >>> as_it_began({"method": {"name": "naive_kd", "alpha": 1.0}, "clients": {}})
    {'method': {'over_teachers': 'sum', 'name': 'naive_kd', 'alpha': 1.0}, 'clients': {'failures': 'tolerate'}}
    """  # noqa: E501
    # of 0.1; the run goes on alone, up to rounding
    kept = {k: v for k, v in tree.items() if k != "stacked_seeds"}
    method = kept.get("method")
    if isinstance(method, Mapping) and isinstance(method.get("name"), str):
        kept["method"] = {**DID.get(method["name"], {}), **method}
    for dotted, value in UNSAID.items():
        table, _, key = dotted.partition(".")
        if isinstance(there := kept.get(table, {}), Mapping):
            kept[table] = {key: value, **there}
    return kept


def unsaid(tree: Mapping[str, Any]) -> set[str]:
    """The dotted keys of which a run's config says nothing, as there were none when it began.

    >>> unsaid({"clients": {"quorum": 0.5}}), unsaid({"clients": {"failures": "stop"}})
    ({'clients.failures'}, set())
    """
    return {
        dotted
        for dotted in UNSAID
        if dotted.partition(".")[2] not in tree.get(dotted.partition(".")[0], {})
    }
