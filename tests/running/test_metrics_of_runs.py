"""Metrics beside accuracy: a run records them, engines agree on them, a resume continues them, and
runs can be ranked by them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.config.validation import WrongConfig
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.extensions import RoundResult
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_clients, from_tensors
from fedstill.metrics.classification import METRICS, RECORDED, RunMetrics
from fedstill.report.page import write_page
from fedstill.report.summary import order_note, ranked, ranking_column
from fedstill.report.table_files import results_table
from fedstill.report.terminal import comparison_table
from fedstill.running.client_evaluation import ClientTests
from fedstill.running.compare import Outcome, Variant
from fedstill.running.preparation import prepare
from fedstill.running.runs import find, groups
from fedstill.running.setting_warnings import log_once
from fedstill.running.tuning import Tuning, parse_space
from run_bits import model_bytes, stopped

ALL = tuple(RECORDED)
Examples = tuple[torch.Tensor, torch.Tensor]


def rare(share: float = 0.06) -> Dataset:
    """A table of two classes of which the last is rare."""
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> Examples:
        labels = (torch.randperm(count, generator=draw) < share * count).long()
        values = torch.randn(count, 6, generator=draw) + labels[:, None]
        return values, labels

    return from_tensors("rare", some(1000), some(1000), classes=("healthy", "ill"))


def of_rare(method: object = "fedavg", **changes: object) -> fedstill.Experiment:
    """A run of three clients on the table with a rare class."""
    values: dict[str, object] = {
        "rounds": 3,
        "measure": (),
        "model": "logistic",
        "partition": "iid",
        "topology": {"clients": 3},
        "plan": {"epochs": 4, "lr": 0.1},
    }
    return toys.toy(method, **{**values, **changes})


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the journal of a run."""
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def logits_of(run: fedstill.Result, values: torch.Tensor) -> torch.Tensor:
    """The logits of the final model of a run."""
    model = fedstill.load_model(run.directory)
    with torch.no_grad():
        logits: torch.Tensor = model(values)
    return logits


# ---- recorded metrics ----------------------------------------------------------------------------


def test_the_metrics_of_the_last_round_are_those_of_the_final_model(tmp_path: Path) -> None:
    data = rare()
    result = fedstill.run(of_rare(metrics=ALL), tmp_path / "run", data=data)
    logits = logits_of(result, data.test.values)
    labels = data.test.labels.numpy()
    scores = torch.softmax(logits.double(), 1).numpy()
    predictions = scores.argmax(1)
    confusion = sk.confusion_matrix(labels, predictions).tolist()

    last_round = events(tmp_path / "run", "round")[-1]
    for recorded in (last_round, result.summary):
        auc = sk.roc_auc_score(labels, scores[:, 1])
        assert recorded["auc"] == pytest.approx(auc, rel=1e-6)
        recall = sk.recall_score(labels, predictions)
        assert recorded["recall"] == pytest.approx(recall, rel=1e-6)
        log_loss = sk.log_loss(labels, scores)
        assert recorded["log_loss"] == pytest.approx(log_loss, rel=1e-6)
        f1 = sk.f1_score(labels, predictions, average="macro")
        assert recorded["f1"] == pytest.approx(f1, rel=1e-6)
        assert recorded["confusion"] == confusion
    (initial,) = events(tmp_path / "run", "initial")
    assert set(ALL) <= initial.keys()


def test_accuracy_is_the_same_with_and_without_metrics(tmp_path: Path) -> None:
    plain = fedstill.run(toys.toy(), tmp_path / "plain", data=toys.blobs())
    measured = fedstill.run(toys.toy(metrics=ALL), tmp_path / "measured", data=toys.blobs())
    for name in ("accuracy", "class_accuracy", "forgetting"):
        assert [e[name] for e in plain.history] == [e[name] for e in measured.history]
    assert model_bytes(tmp_path / "plain") == model_bytes(tmp_path / "measured")

    assert plain.history[-1].keys().isdisjoint(RECORDED)
    assert "metrics" not in (tmp_path / "plain/config.toml").read_text()
    assert plain.summary.keys().isdisjoint(RECORDED)
    assert plain.summary.keys().isdisjoint(f"best_{name}" for name in METRICS)


def test_engines_give_the_same_metrics(tmp_path: Path) -> None:
    def history(engine: str) -> list[dict[str, Any]]:
        experiment = toys.toy(metrics=ALL, engine=engine)
        return fedstill.run(experiment, tmp_path / engine, data=toys.blobs()).history

    serial = history("serial")

    for event, serial_event in zip(history("pooled"), serial, strict=True):
        for name in ALL:
            assert event[name] == serial_event[name]
    for event, serial_event in zip(history("vectorised"), serial, strict=True):
        for name in METRICS:
            assert event[name] == pytest.approx(serial_event[name], abs=1e-4)


