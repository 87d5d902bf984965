"""Shared functions of partitions: checks of labels, parameters and results, divisions of a class,
NumPy's legacy generator, and a cache of slow splits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fedstill.core.errors import ConfigError, DataError, InfeasiblePartition
from fedstill.core.fields import problem
from fedstill.core.files import cache_folder, counted, replaced_file
from fedstill.core.registry import register
from fedstill.core.user_code import is_identified
from fedstill.core.user_modules import files_of
from fedstill.data.client_split import ClientSplit, Positions

Labels = NDArray[np.int64]
"""Class ids of examples."""

Counts = NDArray[np.int64]
"""Numbers of examples."""

Clients = NDArray[np.int64]
"""Numbers of clients."""

Parts = Sequence[Positions]
"""The positions of each client's examples, or of the examples of each class."""

Arguments = ParamSpec("Arguments")


def partition(name: str) -> Callable[[Callable[Arguments, Parts]], Callable[Arguments, Parts]]:
    """Register a partition under a name, with checks of its labels, parameters and result.

    Calls raise DataError for invalid labels, ConfigError for a parameter outside its annotated
    range, and InfeasiblePartition for a client without examples.
    """

    def decorate(split: Callable[Arguments, Parts]) -> Callable[Arguments, Parts]:
        signature = inspect.signature(split)
        hints = get_type_hints(split, include_extras=True)

        @functools.wraps(split)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Parts:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["labels"] = checked_labels(bound.arguments["labels"])
            for key, value in bound.arguments.items():
                if key == "labels" or key not in hints:
                    continue
                fault = problem(hints[key], value)
                if fault:
                    raise ConfigError(f"partition {name!r}: {key} = {fault}")
            parts = ClientSplit.of_parts(split(*bound.args, **bound.kwargs))
            check_no_client_empty(name, parts.sizes)
            return parts

        return register("partition", name)(checked)

    return decorate


