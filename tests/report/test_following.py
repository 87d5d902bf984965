"""What is said of progress where nobody looks at a terminal: lines, not too many, with what a log
needs.
"""

from __future__ import annotations

import signal
from dataclasses import replace
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


def done(round: int, accuracy: float | None = 0.5, refused: int = 0) -> dict[str, Any]:
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
            watch.round(done(number, refused=number // 100), 100)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "", "the table is there"
    assert "runs/one" in lines[0]
    assert "accuracy 50.00 %, forgetting -1.00 %, 4 s, about 6 min 36 s left" in lines[1]
    assert "16 s, about 6 min 24 s left" in lines[2]
    assert "1 refused, 6 min 40 s" in lines[-1]
    assert [int(line.split()[2]) for line in lines[1:]] == list(range(1, 101, 3))


def test_a_long_round_tells_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Followed(Lines(2, "fedseq", clock)) as watch:
        for index in range(4):
            clock.now += 6
            watch.stage(1, 2, index, 4)
        watch.round(done(1, None), 2)
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
            watch.round(done(number), 1000)
    lines = capsys.readouterr().err.splitlines()
    assert "round 900 of 1000, in runs/long" in lines[0]
    assert [line.partition("%, ")[2].rpartition("%, ")[2] for line in lines[1:]] == [
        "40 s, about 1 h 6 min left",
        "50 s, about 16 min 30 s left",
        "1 min 0 s, about 16 min 20 s left",
    ]


def test_ctrl_c_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with Followed(Lines(2, "fedavg", Clock())) as watch:
        assert not watch.stop()
        signal.raise_signal(signal.SIGINT)
        assert watch.stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "Ctrl-C" in capsys.readouterr().err


def test_quiet_says_nothing_and_a_terminal_has_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with followed(2, "fedavg", quiet=True) as watch:
        watch.stage(1, 2, 0, 1)
        watch.round(done(1), 2)
    assert capsys.readouterr() == ("", "")
    assert type(followed_runs(quiet=True)) is ManyRuns
    assert isinstance(followed(2, "fedavg").display, Lines)
    assert isinstance(followed_runs(), RunLines)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich knows a terminal
    assert isinstance(followed(2, "fedavg").display, Bar)
    assert isinstance(followed_runs(), RunBars)


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    runs = variants(replace(toys.toy(rounds=10), data="digits"), tmp_path, ("fedavg",), (1, 2))
    return [Outcome(v, 10) for v in runs]


def test_a_journal_is_read_on_from_where_it_ended(outcomes: list[Outcome]) -> None:
    one = outcomes[0]
    one.state, journal = "running", one.variant.folder / "journal.jsonl"
    one.follow()
    journal.parent.mkdir(parents=True)

    def after(text: str) -> tuple[int, float | None]:
        journal.write_text(text)
        one.follow()
        return one.done, one.accuracy

    start, first, second = (
        '{"event":"start"}\n',
        *(f'{{"event":"round","round":{n},"accuracy":0.{n}}}\n' for n in (1, 2)),
    )
    assert after("") == after(start[:5]) == (0, None)
    assert after(start + first) == after(start + first + second[:20]) == (1, 0.1)
    assert after(start + first + second) == (2, 0.2)
    journal.write_text("{" * len(start + first + second))
    one.follow()  # nothing of it is read a second time
    assert after(start + first) == (1, 0.1), (
        "a run that goes on cuts what its checkpoint does not know"
    )
    assert after(start + first + second) == (2, 0.2)
    one.state = "failed"
    third = '{"event":"round","round":3,"accuracy":0.3}\n'
    assert after(start + first + second + third) == (3, 0.3), "the last rounds before it failed"


def test_a_comparison_says_which_run_ended_and_how_far_all_are(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    clock, (first, second) = Clock(), outcomes
    with RunLines(clock) as lines:
        first.state, first.done = "running", 4  # it had four rounds before
        lines.show(outcomes)
        for _ in range(3):
            clock.now += 5
            first.done += 1
            lines.show(outcomes)
        first.state, first.done, first.accuracy, second.state = "finished", 10, 0.75, "running"
        lines.show(outcomes)
        second.state, second.done = "failed", 3
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
    clock, (first, second) = Clock(), outcomes
    with RunLines(clock, runs=3) as lines:
        first.state = "running"
        lines.show([first])
        first.state, first.done, first.accuracy, clock.now = "finished", 10, 0.5, 10
        lines.show([first, second])
    assert capsys.readouterr().err.splitlines() == [
        "0 of 30 rounds in 3 runs, 1 running, 0 s",
        "10 of 30 rounds in 3 runs, 0 running, 10 s, about 20 s left",
        "fedavg, seed 1: finished, accuracy 50.00 %, 1 of 3 runs",
    ]


CONFIG = (
    "rounds = 3\nmeasure = []\ntopology = { clients = 2 }\n[data]\ntrain_size = 100\n[plan]\n"
    "epochs = 1\n"
)


def test_commands_write_lines_to_the_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.toml").write_text(CONFIG)
    assert call(["run", "short.toml", "--out", "one"]) == 0
    said = capsys.readouterr()
    heads = [line.split(",")[0] for line in said.err.splitlines()]
    assert heads[:2] == ["fedavg: 3 rounds", "fedavg: round 1 of 3"]
    assert heads[-1] == "fedavg: round 3 of 3"
    assert "round 1" not in said.out
    assert call(["compare", "short.toml", "--seeds", "1,2", "--jobs", "1", "--out", "all"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "of 6 rounds in 2 runs" in lines[0]  # the first look may come when a short run has ended
    assert [line for line in lines if "finished, accuracy" in line] == [
        line
        for seed in (1, 2)
        for line in lines
        if line.startswith(f"fedavg, seed {seed}: finished, accuracy")
    ]
    assert (
        call(["compare", "short.toml", "--seeds", "1,2", "--jobs", "1", "--out", "all", "-q"]) == 0
    )
    assert capsys.readouterr().err == ""
