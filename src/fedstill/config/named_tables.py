"""Tables that name a registered object, such as a method, and set its fields. The last part reads
``clients.models``, which assigns networks to clients.

The schema of the fields follows from the object's signature.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fedstill.config.validation import (
    Fields,
    Schema,
    defaults_of,
    is_legal,
    keys_of,
    schema_of,
    unknown_name,
    validated,
    wrong_value,
)
from fedstill.core import descriptions, registry
from fedstill.core.errors import ConfigError, FedstillError, UnknownName, on_one_line
from fedstill.core.fields import Seed, value_text
from fedstill.core.files import named_path
from fedstill.core.registry import short_name
from fedstill.core.user_modules import is_library_module, split_name


@dataclass(frozen=True)
class NameKey:
    """The key under which a table names its object, and the name of the default object."""

    key: str
    default: str
    """Empty if the default depends on other tables."""


NAMED = {
    "method": NameKey("name", "fedavg"),
    "model": NameKey("name", ""),
    "partition": NameKey("kind", "dirichlet"),
    "topology": NameKey("kind", ""),
    "stream": NameKey("kind", "none"),
}
"""The tables that name a registered object."""

NAME_KEYS = {table: name_key.key for table, name_key in NAMED.items()} | {"data": "name"}
"""The key of the name, for all tables that may be written as a name: ``method = "fedntd"`` stands
for ``method.name = "fedntd"``.
"""

PARAMETER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dirichlet": {"alpha": 0.1},
    "sharding": {"shards": 2},
}
"""Values for parameters of partitions that have no default in their signature, by partition."""


@dataclass(frozen=True)
class Named:
    """A registered object that a table names, with a value for each of its fields."""

    kind: str
    name: str
    values: Mapping[str, Any]

    @property
    def entry(self) -> registry.Entry:
        """The registered object."""
        return registry.lookup(self.kind, self.name)

    @property
    def is_live(self) -> bool:
        """Whether the object only exists in this process: it was passed in Python, or a notebook, a
        script or a module of the user's has registered it.
        """
        if self.name.startswith(registry.LIVE):
            return True
        is_ours = is_library_module(str(self.entry.target.__module__))
        return not is_ours and not split_name(self.name).is_code

    @property
    def label(self) -> str:
        """The name in messages and tables, without the folder of a file."""
        return short_name(self.name)

    @property
    def table(self) -> dict[str, Any]:
        """The table of a config that names this object and sets all of its fields."""
        return {NAMED[self.kind].key: self.name, **self.values}

    def build(self) -> Any:
        """Build the object from its fields. Raises ConfigError if it refuses them."""
        try:
            # The entry's preset is part of the values: its fields are defaults of the schema.
            return self.entry.target(**self.values)
        except FedstillError:
            raise
        except Exception as error:  # the constructor of a user's class may raise anything
            message = (
                f"{self.kind} {self.entry.name} cannot be built from these fields: "
                f"{on_one_line(error)}"
            )
            raise ConfigError(message) from error


def read_named(
    kind: str,
    table: Mapping[str, Any],
    base: Path | None,
    default_name: str = "",
    defaults_by_name: Mapping[str, Mapping[str, Any]] | None = None,
) -> Named:
    """The registered object that a table names, with all of its fields.

    ``base``: the folder that paths are relative to. ``default_name``: the name if the table has
    none; empty for the default of ``NAMED``. ``defaults_by_name``: defaults of fields for an
    object of that name, which replace those of its signature. Raises WrongConfig, and
    ConfigError for a file that cannot be used.
    """
    name_key = NAMED[kind]
    fields = dict(table)
    if kind in ("partition", "topology"):
        # The number of clients may be in either table, and is a field of neither object.
        fields.pop("clients", None)
    name = fields.pop(name_key.key, default_name or name_key.default)
    if not isinstance(name, str):
        raise wrong_value(
            f"{kind}.{name_key.key}",
            f"= {value_text(name)} must be a name, a file or an import path",
        )
    resolved = known_name(f"{kind}.{name_key.key}", kind, name, base)

    schema = schema_of_name(kind, name, base)
    defaults = (defaults_by_name or {}).get(name, {})
    legal_defaults = {key: defaults[key] for key in keys_of(schema) if key in defaults}
    values = validated(schema, {**legal_defaults, **fields}, kind)
    if kind == "model":
        values = with_resolved_code(values, base)
    return Named(kind, resolved, values)


def known_name(key: str, kind: str, name: str, base: Path | None) -> str:
    """A name as it stands in a run's config.toml. Raises WrongConfig for the key if no
    registered object of that kind has the name.
    """
    try:
        return resolved_name(kind, name, base)
    except UnknownName as error:
        raise unknown_name(key, kind, error.name, error.advice) from error


def resolved_name(kind: str, name: str, base: Path | None) -> str:
    """A name as it stands in a run's config.toml, in which files have absolute paths.

    Raises UnknownName if there is no such object, and ConfigError for a file that cannot be used.
    """
    registry.lookup(kind, name, base)
    parsed = split_name(name)
    if name.startswith(registry.LIVE) or not parsed.is_file:
        return name
    file = (base or Path.cwd()) / named_path(parsed.path)
    return f"{file.resolve()}{parsed.suffix}"


def with_resolved_code(fields: Mapping[str, Any], base: Path | None) -> dict[str, Any]:
    """The fields of a network, with the resolved names of the networks that it consists of.

    Networks such as ``low_rank`` wrap another one, which they name under ``of``; its own fields are
    in a table in theirs, and may wrap a third one. A ``pair`` names two networks.
    """
    resolved = dict(fields)
    for key, value in fields.items():
        if isinstance(value, Mapping):
            resolved[key] = with_resolved_code(value, base)
        elif isinstance(value, str) and _names_network(key, value):
            resolved[key] = known_name(f"model.{key}", "model", value, base)
    return resolved


def _names_network(key: str, value: str) -> bool:
    """Whether a field of a network names another network. A user's network may have a field
    ``own`` or ``shared`` with another meaning.
    """
    return key == "of" or (key in ("own", "shared") and split_name(value).is_code)


def schema_of_name(kind: str, name: str, base: Path | None) -> Schema:
    """The schema of the fields of a registered object. Raises ConfigError if its signature cannot
    be read.
    """
    return _schema_of_entry(registry.lookup(kind, name, base), name)


@functools.lru_cache(maxsize=1024)
def _schema_of_entry(entry: registry.Entry, name: str) -> Schema:
    """The schema of an entry. ``name``: the name in the config, for messages."""
    fields = dict(descriptions.fields(entry))
    is_seeded = entry.kind == "partition" and "seed" in _partition_parameters(entry)
    if entry.kind == "model":
        fields = _settable(fields)
    if entry.kind == "partition":
        # A config cannot hold an array that a partial function gives a parameter.
        fields = {
            key: (annotation, default)
            for key, (annotation, default) in fields.items()
            if not hasattr(default, "__array__")
        }
    if is_seeded:
        fields["seed"] = (Seed | None, None)
    for key, default in PARAMETER_DEFAULTS.get(name, {}).items():
        if key in fields and fields[key][1] is ...:
            annotation = fields[key][0]
            fields[key] = (annotation, default)
    return schema_of(f"{entry.kind} {short_name(name)}", fields)


def _settable(fields: Fields) -> dict[str, tuple[Any, Any]]:
    """The fields of a network that a config can hold.

    The constructor of another library's network may have others, which keep their defaults. Fields
    without a default stay, so that the config must set them.
    """
    return {
        key: (annotation, default)
        for key, (annotation, default) in fields.items()
        if default is ... or (is_legal(annotation) and _is_plain(default))
    }


def _is_plain(value: Any) -> bool:
    """Whether a config can hold a value.

    >>> _is_plain((1, "a")), _is_plain(print)
    (True, False)
    """
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _partition_parameters(entry: registry.Entry) -> Mapping[str, inspect.Parameter]:
    """The parameters of a partition. Raises ConfigError if it cannot take the labels and the number
    of clients.
    """
    parameters = inspect.signature(entry.target).parameters
    has_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if has_keywords or {"labels", "clients"} <= parameters.keys():
        return parameters
    raise ConfigError(
        f"partition {short_name(entry.name)} has parameters {', '.join(parameters) or 'none'}; "
        "it must have parameters labels and clients, and seed if it draws random numbers"
    )


# Which client has which network: the key ``models`` of ``[clients]``. It has three forms:
#
# - a list of networks: clients have them in turn;
# - a table of names and numbers, or a list of tables with a ``share``: each network has a share of
#   the clients;
# - a table of client ids, such as "3" or "0-2": these clients have the network.
#
# A network is a name, or a table of ``name`` and its fields. All other clients have the server's.


MODELS_KEY = "clients.models"
"""The key of the networks of clients, for messages."""

ID_OR_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

SHARE_TOLERANCE = 1e-6
"""By how much the sum of all shares may differ from 1."""


@dataclass(frozen=True)
class ClientNetwork:
    """A network of clients: its resolved name, and a value for each of its fields."""

    name: str
    fields: Mapping[str, Any]
    is_name_alone: bool = False
    """Whether the config has its name only. The fields are then the network's defaults."""
    share: Any = None
    """The value of ``share`` in its table; None if there is none."""

    @property
    def entry(self) -> str | dict[str, Any]:
        """The network as it stands in a run's config.toml."""
        if self.is_name_alone:
            return self.name
        share = {} if self.share is None else {"share": self.share}
        return {"name": self.name, **share, **self.fields}


