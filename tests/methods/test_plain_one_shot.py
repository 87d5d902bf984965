"""The one-shot family against plain derivations: early stopping, naive KD, QKT's two phases, and
its light form.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from plain import (
    SEED,
    Examples,
    Federation,
    LibraryRun,
    Loss,
    Params,
    assert_same_model,
    batches,
    ce,
    drive,
    kl,
    minus,
    norm,
    split_for_validation,
    weighted_mean,
)
from plain_one_shot import FIT_EPOCHS, PLAN, VALIDATION, ready_one_shot
from torch import Tensor, nn

import toys
from double import NEAR
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.keys import generator, seed_for
from fedstill.core.trees import only, same_bits
from fedstill.methods.fit import queries_of
from fedstill.methods.qkt import QKT, REFINE, PartlyRefined
from fedstill.methods.qkt_light import QKTLight
from fedstill.models import contract
from fedstill.running.preparation import Prepared

ALPHA = 0.7
THRESHOLD = 0.08
HEAD = ("head.weight", "head.bias")

FIT = 0
TRANSFER = 1
REFINEMENT = 2
"""The stages of the round."""

SUM_AND_MEAN = pytest.mark.parametrize("over_teachers", ["sum", "mean"])


# Training alone.


def adam_for(network: nn.Module, names: str = "") -> torch.optim.Adam:
    """Adam for the entries whose names begin so."""
    parameters = [value for name, value in network.named_parameters() if name.startswith(names)]
    return torch.optim.Adam(
        parameters, lr=PLAN["lr"], weight_decay=PLAN["weight_decay"], foreach=False
    )


def train_epoch(
    network: nn.Module,
    adam: torch.optim.Adam,
    examples: Examples,
    order: torch.Generator,
    loss: Loss,
) -> None:
    """One epoch of a network."""
    for index in torch.randperm(len(examples.labels), generator=order).split(PLAN["batch"]):
        network.zero_grad()
        loss(network, examples.inputs[index], examples.labels[index]).backward()
        adam.step()


def order_of(stage: int, client: int) -> torch.Generator:
    """Draws the order of a client's examples in a stage."""
    return generator(seed_for(SEED, 1, stage, client, "order"))


def fitted(fed: Federation, client: int) -> nn.Module:
    """A client's model at the best epoch on its held-out data; it stops if that does not get
    better.
    """
    data = fed.data(client)
    size = len(data.labels)
    split = split_for_validation(size, max(1, round(VALIDATION * size)), client)
    held_out = data.take(split.validation)
    network = fed.net(fed.start)
    adam = adam_for(network)
    order = order_of(FIT, client)

    best_accuracy = -1.0
    epochs_without_gain = 0
    for _ in range(FIT_EPOCHS):
        train_epoch(network, adam, data.take(split.training), order, ce)
        correct = network(held_out.inputs).argmax(1) == held_out.labels
        accuracy = correct.double().mean().item()
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            best_network = copy.deepcopy(network)
            epochs_without_gain = 0
        else:
            epochs_without_gain += 1
        if epochs_without_gain == PLAN["patience"]:
            break
    return best_network


@functools.cache
def fitted_models(public: int = 0) -> dict[int, nn.Module]:
    """The models of all clients, of which so many examples became public data."""
    fed = Federation(ready_one_shot("local_only", data={"public": public}))
    return {client: fitted(fed, client) for client in range(6)}


# Learning from peers.