def test_best_rounds_of_metrics_are_in_the_summary(tmp_path: Path) -> None:
    experiment = toys.toy(metrics=("auc", "log_loss"), rounds=4)
    run = fedstill.run(experiment, tmp_path / "run", data=toys.blobs())
    assert run.summary["best_auc"] == max(event["auc"] for event in run.history)
    assert run.summary["best_log_loss"] == min(event["log_loss"] for event in run.history)


def test_a_resumed_run_has_the_same_metrics(tmp_path: Path) -> None:
    experiment = of_clients(metrics=ALL, rank_by="auc")
    uninterrupted = fedstill.run(experiment, tmp_path / "whole", data=hospitals())
    stopped(experiment, tmp_path / "cut", stages=1, data=hospitals())
    resumed = fedstill.resume(tmp_path / "cut", data=hospitals())

    names_of_own_tests = [f"own_test_{name}" for name in METRICS]
    for event, resumed_event in zip(uninterrupted.history, resumed.history, strict=True):
        for name in (*ALL, *names_of_own_tests, "own_test_confusions"):
            assert resumed_event[name] == event[name]
    assert resolve(fedstill.load(tmp_path / "cut/config.toml")).rank_by == "auc"


def test_tasks_have_metrics_too(tmp_path: Path) -> None:
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 1], [2, 3, 4]]}
    changes: dict[str, Any] = {"stream": stream, "rounds": 4, "partition": "iid"}
    plain = fedstill.run(toys.toy(**changes), tmp_path / "plain", data=toys.blobs())
    run = fedstill.run(toys.toy(metrics=ALL, **changes), tmp_path / "run", data=toys.blobs())

    assert plain.history[-1]["accuracy_seen"] == run.history[-1]["accuracy_seen"]

    matrix = np.array(run.history[-1]["confusion"])
    assert np.trace(matrix) / matrix.sum() == run.history[-1]["accuracy"]


class Numbers:
    """A tracker that keeps the numbers of each round."""

    def __init__(self) -> None:
        self.by_round: dict[int, dict[str, float]] = {}

    def ready(self) -> None:
        pass

    def begin(self, run: object, memo: dict[str, str], last: int) -> int:
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self.by_round[round] = dict(numbers)

    def end(self, state: object, summary: Mapping[str, float | str]) -> None:
        pass


def test_trackers_are_sent_the_metrics(tmp_path: Path) -> None:
    tracker = Numbers()
    run = fedstill.run(
        of_clients(metrics=("auc",)), tmp_path / "run", data=hospitals(), track=tracker
    )
    for event in run.history:
        numbers = tracker.by_round[event["round"]]
        assert numbers["auc"] == event["auc"]
        assert numbers["own_test_auc"] == event["own_test_auc"]


# ---- clients' own test sets ----------------------------------------------------------------------


def hospitals() -> Dataset:
    """Three clients with rows of their own; the test set of the last has one class."""
    draw = torch.Generator().manual_seed(1)

    def some(count: int, share: float) -> Examples:
        labels = (torch.arange(count) < share * count).long()
        return torch.randn(count, 4, generator=draw) + labels[:, None], labels

    pairs = [(some(60, 0.5), some(30, share)) for share in (0.5, 0.2, 0.0)]
    return from_clients("hospitals", pairs, names=["bern", "chur", "genf"])


def of_clients(method: object = "fedavg", **changes: object) -> fedstill.Experiment:
    """A run of the three hospitals, each tested on its own rows too."""
    partition = {"kind": "column", "column": "client", "own_test": "column"}
    return of_rare(method, partition=partition, **changes)


def test_own_tests_have_the_metrics_of_a_common_model(tmp_path: Path) -> None:
    data = hospitals()
    run = fedstill.run(of_clients(metrics=ALL), tmp_path / "run", data=data)
    # The run standardises the table, so the model is asked about standardised rows.
    inputs = prepare(resolve(of_clients()), data).sites.own_tests
    by_client = run.summary["own_test_auc_by_client"]

    assert by_client.keys() == {"0", "1"}, "the third test set has one class"

    for client in (0, 1):
        logits = logits_of(run, inputs[client].values)
        truth = inputs[client].labels.numpy()
        score = torch.softmax(logits.double(), 1)[:, 1].numpy()
        assert by_client[str(client)] == pytest.approx(sk.roc_auc_score(truth, score))

    assert run.summary["own_test_auc"] == pytest.approx(sum(by_client.values()) / 2)
    assert sum(map(sum, run.summary["own_test_confusions"]["2"])) == 30


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_models_of_clients_are_tested_on_their_own_tests(tmp_path: Path, engine: str) -> None:
    run = fedstill.run(
        of_clients("ditto", metrics=ALL, engine=engine), tmp_path / "run", data=hospitals()
    )

    assert run.summary["own_test_auc_by_client"].keys() == {"0", "1"}

    stages = resolve(of_clients("ditto")).method.personal
    answers = [event for event in events(tmp_path / "run", "client") if event["name"] in stages]
    last = {event["client"]: event["site_metrics"] for event in answers}

    assert run.summary["own_test_recall_by_client"]["0"] == last[0]["recall"]
    assert last[2]["auc"] is None

    for client, report in last.items():
        right = np.trace(np.array(report["confusion"])) / 30
        assert right == pytest.approx(run.summary["own_test_by_client"][str(client)])


