"""Standardisation: the mean and standard deviation that scale the columns of a table or the
channels of a series.

They are computed from training examples only. A missing value is left out of the sums, and becomes
0, the scaled mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.checks import check_quorum
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import StageActor, StageProvider, StageResult
from fedstill.core.keys import seed_for
from fedstill.core.label_counts import Received, StatisticsWork
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    Examples,
    Payload,
    Reply,
    Stage,
    State,
    View,
    World,
)
from fedstill.core.rounds import RunContext, Schedule, build_requests, run_stage
from fedstill.data.client_split import ClientSplit
from fedstill.data.dataset import Dataset, DatasetInfo

# Mean and standard deviation by column.


LEAST_SPREAD = 1e-6
"""A column counts as constant if its standard deviation is below this share of its mean. Sums of
squares in float64 cannot distinguish such a deviation from 0.
"""

NO_SPREAD = 1e300
"""The standard deviation that is stored for a constant column. A float32 divided by it is 0."""


@dataclass(frozen=True)
class Moments:
    """The mean and the standard deviation (of the population) of each column or channel, (D,).

    ``constant``: the columns whose standard deviation is ``NO_SPREAD``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    constant: tuple[int, ...] = ()


@dataclass(frozen=True)
class ColumnSums:
    """By column: the number of known values, their sum, and the sum of their squares, each (D,)
    float64.
    """

    count: Tensor
    total: Tensor
    squares: Tensor

    def to_payload(self) -> Payload:
        """The sums as the payload of a client."""
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
    filled = by_column.nan_to_num(0.0)
    return ColumnSums(
        count=is_known.sum(1).double(),
        total=filled.sum(1),
        squares=(filled * filled).sum(1),
    )


def column_moments(values: Tensor, fixed: Collection[int] = ()) -> Moments:
    """The mean and standard deviation of values (n, D) or (n, C, L). Columns in ``fixed`` get mean
    0 and standard deviation 1.
    """
    return moments_from_sums(column_sums(values), fixed)


def pooled_moments(sums_by_client: Sequence[ColumnSums], fixed: Collection[int]) -> Moments:
    """The mean and standard deviation of all clients' values. The sums are added in this order."""
    return moments_from_sums(
        ColumnSums(
            count=torch.stack([sums.count for sums in sums_by_client]).sum(0),
            total=torch.stack([sums.total for sums in sums_by_client]).sum(0),
            squares=torch.stack([sums.squares for sums in sums_by_client]).sum(0),
        ),
        fixed,
    )


