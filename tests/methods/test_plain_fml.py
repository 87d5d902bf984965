"""FML against a plain implementation, and what it is at its edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from class_answers import assert_loaded_models_answer_as_measured
from plain import (
    Federation,
    Params,
    assert_personal_models,
    assert_same_model,
    drive,
    kl,
    ready_for,
    weighted_mean,
    weights_of,
)
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedstill
import toys
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import TrainingStart
from fedstill.core.trees import only, same_bits
from fedstill.methods.fml import FML, Mutual
from fedstill.models import contract
from fedstill.models.adapted import personal_network
from fedstill.models.predictors import predictor
from fedstill.running.runner import run

PAIR = toys.two_networks()


def network_of(params: Mapping[str, Tensor], name: str) -> Params:
    """The entries of one network of a pair, by their names in that network."""
    prefix = name + "."
    return {
        key.removeprefix(prefix): value for key, value in params.items() if key.startswith(prefix)
    }


def fit_mutually(
    fed: Federation, start: Params, round_index: int, client: int, *, alpha: float, beta: float
) -> Params:
    """Both networks of a client step on every batch, each with its optimiser."""
    pair = fed.net(start)
    data = fed.data(client)
    own_sgd = fed.sgd(list(pair.own.parameters()), round_index)
    shared_sgd = fed.sgd(list(pair.shared.parameters()), round_index)
    for index in fed.batches(round_index, client):
        x, y = data.take(index)
        p = pair.own(x)
        m = pair.shared(x)
        own_divergence = kl(m.detach().softmax(1), p.softmax(1)).mean()
        shared_divergence = kl(p.detach().softmax(1), m.softmax(1)).mean()
        own_loss = alpha * cross_entropy(p, y) + (1 - alpha) * own_divergence
        shared_loss = beta * cross_entropy(m, y) + (1 - beta) * shared_divergence
        pair.zero_grad()
        own_loss.backward()
        shared_loss.backward()
        own_sgd.step()
        shared_sgd.step()
    return weights_of(pair)


@pytest.mark.parametrize(
    ("alpha", "beta", "aggregation"), [(0.5, 0.5, "uniform"), (0.9, 0.2, "examples")]
)
def test_rounds_are_those_of_two_networks_written_out(
    alpha: float, beta: float, aggregation: str
) -> None:
    """The shared networks are averaged; the others stay at their clients."""
    method = {"name": "fml", "alpha": alpha, "beta": beta, "aggregation": aggregation}
    ready = ready_for(method, rounds=3, model=PAIR)
    fed = Federation(ready)
    params = fed.start
    shared_names = [name for name in params if name.startswith("shared.")]
    pairs = dict.fromkeys(fed.clients, fed.start)
    for round_index in (1, 2, 3):
        cohort = fed.cohort(round_index)
        for client in cohort:
            start = {**pairs[client], **only(params, shared_names)}
            pairs[client] = fit_mutually(fed, start, round_index, client, alpha=alpha, beta=beta)
        weights = [1] * len(cohort)
        if aggregation == "examples":
            weights = [fed.size(client) for client in cohort]
        shared = [only(pairs[client], shared_names) for client in cohort]
        params = {**params, **weighted_mean(shared, weights)}

    ours = drive(ready)

    assert_same_model(ours.params, params)
    assert_personal_models(ours, pairs, fed.participants(3))


def ready_from(start: Params, method: object, name: str) -> object:
    """A method for one network of the pair, which starts from these parameters."""
    ready = ready_for(
        method,
        rounds=3,
        model={"name": PAIR[name], **PAIR[f"{name}_arguments"]},
        topology={"clients": 6, "sampled": 4},
    )
    ready.world._initial[ready.world.model(0)] = start
    return ready


def test_without_distillation_the_two_networks_are_fedavg_and_local_training_to_the_bit() -> None:
    ready = ready_for({"name": "fml", "alpha": 1.0, "beta": 1.0}, rounds=3, model=PAIR)
    start = ready.world.initial(0)
    fedavg = {"name": "fedavg", "aggregation": "uniform"}
    alone = {"name": "lg_fedavg", "layers": 0}

    ours = drive(ready)
    shared_run = drive(ready_from(network_of(start, "shared"), fedavg, "shared"))
    own_run = drive(ready_from(network_of(start, "own"), alone, "own"))

    assert same_bits(network_of(ours.params, "shared"), shared_run.params)
    for client in range(6):
        assert bool(own_run.remembered(client)) == bool(ours.remembered(client))
        if ours.remembered(client):
            own_network = network_of(ours.personal_model(client), "own")
            assert same_bits(own_network, own_run.personal_model(client))


@dataclass(frozen=True)
class Batch:
    """A batch with given logits of both networks."""

    own: Tensor
    shared: Tensor
    y: Tensor

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
    """No loss of a network has a gradient in the other network's logits."""
    draw = torch.Generator().manual_seed(0)
    own = torch.randn(6, 5, generator=draw, dtype=torch.float64).requires_grad_()
    shared = torch.randn(6, 5, generator=draw, dtype=torch.float64).requires_grad_()
    y = torch.arange(6) % 5
    work = Mutual(FML(), "train", 0.5, 0.5)

    terms = work.terms(Batch(own, shared, y), TrainingStart({}))  # type: ignore[arg-type]

    other_network = {"own": shared, "own_kd": shared, "shared": own, "shared_kd": own}
    for name, logits in other_network.items():
        (gradient,) = torch.autograd.grad(
            terms[name].sum(), [logits], allow_unused=True, retain_graph=True
        )
        assert gradient is None

    of_equals = work.terms(Batch(own, own, y), TrainingStart({}))  # type: ignore[arg-type]
    for name in ("own_kd", "shared_kd"):
        assert float(of_equals[name].detach().abs().max()) < 1e-12


