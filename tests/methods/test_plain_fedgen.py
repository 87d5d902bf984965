"""FedGen against a plain implementation, and the properties of its generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from plain import (
    SEED,
    ClientResult,
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    at_labels,
    average,
    batches,
    ce,
    drive,
    kl,
    ready_for,
    run_of,
)
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

CLASSES = toys.CLASSES
NOISE = 3
HIDDEN = 6
FEATURES = 8
SAMPLES = 40
DIVERSITY = 0.7
DECAY = 0.8
SMALL = {"name": "fedgen", "noise": NOISE, "hidden": HIDDEN, "samples": SAMPLES}
GENERATE = {
    "epochs": 2,
    "batch": 16,
    "lr": 0.01,
    "lr_decay": 1.0,
    "weight_decay": 0.01,
    "momentum": 0.0,
}


def draw_of(round_index: int, client: int) -> torch.Generator:
    """Draws the noise of a round's client or server."""
    return generator(seed_for(SEED, round_index, 0, client, "generate"))


def generator_inputs(labels: Tensor, draw: torch.Generator) -> Tensor:
    """Noise, and the labels that features are generated for."""
    noise = torch.rand(len(labels), NOISE, generator=draw, dtype=torch.float64)
    return torch.cat([noise, nn.functional.one_hot(labels, CLASSES).double()], 1)


def by_position(entries: Mapping[str, Tensor]) -> Params:
    """The library's generator by the names of an ``nn.Sequential``."""
    positions = {"body.1": "0", "head": "2"}
    renamed = {}
    for name, value in entries.items():
        layer, entry = name.rsplit(".", 1)
        renamed[f"{positions[layer]}.{entry}"] = value
    return renamed


def initial_generator(ready: Prepared) -> nn.Sequential:
    """The generator before round 1."""
    spec = ready.settings.method.spec(ready.world)
    initial = contract.initial(spec, seed_for(SEED, 0, 0, SERVER, "generate"))
    network = nn.Sequential(
        nn.Linear(NOISE + CLASSES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)
    ).double()
    network.load_state_dict(by_position(initial))
    return network


def train_generator(
    network: nn.Sequential, fed: Federation, results: Sequence[ClientResult], round_index: int
) -> None:
    """The server's training of the generator, head by head and pair by pair."""
    counts = {result.client: fed.label_counts(result.client).double() for result in results}
    total = sum(counts.values())
    known_classes = total.nonzero().flatten()
    draw = draw_of(round_index, SERVER)
    labels = known_classes[torch.randint(len(known_classes), (SAMPLES,), generator=draw)]
    inputs = generator_inputs(labels, draw)
    adam = torch.optim.Adam(
        network.parameters(),
        lr=GENERATE["lr"],
        weight_decay=GENERATE["weight_decay"],
        foreach=False,
    )
    for index in batches(SAMPLES, GENERATE, round_index, 1, SERVER):
        adam.zero_grad()
        features = network(inputs[index])
        y = labels[index]
        loss = DIVERSITY * closeness(inputs[index, :NOISE], features)
        for result in results:
            head = result.params
            z = features @ head["head.weight"].T + head["head.bias"]
            shares = (counts[result.client] / total.clamp(min=1))[y]
            loss = loss - (shares * at_labels(z.log_softmax(1), y)).mean()
        loss.backward()
        adam.step()


def closeness(noise: Tensor, features: Tensor) -> Tensor:
    """The loss on diversity: large if examples of different noise have the same features."""
    products = []
    for noise_a, features_a in zip(noise, features, strict=True):
        for noise_b, features_b in zip(noise, features, strict=True):
            noise_distance = ((noise_a - noise_b) ** 2).mean()
            products.append(noise_distance * (features_a - features_b).abs().mean())
    return torch.exp(-sum(products) / len(products))


