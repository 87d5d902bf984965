"""A run that overwrites another: the files that fedstill wrote are deleted, and never any other."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ClientFailed, ConfigError, RunBusy, RunExists
from fedstill.data.dataset import Dataset
from fedstill.report.page import write_page
from fedstill.report.table_files import write_run_tables
from fedstill.running.compare import Variant, clear_other_runs, seeded, variants
from fedstill.running.directory import clear, locked
from fedstill.running.journal import add_looks
from fedstill.running.runner import run
from fedstill.running.same_run import other_settings
from flowers import needs_flower
from forking import SETTINGS
from newcomer import SHAPES, mine
from run_bits import StoppedCopy, UninterruptedBits, assert_same_bits, bits


def files(folder: Path) -> dict[str, bytes]:
    """The contents of all files below a folder by their path in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_failed_run_that_is_overwritten_leaves_no_trace(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, SHAPES)
    with pytest.raises(ClientFailed):
        run(experiment, tmp_path / "run", toys.blobs())

    mended, _ = mine(tmp_path)
    with pytest.raises(RunExists, match=r"overwrite=True$"):
        run(mended, tmp_path / "run", toys.blobs())

    run(mended, tmp_path / "run", toys.blobs(), overwrite=True)
    run(mended, tmp_path / "other", toys.blobs())
    assert_same_bits(bits(tmp_path / "run"), bits(tmp_path / "other"))


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_files_of_a_run_are_overwritten(
    setting: str, uninterrupted_bits: UninterruptedBits, stopped_copy: StoppedCopy
) -> None:
    folder = stopped_copy(setting)
    (folder / "checkpoints" / ".LATEST.4711.part").write_bytes(b"half")
    run(SETTINGS[setting], folder, toys.blobs(), overwrite=True)
    assert_same_bits(bits(folder), uninterrupted_bits(setting))


WITH_MEASURES = toys.toy(rounds=1, measure=("tsne", "landscape", "units"), clients={"models": []})
WITH_SITES = toys.toy("toy_logits", rounds=1, data={"public": toys.PUBLIC}, engine="flower")


@pytest.mark.parametrize(
    ("experiment", "subfolder"),
    [
        (WITH_MEASURES, "measures"),
        pytest.param(WITH_SITES, "sites", marks=needs_flower),
    ],
    ids=["measures", "flower"],
)
def test_files_of_measures_of_sites_of_the_report_and_of_why_are_deleted(
    experiment: Experiment, subfolder: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(experiment, folder, toys.blobs())
    write_page([folder], folder / "report.html")
    add_looks(folder, [{"round": 1}])
    (folder / "holder.json").write_text("{}")
    assert any(path.startswith(f"{subfolder}/") for path in files(folder))

    clear(folder)
    assert {p.name for p in folder.iterdir()} <= {"lock", "holder.json"}


def add_files_of_a_user(folder: Path) -> list[str]:
    """Add files and folders that no run writes; returns their names."""
    (folder / "checkpoints" / "mine").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "model.pt").symlink_to(folder / "model.safetensors")
    (folder / "data").mkdir()
    return ["checkpoints/mine", "data", "model.pt", "notes.txt"]


def test_files_of_a_user_are_named_and_nothing_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toys.toy(rounds=1), folder, toys.blobs())
    names = add_files_of_a_user(folder)
    contents = files(folder)
    with pytest.raises(RunExists, match=", ".join(names)):
        run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)
    assert files(folder) == contents


