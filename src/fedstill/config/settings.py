"""The settings of a run: all values of its experiment, resolved before data are read, checks of
contradictions, and the keys of a run's config.toml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import tomli_w

from fedstill import manifest
from fedstill.config.named_tables import ClientNetwork, Named
from fedstill.config.overrides import Origins
from fedstill.config.tables import (
    NO_STREAM,
    SITES,
    ClientsTable,
    DataTable,
    FlowerTable,
    PackageTable,
    StopTable,
    StreamTable,
    TopKeys,
    with_package_tables,
)
from fedstill.config.validation import wrong_value
from fedstill.continual.task_test import HELD_OUT_TEST
from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, as_table, value_text
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.registry import LIVE
from fedstill.core.rounds import Schedule
from fedstill.core.screen import Rules
from fedstill.engines.hardware import Precision
from fedstill.measures.choice import measured_rounds

OfPackage = TypeVar("OfPackage", bound=PackageTable)


@dataclass(frozen=True)
class NamedTables:
    """The tables that name registered objects."""

    method: Named
    model: Named
    partition: Named
    topology: Named
    stream: Named


@dataclass(frozen=True, kw_only=True)
class Settings(TopKeys):
    """Every value of a run, and the schedule with its method that are built from them."""

    threads: tuple[Count, Count]
    data: DataTable
    named: NamedTables
    clients: int
    """The number of clients."""
    clients_table: ClientsTable
    """``[clients]``."""
    client_networks: Sequence[ClientNetwork | None]
    """The network of each client; None for the server's. Empty if all clients have the server's."""
    flower: FlowerTable
    stream: StreamTable
    stop: StopTable
    packages: Mapping[str, PackageTable]
    """The tables of outer packages, by name."""
    plans: Mapping[str, Plan]
    """The plan of each stage."""
    schedule: Schedule
    origins: Origins
    """Where the values came from, by dotted key."""

    def package_table(self, kind: type[OfPackage]) -> OfPackage:
        """The table of an outer package, by its class."""
        return next(table for table in self.packages.values() if isinstance(table, kind))

    @property
    def method(self) -> Method:
        """The method, which acts in the stages of the schedule."""
        return self.schedule.method

    @property
    def precisions(self) -> dict[str, Precision]:
        """The number formats of passes, by their keys."""
        return {
            "precision": self.precision,
            "teacher_precision": self.teacher_precision or self.precision,
        }

    @property
    def exchange_each_round(self) -> bool:
        """Whether every round is a complete exchange between clients."""
        return any(table.exchange_each_round for table in self.packages.values())

    @property
    def hides_client_models(self) -> bool:
        """Whether the models of single clients are hidden from the server."""
        return any(table.hides_client_models for table in self.packages.values())

    @property
    def rules(self) -> Rules:
        """Which replies the server accepts."""
        return self.clients_table.rules

    @property
    def is_deployed(self) -> bool:
        """Whether the clients are machines of a federation, not parts of a simulation."""
        return self.flower.is_deployed(self.engine)

    @property
    def on_sites(self) -> bool:
        """Whether each client trains on data of its site, so that this process splits no data."""
        return self.flower.is_on_sites(self.engine)

    @property
    def sites_have_tasks(self) -> bool:
        """Whether the data of the sites come in tasks."""
        return self.on_sites and self.named.stream.name == SITES

    @property
    def selects_round(self) -> bool:
        """Whether rounds are compared: to keep the best one, or to end the run early."""
        return self.select_on is not None or self.stop.is_active

    @property
    def sites_test_rounds(self) -> bool:
        """Whether real sites test the global model on the data that they hold out, so that rounds
        can be compared.
        """
        return HELD_OUT_TEST in self.schedule.provided_stages

    @property
    def measured_in(self) -> frozenset[int]:
        """The measured rounds: every ``measure_every`` rounds, the last round, and the last round
        of each task; all rounds if each is a complete exchange.
        """
        interval = self.measure_every
        if self.exchange_each_round:
            interval = 1
        last_of_tasks = [first - 1 for first in self.stream.starts(self.rounds)[1:]]
        return measured_rounds(self.rounds, interval).union(last_of_tasks)

    @property
    def live_objects(self) -> list[Named]:
        """The objects that only exist in this process."""
        named = self.named
        measures = [Named("measure", name, {}) for name in self.measure]
        objects = [named.method, named.model, named.partition, named.topology, named.stream]
        return [named_object for named_object in (*objects, *measures) if named_object.is_live]

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Every value, by table, in the order of a run's config.toml.

        The file's bytes are hashed, so neither the order nor the keys may change;
        ``OPTIONAL_KEYS`` are left out if they have their defaults.
        """
        named = self.named
        tables = {
            "data": self.data.table,
            "partition": named.partition.table,
            "topology": {**named.topology.table, "clients": self.clients},
            "model": named.model.table,
            "method": named.method.table,
            "clients": written_clients(self.clients_table, self.is_deployed),
            "flower": _without_defaults("flower", self.flower.table, FlowerTable().table),
            "stream": {**named.stream.table, **self.stream.table},
            "stop": self.stop.table,
            "plan": {name: as_table(plan) for name, plan in self.plans.items()},
        }
        outer = {
            name: table.table for name, table in self.packages.items() if not table.is_optional
        }
        tables = with_package_tables(tables, outer)
        if self.engine != "flower":
            del tables["flower"]
        if named.stream.name == NO_STREAM:
            del tables["stream"]
        if not self.stop.is_active:
            del tables["stop"]
        return {**written_top_keys(self), **tables}

    @property
    def toml(self) -> str:
        """The text of a run's config.toml."""
        plans = {stage: written_plan(plan) for stage, plan in self.plans.items()}
        return as_toml({**self.tree, "plan": plans})


