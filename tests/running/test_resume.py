"""A run that was stopped goes on to the same bits; one that cannot go on says why. Kills are in
test_kills.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
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
from fedstill.running.runner import resume, run
from fedstill.running.runs import find, read_run
from forking import SETTINGS
from run_bits import StopAfter, Whole, assert_same_bits, before_round_1, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")


class Broken(Exception):
    """Something in this process failed between two events."""


class BreakAfterRound(Quiet):
    """Fails when a round has been journaled and no checkpoint knows of it yet."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        raise Broken(event["round"])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_stopped_after_every_single_stage_ends_with_the_same_bits(
    name: str, whole: Whole, tmp_path: Path
) -> None:
    folder, stops = stopped(SETTINGS[name], tmp_path / "run", 1), 1
    while True:
        try:
            resume(folder, toys.blobs(), watch=StopAfter(1))
            break
        except Interrupted:
            stops += 1
    assert (
        stops
        == {
            "parallel": 3,
            "sequential": 8,
            "public_logits": 7,
            "peer_to_peer": 3,
            "asked_again": 6,
            "kept_updates": 2,
            "stopped_early": 7,
        }[name]
    )
    assert_same_bits(bits(folder), whole(name))


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
def test_a_run_stopped_once_goes_on_to_the_same_bits(
    name: str, stages: int, whole: Whole, tmp_path: Path
) -> None:
    folder = stopped(SETTINGS[name], tmp_path / "run", stages)
    result = resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole(name))
    assert result.history[-1]["round"] == SETTINGS[name].rounds


@pytest.mark.parametrize("name", SETTINGS)
def test_a_round_that_was_journaled_before_the_end_is_not_journaled_twice(
    name: str, whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Broken):
        run(SETTINGS[name], folder, toys.blobs(), watch=BreakAfterRound())
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole(name))


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_again(
    whole: Whole, tmp_path: Path
) -> None:
    folder = before_round_1(stopped(SETTINGS["sequential"], tmp_path / "run", 1))
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), whole("sequential"))


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    folder = stopped(SETTINGS["sequential"], tmp_path / "run", 1)
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "journal.jsonl").read_bytes()
    with pytest.raises(CorruptFile, match="checkpoint") as caught:
        resume(folder, data=toys.blobs())
    assert caught.value.in_shell.endswith("--overwrite")
    assert (folder / "journal.jsonl").read_bytes() == before


@pytest.fixture
def ended(whole_run: Path, tmp_path: Path) -> Path:
    """A finished run of two rounds, to be damaged."""
    return Path(shutil.copytree(whole_run, tmp_path / "runs" / "run"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(toys.toy(rounds=2), tmp_path_factory.mktemp("ended") / "run", toys.blobs()).directory


def test_a_finished_run_gives_its_result_and_nothing_is_written(tmp_path: Path) -> None:
    first = run(SETTINGS["parallel"], tmp_path / "run", data=toys.blobs())
    before = {
        p: p.stat().st_mtime_ns
        for p in (tmp_path / "run").rglob("*")
        if p.is_file() and p.name != "lock"
    }
    again = resume(tmp_path / "run")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert (again.accuracy, again.forgetting, again.summary) == (
        first.accuracy,
        first.forgetting,
        first.summary,
    )
    assert again.history == first.history
    assert all(torch.equal(again.model[k], first.model[k]) for k in first.model)


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
def test_a_finished_run_whose_files_are_damaged_says_which(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", data=toys.blobs())
    path = tmp_path / "run" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CorruptFile, match=name):
        resume(tmp_path / "run", data=toys.blobs())


CUTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a round": (
        lambda b: b"".join(b.splitlines(keepends=True)[:-1]),
        "it has 1 rounds, and summary.json 2",
    ),
    "a newline": (lambda b: b[:-1], "it has 1 rounds, and summary.json 2"),
    "a number": (
        lambda b: b.replace(b'"accuracy":', b'"accuracy":0.125,"was":'),
        "last round has accuracy 0.125",
    ),
    "more": (
        lambda b: b + b'{"event":"resumed","round":2,"stage":0,"before":{},"versions":{}}\n',
        "it ends in the event 'resumed', and not in 'round'",
    ),
    "a client": (
        lambda b: b + b'{"event":"client","round":3,"stage":0,"name":"train","client":0}\n',
        "it ends in the event 'client', and not in 'round'",
    ),
    "half": (lambda b: b + b'{"event":"ta', "half a line"),
}


