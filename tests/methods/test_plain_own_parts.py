"""FedROD and FedDBE, whose clients keep what was added to the network, against a plain
implementation of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from class_answers import assert_loaded_models_answer_as_measured
from plain import (
    BODY,
    HEAD,
    Federation,
    Params,
    assert_same_model,
    at_labels,
    drive,
    ready_for,
    run_of,
    weighted_mean,
    zeros,
)
from torch import Tensor

import toys
from double import NEAR
from fedstill.core.records import Stage, TrainingStart
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of, only, same_bits
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.feddbe import FedDBE, Shifted
from fedstill.methods.fedlc import Calibrated
from fedstill.models.predictors import predictor
from fedstill.running.runner import run

GLOBAL = (*BODY, *HEAD)
OWN_HEAD = ("own.weight", "own.bias")
SHIFT = "body.shift"

NamedLoss = Callable[[Params, Tensor, Tensor], Tensor]
"""A loss of named tensors, inputs and labels."""


def fit_by_hand(
    fed: Federation,
    start: Params,
    loss: NamedLoss,
    names: Sequence[str],
    *,
    round_index: int,
    client: int,
    stage: int = 0,
) -> Params:
    """A client's entries after SGD with momentum on those of these names."""
    params = {name: value.detach().clone() for name, value in start.items()}
    velocity = zeros(params)
    data = fed.data(client)
    for index in fed.batches(round_index, client, stage):
        leaves = {name: value.requires_grad_(name in names) for name, value in params.items()}
        trained = [leaves[name] for name in names]
        gradients = torch.autograd.grad(loss(leaves, *data.take(index)), trained)
        params = {name: value.detach() for name, value in params.items()}
        for name, gradient in zip(names, gradients, strict=True):
            gradient = gradient + fed.plan["weight_decay"] * params[name]
            velocity[name] = fed.plan["momentum"] * velocity[name] + gradient
            params[name] = params[name] - fed.lr(round_index) * velocity[name]
    return params


