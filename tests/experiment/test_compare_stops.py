"""A comparison that is stopped, or killed, leaves no run training behind it, and goes on where it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = "rounds = 100000\nmeasure = []\ntopology = { clients = 4 }\nplan = { epochs = 1 }\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_runs_of_a_comparison_end_with_it(how: signal.Signals, tmp_path: Path) -> None:
    """The signal goes to the comparing process alone, as from a job scheduler."""
    (tmp_path / "long.toml").write_text(CONFIG)
    words = ["compare", "long.toml", "--methods", "fedavg", "--seeds", "1,2", "--out", "all", "-q", "--jobs", "2"]
    command = [sys.executable, "-m", "fedstill", *words]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, env={**os.environ})
    try:
        journals = [tmp_path / f"all/fedavg/seed{seed}/journal.jsonl" for seed in (1, 2)]
        _wait(lambda: all(j.is_file() and b'"event":"round"' in j.read_bytes() for j in journals))
        process.send_signal(how)
        process.wait(timeout=60)
        _wait(lambda: not _grows(journals))
        assert not (tmp_path / "all/fedavg/seed1/summary.json").exists(), "it was stopped, not finished"
        _wait(lambda: not _alive(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _grows(files: list[Path], seconds: float = 2) -> bool:
    before = [f.stat().st_size for f in files]
    time.sleep(seconds)
    return before != [f.stat().st_size for f in files]


def _wait(done: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)
