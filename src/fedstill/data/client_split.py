"""Client splits: the training examples of each client, and their label counts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

Positions = NDArray[np.int64]
"""Positions of examples in a training set."""

RandomStream = np.random.RandomState | np.random.Generator
"""NumPy's legacy generator, or a newer one."""


@dataclass(frozen=True, eq=False)
class ClientSplit(Sequence[Positions]):
    """The positions of each client's examples in the training set.

    All clients share one array, so that a split over many clients is cheap. A client's array is
    only created on access.

    positions: (n,) int64, ordered by client. ends: (clients,) int64, ascending, the end of each
    client's positions.

    >>> [part.tolist() for part in ClientSplit(np.array([7, 5, 6]), np.array([1, 3]))]
    [[7], [5, 6]]
    """

    positions: Positions
    ends: NDArray[np.int64]

    @staticmethod
    def of_parts(parts: Sequence[Positions]) -> ClientSplit:
        """The split in which each client has one of the given arrays."""
        if isinstance(parts, ClientSplit):
            return parts
        arrays = list(parts) or [np.zeros(0, dtype=np.int64)]  # concatenate needs an array
        positions = np.concatenate(arrays).astype(np.int64)
        return ClientSplit(positions, ends_of([len(part) for part in parts]))

    @staticmethod
    def of_owners(positions: Positions, owners: NDArray[np.int64], clients: int) -> ClientSplit:
        """The split in which ``owners`` (n,) are the clients of ``positions`` (n,).

        Each client's positions keep their order.

        >>> split = ClientSplit.of_owners(np.array([7, 5, 6]), np.array([1, 0, 1]), 2)
        >>> [part.tolist() for part in split]
        [[5], [7, 6]]
        """
        by_client = positions[np.argsort(owners, kind="stable")]
        sizes = np.bincount(owners, minlength=clients)
        return ClientSplit(by_client.astype(np.int64), ends_of(sizes))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of examples of each client (clients,)."""
        return np.diff(self.ends, prepend=0)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The client of each of ``positions`` (n,)."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def tensors(self) -> Iterator[Tensor]:
        """The positions of each client as a tensor that shares the array's memory."""
        import torch  # lazy, because readers of runs need no tensors

        positions = torch.from_numpy(self.positions)
        for client in range(len(self)):
            start, end = bounds(self.ends, client)
            yield positions[start:end]

    def with_examples(self, client: int, positions: Positions) -> ClientSplit:
        """The split in which a client has further examples, after its present ones."""
        _, end = bounds(self.ends, client)
        ends = self.ends.copy()
        ends[client:] += len(positions)
        return ClientSplit(np.insert(self.positions, end, positions), ends)

    def shuffle_in_place(self, stream_of: Callable[[int], RandomStream]) -> None:
        """Shuffle each client's examples, one client after another.

        stream_of: the random numbers for a client.
        """
        # Shuffling a single example draws nothing.
        for client in np.flatnonzero(self.sizes > 1).tolist():
            stream_of(client).shuffle(self[client])  # in place, because it is a view

    def label_counts(self, labels: NDArray[Any], classes: int) -> LabelCounts:
        """The label counts of each client, from the labels of all training examples."""
        return LabelCounts.of_labels(labels[self.positions], self.ends, classes)

    def label_table(self, labels: Tensor, classes: int) -> Tensor:
        """The label counts of all clients as a tensor (clients, C) on the CPU."""
        import torch  # lazy, as above

        cells = torch.from_numpy(self.owners) * classes
        cells = cells + labels.cpu()[torch.from_numpy(self.positions)]
        counts = torch.bincount(cells, minlength=len(self) * classes)
        return counts.reshape(len(self), classes)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, client: int) -> Positions: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Positions]: ...
    def __getitem__(self, client: int | slice) -> Positions | Sequence[Positions]:
        if isinstance(client, slice):
            return [self[c] for c in range(len(self))[client]]
        start, end = bounds(self.ends, client)
        return self.positions[start:end]


def ends_of(sizes: ArrayLike) -> NDArray[np.int64]:
    """The end of each client's positions, from the number of positions of each client."""
    return np.cumsum(np.asarray(sizes), dtype=np.int64)


def bounds(ends: NDArray[np.int64], client: int) -> tuple[int, int]:
    """The start and the end of a client's entries. A negative number counts from the last client.

    Raises IndexError for a client that does not exist.
    """
    number = operator.index(client)
    if number < 0:
        number += len(ends)
    if not 0 <= number < len(ends):
        raise IndexError(f"there is no client {client} of {len(ends)}")
    start = 0
    if number:
        start = int(ends[number - 1])
    return start, int(ends[number])


