"""The gate in front of a federation's port: sites can only reach Flower's interface for sites, and
only the operator can reach the other interfaces.

Flower serves three interfaces on one port. One is for sites, which sign their requests. The other
two start and stop runs and distribute their work, and Flower does not authenticate their users.
Therefore, the gate requires the operator's key, a secret in a header, for all paths that are not
paths for sites, including unknown ones.

Flower lets a site with a listed key send messages in the name of the server or of another site, and
fetch or delete objects of other sites. Therefore, the gate reads each request of a site, and only
passes on requests about this site; see ``exchange``.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.core.errors import ConfigError
from fedstill.flower.deployment.exchange import (
    EARLY_SECONDS,
    GET_RUN,
    PULL,
    PUSH,
    PUSH_PART,
    REGISTER,
    SIGNED_SECONDS,
    SITES,
    SITES_PATHS,
    UNREGISTER,
    Exchange,
    Forbidden,
    Signed,
    Site,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_HEADER = "x-fedstill-operator"
"""The header with the operator's key."""

FOR_SITES = ("run_id", "fab_id", "fab_version", "fab_hash", "primary_task_type")
"""The fields of a run that sites may read. Other fields contain folders of the server, and traffic
of all sites.
"""

MAX_BODY = 64 << 10
MAX_BODIES = {PUSH: 16 << 20, PUSH_PART: 16 << 20}
"""The maximum size of a site's request, in bytes. A message lists its parts; Flower splits arrays
into parts of 5 MB.
"""

BODY_SECONDS = 120.0
"""The time limit for the body of a site's request, in seconds."""

SIGNER = b"flwr-public-key"
SIGNED_TIME = b"flwr-timestamp"
SIGNATURE = b"flwr-signature"
"""The headers with the signature of a site's request."""

MAX_AT_ONCE = 16
"""The maximum number of simultaneous requests of a site. Normally, a site has two: for messages and
for heartbeats.
"""

RUN_PUSH, RUN_PULL = "/v1/runtime/push-messages", "/v1/runtime/pull-messages"
"""The paths at which a run sends messages to sites and asks for their replies."""

START_RUN, TAKE_RUN = "/v1/control/start-run", "/v1/runtime/acquire-task"
"""The paths at which the operator starts a run and the server's command asks for runs to execute.
"""

CONTROL = "/v1/control/"

HOLD_SECONDS, RUN_HOLD_SECONDS = 20.0, 2.0
"""The time for which a site's request for messages and a run's request for replies are held if
there are none, in seconds. A run also has to watch its deadline.
"""

log = logging.getLogger("fedstill.gate")


def check_paths(paths: Iterable[str]) -> None:
    """Raise ConfigError if Flower's paths for sites differ from those that the gate knows."""
    sites = {path for path in paths if path.startswith(SITES)}
    if sites != SITES_PATHS:
        different = ", ".join(sorted(sites ^ SITES_PATHS))
        raise ConfigError(
            "this version of Flower has paths for sites that fedstill does not know "
            f"({different}): install the version of Flower with which fedstill was tested"
        )


