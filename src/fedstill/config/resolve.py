"""``settle``: an experiment's values resolved and checked, before any data are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedstill import manifest
from fedstill.config.client_models import checked_models
from fedstill.config.data_table import default_model, read_data, whole_path
from fedstill.config.experiment import Experiment, from_tree, refuse_no_experiment
from fedstill.config.named_tables import Named, known_name, read_named, schedules
from fedstill.config.overrides import COMMAND_LINE
from fedstill.config.settings import NamedTables, Settings
from fedstill.config.stages import (
    PlanTable,
    ReadMethod,
    held_out_share,
    own_plans,
    read_method,
    read_plans,
    schedule_of,
)
from fedstill.config.tables import (
    NO_STREAM,
    SITES,
    ClientsTable,
    DataTable,
    FlowerTable,
    StopTable,
    StreamTable,
    TopKeys,
    package_tables,
)
from fedstill.config.unknown_keys import UnknownKey
from fedstill.config.validation import (
    CONTRADICTION,
    NO_EFFECT,
    NOT_A_TABLE,
    UNKNOWN_KEY,
    UNKNOWN_NAME,
    PackageTable,
    Problem,
    WrongConfig,
    contradiction,
    keys_of,
    model_of,
    model_of_record,
    place_of,
    tuples,
    validated,
)
from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, as_table, shown
from fedstill.core.records import Plan
from fedstill.core.rounds import Schedule
from fedstill.core.screen import Failures
from fedstill.data.form import cut_times
from fedstill.engines.precision import check_machine, check_precision
from fedstill.measures.choice import measures
from fedstill.metrics.classification import ACCURACY, RANKING, RECORDED, unknown_metric


def read_package_tables(experiment: Experiment) -> dict[str, PackageTable]:
    """The tables of outer packages, by name; raises WrongConfig with all of their problems."""
    problems: list[Problem] = []
    tables = {}
    for name, model in package_tables().items():
        try:
            tables[name] = model.read(experiment.table(name), name)
        except WrongConfig as error:
            problems += error.problems
    if problems:
        raise WrongConfig(problems)
    return tables


def with_table_defaults(
    top: TopKeys, tables: Mapping[str, PackageTable], experiment: Experiment
) -> TopKeys:
    """The top keys, with the defaults that packages' tables have for those that nothing sets."""
    defaults = TopKeys()
    for table in tables.values():
        unset = {
            key: value
            for key, value in table.top_defaults.items()
            if key not in experiment.origins and getattr(top, key) == getattr(defaults, key)
        }
        top = replace(top, **unset)
    return top


# The table ``[stream]`` of a config: read, and what in it cannot be meant together is refused.


class ReadStream(NamedTuple):
    """The two halves of ``[stream]``: the kind that it names, and the keys of all kinds."""

    named: Named
    table: StreamTable


def read_stream(experiment: Experiment, rounds: int) -> ReadStream:
    """The kind that ``[stream]`` names with its fields, and the rest; raises ConfigError in one
    line.
    """
    given = {key: _dates_as_texts(tuples(v)) for key, v in experiment.table("stream").items()}
    common = keys_of(StreamTable)
    of_kind = {key: value for key, value in given.items() if key not in common}
    named = read_named("stream", of_kind, experiment.base)
    others = [key for key in given if key != "kind"]
    if named.name == NO_STREAM and others:
        raise contradiction(
            f"stream.{others[0]}",
            "says nothing without tasks",
            "set stream.kind: 'classes', 'domains' or 'drift'",
        )
    if named.name == NO_STREAM:
        return ReadStream(named, StreamTable(tasks=1))
    table = StreamTable.read({k: v for k, v in given.items() if k in common}, "stream")
    cuts = named.values.get("cuts") if named.name == SITES else ()
    if cuts:
        table = _cut_by_time(table, cuts, "tasks" in given)
    table.starts(rounds)
    return ReadStream(named, table)


