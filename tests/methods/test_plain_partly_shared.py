"""The methods whose clients send a part of their model, against a plain implementation of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain import PLAN, Federation, Params, ce, check, drive, ready_for
from torch import Tensor, nn

from fedstill.keys import generator, seed_for
from fedstill.records import Payload, Reply
from fedstill.wire.screen import Rules, screen

ALL = {"topology": {"clients": 6, "sampled": 6}}
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
        trained, lr=fed.lr(round), momentum=PLAN["momentum"], weight_decay=PLAN["weight_decay"], foreach=False
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
        sent = {c: train(fed, {**own[c], **{k: server[k] for k in names}}, round, c) for c in fed.cohort(round)}
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
    ours, theirs = (drive(ready_for(m, rounds=3))[0][-1].params for m in ({"name": "lg_fedavg", "layers": 9}, fedavg))
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
        assert not before.load(c) or all(
            torch.equal(memory.load(c).params[k], v) for k, v in before.load(c).params.items()
        )


def test_fedbabu() -> None:
    ready = ready_for("fedbabu", rounds=2, plan={"finetune": {"epochs": 1}})
    fed = Federation(ready)
    server = fed.start
    for round in (1, 2):
        sent = [train(fed, server, round, c, BODY) for c in fed.cohort(round)]
        server = {**server, **mean_of(sent, BODY)}
    states, memory = drive(ready)
    check(states[-1].params, server)
    assert all(torch.equal(states[-1].params[k], v) for k, v in ready.world.initial(0).items() if k in HEAD)
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
        ready.settings.method.expects(0, ready.settings.topology(1, ready.world)[0], ready.world).tensors("shared")
    )
    assert ("body.1.running_var" in sent) == (method == "fedbabu")
    states, _ = drive(ready)
    assert bool((states[-1].params["body.1.running_var"] > 0).all())


@pytest.mark.parametrize("name", ["lg_fedavg", "fedbabu"])
def test_a_shared_part_that_blows_up_is_refused_as_a_whole_model_is(name: str) -> None:
    ready = ready_for(name)
    method, stage = ready.settings.method, ready.settings.topology(1, ready.world)[0]
    state = method.setup(ready.world)
    downs = {c: method.down(state, c, stage, ready.world) for c in stage.clients}
    big = {k: 1000 * v + 1000 for k, v in downs[stage.clients[0]].tensors("shared").items()}
    reply = Reply(stage.clients[0], Payload(shared=big), 5, {}, stage.round, stage.index)
    _, (refusal,) = screen(lambda c: method.expects(c, stage, ready.world), stage, downs, [reply], Rules())  # type: ignore[arg-type]
    assert "its shared parameters' norm" in refusal.reason
    assert refusal.diverged
