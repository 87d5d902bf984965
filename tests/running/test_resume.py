"""A stopped run is resumed to the bits of an uninterrupted one, or an error says why it cannot be
resumed. Kills are in ``test_kills.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.core.errors import CorruptFile, Interrupted
from fedstill.core.records import State, World
from fedstill.core.registry import method
from fedstill.core.trees import same_bits
from fedstill.export.loading import load_model
from fedstill.methods.fedavg import FedAvg
from fedstill.report.table_files import run_frames
from fedstill.running.recording import Quiet
from fedstill.running.replay import Replay
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.runs import find, read_run
from forking import SETTINGS
from run_bits import (
    StopAfter,
    StoppedCopy,
    UninterruptedBits,
    assert_same_bits,
    before_round_1,
    bits,
    stopped,
)

pytestmark = pytest.mark.usefixtures("with_threads")


class Broken(Exception):
    """Something in this process failed between two events."""


class BreakAfterRound(Quiet):
    """Fails between the event of a round and the checkpoint that covers it."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        raise Broken(event["round"])


STAGES = {
    "parallel": 3,
    "sequential": 8,
    "public_logits": 7,
    "peer_to_peer": 3,
    "asked_again": 6,
    "kept_updates": 2,
    "stopped_early": 7,
}
"""The number of stages of each setting, the census included."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_stopped_after_every_single_stage_ends_with_the_same_bits(
    name: str, uninterrupted_bits: UninterruptedBits, tmp_path: Path
) -> None:
    folder = stopped(SETTINGS[name], tmp_path / "run", 1)
    stops = 1
    while True:
        try:
            resume(folder, toys.blobs(), watch=StopAfter(1))
            break
        except Interrupted:
            stops += 1

    assert stops == STAGES[name]
    assert_same_bits(bits(folder), uninterrupted_bits(name))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("parallel", 2),
        ("sequential", 3),
        ("public_logits", 1),
        ("public_logits", 3),
        ("peer_to_peer", 2),
        pytest.param("asked_again", 4, marks=pytest.mark.uses("querying")),
    ],
)
def test_a_run_stopped_once_ends_with_the_same_bits(
    name: str, stages: int, uninterrupted_bits: UninterruptedBits, tmp_path: Path
) -> None:
    folder = stopped(SETTINGS[name], tmp_path / "run", stages)
    result = resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits(name))
    assert result.history[-1]["round"] == SETTINGS[name].rounds


@pytest.mark.parametrize("name", SETTINGS)
def test_a_round_that_the_journal_has_already_is_not_recorded_twice(
    name: str, uninterrupted_bits: UninterruptedBits, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Broken):
        run(SETTINGS[name], folder, toys.blobs(), watch=BreakAfterRound())
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits(name))


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_again(
    uninterrupted_bits: UninterruptedBits, tmp_path: Path
) -> None:
    folder = before_round_1(stopped(SETTINGS["sequential"], tmp_path / "run", 1))
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), uninterrupted_bits("sequential"))


def test_a_run_whose_checkpoints_were_deleted_is_not_resumed(tmp_path: Path) -> None:
    folder = stopped(SETTINGS["sequential"], tmp_path / "run", 1)
    shutil.rmtree(folder / "checkpoints")
    journal = (folder / "journal.jsonl").read_bytes()

    with pytest.raises(CorruptFile, match="checkpoint") as caught:
        resume(folder, data=toys.blobs())
    assert caught.value.in_shell.endswith("--overwrite")
    assert (folder / "journal.jsonl").read_bytes() == journal


@pytest.fixture
def ended(whole_run: Path, tmp_path: Path) -> Path:
    """A finished run of two rounds, to be damaged."""
    return Path(shutil.copytree(whole_run, tmp_path / "runs" / "run"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(toys.toy(rounds=2), tmp_path_factory.mktemp("ended") / "run", toys.blobs()).directory


def modification_times(folder: Path) -> dict[Path, int]:
    """When each file of a run was last written; without the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path: path.stat().st_mtime_ns for path in paths}


