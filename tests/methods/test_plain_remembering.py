"""The methods whose clients or server keep models, against a plain implementation of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from plain import (
    HEAD,
    MANY_EXAMPLES,
    PLAN,
    SEED,
    Examples,
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    average,
    batches,
    ce,
    drive,
    experiment,
    kl,
    largest_gap,
    plus,
    ready_for,
    scaled,
    weights_of,
)
from torch import Tensor, nn

import toys
from double import in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER
from fedstill.core.records import Examples as ImageExamples
from fedstill.core.trees import same_bits
from fedstill.data.partition import public_split
from fedstill.running.preparation import prepare

# FedCurv.

SAMPLES = 15
"""The Fisher information is measured on batches until more examples than this were used."""

WEIGHT = 0.4
FEDCURV = {"name": "fedcurv", "samples": SAMPLES, "weight": WEIGHT}


@dataclass(frozen=True)
class Memory:
    """What a client contributes to the penalty of others."""

    fisher: Params
    params: Params

    @property
    def weighted_model(self) -> Params:
        """The information times the parameters."""
        return {name: value * self.params[name] for name, value in self.fisher.items()}


def measured_batches(size: int) -> list[Tensor]:
    """The positions of the examples of each batch of the measurement."""
    positions = torch.randperm(size, generator=generator(0)).split(PLAN["batch"])
    used = []
    while sum(len(index) for index in used) <= SAMPLES and len(used) < len(positions):
        used.append(positions[len(used)])
    return used


def fisher_of(fed: Federation, params: Params, parts: Iterable[Examples]) -> Params:
    """The mean over batches of the squared gradient of the batch's mean."""
    squares = []
    for x, y in parts:
        model = fed.net(params)
        ce(model, x, y).backward()
        squares.append({name: value.grad**2 for name, value in model.named_parameters()})
    return scaled(1 / len(squares), plus(*squares))


def client_fisher(fed: Federation, params: Params, client: int) -> Params:
    """The Fisher information of a client's examples."""
    data = fed.data(client)
    return fisher_of(fed, params, [data.take(i) for i in measured_batches(len(data.labels))])