def refuse_with_stream(settings: Settings) -> None:
    """Raise WrongConfig for what cannot be meant together with tasks."""
    kind = settings.named.stream
    if kind.name == NO_STREAM:
        return
    if settings.on_sites and kind.name != SITES:
        raise contradiction(
            "stream.kind",
            f"= {kind.label!r} cuts data that this process has; sites have tasks of their own",
            "set stream.kind = 'sites'",
        )
    if settings.on_sites and settings.stream.compose != "tasks_first":
        raise contradiction(
            "stream.compose",
            "says how this process splits data, and sites have their own",
            "leave it out",
        )
    if kind.name == SITES and not settings.on_sites:
        raise contradiction(
            "stream.kind",
            "= 'sites' is for sites with data of their own, flower.data = 'sites'",
            "set 'classes', 'domains' or 'drift' here",
        )
    if kind.values.get("column") and settings.named.partition.values.get("column"):
        raise contradiction(
            "stream.column",
            "and partition.column both need a column of their own",
            "leave one of them out",
        )


def _cut_by_time(table: StreamTable, cuts: tuple[str, ...], said: bool) -> StreamTable:
    """The table with as many tasks as the cuts make; raises ConfigError where it says others, or
    for no dates.
    """
    cut_times(cuts)
    tasks = len(cuts) + 1
    if said and table.tasks != tasks:
        raise contradiction(
            "stream.tasks",
            f"= {table.tasks}, and the {len(cuts)} dates of stream.cuts make {tasks} tasks",
            "leave stream.tasks out",
        )
    return table.changed(tasks=tasks)


