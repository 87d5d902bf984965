"""settle: an experiment's values resolved and checked, before any data are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.data.sources.likely import likely_kind
from fedstill.engines.cores import lone_threads
from fedstill.engines.precision import check_machine, check_precision
from fedstill.errors import ConfigError, UnknownKeys, UnknownName
from fedstill.experiment.config.client_models import checked_models
from fedstill.experiment.config.experiment import Experiment, refuse_no_experiment
from fedstill.experiment.config.misplaced import named_better
from fedstill.experiment.config.named_tables import (
    Named,
    fields_of,
    read_named,
    resolved_name,
    schedules,
)
from fedstill.experiment.config.of_method import read_method
from fedstill.experiment.config.of_privacy import read_privacy, refuse_unprotected
from fedstill.experiment.config.of_stream import read_stream, refuse_with_stream, with_tasks
from fedstill.experiment.config.paths import resolved_data_name, whole_path
from fedstill.experiment.config.query_table import read_query, refuse_rounds
from fedstill.experiment.config.settings import NamedTables, Settings
from fedstill.experiment.config.tables import ClientsTable, DataTable, FlowerTable, TopKeys
from fedstill.experiment.config.unseen import NO_DATA, unseen_kind
from fedstill.experiment.measures.choose import measures
from fedstill.fields import Count, as_table, checked, fields_of_record, read_record, shown
from fedstill.fitting import FIT, FITTING
from fedstill.method import Method
from fedstill.records import Plan
from fedstill.ridge import NO_TRAINING, RIDGE

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
    privacy, top = read_privacy(experiment, _top(experiment))
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
        privacy=privacy,
        flower=flower,
        query=read_query(experiment.table("query")),
        stream=stream,
        plans=_plans(method, experiment, named_topology, stream.longest(top.rounds)),
        method=method,
        topology=with_tasks(named_topology.build(), method, named_stream.name, stream),
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
        name=resolved_data_name(data.name, base, "data.name"),
        public_from=source
        if source in ("train", "noise")
        else resolved_data_name(source, base, "data.public_from"),
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
        return 1, lone_threads()
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
    refuse_rounds(settings)
    refuse_with_stream(settings)
    refuse_unprotected(settings.privacy, settings.method, settings.named.method.label)
