"""Requests and answers as the content of Flower messages: one header, and one array of bytes for
each group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedstill.engines.flower.requests import Request, SiteReply
from fedstill.errors import BadPayload, ConfigError
from fedstill.records import Payload
from fedstill.wire.codec import MAX_ENTRIES, decode, encode

if TYPE_CHECKING:
    from flwr.app import RecordDict

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Flower and Ray as fedstill runs them: they send no reports, and install nothing while they
run.
"""

STAGE, WHOAMI = "train.stage", "query.whoami"
"""The two actions of the app: every stage of every method, and which client a node is."""

_STYPE = "fedstill.payload"


def require_flower() -> None:
    """Import Flower with telemetry, update checks and installs at run time off; ConfigError if it
    is not here.
    """
    os.environ.update(QUIET)
    try:
        import flwr.app  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"engine = 'flower' needs Flower: pip install 'fedstill[flower]' ({error})"
        ) from error


def content(message: Request | SiteReply) -> RecordDict:
    """A request or an answer as a message's content. Equal groups give equal arrays, which Flower
    uploads once.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    payload = message.down if isinstance(message, Request) else message.up
    arrays = {}
    for number, (name, group) in enumerate(payload.items()):
        data = encode(Payload({name: group}))
        arrays[f"{number:06d}"] = Array("uint8", (len(data),), _STYPE, data)
    return RecordDict(
        {"header": ConfigRecord({"json": message.header()}), "groups": ArrayRecord(arrays)}
    )


def header_and_payload(
    records: RecordDict, limit: int, entries: int = MAX_ENTRIES
) -> tuple[str, Payload]:
    """The two halves of a message's content; raises BadPayload for anything else, or more than the
    limits.

    ``limit``: of bytes; ``entries``: of groups and tensors.
    """
    header, groups = records.config_records.get("header"), records.array_records.get("groups")
    text = header.get("json") if header is not None else None
    if groups is None or not isinstance(text, str) or len(records) != 2:
        raise BadPayload("the message is not fedstill's: it holds other records")
    size = sum(len(array.data) for array in groups.values())
    if size > limit:
        raise BadPayload(f"the message has {size} bytes, over the limit of {limit}")
    payload: dict[str, object] = {}
    for key in sorted(groups) if len(groups) <= entries else ():
        one = decode(groups[key].data, limit, min(entries, MAX_ENTRIES))
        if len(one) != 1 or set(one) & set(payload):
            raise BadPayload(f"array {key[:20]!r} does not hold one group of its own")
        payload.update(one)
        entries -= sum(len(group) if isinstance(group, Mapping) else 1 for group in one.values())
    if len(payload) != len(groups) or entries < 0:
        raise BadPayload("the message holds too many groups and tensors")
    return text, Payload(payload)  # type: ignore[arg-type]
