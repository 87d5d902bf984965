"""``fedstill explain``: its imports, its numbers of examples, and federations of real sites."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fedstill.cli import call

NOT_NEEDED = {"datasets", "pandas", "scipy", "sklearn", "sympy", "torch._dynamo"}
"""Packages that take seconds to import, and that explain uses none of."""

ROWS = 900


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROGRAM = """
import json
import sys
from fedstill.cli import call

known = set()
imported = []
for words in json.loads(sys.argv[1]):
    if code := call(["explain", *words]):
        sys.exit(code)
    imported.append(sorted(set(sys.modules) - known))
    known = set(sys.modules)
print(json.dumps(imported))
"""


def imported(folder: Path, *commands: list[str]) -> list[set[str]]:
    """The modules that each ``fedstill explain`` imports, one after another in one process."""
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [set(names) for names in json.loads(completed.stdout.splitlines()[-1])]


def write_table(path: Path) -> None:
    """Write a table of patients in three hospitals."""
    rng = np.random.default_rng(0)
    lines = ["age,pressure,hospital,label"]
    for row in range(ROWS):
        age, pressure = rng.normal(size=2)
        lines.append(f"{age:.3f},{pressure:.3f},h{row % 3},{rng.integers(2)}")
    path.write_text("\n".join(lines), encoding="utf-8")


def write_images(path: Path) -> None:
    """Write random images of three classes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in {"train": 90, "test": 30}.items():
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        arrays[f"{split}_labels"] = rng.integers(0, 3, (count, 1), dtype=np.uint8)
    np.savez(path, **arrays)


FEDERATED = ["--engine", "flower", "--federation", "fed"]
HEART = """
[data]
name = "none"
columns = ["age", "sex"]
standardise = "summed"
[flower]
data = "sites"
classes = ["healthy", "disease"]
[model]
name = "logistic"
[topology]
clients = 4
"""


def test_explain_imports_no_package_that_it_does_not_use(folder: Path) -> None:
    write_images(folder / "shapes.npz")
    (folder / "images.toml").write_text('data = "shapes.npz"\npartition = "iid"\n')
    write_table(folder / "hospitals.csv")
    (folder / "table.toml").write_text('data = "hospitals.csv"\ntopology = {clients = 3}\n')
    (folder / "heart.toml").write_text(HEART)
    by_hospital = "partition={kind='column', column='hospital'}"
    of_federation, of_images, of_table = imported(
        folder,
        ["heart.toml", *FEDERATED],
        ["images.toml", "-s", "topology.clients=5"],
        ["table.toml", "-s", by_hospital],
    )
    assert "torch" in of_federation
    assert of_federation.isdisjoint({*NOT_NEEDED, "flwr"})
    assert of_images.isdisjoint(NOT_NEEDED)
    assert of_table.isdisjoint(NOT_NEEDED)


def test_a_federation_is_explained_without_its_clients(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "heart.toml").write_text(HEART)
    assert call(["explain", "heart.toml"]) == 2
    assert "flower.federation" in capsys.readouterr().err

    assert call(["explain", "heart.toml", *FEDERATED]) == 0
    output = capsys.readouterr().out
    assert "known to the sites only" in output


def test_a_simulated_federation_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "trial.toml").write_text("topology = {clients = 4}\n")
    settings = ["-s", "engine=flower", "-s", "flower.federation=fed"]
    assert call(["explain", "trial.toml", *settings]) == 0
    assert "optimiser steps a round" in capsys.readouterr().out


TRAINED = re.compile(r"data: ([\d,]+)(?: of ([\d,]+))? examples to train on")


@dataclass(frozen=True)
class TrainingExamples:
    """The number of examples that clients train on, and the total if that is larger."""

    trained: int
    total: int | None


def counted(capsys: pytest.CaptureFixture[str], *settings: str) -> TrainingExamples:
    """The numbers that explain prints."""
    words = [word for setting in settings for word in ("-s", setting)]
    assert call(["explain", "hospitals.toml", *words]) == 0
    match = TRAINED.search(capsys.readouterr().out)
    assert match is not None
    total = None
    if match[2]:
        total = int(match[2])
    return TrainingExamples(int(match[1]), total)


HOSPITALS = """
[data]
name = "hospitals.csv"
[partition]
kind = "column"
column = "hospital"
[topology]
clients = 3
"""


def test_explain_counts_the_examples_that_clients_train_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each client's share is rounded."""
    write_table(folder / "hospitals.csv")
    (folder / "hospitals.toml").write_text(HOSPITALS)
    total = ROWS * 4 // 5
    assert counted(capsys) == TrainingExamples(total, None)

    without_own_test = counted(capsys, "partition.own_test=0.25")
    assert without_own_test.trained == pytest.approx(total * 0.75, abs=3)
    assert without_own_test.total == total

    without_validation = counted(capsys, "plan.validation=0.1")
    assert without_validation.trained == pytest.approx(total * 0.9, abs=3)
    assert without_validation.total == total

    with_skewed_labels = counted(capsys, "partition.alpha=0.1")
    assert 0 < with_skewed_labels.trained < total
    assert with_skewed_labels.total == total
