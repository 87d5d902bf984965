"""Payload: named groups of tensors and scalars, the content of messages, client states and a
state's extras.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from fedstill.core.errors import BadPayload

Tensors = Mapping[str, Tensor]
Scalar = bool | int | float | str
Group = Tensors | Tensor | Scalar


class Payload(Mapping[str, Group]):
    """Named groups: each is a mapping of tensors, a tensor, a number or a string. Messages, client
    states and a state's extras are payloads.

    >>> import torch
    >>> p = Payload(params={"w": torch.zeros(2)}, gini=0.5)
    >>> sorted(p), p.number("gini"), p.nbytes
    (['gini', 'params'], 0.5, 16)
    """

    __slots__ = ("_groups",)
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, groups: Mapping[str, Group] | None = None, /, **keywords: Group) -> None:
        self._groups = MappingProxyType({**(groups or {}), **keywords})

    def __getitem__(self, name: str) -> Group:
        if name not in self._groups:
            raise BadPayload(f"there is no group {name!r}, only {sorted(self._groups)}")
        return self._groups[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The group of that name, or the default."""
        return self._groups.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        return f"Payload({', '.join(self._groups)})"

    @property
    def params(self) -> Tensors:
        """The group ``params``: a model's parameters and buffers by name."""
        return self.tensors("params")

    def tensors(self, name: str) -> Tensors:
        """The mapping of tensors of that name; raises BadPayload for another kind of group."""
        group = self[name]
        if not isinstance(group, Mapping):
            raise BadPayload(f"group {name!r} is a {type(group).__name__}, not named tensors")
        return group

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; raises BadPayload for another kind of group."""
        group = self[name]
        if not isinstance(group, Tensor):
            raise BadPayload(f"group {name!r} is a {type(group).__name__}, not a tensor")
        return group

    def number(self, name: str) -> float:
        """The number of that name; raises BadPayload for another kind of group."""
        group = self[name]
        if isinstance(group, str) or not isinstance(group, (int, float)):
            raise BadPayload(f"group {name!r} is a {type(group).__name__}, not a number")
        return float(group)

    def many(self, name: str) -> dict[int, Tensors]:
        """The groups that ``many`` made under a name, by id.

        >>> import torch
        >>> list(Payload(many("peer", {3: {"w": torch.zeros(1)}})).many("peer"))
        [3]
        """
        prefix = f"{name}."
        suffixes = [g.removeprefix(prefix) for g in self._groups if g.startswith(prefix)]
        ids = sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
        return {i: self.tensors(f"{prefix}{i}") for i in ids}

    @property
    def nbytes(self) -> int:
        """The size of the content: a number counts as 8 bytes, a string as its UTF-8 bytes."""
        return sum(_group_bytes(group) for group in self._groups.values())


NOTHING = Payload()
"""The payload without groups."""

NUMBER_BYTES = 8  # of a number in a payload


class Keep(Enum):
    """The type of ``KEEP``, which is its only value."""

    KEEP = "KEEP"

    def __repr__(self) -> str:
        return self.value


KEEP: Final = Keep.KEEP
"""``ClientWork.end`` returns this in place of a client state that does not change."""


def many(name: str, groups: Mapping[int, Tensors]) -> dict[str, Group]:
    """Groups ``name.ID``, one for each id. A payload can hold several models in this way."""
    return {f"{name}.{i}": groups[i] for i in sorted(groups)}


def _group_bytes(group: Group) -> int:
    if isinstance(group, Tensor):
        return group.numel() * group.element_size()
    if isinstance(group, Mapping):
        return sum(t.numel() * t.element_size() for t in group.values())
    if isinstance(group, str):
        return len(group.encode())
    return NUMBER_BYTES
