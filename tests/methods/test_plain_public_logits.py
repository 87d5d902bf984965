"""Two rounds of the methods that exchange logits on public images, against the same written out
plainly.

Four networks that differ learn together; of the library only draws are used (order of examples,
held-out data, subset).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from plain import PLAN, Params, check, drive, normal, ready_for
from torch import Tensor, nn

import toys
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER
from fedstill.models import contract
from fedstill.running.preparation import Prepared

Loss = Callable[[Tensor, Tensor], Tensor]
CLIENTS = (0, 1, 2, 3)


def federation(method: object, **changes: object) -> Prepared:
    values = {
        "data": {"public": toys.PUBLIC},
        "topology": {"clients": 4},
        "clients": {"models": ("logistic", "digits_cnn", "mlp")},
    }
    return ready_for(method, **{**values, **changes})


@dataclass
class Plainly:
    """Everybody's models, and how they train."""

    ready: Prepared
    adam: bool = False
    held: float = 0.0
    shuffled: bool = True
    models: dict[int, Params] = field(default_factory=dict)

    def __post_init__(self) -> None:
        everyone = (SERVER, *CLIENTS)
        self.models = {
            c: {k: v.clone() for k, v in self.ready.world.initial(c).items()} for c in everyone
        }
        public = self.ready.sites.public
        self.public, self.public_labels = normal(self.ready, public.values), public.labels

    def net(self, client: int) -> nn.Module:
        made = contract.build(self.ready.world.model(client)).double()
        made.load_state_dict(self.models[client])
        return made

    def own(self, client: int) -> tuple[Tensor, Tensor]:
        part, train = self.ready.sites.positions(client), self.ready.sites.train
        order = torch.randperm(
            len(part), generator=generator(seed_for(7, 0, 0, client, "validation"))
        )
        held = set(order[: round(self.held * len(part))].tolist())
        kept = part[[i for i in range(len(part)) if i not in held]]
        return normal(self.ready, train.values[kept]), train.labels[kept]

    def fit(
        self,
        client: int,
        round: int,
        stage: int,
        x: Tensor,
        y: Tensor,
        loss: Loss,
        public: bool = False,
    ) -> None:
        model, lr = (
            self.net(client).train(),
            self.ready.settings.plans["local"].lr * PLAN["lr_decay"] ** (round - 1),
        )
        kind = torch.optim.Adam if self.adam else torch.optim.SGD
        more = {} if self.adam else {"momentum": self.ready.settings.plans["local"].momentum}
        steps = kind(
            model.parameters(), lr=lr, weight_decay=PLAN["weight_decay"], foreach=False, **more
        )
        draw = generator(seed_for(7, round, stage, client, "order"))
        for _ in range(int(PLAN["epochs"])):
            order = (
                torch.arange(len(y))
                if public and not self.shuffled
                else torch.randperm(len(y), generator=draw)
            )
            for index in order.split(self.ready.settings.plans["local"].batch):
                steps.zero_grad()
                loss(model(x[index]), y[index]).backward()
                steps.step()
        self.models[client] = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def says(self, client: int) -> Tensor:
        return self.net(client).eval()(self.public)

    def compare(self) -> None:
        states, memory = drive(self.ready)
        ours = {SERVER: states[-1].params, **{c: memory.load(c).params for c in CLIENTS}}
        for who, model in ours.items():
            check(model, self.models[who])
            for key, start in self.ready.world.initial(who).items():
                assert float((model[key] - start).abs().max()) > 1e-4, "it learned something"


def ce(z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z, y)


def scored(z: Tensor) -> Tensor:
    return (z - z.mean(1, keepdim=True)) / (z.std(1, keepdim=True) + 1e-6)


def kl_at(tau: float, change: Callable[[Tensor], Tensor]) -> Loss:
    def value(z: Tensor, target: Tensor) -> Tensor:
        student = (change(z) / tau).log_softmax(1)
        return tau**2 * nn.functional.kl_div(
            student, (target / tau).softmax(1), reduction="batchmean"
        )

    return value


