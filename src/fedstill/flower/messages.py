"""Requests and answers as the content of Flower messages: one header, which holds the groups of a
small message, and one array of bytes for each group of a large one. A federation's server signs its
requests.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


# Requests of the server and answers of clients: a JSON header beside a payload


MAX_HEADER = 1 << 20
"""The most characters of an answer's header."""

MAX_REQUEST = 16 << 20
"""The most characters of a request's header, which holds the names, means and spreads of all
columns of a table.
"""

START = "start_from"
"""The group of a request that holds the model which the run starts from."""


@dataclass(frozen=True)
class Request:
    """One stage for one client.

    ``version``: of fedstill. ``config``: the run's resolved configuration as TOML. ``sha``: its
    SHA-256. ``run``: the run's identity. ``memory``: the version of the client's state that the
    server counts as current; None: it has none. ``named``: the files of states that the server's
    checkpoints name; the site keeps them, and the answer does not depend on them. ``facts``: what
    all sites must agree on about data that only they see. ``reply_limit``: the most bytes of the
    reply, which the server alone knows; 0: no limit of its own. ``start``: the model that the run
    starts from, if the site may lack it; the facts have its SHA-256, and the answer does not depend
    on whether it is sent again.
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
        """The groups that are sent: the payload's, and the model that the run starts from."""
        if not self.start:
            return self.payload
        return Payload({**self.payload, START: self.start})

    def header(self) -> str:
        """Everything that is sent but the payload, as JSON.

        Raises ConfigError where no site would read it.
        """
        names = ("version", "config", "sha", "run", "client", "memory", "facts")
        values = {name: getattr(self, name) for name in names}
        if self.named:
            values["named"] = list(self.named)
        values["stage"] = _stage_fields(self.stage)
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
        """SHA-256 of everything that the answer depends on."""
        question = replace(self, named=())
        return digest(question.header().encode(), *encoded_parts(self.payload))

    @staticmethod
    def of(header: str, payload: Payload) -> Request:
        """The request in a header and the groups that were sent; raises BadPayload for a malformed
        one.
        """
        values = _json(header, MAX_REQUEST)
        run = _typed(values, "run", str)
        if not run.isalnum():
            raise BadPayload("run must be letters and digits")
        start = payload.get(START, {})
        if not isinstance(start, Mapping):
            raise BadPayload(f"{START} is no model")
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
"""The parts of a stage in a request's header."""


def _stage_fields(stage: Stage) -> list[Any]:
    """A stage as a list for JSON; ``_stage`` reads it."""
    return [
        stage.round,
        stage.index,
        stage.name,
        list(stage.clients),
        stage.view,
        stage.sequential,
    ]


def _stage(parts: list[Any]) -> Stage:
    """The stage in a header; raises BadPayload for a malformed one."""
    if len(parts) != len(STAGE_FIELDS):
        raise BadPayload("stage does not have six parts")
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
    """One client's work on one stage, or the reason why it failed.

    ``memory``: the version of the client's state that this stage left; None for none. ``idle``: the
    client has no data in the round's task, which is no failure.
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
        values = {name: getattr(self, name) for name in names}
        if self.idle:
            values["idle"] = True
        return json.dumps(json_value(values), allow_nan=False)

    @staticmethod
    def of(header: str, content: Payload) -> SiteReply:
        """The answer in a header and a payload; raises BadPayload for a malformed one."""
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
    """A client's report; raises BadPayload for a wrong one."""
    problem = wrong_report(report)
    if problem:
        raise BadPayload(problem)
    return report


def _json(text: str, limit: int) -> dict[str, Any]:
    """The object in a header; raises BadPayload for anything else, and a header over the limit."""
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
    """A number in a header; raises ValueError for one that is not finite."""
    value = float(text)
    if not math.isfinite(value):
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


FILE_NAME = re.compile(r"[a-z0-9-][a-z0-9.-]{0,199}")
"""The names of files that hold a client's state."""


def _version(value: Any) -> Version | None:
    """The file and SHA-256 of a client's state; raises BadPayload for anything else but None."""
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(part, str) for part in value):
        raise BadPayload("memory is no file name and SHA-256")
    name, sha = value
    if not FILE_NAME.fullmatch(name):
        raise BadPayload(f"memory has a strange name, {name[:40]!r}")
    if len(sha) > 64 or not sha.isalnum():
        raise BadPayload("memory has no SHA-256")
    return name, sha


STAGE = "train.stage"
"""The app's action for a stage of a method."""

WHOAMI = "query.whoami"
"""The app's action that tells which client a node is."""

RAISED = 2
"""Flower's error code for a ClientApp that raised: asking again would raise again."""

TOO_MANY_ENTRIES = "the message holds too many groups and tensors"

