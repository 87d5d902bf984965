"""FedTGP against a plain implementation, and the properties of its server's stage."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from plain import (
    SEED,
    Federation,
    Loss,
    Params,
    assert_personal_models,
    batches,
    ce,
    drive,
    ready_for,
    run_of,
)
from torch import Tensor, nn

import toys
from double import NEAR
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, Payload, Plan, Reply, Stage
from fedstill.core.registry import lookup
from fedstill.core.trees import same_bits
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.methods.fedtgp import TrainPrototypes, all_prototypes, table_of
from fedstill.models import contract
from fedstill.running.preparation import prepare

CLASSES = toys.CLASSES
WIDTH = 8
"""The number of features."""

STRENGTH = 0.5
PROTOTYPE_PLAN = {
    "epochs": 4,
    "batch": 3,
    "lr": 0.05,
    "lr_decay": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


class Table(nn.Module):
    """The server's network, which has a prototype for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(CLASSES, WIDTH).double()
        self.out = nn.Linear(WIDTH, WIDTH).double()
        spec = table_of(torch.zeros(CLASSES, WIDTH))
        initial = contract.initial(spec, seed_for(SEED, 0, 0, SERVER, "prototypes"))
        self.load_state_dict(
            {
                "embedding.weight": initial["body.1.weight"],
                "embedding.bias": initial["body.1.bias"],
                "out.weight": initial["head.weight"],
                "out.bias": initial["head.bias"],
            }
        )

    def forward(self) -> Tensor:
        return self.out(self.embedding(torch.eye(CLASSES, dtype=torch.float64)).relu())


@dataclass(frozen=True)
class ClassMean:
    """The mean features of a client's examples of a class."""

    features: Tensor
    label: int


def class_means(features: Tensor, labels: Tensor) -> list[ClassMean]:
    """Of each class that there is."""
    return [ClassMean(features[labels == c].mean(0), c) for c in sorted(set(labels.tolist()))]


def margin_of(means: list[ClassMean], largest: float) -> float:
    """The widest gap between the mean of a class over clients and the next class."""
    centres = {}
    for label in {mean.label for mean in means}:
        features = [mean.features for mean in means if mean.label == label]
        centres[label] = sum(features) / len(features)
    gaps = []
    for label, centre in centres.items():
        distances = [float((centre - v).norm()) for c, v in centres.items() if c != label]
        gaps.append(min(distances))
    return min(max(gaps), largest)


def train_table(
    table: Table, means: list[ClassMean], round_index: int, largest_margin: float
) -> None:
    """The server's training, mean by mean."""
    margin = margin_of(means, largest_margin)
    sgd = torch.optim.SGD(table.parameters(), lr=PROTOTYPE_PLAN["lr"], foreach=False)
    for index in batches(len(means), PROTOTYPE_PLAN, round_index, 1, SERVER):
        sgd.zero_grad()
        prototypes = table()
        losses = []
        for position in index.tolist():
            mean = means[position]
            distances = (prototypes - mean.features).norm(dim=1)
            is_label = torch.arange(CLASSES) == mean.label
            logits = -(distances + margin * is_label)
            losses.append(-logits.log_softmax(0)[mean.label])
        torch.stack(losses).mean().backward()
        sgd.step()


