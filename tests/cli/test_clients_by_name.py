"""A client may be named wherever it may be given by number, in any form of Unicode."""

from __future__ import annotations

import json
import random
import re
import shutil
import unicodedata
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

import fedstill
from fedstill.cli import call
from fedstill.cli.app import parse_class_numbers, parse_client_number, parse_client_numbers
from fedstill.core.errors import UnknownName

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
    """Write a table of 240 patients in three hospitals."""
    draw = random.Random(0)
    lines = ["age,pressure,hospital,label"]
    for row in range(240):
        label = draw.choice(("ill", "well", "Ärger"))
        age = draw.gauss(len(label), 1)
        lines.append(f"{age:.3f},{draw.random():.3f},{NAMES[row % 3]},{label}")
    path.write_text("\n".join(lines), encoding="utf-8")


def run_both(folder: Path, config: str) -> None:
    """The runs ``together`` and ``alone`` of a config."""
    (folder / "my.toml").write_text(config, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(["run", "my.toml", "--out", "together", "-q"]) == 0
        alone = ["-s", "method=local_only", "-s", "rounds=1", "--out", "alone", "-q"]
        assert call(["run", "my.toml", *alone]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs over hospitals: ``together`` and ``alone``."""
    folder = tmp_path_factory.mktemp("names")
    write_rows(folder / "hospitals.csv")
    run_both(folder, CONFIG)
    return folder


@pytest.fixture
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has the two runs over hospitals."""
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.parametrize("name", ["2", "Šibenik", DECOMPOSED])
def test_names_and_numbers_are_one_client(name: str) -> None:
    assert parse_client_number(Path("together"), name) == 2


@pytest.mark.uses("querying", "unlearning")
@pytest.mark.parametrize("command", [["query", "--classes", "ill"], ["unlearn"]])
def test_a_name_in_a_folder_without_a_run_is_no_wrong_name(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([*command, str(tmp_path / "nowhere"), "--client", "Bern"]) == 2
    assert "there is no such directory" in capsys.readouterr().err


@pytest.mark.usefixtures("_in_folder")
def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Šibenik"):
        parse_client_number(Path("together"), "Sibenik")


@pytest.mark.usefixtures("_in_folder")
def test_names_of_classes_match_in_any_form() -> None:
    classes = ["Ärger", unicodedata.normalize("NFD", "Ärger")]
    first, second = parse_class_numbers(Path("together"), classes)
    assert first == second


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.uses("attribution")
@pytest.mark.parametrize("name", ["Šibenik", DECOMPOSED, "2"])
def test_why_takes_a_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--class", "well", "--without", name, "--rounds", "1", "-q"]
    assert call(["why", "together", *words]) == 0
    assert "Šibenik (2)" in capsys.readouterr().out


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.uses("attribution")
def test_why_names_the_client_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["why", "together", "--without", "Split"]) == 2
    assert "'Split'" in capsys.readouterr().err


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.uses("attribution")
def test_why_takes_worst_without_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["why", "together", "--worst", "2", "-q"]) == 0
    worst_two = capsys.readouterr().out
    assert call(["why", "--worst", "together", "-q"]) == 0
    assert len(capsys.readouterr().out) > len(worst_two)
    assert call(["why", "together", "-q", "--worst"]) == 0


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.uses("querying")
def test_query_takes_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--classes", "well", "-s", "plan.transfer.epochs=1", "-s", "plan.refine.epochs=1"]
    assert call(["query", "alone", "--client", DECOMPOSED, *words]) == 0
    assert "alone-client2-asked" in capsys.readouterr().out


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.uses("export")
def test_export_and_load_model_take_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["export", "alone", "--folder", str(tmp_path / "m"), "--client", DECOMPOSED]) == 0
    by_number = fedstill.load_model("alone", client=2)
    by_name = fedstill.load_model("alone", client=DECOMPOSED)
    assert by_name.about["model"] == by_number.about["model"] == "client 2"
    assert call(["export", "alone", "--folder", str(tmp_path / "n"), "--client", "Split"]) == 2
    assert "Split" in capsys.readouterr().err


SUBJECTS = ("1", "3", "5", "7", "8")
"""Names of clients that are also numbers of other clients."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs ``together`` and ``alone`` over the subjects of a study, with the classes 1 to 3."""
    folder = tmp_path_factory.mktemp("study")
    draw = random.Random(0)
    labels = [draw.choice(("1", "2", "3")) for _ in range(300)]
    columns = {
        "a": [draw.gauss(int(label), 1) for label in labels],
        "b": [draw.random() for _ in labels],
        "subject": [SUBJECTS[row % 5] for row in range(300)],
        "label": labels,
    }
    parquet.write_table(pyarrow.table(columns), folder / "study.parquet")
    config = CONFIG.replace("hospitals.csv", "study.parquet").replace("hospital", "subject")
    config = config.replace("clients = 3", "clients = 5")
    run_both(folder, config)
    return folder


def test_a_name_that_is_a_number_comes_before_the_number(study: Path) -> None:
    run = study / "together"
    assert [parse_client_number(run, name) for name in SUBJECTS] == [0, 1, 2, 3, 4]
    assert parse_client_number(run, "2") == 2, "nobody has this name"
    assert parse_class_numbers(run, ["1", "2", "3", "0"]) == [0, 1, 2, 0]


@pytest.mark.uses("export")
def test_export_writes_the_model_of_the_client_with_this_name(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "m"
    exports = ["export", str(study / "alone"), "--client"]
    assert call([*exports, "3", "--folder", str(shared)]) == 0
    assert json.loads((shared / "config.json").read_text())["trained"]["model"] == "client 1"
    assert "client 1" in capsys.readouterr().out
    assert call([*exports, "9", "--folder", str(tmp_path / "n")]) == 2


@pytest.mark.uses("attribution")
def test_why_prints_a_command_for_the_client_and_the_class_that_it_names(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = study / "together"
    words = ["why", str(run), "-q", "--class"]
    hints = {}
    for label in ("1", "2", "3"):
        assert call([*words, label, "--round", "2"]) == 0
        out = capsys.readouterr().out
        assert f"'{label}'" in out
        hint = re.search(r"without \w+ \((\d)\): .* --class (\w+) --without (\w+)", out)
        if hint is not None:
            hints[label] = hint
    assert hints
    for label, hint in hints.items():
        assert parse_class_numbers(run, [hint[2]]) == [int(label) - 1]
        assert parse_client_number(run, hint[3]) == int(hint[1])
    assert call([*words, "1", "--without", "7", "--rounds", "1"]) == 0
    assert "7 (3)" in capsys.readouterr().out


def test_a_name_with_a_comma_is_one_client_of_a_list(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "together", tmp_path / "run")
    journal = copy / "journal.jsonl"
    first, _, following = journal.read_text(encoding="utf-8").partition("\n")
    start = json.loads(first)
    start["client_names"] = ["Bern", "Bern, West", "Zadar"]
    journal.write_text(f"{json.dumps(start)}\n{following}", encoding="utf-8")

    assert parse_client_numbers(copy, ["Zadar", "Bern", "West"]) == [2, 1]
    assert parse_client_numbers(copy, ["Bern", "2"]) == [0, 2]
