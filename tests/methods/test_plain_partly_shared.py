"""The methods whose clients keep a part of their model, or a whole one, against a plain
implementation of each.
"""

from __future__ import annotations

import pytest
import torch
from plain import (
    BODY,
    HEAD,
    Federation,
    Loss,
    Params,
    assert_personal_models,
    assert_same_model,
    average,
    ce,
    drive,
    ready_for,
    run_of,
    squared_distance,
    weighted_mean,
)
from torch import Tensor, nn

from fedstill.core.records import Payload, Reply
from fedstill.core.screen import Rules, screen
from fedstill.core.trees import only, same_bits

IN_DATA_ORDER = {"shuffle": False}
"""The order of examples is drawn for each stage of a round; in data order two methods can be
compared to the bit.
"""


def uniform_mean(models: list[Params]) -> Params:
    """The mean of models that all weigh the same."""
    return weighted_mean(models, [1] * len(models))


def sized_mean(fed: Federation, models: dict[int, Params]) -> Params:
    """The mean of clients' models, weighted by their examples."""
    return weighted_mean(list(models.values()), [fed.size(client) for client in models])


# LG-FedAvg.


@pytest.mark.parametrize(("layers", "names"), [(0, ()), (1, HEAD), (2, (*BODY, *HEAD))])
def test_lg_fedavg(layers: int, names: tuple[str, ...]) -> None:
    """The last layers are shared, and the others stay at their clients."""
    ready = ready_for({"name": "lg_fedavg", "layers": layers}, rounds=3)
    fed = Federation(ready)
    server = fed.start
    models = dict.fromkeys(fed.clients, fed.start)
    for round_index in (1, 2, 3):
        shared = []
        for client in fed.cohort(round_index):
            start = {**models[client], **only(server, names)}
            models[client] = fed.fit(start, ce, round_index, client).params
            shared.append(only(models[client], names))
        server = {**server, **uniform_mean(shared)}

    ours = drive(ready)

    assert_same_model(ours.params, server)
    assert_personal_models(ours, models, fed.participants(3))
    predictors = ready.settings.method.predictors(ours.final, ready.world)
    has_global_model = layers == 2
    assert list(predictors) == ["global"] * has_global_model


def test_with_all_layers_shared_it_is_federated_averaging_to_the_bit() -> None:
    ours = run_of({"name": "lg_fedavg", "layers": 9}, rounds=3).params
    fedavg = run_of({"name": "fedavg", "aggregation": "uniform"}, rounds=3).params

    assert same_bits(ours, fedavg)


def test_entries_that_do_not_travel_keep_their_bits_on_both_sides() -> None:
    """At the server, and at clients that rest in the last round."""
    topology = {"clients": 6, "sampled": 2}
    ready = ready_for("lg_fedavg", rounds=3, topology=topology)
    start = ready.world.initial(0)

    of_three_rounds = drive(ready)
    of_two_rounds = run_of("lg_fedavg", rounds=2, topology=topology)

    assert same_bits(only(of_three_rounds.params, BODY), only(start, BODY))
    assert not torch.equal(of_three_rounds.params["head.weight"], start["head.weight"])
    resting = set(range(6)) - set(Federation(ready, sampled=2).cohort(3))
    assert any(of_two_rounds.remembered(client) for client in resting)
    for client in resting:
        before = of_two_rounds.remembered(client)
        after = of_three_rounds.remembered(client)
        assert after.keys() == before.keys()
        if before:
            assert same_bits(after.params, before.params)


# FedBABU.


def test_fedbabu() -> None:
    """Clients train the body; at the end each fine-tunes the whole model."""
    ready = ready_for("fedbabu", rounds=2, plan={"finetune": {"epochs": 1}})
    fed = Federation(ready)
    server = fed.start
    for round_index in (1, 2):
        bodies = []
        for client in fed.cohort(round_index):
            result = fed.fit(server, ce, round_index, client, names=BODY)
            bodies.append(only(result.params, BODY))
        server = {**server, **uniform_mean(bodies)}

    ours = drive(ready)

    assert_same_model(ours.params, server)
    assert same_bits(only(ours.params, HEAD), only(ready.world.initial(0), HEAD))
    fine_tuning = fed.with_plan(epochs=1)
    for client in fed.clients:
        fine_tuned = fine_tuning.fit(server, ce, 2, client, stage=1).params
        assert_same_model(ours.personal_model(client), fine_tuned)


def test_a_fine_tuning_of_no_epochs_leaves_each_client_the_global_model() -> None:
    ours = run_of("fedbabu", rounds=2, plan={"finetune": {"epochs": 0}})

    for client in range(6):
        assert same_bits(ours.personal_model(client), ours.params)


# Both.


@pytest.mark.parametrize("name", ["lg_fedavg", "fedbabu"])
def test_statistics_of_normalisation_travel_with_their_layer(name: str) -> None:
    ready = ready_for(name, model="toy_batchnorm", plan={"lr": 0.02})
    stage = ready.settings.schedule(1, ready.world)[0]
    expected_reply = ready.settings.method.expected_reply(0, stage, ready.world)
    assert ("body.1.running_var" in expected_reply.tensors("shared")) == (name == "fedbabu")

    params = drive(ready).params

    assert bool((params["body.1.running_var"] > 0).all())


