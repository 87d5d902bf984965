"""The gate's rules for requests of sites: the key that signed a request, and the permissions of the
site.
"""

from __future__ import annotations

import binascii
import datetime
import math
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SITES = "/v1/fleet/"
SITES_PATHS = frozenset(
    SITES + name
    for name in (
        "register-node",
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""All paths of Flower's interface for sites."""

REGISTER = SITES + "register-node"
UNREGISTER = SITES + "unregister-node"
ACTIVATE = SITES + "activate-node"
PULL = SITES + "pull-messages"
PUSH = SITES + "push-messages"
PULL_PART = SITES + "pull-object"
PUSH_PART = SITES + "push-object"
CONFIRM = SITES + "confirm-message-received"
GET_RUN = SITES + "get-run"
OF_RUNS = (GET_RUN, SITES + "get-fab")

MAX_SIGNED = 1000
"""The maximum size of each header of a signature, in bytes; those of a site have 288, 32 and 140.
"""

SIGNED_SECONDS = 305.0
"""The maximum age of a signed time, in seconds; Flower has the same limit."""

EARLY_SECONDS = 5.0
"""The maximum time by which a signed time may be ahead of this machine's clock, in seconds."""

MAX_PARTS = 30_000
"""The maximum number of parts of a site's answer."""

ANNOUNCED = 2
"""The number of a site's answers whose parts are stored; a site sends one answer after another."""

MAX_INSTRUCTIONS = 256
"""The maximum number of stored instructions to one site."""


OR_EXPIRED = ", or an instruction that has expired"
"""The end of reasons that also apply to late replies, because expired instructions are deleted."""


class Forbidden(Exception):
    """A request that the gate refuses; its text is the reason.

    ``status``: the HTTP status of the answer.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


# Signatures of requests


@dataclass(frozen=True)
class Signed:
    """A public key in Flower's format, with the time and the signature in a request's headers.

    The key is stored as bytes instead of the text of the header, because different texts can encode
    the same bytes.
    """

    key: bytes
    time: bytes
    signature: bytes

    @staticmethod
    def of(key: bytes, time: bytes, signature: bytes) -> Signed | None:
        """Read the signature from a request's headers, without a check; None if it is missing."""
        texts = (key, time, signature)
        if not all(texts) or max(map(len, texts)) > MAX_SIGNED:
            return None
        try:
            return Signed(
                key=b64decode(key, validate=True),
                time=time,
                signature=b64decode(signature, validate=True),
            )
        except (binascii.Error, ValueError):
            return None

    def is_valid(self, time_now: datetime.datetime) -> bool:
        """Whether the owner of the key signed the time, and the time is current."""
        try:
            signed_at = datetime.datetime.fromisoformat(self.time.decode("ascii"))
            age = (time_now - signed_at).total_seconds()
        except (ValueError, TypeError):
            return False
        return -EARLY_SECONDS < age < SIGNED_SECONDS and self._is_signed()

    def _is_signed(self) -> bool:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            key = load_pem_public_key(self.key)
            if not isinstance(key, ec.EllipticCurvePublicKey):
                return False
            key.verify(self.signature, self.time, ec.ECDSA(hashes.SHA256()))
        except (ValueError, InvalidSignature, UnsupportedAlgorithm):
            return False
        return True


# Permissions of sites


@dataclass(frozen=True)
class Site:
    """The sender of a request: the owner of a public key.

    ``node``: its number in Flower; None for a key that is not registered.
    """

    key: bytes
    node: int | None


@dataclass(frozen=True)
class Instruction:
    """A message of the server that a site has fetched.

    ``parts``: the ids of all its objects. ``until``: the time at which it expires; Flower's server
    then drops a reply, too.
    """

    run: int
    kind: str
    parts: frozenset[str]
    until: float


@dataclass
class Traffic:
    """The messages between the server and one site.

    ``instructions``: the instructions by id. ``answers``: the ids of replies, by the id of the
    instruction. ``uploads``: the runs and parts of the latest answers, whose parts may still
    arrive.
    """

    instructions: dict[str, Instruction] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, tuple[int, frozenset[str]]] = field(default_factory=dict)

    def announce(self, instruction: str, run: int, parts: frozenset[str]) -> None:
        """Register the parts of the answer to an instruction."""
        self.uploads[instruction] = (run, parts)
        for id in list(self.uploads)[:-ANNOUNCED]:
            del self.uploads[id]

    def forget(self, time_now: float) -> None:
        """Delete expired instructions, and the oldest ones above the limit."""
        ids = [id for id, instruction in self.instructions.items() if instruction.until < time_now]
        ids += list(self.instructions)[:-MAX_INSTRUCTIONS]
        for id in ids:
            self.instructions.pop(id, None)
            self.answers.pop(id, None)
            self.uploads.pop(id, None)


@dataclass
class Exchange:
    """The rules for sites: each site only acts for its own node, in runs that sent it a message.

    A site answers each of its instructions once. It only fetches parts of its own instructions, and
    only sends parts of its own answers. The records are kept in memory. This suffices, because a
    restart of the server ends all runs, and resumed runs send their instructions again.
    """

    clock: Callable[[], float] = time.time
    _traffic: dict[int, Traffic] = field(default_factory=dict, repr=False)

    def check(self, path: str, body: bytes, site: Site) -> None:
        """Raise Forbidden for a request that this site may not send."""
        request = _parsed(path, body)
        if path in (REGISTER, ACTIVATE):
            if request.public_key != site.key:
                raise Forbidden(403, "the key in the request differs from the key that signed it")
            return
        named_node = request.node_id if hasattr(request, "node_id") else request.node.node_id
        if site.node is None or named_node != site.node:
            raise Forbidden(403, "the site in the request differs from the site that signed it")

        traffic = self._of(site.node)
        if path == PUSH:
            self._check_answer(request, site.node, traffic)
        elif path in OF_RUNS:
            _check_run(request.run_id, traffic)
        elif path == CONFIRM:
            _check_instruction(request.message_object_id, request.run_id, traffic)
        elif path == PULL_PART:
            _check_download(request, traffic)
        elif path == PUSH_PART:
            _check_upload(request, traffic)

    def note_instructions(self, node: int, answer: bytes) -> int | None:
        """Register the instructions that a site has fetched, from Flower's answer; returns their
        number, or None for an error.
        """
        from flwr.proto.fleet_pb2 import PullMessagesResponse
        from google.protobuf.message import DecodeError

        try:
            pulled = PullMessagesResponse.FromString(answer)
        except DecodeError:
            return None  # Flower writes an error as JSON
        traffic = self._of(node)
        trees = zip(pulled.messages_list, pulled.message_object_trees, strict=True)
        for message, tree in trees:
            about = message.metadata
            traffic.instructions[about.message_id] = Instruction(
                run=about.run_id,
                kind=about.message_type,
                parts=_parts(tree),
                until=about.created_at + about.ttl,
            )
        return len(pulled.messages_list)

    def _of(self, node: int) -> Traffic:
        traffic = self._traffic.setdefault(node, Traffic())
        traffic.forget(self.clock())
        return traffic

    def _check_answer(self, request: Any, node: int, traffic: Traffic) -> None:
        """Raise Forbidden unless a request contains one answer of this node to an instruction."""
        from flwr.common.constant import SUPERLINK_NODE_ID

        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Forbidden(403, "a site must send one message at a time")
        about = request.messages_list[0].metadata
        if about.src_node_id != node:
            raise Forbidden(403, "the sender of the message is not this site")
        if about.dst_node_id != SUPERLINK_NODE_ID:
            raise Forbidden(403, "the message is not for the server")
        instruction = _check_instruction(about.reply_to_message_id, about.run_id, traffic)
        if about.message_type != instruction.kind:
            raise Forbidden(403, "the type of the message differs from that of the instruction")
        if any(not 0 <= seconds < math.inf for seconds in request.clientapp_runtime_list):
            raise Forbidden(403, "the duration of the answer is not a number of seconds")

        tree = request.message_object_trees[0]
        if about.message_id in traffic.instructions or tree.object_id != about.message_id:
            raise Forbidden(403, "the id of the message differs from that of its parts")
        # Flower sends an answer again if it was not acknowledged.
        first = traffic.answers.setdefault(about.reply_to_message_id, about.message_id)
        if first != about.message_id:
            raise Forbidden(403, "the instruction has already been answered")
        parts = _parts(tree)
        if len(parts) > MAX_PARTS:
            raise Forbidden(413, f"an answer may have at most {MAX_PARTS} parts")
        traffic.announce(about.reply_to_message_id, about.run_id, parts)


def _check_instruction(id: str, run: int, traffic: Traffic) -> Instruction:
    """A site's instruction; raises Forbidden for a message that was not sent to this site."""
    instruction = traffic.instructions.get(id)
    if instruction is None or instruction.run != run:
        raise Forbidden(
            403, f"the request refers to a message that was not sent to this site{OR_EXPIRED}"
        )
    return instruction


def _check_run(run: int, traffic: Traffic) -> None:
    """Raise Forbidden for a run that has not sent anything to the site."""
    if all(instruction.run != run for instruction in traffic.instructions.values()):
        raise Forbidden(403, "the request refers to a run that has not sent anything to this site")


def _check_download(request: Any, traffic: Traffic) -> None:
    """Raise Forbidden for a part of a message that was not sent to the site."""
    parts = [i.parts for i in traffic.instructions.values() if i.run == request.run_id]
    if not any(request.object_id in of_one for of_one in parts):
        raise Forbidden(
            403, f"the request refers to a part that belongs to no message to this site{OR_EXPIRED}"
        )


def _check_upload(request: Any, traffic: Traffic) -> None:
    """Raise Forbidden for a part that no answer of the site has announced."""
    announced = [parts for run, parts in traffic.uploads.values() if run == request.run_id]
    if not any(request.object_id in parts for parts in announced):
        raise Forbidden(
            403, f"the request contains a part that belongs to no announced reply{OR_EXPIRED}"
        )


def _parts(tree: Any) -> frozenset[str]:
    """The ids of all objects in a tree."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    return frozenset(part.object_id for part in iterate_object_tree(tree))


def _parsed(path: str, body: bytes) -> Any:
    """Parse a request like Flower; raises Forbidden for an invalid request."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from google.protobuf.message import DecodeError

    request = PROTOBUF_REQUEST_TYPES["POST", path]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise Forbidden(400, "the request cannot be read") from error
    return request
