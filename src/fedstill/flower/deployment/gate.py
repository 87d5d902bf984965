"""The gate in front of a federation's port: sites reach what Flower has for sites, the operator the
rest.

Flower serves three interfaces on one port. One is for sites, each of which signs its requests. The
other two start and stop runs and hand out their work; Flower asks for no password there. So the
gate asks for the operator's key, a secret in a header, for every path that is not one of the
sites'. A path that nobody thought of is the operator's too.

Flower lets a site with a listed key send messages in the name of the server or of another site, and
fetch or delete what is not its own. So the gate reads each request of a site, and passes on only
what concerns this site: see ``exchange``.
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
"""Carries the operator's key."""

FOR_SITES = ("run_id", "fab_id", "fab_version", "fab_hash", "primary_task_type")
"""What a site learns about a run from Flower. The rest names folders of the server, and counts what
all sites have sent.
"""

MAX_BODY = 64 << 10
MAX_BODIES = {PUSH: 16 << 20, PUSH_PART: 16 << 20}
"""Bytes of one request of a site. A message names its parts; Flower cuts arrays into parts of
5 MB.
"""

BODY_SECONDS = 120.0
"""How long the body of a site's request may take."""

SIGNER = b"flwr-public-key"
SIGNED_TIME = b"flwr-timestamp"
SIGNATURE = b"flwr-signature"
"""The headers by which a site signs its request."""

MAX_AT_ONCE = 16
"""Requests of one site that are answered at a time; a site has two: for messages, and to show that
it is there.
"""

RUN_PUSH, RUN_PULL = "/v1/runtime/push-messages", "/v1/runtime/pull-messages"
"""Where a run hands in messages for sites, and asks for their replies."""

START_RUN, TAKE_RUN = "/v1/control/start-run", "/v1/runtime/acquire-task"
"""Where the operator starts a run, and the server's command asks for a run to carry out."""

CONTROL = "/v1/control/"

HOLD_SECONDS, RUN_HOLD_SECONDS = 20.0, 2.0
"""How long a site's question for messages is held while there is none, and a run's for replies. A
run also watches its deadline.
"""

log = logging.getLogger("fedstill.gate")


def check_paths(paths: Iterable[str]) -> None:
    """Raises ConfigError if Flower's paths for sites are not those that the gate knows."""
    sites = {path for path in paths if path.startswith(SITES)}
    if sites != SITES_PATHS:
        different = ", ".join(sorted(sites ^ SITES_PATHS))
        raise ConfigError(
            f"this version of Flower has other paths for sites than fedstill knows ({different}): "
            "install the version of Flower that this fedstill was tested with"
        )