@pytest.mark.parametrize(
    "name", ["config.toml", "report.html", "model.safetensors", "summary.json", "memory/x"]
)
def test_a_folder_that_is_no_run_is_not_cleared_for_the_names_of_its_files(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("rounds = 1\n")
    with pytest.raises(RunExists, match=name.split("/")[0]):
        run(toys.toy(rounds=1), tmp_path / "mine", toys.blobs(), overwrite=True)
    assert path.read_text() == "rounds = 1\n"


def test_a_report_that_fedstill_did_not_write_is_not_deleted(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", toys.blobs())
    (tmp_path / "run" / "report.html").write_text("my thesis")
    with pytest.raises(RunExists, match=r"report\.html"):
        run(toys.toy(rounds=1), tmp_path / "run", toys.blobs(), overwrite=True)


def test_a_run_that_cannot_begin_deletes_nothing(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", toys.blobs())
    files_of_run = files(tmp_path / "run")
    no_rounds = toys.toy(rounds=0)
    no_public_data = toys.toy("toy_logits")
    no_such_split = toys.toy(partition={"kind": "sharding", "shards": 900})
    for wrong in (no_rounds, no_public_data, no_such_split):
        with pytest.raises(ConfigError):
            run(wrong, tmp_path / "run", toys.blobs(), overwrite=True)

    with locked(tmp_path / "run"), pytest.raises(RunBusy):
        run(toys.toy(rounds=1), tmp_path / "run", toys.blobs(), overwrite=True)

    (tmp_path / "run" / "holder.json").unlink(missing_ok=True)
    assert files(tmp_path / "run") == files_of_run


@pytest.mark.parametrize("remaining", ["config.toml", "journal.jsonl"])
def test_a_run_of_which_one_file_is_left_can_be_overwritten(remaining: str, tmp_path: Path) -> None:
    """It was killed at its beginning, or while it was cleared."""
    folder = tmp_path / "run"
    run(toys.toy(rounds=1), folder, toys.blobs())
    for name in files(folder):
        if name != remaining:
            (folder / name).unlink()
    run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)


def test_in_a_new_directory_there_is_nothing_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(toys.toy(rounds=1), tmp_path / "new", toys.blobs(), overwrite=True)
    with pytest.raises(ConfigError, match="overwrite=True needs out=") as caught:
        run(toys.toy(rounds=1), data=toys.blobs(), overwrite=True)
    assert caught.value.in_shell == "--overwrite needs --out"


CONFIG = """
rounds = 1
measure = []
method = 'mine.py'
topology = { clients = 2 }
[data]
train_size = 100
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a method and the config ``own.toml``."""
    monkeypatch.chdir(tmp_path)
    mine(tmp_path)
    (tmp_path / "own.toml").write_text(CONFIG)
    return tmp_path


def test_errors_name_the_options_of_the_command_and_the_arguments_of_python(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "own.toml", "--out", "one", "-q"]
    assert call(words) == 0
    assert call(words) == 2

    error = capsys.readouterr().err
    assert error.startswith("fedstill: one is not empty; ")
    assert all(way in error for way in ("--out", "`fedstill resume one`", "--overwrite"))
    assert call([*words, "--overwrite"]) == 0

    in_run = project / "one"
    in_file = project / "own.toml"
    for out, advice in ((in_run, "overwrite=True"), (in_file, "directory with out=")):
        with pytest.raises(RunExists) as caught:
            run(toys.toy(rounds=1), out, toys.blobs())
        assert "--" not in str(caught.value)
        assert str(caught.value).endswith(advice)
        assert "--out" in caught.value.in_shell


def test_a_comparison_overwrites_the_runs_of_other_settings_only(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "mine.py,fedavg", "--seeds", "1", "--out", "all", "-q"]
    words = ["compare", "own.toml", *options]
    assert call(words) == 0

    def modification_time(summary: Path) -> int:
        return summary.stat().st_mtime_ns

    of_mine = project / "all/mine/seed1/summary.json"
    of_fedavg = project / "all/fedavg/seed1/summary.json"
    time_of_mine = modification_time(of_mine)
    time_of_fedavg = modification_time(of_fedavg)
    mine(project, "# another thought")
    capsys.readouterr()
    assert call(words) == 2, "the numbers are those of another file"
    message = capsys.readouterr().err
    assert "all/mine/seed1 holds a run that began before mine.py changed" in message
    assert message.count("\n") == 1
    assert modification_time(of_mine) == time_of_mine
    assert modification_time(of_fedavg) == time_of_fedavg

    assert call([*words, "--overwrite"]) == 0
    assert modification_time(of_mine) != time_of_mine
    assert modification_time(of_fedavg) == time_of_fedavg, "a finished run of the same settings"

    assert call([*words, "-s", "rounds=2"]) == 2
    assert "(rounds)" in capsys.readouterr().err
    assert call([*words, "-s", "rounds=2", "--overwrite"]) == 0
    assert json.loads(of_fedavg.read_text())["rounds"] == 2


TABLES = {"model": {"name": "mlp", "hidden": [4]}, "topology": {"clients": 2}, "rounds": 1}


def write_rows(path: Path, seed: int) -> str:
    """Write a small CSV file of two columns and two classes; returns its path."""
    draw = random.Random(seed)
    lines = ["x,y,label"]
    for number in range(40):
        class_index = number % 2
        lines.append(f"{draw.gauss(class_index, 1)},{draw.gauss(0, 1)},{'ab'[class_index]}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("changed", ["own", "public"])
def test_a_comparison_refuses_finished_runs_on_other_data_only_if_runs_are_unfinished(
    changed: str, tmp_path: Path
) -> None:
    """Without unfinished runs, or without the file, the data are not read."""
    csv = write_rows(tmp_path / "own.csv", 0)
    public_csv = write_rows(tmp_path / "public.csv", 1)
    experiment = toys.toy(data={"name": csv, "public_from": public_csv}, **TABLES)
    finished, unfinished = variants(experiment, tmp_path / "all", seeds=[1, 2])
    run(finished.experiment, finished.folder)
    clear_other_runs([finished, unfinished], overwrite=False)
    write_rows(tmp_path / f"{changed}.csv", 9)
    clear_other_runs([finished], overwrite=False)

    with pytest.raises(RunExists, match=r"own\.csv"):
        clear_other_runs([finished, unfinished], overwrite=False)

    (tmp_path / f"{changed}.csv").rename(tmp_path / "away")
    clear_other_runs([finished, unfinished], overwrite=False)

    (tmp_path / "away").rename(tmp_path / f"{changed}.csv")
    clear_other_runs([finished, unfinished], overwrite=True)
    assert not (finished.folder / "config.toml").exists()


@dataclass(frozen=True)
class MovedData:
    """A finished run, and the same run with its data in another folder."""

    finished: Variant
    moved: Variant


def run_and_move_data(name: str, data: Dataset | None, folder: Path) -> MovedData:
    """Run on data of this name in a folder, then configure the same run with another folder."""
    experiment = toys.toy(rounds=1, data={"name": name, "folder": str(folder)})
    elsewhere = replace(experiment, data={"name": name, "folder": str(folder / "moved")})
    (finished,) = variants(experiment, folder / name, ("fedavg",), (1,))
    (moved,) = variants(elsewhere, folder / name, ("fedavg",), (1,))
    run(finished.experiment, finished.folder, data)
    assert moved.folder == finished.folder
    return MovedData(finished, moved)


def test_the_folder_of_data_is_another_setting_unless_checksums_of_the_data_are_known(
    tmp_path: Path,
) -> None:
    """It is another setting for public data, and for an unfinished run, in any case."""
    digits = run_and_move_data("digits", None, tmp_path)
    assert other_settings(digits.moved.settings, digits.moved.folder) == []
    blobs = run_and_move_data("blobs", toys.blobs(), tmp_path)
    assert other_settings(blobs.moved.settings, blobs.moved.folder) == ["data.folder"]

    for runs in (digits, blobs):
        folder = runs.finished.folder

        def keys_with_public_photos(variant: Variant, folder: Path = folder) -> list[str]:
            photos = variant.settings.data.changed(public=20, public_from="photos")
            return other_settings(replace(variant.settings, data=photos), folder)

        assert "data.folder" not in keys_with_public_photos(runs.finished)
        assert "data.folder" in keys_with_public_photos(runs.moved)

        (folder / "summary.json").unlink()
        assert other_settings(runs.moved.settings, folder) == ["data.folder"]


def started_from(first: Variant, changes: dict[str, str], folder: Path) -> Variant:
    """Run an experiment that starts from the model of another run."""
    values = {"start_from": str(first.folder), **changes}
    experiment = first.experiment.with_values(values, "test")
    continued = replace(seeded("then", experiment, 1, folder), after=first)
    run(continued.experiment, continued.folder)
    return continued


def test_a_run_that_started_from_another_model_is_a_run_of_other_settings(tmp_path: Path) -> None:
    experiment = toys.toy(data={"name": write_rows(tmp_path / "own.csv", 0)}, **TABLES)
    first = seeded("first", experiment, 1, tmp_path / "first")
    run(first.experiment, first.folder)
    another = seeded("first", experiment, 2, tmp_path / "first")
    run(another.experiment, another.folder)
    continued = started_from(first, {}, tmp_path / "then")
    clear_other_runs([first, continued], overwrite=False)
    model = first.folder / "model.safetensors"
    model_bytes = model.read_bytes()
    model.write_bytes((another.folder / "model.safetensors").read_bytes())

    message = r"then/seed1 holds a run that began before \S+/first/seed1 changed"
    with pytest.raises(RunExists, match=message):
        clear_other_runs([first, continued], overwrite=False)

    model.write_bytes(model_bytes)
    clear_other_runs([first, continued], overwrite=False)

    changed = replace(first, settings=another.settings)
    clear_other_runs([changed, replace(continued, after=changed)], overwrite=True)
    assert not (first.folder / "config.toml").exists()
    assert not (continued.folder / "config.toml").exists()


def test_the_run_that_started_from_an_overwritten_run_is_overwritten_too(tmp_path: Path) -> None:
    csv = write_rows(tmp_path / "own.csv", 0)
    other_csv = write_rows(tmp_path / "others.csv", 1)
    experiment = toys.toy(data={"name": csv}, **TABLES)
    first, unfinished = variants(experiment, tmp_path / "all", seeds=[1, 2])
    run(first.experiment, first.folder)
    continued = started_from(first, {"data.name": other_csv}, tmp_path / "then")
    write_rows(tmp_path / "own.csv", 9)
    clear_other_runs([first, continued, unfinished], overwrite=True)

    assert not (first.folder / "config.toml").exists()
    assert not (continued.folder / "config.toml").exists()


@pytest.mark.slow
def test_a_damaged_run_of_a_comparison_can_be_overwritten(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "own.toml", "--seeds", "1,2,3", "--out", "all", "-q"]
    assert call(words) == 0

    models = [project / f"all/mine/seed{seed}/model.safetensors" for seed in (1, 2, 3)]
    model_bytes = [model.read_bytes() for model in models]
    for model in models[:2]:
        (model.parent / "summary.json").unlink()
        model.unlink()
    (models[0].parent / "config.toml").write_bytes(b"\xff")
    (models[1].parent / "journal.jsonl").write_bytes(b"")

    assert call(words) == 2
    assert "seed1 holds a damaged run (" in capsys.readouterr().err
    assert call([*words, "--overwrite"]) == 0
    assert [m.read_bytes() for m in models] == model_bytes

    journal = models[1].parent / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'{"event":"round",', b'{"event":"round"'))
    (models[2].parent / "journal.jsonl").unlink()

    assert call(words) == 1
    second, third = capsys.readouterr().err.splitlines()
    assert "seed 2: " in second
    assert "all/mine/seed2/journal.jsonl" in second
    assert "is not JSON" in second
    assert "seed 3: " in third
    assert "all/mine/seed3/journal.jsonl" in third
    assert "No such file" in third

    assert call([*words, "--overwrite"]) == 0
    assert [model.read_bytes() for model in models] == model_bytes


def test_tables_that_were_exported_into_a_run_are_deleted_with_it(tmp_path: Path) -> None:
    folder = run(toys.toy(rounds=1), tmp_path / "run", toys.blobs()).directory
    write_run_tables(folder, "csv", folder / "tables/of it")
    write_run_tables(folder, "parquet", folder)
    (folder / "tables/rounds.csv").write_text("round,mine\n")

    with pytest.raises(RunExists, match=r"tables/rounds\.csv"):
        run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)

    (folder / "tables/rounds.csv").unlink()
    run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)
    assert not (folder / "tables").exists()
    assert not (folder / "clients.parquet").exists()
