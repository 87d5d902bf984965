"""What must work while one outer package is blocked: every import, a run, a comparison, a report.

A program for a child process: ``python without_a_package.py FOLDER [MODULE ...]``, with
tests/blocking on PYTHONPATH. The modules are not imported: they build on the blocked package.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import fedstill
from fedstill import manifest
from fedstill.cli import call


def modules(package: str) -> Iterator[str]:
    """The names of a package and of all modules below it but those of missing packages."""
    missing = {outer.module for outer in manifest.PACKAGES if not outer.installed}
    yield package
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if info.name in missing or info.name.endswith(".__main__"):
            continue
        if info.ispkg:
            yield from modules(info.name)
        else:
            yield info.name


def main(folder: Path, dependents: Sequence[str]) -> None:
    """Import everything, train, compare and report; raises where something does not work."""
    names = [name for name in modules("fedstill") if name not in dependents]
    for name in names:
        importlib.import_module(name)
    experiment = fedstill.Experiment(
        rounds=2,
        method="fedntd",
        model={"name": "mlp", "hidden": (8,)},
        data={"train_size": 200, "test_size": 60},
        partition={"kind": "iid"},
        topology={"clients": 4},
        plan={"epochs": 1},
    )
    fedstill.run(experiment, folder / "run")
    fedstill.compare(experiment, ["fedavg", "fedprox"], out=folder / "both", jobs=1, quiet=True)
    for words in (
        ["report", str(folder / "run"), str(folder / "both"), "--out", str(folder / "page.html")],
        ["list", "measure"],
        ["explain"],
        ["--help"],
    ):
        if code := call(words):
            sys.exit(f"{' '.join(words)} ended with {code}")
    print(f"imported {len(names)} modules")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
