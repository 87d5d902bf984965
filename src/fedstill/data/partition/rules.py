"""Rules for every split: labels and parameters are checked first, no client is empty, no example is
given twice.

Slow splits are cached on disk: a Dirichlet 0.05 split takes minutes to draw and an instant to read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import tempfile
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
from fedstill.core.registry import register
from fedstill.core.user_modules import files_of
from fedstill.data.cache import cache_folder
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


def cached(
    split: Callable[..., Parts], labels: Labels, slow_seconds: float = 1.0, **fields: Any
) -> Parts:
    """``split(labels=labels, **fields)``, read from the cache folder if an earlier call took over
    ``slow_seconds``.

    The key covers the labels, the fields and the source of the split's module, so that an edited
    split is drawn again; a split without readable source is never kept. A damaged or unwritable
    cache counts as none.
    """
    path = _path(split, labels, fields)
    if path is not None and (parts := _read(path, len(labels))) is not None:
        return parts
    started = time.perf_counter()
    parts = split(labels=labels, **fields)
    if path is not None and time.perf_counter() - started > slow_seconds and _are_positions(parts):
        with contextlib.suppress(OSError):
            _write(path, parts)
    return parts


def _are_positions(parts: Any) -> bool:
    """Whether these are arrays of whole numbers; all else of a user's is checked, and refused, each
    time anew.
    """
    if isinstance(parts, ClientSplit):
        return True
    return isinstance(parts, (Sequence, np.ndarray)) and all(
        np.asarray(part).dtype.kind in "iu" for part in parts
    )


def _path(split: Callable[..., Parts], labels: Labels, fields: dict[str, Any]) -> Path | None:
    bare = inspect.unwrap(split)
    try:
        source = b"".join(path.read_bytes() for path in files_of(Path(inspect.getfile(bare))))
    except (TypeError, OSError):
        return None
    name = getattr(bare, "__name__", type(bare).__name__)
    key = hashlib.sha256(source)
    key.update(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
    key.update(json.dumps([name, sorted(fields.items())], default=repr).encode())
    return cache_folder() / "partitions" / f"{name}-{key.hexdigest()[:24]}.safetensors"


def _read(path: Path, examples: int) -> Parts | None:
    try:
        arrays = load_file(path)
        order, ends = arrays["order"], arrays["ends"]
    except (OSError, SafetensorError, KeyError):
        return None
    inside = len(order) == ends[-1] and (
        len(order) == 0 or (order.min() >= 0 and order.max() < examples)
    )
    return ClientSplit(order, ends) if inside else None


def _write(path: Path, parts: Parts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = ClientSplit.of_parts(parts)
    arrays = {"order": drawn.positions, "ends": drawn.ends}
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(arrays, aside)
        Path(aside).replace(path)
    finally:
        Path(aside).unlink(missing_ok=True)
