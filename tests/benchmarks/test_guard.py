"""The guard against slower versions: which release it compares with, and what a run takes beyond
training.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchmarks.beside.trees import NoSuchCommit
from benchmarks.guard import last_release, overhead


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def commit(repository: Path, message: str) -> None:
    git(repository, "commit", "--allow-empty", "-q", "-m", message)


def test_the_last_release_is_the_nearest_tag_of_a_version(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    commit(tmp_path, "one")
    with pytest.raises(NoSuchCommit, match="--rev"):
        last_release(tmp_path)
    git(tmp_path, "tag", "v0.1.0")
    commit(tmp_path, "two")
    git(tmp_path, "tag", "v0.2.0")
    commit(tmp_path, "three")
    git(tmp_path, "tag", "nightly")
    assert last_release(tmp_path) == "v0.2.0"


def test_the_overhead_is_the_time_outside_training() -> None:
    events = [
        {"event": "start"},
        {"event": "round", "seconds_training": 1.0, "seconds": 5.0},
        {"event": "client", "seconds_training": 9.0},
        {"event": "round", "seconds_training": 0.5, "seconds": 0.6},
    ]
    assert overhead(3.0, events) == pytest.approx(1.5)
