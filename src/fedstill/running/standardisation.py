"""The mean and spread that scale the columns of a table or the channels of a series.

Only training examples count, never test examples. A missing value does not count, and becomes 0,
which is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.records import Examples, Payload, Reply
from fedstill.data.client_split import ClientSplit
from fedstill.data.dataset import Dataset
from fedstill.running.data_sums import Moments, SumsWork, column_moments, sums_work

Origin = Literal["declared", "pooled", "summed", "server", "own", "none"]

STANDARDISED = ("table", "series")
"""Kinds of inputs whose columns or channels have units of their own."""

WHOSE: Mapping[Origin, str] = {
    "declared": "the mean and spread that are declared",
    "pooled": "the mean and spread of all clients' training rows together, which only a simulation "
    "can do",
    "summed": "the mean and spread of all clients' training rows, from sums that the clients send",
    "server": "the mean and spread of the public set",
    "own": "each client's own mean and spread",
}
"""What columns are standardised by, for people."""

FARTHEST = 1e6
"""How many declared spreads a training value may be from the declared mean. Farther away, one of
them is in another unit.
"""

NAMED_CLIENTS = 20
"""Of more clients with constant columns than these, the notes name the first."""


@dataclass(frozen=True)
class Scaler:
    """Scales the columns of a table, or the channels of a series, by a mean and a spread.

    origin: whose mean and spread they are. mean, std: by column, empty where values stay as they
    are. by_client: where each client has its own. notes: what a person should know, a sentence
    each.
    """

    origin: Origin = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    by_client: Mapping[int, Moments] | None = None
    notes: tuple[str, ...] = ()

    @property
    def awaits_sums(self) -> bool:
        """Whether real sites have to send their sums before there is a mean and a spread."""
        return self.origin == "summed" and not self.mean

    def transform(self, examples: Examples) -> Examples:
        """Examples scaled by the common mean and spread; missing values become 0."""
        values = examples.values
        if not values.is_floating_point() or self.by_client is not None:
            return examples
        if self.mean:
            values = _scaled(values, self.mean, self.std)
        return replace(examples, values=values.nan_to_num(0.0))

    def transform_client(self, client: int, examples: Examples) -> Examples:
        """One client's examples scaled, by its own mean and spread if it has them."""
        if self.by_client is None:
            return self.transform(examples)
        return scaled_by(self.by_client[client], examples)

    def transform_clients(self, train: Examples, split: ClientSplit | None) -> Examples:
        """Training examples scaled, each client's by its own mean and spread if it has them."""
        if self.by_client is None or split is None:
            return self.transform(train)
        values = train.values.clone()
        for client, positions in enumerate(split.tensors()):
            own_moments = self.by_client[client]
            values[positions] = _scaled(values[positions], own_moments.mean, own_moments.std)
        return replace(train, values=values.nan_to_num(0.0))


UNSCALED = Scaler()
"""Leaves numbers as they are."""


def scaled_by(own_moments: Moments, examples: Examples) -> Examples:
    """Examples scaled by a mean and a spread; missing values become 0."""
    values = _scaled(examples.values, own_moments.mean, own_moments.std)
    return replace(examples, values=values.nan_to_num(0.0))