@dataclass
class Gate:
    """An ASGI application that passes on to ``app`` what sites and the operator may ask, and
    nothing else.

    ``key``: the operator's. Whoever asks is known by a key alone: not by an address, and by no
    header that a proxy sets. ``node_of``: finds the node that is registered with a public key; None
    for an unknown key. ``listed``: whether only the operator registers nodes. ``on_trusted``: is
    called with the address and port of a connection whose request has a valid key.
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
                "the operator's key is shorter than 32 bytes: delete it, and a new one is made"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request, as ASGI has it."""
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
        """Pass on a request with the operator's key, and note which sites get messages by it."""
        path = scope["path"]
        if path in (RUN_PUSH, RUN_PULL, TAKE_RUN):
            return await self._of_run(scope, receive, send)
        try:
            await self.app(scope, receive, _retryable(send))
        finally:
            # Also if the connection ended before the answer: Flower may have done what was asked.
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
        """Pass on a question for a run as soon as there may be one, or after a while.

        It is passed on once: Flower takes no signature twice.
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
            self.held.runs_taken = -1  # there may be another one

    async def _run_pull(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a run's question for replies once there is one, or after a while."""
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
        """Pass on a site's request; raises Forbidden, before the body is read if that is possible.

        Only then is the body read, and the application gets it in one piece.
        """
        path = scope["path"]
        if scope["method"] != "POST" or path not in SITES_PATHS:
            raise Forbidden(403, "this path is the operator's")
        if self.listed and path in (REGISTER, UNREGISTER):
            raise Forbidden(403, "the operator registers sites")
        limit = MAX_BODIES.get(path, MAX_BODY)
        _check_size(scope, limit)
        site = await self._signer(scope)
        if self._at_once[site.node] >= MAX_AT_ONCE:
            raise Forbidden(429, "this site asks for too much at once")
        self._at_once[site.node] += 1
        try:
            await self._checked(site, limit, scope, receive, send)
        finally:
            self._at_once[site.node] -= 1

    async def _checked(
        self, site: Site, limit: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass on a request that a site has signed; raises Forbidden for what it may not ask."""
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
        """Pass on a site's question for messages as soon as there may be one, and note the
        instructions in the answer.

        The question of a site that has left is not passed on: it would take the message.
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
        """The site whose key has signed a request just now; raises Forbidden for any other request.

        An unknown key may only register, and only where no keys are listed.
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
            raise Forbidden(401, "this request has no valid signature of the present time")
        if node is not None:
            self._use(signed)
            self.on_trusted(scope.get("client"))
        return Site(signed.key, node)

    async def _node(self, key: bytes) -> int | None:
        """The node with a key. It is remembered until the operator changes something."""
        if key in self._nodes:
            return self._nodes[key]
        changes = self._changes
        node = await asyncio.to_thread(self.node_of, key)
        if node is not None and changes == self._changes:
            self._nodes[key] = node
        return node

    def _forget_nodes(self) -> None:
        """Look every key up again."""
        self._changes += 1
        self._nodes.clear()

    def _use(self, signed: Signed) -> None:
        """Note a signature; raises Forbidden for one that was used before."""
        time_now = time.monotonic()
        while self._used and next(iter(self._used.values())) < time_now:
            del self._used[next(iter(self._used))]
        used = (signed.key, signed.time)
        if used in self._used:
            raise Forbidden(401, "this request was made before")
        self._used[used] = time_now + SIGNED_SECONDS + EARLY_SECONDS


def _check_size(scope: Scope, limit: int) -> None:
    """Raises Forbidden for a request without a length, or with one over the limit; the web server
    sees that it is the true one.
    """
    length = _header(scope, b"content-length")
    # no zeros before it
    plain = length.isdigit() and length == str(int(length[: len(str(limit))])).encode()
    if _header(scope, b"transfer-encoding") or not plain or int(length) > limit:
        raise Forbidden(413, f"a site's request says its length, here at most {limit} bytes")


async def _site_body(receive: Receive, limit: int) -> bytes | None:
    """The body of a site's request, as ``_body``; raises Forbidden, too, for one that does not come
    in time.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _body(receive, limit)
    except TimeoutError:
        raise Forbidden(408, f"the body did not come within {BODY_SECONDS:g} s") from None


async def _body(receive: Receive, limit: float = math.inf) -> bytes | None:
    """The body of a request; None if the connection ends before.

    Raises Forbidden for a body over the limit, whatever length its header gives.
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
    """Whether an answer of Flower's says that there is no reply yet."""
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
    """Gives a body that was read already, and then what the connection gives."""
    is_read = False

    async def received() -> MutableMapping[str, Any]:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _retryable(send: Send) -> Send:
    """Tells Flower's programs to ask again where Flower's server failed, as it does without free
    files or memory: they give up after the status 500, and a run would end.
    """

    async def send_retryable(message: MutableMapping[str, Any]) -> None:
        if message.get("status") == 500:
            message["status"] = 503
        await send(message)

    return send_retryable


def _for_sites(send: Send) -> Send:
    """Sends an answer about a run with what sites may know of it (``FOR_SITES``)."""
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


# Questions that are held until there is an answer


@dataclass
class HeldQuestions:
    """Holds questions that would get an empty answer, so that nobody need ask often.

    A site has no message if its last answer was empty, and no run has sent it a message since. Runs
    ask for replies, and the server's command asks for runs.

    ``seconds``: how long a question of a site or of the command is held; ``run_seconds``: one of a
    run. ``events``: the replies that sites have sent, and the runs that the operator has started.
    ``runs``: the runs alone. ``runs_taken``: their number when the command last got an empty
    answer.
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
        """How many messages were sent to a site since the server started."""
        return self._messages[node]

    def note_messages(self, body: bytes) -> None:
        """Note the sites to which a run sends messages, and let go of their questions."""
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from google.protobuf.message import DecodeError

        try:
            request = PushAppMessagesRequest.FromString(body)
        except DecodeError:
            return  # Flower has refused it
        for message in request.messages_list:
            node = message.metadata.dst_node_id
            self._messages[node] += 1
            for question in self._site_questions.get(node, ()):
                question.set()

    def close(self) -> None:
        """Hold nothing any more: the server ends."""
        self.is_closed = True
        for questions in (*self._site_questions.values(), self._server_questions):
            for question in questions:
                question.set()

    def note_event(self) -> None:
        """Note that there is a reply, or a run, and let go of the questions for them."""
        self.events += 1
        for question in self._server_questions:
            question.set()

    async def wait_for_event(self, events: int, seconds: float) -> bool:
        """Wait, for some seconds at most, until there are more events than a number; whether there
        are.
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
        """Note the answer to a site's question, which was asked after ``count`` messages.

        ``fetched``: how many messages are in the answer; None for an error.
        """
        if fetched == 0:
            self._empty_at[node] = count
        else:
            self._empty_at.pop(node, None)

    async def wait_for_message(self, node: int, receive: Receive) -> bool:
        """Wait until a site may have a message, or for a while; whether it is still connected."""
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