class Plain:
    """The family with torch.optim.Adam, deep copies and no engine."""

    def __init__(self, prepared: Prepared, public: int = 0) -> None:
        self.fed = Federation(prepared)
        self.queries = queries_of(prepared.world)
        self.local = fitted_models(public)

    def trained(
        self, network: nn.Module, client: int, stage: int, loss: Loss, names: str = ""
    ) -> nn.Module:
        """A copy of the network after a stage on all examples of a client."""
        network = copy.deepcopy(network)
        adam = adam_for(network, names)
        order = order_of(stage, client)
        for _ in range(PLAN["epochs"]):
            train_epoch(network, adam, self.fed.data(client), order, loss)
        return network

    def transferred(self, client: int, loss: Loss) -> nn.Module:
        """A client's model after phase one."""
        return self.trained(self.local[client], client, TRANSFER, loss)

    def refined(
        self, network: nn.Module, client: int, head: nn.Module, over_teachers: str
    ) -> nn.Module:
        """The network with another head, after phase two."""
        start = copy.deepcopy(network)
        start.head.load_state_dict(head.head.state_dict())
        loss = self.masked_loss(client, over_teachers)
        return self.trained(start, client, REFINEMENT, loss, "head")

    def peers(self, client: int) -> dict[int, nn.Module]:
        """The models of all other clients."""
        return {peer: network for peer, network in self.local.items() if peer != client}

    def naive_loss(self, client: int, over_teachers: str) -> Loss:
        """Distillation from all peers."""
        peers = list(self.peers(client).values())
        return distillation(peers, torch.ones(toys.CLASSES), over_teachers)

    def masked_loss(self, client: int, over_teachers: str) -> Loss:
        """Distillation from chosen peers, of the classes that the client has or asks for."""
        mask = torch.zeros(toys.CLASSES)
        mask[self.fed.data(client).labels] = 1.0
        mask[list(self.queries[client])] = 1.5
        teachers = [self.local[peer] for peer in self.chosen_peers(client)]
        return distillation(teachers, mask, over_teachers)

    def chosen_peers(self, client: int) -> list[int]:
        """The peers that answer noise often enough with a class that the client asks for."""
        draw = generator(seed_for(SEED, 0, 0, -1, "probe"))
        noise = torch.randn(20, 1, toys.SIDE, toys.SIDE, generator=draw).double()
        classes = list(self.queries[client])
        chosen = []
        for peer, network in self.peers(client).items():
            shares = network(noise).softmax(1).mean(0)
            if shares[classes].max().item() >= THRESHOLD:
                chosen.append(peer)
        return chosen


def distillation(teachers: list[nn.Module], mask: Tensor, over_teachers: str) -> Loss:
    """Cross-entropy, and the divergence from each teacher, class by class times the mask."""
    weight = ALPHA
    if teachers and over_teachers == "mean":
        weight = ALPHA / len(teachers)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        total = nn.functional.cross_entropy(z, y)
        for teacher in teachers:
            p = teacher(x).detach().softmax(1)
            divergence = (mask * p * (p.log() - z.log_softmax(1))).sum(1)
            total = total + weight * divergence.mean()
        return total

    return loss


def students_of(run: LibraryRun) -> dict[int, Params]:
    """The models of the clients that asked their peers."""
    return run.final.extra.many("student")


def run_once(method: object, **changes: object) -> LibraryRun:
    """The library's run of a method of the family."""
    return drive(ready_one_shot(method, **changes))


def client_sizes(prepared: Prepared) -> list[int]:
    """The number of examples of each client."""
    return [len(part) for part in prepared.sites.split.tensors()]


def test_fitting_stops_early_and_keeps_the_best_epoch() -> None:
    models = run_once("local_only").final.extra.many("model")

    for client, network in fitted_models().items():
        assert_same_model(models[client], network.state_dict())


@SUM_AND_MEAN
def test_naive_kd_distils_all_peers(over_teachers: str) -> None:
    method = {"name": "naive_kd", "alpha": ALPHA, "over_teachers": over_teachers}
    prepared = ready_one_shot(method)
    plain = Plain(prepared)

    students = students_of(drive(prepared))

    assert set(students) == set(plain.queries)
    for client, params in students.items():
        loss = plain.naive_loss(client, over_teachers)
        assert_same_model(params, plain.transferred(client, loss).state_dict())


@SUM_AND_MEAN
def test_qkt_filters_masks_replaces_the_head_and_refines_it(over_teachers: str) -> None:
    method = {
        "name": "qkt",
        "alpha": ALPHA,
        "threshold": THRESHOLD,
        "over_teachers": over_teachers,
    }
    prepared = ready_one_shot(method)
    plain = Plain(prepared)

    students = students_of(drive(prepared))

    teacher_counts = [len(plain.chosen_peers(client)) for client in students]
    assert min(teacher_counts) < 5, "the filter leaves some out"
    assert max(teacher_counts) > 0, "and not all"
    for client, params in students.items():
        local = plain.local[client]
        phase_one = plain.transferred(client, plain.masked_loss(client, over_teachers))
        expected = plain.refined(phase_one, client, local, over_teachers).state_dict()
        assert_same_model(params, expected)
        assert norm(minus(only(expected, HEAD), local.state_dict())) > 0.01