def test_a_predictor_for_each_client_is_tested_on_that_clients_examples() -> None:
    def sum_of_values(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([-x.sum(1), x.sum(1)], 1)

    sites = prepare(resolve(of_clients()), hospitals()).sites
    predictors = {f"client {client}": sum_of_values for client in range(3)}
    tests = ClientTests(sites, frozenset(), RunMetrics(("auc",), 1))
    measured = tests.round_fields(RoundResult(1, (), {}, predictors), {})

    for client in (0, 1):
        examples = sites.own_tests[client]
        expected = sk.roc_auc_score(examples.labels, examples.values.sum(1))
        assert measured["own_test_auc_by_client"][str(client)] == pytest.approx(expected)


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"metrics": ("au",)}, "metrics"),
        ({"metrics": ("accuracy",)}, "metrics"),
        ({"rank_by": "confusion"}, "rank_by"),
        ({"rank_by": "log loss"}, "rank_by"),
    ],
)
def test_unknown_names_of_metrics_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(WrongConfig, match=key) as caught:
        resolve(toys.toy(**changes))
    assert [problem.key for problem in caught.value.problems] == [key]
    assert caught.value.problems[0].hint


def test_the_metric_that_ranks_is_recorded() -> None:
    settings = resolve(toys.toy(metrics=("f1",), rank_by="auc"))
    assert settings.metrics == ("f1", "auc")
    assert resolve(toys.toy(rank_by="accuracy")).metrics == ()


def test_the_positive_class_is_named(tmp_path: Path) -> None:
    def summary(positive_class: str) -> dict[str, Any]:
        experiment = of_rare(metrics=("recall", "specificity"), positive_class=positive_class)
        return fedstill.run(experiment, tmp_path / positive_class, data=rare()).summary

    healthy = summary("healthy")
    ill = summary("ill")
    assert healthy["recall"] == ill["specificity"]
    assert healthy["recall"] != ill["recall"]

    with pytest.raises(ConfigError, match="positive_class"):
        prepare(resolve(of_rare(positive_class="sick")), rare())
    with pytest.raises(ConfigError, match="positive_class"):
        prepare(resolve(toys.toy(positive_class="class 1")), toys.blobs())


