"""The clients behind a Flower grid: which node is which, and asking many at once, with a deadline
and retries.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fedstill.core.errors import BadPayload, cut_reason, on_one_line
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


# Replies on a Flower grid, each by itself: one that is slow, broken or too large holds up nobody
# else's.
#
# Flower's own grid fetches the replies that were announced one after another. It waits for parts
# that have not come yet, keeps all of them before their size is known, and raises for a reply that
# it cannot read. So replies from a Flower server are fetched here, a thread for each. This leans on
# names of Flower's that are not public, which a test watches.


BRIEFLY = 0.2
"""The most seconds that a look waits for replies which are being fetched."""

LATEST = 3.0
"""The most seconds between two questions for a part of a reply that has not come."""

AROUND = 2 << 20
"""Bytes of a reply beside its arrays: its header, and what Flower writes around them."""

MAX_INTRODUCTION = 1 << 16
"""The most bytes of the reply of a node that is asked which client it is."""

MAX_PARTS = 100_000
"""The parts of a reply: Flower cuts arrays into pieces of 5 MB."""


@dataclass(frozen=True)
class Arrived:
    """A reply, or the reason why it did not come.

    ``may_retry``: whether the request may be sent again.
    """

    message: Message | None
    reason: str = ""
    may_retry: bool = False


@dataclass
class Arrivals:
    """The replies that come in over a grid. Each has a size limit of its own."""

    grid: Grid
    # by the id of the message that is answered
    _fetched: dict[str, _Fetch] = field(default_factory=dict)

    def pull(self, limits: Mapping[str, int]) -> dict[str, Arrived]:
        """The replies, or reasons why there are none, by the ids of the messages that have one.

        ``limits``: the most bytes of the arrays of each reply, by the id of the message.
        """
        ids = list(limits)
        if not ids:
            return {}
        # no server is between: replies are whole
        if getattr(type(self.grid), "_runtime_client", None) is None:
            messages = self.grid.pull_messages(ids)
            return {message.metadata.reply_to_message_id: Arrived(message) for message in messages}
        self._start({id: most for id, most in limits.items() if id not in self._fetched})
        fetched = {id: self._fetched[id] for id in ids if id in self._fetched}
        wait([fetch.future for fetch in fetched.values()], BRIEFLY)
        ready = [id for id, fetch in fetched.items() if fetch.future.done()]
        return {id: self._fetched.pop(id).future.result() for id in ready}

    def drop(self, ids: Iterable[str]) -> None:
        """Stop fetching the replies to some messages: nobody waits for them any more."""
        for id in ids:
            if id in self._fetched:
                self._fetched.pop(id).stop.set()

    def _start(self, limits: Mapping[str, int]) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        if not limits:
            return
        server: Any = self.grid
        request = PullAppMessagesRequest(message_ids=list(limits))
        pulled = server._runtime_client.PullMessages(request)
        for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            answered = proto.metadata.reply_to_message_id
            if answered in limits and answered not in self._fetched:
                fetch = _Fetch(server, proto.metadata.message_id, tree, limits[answered])
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
    future: Future[Arrived] = field(default_factory=Future)

    def __call__(self) -> None:
        try:
            self.future.set_result(self._fetch())
        except _Lost as error:
            self.future.set_result(Arrived(None, str(error), may_retry=True))
        except BaseException as error:  # an unreadable reply is a failure of one client only
            self.future.set_result(Arrived(None, _problem(error)))

    def _fetch(self) -> Arrived:
        from flwr.app import Message
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        client = self.grid._runtime_client
        run = self.grid.run.run_id
        received = ConfirmMessageReceivedRequest(
            node=self.grid.node, run_id=run, message_object_id=self.root
        )
        try:
            parts = self._parts(client, run)
        finally:
            # After this the server deletes the reply.
            client.ConfirmMessageReceived(received)
        self._check_size(unfolded(parts))
        message = inflate_object_from_contents(self.root, parts)
        if not isinstance(message, Message):
            raise BadPayload("it is no message")
        return Arrived(message)

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
        pause = SOONEST
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

    def _check_size(self, size: int) -> None:
        """Raises BadPayload for a reply over the limit."""
        if size > self.max_bytes + AROUND:
            raise BadPayload(
                f"the message has {size} bytes or more, over the limit of {self.max_bytes}"
            )


class _Lost(Exception):
    """A reply did not come; its request may be sent again."""


def _problem(error: BaseException) -> str:
    """The reason why a reply cannot be read, on one line."""
    if isinstance(error, BadPayload):
        return str(error)
    return on_one_line(error)


def unfolded(parts: Mapping[str, bytes]) -> int:
    """Bytes of all arrays in a message's parts, of which one part may stand in an array many
    times.
    """
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
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        yield node.object_id


UNREADABLE = "sent an invalid reply"

MEMBERS_SECONDS = 10.0
"""Seconds between two looks at the list of members while requests have no answer."""

GRACE = 5.0
"""Seconds by which a message outlives its stage: that the deadline has passed is then ours to say,
not Flower's.
"""


class Clock(Protocol):
    """What time it is, and waiting: the module ``time``, or a grid in which time passes by waiting
    alone.
    """

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class Patience:
    """How long a stage may take and how often a message is sent again.

    ``deadline``: seconds for a stage. ``ttl``: seconds that a message stays valid; 0: until the
    deadline. ``retries``: how often a message is sent again that Flower lost, or that has no answer
    in its share of the deadline: what a node held when it restarted is gone, and Flower does not
    say so if it is back soon. ``poll``: the most seconds between looks; the first ones are nearer.
    ``max_bytes``: of an answer.
    """

    deadline: float = 600.0
    ttl: float = 0.0
    retries: int = 1
    poll: float = 0.2
    max_bytes: int = 1 << 30

    @property
    def share(self) -> float:
        """Seconds after which a message without an answer is sent again."""
        return self.deadline / (self.retries + 1)


@dataclass
class _Call:
    """One client's request: how often it was sent, the messages under way, and its answer.

    ``retry_at``: the time at which it is sent again. ``lost``: why the last message was lost.
    """

    request: Request
    attempts: int = 0
    retry_at: float = 0.0
    messages: set[str] = field(default_factory=set)
    lost: str = ""
    answer: SiteReply | None = None


@dataclass
class Fleet:
    """Clients by their number, over a grid that knows nodes by ids of its own."""

    grid: Grid
    patience: Patience
    clock: Clock = time
    clients: dict[int, int] = field(default_factory=dict)  # node id -> client
    _began: float = field(default=0.0, init=False)  # the stage
    _looked_at: float = field(default=float("-inf"), init=False)  # the list of members
    _asked: dict[str, int] = field(default_factory=dict)  # message id -> node asked who it is
    _arrivals: Arrivals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._arrivals = Arrivals(self.grid)

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        """One answer for each request, in their order; without a reply, a failure with a reason."""
        self._began = self.clock.monotonic()
        self._looked_at = float("-inf")
        end = self._began + self.patience.deadline
        calls = {request.client: _Call(request) for request in requests}
        pace = Pace(self.clock.monotonic)
        pace.worked()
        while True:
            is_late = self.clock.monotonic() >= end
            if not is_late:
                self._send_due(calls, end)
                self._fail_removed([call for call in calls.values() if call.answer is None])
            self._collect(calls)
            if is_late or all(call.answer for call in calls.values()):
                break
            remaining = end - self.clock.monotonic()
            self.clock.sleep(max(0.0, min(pace.wait(self.patience.poll), remaining)))

        for call in calls.values():
            self._arrivals.drop(call.messages)
        return [
            call.answer or _failed(call.request, self._silence(call)) for call in calls.values()
        ]

    def _send_due(self, calls: dict[int, _Call], end: float) -> None:
        due = [call for call in calls.values() if call.answer is None and self._is_due(call)]
        if due:
            self._send(due, self._nodes(calls, end), end)

    def _fail_removed(self, calls: Sequence[_Call]) -> None:
        """Fail the requests to clients that the federation has no more: nobody waits for them."""
        registered = getattr(self.grid, "registered", None)
        looked_at = self._looked_at
        if all(call.attempts for call in calls):
            # All were members when the stage began.
            looked_at = max(looked_at, self._began)
        if registered is None or self.clock.monotonic() < looked_at + MEMBERS_SECONDS:
            return
        self._looked_at = self.clock.monotonic()
        clients = registered()
        for call in calls:
            if call.request.client not in clients:
                call.answer = _failed(call.request, "is not in the federation: no key is listed")

    def _is_due(self, call: _Call) -> bool:
        """Whether a request is to be sent, for the first time or again."""
        if not call.messages:
            return True
        may_retry = call.attempts <= self.patience.retries
        return may_retry and self.clock.monotonic() >= call.retry_at

    def _nodes(self, calls: dict[int, _Call], end: float) -> dict[int, list[int]]:
        """The nodes of each client that are online.

        A grid with ``members`` knows clients by their keys, {node id: client}; what a node says of
        itself counts for nothing there. On any other grid, new nodes are asked which client they
        are.
        """
        members = getattr(self.grid, "members", None)
        if members is not None:
            return _by_client(members())
        online = [int(node) for node in self.grid.get_node_ids()]
        self._read_introductions()
        are_missing = set(calls) - {self.clients.get(node) for node in online}
        if are_missing:
            waiting = set(self._asked.values())
            unknown = [n for n in online if n not in self.clients and n not in waiting]
            self._introduce(unknown, end)
        return _by_client({node: self.clients[node] for node in online if node in self.clients})

    def _read_introductions(self) -> None:
        """Note which clients the nodes are that have answered."""
        limits = dict.fromkeys(self._asked, MAX_INTRODUCTION)
        for id, arrived in self._arrivals.pull(limits).items():
            node = self._asked.pop(id)
            message = arrived.message
            if message is None or not message.has_content():
                continue
            introduction = config_record(message.content, "whoami") or {}
            client = introduction.get("client")
            if type(client) is int:
                self.clients[node] = client

    def _introduce(self, nodes: Sequence[int], end: float) -> None:
        """Ask nodes which clients they are."""
        from flwr.app import ConfigRecord, Message, RecordDict

        if not nodes:
            return
        ttl = min(self._ttl(end), self.patience.share)
        questions = [
            Message(RecordDict({"ask": ConfigRecord()}), node, WHOAMI, ttl=ttl) for node in nodes
        ]
        for id, node in zip(self.grid.push_messages(questions), nodes, strict=True):
            if id:
                self._asked[id] = node

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
                self._lose(call, "the message could not be sent")

    def _collect(self, calls: dict[int, _Call]) -> None:
        under_way = {m: c for c in calls.values() for m in c.messages if c.answer is None}
        limits = {id: self._limit(call.request) for id, call in under_way.items()}
        replies = self._arrivals.pull(limits)
        while replies:
            # One leaves at a time: all encoded and all decoded replies may not fit into memory.
            id, arrived = replies.popitem()
            call = under_way[id]
            call.messages.discard(id)
            message = arrived.message
            if message is None and arrived.may_retry:
                self._lose(call, arrived.reason)
            elif message is None:
                call.answer = _failed(call.request, f"{UNREADABLE}: {arrived.reason}")
            elif not message.has_error():
                call.answer = self._read(call.request, message)
            elif message.error.code == RAISED:
                call.answer = _failed(call.request, _reason(message) or "the app raised")
            else:
                self._lose(call, f"Flower's error {message.error.code}: {_reason(message)}")

    def _read(self, request: Request, message: Message) -> SiteReply:
        try:
            answer = SiteReply.of(*header_and_payload(message.content, self._limit(request)))
        except Exception as error:  # an unreadable message is a failure of one client only
            return _failed(request, f"{UNREADABLE}: {_problem(error)}")
        if answer.client != request.client:
            return _failed(request, f"answered as client {answer.client}")
        return answer

    def _limit(self, request: Request) -> int:
        """The most bytes of the arrays in the reply to a request."""
        return min(request.reply_limit or self.patience.max_bytes, self.patience.max_bytes)

    def _lose(self, call: _Call, reason: str) -> None:
        """Note a lost message; the request fails if it may not be sent again."""
        call.lost = reason
        if call.attempts > self.patience.retries and not call.messages:
            call.answer = _failed(call.request, reason)

    def _silence(self, call: _Call) -> str:
        """The reason why a request has no answer at the deadline."""
        if call.lost:
            return call.lost
        deadline = f"within the deadline of {self.patience.deadline:g} s (flower.deadline)"
        if call.attempts:
            return f"did not reply {deadline}"
        return f"was not connected {deadline}"

    def _ttl(self, end: float) -> float:
        return self.patience.ttl or max(1.0, end - self.clock.monotonic()) + GRACE


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


# How long a program waits before it asks again


SOONEST = 0.05
"""Seconds between two questions while there is work."""

SHARE = 0.02
"""Of the time since there was work last, that is waited before the next question."""


@dataclass
class Pace:
    """How long to wait for the next question, in seconds: never longer than asked for.

    A federation at work is asked twenty times a second, one that has been idle for two minutes
    every three seconds.
    """

    clock: Callable[[], float] = time.monotonic
    busy: float = field(default=float("-inf"))

    def worked(self) -> None:
        """There was work just now."""
        self.busy = self.clock()

    def wait(self, most: float) -> float:
        """Seconds until the next question, at most ``most``."""
        return min(most, max(SOONEST, SHARE * (self.clock() - self.busy)))
