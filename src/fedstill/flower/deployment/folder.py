"""A federation's folder, which `fedstill deploy init` writes and other commands read."""

from __future__ import annotations

import datetime
import io
import ipaddress
import re
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    remove_files,
    remove_folder,
    write_secret,
    write_whole,
)
from fedstill.flower.deployment import certificates
from fedstill.version import VERSION

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses, and the loopback addresses under which the machine itself reaches a server
that listens on them.
"""
MAX_CLIENTS = 10_000
MAX_PORT = 65_535

SITE = """\
# The data of this site, and what it allows. Paths are relative to this folder.
client = {client}
memory = "memory"        # the client's state between rounds; keep it across restarts

# data = "/data/mine"    # parquet, CSV, .npz or image folders by class; without it, the site can take part in trials only
# tasks = "folders"      # for runs with tasks: folders task1, task2, …; or time_column = "acquired", a column of dates
# public = "/data/public"  # for runs with public data: a copy of the server's set
# tokenizer = "/data/tokenizer.json"  # for runs with a tokenizer file: a copy of the server's
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
    """A federation.

    ``hosts``: names and addresses under which clients reach the server; the first one is preferred.
    ``listen``: the address that the server listens on. ``port``: its only port. ``folder``: the
    folder of the federation. ``clients``: the number of clients so far, including those that have
    left. ``departed``: the numbers of clients that have left. They are not assigned to other sites,
    so that a number refers to one site in all journals and certificates.
    """

    folder: Path
    hosts: tuple[str, ...]
    listen: str
    port: int
    clients: int
    departed: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """The host and port under which clients and the operator's commands reach the server."""
        return _joined(self.hosts[0], self.port)

    @property
    def app(self) -> Path:
        """The folder of the Flower app of all runs."""
        return self.folder / "flower-app"

    @property
    def server(self) -> Path:
        """The folder of the server's own files: certificate, keys and Flower's settings."""
        return self.folder / "server"

    @property
    def key(self) -> Path:
        """The file of the operator's key; whoever has it can start runs."""
        return self.server / "operator.key"

    @property
    def signing_key(self) -> Path:
        """The file of the server's key for signing instructions; sites have the public key."""
        return self.server / "signing.key"

    @property
    def local(self) -> str:
        """The host and port under which programs on the server's own machine reach it."""
        return _joined(WILDCARDS.get(self.listen, self.listen), self.port)

    def client(self, client: int) -> Path:
        """The folder to copy to a client's machine."""
        return self.folder / f"client{client}"

    def listed_key(self, client: int) -> Path:
        """The file of the public key of an admitted client."""
        return self.server / "allowed" / f"client{client}.pub"


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def init(
    folder: Path, clients: int, hosts: Sequence[str], *, listen: str, port: int, version: str
) -> Federation:
    """Create a federation's folder; raises RunExists if it is not empty, and ConfigError for
    invalid names.
    """
    certificates.require_cryptography()
    if not 1 <= clients <= MAX_CLIENTS:
        raise ConfigError(f"--clients {clients} must be from 1 to {MAX_CLIENTS}")
    _check_hosts(hosts)
    _check_host(listen)
    if not 1 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port} must be from 1 to {MAX_PORT}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunExists(f"{folder} is not empty; choose another folder")
    federation = Federation(
        folder=folder.resolve(),
        hosts=_canonical_hosts(hosts),
        listen=canonical_host(listen),
        port=port,
        clients=clients,
    )
    make_folder(federation.server / "allowed")
    federation.server.chmod(0o700)
    authority = certificates.make_authority(f"fedstill {federation.hosts[0]}")
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
    """Renew the server's certificate, optionally for additional hosts; clients need no change.

    Raises ConfigError if the authority is missing or has expired.
    """
    _check_hosts(hosts)
    authority, place = certificates.authority_of(federation.folder), federation.folder / "ca.crt"
    if certificates.last_day(place) <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"{place}, which signs certificates, has expired: create a new federation with "
            "`fedstill deploy init`"
        )
    federation = replace(federation, hosts=_canonical_hosts((*federation.hosts, *hosts)))
    _certify(federation, authority)
    _write(federation)
    return federation


