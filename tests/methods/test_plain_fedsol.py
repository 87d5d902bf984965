"""FedSAM and FedSOL against plain implementations in two passes, and what each is at its edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from plain import (
    Federation,
    Params,
    all_finite,
    assert_same_model,
    assert_unlike_fedavg,
    ce,
    drive,
    experiment,
    kl,
    minus,
    norm,
    ready_for,
    run_of,
    weighted_mean,
    weights_of,
    zeros,
)
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.records import Stage, TrainingStart
from fedstill.core.trees import same_bits
from fedstill.methods.fedsam import FedSAM
from fedstill.methods.fedsol import FedSOL
from fedstill.running.preparation import prepare

FirstLoss = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]
"""The loss of the first pass, of the client's model, the model received, inputs and labels."""


def divergence(model: nn.Module, received: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """From the model received, at temperature 3."""
    p = (received(x) / 3).softmax(1).detach()
    q = (model(x) / 3).softmax(1)
    return kl(p, q).mean()


def label_loss(model: nn.Module, received: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy."""
    return ce(model, x, y)


def relative_change(change: Tensor) -> Tensor:
    """The change of each entry in units of its column's, or of a whole bias's; zero where nothing
    has changed.
    """
    length = (change**2).sum(0, keepdim=True) ** 0.5
    return torch.where(length > 0, change.abs() / torch.where(length > 0, length, 1), 0)


@dataclass(frozen=True)
class TwoPasses:
    """Training whose gradients are those of a perturbed model: up the first loss."""

    first: FirstLoss
    rho: float
    adaptive: bool = False
    """Whether entries are perturbed as far as they have changed since the model was received."""
    part: str = ""
    """Entries whose names begin so are perturbed."""

    def fit(self, fed: Federation, start: Params, round_index: int, client: int) -> Params:
        """One client's local training."""
        model = fed.net(start)
        received = fed.net(start)
        parameters = dict(model.named_parameters())
        sgd = fed.sgd(list(parameters.values()), round_index)
        data = fed.data(client)
        for index in fed.batches(round_index, client):
            x, y = data.take(index)
            before = {name: value.detach().clone() for name, value in parameters.items()}
            perturbation = self.perturbation(model, received, x, y)
            with torch.no_grad():
                for name, change in perturbation.items():
                    parameters[name] += change
            model.zero_grad()
            ce(model, x, y).backward()
            with torch.no_grad():
                for name, value in before.items():
                    parameters[name].copy_(value)
            sgd.step()
        return weights_of(model)

    def perturbation(self, model: nn.Module, received: nn.Module, x: Tensor, y: Tensor) -> Params:
        """The way from the model to the point whose gradient is taken.

        At the model received, the divergence from it has no direction.
        """
        parameters = dict(model.named_parameters())
        start = dict(received.named_parameters())
        if self.first is divergence and same_bits(parameters, start):
            return zeros(parameters)
        loss = self.first(model, received, x, y)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        length = sum((gradient**2).sum() for gradient in gradients) ** 0.5 + 1e-12

        changes = {}
        for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
            if name.startswith(self.part):
                changes[name] = self.rho * gradient / length
                if self.adaptive:
                    change = value.detach() - start[name].detach()
                    changes[name] = changes[name] * relative_change(change)
        return changes


@pytest.mark.parametrize(
    ("method", "training"),
    [
        ({"name": "fedsam"}, TwoPasses(label_loss, rho=0.5)),
        ({"name": "fedsol"}, TwoPasses(divergence, rho=1.0, adaptive=True)),
        ({"name": "fedsol", "scale": "fixed", "rho": 0.4}, TwoPasses(divergence, rho=0.4)),
        (
            {"name": "fedsol", "part": "head", "rho": 2.0},
            TwoPasses(divergence, rho=2.0, adaptive=True, part="head"),
        ),
        (
            {"name": "fedsol", "part": "body", "scale": "fixed"},
            TwoPasses(divergence, rho=1.0, part="body"),
        ),
    ],
    ids=["fedsam", "adaptive", "fixed", "head", "body"],
)
def test_two_rounds_are_those_of_two_passes_written_out(
    method: dict[str, object], training: TwoPasses
) -> None:
    ready = ready_for(method)
    fed = Federation(ready)
    params = fed.start
    for round_index in (1, 2):
        cohort = fed.cohort(round_index)
        models = [training.fit(fed, params, round_index, client) for client in cohort]
        params = weighted_mean(models, [fed.size(client) for client in cohort])

    ours = drive(ready).params

    assert_same_model(ours, params)
    assert_unlike_fedavg(ours, ready)


@pytest.mark.parametrize("name", ["fedsam", "fedsol"])
def test_at_rho_0_it_is_federated_averaging_to_the_bit(name: str) -> None:
    ours = run_of({"name": name, "rho": 0.0}).params

    assert same_bits(ours, run_of("fedavg").params)


@pytest.mark.parametrize("scale", ["adaptive", "fixed"])
def test_the_first_step_of_a_client_is_that_of_fedavg(scale: str) -> None:
    """There the divergence from the model received is zero, in float32 but for rounding."""
    fedsol = experiment(
        {"name": "fedsol", "scale": scale}, rounds=1, plan={"steps": 1, "epochs": 0}
    )
    fedavg = replace(fedsol, method="fedavg")

    ours = drive(prepare(resolve(fedsol), toys.blobs())).params
    expected = drive(prepare(resolve(fedavg), toys.blobs())).params

    assert same_bits(ours, expected)


def reach(
    method: FedSAM | FedSOL,
    gradients: Params,
    received: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
) -> float:
    """How far away the point is whose gradient the method takes."""
    work = method.work(Stage(1, 0, "train", (0,)))
    start = TrainingStart(received, constants={"received": received})
    return norm(minus(params, work.perturb(params, gradients, start)))


def test_the_perturbation_has_length_rho() -> None:
    """Less far if each entry goes only as far as it has changed."""
    received = Federation(ready_for("fedavg")).start
    draw = torch.Generator().manual_seed(0)

    def near_received(scale: float) -> Params:
        moved = {}
        for name, value in received.items():
            noise = torch.randn(value.shape, generator=draw, dtype=value.dtype)
            moved[name] = value + scale * noise
        return moved

    params = near_received(0.1)
    gradients = near_received(1.0)
    for rho in (0.3, 2.0):
        assert reach(FedSAM(rho=rho), gradients, received, params) == pytest.approx(rho)
        fixed = FedSOL(rho=rho, scale="fixed")
        assert reach(fixed, gradients, received, params) == pytest.approx(rho)
        assert 0 < reach(FedSOL(rho=rho), gradients, received, params) < rho

    no_gradients = zeros(gradients)
    for method in (FedSAM(), FedSOL(), FedSOL(scale="fixed")):
        assert reach(method, no_gradients, received, received) == 0.0


def test_statistics_of_normalisation_stay_finite_and_are_averaged() -> None:
    run = run_of("fedsol", model="toy_batchnorm", plan={"lr": 0.02})

    assert all_finite(run.params)


def test_a_part_needs_a_model_that_has_it() -> None:
    assert Need.HEAD not in FedSOL().requires()
    assert Need.HEAD in FedSOL(part="head").requires()