@dataclass
class Gate:
    """An ASGI application that only passes permitted requests of sites and the operator to ``app``.

    ``key``: the operator's key. Senders are identified only by keys, not by addresses or by headers
    that a proxy sets. ``node_of``: finds the node that is registered with a public key; None for an
    unknown key. ``listed``: whether only the operator registers nodes. ``on_trusted``: called with
    the address and port of a connection whose request has a valid key.
    """

    app: Asgi
    key: bytes
    node_of: Callable[[bytes], int | None]
    listed: bool = True
    on_trusted: Callable[[Any], None] = lambda peer: None
    exchange: Exchange = field(init=False, repr=False)
    held: HeldQuestions = field(init=False, repr=False)
    _used: dict[tuple[bytes, bytes], float] = field(default_factory=dict, repr=False)
    _at_once: Counter[int | None] = field(default_factory=Counter, repr=False)
    _nodes: dict[bytes, int] = field(default_factory=dict, repr=False)
    _changes: int = 0

    def __post_init__(self) -> None:
        self.exchange = Exchange()
        self.held = HeldQuestions()
        if len(self.key) < 32:
            raise ConfigError(
                "the operator's key is shorter than 32 bytes: delete it, so that a new key is "
                "created"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as specified by ASGI."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        if hmac.compare_digest(_header(scope, KEY_HEADER.encode()), self.key):
            self.on_trusted(scope.get("client"))
            return await self._operator(scope, receive, send)
        try:
            await self._site(scope, receive, send)
        except Forbidden as error:
            await _refuse(scope, send, error.status, str(error))

    async def _operator(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with the operator's key, and register sites that receive messages."""
        path = scope["path"]
        if path in (RUN_PUSH, RUN_PULL, TAKE_RUN):
            return await self._of_run(scope, receive, send)
        try:
            await self.app(scope, receive, _retryable(send))
        finally:
            # Even if the connection ended before the answer, Flower may have executed the request.
            if path == START_RUN:
                self.held.runs += 1
                self.held.note_event()
            if path.startswith(CONTROL):
                self._forget_nodes()

    async def _of_run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request of a run, or of the command that asks for runs."""
        path = scope["path"]
        body = await _body(receive)
        if body is None:
            return None
        if path == TAKE_RUN:
            return await self._take_run(body, scope, receive, send)
        if path == RUN_PULL:
            return await self._run_pull(body, scope, receive, send)
        await self._pass_on(body, scope, receive, send)
        self.held.note_messages(body)

    async def _pass_on(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose body was read."""
        await self.app(scope, _in_one_piece(body, receive), _retryable(send))

    async def _take_run(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request for a run as soon as there may be one, or after a while.

        It is passed on once, because Flower does not accept a signature twice.
        """
        if self.held.runs_taken == self.held.runs:
            await self.held.wait_for_event(self.held.events, self.held.seconds)
        runs = self.held.runs
        answer = bytearray()

        async def watched(message: MutableMapping[str, Any]) -> None:
            answer.extend(message.get("body", b""))
            await send(message)

        await self._pass_on(body, scope, receive, watched)
        self.held.runs_taken = runs
        if answer:
            self.held.runs_taken = -1  # there may be another run

    async def _run_pull(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a run's request for replies as soon as there is one, or after a while."""
        until = time.monotonic() + self.held.run_seconds
        while True:
            events = self.held.events
            answer: list[MutableMapping[str, Any]] = []

            async def collect(
                message: MutableMapping[str, Any],
                answer: list[MutableMapping[str, Any]] = answer,
            ) -> None:
                answer.append(message)

            await self._pass_on(body, {**scope}, receive, collect)
            if not _is_empty(answer):
                break
            if not await self.held.wait_for_event(events, until - time.monotonic()):
                break
        for message in answer:
            await send(message)

    async def _site(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a site's request; raises Forbidden, if possible before the body is read.

        The application receives the body in one piece.
        """
        path = scope["path"]
        if scope["method"] != "POST" or path not in SITES_PATHS:
            raise Forbidden(403, "this path is only for the operator")
        if self.listed and path in (REGISTER, UNREGISTER):
            raise Forbidden(403, "only the operator registers sites")
        limit = MAX_BODIES.get(path, MAX_BODY)
        _check_size(scope, limit)
        site = await self._signer(scope)
        if self._at_once[site.node] >= MAX_AT_ONCE:
            raise Forbidden(429, "this site sends too many requests at once")
        self._at_once[site.node] += 1
        try:
            await self._checked(site, limit, scope, receive, send)
        finally:
            self._at_once[site.node] -= 1

    async def _checked(
        self, site: Site, limit: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass on a site's signed request; raises Forbidden if the site may not send it."""
        path = scope["path"]
        body = await _site_body(receive, limit)
        if body is None:
            return None
        self.exchange.check(path, body, site)
        if path == PULL and site.node is not None:
            return await self._pull(site.node, body, scope, receive, send)
        if path == GET_RUN:
            send = _for_sites(send)
        await self._pass_on(body, scope, receive, send)
        if path in (REGISTER, UNREGISTER):
            self._forget_nodes()
        if path == PUSH:
            self.held.note_event()

    async def _pull(
        self, node: int, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass on a site's request for messages as soon as there may be one, and register the
        instructions in the answer.

        The request of a disconnected site is not passed on, because it would consume the message.
        """
        if not await self.held.wait_for_message(node, receive):
            return
        count = self.held.count(node)
        answer = bytearray()

        async def watched(message: MutableMapping[str, Any]) -> None:
            answer.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                fetched = self.exchange.note_instructions(node, bytes(answer))
                self.held.note_answer(node, count, fetched)
            await send(message)

        await self._pass_on(body, scope, receive, watched)

    async def _signer(self, scope: Scope) -> Site:
        """The site whose key signed a request; raises Forbidden without a current signature.

        An unknown key may only register, and only if there is no list of keys.
        """
        signed = Signed.of(
            key=_header(scope, SIGNER),
            time=_header(scope, SIGNED_TIME),
            signature=_header(scope, SIGNATURE),
        )
        if signed is None:
            raise Forbidden(401, "this request is not signed")
        node = await self._node(signed.key)
        if node is None and (self.listed or scope["path"] != REGISTER):
            raise Forbidden(401, "this key is not listed")
        if not signed.is_valid(datetime.datetime.now(datetime.UTC)):
            raise Forbidden(401, "this request has no valid signature of the current time")
        if node is not None:
            self._use(signed)
            self.on_trusted(scope.get("client"))
        return Site(signed.key, node)

    async def _node(self, key: bytes) -> int | None:
        """The node with a key. It is cached until the operator changes something."""
        if key in self._nodes:
            return self._nodes[key]
        changes = self._changes
        node = await asyncio.to_thread(self.node_of, key)
        if node is not None and changes == self._changes:
            self._nodes[key] = node
        return node

    def _forget_nodes(self) -> None:
        """Clear the cache of nodes."""
        self._changes += 1
        self._nodes.clear()

    def _use(self, signed: Signed) -> None:
        """Register a signature; raises Forbidden if it was used before."""
        time_now = time.monotonic()
        while self._used and next(iter(self._used.values())) < time_now:
            del self._used[next(iter(self._used))]
        used = (signed.key, signed.time)
        if used in self._used:
            raise Forbidden(401, "this request was already sent")
        self._used[used] = time_now + SIGNED_SECONDS + EARLY_SECONDS


def _check_size(scope: Scope, limit: int) -> None:
    """Raise Forbidden for a request without a length, or with a length above the limit. The web
    server verifies the length.
    """
    length = _header(scope, b"content-length")
    # no leading zeros
    plain = length.isdigit() and length == str(int(length[: len(str(limit))])).encode()
    if _header(scope, b"transfer-encoding") or not plain or int(length) > limit:
        raise Forbidden(413, f"a site's request must state its length, here at most {limit} bytes")


async def _site_body(receive: Receive, limit: int) -> bytes | None:
    """The body of a site's request, as in ``_body``; also raises Forbidden if it does not arrive in
    time.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _body(receive, limit)
    except TimeoutError:
        raise Forbidden(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None


async def _body(receive: Receive, limit: float = math.inf) -> bytes | None:
    """The body of a request; None if the connection ends before it is complete.

    Raises Forbidden for a body above the limit, regardless of the length in the header.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise Forbidden(413, f"the body is longer than {limit} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def _is_empty(answer: list[MutableMapping[str, Any]]) -> bool:
    """Whether Flower's answer contains no reply."""
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse
    from google.protobuf.message import DecodeError

    if any(message.get("status", 200) != 200 for message in answer):
        return False
    body = b"".join(message.get("body", b"") for message in answer)
    try:
        return not PullAppMessagesResponse.FromString(body).messages_list
    except DecodeError:
        return False


def _in_one_piece(body: bytes, receive: Receive) -> Receive:
    """A receiver that returns a body that was already read, and then the connection's messages."""
    is_read = False

    async def received() -> MutableMapping[str, Any]:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _retryable(send: Send) -> Send:
    """A sender that asks Flower's programs to retry if Flower's server failed, for example without
    free files or memory. They would give up after the status 500, and a run would end.
    """

    async def send_retryable(message: MutableMapping[str, Any]) -> None:
        if message.get("status") == 500:
            message["status"] = 503
        await send(message)

    return send_retryable


def _for_sites(send: Send) -> Send:
    """A sender that reduces an answer about a run to the fields for sites (``FOR_SITES``)."""
    from flwr.proto.run_pb2 import GetRunResponse, Run

    start: MutableMapping[str, Any] = {}
    answer = bytearray()

    async def send_less(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        answer.extend(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = bytes(answer)
        if start["status"] == 200:
            run = GetRunResponse.FromString(body).run
            known = Run(**{name: getattr(run, name) for name in FOR_SITES})
            body = GetRunResponse(run=known).SerializeToString()
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        await send(start)
        await send({"type": "http.response.body", "body": body})

    return send_less


def _header(scope: Scope, name: bytes) -> bytes:
    return next(
        (bytes(value).strip() for key, value in scope["headers"] if key.lower() == name), b""
    )


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    address, *_ = scope.get("client") or ("?",)
    log.warning("refused %.10s %.200r from %s: %s", scope["method"], scope["path"], address, reason)
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"fedstill: {reason}\n".encode()})


# Requests that are held until there is an answer


@dataclass
class HeldQuestions:
    """Holds requests that would get an empty answer, so that programs need not send requests often.

    A site has no message if its last answer was empty, and no run has sent it a message since. Runs
    ask for replies, and the server's command asks for runs.

    ``seconds``: how long a request of a site or the command is held; ``run_seconds``: the same for
    a run. ``events``: the number of replies that sites have sent and runs that the operator has
    started. ``runs``: the number of runs. ``runs_taken``: the number of runs when the command last
    received an empty answer.
    """

    seconds: float = HOLD_SECONDS
    run_seconds: float = RUN_HOLD_SECONDS
    events: int = 0
    runs: int = 0
    runs_taken: int = -1
    is_closed: bool = False
    _messages: Counter[int] = field(default_factory=Counter, repr=False)
    _empty_at: dict[int, int] = field(default_factory=dict, repr=False)
    _site_questions: dict[int, set[asyncio.Event]] = field(default_factory=dict, repr=False)
    _server_questions: set[asyncio.Event] = field(default_factory=set, repr=False)

    def count(self, node: int) -> int:
        """The number of messages that were sent to a site since the server started."""
        return self._messages[node]

    def note_messages(self, body: bytes) -> None:
        """Register the sites to which a run sends messages, and release their requests."""
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from google.protobuf.message import DecodeError

        try:
            request = PushAppMessagesRequest.FromString(body)
        except DecodeError:
            return  # Flower has rejected it
        for message in request.messages_list:
            node = message.metadata.dst_node_id
            self._messages[node] += 1
            for question in self._site_questions.get(node, ()):
                question.set()

    def close(self) -> None:
        """Release all requests, because the server is stopping."""
        self.is_closed = True
        for questions in (*self._site_questions.values(), self._server_questions):
            for question in questions:
                question.set()

    def note_event(self) -> None:
        """Register that there is a reply or a run, and release the requests for them."""
        self.events += 1
        for question in self._server_questions:
            question.set()

    async def wait_for_event(self, events: int, seconds: float) -> bool:
        """Wait until there are more events than a number, for some seconds at most; returns whether
        there are.
        """
        if self.is_closed or seconds <= 0:
            return False
        if self.events != events:
            return True
        question = asyncio.Event()
        self._server_questions.add(question)
        try:
            async with asyncio.timeout(seconds):
                await question.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._server_questions.discard(question)

    def note_answer(self, node: int, count: int, fetched: int | None) -> None:
        """Register the answer to a site's request, which was sent after ``count`` messages.

        ``fetched``: the number of messages in the answer; None for an error.
        """
        if fetched == 0:
            self._empty_at[node] = count
        else:
            self._empty_at.pop(node, None)

    async def wait_for_message(self, node: int, receive: Receive) -> bool:
        """Wait until a site may have a message, or for a while; returns whether it is connected."""
        if self.is_closed or self._empty_at.get(node) != self._messages[node]:
            return True
        question = asyncio.Event()
        questions = self._site_questions.setdefault(node, set())
        questions.add(question)
        answerable = asyncio.ensure_future(question.wait())
        connection = asyncio.ensure_future(receive())
        try:
            await asyncio.wait(
                {answerable, connection},
                timeout=self.seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return not (connection.done() and connection.result()["type"] == "http.disconnect")
        finally:
            questions.discard(question)
            answerable.cancel()
            connection.cancel()
