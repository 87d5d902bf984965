"""The programs of a federation's server, as fedstill starts them, and the list of the clients that
it lets in.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.core.files import make_folder, write_whole
from fedstill.flower import QUIET, check_flower_installed
from fedstill.flower.deployment import certificates
from fedstill.flower.deployment.control import LINK, Control, public_key, when_it_listens
from fedstill.flower.deployment.folder import Federation, Membership, client_of_key, is_loopback

ANSWER_SECONDS = 180.0
"""How long a server may take to answer once it listens; on a busy machine it takes a minute."""


def environment(home: Path) -> dict[str, str]:
    """What Flower's programs are started with: nothing is reported, checked or installed, settings
    are in ``home``.

    No FLWR_* of the shell is handed on: such a setting can switch off what the gate relies on, such
    as the key.
    """
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return {**variables, **QUIET, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}


def use_environment(home: Path) -> None:
    """Give this process the environment in which Flower's programs are started."""
    variables = environment(home)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def program(name: str) -> str:
    """The path of one of Flower's programs; raises ConfigError if it is not installed beside this
    Python.
    """
    check_flower_installed()
    path = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if path is None:
        raise ConfigError(f"there is no program {name}: pip install 'fedstill[flower]'")
    return path


def superlink(federation: Federation, insecure: bool) -> list[str]:
    """The command that starts the server; raises ConfigError for one that would be open to others
    without TLS.
    """
    check_flower_installed()
    server = federation.server
    command = [sys.executable, "-m", "fedstill.flower.deployment.superlink"]
    command += ["--host", federation.listen, "--port", str(federation.port)]
    command += ["--database", str(server / "link.db"), "--disable-runtime-dependency-installation"]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(federation.key)]
    if insecure:
        _check_loopback(federation.listen)
        return [*command, "--insecure"]
    files = {
        "--ssl-ca-certfile": "ca.crt",
        "--ssl-certfile": "server.crt",
        "--ssl-keyfile": "server.key",
    }
    for option, name in files.items():
        if not (server / name).is_file():
            raise ConfigError(
                f"{server / name} is missing: without certificates the server does not start"
            )
        command += [option, str(server / name)]
    if (until := certificates.last_day(server / "server.crt")) <= datetime.datetime.now(
        datetime.UTC
    ):
        raise ConfigError(
            f"{server / 'server.crt'} expired on {until:%Y-%m-%d}; run: fedstill deploy renew "
            f"{federation.folder}"
        )
    if (host := federation.local.rpartition(":")[0].strip("[]")) not in certificates.named_hosts(
        server / "server.crt"
    ):
        raise ConfigError(
            f"{server / 'server.crt'} does not name {host}, by which programs on this machine "
            "reach the server; "
            f"run: fedstill deploy renew {federation.folder}"
        )
    if not listed(federation):
        raise ConfigError(
            f"{server / 'allowed'} lists no client's public key: without one the server does not "
            "start"
        )
    return [*command, "--enable-supernode-auth"]


def check_client(member: Membership, insecure: bool) -> None:
    """Raise ConfigError for a client that would talk to others without TLS, or without its key."""
    check_flower_installed()
    if not member.server_key.is_file():
        raise ConfigError(
            f"{member.server_key} is missing: copy server/signing.pub from the federation's folder "
            "on the server to this place"
        )
    if insecure:
        _check_loopback(member.address.rpartition(":")[0].strip("[]"))
        return
    for path in (member.folder / "ca.crt", member.key):
        if not path.is_file():
            raise ConfigError(f"{path} is missing: without it the client does not start")


def _check_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"--insecure-for-testing is for this machine alone, and {host} is not a loopback "
            "address"
        )


def listed(federation: Federation) -> dict[str, bytes]:
    """{name: public key} of the clients that are let in; raises ConfigError for a file whose name
    is no client's.
    """
    keys: dict[str, bytes] = {}
    for path in sorted((federation.server / "allowed").glob("*.pub")):
        client = client_of_key(path.stem)
        if client is None or client >= federation.clients:
            last = f"client{federation.clients - 1}"
            raise ConfigError(
                f"{path}: the file's name says which client has this key: from client0.pub to "
                f"{last}.pub"
            )
        keys[path.stem] = public_key(path)
        twice = [name for name, key in keys.items() if key == keys[path.stem] and name != path.stem]
        if twice:
            raise ConfigError(
                f"{path} is the key of {twice[0]}, too: each client needs a key of its own"
            )
    return keys


def write_link(federation: Federation, insecure: bool) -> None:
    """Tell the operator's commands where the server is: ``server/flwr/config.toml``."""
    home = federation.server / "flwr"
    make_folder(home)
    link: dict[str, Any] = {"address": federation.local}
    if insecure:
        link["insecure"] = True
    else:
        link["root-certificates"] = str(federation.server / "ca.crt")
    settings = {"superlink": {"default": LINK, LINK: link}}
    write_whole(home / "config.toml", tomli_w.dumps(settings).encode())


def admit(federation: Federation, seconds: float = ANSWER_SECONDS) -> Iterator[str]:
    """Let in the clients whose keys are listed, and nobody else; a line for each change.

    Raises DeployFailed for a key that was revoked.
    """
    control = Control.of(federation)
    keys = listed(federation)
    nodes = when_it_listens(control.nodes, seconds)
    admitted = set()
    for node, (name, key) in nodes.items():
        if keys.get(name) == key:
            admitted.add(name)
        else:
            control.unregister(node)
            yield f"{name or node} is no longer let in: its key is not listed"
    for name in sorted(keys.keys() - admitted):
        try:
            control.register(name, keys[name])
        except DeployFailed as error:
            if "already in use" not in str(error):
                raise
            number = client_of_key(name)
            remedy = (
                f"make client {number} a new one with `fedstill deploy key {federation.folder} "
                f"{number}`"
            )
            raise DeployFailed(
                f"{name}.pub was revoked once, and the server takes no key twice: {remedy}"
            ) from error
        yield f"{name} may connect from now on"