HEADER_BYTES = 1 << 20
"""The most bytes of groups that stand in a message's header. Flower sends each record and each
array by itself: a small message is sent faster as a whole.
"""

_STYPE = "fedstill.payload"
_SALTED = "fedstill.salted"
"""What the arrays of a message hold: the bytes of a group, or with ``SALT_BYTES`` after them."""

SALT_BYTES = 16
"""Random bytes in the header and after each group of an answer. Flower names records and arrays by
their SHA-256, and tells a site which ones the server has: without them, a site could try what
another has sent.
"""


def require_flower() -> None:
    """Import Flower with telemetry, update checks and installs at run time off; ConfigError if it
    is not here.
    """
    set_environment(QUIET)
    check_flower_installed()


@dataclass
class Contents:
    """Makes the contents of messages. A group that several requests hold is encoded once, for equal
    arrays, which Flower uploads once.
    """

    # By the identity of a group, which the requests hold meanwhile.
    _arrays: dict[tuple[str, int], Array] = field(default_factory=dict)

    def of_request(self, request: Request) -> RecordDict:
        """A request as a message's content."""
        header = {"json": request.header()}
        groups = request.groups()
        return _records(header, groups, lambda name: self._array(groups, name))

    def _array(self, payload: Payload, name: str) -> Array:
        key = (name, id(payload[name]))
        if key not in self._arrays:
            self._arrays[key] = _array(payload, name, _STYPE)
        return self._arrays[key]


def answer_content(answer: SiteReply) -> RecordDict:
    """An answer as a message's content."""
    payload = answer.content
    header = {"json": answer.header(), "salt": secrets.token_bytes(SALT_BYTES)}
    return _records(header, payload, lambda name: _array(payload, name, _SALTED))


def _records(header: dict[str, Any], payload: Payload, array: Callable[[str], Array]) -> RecordDict:
    """A header and a payload as records; ``array`` makes the array of a group."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    groups = [encoded_parts(_one_group(payload, name)) for name in payload]
    size = sum(len(part) for parts in groups for part in parts)
    if size <= HEADER_BYTES:
        header["groups"] = [b"".join(parts) for parts in groups]
        return RecordDict({"header": ConfigRecord(header)})

    arrays = ArrayRecord()
    for number, name in enumerate(payload):
        arrays[f"{number:06d}"] = array(name)
    return RecordDict({"header": ConfigRecord(header), "groups": arrays})


def _one_group(payload: Payload, name: str) -> Payload:
    return Payload({name: payload[name]})


def _array(payload: Payload, name: str, kind: str) -> Array:
    """An array of the bytes of a group."""
    from flwr.app import Array

    parts = encoded_parts(_one_group(payload, name))
    if kind == _SALTED:
        parts.append(secrets.token_bytes(SALT_BYTES))
    data = b"".join(parts)
    return Array("uint8", (len(data),), kind, data)


def header_and_payload(
    records: RecordDict, limit: int, entries: int = MAX_ENTRIES
) -> tuple[str, Payload]:
    """The two halves of a message's content; raises BadPayload for anything else, or more than the
    limits.

    ``limit``: of bytes; ``entries``: of groups and tensors.
    """
    header = config_record(records, "header")
    text = None
    if header is not None:
        text = header.get("json")
    if header is None or not isinstance(text, str):
        raise BadPayload("the message is not fedstill's: it has no header")
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
            raise BadPayload(f"part {number} does not hold one group of its own")
        payload.update(decoded)
        entries -= sum(map(_entries, decoded.values()))
    if entries < 0:
        raise BadPayload(TOO_MANY_ENTRIES)
    return text, Payload(payload)


def config_record(records: RecordDict, name: str) -> ConfigRecord | None:
    """The config record of a name; None without one.

    Flower's views by kind, such as ``config_records``, are cyclic garbage, which keeps a message
    and its arrays in memory.
    """
    from flwr.app import ConfigRecord

    record = records.get(name)
    if isinstance(record, ConfigRecord):
        return record
    return None


def _encoded_groups(records: RecordDict, header: Mapping[str, Any]) -> Sequence[bytes | memoryview]:
    """The bytes of each group, from a header or from arrays; raises BadPayload for other records.

    They are not copied.
    """
    from flwr.app import ArrayRecord

    arrays = records.get("groups")
    in_header: Any = header.get("groups")
    is_small = isinstance(in_header, list) and all(isinstance(data, bytes) for data in in_header)
    if is_small and len(records) == 1:
        return list(in_header)
    if in_header is None and isinstance(arrays, ArrayRecord) and len(records) == 2:
        return [_without_salt(arrays[key]) for key in sorted(arrays)]
    raise BadPayload("the message is not fedstill's: it holds other records")


def _without_salt(array: Array) -> memoryview:
    """The bytes of a group in an array."""
    data = memoryview(array.data)
    if array.stype == _SALTED:
        return data[:-SALT_BYTES]
    return data


def _entries(group: object) -> int:
    """How many entries of a payload a group counts as."""
    if isinstance(group, Mapping):
        return len(group)
    return 1


# Instructions: messages that a federation's server signs, so that a site acts for nobody else


SIGNED = "signed"
"""The record of a message that holds the server's signature."""

