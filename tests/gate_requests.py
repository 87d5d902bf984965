"""Requests of sites to the gate, made and signed by hand."""

from __future__ import annotations

import asyncio
import base64
import datetime
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstill.flower.deployment.exchange import SITES
from fedstill.flower.deployment.gate import Gate

SERVER_NODE = 1


class SiteKey:
    """A site's private key, which signs requests as Flower's client does."""

    def __init__(self) -> None:
        self.private = ec.generate_private_key(ec.SECP384R1())
        self.public = self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def headers(self, when: str = "") -> dict[str, Any]:
        """The headers of a request signed at a time, by default now."""
        when = when or datetime.datetime.now(datetime.UTC).isoformat()
        signature = self.private.sign(when.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            "flwr_public_key": base64.b64encode(self.public).decode(),
            "flwr_timestamp": when,
            "flwr_signature": base64.b64encode(signature).decode(),
        }


@dataclass
class Inside:
    """What is behind the gate: it notes the requests that came through, and answers them."""

    status: int = 200
    answers: dict[str, bytes] = field(default_factory=dict)
    came: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.came.append(str(scope.get("path", scope["type"])))
        if scope["type"] != "http":
            return
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        answer = self.answers.get(scope["path"], b"")
        await send({"type": "http.response.body", "body": answer})


def asked(
    gate: Gate,
    path: str,
    method: str = "POST",
    *,
    kind: str = "http",
    body: bytes = b"",
    receive: Callable[[], Any] | None = None,
    **headers: Any,
) -> dict[str, Any]:
    """The first message of the answer; a header's name is written with _ for -, and an empty one
    is left out.
    """
    sent: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    async def whole() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    pairs = [
        (name.replace("_", "-").encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in {"content_length": str(len(body)), **headers}.items()
        if value != ""
    ]
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": pairs,
        "client": ("203.0.113.7", 5),
    }
    asyncio.run(gate(scope, receive or whole, send))
    if not sent:
        return {}
    answer = b"".join(message.get("body", b"") for message in sent)
    return {**sent[0], "body": answer, "text": answer.decode(errors="replace")}


class SiteSession:
    """A site with a key and a node, which asks a gate for things by their names in Flower."""

    def __init__(self, gate: Gate, key: SiteKey, node: int) -> None:
        self.gate = gate
        self.key = key
        self.node = node

    def asks(self, name: str, request: Any) -> tuple[int, str]:
        """Status and text of the answer to a request, signed now."""
        body = request.SerializeToString()
        answer = asked(self.gate, SITES + name, body=body, **self.key.headers())
        return answer["status"], answer["text"]

    def pulls(self, inside: Inside, *messages: Any) -> tuple[int, str]:
        """Fetch messages, which what is behind the gate hands out."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
        from flwr.proto.node_pb2 import Node

        handed_out = PullMessagesResponse(
            messages_list=messages, message_object_trees=[tree_of(m) for m in messages]
        )
        inside.answers[SITES + "pull-messages"] = handed_out.SerializeToString()
        return self.asks("pull-messages", PullMessagesRequest(node=Node(node_id=self.node)))

    def pushes(self, *messages: Any, tree: Any = None) -> tuple[int, str]:
        """Send messages with their trees."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.node_pb2 import Node

        request = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=messages,
            message_object_trees=[tree or tree_of(m) for m in messages],
        )
        return self.asks("push-messages", request)


def message(id: str, **metadata: Any) -> Any:
    """A message of Flower's protocol without content."""
    from flwr.proto.message_pb2 import Message, Metadata

    values = {"run_id": 7, "message_type": "train.stage", "created_at": time.time(), "ttl": 60.0}
    return Message(metadata=Metadata(message_id=id, **{**values, **metadata}))


def instruction(id: str, node: int, **metadata: Any) -> Any:
    """A message of the server to a node."""
    return message(id, **{"src_node_id": SERVER_NODE, "dst_node_id": node, **metadata})


def reply(id: str, node: int, to: str, **metadata: Any) -> Any:
    """A node's answer to an instruction."""
    values = {"src_node_id": node, "dst_node_id": SERVER_NODE, "reply_to_message_id": to}
    return message(id, **{**values, **metadata})


def tree_of(sent: Any) -> Any:
    """The tree of a message with one part."""
    from flwr.proto.message_pb2 import ObjectTree

    id = sent.metadata.message_id
    return ObjectTree(object_id=id, children=[ObjectTree(object_id=f"part of {id}")])
