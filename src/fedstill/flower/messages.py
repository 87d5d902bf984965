"""Requests and replies as the content of Flower messages, and their signatures.

A message has a header and the groups of a payload. The header of a small message contains the
groups. In a large message, each group is an array of bytes. The server of a federation signs its
requests.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedstill.core.codec import MAX_ENTRIES, decode, encoded_parts
from fedstill.core.errors import (
    BadPayload,
    ConfigError,
    FedstillError,
    Refused,
    Topic,
    cut_reason,
    on_one_line,
)
from fedstill.core.files import digest, make_folder, remove, sync_folder
from fedstill.core.process_settings import set_environment
from fedstill.core.records import NOTHING, Payload, Reply, Stage, Tensors
from fedstill.core.reports import is_count, json_value, wrong_report
from fedstill.engines.serial import Version
from fedstill.flower import QUIET, check_flower_installed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from flwr.app import Array, ConfigRecord, Message, RecordDict


# Requests of the server and replies of clients: a JSON header and a payload


MAX_HEADER = 1 << 20
"""The maximum number of characters in the header of a reply."""

MAX_REQUEST = 16 << 20
"""The maximum number of characters in the header of a request. It includes the names, means and
standard deviations of all columns of a table.
"""

START = "start_from"
"""The name of the group with the model that the run starts from."""


@dataclass(frozen=True)
class Request:
    """One stage for one client.

    ``version``: of fedstill. ``config``: the run's resolved configuration as TOML. ``sha``: its
    SHA-256. ``run``: the run's identity. ``memory``: the current version of the client's state
    according to the server; None if the client has no state. ``named``: the state files that the
    server's checkpoints name. The site keeps them; the reply does not depend on them. ``facts``:
    properties of the sites' data on which all sites must agree. ``reply_limit``: the maximum number
    of bytes of the reply, which only the server knows; 0 for the default limit. ``start``: the
    model that the run starts from, if the site may lack it. The facts include its SHA-256, and the
    reply does not depend on whether it is sent again.
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
    reply_limit: int = 0
    start: Tensors = field(default_factory=dict)

    def groups(self) -> Payload:
        """The groups to send: those of the payload, and the model that the run starts from."""
        if not self.start:
            return self.payload
        return Payload({**self.payload, START: self.start})

    def header(self) -> str:
        """Everything except the payload, as JSON.

        Raises ConfigError if it exceeds the limit of the sites.
        """
        names = ("version", "config", "sha", "run", "client", "memory", "facts")
        values = {name: getattr(self, name) for name in names}
        if self.named:
            values["named"] = list(self.named)
        values["stage"] = [getattr(self.stage, name) for name in STAGE_FIELDS]
        text = json.dumps(values, sort_keys=True)
        if len(text) > MAX_REQUEST:
            raise ConfigError(
                f"the description of the run for each site has {len(text):,} characters, over the "
                f"limit of {MAX_REQUEST:,}; use fewer columns (data.columns) or shorter names"
            )
        return text

    def with_payload(self, payload: Payload) -> Request:
        """The same request with another payload."""
        return replace(self, payload=payload)

    def digest(self) -> str:
        """SHA-256 of everything that determines the reply."""
        without_named = replace(self, named=())
        return digest(without_named.header().encode(), *encoded_parts(self.payload))

    @staticmethod
    def of(header: str, payload: Payload) -> Request:
        """Read a request from its header and groups. Raises BadPayload if it is malformed."""
        values = _json(header, MAX_REQUEST)
        run = _typed(values, "run", str)
        if not run.isalnum():
            raise BadPayload("run must be letters and digits")
        start = payload.get(START, {})
        if not isinstance(start, Mapping):
            raise BadPayload(f"{START} is not a model")
        if start:
            groups = {name: group for name, group in payload.items() if name != START}
            payload = Payload(groups)
        return Request(
            version=_typed(values, "version", str),
            config=_typed(values, "config", str),
            sha=_typed(values, "sha", str),
            run=run,
            client=_count(values, "client"),
            stage=_stage(_typed(values, "stage", list)),
            memory=_version(values.get("memory")),
            named=_names(values.get("named", [])),
            facts=_typed(values, "facts", dict),
            payload=payload,
            start=start,
        )


STAGE_FIELDS = ("round", "index", "name", "clients", "view", "sequential")
"""The fields of a stage in the header of a request, in order."""


