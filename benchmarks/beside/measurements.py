"""The measurements of both trees: whole commands, and rounds of a run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.beside import child
from benchmarks.beside.trees import Tree
from benchmarks.peers.common import cores
from benchmarks.startup import CONFIG
from benchmarks.workloads import WORKLOADS, Workload, write_tensors

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "FEDSTILL_WORKERS")

MOST_EPOCHS = 2
"""Two epochs are enough: the outputs of teachers are computed in one and reused in the other."""

NOT_INHERITED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "PYTHONDONTWRITEBYTECODE")
"""``import fedstill`` sets the first two. Without bytecode, the start would take longer than a
user's.
"""


class Failed(Exception):
    """A timed process ended with an error; the message has its last lines."""


@dataclass(frozen=True)
class Seconds:
    """Wall-clock and CPU seconds, the latter over all threads."""

    wall: float
    cpu: float


class Measurement(Protocol):
    """A measurement in pairs."""

    @property
    def group(self) -> str:
        """Its name for ``--only``."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    @property
    def pairs(self) -> int:
        """The number of pairs by default."""

    def time(self, trees: Sequence[Tree], number: int, scratch: Path) -> list[Seconds]:
        """Time new processes of the trees in this order, and return the seconds of each.

        ``number``: of the pair; both trees use it as the seed of Python's hashes. ``scratch``: a
        folder for files that later pairs use again. Raises Failed.
        """


@dataclass(frozen=True)
class Command:
    """A complete process, from its start to its end, with imports."""

    group: str
    name: str
    pairs: int
    arguments: tuple[str, ...]

    def time(self, trees: Sequence[Tree], number: int, scratch: Path) -> list[Seconds]:
        """Run the command once in each tree."""
        return [self._run(tree, number) for tree in trees]

    def _run(self, tree: Tree, number: int) -> Seconds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "one.toml").write_text(CONFIG, encoding="utf-8")
            with (folder / "output").open("w+", encoding="utf-8") as output:
                began = time.perf_counter()
                process = subprocess.Popen(
                    [sys.executable, "-P", *self.arguments],
                    env=environment(tree, number),
                    cwd=folder,
                    stdout=output,
                    stderr=output,
                )
                _, status, usage = os.wait4(process.pid, 0)
                wall = time.perf_counter() - began
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    raise Failed(_reason(f"{self.name} in {tree.name}", output))
        return Seconds(wall=wall, cpu=usage.ru_utime + usage.ru_stime)


@dataclass(frozen=True)
class Rounds:
    """Rounds of a run, without the process's start and the loading of data.

    A pair is two processes that take turns, a round each. Its seconds are the median of
    ``rounds`` rounds that follow ``warm_up`` others. ``workload``: where the images come from;
    None for the data set that the experiment names.
    """

    group: str
    name: str
    pairs: int
    rounds: int
    warm_up: int
    experiment: Mapping[str, Any]
    workload: Workload | None = None

    def time(self, trees: Sequence[Tree], number: int, scratch: Path) -> list[Seconds]:
        """Run the rounds in one process of each tree, in the order A B B A."""
        total = self.warm_up + self.rounds
        experiment = {**self.experiment, "rounds": total}
        task = {"experiment": experiment, "tensors": self._tensors(scratch)}
        with ExitStack() as stack:
            runs = [
                stack.enter_context(started(tree, environment(tree, number), task))
                for tree in trees
            ]
            for turn in range(total):
                order = list(runs)
                if turn % 2:
                    order.reverse()
                for run in order:
                    run.begin_round()
                    run.end_round()
        return [run.median(self.warm_up) for run in runs]

    def _tensors(self, scratch: Path) -> str:
        if self.workload is None:
            return ""
        return str(write_tensors(self.workload, scratch))


