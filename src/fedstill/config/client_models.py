"""Which client has which network: the key ``models`` of ``[clients]``.

It has three forms. A list is given out in turn. A table of names and numbers, or a list of tables
with a ``share``, is given out by share. A table of client ids, such as ``"3"`` or ``"0-2"``, is
given out by client. A network is a name, or a table of ``name`` and its fields. Clients without a
network of their own have the server's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fedstill.config.named_tables import known_name, schema_of_name, with_resolved_code
from fedstill.config.validation import contradiction, defaults_of, validated
from fedstill.core.fields import shown

KEY = "clients.models"

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

    networks: Sequence[ClientNetwork] = ()
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
                    raise contradiction(
                        f"{KEY}.{ids}",
                        f"names client {client}, which has a network already",
                        "leave it out of one of them",
                    )
                networks[client] = network
        return networks


Assignment = InTurn | ByShare | ByClient


def read_assignment(value: Any, base: Path | None) -> Assignment:
    """The networks of clients as the config assigns them. ``base``: the folder of its paths.

    Raises WrongConfig for networks that are unknown or have wrong fields, and for shares that are
    not above 0 or do not add up to 1.
    """
    if not isinstance(value, Mapping):
        networks = [
            _network(item, f"{KEY}[{position}]", base) for position, item in enumerate(value)
        ]
        if all(network.share is None for network in networks):
            return InTurn(networks)
        return ByShare(networks, _checked_shares(networks), is_table=False)

    if value and all(map(_is_number, value.values())):
        networks = [_network_by_name(name, KEY, base, share) for name, share in value.items()]
        return ByShare(networks, _checked_shares(networks), is_table=True)
    return ByClient({str(ids): _network(item, f"{KEY}.{ids}", base) for ids, item in value.items()})


def _network(value: Any, key: str, base: Path | None) -> ClientNetwork:
    """A network of the config: a name, or a table. ``key``: its dotted key, for messages."""
    if isinstance(value, str):
        return _network_by_name(value, key, base)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise contradiction(
            key, f"= {shown(value)} must be a network's name, or a table of name and its fields"
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
        raise contradiction(
            KEY,
            f"has the shares {shown(shares)}",
            "give every network a share above 0, or none",
        )
    if abs(sum(shares) - 1) > SHARE_TOLERANCE:
        raise contradiction(
            KEY, f"has the shares {shown(shares)}, which make {sum(shares):g}; they must make 1"
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
        raise contradiction(
            f"{KEY}.{ids}",
            "names no client",
            "write ids, '3' or '0-2', or give all networks shares",
        )
    first = int(match[1])
    last = int(match[2] or first)
    if not first <= last < clients:
        raise contradiction(f"{KEY}.{ids}", f"must name clients from 0 to {clients - 1}")
    return range(first, last + 1)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a part of a config, keys among them: whatever names code is one of these.

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
