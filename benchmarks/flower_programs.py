"""A run with Flower's own programs, which start a Python process for every message:
``with flower_programs(clients) as programs: events = programs.journal(experiment)``.

All programs run on this machine, without TLS.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.files import make_folder
from fedstill.flower.deployment.folder import write_app
from fedstill.flower.deployment.programs import environment
from fedstill.running.journal import JOURNAL, read_journal
from fedstill.version import VERSION

HOST = "127.0.0.1"

SECONDS = 600
"""The time limit of a run, and of the server's start."""


@dataclass(frozen=True)
class FlowerPrograms:
    """A running server and its clients. ``folder``: of their app and their settings."""

    folder: Path

    def journal(self, experiment: Experiment, name: str) -> list[dict[str, Any]]:
        """Submit an experiment with ``flwr run``, and return its journal. ``name``: of its
        folder.
        """
        run_folder = self.folder / name
        settings = {"config": resolve(experiment).toml, "out": str(run_folder)}
        settings_file = self.folder / "settings.toml"
        settings_file.write_text(tomli_w.dumps(settings), encoding="utf-8")
        command = [program_path("flwr"), "run", str(self.folder / "app")]
        command += ["--run-config", str(settings_file), "--stream"]
        variables = environment(self.folder / "flwr")
        subprocess.run(command, env=variables, check=True, timeout=SECONDS, capture_output=True)
        return read_journal(run_folder / JOURNAL)


@contextmanager
def flower_programs(clients: int) -> Iterator[FlowerPrograms]:
    """Start Flower's server and its clients, which end with the block."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server_port, *client_ports = _free_ports(clients + 1)
        server = f"{HOST}:{server_port}"
        _write_settings(folder / "flwr", server)
        write_app(folder / "app", clients, VERSION)
        options = ["--disable-runtime-dependency-installation"]
        stack.enter_context(_started(folder, "flower-superlink", server_port, options))
        _wait_for(server_port)
        for client, port in enumerate(client_ports):
            options = ["--superlink", server, "--node-config", f"partition-id={client}"]
            stack.enter_context(_started(folder, "flower-supernode", port, options))
        yield FlowerPrograms(folder)


def _write_settings(folder: Path, server: str) -> None:
    """Write the settings with which ``flwr`` finds the server."""
    make_folder(folder)
    links = {"default": "here", "here": {"address": server, "insecure": True}}
    (folder / "config.toml").write_text(tomli_w.dumps({"superlink": links}), encoding="utf-8")


@contextmanager
def _started(folder: Path, name: str, port: int, options: Sequence[str]) -> Iterator[None]:
    """Run one of Flower's programs during the block."""
    command = [program_path(name), "--insecure", "--host", HOST, "--port", str(port), *options]
    variables = environment(folder / "flwr")
    with (folder / f"{name}-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def program_path(name: str) -> str:
    """The path of one of Flower's programs; raises SystemExit if it is not installed."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        raise SystemExit(f"there is no program {name}: pip install 'fedstill[flower]'")
    return path


def _free_ports(count: int) -> list[int]:
    """Ports of this machine that no program uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listening in sockets:
            listening.bind((HOST, 0))
        return [int(listening.getsockname()[1]) for listening in sockets]


def _wait_for(port: int) -> None:
    """Wait until a program accepts connections; raises TimeoutError if it does not."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"Flower's server does not listen on port {port}")
