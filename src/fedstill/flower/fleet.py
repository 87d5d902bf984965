"""The clients behind a Flower grid: it identifies their nodes, and sends requests to many clients
at once, with a deadline and retries.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fedstill.core.errors import BadPayload, DeployFailed, cut_reason, on_one_line
from fedstill.flower.messages import (
    RAISED,
    STAGE,
    WHOAMI,
    Contents,
    Request,
    SiteReply,
    config_record,
    header_and_payload,
)

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid


# Replies on a Flower grid are fetched independently, so that a slow, broken or oversized reply does
# not delay others.
#
# Flower's own grid fetches announced replies one after another. It waits for missing parts, stores
# parts before the size of the reply is known, and raises an exception for unreadable replies.
# Therefore, this module fetches replies from a Flower server in one thread each. It uses private
# names of Flower, which a test watches.


FETCH_SECONDS = 0.2
"""The maximum time to wait for replies that are being fetched, in seconds."""

SHORTEST_PAUSE = 0.05
"""The time between two requests while there is work, in seconds."""

PAUSE_SHARE = 0.02
"""The time between two requests for replies, as a share of the time since the stage began."""

LONGEST_PAUSE = 3.0
"""The maximum time between two requests for a missing part of a reply, in seconds."""

REPLY_OVERHEAD = 2 << 20
"""The allowance for a reply besides its arrays, in bytes: its header and Flower's encoding."""

MAX_INTRODUCTION = 1 << 16
"""The maximum size of the reply in which a node identifies its client, in bytes."""

MAX_PARTS = 100_000
"""The maximum number of parts of a reply. Flower splits arrays into parts of 5 MB."""


@dataclass(frozen=True)
class FetchedReply:
    """A reply, or the reason why it is missing.

    ``may_retry``: whether the request may be sent again.
    """

    message: Message | None
    reason: str = ""
    may_retry: bool = False


@dataclass
class ReplyFetcher:
    """The incoming replies of a grid. Each reply has its own size limit."""

    grid: Grid
    # by the id of the message that is answered
    _fetched: dict[str, _ReplyDownload] = field(default_factory=dict)
    # the ids of messages whose replies have not arrived and are no longer needed
    _abandoned: set[str] = field(default_factory=set)

    def pull(self, limits: Mapping[str, int]) -> dict[str, FetchedReply]:
        """The available replies, or the reasons why they are missing, by the id of the request.

        ``limits``: the maximum size of each reply's arrays in bytes, by the id of the request.
        """
        ids = list(limits)
        if not ids:
            return {}
        # without a server in between, replies are complete
        if getattr(type(self.grid), "_runtime_client", None) is None:
            messages = self.grid.pull_messages(ids)
            return {
                message.metadata.reply_to_message_id: FetchedReply(message) for message in messages
            }
        self._start({id: most for id, most in limits.items() if id not in self._fetched})
        fetched = {id: self._fetched[id] for id in ids if id in self._fetched}
        wait([fetch.future for fetch in fetched.values()], FETCH_SECONDS)
        ready = [id for id, fetch in fetched.items() if fetch.future.done()]
        return {id: self._fetched.pop(id).future.result() for id in ready}

    def drop(self, ids: Iterable[str]) -> None:
        """Stop fetching the replies to some messages, because they are no longer needed. The server
        deletes those that arrive later.
        """
        for id in ids:
            if id in self._fetched:
                self._fetched.pop(id).stop.set()
            else:
                self._abandoned.add(id)

    def _start(self, limits: Mapping[str, int]) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        ids = [*limits, *self._abandoned]
        if not ids:
            return
        server: Any = self.grid
        request = PullAppMessagesRequest(message_ids=ids)
        pulled = server._runtime_client.PullMessages(request)
        for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            answered = proto.metadata.reply_to_message_id
            if answered in self._abandoned:
                self._abandoned.discard(answered)
                _confirm(server, proto.metadata.message_id)
            elif answered in limits and answered not in self._fetched:
                fetch = _ReplyDownload(server, proto.metadata.message_id, tree, limits[answered])
                self._fetched[answered] = fetch
                threading.Thread(target=fetch, daemon=True).start()


