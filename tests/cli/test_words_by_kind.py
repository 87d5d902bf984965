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
AGES = "columns are standardised by the mean and spread of all clients' training rows together"
NOTES = [
    "train: 10 of 80 rows were left out, as they miss a value (north 5, south 5)",
    f"{AGES}, which only a simulation can do",
    "constant to six digits, and left at 0: floor",
]


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
    assert "examples trained on a round" in said
    assert "images" not in said.partition("stages a round")[2]
    assert "data: examples are rows of a table, 4 features: age, ward=A, ward=B, floor\n" in said
    for note in NOTES:
        assert f"data: {note}\n" in said
    rows = [line for line in said.splitlines() if "own test " in line]
    assert [line.split()[0] for line in rows] == ["north", "south"]


def test_the_journal_and_the_report_say_it_too(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "run", "--quiet"]) == 0
    start = read_journal(Path("run/journal.jsonl"))[0]
    assert start["notes"] == NOTES
    assert start["inputs"]["standardise"] == "pooled"
    assert start["inputs"]["categories"] == [["ward", ["A", "B"]]]
    assert "own tests, worst" in capsys.readouterr().out
    assert call(["report", "run", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert '<section id="data">' in page
    assert "Examples are rows of a table, 4 features: age, ward=A, ward=B, floor." in page
    assert "Constant to six digits, and left at 0: floor." in page


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
    assert "images trained on a round" in said
    assert [line for line in said.splitlines() if line.startswith("data: ")] == [
        "data: examples are images of 8×8 pixels, 1 channel",
        "data: 60 examples to train on, 20 to test on",
    ]
