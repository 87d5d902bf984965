"""How often a program asks while there is work, and while there is none."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fedstill.flower.fleet import SOONEST, Pace, fetch_soon
from flowers import needs_flower


def test_it_asks_often_while_there_is_work_and_more_and_more_rarely_after_it() -> None:
    now = SimpleNamespace(t=100.0)
    pace = Pace(lambda: now.t)
    assert pace.wait(3.0) == 3.0, "there was no work yet"
    pace.worked()
    waits = []
    for _ in range(300):
        waits.append(pace.wait(3.0))
        now.t += waits[-1]
    assert waits[0] == SOONEST
    assert waits == sorted(waits)
    assert waits[-1] == 3.0
    pace.worked()
    assert pace.wait(3.0) == SOONEST
    assert pace.wait(0.01) == 0.01, "never longer than asked for"


@needs_flower
def test_flowers_client_sleeps_by_the_pace_and_nothing_else_of_its_clock_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flwr.supernode import start_client_internal

    from fedstill.flower.deployment import supernode

    slept = list[float]()
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(supernode, "fetch_soon", lambda: True)
    monkeypatch.setattr(supernode.time, "sleep", slept.append)
    assert supernode.awake().__name__ == "flower_supernode"
    clock = start_client_internal.time
    assert isinstance(clock, supernode.Awake)
    assert clock.monotonic is time.monotonic
    for seconds in (3.0, 0.5, 3.0):
        clock.sleep(seconds)
    assert slept[0] == 3.0, "idle"
    assert slept[1] == SOONEST, "it waits for an answer"
    assert slept[2] < 0.2, "it has just had one"


@needs_flower
def test_a_client_that_sleeps_otherwise_by_now_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flwr.supernode import start_client_internal

    from fedstill.flower.deployment import supernode

    other = object()
    monkeypatch.setattr(start_client_internal, "time", other)
    supernode.awake()
    assert start_client_internal.time is other
    assert "sleeps as it likes" in capsys.readouterr().err


@needs_flower
def test_what_tasks_need_is_imported_without_a_thread() -> None:
    import subprocess
    import sys

    code = "import fedstill.flower.warm, threading; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@needs_flower
def test_parts_of_a_message_are_asked_for_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    from flwr.supercore.inflatable import inflatable_utils

    pulls = [inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree]
    before = [dict(inspect.signature(f).parameters) for f in pulls]
    for f in pulls:
        monkeypatch.setattr(f, "__kwdefaults__", f.__kwdefaults__)
    assert fetch_soon()
    for f, were in zip(pulls, before, strict=True):
        now = inspect.signature(f).parameters
        assert now["initial_backoff"].default == SOONEST
        assert {k: p.default for k, p in now.items() if k != "initial_backoff"} == {
            k: p.default for k, p in were.items() if k != "initial_backoff"
        }
