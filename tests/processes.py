"""Real processes of a federation on loopback addresses: started, watched, bounded in time, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fedstill
from fedstill.deploy import folder
from fedstill.deploy.folder import Federation
from fedstill.deploy.programs import descendants

LIMIT = 1800.0
"""Seconds after which a test gives up on anything."""


class Deployment:
    """A federation in a folder, its server and clients as processes of ``fedstill deploy``, each with a log."""

    def __init__(self, place: Path, clients: int) -> None:
        self.federation: Federation = folder.init(
            place / "fed", clients, ("127.0.0.1",), "127.0.0.1", free_port(), fedstill.__version__
        )
        self.place, self.processes = place, dict[str, subprocess.Popen[bytes]]()
        for client in range(clients):
            path = self.federation.client(client) / "client.toml"
            path.write_text(path.read_text().replace(f"port = {folder.NODE_PORT + client}", f"port = {free_port()}"))

    def start(self, name: str, *arguments: str) -> None:
        """Start ``fedstill`` with some arguments, its output in NAME.log."""
        with (self.place / f"{name}.log").open("ab") as log:
            command = ["timeout", f"{LIMIT:g}", sys.executable, "-m", "fedstill", *arguments]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def server(self) -> None:
        self.start("server", "deploy", "server", str(self.federation.folder))
        self.until(lambda: "the server listens" in self.log("server"), "the server to listen")

    def client(self, client: int, *more: str) -> None:
        self.start(f"client{client}", "deploy", "client", str(self.federation.client(client)), *more)

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, true: Callable[[], Any], what: str, seconds: float = LIMIT) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
            time.sleep(0.3)

    def kill(self, name: str, what: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process of ours and all below it."""
        process = self.processes.pop(name)
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue
        process.wait(60)

    def close(self) -> None:
        """End everything that was started."""
        for name in list(self.processes):
            self.kill(name)


@contextmanager
def deployed(place: Path, clients: int) -> Iterator[Deployment]:
    """A federation whose server and clients run."""
    deployment = Deployment(place, clients)
    try:
        deployment.server()
        for client in range(clients):
            deployment.client(client)
        yield deployment
    finally:
        deployment.close()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
