"""Resolve an experiment: every value read, checked and completed, before any data are read.

``resolve`` reads the parts of the config one by one. If one is wrong, it still reads all others, so
that one message has everything that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedstill.config.data_table import absolute_path, default_model, read_data
from fedstill.config.experiment import Experiment, check_is_experiment
from fedstill.config.named_tables import (
    ClientNetwork,
    Named,
    NetworkAssignment,
    known_name,
    read_assignment,
    read_named,
)
from fedstill.config.overrides import place_of
from fedstill.config.settings import NamedTables, Settings, check_contradictions
from fedstill.config.stages import (
    PlanTable,
    check_method,
    default_plans,
    held_out_share,
    read_plans,
    schedule_of,
    topology_defaults,
)
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
    package_tables,
)
from fedstill.config.unknown_keys import KeyPath, UnknownKey
from fedstill.config.validation import (
    CONTRADICTION,
    NOT_A_TABLE,
    UNKNOWN_KEY,
    Problem,
    WrongConfig,
    collected,
    keys_of,
    schema_of,
    schema_of_record,
    unknown_name,
    validated,
    wrong_value,
)
from fedstill.continual.task_test import HELD_OUT_TEST, SITE_TEST, RoundInterval, RoundTests
from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, as_table
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.rounds import Schedule
from fedstill.core.stream import cut_times
from fedstill.data.dataset import with_tuples
from fedstill.engines.devices import check_machine, check_precision, is_device
from fedstill.measures.choice import measures
from fedstill.metrics.classification import ACCURACY, RANKING, RECORDED, unknown_metric

DEFAULT_CLIENTS = 20


def resolve(experiment: Experiment, check_device: bool = True) -> Settings:
    """Resolve and check every value of an experiment.

    ``check_device``: whether this machine must have the run's device. A run that is only read may
    have had another one. Raises ConfigError with one line that names all wrong keys and what to
    write.
    """
    check_is_experiment(experiment)
    parts = Parts(experiment)
    try:
        settings = _resolved(parts)
    except WrongConfig as error:
        problems = parts.problems(error)
        raise WrongConfig([_with_advice(problem, experiment) for problem in problems]) from error
    if check_device:
        check_machine(settings.precisions, settings.device)
    return settings


def _resolved(parts: Parts) -> Settings:
    """The settings of a config's parts. Raises ConfigError for the first part that is wrong."""
    settings = Settings(
        **as_table(parts.top),
        data=parts.data,
        named=NamedTables(
            method=parts.named_method,
            model=parts.named_model,
            partition=parts.named_partition,
            topology=parts.named_topology,
            stream=parts.stream.named,
        ),
        clients=parts.clients,
        clients_table=parts.clients_table,
        client_networks=parts.client_networks,
        flower=parts.flower,
        stream=parts.stream.table,
        stop=parts.stop,
        packages=parts.packages,
        plans=parts.plans,
        schedule=parts.schedule,
        origins=parts.experiment.origins,
    )
    check_contradictions(settings, parts.experiment.device)
    return settings


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a config.

    Each cached property reads and checks one part when it is first used, and with it the parts that
    it needs. It is also the unit in which problems are collected: ``problems`` reads them all, and
    notes what each raises.
    """

    experiment: Experiment

    def problems(self, first: WrongConfig) -> list[Problem]:
        """The problems of all parts. ``first``: the error of the part that was read first."""
        problems = dict.fromkeys(first.problems)
        for name, part in vars(Parts).items():
            if not isinstance(part, cached_property):
                continue
            try:
                getattr(self, name)
            except WrongConfig as error:
                problems |= dict.fromkeys(error.problems)
            except ConfigError:
                # An error without records (such as a file that cannot be imported) is raised as
                # soon as all other problems are solved.
                continue
        return list(problems)

    @property
    def base(self) -> Path | None:
        """The folder that paths are relative to."""
        return self.experiment.base

    @cached_property
    def top(self) -> TopKeys:
        """The keys outside all tables."""
        schema = schema_of_record(TopKeys)
        values = {key: getattr(self.experiment, key) for key in keys_of(schema)}
        top = TopKeys(**validated(schema, {**values, **self.experiment.unknown}, ""))
        measure = [known_name("measure", "measure", name, self.base) for name in top.measure]
        start_from = top.start_from
        if start_from:
            start_from = str(absolute_path(start_from, self.base, "start_from"))
        top = replace(
            top,
            threads=_threads(top.threads),
            device=_device(top),
            measure=tuple(measure),
            start_from=start_from,
            metrics=_metrics(top),
        )
        check_precision(top.precision, top.device)
        measures(top.measure)  # raises ConfigError for measures that cannot be built
        return _with_table_defaults(top, self.packages, self.experiment)

    @cached_property
    def packages(self) -> dict[str, PackageTable]:
        """The tables of outer packages, by name. Raises WrongConfig with all of their problems."""
        problems: list[Problem] = []
        tables = {}
        for name, schema in package_tables().items():
            with collected(problems):
                tables[name] = schema.read(self.experiment.table(name), name)
        if problems:
            raise WrongConfig(problems)
        return tables

    @cached_property
    def data(self) -> DataTable:
        """``[data]``, with absolute paths."""
        return read_data(self.experiment)

    @cached_property
    def named_method(self) -> Named:
        """``[method]``, with all of its fields."""
        return read_named("method", self.experiment.table("method"), self.base)

    @cached_property
    def method(self) -> Method:
        """The method that ``[method]`` names."""
        named = self.named_method
        method = named.build()
        if not isinstance(method, Method):
            raise ConfigError(
                f"method.name = {named.entry.name!r} is a {type(method).__name__}, not a "
                "fedstill.Method"
            )
        check_method(f"method {named.label}", method, self.base)
        return method

    @cached_property
    def clients(self) -> int:
        """The number of clients, which ``[topology]`` or ``[partition]`` can set. Raises
        WrongConfig if they differ.
        """
        schema = schema_of("clients", {"clients": (Count, DEFAULT_CLIENTS)})
        counts: dict[str, int] = {}
        for name in ("topology", "partition"):
            table = self.experiment.table(name)
            if "clients" in table:
                counts[name] = validated(schema, {"clients": table["clients"]}, name)["clients"]
        if len(set(counts.values())) > 1:
            raise wrong_value(
                "topology.clients",
                f"= {counts['topology']} and partition.clients = {counts['partition']} differ",
                "leave one of them out",
            )
        return next(iter(counts.values()), DEFAULT_CLIENTS)

    @cached_property
    def flower(self) -> FlowerTable:
        """``[flower]``, with an absolute path. Raises WrongConfig for sites without a
        federation.
        """
        flower = FlowerTable.read(self.experiment.table("flower"), "flower")
        if flower.federation:
            folder = absolute_path(flower.federation, self.base, "flower.federation")
            return flower.changed(federation=str(folder))
        if flower.data == "sites":
            raise wrong_value(
                "flower.data",
                "= 'sites' needs flower.federation, the folder that `fedstill deploy init` made",
            )
        return flower

    @cached_property
    def _clients_as_written(self) -> ClientsTable:
        """``[clients]``, with names as the config has them."""
        return ClientsTable.read(self.experiment.table("clients"), "clients")

    @cached_property
    def clients_table(self) -> ClientsTable:
        """``[clients]``, with resolved names."""
        failures = self._clients_as_written.failures
        if failures is None:
            failures = "tolerate" if self.flower.is_deployed(self.top.engine) else "stop"
        models = self.network_assignment.entry
        return self._clients_as_written.changed(models=models, failures=failures)

    @cached_property
    def network_assignment(self) -> NetworkAssignment:
        """The networks that ``[clients]`` assigns to clients."""
        return read_assignment(self._clients_as_written.models, self.base)

    @cached_property
    def client_networks(self) -> list[ClientNetwork | None]:
        """The network of each client; none at all if all clients have the server's."""
        networks = self.network_assignment.for_clients(self.clients)
        if not any(networks):
            return []
        return networks

    @cached_property
    def named_topology(self) -> Named:
        """The topology that ``[topology]`` names, by default the method's."""
        return read_named(
            "topology",
            self.experiment.table("topology"),
            self.base,
            default_name=self.method.topology,
            defaults_by_name=topology_defaults(self.method),
        )

    @cached_property
    def named_partition(self) -> Named:
        """The partition that ``[partition]`` names."""
        return read_named("partition", self.experiment.table("partition"), self.base)

    @cached_property
    def named_model(self) -> Named:
        """The server's network that ``[model]`` names, by default one for the kind of data."""
        default_name = default_model(self.experiment, self.data, self.flower)
        return read_named("model", self.experiment.table("model"), self.base, default_name)

    @cached_property
    def stream(self) -> StreamSettings:
        """``[stream]``."""
        return read_stream(self.experiment, self.top.rounds)

    @cached_property
    def stop(self) -> StopTable:
        """``[stop]``."""
        return StopTable.read(self.experiment.table("stop"), "stop")

    @cached_property
    def plan_table(self) -> PlanTable:
        """``[plan]``."""
        return read_plans(self.experiment, self.method)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plan of each stage: the values of ``[plan]`` over the defaults of the method."""
        rounds = self.stream.table.lr_schedule_rounds(self.top.rounds)
        defaults = default_plans(self.method, self.named_topology)
        for table in self.packages.values():
            defaults |= table.stage_plans
        return self.plan_table.resolved(defaults, rounds)

    @cached_property
    def schedule(self) -> Schedule:
        """The stages of all rounds, with the changes of outer packages."""
        schedule = schedule_of(
            self.method,
            self.named_topology.build(),
            self.stream.named.name,
            self.plans,
            self._round_tests,
        )
        for table in self.packages.values():
            schedule = table.changed_schedule(schedule)
        return schedule

    @property
    def _round_tests(self) -> RoundTests | None:
        """The tests of the global model by real sites after rounds; None if there are none.

        Sites test on the data that they hold out if rounds are compared by them, and otherwise on
        their test sets.
        """
        on_sites = self.flower.is_on_sites(self.top.engine)
        hides_client_models = any(table.hides_client_models for table in self.packages.values())
        if not on_sites or hides_client_models or self.method.personal:
            return None

        compares_rounds = self.top.select_on == "held_out"
        if self.top.select_on is None:
            compares_rounds = self.stop.is_active
        if compares_rounds and held_out_share(self.plans):
            return RoundTests(self.method, HELD_OUT_TEST)
        interval = self.flower.test_every
        if not interval:
            return None
        return RoundTests(self.method, SITE_TEST, RoundInterval(interval, self.top.rounds))


# Advice about unknown keys. A key is only suggested if the config is accepted with it.


BLOCKING = {UNKNOWN_KEY, CONTRADICTION, NOT_A_TABLE}
"""Problems of a key that show that another key was meant. With other problems, the key is right,
and its value is wrong.
"""


def _with_advice(problem: Problem, experiment: Experiment) -> Problem:
    """A problem with the place of its key, and with what to do about an unknown key."""
    problem = replace(problem, place=place_of(problem.key, experiment.origins))
    path = KeyPath.of(problem.key, experiment.tree)
    if path.key not in path.values(experiment.tree):
        return problem  # a key in the fields of a network, about which its schema has given advice
    unknown = UnknownKey(path, experiment, _accepts)
    if problem.code == UNKNOWN_KEY:
        return replace(problem, hint=unknown.advice or problem.hint)
    if problem.code == NOT_A_TABLE:
        # A value in the place of a table may be meant for a key of the same name.
        return replace(problem, hint=unknown.suggestion or problem.hint)
    return problem


def _accepts(experiment: Experiment, key: str) -> bool:
    """Whether an experiment can be resolved, as far as a dotted key is concerned."""
    parts = Parts(experiment)
    try:
        _resolved(parts)
    except WrongConfig as error:
        blocked = [problem.key for problem in parts.problems(error) if problem.code in BLOCKING]
        return key not in blocked
    except ConfigError:
        return True  # something else is wrong
    return True


# The parts that need more than the check of one table.


def _with_table_defaults(
    top: TopKeys, tables: Mapping[str, PackageTable], experiment: Experiment
) -> TopKeys:
    """The keys outside all tables. Those that the config does not set have the defaults that the
    tables of packages give them.
    """
    defaults = TopKeys()
    for table in tables.values():
        unset = {
            key: value
            for key, value in table.top_defaults.items()
            if key not in experiment.origins and getattr(top, key) == getattr(defaults, key)
        }
        top = replace(top, **unset)
    return top


class StreamSettings(NamedTuple):
    """``[stream]``: the kind with its fields, and the keys of all kinds."""

    named: Named
    table: StreamTable


def read_stream(experiment: Experiment, rounds: int) -> StreamSettings:
    """Read ``[stream]``. ``rounds``: the rounds of the run, which the tasks share.

    Raises WrongConfig for keys without a kind, wrong values, and rounds that cannot be shared out.
    """
    values = {
        key: _dates_as_texts(with_tuples(value))
        for key, value in experiment.table("stream").items()
    }
    common_keys = keys_of(StreamTable)
    named = read_named(
        "stream",
        {key: value for key, value in values.items() if key not in common_keys},
        experiment.base,
    )
    if named.name == NO_STREAM:
        without_effect = [key for key in values if key != "kind"]
        if without_effect:
            raise wrong_value(
                f"stream.{without_effect[0]}",
                "has no effect without tasks",
                "set stream.kind: 'classes', 'domains' or 'drift'",
            )
        return StreamSettings(named, StreamTable(tasks=1))

    common = {key: value for key, value in values.items() if key in common_keys}
    table = StreamTable.read(common, "stream")
    cuts = named.values.get("cuts")
    if named.name == SITES and cuts:
        table = _with_tasks_of_cuts(table, cuts, is_set="tasks" in values)
    table.starts(rounds)
    return StreamSettings(named, table)


def _with_tasks_of_cuts(table: StreamTable, cuts: Sequence[str], *, is_set: bool) -> StreamTable:
    """The table with one task more than there are dates. ``is_set``: whether the config also sets
    the number of tasks.

    Raises ConfigError for texts that are not dates, and for another number in the config.
    """
    cut_times(cuts)
    tasks = len(cuts) + 1
    if is_set and table.tasks != tasks:
        raise wrong_value(
            "stream.tasks",
            f"= {table.tasks}, and the {len(cuts)} dates of stream.cuts make {tasks} tasks",
            "leave stream.tasks out",
        )
    return table.changed(tasks=tasks)


def _dates_as_texts(value: Any) -> Any:
    """A value with texts for dates, which are a type of their own in TOML."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, tuple):
        return tuple(map(_dates_as_texts, value))
    return value


