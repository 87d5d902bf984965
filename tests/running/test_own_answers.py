"""If a method trains a model for each client, a run measures, stores, prints and draws these
models first.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
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
    """Each client keeps its own model, and the server's model is never trained."""

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
    """The same, and it does not declare ``personal``."""

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
        if state.params:
            return {}
        initial = predictor(world.model(SERVER), world.initial(SERVER))
        return {"cluster 0": initial, "cluster 1": initial}


@dataclass(frozen=True)
class KeepTraining(ClientWork):
    """Training of the client's own model, which ``pull`` draws towards zero."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        params = world.initial(view.client)
        if "params" in client_state:
            params = client_state.params
        return TrainingStart(params, constants={"pull": payload.number("pull")})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        squares = [parameter.square().sum() for parameter in step.params.values()]
        squared_norm = torch.stack(squares).sum()
        return {**super().terms(step, start), "pull": start["pull"] * squared_norm}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return Payload(steps=1), Payload(params=params)


def separate_models(**changes: Any) -> Experiment:
    values = {"method": "toy_apart", "measure": ["local"], "measure_every": 1, "rounds": 3}
    return toys.toy(**{**values, "topology": {"clients": 6, "sampled": 3}, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(
        separate_models(), tmp_path_factory.mktemp("apart") / "run", data=toys.blobs()
    ).directory


def test_a_server_model_that_no_client_trained_has_no_accuracy(finished: Path) -> None:
    rounds = [e for e in read_journal(finished / "journal.jsonl") if e["event"] == "round"]
    assert len(rounds) == 3
    for event in rounds:
        assert event["accuracy"] is None
        assert event["forgetting"] is None

    summary = json.loads((finished / "summary.json").read_text())
    assert summary["answer"] == "clients"
    assert summary["accuracy"] is None
    assert summary["personal_accuracy"] == rounds[-1]["personal_accuracy"]


def test_a_round_has_the_accuracy_of_the_last_model_of_every_client_so_far(finished: Path) -> None:
    """The accuracy of a client is the mean over classes, weighted by the client's labels."""
    label_counts = Result.of(finished).label_counts()
    test_counts = np.bincount(toys.blobs().test.labels)
    accuracy_by_client: dict[str, float] = {}
    for event in read_journal(finished / "journal.jsonl"):
        if event["event"] == "client":
            class_accuracy = np.array(event["correct_by_class"]) / test_counts
            labels = label_counts[event["client"]]
            accuracy = class_accuracy @ labels / labels.sum()
            accuracy_by_client[str(event["client"])] = float(accuracy)
        if event["event"] == "round":
            assert event["personal_by_client"] == pytest.approx(accuracy_by_client)
            mean = np.mean(list(accuracy_by_client.values()))
            assert event["personal_accuracy"] == pytest.approx(mean)
            assert event["personal_clients"] == len(accuracy_by_client)

    assert len(accuracy_by_client) > 3, "clients take turns"


def test_it_resumes_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    for stages in (1, 2):
        folder = stopped(separate_models(), tmp_path / str(stages), stages)
        resume(folder, data=toys.blobs())
        assert_same_bits(bits(folder), bits(finished))


