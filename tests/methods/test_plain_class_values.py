"""FD and FedProto, whose clients agree on values of each class, against a plain implementation of
each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain import Federation, Params, ce, check, drive, minus, norm, ready_for
from torch import Tensor, nn

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import Payload, Reply, State, TrainingStart
from fedstill.core.registry import lookup
from fedstill.data.sources import from_clients
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

CLASSES, WIDTH = toys.CLASSES, 8
Said = dict[int, dict[int, Tensor]]


def by_class(values: Tensor, y: Tensor) -> dict[int, Tensor]:
    """The mean of each class that there is."""
    return {c: values[y == c].mean(0) for c in range(CLASSES) if bool((y == c).any())}


def drawn(
    fed: Federation,
    own: Params,
    round: int,
    client: int,
    targets: dict[int, Tensor],
    strength: float,
) -> Params:
    """FedProto's local training, one example after another."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        far = [
            ((model.body(a) - targets[c]) ** 2).mean()
            for a, c in zip(x.split(1), y.tolist(), strict=True)
            if c in targets
        ]
        return ce(model, x, y) + strength * sum(far) / len(y)

    return fed.fit(own, loss, round, client).params


@pytest.mark.parametrize("aggregation", ["uniform", "examples"])
def test_fedproto(aggregation: str) -> None:
    ready = ready_for(
        {"name": "fedproto", "strength": 0.5, "aggregation": aggregation},
        rounds=3,
        plan={"epochs": 2},
    )
    fed = Federation(ready)
    own, prototypes = dict.fromkeys(range(6), fed.start), dict[int, Tensor]()
    for round in (1, 2, 3):
        said, counts = {}, {}
        for k in fed.cohort(round):
            own[k] = drawn(fed, own[k], round, k, prototypes, 0.5)
            x, y = fed.data(k)
            said[k], counts[k] = (
                by_class(fed.net(own[k]).body(x).detach(), y),
                torch.bincount(y, minlength=CLASSES),
            )
        for c in range(CLASSES):
            weight = {
                k: int(counts[k][c]) if aggregation == "examples" else 1
                for k in said
                if c in said[k]
            }
            if weight:
                prototypes[c] = sum(w * said[k][c] for k, w in weight.items()) / sum(
                    weight.values()
                )
    states, memory = drive(ready)
    assert states[-1].params == {}
    values, seen = states[-1].extra.tensor("values"), states[-1].extra.tensor("seen")
    check({str(c): values[c] for c in prototypes}, {str(c): v for c, v in prototypes.items()})
    assert {c for c in range(CLASSES) if seen[c] > 0} == set(prototypes)
    for k in range(6):
        if memory.load(k):
            check(memory.load(k).params, own[k])


@pytest.mark.parametrize("weights", [False, True])
def test_fd(weights: bool) -> None:
    ready = ready_for({"name": "fd", "strength": 0.5, "average_weights": weights}, rounds=3)
    fed = Federation(ready)
    own, server, said = dict.fromkeys(range(6), fed.start), fed.start, Said()
    for round in (1, 2, 3):
        new = {}
        for k in fed.cohort(round):
            others = {
                c: [said[j][c] for j in said if j != k and c in said[j]] for c in range(CLASSES)
            }
            targets = {c: sum(v) / len(v) for c, v in others.items() if v}

            def loss(
                model: nn.Module, x: Tensor, y: Tensor, targets: dict[int, Tensor] = targets
            ) -> Tensor:
                far = [
                    -(targets[c].softmax(0) * (z.log_softmax(0) - targets[c].log_softmax(0))).sum()
                    for z, c in zip(model(x), y.tolist(), strict=True)
                    if c in targets
                ]
                return ce(model, x, y) + 0.5 * sum(far) / len(y)

            own[k] = fed.fit(server if weights else own[k], loss, round, k).params
            x, y = fed.data(k)
            new[k] = by_class(fed.net(own[k])(x).detach(), y)
        said = new
        sizes = {k: len(fed.data(k)[1]) for k in said}
        server = {n: sum(sizes[k] * own[k][n] for k in said) / sum(sizes.values()) for n in server}
    states, memory = drive(ready)
    if weights:
        check(states[-1].params, server)
    for k in range(6):
        if memory.load(k):
            check(memory.load(k).params, own[k])


@pytest.mark.parametrize("method", ["fd", "fedproto"])
def test_without_weight_clients_train_alone_to_the_bit_and_with_it_they_do_not(method: str) -> None:
    same = {"rounds": 3, "topology": {"clients": 6}, "plan": {"epochs": 1}}
    alone = drive(ready_for({"name": "lg_fedavg", "layers": 0}, **same))[1]
    zero, one = (drive(ready_for({"name": method, "strength": s}, **same))[1] for s in (0.0, 1.0))
    for k in range(6):
        assert all(torch.equal(zero.load(k).params[n], v) for n, v in alone.load(k).params.items())
        assert norm(minus(one.load(k).params, alone.load(k).params)) > 1e-3


def reply(client: int, means: list[list[float]], counts: list[int]) -> Reply:
    return Reply(client, Payload(means=torch.tensor(means), counts=torch.tensor(counts)), 6)


