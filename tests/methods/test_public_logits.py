"""What holds of methods that exchange logits: labels unread, the notebook's temperatures, the odd
client left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from all_methods import METHODS, needs
from plain import drive, ready_for
from torch import Tensor

import toys
from fedstill.cli.explain import run_estimate
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, IncompatibleMethod, TooFewReplies
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Examples, Payload, Reply, Stage, State
from fedstill.core.registry import method
from fedstill.core.trees import same_bits
from fedstill.data.client_split import ClientSplit
from fedstill.methods.hiper_fedkd import HiPerFedKD
from fedstill.methods.public_logits import Distil, TrainThenPredict
from fedstill.running.compatibility import check_run
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

READS_PUBLIC_LABELS = {"qkt_var_e", "fedgkd_vote"}
"""In a validation and in a vote, and they say so."""

READS_NO_PUBLIC_LABELS = [
    name for name in METHODS if needs(name, Need.PUBLIC_DATA) and name not in READS_PUBLIC_LABELS
]
HIPER = [name for name in METHODS if name.startswith("hiper_")]

FOUR_CLIENTS = {"data": {"public": toys.PUBLIC}, "topology": {"clients": 4}}


def federation(method: object, **changes: object) -> Prepared:
    """Four clients with public data."""
    return ready_for(method, **{**FOUR_CLIENTS, **changes})


# Labels of public data.


def relabelled(ready: Prepared, labels: Tensor) -> Prepared:
    """The run with other labels of the public data."""
    public = Examples(ready.sites.public.values, labels)
    return replace(ready, sites=replace(ready.sites, public=public))


def final_tensors(ready: Prepared) -> dict[str, Tensor]:
    """The server's state and the clients' models after a run, by name."""
    ours = drive(ready)
    tensors = {f"server {name}": value for name, value in ours.params.items()}
    for group, value in ours.final.extra.items():
        if isinstance(value, Mapping):
            tensors |= {f"{group} {name}": entry for name, entry in value.items()}
    for client in range(4):
        if ours.remembered(client):
            model = ours.personal_model(client)
            tensors |= {f"client {client} {name}": value for name, value in model.items()}
    return tensors


def run_with_topology(name: str, **topology: object) -> Prepared:
    """A short run of a method."""
    values = {**toys.suited(name), "topology": {"clients": 4, **topology}, "plan": {"epochs": 1}}
    return federation(name, **values)


def topology_without_pretraining(name: str) -> dict[str, object]:
    """FedMD's pre-training is left out."""
    if name == "fedmd":
        return {"first": ""}
    return {}


@pytest.mark.parametrize("name", READS_NO_PUBLIC_LABELS)
def test_labels_of_public_data_are_never_read_but_in_fedmds_pretraining(name: str) -> None:
    ready = run_with_topology(name, **topology_without_pretraining(name))
    labels = ready.sites.public.labels

    expected = final_tensors(ready)

    assert same_bits(final_tensors(relabelled(ready, labels.flip(0))), expected)
    without_labels = relabelled(ready, torch.full_like(labels, -1))
    assert same_bits(final_tensors(without_labels), expected)
    if name == "fedmd":
        ready = run_with_topology(name, first="pretrain")
        with_other_labels = relabelled(ready, labels.flip(0))
        assert not same_bits(final_tensors(with_other_labels), final_tensors(ready))


def test_fedmds_pretraining_is_refused_on_public_data_without_labels() -> None:
    """Without pre-training it is accepted."""
    ready = prepare(resolve(toys.toy("fedmd", **FOUR_CLIENTS)), toys.blobs())
    without_labels = relabelled(ready, torch.full_like(ready.sites.public.labels, -1))

    with pytest.raises(IncompatibleMethod, match=r"'pretrain' of method fedmd .* topology.first"):
        check_run(without_labels.settings, without_labels.world, without_labels.sites)

    toy = toys.toy("fedmd", **{**FOUR_CLIENTS, "topology": {"clients": 4, "first": ""}})
    check_run(resolve(toy), without_labels.world, without_labels.sites)