def checked_labels(labels: Any) -> Labels:
    """Labels as a one-dimensional int64 array; raises DataError for invalid class ids."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise DataError(
            f"the labels of a partition must be a non-empty list of integers, but have type "
            f"{array.dtype} and shape {array.shape}"
        )
    if array.min() < 0:
        raise DataError(
            f"label {array.min()} of example {int(array.argmin())} is negative; class ids start at "
            "0"
        )
    return array.astype(np.int64)


def class_indices(labels: Labels) -> list[Positions]:
    """The positions of the examples of every class that occurs, in ascending order of classes."""
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def check_no_client_empty(name: str, sizes: Counts) -> None:
    """Raise InfeasiblePartition if a client has no examples."""
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise InfeasiblePartition(
            f"partition {name!r} leaves client {empty[0]} of {len(sizes)} without examples; lower "
            "clients, raise alpha, or use another seed"
        )


def check_enough_examples(name: str, examples: int, clients: int, min_size: int = 1) -> None:
    """Raise InfeasiblePartition if there are too few examples to give each client ``min_size``."""
    needed = clients * min_size
    if needed <= examples:
        return
    remedy = "lower clients"
    if min_size > 1:
        remedy += " or min_size"
    raise InfeasiblePartition(
        f"partition {name!r}: {counted(clients, 'client')} × {counted(min_size, 'example')} need "
        f"{counted(needed, 'example')}, but the data have {examples:,}; {remedy}"
    )


def cuts(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """The ascending positions (..., clients - 1) that divide ``size`` examples of a class by shares
    (..., clients).
    """
    return (np.cumsum(shares, axis=-1) * size).astype(np.int64)[..., :-1]


def piece_sizes(cut_positions: NDArray[np.int64], size: int) -> Counts:
    """The number of examples (..., clients) that each client gets of a class with ``size``
    examples.
    """
    return np.diff(np.minimum(cut_positions, size), prepend=0, append=size)


def legacy_stream(seed: int) -> np.random.RandomState:
    """NumPy's legacy generator, whose stream is stable and which official implementations use.

    seed: an integer in [0, 2**63).
    """
    if seed < 2**32:
        return np.random.RandomState(seed)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))


@dataclass(frozen=True)
class ClassAllocation:
    """The assignment of ``per_client`` of all classes to each client, drawn at random."""

    partition: str
    """The name of the partition, for messages."""
    clients: int
    per_client: int
    classes: int

    def check_possible(self) -> None:
        """Raise InfeasiblePartition if clients cannot have so many classes, or too few have one."""
        if self.per_client > self.classes:
            raise InfeasiblePartition(
                f"{self.partition}: classes_per_client = {self.per_client}, but the data have "
                f"{self.classes} classes; lower classes_per_client"
            )
        if self.clients * self.per_client < self.classes:
            raise InfeasiblePartition(
                f"{self.partition}: {self.clients} clients × {self.per_client} classes cannot hold "
                f"{self.classes} classes; raise clients or classes_per_client"
            )

    def drawn(
        self,
        stream: np.random.RandomState,
        *,
        min_clients: int = 1,
        max_tries: int = 10_000,
        other_remedy: str = "",
    ) -> list[Clients]:
        """The clients of every class, in ascending order. Each client draws its classes uniformly.

        The draw is repeated until each class has ``min_clients`` clients. Raises
        InfeasiblePartition if this does not happen in ``max_tries`` draws. other_remedy: an
        additional advice for its message.
        """
        for _ in range(max_tries):
            clients_of_class = self._draw(stream)
            if min(map(len, clients_of_class)) >= min_clients:
                return clients_of_class
        raise InfeasiblePartition(
            f"{self.partition}: none of {max_tries:,} draws gave every class "
            f"{counted(min_clients, 'client')} ({counted(self.clients, 'client')} × "
            f"{self.per_client} of {self.classes} classes); raise classes_per_client or clients"
            f"{other_remedy}"
        )

    def _draw(self, stream: np.random.RandomState) -> list[Clients]:
        """The clients of every class, in ascending order."""
        all_classes = np.arange(self.classes)
        is_drawn = np.zeros((self.clients, self.classes), dtype=bool)
        order = all_classes.copy()
        for client in range(self.clients):
            order[:] = all_classes
            # RandomState.choice(classes, per_client, replace=False) is equivalent, but slower.
            stream.shuffle(order)
            is_drawn[client, order[: self.per_client]] = True
        return [np.flatnonzero(is_drawn[:, label]) for label in range(self.classes)]


# Slow splits are stored in the cache folder. A Dirichlet split with alpha 0.05 takes minutes.


def cached_split(
    split: Callable[..., Parts], labels: Labels, slow_seconds: float = 1.0, **fields: Any
) -> Parts:
    """``split(labels=labels, **fields)``, from the cache folder if an earlier call was slow.

    The cache key depends on the labels, the fields and the source of the partition's module. Splits
    that depend on other values, and splits that take at most ``slow_seconds``, are not stored. A
    damaged entry is computed again.
    """
    path = _cache_path(split, labels, fields)
    if path is not None:
        stored = _read_split(path, len(labels))
        if stored is not None:
            return stored
    start = time.perf_counter()
    parts = split(labels=labels, **fields)
    is_slow = time.perf_counter() - start > slow_seconds
    if path is not None and is_slow and _are_positions(parts):
        with contextlib.suppress(OSError):
            _write_split(path, parts)
    return parts


def _are_positions(parts: Any) -> bool:
    """Whether parts are arrays of integers. An invalid result of a user's partition is not stored,
    so that the next run reports the error, too.
    """
    if isinstance(parts, ClientSplit):
        return True
    if not isinstance(parts, (Sequence, np.ndarray)):
        return False
    return all(np.asarray(part).dtype.kind in "iu" for part in parts)


def _cache_path(split: Callable[..., Parts], labels: Labels, fields: dict[str, Any]) -> Path | None:
    """The cache file of a split; None if the partition's source cannot be read, or does not
    determine the split.
    """
    function = inspect.unwrap(split)
    # A method depends on its object, and a closure on the variables of the function around it.
    if not inspect.isfunction(function) or function.__closure__ or not is_identified(function):
        return None
    try:
        files = files_of(Path(inspect.getfile(function)))
        source = b"".join(path.read_bytes() for path in files)
    except OSError:
        return None
    name = function.__name__
    key = hashlib.sha256(source)
    key.update(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
    key.update(json.dumps([name, sorted(fields.items())], default=_key_part).encode())
    return cache_folder() / "partitions" / f"{name}-{key.hexdigest()[:24]}.safetensors"


def _key_part(value: Any) -> Any:
    """A field's part of the cache key. An array is known by all of its values, since ``repr`` omits
    most of them in a long array.
    """
    if not hasattr(value, "__array__"):
        return repr(value)
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        return array.tolist()
    return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]


def _read_split(path: Path, examples: int) -> ClientSplit | None:
    """The split in a file; None if the file is missing or damaged."""
    try:
        arrays = load_file(path)
        order = arrays["order"]
        ends = arrays["ends"]
    except (OSError, SafetensorError, KeyError):
        return None
    if len(order) != ends[-1]:
        return None
    if len(order) and (order.min() < 0 or order.max() >= examples):
        return None
    return ClientSplit(order, ends)


def _write_split(path: Path, parts: Parts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    split = ClientSplit.of_parts(parts)
    with replaced_file(path) as temporary:
        save_file({"order": split.positions, "ends": split.ends}, temporary)