def moments_from_sums(sums: ColumnSums, fixed: Collection[int]) -> Moments:
    """Mean and standard deviation: mean = total / count, std^2 = squares / count - mean^2.

    Raises ConfigError if a result is not finite.
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
            "the mean or standard deviation of a column is not finite, because its numbers are too "
            "large; divide them by a constant"
        )
    constant = is_constant.nonzero().flatten().tolist()
    return Moments(
        mean=tuple(means),
        std=tuple(stds),
        constant=tuple(column for column in constant if column not in set(fixed)),
    )


# The stage before round 1 in which clients send sums of their columns. The server computes the mean
# and standard deviation from them, and all clients use these (``data.standardise = "summed"``).


MOMENTS = "moments"
"""The name of the stage."""

ROUNDING = 1e-9
"""The relative error that float64 sums of squares may have."""

TINY = 1e-150
"""Below this, the square of a number is 0 in float64."""


@dataclass(frozen=True)
class SumsWork(StatisticsWork):
    """A client's work: to send the sums of its training examples by column or channel.

    ``shape``: the shape of an example. ``fixed``: columns of 0 and 1, which are not scaled.
    """

    shape: tuple[int, ...]
    fixed: Collection[int] = ()

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        return self.sent(view.data.values.cpu())

    @property
    def rows(self) -> int:
        """The number of noised rows in a reply."""
        return 0

    @property
    def expected(self) -> Payload:
        """The form of a reply."""
        zeros = torch.zeros(self.shape[0], dtype=torch.float64)
        return ColumnSums(count=zeros, total=zeros, squares=zeros).to_payload()

    def sent(self, values: Tensor) -> Payload:
        """The payload of a client with these values, without noise."""
        return column_sums(values).to_payload()

    def moments(self, replies: Sequence[Reply]) -> Moments:
        """The mean and standard deviation from the clients' replies, which are added in order."""
        sums_by_client = [ColumnSums.from_payload(reply.content) for reply in replies]
        return pooled_moments(sums_by_client, self.fixed)

    def simulated(self, values: Tensor, seed: int) -> Payload:
        """The payload of a simulated client with these values. ``seed``: the seed of any noise."""
        return self.sent(values)

    def refuses(self, reply: Reply) -> str:
        """Why no values can have these sums; empty if some can.

        Also empty for a reply of an unexpected form, which the screen refuses.
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
    """Why the counts contradict the claimed number of values; empty if they do not."""
    count = sums.count
    is_impossible = (count < 0) | (count > claimed) | (count != count.round())
    if bool(is_impossible.any()):
        return f"its sums count {float(count.max()):g} values, but it claims {claimed}"
    return ""


def _impossible_sums(sums: ColumnSums) -> str:
    """Why no values can have these sums; empty if some can.

    The Cauchy-Schwarz inequality holds for all values: |total| <= sqrt(count squares). The roots
    are computed first, because the product may overflow. Values below ``TINY`` add nothing to the
    squares.
    """
    count = sums.count
    bound = (count * (1 + ROUNDING)).sqrt() * sums.squares.sqrt() + count * TINY
    # Also true if either number is NaN.
    is_above = ~(sums.total.abs() <= bound)
    is_of_nothing = (count == 0) & (sums.squares > 0)
    if bool((is_above | is_of_nothing).any()):
        return "no values can have the sums and the sums of squares that it sent"
    return ""


def sums_work(settings: Settings, about: DatasetInfo, shape: tuple[int, ...]) -> SumsWork:
    """The clients' work in the stage, for examples of a shape.

    Raises ConfigError for limits of columns that are not standardised, and for a lower limit above
    the upper one.
    """
    names = _column_names(about, shape[0])
    standardised = [
        name for i, name in enumerate(names[: shape[0]]) if i not in about.binary_features
    ]
    for name, (low, high) in (settings.data.limits or {}).items():
        if name not in standardised:
            column_names = ", ".join(standardised)[:200]
            raise ConfigError(
                f"data.limits names {name!r}, which is not among the standardised columns: "
                f"{column_names}"
            )
        if not low < high:
            raise ConfigError(
                f"data.limits: {name!r} has limits {low:g} and {high:g}; write the lower one first"
            )
    for part in manifest.sums():
        work: SumsWork | None = part.load()(settings, about, shape)
        if work is not None:
            return work
    return SumsWork(shape, about.binary_features)


def sums_stage(world: World, schedule: Schedule) -> Stage:
    """The stage before round 1 in which every client of the run sends its sums."""
    (stage,) = schedule.change([Stage(0, 1, MOMENTS, tuple(range(world.clients)))])
    return stage


@dataclass(frozen=True)
class SumsProvider(StageProvider, StageActor):
    """Provides the stage, acts in it, and checks its replies."""

    sums: SumsWork

    def actors(self) -> Mapping[str, StageActor]:
        """The actors of the stage, by its name."""
        return {MOMENTS: self}

    def requires(self) -> Need:
        """It requires nothing of a run."""
        return Need.NOTHING

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        """An empty payload for every client."""
        return Payload()

    def work(self, stage: Stage) -> ClientWork:
        """The work that sends the sums."""
        return self.sums

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        """The form of the sums."""
        return self.sums.expected

    def refuses(self, reply: Reply, stage: Stage) -> str:
        """Why no values can have the sums; empty if some can."""
        return self.sums.refuses(reply)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        """The state with mean and standard deviation (D,) float64, and the constant columns."""
        moments = self.sums.moments(replies)
        return state.next(
            mean=torch.tensor(moments.mean, dtype=torch.float64),
            std=torch.tensor(moments.std, dtype=torch.float64),
            constant=torch.tensor(moments.constant, dtype=torch.int64),
        )


def run_sums(work: SumsWork, context: RunContext) -> tuple[Moments, StageResult]:
    """Request the sums of every client, and compute the mean and standard deviation from them.

    Refused replies are left out. Raises TooFewReplies if fewer replies than the quorum are
    accepted; the context's recorder gets the refusals first.
    """
    provider = SumsProvider(work)
    schedule = replace(context.schedule, providers=(provider,))
    context = replace(context, schedule=schedule, hooks=())
    stage = sums_stage(context.world, context.schedule)
    state = State(params={}, round=0)
    result = run_stage(state, build_requests(state, stage, context), context)
    if not result.accepted:
        check_quorum(result, context.rules, is_remote=context.is_remote)
    moments = result.after.extra
    return (
        Moments(
            mean=tuple(moments.tensor("mean").tolist()),
            std=tuple(moments.tensor("std").tolist()),
            constant=tuple(moments.tensor("constant").tolist()),
        ),
        result,
    )


Origin = Literal["declared", "pooled", "summed", "server", "own", "none"]

STANDARDISED = ("table", "series")
"""Kinds of examples whose columns or channels have different units."""

WHOSE: Mapping[Origin, str] = {
    "declared": "the declared mean and standard deviation",
    "pooled": "the mean and standard deviation of all clients' training rows together, which only "
    "a simulation can compute",
    "summed": "the mean and standard deviation of all clients' training rows, from sums that the "
    "clients send",
    "server": "the mean and standard deviation of the public set",
    "own": "each client's own mean and standard deviation",
}
"""The source of mean and standard deviation in words, by ``data.standardise``."""

FARTHEST = 1e6
"""The largest distance of a training value from the declared mean, in declared standard deviations.
A larger distance shows that the two have different units.
"""

NAMED_CLIENTS = 20
"""The largest number of clients whose constant columns are listed in the notes."""


@dataclass(frozen=True)
class Scaler:
    """Scales the columns of a table, or the channels of a series, by mean and standard deviation.

    origin: the source of mean and standard deviation. mean, std: by column; empty if values are not
    scaled. by_client: the mean and standard deviation of each client, if they differ. notes:
    sentences for the user.
    """

    origin: Origin = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    by_client: Mapping[int, Moments] | None = None
    notes: tuple[str, ...] = ()

    @property
    def awaits_sums(self) -> bool:
        """Whether mean and standard deviation are unknown until real sites have sent their sums."""
        return self.origin == "summed" and not self.mean

    def transform(self, examples: Examples) -> Examples:
        """Examples scaled by the common mean and standard deviation; missing values become 0."""
        values = examples.values
        if not values.is_floating_point() or self.by_client is not None:
            return examples
        if self.mean:
            values = _scaled(values, self.mean, self.std)
        return replace(examples, values=values.nan_to_num(0.0))

    def transform_client(self, client: int, examples: Examples) -> Examples:
        """A client's examples, scaled by its own mean and standard deviation or the common ones."""
        if self.by_client is None:
            return self.transform(examples)
        own_moments = self.by_client[client]
        values = _scaled(examples.values, own_moments.mean, own_moments.std)
        return replace(examples, values=values.nan_to_num(0.0))

    def transform_clients(self, train: Examples, split: ClientSplit | None) -> Examples:
        """Scaled training examples: by each client's own mean and standard deviation, or the
        common ones.
        """
        if self.by_client is None or split is None:
            return self.transform(train)
        values = train.values.clone()
        for client, positions in enumerate(split.tensors()):
            own_moments = self.by_client[client]
            values[positions] = _scaled(values[positions], own_moments.mean, own_moments.std)
        return replace(train, values=values.nan_to_num(0.0))


