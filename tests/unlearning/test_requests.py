"""Requests on the command line and in a config: names, files of examples, and each wrong input."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Literal

import pytest

import toys
from fedstill.cli import call
from fedstill.config.experiment import load
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.running.runner import run
from fedstill.unlearning.request import UnlearningRequest, strategy_named
from fedstill.unlearning.strategy import OriginalRun
from fedstill.unlearning.unlearn import UnlearningPlan, unlearn
from journals import journal_events

TABLE = """
rounds = 1
method = "fedavg"
[data]
name = "visits.csv"
label_column = "outcome"
columns = ["age", "pressure"]
[partition]
kind = "column"
column = "ward"
[topology]
clients = 2
[plan]
epochs = 1
"""


ODD_NAMES = {0: "Jos\u00e9", 1: "Zoe\u0308 "}
"""Two patients' names by number: one composed, one decomposed and with a space after it."""


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a table of 60 visits, three of each patient. The age is 20 more than the
    number of the visit, and the wards are the clients.
    """
    folder = tmp_path_factory.mktemp("visits")
    rows = ["patient,ward,age,pressure,outcome"]
    for number in range(60):
        ward = ("south", "north")[number % 2]
        patient = ODD_NAMES.get(number // 3, f"P{number // 3}")
        age = 20 + number
        pressure = 100 + number % 7
        outcome = number % 3 == 0
        rows.append(f"{patient},{ward},{age},{pressure},{outcome}")
    (folder / "visits.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "run.toml").write_text(TABLE, encoding="utf-8")
    run(load(folder / "run.toml"), folder / "run")
    return folder


def unlearned(*arguments: object) -> int:
    """The exit code of ``fedstill unlearn`` with these arguments."""
    return call(["unlearn", *map(str, arguments), "--quiet"])


def forgotten_visits(visits: Path, folder: Path) -> set[int]:
    """The numbers of the visits that a run has forgotten."""
    ages = OriginalRun.of(visits / "run").prepared.dataset.train.values[:, 0]
    request = OriginalRun.of(folder).earlier_request
    return {int(ages[position]) - 20 for position in request.examples}


def test_a_client_is_named_as_in_the_data(visits: Path, tmp_path: Path) -> None:
    assert unlearned(visits / "run", "--client", "north", "--out", tmp_path / "new") == 0

    (start,) = journal_events(visits / "run", event="start")
    forgotten = start["client_names"].index("north")
    events = journal_events(tmp_path / "new", event="client")
    assert {event["client"] for event in events} == {1 - forgotten}


def test_patients_are_forgotten_by_their_names(visits: Path, tmp_path: Path) -> None:
    """Visits in the test set are not among the forgotten ones."""
    (tmp_path / "patients.txt").write_text("P4\n\nP7\n", encoding="utf-8")
    options = ["--examples", tmp_path / "patients.txt", "--column", "patient"]
    assert unlearned(visits / "run", *options, "--out", tmp_path / "new") == 0

    forgotten = forgotten_visits(visits, tmp_path / "new")
    assert forgotten
    assert forgotten <= {12, 13, 14, 21, 22, 23}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_in_another_unicode_form_and_with_spaces_are_found(
    form: Literal["NFC", "NFD"], visits: Path, tmp_path: Path
) -> None:
    text = unicodedata.normalize(form, "Jos\u00e9")
    (tmp_path / "patients.txt").write_bytes(f"\ufeff{text}\r\nZo\u00eb\r\n".encode())
    options = ["--examples", tmp_path / "patients.txt", "--column", "patient"]
    assert unlearned(visits / "run", *options, "--out", tmp_path / "new") == 0

    forgotten = forgotten_visits(visits, tmp_path / "new")
    assert forgotten
    assert forgotten <= {0, 1, 2, 3, 4, 5}


def test_a_patient_with_public_rows_is_not_forgotten_in_part(
    visits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"data.public": 8, "data.standardise": "none"}
    run(load(visits / "run.toml").with_values(values, "test"), tmp_path / "run")
    public = OriginalRun.of(tmp_path / "run").prepared.sites.public
    assert public is not None
    patients = {(int(age) - 20) // 3 for age in public.values[:, 0]}
    patient = min(patients - set(ODD_NAMES))
    (tmp_path / "patients.txt").write_text(f"P{patient}\n", encoding="utf-8")

    options = ["--examples", tmp_path / "patients.txt", "--column", "patient"]
    assert unlearned(tmp_path / "run", *options, "--out", tmp_path / "new") == 2
    assert "the public set" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_examples_are_forgotten_by_positions_in_a_file(visits: Path, tmp_path: Path) -> None:
    (tmp_path / "positions.txt").write_text("3\n1\n3\n", encoding="utf-8")
    options = ["--examples", tmp_path / "positions.txt", "--out", tmp_path / "new"]
    assert unlearned(visits / "run", *options) == 0
    assert OriginalRun.of(tmp_path / "new").earlier_request.examples == (1, 3)


WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "--client"),
    "an unknown client": (["--client", "7"], "--client 7"),
    "an unknown name": (["--client", "west"], "west"),
    "all clients": (["--client", "0,1"], "unlearning.clients"),
    "an unknown class": (["--class", "9"], "--class 9"),
    "an unknown strategy": (["--client", "0", "--strategy", "wishing"], "wishing"),
    "an unknown option": (["--client", "0", "-s", "rounds=3"], "unlearning.options.rounds"),
    "a wrong option": (
        ["--client", "0", "--strategy", "fine_tuning", "-s", "repair_rounds=0"],
        "unlearning.options.repair_rounds",
    ),
    "whole clients only": (["--class", "0", "--strategy", "sifu"], "--client"),
    "a column without a file": (["--column", "patient"], "--examples"),
    "a missing file": (["--examples", "/nowhere/at/all.txt"], "all.txt"),
    "a line that is no position": (["--examples", "{names}"], "names.txt, line 2"),
    "a position too far": (["--examples", "{far}"], "100000"),
    "an unknown value": (["--examples", "{names}", "--column", "patient"], "no value '4'"),
    "an unknown column": (["--examples", "{names}", "--column", "doctor"], "doctor"),
    "an empty file": (["--examples", "{empty}"], "empty.txt"),
    "all classes": (["--class", "0,1"], "unlearning names all"),
    "a number with too many digits": (["--class", "9" * 5000], "class"),
    "a position with too many digits": (["--examples", "{digits}"], "digits.txt, line 1"),
    "another encoding": (["--examples", "{utf16}"], "UTF-8"),
    "a column that is an input": (["--examples", "{names}", "--column", "age"], "positions"),
    "a directory in use": (["--client", "0", "--out", "{used}"], "used"),
}


FILES = ("names", "far", "empty", "digits", "utf16")


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_one_line_and_starts_nothing(
    case: str, visits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, place = WRONG[case]
    (tmp_path / "names.txt").write_text("4\nP999\n", encoding="utf-8")
    (tmp_path / "far.txt").write_text("100000\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    (tmp_path / "digits.txt").write_text("9" * 5000, encoding="utf-8")
    (tmp_path / "utf16.txt").write_text("1\n", encoding="utf-16")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("mine", encoding="utf-8")
    names = {name: tmp_path / f"{name}.txt" for name in FILES}
    filled = [text.format(**names, used=tmp_path / "used") for text in arguments]
    if "--out" not in filled:
        filled += ["--out", str(tmp_path / "new")]
    assert unlearned(visits / "run", *filled) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert place in line
    assert not (tmp_path / "new").exists()


def test_a_repeated_command_reuses_the_finished_run_and_says_so(
    visits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [visits / "run", "--client", "north", "--out", tmp_path / "new"]
    assert unlearned(*command) == 0
    certificate = (tmp_path / "new" / "certificate.json").read_bytes()
    first = capsys.readouterr()
    assert unlearned(*command) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert second.err != first.err
    assert (tmp_path / "new" / "certificate.json").read_bytes() == certificate


def test_a_run_that_has_forgotten_the_data_in_the_same_way_is_not_repeated(
    visits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert unlearned(visits / "run", "--class", "1", "--client", "north", "--out", new) == 0
    assert unlearned(new, "--client", "north") == 2
    assert f"unlearn --check {new}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [new]


def test_a_directory_with_another_run_is_refused_without_advice_that_fails(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command has no option --overwrite."""
    assert unlearned(visits / "run", "--client", "north", "--out", visits / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out" in line
    assert "--overwrite" not in line


def test_the_default_name_of_the_new_run_lists_few_clients_only(tmp_path: Path) -> None:
    """File systems allow 255 bytes for a name."""
    experiment = toys.toy(rounds=1, partition="iid", topology={"clients": 100, "sampled": 2})
    run(experiment, tmp_path / "run", toys.blobs())
    names = {}
    for count in (2, 90):
        request = UnlearningRequest(clients=tuple(range(count)))
        plan = UnlearningPlan.of(
            tmp_path / "run", request, strategy_named("retraining", {}), toys.blobs()
        )
        names[count] = plan.default_folder.name
    assert names == {
        2: "run-without-client0+1-retraining",
        90: "run-without-90-clients-retraining",
    }


def test_an_unfinished_run_is_finished_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toys.toy("fedavg", rounds=1), folder, toys.blobs())
    (folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match="fedstill resume"):
        OriginalRun.of(folder, toys.blobs())