@SUM_AND_MEAN
@pytest.mark.parametrize("phase1_over", ["sum", "mean", "same"])
def test_qkt_light_is_naive_kd_and_then_the_heads_refinement(
    over_teachers: str, phase1_over: str
) -> None:
    """Each phase has its own way to add up teachers."""
    method = {
        "name": "qkt_light",
        "alpha": ALPHA,
        "threshold": THRESHOLD,
        "over_teachers": over_teachers,
        "phase1_over": phase1_over,
    }
    prepared = ready_one_shot(method)
    plain = Plain(prepared)

    students = students_of(drive(prepared))

    over_teachers_at_first = {"same": over_teachers}.get(phase1_over, phase1_over)
    for client, params in students.items():
        phase_one = plain.transferred(client, plain.naive_loss(client, over_teachers_at_first))
        expected = plain.refined(phase_one, client, plain.local[client], over_teachers)
        assert_same_model(params, expected.state_dict())


@pytest.mark.parametrize(
    ("name", "sums"),
    [("naive_kd", {}), ("qkt", {}), ("qkt_light", {"phase1_over": "sum"})],
)
def test_by_default_both_equations_are_sums(name: str, sums: dict[str, str]) -> None:
    by_default = students_of(run_once({"name": name}))
    with_sums = students_of(run_once({"name": name, "over_teachers": "sum", **sums}))

    for client, params in by_default.items():
        assert_same_model(params, with_sums[client])