# ---- ranking -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on a table with 6 % positives; the second finds more of these, and has the lower
    accuracy.
    """
    folder = tmp_path_factory.mktemp("compared")
    metrics = ("auc", "log_loss", "confusion")
    plain = of_rare("fedavg", metrics=metrics, rank_by="balanced_accuracy")
    margin = replace(plain, method={"name": "fedlc", "margin": 4.0})
    fedstill.run(plain, folder / "plain", data=rare())
    fedstill.run(margin, folder / "margin", data=rare())
    return folder


def test_lines_are_ranked_by_the_metric(compared_runs: Path) -> None:
    compared = groups([compared_runs / "plain", compared_runs / "margin"])
    plain, margin = compared
    assert plain.values("accuracy") > margin.values("accuracy")
    assert plain.values("balanced_accuracy") < margin.values("balanced_accuracy")

    ordered = ranked(compared)
    by = ranking_column(compared)
    assert by is not None

    assert by.key == "balanced_accuracy"
    assert [group.label for group in ordered] == ["fedlc", "fedavg"]
    assert by.title in order_note(by)
    assert [line[0] for line in results_table(compared).lines] == ["fedlc", "fedavg"]

    table = comparison_table(compared)
    assert [row[0] for row in table.rows] == ["fedlc", "fedavg"]
    assert any(head.startswith("ROC AUC") for head in table.head)


def test_the_page_has_the_metrics_and_the_confusion_matrix(compared_runs: Path) -> None:
    page = write_page([compared_runs], compared_runs / "report.html").read_text()
    for section in ("metrics", "confusion"):
        assert f'id="{section}"' in page
    assert "ROC AUC by round" in page
    assert "ROC AUC on own tests" not in page


def test_the_confusion_matrix_is_in_the_frame(compared_runs: Path) -> None:
    frame = fedstill.load_runs([compared_runs], metrics=["confusion"])
    last = frame[(frame["round"] == 3) & (frame["metric"] == "confusion/1")]
    events_of_plain = events(compared_runs / "plain", "round")[-1]["confusion"]
    counts = last[last["run"].astype(str).str.endswith("plain")].set_index("class")["value"]
    assert [counts["healthy"], counts["ill"]] == [row[1] for row in events_of_plain]


@pytest.mark.parametrize("matrix", [[[1, 2]], [[1, 2], [3]], [[1, -2], [3, 4]], "none"])
def test_a_malformed_confusion_matrix_is_an_error_with_its_line(
    compared_runs: Path, tmp_path: Path, matrix: object
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(compared_runs / "plain", copy)
    lines = (copy / "journal.jsonl").read_text().splitlines()
    is_round_2 = [line.startswith('{"event":"round","round":2') for line in lines]
    number = is_round_2.index(True)
    lines[number] = json.dumps({**json.loads(lines[number]), "confusion": matrix})
    (copy / "journal.jsonl").write_text("\n".join(lines) + "\n")

    with pytest.raises(CorruptFile, match=f"line {number + 1}: .*confusion"):
        find([copy])


def test_lower_losses_are_ranked_first(
    compared_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = groups([compared_runs / "plain", compared_runs / "margin"])
    for group in compared:
        for run in group.runs:
            monkeypatch.setitem(run.settings, "rank_by", "log_loss")
    ordered = ranked(compared)
    by = ranking_column(compared)
    assert by is not None
    losses = [group.values("log_loss")[0] for group in ordered]

    assert losses == sorted(losses)

    monkeypatch.setitem(compared[0].runs[0].settings, "rank_by", "auc")
    assert ranking_column(compared) is None, "they name two metrics"
    assert ranked(compared) == compared


def test_numbers_of_runs_have_the_metrics(compared_runs: Path) -> None:
    frame = fedstill.load_runs([compared_runs], metrics=["auc"])
    assert {*frame["metric"]} == {"auc"}
    last = frame[frame["round"] == 3].set_index("run")["value"]
    assert len(last) == 2


def search(tmp_path: Path, rank_by: str, goal: str = "") -> Tuning:
    """A search in which the number tuned for is the key's value."""

    def pretend(runs: Sequence[Variant]) -> Sequence[Outcome]:
        for run in runs:
            run.folder.mkdir(parents=True)
            rate = run.settings.plans["train"].lr
            summary = {"accuracy": 1 - rate, "auc": rate, "log_loss": rate}
            (run.folder / "summary.json").write_text(json.dumps(summary))
        return [Outcome(run, 1, state="finished") for run in runs]

    tuning = Tuning(
        toys.toy(rank_by=rank_by),
        parse_space(["plan.lr=0.1,0.2,0.3"]),
        seeds=(100,),
        out=tmp_path,
        do=pretend,
        goal=goal,
    )
    list(tuning.run(8))
    return tuning


def test_tune_searches_by_the_metric_that_ranks_unless_another_goal_is_set(tmp_path: Path) -> None:
    by_auc = search(tmp_path / "auc", "auc")
    assert by_auc.goal == "auc"
    assert by_auc.ranked()[0].values["plan.lr"] == 0.3

    by_loss = search(tmp_path / "log_loss", "log_loss")
    assert by_loss.goal == "log_loss"
    assert by_loss.ranked()[0].values["plan.lr"] == 0.1
    assert by_loss.study.direction.name == "MINIMIZE"

    by_goal = search(tmp_path / "goal", "auc", goal="accuracy")
    assert by_goal.ranked()[0].values["plan.lr"] == 0.1
    with pytest.raises(ConfigError, match="--goal f1"):
        search(tmp_path / "none", "auc", goal="f1")


# ---- a class so frequent that accuracy says little -----------------------------------------------


def has_warning(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a run has logged the share of the frequent class."""
    return any("94.0 %" in record.getMessage() for record in caplog.records)


def test_a_frequent_class_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        run = fedstill.run(of_rare(), tmp_path / "run", data=rare())
    assert has_warning(caplog)
    assert "94.0 %" in run.summary["frequent_class"]
    assert "'healthy'" in run.summary["frequent_class"]


def test_no_warning_if_another_metric_ranks_or_classes_are_even(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        ranked = fedstill.run(of_rare(rank_by="auc"), tmp_path / "ranked", data=rare())
        even = fedstill.run(of_rare(), tmp_path / "even", data=rare(0.3))

    assert not has_warning(caplog)
    assert "frequent_class" not in ranked.summary
    assert "frequent_class" not in even.summary
