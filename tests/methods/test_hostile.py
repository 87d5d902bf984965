"""Hostile clients planted in a simulation, and every method whose fold is a mean among them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from all_methods import METHODS, built, needs, network_for
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.aggregation import ROBUST
from fedstill.core.capabilities import Need, Permit
from fedstill.core.errors import ConfigError, Diverged, IncompatibleMethod
from fedstill.core.extensions import Engine
from fedstill.core.records import Payload, Reply
from fedstill.core.screen import Rules
from fedstill.core.trees import norm
from fedstill.running.extensions import hostile_clients, hostile_middleware
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from loops import Collecting, context_of, first_state, next_state, states_after
from run_bits import assert_same_bits, bits, stopped

MEANS = [name for name in METHODS if Permit.ROBUST_AGGREGATE in built(name).permits]
"""Methods whose fold is a mean, which a robust aggregate can replace."""

OTHER_FOLDS = [name for name in METHODS if name not in MEANS and hasattr(built(name), "suspected")]
"""Methods that could also be asked for a robust aggregate, and refuse it."""

COUNTING = ["ccvr", "fd", "fedproto", "fedtgp", "pfnm", "fedgen"]
"""Methods whose clients send label counts as weights."""

SHORT = {"epochs": 1, "batch": 20, "lr": 0.2}


def test_means_and_others_are_both_many() -> None:
    means = {"fedavg", "fedntd", "scaffold", "feddyn", "feddc", "fedrep", "fedavg_once"}
    assert means <= set(MEANS)
    other_folds = {"fednova", "fedcurv", "feddf", "fedbe", "fedgen", "ccvr", "pfnm"}
    assert other_folds <= set(OTHER_FOLDS)


def ready(name: str, **fields: object) -> Prepared:
    """Two rounds of a method, or one among peers, all of whose six clients take part."""
    suited = toys.suited(name)
    topology = {**suited.pop("topology", {}), "clients": 6}
    values = {**suited, "rounds": min(2, suited["rounds"]), "plan": SHORT}
    if needs(name, Need.SLIM):
        values |= network_for(name)
    toy = toys.toy({"name": name, **fields}, topology=topology, measure=(), **values)
    return prepare(resolve(toy), toys.blobs())


# Clients that send wrong numbers.


class LyingEngine:
    """An engine of whose clients the last one lies."""

    smallest_stage = 1
    """With fewer clients, nobody lies."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.commit = engine.commit

    def run(self, *arguments) -> list[Reply]:  # type: ignore[no-untyped-def]
        replies = self.engine.run(*arguments)
        if len(replies) < self.smallest_stage:
            return replies
        return [*replies[:-1], replace(replies[-1], content=self.lie(replies[-1].content))]

    def lie(self, content: Payload) -> Payload:
        """What the last client sends instead."""
        raise NotImplementedError


class Exaggerating(LyingEngine):
    """The last client sends a million times its model."""

    smallest_stage = 3

    def lie(self, content: Payload) -> Payload:
        lies = {
            group: million_times(content[group])
            for group in ("params", "shared", "change")
            if group in content
        }
        return Payload({**content, **lies})


