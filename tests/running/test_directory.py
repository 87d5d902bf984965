"""What a run's directory may have gone through: what is resumed all the same, and what is refused,
by name.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest

import toys
from fedstill.cli import call
from fedstill.cli.comparisons import carry_out
from fedstill.config.experiment import Experiment, load
from fedstill.core.errors import (
    ConfigError,
    CorruptFile,
    Interrupted,
    NoRun,
    RunBusy,
    RunExists,
    UntrustedCode,
)
from fedstill.report.page import write_page
from fedstill.running import same_run
from fedstill.running.compare import variants
from fedstill.running.directory import claimed
from fedstill.running.journal import read_journal
from fedstill.running.runner import resume, run
from fedstill.running.runs import read_run
from forking import SETTINGS
from run_bits import StopAfter, Whole, assert_same_bits, bits, stopped


def append(text: bytes) -> Callable[[Path], None]:
    return lambda p: p.write_bytes(p.read_bytes() + text)


@pytest.mark.parametrize(
    "text", [b'{"event":"round","round":9}\n', b'{"event":"rou', b"\xff\xff\n\n"]
)
def test_what_a_journal_holds_beyond_the_checkpoint_is_dropped(
    text: bytes, whole: Whole, tmp_path: Path
) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    append(text)(folder / "journal.jsonl")
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole("parallel"))


HARM = {
    "shorter": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "shorter than"),
    "empty": (lambda p: p.write_bytes(b""), "shorter than"),
    "gone": (Path.unlink, "shorter than"),
    "changed": (
        lambda p: p.write_bytes(p.read_bytes().replace(b'"round":1', b'"round":2', 1)),
        "changed",
    ),
}


@pytest.mark.parametrize("how", HARM)
def test_a_journal_that_is_not_the_one_that_was_written_is_refused(
    how: str, whole: Whole, tmp_path: Path
) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    kept = (folder / "journal.jsonl").read_bytes()
    harm, words = HARM[how]
    harm(folder / "journal.jsonl")
    with pytest.raises(CorruptFile, match=words):
        resume(folder, data=toys.blobs())
    (folder / "journal.jsonl").write_bytes(kept)
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole("parallel"))


def objects_of_the_newest(folder: Path) -> Path:
    newest = max((folder / "checkpoints").glob("*.json"))
    sha = json.loads(newest.read_text())["manifest"]["groups"]["params"]
    return folder / "checkpoints" / "objects" / f"{sha}.safetensors"


@pytest.mark.parametrize(
    "victim",
    [
        lambda folder: max((folder / "checkpoints").glob("*.json")),
        objects_of_the_newest,
        lambda folder: max((folder / "memory").iterdir(), key=lambda p: p.stat().st_mtime_ns),
    ],
    ids=["manifest", "object", "memory"],
)
def test_a_damaged_newest_checkpoint_costs_a_stage_and_no_bit(
    victim: Callable[[Path], Path], whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stopped(SETTINGS["sequential"], tmp_path / "run", 5)
    path = victim(folder)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        resume(folder, data=toys.blobs())
    assert "skipped a checkpoint" in caplog.text
    assert_same_bits(bits(folder), whole("sequential"))


def test_leftovers_of_a_killed_process_are_swept_away(whole: Whole, tmp_path: Path) -> None:
    folder = stopped(SETTINGS["sequential"], tmp_path / "run")
    for place in (
        folder,
        folder / "checkpoints",
        folder / "checkpoints" / "objects",
        folder / "memory",
    ):
        (place / ".file.json.4711.part").write_bytes(b"half")
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole("sequential"))


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "all" / "fedavg" / "seed1", data=toys.blobs())
    for folder in (tmp_path / "all", tmp_path / "all" / "fedavg"):
        with pytest.raises(NoRun, match="all/fedavg/seed1"):
            resume(folder, data=toys.blobs())


def test_a_directory_in_which_nothing_but_a_first_write_was_begun_is_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / ".config.toml.4711.part").write_bytes(b"half")
    with pytest.raises(NoRun, match="contains no run"):
        resume(tmp_path / "run", data=toys.blobs())
    run(toys.toy(rounds=1), tmp_path / "run", data=toys.blobs())
    assert not list((tmp_path / "run").glob(".*.part"))


def test_a_changed_config_is_refused(tmp_path: Path) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CorruptFile, match=r"config\.toml") as caught:
        resume(folder, data=toys.blobs())
    assert str(caught.value).endswith(f"--out NEW -s start_from={folder.resolve()}")


def test_a_changed_config_of_a_finished_run_is_refused_and_what_is_said_instead_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(toys.SMALL)
    folder = run(load("my.toml", ("rounds=1", "measure=[]")), "one").directory
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    with pytest.raises(CorruptFile, match=r"config\.toml"):
        resume(folder)
    more = run(load("one/config.toml", ("start_from=one",)), "new")
    assert len(more.history) == 2
    assert f'start_from = "{tmp_path / "one"}"' in (more.directory / "config.toml").read_text()


def test_a_changed_config_is_refused_where_no_checkpoint_is_left_and_by_the_report(
    tmp_path: Path,
) -> None:
    folder = run(toys.toy(rounds=1), tmp_path / "run", toys.blobs()).directory
    rmtree(folder / "checkpoints")
    read_run(folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 1  # and no more\n"))
    for read in (resume, read_run):
        with pytest.raises(CorruptFile, match=r"config\.toml"):
            read(folder)


def test_a_misspelt_key_in_the_config_of_a_run_is_told_as_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "rl = 0.1"))
    with pytest.raises(CorruptFile, match=r"config\.toml"):
        resume(folder, data=toys.blobs())
    assert call(["resume", str(folder)]) == 1
    assert "config.toml" in capsys.readouterr().err


def test_a_config_that_is_named_in_the_place_of_its_run_is_said_to_be_a_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "my.toml").write_text(toys.SMALL)
    with pytest.raises(
        NoRun,
        match=r"my\.toml",
    ):
        resume(tmp_path / "my.toml")


def test_a_journal_that_cannot_be_read_is_not_said_to_be_gone(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(CorruptFile, match=r"journal\.jsonl: Is a directory"):
        read_journal(tmp_path / "journal.jsonl")


LOCKING = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_that_another_process_writes_is_busy(whole: Whole, tmp_path: Path) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    other = subprocess.Popen(
        [sys.executable, "-c", LOCKING, str(folder / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(RunBusy, match="another process"):
        resume(folder, data=toys.blobs())
    other.communicate()
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole("parallel"))


HOLDING = """
import sys
from pathlib import Path
from fedstill.running.directory import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_who_writes_in_a_folder_is_said_to_who_is_refused(tmp_path: Path) -> None:
    """Two comparisons in one folder: the second says which process it is, and touches nothing."""
    config, out = tmp_path / "short.toml", tmp_path / "all"
    config.write_text("rounds = 1\n")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    before = {p: p.read_bytes() for p in out.rglob("*")}
    runs = variants(load(config), out, ("fedavg", "fedprox"))
    who = (
        rf"all is being written by another process, {other.pid} on {socket.gethostname()} since "
        r"2\d+-\d\d-\d\d "
    )
    with pytest.raises(RunBusy, match=who):
        carry_out(runs, out, 1, quiet=True)
    assert {p: p.read_bytes() for p in out.rglob("*")} == before
    other.communicate()
    assert not (out / "holder.json").exists()
    with claimed(out):
        assert (out / "holder.json").exists()


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"process": "x"}', b"\xff", b"[" * 9999])
def test_a_holder_that_cannot_be_read_is_left_out(said: bytes, tmp_path: Path) -> None:
    with claimed(tmp_path):
        (tmp_path / "holder.json").write_bytes(said)
        with pytest.raises(RunBusy, match="another process"), claimed(tmp_path):
            pass