def _stage(parts: list[Any]) -> Stage:
    """Read the stage in a header. Raises BadPayload if it is malformed."""
    if len(parts) != len(STAGE_FIELDS):
        raise BadPayload(f"stage must have {len(STAGE_FIELDS)} fields")
    values = dict(zip(STAGE_FIELDS, parts, strict=True))
    view: Literal["public", "private"] = "private"
    if values["view"] == "public":
        view = "public"
    return Stage(
        round=_count(values, "round"),
        index=_count(values, "index"),
        name=_typed(values, "name", str),
        clients=tuple(_int(client) for client in _typed(values, "clients", list)),
        view=view,
        sequential=_typed(values, "sequential", bool),
    )


@dataclass(frozen=True)
class SiteReply:
    """The reply of a client to one stage, or the reason why the client failed.

    ``memory``: the version of the client's state after this stage; None if it has no state.
    ``idle``: whether the client has no data in the round's task, which is not a failure.
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
        """Make the reply that a site sends. ``memory``: as in this class."""
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
        """The reply as the federated loop takes it."""
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
        """Everything except the payload, as JSON."""
        names = ("client", "round", "stage", "examples", "metrics", "memory", "failure")
        values = {name: getattr(self, name) for name in names}
        if self.idle:
            values["idle"] = True
        return json.dumps(json_value(values), allow_nan=False)

    @staticmethod
    def of(header: str, content: Payload) -> SiteReply:
        """Read a reply from its header and payload. Raises BadPayload if it is malformed."""
        values = _json(header, MAX_HEADER)
        return SiteReply(
            client=_count(values, "client"),
            round=_count(values, "round"),
            stage=_count(values, "stage"),
            content=content,
            examples=_count(values, "examples"),
            metrics=_metrics(_typed(values, "metrics", dict)),
            memory=_version(values.get("memory")),
            failure=cut_reason(_typed(values, "failure", str)),
            idle=values.get("idle") is True,
        )


def _metrics(report: dict[str, Any]) -> dict[str, Any]:
    """Check a client's report. Raises BadPayload if it is invalid."""
    problem = wrong_report(report)
    if problem:
        raise BadPayload(problem)
    return report


def _json(text: str, limit: int) -> dict[str, Any]:
    """Read the JSON object in a header. Raises BadPayload if it is malformed or too long."""
    if len(text) > limit:
        raise BadPayload(f"a header of {len(text)} characters is over the limit of {limit}")
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"the header is not JSON: {on_one_line(error)}") from error
    if not isinstance(value, dict):
        raise BadPayload("the header is not an object")
    return value


def _finite(text: str) -> float:
    """Read a number in a header. Raises ValueError if it is not finite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


def _typed(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if type(value) is not kind:
        raise BadPayload(f"{name} is missing or not of type {kind.__name__}")
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
        raise BadPayload("named is not a list of file names")
    return tuple(value)


FILE_NAME = re.compile(r"[a-z0-9-][a-z0-9.-]{0,199}")
"""The names of files with a client's state."""


def _version(value: Any) -> Version | None:
    """Read the file name and SHA-256 of a client's state, or None. Raises BadPayload otherwise."""
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(part, str) for part in value):
        raise BadPayload("memory is not a file name and a SHA-256")
    name, sha = value
    if not FILE_NAME.fullmatch(name):
        raise BadPayload(f"memory has an invalid file name, {name[:40]!r}")
    if len(sha) > 64 or not sha.isalnum():
        raise BadPayload("memory has no SHA-256")
    return name, sha


STAGE = "train.stage"
"""The app's action for a stage of a method."""

WHOAMI = "query.whoami"
"""The app's action that returns the client of a node."""

RAISED = 2
"""Flower's error code for an exception in a ClientApp. A retry would raise it again."""

TOO_MANY_ENTRIES = "the message has too many groups and tensors"

HEADER_BYTES = 1 << 20
"""The maximum number of bytes of groups in a header. Flower sends each record and each array
separately, so a small message is faster as a single record.
"""

_STYPE = "fedstill.payload"
_SALTED = "fedstill.salted"
"""The types of arrays: the bytes of a group, without or with ``SALT_BYTES`` random bytes."""

SALT_BYTES = 16
"""The number of random bytes in the header and after each group of a reply.

Flower identifies records and arrays by their SHA-256, and tells a site which of them the server
has. Without random bytes, a site could test guesses of what another site has sent.
"""


def require_flower() -> None:
    """Disable Flower's telemetry, update checks and installs at run time.

    Raises ConfigError if Flower is not installed.
    """
    set_environment(QUIET)
    check_flower_installed()