@dataclass(frozen=True)
class InTurn:
    """Client 0 has the first network, client 1 the second, and so on, again and again."""

    networks: Sequence[ClientNetwork]
    """Empty if all clients have the server's network."""

    @property
    def entry(self) -> tuple[Any, ...]:
        """The value of the key in a run's config.toml."""
        return tuple(network.entry for network in self.networks)

    def for_clients(self, clients: int) -> list[ClientNetwork | None]:
        """The network of each client; None for the server's."""
        if not self.networks:
            return [None] * clients
        return [self.networks[client % len(self.networks)] for client in range(clients)]


@dataclass(frozen=True)
class ByShare:
    """Each network has a share of the clients, spread evenly over their ids."""

    networks: Sequence[ClientNetwork]
    shares: Sequence[float]
    is_table: bool
    """Whether the config has a table of names and shares, not a list of networks."""

    @property
    def entry(self) -> dict[str, float] | tuple[Any, ...]:
        """The value of the key in a run's config.toml."""
        if not self.is_table:
            return tuple(network.entry for network in self.networks)
        names = [network.name for network in self.networks]
        return dict(zip(names, self.shares, strict=True))

    def for_clients(self, clients: int) -> list[ClientNetwork | None]:
        """The network of each client."""
        return [self.networks[position] for position in spread_by_share(self.shares, clients)]


