"""The methods whose clients keep a part of their model, or a whole one, against a plain
implementation of each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain import PLAN, Federation, Params, ce, check, drive, ready_for
from torch import Tensor, nn

from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Payload, Reply
from fedstill.core.screen import Rules, screen
from fedstill.core.trees import same_bits

HEAD, BODY = ("head.weight", "head.bias"), ("body.1.weight", "body.1.bias")
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def train(
    fed: Federation,
    start: Params,
    round: int,
    client: int,
    names: tuple[str, ...] = (*BODY, *HEAD),
    stage: int = 0,
    epochs: int = int(PLAN["epochs"]),
    loss: Loss = ce,
) -> Params:
    """A client's model after training of some of its entries."""
    model, (x, y) = fed.net(start), fed.data(client)
    trained = [p for k, p in model.named_parameters() if k in names]
    sgd = torch.optim.SGD(
        trained,
        lr=fed.lr(round),
        momentum=PLAN["momentum"],
        weight_decay=PLAN["weight_decay"],
        foreach=False,
    )
    order = generator(seed_for(7, round, stage, client, "order"))
    for _ in range(epochs):
        for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
            model.zero_grad()
            loss(model, x[index], y[index]).backward()
            sgd.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def mean_of(models: list[Params], names: tuple[str, ...]) -> Params:
    return {k: sum(m[k] for m in models) / len(models) for k in names}


@pytest.mark.parametrize(("layers", "names"), [(0, ()), (1, HEAD), (2, (*BODY, *HEAD))])
def test_lg_fedavg(layers: int, names: tuple[str, ...]) -> None:
    ready = ready_for({"name": "lg_fedavg", "layers": layers}, rounds=3)
    fed = Federation(ready)
    server, own = fed.start, dict.fromkeys(range(6), fed.start)
    for round in (1, 2, 3):
        sent = {
            c: train(fed, {**own[c], **{k: server[k] for k in names}}, round, c)
            for c in fed.cohort(round)
        }
        own |= sent
        server = {**server, **mean_of(list(sent.values()), names)}
    states, memory = drive(ready)
    check(states[-1].params, server)
    for c in range(6):
        assert bool(memory.load(c)) == any(c in fed.cohort(r) for r in (1, 2, 3))
        check(memory.load(c).params if memory.load(c) else fed.start, own[c])
    method = ready.settings.method
    assert list(method.predictors(states[-1], ready.world)) == (["global"] if layers == 2 else [])


def test_with_all_layers_shared_it_is_federated_averaging_to_the_bit() -> None:
    fedavg = {"name": "fedavg", "aggregation": "uniform"}
    ours, theirs = (
        drive(ready_for(m, rounds=3))[0][-1].params
        for m in ({"name": "lg_fedavg", "layers": 9}, fedavg)
    )
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


def test_entries_that_do_not_travel_keep_their_bits_on_both_sides() -> None:
    ready = ready_for("lg_fedavg", rounds=3, topology={"clients": 6, "sampled": 2})
    states, memory = drive(ready)
    start = ready.world.initial(0)
    assert all(torch.equal(states[-1].params[k], start[k]) for k in BODY)
    assert not torch.equal(states[-1].params["head.weight"], start["head.weight"])
    before = drive(ready_for("lg_fedavg", rounds=2, topology={"clients": 6, "sampled": 2}))[1]
    resting = set(range(6)) - set(Federation(ready, sampled=2).cohort(3))
    assert any(before.load(c) for c in resting)
    for c in resting:
        assert memory.load(c).keys() == before.load(c).keys()
        if before.load(c):
            assert same_bits(memory.load(c).params, before.load(c).params)


def test_fedbabu() -> None:
    ready = ready_for("fedbabu", rounds=2, plan={"finetune": {"epochs": 1}})
    fed = Federation(ready)
    server = fed.start
    for round in (1, 2):
        sent = [train(fed, server, round, c, BODY) for c in fed.cohort(round)]
        server = {**server, **mean_of(sent, BODY)}
    states, memory = drive(ready)
    check(states[-1].params, server)
    assert all(
        torch.equal(states[-1].params[k], v) for k, v in ready.world.initial(0).items() if k in HEAD
    )
    for c in range(6):
        check(memory.load(c).params, train(fed, server, 2, c, stage=1, epochs=1))


def test_a_fine_tuning_of_no_epochs_leaves_each_client_the_global_model() -> None:
    states, memory = drive(ready_for("fedbabu", rounds=2, plan={"finetune": {"epochs": 0}}))
    for c in range(6):
        assert all(torch.equal(memory.load(c).params[k], v) for k, v in states[-1].params.items())


@pytest.mark.parametrize("method", ["lg_fedavg", "fedbabu"])
def test_statistics_of_normalisation_travel_with_their_layer(method: str) -> None:
    ready = ready_for(method, model="toy_batchnorm", plan={"lr": 0.02})
    sent = set(
        ready.settings.method.expected_reply(
            0, ready.settings.schedule(1, ready.world)[0], ready.world
        ).tensors("shared")
    )
    assert ("body.1.running_var" in sent) == (method == "fedbabu")
    states, _ = drive(ready)
    assert bool((states[-1].params["body.1.running_var"] > 0).all())