def as_toml(tree: Mapping[str, Any]) -> str:
    """A resolved config as TOML. Values that are None are left out."""
    return tomli_w.dumps(_without_none(tree))


def _without_none(value: Any) -> Any:
    """A value in which all tables lack their keys that are None."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return [_without_none(item) for item in value]
    return value


# Values that exclude each other, though each of them is legal by itself.


PEERS = "peer_to_peer"
"""The topology in which clients exchange models once, without a server."""


def check_contradictions(settings: Settings, device: str) -> None:
    """Raise WrongConfig for values that exclude each other.

    ``device``: the value of the config, which may be "auto"; that of the settings is resolved.
    """
    _check_processes(settings, device)
    _check_site_tests(settings)
    _check_start(settings)
    _check_rounds(settings)
    _check_stream(settings)
    _check_selection(settings)
    for part in manifest.config_checks():
        check = part.load()
        check(settings)


def _check_processes(settings: Settings, device: str) -> None:
    """Raise ConfigError for values that are impossible for clients in other processes or on other
    machines.
    """
    if settings.flower.federation and settings.engine != "flower":
        raise wrong_value(
            "flower.federation",
            f"has no effect with engine = {settings.engine!r}, which trains in this process",
            "set engine = 'flower', or remove it",
        )
    for key in ("grid", "deadline"):
        value = getattr(settings.flower, key)
        if settings.engine != "flower" and value != getattr(FlowerTable(), key):
            raise wrong_value(
                f"flower.{key}",
                f"= {value_text(value)} has no effect with engine = {settings.engine!r}, which "
                "trains in this process",
                "set engine = 'flower', or remove it",
            )
    if device == "auto" and settings.is_deployed:
        raise wrong_value(
            "device",
            "= 'auto' would depend on the server, but sites may have other devices",
            "set 'cpu' or 'cuda', which the server and all sites then need",
        )
    if settings.device.startswith("cuda:") and settings.flower.grid == "ray":
        raise wrong_value(
            "device",
            f"= {settings.device!r} names one GPU, but Ray distributes the clients",
            "set 'cuda', and CUDA_VISIBLE_DEVICES in the environment",
        )
    has_processes = settings.is_deployed or settings.flower.grid == "ray"
    # The other processes may register objects, too.
    passed = [live.name for live in settings.live_objects if live.name.startswith(LIVE)]
    if settings.engine == "flower" and has_processes and passed:
        raise ConfigError(
            f"{passed[0]!r} only exists in this process; put it in a file, and name the file"
        )


def _check_site_tests(settings: Settings) -> None:
    """Raise WrongConfig for a ``flower.test_every`` that has no effect, or leaves metrics without
    tests.
    """
    test_every = settings.flower.test_every
    if settings.engine == "flower" and not settings.on_sites and test_every != 1:
        raise wrong_value(
            "flower.test_every", "is for sites with data of their own, flower.data = 'sites'"
        )
    has_tests = test_every or settings.sites_test_rounds or settings.method.personal
    if settings.on_sites and settings.metrics and not has_tests:
        raise wrong_value(
            "flower.test_every", "= 0 leaves no tests, from which metrics are computed"
        )


def _check_start(settings: Settings) -> None:
    """Raise WrongConfig for keys that need ``start_from``, and for values that exclude it."""
    if settings.start_from_partial and not settings.start_from:
        raise wrong_value(
            "start_from_partial", "= true needs start_from, the model whose entries are loaded"
        )
    if not settings.train_only:
        return
    if not settings.start_from:
        raise wrong_value(
            "train_only", "needs start_from, the model with the values of all other entries"
        )
    if settings.device != "cpu":
        raise wrong_value(
            "train_only",
            "keeps entries in the CPU's memory",
            "remove device, or train all entries",
        )
    if settings.clients_table.models:
        raise wrong_value(
            "train_only",
            "freezes entries of one network, but clients.models names others",
            "remove one of them",
        )


def _check_rounds(settings: Settings) -> None:
    """Raise WrongConfig for a wrong number of rounds in a topology with one exchange for each
    task.
    """
    rounds = settings.rounds
    tasks = settings.stream.tasks
    if settings.named.topology.name != PEERS:
        return
    if tasks > 1 and rounds != tasks:
        raise wrong_value(
            "rounds",
            f"= {rounds}: peer_to_peer has one exchange per task",
            f"set rounds = {tasks}, the value of stream.tasks",
        )
    if tasks == 1 and rounds > 1 and not settings.exchange_each_round:
        raise wrong_value(
            "rounds",
            f"= {rounds}: peer_to_peer has a single exchange",
            "set rounds = 1, or query.again = 'mixed' to query again with new data",
        )


def _check_stream(settings: Settings) -> None:
    """Raise WrongConfig for values that exclude the kind of ``[stream]``."""
    kind = settings.named.stream
    if kind.name == NO_STREAM:
        return
    if settings.on_sites and kind.name != SITES:
        raise wrong_value(
            "stream.kind",
            f"= {kind.label!r} divides data of this process, but sites define their own tasks",
            "set stream.kind = 'sites'",
        )
    if settings.on_sites and settings.stream.compose != "tasks_first":
        raise wrong_value(
            "stream.compose",
            "determines how this process splits data, but sites have their own data",
            "remove it",
        )
    if kind.name == SITES and not settings.on_sites:
        raise wrong_value(
            "stream.kind",
            "= 'sites' needs sites with their own data, flower.data = 'sites'",
            "set 'classes', 'domains' or 'drift'",
        )
    if kind.values.get("column") and settings.named.partition.values.get("column"):
        raise wrong_value(
            "stream.column",
            "and partition.column cannot be combined",
            "remove one of them",
        )


def _check_selection(settings: Settings) -> None:
    """Raise WrongConfig for keys of ``[stop]`` without effect, and for a comparison of rounds of
    several tasks.
    """
    stop = settings.stop
    if stop.min_delta > 0 and stop.patience == 0:
        raise wrong_value(
            "stop.min_delta",
            f"= {stop.min_delta} only has an effect with stop.patience",
            "set stop.patience, or remove stop.min_delta",
        )
    if settings.selects_round and settings.stream.tasks > 1:
        key = "select_on"
        if stop.is_active:
            key = "stop"
        raise wrong_value(
            key,
            "compares rounds, but rounds of different tasks are not comparable",
            f"remove {key} or [stream]",
        )


# The keys of a run's config.toml.
#
# A resumed run must have its original config.toml, and sites accept configs by their SHA-256. So a
# new key must not change the file of a run that does not use it: it is optional, and only written
# if its value differs from the default. Keys with the value None are never written.


OPTIONAL_KEYS: Mapping[str, Sequence[str]] = {
    "": (
        "start_from",
        "start_from_partial",
        "train_only",
        "keep_updates",
        "metrics",
        "rank_by",
        "positive_class",
        "engine_reason",
        "select_on",
    ),
    "plan": ("lr_schedule", "lr_step", "lr_end", "lr_warmup", "lr_rounds", "class_weights"),
    "clients": ("max_examples",),
    "flower": ("test_every",),
}
"""Optional keys by table. Those outside all tables (``""``) follow the others. ``fedstill explain``
shows those of ``[plan]``, whether they are used or not.
"""


def written_top_keys(top: TopKeys) -> dict[str, Any]:
    """The keys outside all tables in a run's config, in order."""
    values = {field.name: getattr(top, field.name) for field in fields(TopKeys)}
    defaults = {field.name: field.default for field in fields(TopKeys)}
    optional = {key: values.pop(key) for key in OPTIONAL_KEYS[""]}
    return {**values, **_without_defaults("", optional, defaults)}


def written_clients(table: ClientsTable, is_deployed: bool) -> dict[str, Any]:
    """The keys of ``[clients]`` in a run's config. ``is_deployed``: whether its clients are
    machines of a federation.
    """
    values = _without_defaults("clients", table.table, ClientsTable().table)
    if is_deployed and values["failures"] == "tolerate":
        # Federations have always tolerated failures, so sites have accepted configs without the
        # key.
        del values["failures"]
    return values


def written_plan(plan: Plan) -> dict[str, Any]:
    """The keys of a stage's plan in a run's config.toml."""
    return _without_defaults("plan", as_table(plan), as_table(Plan()))


def _without_defaults(
    table: str, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a table in order, without optional keys that have their defaults."""
    optional = OPTIONAL_KEYS[table]
    return {
        key: value for key, value in values.items() if key not in optional or value != defaults[key]
    }
