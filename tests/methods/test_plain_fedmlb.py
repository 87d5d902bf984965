"""FedMLB against a plain implementation, and what it is at its edges."""

from __future__ import annotations

import pytest
import torch
from plain import Federation, Params, average, check, check_matters, drive, ready_for
from torch import Tensor, nn

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
METHOD = {"name": "fedmlb", "own": 0.8, "branch": 0.6, "agree": 1.5, "temperature": 2.0}


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize("detach", [False, True])
def test_two_rounds_are_those_of_branches_written_out(detach: bool) -> None:
    """Layers 1 and 3 of the body, each with its ReLU, then the head: two levels."""
    ready = ready_for({**METHOD, "detach": detach}, model=DEEP, plan={"lr": 0.05})
    fed = Federation(ready)
    fed.lr = lambda round: 0.05 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    server = fed.start
    for round in (1, 2):
        g: Params = server

        def loss(model: nn.Module, x: Tensor, y: Tensor, g: Params = g) -> Tensor:
            first = model.body[2](model.body[1](x.flatten(1)))
            second = model.body[4](model.body[3](first))
            z = model.head(second)
            rest = (first @ g["body.3.weight"].T + g["body.3.bias"]).clamp(min=0)
            hybrids = [h @ g["head.weight"].T + g["head.bias"] for h in (rest, second)]
            out = 0.8 * nn.functional.cross_entropy(z, y)
            for h in hybrids:
                target = (h.detach() if detach else h) / 2
                out = out + 0.6 / 2 * nn.functional.cross_entropy(h, y)
                out = out + 1.5 / 2 * kl(target.softmax(1), (z / 2).softmax(1))
            return out

        server = average([fed.fit(server, loss, round, c) for c in fed.cohort(round)])
    ours = drive(ready)[0][-1].params
    check(ours, server)


def test_without_branches_it_is_federated_averaging_to_the_bit() -> None:
    none = {"name": "fedmlb", "branch": 0.0, "agree": 0.0}
    ours, theirs = (drive(ready_for(m, model=DEEP))[0][-1].params for m in (none, "fedavg"))
    assert same_bits(ours, theirs)
    check_matters(drive(ready_for("fedmlb"))[0][-1].params, ready_for("fedmlb"))


class Looked(Branched):
    """Looks at the first step of a client, where it is still the global model."""

    def terms(self, step, start):  # type: ignore[no-untyped-def]
        received = {
            k: v.requires_grad_(v.is_floating_point()) for k, v in start.teachers["global"].items()
        }
        activations = step.run(run_to_levels).activations
        hybrids = [
            step.run_teacher("global", run_from_level, x, level) for level, x in activations.items()
        ]
        first = next(k for k in step.params if k.endswith("weight"))
        for h in hybrids:
            torch.testing.assert_close(h, step.logits(), rtol=NEAR, atol=NEAR)
            (up,) = torch.autograd.grad(h.square().sum(), [step.params[first]], retain_graph=True)
            assert float(up.abs().sum()) > 0, "the gradient of every branch reaches the first layer"
        terms = super().terms(step, start)
        assert float(terms["agree"].detach().abs().max()) < NEAR
        torch.testing.assert_close(terms["branches"], terms["ce"], rtol=NEAR, atol=NEAR)
        sum(v.mean() for v in terms.values()).backward(retain_graph=True)
        assert all(v.grad is None for v in received.values())
        return terms


@pytest.mark.parametrize("model", [DEEP, "toy_batchnorm"])
def test_at_the_global_model_every_branch_says_what_it_says(model: object) -> None:
    ready = ready_for("fedmlb", model=model, plan={"norm": "frozen"})
    stage = Stage(1, 0, "train", (0,))
    view, start = ready.sites.view(0, stage), dict(ready.world.initial(0))
    teacher = {k: v.clone() for k, v in start.items()}
    plan = Plan(steps=1, epochs=0, batch=8, norm="frozen")
    setup = TrainingSetup(plan=plan, stage=stage, inputs=ready.sites.inputs, seed=7)
    train(Looked(FedMLB()), TrainingStart(start, teachers={"global": teacher}), view, setup)
    assert levels(contract.module(view.model))


def test_a_network_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(IncompatibleMethod, match="chain of layers"):
        prepare(resolve(toy("fedmlb", model="toy_uncut")), blobs())


@register("model", "toy_uncut")
class Uncut(nn.Module):
    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
