"""The configuration of one run: what may be written, where each value came from, one clear line for what is wrong."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fedstill import registry
from fedstill.errors import ConfigError, UnknownName
from fedstill.experiment.config.checking import Fields, checked, on_one_line, shown
from fedstill.fields import Count, CountOrZero, NonNegative, Positive, PositiveShare, Seed
from fedstill.records import Plan
from fedstill.wire.privacy import Privacy

TOP: Fields = {
    "seed": (Seed, 0),
    "rounds": (Count, 20),
    "engine": (Literal["serial", "pooled", "vectorised", "auto", "flower"], "pooled"),
    "threads": (tuple[Count, Count] | Count | Literal["auto"], "auto"),
    "device": (Literal["cpu", "cuda", "auto"], "cpu"),
    "precision": (Literal["fp32", "bf16", "tf32"], "fp32"),
    "reuse": (bool, True),
    "start_from": (str, ""),
    "measure": (tuple[str, ...], ("local",)),
    "measure_every": (Count, 10),
}
"""The keys outside all tables."""

DATA: Fields = {
    "name": (str, "digits"),
    "folder": (str, ""),
    "image_column": (str, ""),
    "label_column": (str, ""),
    "augment": (tuple[Literal["crop", "crop_reflect", "flip", "cutout", "rotation"], ...], ()),
    "train_size": (CountOrZero, 0),
    "test_size": (CountOrZero, 0),
    "public": (CountOrZero, 0),
    "public_from": (str, "train"),
    "public_labels": (bool, True),
    "public_resize": (bool, False),
}
"""``[data]``: which set, how training images vary, how much of it (0 = all), stratified; the public set."""

CLIENTS: Fields = {
    "quorum": (PositiveShare, 0.5),
    "norm_limit": (Positive, 10.0),
    "models": (tuple[str | dict[str, Any], ...] | dict[str, Any], ()),
}
"""``[clients]``: when a stage counts, and whose architectures are other than the server's."""

FLOWER: Fields = {
    "federation": (str, ""),
    "grid": (Literal["loopback", "ray"], "loopback"),
    "data": (Literal["partition", "sites"], "partition"),
    "classes": (tuple[str, ...], ()),
    "shape": (tuple[Count, Count, Count] | tuple[()], ()),
    "deadline": (Positive, 600.0),
    "ttl": (NonNegative, 0.0),
    "retries": (CountOrZero, 1),
    "poll": (Positive, 1.0),
    "max_mb": (Count, 1024),
}
"""``[flower]``, for ``engine = "flower"``: where clients are, whose data they train on, how long to wait for them."""

QUERY: Fields = {
    "draw": (Literal["none", "single", "multi"], "none"),
    "fewer_than": (Count, 50),
    "least": (Count, 2),
    "most": (Count, 3),
    "seed": (Seed | None, None),
    "classes": (dict[str, tuple[CountOrZero, ...]], {}),
}
"""``[query]``: which classes clients ask for, drawn, or written in ``[query.classes]`` as ``client = [classes]``.

A class can be asked for by a client with ``fewer_than`` examples of it; a "multi" query has ``least`` to ``most``
classes; ``seed``, unset, is the run's.
"""
PRIVACY: Fields = registry.Entry("privacy", "privacy", Privacy).fields
"""``[privacy]``: what is done to logits before they leave a client; off as it is."""

PLAN: Fields = registry.Entry("plan", "plan", Plan).fields
"""``[plan]`` for all stages, ``[plan.STAGE]`` for one; unset, the method's."""

NAMED = {
    "method": ("name", "fedavg"),
    "model": ("name", ""),
    "partition": ("kind", "dirichlet"),
    "topology": ("kind", ""),
}
"""Tables that name a registered thing: under which key, and which one if none is named."""

TABLES = ("data", "clients", "privacy", "flower", "plan", "query", *NAMED)

DEFAULTS: dict[str, dict[str, Any]] = {"dirichlet": {"alpha": 0.1}, "sharding": {"shards": 2}}
"""Values for parameters that a partition asks for and that we choose if nobody does."""


