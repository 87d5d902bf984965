"""Which client has which examples: all parts in one array, and label counts by client."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

# The parts of all clients in one array with offsets: nothing is made for a client before it is
# asked for.


Array = TypeVar("Array", NDArray[np.int64], Tensor)


@dataclass(frozen=True, eq=False)
class FlatParts(Sequence[Array], Generic[Array]):
    """A sequence of each client's positions, each a view of one array.

    order: the positions (n,), client after client. ends: where each client's stop in it (clients,),
    int64, ascending.

    >>> [part.tolist() for part in FlatParts(np.array([7, 5, 6]), np.array([1, 3]))]
    [[7], [5, 6]]
    """

    order: Array
    ends: NDArray[np.int64]

    @staticmethod
    def of(parts: Sequence[NDArray[np.int64]]) -> FlatParts[NDArray[np.int64]]:
        """Any parts in one array; those that are, as they are."""
        if isinstance(parts, FlatParts):
            return parts
        empty = [np.zeros(0, dtype=np.int64)]
        return FlatParts(
            np.concatenate([*parts] or empty).astype(np.int64),
            ends_of([len(part) for part in parts]),
        )

    @staticmethod
    def dealt(
        examples: NDArray[np.int64], owners: NDArray[np.int64], clients: int
    ) -> FlatParts[NDArray[np.int64]]:
        """Examples (n,) given to their owners (n,); each client has its own in the order in which
        they stand.

        >>> [part.tolist() for part in FlatParts.dealt(np.array([7, 5, 6]), np.array([1, 0, 1]), 2)]
        [[5], [7, 6]]
        """
        order = examples[np.argsort(owners, kind="stable")]
        return FlatParts(order.astype(np.int64), ends_of(np.bincount(owners, minlength=clients)))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many examples each client has (clients,)."""
        return np.diff(self.ends, prepend=0)

    def tensors(self) -> FlatParts[Tensor]:
        """The same as tensors that share the array's memory."""
        return FlatParts(torch.as_tensor(self.order), self.ends)

    def with_more(self: FlatParts[Tensor], client: int, more: Tensor) -> FlatParts[Tensor]:
        """The parts in which a client has more examples, behind its own."""
        ends, end = self.ends.copy(), int(self.ends[client])
        ends[client:] += len(more)
        return FlatParts(torch.cat([self.order[:end], more, self.order[end:]]), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> Array: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Array]: ...
    def __getitem__(self, client: int | slice) -> Array | Sequence[Array]:
        if isinstance(client, slice):
            return [self[c] for c in range(len(self))[client]]
        start, end = bounds(self.ends, client)
        return self.order[start:end]


def ends_of(sizes: ArrayLike) -> NDArray[np.int64]:
    """Where each part stops, given the sizes of all."""
    return np.cumsum(np.asarray(sizes), dtype=np.int64)


def bounds(ends: NDArray[np.int64], client: int) -> tuple[int, int]:
    """Where a client's part starts and stops; a negative number counts from the end, as in a list.

    Raises IndexError for a client that there is not.
    """
    number = operator.index(client)
    number += len(ends) if number < 0 else 0
    if not 0 <= number < len(ends):
        raise IndexError(f"there is no client {client} of {len(ends)}")
    return int(ends[number - 1]) if number else 0, int(ends[number])


# How a run's data are dealt out: whose examples are where, their labels, and what each client has
# of each class.


