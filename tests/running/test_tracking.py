"""A run sends each round to its trackers once, even if the run is stopped or a tracker fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offline_wandb import offline_runs

import fedstill
import toys
from fedstill.core.errors import ConfigError, Interrupted, UnknownName
from fedstill.core.method import ClientWork
from fedstill.core.records import Stage, TrainingResult
from fedstill.core.registry import register
from fedstill.methods.fedavg import FedAvg
from fedstill.running.compare import carry_out_runs, variants
from fedstill.running.frame import load_runs
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import resume, run
from fedstill.running.trackers import TRACKERS, AboutRun, FinishedRound, RoundNumbers
from run_bits import StopAfter


class Recorded:
    """A tracker that records its calls in lists of its class, where a resumed run finds them."""

    begins: list[tuple[AboutRun, dict[str, str], int]]
    steps: list[tuple[int, dict[str, float]]]
    ends: list[tuple[str, dict[str, Any]]]
    fails: str

    def ready(self) -> None:
        """Always."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        Recorded.begins.append((run, dict(memo), last))
        self.break_in("begin")
        memo["id"] = "17"
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.break_in(f"log {round}")
        Recorded.steps.append((round, dict(numbers)))

    def end(self, state: str, summary: Mapping[str, Any]) -> None:
        self.break_in("end")
        Recorded.ends.append((state, dict(summary)))

    def break_in(self, place: str) -> None:
        if Recorded.fails == place:
            raise OSError(f"no network\nin {place}")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker above has the name ``kept``, and no calls are recorded."""
    monkeypatch.setitem(TRACKERS, "kept", Recorded)
    Recorded.begins = []
    Recorded.steps = []
    Recorded.ends = []
    Recorded.fails = ""


def rounds_of_steps() -> list[int]:
    """The rounds that were sent to the tracker."""
    return [round_index for round_index, _ in Recorded.steps]


def test_a_tracker_receives_all_of_a_run(tmp_path: Path) -> None:
    experiment = toys.toy(measure=["divergence"])
    result = run(experiment, tmp_path / "seed7", toys.blobs(), track=Recorded())
    ((about, memo, last),) = Recorded.begins
    assert about.name == f"{tmp_path.name}, seed 7"
    assert about.shared_name == tmp_path.name
    assert about.seed == 7
    assert about.settings["plan.train.lr"] == 0.2
    assert about.folder == result.directory
    assert set(about.versions) == {"fedstill", "torch", "numpy", "python"}
    assert memo == {}
    assert last == -1

    assert rounds_of_steps() == [0, 1, 2, 3]
    for (_, numbers), event in zip(Recorded.steps[1:], result.history, strict=True):
        for key in ("accuracy", "forgetting", "bytes_up", "bytes_down", "seconds", "replies"):
            assert numbers[key] == event[key]
        assert numbers["class_accuracy/class 4"] == event["class_accuracy"][4]
    divergences = {event["round"]: event["mean_l2"] for event in result.measures}
    for round_index, numbers in Recorded.steps:
        assert numbers.get("divergence/mean_l2") == divergences.get(round_index)

    ((state, summary),) = Recorded.ends
    assert state == "finished"
    assert summary["accuracy"] == result.accuracy


def test_the_loss_of_a_round_is_the_mean_over_clients_weighted_by_their_examples(
    tmp_path: Path,
) -> None:
    result = run(toys.toy("fedntd"), tmp_path / "run", toys.blobs(), track=Recorded())
    events = read_journal(result.directory / "journal.jsonl")
    clients = [event for event in events if event["event"] == "client"]
    for round_index in (1, 2, 3):
        clients_of_round = [event for event in clients if event["round"] == round_index]
        examples = [event["examples"] for event in clients_of_round]
        numbers = dict(Recorded.steps)[round_index]
        for term in ("ce", "not_true"):
            losses = [event["loss"][term] for event in clients_of_round]
            mean = np.average(losses, weights=examples)
            assert numbers[f"loss/{term}"] == pytest.approx(mean, rel=1e-12)


USED: dict[int, float] = {}
"""By round, the learning rate with which clients trained."""


class Noting(ClientWork):
    """Plain training that records its learning rate."""

    def end(self, params: Any, start: Any, result: TrainingResult, view: Any, world: Any) -> Any:
        USED[len(USED) + 1] = result.lr
        return super().end(params, start, result, view, world)


@register("method", "toy_noting")
class OfNoting(FedAvg):
    """FedAvg whose clients record their learning rate."""

    def work(self, stage: Stage) -> ClientWork:
        return Noting()


@pytest.mark.parametrize("lr", ["restart", "go_on"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_decay": 0.5},
        {"lr_schedule": "cosine", "lr_warmup": 1},
        {"lr_schedule": "step", "lr_step": 2, "lr_decay": 0.1},
    ],
    ids=["decay", "cosine", "step"],
)
def test_the_learning_rate_of_a_round_is_the_one_that_was_used(
    schedule: dict[str, Any], lr: str, tmp_path: Path
) -> None:
    USED.clear()
    topology = {"clients": 6, "sampled": 1}
    plan = {"epochs": 1, "lr": 0.2, **schedule}
    stream = {"kind": "drift", "tasks": 2, "lr": lr}
    experiment = toys.toy(
        "toy_noting", rounds=6, engine="serial", topology=topology, plan=plan, stream=stream
    )
    result = run(experiment, tmp_path / "run", toys.blobs(), track=Recorded())

    assert len(set(USED.values())) > 1

    rates = {number: s["learning_rate/train"] for number, s in Recorded.steps if number > 0}
    assert rates == USED

    frame = load_runs(result.directory, metrics="learning_rate")
    assert dict(zip(frame["round"], frame["value"], strict=True)) == USED
    assert set(frame["metric"]) == {"learning_rate/train"}, "a setting is not in the summary"


def test_the_numbers_of_a_round_are_means_without_refused_clients_and_absent_losses() -> None:
    numbers = RoundNumbers({})
    position = {"event": "client", "round": 1, "stage": 0}
    accepted = {**position, "client": 0, "examples": 3, "loss": {"ce": 2.0}}
    refused = {**accepted, "refused": "late"}
    without_loss = {**accepted, "loss": {"ce": None}}
    idle = {**position, "client": 1, "idle": True}
    look = {"event": "measure", "measure": "m", "round": 1, "stage": 0, "a": {"b": 1}}
    later_look = {**look, "stage": 1, "a": {"b": 4}}
    for event in (accepted, refused, without_loss, idle, look, later_look):
        assert numbers.finished_round(event) is None

    end_of_round_1 = {"event": "round", "round": 1, "accuracy": None, "refused": 1}
    expected = {"refused": 1.0, "loss/ce": 2.0, "m/a/b": (1 + 4) / 2}
    assert numbers.finished_round(end_of_round_1) == FinishedRound(1, expected)
    assert numbers.finished_round({"event": "round", "round": 2}) == FinishedRound(2, {})


@pytest.mark.parametrize("stages", [1, 2])
def test_a_resumed_run_continues_in_the_same_trackers_and_sends_no_round_twice(
    stages: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(toys.toy(), folder, toys.blobs(), watch=StopAfter(stages), track="kept")
    assert Recorded.ends == [("stopped", {})]

    resume(folder, toys.blobs())
    assert rounds_of_steps() == [0, 1, 2, 3]
    assert [memo for _, memo, _ in Recorded.begins] == [{}, {"id": "17"}]
    assert Recorded.ends[-1][0] == "finished"

    Recorded.begins = []
    resume(folder, toys.blobs())
    assert not Recorded.begins, "the trackers have all of a finished run"


def test_trackers_change_neither_config_nor_journal(tmp_path: Path) -> None:
    run(toys.toy(), tmp_path / "with", toys.blobs(), track=[Recorded()])
    run(toys.toy(), tmp_path / "without", toys.blobs())
    config = (tmp_path / "without/config.toml").read_bytes()

    assert (tmp_path / "with/config.toml").read_bytes() == config

    journal = without_times(read_journal(tmp_path / "without/journal.jsonl"))
    assert without_times(read_journal(tmp_path / "with/journal.jsonl")) == journal
    assert not (tmp_path / "without/trackers.json").exists()

    run(toys.toy(), tmp_path / "with", toys.blobs(), overwrite=True)
    assert not (tmp_path / "with/trackers.json").exists()


def test_a_callback_receives_copies_of_the_events_in_the_journal(tmp_path: Path) -> None:
    received = []

    def spoil(event: dict[str, Any]) -> None:
        received.append(deepcopy(event))
        event["class_accuracy"].clear()

    experiment = toys.toy("fedrep")  # without a common model, the consistency is not a number
    result = run(experiment, tmp_path / "called", toys.blobs(), on_round=spoil)
    assert received == result.history
    alone = run(experiment, tmp_path / "alone", toys.blobs())
    assert without_times(alone.history) == without_times(result.history)


def test_a_run_in_the_working_directory_has_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fedavg/seed7"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    run(toys.toy("fedavg", seed=7), ".", toys.blobs(), track="kept")
    ((about, _, _),) = Recorded.begins
    assert (about.name, about.shared_name) == ("fedavg, seed 7", "fedavg")


@pytest.mark.parametrize("place", ["begin", "log 2", "end"])
def test_a_tracker_that_fails_is_one_warning_and_receives_the_other_rounds_on_resume(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Recorded.fails = place
    result = run(toys.toy(), tmp_path / "run", toys.blobs(), track="kept")
    assert len(result.history) == 3
    (line,) = (r.getMessage() for r in caplog.records if r.name == "fedstill.track")
    assert line.startswith("kept did not accept ")
    reason = f"(OSError: no network in {place})"
    assert f"{reason}: the run continues without it; `fedstill resume " in line

    Recorded.fails = ""
    resume(tmp_path / "run", toys.blobs())
    assert rounds_of_steps() == [0, 1, 2, 3]
    summary = {k: v for k, v in result.summary.items() if isinstance(v, (int, float, str))}
    assert Recorded.ends == [("finished", summary)]


def test_the_warning_about_a_tracker_of_ones_own_names_a_call_that_sends_the_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Recorded.fails = "log 2"
    run(toys.toy(), tmp_path / "run", toys.blobs(), track=Recorded())
    (line,) = (r.getMessage() for r in caplog.records if r.name == "fedstill.track")
    assert f"fedstill.resume({str(tmp_path / 'run')!r}, track=...)" in line

    Recorded.fails = ""
    resume(tmp_path / "run", toys.blobs(), track=Recorded())
    assert rounds_of_steps() == [0, 1, 2, 3]


def test_a_comparison_takes_no_tracker_of_ones_own(tmp_path: Path) -> None:
    for track in (Recorded(), [Recorded()]):
        with pytest.raises(ConfigError, match="separate processes: track names trackers"):
            fedstill.compare(toys.toy(), out=tmp_path / "both", track=track)  # type: ignore[arg-type]
    assert not (tmp_path / "both").exists()


def test_a_damaged_file_of_trackers_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(toys.toy(), tmp_path / "run", toys.blobs(), track="kept")
    (tmp_path / "run/trackers.json").write_text('{"kept": 3}')
    resume(tmp_path / "run", toys.blobs(), track="kept")
    assert "trackers.json cannot be read" in caplog.text
    assert rounds_of_steps() == [0, 1, 2, 3] * 2


def test_a_tracker_that_cannot_be_used_is_refused_before_there_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownName, match=r"unknown tracker 'mlfow'.*mlflow"):
        run(toys.toy(), tmp_path / "run", toys.blobs(), track="mlfow")
    with pytest.raises(ConfigError, match="neither a name"):
        run(toys.toy(), tmp_path / "run", toys.blobs(), track=[Recorded])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="two trackers have the name Recorded"):
        run(toys.toy(), tmp_path / "run", toys.blobs(), track=[Recorded(), Recorded()])

    modules = {"mlflow": "mlflow", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"pip install 'fedstill\[{name}\]'"):
            run(toys.toy(), tmp_path / "run", toys.blobs(), track=name)

    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_a_run_that_was_stopped(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(Interrupted):
        run(toys.toy(), tmp_path / "run", toys.blobs(), watch=StopAfter(2), track="tensorboard")
    result = resume(tmp_path / "run", toys.blobs())
    recorded = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [scalar.step for scalar in recorded.Scalars("forgetting")] == [1, 2, 3]
    accuracies = [scalar.value for scalar in recorded.Scalars("accuracy")]
    assert accuracies[1:] == pytest.approx([event["accuracy"] for event in result.history])
    settings = recorded.Tensors("settings/text_summary")[0].tensor_proto.string_val
    assert "plan.train.lr: 0.2" in str(settings)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_one_run_of_its_own_with_every_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(Interrupted):
        run(toys.toy(), tmp_path / "run", toys.blobs(), watch=StopAfter(2), track="mlflow")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fedstill").experiment_id
    assert [r.info.status for r in client.search_runs([experiment])] == ["KILLED"]
    memo = tmp_path / "run/trackers.json"
    # As if the run had been killed before it recorded the last round.
    memo.write_text(memo.read_text().replace('"round": 1', '"round": 0'))
    result = resume(tmp_path / "run", toys.blobs())

    (tracked,) = client.search_runs([experiment])
    assert tracked.info.status == "FINISHED"
    assert tracked.info.run_name == "run"
    assert tracked.data.params["plan.train.lr"] == "0.2"
    assert tracked.data.tags["fedstill.directory"] == str(tmp_path / "run")
    accuracies = client.get_metric_history(tracked.info.run_id, "accuracy")
    assert [m.step for m in accuracies] == [0, 1, 2, 3]
    assert [m.value for m in accuracies[1:]] == [e["accuracy"] for e in result.history]
    assert tracked.data.metrics["summary/accuracy"] == result.accuracy


@pytest.mark.filterwarnings("ignore")
def test_wandb_stores_a_run_offline_for_a_later_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")

    with pytest.raises(Interrupted):
        run(toys.toy(), tmp_path / "run", toys.blobs(), watch=StopAfter(2), track="wandb")

    result = resume(tmp_path / "run", toys.blobs())
    first, second = offline_runs(tmp_path)
    assert first["id"] == second["id"]
    assert [*first["history"], *second["history"]] == [0, 1, 2, 3]
    assert second["history"][3]["accuracy"] == result.accuracy
    assert first["config"]["plan.train.lr"] == 0.2
    assert (first["exit"], second["exit"]) == (1, 0)
    assert second["summary"]["summary/forgetting"] == result.forgetting


def test_every_run_of_a_comparison_is_tracked_and_finished_ones_are_sent_later(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    (tmp_path / "small.toml").write_text(toys.SMALL)
    from fedstill.config.experiment import load

    runs = variants(load(tmp_path / "small.toml"), tmp_path / "both", seeds=(1, 2))
    carry_out_runs(runs[:1], 1, lambda outcomes: None)
    assert not (runs[0].folder / "tensorboard").exists()

    outcomes = carry_out_runs(runs, 2, lambda outcomes: None, track=("tensorboard",))
    assert [outcome.state for outcome in outcomes] == ["finished", "finished"]
    for variant in runs:
        assert len(list((variant.folder / "tensorboard").iterdir())) == 1
