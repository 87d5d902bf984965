"""Processes of a federation on the loopback address: starting, watching and ending them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedstill
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.settings import as_toml
from fedstill.flower.deployment import folder, programs
from fedstill.flower.deployment.folder import Federation
from fedstill.flower.deployment.programs import descendants
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import run

LIMIT = 1800.0
"""The seconds that a test waits for a process."""


class Deployment:
    """A federation in a folder. Its server and its clients are processes of ``fedstill deploy``,
    and each process has a log.
    """

    def __init__(self, place: Path, clients: int) -> None:
        self.federation: Federation = folder.init(
            place / "fed",
            clients,
            ("127.0.0.1",),
            listen="127.0.0.1",
            port=free_port(),
            version=fedstill.__version__,
        )
        self.place = place
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Start ``fedstill`` with some arguments. Its output goes to NAME.log.

        An earlier process of this name must have ended.
        """
        if name in self.processes:
            self.processes.pop(name).wait(60)
        with (self.place / f"{name}.log").open("ab") as log:
            command = ["timeout", f"{LIMIT:g}", *fedstill_command(*arguments)]
            self.processes[name] = subprocess.Popen(
                command, env=process_environment(), stdout=log, stderr=log, start_new_session=True
            )

    def start_server(self) -> None:
        """Start the server, and wait until it listens."""
        self.start("server", "deploy", "server", str(self.federation.folder))
        self.wait_until(lambda: "the server listens" in self.log("server"), "the server to listen")

    def start_client(self, client: int, *options: str) -> None:
        """Start a client with further options of ``fedstill deploy client``."""
        folder = str(self.federation.client(client))
        self.start(f"client{client}", "deploy", "client", folder, *options)

    def log(self, name: str) -> str:
        """The output of a process; empty if it has not started."""
        path = self.place / f"{name}.log"
        if not path.exists():
            return ""
        return path.read_text(errors="replace")

    def wait_until(
        self, condition: Callable[[], Any], description: str, seconds: float = LIMIT
    ) -> None:
        """Wait until a condition is true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds:g} s for {description}"
            time.sleep(0.3)

    def wait_for_success(self, name: str) -> None:
        """Wait until a process has ended without an error.

        A process may still read its files after it has written the last one.
        """
        status = self.processes.pop(name).wait(LIMIT)
        assert status == 0, self.log(name) + self.log("server")[-3000:]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process and its descendants, and wait for its end."""
        process = self.processes.pop(name)
        pids = [descendant.pid for descendant in descendants(process.pid)]
        for pid in [*pids, process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        process.wait(60)

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self.processes):
            self.kill(name)


def process_environment() -> dict[str, str]:
    """The environment of a process that can import the modules of fedstill and of this folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def fedstill_command(*arguments: str) -> list[str]:
    """The command line of ``fedstill`` with some arguments."""
    return [sys.executable, "-m", "fedstill", *arguments]


def run_fedstill(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``fedstill`` with some arguments to its end."""
    return subprocess.run(
        fedstill_command(*arguments),
        env=process_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@contextmanager
def deployed(place: Path, clients: int) -> Iterator[Deployment]:
    """Start a federation with its server and clients, and kill them at the end."""
    deployment = Deployment(place, clients)
    try:
        deployment.start_server()
        for client in range(clients):
            deployment.start_client(client)
        yield deployment
    finally:
        deployment.close()


def flower_program(name: str) -> str:
    """The path of one of Flower's programs, which are installed in the folder of this Python."""
    folder = str(Path(sys.executable).parent)
    path = shutil.which(name, path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    assert path is not None, f"the program {name} is not installed"
    return path


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a new process group during the block, and end the group afterwards."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    process = subprocess.Popen(list(command), env=dict(env), start_new_session=True, **streams)
    try:
        yield process
    finally:
        programs.end(process)


def wait_for_port(federation: Federation, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server listens on its federation's port."""
    host, _, port = federation.local.rpartition(":")
    end = time.monotonic() + 600
    while True:
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        assert time.monotonic() < end, f"nothing listens on {federation.local}"
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1).close()
        except OSError:
            time.sleep(0.3)
        else:
            return


def free_port() -> int:
    """A port of this machine on which no program listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def experiment(method: str, topology: str, /, **changes: Any) -> Experiment:
    """Two rounds on digits with one torch thread."""
    values: dict[str, Any] = {
        "rounds": 2,
        "seed": 3,
        "threads": 1,
        "method": method,
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "alpha": 1.0},
        "topology": {"kind": topology, "clients": 3},
        "plan": {"epochs": 1, "lr": 0.05, "batch": 50},
        "clients": {"quorum": 0.3},
    }
    return Experiment(**{**values, **changes})


def _run_command(
    deployment: Deployment, chosen: Experiment, out: Path, flower: Mapping[str, Any]
) -> list[str]:
    """Write the config of an experiment; return the arguments of ``fedstill`` that run it over a
    deployment.
    """
    settings = resolve(_in_process(chosen)).tree
    settings = {**settings, "engine": "flower", "flower": {"deadline": 900.0, **flower}}
    config = out.with_suffix(".toml")
    config.write_text(as_toml(settings))
    federation = str(deployment.federation.folder)
    return ["run", str(config), "--federation", federation, "--out", str(out), "-q"]


def _in_process(chosen: Experiment) -> Experiment:
    """The experiment with the serial engine. Clients may fail, as the processes of sites do."""
    return replace(chosen, engine="serial", clients={**chosen.clients, "failures": "tolerate"})


def run_over(
    deployment: Deployment, chosen: Experiment, out: Path, **flower: Any
) -> subprocess.CompletedProcess[str]:
    """Run an experiment over a deployment to its end, with keys of the table ``[flower]``."""
    return run_fedstill(*_run_command(deployment, chosen, out, flower))


def start_run(deployment: Deployment, chosen: Experiment, out: Path, **flower: Any) -> None:
    """Start an experiment over a deployment as its process ``run``."""
    deployment.start("run", *_run_command(deployment, chosen, out, flower))


def serial_run(chosen: Experiment, folder: Path) -> Path:
    """Run an experiment with the serial engine; return its folder."""
    run(_in_process(chosen), folder)
    return folder


def assert_same_bits(folder: Path, other: Path) -> None:
    """Assert that two runs have the same model, and the same journal except for times."""
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    journals = [[without_times(event) for event in events(run)] for run in (folder, other)]
    assert journals[0] == journals[1]


def events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run's journal so far; empty before the run has written it."""
    path = folder / "journal.jsonl"
    if not path.is_file():
        return []
    return read_journal(path)


def kill_all_with(setting: str) -> None:
    """Kill all processes whose environment has a ``NAME=value``, such as processes that a program
    has left running.
    """
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # A process may have ended, or belong to another user.
        with suppress(OSError):
            settings = (process / "environ").read_bytes().split(b"\0")
            if setting.encode() in settings:
                os.kill(int(process.name), signal.SIGKILL)
