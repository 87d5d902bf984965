"""The best round of a run is kept, and ``[stop]`` ends a run early: the same after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.config.tables import StopTable
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, Interrupted
from fedstill.engines.passes import correct_by_example
from fedstill.export.loading import load_model
from fedstill.running.journal import read_journal
from fedstill.running.numbers import RunNumbers
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.selection import (
    RoundRule,
    Standing,
    best_round,
    held_out_examples,
)
from run_bits import StopAfter, assert_same_bits, bits, stopped

HELD_OUT = {"epochs": 1, "batch": 20, "lr": 0.5, "validation": 0.2}
STOPPED_OF = toys.stopping_early("scaffold")
"""Its best round is 3, it stops in round 7 of 20."""


def scores(result: Result) -> list[Any]:
    return [event["selection_score"] for event in result.history]


def test_the_model_of_the_best_round_has_the_numbers_of_that_round(tmp_path: Path) -> None:
    result = run(STOPPED_OF, tmp_path / "run", toys.blobs())
    summary = result.summary
    assert summary["best_round"] == 3 < len(result.history) == 7 < summary["rounds"]
    best = result.history[2]
    assert summary["best_round_score"] == best["selection_score"] == max(scores(result))
    assert summary["best_round_accuracy"] == best["accuracy"] != summary["accuracy"]
    assert (summary["selected_by"], summary["selected_on"]) == ("accuracy", "held_out")

    model = load_model(result, round="best")
    assert model.about["round"] == 3
    test = toys.blobs().test
    assert float((model(test.values).argmax(1) == test.labels).double().mean()) == best["accuracy"]

    prepared = prepare(
        resolve(STOPPED_OF.with_values({"data.name": "blobs"}, "test")), toys.blobs()
    )
    held_out = held_out_examples(prepared.settings, prepared.sites)
    right = (model(held_out.values).argmax(1) == held_out.labels).double().mean()
    assert float(right) == best["selection_score"]


def test_what_is_held_out_is_trained_on_in_no_stage() -> None:
    plans = {"train": HELD_OUT, "finetune": {"epochs": 1, "validation": 0.4}}
    settings = resolve(toys.toy("fedbabu", plan=plans, data={"name": "blobs"}))
    prepared = prepare(settings, toys.blobs())
    sites = prepared.sites
    for client in range(settings.clients):
        held_out = set(sites.division(client, 0.2).held_out.tolist())
        for share in (0.2, 0.4):
            assert held_out.isdisjoint(sites.division(client, share).train.tolist())
    total = sum(len(sites.division(c, 0.2).held_out) for c in range(settings.clients))
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
    method: str, stages: int, tmp_path: Path
) -> None:
    experiment = toys.stopping_early(method, stop={"patience": 1})
    whole = run(experiment, tmp_path / "whole", toys.blobs())
    assert "stopped_in_round" in whole.summary
    folder = stopped(experiment, tmp_path / "run", 1)
    while True:
        try:
            resume(folder, toys.blobs(), watch=StopAfter(stages))
            break
        except Interrupted:
            continue
    assert_same_bits(bits(folder), bits(tmp_path / "whole"))


def test_a_damaged_last_checkpoint_loses_no_best_round(tmp_path: Path) -> None:
    """The checkpoint of an earlier best round may be gone: the rounds since then are repeated."""
    whole = run(STOPPED_OF, tmp_path / "whole", toys.blobs())
    for stages in range(2, 7):
        folder = stopped(STOPPED_OF, tmp_path / f"after{stages}", stages)
        newest = max((folder / "checkpoints").glob("*.json"))
        newest.write_bytes(b"")
        again = resume(folder, toys.blobs())
        assert scores(again) == scores(whole)
        one, other = (load_model(result, round="best") for result in (whole, again))
        assert one.about["round"] == other.about["round"] == 3
        noise = one.noise(5)
        assert torch.equal(one(noise), other(noise))


def test_a_resume_of_a_stopped_run_changes_nothing_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(STOPPED_OF, tmp_path / "run", toys.blobs())
    before = bits(tmp_path / "run")
    result = resume(tmp_path / "run", toys.blobs())
    assert "stop.patience" in result.summary["stopped_because"]
    assert "stop.patience" in caplog.text
    assert_same_bits(bits(tmp_path / "run"), before)
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
def test_a_run_stops_where_its_table_says(
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


def test_models_of_clients_own_are_compared_by_what_they_report(tmp_path: Path) -> None:
    """And the best round has the clients' own models of that round."""
    experiment = toys.stopping_early("ditto", measure_every=1)
    result = run(experiment, tmp_path / "run", toys.blobs())
    best = result.summary["best_round"]
    assert result.summary["answer"] == "clients"
    assert best < len(result.history)
    clients = result.clients()
    reported = clients[clients["held_out_accuracy"].notna() & (clients["round"] <= best)]
    last_reports = reported.groupby("client")["held_out_accuracy"].last()
    assert last_reports.mean() == pytest.approx(result.history[best - 1]["selection_score"])

    settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
    sites = prepare(settings, toys.blobs()).sites
    last_differs = False
    for client, accuracy in last_reports.items():
        held_out = sites.train.take(sites.division(client, 0.2).held_out)
        model = load_model(result, client, round="best")
        right = (model(held_out.values).argmax(1) == held_out.labels).double().mean()
        assert float(right) == accuracy
        noise = model.noise(5)
        last_differs |= not torch.equal(model(noise), load_model(result, client)(noise))
    assert last_differs