def million_times(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Real numbers times a million; counters stay."""
    larger = dict(entries)
    for name, value in entries.items():
        if value.is_floating_point():
            larger[name] = value * 1e6
    return larger


class Miscounting(LyingEngine):
    """The last client sends one number wherever it counts its examples."""

    def __init__(self, engine: Engine, number: int) -> None:
        super().__init__(engine)
        self.number = number
        self.lies = 0

    def lie(self, content: Payload) -> Payload:
        counts = {
            group: torch.full_like(value, self.number)
            for group, value in content.items()
            if isinstance(value, Tensor) and value.dtype == torch.int64
        }
        self.lies += bool(counts)
        return Payload({**content, **counts})


@pytest.mark.parametrize("number", [-1, 10**8, 2**62, -(2**63)])
@pytest.mark.parametrize("name", COUNTING)
def test_label_counts_that_contradict_the_number_of_examples_are_refused(
    name: str, number: int
) -> None:
    """Counts are weights: a client with a few examples would outweigh all others."""
    prepared = ready(name)
    engine = Miscounting(prepared.engine(), number)
    recorder = Collecting()

    states_after(context_of(prepared, engine, recorder), prepared.settings.rounds)

    refused = [refusal for result in recorder.results for refusal in result.refused]
    assert len(refused) == engine.lies > 0
    assert all("examples" in refusal.reason for refusal in refused)


def size_after_a_lie(name: str, aggregation: str) -> float:
    """The norm of the model after a round with one liar, with the screen left open, so that the
    fold alone stands against it. Infinite where the guard of the server's norm ends the run.
    """
    prepared = ready(name, aggregation=aggregation)
    engine = prepared.engine()
    state = first_state(context_of(prepared, engine, rules=Rules()))
    lying = context_of(prepared, Exaggerating(engine), rules=Rules(norm_limit=1e9))
    with suppress(Diverged):
        return norm(next_state(state, lying).params)
    return float("inf")


@pytest.mark.parametrize("name", MEANS)
def test_a_median_withstands_one_client_that_exaggerates(name: str) -> None:
    """It does carry the plain mean away."""
    assert size_after_a_lie(name, "median") < 1e3
    assert size_after_a_lie(name, "uniform") > 1e4


@pytest.mark.parametrize("name", OTHER_FOLDS)
def test_a_method_whose_fold_is_no_mean_refuses_robust_aggregation(name: str) -> None:
    with pytest.raises(IncompatibleMethod, match=f"method {name} cannot take aggregation = 'krum'"):
        ready(name, aggregation="krum")


def test_contradictory_settings_of_attacks_and_robust_means_are_refused() -> None:
    on_a_chain = toys.toy({"name": "fedavg", "aggregation": "median"}, topology="sequential")
    with pytest.raises(IncompatibleMethod, match="at least 3 clients"):
        prepare(resolve(on_a_chain), toys.blobs())
    with pytest.raises(ConfigError, match=r"clients\.attackers needs clients.attack"):
        prepare(resolve(toys.toy(clients={"attackers": 0.2})), toys.blobs())
    with pytest.raises(ConfigError, match=r"aggregation = 'mode'"):
        resolve(toys.toy({"name": "fedavg", "aggregation": "mode"}))
    with pytest.raises(ConfigError, match=r"suspected = 0.5"):
        resolve(toys.toy({"name": "fedavg", "suspected": 0.5}))


# Attacks of a config.

FIVE_CLIENTS = {"rounds": 1, "topology": {"clients": 5}, "measure": ()}


def attacked(kind: str) -> Experiment:
    """A round of FedAvg with five clients, of which one is hostile."""
    return toys.toy(
        {"name": "fedavg", "aggregation": "uniform"},
        clients={"attack": kind, "attackers": 0.2},
        **FIVE_CLIENTS,
    )


@pytest.mark.parametrize(("kind", "factor"), [("sign_flip", -1.0), ("scaled", 10.0)])
def test_a_hostile_client_sends_its_change_times_a_factor(kind: str, factor: float) -> None:
    """The other clients send what they would send without it."""
    honest = prepare(resolve(toys.toy("fedavg", **FIVE_CLIENTS)), toys.blobs())
    settings = resolve(attacked(kind))
    (hostile_client,) = hostile_clients(settings)
    (make_hostile,) = hostile_middleware(settings)
    hostile_engine = make_hostile(prepare(settings, toys.blobs()).engine())
    method = honest.settings.method
    stage = honest.settings.schedule(1, honest.world)[0]
    start = method.initial_state(honest.world).params
    payloads = {client: Payload(params=start) for client in stage.clients}

    arguments = (method.work(stage), stage, payloads, honest.world.seed)
    honest_replies = honest.engine().run(*arguments)
    replies = hostile_engine.run(*arguments)

    for honest_reply, reply in zip(honest_replies, replies, strict=True):
        for name, value in start.items():
            expected = honest_reply.content.params[name]
            if reply.client == hostile_client:
                expected = value + factor * (expected - value)
            torch.testing.assert_close(reply.content.params[name], expected, rtol=1e-5, atol=1e-6)


def test_flipped_labels_are_seen_by_the_hostile_client_alone() -> None:
    """The data themselves stay."""
    settings = resolve(attacked("label_flip"))
    (hostile_client,) = hostile_clients(settings)
    hostile = prepare(settings, toys.blobs())
    honest = prepare(resolve(toys.toy(**FIVE_CLIENTS)), toys.blobs())
    stage = settings.schedule(1, hostile.world)[0]

    for client in range(5):
        expected = honest.sites.view(client, stage).data.labels
        if client == hostile_client:
            expected = toys.CLASSES - 1 - expected
        assert torch.equal(hostile.sites.view(client, stage).data.labels, expected)
    assert torch.equal(hostile.sites.train.labels, honest.sites.train.labels)


@pytest.mark.parametrize("kind", ["sign_flip", "label_flip"])
def test_it_resumes_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    changes = {"rounds": 2, "method.aggregation": "trimmed_mean"}
    experiment = attacked(kind).with_values(changes, "test")
    run(experiment, tmp_path / "uninterrupted", data=toys.blobs())

    stopped(experiment, tmp_path / "resumed", stages=1)
    resume(tmp_path / "resumed", data=toys.blobs())

    assert_same_bits(bits(tmp_path / "resumed"), bits(tmp_path / "uninterrupted"))


def final_accuracies(folder: Path) -> list[float]:
    """The accuracy of each class after the last round."""
    events = read_journal(folder / "journal.jsonl")
    return [event["class_accuracy"] for event in events if event["event"] == "round"][-1]


@needs_flower
@pytest.mark.parametrize("aggregation", sorted(ROBUST))
def test_over_flower_it_is_the_same(aggregation: str, tmp_path: Path) -> None:
    experiment = attacked("scaled").with_values({"method.aggregation": aggregation}, "test")

    run(experiment, tmp_path / "default", data=toys.blobs())
    over_flower = experiment.with_values({"engine": "flower"}, "test")
    run(over_flower, tmp_path / "flower", data=toys.blobs())

    assert final_accuracies(tmp_path / "flower") == final_accuracies(tmp_path / "default")


@needs_flower
def test_over_flower_the_counts_of_flipped_labels_are_accepted(tmp_path: Path) -> None:
    changes = {
        "engine": "flower",
        "plan.validation": 0.2,
        "measure": ["local", "personal", "private_public"],
    }

    run(attacked("label_flip").with_values(changes, "test"), tmp_path / "run", data=toys.blobs())

    events = read_journal(tmp_path / "run/journal.jsonl")
    reports = [event for event in events if event["event"] == "client"]
    assert len(reports) == 5
    assert not any("refused" in event for event in reports)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_a_client_with_flipped_labels_reports_flipped_counts_also_with_held_out_examples(
    validation: float,
) -> None:
    toy = toys.toy(
        "fedavg",
        topology={"clients": 6},
        plan={"epochs": 1, "validation": validation},
        clients={"attack": "label_flip", "attackers": 0.5},
    )
    prepared = prepare(resolve(toy), toys.blobs())
    stage = prepared.settings.schedule(1, prepared.world)[0]
    sites = prepared.sites
    assert sites.flipped

    for client in range(6):
        labels = sites.train.labels[sites.positions(client)]
        counts = torch.bincount(labels, minlength=toys.CLASSES)
        if client in sites.flipped:
            counts = counts.flip(0)
        assert torch.equal(sites.view(client, stage).counts, counts)