def _threads(value: Any) -> tuple[int, int]:
    """The threads of a client among several, and of a client alone."""
    if value == "auto":
        return (1, 1)
    if isinstance(value, int):
        return (value, value)
    return value  # type: ignore[no-any-return]


def _metrics(top: TopKeys) -> tuple[str, ...]:
    """The metrics of the run besides accuracy, with the one that ranks. Raises WrongConfig for
    unknown names.
    """
    problems = [
        *_unknown_metrics("metrics", top.metrics, RECORDED),
        *_unknown_metrics("rank_by", [top.rank_by], RANKING),
    ]
    if problems:
        raise WrongConfig(problems)
    names = [*top.metrics, top.rank_by]
    return tuple(dict.fromkeys(name for name in names if name != ACCURACY))


def _unknown_metrics(key: str, names: Iterable[str], known: Sequence[str]) -> list[Problem]:
    """The problems of names that are not those of metrics."""
    problems: list[Problem] = []
    for name in names:
        hint = unknown_metric(name, known)
        if hint:
            problems += unknown_name(key, "metric", name, hint).problems
    return problems


def _device(top: TopKeys) -> str:
    """The device, with "auto" resolved. Entries that are not trained need the CPU. Raises
    WrongConfig for an unknown device.
    """
    if top.device != "auto":
        if not is_device(top.device):
            raise unknown_name(
                "device", "device", top.device, "use 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'"
            )
        return top.device
    if torch.cuda.is_available() and not top.train_only:
        return "cuda"
    return "cpu"
