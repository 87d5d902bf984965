"""Runs whose server has several models: which of them answers for a client, and how accurate the
answers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import toys
from fedstill.attribution.class_changes import find_changes
from fedstill.cli.explain import run_estimate
from fedstill.config.resolve import resolve
from fedstill.core.aggregation import weighted_mean
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, IncompatibleMethod, MethodFailed
from fedstill.core.extensions import RoundResult
from fedstill.core.method import Method
from fedstill.core.records import (
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.export.loading import load_model
from fedstill.report.blocks import Table
from fedstill.report.clients import clients
from fedstill.report.page import Report, page
from fedstill.running.client_evaluation import ClientTests
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from run_bits import assert_same_bits, bits, stopped


@method("toy_two_models")
@dataclass(frozen=True)
class TwoModels(Method):
    """Clients of even number train one model, those of odd number another."""

    needs: ClassVar[Need] = Need.SAME_SHAPES
    forgotten: int = -1
    """The client that ``client_predictors`` leaves out; -1: none."""
    unknown: str = ""
    """The name that client 0 gets instead of its model's."""

    def initial_state(self, world: World) -> State:
        models = dict.fromkeys(range(2), world.initial(SERVER))
        return State(params={}, extra=Payload(many("cluster", models)))

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=state.extra.many("cluster")[client % 2])

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        models = state.extra.many("cluster")
        for number in models:
            own_replies = [reply for reply in replies if reply.client % 2 == number]
            if own_replies:
                models[number] = weighted_mean(own_replies)
        return state.next(groups=many("cluster", models))

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        models = state.extra.many("cluster")
        return {f"cluster {number}": world.predictor(p) for number, p in models.items()}

    def client_predictors(self, state: State, world: World) -> dict[int, str]:
        names = {client: f"cluster {client % 2}" for client in range(world.clients)}
        names.pop(self.forgotten, None)
        if self.unknown:
            names[0] = self.unknown
        return names


@method("toy_silent_models")
@dataclass(frozen=True)
class SilentModels(TwoModels):
    """The same, and it does not define which model answers for a client."""

    client_predictors = Method.client_predictors


def two_models(**changes: Any) -> Any:
    values = {"method": "toy_two_models", "rounds": 3, "measure": ()}
    return toys.toy(**{**values, "topology": {"clients": 5, "sampled": 3}, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(two_models(), tmp_path_factory.mktemp("two") / "run", data=toys.blobs()).directory


def test_the_accuracy_is_the_mean_over_clients_of_their_models(finished: Path) -> None:
    counts = Result.of(finished).label_counts()
    shares = counts / counts.sum(1, keepdims=True)
    for event in read_journal(finished / "journal.jsonl"):
        if event["event"] != "round":
            continue
        names = [event["client_predictors"][str(client)] for client in range(5)]
        assert names == [f"cluster {client % 2}" for client in range(5)]
        models = event["others"]
        mean = np.mean([models[name]["accuracy"] for name in names])
        assert event["accuracy"] == pytest.approx(mean)
        rows = np.array([models[name]["class_accuracy"] for name in names])
        assert event["class_accuracy"] == pytest.approx(rows.mean(0))
        assert event["personal_accuracy"] == pytest.approx((rows * shares).sum(1).mean())
        assert event["personal_clients"] == 5
    summary = Result.of(finished).summary

    assert summary["answer"] == "server models"
    assert summary["accuracy"] == event["accuracy"]


def test_a_class_is_forgotten_by_the_client_whose_model_was_better_before(finished: Path) -> None:
    """The forgetting of a client is a mean over the classes of its data."""
    rounds = [e for e in read_journal(finished / "journal.jsonl") if e["event"] == "round"]
    counts = Result.of(finished).label_counts()
    forgetting_of_clients = []
    for client in range(5):
        models = [event["others"][f"cluster {client % 2}"] for event in rounds]
        class_accuracies = np.array([model["class_accuracy"] for model in models], float)
        best_earlier = class_accuracies[:-1].max(0)
        forgetting = best_earlier - class_accuracies[-1]
        is_in_data = counts[client] > 0
        forgetting_of_clients.append(forgetting[is_in_data].mean())

    assert rounds[-1]["personal_forgetting"] == pytest.approx(np.mean(forgetting_of_clients))


@pytest.mark.parametrize("stages", [1, 2])
def test_it_resumes_to_the_same_bits(finished: Path, tmp_path: Path, stages: int) -> None:
    folder = stopped(two_models(), tmp_path / "run", stages)
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), bits(finished))


