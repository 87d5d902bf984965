"""A client may be named wherever it may be given by number, in any form of Unicode."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest

import fedstill
from fedstill.cli import call
from fedstill.core.errors import UnknownName
from fedstill.running.journal import parse_class_numbers, parse_client_number

NAMES = ("Bern", "Zadar", "Šibenik")
DECOMPOSED = unicodedata.normalize("NFD", "Šibenik")
"""The name as macOS types and stores it."""

CONFIG = """
rounds = 2
data = "hospitals.csv"
model = "logistic"
topology = { clients = 3 }
plan = { epochs = 2, batch = 10 }
keep_checkpoints_every = 1
[partition]
kind = "column"
column = "hospital"
"""


def write_rows(path: Path) -> None:
    draw = random.Random(0)
    lines = ["age,pressure,hospital,label"]
    for row in range(240):
        label = draw.choice(("ill", "well", "Ärger"))
        age = draw.gauss(len(label), 1)
        lines.append(f"{age:.3f},{draw.random():.3f},{NAMES[row % 3]},{label}")
    path.write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs over hospitals: ``together`` and ``alone``."""
    folder = tmp_path_factory.mktemp("names")
    write_rows(folder / "hospitals.csv")
    (folder / "my.toml").write_text(CONFIG, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(["run", "my.toml", "--out", "together", "-q"]) == 0
        alone = ["-s", "method=local_only", "-s", "rounds=1", "--out", "alone", "-q"]
        assert call(["run", "my.toml", *alone]) == 0
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", ["2", "Šibenik", DECOMPOSED])
def test_names_and_numbers_are_one_client(name: str, here: Path) -> None:
    assert parse_client_number(Path("together"), name) == 2


def test_an_unknown_name_comes_with_the_nearest(here: Path) -> None:
    with pytest.raises(UnknownName, match="Šibenik"):
        parse_client_number(Path("together"), "Sibenik")


def test_names_of_classes_match_in_any_form(here: Path) -> None:
    classes = ["Ärger", unicodedata.normalize("NFD", "Ärger")]
    first, second = parse_class_numbers(Path("together"), classes)
    assert first == second


@pytest.mark.uses("attribution")
@pytest.mark.parametrize("name", ["Šibenik", DECOMPOSED, "2"])
def test_why_takes_a_name(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--class", "well", "--without", name, "--rounds", "1", "-q"]
    assert call(["why", "together", *words]) == 0
    assert "Šibenik (2)" in capsys.readouterr().out


@pytest.mark.uses("attribution")
def test_why_names_the_client_that_is_not_there(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["why", "together", "--without", "Split"]) == 2
    assert "'Split'" in capsys.readouterr().err


@pytest.mark.uses("attribution")
def test_why_takes_worst_without_a_number(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["why", "together", "--worst", "2", "-q"]) == 0
    two = capsys.readouterr().out
    assert call(["why", "--worst", "together", "-q"]) == 0
    assert len(capsys.readouterr().out) > len(two)
    assert call(["why", "together", "-q", "--worst"]) == 0


@pytest.mark.uses("querying")
def test_query_takes_a_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--classes", "well", "-s", "plan.transfer.epochs=1", "-s", "plan.refine.epochs=1"]
    assert call(["query", "alone", "--client", DECOMPOSED, *words]) == 0
    assert "alone-client2-asked" in capsys.readouterr().out


@pytest.mark.uses("export")
def test_export_and_load_model_take_a_name(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["export", "alone", "--folder", str(tmp_path / "m"), "--client", DECOMPOSED]) == 0
    by_number = fedstill.load_model("alone", client=2)
    by_name = fedstill.load_model("alone", client=DECOMPOSED)
    assert by_name.about["model"] == by_number.about["model"] == "client 2"
    assert call(["export", "alone", "--folder", str(tmp_path / "n"), "--client", "Split"]) == 2
    assert "Split" in capsys.readouterr().err
