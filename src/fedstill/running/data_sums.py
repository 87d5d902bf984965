"""The mean and spread of columns or channels, from examples or from sums that clients send."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.checks import check_quorum
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import RoundHook, StageActor, StageProvider
from fedstill.core.records import (
    NOTHING,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.results import StageResult
from fedstill.core.rounds import RunContext, build_requests, run_stage
from fedstill.core.work import ClientWork
from fedstill.data.dataset import DatasetInfo

# Mean and spread by column.


LEAST_SPREAD = 1e-6
"""A column whose spread is below this share of its mean counts as constant: sums of squares cannot
tell such a spread from none.
"""

NO_SPREAD = 1e300
"""The spread of a constant column. A 32-bit number divided by it is 0."""


@dataclass(frozen=True)
class Moments:
    """A mean and a spread (of the population) for each column (D,) or channel.

    ``constant``: the columns whose spread is ``NO_SPREAD``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    constant: tuple[int, ...] = ()


@dataclass(frozen=True)
class ColumnSums:
    """By column, how many values are known, their sum, and the sum of their squares: (D,) float64
    each.
    """

    count: Tensor
    total: Tensor
    squares: Tensor

    def to_payload(self) -> Payload:
        """The sums as a client sends them."""
        return Payload(count=self.count, total=self.total, squares=self.squares)

    @staticmethod
    def from_payload(content: Payload) -> ColumnSums:
        """The sums that a client sent."""
        return ColumnSums(*(content.tensor(name) for name in GROUPS))


GROUPS = ("count", "total", "squares")
"""The groups of a client's reply, in the order of the fields of ``ColumnSums``."""


def column_sums(values: Tensor) -> ColumnSums:
    """The sums of values (n, D) or (n, C, L), in which NaN stands for a missing value."""
    by_column = values.double().transpose(0, 1).flatten(1)
    is_known = ~by_column.isnan()
    known = by_column.nan_to_num(0.0)
    return ColumnSums(
        count=is_known.sum(1).double(),
        total=known.sum(1),
        squares=(known * known).sum(1),
    )


def column_moments(values: Tensor, fixed: Collection[int] = ()) -> Moments:
    """The mean and spread of values (n, D) or (n, C, L); columns in ``fixed`` keep mean 0 and
    spread 1.
    """
    return moments_from_sums(column_sums(values), fixed)


def pooled_moments(sums_by_client: Sequence[ColumnSums], fixed: Collection[int]) -> Moments:
    """The mean and spread of all clients' values, from sums that are added in this order."""
    return moments_from_sums(
        ColumnSums(
            count=torch.stack([sums.count for sums in sums_by_client]).sum(0),
            total=torch.stack([sums.total for sums in sums_by_client]).sum(0),
            squares=torch.stack([sums.squares for sums in sums_by_client]).sum(0),
        ),
        fixed,
    )


def moments_from_sums(sums: ColumnSums, fixed: Collection[int]) -> Moments:
    """Mean and spread: mean = total / count, spread^2 = squares / count - mean^2.

    Raises ConfigError if one of them is not finite.
    """
    count = sums.count.clamp(min=1)
    mean = sums.total / count
    std = (sums.squares / count - mean * mean).clamp(min=0).sqrt()
    is_constant = std <= LEAST_SPREAD * mean.abs()
    means = mean.tolist()
    stds = std.masked_fill(is_constant, NO_SPREAD).tolist()
    for column in fixed:
        means[column] = 0.0
        stds[column] = 1.0
    if not all(math.isfinite(number) for number in (*means, *stds)):
        raise ConfigError(
            "a column's mean or spread is not finite; its numbers are too large, scale them"
        )
    constant = is_constant.nonzero().flatten().tolist()
    return Moments(
        mean=tuple(means),
        std=tuple(stds),
        constant=tuple(column for column in constant if column not in set(fixed)),
    )


# The stage before round 1 in which clients send sums of their columns. The server computes the mean
# and spread from them, and everybody standardises by these (``data.standardise = "summed"``).


MOMENTS = "moments"
"""The name of the stage."""

ROUNDING = 1e-9
"""The relative error that float64 sums of squares may have."""

TINY = 1e-150
"""Below this, the square of a number is 0 in float64."""


@dataclass(frozen=True)
class SumsWork(ClientWork):
    """A client's work: to send the sums of its training examples by column or channel.

    ``shape``: of an example. ``fixed``: columns of 0 and 1, which keep mean 0 and spread 1.
    """

    shape: tuple[int, ...]
    fixed: Collection[int] = ()

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params={})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return self.sent(view.data.values.cpu()), NOTHING

    @property
    def rows(self) -> int:
        """The number of rows of a reply that have noise."""
        return 0

    @property
    def expected(self) -> Payload:
        """The form of a reply."""
        zeros = torch.zeros(self.shape[0], dtype=torch.float64)
        return ColumnSums(count=zeros, total=zeros, squares=zeros).to_payload()

    def sent(self, values: Tensor) -> Payload:
        """What a client with these values sends, before any noise."""
        return column_sums(values).to_payload()

    def moments(self, replies: Sequence[Reply]) -> Moments:
        """The mean and spread that follow from the clients' replies, in their order."""
        sums_by_client = [ColumnSums.from_payload(reply.content) for reply in replies]
        return pooled_moments(sums_by_client, self.fixed)

    def simulated(self, values: Tensor, seed: int) -> Payload:
        """What a simulated client with these values sends; ``seed``: of noise, if there is any."""
        return self.sent(values)

    def refuses(self, reply: Reply) -> str:
        """Why no numbers have these sums; empty if some do, or if the reply has another form than
        expected, which the screen refuses.
        """
        groups = [reply.content.get(name) for name in GROUPS]
        tensors = [g for g in groups if isinstance(g, Tensor) and g.dtype == torch.float64]
        has_expected_form = len(tensors) == len(GROUPS) and len({t.shape for t in tensors}) == 1
        if not has_expected_form:
            return ""
        sums = ColumnSums(*tensors)
        values_per_example = 1
        if len(self.shape) > 1:
            values_per_example = self.shape[1]
        return _impossible_count(sums, reply.examples * values_per_example) or _impossible_sums(
            sums
        )