UNSCALED = Scaler()
"""A scaler that changes nothing."""


def fit_scaler(
    settings: Settings,
    dataset: Dataset,
    train: Examples,
    split: ClientSplit | None,
    *,
    public: Examples | None,
    moments: Moments | None,
) -> Scaler:
    """The scaler for a run's examples; it changes nothing for images, vectors and texts.

    split: the positions of each client's examples in ``train``. moments: the mean and standard
    deviation from the sums of real sites; None until they have sent them. Raises ConfigError if the
    source in the settings has no mean and standard deviation.
    """
    declared = _declared(settings, dataset)
    origin = _origin(settings, dataset, is_declared=declared is not None)
    if origin is None:
        return UNSCALED
    if origin == "none":
        return unscaled(settings, train)
    if origin == "declared":
        if declared is None:
            raise ConfigError(
                "data.standardise = 'declared' needs data.mean and data.std, with one number per "
                "column"
            )
        _check_unit(train, declared, dataset)
        return _scaler(origin, declared, dataset)
    if origin == "own":
        return _scaler_by_client(dataset, train, split)
    if origin == "summed" and settings.on_sites:
        sums_work(settings, dataset.about, dataset.input_shape)  # raises ConfigError before a run
        return _scaler_of_sums(origin, moments, dataset)
    if origin == "server":
        if public is None:
            raise ConfigError(
                "data.standardise = 'server' needs a public set in the units of the data: set "
                "data.public, and no data.public_from = 'noise'"
            )
        return _scaler(
            origin, column_moments(public.values, dataset.about.binary_features), dataset
        )

    assert split is not None  # if sites keep their data, _origin has rejected "pooled"
    if origin == "summed":
        return _scaler(origin, _summed_moments(settings, dataset, train, split), dataset)
    # Examples are added in the order of the clients, which determines the last bits of the sums.
    values = train.values[torch.from_numpy(split.positions)]
    return _scaler(origin, column_moments(values, dataset.about.binary_features), dataset)