@pytest.mark.parametrize("name", ["qkt", "qkt_light"])
def test_a_client_keeps_its_peers_and_is_sent_them_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refinement needs no second transfer of peers, and has the same bits as with one."""
    payload_for_client = QKT.payload_for_client
    payloads = []

    def record_payload(self, state, client, stage, world):
        payload = payload_for_client(self, state, client, stage, world)
        if stage.name == REFINE and payload is not None:
            payloads.append(payload)
        return payload

    monkeypatch.setattr(QKT, "payload_for_client", record_payload)
    method = {"name": name, "threshold": THRESHOLD}

    run = run_once(method)

    students = students_of(run)
    assert len(students) == len(payloads) > 0
    assert all(set(payload) == {"params"} for payload in payloads)
    assert not any(run.remembered(client) for client in range(6))

    payloads.clear()
    for cls in (QKT, QKTLight):
        monkeypatch.setattr(cls, "keeps_peers", False)
    students_with_resent_peers = students_of(run_once(method))
    assert all(payload.many("peer") for payload in payloads)
    for client, params in students.items():
        assert same_bits(params, students_with_resent_peers[client])


@SUM_AND_MEAN
def test_a_volunteer_does_phase_one_for_all_and_its_head_is_refined(over_teachers: str) -> None:
    """The volunteer is the client with most examples."""
    method = {
        "name": "qkt_light_volunteer",
        "alpha": ALPHA,
        "threshold": THRESHOLD,
        "over_teachers": over_teachers,
        "phase1_over": "same",
    }
    prepared = ready_one_shot(method)
    plain = Plain(prepared)
    sizes = client_sizes(prepared)
    volunteer = sizes.index(max(sizes))

    students = students_of(drive(prepared))

    shared = plain.transferred(volunteer, plain.naive_loss(volunteer, over_teachers))
    for client, params in students.items():
        expected = plain.refined(shared, client, shared, over_teachers)
        assert_same_model(params, expected.state_dict())


@SUM_AND_MEAN
def test_a_server_does_phase_one_without_labels(over_teachers: str) -> None:
    """On public examples, from the model of the client with most examples."""
    method = {
        "name": "qkt_light_server",
        "threshold": THRESHOLD,
        "alpha": ALPHA,
        "over_teachers": over_teachers,
        "phase1_over": "same",
    }
    prepared = ready_one_shot(method, data={"public": 40})
    plain = Plain(prepared, public=40)
    sizes = client_sizes(prepared)

    students = students_of(drive(prepared))

    network = copy.deepcopy(plain.local[sizes.index(max(sizes))])
    adam = adam_for(network)
    images = plain.fed.inputs(prepared.sites.public.values)
    for index in batches(40, PLAN, 1, TRANSFER, -1):
        adam.zero_grad()
        student = network(images[index]).softmax(1)
        teachers = [peer(images[index]).detach().softmax(1) for peer in plain.local.values()]
        loss = sum(kl(teacher, student).mean() for teacher in teachers)
        if over_teachers == "mean":
            loss = loss / len(teachers)
        loss.backward()
        adam.step()
    for client, params in students.items():
        expected = plain.refined(network, client, network, over_teachers)
        assert_same_model(params, expected.state_dict())


def test_without_a_server_stage_phase_one_at_the_server_is_refused_before_the_run() -> None:
    method = {"name": "qkt_light_server", "threshold": THRESHOLD}
    with pytest.raises(IncompatibleMethod, match=r"topology\.server"):
        ready_one_shot(method, data={"public": 40}, topology={"clients": 6, "server": ""})


def test_the_one_shot_mean_and_the_ensemble_are_those_of_the_local_models() -> None:
    """The mean is weighted by the examples that clients trained on, the ensemble is not."""
    prepared = ready_one_shot("fedavg_once")
    local = fitted_models()
    inputs = Federation(prepared).data(0).inputs

    mean = drive(prepared).params
    prepared_ensemble = ready_one_shot("ensemble")
    state = drive(prepared_ensemble).final
    predictors = prepared_ensemble.settings.method.predictors(state, prepared_ensemble.world)

    training_sizes = [size - max(1, round(VALIDATION * size)) for size in client_sizes(prepared)]
    models = [network.state_dict() for network in local.values()]
    assert_same_model(mean, weighted_mean(models, training_sizes))
    with torch.no_grad():
        probabilities = sum(network(inputs).softmax(1) for network in local.values()) / 6
    answers = predictors["ensemble"](inputs).exp()
    torch.testing.assert_close(answers, probabilities, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", ["naive_kd", "qkt", "qkt_light"])
def test_with_one_teacher_the_sum_is_the_mean_to_the_bit(name: str) -> None:
    """And of three teachers it is not."""
    with_sum = students_of(run_once({"name": name, "participants": 2, "over_teachers": "sum"}))
    with_mean = students_of(run_once({"name": name, "participants": 2, "over_teachers": "mean"}))
    of_three = students_of(run_once({"name": name, "participants": 4, "over_teachers": "mean"}))

    assert all(same_bits(params, with_mean[client]) for client, params in with_sum.items())
    assert any(not same_bits(params, of_three[client]) for client, params in with_sum.items())


class RefinedHeads:
    """The reports of clients that froze a part of their heads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_client: dict[int, dict[str, object]] = {}
        original = PartlyRefined.report

        def record_report(work, params, start, view, world):
            report = original(work, params, start, view, world)
            self.by_client[view.client] = report
            return report

        monkeypatch.setattr(PartlyRefined, "report", record_report)


def flat_head(params: Params) -> Tensor:
    """All entries of a head in one row."""
    return torch.cat([params["head.weight"].flatten(), params["head.bias"]])


def head_gradients(network: nn.Module, data: Examples, loss: Loss) -> Tensor:
    """The gradient of the head in every batch, in one row each."""
    rows = []
    for index in torch.randperm(len(data.labels), generator=generator(0)).split(PLAN["batch"]):
        network.zero_grad()
        loss(network, data.inputs[index], data.labels[index]).backward()
        rows.append(torch.cat([network.head.weight.grad.flatten(), network.head.bias.grad]))
    return torch.stack(rows)


