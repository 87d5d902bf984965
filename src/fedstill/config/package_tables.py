"""The tables of a config that belong to outer packages, as the manifest lists them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fedstill import manifest
from fedstill.config.tables import ClientsTable, DataTable, FlowerTable
from fedstill.core.fields import PackageTable


@functools.cache
def package_tables() -> Mapping[str, type[PackageTable]]:
    """The records of the tables that outer packages add, by the name of the table."""
    return {part.name: part.load() for part in manifest.config_tables()}


@functools.cache
def record_tables() -> Mapping[str, type[Any]]:
    """All tables that are records, in their order; the others name a registered thing, or are of
    stages.
    """
    inner: dict[str, type[Any]] = {
        "data": DataTable,
        "clients": ClientsTable,
        "flower": FlowerTable,
    }
    return with_package_tables(inner, package_tables())


def with_package_tables(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Values by table, with those of packages' tables behind the tables that they follow."""
    parts = [(part, outer[part.name]) for part in manifest.config_tables() if part.name in outer]
    return manifest.placed(inner, parts)