@pytest.mark.parametrize("how", CUTS)
def test_a_finished_run_whose_journal_is_not_what_was_written_is_refused(
    how: str, ended: Path
) -> None:
    cut, why = CUTS[how]
    journal = ended / "journal.jsonl"
    journal.write_bytes(cut(journal.read_bytes()))
    for read in (resume, read_run, run_frames):
        with pytest.raises(
            CorruptFile,
            match=rf"journal\.jsonl, line \d+, is not .*: .*{why}.*; restore the file",
        ):
            read(ended)


def test_the_journal_of_a_finished_run_may_end_in_an_event_of_an_observer(ended: Path) -> None:
    journal = ended / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"event":"update","round":2}\n')
    assert resume(ended).history[-1]["round"] == 2
    assert len(read_run(ended).rounds) == 2


def test_a_finished_run_whose_journal_is_gone_is_not_left_out_of_a_report(ended: Path) -> None:
    (ended / "journal.jsonl").unlink()
    with pytest.raises(CorruptFile, match="journal"):
        find([ended.parent])


def test_a_bit_of_the_final_model_that_was_turned_is_noticed_by_all_who_read_it(
    ended: Path,
) -> None:
    path = ended / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    shutil.rmtree(ended / "checkpoints")
    further = toys.toy(rounds=1, start_from=str(ended))
    for read in (
        lambda: resume(ended),
        lambda: load_model(ended),
        lambda: run(further, ended / "on", toys.blobs()),
    ):
        with pytest.raises(CorruptFile, match="SHA-256"):
            read()
    summary = json.loads((ended / "summary.json").read_bytes())
    del summary["model_sha256"]  # as of a run of an earlier version
    (ended / "summary.json").write_text(json.dumps(summary))
    assert resume(ended).accuracy == summary["accuracy"]


def test_a_finished_run_needs_no_folder_that_can_be_written(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise AssertionError(f"{folder} is locked")

    monkeypatch.setattr("fedstill.running.runner.locked", refused)
    assert resume(ended).history[-1]["round"] == 2
    with pytest.raises(AssertionError, match="is locked"):
        resume(ended, track="tensorboard")


def test_a_run_whose_data_have_changed_does_not_go_on(tmp_path: Path) -> None:
    def written(scale: float) -> None:
        rows = [f"{scale * (i % 7)},{scale * (i % 11)},{'ab'[i % 3 == 0]}" for i in range(60)]
        (tmp_path / "own.csv").write_text("\n".join(["x,y,label", *rows]) + "\n")

    written(1.0)
    mine = {"name": str(tmp_path / "own.csv")}
    asked = toys.toy(data=mine, model={"name": "mlp", "hidden": [4]}, topology={"clients": 2})
    with pytest.raises(Interrupted):
        run(asked, tmp_path / "run", watch=StopAfter(1))
    written(-50.0)
    with pytest.raises(
        CorruptFile,
        match="standard deviation",
    ):
        resume(tmp_path / "run")
    written(1.0)
    assert resume(tmp_path / "run").accuracy >= 0


def test_a_run_whose_examples_changed_under_the_same_labels_and_spread_does_not_go_on(
    tmp_path: Path,
) -> None:
    data = toys.blobs()
    images = data.train.values.clone()
    images[[0, 5]] = images[[5, 0]]  # two of one class change places
    other = replace(data, train=replace(data.train, values=images))
    assert (other.mean, other.std) == (data.mean, data.std)
    with pytest.raises(Interrupted):
        run(SETTINGS["parallel"], tmp_path / "run", data, watch=StopAfter(1))
    with pytest.raises(CorruptFile, match="examples"):
        resume(tmp_path / "run", data=other)
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
    whole = run(experiment, tmp_path / "whole", toys.blobs())
    run(experiment, tmp_path / "killed", toys.blobs())
    again = resume(before_round_1(tmp_path / "killed"), toys.blobs())
    assert same_bits(whole.model, again.model)
    with Replay.of_round(tmp_path / "whole", 1, toys.blobs()).session() as session:
        *_, last = session.rounds()
    assert same_bits(whole.model, last.params)
