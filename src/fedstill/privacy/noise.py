"""The config table ``[privacy]``, and the protection of uploaded logits: clipping, noise, epsilon.

The guarantee covers a client's whole data: any two data sets of a client are neighbours, so it also
covers each single example. An upload depends on the data through the matrix of logits on public
examples, (P, C). Each of its rows has a norm of at most ``clip``, so any two such matrices differ
by at most ``2 clip sqrt(P)``. With noise of standard deviation ``noise * clip`` on each number, an
upload is a Gaussian mechanism with multiplier ``noise / (2 sqrt(P))``. Uploads of P1, P2, ... rows
together are one with multiplier ``noise / (2 sqrt(P1 + P2 + ...))``, even if later requests depend
on earlier uploads. Smaller neighbourhoods would not lower epsilon, because training does not bound
the effect of one example.

At a real site, the noise comes from the operating system's generator and cannot be reproduced. A
site adds noise to one answer per stage. If the same request comes again, it sends the stored
answer; it refuses any other request for the stage (``privacy/site_guards.py``). In a simulation,
noise is drawn by key from the run's seed, so that a resumed run has the same bits. Anyone who knows
the seed can subtract the noise, so the epsilon of a simulation states the cost of the same run at
real sites.

The sums for mean and standard deviation before round 1 are also rows of norm at most ``clip``, one
per column. They are protected and counted like rows of logits (``privacy/extensions.py``).

Not protected are label counts (the census), numbers of examples, reported losses and accuracies,
whole models (the stage ``fit`` of a method without one), whether a client answers, and what a
simulation measures. Floating-point rounding is not accounted for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import torch
from annotated_types import Interval
from pydantic import Field, model_validator
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.tables import PackageTable
from fedstill.config.validation import wrong_value
from fedstill.core.capabilities import Permit
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.extensions import ClientHook
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Payload, Stage, Tensors, View, World

GROUP = "logits"
"""The group of an upload with logits."""

SUMS_GROUP = "noised_sums"
"""The group of an upload with the sums for mean and standard deviation, (K, 2): one row per column.
"""

PROTECTED = (GROUP, SUMS_GROUP)
"""The groups of an upload that are clipped and noised."""


class Privacy(PackageTable):
    """``[privacy]``: noise on logits (``clip``), private training (``gradient_clip``), secure sums
    (``secure_sum``).
    """

    clip: NonNegative = Field(
        default=0.0,
        description="The norm to which the logits of each example are clipped. 0: logits are sent "
        "unchanged.",
    )
    noise: NonNegative = Field(
        default=0.0,
        description="The standard deviation of the noise on every number, in units of clip.",
    )
    delta: Annotated[float, Interval(gt=0, lt=1)] = Field(
        default=1e-5,
        description="The delta for which each client's epsilon is computed.",
    )
    epsilon: Positive | None = Field(
        default=None,
        description="The largest epsilon that any client may spend. The run stops before an "
        "upload that would exceed it. Unset: no limit.",
    )
    gradient_clip: Positive | None = Field(
        default=None,
        description="Private training (DP-SGD): the norm to which the gradient of each example is "
        "clipped. Unset: ordinary training.",
    )
    gradient_noise: NonNegative | None = Field(
        default=None,
        description="The standard deviation of the noise on each step's sum of gradients, in "
        "units of gradient_clip. Unset: 1.",
    )
    secure_sum: bool | None = Field(
        default=None,
        description="Whether the server learns only the sum of the clients' models. Unset: it "
        "sees every model.",
    )
    secure_range: Positive | None = Field(
        default=None,
        description="The largest change of a parameter in a stage that a secure sum can "
        "represent. Unset: 16.",
    )
    secure_bits: Annotated[int, Interval(ge=8, le=48)] | None = Field(
        default=None,
        description="The number of bits to which changes are rounded in a secure sum. Unset: 32.",
    )
    secure_threshold: Annotated[float, Interval(ge=0.5, lt=1)] | None = Field(
        default=None,
        description="More than this share of a stage's clients must complete a secure sum. Unset: "
        "0.5.",
    )

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.noise > 0 and not self.clip > 0:
            raise wrong_value(
                "privacy.noise",
                f"= {self.noise} needs privacy.clip, which is its unit",
            )
        if self.gradient_noise is not None and not self.trains:
            raise wrong_value(
                "privacy.gradient_noise", "needs privacy.gradient_clip, which is its unit"
            )
        for key in ("secure_range", "secure_bits", "secure_threshold"):
            if getattr(self, key) is not None and not self.secure_sum:
                raise wrong_value(f"privacy.{key}", "needs privacy.secure_sum = true")
        if self.trains and self.protects_logits:
            raise wrong_value(
                "privacy.clip",
                "is for methods that send logits, and gradient_clip for methods that send models: "
                "set one of them",
            )
        self._check_endless_budget()
        return self

    def _check_endless_budget(self) -> None:
        key = "noise"
        noise = self.noise
        if self.trains:
            key = "gradient_noise"
            noise = self.sigma
        if self.epsilon is not None and noise == 0:
            raise wrong_value(
                "privacy.epsilon",
                f"= {self.epsilon} needs privacy.{key}: without noise, epsilon is unbounded",
            )

    @property
    def top_defaults(self) -> Mapping[str, Any]:
        """With secure sums, no measures by default: the usual ones need single models."""
        if self.secure_sum:
            return {"measure": ()}
        return {}

    @property
    def hides_client_models(self) -> bool:
        """Whether the server only learns sums of models."""
        return bool(self.secure_sum)

    @property
    def protects_logits(self) -> bool:
        """Whether logits are clipped before they leave a client."""
        return self.clip > 0

    @property
    def trains(self) -> bool:
        """Whether training is private."""
        return self.gradient_clip is not None

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise in private training, in units of
        ``gradient_clip``.
        """
        if self.gradient_noise is None:
            return 1.0
        return self.gradient_noise

    def protect(self, content: Payload, seed: int | None) -> Payload:
        """An upload with clipped and noised rows; an upload without protected groups is unchanged.

        seed: the seed of the noise; None: use the operating system's generator.
        """
        group = next((name for name in PROTECTED if name in content), "")
        if not self.protects_logits or not group:
            return content
        rows = content.tensor(group)
        clipped = clip_rows(rows, self.clip)
        if seed is None:
            drawn = secret_normal(tuple(rows.shape))
        else:
            drawn = torch.randn(rows.shape, generator=generator(seed), dtype=torch.float64)
        noised = clipped.double() + self.noise * self.clip * drawn
        return Payload(content, **{group: noised.to(rows.dtype)})

    def spent(self, rows: int, uploads: int = 1) -> float | None:
        """The epsilon of a client after ``uploads`` uploads of (rows, C) logits; None if it is
        unbounded.

        For uploads of different sizes, pass the total number of rows.
        """
        if uploads == 0 or rows == 0:
            return 0.0
        if self.noise == 0:
            return None
        return gaussian_epsilon(self.noise / (2 * math.sqrt(rows * uploads)), self.delta)

    def allows(self, rows: int) -> bool:
        """Whether ``privacy.epsilon`` covers this total number of rows."""
        cost = self.spent(rows)
        return self.epsilon is None or (cost is not None and cost <= self.epsilon)