def features_of(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The hidden layer's values."""
    return (x.flatten(1) @ params["body.1.weight"].T + params["body.1.bias"]).clamp(min=0)


def linear(params: Mapping[str, Tensor], layer: str, h: Tensor) -> Tensor:
    """The values of a linear layer."""
    return h @ params[f"{layer}.weight"].T + params[f"{layer}.bias"]


def softmax_loss(z: Tensor, y: Tensor, factors: Tensor | float = 1.0) -> Tensor:
    """Cross-entropy of positive scores exp z, each times its class's factor."""
    scores = factors * z.exp()
    return -(at_labels(scores, y) / scores.sum(1)).log().mean()


# FedROD.


def two_heads(counts: Tensor, gamma: float) -> NamedLoss:
    """FedROD's objective: balanced softmax of the shared head; plain softmax of both heads' sum, of
    which only the client's head learns.
    """
    factors = counts.clamp(min=1).double() ** gamma

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        h = features_of(params, x)
        z = linear(params, "head", h)
        both = z.detach() + linear(params, "own", h.detach())
        return softmax_loss(z, y, factors) + softmax_loss(both, y)

    return loss


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod(gamma: float) -> None:
    """The clients' heads never travel."""
    ready = ready_for({"name": "fedrod", "gamma": gamma}, rounds=3)
    fed = Federation(ready)
    server = fed.start
    own_heads = dict.fromkeys(fed.clients, only(server, OWN_HEAD))
    for round_index in (1, 2, 3):
        models = []
        cohort = fed.cohort(round_index)
        for client in cohort:
            model = fit_by_hand(
                fed,
                {**server, **own_heads[client]},
                two_heads(fed.label_counts(client), gamma),
                (*GLOBAL, *OWN_HEAD),
                round_index=round_index,
                client=client,
            )
            own_heads[client] = only(model, OWN_HEAD)
            models.append(only(model, GLOBAL))
        sizes = [fed.size(client) for client in cohort]
        server = {**server, **weighted_mean(models, sizes)}

    ours = drive(ready)

    assert_same_model(ours.params, server)
    for client in fed.participants(3):
        own_head = only(ours.personal_model(client), OWN_HEAD)
        assert_same_model(own_head, own_heads[client])
        assert own_head["own.weight"].any(), "it was zero at first"


@method("toy_balanced")
class Balanced(FedAvg):
    """FedAvg with balanced softmax, and no second head."""

    def work(self, stage: Stage) -> Calibrated:
        return OnlyBalanced(self)  # type: ignore[arg-type]


class OnlyBalanced(Calibrated):
    """A client that trains with balanced softmax."""

    def begin(self, payload, client_state, view, world):  # type: ignore[no-untyped-def]
        shift = view.counts.clamp(min=1).double().log().to(dtype_of(payload.params))
        return TrainingStart(payload.params, constants={"shift": shift})

    def terms(self, step, start):  # type: ignore[no-untyped-def]
        return {"balanced": cross_entropy(step.logits() + start["shift"], step.y)}


def test_fedrods_global_model_is_that_of_balanced_fedavg_to_the_bit() -> None:
    """Whatever the clients' own heads learn."""
    ours = run_of("fedrod", rounds=3).params
    expected = run_of("toy_balanced", rounds=3).params

    assert same_bits(only(ours, expected), expected)


def test_without_gamma_the_global_model_is_that_of_fedavg() -> None:
    """Equal factors of all classes change no loss, either."""
    expected = run_of("fedavg").params
    ours = run_of({"name": "fedrod", "gamma": 0.0}).params
    assert_same_model(only(ours, expected), expected)

    z = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(7) % 5
    with_equal_counts = softmax_loss(z + torch.tensor(3.0).log(), y)
    torch.testing.assert_close(with_equal_counts, softmax_loss(z, y))


def test_measured_and_loaded_models_answer_by_the_sum_of_both_heads(tmp_path: Path) -> None:
    toy = toys.toy("fedrod", topology={"clients": 6}, measure_every=1)

    run(toy, tmp_path / "run", toys.blobs())

    assert_loaded_models_answer_as_measured(tmp_path / "run", clients=6, round_index=3)


def test_a_client_answers_by_the_sum_of_both_heads_logits() -> None:
    """Of a client; the server's predictor is the shared head's."""
    ready = ready_for("fedrod", rounds=1)
    fed = Federation(ready)
    client = fed.cohort(1)[0]
    stage = ready.settings.schedule(1, ready.world)[0]
    spec = ready.world.model(client)
    x = fed.data(client).inputs

    ours = drive(ready)

    params = ours.personal_model(client)
    h = features_of(params, x)
    both = linear(params, "head", h) + linear(params, "own", h)
    answer = ready.settings.method.work(stage).answer(params, spec)
    torch.testing.assert_close(predictor(spec, answer)(x), both, rtol=NEAR, atol=NEAR)
    assert list(ready.settings.method.predictors(ours.final, ready.world)) == ["global"]


# FedDBE.


def shifted_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy after a client's shift of the features."""
    return softmax_loss(linear(params, "head", features_of(params, x) + params[SHIFT]), y)


@pytest.mark.parametrize("kappa", [0.0, 3.0])
def test_feddbe(kappa: float) -> None:
    """Features are drawn to the consensus mean, which is measured before round 1."""
    ready = ready_for({"name": "feddbe", "kappa": kappa}, rounds=3)
    fed = Federation(ready)
    server = fed.start
    sizes = [fed.size(client) for client in fed.clients]
    feature_means = []
    for client in fed.clients:
        model = fit_by_hand(fed, server, shifted_loss, GLOBAL, round_index=1, client=client)
        features = features_of(model, fed.data(client).inputs)
        feature_means.append({"mean": features.mean(0)})
    consensus = weighted_mean(feature_means, sizes)["mean"]

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        gap = features_of(params, x).mean(0) - consensus
        return shifted_loss(params, x, y) + kappa * (gap**2 / 2).mean()

    shifts = dict.fromkeys(fed.clients, server[SHIFT])
    for round_index, stage in ((1, 1), (2, 0), (3, 0)):  # round 1 begins with the first visit
        cohort = fed.cohort(round_index)
        models = []
        for client in cohort:
            model = fit_by_hand(
                fed,
                {**server, SHIFT: shifts[client]},
                loss,
                (*GLOBAL, SHIFT),
                round_index=round_index,
                client=client,
                stage=stage,
            )
            shifts[client] = model[SHIFT]
            models.append(only(model, GLOBAL))
        server = {**server, **weighted_mean(models, [sizes[client] for client in cohort])}

    ours = drive(ready)

    our_consensus = ours.final.extra.tensor("consensus")
    torch.testing.assert_close(our_consensus, consensus, rtol=NEAR, atol=NEAR)
    assert_same_model(ours.params, server)
    for client in fed.clients:
        took_part = client in fed.participants(3)
        assert bool(ours.remembered(client)) == took_part
        if took_part:
            our_shift = ours.personal_model(client)[SHIFT]
            torch.testing.assert_close(our_shift, shifts[client], rtol=NEAR, atol=NEAR)


@method("toy_unshifted")
class Unshifted(FedDBE):
    """FedDBE whose shifts stay zero."""

    def work(self, stage: Stage):  # type: ignore[no-untyped-def]
        if stage.name == "train":
            return WithoutShift(self, stage.name, self.kappa)
        return super().work(stage)


class WithoutShift(Shifted):
    """A client that trains all but its shift."""

    def trainable(self, name: str) -> bool:
        return name != SHIFT


def test_without_kappa_and_with_shifts_that_stay_zero_feddbe_is_federated_averaging() -> None:
    """In data order: the stage before round 1 draws another."""
    in_data_order = {"shuffle": False}
    ours = run_of({"name": "toy_unshifted", "kappa": 0.0}, plan=in_data_order).params
    expected = run_of("fedavg", plan=in_data_order).params

    assert same_bits(only(ours, expected), expected)


def test_features_at_the_consensus_cost_nothing_and_a_shift_acts_like_a_bias() -> None:
    ready = ready_for("feddbe", rounds=1)
    fed = Federation(ready)
    spec = ready.world.model(0)
    x, y = fed.data(0)
    draw = torch.Generator().manual_seed(0)
    shift = torch.randn(8, generator=draw, dtype=torch.float64)
    params = {**fed.start, SHIFT: shift}
    features = features_of(params, x)
    logits = predictor(spec, params)(x)
    step = SimpleNamespace(
        params=params,
        y=y,
        mask=torch.ones(len(y)),
        features=lambda: features + shift,
        logits=lambda: logits,
        weighted=lambda losses: losses,
    )
    start = TrainingStart(params, constants={"consensus": features.mean(0)})

    terms = Shifted(ready.settings.method, "train", 50.0).terms(step, start)  # type: ignore[arg-type]

    assert float(terms["mean"]) < NEAR
    bias = params["head.bias"] + params["head.weight"] @ shift
    expected = features @ params["head.weight"].T + bias
    torch.testing.assert_close(logits, expected, rtol=NEAR, atol=NEAR)
