"""Progress where the standard error is no terminal: few lines, which make sense in a log."""

from __future__ import annotations

import io
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.cli import call
from fedstill.report.progress import (
    Bar,
    Followed,
    Lines,
    ManyRuns,
    RunBars,
    RunLines,
    followed,
    followed_runs,
)
from fedstill.running.compare import Outcome, variants


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def round_event(round: int, accuracy: float | None = 0.5, refused: int = 0) -> dict[str, Any]:
    """The event of a finished round."""
    return {"round": round, "accuracy": accuracy, "forgetting": -0.01, "refused": refused}


def test_the_first_and_the_last_round_have_a_line_and_those_between_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Followed(Lines(100, "fedavg", clock)) as watch:
        watch.started(Path("runs/one"), 1)
        for number in range(1, 101):
            clock.now += 4
            watch.stage(number, 100, 0, 1)
            watch.round(round_event(number, refused=number // 100), 100)

    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "", "the standard output is for the table"
    assert "runs/one" in lines[0]
    assert "accuracy 50.00 %, forgetting -1.00 %, 4 s, about 6 min 36 s left" in lines[1]
    assert "16 s, about 6 min 24 s left" in lines[2]
    assert "1 refused, 6 min 40 s" in lines[-1]
    assert [int(line.split()[2]) for line in lines[1:]] == list(range(1, 101, 3))


def test_a_long_round_has_lines_for_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Followed(Lines(2, "fedseq", clock)) as watch:
        for index in range(4):
            clock.now += 6
            watch.stage(1, 2, index, 4)
        watch.round(round_event(1, None), 2)
    assert capsys.readouterr().err.splitlines() == [
        "fedseq: round 1 of 2, stage 2 of 4, 12 s",
        "fedseq: round 1 of 2, forgetting -1.00 %, 24 s, about 24 s left",
    ]


def test_a_resumed_run_counts_its_own_rounds_only(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Followed(Lines(1000, "fedavg", clock)) as watch:
        clock.now = 30  # to read the data
        watch.started(Path("runs/long"), 900)
        for number in (900, 901, 902):
            clock.now += 10
            watch.round(round_event(number), 1000)

    lines = capsys.readouterr().err.splitlines()
    assert "round 900 of 1000, in runs/long" in lines[0]
    times = [line.rpartition("%, ")[2] for line in lines[1:]]
    assert times == [
        "40 s, about 1 h 6 min left",
        "50 s, about 16 min 30 s left",
        "1 min 0 s, about 16 min 20 s left",
    ]


def test_ctrl_c_stops_after_the_stage_and_pressed_twice_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Followed(Lines(2, "fedavg", Clock())) as watch:
        assert not watch.stop()
        signal.raise_signal(signal.SIGINT)
        assert watch.stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "Ctrl-C" in capsys.readouterr().err


class InterruptedFile(io.RawIOBase):
    """A file whose first write is interrupted by Ctrl-C."""

    def __init__(self) -> None:
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        is_first = not self.content
        self.content += bytes(data)
        if is_first:
            signal.raise_signal(signal.SIGINT)
        return len(data)


def test_ctrl_c_during_a_line_is_answered_after_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffered stream raises RuntimeError for a write inside of a write."""
    file = InterruptedFile()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BufferedWriter(file)))
    with Followed(Lines(2, "fedavg", Clock())) as watch:
        watch.started(Path("run"), 1)
        assert watch.stop()

    first_line, answer = file.content.decode().splitlines()
    assert first_line == "fedavg: 2 rounds, in run"
    assert "Ctrl-C" in answer


def test_quiet_prints_nothing_and_a_terminal_has_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with followed(2, "fedavg", quiet=True) as watch:
        watch.stage(1, 2, 0, 1)
        watch.round(round_event(1), 2)
    assert capsys.readouterr() == ("", "")
    assert type(followed_runs(quiet=True)) is ManyRuns
    assert isinstance(followed(2, "fedavg").display, Lines)
    assert isinstance(followed_runs(), RunLines)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich knows a terminal
    assert isinstance(followed(2, "fedavg").display, Bar)
    assert isinstance(followed_runs(), RunBars)


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    """Two runs of ten rounds that have not started, seeds 1 and 2."""
    experiment = replace(toys.toy(rounds=10), data="digits")
    runs = variants(experiment, tmp_path, ("fedavg",), (1, 2))
    return [Outcome(run, 10) for run in runs]


@dataclass
class FollowedJournal:
    """A journal that a test rewrites, and the outcome that follows it."""

    outcome: Outcome
    path: Path

    def rounds_after(self, text: str) -> int:
        """How many rounds are finished, once the journal has this text."""
        self.path.write_text(text)
        self.outcome.follow()
        return self.outcome.done


START_LINE = '{"event":"start"}\n'
FIRST_LINE = '{"event":"round","round":1,"accuracy":0.1}\n'
SECOND_LINE = '{"event":"round","round":2,"accuracy":0.2}\n'
THIRD_LINE = '{"event":"round","round":3,"accuracy":0.3}\n'


@pytest.fixture
def followed_journal(outcomes: list[Outcome]) -> FollowedJournal:
    """The journal of the first run, which is running and has written nothing."""
    outcome = outcomes[0]
    outcome.state = "running"
    outcome.variant.folder.mkdir(parents=True)
    return FollowedJournal(outcome, outcome.variant.folder / "journal.jsonl")


def test_a_journal_is_read_on_from_where_it_ended(followed_journal: FollowedJournal) -> None:
    outcome = followed_journal.outcome
    start = START_LINE
    one_round = START_LINE + FIRST_LINE
    two_rounds = one_round + SECOND_LINE

    outcome.follow()
    assert outcome.done == 0, "the journal does not exist yet"
    assert followed_journal.rounds_after("") == 0
    assert followed_journal.rounds_after(start[:5]) == 0
    assert outcome.accuracy is None

    assert followed_journal.rounds_after(one_round) == 1
    assert followed_journal.rounds_after(one_round + SECOND_LINE[:20]) == 1
    assert outcome.accuracy == 0.1
    assert followed_journal.rounds_after(two_rounds) == 2
    assert outcome.accuracy == 0.2

    unreadable = "{" * len(two_rounds)
    assert followed_journal.rounds_after(unreadable) == 2, "nothing is read a second time"
    assert outcome.accuracy == 0.2

    assert followed_journal.rounds_after(one_round) == 1, "a resumed run first cuts its journal"
    assert outcome.accuracy == 0.1
    assert followed_journal.rounds_after(two_rounds) == 2
    assert outcome.accuracy == 0.2

    outcome.state = "failed"
    assert followed_journal.rounds_after(two_rounds + THIRD_LINE) == 3, "the last rounds of a run"
    assert outcome.accuracy == 0.3


def test_a_comparison_names_the_runs_that_ended_and_the_progress_of_all(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    first, second = outcomes
    with RunLines(clock) as lines:
        first.state = "running"
        first.done = 4  # rounds before the comparison was resumed
        lines.show(outcomes)
        for _ in range(3):
            clock.now += 5
            first.done += 1
            lines.show(outcomes)

        first.state = "finished"
        first.done = 10
        first.accuracy = 0.75
        second.state = "running"
        lines.show(outcomes)

        second.state = "failed"
        second.done = 3
        lines.show(outcomes)
        lines.show(outcomes)

    assert capsys.readouterr().err.splitlines() == [
        "4 of 20 rounds in 2 runs, 1 running, 0 s",
        "6 of 20 rounds in 2 runs, 1 running, 10 s, about 1 min 10 s left",
        "fedavg, seed 1: finished, accuracy 75.00 %, 1 of 2 runs",
        "fedavg, seed 2: failed at round 3 of 10, 2 of 2 runs",
    ]


def test_runs_that_are_not_known_yet_are_counted(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    first, second = outcomes
    with RunLines(clock, runs=3) as lines:
        first.state = "running"
        lines.show([first])

        clock.now = 10
        first.state = "finished"
        first.done = 10
        first.accuracy = 0.5
        lines.show([first, second])

    assert capsys.readouterr().err.splitlines() == [
        "0 of 30 rounds in 3 runs, 1 running, 0 s",
        "10 of 30 rounds in 3 runs, 0 running, 10 s, about 20 s left",
        "fedavg, seed 1: finished, accuracy 50.00 %, 1 of 3 runs",
    ]


SHORT_CONFIG = """
rounds = 3
measure = []
topology = { clients = 2 }
[data]
train_size = 100
[plan]
epochs = 1
"""


@pytest.fixture
def short_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The config of a short run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.toml").write_text(SHORT_CONFIG)
    return "short.toml"


def test_commands_write_lines_to_the_standard_error(
    short_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", short_config, "--out", "run"]) == 0

    printed = capsys.readouterr()
    heads = [line.split(",")[0] for line in printed.err.splitlines()]
    assert heads[:2] == ["fedavg: 3 rounds", "fedavg: round 1 of 3"]
    assert heads[-1] == "fedavg: round 3 of 3"
    assert "round 1" not in printed.out

    compare = ["compare", short_config, "--seeds", "1,2", "--jobs", "1", "--out", "comparison"]
    assert call(compare) == 0

    lines = capsys.readouterr().err.splitlines()
    assert "of 6 rounds in 2 runs" in lines[0]  # a short run may have ended by then
    ends = [line.partition(", accuracy")[0] for line in lines if "finished, accuracy" in line]
    assert ends == ["fedavg, seed 1: finished", "fedavg, seed 2: finished"]

    assert call([*compare, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
