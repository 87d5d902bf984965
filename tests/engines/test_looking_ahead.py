"""A gradient taken elsewhere: against a loop written out in torch, and what leaves plain training
as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import Plan, Stage, TrainingStart
from fedstill.core.trees import same_bits
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import train
from fedstill.engines.vectorised import train_stack
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare

STAGE = Stage(2, 0, "train", (0, 1, 2))
PLAN = Plan(epochs=2, batch=7, lr=0.05, momentum=0.9, weight_decay=1e-3, clip_norm=0.7)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return in_double(prepare(resolve(toys.toy()), toys.blobs()))


def trained(ready: Prepared, work: ClientWork, plan: Plan = PLAN, client: int = 0):
    carry, view = TrainingStart(ready.world.initial(client)), ready.sites.view(client, STAGE)
    setup = TrainingSetup(plan=plan, stage=STAGE, inputs=ready.sites.inputs, seed=7)
    return train(work, carry, view, setup)


class Here(ClientWork):
    """Looks at where training is, without a first pass."""

    def perturb(self, params, grads, start):  # type: ignore[no-untyped-def]
        assert all(bool((g == 0).all()) for g in grads.values())
        return params


class HereTwice(ClientWork):
    """Looks at where training is, after a first pass."""

    def ascent_terms(self, step, start):  # type: ignore[no-untyped-def]
        return {"size": step.logits().square().sum(1)}

    def perturb(self, params, grads, start):  # type: ignore[no-untyped-def]
        return params


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": (8,)}, "digits_cnn", "toy_batchnorm"])
@pytest.mark.parametrize("work", [Here(), HereTwice()], ids=["no pass", "a pass"])
def test_a_look_at_where_training_is_leaves_it_as_it_is_to_the_bit(
    model: object, work: ClientWork
) -> None:
    ready = prepare(resolve(toys.toy(model=model)), toys.blobs_of(8))
    one, other = trained(ready, work), trained(ready, ClientWork())
    assert same_bits(one.params, other.params)
    assert one.losses == other.losses


@dataclass(frozen=True)
class Against(ClientWork):
    """Looks where the largest logits are larger; the terms are a cross-entropy."""

    rho: float

    def ascent_terms(self, step, start):  # type: ignore[no-untyped-def]
        return {"largest": step.logits().logsumexp(1), "pull": 0.1 * step.params["head.bias"].sum()}

    def perturb(self, params, grads, start):  # type: ignore[no-untyped-def]
        return {
            k: w + self.rho * grads[k].sign() * grads[k].abs().sqrt() for k, w in params.items()
        }

    def trainable(self, name: str) -> bool:
        return name != "body.1.bias"


def written_out(ready: Prepared, rho: float, client: int = 0) -> dict[str, Tensor]:
    """The same in two passes over a module whose weights are moved and put back."""
    view = ready.sites.view(client, STAGE)
    module = contract.build(view.model).double()
    module.load_state_dict(dict(ready.world.initial(client)))
    named = [p for k, p in module.named_parameters() if k != "body.1.bias"]
    sgd = torch.optim.SGD(
        named, lr=PLAN.lr_at(2), momentum=PLAN.momentum, weight_decay=PLAN.weight_decay
    )
    x, y = ready.sites.inputs.plain(view.data.values), view.data.labels
    order = generator(seed_for(7, 2, 0, client, "order"))
    for _ in range(PLAN.epochs):
        for index in torch.randperm(len(y), generator=order).split(PLAN.batch):
            first = module(x[index]).exp().sum(1).log().mean() + 0.1 * module.head.bias.sum()
            up, before = torch.autograd.grad(first, named), [p.detach().clone() for p in named]
            with torch.no_grad():
                for p, g in zip(named, up, strict=True):
                    p += rho * g.sign() * g.abs() ** 0.5
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            with torch.no_grad():
                for p, old in zip(named, before, strict=True):
                    p.copy_(old)
            torch.nn.utils.clip_grad_norm_(named, PLAN.clip_norm)
            sgd.step()
    return {k: v.detach() for k, v in module.state_dict().items()}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=NEAR, atol=NEAR)


def test_two_passes_are_the_loop_written_out(prepared: Prepared) -> None:
    ours = trained(prepared, Against(0.3)).params
    close(dict(ours), written_out(prepared, 0.3))
    assert not torch.allclose(
        ours["head.weight"], trained(prepared, Against(0.0)).params["head.weight"], atol=1e-4
    )


def test_in_a_stack_each_client_looks_from_where_it_is(prepared: Prepared) -> None:
    views = [prepared.sites.view(c, STAGE) for c in STAGE.clients]
    carries = [TrainingStart(prepared.world.initial(c)) for c in STAGE.clients]
    setup = TrainingSetup(plan=PLAN, stage=STAGE, inputs=prepared.sites.inputs, seed=7)
    for client, result in zip(
        STAGE.clients, train_stack(Against(0.3), carries, views, setup), strict=True
    ):
        close(dict(result.params), written_out(prepared, 0.3, client))


def test_statistics_of_normalisation_take_up_a_batch_once() -> None:
    """In the first pass, at the parameters themselves: one step moves them as one of plain
    training.
    """
    ready = prepare(resolve(toys.toy(model="toy_batchnorm")), toys.blobs())
    plan = replace(PLAN, epochs=0, steps=1)
    looked, plain = (trained(ready, work, plan).params for work in (Far(), ClientWork()))
    names = [
        k
        for k in plain
        if k.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert len(names) == 3
    assert all(torch.equal(looked[k], plain[k]) for k in names)
    assert not torch.equal(looked["head.weight"], plain["head.weight"])


class Far(HereTwice):
    def perturb(self, params, grads, start):  # type: ignore[no-untyped-def]
        return {k: 2 * w + 1 for k, w in params.items()}


class Forgetful(Here):
    """Its first pass has no objective."""

    def ascent_terms(self, step, start):  # type: ignore[no-untyped-def]
        return {}


def test_a_first_pass_without_terms_names_the_function(prepared: Prepared) -> None:
    with pytest.raises(FedstillError, match=r"ascent_terms .*no terms"):
        trained(prepared, Forgetful())