@dataclass(frozen=True)
class ByClient:
    """Clients that are named by their ids have a network of their own."""

    networks: Mapping[str, ClientNetwork]
    """By the ids as the config has them: ``"3"``, or ``"0-2"`` for a range."""

    @property
    def entry(self) -> dict[str, Any]:
        """The value of the key in a run's config.toml."""
        return {ids: network.entry for ids, network in self.networks.items()}

    def for_clients(self, clients: int) -> list[ClientNetwork | None]:
        """The network of each client; None for the server's.

        Raises WrongConfig for ids that no client has, and for a client with two networks.
        """
        networks: list[ClientNetwork | None] = [None] * clients
        for ids, network in self.networks.items():
            for client in _client_range(ids, clients):
                if networks[client] is not None:
                    raise wrong_value(
                        f"{MODELS_KEY}.{ids}",
                        f"names client {client}, which has a network already",
                        "leave it out of one of them",
                    )
                networks[client] = network
        return networks


NetworkAssignment = InTurn | ByShare | ByClient


def read_assignment(value: Any, base: Path | None) -> NetworkAssignment:
    """The networks of clients as the config assigns them. ``base``: the folder of its paths.

    Raises WrongConfig for networks that are unknown or have wrong fields, for shares that are not
    above 0 or do not add up to 1, and for the share of a client.
    """
    if not isinstance(value, Mapping):
        networks = [
            _network(item, f"{MODELS_KEY}[{position}]", base) for position, item in enumerate(value)
        ]
        if all(network.share is None for network in networks):
            return InTurn(networks)
        return ByShare(networks, _checked_shares(networks), is_table=False)

    if value and all(map(_is_number, value.values())):
        networks = [
            _network_by_name(name, MODELS_KEY, base, share) for name, share in value.items()
        ]
        return ByShare(networks, _checked_shares(networks), is_table=True)
    by_client = {
        str(ids): _network(item, f"{MODELS_KEY}.{ids}", base) for ids, item in value.items()
    }
    for ids, network in by_client.items():
        if network.share is not None:
            raise wrong_value(
                f"{MODELS_KEY}.{ids}.share",
                "has no effect on clients that are named by their ids",
                "remove it, or write a list of networks with shares",
            )
    return ByClient(by_client)


