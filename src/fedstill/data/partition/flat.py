"""The parts of all clients in one array with offsets: nothing is made for a client before it is
asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

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
