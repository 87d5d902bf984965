"""The table ``[stream]`` of a config: read, and what in it cannot be meant together is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

from fedstill.data.time_cuts import cut_times
from fedstill.errors import ConfigError, UnknownKeys, suggestion
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.named_tables import Named, fields_of, read_named
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.stream_table import NO_STREAM, SITES, StreamTable
from fedstill.fields import fields_of_record, read_record
from fedstill.method import Method
from fedstill.topology import CountedAnew, SitesTest, Topology


def read_stream(experiment: Experiment, rounds: int) -> tuple[Named, StreamTable]:
    """The kind that ``[stream]`` names with its fields, and the rest; raises ConfigError in one
    line.
    """
    given = {key: _tuples(value) for key, value in experiment.table("stream").items()}
    said = given.get("kind", NO_STREAM)
    own = fields_of("stream", said, experiment.base)[1] if isinstance(said, str) else {}
    common = fields_of_record(StreamTable)
    if unknown := [key for key in given if key not in {*own, *common, "kind"}]:
        raise UnknownKeys(
            [], [("stream", key, suggestion(key, {*own, *common})) for key in unknown]
        )
    named = read_named(
        "stream", {k: v for k, v in given.items() if k not in common}, experiment.base
    )
    table = read_record(StreamTable, {k: v for k, v in given.items() if k in common}, "stream")
    if named.name == NO_STREAM:
        if others := [key for key in given if key != "kind"]:
            raise ConfigError(
                f"stream.{others[0]} says nothing without tasks; set stream.kind: 'classes', "
                "'domains' or 'drift'"
            )
        return named, StreamTable(tasks=1)
    if cuts := named.values.get("cuts") if named.name == SITES else ():
        table = _cut_by_time(table, cuts, "tasks" in given)
    table.starts(rounds)
    return named, table


def refuse_with_stream(settings: Settings) -> None:
    """Raises ConfigError for what cannot be meant together with tasks."""
    if settings.named.stream.name == NO_STREAM:
        return
    if settings.on_sites and settings.named.stream.name != SITES:
        raise ConfigError(
            f"stream.kind = {settings.named.stream.label!r} cuts data that this process has; sites "
            "have tasks of their "
            "own: set stream.kind = 'sites'"
        )
    if settings.on_sites and settings.stream.compose != "tasks_first":
        raise ConfigError(
            "stream.compose says how this process splits data, and sites have their own; leave it "
            "out"
        )
    if settings.named.stream.name == SITES and not settings.on_sites:
        raise ConfigError(
            "stream.kind = 'sites' is for sites with data of their own, flower.data = 'sites'; set "
            "'classes', "
            "'domains' or 'drift' here"
        )
    if settings.on_sites and settings.privacy.secure_sum:
        raise ConfigError(
            "with privacy.secure_sum a site reports nothing of its own, and stream.kind = 'sites' "
            "is measured by what "
            "sites report; leave one of them out"
        )
    if settings.query.asks:
        raise ConfigError("[stream] and [query] both say when data come; leave one of them out")
    if settings.named.stream.values.get("column") and settings.named.partition.values.get("column"):
        raise ConfigError(
            "stream.column and partition.column both need a column of their own; leave one of them "
            "out"
        )


def with_tasks(topology: Topology, method: Method, kind: str, table: StreamTable) -> Topology:
    """A run's schedule with what its tasks ask for: label counts anew, and real sites' tests at
    task ends.
    """
    if kind == SITES and not method.personal:
        topology = SitesTest(topology)
    return (
        CountedAnew(topology)
        if table.tasks > 1 and "label_counts" in method.requires()
        else topology
    )


def _cut_by_time(table: StreamTable, cuts: tuple[str, ...], said: bool) -> StreamTable:
    """The table with as many tasks as the cuts make; raises ConfigError where it says others, or
    for no dates.
    """
    cut_times(cuts)
    if said and table.tasks != len(cuts) + 1:
        raise ConfigError(
            f"stream.cuts has {len(cuts)} dates, which make {len(cuts) + 1} tasks, and "
            f"stream.tasks = {table.tasks}"
        )
    return replace(table, tasks=len(cuts) + 1)


def _tuples(value: Any) -> Any:
    if isinstance(value, date):  # TOML has dates of its own
        return value.isoformat()
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
