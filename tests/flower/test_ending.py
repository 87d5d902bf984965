"""A program that is ended takes all with it that it started, whatever is on the path."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedstill.flower.deployment import tasks
from fedstill.flower.deployment.programs import descendants, running
from flowers import needs_flower

psutil = pytest.importorskip("psutil")

DETACHING = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(grandchild.pid, flush=True)
time.sleep(600)
"""  # noqa: E501


@pytest.fixture
def _same_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_same_signals")
def test_what_a_program_detached_ends_with_it_even_without_any_program_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no ps there
    with running([sys.executable, "-c", DETACHING], {}, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        grandchild = psutil.Process(int(program.stdout.readline()))
        assert [p.pid for p in descendants(program.pid)] == [grandchild.pid]
        assert runs(grandchild)
    assert program.poll() is not None
    program.stdout.close()
    end = time.monotonic() + 30
    while runs(grandchild):
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.05)


def runs(process: Any) -> bool:
    """Whether it is there and no zombie: in a container nobody may take notice of one that
    ended.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_has_ended_started_nothing() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert descendants(done.pid) == []


@needs_flower
def test_no_run_is_started_once_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server cannot be reached: it is asked again until it ends."""
    monkeypatch.setattr(tasks, "AGAIN", 0.01)
    monkeypatch.setattr(tasks, "POLL", 0.01)
    key = tmp_path / "operator.key"
    key.write_text("k" * 43)
    end = threading.Event()
    door = tasks.Door("127.0.0.1:1", key, key)
    carrying = threading.Thread(target=tasks.carry_out_runs, args=(door, end, {}), daemon=True)
    carrying.start()
    carrying.join(0.2)
    assert carrying.is_alive()
    end.set()
    carrying.join(60)
    assert not carrying.is_alive()
