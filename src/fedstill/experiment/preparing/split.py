"""Which client has which examples: the partition that a config names, applied and checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstill.data.examples import stratified
from fedstill.data.partition import Parts, cached
from fedstill.data.partition.flat import FlatParts
from fedstill.errors import ConfigError, FedstillError, InfeasiblePartition
from fedstill.experiment.config.settings import Settings
from fedstill.origin import definition, of_kind, reason
from fedstill.records import Examples


def split(
    settings: Settings, train: Examples, seed: int | None = None
) -> FlatParts[NDArray[np.int64]]:
    """Positions of each client's examples.

    Raises InfeasiblePartition if a client would have none, ConfigError for a partition of yours
    that fails.

    ``seed``: what a partition that draws draws from; unset: its own, or the run's.
    """
    partition, labels = settings.named.partition, to_read(train.labels)
    entry, fields = partition.entry, dict(partition.values)
    own = fields.pop("seed", None) if seed is None else seed
    fields.pop("seed", None)
    if "seed" in inspect.signature(entry.target).parameters:
        fields["seed"] = settings.seed if own is None else own
    if "groups" in inspect.signature(entry.target).parameters:
        fields["groups"] = None if train.owners is None else to_read(train.owners)
    try:
        apply = (
            entry.target
            if partition.name in settings.lives
            else functools.partial(cached, entry.target)
        )
        parts = apply(labels=labels, clients=settings.clients, **fields)
        parts = (
            parts
            if isinstance(parts, FlatParts)
            else _arrays(f"partition {entry.name}", parts, entry.target)
        )
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"partition {entry.name} failed: {reason(error, entry.target)}"
        ) from error
    if len(parts) != settings.clients:
        raise ConfigError(
            f"partition {entry.name} gave {len(parts)} parts for {settings.clients} clients"
        )
    return _checked(f"partition {entry.name}", parts, len(labels))


def to_read(values: Tensor) -> NDArray[np.int64]:
    """The same numbers for NumPy, which nobody may write into: they are the run's."""
    view = values.numpy().view()
    view.flags.writeable = False
    return view


def _arrays(what: str, given: object, partition: Callable[..., object]) -> list[NDArray[Any]]:
    """What a user's partition gave, a part a client; raises ConfigError for what has no parts in an
    order.
    """
    if isinstance(given, Iterable) and not isinstance(given, (Mapping, Set, str)):
        return [np.asarray(part) for part in given]
    where = f" ({definition(partition)})" if definition(partition) else ""
    raise ConfigError(
        f"{what} gives {of_kind(given)}, not a list with an array of positions for each "
        f"client{where}"
    )


def _checked(what: str, parts: Parts, examples: int) -> FlatParts[NDArray[np.int64]]:
    """The parts in one array; raises InfeasiblePartition or ConfigError where they are no split of
    so many examples.
    """
    must = f"positions from 0 to {examples - 1}"
    for client, part in enumerate([] if isinstance(parts, FlatParts) else parts):
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            of = (
                f"numbers of type {part.dtype}"
                if part.ndim == 1
                else f"an array of shape {part.shape}"
            )
            got = (
                "a mask; np.flatnonzero makes of it the"
                if part.dtype == bool
                else f"{of}, not an array of"
            )
            raise ConfigError(f"{what}: client {client} gets {got} {must}")
    flat = FlatParts.of(parts)
    for client in np.flatnonzero(flat.sizes == 0)[:1]:
        raise InfeasiblePartition(f"{what}: client {client} gets no examples; use fewer clients")
    for place in np.flatnonzero((flat.order < 0) | (flat.order >= examples))[:1]:
        raise ConfigError(
            f"{what}: client {_owner(flat, place)} gets example {flat.order[place]}, not {must}"
        )
    for example in np.flatnonzero(np.bincount(flat.order) > 1)[:1]:
        one, other = (_owner(flat, place) for place in np.flatnonzero(flat.order == example)[:2])
        whose = f"client {one} twice" if one == other else f"two clients, {one} and {other}"
        raise ConfigError(
            f"{what} gives an example to {whose}: that at {example}; each goes to one client, once"
        )
    return flat


def _owner(flat: FlatParts[NDArray[np.int64]], place: np.int64) -> int:
    """The client that has what stands at a place of the order."""
    return int(np.searchsorted(flat.ends, place, side="right"))


def some_of(examples: Examples, size: int, key: str) -> Examples:
    """``size`` of the examples, stratified, or all for 0; raises ConfigError naming ``data.KEY``
    for more than all.
    """
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(
            f"data.{key} = {size} is more than the {len(examples.labels)} examples there are"
        )
    return examples.take(stratified(examples.labels, size, seed=0))
