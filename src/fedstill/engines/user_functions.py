"""Checks of a user's functions: they change no shared tensor and return legal values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.core.errors import ChangedInPlace
from fedstill.core.records import Payload, TrainingStart
from fedstill.core.user_code import bad_return, definition, of_kind, returned
from fedstill.core.work import ClientWork

# Tensors that are handed to a user's code while others have them too: nobody may write into them.


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


# What functions of a client's work and of measures gave; anything but what is asked for names the
# function.


def carry_of(work: ClientWork, given: object) -> TrainingStart:
    """What ``begin`` gave; raises BadReturn for anything but a carry."""
    return returned(given, TrainingStart, work.begin, "a TrainingStart")


def terms_of(said: Callable[..., object], given: object, batch: int) -> Mapping[str, Tensor]:
    """What ``terms`` or ``ascent_terms`` gave for a batch; raises BadReturn unless it is named
    tensors, (B,) or () each.
    """
    if not isinstance(given, Mapping):
        raise bad_return(said, f"gives {of_kind(given)}, not a dict of tensors by name")
    if not given:
        raise bad_return(said, "gives no terms, so there is nothing to train")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise bad_return(said, f"gives {of_kind(value)} as {name!r}, not a tensor")
        if value.shape not in ((), (batch,)):
            raise bad_return(
                said,
                f"gives {name!r} of shape {tuple(value.shape)}, not ({batch},), a value an "
                "example, or ()",
            )
    return given


def sent_and_remembered(work: ClientWork, given: object) -> tuple[Payload, Payload]:
    """What ``end`` gave; raises BadReturn for anything but two payloads."""
    both = given if isinstance(given, tuple) else ()
    if len(both) != 2 or not all(isinstance(one, Payload) for one in both):
        kinds = f"a tuple of {', '.join(map(of_kind, both))}" if both else of_kind(given)
        raise bad_return(
            work.end, f"gives {kinds}, not two Payloads: what is sent and what is remembered"
        )
    return both


def journal_fields(
    said: Callable[..., object], given: object, taken: Collection[str] = ()
) -> dict[str, Any]:
    """What ``report`` or a measure's function gave, as a journal holds it; numbers of NumPy and
    torch become Python's.

    taken: names of fields that are the run's own. Raises BadReturn for one of them, for anything
    but a dict, and for what no journal can hold.
    """
    if not isinstance(given, Mapping):
        raise bad_return(said, f"gives {of_kind(given)}, not a dict of numbers and words by name")
    for name in given:
        if not isinstance(name, str):
            raise bad_return(said, f"gives a field named {name!r:.40}; a name is a text")
        if name in taken:
            raise bad_return(
                said, f"gives {name!r}, which is a field of the run's own; choose another name"
            )
    return {name: _plain(said, name, value) for name, value in given.items()}


def _plain(said: Callable[..., object], name: str, value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(said, name, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(said, name, v) for v in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _plain(said, name, value.tolist())
    raise bad_return(
        said,
        f"gives {of_kind(value)} as {name!r}, and not numbers, words, or lists and tables of them",
    )
