"""The suite once for each kind of machine that this one can pretend to be, and a table of how it
went.

    make grid                       all rows: most of an hour on two cores
    make grid ROWS=avx2,threads     some rows; a word names all rows that begin with it
    make grid ARGS="--folder /elsewhere tests/methods"

One thing differs in each row: what torch's own kernels may use of the processor, what oneDNN's may,
the number of threads, the Python, or all versions, which are then the oldest that pyproject.toml
allows. A row that needs what this machine does not have (an interpreter, AVX-512) is left out, and
the table says so. The table grows as rows finish, in build/grid/table.md, beside each row's whole
output.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.environments import NotInstalled, interpreter, uv  # noqa: E402

PACKAGE = f"{ROOT}[test,tensorboard,docs,flower,flower-datasets]"
"""With the extras that make test installs, but for onnx, which the oldest torch does not have."""
SIDE_BY_SIDE = (
    "-n",
    "auto",
    "--dist",
    "loadscope",
    "--no-loadscope-reorder",
    "-p",
    "no:cacheprovider",
)
PROBE = """
import platform, torch
torch.set_num_threads(int(__import__("os").environ.get("FEDSTILL_TEST_THREADS", "1")))
print("Python", platform.python_version(), "torch", torch.__version__, torch.backends.cpu.get_cpu_capability(),
      torch.get_num_threads())
"""  # noqa: E501
HEAD = (
    "| row | what differs | ran on | passed | failed | skipped | seconds |\n"
    "|---|---|---|---:|---:|---:|---:|\n"
)
INSTALL_SECONDS, ROW_SECONDS = 3600.0, 7200.0


class NotHere(Exception):
    """What a row needs and this machine does not have."""


@dataclass(frozen=True)
class Row:
    """A name, what is set in the environment, the Python (ours if empty), and a processor flag that
    it needs.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    oldest: bool = False
    flag: str = ""

    @property
    def differs(self) -> str:
        """What it is that differs, for people."""
        said = [f"{k}={v}" for k, v in self.settings.items()]
        return ", ".join(said) or (
            "the oldest versions" if self.oldest else self.python and f"Python {self.python}"
        )


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
    *map(_threads, ("1", "2", "4")),
    *(Row(f"python-{version}", python=version) for version in ("3.11", "3.12", "3.13")),
    Row("oldest", python="3.11", oldest=True),
)


@dataclass(frozen=True)
class Came:
    """The result of a row."""

    ran_on: str
    counts: Mapping[str, int]
    failing: Sequence[str]
    seconds: float


def chosen(words: str) -> list[Row]:
    """The rows that words, separated by commas, name by how they begin; all if there are none.
    Raises SystemExit.
    """
    wanted = [w for w in words.split(",") if w]
    for word in wanted:
        if not any(row.name.startswith(word) for row in ROWS):
            raise SystemExit(
                f"grid: no row begins with {word!r}; there are "
                f"{', '.join(row.name for row in ROWS)}"
            )
    return [row for row in ROWS if not wanted or any(row.name.startswith(word) for word in wanted)]


def environment(row: Row, folder: Path, more: Sequence[str]) -> Path:
    """The interpreter of a row, with an environment made for it where it is not ours; raises
    NotInstalled.
    """
    if not row.python:
        return Path(sys.executable)
    place = folder / row.name
    python, ready = place / "bin" / "python", place / "ready"
    how = ["--resolution", "lowest-direct"] if row.oldest else ["-c", str(ROOT / "constraints.txt")]
    asked = "\n".join(
        [*how, *more, (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()]
    )
    if not (ready.is_file() and ready.read_text() == asked and python.exists()):
        uv(["venv", "--clear", "--python", interpreter(row.python), str(place)], INSTALL_SECONDS)
    uv(["pip", "install", "--python", str(python), *more, *how, "-e", PACKAGE], INSTALL_SECONDS)
    ready.write_text(asked)
    return python


def flags() -> set[str]:
    """What this machine's processor has, by Linux's names; nothing on other systems."""
    told = Path("/proc/cpuinfo")
    return (
        set(re.findall(r"^flags\s*:\s*(.*)$", told.read_text(), re.M)[0].split())
        if told.exists()
        else set()
    )


def carried_out(row: Row, folder: Path, more: Sequence[str], tests: Sequence[str]) -> Came:
    """Run the suite as a row has it, its output in a file; raises NotInstalled or NotHere."""
    if row.flag and row.flag not in flags():
        raise NotHere(f"this processor has no {row.flag}")
    python = environment(row, folder, more)
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    settings = {**inherited, **row.settings, "PYTHONPATH": str(ROOT / "src")}
    probed = subprocess.run(
        [str(python), "-c", PROBE], env=settings, capture_output=True, text=True, check=False
    )
    began = time.monotonic()
    output = folder / f"{row.name}.log"
    with output.open("w", encoding="utf-8") as log:
        command = [str(python), "-m", "pytest", *SIDE_BY_SIDE, *tests]
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
    lines = output.read_text(errors="replace").splitlines()
    last = next(
        (
            line
            for line in reversed(lines)
            if re.search(r"\d+ (passed|failed|errors?)\b.* in ", line)
        ),
        "",
    )
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failing = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not last:
        failing.append(f"no summary: {lines[-1] if lines else 'no output'}")
    ran_on = " ".join(probed.stdout.split()) or "?"
    return Came(ran_on, counts, failing, time.monotonic() - began)


def in_the_table(row: Row, came: Came) -> str:
    """The row's line."""
    count = came.counts.get
    failed = max(count("failed", 0) + count("error", 0), len(came.failing))
    numbers = f"{count('passed', 0)} | {failed} | {count('skipped', 0)} | {came.seconds:.0f}"
    return f"| {row.name} | {row.differs} | {came.ran_on} | {numbers} |\n"


def main() -> int:
    """Run the rows; 1 if a test failed in any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="", help="names, or how they begin, separated by commas; all if empty"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/grid",
        help="of environments, outputs and table",
    )
    parser.add_argument("--pip-args", default="", help="further arguments for uv pip install")
    parser.add_argument("tests", nargs="*", help="what pytest runs instead of everything")
    given = parser.parse_args()
    wanted, folder = chosen(given.rows), given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failing: dict[str, Sequence[str]] = {}
    with (folder / "table.md").open("a", encoding="utf-8") as table:

        def say(text: str) -> None:
            table.write(text)
            table.flush()
            print(text, end="", flush=True)

        say(
            f"\n{platform.platform()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d %H:%M')}\n"
            f"\n{HEAD}"
        )
        for row in wanted:
            try:
                came = carried_out(row, folder, given.pip_args.split(), given.tests)
            except (NotInstalled, NotHere) as why:
                say(f"| {row.name} | {row.differs} | left out: {why} | | | | |\n")
                continue
            say(in_the_table(row, came))
            failing |= {row.name: came.failing} if came.failing else {}
        for name, tests in failing.items():
            say(f"\n{name}:\n" + "".join(f"  {test}\n" for test in tests))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
