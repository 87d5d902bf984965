"""A run directory as bits: all that must be the same after a resume, and nothing that may differ
(times).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import Interrupted
from fedstill.core.files import digest
from fedstill.data.dataset import Dataset
from fedstill.running import journal as journals
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.recording import Quiet
from fedstill.running.runner import run

UninterruptedBits = Callable[[str], dict[str, Any]]
"""The bits of a setting's uninterrupted run."""


class StoppedCopy(Protocol):
    """Copies the directory of a run of a setting that was stopped after some stages."""

    def __call__(self, name: str, stages: int = 2) -> Path:
        """The copy."""


def bits(folder: Path) -> dict[str, Any]:
    """Every file of a finished run by its path: its SHA-256, or, where times stand in it, its
    content without them.
    """
    out: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock"):
        name = path.relative_to(folder).as_posix()
        if name == "journal.jsonl":
            out[name] = [journals.without_times(e) for e in journals.read_journal(path)]
        elif name == "summary.json":
            out[name] = journals.without_times(json.loads(path.read_bytes()))
        elif path.parent.name == "checkpoints" and path.suffix == ".json":
            manifest = json.loads(path.read_bytes())["manifest"]
            out[name] = {
                k: v for k, v in manifest.items() if k not in ("journal", "config")
            }  # config.toml is here itself
        else:
            out[name] = digest(path.read_bytes())
    restored = Checkpoints(
        folder / "checkpoints", digest((folder / "config.toml").read_bytes()), folder / "memory"
    ).latest()
    assert restored is not None
    out["order"] = [list(restored.state.params), list(restored.state.extra)]
    return out


def model_bytes(folder: Path) -> bytes:
    """The file of a finished run's model."""
    return (folder / "model.safetensors").read_bytes()


def assert_same_bits(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Name the first thing that differs."""
    assert got["model.safetensors"] == want["model.safetensors"], "the final model differs"
    assert sorted(got) == sorted(want), sorted(set(got) ^ set(want))
    for name in want:
        if isinstance(want[name], list):
            for number, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
                assert a == b, f"{name}, line {number}"
        assert got[name] == want[name], name


class StopAfter(Quiet):
    """Asks the run to end after so many stages."""

    def __init__(self, stages: int) -> None:
        self.left = stages

    def stop(self) -> bool:
        self.left -= 1
        return self.left == 0


def before_round_1(folder: Path) -> Path:
    """The directory as of a run that was killed before round 1: without a checkpoint, its journal
    cut to that.
    """
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if not json.loads(line).get("round")))
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink(missing_ok=True)
    return folder


def with_changed_config(folder: Path, config: str) -> Path:
    """The directory as of a finished run that began with another text of config.toml; without
    checkpoints, which know the journal.
    """
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "config.toml").write_text(config)
    journal, sha256 = folder / "journal.jsonl", digest(config.encode())
    journal.write_text(
        re.sub(r'(?<="config_sha256":")[0-9a-f]{64}', sha256, journal.read_text(), count=1)
    )
    return folder


def stopped(
    experiment: Experiment, folder: Path, stages: int = 2, data: Dataset | None = None
) -> Path:
    """The directory of a run that was stopped after so many stages.

    data: the toy images, if none are given.
    """
    with pytest.raises(Interrupted):
        run(experiment, folder, data or toys.blobs(), watch=StopAfter(stages))
    return folder