def test_every_kept_checkpoint_has_a_model_and_no_other_round(tmp_path: Path) -> None:
    result = run(toys.toy(rounds=8, keep_checkpoints_every=2), tmp_path / "run", toys.blobs())
    test = toys.blobs().test
    for number in (2, 4, 6, 7, 8):
        model = load_model(result, round=number)
        right = (model(test.values).argmax(1) == test.labels).double().mean()
        assert float(right) == result.history[number - 1]["accuracy"]
    for number in (0, 1, 3, 9):
        with pytest.raises(ConfigError, match=f"round {number}.*2, 4, 6, 7, 8"):
            load_model(result, round=number)
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
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
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
    assert (scores(result) == [e["accuracy"] for e in result.history]) == is_tested


def test_public_examples_are_scored_by_their_labels(tmp_path: Path) -> None:
    experiment = toys.toy(select_on="public", data={"public": 40})
    result = run(experiment, tmp_path / "run", toys.blobs())
    settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
    sites = prepare(settings, toys.blobs()).sites
    assert sites.public is not None
    model = load_model(result, round="best")
    right = correct_by_example(lambda x: model.network(x), sites.public, sites.inputs)
    assert float(right.double().mean()) == result.summary["best_round_score"]


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

    settings = resolve(experiment.with_values({"data.name": "blobs"}, "test"))
    sites = prepare(settings, toys.blobs()).sites
    examples = sites.public if on == "public" else held_out_examples(settings, sites)
    assert examples is not None
    logits = load_model(result, round="best")(examples.values).detach().double()
    loss = torch.nn.functional.cross_entropy(logits, examples.labels)
    assert float(loss) == pytest.approx(min(losses), rel=1e-6)


def test_a_loss_reaches_its_target_from_above(tmp_path: Path) -> None:
    experiment = toys.stopping_early(rank_by="log_loss", stop={"target": 0.8})
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert "target" in result.summary["stopped_because"]
    assert scores(result)[-1] <= 0.8 < min(scores(result)[:-1])


def test_on_the_test_set_the_metric_is_that_of_the_round(tmp_path: Path) -> None:
    experiment = toys.toy(rank_by="auc", select_on="test")
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert scores(result) == [event["auc"] for event in result.history]
    assert result.summary["best_round_score"] == max(event["auc"] for event in result.history)


def test_models_of_clients_own_are_compared_by_rank_by(tmp_path: Path) -> None:
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
    experiment = toys.stopping_early(method)
    here = run(experiment, tmp_path / "here", toys.blobs())
    flower = experiment.with_values({"engine": "flower"}, "test")
    folder = stopped(flower, tmp_path / "flower", 3)
    there = resume(folder, toys.blobs())
    assert scores(there) == scores(here)
    for key in ("best_round", "best_round_score", "stopped_in_round", "stopped_because"):
        assert there.summary[key] == here.summary[key]
    client = 2 if method == "ditto" else None
    one, other = (load_model(result, client, round="best") for result in (here, there))
    assert one.about["round"] == other.about["round"] == here.summary["best_round"]
    assert torch.equal(one(one.noise(5)), other(one.noise(5)))


def test_a_journal_that_compares_rounds_on_unknown_data_is_named(tmp_path: Path) -> None:
    run(toys.toy(plan=HELD_OUT, select_on="held_out"), tmp_path / "run", toys.blobs())
    journal = tmp_path / "run/journal.jsonl"
    journal.write_text(journal.read_text().replace('"on":"held_out"', '"on":"elsewhere"'))
    with pytest.raises(CorruptFile, match=r"line 1.*selection\.on"):
        read_journal(journal)


@pytest.mark.parametrize(
    ("method", "more", "stage"),
    [
        ("fedavg", {"topology": {"clients": 4, "last": "ridge"}}, "ridge"),
        ("analytic", {"topology": {"clients": 4}}, "sums"),
    ],
)
def test_no_stage_may_use_the_examples_on_which_rounds_are_compared(
    method: str, more: dict[str, object], stage: str
) -> None:
    plan = {"train": {"epochs": 1, "validation": 0.2}}
    experiment = toys.toy(method, plan=plan, select_on="held_out", measure=(), **more)
    with pytest.raises(ConfigError, match=rf"plan\.{stage}\.validation = 0\.2"):
        prepare(resolve(experiment), toys.blobs())
    for apart in ({**plan, stage: {"validation": 0.2}}, {"epochs": 1, "validation": 0.2}):
        experiment = toys.toy(method, plan=apart, select_on="held_out", measure=(), **more)
        prepare(resolve(experiment), toys.blobs())
