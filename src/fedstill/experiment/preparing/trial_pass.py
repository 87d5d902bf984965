"""What two examples tell of a run's networks before anything is trained: what is refused, and what
is only said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from fedstill.data.views import SiteViews
from fedstill.errors import ConfigError, IncompatibleMethod
from fedstill.models import contract
from fedstill.models.probing import built_size, draws_random_numbers, is_of_library
from fedstill.records import ModelSpec, World

PARTS = frozenset({"features", "head", "slim", "levels"})
"""What is asked of a network that is then run by its parts: its body, and its head on that."""

HUGE = 100_000_000
"""Parameters of a network for images: one of the library's that has more was not meant for images
of that size.
"""


def two_examples(sites: SiteViews) -> Tensor:
    """The first two examples as inputs; without content where this side has none."""
    some = sites.train.values[:2]
    return sites.inputs.plain(some if len(some) else some.new_zeros(2, *some.shape[1:]))


def refuse_huge(spec: ModelSpec) -> None:
    """Raise ConfigError for a network of the library that grows with images, on large ones; it is
    not built.
    """
    if (
        len(spec.input_shape) != 3
        or {"of", "own"} & dict(spec.fields).keys()
        or not is_of_library(spec)
    ):
        return
    if (count := built_size(spec)) > HUGE:
        height, width = spec.input_shape[1:]
        raise ConfigError(
            f"model {spec.label} has {count:,} parameters on images of {height} x {width}: "
            "set data.size = 64, or another size, or choose a model that grows less, resnet10 say"
        )


def refuse_odd(spec: ModelSpec, x: Tensor, world: World, needs: Collection[str]) -> None:
    """Raise for a network that cannot be trained or looked at as it is: ConfigError or
    IncompatibleMethod.

    needs: what the method and the measures ask of it.
    """
    trains = any(plan.epochs or plan.steps for plan in world.plans.values())
    if trains and not contract.trainable_names(spec):
        raise ConfigError(
            f"no parameter of model {spec.label} is to be trained: all have requires_grad = False; "
            "leave it on for some"
        )
    if draws_random_numbers(spec, training=False):
        raise ConfigError(
            f"model {spec.label} draws random numbers in evaluation mode, so no two looks at it "
            "are alike; "
            "let it draw only where self.training is true"
        )
    if PARTS & set(needs) and "features" in contract.capabilities(spec):
        _refuse_other_parts(spec, x)


def _refuse_other_parts(spec: ModelSpec, x: Tensor) -> None:
    """Raise IncompatibleMethod where a network is not its head on its body, as what needs features
    takes it to be.
    """
    m = contract.module(spec, "frozen").eval()
    params = contract.entries(spec, m)
    with torch.no_grad():
        whole = contract.forward(m, params, x)
        z = contract.features(m, params, x)
        parts = contract.head(m, params, z)
    if parts.shape != whole.shape or not torch.allclose(parts, whole, rtol=1e-3, atol=1e-5):
        raise IncompatibleMethod(
            f"model {spec.label}: forward(x) is not head(body(x)), which runs in its place where "
            "features are needed; "
            "put into body all that comes before head, or give the two other names"
        )


def said_of_network(spec: ModelSpec, sites: SiteViews) -> Iterator[str]:
    """What is odd about a network and may be meant, a sentence each."""
    m, trained = contract.module(spec, "frozen"), contract.trainable_names(spec)
    own, every = contract.entries(spec, m), [name for name, _ in m.named_parameters()]
    if still := [name for name in every if name in own and name not in trained]:
        yield (
            f"model {spec.label}: {len(still)} of {len(every)} parameters have requires_grad = "
            f"False ({still[0]}, …), "
            "and are not trained; they are sent, and change by the rounding of means; with "
            "train_only they are neither"
        )
    logits = contract.predictor(spec, own)(two_examples(sites).cpu())
    sums = logits.float().sum(1)
    if (
        spec.classes > 1
        and bool((logits >= 0).all())
        and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    ):
        yield (
            f"model {spec.label} gives probabilities, it seems (each row is positive and sums to "
            "1), and losses take "
            "logits: leave softmax out of its forward()"
        )
