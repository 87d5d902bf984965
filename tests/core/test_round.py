"""One loop over rounds runs all four topologies, and a bad reply changes nothing for the other
clients.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.checks import check_quorum
from fedstill.core.errors import Diverged, IncompatibleMethod, TooFewReplies
from fedstill.core.extensions import RoundHook
from fedstill.core.files import digest
from fedstill.core.records import NOTHING, Payload, Reply, Stage, State, World
from fedstill.core.screen import Rules
from fedstill.core.stage_results import StageResult
from fedstill.core.trees import same_bits
from fedstill.running import journal as journals
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.preparation import prepare
from fedstill.running.runner import run
from journals import journal_events, refusals
from loops import context_of, first_state, next_state

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


def last_checkpoint(folder: Path) -> Any:
    """The last checkpoint of a run."""
    config = digest((folder / "config.toml").read_bytes())
    return Checkpoints(folder / "checkpoints", config).latest()


@pytest.mark.parametrize("name", SINGLE)
def test_every_topology_runs_and_learns(name: str, tmp_path: Path) -> None:
    result = run(SINGLE[name], tmp_path / "run", data=toys.blobs())
    assert len(result.history) == SINGLE[name].rounds
    assert result.accuracy > 0.5, "chance is 0.2"
    assert not refusals(tmp_path / "run")


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path) -> None:
    first = run(toys.toy(), tmp_path / "first", data=toys.blobs())
    second = run(toys.toy(), tmp_path / "second", data=toys.blobs())
    of_another_seed = run(toys.toy(seed=8), tmp_path / "another", data=toys.blobs())
    assert same_bits(first.model, second.model)
    assert not same_bits(first.model, of_another_seed.model)


def test_batchnorm_statistics_are_averaged_and_travel(tmp_path: Path) -> None:
    model = run(SINGLE["batchnorm"], tmp_path / "run", data=toys.blobs()).model
    assert model["body.1.running_mean"].abs().sum() > 0
    assert model["body.1.num_batches_tracked"].dtype == torch.int64


def test_the_trace_of_steps_travels_with_the_model(tmp_path: Path) -> None:
    run(SINGLE["chain"], tmp_path / "run", data=toys.blobs())
    importance = last_checkpoint(tmp_path / "run").state.extra.tensors("importance")
    assert importance
    assert all(entry.sum() > 0 for entry in importance.values())


def test_a_census_fills_the_labels_once(tmp_path: Path) -> None:
    run(SINGLE["four architectures"], tmp_path / "run", data=toys.blobs())
    labels = last_checkpoint(tmp_path / "run").state.extra.tensor("labels")
    assert labels.shape == (6, toys.CLASSES)
    assert labels.sum() == 300 - toys.PUBLIC
    journal = journals.read_journal(tmp_path / "run" / "journal.jsonl")
    assert sum(event.get("name") == "census" for event in journal) == 6


ALL_OF_SIX = {"clients": 6, "sampled": 6}


@pytest.fixture(scope="module")
def run_without_client_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which client 1 is not asked from round 2 on."""
    folder = tmp_path_factory.mktemp("without") / "run"
    method = {"name": "toy_failing", "who": 1, "how": "absent"}
    run(toys.toy(method, topology=ALL_OF_SIX), folder, data=toys.blobs())
    return folder


@pytest.mark.parametrize(
    "fault", ["raise", "nan", "shape", "type", "huge", "extra", "missing", "sparse"]
)
def test_a_bad_reply_is_named_and_changes_nothing_else(
    fault: str, run_without_client_1: Path, tmp_path: Path
) -> None:
    method = {"name": "toy_failing", "who": 1, "how": fault}
    failing = toys.toy(method, topology=ALL_OF_SIX, clients=toys.TOLERANT)

    run(failing, tmp_path / "run", toys.blobs())

    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert model == (run_without_client_1 / "model.safetensors").read_bytes()
    checkpoint = last_checkpoint(tmp_path / "run")
    expected_checkpoint = last_checkpoint(run_without_client_1)
    assert checkpoint.state_files == expected_checkpoint.state_files
    assert list(checkpoint.state.extra) == list(expected_checkpoint.state.extra)
    refused = refusals(tmp_path / "run")
    assert [event["client"] for event in refused] == [1, 1]
    assert [event["round"] for event in refused] == [2, 3]
    assert all(event["refused"] for event in refused)