@dataclass
class _ReplyDownload:
    """A reply that is being fetched. Its parts are requested until they are complete, the reply is
    too large, or it is no longer needed.
    """

    grid: Any
    root: str
    tree: Any
    max_bytes: int
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[FetchedReply] = field(default_factory=Future)

    def __call__(self) -> None:
        try:
            self.future.set_result(self._fetch())
        except _Lost as error:
            self.future.set_result(FetchedReply(None, str(error), may_retry=True))
        except BaseException as error:  # an unreadable reply is only a failure of its client
            self.future.set_result(FetchedReply(None, _problem(error)))

    def _fetch(self) -> FetchedReply:
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        try:
            parts = self._parts(self.grid._runtime_client, self.grid.run.run_id)
        finally:
            _confirm(self.grid, self.root)
        self._check_size(unfolded(parts))
        message = inflate_object_from_contents(self.root, parts)
        if not isinstance(message, Message):
            raise BadPayload("it is not a Flower message")
        return FetchedReply(message)

    def _parts(self, client: Any, run: int) -> dict[str, bytes]:
        ids = list(dict.fromkeys(_ids(self.tree)))
        if len(ids) > MAX_PARTS:
            raise BadPayload(f"the message has {len(ids)} parts, over the limit of {MAX_PARTS}")
        parts: dict[str, bytes] = {}
        size = 0
        for id in ids:
            parts[id] = self._part(client, run, id)
            size += len(parts[id])
            self._check_size(size)
        return parts

    def _part(self, client: Any, run: int, id: str) -> bytes:
        from flwr.proto.message_pb2 import PullObjectRequest
        from httpx import HTTPError

        request = PullObjectRequest(node=self.grid.node, run_id=run, object_id=id)
        pause = SHORTEST_PAUSE
        while not self.stop.is_set():
            try:
                answer = client.PullObject(request)
            except HTTPError as error:
                raise _Lost(f"the reply could not be fetched: {on_one_line(error)}") from error
            if not answer.object_found:
                raise _Lost("the site did not upload the whole reply")
            if answer.object_available:
                content: bytes = answer.object_content
                return content
            self.stop.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise _Lost("the reply is no longer needed")

    def _check_size(self, size: int) -> None:
        """Raise BadPayload for a reply above the limit."""
        if size > self.max_bytes + REPLY_OVERHEAD:
            raise BadPayload(
                f"the message has {size} bytes or more, over the limit of {self.max_bytes}"
            )


def _confirm(grid: Any, reply: str) -> None:
    """Confirm that a reply was received, so that the server deletes it.

    If this fails, a complete reply is still valid, and the reason why a reply was lost still holds.
    """
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from httpx import HTTPError

    received = ConfirmMessageReceivedRequest(
        node=grid.node, run_id=grid.run.run_id, message_object_id=reply
    )
    with suppress(HTTPError):
        grid._runtime_client.ConfirmMessageReceived(received)


class _Lost(Exception):
    """A reply was lost; its request may be sent again."""


def _problem(error: BaseException) -> str:
    """The reason why a reply cannot be read, on one line."""
    if isinstance(error, BadPayload):
        return str(error)
    return on_one_line(error)


def unfolded(parts: Mapping[str, bytes]) -> int:
    """The bytes of all arrays in a message. An array may use the same part several times."""
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_head_values_from_object_content,
    )

    size = 0
    for part in parts.values():
        kind, children, _ = get_object_head_values_from_object_content(part)
        if kind == "Array":
            body = json.loads(part[part.index(b"\0") + 1 :])
            size += sum(len(parts[children[i]]) for i in body["arraychunk_ids"])
    return size


def _ids(tree: Any) -> Iterator[str]:
    """The ids of all objects in a tree, the root first.

    In another order, a reply that is too large would be refused while its site still uploads it.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        yield node.object_id


UNREADABLE = "sent an invalid reply"

MEMBERS_SECONDS = 10.0
"""The time between two checks of the list of members while requests are unanswered, in seconds."""

GRACE = 5.0
"""The time by which a message outlives its stage, in seconds, so that fedstill rather than Flower
reports a missed deadline.
"""


class Clock(Protocol):
    """A clock: the module ``time``, or a grid whose time only advances when a caller waits."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class Patience:
    """Time limits for a stage and retries of its messages.

    ``deadline``: the time for a stage, in seconds. ``ttl``: the time for which a message is valid;
    0: until the deadline. ``retries``: how often a message is sent again if Flower lost it, or if
    it is not answered within its share of the deadline. The latter happens if a node restarts and
    loses its messages, which Flower does not report if the node is back soon. ``poll``: the maximum
    time between two checks for replies; the first checks are more frequent. ``max_bytes``: the
    maximum size of an answer.
    """

    deadline: float = 600.0
    ttl: float = 0.0
    retries: int = 1
    poll: float = 0.2
    max_bytes: int = 1 << 30

    @property
    def share(self) -> float:
        """The time after which an unanswered message is sent again, in seconds."""
        return self.deadline / (self.retries + 1)


