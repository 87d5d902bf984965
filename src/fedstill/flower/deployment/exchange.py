"""The rules by which the gate checks a site's request: whose key has signed it, and what this site
may ask.
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
"""All that Flower has for sites."""

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
"""Bytes of each header that a signature is read from; those of a site have 288, 32 and 140."""

SIGNED_SECONDS = 305.0
"""How old a signed time may be; Flower has the same limit."""

EARLY_SECONDS = 5.0
"""How far a signed time may be ahead of this machine's clock."""

MAX_PARTS = 30_000
"""The parts of one answer of a site."""

ANNOUNCED = 2
"""Answers of one site whose parts are remembered; a site sends one after another."""

MAX_INSTRUCTIONS = 256
"""Instructions to one site that are remembered at a time."""


OR_EXPIRED = ", or an instruction that has expired"
"""Ends the reasons of refusals that also meet late replies: expired instructions are forgotten."""


class Forbidden(Exception):
    """A request that the gate refuses; its text is the reason.

    ``status``: of the answer, as HTTP has it.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


# Who has signed a request


@dataclass(frozen=True)
class Signed:
    """A public key, as Flower stores it, with the time and the signature in a request's headers.

    The key's bytes, not the text of the header: a text can be written in more than one way.
    """

    key: bytes
    time: bytes
    signature: bytes

    @staticmethod
    def of(key: bytes, time: bytes, signature: bytes) -> Signed | None:
        """What a request claims to be signed with, from its headers; None if it is not signed."""
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
        """Whether the owner of the key signed the time, and the time is the present."""
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


# What a site may ask


@dataclass(frozen=True)
class Site:
    """Who asks: the owner of a public key.

    ``node``: the number that Flower gave it; None for a key that is not registered.
    """

    key: bytes
    node: int | None


@dataclass(frozen=True)
class Instruction:
    """A message of the server that a site has fetched.

    ``parts``: the ids of all objects that it consists of. ``until``: the time at which it expires
    in Flower, too, whose server then drops a reply.
    """

    run: int
    kind: str
    parts: frozenset[str]
    until: float


@dataclass
class Traffic:
    """What went between the server and one site.

    ``instructions``, ``answers``: by the id of an instruction; the answer is the id of the reply.
    ``uploads``: the runs and parts of the latest answers, whose parts may still come.
    """

    instructions: dict[str, Instruction] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, tuple[int, frozenset[str]]] = field(default_factory=dict)

    def announce(self, instruction: str, run: int, parts: frozenset[str]) -> None:
        """Note which parts will come with the answer to an instruction."""
        self.uploads[instruction] = (run, parts)
        for id in list(self.uploads)[:-ANNOUNCED]:
            del self.uploads[id]

    def forget(self, time_now: float) -> None:
        """Forget instructions that have expired, and the oldest of too many."""
        ids = [id for id, instruction in self.instructions.items() if instruction.until < time_now]
        ids += list(self.instructions)[:-MAX_INSTRUCTIONS]
        for id in ids:
            self.instructions.pop(id, None)
            self.answers.pop(id, None)
            self.uploads.pop(id, None)


@dataclass
class Exchange:
    """The rules for sites: each acts for its own node only, and in the runs that have asked it.

    A site answers each instruction once, and only one that it was sent. It fetches parts of its own
    instructions, and sends parts of its own answers. The notes are in memory: a server that starts
    again has ended its runs, and resumed runs send their instructions again.
    """

    clock: Callable[[], float] = time.time
    _traffic: dict[int, Traffic] = field(default_factory=dict, repr=False)

    def check(self, path: str, body: bytes, site: Site) -> None:
        """Raises Forbidden for a request that this site may not make."""
        request = _parsed(path, body)
        if path in (REGISTER, ACTIVATE):
            if request.public_key != site.key:
                raise Forbidden(403, "the request names another key than the one that signed it")
            return
        named_node = request.node_id if hasattr(request, "node_id") else request.node.node_id
        if site.node is None or named_node != site.node:
            raise Forbidden(403, "the request names another site than the one that signed it")

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
        """Note the instructions that a site has fetched, from Flower's answer to it; returns their
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
        """Raises Forbidden unless a request brings one answer of this node to an instruction."""
        from flwr.common.constant import SUPERLINK_NODE_ID

        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Forbidden(403, "a site sends one message at a time")
        about = request.messages_list[0].metadata
        if about.src_node_id != node:
            raise Forbidden(403, "the message names another sender than this site")
        if about.dst_node_id != SUPERLINK_NODE_ID:
            raise Forbidden(403, "the message is not for the server")
        instruction = _check_instruction(about.reply_to_message_id, about.run_id, traffic)
        if about.message_type != instruction.kind:
            raise Forbidden(403, "the message is of another kind than the one it answers")
        if any(not 0 <= seconds < math.inf for seconds in request.clientapp_runtime_list):
            raise Forbidden(403, "the time that the answer took is no number of seconds")

        tree = request.message_object_trees[0]
        if about.message_id in traffic.instructions or tree.object_id != about.message_id:
            raise Forbidden(403, "the message has another id than its parts")
        # Flower sends an answer again if nothing came back for it.
        first = traffic.answers.setdefault(about.reply_to_message_id, about.message_id)
        if first != about.message_id:
            raise Forbidden(403, "the instruction has been answered")
        parts = _parts(tree)
        if len(parts) > MAX_PARTS:
            raise Forbidden(413, f"an answer has at most {MAX_PARTS} parts")
        traffic.announce(about.reply_to_message_id, about.run_id, parts)


def _check_instruction(id: str, run: int, traffic: Traffic) -> Instruction:
    """A site's instruction; raises Forbidden for a message that this site was not sent."""
    instruction = traffic.instructions.get(id)
    if instruction is None or instruction.run != run:
        raise Forbidden(403, f"the request names a message that this site was not sent{OR_EXPIRED}")
    return instruction


def _check_run(run: int, traffic: Traffic) -> None:
    """Raises Forbidden for a run that has sent the site nothing."""
    if all(instruction.run != run for instruction in traffic.instructions.values()):
        raise Forbidden(403, "the request names a run that has sent this site nothing")


def _check_download(request: Any, traffic: Traffic) -> None:
    """Raises Forbidden for a part of a message that was not sent to the site."""
    parts = [i.parts for i in traffic.instructions.values() if i.run == request.run_id]
    if not any(request.object_id in of_one for of_one in parts):
        raise Forbidden(403, f"the request names a part of no message to this site{OR_EXPIRED}")


def _check_upload(request: Any, traffic: Traffic) -> None:
    """Raises Forbidden for a part that no answer of the site has announced."""
    announced = [parts for run, parts in traffic.uploads.values() if run == request.run_id]
    if not any(request.object_id in parts for parts in announced):
        raise Forbidden(403, f"the request brings a part of no announced reply{OR_EXPIRED}")


def _parts(tree: Any) -> frozenset[str]:
    """The ids of all objects in a tree."""
    ids = set()
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        waiting.extend(part.children)
        ids.add(part.object_id)
    return frozenset(ids)


def _parsed(path: str, body: bytes) -> Any:
    """A request as Flower will read it; raises Forbidden for bytes that are none."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from google.protobuf.message import DecodeError

    request = PROTOBUF_REQUEST_TYPES["POST", path]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise Forbidden(400, "the request cannot be read") from error
    return request