def test_below_the_quorum_the_run_stops_with_the_last_good_state(tmp_path: Path) -> None:
    method = {"name": "toy_failing", "who": 1, "how": "raise"}
    clients = {"quorum": 1.0, **toys.TOLERANT}
    experiment = toys.toy(method, topology=ALL_OF_SIX, clients=clients)
    with pytest.raises(TooFewReplies, match=r"round 2.*client 1.*the disk of this site is gone"):
        run(experiment, tmp_path / "run", data=toys.blobs())

    one_round = toys.toy(method, topology=ALL_OF_SIX, rounds=1)
    short = run(one_round, tmp_path / "one", data=toys.blobs())
    state = last_checkpoint(tmp_path / "run").state
    assert state.round == 1
    assert state.stage == 1
    assert same_bits(state.params, short.model)


@pytest.mark.parametrize(("quorum", "clients", "needed"), [(0.55, 100, 55), (0.28, 25, 7)])
def test_a_quorum_is_exact_in_decimal_numbers(quorum: float, clients: int, needed: int) -> None:
    """In binary numbers, 0.55 of 100 is more than 55."""
    payloads = dict.fromkeys(range(clients), NOTHING)
    stage = Stage(1, 0, "train", tuple(range(clients)))
    accepted = [Reply(client, NOTHING, 1) for client in range(needed)]
    result = StageResult(stage, payloads, accepted, (), before=State({}), after=State({}))

    check_quorum(result, Rules(quorum=quorum))
    with pytest.raises(TooFewReplies):
        check_quorum(replace(result, accepted=accepted[:-1]), Rules(quorum=quorum))


def test_a_failed_link_of_a_chain_is_skipped(tmp_path: Path) -> None:
    experiment = toys.toy(
        {"name": "toy_failing", "who": 1, "how": "raise"},
        topology={"kind": "sequential", "clients": 6, "sampled": 6},
        clients=toys.TOLERANT,
    )
    result = run(experiment, tmp_path / "run", data=toys.blobs())
    assert [event["refused"] for event in result.history] == [0, 1, 1]


def test_divergence_is_named_before_it_replaces_the_last_good_state(tmp_path: Path) -> None:
    diverging = toys.toy(plan={"epochs": 2, "batch": 10, "lr": 1e4})
    with pytest.raises(Diverged, match="round 1"):
        run(diverging, tmp_path / "run", data=toys.blobs())
    assert last_checkpoint(tmp_path / "run").state.round == 1


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        (toys.toy("toy_logits"), "needs public data"),
        (toys.toy("fedavg", clients={"models": ["mlp", "logistic"]}), "averages weights"),
        (toys.toy("toy_peers", topology={"kind": "parallel", "clients": 6}), "stage 'train'"),
    ],
)
def test_experiments_that_cannot_run_are_refused_by_name(
    experiment: Experiment, words: str, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleMethod, match=words):
        run(experiment, tmp_path / "run", data=toys.blobs())
    assert not (tmp_path / "run").exists()


SUMMARY_FIELDS = {
    "method",
    "dataset",
    "rounds",
    "accuracy",
    "best_accuracy",
    "forgetting",
    "seconds",
    "seed",
}


def test_the_run_directory_holds_what_the_design_names(tmp_path: Path) -> None:
    result = run(toys.toy(), tmp_path / "run", data=toys.blobs())
    for name in ("config.toml", "journal.jsonl", "checkpoints", "model.safetensors"):
        assert (tmp_path / "run" / name).exists()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) >= SUMMARY_FIELDS

    rounds = journal_events(tmp_path / "run", event="round")
    assert [event["round"] for event in rounds] == [1, 2, 3]
    assert {"accuracy", "class_accuracy", "seconds", "bytes_up", "bytes_down"} <= set(rounds[0])
    assert "in_local_accuracy" in rounds[1]
    assert "in_local_accuracy" not in rounds[0], "local models are measured every second round here"
    model_bytes = sum(entry.nbytes for entry in result.model.values())
    assert rounds[0]["bytes_up"] == rounds[0]["bytes_down"] == 4 * model_bytes


class BrokenHook(RoundHook):
    """Cannot say what it adds to a reply."""

    def extend_expected(self, payload: Payload, client: int, stage: Stage, world: World) -> Payload:
        raise ValueError("broken")


def test_an_error_of_an_extension_is_not_reported_as_the_methods() -> None:
    prepared = prepare(resolve(toys.toy()), toys.blobs())
    context = context_of(prepared, hooks=[BrokenHook()])

    with pytest.raises(ValueError, match="broken"):
        next_state(first_state(context), context)