def near_prototypes(prototypes: Tensor, known_classes: set[int]) -> Loss:
    """Cross-entropy, and the distance of each example's features from its class's prototype."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        distances = []
        for example, label in zip(x.split(1), y.tolist(), strict=True):
            if label in known_classes:
                distances.append(((model.body(example) - prototypes[label]) ** 2).mean())
        return ce(model, x, y) + STRENGTH * sum(distances) / len(y)

    return loss


@pytest.mark.parametrize("largest_margin", [100.0, 0.1])
def test_fedtgp(largest_margin: float) -> None:
    """The server trains prototypes that keep classes apart."""
    method = {"name": "fedtgp", "strength": STRENGTH, "largest_margin": largest_margin}
    ready = ready_for(method, rounds=3, plan={"prototypes": PROTOTYPE_PLAN})
    fed = Federation(ready)
    table = Table()
    models = dict.fromkeys(fed.clients, fed.start)
    known_classes: set[int] = set()
    prototypes = torch.zeros(CLASSES, WIDTH)
    for round_index in (1, 2, 3):
        loss = near_prototypes(prototypes, set(known_classes))
        means = []
        for client in fed.cohort(round_index):
            models[client] = fed.fit(models[client], loss, round_index, client).params
            x, y = fed.data(client)
            means += class_means(fed.net(models[client]).body(x).detach(), y)
        known_classes |= {mean.label for mean in means}
        train_table(table, means, round_index, largest_margin)
        prototypes = table().detach()

    ours = drive(ready)

    extra = ours.final.extra
    torch.testing.assert_close(extra.tensor("values"), prototypes, rtol=NEAR, atol=NEAR)
    assert set(extra.tensor("seen").nonzero().flatten().tolist()) == known_classes
    assert set(extra) == {"values", "seen", "table"}
    assert_personal_models(ours, models, fed.participants(3))


def test_without_weight_clients_train_alone_to_the_bit() -> None:
    changes = {"rounds": 3, "topology": {"clients": 6}, "plan": {"epochs": 1}}
    ours = run_of({"name": "fedtgp", "strength": 0.0}, **changes)
    alone = run_of({"name": "lg_fedavg", "layers": 0}, **changes)

    for client in range(6):
        assert same_bits(ours.personal_model(client), alone.personal_model(client))


def test_a_server_of_no_epochs_leaves_the_prototypes_as_they_were_drawn() -> None:
    states = run_of("fedtgp", plan={"prototypes": {"epochs": 0}}).states

    initial = states[0].extra
    final = states[-1].extra
    assert same_bits(initial.tensors("table"), final.tensors("table"))
    torch.testing.assert_close(final.tensor("values"), Table()().detach())


def test_without_a_margin_and_with_one_pair_a_class_the_loss_falls_in_every_epoch() -> None:
    """It begins as the cross-entropy of negative distances. A class without examples takes no
    part.
    """
    ready = ready_for("fedtgp")
    stage = Stage(1, 1, "prototypes", (SERVER,), "public")
    view = ready.sites.view(SERVER, stage)
    means = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([1, 2, 0, 3, 1])
    table: Params = contract.initial(table_of(torch.zeros(CLASSES, WIDTH)), 0)
    payload = Payload({"means.0": means, "counts.0": counts, "table": table, "margin": 0.0})

    start = TrainPrototypes().begin(payload, Payload(), view, ready.world)
    losses = []
    for epochs in range(1, 6):
        plan = Plan(epochs=epochs, batch=10, lr=0.01)
        setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=SEED)
        losses.append(train(TrainPrototypes(), start, view, setup).losses["apart"])

    assert start.examples.labels.tolist() == [0, 1, 3, 4]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    prototypes = all_prototypes(start["spec"], table).double()
    distances = torch.cdist(start.examples.values.double(), prototypes)
    first_loss = nn.functional.cross_entropy(-distances, start.examples.labels)
    assert losses[0] == pytest.approx(float(first_loss), rel=1e-5)


def test_the_margin_is_the_widest_gap_to_the_next_class_up_to_its_bound() -> None:
    """Of a single class there is no gap."""
    ready = ready_for("fedtgp")
    method = lookup("method", "fedtgp").build()
    bounded_method = lookup("method", "fedtgp").build(largest_margin=5.0)
    stage = Stage(1, 0, "train", (0, 1))
    means = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)
    means[:3, 0] = torch.tensor([0.0, 3.0, 10.0])
    initial = method.initial_state(ready.world)

    def margin(method: object, counts: list[int]) -> float:
        reply = Reply(0, Payload(means=means, counts=torch.tensor(counts)), 3)
        return method.margin(method.aggregate(initial, [reply], stage, ready.world))

    assert margin(method, [1, 1, 1, 0, 0]) == pytest.approx(7.0)
    assert margin(bounded_method, [1, 1, 1, 0, 0]) == 5.0
    assert margin(method, [1, 0, 0, 0, 0]) == 0.0


def test_without_its_servers_stage_it_is_refused() -> None:
    toy = toys.toy("fedtgp", topology={"clients": 6, "server": ""})
    with pytest.raises(IncompatibleMethod, match=r"set topology\.server = 'prototypes'"):
        prepare(resolve(toy), toys.blobs())
