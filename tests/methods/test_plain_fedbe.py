"""FedBE against a plain implementation: what is drawn, what the ensemble says, and the weights
averaged on the way.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from plain import Federation, Params, Sent, average, ce, check, check_matters, drive, ready_for
from torch import Tensor

import toys
from double import NEAR
from fedstill.core.keys import generator, numpy_generator, seed_for
from fedstill.core.records import SERVER, Stage
from fedstill.methods.fedbe import FedBE

TEACH = {
    "epochs": 5,
    "batch": 16,
    "lr": 0.05,
    "lr_decay": 1.0,
    "momentum": 0.9,
    "weight_decay": 1e-3,
}
PUBLIC = {"data": {"public": toys.PUBLIC}, "plan": {"teach_server": TEACH}}


def gaussian(
    sent: list[Sent], start: Params, round: int, spread: float, uniform: bool
) -> list[Params]:
    """Three models: independent entries around the average, as far apart as the clients' are, times
    ``spread``.
    """
    weights = np.array([1.0 if uniform else s.examples for s in sent])
    draw = generator(seed_for(7, round, 1, SERVER, "models"))
    drawn = []
    for _ in range(3):
        model = {}
        for name in sorted(start):
            entries = np.stack([s.params[name].numpy() for s in sent])
            around = entries - start[name].numpy()
            variance = np.tensordot(weights / weights.sum(), around**2, axes=1)
            noise = torch.randn(variance.shape, dtype=torch.float64, generator=draw).numpy()
            model[name] = start[name] + torch.from_numpy(spread * np.sqrt(variance) * noise)
        drawn.append(model)
    return drawn


def dirichlet(sent: list[Sent], start: Params, round: int, alpha: float) -> list[Params]:
    shares = numpy_generator(seed_for(7, round, 1, SERVER, "models")).dirichlet(
        [alpha] * len(sent), 3
    )
    return [
        {k: sum(a * s.params[k] for a, s in zip(row, sent, strict=True)) for k in start}
        for row in shares
    ]


def distil(
    fed: Federation,
    start: Params,
    goal: Tensor,
    x: Tensor,
    round: int,
    cycle: int,
    low: float,
    after: float,
) -> Params:
    """SGD whose rate is set before every step; the mean of the weights at the end of every cycle,
    and at the end.
    """
    student = fed.net(start)
    sgd = torch.optim.SGD(
        student.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-3, foreach=False
    )
    order, kept, step = generator(seed_for(7, round, 1, SERVER, "order")), [], 0
    total = TEACH["epochs"] * math.ceil(len(x) / TEACH["batch"])
    first = int(after * total)
    for _ in range(int(TEACH["epochs"])):
        for index in torch.randperm(len(x), generator=order).split(int(TEACH["batch"])):
            step += 1
            t = ((step - first - 1) % cycle + 1) / cycle
            sgd.param_groups[0]["lr"] = TEACH["lr"] * ((1 - t) + t * low if step > first else 1)
            sgd.zero_grad()
            q = student(x[index]).softmax(1)
            (goal[index] * (goal[index] / q).log()).sum(1).mean().backward()
            sgd.step()
            if (step > first and t == 1) or step == total:
                kept.append({k: v.detach().clone() for k, v in student.state_dict().items()})
    assert step == total
    assert len(kept) > 1
    return {k: sum(w[k] for w in kept) / len(kept) for k in start}


@pytest.mark.parametrize(
    ("fields", "cycle", "low", "after"),
    [
        ({"spread": 0.7, "temperature": 0.5}, 3, 0.4, 0.3),
        ({"spread": 2.0, "aggregation": "uniform"}, 4, 1.0, 0.0),
        ({"distribution": "dirichlet", "concentration": 0.5, "temperature": 2.0}, 2, 0.1, 0.5),
    ],
)
def test_fedbe(fields: dict[str, object], cycle: int, low: float, after: float) -> None:
    method = {"name": "fedbe", "samples": 3, "cycle": cycle, "low": low, "after": after, **fields}
    ready = ready_for(method, **PUBLIC)
    fed, tau, uniform = (
        Federation(ready),
        float(fields.get("temperature", 1.0)),
        "aggregation" in fields,
    )
    assert ready.sites.public is not None
    x, params = fed.inputs(ready.sites.public.values), fed.start
    for round in (1, 2):
        sent = [fed.fit(params, ce, round, c) for c in fed.cohort(round)]
        start = average(sent, uniform)
        if "distribution" in fields:
            drawn = dirichlet(sent, start, round, 0.5)
        else:
            drawn = gaussian(sent, start, round, float(fields["spread"]), uniform)
        with torch.no_grad():
            members = [fed.net(m)(x).softmax(1) for m in [start, *(s.params for s in sent), *drawn]]
        sharp = (sum(members) / len(members)) ** (1 / tau)
        params = distil(fed, start, sharp / sharp.sum(1, keepdim=True), x, round, cycle, low, after)
    states, memory = drive(ready)
    check(states[-1].params, params)
    check_matters(states[-1].params, ready)
    assert not set(states[-1].extra), "clients' models are dropped after the server's stage"
    assert not any(memory.load(c) for c in range(6))


def after_training(method: dict[str, object]):
    """The state between the clients' stage and the server's, the server's stage, and the world."""
    ready = ready_for(method, **PUBLIC)
    made, world, engine = ready.settings.method, ready.world, ready.engine()
    train, teach = ready.settings.schedule(1, world)
    state = made.initial_state(world)
    payloads = {c: made.payload_for_client(state, c, train, world) for c in train.clients}
    replies = engine.run(made.work(train), train, payloads, world.seed)
    return made, made.aggregate(state, replies, train, world), teach, world


