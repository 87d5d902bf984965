"""A comparison that is stopped or killed leaves no process behind, and the same command continues
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.config.experiment import load
from fedstill.running import compare
from fedstill.running.compare import (
    KILLED,
    Outcome,
    _finish,
    _Pool,
    signals_blocked,
    variants,
)
from fedstill.running.runner import run

CONFIG = "rounds = 100000\nmeasure = []\ntopology = { clients = 4 }\nplan = { epochs = 1 }\n"


def comparison(config: str, *, seeds: str, jobs: int, methods: str = "fedavg") -> list[str]:
    """The command line of a comparison that writes its runs into the folder ``all``."""
    options = ["--methods", methods, "--seeds", seeds, "--jobs", str(jobs), "--out", "all", "-q"]
    return [sys.executable, "-m", "fedstill", "compare", config, *options]


def has_a_round(journal: Path) -> bool:
    """Whether a journal has the event of a round."""
    return journal.is_file() and b'"event":"round"' in journal.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_runs_of_a_comparison_end_with_it(number: signal.Signals, tmp_path: Path) -> None:
    """The signal goes to the comparing process alone, as from a job scheduler."""
    (tmp_path / "long.toml").write_text(CONFIG)
    command = comparison("long.toml", methods="fedavg", seeds="1,2", jobs=2)
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        journals = [tmp_path / f"all/fedavg/seed{seed}/journal.jsonl" for seed in (1, 2)]
        _wait(lambda: all(map(has_a_round, journals)))
        process.send_signal(number)
        process.wait(timeout=60)
        _wait(lambda: not _grows(journals))
        assert not (tmp_path / "all/fedavg/seed1/summary.json").exists(), (
            "it was stopped, not finished"
        )
        _wait(lambda: not _alive(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_processes_that_start_while_signals_are_blocked_ignore_ctrl_c() -> None:
    """The process that starts them receives the Ctrl-C as soon as signals are unblocked."""
    code = "import signal, time; print('up', flush=True); time.sleep(60)"
    heard: list[int] = []
    old_handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with signals_blocked():
        deaf = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        signal.raise_signal(signal.SIGINT)
        assert heard == []

    # A handler in Python is not inherited, so the next process is not deaf.
    assert heard == [signal.SIGINT]
    hearing = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )

    for process in (deaf, hearing):
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, old_handler)

    hearing.communicate(timeout=30)
    assert hearing.returncode != 0
    assert deaf.poll() is None
    deaf.kill()
    deaf.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["at once", "as the first process starts", "as workers start", "as runs begin"]
)
def test_ctrl_c_while_a_comparison_starts_is_one_line(moment: str, tmp_path: Path) -> None:
    """The signal goes to all of its processes, as from a terminal."""
    (tmp_path / "long.toml").write_text(CONFIG)
    command = comparison("long.toml", methods="fedavg", seeds="1,2,3", jobs=2)
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    moments: dict[str, Callable[[], bool]] = {
        "at once": lambda: (tmp_path / "all").is_dir(),
        # beside the first process, Python starts one that tracks resources
        "as the first process starts": lambda: _members(process.pid) > 2,
        "as workers start": lambda: _members(process.pid) > 3,
        "as runs begin": lambda: (tmp_path / "all/fedavg/seed1").is_dir(),
    }
    try:
        _wait(moments[moment], interval=0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert errors.count("\n") == 1, errors
        stopped = "fedstill: stopped with 3 of 3 runs unfinished;"
        assert errors.startswith((stopped, "fedstill: ended at once;"))
        _wait(lambda: not _alive(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_named_and_the_others_are_counted(
    tmp_path: Path,
) -> None:
    (tmp_path / "long.toml").write_text(CONFIG)
    command = comparison("long.toml", seeds="1,2,3", jobs=1)
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = tmp_path / "all/fedavg/seed1/journal.jsonl"
    _wait(lambda: has_a_round(journal))
    holder = json.loads((journal.parent / "holder.json").read_text())
    os.kill(holder["process"], signal.SIGKILL)

    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    killed, stopped = errors.splitlines()
    assert killed.startswith("fedstill: fedavg, seed 1: ")
    assert "2 of 3 runs" in stopped


def _members(group: int) -> int:
    """How many processes a group has."""
    count = 0
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            count += place.name.isdecimal() and os.getpgid(int(place.name)) == group
    return count


def completed(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end."""
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
class BrokenExecutor(ProcessPoolExecutor):
    """A pool of which an idle process was killed."""

    def __init__(self) -> None:
        """Start no process."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise BrokenProcessPool("a process was terminated abruptly")


def test_a_run_fails_if_an_idle_process_of_its_pool_was_killed(tmp_path: Path) -> None:
    (variant,) = variants(load(None), tmp_path)
    outcome = Outcome(variant, 1)
    pool = _Pool(BrokenExecutor(), size=1)

    future = pool.submit(partial(int, 1))
    _finish(outcome, future, is_stopping=False)

    assert outcome.state == "failed"
    assert outcome.problem == KILLED.problem


def test_of_two_comparisons_in_one_folder_the_second_names_the_process_of_the_first(
    tmp_path: Path,
) -> None:
    (tmp_path / "short.toml").write_text(CONFIG.replace("100000", "25"))
    command = comparison("short.toml", methods="fedavg,fedprox", seeds="1,2", jobs=1)
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "all/fedavg/seed1/journal.jsonl"
    _wait(lambda: has_a_round(journal))

    second = completed(command, tmp_path)
    assert first.poll() is None, "the first still runs"
    assert second.returncode == 2
    assert second.stderr.startswith(
        f"fedstill: all is being written by another process, {first.pid} on "
    )
    assert second.stderr.count("\n") == 1

    _, errors = first.communicate(timeout=300)
    assert (first.returncode, errors) == (0, "")
    assert len(list(tmp_path.glob("all/*/*/summary.json"))) == 4
    assert completed(command, tmp_path).returncode == 0, "the same command succeeds again"


def _alive(group: int) -> bool:
    """Whether a group of processes has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _grows(files: list[Path], seconds: float = 2) -> bool:
    """Whether the size of a file changes within some seconds."""
    sizes = [file.stat().st_size for file in files]
    time.sleep(seconds)
    return sizes != [file.stat().st_size for file in files]


def _wait(condition: Callable[[], bool], seconds: float = 90, interval: float = 0.1) -> None:
    """Wait until a condition holds; fail after some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(interval)


def test_a_comparison_whose_runs_are_all_finished_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(toys.SMALL)
    (variant,) = variants(load(tmp_path / "small.toml"), tmp_path / "all", seeds=(1,))
    result = run(variant.experiment, variant.folder)
    monkeypatch.setattr(compare, "_workers", None)
    states: list[str] = []

    def note_states(outcomes: Sequence[compare.Outcome]) -> None:
        states.extend(outcome.state for outcome in outcomes)

    (outcome,) = compare.carry_out_runs([variant], 1, note_states)

    assert outcome.state == "finished"
    assert outcome.exit_code == 0
    assert outcome.done == variant.settings.rounds
    assert outcome.accuracy == result.accuracy
    assert states == ["finished"], "observers are notified"