def _impossible_count(sums: ColumnSums, claimed: int) -> str:
    """Why the counts cannot be those of so many values."""
    count = sums.count
    is_impossible = (count < 0) | (count > claimed) | (count != count.round())
    if bool(is_impossible.any()):
        return f"its sums count {float(count.max()):g} values, and it claims {claimed}"
    return ""


def _impossible_sums(sums: ColumnSums) -> str:
    """Why no numbers have these sums.

    The inequality of Cauchy and Schwarz holds for all numbers: |total| <= sqrt(count squares). The
    roots are taken first, because the product may not be finite. Numbers below ``TINY`` add nothing
    to the squares.
    """
    count = sums.count
    bound = (count * (1 + ROUNDING)).sqrt() * sums.squares.sqrt() + count * TINY
    # Also true where one of them is not a number.
    is_above = ~(sums.total.abs() <= bound)
    is_of_nothing = (count == 0) & (sums.squares > 0)
    if bool((is_above | is_of_nothing).any()):
        return "no numbers have the sums and the sums of squares that it sends"
    return ""


def sums_work(settings: Settings, about: DatasetInfo, shape: tuple[int, ...]) -> SumsWork:
    """The clients' work in the stage of a run, for examples of a shape.

    Raises ConfigError for limits of columns that are not standardised, or not in order.
    """
    names = about.features or tuple(f"channel {i}" for i in range(shape[0]))
    standardised = [
        name for i, name in enumerate(names[: shape[0]]) if i not in about.binary_features
    ]
    for name, (low, high) in (settings.data.limits or {}).items():
        if name not in standardised:
            known = ", ".join(standardised)[:200]
            raise ConfigError(
                f"data.limits names {name!r}, which is not among the standardised columns: {known}"
            )
        if not low < high:
            raise ConfigError(
                f"data.limits: {name!r} is from {low:g} to {high:g}; give the lower number first"
            )
    for part in manifest.sums():
        work: SumsWork | None = part.load()(settings, about, shape)
        if work is not None:
            return work
    return SumsWork(shape, about.binary_features)


def sums_stage(world: World) -> Stage:
    """The stage before round 1 in which every client sends its sums."""
    return Stage(0, 1, MOMENTS, tuple(range(world.clients)))


@dataclass(frozen=True)
class SumsProvider(StageProvider, RoundHook):
    """Provides the stage, acts in it, and checks its replies."""

    sums: SumsWork

    def actors(self) -> Mapping[str, StageActor]:
        """Who acts in the stage."""
        return {MOMENTS: self}

    def requires(self) -> Need:
        """Nothing."""
        return Need.NOTHING

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """An empty payload for every client."""
        return Payload()

    def work(self, stage: Stage) -> ClientWork:
        """Send the sums."""
        return self.sums

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """The form of the sums."""
        return self.sums.expected

    def check_reply(self, reply: Reply, stage: Stage, needs: Need, state: State) -> str:
        return self.sums.refuses(reply)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """Mean and spread as tensors (D,) float64, and the constant columns."""
        moments = self.sums.moments(replies)
        return state.next(
            mean=torch.tensor(moments.mean, dtype=torch.float64),
            std=torch.tensor(moments.std, dtype=torch.float64),
            constant=torch.tensor(moments.constant, dtype=torch.int64),
        )


def run_sums(work: SumsWork, context: RunContext) -> tuple[Moments, StageResult]:
    """Ask every client for its sums, and compute the mean and spread from them.

    Clients that are refused do not count. Raises TooFewReplies if fewer are left than the quorum,
    after the context's recorder has the refusals.
    """
    provider = SumsProvider(work)
    schedule = replace(context.schedule, providers=(provider,))
    context = replace(context, schedule=schedule, hooks=(provider,))
    stage = sums_stage(context.world)
    state = State(params={}, round=0)
    result = run_stage(state, build_requests(state, stage, context), context)
    if not result.accepted:
        check_quorum(stage, (), result.refused, context.rules)
    moments = result.after.extra
    return (
        Moments(
            mean=tuple(moments.tensor("mean").tolist()),
            std=tuple(moments.tensor("std").tolist()),
            constant=tuple(moments.tensor("constant").tolist()),
        ),
        result,
    )