def test_the_ensemble_is_the_clients_the_average_and_what_was_drawn() -> None:
    made, state, teach, world = after_training({"name": "fedbe", "samples": 5})
    models = made.payload_for_client(state, SERVER, teach, world).many("model")
    assert len(models) == 4 + 1 + 5
    assert models[world.clients] == state.params
    assert len({float(m["head.weight"].sum()) for m in models.values()}) == 10, (
        "no two are the same"
    )
    again = made.payload_for_client(state, SERVER, teach, world).many("model")
    assert all(torch.equal(models[i][k], again[i][k]) for i in models for k in models[i])
    other = made.payload_for_client(
        state, SERVER, Stage(2, 1, teach.name, (SERVER,), "public"), world
    ).many("model")
    assert not torch.equal(
        other[world.clients + 1]["head.weight"], again[world.clients + 1]["head.weight"]
    )


def test_what_is_drawn_has_the_mean_and_the_spread_of_the_clients_models() -> None:
    made, state, teach, world = after_training({"name": "fedbe", "samples": 4000, "spread": 0.5})
    assert isinstance(made, FedBE)
    entries = torch.stack([m["head.weight"] for m in made.drawn(state, teach, world)])
    sizes = state.extra.tensor("sizes").double()
    clients = torch.stack([m["head.weight"] for m in state.extra.many("model").values()])
    wide = (
        ((sizes / sizes.sum()).view(-1, 1, 1) * (clients - state.params["head.weight"]).square())
        .sum(0)
        .sqrt()
    )
    torch.testing.assert_close(entries.std(0), 0.5 * wide, rtol=0.06, atol=0)
    assert float(
        ((entries.mean(0) - state.params["head.weight"]) / wide).abs().max()
    ) < 0.5 * 5 / math.sqrt(4000)


@pytest.mark.parametrize(("alpha", "sides"), [(1e-3, "a client's own"), (1e6, "the plain mean")])
def test_at_its_edges_the_dirichlet_distribution_gives_the_clients_or_their_plain_mean(
    alpha: float, sides: str
) -> None:
    method = {"name": "fedbe", "distribution": "dirichlet", "concentration": alpha, "samples": 5}
    made, state, teach, world = after_training(method)
    assert isinstance(made, FedBE)
    clients = list(state.extra.many("model").values())
    near = (
        clients
        if alpha < 1
        else [{k: sum(c[k] for c in clients) / len(clients) for k in clients[0]}]
    )
    for model in made.drawn(state, teach, world):
        gaps = [max(float((model[k] - m[k]).abs().max()) for k in model) for m in near]
        assert min(gaps) < 5e-3, f"not {sides}"


def test_one_client_leaves_nothing_to_learn() -> None:
    """One model's spread is 0: all members agree, and the server's stage leaves the model where it
    is.
    """
    changes = {"topology": {"clients": 6, "sampled": 1}, "data": {"public": toys.PUBLIC}}
    still = {"teach_server": {**TEACH, "weight_decay": 0.0}}
    one = drive(ready_for("fedbe", plan=still, **changes))[0][-1].params
    other = drive(ready_for("fedavg", **changes))[0][-1].params
    for k, v in other.items():
        torch.testing.assert_close(one[k], v, rtol=NEAR, atol=NEAR)


def test_without_a_step_the_average_stays() -> None:
    plan = {"teach_server": {**TEACH, "epochs": 0}}
    ready = ready_for("fedbe", data={"public": toys.PUBLIC}, plan=plan)
    check(
        drive(ready)[0][-1].params,
        drive(ready_for("fedavg", data={"public": toys.PUBLIC}))[0][-1].params,
    )


def test_drawn_models_have_the_buffers_of_the_average() -> None:
    ready = ready_for("fedbe", model="toy_batchnorm", **PUBLIC)
    made, world = ready.settings.method, ready.world
    assert isinstance(made, FedBE)
    states, _ = drive(ready)
    assert all(
        bool(v.isfinite().all()) for v in states[-1].params.values() if v.is_floating_point()
    )
    names = [k for k in states[-1].params if "running" in k]
    assert names
    train, teach = ready.settings.schedule(1, world)
    state = made.initial_state(world)
    replies = ready.engine().run(
        made.work(train),
        train,
        {c: made.payload_for_client(state, c, train, world) for c in train.clients},
        world.seed,
    )
    state = made.aggregate(state, replies, train, world)
    for model in made.drawn(state, teach, world):
        assert all(torch.equal(model[k], state.params[k]) for k in names)
