"""What the functions of a client's work gave, as the engines take it: anything else names the function and its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedstill.origin import bad_return, of_kind, returned
from fedstill.records import Carry, Payload
from fedstill.work import ClientWork


def carry_of(work: ClientWork, given: object) -> Carry:
    """What ``begin`` gave; raises BadReturn for anything but a carry."""
    return returned(given, Carry, work.begin, "a Carry")


def terms_of(said: Callable[..., object], given: object, batch: int) -> Mapping[str, Tensor]:
    """What ``terms`` or ``ascend`` gave for a batch; raises BadReturn unless it is named tensors, (B,) or () each."""
    if not isinstance(given, Mapping):
        raise bad_return(said, f"gives {of_kind(given)}, not a dict of tensors by name")
    if not given:
        raise bad_return(said, "gives no terms, so there is nothing to train")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise bad_return(said, f"gives {of_kind(value)} as {name!r}, not a tensor")
        if value.shape not in ((), (batch,)):
            raise bad_return(
                said, f"gives {name!r} of shape {tuple(value.shape)}, not ({batch},), a value an example, or ()"
            )
    return given


def sent_and_remembered(work: ClientWork, given: object) -> tuple[Payload, Payload]:
    """What ``end`` gave; raises BadReturn for anything but two payloads."""
    both = given if isinstance(given, tuple) else ()
    if len(both) != 2 or not all(isinstance(one, Payload) for one in both):
        kinds = f"a tuple of {', '.join(map(of_kind, both))}" if both else of_kind(given)
        raise bad_return(work.end, f"gives {kinds}, not two Payloads: what is sent and what is remembered")
    return both


def report_of(work: ClientWork, given: object) -> Mapping[str, Any]:
    """What ``report`` gave; raises BadReturn for anything but a dict."""
    if not isinstance(given, Mapping):
        raise bad_return(work.report, f"gives {of_kind(given)}, not a dict of numbers and words by name")
    return given
