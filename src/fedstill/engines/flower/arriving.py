"""Replies on a Flower grid, each by itself: one that is slow, broken or too large holds up nobody
else's.

Flower's own grid fetches the replies that were announced one after another. It waits for parts that
have not come yet, keeps all of them before their size is known, and raises for a reply that it
cannot read. So replies from a Flower server are fetched here, a thread for each. This leans on
names of Flower's that are not public, which a test watches.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedstill.engines.flower.waiting import SOONEST
from fedstill.errors import BadPayload, on_one_line

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

BRIEFLY = 0.2
"""The most seconds that a look waits for replies which are being fetched."""

LATEST = 3.0
"""The most seconds between two questions for a part of a reply that has not come."""

AROUND = 16 << 20
"""Bytes that Flower may write around a reply's arrays."""

MAX_PARTS = 100_000
"""The parts of a reply: Flower cuts arrays into pieces of 5 MB."""


@dataclass(frozen=True)
class Arrived:
    """What came of a message: the reply; or why there is none, and whether the client may be asked
    again.
    """

    message: Message | None
    wrong: str = ""
    again: bool = False


@dataclass
class Arrivals:
    """The replies that come in over a grid; each of at most ``max_bytes``, and what Flower writes
    around them.
    """

    grid: Grid
    max_bytes: int
    # by the id of the message that is answered
    _fetched: dict[str, _Fetch] = field(default_factory=dict)

    def pull(self, ids: Iterable[str]) -> dict[str, Arrived]:
        """{id of a message: what came of it}, for the messages of which something has come."""
        ids = list(ids)
        if not ids:
            return {}
        # no server is between: replies are whole
        if getattr(type(self.grid), "_runtime_client", None) is None:
            return {
                m.metadata.reply_to_message_id: Arrived(m) for m in self.grid.pull_messages(ids)
            }
        self._start([i for i in ids if i not in self._fetched])
        wait([self._fetched[i].done for i in ids if i in self._fetched], BRIEFLY)
        ready = [i for i in ids if i in self._fetched and self._fetched[i].done.done()]
        return {i: self._fetched.pop(i).done.result() for i in ready}

    def drop(self, ids: Iterable[str]) -> None:
        """Stop fetching the replies to some messages: nobody waits for them any more."""
        for id in ids:
            if id in self._fetched:
                self._fetched.pop(id).stop.set()

    def _start(self, ids: list[str]) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        server: Any = self.grid
        came = (
            server._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=ids))
            if ids
            else None
        )
        for proto, tree in (
            zip(came.messages_list, came.message_object_trees, strict=True) if came else ()
        ):
            answered = proto.metadata.reply_to_message_id
            if answered in ids and answered not in self._fetched:
                fetch = _Fetch(server, proto.metadata.message_id, tree, self.max_bytes)
                self._fetched[answered] = fetch
                threading.Thread(target=fetch, daemon=True).start()


@dataclass
class _Fetch:
    """One reply on its way: its parts are asked for until all are there, it is too large, or nobody
    waits for it.
    """

    grid: Any
    root: str
    tree: Any
    max_bytes: int
    stop: threading.Event = field(default_factory=threading.Event)
    done: Future[Arrived] = field(default_factory=Future)

    def __call__(self) -> None:
        try:
            self.done.set_result(self._whole())
        except _Lost as error:
            self.done.set_result(Arrived(None, str(error), again=True))
        except BaseException as error:  # whatever a reply does to its reader, it is one client's
            self.done.set_result(
                Arrived(None, str(error) if isinstance(error, BadPayload) else on_one_line(error))
            )

    def _whole(self) -> Arrived:
        from flwr.app import Message
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        client, run = self.grid._runtime_client, self.grid.run.run_id
        try:
            parts = self._parts(client, run)
        finally:
            client.ConfirmMessageReceived(  # so that the server keeps it no longer
                ConfirmMessageReceivedRequest(
                    node=self.grid.node, run_id=run, message_object_id=self.root
                )
            )
        self._refuse_over(unfolded(parts))
        message = inflate_object_from_contents(self.root, parts)
        if not isinstance(message, Message):
            raise BadPayload("it is no message")
        return Arrived(message)

    def _parts(self, client: Any, run: int) -> dict[str, bytes]:
        ids = list(dict.fromkeys(_ids(self.tree)))
        if len(ids) > MAX_PARTS:
            raise BadPayload(f"the message has {len(ids)} parts, over the limit of {MAX_PARTS}")
        parts, size = dict[str, bytes](), 0
        for id in ids:
            parts[id] = self._part(client, run, id)
            size += len(parts[id])
            self._refuse_over(size)
        return parts

    def _part(self, client: Any, run: int, id: str) -> bytes:
        from flwr.proto.message_pb2 import PullObjectRequest
        from httpx import HTTPError

        request, pause = PullObjectRequest(node=self.grid.node, run_id=run, object_id=id), SOONEST
        while not self.stop.is_set():
            try:
                answer = client.PullObject(request)
            except HTTPError as error:
                raise _Lost(f"the reply could not be fetched: {on_one_line(error)}") from error
            if not answer.object_found:
                raise _Lost("the reply was not sent to its end")
            if answer.object_available:
                content: bytes = answer.object_content
                return content
            self.stop.wait(pause)
            pause = min(2 * pause, LATEST)
        raise _Lost("nobody waits for the reply")

    def _refuse_over(self, size: int) -> None:
        if size > self.max_bytes + AROUND:
            raise BadPayload(
                f"the message has {size} bytes or more, over the limit of {self.max_bytes}"
            )


class _Lost(Exception):
    """A reply did not come; its client may be asked again."""


def unfolded(parts: Mapping[str, bytes]) -> int:
    """Bytes of all arrays in a message's parts, of which one part may stand in an array many
    times.
    """
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_head_values_from_object_content,
    )

    size = 0
    for content in parts.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == "Array":
            body = json.loads(content[content.index(b"\0") + 1 :])
            size += sum(len(parts[children[i]]) for i in body["arraychunk_ids"])
    return size


def _ids(tree: Any) -> Iterator[str]:
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        waiting.extend(one.children)
        yield one.object_id
