"""Real processes of a federation on loopback addresses: started, watched, bounded in time, and
ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""Seconds after which a test gives up on anything."""


class Deployment:
    """A federation in a folder, its server and clients as processes of ``fedstill deploy``, each
    with a log.
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
        self.place, self.processes = place, dict[str, subprocess.Popen[bytes]]()

    def start(self, name: str, *arguments: str) -> None:
        """Start ``fedstill`` with some arguments, its output in NAME.log; what had that name has to
        end first.
        """
        if name in self.processes:
            self.processes.pop(name).wait(60)
        with (self.place / f"{name}.log").open("ab") as log:
            command = ["timeout", f"{LIMIT:g}", *fedstill_command(*arguments)]
            self.processes[name] = subprocess.Popen(
                command, env=beside_us(), stdout=log, stderr=log, start_new_session=True
            )

    def server(self) -> None:
        self.start("server", "deploy", "server", str(self.federation.folder))
        self.until(lambda: "the server listens" in self.log("server"), "the server to listen")

    def client(self, client: int, *more: str) -> None:
        self.start(
            f"client{client}", "deploy", "client", str(self.federation.client(client)), *more
        )

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, true: Callable[[], Any], what: str, seconds: float = LIMIT) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
            time.sleep(0.3)

    def finish(self, name: str) -> None:
        """Wait until a process of ours has ended by itself, without an error.

        It may still read its files after it has written the last one.
        """
        status = self.processes.pop(name).wait(LIMIT)
        assert status == 0, self.log(name) + self.log("server")[-3000:]

    def kill(self, name: str, what: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process of ours and all below it."""
        process = self.processes.pop(name)
        for pid in [*(below.pid for below in descendants(process.pid)), process.pid]:
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue
        process.wait(60)

    def close(self) -> None:
        """End everything that was started."""
        for name in list(self.processes):
            self.kill(name)


def beside_us() -> dict[str, str]:
    """The environment of a process that imports what the tests do, this folder's modules too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def fedstill_command(*arguments: str) -> list[str]:
    """The command line of ``fedstill`` with some arguments."""
    return [sys.executable, "-m", "fedstill", *arguments]


def fedstill_(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``fedstill`` with some arguments, run to its end."""
    command = fedstill_command(*arguments)
    return subprocess.run(
        command, env=beside_us(), capture_output=True, text=True, timeout=LIMIT, check=False
    )


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


def flowers_program(name: str) -> str:
    """The path of one of Flower's programs, which are installed beside this Python."""
    beside = str(Path(sys.executable).parent)
    path = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    assert path is not None, f"there is no program {name}"
    return path


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in its own process group, which ends with all below it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    process = subprocess.Popen(list(command), env=dict(env), start_new_session=True, **streams)
    try:
        yield process
    finally:
        programs.end(process)


def wait_for_port(federation: Federation, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server listens on its federation's port."""
    host, _, port = federation.local.rpartition(":")
    end_at = time.monotonic() + 600
    while True:
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        assert time.monotonic() < end_at, f"nothing listens on {federation.local}"
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1).close()
        except OSError:
            time.sleep(0.3)
        else:
            return


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def experiment(method: str, topology: str, /, **changes: Any) -> Experiment:
    """Two rounds of digits, with as many threads everywhere."""
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


def _submission(
    deployment: Deployment, what: Experiment, out: Path, flower: Mapping[str, Any]
) -> list[str]:
    tree = resolve(_in_process(what)).tree
    config = out.with_suffix(".toml")
    config.write_text(
        as_toml({**tree, "engine": "flower", "flower": {"deadline": 900.0, **flower}})
    )
    return [
        "run",
        str(config),
        "--federation",
        str(deployment.federation.folder),
        "--out",
        str(out),
        "-q",
    ]


def _in_process(what: Experiment) -> Experiment:
    """The same on the serial engine; clients may fail, as machines do."""
    return replace(what, engine="serial", clients={**what.clients, "failures": "tolerate"})


def over(
    deployment: Deployment, what: Experiment, out: Path, **flower: Any
) -> subprocess.CompletedProcess[str]:
    """``fedstill run`` with the Flower engine over a deployment, to its end."""
    return fedstill_(*_submission(deployment, what, out, flower))


def starting(deployment: Deployment, what: Experiment, out: Path, **flower: Any) -> None:
    """The same, begun as the deployment's process ``run``."""
    deployment.start("run", *_submission(deployment, what, out, flower))


def serial_of(what: Experiment, folder: Path) -> Path:
    """The run directory of the same experiment on the serial engine."""
    run(_in_process(what), folder)
    return folder


def same_bits(folder: Path, other: Path) -> None:
    """Assert that two runs have the same model, and the same journal but for times."""
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert [without_times(e) for e in events(folder)] == [without_times(e) for e in events(other)]


def events(folder: Path) -> list[dict[str, Any]]:
    """What a run's journal says so far."""
    path = folder / "journal.jsonl"
    return read_journal(path) if path.is_file() else []


def kill_all_with(setting: str) -> None:
    """Kill the processes in whose environment a ``NAME=value`` stands: what a program left running
    behind it.
    """
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdecimal() and setting.encode() in (
                place / "environ"
            ).read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
        except OSError:  # it has ended, or is somebody else's
            continue