def _occurrences(
    cells: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct numbers in ``cells``, ascending, and their counts.

    cells: numbers from 0 to ``size`` - 1. Counting in a table of this size is faster than sorting,
    unless the table is larger than ``cells``.
    """
    if size > len(cells):
        return np.unique(cells, return_counts=True)
    table = np.bincount(cells, minlength=size)
    occurring = np.flatnonzero(table)
    return occurring, table[occurring]


@dataclass(frozen=True, eq=False)
class LabelCounts(Sequence[list[int]]):
    """Label counts (C,) of each client, stored sparsely, without zeros.

    A table of all clients and classes may not fit into memory, so a client's counts are only
    created on access.

    classes: C. class_ids: ordered by client, ascending for each client. counts: the numbers of
    examples. ends: (clients,), the end of each client's entries.

    >>> LabelCounts.of_labels(np.array([2, 0, 2, 1]), np.array([3, 4]), classes=3)[0]
    [1, 0, 2]
    """

    classes: int
    class_ids: NDArray[np.int64]
    counts: NDArray[Any]
    ends: NDArray[np.int64]

    @staticmethod
    def of_labels(labels: NDArray[Any], ends: NDArray[np.int64], classes: int) -> LabelCounts:
        """From the labels (n,) of all examples, ordered by client, and the end of each client's
        labels.
        """
        owners = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        cells, counts = _occurrences(owners * classes + labels, len(ends) * classes)
        # Without classes there are no cells, and any positive divisor will do.
        divisor = max(classes, 1)
        per_client = np.bincount(cells // divisor, minlength=len(ends))
        return LabelCounts(
            classes=classes,
            class_ids=cells % divisor,
            counts=counts,
            ends=ends_of(per_client),
        )

    @staticmethod
    def of_table(table: Sequence[Sequence[int]], classes: int) -> LabelCounts:
        """From a table (clients, C)."""
        counts = np.asarray(table).reshape(len(table), classes)
        clients, class_ids = np.nonzero(counts)
        per_client = np.bincount(clients, minlength=len(table))
        return LabelCounts(
            classes=classes,
            class_ids=class_ids,
            counts=counts[clients, class_ids],
            ends=ends_of(per_client),
        )

    @property
    def key(self) -> tuple[int, bytes, bytes, bytes]:
        """A hashable key, equal for equal counts."""
        counts = self.counts.astype(np.float64)
        return self.classes, self.class_ids.tobytes(), counts.tobytes(), self.ends.tobytes()

    @property
    def owners(self) -> NDArray[np.int64]:
        """The client of each entry of ``class_ids`` and ``counts``."""
        return np.repeat(np.arange(len(self.ends)), self.classes_held)

    def table(self) -> NDArray[Any]:
        """All counts as one array (clients, C)."""
        table = np.zeros((len(self.ends), self.classes), dtype=self.counts.dtype)
        table[self.owners, self.class_ids] = self.counts
        return table

    @property
    def sizes(self) -> NDArray[np.float64]:
        """The number of examples of each client (clients,)."""
        sizes = np.bincount(self.owners, self.counts, minlength=len(self.ends))
        return sizes.astype(np.float64)

    @property
    def classes_held(self) -> NDArray[np.int64]:
        """The number of classes of each client (clients,)."""
        return np.diff(self.ends, prepend=0)

    def mean_shares(self, among: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The mean over clients of the shares (C,) of classes in a client's examples.

        Only classes in ``among`` (C,) count. Clients without examples of these classes are ignored;
        the shares are NaN if there are no others.

        >>> LabelCounts.of_table([[3, 1], [0, 2], [0, 0]], 2).mean_shares(
        ...     np.array([True, True])
        ... ).tolist()
        [0.375, 0.625]
        """
        owners = self.owners
        counts = self.counts * among[self.class_ids]
        totals = np.bincount(owners, counts, minlength=len(self.ends))
        clients = np.count_nonzero(totals)
        if not clients:
            return np.full(self.classes, np.nan)
        # If a client's total is 0, its counts are 0 as well, and their shares stay 0.
        shares = np.divide(counts, totals[owners], out=np.zeros(len(counts)), where=counts > 0)
        return np.bincount(self.class_ids, shares, minlength=self.classes) / clients

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
        row[self.class_ids[start:end]] = self.counts[start:end]
        return cast(list[int], row.tolist())
