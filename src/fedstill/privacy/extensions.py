"""What privacy adds to a run: secure sums, private training, noise on logits and on sums, and
budgets.

The code of each is imported only by runs that use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import ClientHook, Middleware
from fedstill.core.records import Payload, Reply, World
from fedstill.data.dataset import DatasetInfo
from fedstill.privacy.noise import SUMS_GROUP, NoisedLogits, Privacy
from fedstill.running.extensions import Extensions
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import ROUNDING, Moments, SumsWork


def secure_sums(prepared: Prepared, folder: Path | None) -> Extensions:
    """Secure sums, if the config asks for them. ``folder``: the run's directory."""
    settings = prepared.settings
    if not settings.table(Privacy).secure_sum:
        return Extensions()
    from fedstill.privacy.secure_engine import MaskedBytes, with_masking

    return Extensions(
        middleware=(lambda engine: with_masking(engine, settings, folder),),
        observers=(MaskedBytes(),),
    )


def budgets(prepared: Prepared, folder: Path | None) -> Extensions:
    """The count of what clients spend of their budget; with ``privacy.epsilon``, also the engine
    that enforces it.
    """
    privacy = prepared.settings.table(Privacy)
    if not (privacy.trains or privacy.protects_logits):
        return Extensions()
    from fedstill.privacy.budget import Budget, TrainingBudget, WithinBudget

    budget: Budget | TrainingBudget = Budget.of(prepared)
    if privacy.trains:
        budget = TrainingBudget.of(prepared)
    middleware: list[Middleware] = []
    if privacy.epsilon is not None:
        middleware.append(lambda engine: WithinBudget(engine, budget))
    return Extensions(middleware=tuple(middleware), observers=(budget,))


def client_extensions(
    settings: Settings, world: World, is_real_site: bool
) -> tuple[ClientHook, ...]:
    """The client hooks of private training and of noise on logits. At real sites, the noise comes
    from the operating system and cannot be reproduced.
    """
    privacy = settings.table(Privacy)
    hooks: list[ClientHook] = []
    if privacy.gradient_clip is not None:
        from fedstill.privacy.private_training import Private, PrivateTraining

        rule = Private(privacy.gradient_clip, privacy.sigma, is_real_site)
        hooks.append(PrivateTraining(rule))
    if privacy.protects_logits:
        hooks.append(NoisedLogits(privacy, is_real_site))
    return tuple(hooks)


# ---- sums with noise -----------------------------------------------------------------------------
#
# Means of clipped values and of their squares, protected in the same way as rows of logits
# (``privacy.noise``).
#
# The values of a column are clipped to its limits (``data.limits``) and scaled to [-1, 1]. For each
# column, a client sends the row (m, 2 q - 1) / sqrt(2), multiplied by ``privacy.clip``, where m is
# the mean of the scaled values and q the mean of their squares. For any data, the norm of the row
# is at most ``privacy.clip``. So K columns cost as much as K rows of logits with the same noise.
# Columns of 0 and 1 are not standardised, and clients send nothing about them. The number of a
# client's examples, which weights its row, has no noise, as in a weighted mean of models.


FAR = 40.0
"""The largest plausible noise, in standard deviations. A normal number exceeds it with a
probability of 10^-349, so the server refuses such a reply.
"""
LEAST_SPREAD = 0.1
"""The smallest standard deviation of a column that is taken from noised sums, as a share of half
the width of its limits.
"""


