"""Measurements on a borrowed GPU: ``python -m benchmarks.card`` measures for at most eight minutes,
and writes one JSON file (default: ``results/cards/DEVICE.json``).

Each part runs in a process of its own with a time limit. The most important parts come first. If a
part fails or exceeds its limit, the file contains the last lines of its output, and the other parts
continue. The file is written again after each part, so that nothing is lost if the machine is taken
back. ``--device cpu --quick`` tries the command in two minutes without a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.beside.trees import ROOT, NoSuchCommit, working_tree
from benchmarks.card_parts import PLAIN, TRANSFORMER
from benchmarks.options import option_parser
from fedstill.core.files import write_whole
from fedstill.engines.devices import has_bfloat16
from fedstill.engines.hardware import REPLAY, cores
from fedstill.report import terminal
from fedstill.running.same_run import processor
from fedstill.version import VERSION

MINUTES = 8.0
GRACE = 5.0
"""The seconds that an interrupted part has for its report."""

SHORTEST = 10.0
"""The seconds that a part needs at least; with less time, it is skipped."""

QUICK_ROUNDS = 3

MOST_PROCESSES = 14
"""The largest number of simultaneous processes of tests; each needs about 1 GB of a GPU."""

RECORDED = ", recorded"
"""The end of the names of trainings whose steps may be recorded."""

LINES = 40
"""The number of last lines of a part's output that are reported."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A measurement in a process of its own.

    ``arguments``: of Python. ``seconds``: its limit. ``is_table``: whether its result is its
    output, not a line of JSON.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    is_table: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a part ended.

    ``state``: "done", "failed", "out of time", or "skipped". ``result``: its numbers, also those of
    a part that was interrupted. ``output``: its last lines, unless it is done.
    """

    name: str
    state: str
    seconds: float = 0.0
    limit: float = 0.0
    result: dict[str, Any] | None = None
    output: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Goal:
    """A limit on an NVIDIA H100 for a number in a part's result."""

    name: str
    part: str
    key: str
    limit: float

    def compared(self, reports: Sequence[Report]) -> dict[str, Any]:
        """The goal and the measurement; None if there is no measurement."""
        value = None
        for report in reports:
            if report.name == self.part and report.result:
                value = report.result[self.key]
        is_met = None
        if value is not None:
            is_met = value < self.limit
        return {"goal": self.name, "below": self.limit, "measured": value, "met": is_met}


