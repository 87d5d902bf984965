"""When a site asks its guards: before new work, before a reply is kept, before any reply leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from test_flower_sites import executor, request_of, settings_of

from fedstill.core.errors import Refused
from fedstill.core.extensions import SiteGuard, SiteRequest
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Reply, Stage
from fedstill.flower import site
from flowers import needs_flower

pytestmark = needs_flower


@dataclass
class Watching(SiteGuard):
    """Notes what it is asked, and refuses in one place."""

    refuses: str = ""
    calls: list[str] = field(default_factory=list)

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        self.note("admit")

    def check(self, request: SiteRequest, work: ClientWork, reply: Reply) -> None:
        assert reply.content
        self.note("check")

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        self.note("leaving")

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.refuses:
            raise Refused(f"{call} says no")


def guarded(monkeypatch: pytest.MonkeyPatch, *guards: SiteGuard) -> None:
    """Give sites these guards."""
    monkeypatch.setattr(site, "site_guards", lambda prepared, folder: guards)


def test_new_work_is_admitted_and_checked_and_a_kept_reply_only_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = Watching()
    guarded(monkeypatch, guard)
    request = request_of(settings_of())
    assert executor(tmp_path)(request).failure == ""
    assert guard.calls == ["admit", "check", "leaving"]
    assert executor(tmp_path)(request).failure == ""
    assert guard.calls == ["admit", "check", "leaving", "leaving"]


@pytest.mark.parametrize(("refuses", "is_kept"), [("admit", 0), ("check", 0), ("leaving", 1)])
def test_what_a_guard_refuses_does_not_leave(
    refuses: str, is_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded(monkeypatch, Watching(refuses))
    answer = executor(tmp_path)(request_of(settings_of()))
    assert answer.failure == f"{refuses} says no"
    assert not answer.content
    assert len([*tmp_path.rglob("*.reply")]) == is_kept


def test_a_request_that_is_not_the_runs_reaches_no_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = Watching()
    guarded(monkeypatch, guard)
    request = replace(request_of(settings_of()), stage=Stage(1, 0, "another", (0, 1, 2)))
    assert "schedule" in executor(tmp_path)(request).failure
    assert guard.calls == []


@dataclass
class Renames(SiteGuard):
    """Answers with a group that names the guards which a reply has passed."""

    name: str

    def answer(self, request: SiteRequest, respond: Callable[[Payload], Reply]) -> Reply:
        passed = f"{request.payload.get('passed', '')}{self.name}"
        reply = respond(Payload(request.payload, passed=passed))
        return replace(reply, content=Payload(passed=f"{passed}-{reply.content.get('passed', '')}"))


def test_the_first_guard_is_the_outermost_and_the_memory_of_the_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded(monkeypatch, Renames("a"), Renames("b"))
    answer = executor(tmp_path)(request_of(settings_of("moon")))
    assert answer.failure == ""
    assert dict(answer.content) == {"passed": "a-ab-"}
    assert answer.memory is not None
