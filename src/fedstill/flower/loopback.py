"""A Flower grid inside this process: no sockets, no other processes, but every message serialised
both ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedstill.flower.fleet import RAISED
from fedstill.flower.messages import require_flower

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp


class LoopbackGrid:
    """Calls a ClientApp where a SuperLink would: one virtual node for each client, and bytes in
    between.

    Node ids are large numbers in no order and replies come last first, as in a deployment: nothing
    may depend on them. ``bytes_down``, ``bytes_up`` count whole serialised messages, ``sent`` the
    messages. It leans on names of Flower's that are not public (how a message is serialised and
    gets its id), which a test watches. Its time passes only by waiting: a reply that is not there
    at once never comes, so no caller needs to wait for it.
    """

    def __init__(self, app: ClientApp, clients: Sequence[int]) -> None:
        require_flower()
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.app = app
        ids = {c: (c * 0x9E3779B97F4A7C15 + 12345) % 2**63 for c in clients}
        self.nodes = {
            ids[c]: Context(1, ids[c], {"partition-id": c}, RecordDict(), {}) for c in clients
        }
        self.bytes_down = self.bytes_up = self.sent = 0
        self.time = 0.0
        self._replies: dict[str, bytes] = {}

    def monotonic(self) -> float:
        """The time, in seconds."""
        return self.time

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
        self.time += seconds

    def get_node_ids(self) -> list[int]:
        """The nodes that are there."""
        return sorted(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages at once, and keep the replies until they are pulled."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are there, last first."""
        there = [i for i in message_ids if i in self._replies]
        return [parsed(self._replies.pop(i)) for i in reversed(there)]

    def _push(self, message: Message) -> str:
        self.sent += 1
        message.metadata.__dict__["_message_id"] = str(self.sent)
        data = serialised(message)
        self.bytes_down += len(data)
        reply = self.deliver(message.metadata.dst_node_id, data)
        if reply is not None:
            self.bytes_up += len(reply)
            self._replies[str(self.sent)] = reply
        return str(self.sent)

    def deliver(self, node: int, data: bytes) -> bytes | None:
        """A node's answer to a message: its reply, or Flower's error reply if its app raises; None:
        no reply.
        """
        from flwr.app import Error, Message

        message = parsed(data)
        try:
            reply = self.app(message, self.nodes[node])
        except Exception as error:
            reply = Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
        return serialised(reply)


def serialised(message: Message) -> bytes:
    """A message as the bytes that Flower's own serialisation gives."""
    from flwr.common.serde import message_to_proto

    data: bytes = message_to_proto(message).SerializeToString()
    return data


def parsed(data: bytes) -> Message:
    """The message in some bytes."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as Proto

    return message_from_proto(Proto.FromString(data))