def held_by_others(memories: Iterable[Memory]) -> Loss:
    """Cross-entropy, and the distance from the models of others by their information."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = ce(model, x, y)
        for memory in memories:
            for name, value in model.named_parameters():
                gap = value - memory.params[name]
                total = total + WEIGHT * (memory.fisher[name] * gap**2).sum()
        return total

    return loss


@pytest.mark.parametrize("scope", ["all_seen", "last_round"])
def test_fedcurv(scope: str) -> None:
    """Clients are held by all others that took part so far, or in the last round."""
    ready = ready_for({**FEDCURV, "scope": scope}, rounds=3)
    fed = Federation(ready)
    cohorts = [set(fed.cohort(round_index)) for round_index in (1, 2, 3)]
    assert cohorts[0] & cohorts[1] & cohorts[2], "a client must come back"
    assert (cohorts[0] - cohorts[1]) & cohorts[2], "and one after a pause"
    params = fed.start
    memories: dict[int, Memory] = {}
    for round_index in (1, 2, 3):
        results = []
        new_memories = {}
        for client in fed.cohort(round_index):
            peer_memories = [m for number, m in memories.items() if number != client]
            result = fed.fit(params, held_by_others(peer_memories), round_index, client)
            fisher = client_fisher(fed, result.params, client)
            new_memories[client] = Memory(fisher, result.params)
            results.append(result)
        if scope == "all_seen":
            memories |= new_memories
        else:
            memories = new_memories
        params = average(results)

    ours = drive(ready)

    assert_same_model(ours.params, params)
    assert_unlike_fedavg(ours.params, ready, rounds=3)
    fishers = [memory.fisher for memory in memories.values()]
    assert_same_model(ours.final.extra.tensors("fisher"), plus(*fishers))
    weighted_models = [memory.weighted_model for memory in memories.values()]
    assert_same_model(ours.final.extra.tensors("fisher_params"), plus(*weighted_models))
    for client, memory in memories.items():
        assert_same_model(ours.remembered(client).tensors("fisher"), memory.fisher)


def test_fedcurvs_information_is_that_of_augmented_images() -> None:
    """A mirrored image is drawn for every other one, from the run's seed, the stage and the
    client.
    """
    ready = ready_for(FEDCURV, data={"augment": ("flip",)})
    fed = Federation(ready)
    params = fed.start
    stage = ready.settings.schedule(2, ready.world)[0]
    client = stage.clients[0]
    data = fed.data(client)
    draw = generator(seed_for(SEED, 2, 0, client, "fisher"))
    augmented = []
    for index in measured_batches(len(data.labels)):
        batch = data.take(index)
        is_mirrored = torch.rand(len(index), generator=draw) < 0.5
        batch.inputs[is_mirrored] = batch.inputs[is_mirrored].flip(-1)
        augmented.append(batch)
    work = ready.settings.method.work(stage)

    fisher = work.fisher(params, ready.sites.view(client, stage), ready.world)  # type: ignore[attr-defined]

    expected = fisher_of(fed, params, augmented)
    pixels = 1e-6  # augmented images are float32, as in training
    for name, value in expected.items():
        torch.testing.assert_close(fisher[name], value, rtol=1e-5, atol=pixels)
    assert largest_gap(client_fisher(fed, params, client), fisher) > 100 * pixels


def test_fedcurvs_information_leaves_out_outputs_that_take_no_part() -> None:
    ready = ready_for(FEDCURV)
    params = Federation(ready).start
    stage = ready.settings.schedule(1, ready.world)[0]
    view = ready.sites.view(stage.clients[0], stage)
    takes_part = torch.arange(ready.world.classes) > 0
    information = ready.settings.method.work(stage).fisher  # type: ignore[attr-defined]

    in_task = information(params, replace(view, head=takes_part), ready.world)

    with_all = information(params, view, ready.world)
    for name in HEAD:
        assert not in_task[name][~takes_part].any()
        assert in_task[name][takes_part].any()
        assert with_all[name][~takes_part].any()


# MOON.

MU = 2.0
TEMPERATURE = 0.4


def contrastive(global_model: nn.Module, previous_model: nn.Module) -> Loss:
    """Cross-entropy; features are drawn to the global model's and away from those of the client's
    last model.
    """

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        cosine = (a * b).sum(1) / a.norm(dim=1).clamp(min=1e-8) / b.norm(dim=1).clamp(min=1e-8)
        return (cosine / TEMPERATURE).exp()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features = model.get_submodule("body")(x)
        to_global = similarity(features, global_model.get_submodule("body")(x).detach())
        to_previous = similarity(features, previous_model.get_submodule("body")(x).detach())
        share = to_global / (to_global + to_previous)
        return ce(model, x, y) - MU * share.log().mean()

    return loss


@pytest.mark.parametrize("fields", [{}, {"projection": 6}], ids=str)
def test_moon(fields: dict[str, object]) -> None:
    """A client remembers the model that it sent last."""
    ready = ready_for(
        {"name": "moon", "mu": MU, "temperature": TEMPERATURE},
        rounds=3,
        model={"name": "mlp", "hidden": (8,), **fields},
    )
    fed = Federation(ready)
    params = fed.start
    previous: dict[int, Params] = {}
    for round_index in (1, 2, 3):
        global_model = fed.net(params).eval()
        results = []
        for client in fed.cohort(round_index):
            previous_model = fed.net(previous.get(client, fed.start)).eval()
            loss = contrastive(global_model, previous_model)
            results.append(fed.fit(params, loss, round_index, client))
            previous[client] = results[-1].params
        params = average(results)

    ours = drive(ready)

    assert_same_model(ours.params, params)
    assert_unlike_fedavg(ours.params, ready, rounds=3)
    for client, model in previous.items():
        assert_same_model(ours.personal_model(client), model)


# FedDF.

TEACH = {"epochs": 3, "batch": 16, "lr": 0.01, "lr_decay": 1.0, "weight_decay": 0.0}
PUBLIC = {"data": {"public": toys.PUBLIC}, "plan": {"teach_server": TEACH}}


def distil(
    student: nn.Module, teachers: list[nn.Module], images: Tensor, tau: float, round_index: int
) -> Mapping[str, Tensor]:
    """The student after learning from the teachers' mean logits."""
    with torch.no_grad():
        mean_logits = sum(teacher(images) for teacher in teachers) / len(teachers)
    p = (mean_logits / tau).softmax(1)
    adam = torch.optim.Adam(student.parameters(), lr=TEACH["lr"], foreach=False)
    for index in batches(len(images), TEACH, round_index, 1, SERVER):
        adam.zero_grad()
        q = (student(images[index]) / tau).softmax(1)
        loss = tau**2 * kl(p[index], q).mean()
        loss.backward()
        adam.step()
    return weights_of(student)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_feddf(tau: float) -> None:
    """The server distils the mean of the clients' logits into their average."""
    ready = ready_for({"name": "feddf", "temperature": tau}, **PUBLIC)
    fed = Federation(ready)
    assert ready.sites.public is not None
    images = fed.inputs(ready.sites.public.values)
    params = fed.start
    for round_index in (1, 2):
        results = fed.fit_cohort(params, ce, round_index)
        teachers = [fed.net(result.params) for result in results]
        params = distil(fed.net(average(results)), teachers, images, tau, round_index)

    ours = drive(ready)

    assert_same_model(ours.params, params)
    assert_unlike_fedavg(ours.params, ready)
    client_models = ours.final.extra.many("model")
    assert not client_models, "clients' models are dropped after the server's stage"
    assert not any(ours.remembered(client) for client in range(6))


def test_feddf_never_reads_a_public_label() -> None:
    """With other public labels a run has the same bits."""
    data = toys.blobs(size=MANY_EXAMPLES)
    labels = data.train.labels.clone()
    _, public = public_split(len(labels), toys.PUBLIC, SEED)
    labels[torch.from_numpy(public)] = 0
    relabelled = replace(data, train=ImageExamples(data.train.values, labels))

    ready = ready_for("feddf", MANY_EXAMPLES, **PUBLIC)
    relabelled_ready = in_double(prepare(resolve(experiment("feddf", **PUBLIC)), relabelled))

    assert ready.sites.public is not None
    assert relabelled_ready.sites.public is not None
    assert ready.sites.public.labels.any()
    assert not relabelled_ready.sites.public.labels.any()
    assert same_bits(drive(ready).params, drive(relabelled_ready).params)


def test_a_methods_schedule_is_the_default_of_its_own_topology_only() -> None:
    def server_stage(method: str, **changes: object) -> str:
        return resolve(experiment(method, **changes)).named.topology.values["server"]

    parallel = {"kind": "parallel", "clients": 6}
    assert server_stage("feddf", **PUBLIC) == "teach_server"
    assert server_stage("feddf", topology=parallel, **PUBLIC) == "teach_server"
    assert server_stage("fedavg") == ""
    with pytest.raises(IncompatibleMethod, match="topology"):
        ready_for("feddf", topology={"kind": "public_logits", "clients": 6}, **PUBLIC)


def test_feddf_without_public_data_or_its_stage_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match=r"feddf .*data\.public"):
        ready_for("feddf")
    with pytest.raises(IncompatibleMethod, match=r"topology\.server = 'teach_server'"):
        ready_for("feddf", topology={"clients": 6, "server": ""}, **PUBLIC)
