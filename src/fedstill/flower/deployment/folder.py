"""A federation's folder: what `fedstill deploy init` writes, and what the other commands read from
it.
"""

from __future__ import annotations

import datetime
import io
import ipaddress
import re
import secrets
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.core.errors import ConfigError, Refused, RunExists
from fedstill.core.files import (
    make_folder,
    parse_toml,
    read_toml,
    remove,
    write_secret,
    write_whole,
)
from fedstill.flower.deployment import certificates
from fedstill.version import VERSION

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine's, and by which the machine itself reaches what listens
there.
"""
MAX_CLIENTS = 10_000

SITE = """\
# The data of this site, and what it allows. Paths are relative to this folder.
client = {client}
memory = "memory"        # the client's state between rounds; keep it across restarts

# data = "/data/mine"    # parquet, CSV, .npz or image folders by class; without it, the site can take part in trials only
# tasks = "folders"      # for runs with tasks: folders task1, task2, …; or time_column = "acquired", a column of dates
# public = "/data/public"  # for runs with public data: a copy of the server's set
# tokenizer = "/data/tokenizer.json"  # for runs with a tokenizer's file: a copy of the server's
# accept = ["SHA-256 of a file in memory/offered"]  # accept only these; omit the key to accept all; [] accepts none
# imports = ["mylab.methods:FedMine"]  # code outside fedstill that a config may use; install it here
# files = ["/data/open/flowers"]  # files and folders that a trial may read
# refuse = ["contributions"]  # measures and metrics that this site does not take part in
# evaluate = false       # report no accuracy on this site's test set
# repeat_sums = true     # allow secure sums of several runs on the same data, which can reveal this site's model
# keep_days = 90         # delete a run's state after so many days without a request; 0: never
"""  # noqa: E501


@dataclass(frozen=True)
class Federation:
    """``hosts``: names and addresses under which clients reach the server, the first of them
    preferred. ``listen``: the address the server listens on. ``port``: its one port. ``folder``:
    the folder of all its files. ``clients``: how many numbers clients have had. ``departed``: the
    numbers of clients that have left; no other site gets them, so that a number names one site in
    all journals and certificates.
    """

    folder: Path
    hosts: tuple[str, ...]
    listen: str
    port: int
    clients: int
    departed: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """Host and port as clients and the operator's commands reach the server."""
        return _joined(self.hosts[0], self.port)

    @property
    def app(self) -> Path:
        """The Flower app that runs are submitted as."""
        return self.folder / "flower-app"

    @property
    def server(self) -> Path:
        """What only the server needs: certificate, keys, Flower's own settings."""
        return self.folder / "server"

    @property
    def key(self) -> Path:
        """The operator's key: who has it may start runs."""
        return self.server / "operator.key"

    @property
    def signing_key(self) -> Path:
        """The key by which the server signs its instructions; sites know the public half."""
        return self.server / "signing.key"

    @property
    def local(self) -> str:
        """Host and port as programs on the server's own machine reach it."""
        return _joined(WILDCARDS.get(self.listen, self.listen), self.port)

    def client(self, client: int) -> Path:
        """The folder to bring to a client's machine."""
        return self.folder / f"client{client}"

    def listed_key(self, client: int) -> Path:
        """The public key of a client that is let in."""
        return self.server / "allowed" / f"client{client}.pub"


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def init(
    folder: Path, clients: int, hosts: Sequence[str], *, listen: str, port: int, version: str
) -> Federation:
    """Make a federation's folder; raises RunExists if it holds anything, ConfigError for invalid
    names.
    """
    certificates.require_cryptography()
    if not 1 <= clients <= MAX_CLIENTS:
        raise ConfigError(f"--clients {clients} must be from 1 to {MAX_CLIENTS}")
    _check_hosts((*hosts, listen))
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port {port} must be from 1 to 65535")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunExists(f"{folder} is not empty; choose another folder")
    federation = Federation(folder.resolve(), tuple(hosts), listen, port, clients)
    make_folder(federation.server / "allowed")
    federation.server.chmod(0o700)
    authority = certificates.make_authority(f"fedstill {hosts[0]}")
    certificates.write_authority(federation.folder, authority)
    write_secret(federation.key, new_key())
    certificates.make_signing_key(federation.signing_key)
    _certify(federation, authority)
    for client in range(clients):
        _make_client(federation, client)
    write_app(federation.app, clients, version)
    _write(federation)
    return federation


