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
    """Every file of a finished run by its path: its SHA-256, or, if it contains times, its content
    without them.
    """
    bits_by_path: dict[str, Any] = {}
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    for path in sorted(paths):
        bits_by_path[path.relative_to(folder).as_posix()] = _bits_of_file(path)

    config = digest((folder / "config.toml").read_bytes())
    restored = Checkpoints(folder / "checkpoints", config, folder / "memory").latest()
    assert restored is not None
    bits_by_path["order"] = [list(restored.state.params), list(restored.state.extra)]
    return bits_by_path


def _bits_of_file(path: Path) -> Any:
    if path.name == "journal.jsonl":
        return journals.without_times(journals.read_journal(path))
    if path.name == "summary.json":
        return journals.without_times(json.loads(path.read_bytes()))
    if path.parent.name == "checkpoints" and path.suffix == ".json":
        manifest = json.loads(path.read_bytes())["manifest"]
        # The journal has times, and the config is compared as a file.
        return {key: value for key, value in manifest.items() if key not in ("journal", "config")}
    return digest(path.read_bytes())


def model_bytes(folder: Path) -> bytes:
    """The file of a finished run's model."""
    return (folder / "model.safetensors").read_bytes()


def assert_same_bits(compared: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two runs have the same bits, and name the first difference."""
    assert compared["model.safetensors"] == expected["model.safetensors"], "the final model differs"
    assert sorted(compared) == sorted(expected), sorted(set(compared) ^ set(expected))
    for name in expected:
        if isinstance(expected[name], list):
            lines = zip(compared[name], expected[name], strict=True)
            for number, (line, expected_line) in enumerate(lines):
                assert line == expected_line, f"{name}, line {number}"
        assert compared[name] == expected[name], name


class StopAfter(Quiet):
    """Stops the run after some stages."""

    def __init__(self, stages: int) -> None:
        self.remaining = stages

    def stop(self) -> bool:
        self.remaining -= 1
        return self.remaining == 0


def before_round_1(folder: Path) -> Path:
    """The directory as of a run that was killed before round 1: without a checkpoint, and its
    journal without rounds.
    """
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines_before_round_1 = [line for line in lines if not json.loads(line).get("round")]
    journal.write_bytes(b"".join(lines_before_round_1))
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink(missing_ok=True)
    return folder


def with_changed_config(folder: Path, config: str) -> Path:
    """The directory as of a finished run that began with another config.toml; without checkpoints,
    which contain the hash of the journal.
    """
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "config.toml").write_text(config)
    sha256 = digest(config.encode())
    journal = folder / "journal.jsonl"
    text = re.sub(r'(?<="config_sha256":")[0-9a-f]{64}', sha256, journal.read_text(), count=1)
    journal.write_text(text)
    return folder


def stopped(
    experiment: Experiment, folder: Path, stages: int = 2, data: Dataset | None = None
) -> Path:
    """The directory of a run that was stopped after some stages.

    data: the toy images, if none are given.
    """
    with pytest.raises(Interrupted):
        run(experiment, folder, data or toys.blobs(), watch=StopAfter(stages))
    return folder
