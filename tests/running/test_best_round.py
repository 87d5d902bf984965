"""The best round of a run is kept, and ``[stop]`` ends a run early: the same after a resume."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.tables import StopTable
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, Interrupted
from fedstill.core.records import Examples
from fedstill.engines.passes import correct_by_example
from fedstill.export.loading import load_model
from fedstill.export.trained_model import TrainedModel
from fedstill.running.journal import read_journal
from fedstill.running.numbers import RunNumbers
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.selection import (
    RoundRule,
    Standing,
    best_round,
    held_out_examples,
)
from run_bits import StopAfter, UninterruptedBits, assert_same_bits, bits, stopped

HELD_OUT = {"epochs": 1, "batch": 20, "lr": 0.5, "validation": 0.2}
STOPS_IN_ROUND_7 = toys.stopping_early("scaffold")
"""Its best round is 3, and it stops in round 7 of 20."""


@pytest.fixture(scope="module")
def stopped_in_round_7(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run of ``STOPS_IN_ROUND_7``; tests that change it copy its directory."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return run(STOPS_IN_ROUND_7, folder, toys.blobs())


@pytest.fixture(scope="module")
def bits_of_method(tmp_path_factory: pytest.TempPathFactory) -> UninterruptedBits:
    """A function that returns the bits of a method's run with a patience of one round. Each
    method runs once.
    """

    @functools.cache
    def bits_of(method: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        result = run(impatient(method), folder, toys.blobs())
        assert "stopped_in_round" in result.summary
        return bits(folder)

    return bits_of


def impatient(method: str) -> Experiment:
    """A run that stops after one round that is no better."""
    return toys.stopping_early(method, stop={"patience": 1})


def scores(result: Result) -> list[Any]:
    """The score by which rounds are compared, of every round of a run."""
    return [event["selection_score"] for event in result.history]


def accuracy_on(examples: Examples, model: TrainedModel) -> float:
    """The share of examples whose label a model predicts."""
    is_correct = model(examples.values).argmax(1) == examples.labels
    return float(is_correct.double().mean())


def assert_same_answers(model: TrainedModel, other_model: TrainedModel) -> None:
    """Assert that two models map the same inputs to the same bits."""
    noise = model.noise(5)
    assert torch.equal(model(noise), other_model(noise))


def prepared_run(experiment: Experiment) -> Prepared:
    """The preparation of the run that ``run(experiment, folder, toys.blobs())`` carries out."""
    resolved = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
    return prepare(resolved, toys.blobs())


def test_the_model_of_the_best_round_has_the_numbers_of_that_round(
    stopped_in_round_7: Result,
) -> None:
    result = stopped_in_round_7
    summary = result.summary
    assert summary["best_round"] == 3 < len(result.history) == 7 < summary["rounds"]
    best = result.history[2]
    assert summary["best_round_score"] == best["selection_score"] == max(scores(result))
    assert summary["best_round_accuracy"] == best["accuracy"] != summary["accuracy"]
    assert (summary["selected_by"], summary["selected_on"]) == ("accuracy", "held_out")

    model = load_model(result, round="best")
    assert model.about["round"] == 3
    assert accuracy_on(toys.blobs().test, model) == best["accuracy"]

    prepared = prepared_run(STOPS_IN_ROUND_7)
    held_out = held_out_examples(prepared.settings, prepared.sites)
    assert accuracy_on(held_out, model) == best["selection_score"]


def test_no_stage_trains_on_held_out_examples() -> None:
    plans = {"train": HELD_OUT, "finetune": {"epochs": 1, "validation": 0.4}}
    settings = resolve(toys.toy("fedbabu", plan=plans, data={"name": "blobs"}))
    prepared = prepare(settings, toys.blobs())
    sites = prepared.sites
    total = 0
    for client in range(settings.clients):
        held_out = set(sites.division(client, 0.2).held_out.tolist())
        total += len(held_out)
        for share in (0.2, 0.4):
            assert held_out.isdisjoint(sites.division(client, share).train.tolist())

    assert len(held_out_examples(settings, sites)) == total


def test_a_run_that_does_not_compare_rounds_writes_nothing_of_it(tmp_path: Path) -> None:
    result = run(toys.toy(rounds=2, stop={"patience": 0}), tmp_path / "run", toys.blobs())
    assert "[stop]" not in (tmp_path / "run/config.toml").read_text()
    assert "selection" not in (tmp_path / "run/journal.jsonl").read_text()
    assert not {"best_round", "selected_on", "stopped_because"} & result.summary.keys()
    with pytest.raises(ConfigError, match="select_on"):
        load_model(result, round="best")


def test_comparing_rounds_changes_no_bit_of_the_models(tmp_path: Path) -> None:
    plain = run(toys.toy(plan=HELD_OUT), tmp_path / "plain", toys.blobs())
    compared = run(
        toys.toy(plan=HELD_OUT, select_on="held_out"), tmp_path / "compared", toys.blobs()
    )
    assert all(torch.equal(plain.model[name], compared.model[name]) for name in plain.model)
    assert [e["accuracy"] for e in plain.history] == [e["accuracy"] for e in compared.history]


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
@pytest.mark.parametrize("stages", [1, 3, 7])
def test_a_resumed_run_has_the_same_best_round_and_stops_in_the_same_one(
    method: str, stages: int, bits_of_method: UninterruptedBits, tmp_path: Path
) -> None:
    folder = stopped(impatient(method), tmp_path / "run", 1)
    while True:
        try:
            resume(folder, toys.blobs(), watch=StopAfter(stages))
            break
        except Interrupted:
            continue

    assert_same_bits(bits(folder), bits_of_method(method))


def test_a_damaged_last_checkpoint_loses_no_best_round(
    stopped_in_round_7: Result, tmp_path: Path
) -> None:
    """The damaged checkpoint is that of the best round, the one after it, or one so late that the
    checkpoint of the best round is older than the last three.
    """
    best_model = load_model(stopped_in_round_7, round="best")
    for stages in (3, 4, 6):
        folder = stopped(STOPS_IN_ROUND_7, tmp_path / f"after{stages}", stages)
        newest = max((folder / "checkpoints").glob("*.json"))
        newest.write_bytes(b"")
        resumed = resume(folder, toys.blobs())

        assert scores(resumed) == scores(stopped_in_round_7)
        model = load_model(resumed, round="best")
        assert model.about["round"] == best_model.about["round"] == 3
        assert_same_answers(model, best_model)


def test_a_resume_of_a_stopped_run_changes_nothing_and_logs_the_reason(
    stopped_in_round_7: Result, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(stopped_in_round_7.directory, tmp_path / "run")
    bits_of_run = bits(tmp_path / "run")
    result = resume(tmp_path / "run", toys.blobs())

    assert "stop.patience" in result.summary["stopped_because"]
    assert "stop.patience" in caplog.text
    assert_same_bits(bits(tmp_path / "run"), bits_of_run)
    assert len(result.history) == 7


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"stop": {"target": 0.1}}, 1),
        ({"stop": {"target": 0.1, "patience": 2}}, 1),
        ({"stop": {"patience": 1, "min_delta": 1.0}}, 2),
        ({"stop": {"patience": 0, "target": 2.0}}, 3),
        ({"stop": {"patience": 3}}, 3),
    ],
)
def test_a_run_stops_in_the_round_that_its_table_determines(
    changes: dict[str, Any], last: int, tmp_path: Path
) -> None:
    result = run(toys.toy(plan=HELD_OUT, **changes), tmp_path / "run", toys.blobs())
    assert len(result.history) == last
    assert ("stopped_in_round" in result.summary) == (last < 3)


def test_the_first_of_equal_rounds_is_the_best_and_min_delta_is_for_patience_alone() -> None:
    rule = RoundRule("accuracy", True, StopTable.read({"patience": 2, "min_delta": 0.1}, "stop"))
    standing = Standing()
    for number, score in enumerate([0.5, 0.55, 0.55, 0.58], 1):
        standing = rule.after(standing, number, score)

    assert (standing.best, standing.score) == (4, 0.58)
    assert standing.waited == 3
    assert rule.after(standing, 5, 0.61).waited == 0


def test_of_a_loss_the_smallest_is_the_best() -> None:
    rule = RoundRule("log_loss", False, StopTable.read({"patience": 2, "target": 0.2}, "stop"))
    standing = Standing()
    for number, score in enumerate([0.9, 0.5, 0.7], 1):
        standing = rule.after(standing, number, score)
        assert not rule.reason_to_stop(standing, score)

    assert (standing.best, standing.waited) == (2, 1)
    assert "target" in rule.reason_to_stop(rule.after(standing, 4, 0.2), 0.2)
    assert "patience" in rule.reason_to_stop(rule.after(standing, 4, 0.6), 0.6)


def test_a_round_without_a_score_is_no_better_one() -> None:
    rule = RoundRule("accuracy", True, StopTable.read({"patience": 2, "target": 0.5}, "stop"))
    first = rule.after(Standing(), 1, 0.4)
    second = rule.after(first, 2, None)
    assert second.best == 1
    assert not rule.reason_to_stop(second, None)
    assert rule.reason_to_stop(rule.after(second, 3, None), None)


def test_rounds_before_the_first_score_do_not_use_up_patience() -> None:
    rule = RoundRule("accuracy", True, StopTable.read({"patience": 1}, "stop"))
    second = rule.after(rule.after(Standing(), 1, None), 2, None)
    assert not rule.reason_to_stop(second, None)

    third = rule.after(second, 3, 0.4)
    assert third.best == 3
    assert not rule.reason_to_stop(third, 0.4)
    assert rule.reason_to_stop(rule.after(third, 4, None), None)


def test_a_score_that_is_no_number_is_none_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.running import selection

    monkeypatch.setattr(selection.ServerScore, "__call__", lambda self, result, fields: math.nan)
    result = run(toys.toy(plan=HELD_OUT, stop={"patience": 2}), tmp_path / "run", toys.blobs())
    assert scores(result) == [None, None, None]
    assert result.summary["best_round"] is None
    with pytest.raises(ConfigError, match="score"):
        load_model(result, round="best")


def test_personal_models_are_compared_by_the_accuracies_that_clients_report(tmp_path: Path) -> None:
    """The models of the best round are the personal models of that round."""
    experiment = toys.stopping_early("ditto", measure_every=1)
    result = run(experiment, tmp_path / "run", toys.blobs())
    best = result.summary["best_round"]
    assert result.summary["answer"] == "clients"
    assert best < len(result.history)
    clients = result.clients()
    reported = clients[clients["held_out_accuracy"].notna() & (clients["round"] <= best)]
    last_reports = reported.groupby("client")["held_out_accuracy"].last()
    assert last_reports.mean() == pytest.approx(result.history[best - 1]["selection_score"])

    sites = prepared_run(experiment).sites
    some_model_changed_later = False
    for client, accuracy in last_reports.items():
        held_out = sites.train.take(sites.division(client, 0.2).held_out)
        model = load_model(result, client, round="best")
        assert accuracy_on(held_out, model) == accuracy
        noise = model.noise(5)
        last_model = load_model(result, client)
        some_model_changed_later |= not torch.equal(model(noise), last_model(noise))
    assert some_model_changed_later


def test_the_rounds_whose_checkpoint_is_kept_have_a_model(tmp_path: Path) -> None:
    result = run(toys.toy(rounds=8, keep_checkpoints_every=2), tmp_path / "run", toys.blobs())
    test = toys.blobs().test
    for round_index in (2, 4, 6, 7, 8):
        model = load_model(result, round=round_index)
        assert accuracy_on(test, model) == result.history[round_index - 1]["accuracy"]

    for round_index in (0, 1, 3, 9):
        with pytest.raises(ConfigError, match=f"round {round_index}.*2, 4, 6, 7, 8"):
            load_model(result, round=round_index)
    with pytest.raises(ConfigError, match="round = 'last'"):
        load_model(result, round="last")  # type: ignore[arg-type]


def test_a_round_that_has_not_ended_has_no_model(tmp_path: Path) -> None:
    folder = stopped(toys.toy("toy_chain", rounds=3), tmp_path / "run", 7)
    last = json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])["round"]
    with pytest.raises(ConfigError, match=f"round {last}"):
        load_model(folder, round=last)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"stop": {"patience": 2}}, "plan.validation"),
        ({"select_on": "held_out"}, "plan.validation"),
        ({"select_on": "public"}, "data.public"),
        ({"select_on": "public", "data": {"public": 40, "public_labels": False}}, "data.public"),
        ({"select_on": "test", "method": "ditto"}, "partition.own_test"),
        ({"select_on": "held_out", "method": "fedrep", "plan": {"train": HELD_OUT}}, "finetune"),
        ({"stop": {"min_delta": 0.1}}, "stop.patience"),
        ({"stop": {"patience": 2}, "stream": {"kind": "classes", "tasks": 3}}, "stream"),
        ({"select_on": "test", "stream": {"kind": "classes", "tasks": 3}}, "stream"),
    ],
)
def test_rounds_that_cannot_be_compared_are_an_error_before_training(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(FedstillError, match=key):
        run(toys.toy(**changes), tmp_path / "run", toys.blobs())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"method": "ft_fedavg"}, "finetune"),
        ({"method": "ccvr"}, "statistics"),
        ({"method": "metafed"}, "personalise"),
        ({"topology": {"clients": 6, "last": "ridge"}}, "ridge"),
    ],
)
def test_a_run_that_may_miss_its_last_stages_is_refused(
    changes: dict[str, Any], stage: str, tmp_path: Path
) -> None:
    plan = {"epochs": 1, "validation": 0.2}
    experiment = toys.toy(**{"plan": plan, "stop": {"patience": 2}, **changes})
    with pytest.raises(ConfigError, match=rf"stage '{stage}'.*remove \[stop\]"):
        run(experiment, tmp_path / "run", toys.blobs())
    assert not (tmp_path / "run").exists()

    one_round = experiment.with_values({"rounds": 1}, "test")
    assert run(one_round, tmp_path / "one", toys.blobs()).summary["rounds"] == 1


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({"stop": {"patience": 9}, "plan": HELD_OUT}, "held_out"),
        ({"stop": {"patience": 9}, "data": {"public": 40}}, "public"),
        ({"stop": {"patience": 9}, "data": {"test_from": "held_out"}}, "held_out"),
        ({"select_on": "test", "plan": HELD_OUT}, "test"),
        ({"select_on": "public", "data": {"public": 40, "test_from": "held_out"}}, "public"),
    ],
)
def test_held_out_data_are_preferred_and_the_data_are_stated(
    changes: dict[str, Any], on: str, tmp_path: Path
) -> None:
    result = run(toys.toy(**changes), tmp_path / "run", toys.blobs())
    assert result.summary["selected_on"] == on

    start = json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[0])
    assert start["selection"]["on"] == on

    best = best_round(start, RunNumbers.of(result.history))
    assert best is not None
    assert best.score == max(scores(result))

    is_tested = on == "test" or (on == "held_out" and "test_from" in str(changes))
    accuracies = [event["accuracy"] for event in result.history]
    assert (scores(result) == accuracies) == is_tested


def test_public_examples_are_scored_by_their_labels(tmp_path: Path) -> None:
    experiment = toys.toy(select_on="public", data={"public": 40})
    result = run(experiment, tmp_path / "run", toys.blobs())
    sites = prepared_run(experiment).sites
    assert sites.public is not None
    model = load_model(result, round="best")
    is_correct = correct_by_example(lambda x: model.network(x), sites.public, sites.inputs)

    assert float(is_correct.double().mean()) == result.summary["best_round_score"]


@pytest.mark.parametrize("on", ["held_out", "public"])
def test_rounds_are_compared_by_rank_by_and_of_a_loss_the_least_is_the_best(
    on: str, tmp_path: Path
) -> None:
    experiment = toys.stopping_early(
        rank_by="log_loss", select_on=on, data={"public": 40}, stop={"patience": 1}
    ).with_values({"plan.lr": 3.0}, "test")
    result = run(experiment, tmp_path / "run", toys.blobs())
    losses = scores(result)
    assert result.summary["best_round"] == 1 + losses.index(min(losses))
    assert result.summary["selected_by"] == "log_loss"
    assert min(losses) < losses[0]
    assert "log_loss" in result.summary["stopped_because"]
    assert losses[-1] >= losses[-2] == min(losses)

    prepared = prepared_run(experiment)
    examples = prepared.sites.public
    if on == "held_out":
        examples = held_out_examples(prepared.settings, prepared.sites)
    assert examples is not None
    logits = load_model(result, round="best")(examples.values).detach().double()
    loss = torch.nn.functional.cross_entropy(logits, examples.labels)
    assert float(loss) == pytest.approx(min(losses), rel=1e-6)


def test_a_loss_reaches_its_target_from_above(tmp_path: Path) -> None:
    experiment = toys.stopping_early(rank_by="log_loss", stop={"target": 0.8})
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert "target" in result.summary["stopped_because"]
    *earlier_losses, last_loss = scores(result)
    assert last_loss <= 0.8 < min(earlier_losses)


def test_on_the_test_set_the_metric_is_that_of_the_round(tmp_path: Path) -> None:
    experiment = toys.toy(rank_by="auc", select_on="test")
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert scores(result) == [event["auc"] for event in result.history]
    assert result.summary["best_round_score"] == max(event["auc"] for event in result.history)


def test_personal_models_are_compared_by_rank_by(tmp_path: Path) -> None:
    experiment = toys.toy("ditto", rank_by="brier", plan=HELD_OUT, select_on="held_out")
    result = run(experiment, tmp_path / "run", toys.blobs())
    clients = result.clients()
    last_reports = clients[clients["held_out_score"].notna()].groupby("client")
    mean = last_reports["held_out_score"].last().mean()

    assert mean == pytest.approx(scores(result)[-1])
    assert result.summary["best_round_score"] == min(scores(result))


@pytest.mark.uses("flower")
@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_over_flower_the_same_round_is_the_best_and_the_run_stops_in_the_same(
    method: str, tmp_path: Path
) -> None:
    experiment = toys.stopping_early(method, stop={"patience": 2})
    simulated = run(experiment, tmp_path / "simulated", toys.blobs())
    flower = experiment.with_values({"engine": "flower"}, "test")
    folder = stopped(flower, tmp_path / "flower", 3)
    deployed = resume(folder, toys.blobs())
    assert scores(deployed) == scores(simulated)
    for key in ("best_round", "best_round_score", "stopped_in_round", "stopped_because"):
        assert deployed.summary[key] == simulated.summary[key]

    client = None
    if method == "ditto":
        client = 2
    model = load_model(simulated, client, round="best")
    model_over_flower = load_model(deployed, client, round="best")
    assert model.about["round"] == simulated.summary["best_round"]
    assert model_over_flower.about["round"] == simulated.summary["best_round"]
    assert_same_answers(model, model_over_flower)


def test_a_journal_that_compares_rounds_on_unknown_data_is_named(tmp_path: Path) -> None:
    run(toys.toy(plan=HELD_OUT, select_on="held_out"), tmp_path / "run", toys.blobs())
    journal = tmp_path / "run/journal.jsonl"
    journal.write_text(journal.read_text().replace('"on":"held_out"', '"on":"elsewhere"'))
    with pytest.raises(CorruptFile, match=r"line 1.*selection\.on"):
        read_journal(journal)


@pytest.mark.parametrize(
    ("method", "changes", "stage"),
    [
        ("fedavg", {"topology": {"clients": 4, "last": "ridge"}}, "ridge"),
        ("analytic", {"topology": {"clients": 4}}, "sums"),
    ],
)
def test_no_stage_may_use_the_examples_on_which_rounds_are_compared(
    method: str, changes: dict[str, object], stage: str
) -> None:
    def prepare_with(plan: dict[str, object]) -> None:
        experiment = toys.toy(method, plan=plan, select_on="held_out", measure=(), **changes)
        prepare(resolve(experiment), toys.blobs())

    training_alone = {"train": {"epochs": 1, "validation": 0.2}}
    with pytest.raises(ConfigError, match=rf"plan\.{stage}\.validation = 0\.2"):
        prepare_with(training_alone)

    prepare_with({**training_alone, stage: {"validation": 0.2}})
    prepare_with({"epochs": 1, "validation": 0.2})
