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
from fedstill.engines.loop import Trained, train
from fedstill.engines.vectorised import train_stack
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare

STAGE = Stage(2, 0, "train", (0, 1, 2))
PLAN = Plan(epochs=2, batch=7, lr=0.05, momentum=0.9, weight_decay=1e-3, clip_norm=0.7)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return in_double(prepare(resolve(toys.toy()), toys.blobs()))


def trained(ready: Prepared, work: ClientWork, plan: Plan = PLAN, client: int = 0) -> Trained:
    """The training of one client in the second round."""
    carry = TrainingStart(ready.world.initial(client))
    view = ready.sites.view(client, STAGE)
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
    looking = trained(ready, work)
    plain = trained(ready, ClientWork())
    assert same_bits(looking.params, plain.params)
    assert looking.losses == plain.losses


@dataclass(frozen=True)
class Against(ClientWork):
    """Looks where the largest logits are larger; the terms are a cross-entropy."""

    rho: float

    def ascent_terms(self, step, start):  # type: ignore[no-untyped-def]
        return {"largest": step.logits().logsumexp(1), "pull": 0.1 * step.params["head.bias"].sum()}

    def perturb(self, params, grads, start):  # type: ignore[no-untyped-def]
        roots = {name: grad.sign() * grad.abs().sqrt() for name, grad in grads.items()}
        return {name: entry + self.rho * roots[name] for name, entry in params.items()}

    def trainable(self, name: str) -> bool:
        return name != "body.1.bias"


def written_out(ready: Prepared, rho: float, client: int = 0) -> dict[str, Tensor]:
    """The same in two passes over a module whose weights are moved and put back."""
    view = ready.sites.view(client, STAGE)
    module = contract.build(view.model).double()
    module.load_state_dict(dict(ready.world.initial(client)))
    params = [entry for name, entry in module.named_parameters() if name != "body.1.bias"]
    sgd = torch.optim.SGD(
        params, lr=PLAN.lr_at(2), momentum=PLAN.momentum, weight_decay=PLAN.weight_decay
    )
    x = ready.sites.inputs.plain(view.data.values)
    y = view.data.labels
    order = generator(seed_for(7, 2, 0, client, "order"))
    for _ in range(PLAN.epochs):
        for index in torch.randperm(len(y), generator=order).split(PLAN.batch):
            log_sums = module(x[index]).exp().sum(1).log()
            ascent = log_sums.mean() + 0.1 * module.head.bias.sum()
            ascent_grads = torch.autograd.grad(ascent, params)
            weights = [entry.detach().clone() for entry in params]
            with torch.no_grad():
                for entry, grad in zip(params, ascent_grads, strict=True):
                    entry += rho * grad.sign() * grad.abs() ** 0.5
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            with torch.no_grad():
                for entry, weight in zip(params, weights, strict=True):
                    entry.copy_(weight)
            torch.nn.utils.clip_grad_norm_(params, PLAN.clip_norm)
            sgd.step()
    return dict(module.state_dict())


def check_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Check that parameters differ by the rounding of float64 alone."""
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=NEAR, atol=NEAR)


def test_two_passes_are_the_loop_written_out(prepared: Prepared) -> None:
    ours = trained(prepared, Against(0.3)).params
    check_close(dict(ours), written_out(prepared, 0.3))
    unperturbed = trained(prepared, Against(0.0)).params
    assert not torch.allclose(ours["head.weight"], unperturbed["head.weight"], atol=1e-4)


def test_in_a_stack_each_client_looks_from_where_it_is(prepared: Prepared) -> None:
    views = [prepared.sites.view(c, STAGE) for c in STAGE.clients]
    carries = [TrainingStart(prepared.world.initial(c)) for c in STAGE.clients]
    setup = TrainingSetup(plan=PLAN, stage=STAGE, inputs=prepared.sites.inputs, seed=7)

    results = train_stack(Against(0.3), carries, views, setup)

    for client, result in zip(STAGE.clients, results, strict=True):
        check_close(dict(result.params), written_out(prepared, 0.3, client))


def test_statistics_of_normalisation_take_up_a_batch_once() -> None:
    """In the first pass, at the parameters themselves: one step moves them as one of plain
    training.
    """
    ready = prepare(resolve(toys.toy(model="toy_batchnorm")), toys.blobs())
    plan = replace(PLAN, epochs=0, steps=1)

    looking = trained(ready, Far(), plan).params
    plain = trained(ready, ClientWork(), plan).params

    statistics = ("running_mean", "running_var", "num_batches_tracked")
    names = [name for name in plain if name.endswith(statistics)]
    assert len(names) == 3
    assert same_bits({name: looking[name] for name in names}, {name: plain[name] for name in names})
    assert not torch.equal(looking["head.weight"], plain["head.weight"])


class Far(HereTwice):
    """Computes its gradients far from where training is."""

    def perturb(self, params, grads, start):  # type: ignore[no-untyped-def]
        return {k: 2 * w + 1 for k, w in params.items()}


class Forgetful(Here):
    """Its first pass has no objective."""

    def ascent_terms(self, step, start):  # type: ignore[no-untyped-def]
        return {}


def test_a_first_pass_without_terms_names_the_function(prepared: Prepared) -> None:
    with pytest.raises(FedstillError, match=r"ascent_terms .*no terms"):
        trained(prepared, Forgetful())
