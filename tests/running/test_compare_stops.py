"""A comparison that is stopped, or killed, leaves no run training behind it, and goes on where it
was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import toys
from fedstill.config.experiment import load
from fedstill.running import compare
from fedstill.running.compare import signals_blocked, variants
from fedstill.running.runner import run

CONFIG = "rounds = 100000\nmeasure = []\ntopology = { clients = 4 }\nplan = { epochs = 1 }\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_runs_of_a_comparison_end_with_it(how: signal.Signals, tmp_path: Path) -> None:
    """The signal goes to the comparing process alone, as from a job scheduler."""
    (tmp_path / "long.toml").write_text(CONFIG)
    words = [
        "compare",
        "long.toml",
        "--methods",
        "fedavg",
        "--seeds",
        "1,2",
        "--out",
        "all",
        "-q",
        "--jobs",
        "2",
    ]
    command = [sys.executable, "-m", "fedstill", *words]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, env={**os.environ})
    try:
        journals = [tmp_path / f"all/fedavg/seed{seed}/journal.jsonl" for seed in (1, 2)]
        _wait(lambda: all(j.is_file() and b'"event":"round"' in j.read_bytes() for j in journals))
        process.send_signal(how)
        process.wait(timeout=60)
        _wait(lambda: not _grows(journals))
        assert not (tmp_path / "all/fedavg/seed1/summary.json").exists(), (
            "it was stopped, not finished"
        )
        _wait(lambda: not _alive(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_processes_that_start_deaf_take_no_notice_of_ctrl_c_and_no_ctrl_c_is_lost() -> None:
    code = "import signal, time; print('up', flush=True); time.sleep(60)"
    heard: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with signals_blocked():
        deaf_one = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        signal.raise_signal(signal.SIGINT)
        assert heard == []
    # a handler of one's own is not inherited, so the next process hears it, too
    assert heard == [signal.SIGINT]
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    for process in (deaf_one, other):
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, old)
    other.communicate(timeout=30)
    assert other.returncode != 0
    assert deaf_one.poll() is None
    deaf_one.kill()
    deaf_one.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", ["at once", "as the first process starts", "as workers start", "as runs begin"]
)
def test_ctrl_c_while_a_comparison_starts_is_one_line(when: str, tmp_path: Path) -> None:
    """The signal goes to all of its processes, as from a terminal."""
    (tmp_path / "long.toml").write_text(CONFIG)
    words = [
        "compare",
        "long.toml",
        "--methods",
        "fedavg",
        "--seeds",
        "1,2,3",
        "--out",
        "all",
        "-q",
        "--jobs",
        "2",
    ]
    command = [sys.executable, "-m", "fedstill", *words]
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
        # beside this one, one that counts resources
        "as the first process starts": lambda: _members(process.pid) > 2,
        "as workers start": lambda: _members(process.pid) > 3,
        "as runs begin": lambda: (tmp_path / "all/fedavg/seed1").is_dir(),
    }
    try:
        _wait(moments[when], every=0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 1
        assert said.count("\n") == 1, said
        assert said.startswith(
            ("fedstill: stopped with 3 of 3 runs unfinished;", "fedstill: ended at once;")
        )
        _wait(lambda: not _alive(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_named_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "long.toml").write_text(CONFIG)
    words = ["compare", "long.toml", "--seeds", "1,2,3", "--out", "all", "-q", "--jobs", "1"]
    command = [sys.executable, "-m", "fedstill", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = tmp_path / "all/fedavg/seed1/journal.jsonl"
    _wait(lambda: journal.is_file() and b'"event":"round"' in journal.read_bytes())
    os.kill(json.loads((journal.parent / "holder.json").read_text())["process"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    killed, stopped = said.splitlines()
    assert killed.startswith("fedstill: fedavg, seed 1: ")
    assert "2 of 3 runs" in stopped


def _members(group: int) -> int:
    """How many processes a group has."""
    count = 0
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            count += place.name.isdecimal() and os.getpgid(int(place.name)) == group
    return count


@pytest.mark.slow
def test_of_two_comparisons_in_one_folder_the_second_says_who_works_there(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(CONFIG.replace("100000", "25"))
    words = [
        "compare",
        "short.toml",
        "--methods",
        "fedavg,fedprox",
        "--seeds",
        "1,2",
        "--out",
        "all",
        "-q",
        "--jobs",
        "1",
    ]
    command = [sys.executable, "-m", "fedstill", *words]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "all/fedavg/seed1/journal.jsonl"
    _wait(lambda: journal.is_file() and b'"event":"round"' in journal.read_bytes())
    second = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert first.poll() is None, "the first was still at work"
    assert second.returncode == 2
    assert second.stderr.startswith(
        f"fedstill: all is being written by another process, {first.pid} on "
    )
    assert second.stderr.count("\n") == 1
    _, said = first.communicate(timeout=300)
    assert (first.returncode, said) == (0, "")
    assert len(list(tmp_path.glob("all/*/*/summary.json"))) == 4
    third = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert third.returncode == 0, "a finished comparison may be asked for again"


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


def _wait(done: Callable[[], bool], seconds: float = 90, every: float = 0.1) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it took too long"
        time.sleep(every)


def test_a_comparison_whose_runs_are_all_finished_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(toys.SMALL)
    (one,) = variants(load(tmp_path / "small.toml"), tmp_path / "all", seeds=(1,))
    result = run(one.experiment, one.folder)
    monkeypatch.setattr(compare, "_workers", None)
    seen: list[str] = []
    (outcome,) = compare.carry_out_runs(
        [one], 1, lambda outcomes: seen.extend(o.state for o in outcomes)
    )
    assert (outcome.state, outcome.exit_code, outcome.done) == ("finished", 0, one.settings.rounds)
    assert outcome.accuracy == result.accuracy
    assert seen == ["finished"], "whoever watches is told"