@dataclass(frozen=True)
class Experiment:
    """One run as it was asked for: only what differs from the defaults needs to be said.

    The keys are those of a config file; ``method = "fedntd"`` stands for ``method = {"name": "fedntd"}``. ``origins``
    says where a dotted key came from, ``base`` is the folder that paths are relative to.
    """

    seed: Any = TOP["seed"][1]
    rounds: Any = TOP["rounds"][1]
    engine: Any = TOP["engine"][1]
    threads: Any = TOP["threads"][1]
    device: Any = TOP["device"][1]
    precision: Any = TOP["precision"][1]
    reuse: Any = TOP["reuse"][1]
    start_from: Any = TOP["start_from"][1]
    measure: Any = TOP["measure"][1]
    measure_every: Any = TOP["measure_every"][1]
    data: Any = field(default_factory=dict)
    model: Any = field(default_factory=dict)
    method: Any = field(default_factory=dict)
    partition: Any = field(default_factory=dict)
    topology: Any = field(default_factory=dict)
    plan: Any = field(default_factory=dict)
    clients: Any = field(default_factory=dict)
    privacy: Any = field(default_factory=dict)
    flower: Any = field(default_factory=dict)
    query: Any = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    base: Path | None = None

    def table(self, name: str) -> dict[str, Any]:
        """A table as a mapping; raises ConfigError if it is something else."""
        value = getattr(self, name)
        if isinstance(value, str) and name in (*NAMED, "data"):
            return {NAMED.get(name, ("name", ""))[0]: value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {shown(value)} must be a table, [{name}]")
        return dict(value)

    def with_values(self, values: Mapping[str, Any], origin: str) -> Experiment:
        """The experiment with some dotted keys set, e.g. ``{"method.beta": 0.5}``."""
        tree = {k: getattr(self, k) for k in (*TOP, *TABLES)}
        for key, value in values.items():
            _set(tree, key, value)
        return from_tree(tree, {**self.origins, **dict.fromkeys(values, origin)}, self.base)


def load(path: Path | None, overrides: tuple[str, ...] = ()) -> Experiment:
    """The experiment in a TOML file (none: the defaults), with ``key=value`` overrides: TOML, or else strings."""
    if path is None:
        return Experiment().with_values(parse_overrides(overrides), "command line")
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    origins = dict.fromkeys(_dotted(tree), f"file {path.name}")
    return from_tree(tree, origins, path.parent).with_values(parse_overrides(overrides), "command line")


def from_tree(tree: Mapping[str, Any], origins: Mapping[str, str], base: Path | None) -> Experiment:
    """The experiment of a parsed config; raises ConfigError naming an unknown key and the nearest legal one."""
    for key in tree:
        if key not in TOP and key not in TABLES:
            raise UnknownName("key", key, [*TOP, *TABLES], where="config")
    return Experiment(**tree, origins=origins, base=base)


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, Any]:
    """``("method.beta=0.5",)`` as ``{"method.beta": 0.5}``.

    >>> parse_overrides(("method.beta=0.5", "method=fedntd"))
    {'method.beta': 0.5, 'method': 'fedntd'}
    """
    out: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {text!r} is not of the form key=value, e.g. -s method.beta=0.5")
        try:
            read = tomllib.loads(f"v = {value}")
        except (ValueError, RecursionError):
            read = {"v": value.strip()}
        out[key.strip()] = read["v"] if len(read) == 1 else value.strip()
    return out


def parse_grid(texts: tuple[str, ...]) -> dict[str, list[Any]]:
    """``("method.beta=0.1,1",)`` as ``{"method.beta": [0.1, 1]}``.

    >>> parse_grid(("method.beta=0.1,1", "partition=iid,sharding"))
    {'method.beta': [0.1, 1], 'partition': ['iid', 'sharding']}
    >>> parse_grid(("model.hidden=[8],[8, 8]",))
    {'model.hidden': [[8], [8, 8]]}
    """
    grid = {}
    for text in texts:
        key, _, values = text.partition("=")
        (whole,) = parse_overrides((f"{key}=[{values}]",)).values()
        words = [] if isinstance(whole, list) else [parse_overrides((f"{key}={v}",)) for v in values.split(",")]
        grid[key.strip()] = whole if isinstance(whole, list) else [v for word in words for v in word.values()]
    return grid


def plan_for(default: Plan, given: Mapping[str, Any], where: str) -> Plan:
    """A plan with some of its fields replaced."""
    return Plan(**checked({k: (hint, getattr(default, k)) for k, (hint, _) in PLAN.items()}, given, where))


def as_toml(tree: Mapping[str, Any]) -> str:
    """A resolved config as TOML text; what is left to another value (None) is left out."""
    return tomli_w.dumps(_plain(tree))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        kept = {k: v for k, v in tree[head].items() if k == "clients"} if isinstance(tree.get(head), Mapping) else {}
        tree[head] = {**kept, NAMED[head][0]: value} if head in NAMED and isinstance(value, str) else value
        return
    if head not in tree:
        raise UnknownName("key", key, [*TOP, *TABLES], where="override")
    inner = tree[head]
    if isinstance(inner, str) and head in (*NAMED, "data"):
        inner = {NAMED.get(head, ("name", ""))[0]: inner}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"override {key}: {head} is a value, not a table")
    tree[head] = dict(inner)
    if "." in rest:
        tree[head].setdefault(rest.partition(".")[0], {})
    _set(tree[head], rest, value)


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def fields_of(kind: str, name: str, base: Path | None) -> tuple[registry.Entry, Fields]:
    """A registered thing and what a config may set of it."""
    entry = registry.lookup(kind, name, base)
    try:
        fields = entry.fields
        seeded = kind == "partition" and "seed" in inspect.signature(entry.target).parameters
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} has fields that cannot be read: {on_one_line(error)}") from error
    if seeded:
        fields["seed"] = (Seed | None, None)
    for key, value in DEFAULTS.get(name, {}).items():
        if key in fields and fields[key][1] is ...:
            fields[key] = (fields[key][0], value)
    return entry, fields
