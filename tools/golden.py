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
    listed = intended(ROOT / "tools" / "golden_differences.toml")
    return report(results, differences, listed, options.quick)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="REV", default=BEFORE_REDESIGN, help="the commit")
    parser.add_argument("--quick", action="store_true", help="a subset that takes a minute")
    return parser.parse_args(arguments)


def git(*arguments: str) -> str:
    """The output of a git command in this repository."""
    command = ["git", *arguments]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return result.stdout.strip()


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
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    machine = f"{sys.version} {platform.machine()} {processor()} {capability}"
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
        old = expected.get(field)
        new = result.get(field)
        if old == new:
            continue
        if field == "journal" and old and new:
            yield from compared_journals(cell, old, new)
        elif isinstance(old, dict) and isinstance(new, dict):
            for key in different_keys(old, new):
                yield Difference(cell, f"{field}.{key}", change(old.get(key), new.get(key)))
        else:
            yield Difference(cell, field, change(old, new))


def different_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys that one of two mappings lacks, or for which they have different values."""
    return [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]


def compared_journals(
    cell: str, expected: Sequence[Mapping[str, Any]], result: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """The fields of events that differ, each with the first event in which it does.

    The version of fedstill may differ.
    """
    expected_kinds = [event["event"] for event in expected]
    kinds = [event["event"] for event in result]
    if kinds != expected_kinds:
        yield Difference(cell, "journal.events", change(expected_kinds, kinds))
        return
    fields = {"journal.start.fedstill"}
    for number, (old, new) in enumerate(zip(expected, result, strict=True), start=1):
        for key in different_keys(old, new):
            field = f"journal.{old['event']}.{key}"
            if field not in fields:
                fields.add(field)
                values = change(old.get(key), new.get(key))
                yield Difference(cell, field, f"line {number}: {values}")


def change(old: Any, new: Any) -> str:
    """Both values, shortened; of two lists the first item that differs."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        different = [index for index in range(len(old)) if old[index] != new[index]]
        first = different[0]
        values = f"{shortened(old[first])} -> {shortened(new[first])}"
        return f"item {first} of {len(different)} that differ: {values}"
    return f"{shortened(old)} -> {shortened(new)}"


def shortened(value: Any) -> str:
    """A value in at most 100 characters."""
    text = json.dumps(value)
    if len(text) <= 100:
        return text
    return f"{text[:97]}..."


def intended(path: Path) -> list[Intended]:
    """The intended differences with their reasons."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("difference", [])
    return [Intended(**entry) for entry in entries]


def report(
    results: Results, differences: Sequence[Difference], listed: Sequence[Intended], quick: bool
) -> int:
    """Print the number of cells and what differs; return 1 if something is not as intended."""
    unexpected = [
        difference
        for difference in differences
        if not any(entry.covers(difference) for entry in listed)
    ]
    unmatched = [entry for entry in listed if not any(map(entry.covers, differences))]
    if quick:
        # An entry may list a cell that is not in the quick set.
        unmatched = [entry for entry in unmatched if any(map(entry.concerns, results))]
    runs = [result for result in results.values() if "journal" in result]
    seconds = sum(result.get("seconds", 0.0) for result in results.values())
    for difference in unexpected[:MOST_SHOWN]:
        print(f"differs: {difference.cell}: {difference.field}: {difference.detail}")
    if len(unexpected) > MOST_SHOWN:
        print(f"... and {len(unexpected) - MOST_SHOWN} more")
    for entry in unmatched:
        print(f"listed as intended, but equal: {entry.cell}: {entry.field}")
    other_cells = len(results) - len(runs)
    expected = len(differences) - len(unexpected)
    cells = f"{len(results)} cells ({len(runs)} runs, {other_cells} refusals and outputs)"
    print(
        f"{cells} in {seconds:.0f} s: {len(unexpected)} unexpected differences, "
        f"{expected} intended, {len(unmatched)} listed without effect"
    )
    return int(bool(unexpected or unmatched))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