@dataclass(frozen=True)
class NoisedLogits(ClientHook):
    """Clips and noises logits before they leave a client.

    ``secret``: take the noise from the operating system, as real sites do.
    """

    privacy: Privacy
    secret: bool

    def extend_reply(
        self, content: Payload, params: Tensors, view: View, stage: Stage, world: World
    ) -> Payload:
        if self.secret:
            return self.privacy.protect(content, None)
        seed = seed_for(world.seed, stage.round, stage.index, view.client, "privacy")
        return self.privacy.protect(content, seed)


def rows_of(content: Payload) -> int:
    """The number of protected rows (logits and sums) in a payload, which may be malformed."""
    groups = [content.get(name) for name in PROTECTED]
    tensors = [group for group in groups if isinstance(group, Tensor)]
    return sum(tensor.shape[0] for tensor in tensors if tensor.ndim and tensor.numel())


def secret_normal(shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers (float64) from the operating system's generator.

    Each is the inverse of the normal distribution function at a uniform number below 1/2 with 63
    random bits; one more bit decides the sign. So the tails reach beyond nine standard deviations.
    """
    from scipy.special import ndtri  # every run imports this module, and few need scipy here

    words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
    below = ndtri(((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64)
    return torch.from_numpy(np.where(words & np.uint64(1), below, -below).reshape(shape))


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The smallest epsilon of the Gaussian mechanism for a delta in (0, 1), exact up to rounding.

    multiplier: the standard deviation divided by the sensitivity, > 0. Several adaptive uploads
    with multipliers m_i are one with multiplier ``1 / sqrt(sum 1 / m_i^2)``. Solves
    ``Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r) = delta`` for e, with r = 1 / multiplier.

    Source: Balle & Wang, "Improving the Gaussian Mechanism for Differential Privacy" (2018),
    theorem 8.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    from scipy.optimize import bisect
    from scipy.special import log_ndtr

    r = 1 / multiplier

    def excess(epsilon: float) -> float:
        first = float(log_ndtr(r / 2 - epsilon / r))
        second = epsilon + float(log_ndtr(-r / 2 - epsilon / r))
        share = -math.expm1(min(second - first, 0.0))
        if share <= 0:
            return -math.inf
        return first + math.log(share) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    # An upper bound from the Rényi divergence.
    bound = r * r / 2 + r * math.sqrt(2 * math.log(1 / delta))
    # With almost no noise, the two terms of the equation differ by less than rounding.
    if math.isinf(bound) or not excess(bound) < 0:
        return bound
    return float(bisect(excess, 0.0, bound, xtol=1e-12 * bound))


def clip_rows(logits: Tensor, most: float) -> Tensor:
    """Rows of (P, C) logits, scaled down to a norm of at most ``most``. A row with a number that is
    not finite becomes zeros.

    >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    finite = logits.isfinite().all(-1, keepdim=True)
    wide = torch.where(finite, logits, torch.zeros_like(logits)).double()
    norm = wide.norm(dim=-1, keepdim=True)
    shrunk: Tensor = wide * (most / norm.clamp(min=most))
    return shrunk.to(logits.dtype)


def check_config(settings: Settings) -> None:
    """Raise ConfigError for secure sums with tasks of sites, and IncompatibleMethod if the method
    sends no logits to protect.
    """
    privacy = settings.package_table(Privacy)
    if privacy.secure_sum and settings.sites_have_tasks:
        raise wrong_value(
            "privacy.secure_sum",
            "hides what each site reports, but stream.kind = 'sites' is evaluated by reports of "
            "sites; leave out one of them",
        )
    if privacy.protects_logits and Permit.NOISY_LOGITS not in settings.method.permits:
        raise IncompatibleMethod(
            f"method {settings.named.method.label} sends no logits, which privacy.clip protects; "
            "leave it out, or choose a method that exchanges logits (hiper_fedkd, fedmd, dsfl)"
        )
