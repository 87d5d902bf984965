"""``explain``, the journal and the report describe the examples of a table, the rows that were left
out, and the names of clients.
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
    """A config for a table of two houses. Every eighth row has no age; the floor is constant."""
    monkeypatch.chdir(tmp_path)
    lines = ["age,ward,floor,house,label"]
    for row in range(80):
        age = str(40 + row % 7)
        if row % 8 == 0:
            age = ""
        ward = "AB"[row % 2]
        house = "south"
        if row % 16 >= 8:
            house = "north"
        label = row // 4 % 2
        lines.append(f"{age},{ward},3,{house},{label}")
    (tmp_path / "wards.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "c.toml").write_text(CONFIG)
    return tmp_path / "c.toml"


def notes_of_data(printed: str) -> list[str]:
    """The lines of ``explain`` about the data."""
    return [line for line in printed.splitlines() if line.startswith("data: ")]


def test_explain_describes_the_rows_and_names_the_clients(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["explain", str(config)]) == 0
    printed = capsys.readouterr().out

    assert "examples trained" in printed
    assert "4 features: age, ward=A, ward=B, floor\n" in printed
    notes = notes_of_data(printed)
    for fact in FACTS:
        assert any(fact in note for note in notes)

    _, _, split = printed.partition("stages a round")
    assert "images" not in split
    clients = [line.split()[0] for line in split.splitlines() if "own test " in line]
    assert clients == ["north", "south"]


def test_the_journal_and_the_report_describe_the_rows(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "run", "--quiet"]) == 0
    assert "own tests, worst" in capsys.readouterr().out

    start = read_journal(Path("run/journal.jsonl"))[0]
    for fact, note in zip(FACTS, start["notes"], strict=True):
        assert fact in note
    assert start["inputs"]["standardise"] == "pooled"
    assert start["inputs"]["categories"] == [["ward", ["A", "B"]]]

    assert call(["report", "run", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert '<section id="data">' in page
    assert "4 features: age, ward=A, ward=B, floor." in page
    assert "become 0: floor." in page


def test_explain_describes_images_by_their_size_and_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "d.toml"
    config.write_text(
        "rounds = 1\n[data]\ntrain_size = 60\ntest_size = 20\n[topology]\nclients = 2\n"
    )
    assert call(["explain", str(config)]) == 0

    printed = capsys.readouterr().out
    assert "images trained" in printed
    size, number = notes_of_data(printed)
    assert "8×8" in size
    assert "60 " in number
