"""Which client has which network: ``[clients] models`` by list, share or client; the others have
the server's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.config.named_tables import known_name, model_of_name, with_code
from fedstill.config.validation import contradiction, defaults_of, validated
from fedstill.core.fields import shown

KEY = "clients.models"
IDS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
SUM = 1e-6
"""How far shares may be from 1 together."""


def checked_models(said: Any, clients: int, base: Path | None) -> Any:
    """The clients' networks as the config writes them, with names resolved and fields checked.

    A list is given out in turn, or by share if its tables have a ``share``; a table of names and
    numbers is shares; a table of client ids (``"3"``, ``"0-2"``) is by client. A network is a name,
    or a table of ``name`` and its fields. Raises ConfigError in one line that names the key.
    """
    if isinstance(said, Mapping):
        shared = bool(said) and all(_number(v) for v in said.values())
        if shared:
            out: Any = {known_name(KEY, "model", str(k), base): v for k, v in said.items()}
        else:
            out = {str(k): _network(v, f"{KEY}.{k}", base) for k, v in said.items()}
    else:
        out = tuple(_network(v, f"{KEY}[{i}]", base) for i, v in enumerate(said))
    assigned(out, clients)
    return out


def assigned(models: Any, clients: int) -> list[tuple[str, dict[str, Any]] | None]:
    """The network of each client as (name, fields); None for the server's. Takes what
    ``checked_models`` gives.

    Raises ConfigError for shares that are not above 0 or do not make 1.
    """
    if not models:
        return [None] * clients
    if isinstance(models, Mapping) and not all(_number(v) for v in models.values()):
        return _by_client(models, clients)
    entries = (
        [{"name": k, "share": v} for k, v in models.items()]
        if isinstance(models, Mapping)
        else list(models)
    )
    shares = [e["share"] for e in entries if isinstance(e, Mapping) and "share" in e]
    if not shares:
        networks = [_pair(e) for e in entries]
        return [networks[c % len(networks)] for c in range(clients)]
    if len(shares) < len(entries) or not all(_number(s) and 0 < s <= 1 for s in shares):
        raise contradiction(
            KEY,
            f"has the shares {shown(shares)}",
            "give every network a share above 0, or none",
        )
    if abs(sum(shares) - 1) > SUM:
        raise contradiction(
            KEY, f"has the shares {shown(shares)}, which make {sum(shares):g}; they must make 1"
        )
    networks = [_pair(e) for e in entries]
    return [networks[i] for i in dealt(shares, clients)]


def dealt(shares: Sequence[float], clients: int) -> list[int]:
    """Which of several each client gets: the one furthest behind its share, so that they are spread
    evenly.

    >>> dealt([0.5, 0.25, 0.25], 8)
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    counts, out = [0] * len(shares), []
    for k in range(1, clients + 1):
        behind = [s * k - n for s, n in zip(shares, counts, strict=True)]
        out.append(max(range(len(shares)), key=lambda i: (round(behind[i], 9), -i)))
        counts[out[-1]] += 1
    return out


def words(said: Any) -> Iterator[str]:
    """Every text in the config's entry on clients' networks; names of code are among them."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for key, value in said.items():
            yield str(key)
            yield from words(value)
    elif isinstance(said, Sequence):
        for value in said:
            yield from words(value)


def _by_client(models: Mapping[str, Any], clients: int) -> list[tuple[str, dict[str, Any]] | None]:
    out: list[tuple[str, dict[str, Any]] | None] = [None] * clients
    for key, network in models.items():
        ids = IDS.fullmatch(key)
        if not ids:
            raise contradiction(
                f"{KEY}.{key}",
                "names no client",
                "write ids, '3' or '0-2', or give all networks shares",
            )
        first, own = int(ids[1]), _pair(network)
        last = int(ids[2] or first)
        if not first <= last < clients:
            raise contradiction(f"{KEY}.{key}", f"must name clients from 0 to {clients - 1}")
        for client in range(first, last + 1):
            if out[client] is not None:
                raise contradiction(
                    f"{KEY}.{key}",
                    f"names client {client}, which has a network already",
                    "leave it out of one of them",
                )
            out[client] = own
    return out


def _network(said: Any, where: str, base: Path | None) -> Any:
    if isinstance(said, str):
        return known_name(where, "model", said, base)
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        raise contradiction(
            where, f"= {shown(said)} must be a network's name, or a table of name and its fields"
        )
    name = known_name(f"{where}.name", "model", said["name"], base)
    given = {str(k): v for k, v in said.items() if k not in ("name", "share")}
    fields = validated(model_of_name("model", said["name"], base), given, where)
    share = {"share": said["share"]} if "share" in said else {}
    return {"name": name, **share, **with_code(fields, base)}


def _pair(network: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(network, str):
        network = {"name": network}
    name = network["name"]
    fields = {k: v for k, v in network.items() if k not in ("name", "share")}
    defaults = defaults_of(model_of_name("model", name, None))
    return name, {**defaults, **fields}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