@pytest.mark.parametrize("name", ["lg_fedavg", "fedbabu"])
def test_a_shared_part_that_blows_up_is_refused_as_a_whole_model_is(name: str) -> None:
    ready = ready_for(name)
    method, stage = ready.settings.method, ready.settings.schedule(1, ready.world)[0]
    state = method.initial_state(ready.world)
    payloads = {c: method.payload_for_client(state, c, stage, ready.world) for c in stage.clients}
    big = {k: 1000 * v + 1000 for k, v in payloads[stage.clients[0]].tensors("shared").items()}
    reply = Reply(stage.clients[0], Payload(shared=big), 5, {}, stage.round, stage.index)
    _, (refusal,) = screen(
        lambda c: method.expected_reply(c, stage, ready.world), stage, payloads, [reply], Rules()
    )  # type: ignore[arg-type]
    assert "its shared parameters' norm" in refusal.reason
    assert refusal.diverged


def test_fedrep() -> None:
    plan = {"head": {"epochs": 2}, "train": {"epochs": 1}, "finetune": {"epochs": 1}}
    ready = ready_for("fedrep", rounds=3, plan=plan)
    fed = Federation(ready)
    server, own = fed.start, dict.fromkeys(range(6), fed.start)
    for round in (1, 2, 3):
        cohort, sizes = fed.cohort(round), {c: len(fed.data(c)[1]) for c in range(6)}
        for c in cohort:
            both = {**own[c], **{k: server[k] for k in BODY}}
            fitted = train(fed, both, round, c, HEAD, stage=0, epochs=2)
            assert all(torch.equal(fitted[k], server[k]) for k in BODY)
            own[c] = train(fed, fitted, round, c, BODY, stage=1, epochs=1)
        total = sum(sizes[c] for c in cohort)
        server = {**server, **{k: sum(sizes[c] * own[c][k] for c in cohort) / total for k in BODY}}
    states, memory = drive(ready)
    check(states[-1].params, server)
    for c in range(6):
        both = {**own[c], **{k: server[k] for k in BODY}}
        check(memory.load(c).params, train(fed, both, 3, c, HEAD, stage=2, epochs=1))


ORDERED = {"shuffle": False}
"""The order of examples is drawn for each stage of a round; in data order two methods can be
compared to the bit.
"""


def test_without_epochs_of_the_head_fedrep_trains_as_fedbabu() -> None:
    plan = {**ORDERED, "head": {"epochs": 0}, "finetune": {"epochs": 0}, "train": {"epochs": 2}}
    ours = drive(ready_for("fedrep", plan=plan))[0][-1].params
    babu = {"name": "fedbabu", "aggregation": "examples"}
    theirs = drive(ready_for(babu, plan={**ORDERED, "finetune": {"epochs": 0}}))[0][-1].params
    assert same_bits(ours, theirs)


def test_fedreps_head_is_trained_under_the_received_statistics() -> None:
    ready = ready_for(
        "fedrep", model="toy_batchnorm", rounds=1, plan={"lr": 0.02, "train": {"epochs": 0}}
    )
    states, memory = drive(ready)
    start, client = ready.world.initial(0), ready.settings.schedule(1, ready.world)[0].clients[0]
    assert all(
        torch.equal(states[-1].params[k], v)
        for k, v in start.items()
        if v.is_floating_point() is False
    )
    assert torch.equal(
        memory.load(client).params["body.1.running_mean"], start["body.1.running_mean"]
    )
    assert not torch.equal(memory.load(client).params["head.weight"], start["head.weight"])


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_ditto(strength: float) -> None:
    ready = ready_for(
        {"name": "ditto", "strength": strength}, rounds=3, plan={"personal": {"epochs": 1}}
    )
    fed = Federation(ready)
    server, own = fed.start, dict.fromkeys(range(6), fed.start)
    for round in (1, 2, 3):
        sent, sizes = {}, {c: len(fed.data(c)[1]) for c in fed.cohort(round)}
        for c in sizes:

            def loss(model: nn.Module, x: Tensor, y: Tensor, w: Params = server) -> Tensor:
                far = sum(((p - w[k]) ** 2).sum() for k, p in model.named_parameters())
                return ce(model, x, y) + strength / 2 * far

            own[c] = train(fed, own[c], round, c, stage=0, epochs=1, loss=loss)
            sent[c] = train(fed, server, round, c, stage=1)
        server = {
            k: sum(n * sent[c][k] for c, n in sizes.items()) / sum(sizes.values()) for k in server
        }
    states, memory = drive(ready)
    check(states[-1].params, server)
    for c in range(6):
        if any(c in fed.cohort(r) for r in (1, 2, 3)):
            check(memory.load(c).params, own[c])


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_dittos_global_model_is_that_of_federated_averaging_to_the_bit(strength: float) -> None:
    ours, theirs = (
        drive(ready_for(m, rounds=3, plan={"lr": 0.05, **ORDERED}))[0][-1].params
        for m in ({"name": "ditto", "strength": strength}, "fedavg")
    )
    assert same_bits(ours, theirs)


def test_at_strength_0_dittos_own_models_are_those_of_clients_that_train_alone() -> None:
    same = {"rounds": 3, "topology": {"clients": 6}, "plan": ORDERED}
    alone = drive(ready_for({"name": "lg_fedavg", "layers": 0}, **same))[1]
    ours = drive(ready_for({"name": "ditto", "strength": 0.0}, **same))[1]
    for c in range(6):
        check(ours.load(c).params, alone.load(c).params)


def test_a_client_that_was_never_drawn_remembers_nothing() -> None:
    ready = ready_for("ditto", rounds=1, topology={"clients": 6, "sampled": 2})
    memory = drive(ready)[1]
    drawn = set(Federation(ready, sampled=2).cohort(1))
    assert [bool(memory.load(c)) for c in range(6)] == [c in drawn for c in range(6)]
