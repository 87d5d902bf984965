"""By whose mean and spread a table or series is standardised, and the examples as they are then.

Only training examples count, never test ones; a value that is missing counts for nothing, and
becomes 0, the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.records import Examples, Payload
from fedstill.data.client_split import FlatParts
from fedstill.data.dataset import Dataset
from fedstill.privacy.noised_sums import sums_work
from fedstill.running.data_sums import Moments, SumUp, moments

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
"""By what columns are standardised, for people."""

MOST_SPREADS = 1e6
"""How many declared spreads a training value may be from the declared mean; farther, one of them is
in another unit.
"""

Parts = Sequence[Tensor] | Mapping[int, Tensor]


@dataclass(frozen=True)
class Standard:
    """A mean and a spread for each column of a table or channel of a series, and whose they are;
    empty for none.

    ``by_client``: where each client has its own. ``notes``: what a person should know, a sentence
    each.
    """

    origin: Origin = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    by_client: Mapping[int, Moments] | None = None
    notes: tuple[str, ...] = ()

    def of(self, examples: Examples) -> Examples:
        """Examples standardised, values that are missing 0 in the same step."""
        if not examples.values.is_floating_point() or self.by_client is not None:
            return examples
        values = _scaled(examples.values, self.mean, self.std) if self.mean else examples.values
        return replace(examples, values=values.nan_to_num(0.0))

    def of_one(self, client: int, examples: Examples) -> Examples:
        """One client's examples: by its own mean and spread, if it has one."""
        if self.by_client is None:
            return self.of(examples)
        return by_moments(examples, self.by_client[client])

    def of_clients(self, examples: Examples, parts: Parts) -> Examples:
        """Training examples standardised: each client's by its own mean and spread, if it has
        one.
        """
        if self.by_client is None:
            return self.of(examples)
        values = examples.values.clone()
        for client, part in _by_client(parts):
            own = self.by_client[client]
            values[part] = _scaled(values[part], own.mean, own.std)
        return replace(examples, values=values.nan_to_num(0.0))


def _by_client(parts: Parts) -> Iterable[tuple[int, Tensor]]:
    return parts.items() if isinstance(parts, Mapping) else enumerate(parts)


def by_moments(examples: Examples, own: Moments) -> Examples:
    """Examples standardised by a mean and a spread, values that are missing 0."""
    return replace(examples, values=_scaled(examples.values, own.mean, own.std).nan_to_num(0.0))


def standard(
    settings: Settings,
    dataset: Dataset,
    train: Examples,
    parts: Parts,
    public: Examples | None = None,
    sent: Moments | None = None,
) -> Standard:
    """The mean and spread by which a run's examples are standardised; none for images, vectors and
    texts.

    parts: positions in ``train`` of the clients' examples. sent: what the sums of real sites came
    to; before they have sent them, mean and spread are empty. Raises ConfigError where nobody has
    what is asked for.
    """
    asked, kind = settings.data.standardise, dataset.about.kind
    declared = _declared(settings, dataset)
    if kind not in STANDARDISED and (asked or "none") == "none" and not declared:
        return Standard()
    if kind in ("image", "text"):
        raise ConfigError(
            f"data.standardise is for tables, series and vectors; {dataset.name} holds "
            f"{dataset.many}"
        )
    if asked not in (None, "declared") and settings.data.mean is not None:
        raise ConfigError(
            f"data.standardise = {asked!r} does not read data.mean and data.std; leave them out, "
            "or set 'declared'"
        )
    origin: Origin = asked or ("declared" if declared else "pooled")
    if origin == "none":
        return unscaled(settings, train)
    if origin == "declared":
        if not declared:
            raise ConfigError(
                "data.standardise = 'declared' needs data.mean and data.std, one number a column"
            )
        _refuse_far(train, declared, dataset)
        return Standard("declared", *declared, notes=(_whose("declared", dataset),))
    if settings.on_sites and origin == "pooled":
        said = "= 'pooled'" if asked else "is unset, and 'pooled'"
        raise ConfigError(
            f"data.standardise {said} would use data that sites keep; write data.mean and "
            "data.std, or set "
            "data.standardise = 'server' (the public set's), 'summed' (sums that sites send) or "
            "'own' (each site's)"
        )
    if origin == "summed" and settings.on_sites:
        sums_work(settings, dataset.about, dataset.input_shape)  # raises now if it cannot be
        return _said(origin, sent, dataset) if sent else Standard(origin)
    return _taken(settings, dataset, origin, train, parts, public)