def unscaled(settings: Settings, train: Examples) -> Scaler:
    """A scaler that changes nothing; raises ConfigError if missing values need a mean."""
    if settings.data.missing == "mean" and bool(train.values.isnan().any()):
        raise ConfigError(
            "data.missing = 'mean' needs a mean: leave out data.standardise = 'none', or set "
            "data.missing = 'drop'"
        )
    return UNSCALED


def _origin(settings: Settings, dataset: Dataset, *, is_declared: bool) -> Origin | None:
    """The source of mean and standard deviation; None for kinds of examples that are not scaled.

    Raises ConfigError for keys that contradict each other or the data.
    """
    key = settings.data.standardise
    kind = dataset.about.kind
    if kind not in STANDARDISED and key in (None, "none") and not is_declared:
        return None
    if kind in ("image", "text"):
        raise ConfigError(
            f"data.standardise is for tables, series and vectors; {dataset.name} holds "
            f"{dataset.many}"
        )
    if key not in (None, "declared") and settings.data.mean is not None:
        raise ConfigError(
            f"data.mean and data.std have no effect with data.standardise = {key!r}; leave them "
            "out, or set data.standardise = 'declared'"
        )
    if key is not None and key != "pooled":
        return key
    if key is None and is_declared:
        return "declared"
    if settings.on_sites:
        cause = "= 'pooled'"
        if key is None:
            cause = "is unset, and 'pooled'"
        raise ConfigError(
            f"data.standardise {cause} needs all data in one place, but sites keep theirs; set "
            "data.mean and data.std, or data.standardise = 'server' (those of the public set), "
            "'summed' (from sums that sites send) or 'own' (those of each site)"
        )
    return "pooled"


def _declared(settings: Settings, dataset: Dataset) -> Moments | None:
    """The mean and standard deviation in the config, or else those of the data set's files."""
    if dataset.about.kind in ("image", "text"):
        return None
    mean = settings.data.mean
    std = settings.data.std
    if (mean is None) != (std is None):
        raise ConfigError("data.mean and data.std belong together; set both, or none")
    if mean is None or std is None:
        mean = dataset.mean
        std = dataset.std
    if not mean or not std:
        return None
    width = dataset.input_shape[0]
    if {len(mean), len(std)} != {width}:
        raise ConfigError(
            f"data.mean has {len(mean)} numbers and data.std {len(std)}, but {dataset.name} has "
            f"{width} columns or channels; write one number for each"
        )
    return Moments(tuple(map(float, mean)), tuple(map(float, std)))