@dataclass(eq=False)
class _EncodedGroup:
    """A group of a message in encoded parts. ``kind``: the type of its array."""

    parts: list[bytes | memoryview]
    kind: str

    @classmethod
    def of(cls, payload: Payload, name: str, kind: str) -> _EncodedGroup:
        """Encode a group of a payload."""
        return cls(encoded_parts(Payload({name: payload[name]})), kind)

    @property
    def size(self) -> int:
        """The size of the encoded group in bytes."""
        return sum(map(len, self.parts))

    @cached_property
    def array(self) -> Array:
        """An array of the bytes of the group."""
        from flwr.app import Array

        parts = list(self.parts)
        if self.kind == _SALTED:
            parts.append(secrets.token_bytes(SALT_BYTES))
        data = b"".join(parts)
        return Array("uint8", (len(data),), self.kind, data)


@dataclass
class Contents:
    """Makes the contents of messages.

    A group of several requests is encoded once. Its arrays are equal, so Flower uploads it once.
    """

    # Keys have the identity of a group. The requests keep the group alive.
    _groups: dict[tuple[str, int], _EncodedGroup] = field(default_factory=dict)

    def of_request(self, request: Request) -> RecordDict:
        """The content of a message with a request."""
        groups = request.groups()
        return _records({"json": request.header()}, [self._group(groups, name) for name in groups])

    def _group(self, payload: Payload, name: str) -> _EncodedGroup:
        key = (name, id(payload[name]))
        if key not in self._groups:
            self._groups[key] = _EncodedGroup.of(payload, name, _STYPE)
        return self._groups[key]


def answer_content(answer: SiteReply) -> RecordDict:
    """The content of a message with a reply."""
    payload = answer.content
    header = {"json": answer.header(), "salt": secrets.token_bytes(SALT_BYTES)}
    return _records(header, [_EncodedGroup.of(payload, name, _SALTED) for name in payload])


def _records(header: dict[str, Any], groups: Sequence[_EncodedGroup]) -> RecordDict:
    """A header and encoded groups as records."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    if sum(group.size for group in groups) <= HEADER_BYTES:
        header["groups"] = [b"".join(group.parts) for group in groups]
        return RecordDict({"header": ConfigRecord(header)})

    arrays = ArrayRecord()
    for number, group in enumerate(groups):
        arrays[f"{number:06d}"] = group.array
    return RecordDict({"header": ConfigRecord(header), "groups": arrays})


def header_and_payload(
    records: RecordDict, limit: int, entries: int = MAX_ENTRIES
) -> tuple[str, Payload]:
    """The header and the payload of a message.

    ``limit``: the maximum number of bytes. ``entries``: the maximum number of groups and tensors.
    Raises BadPayload for other contents, and for more than the limits.
    """
    header = config_record(records, "header")
    text = None
    if header is not None:
        text = header.get("json")
    if header is None or not isinstance(text, str):
        raise BadPayload("this is not a message of fedstill: it has no header")
    encoded = _encoded_groups(records, header)
    size = sum(len(data) for data in encoded)
    if size > limit:
        raise BadPayload(f"the message has {size} bytes, over the limit of {limit}")
    if len(encoded) > entries:
        raise BadPayload(TOO_MANY_ENTRIES)

    payload: dict[str, Any] = {}
    for number, data in enumerate(encoded):
        decoded = decode(data, limit, min(entries, MAX_ENTRIES))
        if len(decoded) != 1 or set(decoded) & set(payload):
            raise BadPayload(f"part {number} is not a single new group")
        payload.update(decoded)
        entries -= sum(map(_entries, decoded.values()))
    if entries < 0:
        raise BadPayload(TOO_MANY_ENTRIES)
    return text, Payload(payload)


def config_record(records: RecordDict, name: str) -> ConfigRecord | None:
    """The config record with a name; None if there is none.

    Flower's views by type, such as ``config_records``, are not used: they form reference cycles,
    which keep a message and its arrays in memory.
    """
    from flwr.app import ConfigRecord

    record = records.get(name)
    if isinstance(record, ConfigRecord):
        return record
    return None


def _encoded_groups(records: RecordDict, header: Mapping[str, Any]) -> Sequence[bytes | memoryview]:
    """The bytes of each group, from the header or from arrays, without a copy.

    Raises BadPayload for other records.
    """
    from flwr.app import ArrayRecord

    arrays = records.get("groups")
    in_header: Any = header.get("groups")
    is_small = isinstance(in_header, list) and all(isinstance(data, bytes) for data in in_header)
    if is_small and len(records) == 1:
        return list(in_header)
    if in_header is None and isinstance(arrays, ArrayRecord) and len(records) == 2:
        return [_without_salt(arrays[key]) for key in sorted(arrays)]
    raise BadPayload("this is not a message of fedstill: it has other records")


def _without_salt(array: Array) -> memoryview:
    """The bytes of a group in an array."""
    data = memoryview(array.data)
    if array.stype == _SALTED:
        return data[:-SALT_BYTES]
    return data


def _entries(group: object) -> int:
    """The number of entries of a group, towards the limit of a message."""
    if isinstance(group, Mapping):
        return len(group)
    return 1


# Instructions: messages with a signature of the federation's server. A site obeys no other message.


SIGNED = "signed"
"""The name of the record with the server's signature."""

