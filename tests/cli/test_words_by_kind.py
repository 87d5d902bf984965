"""``explain`` and the report say what examples are, what reading them left out, and who the clients
are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.cli import call
from fedstill.running.journal import read_journal

CONFIG = """
rounds = 1
threads = 1
measure = []

[data]
name = "wards.csv"
columns = ["age", "ward", "floor"]
categorical = ["ward"]
missing = "drop"

[partition]
kind = "column"
column = "house"
own_test = 0.25

[topology]
clients = 2

[plan]
epochs = 1
"""
FACTS = ("10 of 80 rows", "all clients' training rows", "floor")
"""What the notes say of left-out rows, of standardised columns and of a constant column."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = ["age,ward,floor,house,label"]
    for i in range(80):
        missing = i % 8 == 0
        lines.append(
            f"{'' if missing else 40 + i % 7},{'AB'[i % 2]},3,{'south' if i % 16 < 8 else 'north'},"
            f"{i // 4 % 2}"
        )
    (tmp_path / "wards.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "c.toml").write_text(CONFIG)
    return tmp_path / "c.toml"


def test_explain_says_what_was_read_and_whose_it_is(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["explain", str(config)]) == 0
    said = capsys.readouterr().out
    assert "examples trained" in said
    assert "images" not in said.partition("stages a round")[2]
    assert "4 features: age, ward=A, ward=B, floor\n" in said
    lines = [line for line in said.splitlines() if line.startswith("data: ")]
    assert all(any(fact in line for line in lines) for fact in FACTS)
    drawn = said.partition("stages a round")[2]
    rows = [line for line in drawn.splitlines() if "own test " in line]
    assert [line.split()[0] for line in rows] == ["north", "south"]


def test_the_journal_and_the_report_say_it_too(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "run", "--quiet"]) == 0
    start = read_journal(Path("run/journal.jsonl"))[0]
    assert all(fact in note for fact, note in zip(FACTS, start["notes"], strict=True))
    assert start["inputs"]["standardise"] == "pooled"
    assert start["inputs"]["categories"] == [["ward", ["A", "B"]]]
    assert "own tests, worst" in capsys.readouterr().out
    assert call(["report", "run", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert '<section id="data">' in page
    assert "4 features: age, ward=A, ward=B, floor." in page
    assert "become 0: floor." in page


def test_images_have_their_word_and_no_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["data.train_size=60", "data.test_size=20", "topology.clients=2", "rounds=1"]
    (tmp_path / "d.toml").write_text("")
    assert (
        call(["explain", str(tmp_path / "d.toml"), *(word for s in small for word in ("-s", s))])
        == 0
    )
    said = capsys.readouterr().out
    assert "images trained" in said
    lines = [line for line in said.splitlines() if line.startswith("data: ")]
    assert len(lines) == 2
    assert "8×8" in lines[0]
    assert "60 " in lines[1]
