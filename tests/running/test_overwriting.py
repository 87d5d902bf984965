"""Beginning anew where a run is: what fedstill wrote is deleted, and never anything else."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ClientFailed, ConfigError, RunBusy, RunExists
from fedstill.report.page import write_page
from fedstill.report.table_files import write_run_tables
from fedstill.running.compare import clear_other_runs, seeded, variants
from fedstill.running.directory import clear, locked
from fedstill.running.journal import add_looks
from fedstill.running.runner import run
from fedstill.running.same_run import other_settings
from flowers import needs_flower
from forking import SETTINGS
from newcomer import SHAPES, mine
from run_bits import Whole, assert_same_bits, bits, stopped


def files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_a_run_that_failed_is_begun_anew_and_leaves_no_trace(tmp_path: Path) -> None:
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
def test_whatever_a_run_writes_is_known(setting: str, whole: Whole, tmp_path: Path) -> None:
    folder = stopped(SETTINGS[setting], tmp_path / "run")
    (folder / "checkpoints" / ".LATEST.4711.part").write_bytes(b"half")
    run(SETTINGS[setting], folder, toys.blobs(), overwrite=True)
    assert_same_bits(bits(folder), whole(setting))


@pytest.mark.parametrize(
    "experiment",
    [
        toys.toy(rounds=1, measure=("tsne", "landscape", "units"), clients={"models": []}),
        pytest.param(
            toys.toy("toy_logits", rounds=1, data={"public": toys.PUBLIC}, engine="flower"),
            marks=needs_flower,
        ),
    ],
    ids=["measures", "flower"],
)
def test_so_is_what_measures_sites_the_report_and_why_write(
    experiment: Experiment, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(experiment, folder, toys.blobs())
    write_page([folder], folder / "report.html")
    add_looks(folder, [{"round": 1}])
    (folder / "holder.json").write_text("{}")
    before = {p.split("/")[0] for p in files(folder)}
    assert before >= ({"measures"} if experiment.measure != ("local",) else {"sites"})
    clear(folder)
    assert {p.name for p in folder.iterdir()} <= {"lock", "holder.json"}


def of_a_user(folder: Path) -> list[str]:
    (folder / "checkpoints" / "mine").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "model.pt").symlink_to(folder / "model.safetensors")
    (folder / "data").mkdir()
    return ["checkpoints/mine", "data", "model.pt", "notes.txt"]


def test_what_others_wrote_there_is_named_and_nothing_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toys.toy(rounds=1), folder, toys.blobs())
    theirs, before = of_a_user(folder), files(folder)
    with pytest.raises(RunExists, match=", ".join(theirs)):
        run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)
    assert files(folder) == before


@pytest.mark.parametrize(
    "name", ["config.toml", "report.html", "model.safetensors", "summary.json", "memory/x"]
)
def test_files_of_those_names_that_are_no_runs_are_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("rounds = 1\n")
    with pytest.raises(RunExists, match=name.split("/")[0]):
        run(toys.toy(rounds=1), tmp_path / "mine", toys.blobs(), overwrite=True)
    assert path.read_text() == "rounds = 1\n"


def test_a_report_of_somebody_elses_in_a_runs_directory_is_left_alone(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", toys.blobs())
    (tmp_path / "run" / "report.html").write_text("my thesis")
    with pytest.raises(RunExists, match=r"report\.html"):
        run(toys.toy(rounds=1), tmp_path / "run", toys.blobs(), overwrite=True)


def test_a_config_that_cannot_run_costs_the_old_run_nothing(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", toys.blobs())
    before = files(tmp_path / "run")
    for wrong in (
        toys.toy(rounds=0),
        toys.toy("toy_logits"),
        toys.toy(partition={"kind": "sharding", "shards": 900}),
    ):
        with pytest.raises(ConfigError):
            run(wrong, tmp_path / "run", toys.blobs(), overwrite=True)
    with locked(tmp_path / "run"), pytest.raises(RunBusy):
        run(toys.toy(rounds=1), tmp_path / "run", toys.blobs(), overwrite=True)
    (tmp_path / "run" / "holder.json").unlink(missing_ok=True)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("left", ["config.toml", "journal.jsonl"])
def test_a_run_killed_at_its_beginning_or_while_it_was_cleared_can_be_begun_anew(
    left: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(toys.toy(rounds=1), folder, toys.blobs())
    for path in [p for p in folder.rglob("*") if p.is_file() and p.name != left]:
        path.unlink()
    run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)


def test_in_a_new_directory_there_is_nothing_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(toys.toy(rounds=1), tmp_path / "new", toys.blobs(), overwrite=True)
    with pytest.raises(ConfigError, match="overwrite=True needs out=") as caught:
        run(toys.toy(rounds=1), data=toys.blobs(), overwrite=True)
    assert caught.value.in_shell == "--overwrite needs --out"


CONFIG = (
    "rounds = 1\nmeasure = []\nmethod = 'mine.py'\ntopology = { clients = 2 }\n[data]\ntrain_size "
    "= 100\n"
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    mine(tmp_path)
    (tmp_path / "own.toml").write_text(CONFIG)
    return tmp_path


def test_the_command_says_its_options_and_python_its_arguments(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "own.toml", "--out", "one", "-q"]
    assert call(words) == 0
    assert call(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedstill: one is not empty; ")
    assert all(way in error for way in ("--out", "`fedstill resume one`", "--overwrite"))
    assert call([*words, "--overwrite"]) == 0
    for out, todo in (
        (own / "one", "overwrite=True"),
        (own / "own.toml", "directory with out="),
    ):
        with pytest.raises(RunExists) as caught:
            run(toys.toy(rounds=1), out, toys.blobs())
        assert "--" not in str(caught.value)
        assert str(caught.value).endswith(todo)
        assert "--out" in caught.value.in_shell


def test_a_comparison_begins_anew_what_is_in_its_way_and_nothing_more(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "compare",
        "own.toml",
        "--methods",
        "mine.py,fedavg",
        "--seeds",
        "1",
        "--out",
        "all",
        "-q",
    ]
    assert call(words) == 0
    ours, theirs = (own / f"all/{m}/seed1/summary.json" for m in ("mine", "fedavg"))
    before = {p: p.stat().st_mtime_ns for p in (ours, theirs)}
    mine(own, "# another thought")
    capsys.readouterr()
    assert call(words) == 2, "it was run with another file, so its numbers are not those asked for"
    said = "all/mine/seed1 holds a run that began before mine.py changed"
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert call([*words, "--overwrite"]) == 0
    assert (ours.stat().st_mtime_ns, theirs.stat().st_mtime_ns) != (before[ours], before[theirs])
    assert theirs.stat().st_mtime_ns == before[theirs], (
        "a finished run of the same settings is left alone"
    )
    assert call([*words, "-s", "rounds=2"]) == 2
    assert "(rounds)" in capsys.readouterr().err
    assert call([*words, "-s", "rounds=2", "--overwrite"]) == 0
    assert json.loads(theirs.read_text())["rounds"] == 2


TABLES = {"model": {"name": "mlp", "hidden": [4]}, "topology": {"clients": 2}, "rounds": 1}


def rows(path: Path, seed: int) -> str:
    """A small CSV file of two columns and two classes, at its path."""
    draw = random.Random(seed)
    lines = [f"{draw.gauss(i % 2, 1)},{draw.gauss(0, 1)},{'ab'[i % 2]}" for i in range(40)]
    path.write_text("\n".join(["x,y,label", *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize("changed", ["own", "public"])
def test_finished_runs_on_other_data_are_in_the_way_of_those_that_are_left(
    changed: str, tmp_path: Path
) -> None:
    own, public = (
        rows(tmp_path / f"{name}.csv", seed) for seed, name in enumerate(("own", "public"))
    )
    experiment = toys.toy(data={"name": own, "public_from": public}, **TABLES)
    done, left = variants(experiment, tmp_path / "all", seeds=[1, 2])
    run(done.experiment, done.folder)
    clear_other_runs([done, left], overwrite=False)
    rows(tmp_path / f"{changed}.csv", 9)
    clear_other_runs([done], overwrite=False)  # where nothing is left to do, nothing is read
    with pytest.raises(RunExists, match=r"own\.csv"):
        clear_other_runs([done, left], overwrite=False)
    (tmp_path / f"{changed}.csv").rename(tmp_path / "away")
    clear_other_runs([done, left], overwrite=False)  # which the run that is left says
    (tmp_path / "away").rename(tmp_path / f"{changed}.csv")
    clear_other_runs([done, left], overwrite=True)
    assert not (done.folder / "config.toml").exists()


def test_where_data_of_known_checksums_lie_is_no_other_setting_of_a_finished_run(
    tmp_path: Path,
) -> None:
    """Others' folder may hold anything, and that of public data; an unfinished run goes on with the
    folder it has.
    """
    for name, data, other in (("digits", None, []), ("blobs", toys.blobs(), ["data.folder"])):
        experiment = toys.toy(rounds=1, data={"name": name, "folder": str(tmp_path)})
        (there,) = variants(experiment, tmp_path / name, ("fedavg",), (1,))
        run(there.experiment, there.folder, data)
        moved = replace(experiment, data={"name": name, "folder": str(tmp_path / "moved")})
        (asked,) = variants(moved, tmp_path / name, ("fedavg",), (1,))
        assert asked.folder == there.folder
        assert other_settings(asked.settings, asked.folder) == other
        public = asked.settings.data.changed(public=20, public_from="photos")
        for one in (there, asked):
            photos = replace(
                asked,
                settings=replace(
                    one.settings, data=public.changed(folder=one.settings.data.folder)
                ),
            )
            keys = other_settings(photos.settings, photos.folder)
            assert ("data.folder" in keys) == (one is asked)
        (asked.folder / "summary.json").unlink()
        assert other_settings(asked.settings, asked.folder) == ["data.folder"]


def test_so_are_runs_that_started_from_another_model(tmp_path: Path) -> None:
    experiment = toys.toy(data={"name": rows(tmp_path / "own.csv", 0)}, **TABLES)
    first, other = (seeded("first", experiment, seed, tmp_path / "first") for seed in (1, 2))
    for one in (first, other):
        run(one.experiment, one.folder)
    start = experiment.with_values({"start_from": str(first.folder)}, "test")
    then = replace(seeded("then", start, 1, tmp_path / "then"), after=first)
    run(then.experiment, then.folder)
    clear_other_runs([first, then], overwrite=False)
    model = first.folder / "model.safetensors"
    mine, theirs = model.read_bytes(), (other.folder / "model.safetensors").read_bytes()
    model.write_bytes(theirs)
    with pytest.raises(
        RunExists, match=r"then/seed1 holds a run that began before \S+/first/seed1 changed"
    ):
        clear_other_runs([first, then], overwrite=False)
    model.write_bytes(mine)
    clear_other_runs([first, then], overwrite=False)
    anew = replace(first, settings=other.settings)
    clear_other_runs([anew, replace(then, after=anew)], overwrite=True)
    assert not (first.folder / "config.toml").exists()
    assert not (then.folder / "config.toml").exists()


def test_a_run_on_other_data_goes_with_the_run_that_it_started_from(tmp_path: Path) -> None:
    own, others = (
        rows(tmp_path / f"{name}.csv", seed) for seed, name in enumerate(("own", "others"))
    )
    experiment = toys.toy(data={"name": own}, **TABLES)
    first, left = variants(experiment, tmp_path / "all", seeds=[1, 2])
    run(first.experiment, first.folder)
    changes = {"start_from": str(first.folder), "data.name": others}
    start = experiment.with_values(changes, "test")
    then = replace(seeded("then", start, 1, tmp_path / "then"), after=first)
    run(then.experiment, then.folder)
    rows(tmp_path / "own.csv", 9)
    clear_other_runs([first, then, left], overwrite=True)
    assert not (first.folder / "config.toml").exists()
    assert not (then.folder / "config.toml").exists()


@pytest.mark.slow
def test_a_damaged_run_of_a_comparison_is_begun_anew(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "own.toml", "--seeds", "1,2,3", "--out", "all", "-q"]
    assert call(words) == 0
    models = [own / f"all/mine/seed{seed}/model.safetensors" for seed in (1, 2, 3)]
    whole = [m.read_bytes() for m in models]
    for model in models[:2]:
        (model.parent / "summary.json").unlink()
        model.unlink()
    (models[0].parent / "config.toml").write_bytes(b"\xff")
    (models[1].parent / "journal.jsonl").write_bytes(b"")
    assert call(words) == 2
    assert "seed1 holds a damaged run (" in capsys.readouterr().err
    assert call([*words, "--overwrite"]) == 0
    assert [m.read_bytes() for m in models] == whole
    journal = models[1].parent / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'{"event":"round",', b'{"event":"round"'))
    (models[2].parent / "journal.jsonl").unlink()
    assert call(words) == 1
    said = capsys.readouterr().err.splitlines()
    for line, seed, why in zip(said, (2, 3), ("is not JSON", "No such file"), strict=True):
        assert f"seed {seed}: " in line
        assert f"all/mine/seed{seed}/journal.jsonl" in line
        assert why in line
    assert call([*words, "--overwrite"]) == 0
    assert [m.read_bytes() for m in models] == whole


def test_tables_that_were_exported_into_the_run_go_with_it(tmp_path: Path) -> None:
    folder = run(toys.toy(rounds=1), tmp_path / "run", toys.blobs()).directory
    for kind, place in (("csv", folder / "tables/of it"), ("parquet", folder)):
        write_run_tables(folder, kind, place)
    (folder / "tables/rounds.csv").write_text("round,mine\n")
    with pytest.raises(RunExists, match=r"tables/rounds\.csv"):
        run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)
    (folder / "tables/rounds.csv").unlink()
    run(toys.toy(rounds=1), folder, toys.blobs(), overwrite=True)
    assert not (folder / "tables").exists()
    assert not (folder / "clients.parquet").exists()
