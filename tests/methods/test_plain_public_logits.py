"""Two rounds of the methods that exchange logits on public images, against the same written out
plainly.

Four networks that differ learn together. Of the library only draws are used: the order of examples,
held-out data, and the public subset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from plain import (
    PLAN,
    SEED,
    Examples,
    Params,
    assert_same_model,
    at_labels,
    batches,
    drive,
    normalised,
    ready_for,
    split_for_validation,
    weights_of,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import toys
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER
from fedstill.models import contract
from fedstill.running.preparation import Prepared

CLIENTS = (0, 1, 2, 3)
LEARNERS = (SERVER, *CLIENTS)

LogitLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss of logits, and of labels or of a teacher's answers."""

Change = Callable[[Tensor], Tensor]
"""What becomes of logits before they are used."""


def federation(method: object, **changes: object) -> Prepared:
    """Clients with three kinds of networks, and public images."""
    values = {
        "data": {"public": toys.PUBLIC},
        "topology": {"clients": len(CLIENTS)},
        "clients": {"models": ("logistic", "digits_cnn", "mlp")},
    }
    return ready_for(method, **{**values, **changes})


class Plainly:
    """The models of the server and of all clients, and how they train."""

    def __init__(
        self, ready: Prepared, *, adam: bool = False, held_out: float = 0.0, **plan: float
    ) -> None:
        self.ready = ready
        self.plan = {**PLAN, **plan}
        self.adam = adam
        self.held_out = held_out
        self.public = Examples(
            normalised(ready, ready.sites.public.values), ready.sites.public.labels
        )
        self.models: dict[int, Params] = {}
        for learner in LEARNERS:
            initial = ready.world.initial(learner)
            self.models[learner] = {name: value.clone() for name, value in initial.items()}

    def net(self, learner: int) -> nn.Module:
        """The network of the server or a client."""
        network = contract.build(self.ready.world.model(learner)).double()
        network.load_state_dict(self.models[learner])
        return network

    def private(self, client: int) -> Examples:
        """The examples that a client trains on."""
        positions = self.ready.sites.positions(client)
        size = len(positions)
        split = split_for_validation(size, round(self.held_out * size), client)
        positions = positions[split.training]
        train = self.ready.sites.train
        return Examples(normalised(self.ready, train.values[positions]), train.labels[positions])

    def optimiser(self, network: nn.Module, round_index: int) -> torch.optim.Optimizer:
        """Adam, or SGD with momentum."""
        lr = self.plan["lr"] * self.plan["lr_decay"] ** (round_index - 1)
        weight_decay = self.plan["weight_decay"]
        if self.adam:
            return torch.optim.Adam(
                network.parameters(), lr=lr, weight_decay=weight_decay, foreach=False
            )
        return torch.optim.SGD(
            network.parameters(),
            lr=lr,
            momentum=self.plan["momentum"],
            weight_decay=weight_decay,
            foreach=False,
        )

    def fit(
        self,
        learner: int,
        examples: Examples,
        loss: LogitLoss,
        *,
        round_index: int,
        stage: int,
        in_data_order: bool = False,
    ) -> None:
        """Train the model of the server or a client."""
        network = self.net(learner).train()
        optimiser = self.optimiser(network, round_index)
        size = len(examples.labels)
        order = list(batches(size, self.plan, round_index, stage, learner))
        if in_data_order:
            order = list(torch.arange(size).split(int(self.plan["batch"])))
            order = order * int(self.plan["epochs"])
        for index in order:
            x, y = examples.take(index)
            optimiser.zero_grad()
            loss(network(x), y).backward()
            optimiser.step()
        self.models[learner] = weights_of(network)

    def fit_privately(
        self, losses: Mapping[int, LogitLoss], *, round_index: int, stage: int
    ) -> None:
        """Train each client on its examples."""
        for client, loss in losses.items():
            self.fit(client, self.private(client), loss, round_index=round_index, stage=stage)

    def distil(
        self,
        teacher: Examples,
        loss: LogitLoss,
        *,
        round_index: int,
        stage: int,
        in_data_order: bool = False,
    ) -> None:
        """Train the server in a stage and the clients in the next one, on the teacher's answers."""
        for learner in LEARNERS:
            learner_stage = stage
            if learner != SERVER:
                learner_stage = stage + 1
            self.fit(
                learner,
                teacher,
                loss,
                round_index=round_index,
                stage=learner_stage,
                in_data_order=in_data_order,
            )

    @torch.no_grad()
    def logits(self, client: int) -> Tensor:
        """A client's logits on the public images."""
        return self.net(client).eval()(self.public.inputs)

    def assert_same_as_library(self) -> None:
        """All models are the library's, and have learned something."""
        run = drive(self.ready)
        ours = {client: run.personal_model(client) for client in CLIENTS}
        ours[SERVER] = run.params
        for learner, model in ours.items():
            assert_same_model(model, self.models[learner])
            for name, initial in self.ready.world.initial(learner).items():
                assert float((model[name] - initial).abs().max()) > 1e-4


def mean(values: list[Tensor]) -> Tensor:
    """The mean over clients."""
    return sum(values) / len(values)


# HiPer.


def unchanged(z: Tensor) -> Tensor:
    """Logits as they are."""
    return z


def standardised(z: Tensor) -> Tensor:
    """Logits of mean 0 and standard deviation 1, example by example."""
    return (z - z.mean(1, keepdim=True)) / (z.std(1, keepdim=True) + 1e-6)


def distillation(change: Change) -> LogitLoss:
    """The divergence from a teacher's logits at temperature 2."""

    def loss(z: Tensor, teacher: Tensor) -> Tensor:
        student = (change(z) / 2).log_softmax(1)
        p = (teacher / 2).softmax(1)
        return 2**2 * nn.functional.kl_div(student, p, reduction="batchmean")

    return loss