def _network(value: Any, key: str, base: Path | None) -> ClientNetwork:
    """A network of the config: a name, or a table. ``key``: its dotted key, for messages."""
    if isinstance(value, str):
        return _network_by_name(value, key, base)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise wrong_value(
            key,
            f"= {value_text(value)} must be a network's name, or a table of name and its fields",
        )
    name = known_name(f"{key}.name", "model", value["name"], base)
    entries = {str(field): item for field, item in value.items() if field not in ("name", "share")}
    fields = validated(schema_of_name("model", value["name"], base), entries, key)
    return ClientNetwork(name, with_resolved_code(fields, base), share=value.get("share"))


def _network_by_name(name: Any, key: str, base: Path | None, share: Any = None) -> ClientNetwork:
    """The network of a name, with its default fields."""
    resolved = known_name(key, "model", str(name), base)
    fields = defaults_of(schema_of_name("model", resolved, base))
    return ClientNetwork(resolved, fields, is_name_alone=True, share=share)


def _checked_shares(networks: Sequence[ClientNetwork]) -> list[float]:
    """The share of each network. Raises WrongConfig if one has none, or if they do not make 1."""
    shares = [network.share for network in networks if network.share is not None]
    are_legal = all(_is_number(share) and 0 < share <= 1 for share in shares)
    if len(shares) < len(networks) or not are_legal:
        raise wrong_value(
            MODELS_KEY,
            f"has the shares {value_text(shares)}",
            "give every network a share above 0, or none",
        )
    if abs(sum(shares) - 1) > SHARE_TOLERANCE:
        raise wrong_value(
            MODELS_KEY,
            f"has the shares {value_text(shares)}, whose sum is {sum(shares):g}; it must be 1",
        )
    return shares


def spread_by_share(shares: Sequence[float], clients: int) -> list[int]:
    """The position of each client's share. A client gets the one that lacks most clients so far, so
    that all are spread evenly; the first one, if several lack as many.

    >>> spread_by_share([0.5, 0.25, 0.25], 8)
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    counts = [0] * len(shares)
    positions = []
    for client_count in range(1, clients + 1):
        # Rounded, so that errors of floating-point numbers do not decide between equal ones.
        lacking = [
            round(share * client_count - count, 9)
            for share, count in zip(shares, counts, strict=True)
        ]
        position = lacking.index(max(lacking))
        counts[position] += 1
        positions.append(position)
    return positions


def _client_range(ids: str, clients: int) -> range:
    """The clients that ``"3"`` or ``"0-2"`` names. Raises WrongConfig if there are no such
    clients.
    """
    match = ID_OR_RANGE.fullmatch(ids)
    if match is None:
        raise wrong_value(
            f"{MODELS_KEY}.{ids}",
            "does not name a client",
            "write ids, '3' or '0-2', or give all networks shares",
        )
    first = int(match[1])
    last = int(match[2] or first)
    if not first <= last < clients:
        raise wrong_value(f"{MODELS_KEY}.{ids}", f"must name clients from 0 to {clients - 1}")
    return range(first, last + 1)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a part of a config, including keys and all names of code.

    >>> sorted(texts_in({"0": "mine.py", "1": [{"name": "mlp", "hidden": [8]}]}))
    ['0', '1', 'hidden', 'mine.py', 'mlp', 'name']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from texts_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts_in(item)
