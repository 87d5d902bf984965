"""Compare the results of this source tree with those of an earlier commit, bit by bit.

``python tools/golden.py --against REV`` carries out the runs of ``tools/golden_cells.py`` with both
trees and compares final models, configs, journals without times, cache hits, and the outputs of
commands. It fails on any difference that ``tools/golden_differences.toml`` does not list, and on
any line of that file that matches nothing. The results of REV are cached under ``.cache/golden``.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "golden"
PRODUCERS = ("golden_cells.py", "golden_edges.py", "golden_outputs.py")
"""The files that define the cells; another version of them makes cached results useless."""

BEFORE_REDESIGN = "26e6b23f8947"
"""The last commit before the redesign, also tagged ``before-redesign``."""

MEMORY = Path("/dev/shm")
"""A file system in memory, where the system has one."""

MOST_SHOWN = 40
"""The number of differences that are printed."""

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True, order=True)
class Difference:
    """One field of one cell that is not the same in both trees."""

    cell: str
    field: str
    detail: str


@dataclass(frozen=True, order=True)
class Intended:
    """An entry of golden_differences.toml.

    ``cell``: a shell pattern; an entry with ``*`` stands for many cells.
    """

    cell: str
    field: str
    reason: str

    def covers(self, difference: Difference) -> bool:
        """Whether a difference is one of those that this entry lists."""
        return difference.field == self.field and self.concerns(difference.cell)

    def concerns(self, cell: str) -> bool:
        """Whether a cell has a name that fits the pattern."""
        return fnmatch.fnmatchcase(cell, self.cell)


def main(arguments: Sequence[str]) -> int:
    """Compare both trees; return 1 if anything differs that is not intended."""
    options = parsed(arguments)
    revision = git("rev-parse", f"{options.against}^{{commit}}")
    CACHE.mkdir(parents=True, exist_ok=True)
    reference = CACHE / f"{revision[:12]}-{fingerprint(options.quick)}.json"
    current = CACHE / "working-tree.json"
    producers = [start(ROOT / "src", current, options.quick)]
    if not reference.is_file():
        producers.append(start(checkout(revision), reference, options.quick))
    for producer in producers:
        if producer.wait():
            print("a tree did not finish its cells", file=sys.stderr)
            return 2
    expected = read(reference)
    results = read(current)
    differences = list(compared(expected, results))
    return report(
        results, differences, intended(ROOT / "tools" / "golden_differences.toml"), options.quick
    )


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="REV", default=BEFORE_REDESIGN, help="the commit")
    parser.add_argument("--quick", action="store_true", help="a subset that takes a minute")
    return parser.parse_args(arguments)


def git(*arguments: str) -> str:
    """The output of a git command in this repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def checkout(revision: str) -> Path:
    """The package's source as of a commit, in a folder of the cache."""
    folder = CACHE / f"source-{revision[:12]}"
    if not (folder / "src").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "src"


def fingerprint(quick: bool) -> str:
    """Identifies everything but the revision on which cached results depend."""
    sources = [(ROOT / "tools" / name).read_bytes() for name in PRODUCERS]
    packages = " ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    machine = (
        f"{sys.version} {platform.machine()} {processor()} {os.environ.get('ATEN_CPU_CAPABILITY')}"
    )
    parts = [*sources, packages.encode(), machine.encode(), str(quick).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def processor() -> str:
    """The processor's model, where the system tells it."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor()
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("model name")), "")


def start(source: Path, out: Path, quick: bool) -> subprocess.Popen[bytes]:
    """Start the cells of one tree in a process with one thread."""
    paths = os.pathsep.join([str(source), str(ROOT)])
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    if MEMORY.is_dir():
        environment["TMPDIR"] = str(MEMORY)  # runs wait for the disk more than they compute
    command = [sys.executable, "-m", "tools.golden_cells", str(out)]
    if quick:
        command.append("--quick")
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def read(path: Path) -> Results:
    """The results of one tree."""
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results


def compared(expected: Results, results: Results) -> Iterator[Difference]:
    """Every field that differs, once for each cell."""
    for cell in sorted(expected.keys() | results.keys()):
        if cell not in results:
            yield Difference(cell, "cell", "is gone")
        elif cell not in expected:
            yield Difference(cell, "cell", "is new")
        else:
            yield from compared_cells(cell, expected[cell], results[cell])


def compared_cells(
    cell: str, expected: Mapping[str, Any], result: Mapping[str, Any]
) -> Iterator[Difference]:
    """The fields of one cell that differ."""
    for field in sorted((expected.keys() | result.keys()) - {"seconds"}):
        old, new = expected.get(field), result.get(field)
        if old == new:
            continue
        if field == "journal" and old and new:
            yield from compared_journals(cell, old, new)
        elif isinstance(old, dict) and isinstance(new, dict):
            for key in sorted(old.keys() | new.keys()):
                if old.get(key) != new.get(key):
                    yield Difference(cell, f"{field}.{key}", change(old.get(key), new.get(key)))
        else:
            yield Difference(cell, field, change(old, new))


def compared_journals(
    cell: str, expected: Sequence[Mapping[str, Any]], result: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """The fields of events that differ, each with the first event in which it does.

    The version of fedstill may differ.
    """
    kinds = [event["event"] for event in expected]
    kinds_now = [event["event"] for event in result]
    if kinds != kinds_now:
        yield Difference(cell, "journal.events", change(kinds, kinds_now))
        return
    fields = {"journal.start.fedstill"}
    for number, (old, new) in enumerate(zip(expected, result, strict=True)):
        for key in sorted(old.keys() | new.keys()):
            field = f"journal.{old['event']}.{key}"
            if old.get(key) != new.get(key) and field not in fields:
                fields.add(field)
                yield Difference(
                    cell, field, f"line {number + 1}: {change(old.get(key), new.get(key))}"
                )


def change(old: Any, new: Any) -> str:
    """Both values, shortened; of two lists the first item that differs."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        number, old, new = pairs[0]
        return f"item {number} of {len(pairs)} that differ: {shortened(old)} -> {shortened(new)}"
    return f"{shortened(old)} -> {shortened(new)}"


def shortened(value: Any) -> str:
    """A value in at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def intended(path: Path) -> list[Intended]:
    """The intended differences with their reasons."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("difference", [])
    return [Intended(**entry) for entry in entries]


def report(
    results: Results, differences: Sequence[Difference], listed: Sequence[Intended], quick: bool
) -> int:
    """Print the number of cells and what differs; return 1 if something is not as intended."""
    unexpected = [d for d in differences if not any(entry.covers(d) for entry in listed)]
    unmatched = [e for e in listed if not any(e.covers(difference) for difference in differences)]
    if quick:  # other cells were not run
        unmatched = [e for e in unmatched if any(e.concerns(cell) for cell in results)]
    accepted = [r for r in results.values() if "journal" in r]
    seconds = sum(r.get("seconds", 0.0) for r in results.values())
    for difference in unexpected[:MOST_SHOWN]:
        print(f"differs: {difference.cell}: {difference.field}: {difference.detail}")
    if len(unexpected) > MOST_SHOWN:
        print(f"... and {len(unexpected) - MOST_SHOWN} more")
    for entry in unmatched:
        print(f"listed as intended, but equal: {entry.cell}: {entry.field}")
    print(
        f"{len(results)} cells ({len(accepted)} runs, {len(results) - len(accepted)} refusals and "
        f"outputs) in {seconds:.0f} s: {len(unexpected)} unexpected differences, "
        f"{len(differences) - len(unexpected)} intended, {len(unmatched)} listed without effect"
    )
    return 1 if unexpected or unmatched else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