def test_the_folder_of_a_comparison_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunExists, match=str(tmp_path / "file")), claimed(tmp_path / "file"):
        pass
    with (
        pytest.raises(ConfigError, match="below"),
        claimed(tmp_path / "file/below"),
    ):
        pass


def test_values_that_make_a_longer_name_than_a_folder_may_have_are_cut_and_told_apart(
    tmp_path: Path,
) -> None:
    values = [[0.125 + 1 / n for n in range(1, 20)], [0.125 + 1 / n for n in range(1, 21)]]
    runs = variants(Experiment(), tmp_path, ["fedavg"], [1], {"data.std": values})
    for run_ in runs:
        run_.folder.mkdir(parents=True)
    short, long = (run_.folder.parent.name for run_ in runs)
    assert short[:150] == long[:150]
    assert len(short) == len(long) < 170
    assert runs[1].label == f"fedavg data.std={values[1]}"
    (whole,) = variants(Experiment(), tmp_path, ["fedavg"], [1], {"data.std": [[0.1] * 40]})
    assert whole.folder.parent.name == "fedavg_data.std=[" + ",_".join(["0.1"] * 40) + "]", (
        "it fits"
    )


def test_a_directory_that_holds_another_run_is_left_alone(tmp_path: Path) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(RunExists, match=str(folder)):
        run(SETTINGS["parallel"], folder, data=toys.blobs())
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_places_that_cannot_hold_a_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for out in ("file", "folder"):
        with pytest.raises(RunExists, match=out):
            run(toys.toy(rounds=1), tmp_path / out, data=toys.blobs())
    with pytest.raises(ConfigError, match="below"):
        run(toys.toy(rounds=1), tmp_path / "file" / "below", data=toys.blobs())
    for out in ("nowhere", "file", "folder"):
        with pytest.raises(NoRun, match=out):
            resume(tmp_path / out)