def _dates_as_texts(value: Any) -> Any:
    """A value in which dates, of which TOML has a type of its own, are texts."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, tuple):
        return tuple(map(_dates_as_texts, value))
    return value


PEERS = "peer_to_peer"


def check_rounds(settings: Settings) -> None:
    """Raises ConfigError where rounds, topology and tasks do not go together."""
    rounds = settings.rounds
    tasks = settings.stream.tasks
    if settings.named.topology.name != PEERS:
        return
    if tasks > 1 and rounds != tasks:
        raise contradiction(
            "rounds",
            f"= {rounds}: peer_to_peer has one exchange a task",
            f"set rounds = {tasks}, as stream.tasks says",
        )
    if tasks == 1 and rounds > 1 and not settings.exchange_each_round:
        raise contradiction(
            "rounds",
            f"= {rounds}: peer_to_peer is one shot",
            "set rounds = 1, or query.again = 'mixed' to ask again with new data",
        )


# settle: an experiment's values resolved and checked, before any data are read.


DEFAULT_CLIENTS = 20


def settle(experiment: Experiment, here: bool = True) -> Settings:
    """Resolve and check every value; raises ConfigError with one line that names the keys and what
    to write.

    here: whether this machine is to run it. A run that is only read may have had a device that this
    machine lacks.
    """
    refuse_no_experiment(experiment)
    parts = Parts(experiment)
    try:
        settings = _settled(parts)
    except WrongConfig as error:
        problems = parts.problems(error)
        raise WrongConfig([_with_advice(one, experiment) for one in problems]) from error
    if here:
        check_machine(settings.precision, settings.device)
    return settings


def _settled(parts: Parts) -> Settings:
    settings = Settings(
        **as_table(parts.top),
        data=parts.data,
        named=NamedTables(
            method=parts.method.named,
            model=parts.model,
            partition=parts.partition,
            topology=parts.topology,
            stream=parts.stream.named,
        ),
        clients=parts.number_of_clients,
        of_clients=parts.clients,
        flower=parts.flower,
        stream=parts.stream.table,
        stop=parts.stop,
        tables=parts.packages,
        plans=parts.plans,
        method=parts.method.built,
        schedule=parts.schedule,
        origins=parts.experiment.origins,
    )
    _refuse_contradictions(settings, parts.experiment.device)
    return settings


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a config, each read and checked when it is first needed."""

    experiment: Experiment

    def problems(self, first: WrongConfig) -> list[Problem]:
        """The problems of all parts; ``first``: those at which settling stopped."""
        problems = dict.fromkeys(first.problems)
        for name, part in vars(Parts).items():
            if not isinstance(part, cached_property):
                continue
            try:
                getattr(self, name)
            except WrongConfig as error:
                problems |= dict.fromkeys(error.problems)
            except ConfigError:
                continue  # another kind of error; settling raises it once these are solved
        return list(problems)

    @property
    def base(self) -> Path | None:
        """The folder that paths are relative to."""
        return self.experiment.base

    @cached_property
    def top(self) -> TopKeys:
        """The keys outside all tables."""
        model = model_of_record(TopKeys)
        given = {key: getattr(self.experiment, key) for key in keys_of(model)}
        top = TopKeys(**validated(model, {**given, **self.experiment.unknown}, ""))
        measure = [known_name("measure", "measure", name, self.base) for name in top.measure]
        start = top.start_from
        if start:
            start = str(whole_path(start, self.base, "start_from"))
        top = replace(
            top,
            threads=_threads(top.threads),
            device=_device(top),
            measure=tuple(measure),
            start_from=start,
            metrics=_metrics(top),
        )
        check_precision(top.precision, top.device)
        measures(top.measure)
        return with_table_defaults(top, self.packages, self.experiment)

    @cached_property
    def packages(self) -> dict[str, PackageTable]:
        """The tables of outer packages, by name."""
        return read_package_tables(self.experiment)

    @cached_property
    def data(self) -> DataTable:
        """``[data]``, with whole paths."""
        return read_data(self.experiment)

    @cached_property
    def method(self) -> ReadMethod:
        """What ``[method]`` names."""
        return read_method(self.experiment)

    @cached_property
    def number_of_clients(self) -> int:
        """How many clients there are."""
        return _number_of_clients(self.experiment)

    @cached_property
    def flower(self) -> FlowerTable:
        """``[flower]``, with whole paths."""
        return _flower(self.experiment)

    @cached_property
    def clients(self) -> ClientsTable:
        """``[clients]``, with all names resolved."""
        table = ClientsTable.read(self.experiment.table("clients"), "clients")
        is_deployed = self.top.engine == "flower" and bool(self.flower.federation)
        failures: Failures = "tolerate" if is_deployed else "stop"
        models = checked_models(table.models, self.number_of_clients, self.base)
        return table.changed(models=models, failures=table.failures or failures)

    @cached_property
    def topology(self) -> Named:
        """What ``[topology]`` names, by default the method's own."""
        method = self.method.built
        options = schedules(method.topology, method.schedule)
        table = self.experiment.table("topology")
        return read_named("topology", table, self.base, method.topology, options)

    @cached_property
    def partition(self) -> Named:
        """What ``[partition]`` names."""
        return read_named("partition", self.experiment.table("partition"), self.base)

    @cached_property
    def model(self) -> Named:
        """What ``[model]`` names, by default a network for the data."""
        default = default_model(self.experiment, self.data, self.flower)
        return read_named("model", self.experiment.table("model"), self.base, default)

    @cached_property
    def stream(self) -> ReadStream:
        """``[stream]``."""
        return read_stream(self.experiment, self.top.rounds)

    @cached_property
    def stop(self) -> StopTable:
        """``[stop]``."""
        return StopTable.read(self.experiment.table("stop"), "stop")

    @cached_property
    def plan_table(self) -> PlanTable:
        """``[plan]``."""
        return read_plans(self.experiment, self.method.built)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plan of each stage: ``[plan]`` over the method's own."""
        rounds = self.stream.table.longest(self.top.rounds)
        return self.plan_table.applied(own_plans(self.method.built, self.topology), rounds)

    @cached_property
    def schedule(self) -> Schedule:
        """The stages of all rounds."""
        return schedule_of(
            self.method.built,
            self.topology.build(),
            self.stream.named.name,
            self.plans,
            sites_test_rounds=self._sites_test_rounds,
        )

    @property
    def _sites_test_rounds(self) -> bool:
        """Whether real sites test the global model on what they hold out, to compare rounds by."""
        on_sites = self.top.engine == "flower" and self.flower.data == "sites"
        is_hidden = any(table.hides_client_models for table in self.packages.values())
        if not on_sites or is_hidden or self.method.built.personal:
            return False
        if not held_out_share(self.plans):
            return False
        if self.top.select_on is None:
            return self.stop.is_active
        return self.top.select_on == "held_out"


