"""A program that is ended takes all with it that it started, whatever is on the path."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedstill.flower.deployment import superlink, tasks
from fedstill.flower.deployment.folder import Federation
from fedstill.flower.deployment.programs import descendants
from flowers import needs_flower
from processes import running

psutil = pytest.importorskip("psutil")

DETACHING = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(grandchild.pid, flush=True)
time.sleep(600)
"""  # noqa: E501


@pytest.fixture
def _same_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


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
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert descendants(process.pid) == []


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


def client_with_runs() -> Any:
    """A client of a server that provides a run whenever it is asked."""
    from flwr.proto.runtime_pb2 import AcquireTaskResponse
    from flwr.proto.task_pb2 import Task

    answer = AcquireTaskResponse(task=Task(task_id=1), token="token")
    return SimpleNamespace(
        AcquireTask=lambda request: answer,
        SendTaskHeartbeat=lambda request: None,
        close=lambda: None,
    )


@needs_flower
def test_a_run_that_cannot_be_started_ends_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have no memory for a process, or no more open files."""
    monkeypatch.setattr(tasks, "POLL", 0.01)
    monkeypatch.setattr(tasks.Door, "tasks", lambda door: client_with_runs())
    monkeypatch.setattr(tasks.Door, "client", lambda door, *_, **__: client_with_runs())
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(tasks.Door, "command", lambda door, pipe: program)
    original = tasks.subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []
    attempts: list[int] = []
    end = threading.Event()

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        attempts.append(len(attempts))
        if attempts[-1] in (1, 2):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(original(*arguments, **options))
        if len(started) == 2:
            assert started[0].poll() is None
            end.set()
        return started[-1]

    monkeypatch.setattr(tasks.subprocess, "Popen", start)
    door = tasks.Door("127.0.0.1:1", tmp_path, tmp_path)
    tasks.carry_out_runs(door, end, {})
    assert len(started) == 2
    assert all(process.poll() is not None for process in started), "the server has ended"


@needs_flower
def test_a_server_that_can_execute_no_more_runs_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, sites and users would wait for it forever."""

    def fail(*_: Any) -> None:
        raise RuntimeError("an error that nobody expects")

    monkeypatch.setattr(superlink, "carry_out_runs", fail)
    federation = Federation(tmp_path, ("localhost",), "127.0.0.1", 1, 1)
    config = SimpleNamespace(is_ssl=False)
    server = SimpleNamespace(started=True, should_exit=False, config=config)
    operator = superlink.Operator(federation, cast(Any, server))
    operator.start()
    operator.join(60)
    assert not operator.is_alive()
    assert operator.failed
    assert server.should_exit