def _taken(
    settings: Settings,
    dataset: Dataset,
    origin: Origin,
    train: Examples,
    parts: Parts,
    public: Examples | None,
) -> Standard:
    fixed = dataset.about.marks
    if origin == "server":
        if public is None:
            raise ConfigError("data.standardise = 'server' needs a public set: set data.public")
        return _said(origin, moments(public.values, fixed), dataset)
    if origin == "pooled":
        every = (
            parts.order
            if isinstance(parts, FlatParts)
            else torch.cat([own for _, own in _by_client(parts)])
        )
        return _said(origin, moments(train.values[every], fixed), dataset)
    if origin == "summed":
        work = sums_work(settings, dataset.about, dataset.input_shape)
        sent = [
            _sums_sent(settings, work, client, train.values[part])
            for client, part in _by_client(parts)
        ]
        return _said(origin, work.moments(sent), dataset)
    own = {client: moments(train.values[part], fixed) for client, part in _by_client(parts)}
    said = [
        _constant(one, dataset, f" at client {client}")
        for client, one in own.items()
        if one.constant
    ]
    return Standard("own", by_client=own, notes=(_whose("own", dataset), *said[:20]))


def _sums_sent(settings: Settings, work: SumUp, client: int, values: Tensor) -> tuple[Payload, int]:
    """What a simulated client sends of its sums, with noise drawn by key, and how many examples it
    has.
    """
    seed = seed_for(settings.seed, 0, 1, client, "privacy")
    return settings.privacy.protect(work.sent(values), seed), len(values)


def _declared(
    settings: Settings, dataset: Dataset
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if dataset.about.kind in ("image", "text"):
        return None
    own = settings.data
    if (own.mean is None) != (own.std is None):
        raise ConfigError("data.mean and data.std belong together; set both, or none")
    mean, std = (own.mean, own.std) if own.mean is not None else (dataset.mean, dataset.std)
    if not mean or not std:
        return None
    width = dataset.input_shape[0]
    if {len(mean), len(std)} != {width}:
        raise ConfigError(
            f"data.mean has {len(mean)} numbers and data.std {len(std)}; {dataset.name} has "
            f"{width} columns or channels"
        )
    return tuple(map(float, mean)), tuple(map(float, std))


def _refuse_far(
    train: Examples, declared: tuple[tuple[float, ...], tuple[float, ...]], dataset: Dataset
) -> None:
    """Raises ConfigError where a training value is too many declared spreads from the declared
    mean.

    With the mean and spread of the n rows themselves, no value would be more than sqrt(n) spreads
    away.
    """
    columns = train.values.double().movedim(1, -1).flatten(0, -2)
    if not len(columns):
        return
    mean, std = (torch.tensor(own, dtype=torch.float64) for own in declared)
    far = ((columns - mean) / std).abs().nan_to_num(0.0, posinf=torch.inf).amax(0)
    if (most := float(far.max())) > MOST_SPREADS:
        i = int(far.argmax())
        raise ConfigError(
            f"data.std = {declared[1][i]:g} of {_names(dataset, i + 1)[i]}: a training value is "
            f"{most:.1e} times that "
            f"from data.mean, {declared[0][i]:g}; give both in the unit of the data"
        )


def unscaled(settings: Settings, train: Examples) -> Standard:
    """No standard; raises ConfigError where missing numbers are to be the mean."""
    if settings.data.missing == "mean" and bool(train.values.isnan().any()):
        raise ConfigError("data.missing = 'mean' needs a mean: leave data.standardise out")
    return Standard("none")


def _said(origin: Origin, own: Moments, dataset: Dataset) -> Standard:
    said = (_constant(own, dataset),) if own.constant else ()
    return Standard(origin, own.mean, own.std, notes=(_whose(origin, dataset), *said))


def _constant(own: Moments, dataset: Dataset, where: str = "") -> str:
    names = _names(dataset, len(own.mean))
    return (
        f"constant to six digits{where}, and left at 0: "
        f"{', '.join(names[i] for i in own.constant[:20])}"
    )


def _names(dataset: Dataset, width: int) -> Sequence[str]:
    return dataset.about.features or tuple(f"channel {i}" for i in range(width))


def _whose(origin: Origin, dataset: Dataset) -> str:
    what = "channels" if dataset.about.kind == "series" else "columns"
    return f"{what} are standardised by {WHOSE[origin]}"


def _scaled(values: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std by column (n, D) or channel (n, C, L)."""
    shape = (1, -1, *[1] * (values.dim() - 2))
    shift, scale = (torch.tensor(tuple(v), dtype=torch.float64).view(shape) for v in (mean, std))
    return ((values.double() - shift) / scale).to(values.dtype)


PLAIN = Standard()
"""Examples as they are."""
