"""Damaged, changed and occupied run directories: which are resumed to the same bits, and which are
refused by an error that names the file.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
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
from fedstill.running.compare import output_folder, variants
from fedstill.running.directory import claimed
from fedstill.running.journal import read_journal
from fedstill.running.runner import resume, run
from fedstill.running.runs import read_run
from forking import SETTINGS
from run_bits import StopAfter, StoppedCopy, UninterruptedBits, assert_same_bits, bits


@pytest.mark.parametrize(
    "text", [b'{"event":"round","round":9}\n', b'{"event":"rou', b"\xff\xff\n\n"]
)
def test_the_part_of_a_journal_that_no_checkpoint_covers_is_dropped(
    text: bytes, uninterrupted_bits: UninterruptedBits, stopped_copy: StoppedCopy
) -> None:
    folder = stopped_copy("parallel")
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(text)
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits("parallel"))


def shortened(journal: bytes) -> bytes:
    """The journal without its last byte."""
    return journal[:-1]


def emptied(journal: bytes) -> bytes:
    """Nothing."""
    return b""


def changed(journal: bytes) -> bytes:
    """The journal with another number of the first round."""
    return journal.replace(b'"round":1', b'"round":2', 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shortened, "shorter than"),
        (emptied, "shorter than"),
        (None, "shorter than"),
        (changed, "changed"),
    ],
    ids=["shorter", "empty", "deleted", "changed"],
)
def test_a_run_whose_journal_was_damaged_is_not_resumed(
    damage: Callable[[bytes], bytes] | None,
    words: str,
    uninterrupted_bits: UninterruptedBits,
    stopped_copy: StoppedCopy,
) -> None:
    """As soon as the journal is restored, the run is resumed to the same bits."""
    folder = stopped_copy("parallel")
    path = folder / "journal.jsonl"
    journal = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(journal))
    with pytest.raises(CorruptFile, match=words):
        resume(folder, data=toys.blobs())

    path.write_bytes(journal)
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits("parallel"))


def newest_manifest(folder: Path) -> Path:
    """The manifest of the newest checkpoint of a run."""
    return max((folder / "checkpoints").glob("*.json"))


def newest_object(folder: Path) -> Path:
    """The parameters of the newest checkpoint of a run."""
    manifest = json.loads(newest_manifest(folder).read_text())["manifest"]
    return folder / "checkpoints" / "objects" / f"{manifest['groups']['params']}.safetensors"


def newest_memory(folder: Path) -> Path:
    """The state of a client that a run wrote last."""
    return max((folder / "memory").iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("file_of", [newest_manifest, newest_object, newest_memory])
def test_a_damaged_newest_checkpoint_costs_a_stage_and_no_bit(
    file_of: Callable[[Path], Path],
    uninterrupted_bits: UninterruptedBits,
    stopped_copy: StoppedCopy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = stopped_copy("sequential", 5)
    path = file_of(folder)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        resume(folder, data=toys.blobs())

    assert "skipped a checkpoint" in caplog.text
    assert_same_bits(bits(folder), uninterrupted_bits("sequential"))


def test_unfinished_files_of_a_killed_process_are_deleted(
    uninterrupted_bits: UninterruptedBits, stopped_copy: StoppedCopy
) -> None:
    folder = stopped_copy("sequential")
    for subfolder in (".", "checkpoints", "checkpoints/objects", "memory"):
        (folder / subfolder / ".file.json.4711.part").write_bytes(b"half")
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits("sequential"))


def test_the_error_for_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "all/fedavg/seed1", data=toys.blobs())
    for folder in (tmp_path / "all", tmp_path / "all/fedavg"):
        with pytest.raises(NoRun, match="all/fedavg/seed1"):
            resume(folder, data=toys.blobs())


def test_a_run_may_begin_in_a_directory_that_has_only_an_unfinished_first_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / ".config.toml.4711.part").write_bytes(b"half")

    with pytest.raises(NoRun, match="contains no run"):
        resume(tmp_path / "run", data=toys.blobs())

    run(toys.toy(rounds=1), tmp_path / "run", data=toys.blobs())
    assert not list((tmp_path / "run").glob(".*.part"))


def test_a_changed_config_is_refused(stopped_copy: StoppedCopy) -> None:
    folder = stopped_copy("parallel")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(CorruptFile, match=r"config\.toml") as caught:
        resume(folder, data=toys.blobs())
    assert str(caught.value).endswith(f"--out NEW -s start_from={folder.resolve()}")


def test_a_finished_run_with_a_changed_config_is_not_resumed_but_can_be_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(toys.SMALL)
    folder = run(load("my.toml", ("rounds=1", "measure=[]")), "one").directory
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 2\n"))

    with pytest.raises(CorruptFile, match=r"config\.toml"):
        resume(folder)

    continued = run(load("one/config.toml", ("start_from=one",)), "new")
    assert len(continued.history) == 2
    assert f'start_from = "{tmp_path / "one"}"' in (continued.directory / "config.toml").read_text()


def test_a_changed_config_is_noticed_without_checkpoints_too(tmp_path: Path) -> None:
    """By a resume, and by the report."""
    folder = run(toys.toy(rounds=1), tmp_path / "run", toys.blobs()).directory
    rmtree(folder / "checkpoints")
    read_run(folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 1  # and no more\n"))
    for read in (resume, read_run):
        with pytest.raises(CorruptFile, match=r"config\.toml"):
            read(folder)


def test_a_misspelt_key_in_the_config_of_a_run_is_reported_as_a_change(
    stopped_copy: StoppedCopy, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped_copy("parallel")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "rl = 0.1"))

    with pytest.raises(CorruptFile, match=r"config\.toml"):
        resume(folder, data=toys.blobs())
    assert call(["resume", str(folder)]) == 1
    assert "config.toml" in capsys.readouterr().err


def test_a_config_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(toys.SMALL)
    with pytest.raises(NoRun, match=r"my\.toml"):
        resume(tmp_path / "my.toml")


def test_the_error_for_an_unreadable_journal_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(CorruptFile, match=r"journal\.jsonl: Is a directory"):
        read_journal(tmp_path / "journal.jsonl")


def holding_process(program: str, path: Path) -> subprocess.Popen[str]:
    """A process that holds a path until its input ends; it holds it when this function returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


