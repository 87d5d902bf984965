"""Where each client's own model is the answer, that is what is measured, written, printed and drawn
first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.export.loading import load_model
from fedstill.models.predictors import predictor
from fedstill.report.page import page
from fedstill.report.summary import measured_columns
from fedstill.report.terminal import comparison_table, console
from fedstill.running.journal import read_journal
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from run_bits import assert_same_bits, bits, stopped


@method("toy_apart")
@dataclass(frozen=True)
class Apart(Method):
    """Each client keeps a model of its own; the server's is never trained."""

    needs: ClassVar[Need] = Need.NOTHING
    personal: ClassVar[frozenset[str]] = frozenset({"train"})
    pull: float = 0.0

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(pull=self.pull)

    def work(self, stage: Stage) -> ClientWork:
        return KeepTraining()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(steps=0)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state.next(seen=len(replies))


@method("toy_silent")
@dataclass(frozen=True)
class Silent(Apart):
    """The same, and it does not say so."""

    personal: ClassVar[frozenset[str]] = frozenset()


@method("toy_grouped")
@dataclass(frozen=True)
class Grouped(Apart):
    """The same, with a model for each of two groups at the server."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return State(params={}, round=state.round, stage=state.stage)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        start = world.initial(SERVER)
        return (
            {f"cluster {i}": predictor(world.model(SERVER), start) for i in range(2)}
            if not state.params
            else {}
        )


@dataclass(frozen=True)
class KeepTraining(ClientWork):
    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = client_state.params if "params" in client_state else world.initial(view.client)
        return TrainingStart(start, constants={"pull": payload.number("pull")})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        size = sum((v.square().sum() for v in step.params.values()), start=step.logits().sum() * 0)
        return {**super().terms(step, start), "pull": start["pull"] * size}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(steps=1), Payload(params=params)


def apart(**changes: Any) -> Experiment:
    what = {"method": "toy_apart", "measure": ["local"], "measure_every": 1, "rounds": 3}
    return toys.toy(**{**what, "topology": {"clients": 6, "sampled": 3}, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(apart(), tmp_path_factory.mktemp("apart") / "run", data=toys.blobs()).directory


def test_the_server_model_that_nobody_trained_says_nothing(finished: Path) -> None:
    rounds = [e for e in read_journal(finished / "journal.jsonl") if e["event"] == "round"]
    assert [(e["accuracy"], e["forgetting"]) for e in rounds] == [(None, None)] * 3
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["answer"], summary["accuracy"]) == ("clients", None)
    assert summary["personal_accuracy"] == rounds[-1]["personal_accuracy"]


def test_each_round_has_the_last_model_of_every_client_that_was_ever_measured(
    finished: Path,
) -> None:
    events = read_journal(finished / "journal.jsonl")
    counts, test = Result.of(finished).label_counts(), np.bincount(toys.blobs().test.labels)
    last: dict[int, np.ndarray] = {}
    for event in events:
        if event["event"] == "client":
            last[event["client"]] = np.array(event["correct_by_class"]) / test
        if event["event"] == "round":
            mine = {c: float(a @ counts[c] / counts[c].sum()) for c, a in sorted(last.items())}
            assert event["personal_by_client"] == {
                str(c): pytest.approx(v) for c, v in mine.items()
            }
            assert event["personal_accuracy"] == pytest.approx(np.mean(list(mine.values())))
            assert event["personal_clients"] == len(last)
    assert len(last) > 3, "clients take turns"


def test_it_resumes_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    for stages in (1, 2):
        other = stopped(apart(), tmp_path / str(stages), stages)
        resume(other, data=toys.blobs())
        assert_same_bits(bits(other), bits(finished))


def test_table_and_page_show_it_first(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    run(apart(method={"name": "toy_apart", "pull": 0.1}), tmp_path / "pulled", data=toys.blobs())
    run(apart(method="fedavg"), tmp_path / "shared", data=toys.blobs())
    compared = groups([finished, tmp_path])
    console().print(comparison_table(compared))
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("[%]")[0].strip() == "for the clients"
    cells = [line.split("  ") for line in lines]
    assert len({[c for c in row if c][1].strip() for row in cells}) == 3, (
        "three settings, three numbers"
    )
    shown = measured_columns(compared)
    assert {"personal_accuracy", "personal_forgetting"} <= {m.key for m in shown}
    assert "Accuracy for the clients by round" in page(compared)
    assert 'id="clients"' in page(compared)
    alone = measured_columns(groups([tmp_path / "shared"]))
    assert "personal_accuracy" not in {m.key for m in alone}, (
        "where nobody has a model of its own it says no more"
    )


def test_a_shared_model_is_every_clients_answer(tmp_path: Path) -> None:
    result = run(apart(method="fedavg"), tmp_path / "run", data=toys.blobs())
    (group,) = groups([tmp_path])
    events = read_journal(tmp_path / "run/journal.jsonl")
    counts = result.label_counts()
    accuracy = np.array(events[-1]["class_accuracy"])
    mean = group.mean_spread("personal_accuracy")
    assert mean is not None
    assert mean.mean == pytest.approx((counts / counts.sum(1, keepdims=True) @ accuracy).mean())


def test_a_method_that_does_not_say_so_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedstill"):
        found = run(apart(method="toy_silent"), tmp_path / "run", data=toys.blobs())
    (said,) = [
        r.getMessage()
        for r in caplog.records
        if "round 1 left the server's model as it was" in r.getMessage()
    ]
    assert "personal = frozenset({'train'})" in said
    assert found.summary["answer"] == "server"


def test_a_run_that_trains_nothing_is_told_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedstill"):
        run(
            apart(method="fedavg", plan={"epochs": 0}, topology={"clients": 6, "sampled": 1}),
            tmp_path / "run",
            data=toys.blobs(),
        )
    (said,) = [
        r.getMessage()
        for r in caplog.records
        if "round 1 left the server's model as it was" in r.getMessage()
    ]
    assert said.endswith("set plan.epochs above 0")


def test_local_only_and_explain_say_what_the_answer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    small = [
        "-s",
        "data.train_size=200",
        "-s",
        "data.test_size=60",
        "-s",
        "topology.clients=4",
        "-s",
        "plan.epochs=1",
    ]
    (tmp_path / "alone.toml").write_text('method = "local_only"\nrounds = 1\n')
    assert call(["explain", "alone.toml", *small]) == 0
    assert "each client's own model, after fit" in " ".join(capsys.readouterr().out.split())
    assert call(["run", "alone.toml", *small, "--out", "out", "-q"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("for the clients")
    assert any("4 of 4" in line for line in rest)
    assert not any(line.startswith("accuracy") for line in rest)


def test_a_measure_that_would_say_nothing_is_refused(tmp_path: Path) -> None:
    what = apart(measure=["private_public"])
    with pytest.raises(IncompatibleMethod, match=r"private_public: .*plan\.validation"):
        run(what, tmp_path / "no", data=toys.blobs())
    held_out = apart(measure=["private_public"], plan={"epochs": 1, "validation": 0.2})
    found = run(held_out, tmp_path / "yes", data=toys.blobs())
    assert found.history[-1]["private_accuracy"] > 0


def test_personal_needs_no_models_in_replies(tmp_path: Path) -> None:
    found = run(apart(measure=["personal"]), tmp_path / "run", data=toys.blobs())
    assert found.history[-1]["local_train_accuracy"] > 0
    assert found.history[-1]["personalised_accuracy"] > 0


def test_models_of_groups_are_evaluated_and_loaded_and_none_is_the_accuracy(tmp_path: Path) -> None:
    result = run(toys.toy("toy_grouped", rounds=1), tmp_path / "run", data=toys.blobs())
    assert result.summary["accuracy"] is None
    assert result.summary["personal_accuracy"] is not None
    assert list(result.history[0]["others"]) == ["cluster 0", "cluster 1"]
    with pytest.raises(ConfigError, match="or a model: 'cluster 0', 'cluster 1'"):
        load_model(result)
    assert load_model(result, client="cluster 1").about["model"] == "cluster 1"
    with pytest.raises(
        ConfigError,
        match="cluster 2",
    ):
        load_model(result, client="cluster 2")