def test_a_resume_of_a_finished_run_returns_its_result_and_writes_nothing(tmp_path: Path) -> None:
    first = run(SETTINGS["parallel"], tmp_path / "run", data=toys.blobs())
    times = modification_times(tmp_path / "run")
    resumed = resume(tmp_path / "run")

    assert modification_times(tmp_path / "run") == times
    assert resumed.accuracy == first.accuracy
    assert resumed.forgetting == first.forgetting
    assert resumed.summary == first.summary
    assert resumed.history == first.history
    assert all(torch.equal(resumed.model[name], first.model[name]) for name in first.model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b""),
        ("summary.json", b"[1]"),
        ("summary.json", b"{}"),
        ("summary.json", b"\xff"),
        ("model.safetensors", b"PK\x03\x04"),
        ("model.safetensors", None),
        ("journal.jsonl", b"{]\n"),
        ("journal.jsonl", b"3\n"),
        ("journal.jsonl", None),
    ],
)
def test_the_damaged_file_of_a_finished_run_is_named(
    name: str, content: bytes | None, ended: Path
) -> None:
    (ended / name).unlink()
    if content is not None:
        (ended / name).write_bytes(content)
    with pytest.raises(CorruptFile, match=name):
        resume(ended, data=toys.blobs())


def assert_journal_is_refused(folder: Path, words: str) -> None:
    """Assert that every reader refuses the journal of a finished run, for this reason."""
    message = rf"journal\.jsonl, line \d+, is not .*: .*{words}.*; restore the file"
    for read in (resume, read_run, run_frames):
        with pytest.raises(CorruptFile, match=message):
            read(folder)


@pytest.mark.parametrize("length", [1, None], ids=["a newline", "a line"])
def test_a_journal_that_lost_its_end_is_refused(length: int | None, ended: Path) -> None:
    journal = ended / "journal.jsonl"
    content = journal.read_bytes()
    if length is None:
        length = len(content.splitlines(keepends=True)[-1])
    journal.write_bytes(content[:-length])
    assert_journal_is_refused(ended, "it has 1 rounds, and summary.json 2")


@pytest.mark.parametrize(
    ("addition", "words"),
    [
        (
            '{"event":"resumed","round":2,"stage":0,"before":{},"versions":{}}\n',
            "it ends in the event 'resumed', and not in 'round'",
        ),
        (
            '{"event":"client","round":3,"stage":0,"name":"train","client":0}\n',
            "it ends in the event 'client', and not in 'round'",
        ),
        ('{"event":"ta', "half a line"),
    ],
    ids=["a resume", "a client", "half a line"],
)
def test_a_journal_with_an_addition_is_refused(addition: str, words: str, ended: Path) -> None:
    with (ended / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write(addition)
    assert_journal_is_refused(ended, words)


def test_a_journal_with_a_changed_number_is_refused(ended: Path) -> None:
    journal = ended / "journal.jsonl"
    content = journal.read_text(encoding="utf-8")
    changed = content.replace('"accuracy":', '"accuracy":0.125,"was":')
    journal.write_text(changed, encoding="utf-8")
    assert_journal_is_refused(ended, "last round has accuracy 0.125")


def test_the_journal_of_a_finished_run_may_end_in_an_event_of_an_observer(ended: Path) -> None:
    journal = ended / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"event":"update","round":2}\n')
    assert resume(ended).history[-1]["round"] == 2
    assert len(read_run(ended).rounds) == 2


def test_a_finished_run_without_its_journal_is_an_error_for_a_report(ended: Path) -> None:
    (ended / "journal.jsonl").unlink()
    with pytest.raises(CorruptFile, match="journal"):
        find([ended.parent])


