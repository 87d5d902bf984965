"""Runs on the loopback grid whose sites have data of their own: the simulation's bits, for every
kind of method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from fedstill.core.records import Stage, Tensors
from fedstill.core.registry import register
from fedstill.engines.client_measures import AtClient, ClientMeasures
from fedstill.flower.site_data import data_digests
from fedstill.flower.site_settings import Site
from fedstill.measures.base import Measure
from fedstill.metrics.classification import METRICS, Predictions, RunMetrics
from fedstill.metrics.score_histograms import as_histograms, auc_error, concatenated
from fedstill.privacy import site_guards
from fedstill.running.client_evaluation import SiteTests
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from flowers import at_sites, needs_flower, own_sites, site_grid
from journals import journal_events, refusals
from run_bits import model_bytes

pytestmark = needs_flower

CLIENTS = 3
QUERIES = {"classes": {"0": [3, 4], "1": [4], "2": [0, 3]}}


def experiment(method: str, **changes: Any) -> Experiment:
    """Three clients that act in one round, with the data and queries that the method needs."""
    values: dict[str, Any] = {
        **toys.suited(method),
        "rounds": 1,
        "topology": {"clients": CLIENTS},
        "data": {},
    }
    if values.get("query"):
        values["query"] = QUERIES
    return toys.toy(method, **{**values, **changes})


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


def run_at_sites(
    experiment: Experiment, sites: Sequence[Site], out: Path, **options: Any
) -> Result:
    """Run the experiment with these sites on a loopback grid."""
    return run(at_sites(experiment), out, toys.blobs(), grid=site_grid(sites), **options)


def interrupt(event: Any) -> None:
    """End the run after its first round."""
    raise KeyboardInterrupt


def simulated(experiment: Experiment) -> Prepared:
    """The experiment on blobs, prepared as a simulation."""
    return prepare(resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs())


def assert_label_counts_stay(events: Sequence[Mapping[str, Any]]) -> None:
    """No event has numbers that a site must not send."""
    assert not any("label_counts" in event for event in events)
    assert not any("correct_by_class" in event for event in events)


@pytest.mark.parametrize("name", RUNS)
def test_sites_with_their_own_data_give_the_bits_of_the_simulation(
    name: str, tmp_path: Path
) -> None:
    experiment = RUNS[name]
    run(replace(experiment, engine="serial"), tmp_path / "serial", toys.blobs())
    sites = own_sites(simulated(experiment), tmp_path / "sites")

    run_at_sites(experiment, sites, tmp_path / "run")

    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "serial")
    events = journal_events(tmp_path / "run", event="client")
    expected = journal_events(tmp_path / "serial", event="client")
    assert not refusals(tmp_path / "run")
    assert [event["name"] for event in events] == [event["name"] for event in expected]
    assert [event["client"] for event in events] == [event["client"] for event in expected]
    assert [event.get("loss") for event in events] == [event.get("loss") for event in expected]
    assert_label_counts_stay(events)


def is_repeated(failure: str) -> bool:
    """Whether a site refused a second run with secure sums on its data."""
    return "repeat_sums" in failure


class CountedBytes:
    """Stands in for ``secrets``: returns a constant byte, and counts the requests."""

    def __init__(self, byte: bytes) -> None:
        self.byte = byte
        self.requests = 0

    def token_bytes(self, size: int) -> bytes:
        self.requests += 1
        return self.byte * size


@pytest.mark.uses("privacy")
@pytest.mark.parametrize("name", SUMMED)
def test_under_secure_sums_a_sites_training_depends_on_a_number_that_it_keeps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number gives other bits, and a resume with the same number the same bits."""
    experiment = SUMMED[name]
    run(replace(experiment, engine="serial"), tmp_path / "serial", toys.blobs())
    numbers = CountedBytes(b"\1")
    monkeypatch.setattr(site_guards, "secrets", numbers)

    sites = own_sites(simulated(experiment), tmp_path / "sites")
    run_at_sites(experiment, sites, tmp_path / "first")
    assert numbers.requests == CLIENTS, "one number for each site, whatever the number of rounds"
    assert model_bytes(tmp_path / "first") != model_bytes(tmp_path / "serial")

    sites = own_sites(simulated(experiment), tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        run_at_sites(experiment, sites, tmp_path / "stopped", on_round=interrupt)
    resume(tmp_path / "stopped", toys.blobs(), grid=site_grid(sites))
    assert model_bytes(tmp_path / "stopped") == model_bytes(tmp_path / "first")

    monkeypatch.setattr(site_guards, "secrets", CountedBytes(b"\2"))
    sites = own_sites(simulated(experiment), tmp_path / "others")
    run_at_sites(experiment, sites, tmp_path / "other")
    assert model_bytes(tmp_path / "other") != model_bytes(tmp_path / "first")


@pytest.mark.uses("privacy")
def test_a_site_is_in_the_secure_sums_of_one_run_on_its_data_unless_its_operator_allows_more(
    tmp_path: Path,
) -> None:
    """The attack: the same run twice, once without a client, whose model is the difference."""
    experiment = SUMMED["secure sums"]
    sites = own_sites(simulated(experiment), tmp_path / "sites")
    run_at_sites(experiment, sites, tmp_path / "first")

    second_runs = {
        "same": experiment,
        "another seed": replace(experiment, seed=experiment.seed + 1),
        "another number of rounds": replace(experiment, rounds=1),
    }
    for name, second_run in second_runs.items():
        with pytest.raises(TooFewReplies) as raised:
            run_at_sites(second_run, sites, tmp_path / name)
        assert is_repeated(str(raised.value))
    assert json.loads((sites[0].memory / site_guards.RUNS_WITH_SUMS).read_text())

    allowing = [replace(site, repeat_sums=True) for site in sites]
    run_at_sites(experiment, allowing, tmp_path / "third")
    assert model_bytes(tmp_path / "third") != model_bytes(tmp_path / "first"), (
        "other random numbers"
    )

    other_split = simulated(replace(experiment, seed=experiment.seed + 1))
    other_data = [
        replace(other_site, memory=site.memory)
        for other_site, site in zip(own_sites(other_split, tmp_path / "new"), sites, strict=True)
    ]
    run_at_sites(experiment, other_data, tmp_path / "fourth")


@pytest.mark.uses("privacy")
def test_data_that_another_config_reads_in_another_way_are_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another config may select other columns, or list the classes in another order."""
    experiment = SUMMED["secure sums"]
    sites = own_sites(simulated(experiment), tmp_path / "sites")
    run_at_sites(experiment, sites, tmp_path / "first")

    monkeypatch.setattr(site_guards, "examples_digest", lambda examples: "another selection")

    with pytest.raises(TooFewReplies) as raised:
        run_at_sites(experiment, sites, tmp_path / "second")
    assert is_repeated(str(raised.value))


def test_a_sites_data_are_identified_by_their_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    (data / "train.csv").write_text("age,label\n50,1\n")
    (data / "more" / "test.csv").write_text("age,label\n60,0\n")
    site = Site(0, tmp_path / "memory", data=str(data))
    original = data_digests(site)
    assert len(original) == 1
    assert data_digests(replace(site, data=str(data / "train.csv"))) != original

    folder = data.rename(tmp_path / "elsewhere")
    (folder / ".cache").write_text("a hidden file")
    site = replace(site, data=str(folder))
    assert data_digests(site) == original, "neither the place nor hidden files matter"

    (folder / "train.csv").rename(folder / "training.csv")
    renamed = data_digests(site)
    (folder / "training.csv").write_text("age,label\n50,0\n")
    relabelled = data_digests(site)
    assert len({*original, *renamed, *relabelled}) == 3

    digits = data_digests(replace(site, data="digits"))
    mnist = data_digests(replace(site, data="mnist"))
    assert len({*digits, *mnist}) == 2
    for code in ("", "mylab.data:load", str(tmp_path / "mine.py:load")):
        assert data_digests(replace(site, data=code)) == []


def test_folders_of_tasks_have_a_digest_each(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for task in ("task1", "task2", "task3"):
        (data / task).mkdir(parents=True)
    (data / "task1" / "train.csv").write_text("age,label\n50,1\n")
    site = Site(0, tmp_path / "memory", data=str(data), tasks="folders")

    first_task = data_digests(site)
    (data / "task2" / "train.csv").write_text("age,label\n51,1\n")
    two_tasks = data_digests(site)

    assert len(first_task) == 1, "empty folders are not data that runs have in common"
    assert two_tasks[:1] == first_task
    assert len(set(two_tasks)) == 2


FOUR = replace(
    experiment("fedavg", measure=()),
    privacy={"secure_sum": True},
    topology={"clients": 4},
    clients={**toys.TOLERANT, "quorum": 0.5},
    rounds=1,
)


def summed_model(sites: Sequence[Site], out: Path) -> Tensors:
    """The model of a run with secure sums over those of the four sites that take part."""
    run(at_sites(FOUR), out, toys.blobs(), grid=site_grid(sites))
    return safetensors.torch.load_file(out / "model.safetensors")


def distance(first: Tensors, second: Tensors) -> float:
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
    simulation = simulated(FOUR)
    sites = own_sites(simulation, tmp_path / "sites")
    if protection != "one run only":
        sites = [replace(site, repeat_sums=True) for site in sites]
    *other_sites, target = sites

    sum_of_all = summed_model(sites, tmp_path / "all")
    (reply,) = target.memory.rglob("*.reply")
    secret_model = decode(reply.read_bytes())["up params"]
    if protection == "one run only":
        with pytest.raises(TooFewReplies) as raised:
            summed_model(other_sites, tmp_path / "others")
        assert is_repeated(str(raised.value))
        return

    sum_of_others = summed_model(other_sites, tmp_path / "others")
    examples = [simulation.sites.positions(client).numel() for client in range(len(sites))]
    target_examples = examples[target.client]
    total = sum(examples)
    difference = {
        name: (total * value - (total - target_examples) * sum_of_others[name]) / target_examples
        for name, value in sum_of_all.items()
    }
    error = distance(difference, secret_model)
    if protection == "none":
        assert error < 1e-5, "the attack works where nothing prevents it"
    else:
        assert error > 1e-2, error


@pytest.mark.uses("querying")
def test_a_run_with_a_public_set_needs_a_copy_at_every_site(tmp_path: Path) -> None:
    experiment = RUNS["queries, scored on public labels"]
    sites = own_sites(simulated(experiment), tmp_path / "sites", public=False)

    with pytest.raises(TooFewReplies, match="public"):
        run_at_sites(experiment, sites, tmp_path / "run")


@pytest.mark.uses("querying")
def test_the_server_knows_the_classes_of_a_query_and_no_number(tmp_path: Path) -> None:
    experiment = RUNS["queries that sites raise"]
    sites = own_sites(simulated(experiment), tmp_path / "sites")

    run_at_sites(experiment, sites, tmp_path / "run")

    fits = journal_events(tmp_path / "run", name="fit")
    assert len(fits) == CLIENTS
    queries = {event["client"]: event["query"] for event in fits if event["query"]}
    assert queries
    for event in fits:
        reasons = event["why_asked"]
        assert reasons.keys() >= {str(label) for label in event["query"]}
        assert all(reason == {"lack": None} for reason in reasons.values())
    assert any(event["why_asked"] for event in fits)

    refinements = journal_events(tmp_path / "run", name="refine")
    assert queries == {event["client"]: event["query"] for event in refinements if "query" in event}


def test_a_method_without_a_fit_cannot_have_sites_raise_queries(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology\.first"):
        run_at_sites(experiment("fedavg", query={"draw": "single"}), [], tmp_path / "run")


@register("measure", "toy_spread")
class Spread(Measure):
    """A number from a site's own data that may leave it."""

    at_sites = True
    gives = ("spread",)

    def at_client(self, client: AtClient) -> dict[str, float]:
        return {"spread": float(client.view.logits(client.end).std())}


@pytest.mark.uses("querying")
def test_real_sites_take_the_measures_that_say_so_and_no_others(tmp_path: Path) -> None:
    experiment = replace(RUNS["queries"], measure=("local", "toy_spread"), measure_every=1)
    sites = own_sites(simulated(experiment), tmp_path / "sites")

    run_at_sites(experiment, sites, tmp_path / "run")

    events = [event for event in journal_events(tmp_path / "run", event="client") if event["round"]]
    assert events
    assert all("spread" in event and "site_accuracy" in event for event in events)
    assert_label_counts_stay(events)


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_rounds_are_compared_on_what_sites_hold_out_as_in_a_simulation(
    method: str, tmp_path: Path
) -> None:
    """A global model is tested by all sites in a stage of its own; no site sends an example."""
    experiment = toys.stopping_early(
        method, topology={"clients": CLIENTS}, stop={"patience": 2}, measure=(), data={}
    )
    simulation = run(experiment, tmp_path / "simulation", toys.blobs())
    sites = own_sites(simulated(experiment), tmp_path)

    result = run_at_sites(experiment, sites, tmp_path / "run")

    assert selection_scores(result) == selection_scores(simulation)
    for key in ("best_round", "best_round_score", "stopped_in_round", "selected_on"):
        assert result.summary[key] == simulation.summary[key]
    tests = [event for event in journal_events(tmp_path / "run") if "held_out_accuracy" in event]
    assert {event["name"] for event in tests} == {HELD_OUT_STAGES[method]}
    assert len(tests) == CLIENTS * len(result.history)


HELD_OUT_STAGES = {"scaffold": "held_out_test", "ditto": "personal"}
"""By method, the stage in which sites test a model on what they hold out."""


def selection_scores(result: Result) -> list[float]:
    """The score of each round, by which rounds are compared."""
    return [event["selection_score"] for event in result.history]


@pytest.mark.uses("privacy")
def test_with_secure_sums_sites_test_nothing_on_what_they_hold_out(tmp_path: Path) -> None:
    experiment = toys.stopping_early(
        "moon", topology={"clients": CLIENTS}, measure=(), data={}, privacy={"secure_sum": True}
    )
    sites = own_sites(simulated(experiment), tmp_path)

    with pytest.raises(ConfigError, match="secure sums"):
        run_at_sites(experiment, sites, tmp_path / "run")


@pytest.mark.parametrize(("metric", "tolerance"), [("auc", 0.01), ("log_loss", 0.01), ("f1", 0.0)])
def test_rounds_are_compared_by_histograms_that_sites_send(
    metric: str, tolerance: float, tmp_path: Path
) -> None:
    experiment = toys.stopping_early(
        topology={"clients": CLIENTS}, rounds=2, measure=(), data={}, rank_by=metric
    )
    simulation = run(experiment, tmp_path / "simulation", toys.blobs())
    sites = own_sites(simulated(experiment), tmp_path)

    result = run_at_sites(experiment, sites, tmp_path / "run")

    expected = selection_scores(simulation)
    assert selection_scores(result) == pytest.approx(expected, abs=tolerance)
    assert result.summary["selected_by"] == metric


def test_a_histogram_that_a_site_makes_up_is_refused() -> None:
    report = {"held_out_examples": 3, "held_out_histograms": {"confusion": [[3]]}}
    assert "held_out_histograms" in ClientMeasures().refuses(report, Stage(1, 0, "x", (0,)), 5)


TEST_STAGES = {"scaffold": "site_test", "ditto": "personal"}
"""By method, the stage in which sites test a model on their test sets."""


@pytest.mark.parametrize("method", TEST_STAGES)
def test_sites_send_histograms_from_which_the_server_computes_metrics(
    method: str, tmp_path: Path
) -> None:
    """All sites have the run's test set here, so theirs are the metrics of the simulation."""
    metrics = ("auc", "recall", "log_loss", "brier", "ece", "confusion")
    experiment = toys.toy(
        method, metrics=metrics, topology={"clients": CLIENTS}, measure=(), data={}, rounds=2
    )
    simulation = run(experiment, tmp_path / "simulation", toys.blobs())
    sites = own_sites(simulated(experiment), tmp_path)

    result = run_at_sites(experiment, sites, tmp_path / "run")

    for event, expected in zip(result.history, simulation.history, strict=True):
        assert event["auc"] == expected["auc"], "the server has a test set"
        assert event["own_test_auc_error"] < 0.05
        assert event["own_test_by_client"].keys() == {"0", "1", "2"}
        if method == "scaffold":
            bounds = {"auc": event["own_test_auc_error"], "log_loss": 0.01, "recall": 0.0}
            for name, bound in bounds.items():
                values = event[f"own_test_{name}_by_client"].values()
                assert max(abs(value - expected[name]) for value in values) <= bound
            assert event["own_test_confusions"]["1"] == expected["confusion"]
            assert event["own_test_accuracy"] == pytest.approx(expected["accuracy"])

    journal = journal_events(tmp_path / "run")
    tests = [event for event in journal if "site_scores" in event]
    assert {event["name"] for event in tests} == {TEST_STAGES[method]}
    assert len(tests) == 2 * CLIENTS
    assert not any("site_metrics" in event for event in journal)


def test_metrics_of_the_server_model_are_on_the_examples_of_all_sites() -> None:
    tests = SiteTests(RunMetrics(("auc", "recall"), 1), frozenset())
    for client, predictions in enumerate(site_predictions()):
        event = {
            "event": "client",
            "name": "site_test",
            "client": client,
            "site_scores": as_histograms(predictions),
            "site_accuracy": 0.5,
            "site_test_examples": 30,
        }
        tests.on_event(event)
    unevaluated = RoundResult(1, (), {"accuracy": None})

    metrics = tests.round_fields(unevaluated, {"accuracy": None})

    exact = concatenated(site_predictions())
    assert metrics["recall"] == METRICS["recall"].value(exact)
    error = (auc_error(exact) or 0) + 0.01
    assert abs(metrics["auc"] - METRICS["auc"].formula(exact)) <= error

    tests.on_event({"event": "round", "round": 1})
    assert tests.round_fields(unevaluated, {"accuracy": None}) == {}, "a round has its tests only"


def site_predictions() -> list[Predictions]:
    """The predictions of two sites; the second has one class."""
    logits = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    classes = logits.argmax(1)
    labels = (torch.arange(60) % 3 == 0).long()
    labels[40:] = 0
    return [
        Predictions.of(logits[:40], classes[:40], labels[:40], 1),
        Predictions.of(logits[40:], classes[40:], labels[40:], 1),
    ]


def test_a_site_that_refuses_a_metric_takes_part_in_no_run_with_it(tmp_path: Path) -> None:
    experiment = toys.toy(metrics=("auc",), topology={"clients": CLIENTS}, measure=(), data={})
    sites = own_sites(simulated(experiment), tmp_path)
    refusing = [replace(site, refuse=("auc",)) for site in sites]

    with pytest.raises(TooFewReplies, match="'auc'"):
        run_at_sites(experiment, refusing, tmp_path / "run")


@pytest.mark.uses("privacy")
def test_with_secure_sums_no_site_sends_histograms(tmp_path: Path) -> None:
    experiment = toys.toy(
        "moon",
        metrics=("auc",),
        topology={"clients": CLIENTS},
        measure=(),
        data={},
        privacy={"secure_sum": True},
    )

    run_at_sites(experiment, own_sites(simulated(experiment), tmp_path), tmp_path / "run")

    assert not any("site_scores" in event for event in journal_events(tmp_path / "run"))