def temperatures(ready: Prepared, kind: str, counts_absent: bool) -> list[float]:
    """HiPer's temperatures of all clients, from their label counts: the more skewed, the lower."""
    if kind == "off":
        return [1.0] * len(CLIENTS)
    labels = ready.sites.train.labels.numpy()
    counts = [np.bincount(labels[part], minlength=toys.CLASSES) for part in ready.sites.split]
    shares = np.array([count / count.sum() for count in counts])
    global_shares = np.maximum(shares.mean(0), 0.01)
    global_shares = global_shares / global_shares.sum()

    skews = np.abs(shares / global_shares - 1)
    if not counts_absent:
        skews[shares == 0] = 0
    skew = np.minimum(1.0, skews.sum(1) / toys.CLASSES)
    values = 0.99 * np.exp(-1.5 * skew)
    if kind == "linear":
        values = 0.99 - 0.98 * skew
    return np.clip(values, 0.01, 0.99).tolist()


def cross_entropy_at(temperature: float, floor: float = 0.0) -> LogitLoss:
    """Cross-entropy of scaled logits, with a floor under the label's probability."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return -(at_labels((z / temperature).softmax(1), y) + floor).log().mean()

    return loss


def assert_hiper(method: dict[str, object], kind: str, change: Change) -> None:
    """Two rounds of HiPer are those written out here."""
    ready = federation(
        {"temperature": 2.0, "decay": 1.5, **method},
        partition={"kind": "dirichlet", "alpha": 0.5, "min_size": 4},
        plan={"lr": 0.005, "momentum": 0.0, "batch": 8},  # 8 does not divide 50
    )
    fed = Plainly(ready, held_out=0.2, lr=0.005, momentum=0.0, batch=8)
    taus = temperatures(ready, kind, bool(method.get("count_absent")))
    floor = float(method.get("floor", 0.0))  # type: ignore[arg-type]
    assert kind == "off" or len(set(taus)) == len(CLIENTS)
    losses = {client: cross_entropy_at(taus[client], floor) for client in CLIENTS}
    for round_index in (1, 2):
        fed.fit_privately(losses, round_index=round_index, stage=0)
        answers = mean([change(fed.logits(client)) for client in CLIENTS])
        teacher = Examples(fed.public.inputs, answers)
        fed.distil(
            teacher, distillation(change), round_index=round_index, stage=1, in_data_order=True
        )

    fed.assert_same_as_library()


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("hiper_baseline", "off", unchanged),
        ("hiper_temperature", "linear", unchanged),
        ("hiper_standardised", "linear", standardised),
        ("hiper_fedkd", "exponential", standardised),
    ],
)
@pytest.mark.parametrize("count_absent", [False, True])
def test_hiper(name: str, kind: str, change: Change, count_absent: bool) -> None:
    """Each client's temperature follows from its labels."""
    assert_hiper({"name": name, "count_absent": count_absent}, kind, change)


def test_hiper_over_a_floor() -> None:
    """Large, so that it matters: 0.2 is added to the probability of the label."""
    assert_hiper({"name": "hiper_fedkd", "floor": 0.2}, "exponential", standardised)


# DS-FL and FedMD.


def soft_cross_entropy(z: Tensor, p: Tensor) -> Tensor:
    """Cross-entropy with soft labels."""
    return -(p * z.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("aggregation", ["era", "mean"])
@pytest.mark.parametrize("subset", [0, 20])
def test_dsfl(aggregation: str, subset: int) -> None:
    """The mean of the clients' probabilities teaches all of them, sharpened or as it is."""
    method = {"name": "dsfl", "aggregation": aggregation, "temperature": 0.2, "subset": subset}
    fed = Plainly(federation(method))
    for round_index in (1, 2):
        positions = torch.arange(toys.PUBLIC)
        if subset:
            draw = generator(seed_for(SEED, round_index, 0, SERVER, "public subset"))
            positions = torch.randperm(toys.PUBLIC, generator=draw)[:subset].sort().values
        losses = dict.fromkeys(CLIENTS, cross_entropy)
        fed.fit_privately(losses, round_index=round_index, stage=0)
        answers = mean([fed.logits(client)[positions].softmax(1) for client in CLIENTS])
        if aggregation == "era":
            sharp = (answers / 0.2).exp()
            answers = sharp / sharp.sum(1, keepdim=True)
        teacher = Examples(fed.public.inputs[positions], answers)
        fed.distil(teacher, soft_cross_entropy, round_index=round_index, stage=1)

    fed.assert_same_as_library()


@pytest.mark.parametrize("first", ["pretrain", ""])
def test_fedmd(first: str) -> None:
    """Clients may first learn the public labels; at the end they revisit their data."""
    ready = federation("fedmd", topology={"clients": 4, "first": first}, plan={"lr": 0.01})
    fed = Plainly(ready, adam=True, lr=0.01)
    losses = dict.fromkeys(CLIENTS, cross_entropy)
    for round_index in (1, 2):
        stage = 0
        if first and round_index == 1:
            for client in CLIENTS:
                fed.fit(client, fed.public, cross_entropy, round_index=1, stage=0)
            stage = 1
        fed.fit_privately(losses, round_index=round_index, stage=stage)
        answers = mean([fed.logits(client) for client in CLIENTS])
        teacher = Examples(fed.public.inputs, answers)
        fed.distil(teacher, nn.functional.l1_loss, round_index=round_index, stage=stage + 1)
    fed.fit_privately(losses, round_index=2, stage=3)

    fed.assert_same_as_library()
