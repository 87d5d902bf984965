"""The programs of a federation: their commands and environment, and how they are started, watched,
and ended with all that they started.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from filelock import FileLock, Timeout

from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.flower import QUIET, check_flower_installed
from fedstill.flower.deployment import certificates
from fedstill.flower.deployment.control import listed
from fedstill.flower.deployment.folder import Federation, Membership, is_loopback

if TYPE_CHECKING:
    import psutil

LISTEN_SECONDS = 180.0
"""How long a server may take to listen; on a busy machine it takes a minute."""


IN_MEMORY = ":flwr-in-memory:"
"""Flower's name of a database that is no file."""


# What is started


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
    command += [str(federation.folder), "--host", federation.listen, "--port", str(federation.port)]
    # Nothing of it outlives the server: keys are in files, and a resumed run is a new one for
    # Flower. A database would take most of the server's time.
    command += ["--database", IN_MEMORY, "--disable-runtime-dependency-installation"]
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
    _check_certificate(federation)
    if not listed(federation):
        raise ConfigError(
            f"{server / 'allowed'} lists no client's public key: without one the server does not "
            "start"
        )
    return [*command, "--enable-supernode-auth"]


def _check_certificate(federation: Federation) -> None:
    """Raise ConfigError for a certificate of the server that has expired, or that programs on this
    machine would refuse.
    """
    path = federation.server / "server.crt"
    remedy = f"run: fedstill deploy renew {federation.folder}"
    until = certificates.last_day(path)
    if until <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{path} expired on {until:%Y-%m-%d}; {remedy}")

    host = federation.local.rpartition(":")[0].strip("[]")
    if host not in certificates.named_hosts(path):
        raise ConfigError(
            f"{path} does not name {host}, by which programs on this machine reach the server; "
            f"{remedy}"
        )


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


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), dict(env))


# Programs under way


@contextmanager
def alone(folder: Path, program_name: str) -> Iterator[None]:
    """While the block runs, no other process enters one for this folder; raises DeployFailed if one
    is in it.
    """
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout:
        raise DeployFailed(
            f"{program_name} already runs from {folder}: stop it first, or leave it"
        ) from None


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A program and whatever it starts, in a group of their own, all ended with this block or this
    process.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    process = subprocess.Popen(list(command), env=dict(env), start_new_session=True, **streams)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """End a program that ``running`` started, and all that it started: asked first, then killed.

    Flower's server detaches what it starts, so that its group alone is not enough.
    """
    import psutil

    # Before anything ends: after a process has ended, its children cannot be found.
    below = descendants(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        below += descendants(process.pid)
    _signal_group(process.pid, signal.SIGKILL)
    for process_below in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process_below.kill()
    process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that a process has started, and those that they have; none if it has ended."""
    import psutil

    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
    return below


def demand_free(federation: Federation) -> None:
    """Raise DeployFailed where something listens on the federation's port already: it would be
    taken for the server.
    """
    if _listens(federation):
        raise DeployFailed(
            f"something listens on {federation.local} already, perhaps a server whose command was "
            "killed: stop it first"
        )


def _listens(federation: Federation) -> bool:
    host, _, port = federation.local.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1):
            return True
    except OSError:
        return False


def wait_for_port(
    federation: Federation, process: subprocess.Popen[bytes], seconds: float = LISTEN_SECONDS
) -> None:
    """Wait until the server answers; raises DeployFailed if it ends or does not."""
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        if process.poll() is not None:
            raise DeployFailed(
                f"the server ended at once, with status {process.returncode}; its output says why"
            )
        if _listens(federation):
            return
        time.sleep(0.3)
    raise DeployFailed(f"the server did not listen on port {federation.port} within {seconds:g} s")
