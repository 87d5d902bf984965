"""A run as Flower's own programs carry it out: the cold way, in which every message starts a Python
of its own.

``with flowers_own(clients) as way: events = way.journal(experiment)``; on this machine alone,
without TLS.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.files import make_folder
from fedstill.flower.deployment.folder import write_app
from fedstill.flower.deployment.programs import environment, program
from fedstill.running.journal import read_journal
from fedstill.version import VERSION

SECONDS = 600


@dataclass(frozen=True)
class FlowersOwn:
    """A server and clients of Flower's that are running; ``folder`` has their app and settings."""

    folder: Path

    def journal(self, what: Experiment) -> list[dict[str, Any]]:
        """The journal of an experiment that was submitted by ``flwr run``."""
        out = self.folder / f"run-{what.topology['kind']}"
        given = self.folder / "given.toml"
        given.write_text(
            tomli_w.dumps({"config": resolve(what).toml, "out": str(out)}), encoding="utf-8"
        )
        command = [
            program("flwr"),
            "run",
            str(self.folder / "app"),
            "--run-config",
            str(given),
            "--stream",
        ]
        env = environment(self.folder / "flwr")
        subprocess.run(command, env=env, check=True, timeout=SECONDS, capture_output=True)
        return read_journal(out / "journal.jsonl")


@contextmanager
def flowers_own(clients: int) -> Iterator[FlowersOwn]:
    """Flower's server and clients, each with Flower's own executor; they end with the block."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as running:
        folder, ports = Path(temporary), _free_ports(clients + 1)
        server, env = f"127.0.0.1:{ports[0]}", environment(folder / "flwr")
        make_folder(folder / "flwr")
        link = {"default": "here", "here": {"address": server, "insecure": True}}
        (folder / "flwr/config.toml").write_text(
            tomli_w.dumps({"superlink": link}), encoding="utf-8"
        )
        write_app(folder / "app", clients, VERSION)

        def start(name: str, port: int, *more: str) -> None:
            at = ["--insecure", "--host", "127.0.0.1", "--port", str(port)]
            log = running.enter_context((folder / f"{name}-{port}.log").open("wb"))
            process = subprocess.Popen([program(name), *at, *more], env=env, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.terminate)

        start("flower-superlink", ports[0], "--disable-runtime-dependency-installation")
        _wait_for(ports[0])
        for client, port in enumerate(ports[1:]):
            start(
                "flower-supernode",
                port,
                "--superlink",
                server,
                "--node-config",
                f"partition-id={client}",
            )
        yield FlowersOwn(folder)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _wait_for(port: int) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"Flower's server does not listen on port {port}")
