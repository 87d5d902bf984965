"""FML against a plain implementation, and what it is at its edges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain import PLAN, Federation, Params, check, drive, ready_for
from torch import Tensor, nn

import fedstill
import toys
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import TrainingStart
from fedstill.core.trees import same_bits
from fedstill.methods.fml import FML, Mutual
from fedstill.models import contract
from fedstill.models.adapted import personal_network
from fedstill.models.predictors import predictor
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

PAIR = toys.two_networks()


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1).mean()


def split(params: Params, name: str) -> Params:
    return {k.removeprefix(name + "."): v for k, v in params.items() if k.startswith(name + ".")}


def mutual(
    fed: Federation, start: Params, round: int, client: int, alpha: float, beta: float
) -> Params:
    """Both networks step on every batch, each with an optimiser of its own."""
    model, (x, y) = fed.net(start), fed.data(client)
    how = {"lr": fed.lr(round), "momentum": PLAN["momentum"], "weight_decay": PLAN["weight_decay"]}
    sgd = [torch.optim.SGD(net.parameters(), **how) for net in (model.own, model.shared)]
    order = generator(seed_for(7, round, 0, client, "order"))
    for _ in range(fed.epochs):
        for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
            p, m = model.own(x[index]), model.shared(x[index])
            one = alpha * nn.functional.cross_entropy(p, y[index])
            other = beta * nn.functional.cross_entropy(m, y[index])
            one = one + (1 - alpha) * kl(m.detach().softmax(1), p.softmax(1))
            other = other + (1 - beta) * kl(p.detach().softmax(1), m.softmax(1))
            for optimiser, loss in zip(sgd, (one, other), strict=True):
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("alpha", "beta", "aggregation"), [(0.5, 0.5, "uniform"), (0.9, 0.2, "examples")]
)
def test_rounds_are_those_of_two_networks_written_out(
    alpha: float, beta: float, aggregation: str
) -> None:
    method = {"name": "fml", "alpha": alpha, "beta": beta, "aggregation": aggregation}
    ready = ready_for(method, rounds=3, model=PAIR)
    fed = Federation(ready)
    server, own = fed.start, dict.fromkeys(range(6), fed.start)
    for round in (1, 2, 3):
        shared = {k: v for k, v in server.items() if k.startswith("shared.")}
        weights = {
            c: len(fed.data(c)[1]) if aggregation == "examples" else 1 for c in fed.cohort(round)
        }
        own |= {c: mutual(fed, {**own[c], **shared}, round, c, alpha, beta) for c in weights}
        total = sum(weights.values())
        server = {
            **server,
            **{k: sum(w * own[c][k] for c, w in weights.items()) / total for k in shared},
        }
    states, memory = drive(ready)
    check(states[-1].params, server)
    for c in range(6):
        if memory.load(c):
            check(memory.load(c).params, own[c])


def test_where_both_learn_from_labels_alone_they_are_fedavg_and_local_training_to_the_bit() -> None:
    alone = {"name": "fml", "alpha": 1.0, "beta": 1.0}
    ready, sampled = ready_for(alone, rounds=3, model=PAIR), {"clients": 6, "sampled": 4}
    start = ready.world.initial(0)
    states, memory = drive(ready)
    for name, method in (
        ("shared", {"name": "fedavg", "aggregation": "uniform"}),
        ("own", {"name": "lg_fedavg", "layers": 0}),
    ):
        other = ready_for(
            method,
            rounds=3,
            model={"name": PAIR[name], **PAIR[f"{name}_arguments"]},
            topology=sampled,
        )
        other.world._initial[other.world.model(0)] = split(dict(start), name)
        theirs, kept = drive(other)
        if name == "shared":
            assert same_bits(split(dict(states[-1].params), "shared"), theirs[-1].params)
            continue
        for c in range(6):
            assert bool(kept.load(c)) == bool(memory.load(c))
            if kept.load(c):
                assert same_bits(split(dict(memory.load(c).params), "own"), kept.load(c).params)


class Same:
    """A batch on which both networks say the same."""

    def __init__(self, own: Tensor, shared: Tensor, y: Tensor) -> None:
        self.own, self.shared, self.y = own, shared, y

    def run(self, function: Callable[..., Tensor], part: str) -> Tensor:
        assert (function, part) == (contract.run_part, "own")
        return self.own

    def weighted(self, losses: Tensor) -> Tensor:
        return losses

    def on(self, logits: Tensor) -> Tensor:
        return logits

    def logits(self) -> Tensor:
        return self.shared


def test_neither_distillation_reaches_the_other_and_equal_networks_have_none() -> None:
    draw = torch.Generator().manual_seed(0)
    own, shared = (
        torch.randn(6, 5, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    y = torch.arange(6) % 5
    work = Mutual(FML(), "train", 0.5, 0.5)
    terms = work.terms(Same(own, shared, y), TrainingStart({}))  # type: ignore[arg-type]
    for name, other in (("own", shared), ("own_kd", shared), ("shared", own), ("shared_kd", own)):
        (grad,) = torch.autograd.grad(
            terms[name].sum(), [other], allow_unused=True, retain_graph=True
        )
        assert grad is None
    equal = work.terms(Same(own, own, y), TrainingStart({}))  # type: ignore[arg-type]
    assert float(equal["own_kd"].detach().abs().max()) < 1e-12
    assert float(equal["shared_kd"].detach().abs().max()) < 1e-12


def test_clients_may_have_other_networks_of_their_own(tmp_path: Path) -> None:
    """What a client measures, and what is loaded, is its own network."""
    models = (toys.two_networks("mlp", hidden=(6,)), toys.two_networks("logistic"))
    changes = {
        "topology": {"clients": 4},
        "model": PAIR,
        "clients": {"models": models},
        "measure_every": 1,
    }
    run(toys.toy("fml", **changes), tmp_path / "run", toys.blobs())
    told = [
        e
        for e in read_journal(tmp_path / "run/journal.jsonl")
        if e["event"] == "client" and e["round"] == 3
    ]
    test = toys.blobs().test
    for event, name in zip(told, ("mlp", "logistic") * 2, strict=True):
        loaded = fedstill.load_model(tmp_path / "run", client=event["client"]).eval()
        assert loaded.about["network"].startswith(name)
        with torch.no_grad():
            right = loaded(test.values).argmax(1) == test.labels
        assert (
            torch.bincount(test.labels[right], minlength=toys.CLASSES).tolist()
            == event["correct_by_class"]
        )


def test_the_shared_network_is_one_for_all() -> None:
    other = {
        "name": "pair",
        "own": "logistic",
        "shared": "mlp",
        "shared_arguments": {"hidden": (3,)},
    }
    with pytest.raises(IncompatibleMethod, match=r"model\.shared"):
        run(
            toys.toy("fml", model=PAIR, clients={"models": (PAIR, other)}, topology={"clients": 4}),
            None,
            toys.blobs(),
        )
    with pytest.raises(
        IncompatibleMethod, match=r"set model\.name = 'pair', and model\.own and model\.shared"
    ):
        run(toys.toy("fml"), None, toys.blobs())


def test_a_pair_gives_what_its_shared_network_gives() -> None:
    fields = {k: v for k, v in PAIR.items() if k != "name"}
    spec = contract.spec_for("pair", (1, 4, 4), 5, fields)
    params, x = (
        contract.initial(spec, 0),
        torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
    )
    shared = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})
    assert torch.equal(predictor(spec, params)(x), predictor(shared, split(params, "shared"))(x))
    own, weights = personal_network(spec, params)
    assert own == contract.spec_for(str(PAIR["own"]), (1, 4, 4), 5, PAIR["own_arguments"])
    assert same_bits(weights, split(params, "own"))
    assert torch.equal(
        contract.run_part(contract.module(spec), params, x, "own"),
        predictor(own, weights)(x),
    )