@dataclass(frozen=True, eq=False)
class LabelCounts(Sequence[list[int]]):
    """Label counts (C,) of each client, made when they are asked for; only classes that a client
    has are kept.

    classes: C. held: class ids, client after client, each client's ascending; counts: how many
    examples it has of each. ends: where each client's stop in both (clients,).

    >>> LabelCounts.of_labels(np.array([2, 0, 2, 1]), np.array([3, 4]), classes=3)[0]
    [1, 0, 2]
    """

    classes: int
    held: NDArray[np.int64]
    counts: NDArray[Any]
    ends: NDArray[np.int64]

    @staticmethod
    def of_labels(labels: NDArray[Any], ends: NDArray[np.int64], classes: int) -> LabelCounts:
        """From the labels (n,) of all clients' examples, client after client, and where each
        client's stop.
        """
        owners = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        cells, counts = np.unique(owners * classes + labels, return_counts=True)
        per_client = np.bincount(cells // max(classes, 1), minlength=len(ends))
        return LabelCounts(classes, cells % max(classes, 1), counts, ends_of(per_client))

    @staticmethod
    def of_table(table: Sequence[Sequence[int]], classes: int) -> LabelCounts:
        """From a table (clients, C)."""
        counts = np.asarray(table).reshape(len(table), classes)
        clients, held = np.nonzero(counts)
        return LabelCounts(
            classes,
            held,
            counts[clients, held],
            ends_of(np.bincount(clients, minlength=len(table))),
        )

    @property
    def key(self) -> tuple[int, bytes, bytes, bytes]:
        """The same for equal counts."""
        return (
            self.classes,
            self.held.tobytes(),
            self.counts.astype(np.float64).tobytes(),
            self.ends.tobytes(),
        )

    def table(self) -> NDArray[Any]:
        """All of them as one array (clients, C)."""
        table = np.zeros((len(self.ends), self.classes), dtype=self.counts.dtype)
        table[self.owners, self.held] = self.counts
        return table

    @property
    def owners(self) -> NDArray[np.int64]:
        """Which client each entry of ``held`` and ``counts`` is of."""
        return np.repeat(np.arange(len(self.ends)), self.classes_held())

    def sizes(self) -> NDArray[np.float64]:
        """How many examples each client has (clients,)."""
        return np.bincount(self.owners, self.counts, minlength=len(self.ends)).astype(np.float64)

    def classes_held(self) -> NDArray[np.int64]:
        """Of how many classes each client has an example (clients,)."""
        return np.diff(self.ends, prepend=0)

    def mean_shares(self, among: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The shares (C,) that classes have of a client's examples, the mean over clients; of some
        classes (C,) only.

        Clients that have none of these are left out; NaN where that leaves nobody.

        >>> LabelCounts.of_table([[3, 1], [0, 2], [0, 0]], 2).mean_shares(
        ...     np.array([True, True])
        ... ).tolist()
        [0.375, 0.625]
        """
        owners, counts = self.owners, self.counts * among[self.held]
        totals = np.bincount(owners, counts, minlength=len(self.ends))
        shares = np.divide(counts, totals[owners], out=np.zeros(len(counts)), where=counts > 0)
        some = np.count_nonzero(totals)
        sums = np.bincount(self.held, shares, minlength=self.classes)
        return sums / some if some else np.full(self.classes, np.nan)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> list[int]: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[list[int]]: ...
    def __getitem__(self, client: int | slice) -> list[int] | Sequence[list[int]]:
        if isinstance(client, slice):
            return [self[c] for c in range(len(self))[client]]
        start, end = bounds(self.ends, client)
        row = np.zeros(self.classes, dtype=self.counts.dtype)
        row[self.held[start:end]] = self.counts[start:end]
        return cast(list[int], row.tolist())


@dataclass(frozen=True, eq=False)
class DealtOut:
    """A run's split: each client's positions in the training set, and the labels (n,) of these,
    client after client.

    names, networks: where clients have different networks, their names, and the number of each
    client's (clients,).
    """

    parts: FlatParts[NDArray[np.int64]]
    labels: NDArray[Any]
    names: tuple[str, ...] = ()
    networks: NDArray[Any] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def counts(self, classes: int) -> LabelCounts:
        """Label counts by client."""
        return LabelCounts.of_labels(self.labels, self.parts.ends, classes)

    def fits(self, labels: NDArray[Any], clients: int) -> bool:
        """Whether it is a split of examples with these labels over as many clients."""
        order = self.parts.order
        inside = len(order) > 0 and int(order.max()) < len(labels) and len(self.parts) == clients
        return inside and np.array_equal(labels[order], self.labels)


def counts_table(labels: Tensor, parts: Iterable[Tensor], classes: int) -> Tensor:
    """Label counts (clients, C) of a split of examples with these labels (n,), on the CPU."""
    labels = labels.cpu()
    if isinstance(parts, FlatParts):
        owners = torch.from_numpy(np.repeat(np.arange(len(parts)), parts.sizes))
        cells = owners * classes + labels[parts.order]
        return torch.bincount(cells, minlength=len(parts) * classes).reshape(len(parts), classes)
    each = [torch.bincount(labels[part], minlength=classes) for part in parts]
    return torch.stack(each) if each else torch.zeros(0, classes, dtype=torch.int64)
