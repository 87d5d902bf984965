"""Private training (DP-SGD): clipped, noised gradients, and its epsilon."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.extensions import ClientHook, GradientRule
from fedstill.core.keys import to_device
from fedstill.core.records import SERVER, Plan, Stage, Tensors, View
from fedstill.privacy.noise import secret_normal

# Training whose steps tell little of any one example (DP-SGD): clipped gradients, noise, batches
# drawn example by example.


@dataclass(frozen=True)
class Private(GradientRule):
    """The gradient rule of DP-SGD: sampled examples, clipped gradients, and noise on their sum.

    clip: the largest norm of one example's gradient. noise: the standard deviation of the noise on
    their sum, in units of ``clip``. secret: use random numbers that no seed repeats, as on real
    sites.
    """

    clip: float
    noise: float
    secret: bool = False

    def batches(
        self, n: int, plan: Plan, order: torch.Generator, device: torch.device
    ) -> Iterator[list[Tensor]]:
        """The examples of each step, sampled by ``poisson_batches``."""
        return poisson_batches(n, plan, order, device, self.secret)

    def combined(
        self, gradients: Tensors, like: Tensors, size: int, draws: torch.Generator
    ) -> Tensors:
        """The noised mean of clipped gradients (``noised_mean``)."""
        return noised_mean(gradients, like, self, size, draws)


@dataclass(frozen=True)
class PrivateTraining(ClientHook):
    """Trains clients on their own data privately. ``rule``: how steps are protected."""

    stackable: ClassVar[bool] = False

    rule: Private

    def gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """The rule, but not for the server and for public data."""
        if view.client == SERVER or stage.view == "public":
            return None
        return self.rule


def poisson_batches(
    n: int, plan: Plan, order: torch.Generator, device: torch.device, secret: bool = False
) -> Iterator[list[Tensor]]:
    """As ``epoch_batches``, but each step takes each of n examples by itself, with probability
    ``plan.batch / n``.

    An epoch has as many steps as it would have in batches. A step may take none. secret: ``order``
    has no part.
    """
    if n == 0:
        return
    per_epoch = -(-n // plan.batch)
    rate = min(1.0, plan.batch / n)
    steps = plan.steps or plan.epochs * per_epoch
    generator = None if secret else order
    for begin in range(0, steps, per_epoch):
        samples = [_sample(n, rate, generator) for _ in range(per_epoch)]
        yield [to_device(sample.nonzero().flatten(), device) for sample in samples[: steps - begin]]


def _sample(n: int, rate: float, order: torch.Generator | None) -> Tensor:
    """Which of n examples a step takes, (n,) bool. Without a generator, the operating system draws.

    A seed of torch's has 32 bits, which can be tried out, and an amplification by sampling supposes
    draws that nobody knows.
    """
    if order is not None:
        return torch.rand(n, generator=order, dtype=torch.float64) < rate
    words = np.frombuffer(os.urandom(8 * n), dtype=np.uint64)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53 < rate)


CACHED = 1 << 20
"""Numbers of float64 that are worked on at once. Of a large network the gradients of a batch have
many times as many, and going to memory for them takes longer than computing.
"""


def noised_mean(
    gradients: Tensors, like: Tensors, how: Private, size: float, draws: torch.Generator
) -> Tensors:
    """The sum of clipped gradients, with noise, over ``size``, the number of examples that a step
    takes on average.

    gradients: (B, ...) by entry, or empty where a step has taken no example; like: the entries. One
    that is not finite counts as zeros. Source: Abadi et al., "Deep Learning with Differential
    Privacy" (2016), Algorithm 1.
    """
    factors = torch.zeros(0)
    if gradients:
        factors = _factors(gradients, how.clip)
    out = {}
    for name, entry in like.items():
        shape = tuple(entry.shape)
        total = torch.zeros(shape)
        if gradients:
            total = _weighted(gradients[name].detach(), factors)
        noise = _normal(shape, how.secret, draws)
        out[name] = ((total + how.noise * how.clip * noise) / size).to(entry)
    return out


def _normal(shape: tuple[int, ...], secret: bool, draws: torch.Generator) -> Tensor:
    """Standard normal numbers, float64; drawn by the operating system if nobody may draw them
    again.
    """
    if secret:
        return secret_normal(shape)
    return torch.randn(shape, generator=draws, dtype=torch.float64)


def _factors(gradients: Tensors, clip: float) -> Tensor:
    """What each example's gradient is multiplied by, (B,) float64: no norm is above ``clip`` after
    it.
    """
    norms = torch.stack([_squares(g.detach()) for g in gradients.values()]).sum(0).sqrt()
    return torch.where(norms.isfinite(), clip / norms.clamp(min=clip), 0.0)


def _squares(gradients: Tensor) -> Tensor:
    """The squared norms (B,) of gradients (B, ...), in float64."""
    return torch.stack([part.double().square().sum(1) for part in _in_cache(gradients)]).sum(0)


def _weighted(gradients: Tensor, factors: Tensor) -> Tensor:
    """The sum of gradients (B, ...) times factors (B,), in float64; where a factor is 0, whatever
    the gradient is.
    """
    all_finite = bool(factors.all())
    factors = factors.to(gradients.device)
    sums = []
    for part in _in_cache(gradients):
        values = part.double()
        if not all_finite:
            values = torch.nan_to_num(values, 0.0, 0.0, 0.0)
        sums.append(factors @ values)
    return torch.cat(sums).view(gradients.shape[1:]).cpu()


def _in_cache(gradients: Tensor) -> Sequence[Tensor]:
    """Gradients (B, ...) as (B, N), N at a time: in float64 about as many as the processor's cache
    holds.
    """
    return torch.split(gradients.reshape(len(gradients), -1), max(1, CACHED // len(gradients)), 1)


def rate_and_steps(n: int, plan: Plan) -> tuple[float, int]:
    """With which probability a step takes an example of n, and how many steps a stage has.

    >>> rate_and_steps(1000, Plan(epochs=2, batch=50))
    (0.05, 40)
    """
    if n == 0:
        return 0.0, 0
    return min(1.0, plan.batch / n), plan.steps or plan.epochs * math.ceil(n / plan.batch)


# What private training costs: epsilon of many noised steps, each on examples drawn one by one.


ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(12, 64), 80, 96, 128, 256, 512, 1024)
"""The Rényi orders of which the best is taken; any set gives a bound that holds."""


def training_epsilon(noise: float, steps: Mapping[float, int], delta: float) -> float | None:
    """The epsilon of steps of DP-SGD, for data sets that differ in one example more or less; None
    without noise.

    noise: standard deviation over the clipping norm. steps: how many steps took examples with which
    probability.

    Source: Mironov et al., "Rényi Differential Privacy of the Sampled Gaussian Mechanism" (2019),
    by Opacus.
    """
    taken = {rate: count for rate, count in steps.items() if rate > 0 and count > 0}
    if not taken:
        return 0.0
    if noise == 0:
        return None
    rdp = require_opacus()
    total = sum(count * _of_a_step(rate, noise) for rate, count in taken.items())
    # the best order may be the first or the last: the bound holds all the same
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        epsilon, _ = rdp.get_privacy_spent(orders=list(ORDERS), rdp=total, delta=delta)
    # For little noise-free training and large deltas, the conversion gives a negative bound.
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=4096)
def _of_a_step(rate: float, noise: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    orders = list(ORDERS)
    computed = require_opacus().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
    return np.asarray(computed, dtype=np.float64)


def require_opacus() -> ModuleType:
    """Opacus's accountant; ConfigError if it is not here."""
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise ConfigError(
            "privacy.gradient_clip needs Opacus, which counts epsilon: pip install "
            f"'fedstill[private]' ({error})"
        ) from error
    module: ModuleType = rdp
    return module
