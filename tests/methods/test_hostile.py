"""Hostile clients planted in a simulation, and every method whose fold is a mean among them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import plain
import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.aggregation import ROBUST
from fedstill.core.capabilities import Need, Permit
from fedstill.core.errors import ConfigError, Diverged, IncompatibleMethod
from fedstill.core.method import Method
from fedstill.core.records import Payload, Reply
from fedstill.core.screen import Rules
from fedstill.core.trees import norm
from fedstill.running.extensions import hostile_clients, hostile_middleware
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from loops import Collecting, context_of, first_state, next_state, states_after
from run_bits import assert_same_bits, bits, stopped


def built(name: str) -> Method:
    return registry.lookup("method", name).build()


NAMES = [n for n in registry.names("method") if not n.startswith("toy_")]
MEANS = [n for n in NAMES if Permit.ROBUST_AGGREGATE in built(n).permits]
OTHERS = [n for n in NAMES if n not in MEANS and hasattr(built(n), "suspected")]


def test_means_and_others_are_both_many() -> None:
    assert {"fedavg", "fedntd", "scaffold", "feddyn", "feddc", "fedrep", "fedavg_once"} <= set(
        MEANS
    )
    assert {"fednova", "fedcurv", "feddf", "fedbe", "fedgen", "ccvr", "pfnm"} <= set(OTHERS)


def ready(name: str, **method: object):
    changes = toys.suited(name)
    topology = {**changes.pop("topology", {}), "clients": 6}
    values = {"rounds": 2, "plan": {"epochs": 1, "batch": 20, "lr": 0.2}, **changes}
    asked = toys.toy({"name": name, **method}, topology=topology, measure=(), **values)
    if Need.SLIM in built(name).requires():
        asked = asked.with_values({"model": plain.toy_slim.__name__}, "test")
    return prepare(resolve(asked), toys.blobs())


class Lies:
    """An engine of whose clients the last sends a million times what it should."""

    def __init__(self, engine) -> None:
        self.engine, self.commit = engine, engine.commit

    def run(self, *asked) -> list[Reply]:
        came = self.engine.run(*asked)
        if len(came) < 3:
            return came
        up = {
            g: {k: v * 1e6 if v.is_floating_point() else v for k, v in t.items()}
            if g in WHOLE
            else t
            for g, t in came[-1].content.items()
        }
        return [
            *came[:-1],
            Reply(
                came[-1].client, Payload(up), came[-1].examples, {}, came[-1].round, came[-1].stage
            ),
        ]


WHOLE = ("params", "shared", "change")


class Miscounts(Lies):
    """An engine of whose clients the last sends one number wherever it counts its examples."""

    def __init__(self, engine, number: int) -> None:
        super().__init__(engine)
        self.number = number
        self.lied = 0

    def run(self, *asked) -> list[Reply]:
        came = self.engine.run(*asked)
        liar = came[-1]
        counted = {
            name: torch.full_like(group, self.number)
            for name, group in liar.content.items()
            if isinstance(group, torch.Tensor) and group.dtype == torch.int64
        }
        self.lied += bool(counted)
        lie = replace(liar, content=Payload({**liar.content, **counted}))
        return [*came[:-1], lie]


COUNTING = ["ccvr", "fd", "fedproto", "fedtgp", "pfnm", "fedgen"]


@pytest.mark.parametrize("number", [-1, 10**8, 2**62, -(2**63)])
@pytest.mark.parametrize("name", COUNTING)
def test_nobody_counts_more_examples_than_it_claims(name: str, number: int) -> None:
    """Counts are weights: a client with a few examples would outweigh all others."""
    run = ready(name)
    miscounting = Miscounts(run.engine(), number)
    seen = Collecting()
    context = context_of(run, miscounting, seen)
    states_after(context, run.settings.rounds)
    refused = [refusal for result in seen.results for refusal in result.refused]
    assert len(refused) == miscounting.lied > 0
    assert all("examples" in refusal.reason for refusal in refused)


@pytest.mark.parametrize("name", MEANS)
def test_one_liar_does_not_carry_any_such_method_away(name: str) -> None:
    """The screen is left open, so that the fold alone stands against it."""
    sizes = {"uniform": float("inf")}  # where the guard of the server's own norm stops it
    for how in ("median", "uniform"):
        run = ready(name, aggregation=how)
        engine = run.engine()
        state = first_state(context_of(run, engine, rules=Rules()))
        lying = context_of(run, Lies(engine), rules=Rules(norm_limit=1e9))
        with suppress(Diverged):
            sizes[how] = norm(next_state(state, lying).params)
    assert sizes["median"] < 1e3 < 1e4 < sizes["uniform"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_method_whose_fold_is_no_mean_refuses_at_the_start(name: str) -> None:
    with pytest.raises(IncompatibleMethod, match=f"method {name} cannot take aggregation = 'krum'"):
        ready(name, aggregation="krum")


def test_what_has_no_meaning_is_refused_in_a_line() -> None:
    with pytest.raises(IncompatibleMethod, match="at least 3 clients"):
        prepare(
            resolve(toys.toy({"name": "fedavg", "aggregation": "median"}, topology="sequential")),
            toys.blobs(),
        )
    with pytest.raises(ConfigError, match=r"clients\.attackers needs clients.attack"):
        prepare(resolve(toys.toy(clients={"attackers": 0.2})), toys.blobs())
    with pytest.raises(ConfigError, match=r"aggregation = 'mode'"):
        resolve(toys.toy({"name": "fedavg", "aggregation": "mode"}))
    with pytest.raises(ConfigError, match=r"suspected = 0.5"):
        resolve(toys.toy({"name": "fedavg", "suspected": 0.5}))


def attacked(kind: str, **changes: object):
    return toys.toy(
        {"name": "fedavg", "aggregation": "uniform"},
        rounds=1,
        topology={"clients": 5},
        clients={"attack": kind, "attackers": 0.2},
        measure=(),
        **changes,
    )


@pytest.mark.parametrize(("kind", "factor"), [("sign_flip", -1.0), ("scaled", 10.0)])
def test_a_hostile_client_sends_its_change_times_a_factor(kind: str, factor: float) -> None:
    """So the mean of five is that of the others and of its own change times the factor."""
    alone = prepare(
        resolve(toys.toy("fedavg", rounds=1, topology={"clients": 5}, measure=())), toys.blobs()
    )
    stages = alone.settings.schedule(1, alone.world)
    start = alone.settings.method.initial_state(alone.world)
    payloads = {c: Payload(params=start.params) for c in stages[0].clients}
    honest = alone.engine().run(
        alone.settings.method.work(stages[0]), stages[0], payloads, alone.world.seed
    )
    settings = resolve(attacked(kind))
    (liar,) = hostile_clients(settings)
    (make_hostile,) = hostile_middleware(settings)
    engine = make_hostile(prepare(settings, toys.blobs()).engine())
    came = engine.run(alone.settings.method.work(stages[0]), stages[0], payloads, alone.world.seed)
    for one, other in zip(honest, came, strict=True):
        for k, start_k in start.params.items():
            want = start_k + (factor if one.client == liar else 1.0) * (
                one.content.params[k] - start_k
            )
            torch.testing.assert_close(other.content.params[k], want, rtol=1e-5, atol=1e-6)


def test_flipped_labels_are_seen_by_the_hostile_client_alone() -> None:
    settings = resolve(attacked("label_flip"))
    (liar,) = hostile_clients(settings)
    bad = prepare(settings, toys.blobs())
    good = prepare(resolve(toys.toy(rounds=1, topology={"clients": 5}, measure=())), toys.blobs())
    stage = settings.schedule(1, bad.world)[0]
    for client in range(5):
        false, true = (
            bad.sites.view(client, stage).data.labels,
            good.sites.view(client, stage).data.labels,
        )
        assert torch.equal(false, toys.CLASSES - 1 - true if client == liar else true)
    assert torch.equal(bad.sites.train.labels, good.sites.train.labels)


@pytest.mark.parametrize("kind", ["sign_flip", "label_flip"])
def test_it_resumes_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    asked = attacked(kind).with_values({"rounds": 2, "method.aggregation": "trimmed_mean"}, "test")
    run(asked, tmp_path / "whole", data=toys.blobs())
    stopped(asked, tmp_path / "cut", stages=1)
    resume(tmp_path / "cut", data=toys.blobs())
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))


@needs_flower
@pytest.mark.parametrize("how", sorted(ROBUST))
def test_over_flower_it_is_the_same(how: str, tmp_path: Path) -> None:
    asked = attacked("scaled").with_values({"method.aggregation": how}, "test")
    run(asked, tmp_path / "here", data=toys.blobs())
    run(asked.with_values({"engine": "flower"}, "test"), tmp_path / "there", data=toys.blobs())
    here, there = (read_journal(tmp_path / n / "journal.jsonl") for n in ("here", "there"))
    last = [
        [e for e in events if e["event"] == "round"][-1]["class_accuracy"]
        for events in (here, there)
    ]
    assert last[0] == last[1]


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
def test_who_turns_labels_round_counts_them_so_whether_or_not_some_are_held_out(
    validation: float,
) -> None:
    plan = {"epochs": 1, "validation": validation}
    clients = {"attack": "label_flip", "attackers": 0.5}
    given = prepare(
        resolve(toys.toy("fedavg", topology={"clients": 6}, plan=plan, clients=clients)),
        toys.blobs(),
    )
    stage = given.settings.schedule(1, given.world)[0]
    flipped = sorted(given.sites.flipped)
    assert flipped
    for client in range(6):
        counts = torch.bincount(
            given.sites.train.labels[given.sites.positions(client)], minlength=toys.CLASSES
        )
        assert (
            given.sites.view(client, stage).counts.tolist()
            == (counts.flip(0) if client in flipped else counts).tolist()
        )
