"""Tables in a terminal: what they hold is there however narrow it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import toys
from fedstill.cli import call
from fedstill.report.terminal import PlainTable, comparison_table, console
from fedstill.running.runs import Group, spread

HEAD = [
    "",
    "accuracy, last [%]",
    "mean of last 10 [%]",
    "best [%]",
    "forgetting F [%]",
    "epsilon [largest]",
    "seeds",
]
ROWS = [
    [
        f"fedavg, plan.lr={lr}",
        "82.4 ± 0.5",
        "81.9 ± 10.5",
        "83.0 ± 0.4",
        "22.4 ± 3.5",
        "0.03 ± 0.01",
        "30",
    ]
    for lr in (0.01, 0.1)
]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_terminal_has_every_cell(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    console().print(PlainTable(HEAD, ROWS))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    first, other = ([line for line in lines if line.startswith(row[0])] for row in ROWS)
    assert " ".join(" ".join(line.split()[2:]) for line in first) == " ".join(ROWS[0][1:])
    assert len(first) == len(other)
    words = {word for line in lines if not line.startswith("fedavg") for word in line.split()}
    assert words == {word for head in HEAD for word in head.split()}


def test_texts_are_broken_between_words_and_numbers_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "matrix.csv").write_text("90,10,5,5\n45,35,80.9,70\n")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    assert call(["forgetting", "matrix.csv", "--class-tasks", "0,0,1,1"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.split("Beside")[0].splitlines())) <= 60
    assert out.split().count("57.73") == 2, "the mean of the last row, by task and by class"
    assert "class" in out.split()


def test_a_small_epsilon_has_its_digits_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "accuracy": spread([0.5, 0.6]),
        "epsilon": spread([0.02, 0.04]),
        "seconds": spread([3.0, 5.0]),
    }
    group = SimpleNamespace(
        label="fedavg",
        finished=True,
        run_count_text="2",
        has_personal_models=False,
        runs=(),
        started=(),
        settings={},
        values=lambda key: [0.0] if key in values else [],
        mean_spread=values.get,
    )
    console().print(comparison_table([cast("Group", group)]))
    assert (
        " ".join(capsys.readouterr().out.splitlines()[1].split())
        == "fedavg 55.0 ± 7.1 0.03 ± 0.01 4.0 ± 1.4 2"
    )


def test_a_terminal_breaks_sentences_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "matrix.csv").write_text("90,10\n45,80\n")
    monkeypatch.setenv("COLUMNS", "50")

    def said() -> str:
        assert call(["forgetting", str(tmp_path / "matrix.csv")]) == 0
        return capsys.readouterr().out.partition("Beside")[2]

    whole = said()
    assert max(map(len, whole.splitlines())) > 60, "a file has one line a sentence"
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    broken = said()
    assert max(map(len, broken.splitlines())) <= 50
    assert broken.split() == whole.split()


def test_a_narrow_terminal_has_what_a_value_is_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(toys.SMALL)
    monkeypatch.setenv("COLUMNS", "60")
    assert call(["explain", str(tmp_path / "small.toml"), "--no-split"]) == 0
    lines = capsys.readouterr().out.partition("quantity")[0].splitlines()
    assert max(map(len, lines)) <= 60
    at = next(i for i, line in enumerate(lines) if line.startswith("rounds = "))
    description = lines[at + 1]
    assert description.startswith("    ")
    assert description.strip()
