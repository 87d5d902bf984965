"""The programs in examples/, with as few rounds as they accept."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

PROGRAMS = {"even_model": "2", "parallel": "1", "public_logits": "1", "sequential": "1"}
"""The smallest argument of each program."""


def printed_by(
    program: str,
    argument: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    path = EXAMPLES / f"{program}.py"
    monkeypatch.setattr(sys, "argv", [str(path), argument])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def test_the_list_of_programs_is_complete() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PROGRAMS.keys()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_short(program: str) -> None:
    text = (EXAMPLES / f"{program}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize("program", ["even_model", "parallel", "public_logits"])
def test_a_program_runs_with_its_smallest_argument(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed_by(program, PROGRAMS[program], monkeypatch, capsys)


def test_a_run_of_one_round_is_stopped_and_resumed_to_the_same_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed_by("sequential", PROGRAMS["sequential"], monkeypatch, capsys)
    assert "the same model" in text.splitlines()[-1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_argument_that_is_no_number_is_one_line_of_error(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        printed_by(program, "few", monkeypatch, capsys)
    assert stop.value.code == 2
    assert "few" in capsys.readouterr().err.splitlines()[-1]
