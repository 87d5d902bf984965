"""Runs on the loopback grid whose sites have data of their own: the simulation's bits, for every
kind of method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.codec import decode
from fedstill.core.errors import ConfigError, TooFewReplies
from fedstill.core.extensions import RoundResult
from fedstill.core.records import Stage
from fedstill.core.registry import register
from fedstill.engines.client_measures import AtClient, ClientMeasures
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.site import StageExecutor, client_app
from fedstill.flower.site_data import data_digests
from fedstill.flower.site_settings import Site
from fedstill.measures.base import Measure
from fedstill.metrics.classification import METRICS, Predictions, RunMetrics
from fedstill.metrics.score_histograms import as_histograms, auc_error, concatenated
from fedstill.privacy import site_guards
from fedstill.running.client_evaluation import SiteTests
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from flowers import needs_flower, own_sites

pytestmark = needs_flower

CLIENTS = 3
QUERIES = {"classes": {"0": [3, 4], "1": [4], "2": [0, 3]}}


def experiment(method: str, **changes: Any) -> Experiment:
    suited: dict[str, Any] = {**toys.suited(method), "rounds": 1}
    if suited.get("query"):
        suited["query"] = QUERIES
    return toys.toy(method, **{**suited, "topology": {"clients": CLIENTS}, "data": {}, **changes})


PLAN = {"epochs": 3, "batch": 10, "lr": 0.1}
WITH_PUBLIC = {"data": {"public": toys.PUBLIC}}
RUNS: dict[str, Experiment] = {
    "public logits": experiment("hiper_fedkd", **WITH_PUBLIC),
    "public logits and labels": experiment("fedmd", **WITH_PUBLIC),
    "public noise": experiment("feddf", data={"public": 40, "public_from": "noise"}),
    "public images without labels": experiment(
        "hiper_fedkd", data={"public": toys.PUBLIC, "public_labels": False}
    ),
    "fit first, beside a method that has no such stage": experiment(
        "fedavg", topology={"clients": CLIENTS, "first": "fit"}
    ),
    "label counts": experiment("toy_logits", **WITH_PUBLIC),
    "a chain": experiment("fedseq"),
}
if toys.has("querying"):
    RUNS |= {
        "queries": experiment("qkt"),
        "queries, beside public data whose labels are hidden": experiment(
            "qkt",
            **WITH_PUBLIC,
            plan={**PLAN, "transfer": {"keep": "best", "validation": 0.1}},
        ),
        "queries, scored on public labels": experiment("qkt_var_e", **WITH_PUBLIC),
        "queries that sites raise": experiment(
            "qkt", query={"draw": "single", "fewer_than": 12}, plan=PLAN
        ),
        "queries that sites raise again, with new data": replace(
            toys.asking_again(), topology={"clients": CLIENTS}, measure=()
        ),
    }
SUMMED: dict[str, Experiment] = {}
if toys.has("privacy"):
    SUMMED = {
        "secure sums": experiment("moon", privacy={"secure_sum": True}, measure=(), rounds=2),
        "secure sums, beside label counts": experiment(
            "fedlc", privacy={"secure_sum": True}, measure=(), rounds=2
        ),
    }


def grid_of(there: Sequence[Site], clients: Iterable[int] = range(CLIENTS)) -> LoopbackGrid:
    executors = {site.client: StageExecutor(site, shows_reasons=True) for site in there}
    app = client_app(
        lambda c: (c.node_config["partition-id"], executors[c.node_config["partition-id"]]), 1 << 30
    )
    return LoopbackGrid(app, list(clients))


def over(
    experiment: Experiment,
    there: Sequence[Site],
    out: Path,
    overwrite: bool = False,
    on_round: Callable[[Any], None] | None = None,
) -> None:
    """The experiment with these sites on a loopback grid."""
    flower = {"deadline": 30, "poll": 1, "data": "sites", "federation": "/federation"}
    # Tests compare the events with those of a simulation, which has no stage of tests.
    flower["test_every"] = int(bool(experiment.metrics))
    run(
        replace(experiment, engine="flower", flower=flower),
        out,
        toys.blobs(),
        grid=grid_of(there),
        overwrite=overwrite,
        on_round=on_round,
    )


def stop(event: Any) -> None:
    raise KeyboardInterrupt


def simulated(experiment: Experiment) -> Prepared:
    return prepare(resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs())


@pytest.mark.parametrize("what", RUNS)
def test_sites_with_their_own_data_give_the_bits_of_the_simulation(
    what: str, tmp_path: Path
) -> None:
    run(replace(RUNS[what], engine="serial"), tmp_path / "serial", toys.blobs())
    over(RUNS[what], own_sites(simulated(RUNS[what]), tmp_path / "sites"), tmp_path / "run")
    events = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"]
    assert not [e for e in events if "refused" in e]
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        tmp_path / "serial/model.safetensors"
    ).read_bytes()
    trained = [e for e in read_journal(tmp_path / "serial/journal.jsonl") if e["event"] == "client"]
    assert [(e["name"], e["client"], e.get("loss")) for e in events] == [
        (e["name"], e["client"], e.get("loss")) for e in trained
    ]
    assert not any("label_counts" in e or "correct_by_class" in e for e in events), (
        "they stay at the site"
    )


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def is_repeated(failure: str) -> bool:
    return "repeat_sums" in failure


@pytest.mark.uses("privacy")
@pytest.mark.parametrize("what", SUMMED)
def test_under_secure_sums_a_sites_training_depends_on_a_number_that_it_keeps(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number gives other bits, and a resume with the same number the same bits."""
    asked = SUMMED[what]
    run(replace(asked, engine="serial"), tmp_path / "serial", toys.blobs())
    numbers: list[int] = []

    def drawn(size: int) -> bytes:
        numbers.append(size)
        return bytes([seed[0]]) * size

    seed = [1]
    monkeypatch.setattr(site_guards, "secrets", SimpleNamespace(token_bytes=drawn))
    over(asked, own_sites(simulated(asked), tmp_path / "sites"), tmp_path / "whole")
    assert len(numbers) == CLIENTS, "one number for each site, whatever the number of rounds"
    assert model(tmp_path / "whole") != model(tmp_path / "serial")

    there = own_sites(simulated(asked), tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        over(asked, there, tmp_path / "stopped", on_round=stop)
    resume(tmp_path / "stopped", toys.blobs(), grid=grid_of(there))
    assert model(tmp_path / "stopped") == model(tmp_path / "whole")

    seed[0] = 2
    over(asked, own_sites(simulated(asked), tmp_path / "others"), tmp_path / "other")
    assert model(tmp_path / "other") != model(tmp_path / "whole")


@pytest.mark.uses("privacy")
def test_a_site_is_in_the_secure_sums_of_one_run_on_its_data_unless_its_operator_allows_more(
    tmp_path: Path,
) -> None:
    """The attack: the same run twice, once without a client, whose model is the difference."""
    asked = SUMMED["secure sums"]
    there = own_sites(simulated(asked), tmp_path / "sites")
    over(asked, there, tmp_path / "first")
    for changes in ({}, {"seed": 7}, {"rounds": 1}):
        with pytest.raises(TooFewReplies) as raised:
            over(replace(asked, **changes), there, tmp_path / f"second{len(changes)}", True)
        assert is_repeated(str(raised.value))
    assert json.loads((there[0].memory / site_guards.RUNS_WITH_SUMS).read_text())

    allowed = [replace(site, repeat_sums=True) for site in there]
    over(asked, allowed, tmp_path / "third")
    assert model(tmp_path / "third") != model(tmp_path / "first"), "other random numbers"

    other = simulated(replace(asked, seed=asked.seed + 1))
    changed = own_sites(other, tmp_path / "new")
    moved = [replace(site, memory=old.memory) for site, old in zip(changed, there, strict=True)]
    over(asked, moved, tmp_path / "fourth")


@pytest.mark.uses("privacy")
def test_data_that_another_config_reads_in_another_way_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another config may select other columns, or list the classes in another order."""
    asked = SUMMED["secure sums"]
    there = own_sites(simulated(asked), tmp_path / "sites")
    over(asked, there, tmp_path / "first")
    monkeypatch.setattr(site_guards, "examples_digest", lambda examples: "another selection")
    with pytest.raises(TooFewReplies) as raised:
        over(asked, there, tmp_path / "second")
    assert is_repeated(str(raised.value))


def test_a_sites_data_are_identified_by_their_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    (data / "train.csv").write_text("age,label\n50,1\n")
    (data / "more" / "test.csv").write_text("age,label\n60,0\n")
    site = Site(0, tmp_path / "memory", data=str(data))
    first = data_digests(site)
    assert len(first) == 1
    assert data_digests(replace(site, data=str(data / "train.csv"))) != first

    moved = data.rename(tmp_path / "elsewhere")
    (moved / ".cache").write_text("a hidden file")
    site = replace(site, data=str(moved))
    assert data_digests(site) == first
    (moved / "train.csv").rename(moved / "training.csv")
    renamed = data_digests(site)
    (moved / "training.csv").write_text("age,label\n50,0\n")
    assert len({*first, *renamed, *data_digests(site)}) == 3

    names = [replace(site, data=name) for name in ("digits", "mnist")]
    assert len({*data_digests(names[0]), *data_digests(names[1])}) == 2
    for code in ("", "mylab.data:load", str(tmp_path / "mine.py:load")):
        assert data_digests(replace(site, data=code)) == []


def test_folders_of_tasks_have_a_digest_each(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for task in ("task1", "task2", "task3"):
        (data / task).mkdir(parents=True)
    (data / "task1" / "train.csv").write_text("age,label\n50,1\n")
    site = Site(0, tmp_path / "memory", data=str(data), tasks="folders")
    first = data_digests(site)
    assert len(first) == 1, "empty folders are not data that runs have in common"
    (data / "task2" / "train.csv").write_text("age,label\n51,1\n")
    later = data_digests(site)
    assert later[:1] == first
    assert len(set(later)) == 2


FOUR = replace(
    experiment("fedavg", measure=()),
    privacy={"secure_sum": True},
    topology={"clients": 4},
    clients={**toys.TOLERANT, "quorum": 0.5},
    rounds=1,
)


def summed_model(there: Sequence[Site], out: Path) -> dict[str, torch.Tensor]:
    """The model of a run with secure sums over those of four sites that are there."""
    flower = {"deadline": 30, "poll": 1, "data": "sites", "federation": "/federation"}
    asked = replace(FOUR, engine="flower", flower={**flower, "test_every": 0})
    run(asked, out, toys.blobs(), grid=grid_of(there, [site.client for site in there]))
    return safetensors.torch.load_file(out / "model.safetensors")


def distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two models in one number."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.uses("privacy")
@pytest.mark.parametrize("protection", ["none", "another number", "one run only"])
def test_two_honest_runs_of_which_one_lacks_a_site_do_not_reveal_its_model(
    protection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server subtracts the sums. Without the sites' two protections it has the model."""
    if protection == "none":
        constant = SimpleNamespace(token_bytes=lambda size: b"n" * size)
        monkeypatch.setattr(site_guards, "secrets", constant)
    there = own_sites(simulated(FOUR), tmp_path / "sites")
    if protection != "one run only":
        there = [replace(site, repeat_sums=True) for site in there]
    examples = [
        int(simulated(FOUR).sites.positions(client).numel()) for client in range(len(there))
    ]
    *others, target = there

    everybody = summed_model(there, tmp_path / "everybody")
    (reply,) = target.memory.rglob("*.reply")
    secret = decode(reply.read_bytes())["up params"]
    if protection == "one run only":
        with pytest.raises(TooFewReplies) as raised:
            summed_model(others, tmp_path / "others")
        assert is_repeated(str(raised.value))
        return

    remaining = summed_model(others, tmp_path / "others")
    total = sum(examples)
    without = total - examples[target.client]
    difference = {
        name: (total * value - without * remaining[name]) / examples[target.client]
        for name, value in everybody.items()
    }
    error = distance(difference, secret)
    if protection == "none":
        assert error < 1e-5, "the attack works where nothing prevents it"
    else:
        assert error > 1e-2, error


@pytest.mark.uses("querying")
def test_a_run_with_a_public_set_needs_a_copy_at_every_site(tmp_path: Path) -> None:
    what = RUNS["queries, scored on public labels"]
    with pytest.raises(TooFewReplies, match="public"):
        over(what, own_sites(simulated(what), tmp_path / "sites", public=False), tmp_path / "run")


@pytest.mark.uses("querying")
def test_the_server_knows_of_a_query_what_its_site_says(tmp_path: Path) -> None:
    what = RUNS["queries that sites raise"]
    over(what, own_sites(simulated(what), tmp_path / "sites"), tmp_path / "run")
    events = read_journal(tmp_path / "run/journal.jsonl")
    asked = {e["client"]: e["query"] for e in events if e.get("name") == "fit"}
    assert any(asked.values())
    whys = [e["why_asked"] for e in events if e.get("name") == "fit"]
    assert [
        set(why) >= {str(c) for c in q} for why, q in zip(whys, asked.values(), strict=True)
    ] == [True] * CLIENTS
    assert {json.dumps(w) for why in whys for w in why.values()} == {'{"lack": null}'}, (
        "no number leaves a site"
    )
    assert {
        e["client"]: e["query"] for e in events if e.get("name") == "refine" and "query" in e
    } == {c: query for c, query in asked.items() if query}


def test_a_method_without_a_fit_cannot_have_sites_raise_queries(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology\.first"):
        over(experiment("fedavg", query={"draw": "single"}), [], tmp_path / "run")


@register("measure", "toy_spread")
class Spread(Measure):
    """A number from a site's own data that may leave it."""

    at_sites = True
    gives = ("spread",)

    def at_client(self, seen: AtClient) -> dict[str, float]:
        return {"spread": float(seen.view.logits(seen.end).std())}


@pytest.mark.uses("querying")
def test_real_sites_take_the_measures_that_say_so_and_no_others(tmp_path: Path) -> None:
    what = replace(RUNS["queries"], measure=("local", "toy_spread"), measure_every=1)
    over(what, own_sites(simulated(what), tmp_path / "sites"), tmp_path / "run")
    events = [
        e
        for e in read_journal(tmp_path / "run/journal.jsonl")
        if e["event"] == "client" and e["round"]
    ]
    assert events
    assert all("spread" in e and "site_accuracy" in e for e in events)
    assert not any("label_counts" in e or "correct_by_class" in e for e in events), (
        "they stay at the site"
    )


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_rounds_are_compared_on_what_sites_hold_out_as_in_a_simulation(
    method: str, tmp_path: Path
) -> None:
    """A global model is tested by all sites in a stage of its own; no site sends an example."""
    asked = toys.stopping_early(
        method, topology={"clients": CLIENTS}, stop={"patience": 2}, measure=(), data={}
    )
    whole = run(asked, tmp_path / "whole", toys.blobs())
    there = own_sites(simulated(asked), tmp_path)
    over(asked, there, tmp_path / "there")
    result = Result.of(tmp_path / "there")
    scores, expected = (
        [event["selection_score"] for event in events] for events in (result.history, whole.history)
    )
    assert scores == expected
    for key in ("best_round", "best_round_score", "stopped_in_round", "selected_on"):
        assert result.summary[key] == whole.summary[key]
    tested = [e for e in read_journal(tmp_path / "there/journal.jsonl") if "held_out_accuracy" in e]
    stage = "personal" if method == "ditto" else "held_out_test"
    assert {event["name"] for event in tested} == {stage}
    assert len(tested) == CLIENTS * len(result.history)


@pytest.mark.uses("privacy")
def test_with_secure_sums_sites_test_nothing_on_what_they_hold_out(tmp_path: Path) -> None:
    asked = toys.stopping_early(
        "moon", topology={"clients": CLIENTS}, measure=(), data={}, privacy={"secure_sum": True}
    )
    with pytest.raises(ConfigError, match="secure sums"):
        over(asked, own_sites(simulated(asked), tmp_path), tmp_path / "there")


@pytest.mark.parametrize("by", ["auc", "log_loss", "f1"])
def test_rounds_are_compared_by_histograms_that_sites_send(by: str, tmp_path: Path) -> None:
    asked = toys.stopping_early(
        topology={"clients": CLIENTS}, rounds=4, measure=(), data={}, rank_by=by
    )
    whole = run(asked, tmp_path / "whole", toys.blobs())
    over(asked, own_sites(simulated(asked), tmp_path), tmp_path / "there")
    result = Result.of(tmp_path / "there")
    scores, expected = (
        [event["selection_score"] for event in events] for events in (result.history, whole.history)
    )
    assert scores == pytest.approx(expected, abs=0.0 if by == "f1" else 0.01)
    assert result.summary["selected_by"] == by


def test_a_histogram_that_a_site_makes_up_is_refused() -> None:
    report = {"held_out_examples": 3, "held_out_histograms": {"confusion": [[3]]}}
    assert "held_out_histograms" in ClientMeasures().refuses(report, Stage(1, 0, "x", (0,)), 5)


NAMES = ("auc", "recall", "log_loss", "brier", "ece", "confusion")


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_sites_send_histograms_from_which_the_server_computes_metrics(
    method: str, tmp_path: Path
) -> None:
    """All sites have the run's test set here, so theirs are the metrics of the simulation."""
    asked = toys.toy(
        method, metrics=NAMES, topology={"clients": CLIENTS}, measure=(), data={}, rounds=2
    )
    whole = run(asked, tmp_path / "whole", toys.blobs())
    over(asked, own_sites(simulated(asked), tmp_path), tmp_path / "there")
    there = Result.of(tmp_path / "there")
    for event, expected in zip(there.history, whole.history, strict=True):
        assert event["auc"] == expected["auc"], "the server has a test set"
        assert event["own_test_auc_error"] < 0.05
        assert event["own_test_by_client"].keys() == {"0", "1", "2"}
        if method == "scaffold":
            most = {"auc": event["own_test_auc_error"], "log_loss": 0.01, "recall": 0.0}
            for name, bound in most.items():
                values = event[f"own_test_{name}_by_client"].values()
                assert max(abs(value - expected[name]) for value in values) <= bound
            assert event["own_test_confusions"]["1"] == expected["confusion"]
            assert event["own_test_accuracy"] == pytest.approx(expected["accuracy"])

    journal = read_journal(tmp_path / "there/journal.jsonl")
    tested = [event for event in journal if "site_scores" in event]
    stage = "personal" if method == "ditto" else "site_test"
    assert {event["name"] for event in tested} == {stage}
    assert len(tested) == 2 * CLIENTS
    assert not any("site_metrics" in event for event in journal)


def test_metrics_of_the_server_model_are_on_the_examples_of_all_sites() -> None:
    events = [
        {
            "event": "client",
            "name": "site_test",
            "client": client,
            "site_scores": as_histograms(predictions),
            "site_accuracy": 0.5,
            "site_test_examples": 30,
        }
        for client, predictions in enumerate(site_predictions())
    ]
    tests = SiteTests(RunMetrics(("auc", "recall"), 1), frozenset())
    for event in events:
        tests.on_event(event)
    nothing = RoundResult(1, (), {"accuracy": None})
    first = tests.round_fields(nothing, {"accuracy": None})
    exact = concatenated(site_predictions())
    assert first["recall"] == METRICS["recall"].value(exact)
    assert abs(first["auc"] - METRICS["auc"].formula(exact)) <= (auc_error(exact) or 0) + 0.01
    tests.on_event({"event": "round", "round": 1})
    assert tests.round_fields(nothing, {"accuracy": None}) == {}, "they are of the round before"


def site_predictions() -> list[Predictions]:
    """The predictions of two sites; the second has one class."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 2, generator=draw)
    labels = (torch.arange(60) % 3 == 0).long()
    labels[40:] = 0
    parts = (slice(0, 40), slice(40, 60))
    return [Predictions.of(logits[p], logits[p].argmax(1), labels[p], 1) for p in parts]


def test_a_site_that_refuses_a_metric_takes_part_in_no_run_with_it(tmp_path: Path) -> None:
    asked = toys.toy(metrics=("auc",), topology={"clients": CLIENTS}, measure=(), data={})
    there = [replace(site, refuse=("auc",)) for site in own_sites(simulated(asked), tmp_path)]
    with pytest.raises(TooFewReplies, match="'auc'"):
        over(asked, there, tmp_path / "there")


@pytest.mark.uses("privacy")
def test_with_secure_sums_no_site_sends_histograms(tmp_path: Path) -> None:
    asked = toys.toy(
        "moon",
        metrics=("auc",),
        topology={"clients": CLIENTS},
        measure=(),
        data={},
        privacy={"secure_sum": True},
    )
    over(asked, own_sites(simulated(asked), tmp_path), tmp_path / "there")
    journal = read_journal(tmp_path / "there/journal.jsonl")
    assert not any("site_scores" in event for event in journal)