HOLDS_LOCK = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_that_another_process_writes_is_busy(
    uninterrupted_bits: UninterruptedBits, stopped_copy: StoppedCopy
) -> None:
    folder = stopped_copy("parallel")
    holder = holding_process(HOLDS_LOCK, folder / "lock")
    with pytest.raises(RunBusy, match="another process"):
        resume(folder, data=toys.blobs())

    holder.communicate()
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits("parallel"))


HOLDS_FOLDER = """
import sys
from pathlib import Path
from fedstill.running.directory import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files_below(folder: Path) -> dict[Path, bytes]:
    """The contents of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_error_for_a_folder_in_use_names_the_process_that_writes_in_it(tmp_path: Path) -> None:
    """The second of two comparisons in one folder changes nothing."""
    config = tmp_path / "short.toml"
    config.write_text("rounds = 1\n")
    out = tmp_path / "all"
    holder = holding_process(HOLDS_FOLDER, out)
    files_of_holder = files_below(out)
    runs = variants(load(config), out, ("fedavg", "fedprox"))
    process = f"{holder.pid} on {socket.gethostname()}"
    message = rf"all is being written by another process, {process} since 2\d+-\d\d-\d\d "
    with pytest.raises(RunBusy, match=message):
        carry_out(runs, out, 1, quiet=True)
    assert files_below(out) == files_of_holder

    holder.communicate()
    assert not (out / "holder.json").exists()
    with claimed(out):
        assert (out / "holder.json").exists()


@pytest.mark.parametrize("holder", [b"", b"{", b"[]", b'{"process": "x"}', b"\xff", b"[" * 9999])
def test_a_folder_with_an_unreadable_holder_is_busy_too(holder: bytes, tmp_path: Path) -> None:
    with claimed(tmp_path):
        (tmp_path / "holder.json").write_bytes(holder)
        with pytest.raises(RunBusy, match="another process"), claimed(tmp_path):
            pass


def test_the_folder_of_a_comparison_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunExists, match=str(tmp_path / "file")), claimed(tmp_path / "file"):
        pass
    with pytest.raises(ConfigError, match="below"), claimed(tmp_path / "file/below"):
        pass