@pytest.mark.parametrize("name", ["lg_fedavg", "fedbabu"])
def test_a_shared_part_that_diverges_is_refused(name: str) -> None:
    ready = ready_for(name)
    method = ready.settings.method
    world = ready.world
    stage = ready.settings.schedule(1, world)[0]
    state = method.initial_state(world)
    payloads = {}
    for client in stage.clients:
        payloads[client] = method.payload_for_client(state, client, stage, world)
    sender = stage.clients[0]
    shared = {key: 1000 * value + 1000 for key, value in payloads[sender].tensors("shared").items()}
    reply = Reply(
        client=sender,
        content=Payload(shared=shared),
        examples=5,
        metrics={},
        round=stage.round,
        stage=stage.index,
    )

    _, (refusal,) = screen(
        lambda client: method.expected_reply(client, stage, world),
        stage,
        payloads,
        [reply],
        Rules(),
    )  # type: ignore[arg-type]

    assert "its shared parameters' norm" in refusal.reason
    assert refusal.diverged


# FedRep.


def test_fedrep() -> None:
    """Each round a client trains its head, and then the shared body."""
    plan = {"head": {"epochs": 2}, "train": {"epochs": 1}, "finetune": {"epochs": 1}}
    ready = ready_for("fedrep", rounds=3, plan=plan)
    fed = Federation(ready)
    for_two_epochs = fed.with_plan(epochs=2)
    for_one_epoch = fed.with_plan(epochs=1)
    server = fed.start
    models = dict.fromkeys(fed.clients, fed.start)
    for round_index in (1, 2, 3):
        bodies = {}
        for client in fed.cohort(round_index):
            received = {**models[client], **only(server, BODY)}
            with_head = for_two_epochs.fit(received, ce, round_index, client, names=HEAD).params
            assert same_bits(only(with_head, BODY), only(server, BODY))
            result = for_one_epoch.fit(with_head, ce, round_index, client, stage=1, names=BODY)
            models[client] = result.params
            bodies[client] = only(result.params, BODY)
        server = {**server, **sized_mean(fed, bodies)}

    ours = drive(ready)

    assert_same_model(ours.params, server)
    for client in fed.clients:
        received = {**models[client], **only(server, BODY)}
        fine_tuned = for_one_epoch.fit(received, ce, 3, client, stage=2, names=HEAD).params
        assert_same_model(ours.personal_model(client), fine_tuned)


def test_without_epochs_of_the_head_fedrep_trains_as_fedbabu() -> None:
    without_head = {"head": {"epochs": 0}, "finetune": {"epochs": 0}, "train": {"epochs": 2}}
    ours = run_of("fedrep", plan={**IN_DATA_ORDER, **without_head}).params
    fedbabu = run_of(
        {"name": "fedbabu", "aggregation": "examples"},
        plan={**IN_DATA_ORDER, "finetune": {"epochs": 0}},
    ).params

    assert same_bits(ours, fedbabu)


def test_fedreps_head_is_trained_under_the_received_statistics() -> None:
    """The stage of the head leaves the running statistics of the body as they are."""
    plan = {"lr": 0.02, "train": {"epochs": 0}}
    ready = ready_for("fedrep", model="toy_batchnorm", rounds=1, plan=plan)
    start = ready.world.initial(0)
    client = ready.settings.schedule(1, ready.world)[0].clients[0]

    ours = drive(ready)

    counters = [name for name, value in start.items() if not value.is_floating_point()]
    assert same_bits(only(ours.params, counters), only(start, counters))
    model = ours.personal_model(client)
    assert torch.equal(model["body.1.running_mean"], start["body.1.running_mean"])
    assert not torch.equal(model["head.weight"], start["head.weight"])


# Ditto.


def near_global_model(server: Params, strength: float) -> Loss:
    """Cross-entropy, and the squared distance from the global model."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ce(model, x, y) + strength / 2 * squared_distance(model, server)

    return loss


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_ditto(strength: float) -> None:
    """A client trains a model of its own near the global one, and then the global one."""
    method = {"name": "ditto", "strength": strength}
    ready = ready_for(method, rounds=3, plan={"personal": {"epochs": 1}})
    fed = Federation(ready)
    personal_training = fed.with_plan(epochs=1)
    server = fed.start
    models = dict.fromkeys(fed.clients, fed.start)
    for round_index in (1, 2, 3):
        loss = near_global_model(server, strength)
        results = []
        for client in fed.cohort(round_index):
            personal = personal_training.fit(models[client], loss, round_index, client)
            models[client] = personal.params
            results.append(fed.fit(server, ce, round_index, client, stage=1))
        server = average(results)

    ours = drive(ready)

    assert_same_model(ours.params, server)
    assert_personal_models(ours, models, fed.participants(3))


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_dittos_global_model_is_that_of_federated_averaging_to_the_bit(strength: float) -> None:
    plan = {"lr": 0.05, **IN_DATA_ORDER}
    ours = run_of({"name": "ditto", "strength": strength}, rounds=3, plan=plan).params
    fedavg = run_of("fedavg", rounds=3, plan=plan).params

    assert same_bits(ours, fedavg)


def test_at_strength_0_dittos_own_models_are_those_of_clients_that_train_alone() -> None:
    changes = {"rounds": 3, "topology": {"clients": 6}, "plan": IN_DATA_ORDER}
    ours = run_of({"name": "ditto", "strength": 0.0}, **changes)
    alone = run_of({"name": "lg_fedavg", "layers": 0}, **changes)

    for client in range(6):
        assert_same_model(ours.personal_model(client), alone.personal_model(client))


def test_a_client_that_was_never_drawn_remembers_nothing() -> None:
    ready = ready_for("ditto", rounds=1, topology={"clients": 6, "sampled": 2})

    ours = drive(ready)

    sampled = set(Federation(ready, sampled=2).cohort(1))
    assert {client for client in range(6) if ours.remembered(client)} == sampled
