"""One round loop hosts all four topologies; what a bad client sends changes nothing for the
others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import Diverged, IncompatibleMethod, TooFewReplies
from fedstill.core.files import digest
from fedstill.running import journal as journals
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.runner import run

SINGLE = {
    "fedavg": toys.toy(),
    "chain": toys.toy("toy_chain"),
    "batchnorm": toys.toy(model="toy_batchnorm"),
    "peers": toys.toy("toy_peers", rounds=1, topology={"clients": 6}),
    "four architectures": toys.toy(
        "toy_logits",
        data={"public": toys.PUBLIC},
        clients={"models": ["mlp", "logistic", "toy_batchnorm", "qkt_cnn"]},
        plan={"epochs": 4, "batch": 20, "lr": 0.2},
    ),
}


def last_state(folder: Path):
    config = digest((folder / "config.toml").read_bytes())
    return Checkpoints(folder / "checkpoints", config).latest()


@pytest.mark.parametrize("name", SINGLE)
def test_every_topology_runs_and_learns(name: str, tmp_path: Path) -> None:
    result = run(SINGLE[name], tmp_path / "run", data=toys.blobs())
    assert len(result.history) == SINGLE[name].rounds
    assert result.accuracy > 0.5, "chance is 0.2"
    events = journals.read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [e for e in events if "refused" in e and e["event"] == "client"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path) -> None:
    first, second = (run(toys.toy(), tmp_path / str(i), data=toys.blobs()) for i in range(2))
    other = run(toys.toy(seed=8), tmp_path / "other", data=toys.blobs())
    assert all(torch.equal(first.model[k], second.model[k]) for k in first.model)
    assert any(not torch.equal(first.model[k], other.model[k]) for k in first.model)


def test_batchnorm_statistics_are_averaged_and_travel(tmp_path: Path) -> None:
    model = run(SINGLE["batchnorm"], tmp_path / "run", data=toys.blobs()).model
    assert model["body.1.running_mean"].abs().sum() > 0
    assert model["body.1.num_batches_tracked"].dtype == torch.int64


def test_settle_leaves_a_trace_that_travels_with_the_model(tmp_path: Path) -> None:
    run(SINGLE["chain"], tmp_path / "run", data=toys.blobs())
    state = last_state(tmp_path / "run").state
    assert all(v.sum() > 0 for v in state.extra.tensors("importance").values())


def test_a_census_fills_the_labels_once(tmp_path: Path) -> None:
    run(SINGLE["four architectures"], tmp_path / "run", data=toys.blobs())
    labels = last_state(tmp_path / "run").state.extra.tensor("labels")
    assert labels.shape == (6, toys.CLASSES)
    assert labels.sum() == 300 - toys.PUBLIC
    census = [
        e
        for e in journals.read_journal(tmp_path / "run" / "journal.jsonl")
        if e.get("name") == "census"
    ]
    assert len(census) == 6


@pytest.mark.parametrize(
    "how", ["raise", "nan", "shape", "type", "huge", "extra", "missing", "sparse"]
)
def test_a_bad_reply_is_named_and_changes_nothing_else(how: str, tmp_path: Path) -> None:
    """State and memory are those of the same run in which that client was not asked at all."""
    who = 1
    topology = {"clients": 6, "sampled": 6}
    failing = toys.toy(
        {"name": "toy_failing", "who": who, "how": how}, topology=topology, clients=toys.TOLERANT
    )
    bad = run(failing, tmp_path / "bad", toys.blobs())
    good_config = toys.toy({"name": "toy_failing", "who": who, "how": "absent"}, topology=topology)
    good = run(good_config, tmp_path / "good", data=toys.blobs())
    assert all(torch.equal(bad.model[k], good.model[k]) for k in bad.model)
    left, right = last_state(tmp_path / "bad"), last_state(tmp_path / "good")
    assert left.state_files == right.state_files
    assert list(left.state.extra) == list(right.state.extra)
    refused = [
        e
        for e in journals.read_journal(tmp_path / "bad" / "journal.jsonl")
        if e["event"] == "client" and "refused" in e
    ]
    assert {e["client"] for e in refused} == {who}
    assert [e["round"] for e in refused] == [2, 3]
    assert all(e["refused"] for e in refused)


def test_below_the_quorum_the_run_stops_with_the_last_good_state(tmp_path: Path) -> None:
    method = {"name": "toy_failing", "who": 1, "how": "raise"}
    clients = {"quorum": 1.0, **toys.TOLERANT}
    experiment = toys.toy(method, topology={"clients": 6, "sampled": 6}, clients=clients)
    with pytest.raises(TooFewReplies, match=r"round 2.*client 1.*the disk of this site is gone"):
        run(experiment, tmp_path / "run", data=toys.blobs())
    short = run(
        toys.toy(method, topology={"clients": 6, "sampled": 6}, rounds=1),
        tmp_path / "one",
        data=toys.blobs(),
    )
    state = last_state(tmp_path / "run").state
    assert (state.round, state.stage) == (1, 1)
    assert all(torch.equal(state.params[k], short.model[k]) for k in short.model)


def test_a_failed_link_of_a_chain_is_skipped(tmp_path: Path) -> None:
    experiment = toys.toy(
        {"name": "toy_failing", "who": 1, "how": "raise"},
        topology={"kind": "sequential", "clients": 6, "sampled": 6},
        clients=toys.TOLERANT,
    )
    result = run(experiment, tmp_path / "run", data=toys.blobs())
    assert [e["refused"] for e in result.history] == [0, 1, 1]


def test_divergence_is_named_before_it_replaces_the_last_good_state(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="round 1"):
        run(
            toys.toy(plan={"epochs": 2, "batch": 10, "lr": 1e4}),
            tmp_path / "run",
            data=toys.blobs(),
        )
    assert last_state(tmp_path / "run").state.round == 1


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        (toys.toy("toy_logits"), "needs public data"),
        (toys.toy("fedavg", clients={"models": ["mlp", "logistic"]}), "averages weights"),
        (
            toys.toy("toy_peers", topology={"kind": "parallel", "clients": 6}),
            "stage 'train'",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    experiment: Experiment, words: str, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleMethod, match=words):
        run(experiment, tmp_path / "run", data=toys.blobs())
    assert not (tmp_path / "run").exists()


def test_the_run_directory_holds_what_the_design_names(tmp_path: Path) -> None:
    result = run(toys.toy(), tmp_path / "run", data=toys.blobs())
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {
        "config.toml",
        "journal.jsonl",
        "checkpoints",
        "model.safetensors",
        "summary.json",
    } <= names
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    wanted = {
        "method",
        "dataset",
        "rounds",
        "accuracy",
        "best_accuracy",
        "forgetting",
        "seconds",
        "seed",
    }
    assert wanted <= set(summary)
    rounds = [
        e
        for e in journals.read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "round"
    ]
    assert [e["round"] for e in rounds] == [1, 2, 3]
    assert {"accuracy", "class_accuracy", "seconds", "bytes_up", "bytes_down"} <= set(rounds[0])
    assert "in_local_accuracy" in rounds[1]
    assert "in_local_accuracy" not in rounds[0], "local models are measured every second round here"
    assert (
        rounds[0]["bytes_up"]
        == rounds[0]["bytes_down"]
        == 4 * sum(v.nbytes for v in result.model.values())
    )