def renew(federation: Federation, hosts: Sequence[str]) -> Federation:
    """Make the server's certificate again, for more hosts if any are given; clients need no change.

    Raises ConfigError where the authority is not here, or has expired.
    """
    _check_hosts(hosts)
    authority, place = certificates.authority_of(federation.folder), federation.folder / "ca.crt"
    if certificates.last_day(place) <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"{place}, which signs certificates, has expired: make a new federation with `fedstill "
            "deploy init`"
        )
    federation = replace(federation, hosts=tuple(dict.fromkeys((*federation.hosts, *hosts))))
    _certify(federation, authority)
    _write(federation)
    return federation


def rekey(federation: Federation, client: int, *, returns: bool = False) -> Path:
    """Make a client a new key and list it in the place of the old one; the client's folder, made
    again if it is gone.

    ``returns``: whether the client has left, and is a member again. Raises ConfigError for a client
    that the federation does not have, or that has left.
    """
    if not 0 <= client < federation.clients:
        raise ConfigError(f"client {client} must be from 0 to {federation.clients - 1}")
    if client in federation.departed and not returns:
        raise ConfigError(
            f"client {client} has left, and its number stays its own: give a new site the next "
            f"number with `fedstill deploy add {federation.folder} --clients 1`, or add --returns "
            "if the same site comes back"
        )
    departed = tuple(number for number in federation.departed if number != client)
    _write(replace(federation, departed=departed))
    _make_client(federation, client)
    return federation.client(client)


def add_clients(federation: Federation, clients: int) -> tuple[Federation, list[Path]]:
    """Give a federation more clients, with the next numbers; their folders.

    Raises ConfigError for a number of clients that is not possible.
    """
    most = MAX_CLIENTS - federation.clients
    if not 1 <= clients <= most:
        raise ConfigError(f"--clients {clients} must be from 1 to {most}")
    larger = replace(federation, clients=federation.clients + clients)
    numbers = range(federation.clients, larger.clients)
    # First of all: a listed key with a number that is not in use yet would be an error.
    _write(larger)
    for client in numbers:
        _make_client(larger, client)
    write_app(larger.app, larger.clients, VERSION)
    return larger, [larger.client(client) for client in numbers]


def remove_client(federation: Federation, client: int) -> None:
    """Take a client's key from the list, and note that the client has left.

    Raises ConfigError for a client that is not listed.
    """
    path = federation.listed_key(client)
    if not path.is_file():
        raise ConfigError(f"client {client} is not listed: there is no {path}")
    departed = sorted({*federation.departed, client})
    _write(replace(federation, departed=tuple(departed)))
    remove(path)


