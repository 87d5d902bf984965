"""Tensors that are handed to a user's code while others have them too: nobody may write into
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fedstill.errors import ChangedInPlace
from fedstill.origin import definition


class Lent:
    """Tensors as they are when they are handed out. Torch counts what is written into each; nothing
    is copied.
    """

    def __init__(self, what: Any) -> None:
        self._then = [(name, tensor, tensor._version) for name, tensor in _tensors(what, "")]

    def check(self, by: Callable[..., Any], client: int | None = None) -> None:
        """Raises ChangedInPlace, naming the function or class and the client, if one was written
        into.
        """
        for name, tensor, version in self._then:
            if tensor._version != version:
                where = definition(by)
                who = (
                    ""
                    if client is None
                    else " at the server"
                    if client == -1
                    else f" at client {client}"
                )
                raise ChangedInPlace(
                    f"{by.__qualname__} writes into {name}{who}, which others share: make a new "
                    "tensor "
                    "(x + 1, not x.add_(1)), or change x.clone()" + (f" ({where})" if where else "")
                )


def _tensors(what: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that counts what is written into it, with its name."""
    if isinstance(what, Tensor):
        if not what.is_inference():  # torch itself refuses to write into these
            yield name, what
    elif isinstance(what, (Mapping, list, tuple)):
        for key, value in what.items() if isinstance(what, Mapping) else enumerate(what):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
