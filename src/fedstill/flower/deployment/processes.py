"""Programs that run beside this one: started in groups of their own, watched, and ended with all
that they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fedstill.core.errors import DeployFailed
from fedstill.flower.deployment.folder import Federation

if TYPE_CHECKING:
    import psutil

SECONDS = 180.0
"""How long a server may take to listen; on a busy machine it takes a minute."""


@contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """While the block runs, no other process enters one for this folder; raises DeployFailed if one
    is in it.
    """
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout:
        raise DeployFailed(
            f"{what} already runs from {folder}: stop it first, or leave it"
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


def end_with_parent() -> None:
    """Let this process end, as by SIGTERM, when the one that started it has: also where that was
    killed.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def end(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """End a program that ``running`` started, and all that it started: asked first, then killed.

    Flower's server detaches what it starts, so that its group alone is not enough.
    """
    import psutil

    # before anything ends: after a process has ended, its children cannot be found
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
    federation: Federation, process: subprocess.Popen[bytes], seconds: float = SECONDS
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