# The parts, in the order of their importance.


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements on a device. ``data``: a folder for the data of the workloads."""

    device: str
    quick: bool
    data: str

    @property
    def on_card(self) -> bool:
        """Whether the device is a GPU, which can record steps."""
        return self.device != "cpu"

    def training(
        self,
        workload: str,
        method: str,
        *,
        seconds: float,
        precision: str = "fp32",
        engine: str = "auto",
        recorded: bool = True,
        rounds: int = 200,
    ) -> Part:
        """Rounds of a workload."""
        if self.quick:
            rounds = QUICK_ROUNDS
        fields = {
            "workload": workload,
            "method": method,
            "precision": precision,
            "engine": engine,
            "rounds": rounds,
        }
        name = f"{workload}, {method}, {precision}"
        if engine != "auto":
            name += f", {engine}"
        if recorded and self.on_card:
            name += RECORDED
        part = self.part(name, "rounds", fields, seconds=seconds)
        return replace(part, environment={REPLAY: str(int(recorded))})

    def part(self, name: str, function: str, fields: Mapping[str, Any], *, seconds: float) -> Part:
        """A part of ``benchmarks.card_parts``."""
        common = {"device": self.device, "quick": self.quick, "data": self.data}
        arguments = ("-m", "benchmarks.card_parts", function, json.dumps({**fields, **common}))
        return Part(name=name, arguments=arguments, seconds=seconds)

    def resumes(self) -> Part:
        """Resumes with and without recorded steps, in a chain, and with stacked clients."""
        runs = [("W2", "fedseq"), ("W2", "sfedkd"), ("W1", "fedntd"), ("W4", "fedavg")]
        return self.part("bit-identical resumes", "resumes", {"runs": runs}, seconds=60)

    def suite(self) -> Part:
        """The tests of methods and engines on the device."""
        processes = max(1, min(MOST_PROCESSES, cores() - 2))
        fields: dict[str, Any] = {
            "paths": ["tests/methods", "tests/engines"],
            "processes": processes,
        }
        if self.quick:
            fields = {"paths": ["tests/engines/test_order.py"], "processes": 1}
        return Part(
            name="tests of methods and engines",
            arguments=("-m", "benchmarks.card_parts", "suite", json.dumps(fields)),
            seconds=110,
            environment={
                "FEDSTILL_TEST_DEVICE": self.device,
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        )

    def peers(self) -> Part:
        """W1 with the peers that can be installed. They train on the CPU."""
        options = ["--workloads", "W1", "--pairs", "1", "--rounds", "1", "--minutes", "2"]
        if self.quick:
            options = ["--workloads", "W4", "--pairs", "1", "--rounds", "1", "--only", "fedstill"]
        return Part(
            name="peers on the CPU",
            arguments=("-m", "benchmarks.peers", *options),
            seconds=180,
            is_table=True,
        )

    def parts(self) -> list[Part]:
        """All parts. Their limits add up to about the eight minutes, without the peers."""
        parts = [
            self.training("W1", "fedavg", seconds=80),
            self.training("W4", "fedavg", seconds=20),
            self.resumes(),
            self.suite(),
            self.training("W1", "fedntd", seconds=28),
            self.training("W1", "fedavg", seconds=20, engine="pooled", rounds=20),
            self.training("W4", "fedavg", seconds=15, engine="pooled", rounds=10),
            self.training("W2", "sfedkd", seconds=16, rounds=30),
            self.training("W2", "fedseq", seconds=16, rounds=30),
            self.training("W3", "fedavg", seconds=18, rounds=30),
        ]
        lower = self.lower_precisions()
        parts += [self.training("W1", "fedavg", seconds=20, precision=p) for p in lower]
        parts.append(self.training("W1", PLAIN, seconds=18, rounds=10, recorded=False))
        parts += [self.training("W1", "fedntd", seconds=14, precision=p) for p in lower]
        parts.append(self.training(TRANSFORMER, "fedavg", seconds=14, rounds=50))
        if self.on_card:
            parts += [
                self.training("W1", method, seconds=12, precision=precision, recorded=False)
                for precision in ("fp32", *lower)
                for method in ("fedavg", "fedntd")
            ]
        return [*parts, self.peers()]

    def lower_precisions(self) -> list[str]:
        """The precisions below float32 that the device has."""
        precisions = []
        if has_bfloat16(self.device):
            precisions.append("bf16")
        if self.on_card:
            precisions.append("tf32")
        return precisions


def goals(device: str) -> list[Goal]:
    """The goals for a device; none for the CPU."""
    if device == "cpu":
        return []
    return [
        Goal("200 rounds of W1, s", "W1, fedavg, fp32, recorded", "seconds_of_all_rounds", 60.0),
        Goal("a round of W4, s", "W4, fedavg, fp32, recorded", "median_round", 0.005),
    ]


# Running parts.


def run_part(part: Part, limit: float) -> Report:
    """Run a part until it ends, or for ``limit`` seconds and a short time for its report."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
    _accept_interrupts()
    began = time.monotonic()
    is_late = False
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            is_late = True
            code = _interrupt(process)
        finally:
            _kill_group(process)
        log.seek(0)
        output = log.read().decode(errors="replace").replace(f"{ROOT}/", "")

    state = "done"
    if code:
        state = "failed"
    result = None
    if not part.is_table:
        result = last_json(output)
        if result is None:
            state = "failed"
    if is_late:
        state = "out of time"
    lines: list[str] = []
    if state != "done" or part.is_table:
        lines = output.splitlines()[-LINES:]
    return Report(
        name=part.name,
        state=state,
        seconds=round(time.monotonic() - began, 2),
        limit=round(limit, 1),
        result=result,
        output=lines,
    )


def _accept_interrupts() -> None:
    """Make sure that parts receive SIGINT. With ``nohup`` or ``&`` in a shell, this process ignores
    the signal, and its child processes would inherit this.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Send SIGINT to a part, and wait for its report."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and all its processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def last_json(output: str) -> dict[str, Any] | None:
    """The last line of an output that is an object in JSON; None without one."""
    for line in reversed(output.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            value: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        return value
    return None


def same_bits(reports: Sequence[Report]) -> dict[str, bool]:
    """Whether a training gives the same model with and without recorded steps, by name."""
    digests = {}
    for report in reports:
        if report.result and report.result.get("model_sha256"):
            digests[report.name] = report.result["model_sha256"]
    compared = {}
    for name, recorded in digests.items():
        plain = name.removesuffix(RECORDED)
        if plain != name and plain in digests:
            compared[plain] = recorded == digests[plain]
    return compared


# The file.


def machine(device: str, commit: str = "") -> dict[str, Any]:
    """The device, its driver, and the versions of all programs.

    ``commit``: of this tree, if git cannot tell.
    """
    about: dict[str, Any] = {
        "device": device_name(device),
        "processor": processor(),
        "cores": cores(),
        "fedstill": VERSION,
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if device != "cpu":
        about["memory"] = torch.cuda.get_device_properties(device).total_memory
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
        about["driver"] = _driver()
    return about


def device_name(device: str) -> str:
    """The name of a GPU or of the processor."""
    if device == "cpu":
        return processor().partition(" (")[0]
    return torch.cuda.get_device_name(device)


def _commit() -> str:
    """The commit of this tree; "unknown" outside a git repository."""
    try:
        tree = working_tree()
    except (NoSuchCommit, OSError, subprocess.CalledProcessError):
        return "unknown"
    if tree.changed:
        return f"{tree.commit} with changes"
    return tree.commit


def _driver() -> str:
    """The version of the NVIDIA driver, or the error of nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return (process.stdout or process.stderr).strip()