# HiPer's temperatures.


@pytest.mark.parametrize(
    ("fields", "printed"),
    [
        ({"temperatures": "linear"}, [0.2892, 0.3038, 0.3477, 0.3424]),
        ({}, [0.1159, 0.1212, 0.1386, 0.1364]),
    ],
    ids=["linear", "exponential"],
)
def test_the_method_gives_the_temperatures_of_the_notebook(
    fields: dict[str, str], printed: list[float]
) -> None:
    """Its split: 4,500 examples of each class, of which the last client takes what rounding
    leaves.
    """
    shares_by_class = np.random.RandomState(42).dirichlet(np.ones(4), size=10)
    counts = (4500 * shares_by_class).astype(np.int64)
    counts[:, 3] = 4500 - counts[:, :3].sum(1)
    state = State(params={}).next(labels=torch.from_numpy(counts.T.copy()))

    temperatures = [HiPerFedKD(**fields).temperature_of(state, client) for client in range(4)]

    assert temperatures == pytest.approx(printed, abs=1e-3)


def test_a_client_with_unknown_labels_has_the_highest_temperature_and_changes_no_other() -> None:
    method = HiPerFedKD()
    counts = torch.tensor([[9, 1, 0], [1, 9, 0], [0, 0, 0]])
    of_three = State(params={}).next(labels=counts)
    of_two = State(params={}).next(labels=counts[:2])

    assert method.temperature_of(of_three, 2) == method.high
    for client in (0, 1):
        expected = method.temperature_of(of_two, client)
        assert method.temperature_of(of_three, client) == expected


def test_temperatures_lie_between_low_and_high() -> None:
    toy = toys.toy({"name": "hiper_fedkd", "low": 0.9, "high": 0.5}, data={"public": 5})
    with pytest.raises(ConfigError, match=r"method\.low = 0\.9 .*method\.high = 0\.5"):
        resolve(toy)


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
    distillation = Distil(method).terms(step, {"target": target})["distil"]

    (gradient,) = torch.autograd.grad((local + distillation).sum(), z)
    for values in (local, distillation, gradient):
        assert values.isfinite().all()


# Stages in which not all clients answer.


def first_payloads(ready: Prepared, stage: Stage) -> dict[int, Payload]:
    """What the clients are sent in the first stage."""
    method = ready.settings.method
    state = method.initial_state(ready.world)
    payloads = {}
    for client in stage.clients:
        payloads[client] = method.payload_for_client(state, client, stage, ready.world)
    return payloads


def first_replies(ready: Prepared) -> list[Reply]:
    """What the clients reply in the first stage."""
    stage = ready.settings.schedule(1, ready.world)[0]
    work = ready.settings.method.work(stage)
    return ready.engine().run(work, stage, first_payloads(ready, stage), 7)


def test_a_client_without_examples_fails_by_name() -> None:
    ready = federation("hiper_fedkd")
    parts = [*ready.sites.split[:3], ready.sites.split[3][:0]]
    split = ClientSplit.of_parts(parts)

    replies = first_replies(replace(ready, sites=replace(ready.sites, split=split)))

    assert [bool(reply.failure) for reply in replies] == [False, False, False, True]
    assert "client 3" in replies[3].failure


def test_the_target_is_the_mean_over_clients_that_replied() -> None:
    ready = federation("hiper_baseline")
    method = ready.settings.method
    stage = ready.settings.schedule(1, ready.world)[0]
    replies = first_replies(ready)[1:]

    state = method.aggregate(method.initial_state(ready.world), replies, stage, ready.world)

    logits = torch.stack([reply.content.tensor("logits") for reply in replies])
    torch.testing.assert_close(state.extra.tensor("target"), logits.mean(0))


@method("toy_hiper_failing")
@dataclass(frozen=True)
class Failing(HiPerFedKD):
    """HiPer-FedKD with clients that fail in one stage of round 1."""

    stage: str = "local"
    failing_clients: tuple[int, ...] = (0,)

    def work(self, stage: Stage) -> ClientWork:
        work = super().work(stage)
        if (stage.round, stage.name) == (1, self.stage):
            return failing(work, self.failing_clients)
        return work