def fit_scaler(
    settings: Settings,
    dataset: Dataset,
    train: Examples,
    split: ClientSplit | None,
    *,
    public: Examples | None = None,
    sent: Moments | None = None,
) -> Scaler:
    """The scaler of a run's examples; images, vectors and texts stay as they are.

    split: which client has which of ``train``. sent: the mean and spread from the sums of real
    sites; before they have sent them, the scaler has none. Raises ConfigError where nobody has the
    mean and spread that the settings name.
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
                "data.standardise = 'declared' needs data.mean and data.std, one number a column"
            )
        _check_unit(train, declared, dataset)
        return _scaler(origin, declared, dataset)
    if origin == "own":
        return _scaler_by_client(dataset, train, split)
    if origin == "summed" and settings.on_sites:
        sums_work(settings, dataset.about, dataset.input_shape)  # raises if it cannot be
        return Scaler(origin) if sent is None else _scaler(origin, sent, dataset)
    if origin == "server":
        if public is None:
            raise ConfigError("data.standardise = 'server' needs a public set: set data.public")
        return _scaler(
            origin, column_moments(public.values, dataset.about.binary_features), dataset
        )

    assert split is not None  # where sites keep their data, _origin has refused "pooled"
    if origin == "summed":
        return _scaler(origin, _summed_moments(settings, dataset, train, split), dataset)
    # The order of the examples is that of the clients: it decides the last bits of the sums.
    values = train.values[torch.from_numpy(split.positions)]
    return _scaler(origin, column_moments(values, dataset.about.binary_features), dataset)


def unscaled(settings: Settings, train: Examples) -> Scaler:
    """No scaling; raises ConfigError where missing numbers are to become the mean."""
    if settings.data.missing == "mean" and bool(train.values.isnan().any()):
        raise ConfigError("data.missing = 'mean' needs a mean: leave data.standardise out")
    return UNSCALED


def _origin(settings: Settings, dataset: Dataset, *, is_declared: bool) -> Origin | None:
    """Whose mean and spread scale the examples; None for kinds of examples that are never scaled.

    Raises ConfigError for keys that contradict each other, or the data.
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
            f"data.standardise = {key!r} does not read data.mean and data.std; leave them out, "
            "or set 'declared'"
        )
    if key is not None and key != "pooled":
        return key
    if key is None and is_declared:
        return "declared"
    if settings.on_sites:
        cause = "is unset, and 'pooled'" if key is None else "= 'pooled'"
        raise ConfigError(
            f"data.standardise {cause} would use data that sites keep; write data.mean and "
            "data.std, or set data.standardise = 'server' (the public set's), 'summed' (sums that "
            "sites send) or 'own' (each site's)"
        )
    return "pooled"


def _declared(settings: Settings, dataset: Dataset) -> Moments | None:
    """The mean and spread in the config, or else those that the data set comes with."""
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
            f"data.mean has {len(mean)} numbers and data.std {len(std)}; {dataset.name} has "
            f"{width} columns or channels"
        )
    return Moments(tuple(map(float, mean)), tuple(map(float, std)))


def _check_unit(train: Examples, declared: Moments, dataset: Dataset) -> None:
    """Raise ConfigError where a training value is too many declared spreads from the declared mean.

    With the mean and spread of the n rows themselves, no value would be more than sqrt(n) spreads
    away.
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
        raise ConfigError(
            f"data.std = {declared.std[column]:g} of {_column_names(dataset, column + 1)[column]}: "
            f"a training value is {farthest:.1e} times that from data.mean, "
            f"{declared.mean[column]:g}; give both in the unit of the data"
        )


def _scaler_by_client(dataset: Dataset, train: Examples, split: ClientSplit | None) -> Scaler:
    """The scaler in which each client has its own mean and spread; of no client where sites keep
    their data.
    """
    by_client = {}
    notes = []
    clients = () if split is None else split.tensors()
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
    """The mean and spread from the sums that simulated clients send."""
    work = sums_work(settings, dataset.about, dataset.input_shape)
    replies = []
    for client, positions in enumerate(split.tensors()):
        values = train.values[positions]
        content = _sent_sums(settings, work, client, values)
        replies.append(Reply(client, content, examples=len(values)))
    return work.moments(replies)


def _sent_sums(settings: Settings, work: SumsWork, client: int, values: Tensor) -> Payload:
    """What a simulated client sends of its sums, with noise if the run has any."""
    return work.simulated(values, seed_for(settings.seed, 0, 1, client, "privacy"))


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
    columns = "channels" if dataset.about.kind == "series" else "columns"
    return f"{columns} are standardised by {WHOSE[origin]}"


def _note_constant(column_moments: Moments, dataset: Dataset, place: str = "") -> str:
    names = _column_names(dataset, len(column_moments.mean))
    constant = ", ".join(names[column] for column in column_moments.constant[:20])
    return f"constant to six digits{place}, and left at 0: {constant}"


def _column_names(dataset: Dataset, width: int) -> Sequence[str]:
    return dataset.about.features or tuple(f"channel {i}" for i in range(width))


def _scaled(values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std by column (n, D) or channel (n, C, L)."""
    shape = (1, -1, *[1] * (values.dim() - 2))
    shift = torch.tensor(tuple(mean), dtype=torch.float64).view(shape)
    scale = torch.tensor(tuple(std), dtype=torch.float64).view(shape)
    return ((values.double() - shift) / scale).to(values.dtype)
