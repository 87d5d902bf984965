"""Mean and spread of columns or channels, from examples or from sums that clients send."""

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
from fedstill.data.form import About

# Mean and spread of columns or channels: of some examples, or from sums that clients send.


LEAST = 1e-6
"""A spread below this share of the mean's size is none, as sums of squares tell no less: the column
is constant.
"""

NO_SPREAD = 1e300
"""The spread that a constant column is given: whatever a number of 32 bits is divided by it, is 0
in 32 bits.
"""


@dataclass(frozen=True)
class Moments:
    """A mean and a spread (population) for each column (D,) or channel; ``constant``: columns given
    ``NO_SPREAD``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    constant: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sums:
    """What one client says of its examples, by column: how many values it knows, their sum, and
    that of their squares.

    Each (D,) float64.
    """

    count: Tensor
    total: Tensor
    squares: Tensor


def sums_of(values: Tensor) -> Sums:
    """The sums of values (n, D) or (n, C, L), in which NaN stands for one that is missing."""
    by_column = values.double().transpose(0, 1).flatten(1)
    known = ~by_column.isnan()
    there = by_column.nan_to_num(0.0)
    return Sums(known.sum(1).double(), there.sum(1), (there * there).sum(1))


def moments(values: Tensor, fixed: Collection[int] = ()) -> Moments:
    """The mean and spread of values (n, D) or (n, C, L); columns in ``fixed`` keep mean 0 and
    spread 1.
    """
    return _from(sums_of(values), fixed)


def moments_of(each: Sequence[Sums], fixed: Collection[int]) -> Moments:
    """The same from the sums that clients send, in the order of the clients."""
    count, total, squares = (
        torch.stack([getattr(own, name) for own in each]).sum(0)
        for name in ("count", "total", "squares")
    )
    return _from(Sums(count, total, squares), fixed)


def _from(sums: Sums, fixed: Collection[int]) -> Moments:
    count = sums.count.clamp(min=1)
    mean = sums.total / count
    std = (sums.squares / count - mean * mean).clamp(min=0).sqrt()
    small = std <= LEAST * mean.abs()
    means, stds = mean.tolist(), std.masked_fill(small, NO_SPREAD).tolist()
    for column in fixed:
        means[column], stds[column] = 0.0, 1.0
    if not all(map(math.isfinite, (*means, *stds))):
        raise ConfigError(
            "a column's mean or spread is not finite; its numbers are too large, scale them"
        )
    constant = [i for i in small.nonzero().flatten().tolist() if i not in set(fixed)]
    return Moments(tuple(means), tuple(stds), tuple(constant))


# The sums: the stage before round 1 in which sites send, by column, how many values they know,
# their sum and squares.
#
# Of these the server makes the mean and spread by which all standardise (``data.standardise =
# "summed"``).


MOMENTS = "moments"
"""The name of the stage."""

SUMS = ("count", "total", "squares")
"""The groups of a reply, each (D,) float64."""

ROUNDING = 1e-9
"""By what share of it a sum of squares may be too small, as float64 rounds."""

TINY = 1e-150
"""Numbers below it have squares that float64 does not hold."""

Answers = Sequence[tuple[Payload, int]]
"""What each client sent, and how many examples it has."""


@dataclass(frozen=True)
class SumUp(ClientWork):
    """Send the sums of the training examples by column or channel, once, before round 1.

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
        """How many rows of the reply have noise."""
        return 0

    @property
    def expected(self) -> Payload:
        """What a reply looks like."""
        return Payload(**{name: torch.zeros(self.shape[0], dtype=torch.float64) for name in SUMS})

    def sent(self, values: Tensor) -> Payload:
        """What a client with these values sends, before any noise."""
        own = sums_of(values)
        return Payload(**{name: getattr(own, name) for name in SUMS})

    def moments(self, answers: Answers) -> Moments:
        """The mean and spread that the clients' answers come to, in their order."""
        return moments_of(
            [Sums(*(up.tensor(name) for name in SUMS)) for up, _ in answers], self.fixed
        )

    def simulated(self, values: Tensor, seed: int) -> Payload:
        """What a simulated client with these values sends; ``seed``: of noise, if there is any."""
        return self.sent(values)

    def refuses(self, reply: Reply) -> str:
        """Why no numbers have these sums; empty if some may, or if the reply's form is for the
        screen to judge.
        """
        sums = [
            one
            for name in SUMS
            if isinstance(one := reply.content.get(name), Tensor) and one.dtype == torch.float64
        ]
        if len(sums) < len(SUMS) or len({one.shape for one in sums}) > 1:
            return ""
        count, total, squares = sums
        most = reply.examples * (self.shape[1] if len(self.shape) > 1 else 1)
        if bool(((count < 0) | (count > most) | (count != count.round())).any()):
            return f"its sums count {float(count.max()):g} values, and it claims {most}"
        # by Cauchy and Schwarz, in roots, which stay finite; squares of tiny numbers are 0
        roots = (count * (1 + ROUNDING)).sqrt() * squares.sqrt() + count * TINY
        if bool((~(total.abs() <= roots) | ((count == 0) & (squares > 0))).any()):
            return "no numbers have the sums and the sums of squares that it sends"
        return ""


def sums_of_run(settings: Settings, about: About, shape: tuple[int, ...]) -> SumUp:
    """What clients send of their sums, for examples of a shape.

    Raises ConfigError for limits of columns that are not standardised, or not in order.
    """
    names = about.features or tuple(f"channel {i}" for i in range(shape[0]))
    standardised = [name for i, name in enumerate(names[: shape[0]]) if i not in about.marks]
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
        sums: SumUp | None = part.load()(settings, about, shape)
        if sums is not None:
            return sums
    return SumUp(shape, about.marks)


def sums_stage(world: World) -> Stage:
    """The stage before round 1 in which every client sends its sums."""
    return Stage(0, 1, MOMENTS, tuple(range(world.clients)))


@dataclass(frozen=True)
class SumsStage(StageProvider, RoundHook):
    """The stage's provider, actor and check of replies, for sums of a kind."""

    sums: SumUp

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
        made = self.sums.moments([(reply.content, reply.examples) for reply in replies])
        return state.next(
            mean=torch.tensor(made.mean, dtype=torch.float64),
            std=torch.tensor(made.std, dtype=torch.float64),
            constant=torch.tensor(made.constant, dtype=torch.int64),
        )


def run_sums(sums: SumUp, context: RunContext) -> tuple[Moments, StageResult]:
    """Ask every client for its sums, and make mean and spread of them.

    Clients that are refused do not count. Raises TooFewReplies where fewer are left than the
    quorum, after the context's recorder has the refusals.
    """
    collect = SumsStage(sums)
    own_schedule = replace(context.schedule, providers=(collect,))
    context = replace(context, schedule=own_schedule, hooks=(collect,))
    stage = sums_stage(context.world)
    state = State(params={}, round=0)
    result = run_stage(state, build_requests(state, stage, context), context)
    if not result.accepted:
        check_quorum(stage, (), result.refused, context.rules)
    made = Moments(
        mean=tuple(result.after.extra.tensor("mean").tolist()),
        std=tuple(result.after.extra.tensor("std").tolist()),
        constant=tuple(result.after.extra.tensor("constant").tolist()),
    )
    return made, result
