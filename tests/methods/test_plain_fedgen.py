"""FedGen against a plain implementation, and what its generator is bound to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from plain import Federation, Loss, Params, average, ce, check, check_matters, drive, ready_for
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Payload, Plan, Stage
from fedstill.core.trees import same_bits
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.methods.fedgen import POOL, TrainGenerator, diversity_loss
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare

CLASSES, NOISE = toys.CLASSES, 3
SMALL = {"name": "fedgen", "noise": NOISE, "hidden": 6, "samples": 40}
SERVERS = {
    "epochs": 2,
    "batch": 16,
    "lr": 0.01,
    "lr_decay": 1.0,
    "weight_decay": 0.01,
    "momentum": 0.0,
}


def drawn(seed: int, round: int, client: int) -> torch.Generator:
    return generator(seed_for(seed, round, 0, client, "generate"))


def noise_for(labels: Tensor, draw: torch.Generator) -> Tensor:
    eps = torch.rand(len(labels), NOISE, generator=draw, dtype=torch.float64)
    return torch.cat([eps, nn.functional.one_hot(labels, CLASSES).double()], 1)


def new_generator(ready: Prepared) -> nn.Sequential:
    start = contract.initial(
        ready.settings.method.spec(ready.world), seed_for(7, 0, 0, SERVER, "generate")
    )
    made = nn.Sequential(nn.Linear(NOISE + CLASSES, 6), nn.ReLU(), nn.Linear(6, 8)).double()
    made.load_state_dict(
        {k.replace("body.1", "0").replace("head", "2"): v for k, v in start.items()}
    )
    return made


def fit(made: nn.Sequential, sent: dict[int, Params], fed: Federation, round: int) -> None:
    """The server's training of the generator, head by head and pair by pair."""
    counts = {k: torch.bincount(fed.data(k)[1], minlength=CLASSES).double() for k in sent}
    total = sum(counts.values())
    draw = drawn(7, round, SERVER)
    there = [c for c in range(CLASSES) if total[c] > 0]
    y = torch.tensor(there)[torch.randint(len(there), (40,), generator=draw)]
    x = noise_for(y, draw)
    adam = torch.optim.Adam(made.parameters(), lr=0.01, weight_decay=0.01, foreach=False)
    order = generator(seed_for(7, round, 1, SERVER, "order"))
    for _ in range(2):
        for index in torch.randperm(40, generator=order).split(16):
            adam.zero_grad()
            h, some = made(x[index]), y[index]
            loss = torch.zeros((), dtype=torch.float64)
            for k, model in sent.items():
                logs = (h @ model["head.weight"].T + model["head.bias"]).log_softmax(1)
                omega = (counts[k] / total.clamp(min=1))[some]
                loss = loss - (omega * logs[range(len(some)), some]).mean()
            pairs = [
                ((x[i, :NOISE] - x[j, :NOISE]) ** 2).mean() * (h[a] - h[b]).abs().mean()
                for a, i in enumerate(index)
                for b, j in enumerate(index)
            ]
            (loss + 0.7 * torch.exp(-sum(pairs) / len(pairs))).backward()
            adam.step()


def iterations(size: int, round: int, client: int) -> Iterator[Tensor]:
    """Which examples each batch of a client has, plus the epoch."""
    order = generator(seed_for(7, round, 0, client, "order"))
    for epoch in range(2):
        for index in torch.randperm(size, generator=order).split(10):
            yield index + epoch


def objective(
    made: nn.Sequential, fed: Federation, round: int, k: int, weight: float, match: float
) -> Loss:
    """A client's loss, one batch after another."""
    draw, labels = drawn(7, round, k), torch.arange(CLASSES).repeat_interleave(POOL)
    with torch.no_grad():
        pool = made(noise_for(labels, draw))
    mixed = torch.randperm(CLASSES * POOL, generator=draw)
    turns = iterations(len(fed.data(k)[1]), round, k)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        turn = next(turns)
        other = mixed[turn % len(mixed)]
        known = nn.functional.nll_loss(m.head(pool[other]).log_softmax(1), labels[other])
        p = m.head(pool.view(CLASSES, POOL, -1)[y, turn % POOL]).detach().log_softmax(1)
        far = (p.exp() * (p - m(x).log_softmax(1))).sum(1).mean()
        return ce(m, x, y) + weight * known + match * far

    return loss


