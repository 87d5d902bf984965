"""Runs the test suite once for each kind of machine that this one can imitate, and writes a table
of the results.

    make grid                       all rows: most of an hour on two cores
    make grid ROWS=avx2,threads     some rows; a word selects all rows that begin with it
    make grid ARGS="--folder /elsewhere tests/methods"

Each row changes one thing: the instructions that torch's kernels or oneDNN's may use, the number of
threads, the version of Python, or all versions, which are then the oldest that pyproject.toml
allows. A row is left out if it needs something that this machine lacks, such as an interpreter or
AVX-512; the table names the reason. The table, build/grid/table.md, grows as rows finish. The
output of each row is in a file beside it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.environments import NotInstalled, interpreter, uv  # noqa: E402

PACKAGE = f"{ROOT}[test,tensorboard,docs,flower,flower-datasets]"
"""The package with the extras that ``make test`` installs, except onnx, which the oldest torch
lacks.
"""

PYTEST_OPTIONS = (
    "-n",
    "auto",
    "--dist",
    "loadscope",
    "--no-loadscope-reorder",
    "-p",
    "no:cacheprovider",
)

PROBE = """
import os
import platform
import torch

torch.set_num_threads(int(os.environ.get("FEDSTILL_TEST_THREADS", "1")))
capability = torch.backends.cpu.get_cpu_capability()
print("Python", platform.python_version(), "torch", torch.__version__, capability)
print(torch.get_num_threads())
"""
"""A program that prints what the suite runs on."""

HEAD = (
    "| row | what differs | ran on | passed | failed | skipped | seconds |\n"
    "|---|---|---|---:|---:|---:|---:|\n"
)

INSTALL_SECONDS = 3600.0
ROW_SECONDS = 7200.0

SUMMARY = re.compile(r"\d+ (passed|failed|errors?)\b.* in ")
"""The last line of pytest's output."""


class NotOnThisMachine(Exception):
    """A row needs something that this machine does not have."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    settings: variables of the environment. python: the version of the interpreter; empty for ours.
    oldest: whether the oldest versions are installed. flag: the processor's flag that the row
    needs.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    oldest: bool = False
    flag: str = ""

    @property
    def difference(self) -> str:
        """What differs from an ordinary run."""
        if self.settings:
            return ", ".join(f"{name}={value}" for name, value in self.settings.items())
        if self.oldest:
            return "the oldest versions"
        if self.python:
            return f"Python {self.python}"
        return ""


def _threads(count: str) -> Row:
    names = ("FEDSTILL_TEST_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return Row(f"threads-{count}", dict.fromkeys(names, count))


ROWS = (
    Row("as-it-is"),
    Row("default", {"ATEN_CPU_CAPABILITY": "default"}),
    Row("avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, flag="avx2"),
    Row("avx512", {"ATEN_CPU_CAPABILITY": "avx512"}, flag="avx512f"),
    Row("onednn-sse41", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Row("onednn-avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, flag="avx2"),
    Row("onednn-avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, flag="avx512f"),
    _threads("1"),
    _threads("2"),
    _threads("4"),
    Row("python-3.11", python="3.11"),
    Row("python-3.12", python="3.12"),
    Row("python-3.13", python="3.13"),
    Row("oldest", python="3.11", oldest=True),
)


@dataclass(frozen=True)
class RowResult:
    """The result of a row.

    ran_on: versions, instructions and threads. counts: the number of tests by outcome. failing: the
    tests that failed.
    """

    ran_on: str
    counts: Mapping[str, int]
    failing: Sequence[str]
    seconds: float

    def table_line(self, row: Row) -> str:
        """The line of the table."""
        errors = self.counts.get("failed", 0) + self.counts.get("error", 0)
        failed = max(errors, len(self.failing))
        passed = self.counts.get("passed", 0)
        skipped = self.counts.get("skipped", 0)
        cells = (row.name, row.difference, self.ran_on, passed, failed, skipped)
        return f"| {' | '.join(map(str, cells))} | {self.seconds:.0f} |\n"


def selected_rows(words: str) -> list[Row]:
    """The rows whose names begin with one of the words, which commas separate; all rows if there
    are no words. Raises SystemExit for a word without a row.
    """
    prefixes = tuple(word for word in words.split(",") if word)
    if not prefixes:
        return list(ROWS)
    names = [row.name for row in ROWS]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise SystemExit(f"grid: no row begins with {prefix!r}; there are {', '.join(names)}")
    return [row for row in ROWS if row.name.startswith(prefixes)]


def environment(row: Row, folder: Path, uv_arguments: Sequence[str]) -> Path:
    """The interpreter of a row. Unless the row uses ours, its environment is made if necessary.
    Raises NotInstalled.
    """
    if not row.python:
        return Path(sys.executable)
    versions = ["-c", str(ROOT / "constraints.txt")]
    if row.oldest:
        versions = ["--resolution", "lowest-direct"]
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    request = "\n".join([*versions, *uv_arguments, *(file.read_text() for file in files)])

    place = folder / row.name
    python = place / "bin" / "python"
    installed = place / "ready"
    is_current = installed.is_file() and installed.read_text() == request
    if not is_current or not python.exists():
        uv(["venv", "--clear", "--python", interpreter(row.python), str(place)], INSTALL_SECONDS)
    options = ["--python", str(python), *uv_arguments, *versions]
    uv(["pip", "install", *options, "-e", PACKAGE], INSTALL_SECONDS)
    installed.write_text(request)
    return python


def processor_flags() -> set[str]:
    """The flags of this machine's processor, by Linux's names; empty on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return set()
    lines = re.findall(r"^flags\s*:\s*(.*)$", path.read_text(), re.MULTILINE)
    return set(lines[0].split())