PURPOSE = "fedstill instruction"
"""Stands in each signed statement: the key signs nothing else."""

CLOCK_SECONDS = 300.0
"""By how much the clocks of server and site may differ."""

KEPT_SECONDS = 86_400.0
"""How long a site remembers an instruction after it has expired."""

USED_NAME = re.compile(r"(\d{1,12})-[0-9a-f]{32}")
"""The file that stands for a used instruction: when it expires, and its number."""


def sign_all(messages: Sequence[Message], run: int, key: Ed25519PrivateKey) -> None:
    """Add the server's signature to messages for sites; bytes that several hold are hashed once.

    run: its number in Flower.
    """
    digests: Digests = {}
    for message in messages:
        sign(message, run, key, digests)


def sign(
    message: Message, run: int, key: Ed25519PrivateKey, digests: Digests | None = None
) -> None:
    """Add the server's signature to a message for a site.

    It covers the run, the site's node, the kind and all content of the message, and the time at
    which it expires. A random number makes it usable once. run: its number in Flower. digests: as
    in ``content_digest``.
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
"""The SHA-256 of some bytes, by their identity."""


def content_digest(records: RecordDict, digests: Digests | None = None) -> str:
    """SHA-256 of the content of a message: its configs and arrays, with their names and forms.

    digests: the known digests of arrays' data, to which the others are added. It is valid only as
    long as the arrays exist.
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
    """The name and form of an array, and the SHA-256 of its data."""
    data = array.data
    if id(data) not in digests:
        digests[id(data)] = digest(data)
    return [key, array.dtype, list(array.shape), array.stype, digests[id(data)]]


@dataclass(frozen=True)
class InstructionCheck:
    """Finds out at a site whether a message is an instruction of the federation's server.

    ``server_key``: the file with the server's public key, as the site got it with its own key.
    ``used``: a folder with an empty file for each instruction that the site has carried out.
    """

    server_key: Path
    used: Path

    def __call__(self, message: Message, node: int) -> None:
        """Take the signature out of a message; raises Refused unless it is the server's.

        It must be for this site, run, kind and content, not expired, and not used before. node: the
        number that this site has in Flower.
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
                raise Refused(f"the server has signed another {name} of the message", "signature")
        records = message.content.values()
        has_metrics = any(isinstance(record, MetricRecord) for record in records)
        if about.dst_node_id != node or has_metrics:
            raise Refused("the message is for another site, or holds metrics", "signature")
        if time.time() > statement["until"] + CLOCK_SECONDS:
            raise Refused("the instruction has expired, or a clock is wrong", "signature")
        self._use(float(statement["until"]), str(statement["number"]))

    def _signed_statement(self, signature: Any) -> dict[str, Any]:
        """The statement that the server has signed; raises Refused for any other."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            key = load_pem_public_key(self.server_key.read_bytes())
        except (OSError, ValueError) as error:
            raise Refused(f"{self.server_key} is no public key: {error}", "signature") from error
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
        """Note that an instruction is carried out; raises Refused for one that was before."""
        make_folder(self.used)
        for path in self.used.iterdir():
            note = USED_NAME.fullmatch(path.name)
            if note is not None and int(note[1]) < time.time() - KEPT_SECONDS:
                remove(path)
        try:
            (self.used / f"{until:.0f}-{number}").touch(exist_ok=False)
        except FileExistsError:
            raise Refused("the instruction was carried out before", "signature") from None
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
        "a change of the site's model has no room in the secure sum: raise "
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
"""All reasons that leave a site. They are constants, because a reason with a value in it would
reveal data: a class name, a count, a path.
"""

SEE_LOG = "; the site's log has the details"


def public_reason(topic: Topic) -> str:
    """The reason that leaves a site, for an error or a refusal about a topic."""
    return PUBLIC_REASONS[topic] + SEE_LOG


def topic_of(error: BaseException) -> Topic:
    """What an error at a site is about."""
    if isinstance(error, FedstillError):
        return error.topic
    return "work"


def error_text(error: BaseException) -> str:
    """The text of an error of fedstill; of another error, its type and its text."""
    if isinstance(error, FedstillError):
        return str(error)
    return on_one_line(error)
