"""Requests and answers as the content of Flower messages: one header, and one array of bytes for
each group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedstill.core.codec import MAX_ENTRIES, decode, encode
from fedstill.core.errors import BadPayload, ConfigError, cut_reason, on_one_line
from fedstill.core.files import digest
from fedstill.core.process_settings import set_environment
from fedstill.core.records import NOTHING, Payload, Reply, Stage
from fedstill.core.reports import is_count, json_value, wrong_report
from fedstill.engines.serial import Version

if TYPE_CHECKING:
    from flwr.app import RecordDict


# What the server asks of a client for one stage, and what the client answers: a JSON header beside
# a payload.


MAX_HEADER = 1 << 20
"""The most characters of an answer's header."""

MAX_REQUEST = 16 << 20
"""The most characters of a request's header, which holds the names, means and spreads of all
columns of a table.
"""


@dataclass(frozen=True)
class Request:
    """One stage for one client.

    ``version``: fedstill's. ``config``: the run's resolved configuration as TOML, ``sha``: its
    SHA-256. ``run``: the run's identity. ``memory``: which of the client's memories the server
    counts as current; None: it has none. ``named``: the files of memories that the server's
    checkpoints name, which the site keeps; the answer does not depend on them.
    ``facts``: what all sites must agree on about data that only they see.
    """

    version: str
    config: str
    sha: str
    run: str
    client: int
    stage: Stage
    memory: Version | None = None
    named: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    payload: Payload = NOTHING

    def header(self) -> str:
        """Everything but the payload, as JSON; raises ConfigError where no site would read it."""
        s = self.stage
        stage = [s.round, s.index, s.name, list(s.clients), s.view, s.sequential]
        values = {
            k: getattr(self, k)
            for k in ("version", "config", "sha", "run", "client", "memory", "facts")
        }
        if self.named:
            values["named"] = list(self.named)
        text = json.dumps({**values, "stage": stage}, sort_keys=True)
        if len(text) > MAX_REQUEST:
            raise ConfigError(
                f"what each site is told of the run takes {len(text):,} characters, over the limit "
                f"of {MAX_REQUEST:,}; "
                "give it fewer columns (data.columns), or shorter names"
            )
        return text

    def with_payload(self, payload: Payload) -> Request:
        """The same request with another payload."""
        return replace(self, payload=payload)

    def digest(self) -> str:
        """SHA-256 of all that the answer depends on: the same question has the same answer."""
        question = replace(self, named=())
        return digest(question.header().encode() + encode(self.payload))

    @staticmethod
    def of(header: str, payload: Payload) -> Request:
        """The request in a header and a payload; raises BadPayload for what is none."""
        h = _json(header, MAX_REQUEST)
        stage = _typed(h, "stage", list)
        if len(stage) != 6:
            raise BadPayload("stage does not have six parts")
        names = dict(
            zip(("round", "index", "name", "clients", "view", "sequential"), stage, strict=True)
        )
        texts = {k: _typed(h, k, str) for k in ("version", "config", "sha", "run")}
        if not texts["run"].isalnum():
            raise BadPayload("run must be letters and digits")
        where = Stage(
            _count(names, "round"),
            _count(names, "index"),
            _typed(names, "name", str),
            tuple(_int(c) for c in _typed(names, "clients", list)),
            "public" if names["view"] == "public" else "private",
            _typed(names, "sequential", bool),
        )
        return Request(
            **texts,
            client=_count(h, "client"),
            stage=where,
            memory=_version(h.get("memory")),
            named=_names(h.get("named", [])),
            facts=_typed(h, "facts", dict),
            payload=payload,
        )


@dataclass(frozen=True)
class SiteReply:
    """One client's work on one stage, or why there is none; ``memory``: what it remembers of it,
    None for nothing.

    ``idle``: it has no data in the round's task, which is no failure.
    """

    client: int
    round: int
    stage: int
    content: Payload = NOTHING
    examples: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    memory: Version | None = None
    failure: str = ""
    idle: bool = False

    @staticmethod
    def from_reply(reply: Reply, memory: Version | None) -> SiteReply:
        """A reply that leaves a site, with the version of the memory that it leaves there."""
        return SiteReply(
            client=reply.client,
            round=reply.round,
            stage=reply.stage,
            content=reply.content,
            examples=reply.examples,
            metrics=reply.metrics,
            memory=memory,
            failure=reply.failure,
            idle=reply.idle,
        )

    def reply(self) -> Reply:
        """The reply in this answer."""
        return Reply(
            client=self.client,
            content=self.content,
            examples=self.examples,
            metrics=self.metrics,
            round=self.round,
            stage=self.stage,
            failure=self.failure,
            idle=self.idle,
        )

    def header(self) -> str:
        """Everything but the payload, as JSON."""
        names = ("client", "round", "stage", "examples", "metrics", "memory", "failure")
        idle = {"idle": True} if self.idle else {}
        return json.dumps(
            json_value({**{k: getattr(self, k) for k in names}, **idle}), allow_nan=False
        )

    @staticmethod
    def of(header: str, content: Payload) -> SiteReply:
        """The answer in a header and a payload; raises BadPayload for what is none."""
        h = _json(header, MAX_HEADER)
        return SiteReply(
            client=_count(h, "client"),
            round=_count(h, "round"),
            stage=_count(h, "stage"),
            content=content,
            examples=_count(h, "examples"),
            metrics=_metrics(_typed(h, "metrics", dict)),
            memory=_version(h.get("memory")),
            failure=cut_reason(_typed(h, "failure", str)),
            idle=h.get("idle") is True,
        )


def _metrics(given: dict[str, Any]) -> dict[str, Any]:
    if bad := wrong_report(given):
        raise BadPayload(bad)
    return given


def _json(text: str, most: int) -> dict[str, Any]:
    if len(text) > most:
        raise BadPayload(f"a header of {len(text)} characters is over the limit of {most}")
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"the header is not JSON: {on_one_line(error)}") from error
    if not isinstance(value, dict):
        raise BadPayload("the header is not an object")
    return value


def _finite(text: str) -> float:
    """A number in a header; raises ValueError for one that is not finite."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is not finite")
    return value


def _typed(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if type(value) is not kind:
        raise BadPayload(f"{name} is missing, or no {kind.__name__}")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise BadPayload(f"{str(value)[:40]!r} is not a whole number")
    return value


def _count(values: Mapping[str, Any], name: str) -> int:
    value = _int(values.get(name))
    if not is_count(value):
        raise BadPayload(f"{name} is out of range")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadPayload("named is no list of file names")
    return tuple(value)


def _version(value: Any) -> Version | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)):
        raise BadPayload("memory is no file name and SHA-256")
    name, sha = value
    if (
        len(name) > 200
        or not set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
        or name.startswith(".")
    ):
        raise BadPayload(f"memory has a strange name, {name[:40]!r}")
    if len(sha) > 64 or not sha.isalnum():
        raise BadPayload("memory has no SHA-256")
    return name, sha


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
    set_environment(QUIET)
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

    payload = message.payload if isinstance(message, Request) else message.content
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