def test_table_and_page_show_it_first(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    run(
        separate_models(method={"name": "toy_apart", "pull": 0.1}),
        tmp_path / "pulled",
        data=toys.blobs(),
    )
    run(separate_models(method="fedavg"), tmp_path / "shared", data=toys.blobs())
    compared = groups([finished, tmp_path])
    console().print(comparison_table(compared))

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("[%]")[0].strip() == "for the clients"
    second_cells = {re.split(" {2,}", line.strip())[1] for line in lines}
    assert len(second_cells) == 3, "three settings, three numbers"
    keys = {column.key for column in measured_columns(compared)}
    assert {"personal_accuracy", "personal_forgetting"} <= keys
    assert "Accuracy for the clients by round" in page(compared)
    assert 'id="clients"' in page(compared)
    columns_of_shared = measured_columns(groups([tmp_path / "shared"]))
    assert "personal_accuracy" not in {column.key for column in columns_of_shared}


def test_a_shared_model_is_every_clients_answer(tmp_path: Path) -> None:
    result = run(separate_models(method="fedavg"), tmp_path / "run", data=toys.blobs())
    (group,) = groups([tmp_path])
    events = read_journal(tmp_path / "run/journal.jsonl")
    class_accuracy = np.array(events[-1]["class_accuracy"])
    label_counts = result.label_counts()
    label_shares = label_counts / label_counts.sum(1, keepdims=True)
    accuracy_by_client = label_shares @ class_accuracy

    mean = group.mean_spread("personal_accuracy")
    assert mean is not None
    assert mean.mean == pytest.approx(accuracy_by_client.mean())


def warning_of_round_1(caplog: pytest.LogCaptureFixture) -> str:
    """The only warning that the server's model has not changed."""
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [m for m in messages if "round 1 left the server's model as it was" in m]
    return warning


def test_a_method_that_does_not_declare_personal_models_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedstill"):
        result = run(separate_models(method="toy_silent"), tmp_path / "run", data=toys.blobs())
    assert "personal = frozenset({'train'})" in warning_of_round_1(caplog)
    assert result.summary["answer"] == "server"


def test_the_warning_of_a_run_that_trains_nothing_gives_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = separate_models(
        method="fedavg", plan={"epochs": 0}, topology={"clients": 6, "sampled": 1}
    )
    with caplog.at_level(logging.WARNING, "fedstill"):
        run(experiment, tmp_path / "run", data=toys.blobs())
    assert warning_of_round_1(caplog).endswith("set plan.epochs above 0")


SMALL_ALONE = """
method = "local_only"
rounds = 1
[data]
train_size = 200
test_size = 60
[topology]
clients = 4
[plan]
epochs = 1
"""


def test_explain_and_run_print_that_the_answer_is_the_model_of_each_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "alone.toml").write_text(SMALL_ALONE)
    assert call(["explain", "alone.toml"]) == 0
    assert "each client's own model, after fit" in " ".join(capsys.readouterr().out.split())

    assert call(["run", "alone.toml", "--out", "out", "-q"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("for the clients")
    assert any("4 of 4" in line for line in lines)
    assert not any(line.startswith("accuracy") for line in lines)


def test_a_measure_that_needs_held_out_examples_is_refused_without_them(tmp_path: Path) -> None:
    experiment = separate_models(measure=["private_public"])
    with pytest.raises(IncompatibleMethod, match=r"private_public: .*plan\.validation"):
        run(experiment, tmp_path / "no", data=toys.blobs())
    held_out = separate_models(measure=["private_public"], plan={"epochs": 1, "validation": 0.2})
    result = run(held_out, tmp_path / "yes", data=toys.blobs())
    assert result.history[-1]["private_accuracy"] > 0


def test_personal_needs_no_models_in_replies(tmp_path: Path) -> None:
    result = run(separate_models(measure=["personal"]), tmp_path / "run", data=toys.blobs())
    assert result.history[-1]["local_train_accuracy"] > 0
    assert result.history[-1]["personalised_accuracy"] > 0


def test_models_of_groups_are_evaluated_and_loaded_and_none_is_the_accuracy(tmp_path: Path) -> None:
    result = run(toys.toy("toy_grouped", rounds=1), tmp_path / "run", data=toys.blobs())
    assert result.summary["accuracy"] is None
    assert result.summary["personal_accuracy"] is not None
    assert list(result.history[0]["others"]) == ["cluster 0", "cluster 1"]
    with pytest.raises(ConfigError, match="or a model: 'cluster 0', 'cluster 1'"):
        load_model(result)
    assert load_model(result, client="cluster 1").about["model"] == "cluster 1"
    with pytest.raises(ConfigError, match="cluster 2"):
        load_model(result, client="cluster 2")
