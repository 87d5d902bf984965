"""``settle``: an experiment's values resolved and checked, before any data are read."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fedstill import manifest
from fedstill.config.client_models import checked_models
from fedstill.config.experiment import Experiment, refuse_no_experiment
from fedstill.config.named_tables import Named, fields_of, read_named, resolved_name, schedules
from fedstill.config.settings import NamedTables, Settings
from fedstill.config.tables import (
    NO_STREAM,
    SITES,
    ClientsTable,
    DataTable,
    FlowerTable,
    StreamTable,
    TopKeys,
    package_tables,
)
from fedstill.config.unknown_keys import named_better
from fedstill.config.unseen_data import NO_DATA, unseen_kind
from fedstill.continual.task_test import TASK_TEST, TaskTests
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.census import CENSUS, CensusStages
from fedstill.core.errors import (
    ConfigError,
    UnknownKeys,
    UnknownName,
    on_one_line,
    suggestion,
)
from fedstill.core.extensions import StageProvider
from fedstill.core.fields import (
    Count,
    PackageTable,
    as_table,
    checked,
    fields_of_record,
    read_record,
    shown,
)
from fedstill.core.files import refuse_windows_path
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.schedule import Schedule
from fedstill.core.topology import Topology
from fedstill.core.user_code import returned
from fedstill.data.form import cut_times
from fedstill.data.sources.load import likely_kind, local_folder
from fedstill.engines.precision import check_machine, check_precision
from fedstill.measures.choice import measures
from fedstill.methods.fit import FIT, FITTING, FitStage
from fedstill.methods.ridge import NO_TRAINING, RIDGE, RidgeStage

# Paths and data sets' names: relative to the config's folder in a config, absolute in a run's
# config.toml.


def whole_path(path: str, base: Path | None, key: str) -> Path:
    """A path of a config as an absolute one; raises ConfigError naming the key if it cannot be a
    path.
    """
    refuse_windows_path(path, key)
    try:
        place = ((base or Path.cwd()) / Path(path).expanduser()).resolve()
        place.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{key} = {shown(path)} cannot be a path: {on_one_line(error)}"
        ) from error
    return place


FILE_SUFFIXES = (".csv", ".gz", ".npz", ".parquet", ".py", ".tsv", ".zip")
"""How the names of files of data end."""


def resolved_data_name(name: str, base: Path | None, key: str, folder: str = "") -> str:
    """A data set's name, or the absolute path of a file or a folder; a run's directory is none.

    folder: the folder of data sets that the config names. Raises ConfigError naming the key if it
    cannot be a path, or is empty.
    """
    if not name:
        raise ConfigError(
            f"{key} = '' names no data; leave it out, or name a data set, a file or a folder"
        )
    if name in registry.names("dataset"):
        return name
    refuse_windows_path(name, key)
    path, colon, attribute = name.partition(":")
    place = whole_path(path, base, key)
    if (place / "journal.jsonl").is_file():
        return name
    # The path of a file that is absent is resolved, too, so that the error about it names the place
    # beside the config.
    is_path = place.exists() or _can_only_be_path(path, folder)
    return str(place) + colon + attribute if is_path else name


def _can_only_be_path(name: str, folder: str) -> bool:
    """Whether a relative name of data is neither that of a folder of data sets nor, as owner/name,
    one on the hub.
    """
    if name.startswith(("/", "~")):
        return False
    is_nested = name.startswith(".") or name.count("/") > 1
    return is_nested or (name.endswith(FILE_SUFFIXES) and not local_folder(name, folder or None))


# The method of an experiment: found, built, and what it declares checked against the names that
# there are.


OF_STAGES = ("plans", "personal", "labelled", "reusable")
"""What a method says by stage."""


def read_method(experiment: Experiment) -> tuple[Named, Method]:
    """The method and the table that names it; raises ConfigError for what a user's class declares
    and there is not.
    """
    named = read_named("method", experiment.table("method"), experiment.base)
    built = named.build()
    if not isinstance(built, Method):
        raise ConfigError(
            f"method.name = {named.entry.name!r} is a {type(built).__name__}, not a fedstill.Method"
        )
    what = f"method {named.label}"
    _check_declared(what, built, experiment.base)
    returned(built.requires(), Need, built.requires, "flags of fedstill.Need")
    return named, built


def _check_declared(what: str, method: Method, base: Path | None) -> None:
    """Raise ConfigError where a user's class declares what is of another type, or names what there
    is not.
    """
    for name, (kind, how) in _TYPES.items():
        if is_users_own(method, name) and not isinstance(value := getattr(method, name), kind):
            raise ConfigError(f"{what}: {name} = {shown(value)} must be {how}")
    stages = method.stages | SHARED_STAGES
    for name in OF_STAGES:
        if not is_users_own(method, name):
            continue
        for stage in getattr(method, name):
            if stage not in stages:
                raise UnknownName("stage", str(stage), stages, f"{what}, {name}")
    if is_users_own(method, "schedule"):
        _, options = fields_of("topology", method.topology, base)
        for key in sorted(method.schedule.keys() - options.keys() - {"task_end"}):
            raise UnknownName(
                "option", key, options, f"{what}, schedule of topology {method.topology}"
            )
    for stage, plan in method.plans.items():
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"{what}: plans[{stage!r}] = {shown(plan)} must be a Plan, such as Plan(epochs=1)"
            )
    if not method.stages & method.plans.keys():
        some = f"{{{min(method.stages, default='train')!r}: Plan(epochs=1)}}"
        todo = f"give it one, such as plans = {some}; Plan(epochs=0) trains nothing"
        raise ConfigError(f"{what}: none of its stages has a plan: {todo}")


def is_users_own(method: Method, name: str) -> bool:
    """Whether an attribute of a method is defined in a user's class, and not in one of the
    library's.
    """
    owner = next(kind for kind in type(method).__mro__ if name in vars(kind))
    return owner.__module__.partition(".")[0] != "fedstill"


_A_SET = (Set, "a frozenset of names, such as frozenset({'train'})")
_TYPES: Mapping[str, tuple[Any, str]] = {
    "stages": _A_SET,
    "personal": _A_SET,
    "labelled": _A_SET,
    "reusable": _A_SET,
    "plans": (Mapping, "a dict of stages to plans, such as {'train': Plan(epochs=1)}"),
    "schedule": (Mapping, "a dict of options of the topology, such as {'before': 'head'}"),
}
"""What each declaration must be: its type, and in words."""


# The tables of outer packages: read, and what they change in the rest of a config.


def read_package_tables(experiment: Experiment) -> dict[str, PackageTable]:
    """The tables of outer packages, by name."""
    return {
        name: record.read(experiment.table(name), name) for name, record in package_tables().items()
    }


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
    if settings.named.stream.values.get("column") and settings.named.partition.values.get("column"):
        raise ConfigError(
            "stream.column and partition.column both need a column of their own; leave one of them "
            "out"
        )


SHARED_STAGES = frozenset({FIT, RIDGE, CENSUS, TASK_TEST})
"""Stages that a method need not know itself."""


def schedule_of(method: Method, topology: Topology, stream_kind: str) -> Schedule:
    """A run's schedule: the topology's stages, and those that method and tasks ask for."""
    providers: list[StageProvider] = [FitStage(), RidgeStage()]
    if stream_kind == SITES and not method.personal:
        providers.append(TaskTests())
    if Need.LABEL_COUNTS in method.requires():
        providers.append(CensusStages())
    return Schedule(method, topology, tuple(providers))


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


PEERS = "peer_to_peer"


def check_rounds(settings: Settings) -> None:
    """Raises ConfigError where rounds, topology and tasks do not go together."""
    rounds = settings.rounds
    tasks = settings.stream.tasks
    if settings.named.topology.name != PEERS:
        return
    if tasks > 1 and rounds != tasks:
        raise ConfigError(
            f"rounds: peer_to_peer has one exchange a task; set rounds = {tasks}, as stream.tasks "
            "says"
        )
    if tasks == 1 and rounds > 1 and not settings.exchange_each_round:
        raise ConfigError(
            "rounds: peer_to_peer is one shot; set rounds = 1, or query.again = 'mixed' to ask "
            "again with new data"
        )


# settle: an experiment's values resolved and checked, before any data are read.


DEFAULT_CLIENTS = 20

DEFAULT_MODELS = {
    "image": "cnn",
    "table": "mlp",
    "vector": "mlp",
    "series": "series_cnn",
    "text": "bag",
}
"""The model of each kind of examples where none is named."""


def settle(experiment: Experiment, here: bool = True) -> Settings:
    """Resolve and check every value; raises ConfigError with one line that names the key and what
    to write.

    here: whether this machine is to run it. A run that is only read may have had a device that this
    machine lacks.
    """
    refuse_no_experiment(experiment)
    try:
        settings = _settled(experiment)
    except UnknownKeys as error:
        raise named_better(error, experiment.tree, experiment.base) from error
    if here:
        check_machine(settings.precision, settings.device)
    return settings


def _settled(experiment: Experiment) -> Settings:
    base = experiment.base
    top = _top(experiment)
    tables = read_package_tables(experiment)
    top = with_table_defaults(top, tables, experiment)
    data = _data(experiment)
    named_method, method = read_method(experiment)
    clients = _number_of_clients(experiment)
    own = read_record(ClientsTable, experiment.table("clients"), "clients")
    flower = _flower(experiment)
    deployed = top.engine == "flower" and bool(flower.federation)
    failures = own.failures or ("tolerate" if deployed else "stop")
    models = checked_models(
        own.models, clients, base, lambda name: resolved_name("model", name, base)
    )
    named_topology = read_named(
        "topology",
        experiment.table("topology"),
        base,
        method.topology,
        schedules(method.topology, method.schedule),
    )
    named_stream, stream = read_stream(experiment, top.rounds)
    named = NamedTables(
        named_method,
        read_named(
            "model", experiment.table("model"), base, _default_model(experiment, data, flower)
        ),
        read_named("partition", experiment.table("partition"), base),
        named_topology,
        named_stream,
    )
    settings = Settings(
        **as_table(top),
        data=data,
        named=named,
        clients=clients,
        of_clients=replace(own, models=models, failures=failures),
        flower=flower,
        stream=stream,
        tables=tables,
        plans=_plans(method, experiment, named_topology, stream.longest(top.rounds)),
        method=method,
        schedule=schedule_of(method, named_topology.build(), named_stream.name),
        origins=experiment.origins,
    )
    _refuse_contradictions(settings, experiment.device)
    return settings


def _top(experiment: Experiment) -> TopKeys:
    top = read_record(TopKeys, {f.name: getattr(experiment, f.name) for f in fields(TopKeys)}, "")
    base, own = experiment.base, {"threads": _threads(top.threads), "device": _device(top)}
    top = replace(
        top,
        **own,
        measure=tuple(resolved_name("measure", name, base) for name in top.measure),
        start_from=str(whole_path(top.start_from, base, "start_from")) if top.start_from else "",
    )
    check_precision(top.precision, top.device)
    measures(top.measure)
    return top


def _data(experiment: Experiment) -> DataTable:
    data, base = read_record(DataTable, experiment.table("data"), "data"), experiment.base
    source = data.public_from
    return replace(
        data,
        name=resolved_data_name(data.name, base, "data.name", data.folder),
        public_from=source
        if source in ("train", "noise")
        else resolved_data_name(source, base, "data.public_from", data.folder),
        folder=str(whole_path(data.folder, base, "data.folder")) if data.folder else "",
        tokenizer=_tokenizer(data.tokenizer, base),
        features_of=_backbone(data.features_of, base),
    )


def _backbone(said: Mapping[str, Any] | None, base: Path | None) -> Mapping[str, Any] | None:
    """The network whose features are examples, with whole paths; raises ConfigError where it has no
    name or file.
    """
    if said is None:
        return None
    if absent := [key for key in ("name", "file") if not isinstance(said.get(key), str)]:
        raise ConfigError(
            f'data.features_of needs {absent[0]}: features_of = {{ name = "cnn", file = "RUN" }}'
        )
    name, file = (
        resolved_name("model", said["name"], base),
        str(whole_path(said["file"], base, "data.features_of.file")),
    )
    others = {key: value for key, value in said.items() if key not in ("name", "file")}
    known = fields_of("model", name, base)[1]
    return {
        "name": name,
        "file": file,
        **checked({k: v for k, v in known.items() if k in others}, others, "features_of"),
    }


def _tokenizer(said: str | None, base: Path | None) -> str | None:
    """What makes token ids of texts, a file with its whole path."""
    return (
        str(whole_path(said, base, "data.tokenizer")) if said and said.endswith(".json") else said
    )


def _default_model(experiment: Experiment, data: DataTable, flower: FlowerTable) -> str:
    """The model where none is named: for the kind of examples that the data most likely hold."""
    named = experiment.table("model").get("name")
    if data.features_of:
        return "logistic"
    if named is not None or data.name == "digits":
        return "digits_cnn"
    if data.name == NO_DATA and flower.data == "sites":
        return DEFAULT_MODELS[unseen_kind(data, flower)]
    owner = experiment.table("partition").get("column") or experiment.table("stream").get("column")
    form = {**data.form, **({"owner": owner} if isinstance(owner, str) else {})}
    return DEFAULT_MODELS[likely_kind(data.name, data.folder, data.label_column, form)]


def _number_of_clients(experiment: Experiment) -> int:
    said = {
        t: experiment.table(t)["clients"]
        for t in ("topology", "partition")
        if "clients" in experiment.table(t)
    }
    counts = {
        t: checked({"clients": (Count, ...)}, {"clients": v}, t)["clients"] for t, v in said.items()
    }
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"topology.clients = {counts['topology']} and partition.clients = "
            f"{counts['partition']} differ"
        )
    return int(next(iter(counts.values()), DEFAULT_CLIENTS))


def _plans(method: Method, experiment: Experiment, topology: Named, rounds: int) -> dict[str, Plan]:
    table = experiment.table("plan")
    plans = {**({FIT: FITTING} if topology.values.get("first") == FIT else {}), **method.plans}
    plans |= {RIDGE: NO_TRAINING} if topology.values.get("last") == RIDGE else {}
    for name, value in table.items():
        if isinstance(value, Mapping) and name not in plans:
            raise UnknownName("stage", name, plans, where="plan")
        if name in plans and not isinstance(value, Mapping):
            raise ConfigError(f"plan.{name} = {shown(value)} must be a table, [plan.{name}]")
    common = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    over = [k for k in common if not experiment.origins.get(f"plan.{k}", "file").startswith("file")]
    if idle := [k for k in over if plans and all(k in table.get(stage, {}) for stage in plans)]:
        todo = " and ".join(f"plan.{stage}.{idle[0]}" for stage in plans)
        raise ConfigError(f"plan.{idle[0]} changes nothing, for each stage has its own; set {todo}")
    both = {stage: {**common, **table.get(stage, {})} for stage in plans}
    return {stage: _plan(own, both[stage], f"plan.{stage}", rounds) for stage, own in plans.items()}


def _plan(default: Plan, given: Mapping[str, Any], where: str, rounds: int) -> Plan:
    hints = fields_of_record(Plan)
    plan = Plan(
        **checked({k: (hint, getattr(default, k)) for k, (hint, _) in hints.items()}, given, where)
    )
    if plan.lr_warmup >= rounds:
        raise ConfigError(
            f"{where}.lr_warmup = {plan.lr_warmup} must be below the rounds of the run, {rounds}"
        )
    if plan.lr_schedule == "step" and plan.lr_decay == 1:
        raise ConfigError(
            f"{where}.lr_schedule = 'step' needs lr_decay below 1: what each step multiplies the "
            "rate by"
        )
    if plan.lr_schedule != "cosine":
        return plan
    plan = replace(plan, lr_rounds=plan.lr_rounds or rounds)
    if plan.lr_rounds <= plan.lr_warmup:
        raise ConfigError(
            f"{where}.lr_rounds = {plan.lr_rounds} must be above lr_warmup = {plan.lr_warmup}"
        )
    return plan


def _flower(experiment: Experiment) -> FlowerTable:
    flower = read_record(FlowerTable, experiment.table("flower"), "flower")
    if flower.federation:
        return replace(
            flower,
            federation=str(whole_path(flower.federation, experiment.base, "flower.federation")),
        )
    if flower.data == "sites":
        raise ConfigError(
            "flower.data = 'sites' needs flower.federation, the folder that `fedstill deploy init` "
            "made"
        )
    return flower


def _threads(value: Any) -> tuple[int, int]:
    if value == "auto":
        return 1, 1
    return (value, value) if isinstance(value, int) else value


def _device(top: TopKeys) -> Any:
    if top.device != "auto":
        return top.device
    return "cuda" if torch.cuda.is_available() and not top.train_only else "cpu"


def _refuse_contradictions(settings: Settings, device: str) -> None:
    if device == "auto" and settings.engine == "flower" and settings.flower.federation:
        todo = "name 'cpu' or 'cuda', which the server and all sites then need"
        raise ConfigError(
            "device = 'auto' would be the server's choice, and sites may have other devices: "
            f"{todo}"
        )
    if (
        settings.lives
        and settings.engine == "flower"
        and (settings.flower.federation or settings.flower.grid == "ray")
    ):
        raise ConfigError(
            f"{settings.lives[0]!r} exists in this process only; put it in a file, and name that"
        )
    if settings.start_from_partial and not settings.start_from:
        raise ConfigError(
            "start_from_partial = true needs start_from, the model of which parts are taken"
        )
    if settings.train_only and not settings.start_from:
        raise ConfigError(
            "train_only needs start_from, the model whose other entries stay as they are"
        )
    if settings.train_only and settings.device != "cpu":
        raise ConfigError(
            "train_only keeps entries in the CPU's memory; leave device out, or train all entries"
        )
    if settings.train_only and settings.of_clients.models:
        raise ConfigError(
            "train_only keeps entries of one network, and clients.models names others; leave one "
            "out"
        )
    if settings.start_from and settings.engine == "flower" and settings.flower.federation:
        raise ConfigError(
            "start_from names a model on this machine, which sites lack; leave flower.federation "
            "out"
        )
    check_rounds(settings)
    refuse_with_stream(settings)
    for part in manifest.config_checks():
        check = part.load()
        check(settings)
