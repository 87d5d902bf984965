"""The cost of a federation by its number of sites: ``python -m benchmarks.flower --sites 5,10,15``.

For each number, the benchmark starts a server and so many sites, runs FedNTD on digits over TLS,
and prints seconds a round, processor time a message, and memory. A message is an instruction or a
reply. "link" is the process of the server: Flower's SuperLink behind the gate. "run" is the process
of the run, from the end of its first round to the end of its last one. Its start is not included:
it takes several seconds, regardless of the number of messages. "server" is the sum of both. "in" is
the number of processes. All sites share the cores of this machine, so seconds a round depend more
on their training than on messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.settings import as_toml
from fedstill.flower.deployment import folder
from fedstill.flower.deployment.programs import descendants
from fedstill.running.journal import read_journal
from fedstill.version import VERSION

CONNECT_SECONDS = 900.0
"""The seconds after which all sites must be connected."""

LINK_PROGRAM = "deployment.superlink"
RUN_PROGRAM = "deployment.tasks"
"""Parts of the command lines of the server's processes."""

HOST = "127.0.0.1"

HEADER = (
    f"{'sites':>5} {'s a round':>10} {'link s a message':>17} {'run':>8} {'server':>8} {'site':>8} "
    f"{'server MB':>10} {'in':>3} {'site MB':>8} {'in':>3}"
)


@dataclass(frozen=True)
class Usage:
    """Processor seconds, memory in MB and number of processes, of a command and its descendants.

    Memory is the proportional set size: pages that processes share are counted once.
    """

    seconds: float
    megabytes: float
    processes: int

    @staticmethod
    def of(pid: int, program: str = "") -> Usage:
        """The current usage of a process and its descendants, or of those that run a program."""
        seconds = 0.0
        size = 0
        count = 0
        for process in [psutil.Process(pid), *descendants(pid)]:
            # A process that has just ended is left out.
            with contextlib.suppress(psutil.Error):
                if program not in " ".join(process.cmdline()):
                    continue
                times = process.cpu_times()
                memory = process.memory_full_info().pss
                seconds += times.user + times.system
                size += memory
                count += 1
        return Usage(seconds, size / 1e6, count)


def measure(sites: int, rounds: int) -> str:
    """The line of the table for a number of sites."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as commands:
        place = Path(name)
        federation = folder.init(
            place / "fed", sites, (HOST,), listen=HOST, port=free_port(), version=VERSION
        )
        server = commands.enter_context(_command("server", federation.folder, place / "server"))
        clients = []
        logs = [place / f"client{client}" for client in range(sites)]
        for client, log in enumerate(logs):
            command = _command("client", federation.client(client), log)
            clients.append(commands.enter_context(command))
        _wait(lambda: all("connected" in log.read_text() for log in logs))

        link_start = Usage.of(server.pid, LINK_PROGRAM).seconds
        sites_start = sum(Usage.of(client.pid).seconds for client in clients)
        watch = Watch(server, clients[0], place / "run" / "journal.jsonl")
        _run(federation, place, experiment(sites, rounds), watch)
        link_seconds = Usage.of(server.pid, LINK_PROGRAM).seconds - link_start
        sites_end = sum(Usage.of(client.pid).seconds for client in clients)
        events = read_journal(place / "run" / "journal.jsonl")
    seconds = [event["seconds_training"] for event in events if event["event"] == "round"]
    messages = 2 * sum(event["event"] == "client" for event in events)
    link = link_seconds / messages
    run = watch.run_seconds_a_round() * rounds / messages
    cells = (
        f"{sites:>5}",
        f"{median(seconds):>10.2f}",
        f"{link:>17.3f}",
        f"{run:>8.3f}",
        f"{link + run:>8.3f}",
        f"{(sites_end - sites_start) / messages:>8.3f}",
        f"{watch.server.megabytes:>10.0f} {watch.server.processes:>3}",
        f"{watch.site.megabytes:>8.0f} {watch.site.processes:>3}",
    )
    return " ".join(cells)


class Watch:
    """Observes a server and a site during a run.

    ``server``, ``site``: their usage at the peak of memory.
    """

    def __init__(
        self, server: subprocess.Popen[bytes], site: subprocess.Popen[bytes], journal: Path
    ) -> None:
        self._server = server
        self._site = site
        self._journal = journal
        # The processor time of the run's process by the number of complete rounds.
        self._run_seconds: dict[int, float] = {}
        self.server = Usage.of(server.pid)
        self.site = Usage.of(site.pid)

    def look(self) -> None:
        """Record the current usage."""
        self.server = _larger(self.server, Usage.of(self._server.pid))
        self.site = _larger(self.site, Usage.of(self._site.pid))
        seconds = Usage.of(self._server.pid, RUN_PROGRAM).seconds
        if seconds:
            self._run_seconds.setdefault(self._rounds(), seconds)

    def run_seconds_a_round(self) -> float:
        """The processor time of the run's process in a round, without its start and its end."""
        rounds = sorted(round for round in self._run_seconds if round)
        if len(rounds) < 2:
            raise RuntimeError("too few rounds to measure: use more --rounds")
        first = rounds[0]
        last = rounds[-1]
        seconds = self._run_seconds[last] - self._run_seconds[first]
        return seconds / (last - first)

    def _rounds(self) -> int:
        """The number of complete rounds."""
        if not self._journal.is_file():
            return 0
        return sum(event["event"] == "round" for event in read_journal(self._journal))


def _larger(peak: Usage, current: Usage) -> Usage:
    """The usage with more memory."""
    return max(peak, current, key=lambda usage: usage.megabytes)


def experiment(sites: int, rounds: int) -> Experiment:
    """FedNTD on digits, one epoch a round."""
    return Experiment(
        rounds=rounds,
        seed=1,
        threads=1,
        measure=(),
        method="fedntd",
        data="digits",
        partition={"kind": "iid"},
        topology={"clients": sites, "sampled": sites},
        plan={"epochs": 1},
    )


def free_port() -> int:
    """A port of this machine that no program uses."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def _command(name: str, place: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of ``fedstill deploy`` during the block."""
    command = [sys.executable, "-m", "fedstill", "deploy", name, str(place)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=dict(os.environ))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _run(federation: folder.Federation, place: Path, experiment: Experiment, watch: Watch) -> None:
    """Run an experiment to its end."""
    config = place / "run.toml"
    config.write_text(as_toml({**resolve(experiment).tree, "engine": "flower"}))
    command = [sys.executable, "-m", "fedstill", "run", str(config), "-q"]
    command += ["--federation", str(federation.folder), "--out", str(place / "run")]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while run.poll() is None:
        watch.look()
        time.sleep(0.2)
    if run.returncode:
        raise RuntimeError(f"the run ended with status {run.returncode}")


def _wait(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds; raises TimeoutError if it never does."""
    end = time.monotonic() + CONNECT_SECONDS
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError("the sites did not connect")
        time.sleep(0.5)


def print_table(numbers: Sequence[int], rounds: int) -> None:
    """Print a line for each number of sites."""
    print(HEADER)
    for sites in numbers:
        print(measure(sites, rounds), flush=True)
