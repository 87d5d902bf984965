"""The table ``[stream]`` of a config: read, and what in it cannot be meant together is refused."""

from __future__ import annotations

from typing import Any

from fedstill.errors import ConfigError, UnknownKeys, suggestion
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.named_tables import Named, fields_of, read_named
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.stream_table import NO_STREAM, StreamTable
from fedstill.fields import fields_of_record, read_record


def read_stream(experiment: Experiment, rounds: int) -> tuple[Named, StreamTable]:
    """The kind that ``[stream]`` names with its fields, and the rest; raises ConfigError in one line."""
    given = {key: _tuples(value) for key, value in experiment.table("stream").items()}
    said = given.get("kind", NO_STREAM)
    own = fields_of("stream", said, experiment.base)[1] if isinstance(said, str) else {}
    common = fields_of_record(StreamTable)
    if unknown := [key for key in given if key not in {*own, *common, "kind"}]:
        raise UnknownKeys([], [("stream", key, suggestion(key, {*own, *common})) for key in unknown])
    named = read_named("stream", {k: v for k, v in given.items() if k not in common}, experiment.base)
    table = read_record(StreamTable, {k: v for k, v in given.items() if k in common}, "stream")
    if named.name == NO_STREAM:
        if others := [key for key in given if key != "kind"]:
            raise ConfigError(
                f"stream.{others[0]} says nothing without tasks; set stream.kind: 'classes', 'domains' or 'drift'"
            )
        return named, StreamTable(tasks=1)
    table.starts(rounds)
    return named, table


def refuse_with_stream(settings: Settings) -> None:
    """Raises ConfigError for what cannot be meant together with tasks."""
    if settings.named.stream.name == NO_STREAM:
        return
    if settings.on_sites:
        raise ConfigError("[stream] cuts data that this process has; leave it out, or flower.data = 'sites'")
    if settings.query.asks:
        raise ConfigError("[stream] and [query] both say when data come; leave one of them out")
    if settings.named.stream.values.get("column") and settings.named.partition.values.get("column"):
        raise ConfigError("stream.column and partition.column both need a column of their own; leave one of them out")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
