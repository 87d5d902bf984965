"""What the operator's commands make of a server that is silent: what may have arrived is not asked
twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import DeployFailed
from fedstill.flower import remote_runs
from fedstill.flower.deployment.control import (
    Control,
    NoAnswer,
    NotListening,
    SiteStatus,
    when_it_listens,
)
from fedstill.running.recording import Quiet
from fedstill.running.runner import run

httpx = pytest.importorskip("httpx")
control_client = pytest.importorskip("flwr.supercore.control").ControlHttpClient

SILENCE: dict[str, tuple[Any, type[DeployFailed]]] = {
    "nobody listens": (httpx.ConnectError("refused"), NotListening),
    "nobody answers the call": (httpx.ConnectTimeout("late"), NotListening),
    "the answer does not come": (httpx.ReadTimeout("late"), NoAnswer),
    "the connection breaks": (httpx.RemoteProtocolError("closed"), NoAnswer),
}


def asked(monkeypatch: pytest.MonkeyPatch, raises: Exception) -> list[str]:
    """The questions that reach a server whose answer is this exception."""
    questions: list[str] = []

    def stop(_: Any, __: Any) -> None:
        questions.append("stop")
        raise raises

    monkeypatch.setattr(control_client, "StopRun", stop)
    return questions


@pytest.mark.parametrize("silence", SILENCE)
def test_each_silence_has_its_name(silence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raises, kind = SILENCE[silence]
    asked(monkeypatch, raises)
    with pytest.raises(DeployFailed, match=r"the server at 127.0.0.1:1 .* stop-run") as error:
        Control("127.0.0.1:1", None, b"x" * 43).stop(1)
    assert type(error.value) is kind


@pytest.mark.parametrize("silence", SILENCE)
def test_only_what_did_not_arrive_is_asked_again(
    silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises, kind = SILENCE[silence]
    questions = asked(monkeypatch, raises)
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("time.sleep", lambda _: None)
    question: Callable[[], None] = lambda: Control("127.0.0.1:1", None, b"x" * 43).stop(1)  # noqa: E731
    with pytest.raises(kind):
        when_it_listens(question, 3.0)
    assert len(questions) == (3 if kind is NotListening else 1)


def test_a_command_that_waits_for_the_server_says_so_once_and_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    stops = iter([False, False, True])

    def ask() -> None:
        raise NotListening("the server cannot be reached")

    with pytest.raises(KeyboardInterrupt):
        when_it_listens(ask, 60.0, lambda: next(stops))

    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("the server cannot be reached; trying again for 60 s")


def answers(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A server that answers questions about runs with this HTTP status."""
    request = httpx.Request("POST", "http://fed")
    response = httpx.Response(status, text="unknown", request=request)

    def refuse(_: Any, __: Any) -> None:
        response.raise_for_status()

    monkeypatch.setattr(control_client, "ListRuns", refuse)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_run_is_watched_further_while_the_server_is_busy(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, status)
    server = Control("127.0.0.1:1", None, b"x" * 43)
    with pytest.raises(NoAnswer):
        server.ended(7)
    remote_runs._raise_if_ended(server, 7, tmp_path)

    answers(monkeypatch, 403)
    with pytest.raises(DeployFailed):
        remote_runs._raise_if_ended(server, 7, tmp_path)


def test_a_run_of_which_the_server_does_not_know_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server keeps no list of runs when it ends."""
    answers(monkeypatch, 404)
    end = Control("127.0.0.1:1", None, b"x" * 43).ended(7)
    assert end is not None
    assert "restarted" in end


class Listener(Quiet):
    """Keeps the rounds that are announced. ``writes``: what the server does after each reading of
    the journal.
    """

    def __init__(self, *writes: Callable[[], Any]) -> None:
        self.first = 0
        self.rounds: list[int] = []
        self.writes = list(writes)

    def started(self, folder: Path, round: int) -> None:
        self.first = round

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        self.rounds.append(event["round"])

    def stop(self) -> bool:
        self.writes.pop(0)()
        return False


def test_a_resumed_run_announces_each_new_round_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last ones, too, which the server writes just before the run ends."""
    settings = resolve(toys.toy(rounds=5))
    finished = tmp_path / "finished"
    run(toys.toy(rounds=5), finished, toys.blobs())
    lines = (finished / "journal.jsonl").read_bytes().splitlines(keepends=True)
    ends = [i + 1 for i, line in enumerate(lines) if json.loads(line)["event"] == "round"]
    assert len(ends) == 5
    folder = tmp_path / "resumed"
    folder.mkdir()

    def write(lines_written: list[bytes]) -> None:
        (folder / "journal.jsonl").write_bytes(b"".join(lines_written))

    def finish() -> None:
        write(lines)
        (folder / "summary.json").write_bytes((finished / "summary.json").read_bytes())

    write(lines[: ends[1]])
    server = SimpleNamespace(start=lambda app, values: 1)
    monkeypatch.setattr(remote_runs.Control, "of", lambda federation: server)
    monkeypatch.setattr(remote_runs, "load_federation", lambda folder: SimpleNamespace(app=b""))
    monkeypatch.setattr(remote_runs.Result, "of", lambda folder: None)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    listener = Listener(lambda: write(lines[: ends[2]]), lambda: None, finish)
    remote_runs.FlowerRuns().submit(settings, folder, True, listener)
    assert listener.first == 3
    assert listener.rounds == [3, 4, 5]


def test_sites_that_are_not_connected_are_named_when_they_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [
        [SiteStatus("client0"), SiteStatus("client1", is_online=True), SiteStatus("client2")],
        [SiteStatus("client0"), SiteStatus("client1", is_online=True), SiteStatus("client2")],
        NoAnswer("the server restarts"),
        [SiteStatus("client0", is_online=True), SiteStatus("client1", is_online=True)],
        [SiteStatus("client0", is_online=True), SiteStatus("client1")],
    ]
    answers = iter(states)

    def site_states(*_: object) -> list[SiteStatus]:
        state = next(answers)
        if isinstance(state, NoAnswer):
            raise state
        return state

    monkeypatch.setattr(remote_runs, "site_states", site_states)
    server = SimpleNamespace()
    offline = remote_runs.OfflineSites(server, server)  # type: ignore[arg-type]
    named_sites = []
    for _ in states:
        offline.announce()
        printed = capsys.readouterr().out
        named_sites.append([name for name in ("client0", "client1", "client2") if name in printed])
    assert named_sites == [["client0", "client2"], [], [], [], ["client1"]]


def test_a_long_wait_for_sites_is_explained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(remote_runs.time, "monotonic", lambda: clock.now)
    announcer = remote_runs._RoundAnnouncer(tmp_path, 2, Quiet(), announced=0, grew_at=clock.now)
    lengths = iter([0, 500, 500, 500, 500])
    monkeypatch.setattr(remote_runs, "_length", lambda folder: next(lengths))
    printed = []
    for seconds in (30, 20, 30, 30, 600):
        clock.now += seconds
        announcer.announce_new()
        announcer.explain_waiting()
        printed.append(capsys.readouterr().out != "")
    assert printed == [False, False, False, True, False]
