"""Kept updates: what clients sent, the same after a kill, and as many bytes as explain says."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.cli import call
from fedstill.cli.explain import kept_update_bytes, run_estimate
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.codec import encode
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.files import digest
from fedstill.core.records import SERVER
from fedstill.running.checkpoint import UPDATES, Checkpoints, kept_updates
from fedstill.running.preparation import prepare
from fedstill.running.replay import Replay
from fedstill.running.runner import resume, run
from flowers import needs_flower
from forking import Helper
from run_bits import assert_same_bits, bits

EXPERIMENTS = {
    "scaffold": toys.toy("scaffold", keep_updates=True),
    "chain": toys.toy("fedseq", rounds=2, topology={"clients": 4, "sampled": 3}, keep_updates=True),
    "logits": toys.toy(
        "hiper_fedkd",
        rounds=2,
        data={"public": toys.PUBLIC},
        clients={"models": ["mlp", "logistic"]},
        keep_updates=True,
    ),
}


@dataclass
class Updates(NoRecorder):
    """Keeps the SHA-256 of every accepted reply, by round, stage and client."""

    digests: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def stage(self, result: StageResult) -> None:
        for reply in result.accepted:
            if reply.client != SERVER:
                key = (result.stage.round, result.stage.index, reply.client)
                self.digests[key] = digest(encode(reply.content))


def directory_of_run(experiment: Experiment, folder: Path) -> Path:
    """Run an experiment in a folder."""
    run(experiment, folder, toys.blobs())
    return folder


def update_bytes(folder: Path) -> int:
    """The size of all kept updates of a run."""
    return sum(path.stat().st_size for path in (folder / UPDATES).iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_kept_updates_are_the_replies_of_a_replay(name: str, tmp_path: Path) -> None:
    folder = directory_of_run(EXPERIMENTS[name], tmp_path / "run")
    replayed = Updates()
    with Replay.of_round(folder, 0, toys.blobs()).session() as session:
        for _ in session.rounds(recorder=replayed):
            pass
    updates = kept_updates(folder)

    assert len(updates) == len(list((folder / UPDATES).iterdir()))

    digests = {(update.round, update.stage, update.client): update.sha256 for update in updates}
    assert list(digests) == sorted(digests)

    # The census comes before round 1, where the replay begins.
    after_census = {key: sha256 for key, sha256 in digests.items() if key[0] > 0}
    assert after_census == replayed.digests
    for update in updates:
        assert digest(encode(update.content())) == update.sha256
        assert update.examples > 0


@needs_flower
def test_over_flower_they_are_the_same(tmp_path: Path) -> None:
    experiment = toys.toy("scaffold", keep_updates=True)
    serial = directory_of_run(experiment, tmp_path / "serial")
    over_flower = directory_of_run(replace(experiment, engine="flower"), tmp_path / "flower")

    digests = [update.sha256 for update in kept_updates(serial)]
    assert digests
    assert digests == [update.sha256 for update in kept_updates(over_flower)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_explain_knows_their_bytes_before_the_run(name: str, tmp_path: Path) -> None:
    prepared = prepare(resolve(EXPERIMENTS[name]), toys.blobs())
    figure = kept_update_bytes(prepared)
    assert figure == update_bytes(directory_of_run(EXPERIMENTS[name], tmp_path / "run"))
    values = [value for _, value in run_estimate(prepared).lines()]
    assert any(f"{figure:,} bytes" in value for value in values)


def test_the_command_prints_the_bytes_only_if_updates_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.toml"
    config.write_text('data = "digits"\nmodel = "logistic"\nrounds = 2\n')
    printed = []
    for value in ("true", "false"):
        assert call(["explain", str(config), "-s", f"keep_updates={value}", "--no-split"]) == 0
        printed.append(capsys.readouterr().out)

    assert ["updates kept" in out for out in printed] == [True, False]


def test_a_run_without_kept_updates_does_not_mention_them(tmp_path: Path) -> None:
    folder = directory_of_run(toys.toy(rounds=1), tmp_path / "run")
    assert "keep_updates" not in (folder / "config.toml").read_text()
    assert "update_sha256" not in (folder / "journal.jsonl").read_text()
    with pytest.raises(ConfigError, match="keep_updates"):
        kept_updates(folder)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    folder = directory_of_run(toys.toy(rounds=1, keep_updates=True), tmp_path / "run")
    update = kept_updates(folder)[0]
    data = bytearray(update.path.read_bytes())
    data[-1] ^= 1
    update.path.write_bytes(bytes(data))

    with pytest.raises(CorruptFile, match=update.path.name):
        update.content()


def test_with_secure_sums_there_is_nothing_to_keep() -> None:
    settings = resolve(toys.toy(privacy={"secure_sum": True}, keep_updates=True))
    with pytest.raises(ConfigError, match="keep_updates"):
        prepare(settings, toys.blobs())


class Killed(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("checkpoints", [0, 2])
def test_updates_without_their_checkpoint_are_dropped_and_written_again(
    name: str, checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = directory_of_run(EXPERIMENTS[name], tmp_path / "whole")
    save = Checkpoints.save
    remaining = checkpoints + 1  # one is written before round 1

    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise Killed
        return save(*args, **kwargs)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killing)
        with pytest.raises(Killed):
            run(EXPERIMENTS[name], folder, toys.blobs())
    stray = list((folder / UPDATES).iterdir())

    assert len(stray) > len(kept_updates_with_checkpoint(folder))

    # What is beyond the checkpoint is dropped even if it is not written again.
    late = folder / UPDATES / "client0-round3-stage9.safetensors"
    late.write_bytes(b"")
    resume(folder, toys.blobs())

    assert not late.exists()
    assert_same_bits(bits(folder), bits(uninterrupted))


def kept_updates_with_checkpoint(folder: Path) -> list[Any]:
    """The updates before the newest checkpoint."""
    manifest = (folder / "checkpoints" / "LATEST").read_text()
    reached = json.loads((folder / "checkpoints" / manifest).read_bytes())["manifest"]
    position = (reached["round"], reached["stage"])
    return [u for u in kept_updates(folder) if (u.round, u.stage) < position]


@pytest.mark.slow
def test_a_kill_while_updates_are_written_changes_no_bit(helper: Helper, tmp_path: Path) -> None:
    uninterrupted = helper.go("kept_updates", tmp_path / "whole")
    draw = random.Random(57)
    for number, kind in enumerate(("replace", "fsync", "fsync")):
        folder = tmp_path / str(number)
        nth = draw.randrange(8, uninterrupted["counts"][kind] - 4)
        fault = (kind, nth, draw.choice(["before", "after"]))
        assert helper.go("kept_updates", folder, fault=fault)["status"] != 0, fault
        assert helper.go("kept_updates", folder)["status"] == 0
        assert_same_bits(bits(folder), bits(tmp_path / "whole"))
