"""The programs of a federation: their commands and environment, and functions that start, watch and
end them together with their child processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from filelock import FileLock, Timeout

from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.flower import QUIET, check_flower_installed
from fedstill.flower.deployment import certificates
from fedstill.flower.deployment.control import listed
from fedstill.flower.deployment.folder import Federation, Membership, is_loopback
from fedstill.flower.deployment.reach import host_of, without_proxy

if TYPE_CHECKING:
    import psutil

IN_MEMORY = ":flwr-in-memory:"
"""Flower's name for a database in memory."""


# Commands and their environment


def server_environment(federation: Federation) -> dict[str, str]:
    """The environment of a federation's server and of its runs, which reach it without a proxy."""
    variables = environment(federation.server / "flwr")
    return {**variables, **without_proxy([host_of(federation.local)], variables)}


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs: they report, check and install nothing, and their
    settings are in ``home``.

    The shell's FLWR_* variables are removed, because they could disable features that the gate
    needs, such as the key.
    """
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return {**variables, **QUIET, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}


def use_environment(home: Path) -> None:
    """Set the environment of Flower's programs in this process."""
    variables = environment(home)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def superlink(federation: Federation, insecure: bool) -> list[str]:
    """The command that starts the server; raises ConfigError if others could reach the server
    without TLS.
    """
    check_flower_installed()
    server = federation.server
    command = [sys.executable, "-m", "fedstill.flower.deployment.superlink"]
    command += [str(federation.folder), "--host", federation.listen, "--port", str(federation.port)]
    # No state outlives the server: keys are in files, and Flower treats a resumed run as new. A
    # database would take most of the server's time.
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
                f"{server / name} is missing: the server does not start without certificates"
            )
        command += [option, str(server / name)]
    _check_certificate(federation)
    if not listed(federation):
        raise ConfigError(
            f"{server / 'allowed'} contains no client's public key: without keys the server does "
            "not start"
        )
    return [*command, "--enable-supernode-auth"]


def _check_certificate(federation: Federation) -> None:
    """Raise ConfigError for a server certificate that has expired, or that programs on this machine
    would reject.
    """
    path = federation.server / "server.crt"
    remedy = f"run: fedstill deploy renew {federation.folder}"
    until = certificates.last_day(path)
    if until <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{path} expired on {until:%Y-%m-%d}; {remedy}")

    host = host_of(federation.local)
    if host not in certificates.named_hosts(path):
        raise ConfigError(
            f"{path} is not valid for {host}, under which programs on this machine reach the "
            f"server; {remedy}"
        )


def check_client(member: Membership, insecure: bool) -> None:
    """Raise ConfigError for a client without a key, or without TLS to another machine."""
    check_flower_installed()
    if not member.server_key.is_file():
        raise ConfigError(
            f"{member.server_key} is missing: copy server/signing.pub from the federation's folder "
            "on the server to this place"
        )
    if insecure:
        _check_loopback(host_of(member.address))
        return
    for path in (member.folder / "ca.crt", member.key):
        if not path.is_file():
            raise ConfigError(f"{path} is missing: the client does not start without it")


def _check_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"--insecure-for-testing is only for this machine, but {host} is not a loopback address"
        )


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), dict(env))


# Running programs


@contextmanager
def alone(folder: Path, program_name: str) -> Iterator[None]:
    """A context that only one process can enter for a folder; raises DeployFailed if another
    process is inside.
    """
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout:
        raise DeployFailed(
            f"{program_name} is already running from {folder}; stop it first to restart it"
        ) from None


def end(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """End a program in its own process group, and its child processes: they are terminated and, if
    necessary, killed.

    Flower's server detaches its child processes, so ending the process group does not suffice.
    """
    import psutil

    # This comes first, because the children of a process cannot be found after its end.
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
    """The descendants of a process; empty if it has ended."""
    import psutil

    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
    return below


def demand_free(federation: Federation) -> None:
    """Raise DeployFailed if a program already listens on the federation's port, because it would be
    mistaken for the server.
    """
    if _listens(federation):
        raise DeployFailed(
            f"another program already listens on {federation.local}, perhaps a server whose "
            "command was killed: stop it first"
        )


def _listens(federation: Federation) -> bool:
    host, _, port = federation.local.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1):
            return True
    except OSError:
        return False
