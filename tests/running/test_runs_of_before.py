"""Runs that an earlier version began: their config.toml resolves to its own bytes, and they go on
to their end.

``begun_before/`` was written by version 0.1.0, before ``experiment/`` had folders: a run of each
topology, stopped on the way, and resolved configs of every method, partition and model (one JSON
object a line). Fields that came later have the value there of what was done before.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.config.experiment import from_tree
from fedstill.config.resolve import settle
from fedstill.config.settings import with_old_behaviour
from fedstill.core.errors import ClientFailed
from fedstill.engines import serial
from fedstill.running.compare import variants
from fedstill.running.journal import read_journal
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from fedstill.running.same_run import other_settings, software
from run_bits import before_round_1, resealed

BEFORE = Path(__file__).parent / "begun_before"
CONFIGS = [json.loads(line) for line in (BEFORE / "configs.jsonl").read_text().splitlines()]
CAME_LATER = ['over_teachers = "sum"', 'phase1_over = "same"', 'failures = "tolerate"']
CAME_LATER += ['before = ""', 'after = ""', 'closing = ""']
"""Lines that a config has today and those of version 0.1.0 lack."""
CHAIN_CAME_LATER = 'order = "drawn"\nfirst = ""\nlast = ""\n'
"""The same of a chain."""
NORM = 'norm = "group"\n'
PROJECTION_CAME_LATER = f"{NORM}projection = 0\n"
"""The same of a ResNet."""


@pytest.mark.parametrize("one", CONFIGS, ids=lambda one: one["name"])
def test_a_config_resolves_to_its_own_bytes(one: dict[str, str]) -> None:
    resolved = settle(from_tree(with_old_behaviour(tomllib.loads(one["config"])), {}, None)).toml
    resolved = resolved.replace(CHAIN_CAME_LATER, "").replace(PROJECTION_CAME_LATER, NORM)
    assert (
        "".join(line for line in resolved.splitlines(True) if line.strip() not in CAME_LATER)
        == one["config"]
    )


@pytest.mark.parametrize("topology", ["parallel", "sequential", "public_logits", "peer_to_peer"])
def test_a_run_begun_before_goes_on_to_its_end(topology: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(BEFORE / topology, folder)
    config, events = (folder / "config.toml").read_bytes(), read_journal(folder / "journal.jsonl")
    done = resume(folder, toys.blobs())
    assert (folder / "config.toml").read_bytes() == config
    after = read_journal(folder / "journal.jsonl")
    assert after[: len(events)] == events, "what was journaled stays, times too"
    assert [e["round"] for e in done.history] == list(
        range(1, tomllib.loads(config.decode())["rounds"] + 1)
    )
    assert not [e for e in after if e["event"] == "client" and "refused" in e]
    was, now = events[0]["torch"], software()["torch"]
    noted = [e for e in after if e["event"] == "resumed"]
    assert all("numpy" not in e["versions"] for e in noted), (
        "what version 0.1.0 did not note is not compared"
    )
    assert [e["versions"]["torch"] for e in noted if "torch" in e["versions"]] == (
        [now] if was != now else []
    )


def test_a_run_begun_before_goes_on_without_clients_that_fail_with_old_behaviour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config says nothing of that; a run that begins now stops."""
    folder, train = tmp_path / "run", serial.train
    shutil.copytree(BEFORE / "parallel", folder)

    def failing(work: Any, start: Any, view: Any, setup: Any) -> Any:
        if view.client == setup.stage.clients[0]:
            raise OSError("gone")
        return train(work, start, view, setup)

    monkeypatch.setattr(serial, "train", failing)
    done = resume(folder, toys.blobs())
    assert done.summary["refused"] == sum(e["refused"] for e in done.history) > 0
    assert "failures" not in (folder / "config.toml").read_text()
    again = from_tree(tomllib.loads((folder / "config.toml").read_text()), {}, None)
    with pytest.raises(ClientFailed, match="OSError: gone"):
        run(again, tmp_path / "again", toys.blobs())


def test_a_comparison_begun_before_goes_on_and_its_runs_stay_one_group(tmp_path: Path) -> None:
    experiment = toys.toy(
        rounds=1, topology={"clients": 4}, data={"train_size": 200, "name": "digits"}
    )
    (begun,) = variants(experiment, tmp_path, ("fedavg",), (1,))
    (now,) = variants(experiment, tmp_path, ("fedavg",), (2,))
    for one in (begun, now):
        run(one.experiment, one.folder)
    path = begun.folder / "config.toml"
    resealed(begun.folder, path.read_text().replace('failures = "stop"\n', ""))
    assert other_settings(begun.settings, begun.folder) == []
    assert other_settings(now.settings, now.folder) == []
    (group,) = groups([tmp_path])
    assert (group.label, group.seeds) == ("fedavg", [1, 2])
    resealed(begun.folder, path.read_text().replace("quorum = 0.5", "quorum = 0.7"))
    assert other_settings(begun.settings, begun.folder) == ["clients.quorum"]


def test_a_run_whose_clients_were_stacked_with_other_seeds_goes_on_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(BEFORE / "parallel", folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text("stacked_seeds = [7, 8]\n" + text)
    before_round_1(folder)  # the checkpoints were made under another configuration
    assert len(resume(folder, toys.blobs()).history) == 3
