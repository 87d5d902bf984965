"""Private training (DP-SGD): clipped gradients with noise, sampled batches, and epsilon."""

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

# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Private(GradientRule):
    """The gradient rule of DP-SGD: sampled examples, clipped gradients, and noise on their sum.

    clip: the largest norm of an example's gradient. noise: the standard deviation of the noise on
    the sum, in units of ``clip``. secret: take random numbers from the operating system, as real
    sites do.
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
    """Trains clients on their own data with DP-SGD. ``rule``: the gradient rule of each step."""

    stackable: ClassVar[bool] = False

    rule: Private

    def gradient_rule(self, view: View, stage: Stage) -> GradientRule | None:
        """The rule; None for the server and for public data."""
        if view.client == SERVER or stage.view == "public":
            return None
        return self.rule


def poisson_batches(
    n: int, plan: Plan, order: torch.Generator, device: torch.device, secret: bool = False
) -> Iterator[list[Tensor]]:
    """As ``epoch_batches``, but each step takes each of n examples independently, with probability
    ``plan.batch / n``.

    An epoch has as many steps as with ordinary batches. A step may have no examples. secret: take
    random numbers from the operating system instead of ``order``.
    """
    if n == 0:
        return
    per_epoch = -(-n // plan.batch)
    rate = min(1.0, plan.batch / n)
    steps = plan.steps or plan.epochs * per_epoch
    generator: torch.Generator | None = order
    if secret:
        generator = None
    for begin in range(0, steps, per_epoch):
        samples = [_sample(n, rate, generator) for _ in range(per_epoch)]
        yield [to_device(sample.nonzero().flatten(), device) for sample in samples[: steps - begin]]


def _sample(n: int, rate: float, order: torch.Generator | None) -> Tensor:
    """Which of n examples a step takes, (n,) bool. Without a generator, random numbers come from
    the operating system.

    Amplification by sampling assumes that nobody knows the sample, and all of torch's 32-bit seeds
    can be tried.
    """
    if order is not None:
        return torch.rand(n, generator=order, dtype=torch.float64) < rate
    words = np.frombuffer(os.urandom(8 * n), dtype=np.uint64)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53 < rate)


CACHED = 1 << 20
"""How many float64 numbers are processed at once, so that they stay in the processor's cache. The
gradients of a batch have many more, and reading them from memory would take longer than computing.
"""


def noised_mean(
    gradients: Tensors, like: Tensors, rule: Private, size: float, draws: torch.Generator
) -> Tensors:
    """The sum of clipped gradients with noise, divided by ``size``, the expected number of examples
    in a step.

    gradients: (B, ...) by entry; empty if the step has no examples. like: the entries of the model.
    A gradient that is not finite counts as zeros. Source: Abadi et al., "Deep Learning with
    Differential Privacy" (2016), Algorithm 1.
    """
    factors = torch.zeros(0)
    if gradients:
        factors = _factors(gradients, rule.clip)
    out = {}
    for name, entry in like.items():
        shape = tuple(entry.shape)
        total = torch.zeros(shape)
        if gradients:
            total = _weighted(gradients[name].detach(), factors)
        noise = _normal(shape, rule.secret, draws)
        out[name] = ((total + rule.noise * rule.clip * noise) / size).to(entry)
    return out


def _normal(shape: tuple[int, ...], secret: bool, draws: torch.Generator) -> Tensor:
    """Standard normal numbers, float64; if ``secret``, from the operating system."""
    if secret:
        return secret_normal(shape)
    return torch.randn(shape, generator=draws, dtype=torch.float64)


def _factors(gradients: Tensors, clip: float) -> Tensor:
    """The factor for each example's gradient, (B,) float64, that scales its norm down to
    ``clip``; 0 for a gradient that is not finite.
    """
    norms = torch.stack([_squares(g.detach()) for g in gradients.values()]).sum(0).sqrt()
    return torch.where(norms.isfinite(), clip / norms.clamp(min=clip), 0.0)


def _squares(gradients: Tensor) -> Tensor:
    """The squared norms (B,) of gradients (B, ...), in float64."""
    return torch.stack([part.double().square().sum(1) for part in _in_cache(gradients)]).sum(0)


def _weighted(gradients: Tensor, factors: Tensor) -> Tensor:
    """The sum of gradients (B, ...) times factors (B,), in float64. A gradient with factor 0 may
    contain any numbers.
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
    """Gradients (B, ...) in parts (B, N) that fit in the processor's cache as float64."""
    return torch.split(gradients.reshape(len(gradients), -1), max(1, CACHED // len(gradients)), 1)


def rate_and_steps(n: int, plan: Plan) -> tuple[float, int]:
    """The probability with which a step takes one of n examples, and the steps of a stage.

    >>> rate_and_steps(1000, Plan(epochs=2, batch=50))
    (0.05, 40)
    """
    if n == 0:
        return 0.0, 0
    return min(1.0, plan.batch / n), plan.steps or plan.epochs * math.ceil(n / plan.batch)


# ---- epsilon -------------------------------------------------------------------------------------


ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(12, 64), 80, 96, 128, 256, 512, 1024)
"""The Rényi orders, of which the best one counts. The bound is valid for any set of orders."""


def training_epsilon(noise: float, steps: Mapping[float, int], delta: float) -> float | None:
    """The epsilon of steps of DP-SGD; None without noise. Neighbouring data sets differ in one
    added or removed example.

    noise: the standard deviation divided by the clipping norm. steps: the number of steps by
    sampling probability.

    Source: Mironov et al., "Rényi Differential Privacy of the Sampled Gaussian Mechanism" (2019),
    computed by Opacus.
    """
    nonzero = {rate: count for rate, count in steps.items() if rate > 0 and count > 0}
    if not nonzero:
        return 0.0
    if noise == 0:
        return None
    rdp = require_opacus()
    total = sum(count * _rdp_of_step(rate, noise) for rate, count in nonzero.items())
    # Opacus warns if the best order is the first or the last one. The bound holds nevertheless.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        epsilon, _ = rdp.get_privacy_spent(orders=list(ORDERS), rdp=total, delta=delta)
    # With few steps and a large delta, the conversion gives a negative bound.
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=4096)
def _rdp_of_step(rate: float, noise: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The Rényi divergence of one step for each of ``ORDERS``."""
    orders = list(ORDERS)
    computed = require_opacus().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
    return np.asarray(computed, dtype=np.float64)


def require_opacus() -> ModuleType:
    """Opacus's accountant of Rényi divergences. Raises ConfigError if Opacus is not installed."""
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise ConfigError(
            "privacy.gradient_clip needs Opacus, which counts epsilon: pip install "
            f"'fedstill[private]' ({error})"
        ) from error
    module: ModuleType = rdp
    return module