def rekey(federation: Federation, client: int, *, returns: bool = False) -> Path:
    """Create a new key for a client, list it in place of the old one, and return the client's
    folder, which is created again if it is missing.

    ``returns``: whether the client has left, and becomes a member again. Raises ConfigError for a
    client that does not belong to the federation, or that has left.
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
    """Add clients with the next numbers to a federation, and return their folders.

    Raises ConfigError for an invalid number of clients.
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
    """Remove a client's key from the list, and record that the client has left.

    Raises ConfigError for a client that is not listed.
    """
    path = federation.listed_key(client)
    if not path.is_file():
        raise ConfigError(f"client {client} is not listed: there is no {path}")
    departed = sorted({*federation.departed, client})
    _write(replace(federation, departed=tuple(departed)))
    remove(path)


def load_federation(folder: Path) -> Federation:
    """Read the federation in a folder; raises ConfigError if there is none."""
    values = _read(
        folder / "federation.toml",
        "create a federation with `fedstill deploy init DIR --clients N`",
    )
    try:
        federation = Federation(
            folder=folder.resolve(),
            hosts=_canonical_hosts(str(host) for host in values["hosts"]),
            listen=canonical_host(str(values["listen"])),
            port=_number(values, "port", MAX_PORT),
            clients=_number(values, "clients", MAX_CLIENTS),
            departed=tuple(int(client) for client in values.get("departed", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'federation.toml'} is not a valid federation: {error}"
        ) from error
    return federation


def _number(values: Mapping[str, Any], key: str, largest: int) -> int:
    """A whole number in a file, from 1 on. Raises ValueError for anything else."""
    value = values[key]
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"{key} = {value!r} must be a whole number from 1 to {largest}")
    return value


@dataclass(frozen=True)
class Membership:
    """A client's folder, and the address of its server: host and port."""

    folder: Path
    client: int
    address: str

    @property
    def key(self) -> Path:
        """The file of the client's private key."""
        return self.folder / "client.key"

    @property
    def server_key(self) -> Path:
        """The file of the server's public key, with which the client verifies instructions."""
        return self.folder / "server.pub"