PURPOSE = "fedstill instruction"
"""A constant in each signed statement. The key signs no other statements."""

CLOCK_SECONDS = 300.0
"""The maximum difference between the clocks of server and site."""

KEPT_SECONDS = 86_400.0
"""The time for which a site remembers an expired instruction."""

USED_NAME = re.compile(r"(\d{1,12})-[0-9a-f]{32}")
"""The name of the file for a used instruction: its time of expiry and its number."""


def sign_all(messages: Sequence[Message], run: int, key: Ed25519PrivateKey) -> None:
    """Add the server's signature to messages for sites. Shared bytes are hashed once.

    run: the run's number in Flower.
    """
    digests: Digests = {}
    for message in messages:
        sign(message, run, key, digests)


def sign(
    message: Message, run: int, key: Ed25519PrivateKey, digests: Digests | None = None
) -> None:
    """Add the server's signature to a message for a site.

    It covers the run, the site's node, the kind and the content of the message, and its time of
    expiry. A random number ensures that it is used once. run: the run's number in Flower. digests:
    as in ``content_digest``.
    """
    from flwr.app import ConfigRecord

    about = message.metadata
    message.content.pop(SIGNED, None)
    statement = {
        "purpose": PURPOSE,
        "run": run,
        "node": about.dst_node_id,
        "kind": about.message_type,
        "content": content_digest(message.content, digests),
        "until": round(time.time() + about.ttl, 3),
        "number": secrets.token_hex(16),
    }
    text = json.dumps(statement, sort_keys=True)
    signature = ConfigRecord({"statement": text, "signature": key.sign(text.encode())})
    message.content[SIGNED] = signature


Digests = dict[int, str]
"""SHA-256 digests by the identity of the bytes."""


def content_digest(records: RecordDict, digests: Digests | None = None) -> str:
    """SHA-256 of the content of a message: its configs and arrays, with names, types and shapes.

    digests: known digests of the arrays' data. New ones are added. They are valid only as long as
    the arrays exist.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    if digests is None:
        digests = {}
    configs = []
    arrays = []
    for name, record in records.items():
        if isinstance(record, ConfigRecord):
            configs.append([name, sorted(record.items())])
        elif isinstance(record, ArrayRecord):
            for key, array in record.items():
                arrays.append([name, *_array_digest(key, array, digests)])
    content = json.dumps([sorted(configs), sorted(arrays)], default=bytes.hex)
    return digest(content.encode())


def _array_digest(key: str, array: Array, digests: Digests) -> list[Any]:
    """The name, type and shape of an array, and the SHA-256 of its data."""
    data = array.data
    if id(data) not in digests:
        digests[id(data)] = digest(data)
    return [key, array.dtype, list(array.shape), array.stype, digests[id(data)]]


@dataclass(frozen=True)
class InstructionCheck:
    """Checks at a site that a message is an instruction of the federation's server.

    ``server_key``: the file with the server's public key, which the site received with its own key.
    ``used``: a folder with an empty file for each executed instruction.
    """

    server_key: Path
    used: Path

    def __call__(self, message: Message, node: int) -> None:
        """Remove and check the signature of a message. Raises Refused unless it is the server's.

        The signature must match this site, run, kind and content. It must not have expired or have
        been used before. node: the number of this site in Flower.
        """
        from flwr.app import MetricRecord

        if not message.has_content():
            raise Refused("the message has no content", "signature")
        statement = self._signed_statement(message.content.pop(SIGNED, None))
        about = message.metadata
        expected = {
            "purpose": PURPOSE,
            "run": about.run_id,
            "node": node,
            "kind": about.message_type,
            "content": content_digest(message.content),
        }
        for name, value in expected.items():
            if statement.get(name) != value:
                raise Refused(f"the signed {name} differs from that of the message", "signature")
        records = message.content.values()
        has_metrics = any(isinstance(record, MetricRecord) for record in records)
        if about.dst_node_id != node or has_metrics:
            raise Refused("the message is for another site, or holds metrics", "signature")
        if time.time() > statement["until"] + CLOCK_SECONDS:
            raise Refused("the instruction has expired, or a clock is wrong", "signature")
        self._use(float(statement["until"]), str(statement["number"]))

    def _signed_statement(self, signature: Any) -> dict[str, Any]:
        """The signed statement. Raises Refused unless the server has signed it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            key = load_pem_public_key(self.server_key.read_bytes())
        except (OSError, ValueError) as error:
            raise Refused(f"{self.server_key} is not a public key: {error}", "signature") from error
        if not isinstance(key, Ed25519PublicKey) or not isinstance(signature, Mapping):
            raise Refused("the message has no signature of the server", "signature")
        try:
            text = str(signature["statement"])
            key.verify(signature["signature"], text.encode())
        except (KeyError, TypeError, InvalidSignature) as error:
            raise Refused(
                "the signature of the message is not the server's", "signature"
            ) from error
        statement: dict[str, Any] = json.loads(text)
        return statement

    def _use(self, until: float, number: str) -> None:
        """Record that an instruction is used. Raises Refused if it was used before."""
        make_folder(self.used)
        for path in self.used.iterdir():
            note = USED_NAME.fullmatch(path.name)
            if note is not None and int(note[1]) < time.time() - KEPT_SECONDS:
                remove(path)
        try:
            (self.used / f"{until:.0f}-{number}").touch(exist_ok=False)
        except FileExistsError:
            raise Refused("the instruction was executed before", "signature") from None
        sync_folder(self.used)