def failing(work: ClientWork, clients: tuple[int, ...]) -> ClientWork:
    """The same work, in which these clients fail at the end."""

    class FailingAtTheEnd(type(work)):  # type: ignore[misc]
        def end(self, params, start, result, view, world):  # type: ignore[no-untyped-def]
            if view.client in clients:
                raise RuntimeError("this site is gone")
            return super().end(params, start, result, view, world)

    return FailingAtTheEnd(work.method)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", ["local", "distil"])
def test_a_client_that_fails_is_left_out_and_named_and_catches_up(
    stage: str, tmp_path: Path
) -> None:
    """It acts in all other stages."""
    toy = toys.toy(
        {"name": "toy_hiper_failing", "stage": stage},
        rounds=2,
        clients=toys.TOLERANT,
        **FOUR_CLIENTS,
    )

    run(toy, tmp_path / "run", data=toys.blobs())

    events = read_journal(tmp_path / "run" / "journal.jsonl")
    client_events = [event for event in events if event["event"] == "client" and event["round"]]
    (failure,) = [event for event in client_events if "refused" in event]
    assert (failure["round"], failure["name"], failure["client"]) == (1, stage, 0)
    assert "this site is gone" in failure["refused"]
    stages = set()
    for event in client_events:
        if event["client"] == 0 and "refused" not in event:
            stages.add((event["round"], event["name"]))
    all_stages = {(1, "local"), (1, "distil"), (2, "local"), (2, "distil")}
    assert stages == all_stages - {(1, stage)}


def test_a_run_ends_when_most_clients_fail_a_stage(tmp_path: Path) -> None:
    toy = toys.toy(
        {"name": "toy_hiper_failing", "failing_clients": (0, 1, 2)},
        clients=toys.TOLERANT,
        **FOUR_CLIENTS,
    )
    with pytest.raises(TooFewReplies, match="stage 'local': 1 of 4 clients"):
        run(toy, tmp_path / "run", data=toys.blobs())


# What is sent.


def test_server_and_clients_distil_by_the_same_work() -> None:
    ready = federation("hiper_fedkd")
    stages = {stage.name: stage for stage in ready.settings.schedule(1, ready.world)}
    assert stages["teach_server"].clients == (SERVER,)

    server_work = ready.settings.method.work(stages["teach_server"])

    assert server_work == ready.settings.method.work(stages["distil"])


def test_a_round_sends_public_logits_and_no_weights() -> None:
    """To a client also its temperature. The server's own work is not sent."""
    ready = federation("hiper_fedkd")
    method = ready.settings.method
    world = ready.world
    local, _, distil = ready.settings.schedule(1, world)
    logits_bytes = toys.PUBLIC * toys.CLASSES * 8  # tests train in float64
    state = drive(ready).states[1]

    reply = method.expected_reply(0, local, world)
    local_payload = method.payload_for_client(state, 0, local, world)
    distil_payload = method.payload_for_client(state, 0, distil, world)
    estimate = run_estimate(ready).work

    assert reply.nbytes == logits_bytes
    assert local_payload.nbytes == 8
    assert distil_payload.nbytes == logits_bytes
    assert estimate.bytes_up == 4 * logits_bytes
    assert estimate.bytes_down == 4 * (logits_bytes + 8)


def test_bytes_of_a_round_are_those_between_clients_and_server(tmp_path: Path) -> None:
    """The first round also has a census of labels."""
    toy = toys.toy("hiper_fedkd", rounds=1, **FOUR_CLIENTS)

    (event,) = run(toy, tmp_path / "run", data=toys.blobs()).history

    logits_bytes = 4 * toys.PUBLIC * toys.CLASSES * 4
    census_bytes = 4 * 8 * toys.CLASSES
    temperature_bytes = 4 * 8
    assert event["bytes_up"] == logits_bytes + census_bytes
    assert event["bytes_down"] == logits_bytes + temperature_bytes
