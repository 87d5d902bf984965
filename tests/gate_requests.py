"""Requests of sites to the gate, signed without Flower's client."""

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

    def headers(self, timestamp: str = "") -> dict[str, Any]:
        """The headers of a request that was signed at a time; now by default."""
        timestamp = timestamp or datetime.datetime.now(datetime.UTC).isoformat()
        signature = self.private.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            "flwr_public_key": base64.b64encode(self.public).decode(),
            "flwr_timestamp": timestamp,
            "flwr_signature": base64.b64encode(signature).decode(),
        }


@dataclass
class Backend:
    """An application behind the gate, which records requests and answers them.

    ``status``: of all answers. ``answers``: the bodies of answers by path. ``paths``, ``bodies``:
    of the requests that passed the gate.
    """

    status: int = 200
    answers: dict[str, bytes] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.paths.append(str(scope.get("path", scope["type"])))
        if scope["type"] != "http":
            return
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        answer = self.answers.get(scope["path"], b"")
        await send({"type": "http.response.body", "body": answer})


def response(
    gate: Gate,
    path: str,
    method: str = "POST",
    *,
    kind: str = "http",
    body: bytes = b"",
    receive: Callable[[], Any] | None = None,
    **headers: Any,
) -> dict[str, Any]:
    """The gate's response to a request: its first message, with the whole ``body`` and its
    ``text``.

    headers: "_" in a name stands for "-". A header with an empty value is left out.
    """
    messages: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(dict(message))

    async def receive_body() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = {"content_length": str(len(body)), **headers}
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [
            (name.replace("_", "-").encode(), _encoded(value))
            for name, value in headers.items()
            if value != ""
        ],
        "client": ("203.0.113.7", 5),
    }
    asyncio.run(gate(scope, receive or receive_body, send))
    if not messages:
        return {}
    content = b"".join(message.get("body", b"") for message in messages)
    return {**messages[0], "body": content, "text": content.decode(errors="replace")}


def _encoded(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode()


class SiteSession:
    """A site with a key and a node, which sends requests to a gate."""

    def __init__(self, gate: Gate, key: SiteKey, node: int) -> None:
        self.gate = gate
        self.key = key
        self.node = node

    def request(self, name: str, content: Any) -> tuple[int, str]:
        """Send a signed request with a name of Flower's interface; return the status and the text
        of the response.
        """
        body = content.SerializeToString()
        answer = response(self.gate, SITES + name, body=body, **self.key.headers())
        return answer["status"], answer["text"]

    def pull(self, backend: Backend, *messages: Any) -> tuple[int, str]:
        """Request messages, which the backend then sends."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
        from flwr.proto.node_pb2 import Node

        answer = PullMessagesResponse(
            messages_list=messages, message_object_trees=[tree_of(m) for m in messages]
        )
        backend.answers[SITES + "pull-messages"] = answer.SerializeToString()
        return self.request("pull-messages", PullMessagesRequest(node=Node(node_id=self.node)))

    def push(self, *messages: Any, tree: Any = None) -> tuple[int, str]:
        """Send messages with their trees."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.node_pb2 import Node

        content = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=messages,
            message_object_trees=[tree or tree_of(m) for m in messages],
        )
        return self.request("push-messages", content)


def message(id: str, **metadata: Any) -> Any:
    """A message of Flower's protocol without content."""
    from flwr.proto.message_pb2 import Message, Metadata

    values = {"run_id": 7, "message_type": "train.stage", "created_at": time.time(), "ttl": 60.0}
    return Message(metadata=Metadata(message_id=id, **{**values, **metadata}))


def instruction(id: str, node: int, **metadata: Any) -> Any:
    """A message from the server to a node."""
    return message(id, **{"src_node_id": SERVER_NODE, "dst_node_id": node, **metadata})


def reply(id: str, node: int, to: str, **metadata: Any) -> Any:
    """A node's answer to an instruction."""
    values = {"src_node_id": node, "dst_node_id": SERVER_NODE, "reply_to_message_id": to}
    return message(id, **{**values, **metadata})


def tree_of(message: Any) -> Any:
    """The tree of a message with one part."""
    from flwr.proto.message_pb2 import ObjectTree

    id = message.metadata.message_id
    return ObjectTree(object_id=id, children=[ObjectTree(object_id=f"part of {id}")])
