"""FedMLB against a plain implementation, and what it is at its edges."""

from __future__ import annotations

import pytest
import torch
from plain import (
    PLAN,
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    average,
    drive,
    kl,
    ready_for,
    run_of,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from double import NEAR
from fedstill.config.resolve import resolve
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.records import Plan, Stage, TrainingStart
from fedstill.core.registry import register
from fedstill.core.trees import same_bits
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.methods.fedmlb import Branched, FedMLB
from fedstill.models import contract
from fedstill.models.layer_chain import levels, run_from_level, run_to_levels
from fedstill.running.preparation import prepare
from toys import blobs, toy

DEEP = {"name": "mlp", "hidden": (8, 6)}
"""Layers 1 and 3 of the body, each with its ReLU, then the head: two levels."""


def branched(received: Params, detach: bool) -> Loss:
    """Cross-entropy of the client's network and of two branches that go on in the global model,
    which teach the client's network.
    """

    def linear(x: Tensor, layer: str) -> Tensor:
        return x @ received[f"{layer}.weight"].T + received[f"{layer}.bias"]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first = model.body[2](model.body[1](x.flatten(1)))
        second = model.body[4](model.body[3](first))
        z = model.head(second)
        branches = [
            linear(linear(first, "body.3").clamp(min=0), "head"),
            linear(second, "head"),
        ]
        total = 0.8 * cross_entropy(z, y)
        for branch in branches:
            teacher = branch / 2
            if detach:
                teacher = teacher.detach()
            divergence = kl(teacher.softmax(1), (z / 2).softmax(1)).mean()
            total = total + 0.6 / 2 * cross_entropy(branch, y) + 1.5 / 2 * divergence
        return total

    return loss


@pytest.mark.parametrize("detach", [False, True])
def test_two_rounds_are_those_of_branches_written_out(detach: bool) -> None:
    method = {
        "name": "fedmlb",
        "own": 0.8,
        "branch": 0.6,
        "agree": 1.5,
        "temperature": 2.0,
        "detach": detach,
    }
    ready = ready_for(method, model=DEEP, plan={"lr": 0.05})
    fed = Federation(ready, plan={**PLAN, "lr": 0.05})
    params = fed.start
    for round_index in (1, 2):
        params = average(fed.fit_cohort(params, branched(params, detach), round_index))

    assert_same_model(drive(ready).params, params)


def test_without_branches_it_is_federated_averaging_to_the_bit() -> None:
    """And with them it is not."""
    without_branches = {"name": "fedmlb", "branch": 0.0, "agree": 0.0}

    ours = run_of(without_branches, model=DEEP).params

    assert same_bits(ours, run_of("fedavg", model=DEEP).params)
    ready = ready_for("fedmlb")
    assert_unlike_fedavg(drive(ready).params, ready)


class CheckedAtTheStart(Branched):
    """Checks the first step of a client, where its model is still the global one."""

    def terms(self, step, start):  # type: ignore[no-untyped-def]
        received = start.teachers["global"]
        for value in received.values():
            value.requires_grad_(value.is_floating_point())
        first_weight = next(name for name in step.params if name.endswith("weight"))

        for level, activation in step.run(run_to_levels).activations.items():
            branch = step.run_teacher("global", run_from_level, activation, level)
            torch.testing.assert_close(branch, step.logits(), rtol=NEAR, atol=NEAR)
            (gradient,) = torch.autograd.grad(
                branch.square().sum(), [step.params[first_weight]], retain_graph=True
            )
            assert float(gradient.abs().sum()) > 0, "each branch trains the first layer"

        terms = super().terms(step, start)
        assert float(terms["agree"].detach().abs().max()) < NEAR
        torch.testing.assert_close(terms["branches"], terms["ce"], rtol=NEAR, atol=NEAR)
        sum(losses.mean() for losses in terms.values()).backward(retain_graph=True)
        assert all(value.grad is None for value in received.values()), "the teacher stays"
        return terms


@pytest.mark.parametrize("model", [DEEP, "toy_batchnorm"])
def test_at_the_global_model_every_branch_gives_its_logits(model: object) -> None:
    ready = ready_for("fedmlb", model=model, plan={"norm": "frozen"})
    stage = Stage(1, 0, "train", (0,))
    view = ready.sites.view(0, stage)
    params = dict(ready.world.initial(0))
    teacher = {name: value.clone() for name, value in params.items()}
    plan = Plan(steps=1, epochs=0, batch=8, norm="frozen")
    setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
    start = TrainingStart(params, teachers={"global": teacher})

    train(CheckedAtTheStart(FedMLB()), start, view, setup)

    assert levels(contract.module(view.model))


def test_a_network_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match="chain of layers"):
        prepare(resolve(toy("fedmlb", model="toy_uncut")), blobs())


@register("model", "toy_uncut")
class Uncut(nn.Module):
    """A network whose body has no layers."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