@dataclass(frozen=True)
class NoisedSums(SumsWork):
    """Clients send means of clipped values and of their squares, with noise.

    ``places``: the columns that are standardised. ``low``, ``high``: their limits. ``clip``: the
    largest norm of a row. ``noise``: the standard deviation of the noise on each number, in units
    of ``clip``.
    """

    places: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    clip: float = 1.0
    noise: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def expected(self) -> Payload:
        return Payload({SUMS_GROUP: torch.zeros(self.rows, 2, dtype=torch.float64)})

    def sent(self, values: Tensor) -> Payload:
        by_column = values.double().transpose(0, 1).flatten(1)[list(self.places)]
        centre, half = self._scale
        scaled = ((by_column - centre[:, None]) / half[:, None]).clamp(-1, 1)
        # A column without values has the moments of a uniform distribution over its limits.
        means = scaled.nanmean(1).nan_to_num(0.0)
        squares = (scaled * scaled).nanmean(1).nan_to_num(1 / 3)
        rows = torch.stack([means, 2 * squares - 1], 1) / math.sqrt(2)
        return Payload({SUMS_GROUP: self.clip * rows})

    def simulated(self, values: Tensor, seed: int) -> Payload:
        return Privacy(clip=self.clip, noise=self.noise).protect(self.sent(values), seed)

    def moments(self, replies: Sequence[Reply]) -> Moments:
        weights = torch.tensor([float(reply.examples) for reply in replies], dtype=torch.float64)
        rows = torch.stack([reply.content.tensor(SUMS_GROUP) for reply in replies])
        rows = rows * math.sqrt(2) / self.clip
        weighted = (rows * weights[:, None, None]).sum(0) / weights.sum().clamp(min=1)
        # A row contains m and 2 q - 1.
        mean, shifted_squares = weighted.unbind(1)
        mean = mean.clamp(-1, 1)
        squares = ((shifted_squares + 1) / 2).clamp(0, 1)
        spread = (squares - mean * mean).clamp(min=LEAST_SPREAD**2).sqrt()

        centre, half = self._scale
        means = torch.zeros(self.shape[0], dtype=torch.float64)
        stds = torch.ones(self.shape[0], dtype=torch.float64)
        places = list(self.places)
        means[places] = centre + half * mean
        stds[places] = half * spread
        return Moments(tuple(means.tolist()), tuple(stds.tolist()))

    def refuses(self, reply: Reply) -> str:
        """Why a reply cannot consist of clipped rows with noise: a number is too large. Empty
        otherwise; the form of the reply is checked elsewhere.
        """
        rows = reply.content.get(SUMS_GROUP)
        if not isinstance(rows, Tensor) or rows.dtype != torch.float64:
            return ""
        bound = self.clip * (1 + FAR * self.noise) * (1 + ROUNDING)
        largest = rows.abs().max()
        if bool((rows.abs() > bound).any()):
            return (
                f"its sums contain {float(largest):.3g}, but with noise they are at most "
                f"{bound:.3g}"
            )
        return ""

    @property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """The centre and half the width of each column's limits, (K,) float64."""
        low = torch.tensor(self.low, dtype=torch.float64)
        high = torch.tensor(self.high, dtype=torch.float64)
        return (low + high) / 2, (high - low) / 2


def noised_sums(
    settings: Settings, about: DatasetInfo, shape: tuple[int, ...]
) -> NoisedSums | None:
    """The noised sums that clients send, if ``[privacy]`` protects uploads; otherwise None.

    Raises ConfigError for a column without limits, whose sums would be unbounded.
    """
    privacy: Privacy = settings.table(Privacy)
    if not privacy.protects_logits:
        return None
    limits = settings.data.limits or {}
    names = about.features or tuple(f"channel {i}" for i in range(shape[0]))
    places = [i for i in range(shape[0]) if i not in about.binary_features]
    lacking = [names[i] for i in places if names[i] not in limits]
    if lacking:
        raise ConfigError(
            "data.standardise = 'summed' with [privacy] needs limits for each column, and "
            f"{lacking[0]!r} has none: "
            f'set data.limits = {{ "{lacking[0]}" = [LOW, HIGH], ... }}, or set data.mean and '
            "data.std"
        )
    return NoisedSums(
        shape,
        about.binary_features,
        places=tuple(places),
        low=tuple(float(limits[names[i]][0]) for i in places),
        high=tuple(float(limits[names[i]][1]) for i in places),
        clip=privacy.clip,
        noise=privacy.noise,
    )