@dataclass
class _Call:
    """A request to a client: the number of attempts, pending messages, and the answer.

    ``retry_at``: the time of the next attempt. ``lost``: the reason why the last message was lost.
    """

    request: Request
    attempts: int = 0
    retry_at: float = 0.0
    messages: set[str] = field(default_factory=set)
    lost: str = ""
    answer: SiteReply | None = None


@dataclass
class Fleet:
    """Clients by number, over a grid with its own node ids."""

    grid: Grid
    patience: Patience
    clock: Clock = time
    clients: dict[int, int] = field(default_factory=dict)  # node id -> client
    _stage_start: float = field(default=0.0, init=False)
    _members_checked_at: float = field(default=float("-inf"), init=False)
    # message id -> node that is asked for its client
    _introductions: dict[str, int] = field(default_factory=dict, init=False)
    _fetcher: ReplyFetcher = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._fetcher = ReplyFetcher(self.grid)

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        """One answer for each request, in order; a missing reply becomes a failed answer."""
        self._stage_start = self.clock.monotonic()
        self._members_checked_at = float("-inf")
        end = self._stage_start + self.patience.deadline
        calls = {request.client: _Call(request) for request in requests}
        while True:
            is_late = self.clock.monotonic() >= end
            if not is_late:
                self._send_due(calls, end)
                self._fail_removed([call for call in calls.values() if call.answer is None])
            self._collect(calls)
            if is_late or all(call.answer for call in calls.values()):
                break
            time_now = self.clock.monotonic()
            pause = pause_after(time_now - self._stage_start, self.patience.poll)
            self.clock.sleep(max(0.0, min(pause, end - time_now)))

        for call in calls.values():
            self._fetcher.drop(call.messages)
        return [
            call.answer or _failed(call.request, self._missing_reply_reason(call))
            for call in calls.values()
        ]

    def _send_due(self, calls: dict[int, _Call], end: float) -> None:
        due = [call for call in calls.values() if call.answer is None and self._is_due(call)]
        if due:
            self._send(due, self._nodes(calls, end), end)

    def _fail_removed(self, calls: Sequence[_Call]) -> None:
        """Fail the requests to clients that have been removed from the federation."""
        registered = getattr(self.grid, "registered", None)
        checked_at = self._members_checked_at
        if all(call.attempts for call in calls):
            # All clients were members at the start of the stage.
            checked_at = max(checked_at, self._stage_start)
        if registered is None or self.clock.monotonic() < checked_at + MEMBERS_SECONDS:
            return
        self._members_checked_at = self.clock.monotonic()
        try:
            clients = registered()
        except DeployFailed:
            # A server that does not answer is asked again later.
            return
        for call in calls:
            if call.request.client not in clients:
                call.answer = _failed(call.request, "is not in the federation: no key is listed")

    def _is_due(self, call: _Call) -> bool:
        """Whether a request has to be sent, for the first time or again."""
        if not call.messages:
            return True
        may_retry = call.attempts <= self.patience.retries
        return may_retry and self.clock.monotonic() >= call.retry_at

    def _nodes(self, calls: dict[int, _Call], end: float) -> dict[int, list[int]]:
        """The online nodes of each client.

        A grid with ``members`` identifies clients by their keys, {node id: client}, regardless of
        the nodes' own claims. On other grids, new nodes are asked for their client.
        """
        members = getattr(self.grid, "members", None)
        if members is not None:
            return _by_client(members())
        online = [int(node) for node in self.grid.get_node_ids()]
        self._read_introductions()
        missing_clients = set(calls) - {self.clients.get(node) for node in online}
        if missing_clients:
            waiting = set(self._introductions.values())
            unknown = [n for n in online if n not in self.clients and n not in waiting]
            self._introduce(unknown, end)
        return _by_client({node: self.clients[node] for node in online if node in self.clients})

    def _read_introductions(self) -> None:
        """Store the clients of the nodes that have answered."""
        limits = dict.fromkeys(self._introductions, MAX_INTRODUCTION)
        for id, arrived in self._fetcher.pull(limits).items():
            node = self._introductions.pop(id)
            message = arrived.message
            if message is None or not message.has_content():
                continue
            introduction = config_record(message.content, "whoami") or {}
            client = introduction.get("client")
            if type(client) is int:
                self.clients[node] = client

    def _introduce(self, nodes: Sequence[int], end: float) -> None:
        """Ask nodes for their clients."""
        from flwr.app import ConfigRecord, Message, RecordDict

        if not nodes:
            return
        ttl = min(self._ttl(end), self.patience.share)
        questions = [
            Message(RecordDict({"ask": ConfigRecord()}), node, WHOAMI, ttl=ttl) for node in nodes
        ]
        for id, node in zip(self.grid.push_messages(questions), nodes, strict=True):
            if id:
                self._introductions[id] = node

    def _send(self, calls: Sequence[_Call], nodes: dict[int, list[int]], end: float) -> None:
        from flwr.app import Message

        contents = Contents()
        messages = []
        sending = []
        for call in calls:
            client_nodes = nodes.get(call.request.client, [])
            if len(client_nodes) > 1:
                call.answer = _failed(
                    call.request,
                    f"is claimed by {len(client_nodes)} nodes: stop all but one of them",
                )
            elif client_nodes:
                records = contents.of_request(call.request)
                messages.append(Message(records, client_nodes[0], STAGE, ttl=self._ttl(end)))
                sending.append(call)
        if not messages:
            return
        for call, id in zip(sending, self.grid.push_messages(messages), strict=True):
            call.attempts += 1
            call.retry_at = self.clock.monotonic() + self.patience.share
            if id:
                call.messages.add(id)
            else:
                self._note_loss(call, "the message could not be sent")

    def _collect(self, calls: dict[int, _Call]) -> None:
        under_way = {m: c for c in calls.values() for m in c.messages if c.answer is None}
        limits = {id: self._limit(call.request) for id, call in under_way.items()}
        replies = self._fetcher.pull(limits)
        while replies:
            # Replies are removed one by one, because all encoded and decoded replies together may
            # not fit into memory.
            id, arrived = replies.popitem()
            call = under_way[id]
            call.messages.discard(id)
            if call.answer is not None and not call.answer.failure:
                # The reply to another message with the same request arrived at the same time.
                continue
            message = arrived.message
            if message is None and arrived.may_retry:
                self._note_loss(call, arrived.reason)
            elif message is None:
                call.answer = _failed(call.request, f"{UNREADABLE}: {arrived.reason}")
            elif not message.has_error():
                call.answer = self._read(call.request, message)
            elif message.error.code == RAISED:
                call.answer = _failed(call.request, _reason(message) or "the app raised")
            else:
                self._note_loss(call, f"Flower's error {message.error.code}: {_reason(message)}")

    def _read(self, request: Request, message: Message) -> SiteReply:
        try:
            answer = SiteReply.of(*header_and_payload(message.content, self._limit(request)))
        except Exception as error:  # an unreadable message is only a failure of its client
            return _failed(request, f"{UNREADABLE}: {_problem(error)}")
        if answer.client != request.client:
            return _failed(request, f"answered as client {answer.client}")
        return answer

    def _limit(self, request: Request) -> int:
        """The maximum size of the arrays in the reply to a request, in bytes."""
        return min(request.reply_limit or self.patience.max_bytes, self.patience.max_bytes)

    def _note_loss(self, call: _Call, reason: str) -> None:
        """Register a lost message; the request fails if it may not be sent again."""
        call.lost = reason
        if call.attempts > self.patience.retries and not call.messages:
            call.answer = _failed(call.request, reason)

    def _missing_reply_reason(self, call: _Call) -> str:
        """The reason why a request was not answered by the deadline."""
        if call.lost:
            return call.lost
        deadline = f"within the deadline of {self.patience.deadline:g} s (flower.deadline)"
        if call.attempts:
            return f"did not reply {deadline}"
        return f"was not connected {deadline}"

    def _ttl(self, end: float) -> float:
        return self.patience.ttl or max(1.0, end - self.clock.monotonic()) + GRACE


def pause_after(seconds: float, longest: float) -> float:
    """The time until the next request for replies, some seconds after the start of a stage.

    Replies are requested twenty times per second at first, and then less and less often.
    """
    return min(longest, max(SHORTEST_PAUSE, PAUSE_SHARE * seconds))


def _by_client(nodes: Mapping[int, int]) -> dict[int, list[int]]:
    by_client: dict[int, list[int]] = {}
    for node, client in nodes.items():
        by_client.setdefault(client, []).append(node)
    return by_client


def _reason(message: Message) -> str:
    return " ".join((message.error.reason or "").split())


def _failed(request: Request, reason: str) -> SiteReply:
    stage = request.stage
    return SiteReply(request.client, stage.round, stage.index, failure=cut_reason(reason))