def membership(folder: Path) -> Membership:
    """Read the membership in a client's folder; raises ConfigError if there is none."""
    values = _read(
        folder / "client.toml", "use a folder clientN that `fedstill deploy init` created"
    )
    try:
        return Membership(folder.resolve(), int(values["client"]), str(values["address"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'client.toml'} is not a valid membership: {error}") from error


def client_of_key(name: str) -> int | None:
    """The client of a name in the list of keys: 3 for "client3"; None for other names."""
    match = re.fullmatch(r"client(0|[1-9][0-9]{0,4})", name)
    return int(match[1]) if match else None


def ensure_keys(federation: Federation) -> None:
    """Create the operator's key and the key for instructions if they are missing, as in federations
    created by an earlier version.
    """
    federation.server.chmod(0o700)
    if not federation.key.is_file():
        write_secret(federation.key, new_key())
    if not federation.signing_key.is_file():
        certificates.make_signing_key(federation.signing_key)


def new_key() -> bytes:
    """A random secret as text."""
    return secrets.token_urlsafe(32).encode()


def canonical_host(host: str) -> str:
    """An address as certificates contain it: ``2001:db8::1`` for ``2001:DB8:0::1``; a name
    unchanged.
    """
    address = _address(host)
    if address is None:
        return host
    return str(address)


def _canonical_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """Distinct names and canonical addresses, in order."""
    return tuple(dict.fromkeys(map(canonical_host, hosts)))


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address of this machine, which others cannot reach."""
    address = _address(host)
    if address is None:
        return host == "localhost"
    return address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_hosts(hosts: Sequence[str]) -> None:
    """Raise ConfigError unless clients can reach a server under these names and addresses."""
    for host in hosts:
        _check_host(host)
        if canonical_host(host) in WILDCARDS:
            raise ConfigError(
                f"--host {host} is not the address of a machine; give a name or an address under "
                f"which clients reach the server, and --listen {host} to listen on all addresses"
            )


def _check_host(host: str) -> None:
    """Raise ConfigError for anything but a name or an address."""
    if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", host):
        raise ConfigError(f"{host!r} is not a host name or an address")
    if ":" in host and _address(host) is None:
        raise ConfigError(
            f"{host!r} is not a host name or an address; if it ends with a port, leave that out"
        )


def _certify(federation: Federation, authority: certificates.Authority) -> None:
    listen = () if federation.listen in WILDCARDS else (federation.listen,)
    # the last ones are for programs on the server's machine
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
# Flower requires an app for every run, and would execute its code on the server and at every site.
# fedstill only executes installed code. Therefore, its app consists of two imports, and any other
# app is refused.


MAX_FILE = 1 << 20
"""The maximum size of a file of an app, in bytes."""

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstill-app"
version = "{version}"
description = "fedstill on Flower: its code is in the installed library"
license = "Apache-2.0"
dependencies = []  # Flower would install them at every run; every machine must already have fedstill[flower] {version}

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
out = ""          # the run's directory on the server; if empty, one is created under runs/
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
"""The code of the app, by its path in the app."""


def write_app(folder: Path, clients: int, version: str) -> None:
    """Write the Flower app, whose code consists of two imports; ``flwr run`` in its folder runs a
    trial.
    """
    make_folder(folder / "fedstill_app")
    trial = TRIAL.format(clients=clients)
    write_whole(folder / "pyproject.toml", PYPROJECT.format(version=version, config=trial).encode())
    for name, code in CODE.items():
        write_whole(folder / name, code)


def require_own_app(packed: bytes) -> None:
    """Raise Refused if an app, packed by Flower, differs from the app that ``write_app`` writes."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as files:
            names = set(files.namelist())
            code = {name: _read_member(files, name) for name in CODE.keys() & names}
            components = _components(_read_member(files, "pyproject.toml"))
    except Exception as error:  # untrusted bytes: any error means that they are not this app
        raise Refused(
            f"the app is not fedstill's: it cannot be read ({type(error).__name__})", "app"
        ) from error
    other = sorted(name for name in names if name.endswith(".py") and name not in CODE)
    if other:
        raise Refused(
            f"the app is not fedstill's: it contains its own code, {other[0][:80]!r}", "app"
        )
    if code != CODE or components != _components(PYPROJECT.encode()):
        raise Refused(
            "the app is not fedstill's: its code differs from that of `fedstill deploy init`",
            "app",
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


# The deletion of a client's files on the server when the client leaves a federation.


CLIENT_FOLDERS = ("updates", "memory")
"""The folders in a run directory with files of single clients: kept replies, and states."""

BEYOND_REACH = (
    "copies of models that sites, users or trackers hold, and models that were published",
    "backups of this machine",
    "data and state at the client's own site, which deletes them itself",
)
"""Copies that no command on the server can delete."""


@dataclass(frozen=True)
class Deletion:
    """The result of a deletion.

    ``deleted``: files and folders. ``left``: descriptions of what was not deleted, with paths.
    """

    deleted: Sequence[Path]
    left: Sequence[str]


def delete_traces(federation: Federation, client: int, runs: Sequence[Path]) -> Deletion:
    """Delete the replies, states and files of a client on this machine, in the directories of runs
    and in the federation's folder.

    Raises DiskFull, and ConfigError if a folder of replies or states is a link.
    """
    deleted: list[Path] = []
    for run in runs:
        deleted += _delete_files(run, client)
    folder = federation.client(client)
    if folder.is_dir():
        remove_folder(folder)
        deleted.append(folder)
    left = [line for run in runs for line in _left_in(run)]
    return Deletion(deleted, [*left, *BEYOND_REACH])


def _delete_files(run: Path, client: int) -> list[Path]:
    """Delete the replies and states of a client in a run directory; returns their paths."""
    deleted: list[Path] = []
    name = re.compile(rf"client{client}-round\d+-stage\d+\.safetensors")
    for folder in CLIENT_FOLDERS:
        names = remove_files(run / folder, lambda entry: name.fullmatch(entry) is not None)
        deleted += [run / folder / deleted_name for deleted_name in sorted(names)]

    # In a simulation, the states of sites are also in the run directory.
    for path in sorted((run / "sites").glob(f"*/client{client}")):
        if path.parent.resolve().parent != run.resolve() / "sites":
            raise ConfigError(f"{path} is a link out of {run}: delete the link, then unlearn again")
        remove_folder(path)
        deleted.append(path)
    return deleted


def _left_in(run: Path) -> Iterator[str]:
    """Descriptions of files in a run directory and its packs that still depend on the client."""
    from fedstill.running.packs import pack_of  # lazy, because clients need little memory

    yield (
        f"{run}: the old model and its checkpoints, and the journal with the client's numbers; "
        "delete the directory when nobody needs it"
    )
    for folder in (run, *run.parents):
        if folder.name and pack_of(folder).is_file():
            yield f"{pack_of(folder)}: a pack with the journal of {run.name}"