@pytest.mark.parametrize("importance", ["rms", "mean", "objective"])
def test_the_most_important_entries_of_the_head_are_frozen_to_the_bit(
    importance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under Adam with weight decay. They are the ones with the largest gradients on the
    client's data.
    """
    method = {
        "name": "qkt",
        "frozen": 0.3,
        "importance": importance,
        "alpha": ALPHA,
        "threshold": THRESHOLD,
    }
    reports = RefinedHeads(monkeypatch)
    prepared = ready_one_shot(method)
    plain = Plain(prepared)

    run = drive(prepared)

    local_models = run.final.extra.many("model")
    for client, params in students_of(run).items():
        start = {**params, **only(local_models[client], HEAD)}
        loss = ce
        if importance == "objective":
            loss = plain.masked_loss(client, "sum")
        network = plain.fed.net(start).eval()
        gradients = head_gradients(network, plain.fed.data(client), loss)
        scores = gradients.square().mean(0).sqrt()
        if importance == "mean":
            scores = gradients.abs().mean(0)

        frozen = flat_head(start) == flat_head(params)
        assert int(frozen.sum()) == round(0.3 * len(frozen))
        assert float(scores[frozen].min()) >= float(scores[~frozen].max())

        report = reports.by_client[client]
        weight = params["head.weight"]
        rows = frozen[: weight.numel()].reshape(weight.shape).tolist()
        assert report["frozen_rows"] == [sum(row) / len(row) for row in rows]
        assert report["query"] == list(plain.queries[client])


def test_phase_two_moves_the_head_alone_and_leaves_running_statistics() -> None:
    phase_one_alone = {"name": "qkt", "phases": 1}
    plan = {**PLAN, "refine": {"epochs": 1}}

    transferred = students_of(run_once(phase_one_alone, model="toy_batchnorm", plan=PLAN))
    refined = students_of(run_once("qkt", model="toy_batchnorm", plan=plan))

    for client, params in transferred.items():
        body = [name for name in params if not name.startswith("head.")]
        assert "body.1.running_mean" in body
        assert same_bits(only(params, body), only(refined[client], body))
        assert not torch.equal(params["head.weight"], refined[client]["head.weight"])


def test_teachers_may_be_of_other_architectures() -> None:
    """Each student keeps its client's own."""
    prepared = ready_one_shot("qkt", clients={"models": ("mlp", "logistic")})
    specs = [prepared.world.model(client) for client in range(6)]
    assert {spec.name for spec in specs} == {"mlp", "logistic"}

    students = students_of(drive(prepared))

    for client, params in students.items():
        assert set(params) == set(contract.initial(specs[client], 0))


ALL_PEERS_AND_CLASSES = {"teachers": "all", "classes": "all"}


@pytest.mark.parametrize(
    ("at_its_edge", "equivalent"),
    [
        (
            {"name": "qkt", **ALL_PEERS_AND_CLASSES, "phases": 1, "over_teachers": "mean"},
            {"name": "naive_kd", "over_teachers": "mean"},
        ),
        ({"name": "qkt", **ALL_PEERS_AND_CLASSES, "phases": 1}, "naive_kd"),
        ({"name": "qkt", "threshold": 0.0}, {"name": "qkt", "teachers": "all"}),
        (
            {"name": "qkt", "head": "phase1", "alpha": 0.0},
            {"name": "qkt", "head": "phase1", "threshold": 1.0},
        ),
        (
            {"name": "qkt_light", **ALL_PEERS_AND_CLASSES, "phase1_over": "same"},
            {"name": "qkt", **ALL_PEERS_AND_CLASSES},
        ),
    ],
    ids=str,
)
def test_at_its_edge_it_is_another(at_its_edge: object, equivalent: object) -> None:
    students = students_of(run_once(at_its_edge))
    expected = students_of(run_once(equivalent))

    assert set(students) == set(expected)
    for client, params in students.items():
        assert_same_model(params, expected[client])


def test_the_volunteer_is_the_student_with_most_examples() -> None:
    """A client that is no student has more."""
    topology = {"clients": 6, "students": (1, 4)}
    prepared = ready_one_shot("qkt_light_volunteer", topology=topology, query={"draw": "single"})
    sizes = client_sizes(prepared)
    assert max(sizes) > max(sizes[1], sizes[4])

    students = students_of(drive(prepared))

    assert set(students) == {1, 4}
