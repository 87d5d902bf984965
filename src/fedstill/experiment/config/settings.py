"""Settings: an experiment with every value resolved and checked, before any data are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fedstill import registry
from fedstill.engines.cores import lone_threads
from fedstill.engines.precision import check_precision
from fedstill.errors import ConfigError, IncompatibleMethod, UnknownName
from fedstill.experiment.config.checking import checked, on_one_line, shown
from fedstill.experiment.config.client_models import checked_models
from fedstill.experiment.config.experiment import (
    CLIENTS,
    DATA,
    FLOWER,
    NAMED,
    PRIVACY,
    QUERY,
    TOP,
    Experiment,
    fields_of,
    plan_for,
)
from fedstill.experiment.measures.choose import measures
from fedstill.fields import Count
from fedstill.fitting import FIT, FITTING
from fedstill.method import Method
from fedstill.records import Plan
from fedstill.topology import Topology
from fedstill.wire.privacy import Privacy
from fedstill.wire.screen import Rules

DEFAULT_CLIENTS = 20


@dataclass(frozen=True)
class Settings:
    """Every value of a run (``tree``, as it stands in the run's config.toml) and the things built from them."""

    tree: Mapping[str, Any]
    origins: Mapping[str, str]
    method: Method
    topology: Topology
    plans: Mapping[str, Plan]
    rules: Rules
    clients: int
    privacy: Privacy = field(default_factory=Privacy)

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    @property
    def start_from(self) -> str:
        """The model that the run starts from; empty for drawn weights."""
        return str(self.tree.get("start_from", ""))

    @property
    def on_sites(self) -> bool:
        """Whether clients train on data of their own, which the server never sees, and nothing is split here."""
        return "flower" in self.tree and self["flower"]["data"] == "sites"

    @property
    def many_threads(self) -> tuple[int, int]:
        """Torch threads in a stage of many clients, and in one of a single client or a stack of clients."""
        many, one = self.tree["threads"]
        return many, one

    def named(self, table: str) -> tuple[registry.Entry, dict[str, Any]]:
        """The registered thing that a table names, and the fields set for it."""
        values = dict(self.tree[table])
        return registry.lookup(table, values.pop(NAMED[table][0])), values


def settle(experiment: Experiment) -> Settings:
    """Resolve and check every value; raises ConfigError with one line that names the key and what to write."""
    top = checked(TOP, {k: getattr(experiment, k) for k in TOP}, "")
    top["threads"] = _threads(top["threads"])
    top["device"] = _device(top["device"])
    check_precision(top["precision"], top["device"])
    top["measure"] = tuple(_resolved_name("measure", n, experiment.base) for n in top["measure"])
    measures(top["measure"])
    started = str(_place(start, experiment.base, "start_from")) if (start := top.pop("start_from")) else ""
    data = checked(DATA, experiment.table("data"), "data")
    data["name"] = _data_name(data["name"], experiment.base)
    if data["public_from"] not in ("train", "noise"):
        data["public_from"] = _data_name(data["public_from"], experiment.base)
    data["folder"] = str(_place(data["folder"], experiment.base, "data.folder")) if data["folder"] else ""
    rules = checked(CLIENTS, experiment.table("clients"), "clients")
    privacy = Privacy(**checked(PRIVACY, experiment.table("privacy"), "privacy"))
    method, method_values = _thing(experiment, "method", {})
    clients = _clients(experiment)
    rules["models"] = checked_models(
        rules["models"], clients, experiment.base, lambda name: _resolved_name("model", name, experiment.base)
    )
    default = {"topology": method.topology, "model": "digits_cnn" if data["name"] == "digits" else "cnn"}
    topology, topology_values = _thing(experiment, "topology", default, {method.topology: method.schedule})
    model_values = _values(experiment, "model", default)
    partition_values = _values(experiment, "partition", default)
    flower = _flower(experiment)
    if started and top["engine"] == "flower" and flower["federation"]:
        raise ConfigError("start_from names a model on this machine, which sites lack; leave flower.federation out")
    plans = _plans(method, experiment.table("plan"), topology_values)
    _check_rounds(top, topology_values)
    tree = {
        **top,
        **({"start_from": started} if started else {}),
        "data": data,
        "partition": partition_values,
        "topology": {**topology_values, "clients": clients},
        "model": model_values,
        "method": method_values,
        "clients": rules,
        "privacy": {f.name: getattr(privacy, f.name) for f in fields(privacy)},
        **({"flower": flower} if top["engine"] == "flower" else {}),
        "query": _query(experiment.table("query")),
        "plan": {name: {f.name: getattr(p, f.name) for f in fields(p)} for name, p in plans.items()},
    }
    if privacy.on and "noisy_logits" not in method.permits:
        raise IncompatibleMethod(
            f"[privacy] protects logits that clients upload, and method {method_values['name']} uploads none; "
            "leave it out, or choose a method that exchanges logits (hiper_fedkd, fedmd, dsfl)"
        )
    limits = Rules(rules["quorum"], rules["norm_limit"])
    return Settings(tree, experiment.origins, method, topology, plans, limits, clients, privacy)


def as_experiment(settings: Settings) -> Experiment:
    """The experiment that says every resolved value outright."""
    return Experiment(**settings.tree, origins=settings.origins)


Options = Mapping[str, Mapping[str, Any]]
"""Defaults of fields, by the name of the thing they are for."""


def _thing(
    experiment: Experiment, kind: str, default: Mapping[str, str], options: Options | None = None
) -> tuple[Any, dict[str, Any]]:
    key = NAMED[kind][0]
    live = getattr(experiment, kind)
    if isinstance(live, Method):
        given = {f.name: getattr(live, f.name) for f in fields(live)}
        experiment = replace(experiment, method={key: registry.name_of(kind, type(live)), **given})
    values = _values(experiment, kind, default, options)
    entry = registry.lookup(kind, values[key])
    try:
        built = entry.build(**{k: v for k, v in values.items() if k != key})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {entry.name} cannot be made from these fields: {on_one_line(error)}") from error
    if kind == "method" and not isinstance(built, Method):
        raise ConfigError(f"{kind}.{key} = {entry.name!r} is a {type(built).__name__}, not a fedstill.Method")
    return built, values


def _values(
    experiment: Experiment, kind: str, default: Mapping[str, str], options: Options | None = None
) -> dict[str, Any]:
    key, first = NAMED[kind]
    given = experiment.table(kind)
    if kind in ("partition", "topology"):
        given.pop("clients", None)
    name = given.pop(key, default.get(kind, first))
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.{key} = {shown(name)} must be a name, a file or an import path")
    _, fields = fields_of(kind, name, experiment.base)
    own = (options or {}).get(name, {})
    fields = {k: (hint, own.get(k, value)) for k, (hint, value) in fields.items()}
    return {key: _resolved_name(kind, name, experiment.base), **checked(fields, given, kind)}


def _resolved_name(kind: str, name: str, base: Path | None) -> str:
    registry.lookup(kind, name, base)
    path, colon, attribute = name.partition(":")
    return str(((base or Path.cwd()) / path).resolve()) + colon + attribute if path.endswith(".py") else name


def _data_name(name: str, base: Path | None) -> str:
    if name in registry.names("dataset"):
        return name
    path, colon, attribute = name.partition(":")
    place = _place(path, base, "data.name")
    return str(place) + colon + attribute if place.exists() else name


def _place(path: str, base: Path | None, key: str) -> Path:
    """A path as it is written in a config: relative to the config's folder."""
    try:
        place = ((base or Path.cwd()) / Path(path).expanduser()).resolve()
        place.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{key} = {shown(path)} cannot be a path: {on_one_line(error)}") from error
    return place


def _clients(experiment: Experiment) -> int:
    said = {t: experiment.table(t)["clients"] for t in ("topology", "partition") if "clients" in experiment.table(t)}
    counts = {t: checked({"clients": (Count, ...)}, {"clients": v}, t)["clients"] for t, v in said.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"topology.clients = {counts['topology']} and partition.clients = {counts['partition']} differ"
        )
    return int(next(iter(counts.values()), DEFAULT_CLIENTS))


def _plans(method: Method, table: Mapping[str, Any], topology: Mapping[str, Any]) -> dict[str, Plan]:
    plans = {**({FIT: FITTING} if topology.get("first") == FIT else {}), **method.plans}
    for name, value in table.items():
        if isinstance(value, Mapping) and name not in plans:
            raise UnknownName("stage", name, plans, where="plan")
        if name in plans and not isinstance(value, Mapping):
            raise ConfigError(f"plan.{name} = {shown(value)} must be a table, [plan.{name}]")
    common = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    return {
        stage: plan_for(default, {**common, **table.get(stage, {})}, f"plan.{stage}")
        for stage, default in plans.items()
    }


def _flower(experiment: Experiment) -> dict[str, Any]:
    flower = checked(FLOWER, experiment.table("flower"), "flower")
    if flower["federation"]:
        flower["federation"] = str(_place(flower["federation"], experiment.base, "flower.federation"))
    elif flower["data"] == "sites":
        raise ConfigError("flower.data = 'sites' needs flower.federation, the folder that `fedstill deploy init` made")
    return flower


def _query(table: Mapping[str, Any]) -> dict[str, Any]:
    written = table.get("classes", {})
    if isinstance(written, Mapping):
        lists = {str(k): tuple(v) if isinstance(v, list) else v for k, v in written.items()}
        table = {**table, "classes": lists}
    found = checked(QUERY, table, "query")
    for client in found["classes"]:
        if not client.isdecimal():
            raise ConfigError(f"query.classes.{client}: a client is a whole number, e.g. [query.classes] 3 = [7, 9]")
    if found["classes"] and found["draw"] != "none":
        raise ConfigError("query: classes are written and drawn; leave query.draw or [query.classes] out")
    return found


def _threads(value: Any) -> tuple[int, int]:
    if value == "auto":
        return 1, lone_threads()
    return (value, value) if isinstance(value, int) else value


def _device(value: str) -> str:
    there = torch.cuda.is_available()
    if value == "cuda" and not there:
        raise ConfigError(
            "device = 'cuda': torch sees no CUDA device here; set device = 'cpu', or install torch for CUDA"
        )
    return ("cuda" if there else "cpu") if value == "auto" else value


def _check_rounds(top: Mapping[str, Any], topology: Mapping[str, Any]) -> None:
    if topology["kind"] == "peer_to_peer" and top["rounds"] > 1:
        raise ConfigError("rounds: peer_to_peer is one shot; set rounds = 1")