def test_names_that_are_too_long_for_a_folder_are_shortened_and_stay_distinct(
    tmp_path: Path,
) -> None:
    """A name that fits is not shortened."""
    longer = [0.125 + 1 / n for n in range(1, 21)]
    grid = {"data.std": [longer[:-1], longer]}
    runs = variants(Experiment(), tmp_path, ["fedavg"], [1], grid)
    for variant in runs:
        variant.folder.mkdir(parents=True)

    first_name, second_name = (variant.folder.parent.name for variant in runs)
    assert first_name != second_name
    assert first_name[:150] == second_name[:150]
    assert len(first_name) == len(second_name) < 170
    assert runs[1].label == f"fedavg data.std={longer}"

    values = [0.1] * 40
    (variant,) = variants(Experiment(), tmp_path, ["fedavg"], [1], {"data.std": [values]})
    text = ",_".join(["0.1"] * 40)
    assert variant.folder.parent.name == f"fedavg_data.std=[{text}]"


def test_a_run_does_not_begin_in_the_directory_of_another_run(stopped_copy: StoppedCopy) -> None:
    folder = stopped_copy("parallel")
    files_of_run = files_below(folder)
    with pytest.raises(RunExists, match=str(folder)):
        run(SETTINGS["parallel"], folder, data=toys.blobs())
    assert files_below(folder) == files_of_run


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


def test_a_run_with_a_users_method_is_resumed_only_if_the_file_has_not_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    experiment = replace(toys.toy("mine.py"), base=tmp_path)
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


def test_a_resume_with_other_versions_is_logged_and_recorded(
    tmp_path: Path,
    stopped_copy: StoppedCopy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second resume with the same other versions logs nothing."""
    folder = stopped_copy("parallel", 1)
    versions = same_run.software()
    older = {name: versions[name] for name in ("fedstill", "torch")}
    newer = {"fedstill": "8.0", "torch": "9.0"}
    with monkeypatch.context() as patch:
        patch.setattr(same_run, "software", lambda device: {**versions, **newer})
        with pytest.raises(Interrupted):
            resume(folder, toys.blobs(), watch=StopAfter(1))
        (line,) = (r.getMessage() for r in caplog.records if r.name == "fedstill.resume")
        was_run_with = f"was run with fedstill {older['fedstill']}, torch {older['torch']}"
        assert f"{was_run_with} and goes on with fedstill 8.0" in line

        caplog.clear()
        with pytest.raises(Interrupted):
            resume(folder, toys.blobs(), watch=StopAfter(1))
        assert not caplog.records

    resume(folder, toys.blobs())
    assert "torch 9.0" in caplog.text
    events = read_journal(folder / "journal.jsonl")
    resumed = [event for event in events if event["event"] == "resumed"]
    assert [event["before"] for event in resumed] == [older, newer]
    assert [event["versions"] for event in resumed] == [newer, older]
    rounds = [event["round"] for event in resumed]
    assert rounds == sorted(rounds)
    assert read_run(folder).versions("torch") == [older["torch"], "9.0", older["torch"]]
    page = write_page([folder], tmp_path / "report.html").read_text()
    assert f"torch {', '.join(sorted([older['torch'], '9.0']))}" in page


def test_a_resume_with_the_same_versions_records_nothing(
    uninterrupted_bits: UninterruptedBits,
    stopped_copy: StoppedCopy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = stopped_copy("parallel")
    resume(folder, toys.blobs())
    assert "goes on with" not in caplog.text
    assert_same_bits(bits(folder), uninterrupted_bits("parallel"))


def test_commands_at_the_same_time_get_different_output_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with output_folder(None, "compare") as first, output_folder(None, "compare") as second:
        assert first != second
        (second / "report.html").touch()
    assert list(Path("runs").iterdir()) == [second], "an empty folder is removed"


def test_a_new_output_folder_has_not_been_packed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/compare-1.runs.tar.xz").touch()
    with output_folder(None, "compare") as folder:
        assert folder == Path("runs/compare-2")


def test_a_file_in_place_of_the_output_folders_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(ConfigError, match="runs"), output_folder(None, "compare"):
        pass


def test_the_directory_of_a_run_is_no_folder_for_a_comparison(tmp_path: Path) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", toys.blobs())
    with pytest.raises(RunExists, match="single run"), claimed(tmp_path / "run"):
        pass
