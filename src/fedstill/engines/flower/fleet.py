"""The clients behind a Flower grid: which node is which, and asking many at once, with a deadline
and retries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fedstill.engines.flower.arriving import Arrivals
from fedstill.engines.flower.messages import STAGE, WHOAMI, content, header_and_payload
from fedstill.engines.flower.requests import Request, SiteReply
from fedstill.engines.flower.waiting import Pace
from fedstill.errors import BadPayload, cut_reason, on_one_line

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

RAISED = 2
"""Flower's error code for a ClientApp that raised: asking again would raise again."""

UNREADABLE = "answered with no answer"

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
    """One client's request: the messages under way, how often and when last it was sent, its
    result.
    """

    request: Request
    sent: int = 0
    again: float = 0.0  # when it is due to be sent again
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
    _asked: dict[str, int] = field(default_factory=dict)  # message id -> node asked who it is
    _arrivals: Arrivals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._arrivals = Arrivals(self.grid, self.patience.max_bytes)

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        """One answer for each request, in their order; what did not come is a failure that says
        why.
        """
        end = self.clock.monotonic() + self.patience.deadline
        calls, pace = {r.client: _Call(r) for r in requests}, Pace(self.clock.monotonic)
        pace.worked()
        while True:
            left = end - self.clock.monotonic()
            due = (
                [c for c in calls.values() if c.answer is None and self._due(c)] if left > 0 else []
            )
            if due:
                self._send(due, self._nodes(calls, end), end)
            self._collect(calls)
            if all(c.answer for c in calls.values()) or left <= 0:
                break
            self.clock.sleep(
                max(0.0, min(pace.wait(self.patience.poll), end - self.clock.monotonic()))
            )
        self._arrivals.drop(m for c in calls.values() for m in c.messages)
        return [c.answer or _failed(c.request, self._silence(c)) for c in calls.values()]

    def _due(self, call: _Call) -> bool:
        return not call.messages or (
            call.sent <= self.patience.retries and self.clock.monotonic() >= call.again
        )

    def _nodes(self, calls: dict[int, _Call], end: float) -> dict[int, list[int]]:
        """The nodes of each client that are online.

        A grid with ``members`` knows clients by their keys, {node id: client}; what a node says of
        itself counts for nothing there. On any other grid, new nodes are asked which client they
        are.
        """
        members = getattr(self.grid, "members", None)
        if members is not None:
            return _by_client(members())
        online = [int(n) for n in self.grid.get_node_ids()]
        for id, came in self._arrivals.pull(self._asked).items():
            node = self._asked.pop(id)
            if came.message is not None and came.message.has_content():
                client = came.message.content.config_records.get("whoami", {}).get("client")
                if type(client) is int:
                    self.clients[node] = client
        waiting = set(self._asked.values())
        if set(calls) - {self.clients.get(n) for n in online}:
            self._introduce([n for n in online if n not in self.clients and n not in waiting], end)
        return _by_client({n: self.clients[n] for n in online if n in self.clients})

    def _introduce(self, nodes: Sequence[int], end: float) -> None:
        from flwr.app import ConfigRecord, Message, RecordDict

        ttl = min(self._ttl(end), self.patience.share)
        ask = [Message(RecordDict({"ask": ConfigRecord()}), n, WHOAMI, ttl=ttl) for n in nodes]
        ids = self.grid.push_messages(ask) if ask else []
        self._asked.update({i: n for i, n in zip(ids, nodes, strict=True) if i})

    def _send(self, calls: Sequence[_Call], nodes: dict[int, list[int]], end: float) -> None:
        from flwr.app import Message

        messages, sending = [], []
        for call in calls:
            there = nodes.get(call.request.client, [])
            if len(there) > 1:
                call.answer = _failed(
                    call.request, f"is claimed by {len(there)} nodes: stop all but one of them"
                )
            elif there:
                messages.append(Message(content(call.request), there[0], STAGE, ttl=self._ttl(end)))
                sending.append(call)
        for call, id in zip(
            sending, self.grid.push_messages(messages) if messages else [], strict=True
        ):
            call.sent, call.again = call.sent + 1, self.clock.monotonic() + self.patience.share
            if id:
                call.messages.add(id)
            else:
                self._lose(call, "the message could not be sent")

    def _collect(self, calls: dict[int, _Call]) -> None:
        under_way = {m: c for c in calls.values() for m in c.messages if c.answer is None}
        for id, came in self._arrivals.pull(under_way).items():
            call, message = under_way[id], came.message
            call.messages.discard(id)
            if message is None and came.again:
                self._lose(call, came.wrong)
            elif message is None:
                call.answer = _failed(call.request, f"{UNREADABLE}: {came.wrong}")
            elif not message.has_error():
                call.answer = self._read(call.request, message)
            elif message.error.code == RAISED:
                call.answer = _failed(call.request, _reason(message) or "the app raised")
            else:
                self._lose(call, f"Flower's error {message.error.code}: {_reason(message)}")

    def _read(self, request: Request, message: Message) -> SiteReply:
        try:
            answer = SiteReply.of(*header_and_payload(message.content, self.patience.max_bytes))
        except Exception as error:  # whatever a message does to its reader, it is one client's
            said = str(error) if isinstance(error, BadPayload) else on_one_line(error)
            return _failed(request, f"{UNREADABLE}: {said}")
        if answer.client != request.client:
            return _failed(request, f"answered as client {answer.client}")
        return answer

    def _lose(self, call: _Call, why: str) -> None:
        call.lost = why
        if call.sent > self.patience.retries and not call.messages:
            call.answer = _failed(call.request, why)

    def _silence(self, call: _Call) -> str:
        if call.lost:
            return call.lost
        late = f"within the deadline of {self.patience.deadline:g} s (flower.deadline)"
        return f"did not reply {late}" if call.sent else f"was not connected {late}"

    def _ttl(self, end: float) -> float:
        return self.patience.ttl or max(1.0, end - self.clock.monotonic()) + GRACE


def _by_client(nodes: Mapping[int, int]) -> dict[int, list[int]]:
    by_client: dict[int, list[int]] = {}
    for node, client in nodes.items():
        by_client.setdefault(client, []).append(node)
    return by_client


def _reason(message: Message) -> str:
    return " ".join((message.error.reason or "").split())


def _failed(request: Request, why: str) -> SiteReply:
    return SiteReply(
        request.client, request.stage.round, request.stage.index, failure=cut_reason(why)
    )