@pytest.mark.parametrize(("weight", "match"), [(0.5, 0.3), (0.0, 0.3)])
def test_fedgen(weight: float, match: float) -> None:
    method = {**SMALL, "weight": weight, "match": match, "decay": 0.8, "diversity": 0.7}
    ready = ready_for(method, rounds=3, plan={"generate": SERVERS})
    fed, made = Federation(ready), new_generator(ready)
    every = sum(torch.bincount(fed.data(k)[1], minlength=CLASSES) for k in range(6))
    assert bool((every > 0).all())
    server = fed.start
    for round in (1, 2, 3):
        sent = []
        for k in fed.cohort(round):
            loss = objective(
                made, fed, round, k, 0.8 ** (round - 1) * weight, 0.8 ** (round - 1) * match
            )
            sent.append(fed.fit(server, ce if round == 1 else loss, round, k))
        server = average(sent)
        fit(made, {s.client: s.params for s in sent}, fed, round)
    states, _ = drive(ready)
    check(states[-1].params, server)
    check_matters(states[-1].params, ready, 3)
    ours = {
        k.replace("body.1", "0").replace("head", "2"): v
        for k, v in states[-1].extra.tensors("generator").items()
    }
    check(ours, {k: v.detach() for k, v in made.state_dict().items()})
    assert set(states[-1].extra) == {"labels", "generator"}


def test_without_both_weights_it_is_federated_averaging_to_the_bit() -> None:
    ours, theirs = (
        drive(ready_for(m, rounds=3))[0][-1].params
        for m in ({**SMALL, "weight": 0.0, "match": 0.0}, "fedavg")
    )
    assert same_bits(ours, theirs)


def test_features_that_do_not_differ_cost_1_and_others_less() -> None:
    draw, ones = torch.Generator().manual_seed(0), torch.ones(6)
    noise, features = torch.rand(6, NOISE, generator=draw), torch.randn(6, 8, generator=draw)
    assert diversity_loss(noise, torch.ones(6, 8), ones) == 1
    assert 0 < diversity_loss(noise, features, ones) < 1
    few = diversity_loss(noise[:4], features[:4], ones[:4])
    masked = diversity_loss(noise, features, torch.tensor([1.0, 1, 1, 1, 0, 0]))
    torch.testing.assert_close(masked, few)


def test_the_generator_learns_and_leaves_heads_and_absent_classes_alone() -> None:
    ready = ready_for({**SMALL, "samples": 200})
    stage = Stage(1, 1, "generate", (SERVER,), "public")
    work, view = TrainGenerator(ready.settings.method, 1), ready.sites.view(SERVER, stage)
    made = ready.settings.method.initial_state(ready.world).extra["generator"]
    head = {k: v for k, v in ready.world.initial(0).items() if k.startswith("head.")}
    counts = torch.tensor([[3, 0, 1, 4, 2]])
    start = work.begin(
        Payload({"generator": made, "head.0": head, "counts": counts}), Payload(), view, ready.world
    )
    assert set(start.examples.labels.tolist()) == {0, 2, 3, 4}
    torch.testing.assert_close(
        start["omega"].sum(0), torch.tensor([1.0, 0, 1, 1, 1], dtype=torch.float64)
    )
    losses = []
    for epochs in (1, 5, 20):
        plan = Plan(epochs=epochs, batch=32, optimiser="adam", lr=0.01)
        setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
        losses.append(train(work, start, view, setup).losses)
    assert losses[0]["known"] > losses[1]["known"] > losses[2]["known"]
    assert all(torch.equal(start["weight"][0], head["head.weight"]) for _ in losses)


def test_the_servers_stage_changes_no_parameter_of_the_model() -> None:
    (*_, ours), (*_, theirs) = (
        drive(ready_for(SMALL, rounds=1, plan={"generate": {"epochs": e}}))[0] for e in (0, 3)
    )
    assert same_bits(ours.params, theirs.params)
    assert not same_bits(ours.extra.tensors("generator"), theirs.extra.tensors("generator"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"topology": {"clients": 6, "server": ""}},
            r"set topology\.kind = 'parallel' and topology\.server = 'generate'",
        ),
        ({"model": {"name": "sphere_mlp", "hidden": (8,)}}, "no linear layer with a bias"),
    ],
)
def test_what_it_cannot_do_is_one_clear_line(changes: dict[str, object], says: str) -> None:
    with pytest.raises(IncompatibleMethod, match=says):
        prepare(resolve(toys.toy("fedgen", **changes)), toys.blobs())
