"""What a run's config.toml has depending on the version that wrote it.

A resumed run must have the config.toml that it began with, and sites accept configs by their
SHA-256. So a key that a later version adds must not change the file of a run that does not use the
key. There are three cases:

1. An optional key, whose default is None or a value that changes nothing. It is written only if it
   has another value (``OPTIONAL_KEYS``, ``OPTIONAL_PLAN_KEYS``, ``OPTIONAL_CLIENT_KEYS``; keys of
   tables that are None are never written).
2. A key whose default is what earlier versions did. It is written by all runs that begin now.
3. A key whose default is *not* what earlier versions did. It is written by all runs that begin now,
   and a config without it is read with the old behaviour (``OLD_BEHAVIOUR``,
   ``OLD_METHOD_FIELDS``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedstill.config.overrides import flat
from fedstill.config.tables import ClientsTable, TopKeys
from fedstill.core.fields import as_table
from fedstill.core.records import Plan

# Keys that are written only if they are used.


OPTIONAL_KEYS = (
    "start_from",
    "start_from_partial",
    "train_only",
    "keep_updates",
    "metrics",
    "rank_by",
    "positive_class",
    "select_on",
)
"""Keys outside all tables. They stand behind the others."""

OPTIONAL_PLAN_KEYS = (
    "lr_schedule",
    "lr_step",
    "lr_end",
    "lr_warmup",
    "lr_rounds",
    "class_weights",
)
"""Keys of ``[plan]``. A config that is shown has them, a config.toml only if they are used."""

OPTIONAL_CLIENT_KEYS = ("max_examples",)
"""Keys of ``[clients]``."""


def written_top_keys(top: TopKeys) -> dict[str, Any]:
    """The keys outside all tables that a run's config has, in their order."""
    values = {field.name: getattr(top, field.name) for field in fields(TopKeys)}
    defaults = {field.name: field.default for field in fields(TopKeys)}
    optional = {key: values.pop(key) for key in OPTIONAL_KEYS}
    return {**values, **_not_default(optional, defaults)}


def written_clients(table: ClientsTable, is_deployed: bool) -> dict[str, Any]:
    """The keys of ``[clients]`` that a run's config has. ``is_deployed``: whether its clients are
    machines of a federation.
    """
    values = table.table
    defaults = ClientsTable().table
    optional = {key: values.pop(key) for key in OPTIONAL_CLIENT_KEYS}
    values |= _not_default(optional, defaults)
    if is_deployed and values["failures"] == "tolerate":
        # Federations have always tolerated failures. Their sites have accepted configs without it.
        del values["failures"]
    return {key: values[key] for key in table.table if key in values}


def written_plan(plan: Plan) -> dict[str, Any]:
    """The keys of a stage's plan that a run's config.toml has."""
    values = as_table(plan)
    defaults = as_table(Plan())
    optional = {key: values.pop(key) for key in OPTIONAL_PLAN_KEYS}
    values |= _not_default(optional, defaults)
    return {key: values[key] for key in as_table(plan) if key in values}  # in the order of fields


def _not_default(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != defaults[key]}


# Keys that earlier versions lacked, and whose defaults are not what these versions did.


OLD_BEHAVIOUR: Mapping[str, Any] = {"clients.failures": "tolerate"}
"""What runs did before there was a key, by dotted key."""

OLD_METHOD_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "naive_kd": {"over_teachers": "sum"},
    "qkt_light": {"phase1_over": "same"},
    "qkt_light_volunteer": {"phase1_over": "same"},
    "qkt_light_server": {"phase1_over": "same"},
}
"""What methods did before they had a field, by method."""

DROPPED_KEYS = ("stacked_seeds",)
"""Keys of version 0.1.0 that are read and ignored. ``stacked_seeds`` trained the runs of several
seeds as one stack; such a run is resumed alone, with the same numbers up to rounding.
"""


def with_old_behaviour(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run, with what its version did for keys that it lacks.

    >>> with_old_behaviour({"method": {"name": "naive_kd", "alpha": 1.0}})["method"]
    {'over_teachers': 'sum', 'name': 'naive_kd', 'alpha': 1.0}
    >>> with_old_behaviour({"clients": {"quorum": 0.5}, "stacked_seeds": True})
    {'clients': {'failures': 'tolerate', 'quorum': 0.5}}
    """
    values = {key: value for key, value in tree.items() if key not in DROPPED_KEYS}
    method = values.get("method")
    if isinstance(method, Mapping) and isinstance(method.get("name"), str):
        values["method"] = {**OLD_METHOD_FIELDS.get(method["name"], {}), **method}
    for dotted_key, old_value in OLD_BEHAVIOUR.items():
        name, _, key = dotted_key.partition(".")
        table = values.get(name, {})
        if isinstance(table, Mapping):
            values[name] = {key: old_value, **table}
    return values


def absent_keys(tree: Mapping[str, Any]) -> set[str]:
    """The dotted keys of ``OLD_BEHAVIOUR`` that a run's config lacks, since it is older than they
    are.

    >>> absent_keys({"clients": {"quorum": 0.5}}), absent_keys({"clients": {"failures": "stop"}})
    ({'clients.failures'}, set())
    """
    return OLD_BEHAVIOUR.keys() - flat(tree).keys()
