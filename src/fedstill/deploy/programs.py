"""Flower's own programs, as fedstill starts them: the server's SuperLink, a client's SuperNode, the operator's flwr."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedstill.deploy import certificates
from fedstill.deploy.folder import Federation, Membership, is_loopback
from fedstill.engines.flower.messages import QUIET, require_flower
from fedstill.errors import ConfigError, DeployFailed
from fedstill.files import make_folder, write_whole

if TYPE_CHECKING:
    import psutil

LINK = "fedstill"
"""The name that a federation's server has in Flower's own settings."""

REFUSED = b"[code: 2004]"
"""What a SuperNode says before it ends if the server does not list its key."""

ECHO_SECONDS = 5.0

SECONDS = 180.0
"""How long one of the operator's commands may take; on a busy machine it takes a minute."""


def environment(home: Path) -> dict[str, str]:
    """What Flower's programs are started with: nothing is reported, checked or installed, settings are in ``home``."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}


def program(name: str) -> str:
    """The path of one of Flower's programs; raises ConfigError if it is not installed beside this Python."""
    require_flower()
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        raise ConfigError(f"there is no program {name}: pip install 'fedstill[flower]'")
    return path


def superlink(federation: Federation, insecure: bool) -> list[str]:
    """The command that starts the server; raises ConfigError for one that would be open to others without TLS."""
    server = federation.server
    command = [program("flower-superlink"), "--host", federation.listen, "--port", str(federation.port)]
    command += ["--database", str(server / "link.db"), "--disable-runtime-dependency-installation"]
    if insecure:
        _check_loopback(federation.listen)
        return [*command, "--insecure"]
    files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
    for option, name in files.items():
        if not (server / name).is_file():
            raise ConfigError(f"{server / name} is missing: without certificates the server does not start")
        command += [option, str(server / name)]
    if (until := certificates.last_day(server / "server.crt")) <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"{server / 'server.crt'} expired on {until:%Y-%m-%d}; run: fedstill deploy renew {federation.folder}"
        )
    if not any((server / "allowed").glob("*.pub")):
        raise ConfigError(f"{server / 'allowed'} lists no client's public key: without one the server does not start")
    return [*command, "--enable-supernode-auth"]


def supernode(member: Membership, insecure: bool) -> list[str]:
    """The command that starts a client; raises ConfigError for one that would talk to others without TLS."""
    node = [f"partition-id={member.client}", f'site="{member.folder / "site.toml"}"']
    command = [program("flower-supernode"), "--superlink", member.address, "--host", "127.0.0.1"]
    command += ["--port", str(member.port), "--node-config", " ".join(node)]
    if insecure:
        _check_loopback(member.address.rpartition(":")[0])
        return [*command, "--insecure"]
    for path in (member.folder / "ca.crt", member.key):
        if not path.is_file():
            raise ConfigError(f"{path} is missing: without it the client does not start")
    secured = ["--root-certificates", str(member.folder / "ca.crt"), "--auth-supernode-private-key", str(member.key)]
    return [*command, *secured]


def _check_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(f"--insecure-for-testing is for this machine alone, and {host} is not a loopback address")


def write_link(federation: Federation, insecure: bool) -> None:
    """Tell Flower's own commands where the server is: ``server/flwr/config.toml``."""
    home = federation.server / "flwr"
    make_folder(home)
    host = federation.listen if is_loopback(federation.listen) else federation.hosts[0]
    link: dict[str, Any] = {"address": f"{host}:{federation.port}"}
    link |= {"insecure": True} if insecure else {"root-certificates": str(federation.server / "ca.crt")}
    write_whole(home / "config.toml", tomli_w.dumps({"superlink": {"default": LINK, LINK: link}}).encode())


def flwr(federation: Federation, *arguments: str, seconds: float = SECONDS) -> Any:
    """What one of Flower's own commands answers, as JSON; raises DeployFailed with its reason."""
    command = [program("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command,
            env=environment(federation.server / "flwr"),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeployFailed(f"flwr {' '.join(arguments[:2])} gave no answer within {seconds:g} s") from error
    begin = done.stdout.find("{")
    try:
        answer = json.loads(done.stdout[begin:]) if begin >= 0 else {}
    except ValueError:
        answer = {}
    if done.returncode or answer.get("success") is False:
        reason = answer.get("error-message") or done.stderr or done.stdout
        raise DeployFailed(f"flwr {' '.join(arguments[:2])} failed: {' '.join(str(reason).split())[:500]}")
    return answer


def register_clients(federation: Federation) -> list[str]:
    """Accept every client whose public key is in ``server/allowed``; the names of those that are new."""
    new = []
    for path in sorted((federation.server / "allowed").glob("*.pub")):
        try:
            flwr(federation, "supernode", "register", str(path), LINK, "--name", path.stem)
            new.append(path.stem)
        except DeployFailed as error:
            if "already" not in str(error):
                raise
    return new


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program and whatever it starts, in a group of their own, all ended with this block or this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    process = subprocess.Popen(list(command), env=dict(env), start_new_session=True, **streams)
    try:
        yield process
    finally:
        end(process)


def keep_running(command: Sequence[str], env: Mapping[str, str], wait: float) -> int:
    """Run a client until it ends; its status. One that the server refuses is started again for ``wait`` seconds.

    Raises DeployFailed if the server refuses it to the last.
    """
    until = time.monotonic() + wait
    while True:
        said: list[bytes] = []
        with running(command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            # a thread of its own: what the program has started may outlive it, and hold the pipe open
            echo = threading.Thread(target=_echo, args=(process, said), daemon=True)
            echo.start()
            status = process.wait()
        echo.join(ECHO_SECONDS)
        if not said:
            return status
        if time.monotonic() >= until:
            raise DeployFailed("the server refuses this client: its key is not listed in the server's folder, allowed")
        time.sleep(min(5.0, max(0.0, until - time.monotonic())))


def _echo(process: subprocess.Popen[bytes], said: list[bytes]) -> None:
    """Pass a program's output on, and note a line that says it was refused."""
    for line in process.stdout or ():
        if REFUSED in line:
            said.append(line)
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def end(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """End a program that ``running`` started, and all that it started: asked first, then killed.

    Flower's server detaches what it starts, so that its group alone is not enough.
    """
    import psutil

    below = descendants(process.pid)  # before anything ends: after a process has ended, its children cannot be found
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        below += descendants(process.pid)
    _signal_group(process.pid, signal.SIGKILL)
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _signal_group(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, what)


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that a process has started, and those that they have; none if it has ended."""
    import psutil

    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
    return below


def wait_for_port(federation: Federation, process: subprocess.Popen[bytes], seconds: float = SECONDS) -> None:
    """Wait until the server answers; raises DeployFailed if it ends or does not."""
    import socket

    host = federation.listen if is_loopback(federation.listen) else "127.0.0.1"
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        if process.poll() is not None:
            raise DeployFailed(f"the server ended at once, with status {process.returncode}; its output says why")
        try:
            with socket.create_connection((host, federation.port), 1):
                return
        except OSError:
            time.sleep(0.3)
    raise DeployFailed(f"the server did not listen on port {federation.port} within {seconds:g} s")