# Reasons that leave a site


PUBLIC_REASONS: Mapping[Topic, str] = {
    "accept": (
        "the site has not accepted this configuration: its operator adds the SHA-256 to "
        "accept in site.toml"
    ),
    "app": "the app is not the one that fedstill writes",
    "budget": "the request would exceed privacy.epsilon at the site",
    "classes": "the site has a class that the run does not list; compare the classes",
    "columns": "the site's columns are not those of the run; compare data.columns",
    "config": "the configuration does not work at the site: install the same versions there",
    "data": "the site's data do not fit the run, or the site has none",
    "files": (
        "the configuration has the site read files that its site.toml does not list under "
        "files; or set flower.data = 'sites'"
    ),
    "imports": "the configuration names code that the site's site.toml does not list under imports",
    "limit": (
        "the site has refused too many different requests and answers no new ones: its "
        "operator may delete refused.json in its memory folder"
    ),
    "measure": "the site takes part in no run with a measure or metric of this configuration",
    "noise": "the site has answered this stage with noise, and answers no other request for it",
    "public": "the site needs a copy of the run's public set: set public in its site.toml",
    "range": (
        "a change of the site's model is too large for the secure sum: raise "
        "privacy.secure_range or lower plan.lr; or lower privacy.secure_bits"
    ),
    "repeated": (
        "the site has taken part in a secure sum of another run on the same data: its "
        "operator may set repeat_sums in site.toml"
    ),
    "request": "the request is malformed, or does not belong to this run",
    "shape": "the site's examples do not have the run's kind, shape or vocabulary",
    "signature": (
        "the message is no new instruction to this site by the server whose key it has: "
        "its operator may compare server.pub with the server's signing.pub, and the clocks"
    ),
    "start": (
        "the site lacks the model that the run starts from, or this model does not fit the run"
    ),
    "state": "the site's state of this run is lost or damaged",
    "stage": "the stage is not in the run's schedule, or the run does not need it",
    "sum": "the request is not the next step of a secure sum that the site takes part in",
    "tasks": (
        "the site's tasks are not those of the run: see stream.kind, and tasks in its site.toml"
    ),
    "tokenizer": (
        "the site needs a copy of the run's tokenizer file: set tokenizer in its site.toml"
    ),
    "version": "the site has another version of fedstill than the server: install the same",
    "work": "the work failed at the site",
}
"""All reasons that leave a site. They are constants, because values in a reason, such as a class
name, a count or a path, would reveal data.
"""

SEE_LOG = "; the site's log has the details"


def public_reason(topic: Topic) -> str:
    """The reason that leaves a site for an error or a refusal about a topic."""
    return PUBLIC_REASONS[topic] + SEE_LOG


def topic_of(error: BaseException) -> Topic:
    """The topic of an error at a site."""
    if isinstance(error, FedstillError):
        return error.topic
    return "work"


def error_text(error: BaseException) -> str:
    """The text of an error, with its type unless it is an error of fedstill."""
    if isinstance(error, FedstillError):
        return str(error)
    return on_one_line(error)
