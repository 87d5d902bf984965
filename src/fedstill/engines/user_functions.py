"""Checks around a user's functions: they must not change tensors that others share, and must return
what the engines expect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedstill.core.checks import bad_return, users_definition
from fedstill.core.errors import ChangedInPlace
from fedstill.core.fields import kind_text
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Keep, Payload


class _Guarded(NamedTuple):
    """A tensor with its name, and torch's count of the writes to it when the guard began."""

    name: str
    tensor: Tensor
    version: int


class MutationGuard:
    """Notices when a user's code writes into tensors that are shared with others.

    Nothing is copied: torch counts the writes to each tensor.
    """

    def __init__(self, value: Any) -> None:
        """value: a tensor, or mappings and sequences of tensors."""
        self._guarded = [
            _Guarded(name, tensor, tensor._version) for name, tensor in _named_tensors(value, "")
        ]

    def check(self, function: Callable[..., Any], client: int | None = None) -> None:
        """Raises ChangedInPlace if a tensor was written into. The error names the function or class
        that was called, and the client.
        """
        for guarded in self._guarded:
            if guarded.tensor._version != guarded.version:
                raise ChangedInPlace(_changed_in_place(guarded.name, function, client))


def _changed_in_place(name: str, function: Callable[..., Any], client: int | None) -> str:
    place = ""
    if client == SERVER:
        place = " at the server"
    elif client is not None:
        place = f" at client {client}"
    message = (
        f"{function.__qualname__} writes into {name}{place}, which others share: make a new tensor "
        "(x + 1, not x.add_(1)), or change x.clone()"
    )
    line = users_definition(function)
    if line:
        message += f" ({line})"
    return message


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whose writes torch counts, with its name."""
    if isinstance(value, Tensor):
        # Torch itself forbids writes to inference tensors, and does not count them.
        if not value.is_inference():
            yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    prefix = f"{name}." if name else ""
    for key, item in items:
        yield from _named_tensors(item, f"{prefix}{key}")


def terms_of(function: Callable[..., object], value: object, batch: int) -> Mapping[str, Tensor]:
    """The return value of ``terms`` or ``ascent_terms`` for a batch. Raises BadReturn if it is not
    a mapping of names to tensors of shape (batch,) or ().
    """
    if not isinstance(value, Mapping):
        raise bad_return(function, f"gives {kind_text(value)}, not a dict of tensors by name")
    if not value:
        raise bad_return(function, "gives no terms, so there is nothing to train")
    for name, term in value.items():
        if not isinstance(term, Tensor):
            raise bad_return(function, f"gives {kind_text(term)} as {name!r}, not a tensor")
        if term.shape not in ((), (batch,)):
            shape = tuple(term.shape)
            raise bad_return(
                function,
                f"gives {name!r} of shape {shape}, not ({batch},), a value an example, or ()",
            )
    return value


def sent_and_remembered(work: ClientWork, given: object) -> tuple[Payload, Payload | Keep]:
    """What ``end`` gave; raises BadReturn for anything but two payloads, the second perhaps
    ``KEEP``.
    """
    if isinstance(given, tuple) and len(given) == 2:
        content, client_state = given
        if isinstance(content, Payload) and isinstance(client_state, (Payload, Keep)):
            return content, client_state
    kinds = kind_text(given)
    if isinstance(given, tuple) and given:
        kinds = f"a tuple of {', '.join(map(kind_text, given))}"
    raise bad_return(
        work.end, f"gives {kinds}, not two Payloads: what is sent and what is remembered"
    )


def journal_fields(
    function: Callable[..., object], value: object, reserved: Collection[str] = ()
) -> dict[str, Any]:
    """The return value of ``report`` or of a measure, in a form that a journal can hold: numbers of
    NumPy and torch become Python's.

    reserved: names of fields that belong to the run. Raises BadReturn for one of them, for anything
    but a mapping, and for values that a journal cannot hold.
    """
    if not isinstance(value, Mapping):
        raise bad_return(
            function, f"gives {kind_text(value)}, not a dict of numbers and words by name"
        )
    for name in value:
        if not isinstance(name, str):
            raise bad_return(function, f"gives a field named {name!r:.40}; a name is a text")
        if name in reserved:
            raise bad_return(
                function, f"gives {name!r}, which is a field of the run's own; choose another name"
            )
    return {name: _plain(item, function, name) for name, item in value.items()}


def _plain(value: object, function: Callable[..., object], name: str) -> Any:
    """A value made of Python's numbers, texts, lists and dictionaries."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, function, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, function, name) for item in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _plain(value.tolist(), function, name)
    raise bad_return(
        function,
        f"gives {kind_text(value)} as {name!r}, not numbers, words, or lists and tables of them",
    )