BLOCKING = {UNKNOWN_KEY, NO_EFFECT, CONTRADICTION, NOT_A_TABLE}
"""Problems with which a key cannot be what was meant; its value may still be wrong."""


def _with_advice(problem: Problem, experiment: Experiment) -> Problem:
    """A problem with the place of its key, and with what to do about an unknown key."""
    key = problem.key
    table, last = _table_and_key(key, experiment.tree)
    # other unknown keys are deeper, in the fields of a network, and have the advice of its model
    is_in_table = last in _values(experiment.tree, table)
    if problem.code in (UNKNOWN_KEY, NOT_A_TABLE) and is_in_table:
        unknown = UnknownKey(
            table=table,
            key=last,
            tree=experiment.tree,
            base=experiment.base,
            accepts=partial(_accepts, experiment, key),
        )
        problem = replace(problem, hint=unknown.advice)
    return replace(problem, place=place_of(key, experiment.origins))


def _accepts(experiment: Experiment, key: str, other: str) -> bool:
    """Whether a config is accepted with the value of a key under another key."""
    try:
        parts = Parts(_moved(experiment, key, other))
        _settled(parts)
    except WrongConfig as error:
        wrong = [problem.key for problem in parts.problems(error) if problem.code in BLOCKING]
        return other not in wrong
    except ConfigError:
        return True  # what is wrong is something else
    return True


def _table_and_key(key: str, tree: Mapping[str, Any]) -> tuple[str, str]:
    """The table of a dotted key, and the key in it, which may have dots."""
    head, dot, rest = key.partition(".")
    table = tree.get(head)
    if not dot or not isinstance(table, Mapping):
        return "", key
    stage, _, last = rest.partition(".")
    if head == "plan" and last and isinstance(table.get(stage), Mapping):
        return f"plan.{stage}", last
    return head, rest