def row_result(
    row: Row, folder: Path, uv_arguments: Sequence[str], tests: Sequence[str]
) -> RowResult:
    """Run the suite for a row, with its output in a file. Raises NotInstalled and
    NotOnThisMachine.
    """
    if row.flag and row.flag not in processor_flags():
        raise NotOnThisMachine(f"this processor has no {row.flag}")
    python = environment(row, folder, uv_arguments)
    settings = {**os.environ, **row.settings, "PYTHONPATH": str(ROOT / "src")}
    settings.pop("PYTHONDONTWRITEBYTECODE", None)
    probe = subprocess.run(
        [str(python), "-c", PROBE], env=settings, capture_output=True, text=True, check=False
    )

    began = time.monotonic()
    output = folder / f"{row.name}.log"
    with output.open("w", encoding="utf-8") as log:
        run_suite([str(python), "-m", "pytest", *PYTEST_OPTIONS, *tests], settings, log)
    seconds = time.monotonic() - began

    lines = output.read_text(errors="replace").splitlines()
    summary = next(filter(SUMMARY.search, reversed(lines)), "")
    outcomes = re.findall(r"(\d+) (passed|failed|skipped|error)", summary)
    failing = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not summary:
        last_line = "no output"
        if lines:
            last_line = lines[-1]
        failing.append(f"no summary: {last_line}")
    return RowResult(
        ran_on=" ".join(probe.stdout.split()) or "?",
        counts={outcome: int(count) for count, outcome in outcomes},
        failing=failing,
        seconds=seconds,
    )


def run_suite(command: Sequence[str], settings: Mapping[str, str], log: IO[str]) -> None:
    """Run pytest; it is ended if it takes too long."""
    try:
        subprocess.run(
            command,
            env=settings,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            timeout=ROW_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log.write(f"\nended after {ROW_SECONDS:.0f} s\n")


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="", help="the beginnings of names, separated by commas (default: all)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/grid",
        help="the folder of environments, outputs and the table",
    )
    parser.add_argument("--pip-args", default="", help="further arguments for uv pip install")
    parser.add_argument("tests", nargs="*", help="arguments for pytest (default: all tests)")
    return parser.parse_args()


def main() -> int:
    """Run the rows; return 1 if a test failed in any of them."""
    options = arguments()
    rows = selected_rows(options.rows)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failing: dict[str, Sequence[str]] = {}

    with (folder / "table.md").open("a", encoding="utf-8") as table:

        def say(text: str) -> None:
            table.write(text)
            table.flush()
            print(text, end="", flush=True)

        date = time.strftime("%Y-%m-%d %H:%M")
        say(f"\n{platform.platform()}, {os.cpu_count()} cores, {date}\n\n{HEAD}")
        for row in rows:
            try:
                result = row_result(row, folder, options.pip_args.split(), options.tests)
            except (NotInstalled, NotOnThisMachine) as error:
                say(f"| {row.name} | {row.difference} | left out: {error} | | | | |\n")
                continue
            say(result.table_line(row))
            if result.failing:
                failing[row.name] = result.failing
        for name, tests in failing.items():
            say(f"\n{name}:\n")
            for test in tests:
                say(f"  {test}\n")
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main())