def test_clients_may_have_other_networks_of_their_own(tmp_path: Path) -> None:
    """What a client measures, and what is loaded, is its own network."""
    models = (toys.two_networks("mlp", hidden=(6,)), toys.two_networks("logistic"))
    toy = toys.toy(
        "fml",
        topology={"clients": 4},
        model=PAIR,
        clients={"models": models},
        measure_every=1,
    )

    run(toy, tmp_path / "run", toys.blobs())

    assert_loaded_models_answer_as_measured(tmp_path / "run", clients=4, round_index=3)
    for client, network in enumerate(("mlp", "logistic") * 2):
        loaded = fedstill.load_model(tmp_path / "run", client=client)
        assert loaded.about["network"].startswith(network)


def test_the_shared_network_is_one_for_all() -> None:
    other_pair = {
        "name": "pair",
        "own": "logistic",
        "shared": "mlp",
        "shared_arguments": {"hidden": (3,)},
    }
    toy = toys.toy(
        "fml", model=PAIR, clients={"models": (PAIR, other_pair)}, topology={"clients": 4}
    )
    with pytest.raises(IncompatibleMethod, match=r"model\.shared"):
        run(toy, None, toys.blobs())

    advice = r"set model\.name = 'pair', and model\.own and model\.shared"
    with pytest.raises(IncompatibleMethod, match=advice):
        run(toys.toy("fml"), None, toys.blobs())


def test_a_pair_gives_what_its_shared_network_gives() -> None:
    """And its own network can be taken out of it."""
    fields = {key: value for key, value in PAIR.items() if key != "name"}
    spec = contract.spec_for("pair", (1, 4, 4), 5, fields)
    params = contract.initial(spec, 0)
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    shared_spec = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})
    shared_answers = predictor(shared_spec, network_of(params, "shared"))(x)
    assert torch.equal(predictor(spec, params)(x), shared_answers)

    own_spec, own_params = personal_network(spec, params)
    assert own_spec == contract.spec_for(str(PAIR["own"]), (1, 4, 4), 5, PAIR["own_arguments"])
    assert same_bits(own_params, network_of(params, "own"))
    own_answers = contract.run_part(contract.module(spec), params, x, "own")
    assert torch.equal(own_answers, predictor(own_spec, own_params)(x))
