"""A Flower grid inside this process: no sockets, no other processes, but every message serialised both ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedstill.engines.flower.records import require_flower

require_flower()

from flwr.app import Context, Error, Message, RecordDict  # noqa: E402
from flwr.common.serde import message_from_proto, message_to_proto  # noqa: E402
from flwr.proto.message_pb2 import Message as Proto  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

RAISED = 2
"""Flower's error code for a ClientApp that raised."""


class LoopbackGrid(Grid):  # type: ignore[misc]
    """Calls a ClientApp where a SuperLink would: one virtual node for each client, and bytes in between.

    Node ids are large numbers in no order and replies come last first, as in a deployment: nothing may depend on them.
    ``bytes_down`` and ``bytes_up`` count whole serialised messages.
    """

    def __init__(self, app: ClientApp, clients: Sequence[int]) -> None:
        self.app = app
        self.nodes = {(c * 0x9E3779B97F4A7C15 + 12345) % 2**63: _node(c) for c in clients}
        self.bytes_down = self.bytes_up = self.sent = 0
        self._replies: dict[str, bytes] = {}
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

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
        """What a node makes of a message: its reply, or Flower's error reply if its app raises; None: no reply."""
        message = parsed(data)
        try:
            reply = self.app(message, self.nodes[node])
        except Exception as error:
            reply = Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
        return serialised(reply)

    def set_run(self, run: Any) -> None:
        """A loopback grid has no run of Flower's."""

    @property
    def run(self) -> Any:
        """None: see ``set_run``."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Deprecated by Flower, and not needed here."""
        raise NotImplementedError("make a flwr.app.Message")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push, then pull what is there."""
        return self.pull_messages(self.push_messages(messages))


def _node(client: int) -> Context:
    return Context(1, client, {"partition-id": client}, RecordDict(), {})


def serialised(message: Message) -> bytes:
    """A message as the bytes that Flower's own serialisation gives."""
    data: bytes = message_to_proto(message).SerializeToString()
    return data


def parsed(data: bytes) -> Message:
    """The message in some bytes."""
    return message_from_proto(Proto.FromString(data))