class TimedRun:
    """A child process that runs one round for each request."""

    def __init__(self, tree: Tree, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self.tree = tree
        self.process = process
        self.errors = errors
        self.seconds: list[Seconds] = []
        # The first line says that the process is ready.
        self._line()

    def begin_round(self) -> None:
        """Request one round."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def end_round(self) -> None:
        """Wait for the end of the round, and record its seconds."""
        self.seconds.append(Seconds(**json.loads(self._line())))

    def median(self, warm_up: int) -> Seconds:
        """Return the median of each clock over the rounds after the first ``warm_up``."""
        timed = self.seconds[warm_up:]
        return Seconds(
            wall=statistics.median(seconds.wall for seconds in timed),
            cpu=statistics.median(seconds.cpu for seconds in timed),
        )

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise Failed(_reason(f"a run in {self.tree.name}", self.errors))
        return line


@contextmanager
def started(
    tree: Tree, variables: Mapping[str, str], task: Mapping[str, Any]
) -> Iterator[TimedRun]:
    """Start a child process in a folder of its own, and end it after the block.

    ``variables``: its environment. ``task``: the experiment, and the file of its images.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "task.json"
        path.write_text(json.dumps({**task, "source": str(tree.source)}), encoding="utf-8")
        errors = stack.enter_context((folder / "errors").open("w+", encoding="utf-8"))
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", child.__file__, str(path)],
                env=dict(variables),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
            )
        )
        # After the last round, the process waits for another request.
        stack.callback(process.kill)
        yield TimedRun(tree, process, errors)


def environment(tree: Tree, number: int) -> dict[str, str]:
    """Return the environment of a process: the code of its tree, and the same number of threads in
    both trees.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    threads = dict.fromkeys(THREADS, str(cores()))
    return {
        **inherited,
        **threads,
        "PYTHONPATH": str(tree.source),
        "PYTHONHASHSEED": str(number),
    }


def _reason(subject: str, output: IO[str]) -> str:
    output.seek(0)
    lines = output.read().strip().splitlines()
    return "\n".join([f"{subject} failed:", *lines[-5:]])


def _workload(name: str, method: str, engine: str, pairs: int, rounds: int) -> Rounds:
    workload = WORKLOADS[name]
    epochs = min(workload.plan["epochs"], MOST_EPOCHS)
    plan = {**workload.plan, "epochs": epochs}
    return Rounds(
        group=name,
        name=f"{name}, {method}, {engine}, epochs {epochs}: a round",
        pairs=pairs,
        rounds=rounds,
        warm_up=1,
        experiment=workload.values(method, engine=engine, plan=plan, threads=[1, cores()]),
        workload=workload,
    )


def _many_clients() -> Rounds:
    """A million clients with two images each, a thousand of them in a round."""
    workload = replace(WORKLOADS["W4"], name="many", clients=1_000_000, sampled=1000, images=2)
    return Rounds(
        group="clients",
        name="1,000,000 clients, fedavg, pooled: a round",
        pairs=6,
        rounds=2,
        warm_up=1,
        experiment=workload.values("fedavg", engine="pooled", threads=[1, cores()]),
        workload=workload,
    )


MEASUREMENTS: tuple[Measurement, ...] = (
    Command("start-up", "import fedstill", 20, ("-c", "import fedstill")),
    Command("start-up", "fedstill --help", 20, ("-m", "fedstill", "--help")),
    Command(
        "first-round",
        "fedstill run, one round: the whole process",
        10,
        ("-m", "fedstill", "run", "one.toml", "-q"),
    ),
    Rounds(
        group="first-round",
        name="run(), one round: without the start",
        pairs=10,
        rounds=1,
        warm_up=0,
        experiment={"method": "fedntd", "measure": ()},
    ),
    _workload("W1", "fedntd", "pooled", pairs=6, rounds=2),
    _workload("W2", "fedseq", "pooled", pairs=6, rounds=2),
    _workload("W4", "fedavg", "pooled", pairs=7, rounds=10),
    _workload("W4", "fedavg", "vectorised", pairs=7, rounds=10),
    _many_clients(),
)


def warm_up(trees: Sequence[Tree], scratch: Path) -> None:
    """Run every command once, so that both trees have their bytecode and their files cached."""
    for measurement in MEASUREMENTS:
        if isinstance(measurement, Command):
            measurement.time(trees, 0, scratch)