def test_a_run_that_started_from_a_model_that_knows_the_data_is_refused(tmp_path: Path) -> None:
    """It is accepted if that model has forgotten the same data, and only the same data."""
    request = UnlearningRequest(clients=(1,))
    retraining = strategy_named("retraining", {})
    first = tmp_path / "first"
    later = tmp_path / "later"
    run(toys.toy("fedavg", rounds=1), first, toys.blobs())
    run(toys.toy("fedavg", rounds=1, start_from=str(first)), later, toys.blobs())
    with pytest.raises(ConfigError, match="first"):
        unlearn(later, request, retraining, data=toys.blobs())

    new = tmp_path / "new"
    clean = tmp_path / "clean"
    unlearn(first, request, retraining, new, data=toys.blobs())
    run(toys.toy("fedavg", rounds=1, start_from=str(new)), clean, toys.blobs())
    unlearn(clean, request, retraining, data=toys.blobs())
    with pytest.raises(ConfigError, match="new"):
        unlearn(clean, UnlearningRequest(clients=(2,)), retraining, data=toys.blobs())


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"clients": [9]}, "unlearning.clients"),
        ({"clients": [-1]}, "unlearning.clients"),
        ({"strategy": 3}, "unlearning.strategy"),
        ({"what": 1}, "unlearning.what"),
    ],
)
def test_the_table_of_a_config_is_checked(table: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        run(toys.toy("fedavg", rounds=1, unlearning=table), None, toys.blobs())


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(UnknownName, match="wishing"):
        strategy_named("wishing", {})


def test_explain_prints_how_many_bytes_of_updates_a_run_keeps(
    visits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", str(visits / "run.toml")]
    assert call(arguments) == 0
    assert "federaser" not in capsys.readouterr().out
    assert call([*arguments, "-s", "keep_updates=true"]) == 0
    printed = capsys.readouterr().out
    run(load(visits / "run.toml", ["keep_updates=true"]), visits / "kept")
    size = sum(path.stat().st_size for path in (visits / "kept" / "updates").iterdir())
    assert f"updates of clients, {size:,} bytes" in " ".join(printed.split())