def test_all_readers_of_the_final_model_refuse_one_with_a_flipped_bit(ended: Path) -> None:
    path = ended / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shutil.rmtree(ended / "checkpoints")

    with pytest.raises(CorruptFile, match="SHA-256"):
        resume(ended)
    with pytest.raises(CorruptFile, match="SHA-256"):
        load_model(ended)
    with pytest.raises(CorruptFile, match="SHA-256"):
        run(toys.toy(rounds=1, start_from=str(ended)), ended / "on", toys.blobs())

    # Earlier versions did not record the SHA-256.
    summary = json.loads((ended / "summary.json").read_bytes())
    del summary["model_sha256"]
    (ended / "summary.json").write_text(json.dumps(summary))
    assert resume(ended).accuracy == summary["accuracy"]


def test_a_finished_run_is_read_without_a_lock(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise AssertionError(f"{folder} is locked")

    monkeypatch.setattr("fedstill.running.runner.locked", refused)

    assert resume(ended).history[-1]["round"] == 2
    with pytest.raises(AssertionError, match="is locked"):
        resume(ended, track="tensorboard")


def write_rows(path: Path, scale: float) -> None:
    """Write a table of two columns and two classes."""
    lines = ["x,y,label"]
    for number in range(60):
        label = "ab"[number % 3 == 0]
        lines.append(f"{scale * (number % 7)},{scale * (number % 11)},{label}")
    path.write_text("\n".join(lines) + "\n")


def test_a_run_is_not_resumed_on_changed_data(tmp_path: Path) -> None:
    csv = tmp_path / "own.csv"
    write_rows(csv, 1.0)
    experiment = toys.toy(
        data={"name": str(csv)}, model={"name": "mlp", "hidden": [4]}, topology={"clients": 2}
    )
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "run", watch=StopAfter(1))

    write_rows(csv, -50.0)
    with pytest.raises(CorruptFile, match="standard deviation"):
        resume(tmp_path / "run")

    write_rows(csv, 1.0)
    assert resume(tmp_path / "run").accuracy >= 0


def test_a_run_is_not_resumed_on_exchanged_examples_of_the_same_labels_and_spread(
    tmp_path: Path,
) -> None:
    data = toys.blobs()
    images = data.train.values.clone()
    images[[0, 5]] = images[[5, 0]]  # two of one class change places
    exchanged = replace(data, train=replace(data.train, values=images))

    assert (exchanged.mean, exchanged.std) == (data.mean, data.std)
    with pytest.raises(Interrupted):
        run(SETTINGS["parallel"], tmp_path / "run", data, watch=StopAfter(1))
    with pytest.raises(CorruptFile, match="examples"):
        resume(tmp_path / "run", data=exchanged)
    assert resume(tmp_path / "run", data=toys.blobs()).accuracy >= 0


@method("toy_noisy_start")
@dataclass(frozen=True)
class NoisyStart(FedAvg):
    """FedAvg from parameters that it draws itself."""

    def initial_state(self, world: World) -> State:
        state = super().initial_state(world)
        noisy = {name: p + torch.randn_like(p) for name, p in state.params.items()}
        return state.next(params=noisy)


def test_a_method_draws_the_same_start_in_a_resumed_run_and_in_a_replay(tmp_path: Path) -> None:
    experiment = toys.toy("toy_noisy_start")
    uninterrupted = run(experiment, tmp_path / "whole", toys.blobs())
    run(experiment, tmp_path / "killed", toys.blobs())
    resumed = resume(before_round_1(tmp_path / "killed"), toys.blobs())

    assert same_bits(uninterrupted.model, resumed.model)

    with Replay.of_round(tmp_path / "whole", 1, toys.blobs()).session() as session:
        *_, last = session.rounds()
    assert same_bits(uninterrupted.model, last.params)


def test_an_unfinished_run_has_no_result(stopped_copy: StoppedCopy) -> None:
    with pytest.raises(CorruptFile, match=r"not finished.*fedstill resume"):
        Result.of(stopped_copy("parallel"))
