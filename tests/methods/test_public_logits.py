"""What holds of methods that exchange logits: labels unread, the notebook's temperatures, the odd
client left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain import drive, ready_for
from torch import Tensor

import toys
from fedstill.cli.explain import run_estimate
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, IncompatibleMethod, TooFewReplies
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Examples, State
from fedstill.core.registry import method
from fedstill.data.client_split import ClientSplit
from fedstill.methods.hiper_fedkd import HiPerFedKD
from fedstill.methods.public_logits import Distil, TrainThenPredict
from fedstill.running.compatibility import check_run
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

NAMES = [n for n in registry.names("method") if not n.startswith("toy_")]
PUBLIC = [n for n in NAMES if Need.PUBLIC_DATA in registry.lookup("method", n).build().requires()]
READ = {"qkt_var_e", "fedgkd_vote"}
"""They read labels in a validation and in a vote, and say so."""
HIPER = [n for n in NAMES if n.startswith("hiper_")]


def federation(name: object, **changes: object) -> Prepared:
    return ready_for(
        name, **{"data": {"public": toys.PUBLIC}, "topology": {"clients": 4}, **changes}
    )


def relabelled(ready: Prepared, labels: Tensor) -> Prepared:
    public = Examples(ready.sites.public.values, labels)
    return replace(ready, sites=replace(ready.sites, public=public))


def finals(ready: Prepared) -> dict[str, Tensor]:
    states, memory = drive(ready)
    out = {f"server {k}": v for k, v in states[-1].params.items()}
    for group, value in states[-1].extra.items():
        out |= {f"{group} {k}": v for k, v in value.items()} if isinstance(value, Mapping) else {}
    for c in range(4):
        if memory.load(c):
            out |= {f"client {c} {k}": v for k, v in memory.load(c).params.items()}
    return out


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in READ])
def test_labels_of_public_data_are_never_read_but_in_fedmds_pretraining(name: str) -> None:
    for first in ("pretrain", "") if name == "fedmd" else ("",):
        topology = {"clients": 4, "first": first} if first or name == "fedmd" else {"clients": 4}
        ready = federation(
            name, **{**toys.suited(name), "topology": topology, "plan": {"epochs": 1}}
        )
        there, labels = finals(ready), ready.sites.public.labels
        shuffled = finals(relabelled(ready, labels.flip(0)))
        same = all(torch.equal(there[k], shuffled[k]) for k in there)
        assert same == (first == ""), "only the pre-training reads them"
        if not first:
            missing = finals(relabelled(ready, torch.full_like(labels, -1)))
            assert all(torch.equal(there[k], missing[k]) for k in there)


def test_the_notebooks_temperatures_come_out_of_the_method() -> None:
    shares = np.random.RandomState(42).dirichlet(np.ones(4), size=10)  # a row a class
    cut = (4500 * shares).astype(np.int64)
    cut[:, 3] = 4500 - cut[:, :3].sum(1)  # the last client takes what rounding leaves
    counts = torch.from_numpy(cut.T.copy())
    state = State(params={}).next(labels=counts)
    for fields, printed in (
        ({"temperatures": "linear"}, [0.2892, 0.3038, 0.3477, 0.3424]),
        ({}, [0.1159, 0.1212, 0.1386, 0.1364]),
    ):
        found = [HiPerFedKD(**fields).temperature_of(state, c) for c in range(4)]
        assert found == pytest.approx(printed, abs=1e-3)


def test_a_client_whose_labels_nobody_knows_trains_like_the_others_and_counts_for_nobody() -> None:
    counts = torch.tensor([[9, 1, 0], [1, 9, 0], [0, 0, 0]])
    state, method = State(params={}).next(labels=counts), HiPerFedKD()
    without = State(params={}).next(labels=counts[:2])
    assert method.temperature_of(state, 2) == method.high
    assert [method.temperature_of(state, c) for c in (0, 1)] == [
        method.temperature_of(without, c) for c in (0, 1)
    ]


def test_a_client_without_examples_has_nothing_to_say() -> None:
    ready = federation("hiper_fedkd")
    parts = [*ready.sites.split[:3], ready.sites.split[3][:0]]
    empty = replace(ready, sites=replace(ready.sites, split=ClientSplit.of_parts(parts)))
    stage = empty.settings.schedule(1, empty.world)[0]
    state = empty.settings.method.initial_state(empty.world)
    payloads = {
        c: empty.settings.method.payload_for_client(state, c, stage, empty.world)
        for c in stage.clients
    }
    replies = empty.engine().run(empty.settings.method.work(stage), stage, payloads, 7)
    assert [bool(r.failure) for r in replies] == [False, False, False, True]
    assert "client 3" in replies[3].failure


@pytest.mark.parametrize("name", HIPER)
def test_training_stays_finite_where_logits_are_far_apart_and_temperatures_low(name: str) -> None:
    method = registry.lookup("method", name).build(temperature=0.01)
    z = 1e4 * torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 1.0], [0.0, 0.0, 0.0]])
    z.requires_grad_()
    target = method.sent_logits(z.detach().flip(0))
    step = SimpleNamespace(
        logits=lambda: z,
        y=torch.tensor([1, 0, 2]),
        index=torch.arange(3),
        weighted=lambda losses: losses,
    )
    local = TrainThenPredict(method).terms(step, {"temperature": 0.01})["ce"]
    distil = Distil(method).terms(step, {"target": target})["distil"]
    (slope,) = torch.autograd.grad((local + distil).sum(), z)
    assert local.isfinite().all()
    assert distil.isfinite().all()
    assert slope.isfinite().all()


def test_fedmds_pretraining_is_refused_on_public_data_without_labels() -> None:
    values = {"data": {"public": toys.PUBLIC}, "topology": {"clients": 4}}
    ready = prepare(resolve(toys.toy("fedmd", **values)), toys.blobs())
    blind = relabelled(ready, torch.full_like(ready.sites.public.labels, -1))
    with pytest.raises(IncompatibleMethod, match=r"'pretrain' of method fedmd .* topology.first"):
        check_run(blind.settings, blind.world, blind.sites)
    values["topology"] = {"clients": 4, "first": ""}
    check_run(resolve(toys.toy("fedmd", **values)), blind.world, blind.sites)


def test_temperatures_lie_between_low_and_high() -> None:
    with pytest.raises(ConfigError, match=r"method\.low = 0\.9 .*method\.high = 0\.5"):
        resolve(toys.toy({"name": "hiper_fedkd", "low": 0.9, "high": 0.5}, data={"public": 5}))


@method("toy_hiper_failing")
@dataclass(frozen=True)
class Failing(HiPerFedKD):
    """HiPer-FedKD with clients that fail in one stage of round 1."""

    where: str = "local"
    who: tuple[int, ...] = (0,)

    def work(self, stage):
        return FailingWork(
            super().work(stage), self.who if (stage.round, stage.name) == (1, self.where) else ()
        )


class FailingWork(ClientWork):
    def __init__(self, work: ClientWork, who: tuple[int, ...]) -> None:
        self.work, self.who = work, who

    def __getattribute__(self, name: str):
        if name in (
            "begin",
            "terms",
            "report",
            "adjust_gradients",
            "after_step",
            "validation_score",
            "trainable",
        ):
            return getattr(self.work, name)
        return super().__getattribute__(name)

    def end(self, params, start, result, view, world):
        if view.client in self.who:
            raise RuntimeError("this site is gone")
        return self.work.end(params, start, result, view, world)


@pytest.mark.parametrize("where", ["local", "distil"])
def test_a_client_that_fails_is_left_out_and_named_and_catches_up(where: str, tmp_path) -> None:
    whole = {
        "data": {"public": toys.PUBLIC},
        "topology": {"clients": 4},
        "rounds": 2,
        "clients": toys.TOLERANT,
    }
    result = run(
        toys.toy({"name": "toy_hiper_failing", "where": where}, **whole),
        tmp_path / "run",
        data=toys.blobs(),
    )
    from fedstill.running.journal import read_journal

    clients = [
        e
        for e in read_journal(result.directory / "journal.jsonl")
        if e["event"] == "client" and e["round"]
    ]
    failed = [e for e in clients if "refused" in e]
    assert [(e["round"], e["name"], e["client"]) for e in failed] == [(1, where, 0)]
    assert "this site is gone" in failed[0]["refused"]
    acted = {(e["round"], e["name"]) for e in clients if e["client"] == 0 and "refused" not in e}
    assert acted == {(r, n) for r in (1, 2) for n in ("local", "distil")} - {(1, where)}


def test_the_mean_is_of_those_who_answered() -> None:
    ready = federation({"name": "hiper_baseline"})
    method, stage = ready.settings.method, ready.settings.schedule(1, ready.world)[0]
    state = method.initial_state(ready.world)
    payloads = {c: method.payload_for_client(state, c, stage, ready.world) for c in stage.clients}
    replies = ready.engine().run(method.work(stage), stage, payloads, 7)[1:]
    target = method.aggregate(state, replies, stage, ready.world).extra.tensor("target")
    torch.testing.assert_close(target, sum(r.content.tensor("logits") for r in replies) / 3)


def test_a_stage_that_most_fail_ends_the_run_by_name(tmp_path) -> None:
    experiment = toys.toy(
        {"name": "toy_hiper_failing", "who": (0, 1, 2)},
        data={"public": toys.PUBLIC},
        topology={"clients": 4},
        clients=toys.TOLERANT,
    )
    with pytest.raises(TooFewReplies, match="stage 'local': 1 of 4 clients"):
        run(experiment, tmp_path / "run", data=toys.blobs())


def test_the_server_distils_by_the_clients_work() -> None:
    ready = federation("hiper_fedkd")
    stages = ready.settings.schedule(1, ready.world)
    teach, distil = (next(s for s in stages if s.name == n) for n in ("teach_server", "distil"))
    assert teach.clients == (SERVER,)
    assert ready.settings.method.work(teach) == ready.settings.method.work(distil)


def test_a_round_sends_public_logits_and_no_weights() -> None:
    ready = federation("hiper_fedkd")
    sent = toys.PUBLIC * toys.CLASSES * 8  # tests train in float64
    states, _ = drive(ready)
    method, (local, _, distil) = ready.settings.method, ready.settings.schedule(1, ready.world)
    assert method.expected_reply(0, local, ready.world).nbytes == sent
    assert method.payload_for_client(states[1], 0, distil, ready.world).nbytes == sent
    assert method.payload_for_client(states[1], 0, local, ready.world).nbytes == 8, "a temperature"
    sums = run_estimate(ready)
    assert (sums.work.bytes_up, sums.work.bytes_down) == (4 * sent, 4 * (sent + 8)), (
        "the server's own work is not sent"
    )


def test_bytes_of_a_round_are_those_between_clients_and_server(tmp_path) -> None:
    experiment = toys.toy(
        "hiper_fedkd", data={"public": toys.PUBLIC}, topology={"clients": 4}, rounds=1
    )
    (event,) = run(experiment, tmp_path / "run", data=toys.blobs()).history
    sent = 4 * toys.PUBLIC * toys.CLASSES * 4
    census = 4 * 8 * toys.CLASSES
    assert (event["bytes_up"], event["bytes_down"]) == (sent + census, sent + 4 * 8)
