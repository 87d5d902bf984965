"""What private training costs: epsilon of many noised steps, each on examples drawn one by one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from fedstill.errors import ConfigError

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
    return float(epsilon)


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