def default_path(device: str) -> Path:
    """The file of a device under results/cards."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return ROOT / "results" / "cards" / f"{name}.json"


@dataclass
class Card:
    """The file of all reports, which is written again after each of them."""

    path: Path
    about: dict[str, Any]
    goals: Sequence[Goal]
    reports: list[Report] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            **self.about,
            "goals": [goal.compared(self.reports) for goal in self.goals],
            "same_bits_recorded": same_bits(self.reports),
            "parts": [asdict(report) for report in self.reports],
        }

    def add(self, report: Report) -> None:
        """Add a report, and write the file."""
        self.reports.append(report)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (json.dumps(self.content(), indent=1) + "\n").encode())

    def measure(self, parts: Sequence[Part], seconds: float) -> None:
        """Run parts, one after another, for at most so many seconds."""
        end = time.monotonic() + seconds
        for part in parts:
            limit = min(part.seconds, end - time.monotonic() - GRACE)
            if limit < min(SHORTEST, part.seconds):
                self.add(Report(name=part.name, state="skipped", output=["no time was left"]))
                continue
            print(f"{part.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
            self.add(run_part(part, limit))

    @property
    def is_complete(self) -> bool:
        """Whether nothing failed, and recorded steps gave the same bits."""
        has_failed = any(report.state == "failed" for report in self.reports)
        return not has_failed and all(same_bits(self.reports).values())


def show(content: Mapping[str, Any]) -> None:
    """Print the reports and the goals of a file."""
    screen = terminal.console()
    print(f"{content['device']}, commit {content['commit'][:12]}, torch {content['torch']}")
    reports = [Report(**part) for part in content["parts"]]
    rows = [(report.name, report.state, *_figures(report)) for report in reports]
    screen.print(terminal.PlainTable(["", "", "rounds", "s a round", "s of all", "result"], rows))
    for name, is_same in content["same_bits_recorded"].items():
        answer = "OTHER BITS"
        if is_same:
            answer = "the same bits"
        print(f"{name}: recorded steps give {answer}")
    for goal in content["goals"]:
        print(f"goal on an H100: {goal['goal']} below {goal['below']:g}; here {goal['measured']}")


def _figures(report: Report) -> tuple[str, str, str, str]:
    """Rounds, seconds of a round and of all rounds, and other results."""
    result = report.result or {}
    if "median_round" in result:
        of_all = f"{result['seconds_of_all_rounds']:.1f}"
        if result["rounds"] < result["rounds_planned"]:
            of_all = f"about {of_all}"
        return str(result["rounds"]), f"{result['median_round']:.4g}", of_all, result["engine"]
    if "passed" in result:
        return "", "", "", f"{result['passed']} passed, {result['failed']} failed"
    if report.state != "done" and report.output:
        return "", "", "", f"{report.output[-1]:.60}"
    return "", "", "", ""


def main() -> int:
    """Measure, write the file and print a table; 1 if a part failed."""
    parser = option_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--quick", action="store_true", help="smaller workloads, to try it out")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--only", default="", help="only parts whose name contains this")
    parser.add_argument("--skip", default="nothing", help="skip parts whose name contains this")
    parser.add_argument("--commit", default="", help="of this tree, if it is not a git repository")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print an existing file")
    parser.add_argument("--out", type=Path, help="the file, instead of results/cards/DEVICE.json")
    options = parser.parse_args()
    if options.show:
        show(json.loads(options.show.read_bytes()))
        return 0
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("--device: torch sees no CUDA device here; --device cpu --quick tries it out")

    with tempfile.TemporaryDirectory(prefix="card-") as data:
        plan = Plan(device=options.device, quick=options.quick, data=data)
        parts = [
            part
            for part in plan.parts()
            if options.only in part.name and options.skip not in part.name
        ]
        about = {"quick": options.quick, **machine(options.device, options.commit)}
        card = Card(options.out or default_path(options.device), about, goals(options.device))
        card.measure(parts, 60 * options.minutes)
    show(card.content())
    print(f"written: {card.path}")
    return int(not card.is_complete)


if __name__ == "__main__":
    sys.exit(main())