def test_a_config_that_cannot_be_read_back_is_named(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"seed = ", b"x = " + b"[" * 9999):
        (tmp_path / "config.toml").write_bytes(content)
        with pytest.raises(CorruptFile, match=r"config\.toml"):
            resume(tmp_path)


MINE = """
from dataclasses import dataclass
from fedstill.core.method import Method
from fedstill.core.registry import method

@method("mine")
@dataclass(frozen=True)
class Mine(Method):
    '''Averaging, under another name.'''
"""


def test_a_users_method_whose_file_has_changed_is_refused_and_one_that_has_not_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    experiment = Experiment(**{**vars(toys.toy("mine.py")), "base": tmp_path})
    run(experiment, tmp_path / "whole", data=toys.blobs())
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "run", toys.blobs(), watch=StopAfter(1))
    (tmp_path / "mine.py").write_text(MINE + "# another thought\n")
    with pytest.raises(UntrustedCode, match=r"mine\.py"):
        resume(tmp_path / "run", data=toys.blobs())
    with pytest.raises(CorruptFile, match=r"mine\.py"):
        resume(tmp_path / "run", data=toys.blobs(), trust_code=True)
    (tmp_path / "mine.py").write_text(MINE)
    resume(tmp_path / "run", data=toys.blobs())
    assert_same_bits(bits(tmp_path / "run"), bits(tmp_path / "whole"))


def test_a_resume_with_other_versions_is_said_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run", 1)
    here = same_run.software()
    with monkeypatch.context() as later:
        later.setattr(
            same_run, "software", lambda device: {**here, "torch": "9.0", "fedstill": "8.0"}
        )
        with pytest.raises(Interrupted):
            resume(folder, toys.blobs(), watch=StopAfter(1))
        (line,) = (r.getMessage() for r in caplog.records if r.name == "fedstill.resume")
        assert (
            f"was run with fedstill {here['fedstill']}, torch {here['torch']} and goes on with "
            "fedstill 8.0" in line
        )
        caplog.clear()
        with pytest.raises(Interrupted):
            resume(folder, toys.blobs(), watch=StopAfter(1))
        assert not caplog.records, "it was said"
    resume(folder, toys.blobs())
    assert "torch 9.0" in caplog.text
    noted = [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "resumed"]
    was = {name: here[name] for name in ("fedstill", "torch")}
    assert [e["before"] for e in noted] == [was, {"fedstill": "8.0", "torch": "9.0"}]
    assert [e["versions"] for e in noted] == [{"fedstill": "8.0", "torch": "9.0"}, was]
    assert [e["round"] for e in noted] == sorted(e["round"] for e in noted)
    assert read_run(folder).versions("torch") == [here["torch"], "9.0", here["torch"]]
    page = write_page([folder], tmp_path / "report.html").read_text()
    assert f"torch {', '.join(sorted({here['torch'], '9.0'}))}" in page


def test_a_resume_with_the_same_versions_notes_nothing(
    whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stopped(SETTINGS["parallel"], tmp_path / "run")
    resume(folder, toys.blobs())
    assert "goes on with" not in caplog.text
    assert_same_bits(bits(folder), whole("parallel"))