def _check_unit(train: Examples, declared: Moments, dataset: Dataset) -> None:
    """Raise ConfigError if a training value is too far from the declared mean.

    With the actual mean and standard deviation of the n rows, no value is more than sqrt(n)
    standard deviations away.
    """
    columns = train.values.double().movedim(1, -1).flatten(0, -2)
    if not len(columns):
        return
    mean = torch.tensor(declared.mean, dtype=torch.float64)
    std = torch.tensor(declared.std, dtype=torch.float64)
    distances = ((columns - mean) / std).abs().nan_to_num(0.0, posinf=torch.inf).amax(0)
    farthest = float(distances.max())
    if farthest > FARTHEST:
        column = int(distances.argmax())
        column_name = _column_names(dataset.about, column + 1)[column]
        raise ConfigError(
            f"data.std = {declared.std[column]:g} of {column_name}: "
            f"a training value is {farthest:.1e} standard deviations away from data.mean = "
            f"{declared.mean[column]:g}; write both in the unit of the data"
        )


def _scaler_of_sums(origin: Origin, moments: Moments | None, dataset: Dataset) -> Scaler:
    """The scaler from the sums of sites; without a mean until the sites have sent the sums."""
    if moments is None:
        return Scaler(origin)
    return _scaler(origin, moments, dataset)


def _scaler_by_client(dataset: Dataset, train: Examples, split: ClientSplit | None) -> Scaler:
    """The scaler in which each client has its own mean and standard deviation; without any clients
    if sites keep their data.
    """
    by_client = {}
    notes = []
    clients: Iterable[Tensor] = ()
    if split is not None:
        clients = split.tensors()
    for client, positions in enumerate(clients):
        values = train.values[positions]
        by_client[client] = column_moments(values, dataset.about.binary_features)
        if by_client[client].constant:
            notes.append(_note_constant(by_client[client], dataset, f" at client {client}"))
    return Scaler(
        origin="own",
        by_client=by_client,
        notes=(_note_origin("own", dataset), *notes[:NAMED_CLIENTS]),
    )


def _summed_moments(
    settings: Settings, dataset: Dataset, train: Examples, split: ClientSplit
) -> Moments:
    """The mean and standard deviation from the sums that simulated clients send, with noise if the
    run has any.
    """
    work = sums_work(settings, dataset.about, dataset.input_shape)
    replies = []
    for client, positions in enumerate(split.tensors()):
        values = train.values[positions]
        content = work.simulated(values, seed_for(settings.seed, 0, 1, client, "privacy"))
        replies.append(Reply(client, content, examples=len(values)))
    return work.moments(replies)


def _scaler(origin: Origin, common_moments: Moments, dataset: Dataset) -> Scaler:
    notes = [_note_origin(origin, dataset)]
    if common_moments.constant:
        notes.append(_note_constant(common_moments, dataset))
    return Scaler(
        origin=origin,
        mean=common_moments.mean,
        std=common_moments.std,
        notes=tuple(notes),
    )


def _note_origin(origin: Origin, dataset: Dataset) -> str:
    columns = "columns"
    if dataset.about.kind == "series":
        columns = "channels"
    return f"{columns} are standardised by {WHOSE[origin]}"


def _note_constant(column_moments: Moments, dataset: Dataset, place: str = "") -> str:
    names = _column_names(dataset.about, len(column_moments.mean))
    constant = ", ".join(names[column] for column in column_moments.constant[:20])
    return f"columns that are constant to six digits{place} become 0: {constant}"


def _column_names(about: DatasetInfo, width: int) -> Sequence[str]:
    return about.features or tuple(f"channel {i}" for i in range(width))


def _scaled(values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std by column (n, D) or channel (n, C, L)."""
    shape = (1, -1, *[1] * (values.dim() - 2))
    shift = torch.tensor(tuple(mean), dtype=torch.float64).view(shape)
    scale = torch.tensor(tuple(std), dtype=torch.float64).view(shape)
    return ((values.double() - shift) / scale).to(values.dtype)
