"""A run tells its trackers every round once, whatever happens to the run or to them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from offline_wandb import offline_runs

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


class Kept:
    """A tracker that keeps what it is told in the lists of its class, so that a resumed run finds
    them.
    """

    begun: list[tuple[AboutRun, dict[str, str], int]]
    steps: list[tuple[int, dict[str, float]]]
    ends: list[tuple[str, dict[str, Any]]]
    fails: str

    def ready(self) -> None:
        """Always."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        Kept.begun.append((run, dict(memo), last))
        self.break_in("begin")
        memo["id"] = "17"
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.break_in(f"log {round}")
        Kept.steps.append((round, dict(numbers)))

    def end(self, how: str, summary: Mapping[str, Any]) -> None:
        self.break_in("end")
        Kept.ends.append((how, dict(summary)))

    def break_in(self, where: str) -> None:
        if Kept.fails == where:
            raise OSError(f"no network\nin {where}")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker above has a name of its own, and knows nothing yet."""
    monkeypatch.setitem(TRACKERS, "kept", Kept)
    Kept.begun, Kept.steps, Kept.ends, Kept.fails = [], [], [], ""


def test_a_tracker_is_told_all_of_a_run(tmp_path: Path) -> None:
    result = run(toys.toy(measure=["divergence"]), tmp_path / "seed7", toys.blobs(), track=Kept())
    ((about, memo, last),) = Kept.begun
    assert (about.name, about.shared_name, about.seed) == (
        f"{tmp_path.name}, seed 7",
        tmp_path.name,
        7,
    )
    assert about.settings["plan.train.lr"] == 0.2
    assert about.folder == result.directory
    assert set(about.versions) == {"fedstill", "torch", "numpy", "python"}
    assert (memo, last) == ({}, -1)
    assert [number for number, _ in Kept.steps] == [0, 1, 2, 3]
    for (_, numbers), event in zip(Kept.steps[1:], result.history, strict=True):
        for key in ("accuracy", "forgetting", "bytes_up", "bytes_down", "seconds", "replies"):
            assert numbers[key] == event[key]
        assert numbers["class_accuracy/class 4"] == event["class_accuracy"][4]
    looks = {e["round"]: e["mean_l2"] for e in result.measures}
    assert {n: s["divergence/mean_l2"] for n, s in Kept.steps if "divergence/mean_l2" in s} == looks
    ((how, summary),) = Kept.ends
    assert (how, summary["accuracy"]) == ("finished", result.accuracy)


def test_the_loss_of_a_round_is_the_mean_over_clients_weighted_by_their_examples(
    tmp_path: Path,
) -> None:
    result = run(toys.toy("fedntd"), tmp_path / "run", toys.blobs(), track=Kept())
    every = [e for e in read_journal(result.directory / "journal.jsonl") if e["event"] == "client"]
    for number in (1, 2, 3):
        here = [e for e in every if e["round"] == number]
        for term in ("ce", "not_true"):
            mean = sum(e["examples"] * e["loss"][term] for e in here) / sum(
                e["examples"] for e in here
            )
            assert dict(Kept.steps)[number][f"loss/{term}"] == pytest.approx(mean, rel=1e-12)


USED: dict[int, float] = {}
"""By round, the learning rate with which clients trained."""


class Noting(ClientWork):
    """Plain training that notes its learning rate."""

    def end(self, params: Any, start: Any, result: TrainingResult, view: Any, world: Any) -> Any:
        USED[len(USED) + 1] = result.lr
        return super().end(params, start, result, view, world)


@register("method", "toy_noting")
class OfNoting(FedAvg):
    """FedAvg whose clients note their learning rate."""

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
    asked = toys.toy(
        "toy_noting",
        rounds=6,
        engine="serial",
        topology={"clients": 6, "sampled": 1},
        plan={"epochs": 1, "lr": 0.2, **schedule},
        stream={"kind": "drift", "tasks": 2, "lr": lr},
    )
    result = run(asked, tmp_path / "run", toys.blobs(), track=Kept())
    assert len(set(USED.values())) > 1
    sent = {number: s["learning_rate/train"] for number, s in Kept.steps if number > 0}
    assert sent == USED
    frame = load_runs(result.directory, metrics="learning_rate")
    assert dict(zip(frame["round"], frame["value"], strict=True)) == USED
    assert set(frame["metric"]) == {"learning_rate/train"}, "a setting is not in the summary"


def test_refused_clients_and_absent_losses_do_not_count() -> None:
    gather = RoundNumbers({})
    where = {"event": "client", "round": 1, "stage": 0}
    sent = {**where, "client": 0, "examples": 3, "loss": {"ce": 2.0}}
    for event in (
        sent,
        {**sent, "refused": "late"},
        {**sent, "loss": {"ce": None}},
        {**where, "client": 1, "idle": True},
    ):
        assert gather.finished_round(event) is None
    looks = [
        {"event": "measure", "measure": "m", "round": 1, "stage": s, "a": {"b": v}}
        for s, v in ((0, 1), (1, 4))
    ]
    assert [gather.finished_round(look) for look in looks] == [None, None]
    assert gather.finished_round(
        {"event": "round", "round": 1, "accuracy": None, "refused": 1}
    ) == FinishedRound(
        1,
        {"refused": 1.0, "loss/ce": 2.0, "m/a/b": 2.5},
    )
    assert gather.finished_round({"event": "round", "round": 2}) == FinishedRound(2, {})


def test_a_stopped_run_goes_on_in_the_same_trackers_and_tells_no_round_twice(
    tmp_path: Path,
) -> None:
    for stages in (1, 2):
        with pytest.raises(Interrupted):
            run(
                toys.toy(),
                tmp_path / f"run{stages}",
                toys.blobs(),
                watch=StopAfter(stages),
                track="kept",
            )
        assert Kept.ends[-1] == ("stopped", {})
        resume(tmp_path / f"run{stages}", toys.blobs())
        assert [n for n, _ in Kept.steps] == [0, 1, 2, 3]
        assert [memo for _, memo, _ in Kept.begun] == [{}, {"id": "17"}]
        assert Kept.ends[-1][0] == "finished"
        Kept.begun, Kept.steps = [], []
        resume(tmp_path / f"run{stages}", toys.blobs())
        assert not Kept.begun, "a finished run has been told"


def test_trackers_are_no_part_of_what_a_run_is(tmp_path: Path) -> None:
    run(toys.toy(), tmp_path / "with", toys.blobs(), track=[Kept()])
    run(toys.toy(), tmp_path / "without", toys.blobs())
    assert (tmp_path / "with/config.toml").read_bytes() == (
        tmp_path / "without/config.toml"
    ).read_bytes()
    journals = [read_journal(tmp_path / name / "journal.jsonl") for name in ("with", "without")]
    assert without_times(journals[0]) == without_times(journals[1])
    assert not (tmp_path / "without/trackers.json").exists()
    run(toys.toy(), tmp_path / "with", toys.blobs(), overwrite=True)
    assert not (tmp_path / "with/trackers.json").exists()


@pytest.mark.parametrize("where", ["begin", "log 2", "end"])
def test_a_tracker_that_fails_is_one_warning_and_gets_the_rest_on_resume(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Kept.fails = where
    result = run(toys.toy(), tmp_path / "run", toys.blobs(), track="kept")
    assert len(result.history) == 3
    (line,) = (r.getMessage() for r in caplog.records if r.name == "fedstill.track")
    assert line.startswith("kept did not accept ")
    assert (
        f"(OSError: no network in {where}): the run continues without it; `fedstill resume " in line
    )
    Kept.fails = ""
    resume(tmp_path / "run", toys.blobs())
    assert [n for n, _ in Kept.steps] == [0, 1, 2, 3]
    assert Kept.ends == [
        ("finished", {k: v for k, v in result.summary.items() if isinstance(v, (int, float, str))})
    ]


def test_a_damaged_note_of_trackers_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(toys.toy(), tmp_path / "run", toys.blobs(), track="kept")
    (tmp_path / "run/trackers.json").write_text('{"kept": 3}')
    resume(tmp_path / "run", toys.blobs(), track="kept")
    assert "trackers.json cannot be read" in caplog.text
    assert [n for n, _ in Kept.steps] == [0, 1, 2, 3] * 2


def test_what_cannot_be_tracked_is_refused_before_there_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownName, match=r"unknown tracker 'mlfow'.*mlflow"):
        run(toys.toy(), tmp_path / "run", toys.blobs(), track="mlfow")
    with pytest.raises(ConfigError, match="neither a name"):
        run(toys.toy(), tmp_path / "run", toys.blobs(), track=[Kept])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="two trackers have the name Kept"):
        run(toys.toy(), tmp_path / "run", toys.blobs(), track=[Kept(), Kept()])
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
    seen = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [e.step for e in seen.Scalars("forgetting")] == [1, 2, 3]
    assert [e.value for e in seen.Scalars("accuracy")][1:] == pytest.approx(
        [e["accuracy"] for e in result.history]
    )
    assert "plan.train.lr: 0.2" in str(
        seen.Tensors("settings/text_summary")[0].tensor_proto.string_val
    )


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
    # killed before it noted the last round
    memo.write_text(memo.read_text().replace('"round": 1', '"round": 0'))
    result = resume(tmp_path / "run", toys.blobs())
    (there,) = client.search_runs([experiment])
    assert (there.info.status, there.info.run_name) == ("FINISHED", "run")
    assert there.data.params["plan.train.lr"] == "0.2"
    assert there.data.tags["fedstill.directory"] == str(tmp_path / "run")
    sent = client.get_metric_history(there.info.run_id, "accuracy")
    assert [m.step for m in sent] == [0, 1, 2, 3]
    assert [m.value for m in sent[1:]] == [e["accuracy"] for e in result.history]
    assert there.data.metrics["summary/accuracy"] == result.accuracy


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_offline_what_a_sync_sends(
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
    assert [
        o.state for o in carry_out_runs(runs, 2, lambda outcomes: None, track=("tensorboard",))
    ] == ["finished"] * 2
    assert all(len(list((v.folder / "tensorboard").iterdir())) == 1 for v in runs)
