"""FD and FedProto, whose clients agree on values of each class, against a plain implementation of
each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain import (
    Federation,
    Loss,
    assert_personal_models,
    assert_same_model,
    ce,
    drive,
    minus,
    norm,
    ready_for,
    run_of,
    weighted_mean,
)
from torch import Tensor, nn

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import Payload, Reply, State, TrainingStart
from fedstill.core.registry import lookup
from fedstill.core.trees import same_bits
from fedstill.data.sources import from_clients
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

CLASSES = toys.CLASSES
WIDTH = 8
"""The number of features."""

STRENGTH = 0.5

ClassValues = dict[int, Tensor]
"""A vector of each class that is there."""


def mean_by_class(values: Tensor, labels: Tensor) -> ClassValues:
    """The mean value of the examples of each class."""
    return {c: values[labels == c].mean(0) for c in sorted(set(labels.tolist()))}


# FedProto.


def near_prototypes(prototypes: ClassValues) -> Loss:
    """Cross-entropy, and the distance of each example's features from its class's prototype."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        distances = []
        for example, label in zip(x.split(1), y.tolist(), strict=True):
            if label in prototypes:
                distances.append(((model.body(example) - prototypes[label]) ** 2).mean())
        return ce(model, x, y) + STRENGTH * sum(distances) / len(y)

    return loss


@pytest.mark.parametrize("aggregation", ["uniform", "examples"])
def test_fedproto(aggregation: str) -> None:
    """Prototypes are averaged over the clients that have the class, and networks are not."""
    method = {"name": "fedproto", "strength": STRENGTH, "aggregation": aggregation}
    ready = ready_for(method, rounds=3, plan={"epochs": 2})
    fed = Federation(ready)
    models = dict.fromkeys(fed.clients, fed.start)
    prototypes: ClassValues = {}
    for round_index in (1, 2, 3):
        loss = near_prototypes(dict(prototypes))
        reported = {}
        for client in fed.cohort(round_index):
            models[client] = fed.fit(models[client], loss, round_index, client).params
            x, y = fed.data(client)
            features = fed.net(models[client]).body(x).detach()
            reported[client] = mean_by_class(features, y)
        for c in range(CLASSES):
            values = {client: means[c] for client, means in reported.items() if c in means}
            weights = [1] * len(values)
            if aggregation == "examples":
                weights = [int(fed.label_counts(client)[c]) for client in values]
            if values:
                terms = zip(weights, values.values(), strict=True)
                prototypes[c] = sum(weight * value for weight, value in terms) / sum(weights)

    ours = drive(ready)

    assert ours.final.params == {}
    our_prototypes = ours.final.extra.tensor("values")
    is_known = ours.final.extra.tensor("seen") > 0
    assert set(is_known.nonzero().flatten().tolist()) == set(prototypes)
    for c, prototype in prototypes.items():
        assert_same_model({"prototype": our_prototypes[c]}, {"prototype": prototype})
    assert_personal_models(ours, models, fed.participants(3))


# FD.


def taught_by_class(teachers: ClassValues) -> Loss:
    """Cross-entropy, and the divergence of each example's logits from its class's."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        divergences = []
        for z, label in zip(model(x), y.tolist(), strict=True):
            if label in teachers:
                log_p = teachers[label].log_softmax(0)
                divergences.append((log_p.exp() * (log_p - z.log_softmax(0))).sum())
        return ce(model, x, y) + STRENGTH * sum(divergences) / len(y)

    return loss


def mean_of_peers(reported: dict[int, ClassValues], client: int) -> ClassValues:
    """For each class, the mean of what other clients reported."""
    means = {}
    for c in range(CLASSES):
        values = [v[c] for peer, v in reported.items() if peer != client and c in v]
        if values:
            means[c] = sum(values) / len(values)
    return means


@pytest.mark.parametrize("averages_weights", [False, True])
def test_fd(averages_weights: bool) -> None:
    """Clients learn from the last round's mean logits of their peers."""
    method = {"name": "fd", "strength": STRENGTH, "average_weights": averages_weights}
    ready = ready_for(method, rounds=3)
    fed = Federation(ready)
    models = dict.fromkeys(fed.clients, fed.start)
    server = fed.start
    reported: dict[int, ClassValues] = {}
    for round_index in (1, 2, 3):
        last_reported = reported
        reported = {}
        for client in fed.cohort(round_index):
            start = models[client]
            if averages_weights:
                start = server
            loss = taught_by_class(mean_of_peers(last_reported, client))
            models[client] = fed.fit(start, loss, round_index, client).params
            x, y = fed.data(client)
            reported[client] = mean_by_class(fed.net(models[client])(x).detach(), y)
        sizes = [fed.size(client) for client in reported]
        server = weighted_mean([models[client] for client in reported], sizes)

    ours = drive(ready)

    if averages_weights:
        assert_same_model(ours.params, server)
    assert_personal_models(ours, models, fed.participants(3))


# Both methods.


@pytest.mark.parametrize("name", ["fd", "fedproto"])
def test_without_weight_clients_train_alone_to_the_bit_and_with_it_they_do_not(name: str) -> None:
    changes = {"rounds": 3, "topology": {"clients": 6}, "plan": {"epochs": 1}}

    alone = run_of({"name": "lg_fedavg", "layers": 0}, **changes)
    without_weight = run_of({"name": name, "strength": 0.0}, **changes)
    with_weight = run_of({"name": name, "strength": 1.0}, **changes)

    for client in range(6):
        expected = alone.personal_model(client)
        assert same_bits(without_weight.personal_model(client), expected)
        assert norm(minus(with_weight.personal_model(client), expected)) > 1e-3


