"""Privacy: the table, and what protects uploaded logits: each example's are clipped and noised,
epsilon is computed.

What is protected: a client's whole data. Two data sets of one client are neighbours if they differ
in any way, so the guarantee holds for a client, and all the more for one example. What its training
changes in an upload is the matrix of logits on public images, (P, C), whose rows have norm at most
``clip``; whatever the data, two such matrices are at most ``2 clip sqrt(P)`` apart. With noise of
standard deviation ``noise * clip`` on every number, one upload is a Gaussian mechanism of
multiplier ``noise / (2 sqrt(P))``; uploads of P1, P2, ... rows are together one of
``noise / (2 sqrt(P1 + P2 + ...))``, also where one is asked for with the others in view. Nothing is
gained by a smaller
neighbourhood: training does not bound what one example can change.

At a real site noise comes from the operating system's generator, and nobody can draw it again. A
site adds noise to one answer a stage: the same request gets the kept answer, and another request
none (``privacy/site_guards.py``). In a simulation noise is drawn by key from the run's seed, so
that a resumed run has the same bits. Who knows the seed can subtract it: there, an epsilon says
what the same run on real sites would cost.

Sums of which mean and spread are made before round 1 are rows of norm at most ``clip`` too, one a
column, and are protected and counted as rows of logits are
(``privacy/extensions.py``).

What is not protected: label counts (a census), numbers of examples, losses and accuracies that are
reported, whole models (the stage ``fit`` of a method that has none), whether a client answers at
all, and what a simulation measures; all that goes up as it is. Rounding in floating point is not
accounted for.
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
from fedstill.config.validation import PackageTable, contradiction
from fedstill.core.capabilities import Permit
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.extensions import ClientHook
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Payload, Stage, Tensors, View, World

GROUP = "logits"
"""The group of an upload that is protected."""

SUMS_GROUP = "noised_sums"
"""The group of rows, one a column, of which mean and spread are made, (K, 2); it is protected in
the same way.
"""

PROTECTED = (GROUP, SUMS_GROUP)


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
            raise contradiction(
                "privacy.noise",
                f"= {self.noise} needs privacy.clip: noise counts in units of the clipping",
            )
        if self.gradient_noise is not None and not self.trains:
            raise contradiction(
                "privacy.gradient_noise", "needs privacy.gradient_clip: noise counts in units of it"
            )
        for key in ("secure_range", "secure_bits", "secure_threshold"):
            if getattr(self, key) is not None and not self.secure_sum:
                raise contradiction(
                    f"privacy.{key}", "needs privacy.secure_sum = true: it is of secure sums"
                )
        if self.trains and self.protects_logits:
            raise contradiction(
                "privacy.clip",
                "is for methods that send logits, gradient_clip for models: set one of them",
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
            raise contradiction(
                "privacy.epsilon",
                f"= {self.epsilon} needs privacy.{key}: without it nothing bounds it",
            )

    @property
    def top_defaults(self) -> Mapping[str, Any]:
        """With secure sums the usual measures, which look at single models, are left out."""
        if self.secure_sum:
            return {"measure": ()}
        return {}

    @property
    def hides_client_models(self) -> bool:
        """Whether the server learns sums only."""
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
        """The noise of private training, in units of its clipping."""
        if self.gradient_noise is None:
            return 1.0
        return self.gradient_noise

    def protect(self, content: Payload, seed: int | None) -> Payload:
        """An upload with its logits clipped and noised; one without logits as it is.

        seed: what noise is drawn from; None: the operating system's generator.
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
        """The epsilon of a client after so many uploads of (rows, C) logits; None where nothing
        bounds it.

        Uploads that differ in their rows are one of all rows.
        """
        if uploads == 0 or rows == 0:
            return 0.0
        if self.noise == 0:
            return None
        return gaussian_epsilon(self.noise / (2 * math.sqrt(rows * uploads)), self.delta)

    def allows(self, rows: int) -> bool:
        """Whether a client may have sent so many rows in all."""
        cost = self.spent(rows)
        return self.epsilon is None or (cost is not None and cost <= self.epsilon)


@dataclass(frozen=True)
class NoisedLogits(ClientHook):
    """Clips and noises logits before they leave a client. ``secret``: with noise that no seed
    repeats, as at real sites.
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
    """How many protected rows (of logits, of sums) a payload holds, whoever sent it and whatever
    else is in it.
    """
    rows = [
        one
        for name in PROTECTED
        if isinstance(one := content.get(name), Tensor) and one.ndim and one.numel()
    ]
    return sum(one.shape[0] for one in rows)


def secret_normal(shape: tuple[int, ...]) -> Tensor:
    """Normal draws (float64) from the operating system's generator, which no seed repeats.

    A draw is the inverse of the normal distribution function at a uniform number below a half, of
    63 bits, with the sign of one bit more; so the tails reach beyond nine standard deviations.
    """
    from scipy.special import ndtri  # here, as every run imports this module

    words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64)
    below = ndtri(((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64)
    return torch.from_numpy(np.where(words & np.uint64(1), below, -below).reshape(shape))


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The least epsilon of the Gaussian mechanism at a delta in (0, 1), exact up to rounding.

    multiplier: standard deviation over sensitivity, > 0. Several adaptive uploads of multipliers
    m_i are one of ``1 / sqrt(sum 1 / m_i^2)``. Solves
    ``Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r) = delta`` for e, r = 1 / multiplier.

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
    enough = r * r / 2 + r * math.sqrt(2 * math.log(1 / delta))  # what its Renyi divergence gives
    # almost no noise: the two terms differ by less than rounding
    if math.isinf(enough) or not excess(enough) < 0:
        return enough
    return float(bisect(excess, 0.0, enough, xtol=1e-12 * enough))


def clip_rows(logits: Tensor, most: float) -> Tensor:
    """Rows of (P, C) logits scaled down to a norm of at most ``most``; a row that is not finite
    becomes zeros.

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
    """Raises ConfigError for secure sums over tasks of sites, and IncompatibleMethod where logits
    are to be protected and none are sent.
    """
    privacy = settings.table(Privacy)
    if privacy.secure_sum and settings.sites_have_tasks:
        raise contradiction(
            "privacy.secure_sum",
            "lets a site report nothing of its own, and stream.kind = 'sites' is measured by what "
            "sites report; leave one of them out",
        )
    if privacy.protects_logits and Permit.NOISY_LOGITS not in settings.method.permits:
        raise IncompatibleMethod(
            f"[privacy] protects logits that clients send, and method "
            f"{settings.named.method.label} sends none; "
            "omit it, or choose a method that exchanges logits (hiper_fedkd, fedmd, dsfl)"
        )