def test_two_clients_get_exactly_each_others_logits_and_one_alone_gets_none() -> None:
    world = ready_for("fd", topology={"clients": 2, "sampled": 2}).world
    method, noise = lookup("method", "fd").build(), torch.Generator().manual_seed(0)
    said = [torch.randn(CLASSES, CLASSES, generator=noise).double() for _ in range(2)]
    has = [[3, 1, 0, 2, 0], [0, 5, 0, 1, 1]]
    said = [
        s.float().double() * (torch.tensor(n) > 0).unsqueeze(1)
        for s, n in zip(said, has, strict=True)
    ]
    both = [Reply(k, Payload(means=said[k], counts=torch.tensor(has[k])), 6) for k in range(2)]
    state = method.aggregate(method.initial_state(world), both, None, world)
    for k in range(2):
        payload = method.payload_for_client(state, k, None, world)
        assert payload.tensor("seen").tolist() == [float(n > 0) for n in has[1 - k]]
        assert torch.equal(payload.tensor("values"), said[1 - k])
    alone = method.payload_for_client(
        method.aggregate(state, both[:1], None, world), 0, None, world
    )
    assert not alone.tensor("seen").any()


def test_a_prototype_is_the_mean_of_those_that_have_the_class_in_whatever_order_they_come() -> None:
    method = lookup("method", "fedproto").build()
    state = State(params={}).next(
        values=torch.full((3, 2), 9.0), seen=torch.tensor([0.0, 0.0, 1.0])
    )
    replies = [
        reply(0, [[1, 2], [3, 4], [0, 0]], [5, 1, 0]),
        reply(1, [[3, 6], [0, 0], [0, 0]], [1, 0, 0]),
    ]
    for came in (replies, replies[::-1]):
        after = method.aggregate(state, came, None, None).extra
        assert after.tensor("values").tolist() == [[2.0, 4.0], [3.0, 4.0], [9.0, 9.0]]
        assert after.tensor("seen").tolist() == [1.0, 1.0, 1.0]


def test_features_that_are_their_prototypes_are_not_moved() -> None:
    method = lookup("method", "fedproto").build()

    class Same:
        def features(self) -> Tensor:
            return torch.ones(4, 2)

    assert method.distance(Same(), torch.ones(4, 2)).tolist() == [0.0] * 4


def test_networks_may_differ_but_for_the_number_of_features() -> None:
    nets = ({"name": "mlp", "hidden": (WIDTH,)}, {"name": "mlp", "hidden": (6, WIDTH)})
    states, memory = drive(ready_for("fedproto", clients={"models": nets}, topology={"clients": 6}))
    assert states[-1].extra.tensor("seen").bool().all()
    assert {len(memory.load(k).params) for k in range(6)} == {4, 6}
    other = toys.toy("fedproto", clients={"models": ("mlp", "logistic")})
    with pytest.raises(IncompatibleMethod, match="number of features"):
        prepare(resolve(other), toys.blobs())
    with pytest.raises(IncompatibleMethod, match="averages weights"):
        prepare(
            resolve(toys.toy({"name": "fd", "average_weights": True}, clients={"models": nets})),
            toys.blobs(),
        )


def test_where_a_client_has_its_own_test_the_nearest_prototype_answers_too() -> None:
    ready = ready_for("fedproto", rounds=1)
    stage = ready.settings.schedule(1, ready.world)[0]
    k, fed = stage.clients[0], Federation(ready)
    view, work = ready.sites.view(k, stage), ready.settings.method.work(stage)
    x, y = fed.data(k)
    h = fed.net(fed.start).body(x).detach()
    means = by_class(h, y)
    values = torch.stack(
        [means.get(c, torch.zeros(WIDTH, dtype=torch.float64)) for c in range(CLASSES)]
    )
    seen = torch.tensor([float(c in means) for c in range(CLASSES)])
    right = sum(
        min(means, key=lambda c: float(((a - means[c]) ** 2).sum())) == int(b)
        for a, b in zip(h, y, strict=True)
    )
    carry = TrainingStart(fed.start, constants={"values": values, "seen": seen})
    told = work.report(fed.start, carry, replace(view, test=view.data), ready.world)
    assert told == {"nearest_prototype": right / len(y)}
    assert work.report(fed.start, carry, replace(view, test=None), ready.world) == {}


def test_a_run_on_clients_with_own_tests_tells_of_the_nearest_prototype_from_the_second_round_on(
    tmp_path: Path,
) -> None:
    draw = torch.Generator().manual_seed(0)

    def some(n: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % 3
        return torch.randn(n, 4, generator=draw) + 3 * torch.eye(4)[y], y

    data = from_clients("own", [(some(30), some(12)), (some(24), some(9))], kind="table")
    what = Experiment(
        method="fedproto",
        model={"name": "mlp", "hidden": (6,)},
        rounds=3,
        plan={"epochs": 5, "lr": 0.05},
    )
    run(what, tmp_path / "run", data)
    events = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"]
    assert {e["round"] for e in events if "nearest_prototype" in e} == {2, 3}
    assert min(e["nearest_prototype"] for e in events if e["round"] == 3) > 0.5
