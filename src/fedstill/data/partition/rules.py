"""Rules for every split: labels and parameters are checked first, no client is empty, no example is
given twice.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, get_type_hints

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError, DataError, InfeasiblePartition
from fedstill.core.fields import problem
from fedstill.core.registry import register
from fedstill.data.client_split import ClientSplit

Labels = NDArray[np.int64]
Parts = Sequence[NDArray[np.int64]]
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Draw:
    """An accepted split and what it took.

    parts: one int64 index array a client, all of them views of one; tries: draws made, the accepted
    one included;
    min_size: the smallest client asked for in the end (lower than the caller's only where the
    caller allowed that).
    """

    parts: Parts
    tries: int
    min_size: int


def partition(name: str) -> Callable[[Callable[Arguments, Parts]], Callable[Arguments, Parts]]:
    """Register a split under a name, and check its labels, its ranges and its outcome.

    Raises DataError for labels that are no class ids, ConfigError for a parameter outside its
    annotated range, InfeasiblePartition for a client without examples.
    """

    def decorate(split: Callable[Arguments, Parts]) -> Callable[Arguments, Parts]:
        signature = inspect.signature(split)
        hints = get_type_hints(split, include_extras=True)

        @functools.wraps(split)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Parts:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["labels"] = checked_labels(bound.arguments["labels"])
            for key in bound.arguments.keys() & hints.keys() - {"labels"}:
                if why := problem(hints[key], bound.arguments[key]):
                    raise ConfigError(f"partition {name!r}: {key} = {why}")
            parts = ClientSplit.of_parts(split(*bound.args, **bound.kwargs))
            refuse_empty(name, parts.sizes)
            return parts

        return register("partition", name)(checked)

    return decorate


def checked_labels(labels: Any) -> Labels:
    """Labels as an int64 array of one dimension; DataError where they are no class ids."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise DataError(
            f"labels to be split must be a non-empty list of whole numbers, not {array.dtype} of "
            f"shape {array.shape}"
        )
    if array.min() < 0:
        raise DataError(
            f"label {array.min()} at example {int(array.argmin())}: class ids start at 0"
        )
    return array.astype(np.int64)


def class_indices(labels: Labels) -> list[Labels]:
    """The examples of every class that occurs, in data-set order; classes in ascending order."""
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


def refuse_empty(name: str, sizes: NDArray[np.int64]) -> None:
    """Raise InfeasiblePartition naming the first client that got nothing."""
    for client in np.flatnonzero(sizes == 0)[:1]:
        raise InfeasiblePartition(
            f"partition {name!r} leaves client {client} of {len(sizes)} without examples; "
            "take fewer clients, a larger alpha or another seed"
        )


def refuse_too_many(name: str, examples: int, clients: int, min_size: int = 1) -> None:
    """Raise InfeasiblePartition where the examples cannot give every client ``min_size``."""
    if clients * min_size > examples:
        raise InfeasiblePartition(
            f"partition {name!r}: {clients} clients × {min_size} example(s) need "
            f"{clients * min_size:,}, "
            f"the data have {examples:,}; take fewer "
            f"clients{' or a smaller min_size' if min_size > 1 else ''}"
        )


def legacy_stream(seed: int) -> np.random.RandomState:
    """NumPy's frozen legacy stream, which the official codes draw from; ``seed`` may be any in [0,
    2**63).
    """
    if seed < 2**32:
        return np.random.RandomState(seed)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))


def random_classes(
    clients: int, per_client: int, classes: int, stream: np.random.RandomState
) -> list[Labels]:
    """Each client draws ``per_client`` distinct classes uniformly: the clients of every class,
    ascending.
    """
    everyone = np.arange(classes)
    taken = np.zeros((clients, classes), dtype=bool)
    order = everyone.copy()
    for client in range(clients):
        order[:] = everyone
        stream.shuffle(order)  # what RandomState.choice(classes, per_client, replace=False) draws
        taken[client, order[:per_client]] = True
    return [np.flatnonzero(taken[:, c]) for c in range(classes)]