def load_federation(folder: Path) -> Federation:
    """The federation in a folder; raises ConfigError if there is none."""
    values = _read(
        folder / "federation.toml", "make one with `fedstill deploy init DIR --clients N`"
    )
    try:
        federation = Federation(
            folder=folder.resolve(),
            hosts=tuple(str(host) for host in values["hosts"]),
            listen=str(values["listen"]),
            port=values["port"],
            clients=values["clients"],
            departed=tuple(int(client) for client in values.get("departed", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'federation.toml'} is not one: {error}") from error
    return federation


@dataclass(frozen=True)
class Membership:
    """A client's folder, and the address of the server that it belongs to: host and port."""

    folder: Path
    client: int
    address: str

    @property
    def key(self) -> Path:
        """The client's private key."""
        return self.folder / "client.key"

    @property
    def server_key(self) -> Path:
        """The public key of the server, by which the client knows its instructions."""
        return self.folder / "server.pub"


def membership(folder: Path) -> Membership:
    """The membership in a client's folder; raises ConfigError if there is none."""
    values = _read(folder / "client.toml", "give a folder clientN that `fedstill deploy init` made")
    try:
        return Membership(folder.resolve(), int(values["client"]), str(values["address"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'client.toml'} is not one: {error}") from error


def client_of_key(name: str) -> int | None:
    """The client whose key is listed under a name: 3 for "client3"; None for any other name."""
    match = re.fullmatch(r"client(0|[1-9][0-9]{0,4})", name)
    return int(match[1]) if match else None


def ensure_keys(federation: Federation) -> None:
    """Make the operator's key and the one for instructions where there is none: a federation made
    by an earlier version has none.
    """
    federation.server.chmod(0o700)
    if not federation.key.is_file():
        write_secret(federation.key, new_key())
    if not federation.signing_key.is_file():
        certificates.make_signing_key(federation.signing_key)


def new_key() -> bytes:
    """A secret that nobody can guess, as text."""
    return secrets.token_urlsafe(32).encode()


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by an address that others cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", host):
            raise ConfigError(f"{host!r} is no host name or address")


def _certify(federation: Federation, authority: certificates.Authority) -> None:
    listen = () if federation.listen in WILDCARDS else (federation.listen,)
    # the last are for programs beside the server
    names = dict.fromkeys((*federation.hosts, *listen, *LOOPBACK))
    certificates.make_server(federation.server, authority, list(names))


def _write(federation: Federation) -> None:
    values = asdict(federation)
    del values["folder"]
    values["hosts"] = list(federation.hosts)
    values["departed"] = list(federation.departed)
    write_whole(federation.folder / "federation.toml", tomli_w.dumps(values).encode())


def _make_client(federation: Federation, client: int) -> None:
    ensure_keys(federation)
    folder = federation.client(client)
    make_folder(folder)
    folder.chmod(0o700)
    certificates.make_client(folder / "client.key")
    values = {"client": client, "address": federation.address}
    files = {
        "ca.crt": (federation.server / "ca.crt").read_bytes(),
        "server.pub": federation.signing_key.with_suffix(".pub").read_bytes(),
        "site.toml": SITE.format(client=client).encode(),
        "client.toml": tomli_w.dumps(values).encode(),
    }
    for name, data in files.items():
        if not (folder / name).exists():
            write_whole(folder / name, data)
    write_whole(federation.listed_key(client), (folder / "client.key.pub").read_bytes())


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


# fedstill as a Flower app
#
# Flower wants an app with every run, and would run its code on the server and at every site.
# fedstill does not: both run what is installed there. So the app holds no more than two imports,
# and an app that holds anything else is refused.


MAX_FILE = 1 << 20
"""Bytes of a file of an app that are looked at."""

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstill-app"
version = "{version}"
description = "fedstill on Flower: all it does is in the installed library"
license = "Apache-2.0"
dependencies = []  # Flower would install them at every run: fedstill[flower] {version} must be on every machine already

[tool.hatch.build.targets.wheel]
packages = ["fedstill_app"]

[tool.flwr.app]
publisher = "fedstill"

[tool.flwr.app.components]
serverapp = "fedstill_app.server_app:app"
clientapp = "fedstill_app.client_app:app"

[tool.flwr.app.config]
config = '''
{config}'''
out = ""          # the run's directory on the server; empty: one is made under runs/
resume = false
"""  # noqa: E501

SIDE = '''\
"""The {side} of fedstill."""

from fedstill.flower.apps import {side} as app

__all__ = ["app"]
'''

TRIAL = """\
rounds = 2
threads = 1

[data]
name = "digits"

[topology]
clients = {clients}
"""

CODE = {
    "fedstill_app/__init__.py": b'"""fedstill as a Flower app."""\n',
    **{
        f"fedstill_app/{side}.py": SIDE.format(side=side).encode()
        for side in ("client_app", "server_app")
    },
}
"""All code of the app, by its path in it."""


def write_app(folder: Path, clients: int, version: str) -> None:
    """Write the Flower app: ``flwr run`` in its folder runs a trial; it holds no code but two
    imports.
    """
    make_folder(folder / "fedstill_app")
    trial = TRIAL.format(clients=clients)
    write_whole(folder / "pyproject.toml", PYPROJECT.format(version=version, config=trial).encode())
    for name, code in CODE.items():
        write_whole(folder / name, code)


def require_own_app(packed: bytes) -> None:
    """Raises Refused if an app, packed as Flower packs them, is another one than ``write_app``
    writes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as files:
            names = set(files.namelist())
            code = {name: _read_member(files, name) for name in CODE.keys() & names}
            components = _components(_read_member(files, "pyproject.toml"))
    except (
        Exception
    ) as error:  # a stranger's bytes: whatever reading them raises, they are not this app
        raise Refused(
            f"the app is not fedstill's: it cannot be read ({type(error).__name__})", "app"
        ) from error
    other = sorted(name for name in names if name.endswith(".py") and name not in CODE)
    if other:
        raise Refused(
            f"the app is not fedstill's: it brings code of its own, {other[0][:80]!r}", "app"
        )
    if code != CODE or components != _components(PYPROJECT.encode()):
        raise Refused(
            "the app is not fedstill's: its code is not what `fedstill deploy init` writes", "app"
        )


def _read_member(files: zipfile.ZipFile, name: str) -> bytes:
    with files.open(name) as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"{name} is too large")
    return data


def _components(pyproject: bytes) -> Any:
    tree: Any = parse_toml(pyproject)
    for key in ("tool", "flwr", "app", "components"):
        tree = tree[key] if isinstance(tree, dict) else {}
    return tree
