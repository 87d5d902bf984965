"""What several clients start with, as one carry; and which clients can be stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.engines.how import on_device
from fedstill.records import Carry, ModelSpec, View


@dataclass(frozen=True)
class StackedCarry:
    """The carries of K clients of one structure (``Structures``) as one.

    ``carry``: each tensor has a leading client axis (K, ...), except those that are one object for
    all clients; a number that differs is a tensor (K,). ``axes``: a carry of the same form that
    says for each value which axis is the clients', 0, or None where there is none. Neither says
    which examples a client trains on (``Carry.only``).
    """

    carry: Carry
    axes: Carry

    @staticmethod
    def of(carries: Sequence[Carry], device: torch.device) -> StackedCarry:
        """The carries as one, on a device."""
        values, axes = _stacked([parts(c) for c in carries])
        return StackedCarry(Carry(**on_device(values, device)), Carry(**axes))

    def of_client(self, k: int) -> Carry:
        """The k-th client's own."""
        return Carry(**_own(parts(self.carry), parts(self.axes), k))


def parts(carry: Carry) -> dict[str, Any]:
    """What of a carry is stacked, by name: ``vmap`` looks into dictionaries, not into records."""
    return {
        name: getattr(carry, name) for name in ("params", "teachers", "trace", "constants", "head")
    }


def shared(axes: Any) -> bool:
    """Whether nothing in a value has a client axis."""
    if isinstance(axes, (Mapping, tuple)):
        return all(map(shared, axes.values() if isinstance(axes, Mapping) else axes))
    return axes is None


class Structures:
    """What clients must share to be stacked: equal for two clients if their tensors fit on each
    other.

    An object that was sent to many is examined once. It is found by its id, and kept, so that the
    id stays unique.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Mapping[Any, Any], Any]] = {}

    def of(self, carry: Carry, view: View) -> Any:
        """The structure of one client."""
        return view.model, *map(self._of, (*parts(carry).values(), carry.only))

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        if isinstance(value, Mapping):
            if id(value) not in self._known:
                self._known[id(value)] = (
                    value,
                    tuple((k, self._of(value[k])) for k in sorted(value)),
                )
            return self._known[id(value)][1]
        if isinstance(value, tuple):
            return tuple(map(self._of, value))
        if isinstance(value, (bool, int, float)):
            return type(value)
        return value if isinstance(value, (str, ModelSpec, type(None))) else id(value)


def _stacked(values: Sequence[Any]) -> tuple[Any, Any]:
    """Values of one structure as one, and for each in it which axis is the clients': 0, or None if
    it is shared.
    """
    first = values[0]
    if all(v is first for v in values) and not isinstance(first, (Mapping, tuple)):
        return first, None  # no copies of what was sent to all
    if isinstance(first, Tensor):
        return torch.stack([v.detach() for v in values]), 0
    if isinstance(first, Mapping):
        pairs = {k: _stacked([v[k] for v in values]) for k in first}
        return {k: v for k, (v, _) in pairs.items()}, {k: axis for k, (_, axis) in pairs.items()}
    if isinstance(first, tuple):
        both = [_stacked(each) for each in zip(*values, strict=True)]
        return tuple(v for v, _ in both), tuple(axis for _, axis in both)
    if all(v == first for v in values):
        return first, None
    return torch.tensor(values, dtype=torch.float64 if isinstance(first, float) else None), 0


def _own(value: Any, axes: Any, k: int) -> Any:
    """The k-th client's part of a stacked value."""
    if isinstance(axes, Mapping):
        return {name: _own(value[name], axis, k) for name, axis in axes.items()}
    if isinstance(axes, tuple):
        return tuple(_own(v, axis, k) for v, axis in zip(value, axes, strict=True))
    return value if axes is None else value[k]