def reply(client: int, means: Tensor, counts: list[int]) -> Reply:
    """A client's mean value and number of examples of each class."""
    content = Payload(means=means, counts=torch.tensor(counts))
    return Reply(client, content, sum(counts))


def test_two_clients_get_exactly_each_others_logits_and_one_alone_gets_none() -> None:
    world = ready_for("fd", topology={"clients": 2, "sampled": 2}).world
    method = lookup("method", "fd").build()
    counts = [[3, 1, 0, 2, 0], [0, 5, 0, 1, 1]]
    draw = torch.Generator().manual_seed(0)
    means = torch.randn(2, CLASSES, CLASSES, generator=draw).double()
    means[torch.tensor(counts) == 0] = 0
    replies = [reply(client, means[client], counts[client]) for client in range(2)]

    state = method.aggregate(method.initial_state(world), replies, None, world)

    for client, peer in ((0, 1), (1, 0)):
        payload = method.payload_for_client(state, client, None, world)
        assert payload.tensor("seen").tolist() == [float(count > 0) for count in counts[peer]]
        assert torch.equal(payload.tensor("values"), means[peer])

    state = method.aggregate(state, replies[:1], None, world)
    payload = method.payload_for_client(state, 0, None, world)
    assert not payload.tensor("seen").any()


def test_a_prototype_is_the_mean_over_clients_that_have_the_class_in_any_order() -> None:
    """A class that no client of the round has keeps its prototype."""
    method = lookup("method", "fedproto").build()
    is_known = torch.tensor([0.0, 0.0, 1.0])
    state = State(params={}).next(values=torch.full((3, 2), 9.0), seen=is_known)
    replies = [
        reply(0, torch.tensor([[1, 2], [3, 4], [0, 0]]), [5, 1, 0]),
        reply(1, torch.tensor([[3, 6], [0, 0], [0, 0]]), [1, 0, 0]),
    ]

    for in_order in (replies, replies[::-1]):
        extra = method.aggregate(state, in_order, None, None).extra
        assert extra.tensor("values").tolist() == [[2.0, 4.0], [3.0, 4.0], [9.0, 9.0]]
        assert extra.tensor("seen").tolist() == [1.0, 1.0, 1.0]


def test_features_that_are_their_prototypes_are_not_moved() -> None:
    method = lookup("method", "fedproto").build()

    class ConstantFeatures:
        def features(self) -> Tensor:
            return torch.ones(4, 2)

    assert method.distance(ConstantFeatures(), torch.ones(4, 2)).tolist() == [0.0] * 4


def test_networks_may_differ_but_for_the_number_of_features() -> None:
    networks = ({"name": "mlp", "hidden": (WIDTH,)}, {"name": "mlp", "hidden": (6, WIDTH)})

    ours = run_of("fedproto", clients={"models": networks}, topology={"clients": 6})

    assert ours.final.extra.tensor("seen").bool().all()
    assert {len(ours.personal_model(client)) for client in range(6)} == {4, 6}

    other_features = toys.toy("fedproto", clients={"models": ("mlp", "logistic")})
    with pytest.raises(IncompatibleMethod, match="number of features"):
        prepare(resolve(other_features), toys.blobs())
    fd = {"name": "fd", "average_weights": True}
    with pytest.raises(IncompatibleMethod, match="averages weights"):
        prepare(resolve(toys.toy(fd, clients={"models": networks})), toys.blobs())


def test_a_client_with_test_data_reports_the_accuracy_of_the_nearest_prototype() -> None:
    ready = ready_for("fedproto", rounds=1)
    fed = Federation(ready)
    stage = ready.settings.schedule(1, ready.world)[0]
    client = stage.clients[0]
    work = ready.settings.method.work(stage)
    x, y = fed.data(client)
    features = fed.net(fed.start).body(x).detach()
    prototypes = mean_by_class(features, y)
    values = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)
    is_known = torch.zeros(CLASSES)
    for c, prototype in prototypes.items():
        values[c] = prototype
        is_known[c] = 1
    start = TrainingStart(fed.start, constants={"values": values, "seen": is_known})
    view = ready.sites.view(client, stage)

    with_test = work.report(fed.start, start, replace(view, test=view.data), ready.world)
    without_test = work.report(fed.start, start, replace(view, test=None), ready.world)

    known_classes = torch.tensor(list(prototypes))
    distances = torch.cdist(features, values[known_classes])
    correct = known_classes[distances.argmin(1)] == y
    assert with_test == {"nearest_prototype": int(correct.sum()) / len(y)}
    assert without_test == {}


def test_clients_with_test_data_report_the_nearest_prototype_from_the_second_round_on(
    tmp_path: Path,
) -> None:
    draw = torch.Generator().manual_seed(0)

    def examples(size: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(size) % 3
        return torch.randn(size, 4, generator=draw) + 3 * torch.eye(4)[labels], labels

    clients = [(examples(30), examples(12)), (examples(24), examples(9))]
    data = from_clients("own", clients, kind="table")
    experiment = Experiment(
        method="fedproto",
        model={"name": "mlp", "hidden": (6,)},
        rounds=3,
        plan={"epochs": 5, "lr": 0.05},
    )

    run(experiment, tmp_path / "run", data)

    events = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"]
    accuracies: dict[int, list[float]] = {}
    for event in events:
        if "nearest_prototype" in event:
            accuracies.setdefault(event["round"], []).append(event["nearest_prototype"])
    assert set(accuracies) == {2, 3}
    assert len(accuracies[3]) == 2
    assert min(accuracies[3]) > 0.5
