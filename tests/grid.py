"""The whole suite on other processors, numbers of threads, Pythons and versions: ``make grid``, by hand.

A row is one run of the suite. Its environment is made with uv where it is not there yet; a row whose Python is not on
this machine is left out, and the table says so. The table is printed again as each row ends, and is kept in
``FOLDER/table.md`` with what each row printed beside it, so that nothing is lost when the grid is stopped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "test,tensorboard,docs,flower,flower-datasets"
ENDED = re.compile(r"(\d+) (passed|failed|skipped|errors?)")


@dataclass(frozen=True)
class Row:
    """One run of the suite: where it differs from the suite as it is.

    ``python``: the version; empty for the one that runs this. ``oldest``: the lowest versions that pyproject allows.
    """

    name: str
    about: str
    env: dict[str, str] = field(default_factory=dict)
    python: str = ""
    oldest: bool = False

    @property
    def place(self) -> str:
        """The name of its environment; empty where it needs none of its own."""
        return "oldest" if self.oldest else self.python and f"py{self.python.replace('.', '')}"


def _processor(name: str, aten: str, onednn: str) -> Row:
    """A processor that has no more than this: torch's own kernels and oneDNN's are both held to it."""
    env = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    return Row(name, f"ATEN_CPU_CAPABILITY={aten}, ONEDNN_MAX_CPU_ISA={onednn}", env)


def _threads(count: int) -> Row:
    env = {"FEDSTILL_TEST_THREADS": str(count), "OMP_NUM_THREADS": str(count)}
    return Row(f"threads{count}", f"{count} torch threads in every test", env)


ROWS = (
    Row("here", "as it is: 1 torch thread"),
    _processor("sse41", "default", "SSE41"),
    _processor("avx2", "avx2", "AVX2"),
    _processor("avx512", "avx512", "AVX512_CORE"),
    _threads(2),
    _threads(4),
    Row("py312", "Python 3.12", python="3.12"),
    Row("py313", "Python 3.13", python="3.13"),
    Row("oldest", "the lowest versions that pyproject.toml allows, Python 3.11", python="3.11", oldest=True),
)


class NotHere(Exception):
    """A row that this machine cannot run."""


@dataclass(frozen=True)
class Ran:
    """The result of a row."""

    row: Row
    counts: dict[str, int]
    seconds: float
    failed: tuple[str, ...]
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether tests ran and all passed."""
        return not self.problem and self.counts.get("passed", 0) > 0 and not self.failed

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        numbers = [str(self.counts.get(k, 0)) for k in ("passed", "failed", "skipped")]
        return (self.row.name, self.row.about, *(["–"] * 3 if self.problem else numbers), f"{self.seconds:.0f}")


def interpreter(row: Row, envs: Path, pip_args: Sequence[str]) -> str:
    """The Python that runs a row, its environment made first where there is none; raises NotHere."""
    if not row.place:
        return sys.executable
    place = envs / row.place
    python = place / "bin" / "python"
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise NotHere("uv is not installed")
    if (place / "ready").exists():
        return str(python)
    if not python.exists() and subprocess.run([uv, "venv", "-q", "--python", row.python, str(place)]).returncode:
        raise NotHere(f"there is no Python {row.python}")
    versions = ["--resolution", "lowest-direct"] if row.oldest else ["-c", "constraints.txt"]
    command = [uv, "pip", "install", "-q", *pip_args, *versions, "-p", str(python), "-e", f".[{EXTRAS}]"]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise NotHere("its packages cannot be installed")
    (place / "ready").touch()
    return str(python)


def run(row: Row, python: str, out: Path, workers: str) -> Ran:
    """Run the suite, and keep what it prints in ``out/NAME.log``."""
    command = [python, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider"]
    env = {**os.environ, **row.env, "PYTHONPATH": str(ROOT / "src")}
    began = time.perf_counter()
    with (out / f"{row.name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    text = (out / f"{row.name}.log").read_text(errors="replace")
    last = next((line for line in reversed(text.splitlines()) if ENDED.search(line)), "")
    counts = {what: int(n) for n, what in ENDED.findall(last)}
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+.*)$", text, re.MULTILINE))
    return Ran(row, counts, time.perf_counter() - began, failed, "" if last else "the suite did not end")


def table(rows: Sequence[Ran]) -> str:
    """The rows in Markdown, what failed below them."""
    head = ("row", "what differs", "passed", "failed", "skipped", "seconds")
    lines = [" | ".join(cells) for cells in (head, ("---",) * len(head), *(r.cells() for r in rows))]
    below = [f"{r.row.name}: {what}" for r in rows for what in (*r.failed, *([r.problem] if r.problem else []))]
    return "\n".join([*(f"| {line} |" for line in lines), "", *below]) + "\n"


def chosen(names: str) -> Iterator[Row]:
    """The rows of these names, separated by commas; all for none."""
    wanted = [n for n in names.split(",") if n]
    strange = sorted(set(wanted) - {r.name for r in ROWS})
    if strange:
        raise SystemExit(f"there is no row {strange[0]!r}; choose among {', '.join(r.name for r in ROWS)}")
    yield from (r for r in ROWS if not wanted or r.name in wanted)


def main() -> int:
    """Run the rows that were asked for; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="names, separated by commas; by default all")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "grid", help="where environments are made")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "grid", help="where tables and logs go")
    parser.add_argument("--workers", default="auto", help="tests side by side, as pytest-xdist's -n")
    parser.add_argument("--pip-args", default="", help="for uv pip install, e.g. another index")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    done: list[Ran] = []
    for row in chosen(asked.rows):
        try:
            done.append(
                run(row, interpreter(row, asked.envs.resolve(), asked.pip_args.split()), asked.out, asked.workers)
            )
        except NotHere as missing:
            done.append(Ran(row, {}, 0.0, (), f"left out: {missing}"))
        (asked.out / "table.md").write_text(table(done))
        print(table(done), flush=True)
    return 0 if all(r.good or r.problem.startswith("left out") for r in done) else 1


if __name__ == "__main__":
    sys.exit(main())