def batch_offsets(fed: Federation, round_index: int, client: int) -> Iterator[Tensor]:
    """For each batch of a client: the positions of its examples, plus the epoch."""
    size = fed.size(client)
    batches_per_epoch = -(-size // int(fed.plan["batch"]))
    for number, index in enumerate(fed.batches(round_index, client)):
        yield index + number // batches_per_epoch


def with_generated_features(
    network: nn.Sequential,
    fed: Federation,
    round_index: int,
    client: int,
    *,
    weight: float,
    match: float,
) -> Loss:
    """Cross-entropy; that of the head on generated features; and the divergence from the head's
    answers to generated features of the batch's labels.
    """
    draw = draw_of(round_index, client)
    pool_labels = torch.arange(CLASSES).repeat_interleave(POOL)
    with torch.no_grad():
        pool = network(generator_inputs(pool_labels, draw))
    mixed = torch.randperm(CLASSES * POOL, generator=draw)
    offsets = batch_offsets(fed, round_index, client)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        offset = next(offsets)
        any_class = mixed[offset % len(mixed)]
        generated_loss = nn.functional.cross_entropy(
            model.head(pool[any_class]), pool_labels[any_class]
        )
        of_labels = pool.view(CLASSES, POOL, -1)[y, offset % POOL]
        p = model.head(of_labels).detach().softmax(1)
        match_loss = kl(p, model(x).softmax(1)).mean()
        return ce(model, x, y) + weight * generated_loss + match * match_loss

    return loss


@pytest.mark.parametrize(("weight", "match"), [(0.5, 0.3), (0.0, 0.3)])
def test_fedgen(weight: float, match: float) -> None:
    """From round 2 on, clients learn from generated features, less in every round."""
    method = {**SMALL, "weight": weight, "match": match, "decay": DECAY, "diversity": DIVERSITY}
    ready = ready_for(method, rounds=3, plan={"generate": GENERATE})
    fed = Federation(ready)
    all_counts = sum(fed.label_counts(client) for client in fed.clients)
    assert bool((all_counts > 0).all())
    network = initial_generator(ready)
    params = fed.start
    for round_index in (1, 2, 3):
        decay = DECAY ** (round_index - 1)
        results = []
        for client in fed.cohort(round_index):
            loss = ce
            if round_index > 1:
                loss = with_generated_features(
                    network,
                    fed,
                    round_index,
                    client,
                    weight=decay * weight,
                    match=decay * match,
                )
            results.append(fed.fit(params, loss, round_index, client))
        params = average(results)
        train_generator(network, fed, results, round_index)

    ours = drive(ready).final

    assert_same_model(ours.params, params)
    assert_unlike_fedavg(ours.params, ready, 3)
    expected_generator = {name: value.detach() for name, value in network.state_dict().items()}
    assert_same_model(by_position(ours.extra.tensors("generator")), expected_generator)
    assert set(ours.extra) == {"labels", "generator"}


def test_without_both_weights_it_is_federated_averaging_to_the_bit() -> None:
    ours = run_of({**SMALL, "weight": 0.0, "match": 0.0}, rounds=3).params

    assert same_bits(ours, run_of("fedavg", rounds=3).params)


def test_the_diversity_loss_is_1_for_equal_features_and_less_for_others() -> None:
    """Masked examples do not count."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.rand(6, NOISE, generator=draw)
    features = torch.randn(6, FEATURES, generator=draw)
    all_examples = torch.ones(6)
    first_four = torch.tensor([1.0, 1, 1, 1, 0, 0])

    assert diversity_loss(noise, torch.ones(6, FEATURES), all_examples) == 1
    assert 0 < diversity_loss(noise, features, all_examples) < 1
    of_four = diversity_loss(noise[:4], features[:4], torch.ones(4))
    torch.testing.assert_close(diversity_loss(noise, features, first_four), of_four)


def test_the_generator_learns_and_leaves_heads_and_absent_classes_alone() -> None:
    ready = ready_for({**SMALL, "samples": 200})
    world = ready.world
    stage = Stage(1, 1, "generate", (SERVER,), "public")
    view = ready.sites.view(SERVER, stage)
    work = TrainGenerator(ready.settings.method, 1)
    initial = ready.settings.method.initial_state(world).extra["generator"]
    head = {name: value for name, value in world.initial(0).items() if name.startswith("head.")}
    counts = torch.tensor([[3, 0, 1, 4, 2]])
    payload = Payload({"generator": initial, "head.0": head, "counts": counts})

    start = work.begin(payload, Payload(), view, world)
    losses = []
    for epochs in (1, 5, 20):
        plan = Plan(epochs=epochs, batch=32, optimiser="adam", lr=0.01)
        setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=SEED)
        losses.append(train(work, start, view, setup).losses["known"])
        assert torch.equal(start["weight"][0], head["head.weight"])

    assert set(start.examples.labels.tolist()) == {0, 2, 3, 4}
    shares = torch.tensor([1.0, 0, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(start["omega"].sum(0), shares)
    assert losses[0] > losses[1] > losses[2]


def test_the_servers_stage_changes_no_parameter_of_the_model() -> None:
    """It changes the generator."""
    without = run_of(SMALL, rounds=1, plan={"generate": {"epochs": 0}}).final
    with_stage = run_of(SMALL, rounds=1, plan={"generate": {"epochs": 3}}).final

    assert same_bits(without.params, with_stage.params)
    initial_generator = without.extra.tensors("generator")
    assert not same_bits(initial_generator, with_stage.extra.tensors("generator"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"topology": {"clients": 6, "server": ""}},
            r"set topology\.kind = 'parallel' and topology\.server = 'generate'",
        ),
        ({"model": {"name": "sphere_mlp", "hidden": (8,)}}, "no linear layer with a bias"),
    ],
)
def test_unsuited_settings_are_refused_in_one_line(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(IncompatibleMethod, match=message):
        prepare(resolve(toys.toy("fedgen", **changes)), toys.blobs())