@pytest.mark.parametrize(
    ("name", "fields", "hook", "words"),
    [
        ("toy_silent_models", {}, "predictors", "0, 1, 2, 3, 4"),
        ("toy_two_models", {"forgotten": 3}, "client_predictors", r"\(3\)"),
        ("toy_two_models", {"unknown": "cluster 7"}, "client_predictors", "cluster 7"),
    ],
)
def test_a_client_without_a_model_ends_the_run_before_round_1(
    tmp_path: Path, name: str, fields: dict[str, Any], hook: str, words: str
) -> None:
    experiment = two_models(method={"name": name, **fields})
    with pytest.raises(MethodFailed, match=rf"before round 1: \w+\.{hook} .*{words}"):
        run(experiment, tmp_path / "run", data=toys.blobs())
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [e for e in events if e["event"] in ("client", "round")]


def test_explain_states_how_many_models_there_are() -> None:
    ready = prepare(resolve(two_models()), toys.blobs())
    assert "server's 2 models" in run_estimate(ready).answer


def test_models_are_loaded_by_name_and_by_client(finished: Path) -> None:
    by_client = load_model(finished, client=3)
    by_name = load_model(finished, client="cluster 1")
    assert by_client.about["model"] == by_name.about["model"] == "cluster 1"

    params = by_client.state_dict()
    params_by_name = by_name.state_dict()
    assert params.keys() == params_by_name.keys()
    assert all(torch.equal(params[name], params_by_name[name]) for name in params)
    with pytest.raises(ConfigError, match="a model: 'cluster 0'"):
        load_model(finished)


def test_why_and_measures_of_one_model_are_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="why"):
        find_changes(finished, None, None)
    with pytest.raises(IncompatibleMethod, match="contributions"):
        run(two_models(measure=["contributions"]), tmp_path / "a", data=toys.blobs())


def test_the_page_shows_the_accuracy_for_the_clients(finished: Path) -> None:
    assert "Accuracy for the clients by round" in page(groups([finished]))


def test_the_page_names_the_model_of_each_client(finished: Path) -> None:
    (group,) = groups([finished])
    section = clients(Report([group]))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    column = table.head.index(f"{group.label}: model")
    names = [row[column] for row in table.rows]

    assert names == ["cluster 0", "cluster 1", "cluster 0", "cluster 1", "cluster 0"]


def test_in_tasks_each_client_has_the_accuracy_of_its_model(tmp_path: Path) -> None:
    experiment = two_models(stream={"kind": "classes", "tasks": 2}, rounds=4)
    folder = run(experiment, tmp_path / "run", data=toys.blobs()).directory
    events = read_journal(folder / "journal.jsonl")
    last_round = [event for event in events if event["event"] == "round"][-1]
    last_task = [event for event in events if event["event"] == "task"][-1]

    assert last_task["task"] == 2
    accuracy = sum(last_task["correct"][0]) / sum(last_task["totals"][0])
    assert accuracy == pytest.approx(last_round["accuracy_seen"])
    rows = {tuple(last_task["clients"][str(client)]) for client in range(5)}
    assert len(rows) > 1


def test_own_test_sets_are_tested_by_the_clients_model() -> None:
    sites = prepare(resolve(two_models()), toys.blobs()).sites
    test = sites.common_test
    assert test is not None
    with_tests = replace(sites, own_tests={0: test, 1: test})

    def always_0(x: Tensor) -> Tensor:
        return torch.eye(5)[0].repeat(len(x), 1)

    def always_1(x: Tensor) -> Tensor:
        return torch.eye(5)[1].repeat(len(x), 1)

    predictors = {"cluster 0": always_0, "cluster 1": always_1}
    result = RoundResult(1, (), {}, predictors, client_predictors={0: "cluster 1", 1: "cluster 0"})
    fields = ClientTests(with_tests, frozenset()).round_fields(result, {})
    share_of_0 = float((test.labels == 0).double().mean())
    share_of_1 = float((test.labels == 1).double().mean())

    assert fields["own_test_by_client"] == {"0": share_of_1, "1": share_of_0}


def test_rounds_are_compared_by_each_clients_model_on_its_held_out_examples(
    tmp_path: Path,
) -> None:
    plan = {"epochs": 1, "validation": 0.25}
    experiment = two_models(select_on="held_out", plan=plan)
    folder = run(experiment, tmp_path / "run", data=toys.blobs()).directory
    rounds = [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "round"]

    assert all(0 <= event["selection_score"] <= 1 for event in rounds)
    with pytest.raises(ConfigError, match="select_on"):
        run(two_models(select_on="public"), tmp_path / "b", data=toys.blobs())
