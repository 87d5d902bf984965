"""The gate in front of a federation's port: sites reach what Flower has for sites, the operator the
rest.

Flower serves three interfaces on one port. One is for sites, each of which signs its requests. The
other two start and stop runs and hand out their work; Flower asks for no password there. So the
gate asks for the operator's key, a secret in a header, for every path that is not one of the
sites'. A path that nobody thought of is the operator's too.
"""

from __future__ import annotations

import binascii
import hmac
import logging
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fedstill.core.errors import ConfigError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_HEADER = "x-fedstill-operator"
"""Carries the operator's key."""

SITES = "/v1/fleet/"
SITES_PATHS = frozenset(
    SITES + name
    for name in (
        "register-node",
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""All that Flower has for sites; with listed keys it refuses the first and the fourth itself."""

SIGNER = b"flwr-public-key"
SIGNED_TIME = b"flwr-timestamp"
"""The headers that a site signs with its request."""

MAX_BODY = 64 << 20
"""Bytes of one request; Flower cuts arrays into pieces of 5 MB."""

MAX_SIGNER = 1000
"""Bytes of a public key, and of a time, as they stand in a header; those of a site have 288
and 32.
"""

SIGNED_SECONDS = 330.0
"""Longer than Flower takes a signed time for now."""

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

    ``key``: the operator's. Whoever asks is known by it alone: not by an address, and by no header
    that a proxy sets.
    ``listed``: whether sites have listed keys; then a request that is not signed is refused before
    its body is read.
    """

    app: Asgi
    key: bytes
    listed: bool = False
    _signed: dict[tuple[bytes, bytes], float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
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
            return await self.app(scope, receive, send)
        if scope["method"] != "POST" or scope["path"] not in SITES_PATHS:
            return await _refuse(scope, send, 403, "this path is the operator's")
        await self._site(scope, receive, send)

    async def _site(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A site's request: never twice with the same key and time, and of limited size."""
        signed = _signed_by(scope)
        if not _is_sized(scope):
            return await _refuse(
                scope, send, 413, f"a site's request says its length, at most {MAX_BODY} bytes"
            )
        if signed is None and self.listed:
            return await _refuse(scope, send, 401, "this request is not signed")
        if signed is not None and self._is_known(signed):
            return await _refuse(scope, send, 401, "this request was made before")
        if signed is not None:
            self._signed[signed] = time.monotonic() + SIGNED_SECONDS

        async def watched(message: MutableMapping[str, Any]) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and 400 <= message["status"] < 500 and signed is not None:
                # Flower refused it, so the owner of the key may not have sent it.
                self._signed.pop(signed, None)
            await send(message)

        await self.app(scope, _counted(receive), watched)

    def _is_known(self, signed: tuple[bytes, bytes]) -> bool:
        time_now = time.monotonic()
        while self._signed and next(iter(self._signed.values())) < time_now:
            del self._signed[next(iter(self._signed))]
        return signed in self._signed


def _is_sized(scope: Scope) -> bool:
    """Whether a request has a length that is not too large; the web server sees that it is the true
    one.
    """
    length = _header(scope, b"content-length")
    # no zeros before it
    plain = length.isdigit() and length == str(int(length[: len(str(MAX_BODY))])).encode()
    return not _header(scope, b"transfer-encoding") and plain and int(length) <= MAX_BODY


def _counted(receive: Receive) -> Receive:
    """The same body, cut off where it is larger than any may be, whatever length it was said to
    have.
    """
    remaining = MAX_BODY

    async def counted() -> MutableMapping[str, Any]:
        nonlocal remaining
        message = await receive()
        remaining -= len(message.get("body", b""))
        if remaining < 0:
            return {"type": "http.disconnect"}
        return message

    return counted


def _signed_by(scope: Scope) -> tuple[bytes, bytes] | None:
    """The key and the time that a request claims to be signed by and at; None if Flower will refuse
    it for having none.

    The key's bytes, not its text: a text can be written in more than one way.
    """
    text = _header(scope, SIGNER)
    signed_time = _header(scope, SIGNED_TIME)
    try:
        key = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    if not key or not signed_time or max(len(text), len(signed_time)) > MAX_SIGNER:
        return None
    return key, signed_time


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