def temperatures(ready: Prepared, kind: str, absent: bool, decay: float) -> list[float]:
    """HiPer's, from the label counts, in NumPy."""
    if kind == "off":
        return [1.0] * 4
    train, parts = ready.sites.train.labels.numpy(), ready.sites.split
    p = np.array([[(train[i] == c).mean() for c in range(toys.CLASSES)] for i in parts])
    g = np.maximum(p.mean(0), 0.01)
    g = g / g.sum()
    s = [
        min(1.0, sum(abs(a / b - 1) for a, b in zip(q, g, strict=True) if a > 0 or absent) / len(g))
        for q in p
    ]
    raw = [0.99 - 0.98 * v if kind == "linear" else 0.99 * np.exp(-decay * v) for v in s]
    return [float(np.clip(t, 0.01, 0.99)) for t in raw]


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("hiper_baseline", "off", lambda z: z),
        ("hiper_temperature", "linear", lambda z: z),
        ("hiper_standardised", "linear", scored),
        ("hiper_fedkd", "exponential", scored),
    ],
)
@pytest.mark.parametrize("absent", [False, True])
def test_hiper(name: str, kind: str, change: Callable[[Tensor], Tensor], absent: bool) -> None:
    method = {"name": name, "temperature": 2.0, "decay": 1.5, "count_absent": absent}
    split = {"kind": "dirichlet", "alpha": 0.5, "min_size": 4}
    # 8 does not divide 50
    ready = federation(method, partition=split, plan={"lr": 0.005, "momentum": 0.0, "batch": 8})
    fed, taus = Plainly(ready, held=0.2, shuffled=False), temperatures(ready, kind, absent, 1.5)
    assert kind == "off" or len(set(taus)) == 4
    for round in (1, 2):
        for c in CLIENTS:
            fed.fit(c, round, 0, *fed.own(c), lambda z, y, c=c: ce(z / taus[c], y))
        target = sum(change(fed.says(c)) for c in CLIENTS) / 4
        for c in (SERVER, *CLIENTS):
            fed.fit(
                c,
                round,
                1 if c == SERVER else 2,
                fed.public,
                target,
                kl_at(2.0, change),
                public=True,
            )
    fed.compare()


def test_hiper_over_a_floor() -> None:
    """Large, so that it matters: 0.2 is added to the probability of the label."""
    split = {"kind": "dirichlet", "alpha": 0.5, "min_size": 4}
    method = {"name": "hiper_fedkd", "temperature": 2.0, "decay": 1.5, "floor": 0.2}
    ready = federation(method, partition=split, plan={"lr": 0.005, "momentum": 0.0, "batch": 8})
    fed, taus = (
        Plainly(ready, held=0.2, shuffled=False),
        temperatures(ready, "exponential", False, 1.5),
    )
    for round in (1, 2):
        for c in CLIENTS:

            def loss(z: Tensor, y: Tensor, tau: float = taus[c]) -> Tensor:
                return -((z / tau).softmax(1)[torch.arange(len(y)), y] + 0.2).log().mean()

            fed.fit(c, round, 0, *fed.own(c), loss)
        target = sum(scored(fed.says(c)) for c in CLIENTS) / 4
        for c in (SERVER, *CLIENTS):
            fed.fit(
                c,
                round,
                1 if c == SERVER else 2,
                fed.public,
                target,
                kl_at(2.0, scored),
                public=True,
            )
    fed.compare()


@pytest.mark.parametrize("aggregation", ["era", "mean"])
@pytest.mark.parametrize("subset", [0, 20])
def test_dsfl(aggregation: str, subset: int) -> None:
    ready = federation(
        {"name": "dsfl", "aggregation": aggregation, "temperature": 0.2, "subset": subset}
    )
    fed = Plainly(ready)
    for round in (1, 2):
        draw = generator(seed_for(7, round, 0, SERVER, "public subset"))
        some = (
            torch.randperm(toys.PUBLIC, generator=draw)[:subset].sort().values
            if subset
            else torch.arange(50)
        )
        for c in CLIENTS:
            fed.fit(c, round, 0, *fed.own(c), ce)
        mean = sum(fed.says(c)[some].softmax(1) for c in CLIENTS) / 4
        sharp = (
            (mean / 0.2).exp() / (mean / 0.2).exp().sum(1, keepdim=True)
            if aggregation == "era"
            else mean
        )
        for c in (SERVER, *CLIENTS):
            loss = lambda z, p: -(p * z.log_softmax(1)).sum(1).mean()  # noqa: E731
            fed.fit(c, round, 1 if c == SERVER else 2, fed.public[some], sharp, loss)
    fed.compare()


@pytest.mark.parametrize("first", ["pretrain", ""])
def test_fedmd(first: str) -> None:
    ready = federation("fedmd", topology={"clients": 4, "first": first}, plan={"lr": 0.01})
    fed = Plainly(ready, adam=True)
    for round in (1, 2):
        stage = 0
        if first and round == 1:
            for c in CLIENTS:
                fed.fit(c, 1, 0, fed.public, fed.public_labels, ce)
            stage = 1
        for c in CLIENTS:
            fed.fit(c, round, stage, *fed.own(c), ce)
        target = sum(fed.says(c) for c in CLIENTS) / 4
        for c in (SERVER, *CLIENTS):
            where = stage + (1 if c == SERVER else 2)
            fed.fit(c, round, where, fed.public, target, nn.functional.l1_loss)
    for c in CLIENTS:
        fed.fit(c, 2, 3, *fed.own(c), ce)
    fed.compare()