def _values(tree: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    """The values of a table, such as ``plan.train``; the tree itself for no name."""
    values = tree
    for name in filter(None, table.split(".")):
        values = values[name]
    return values


def _moved(experiment: Experiment, key: str, other: str) -> Experiment:
    """The experiment with the value of a key under another key."""
    table, last = _table_and_key(key, experiment.tree)
    value = _values(experiment.tree, table)[last]
    tree = _without(experiment.tree, [*filter(None, table.split(".")), last])
    values = {other: value}
    if isinstance(value, Mapping) and "." not in other:
        values = {f"{other}.{inner}": value[inner] for inner in value}
    without = from_tree(tree, experiment.origins, experiment.base)
    return without.with_values(values, COMMAND_LINE)


def _without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The tree without the value at a path of keys."""
    first, *rest = path
    if rest:
        return {**tree, first: _without(tree[first], rest)}
    return {key: value for key, value in tree.items() if key != first}


def _number_of_clients(experiment: Experiment) -> int:
    model = model_of("clients", {"clients": (Count, DEFAULT_CLIENTS)})
    counts = {}
    for name in ("topology", "partition"):
        table = experiment.table(name)
        if "clients" in table:
            counts[name] = validated(model, {"clients": table["clients"]}, name)["clients"]
    if len(set(counts.values())) > 1:
        raise contradiction(
            "topology.clients",
            f"= {counts['topology']} and partition.clients = {counts['partition']} differ",
            "leave one of them out",
        )
    return int(next(iter(counts.values()), DEFAULT_CLIENTS))


def _flower(experiment: Experiment) -> FlowerTable:
    flower = FlowerTable.read(experiment.table("flower"), "flower")
    if flower.federation:
        folder = whole_path(flower.federation, experiment.base, "flower.federation")
        return flower.changed(federation=str(folder))
    if flower.data == "sites":
        raise contradiction(
            "flower.data",
            "= 'sites' needs flower.federation, the folder that `fedstill deploy init` made",
        )
    return flower


def _threads(value: Any) -> tuple[int, int]:
    if value == "auto":
        return 1, 1
    return (value, value) if isinstance(value, int) else value


def _metrics(top: TopKeys) -> tuple[str, ...]:
    """The metrics of the run, the one that ranks among them; raises WrongConfig for names that are
    no metrics.
    """
    problems = [_unknown_metric("metrics", name, RECORDED) for name in top.metrics]
    problems.append(_unknown_metric("rank_by", top.rank_by, RANKING))
    wrong = [problem for problem in problems if problem.hint]
    if wrong:
        raise WrongConfig(wrong)
    names = [*top.metrics, top.rank_by]
    return tuple(dict.fromkeys(name for name in names if name != ACCURACY))


def _unknown_metric(key: str, name: str, known: Sequence[str]) -> Problem:
    """The problem of a name that is no metric; without a hint if it is one."""
    return Problem(
        code=UNKNOWN_NAME,
        key=key,
        reason=f"unknown metric {shown(name)}",
        hint=unknown_metric(name, known),
    )


def _device(top: TopKeys) -> Any:
    if top.device != "auto":
        return top.device
    return "cuda" if torch.cuda.is_available() and not top.train_only else "cpu"


def _refuse_contradictions(settings: Settings, device: str) -> None:
    """Raise WrongConfig for values that cannot be meant together. ``device``: as the config has
    it.
    """
    is_flower = settings.engine == "flower"
    if device == "auto" and settings.deployed:
        raise contradiction(
            "device",
            "= 'auto' would be the server's choice, and sites may have other devices",
            "name 'cpu' or 'cuda', which the server and all sites then need",
        )
    if settings.lives and is_flower and (settings.deployed or settings.flower.grid == "ray"):
        raise ConfigError(
            f"{settings.lives[0]!r} exists in this process only; put it in a file, and name that"
        )
    _refuse_with_start(settings)
    check_rounds(settings)
    refuse_with_stream(settings)
    _refuse_selection(settings)
    for part in manifest.config_checks():
        check = part.load()
        check(settings)


def _refuse_selection(settings: Settings) -> None:
    """Raise WrongConfig for keys of ``[stop]`` without effect, and for rounds of several tasks that
    would be compared.
    """
    stop = settings.stop
    if stop.min_delta > 0 and stop.patience == 0:
        raise contradiction(
            "stop.min_delta",
            f"= {stop.min_delta} changes only what stop.patience counts",
            "set stop.patience, or leave stop.min_delta out",
        )
    if settings.selects_round and settings.stream.tasks > 1:
        key = "stop" if settings.stop.is_active else "select_on"
        raise contradiction(
            key,
            "compares rounds, and those of a run with tasks are not comparable: every task changes "
            "what is learned",
            f"leave {key} out, or leave [stream] out",
        )


def _refuse_with_start(settings: Settings) -> None:
    """Raise WrongConfig for what cannot be meant with or without ``start_from``."""
    if settings.start_from_partial and not settings.start_from:
        raise contradiction(
            "start_from_partial", "= true needs start_from, the model of which parts are taken"
        )
    if settings.train_only and not settings.start_from:
        raise contradiction(
            "train_only", "needs start_from, the model whose other entries stay as they are"
        )
    if settings.train_only and settings.device != "cpu":
        raise contradiction(
            "train_only",
            "keeps entries in the CPU's memory",
            "leave device out, or train all entries",
        )
    if settings.train_only and settings.of_clients.models:
        raise contradiction(
            "train_only",
            "keeps entries of one network, and clients.models names others",
            "leave one out",
        )
    if settings.start_from and settings.deployed:
        raise contradiction(
            "start_from",
            "names a model on this machine, which sites lack",
            "leave flower.federation out",
        )
