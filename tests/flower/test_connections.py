"""The limits of a server's connections: strangers cannot use up its files, nor push out a site."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federations import federation_in

from fedstill.core.errors import ConfigError
from fedstill.flower.deployment import folder, superlink
from fedstill.flower.deployment.superlink import Connections
from flowers import needs_flower

pytestmark = needs_flower

HEADERS = [(b"content-length", b"0")]
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Web:
    """The web server of a federation around a small application, in a thread."""

    def __init__(self, federation: folder.Federation, connections: Connections) -> None:
        self.federation = federation
        self.connections = connections
        certificates = federation.server
        config = SimpleNamespace(
            ssl_certfile=str(certificates / "server.crt"),
            ssl_keyfile=str(certificates / "server.key"),
        )
        (self.listening,) = superlink.listeners("127.0.0.1", 0, connections)
        self.port = self.listening.getsockname()[1]
        self.server = superlink.web_server(self.app, config)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        end = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < end, "the web server did not start"
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.listening.close()

    def _run(self) -> None:
        import asyncio

        with asyncio.Runner(loop_factory=superlink.Loop) as runner:
            runner.run(self.server.serve(sockets=[self.listening]))

    async def app(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                event = (await receive())["type"]
                await send({"type": f"{event}.complete"})
                if event == "lifespan.shutdown":
                    return
        self.connections.trust(scope["client"])
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b""})

    def plain(self) -> socket.socket:
        """A connection without a handshake."""
        return socket.create_connection(("127.0.0.1", self.port), 30)

    def encrypted(self) -> ssl.SSLSocket:
        """A connection after its handshake."""
        authority = self.federation.server / "ca.crt"
        context = ssl.create_default_context(cafile=str(authority))
        return context.wrap_socket(self.plain(), server_hostname="127.0.0.1")

    def until_open(self, count: int) -> None:
        """Wait until so many connections are open."""
        end = time.monotonic() + 30
        while len(self.connections) != count:
            assert time.monotonic() < end, f"{len(self.connections)} connections, not {count}"
            time.sleep(0.01)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    """A server that admits 16 connections."""
    federation = federation_in(tmp_path)
    started = Web(federation, Connections(16))
    yield started
    started.close()


def is_answered(connection: socket.socket) -> bool:
    """Whether a request over the connection gets its answer."""
    connection.settimeout(30)
    try:
        connection.sendall(REQUEST)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            part = connection.recv(1000)
            if not part:
                return False
            answer += part
        return answer.startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def is_ended(connection: socket.socket, seconds: float = 30.0) -> bool:
    """Whether the server ends the connection within this time."""
    connection.settimeout(seconds)
    try:
        while connection.recv(100):
            continue  # the rest of an answer
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_a_connection_without_a_whole_head_ends(
    head: bytes, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "HEAD_SECONDS", 0.2)
    with web.encrypted() as connection:
        connection.sendall(head)
        assert is_ended(connection)
    web.until_open(0)


def test_a_second_request_has_a_time_limit_too(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "HEAD_SECONDS", 0.2)
    with web.encrypted() as connection:
        assert is_answered(connection)
        connection.sendall(b"G")
        assert is_ended(connection, 4.0)


def test_a_connection_without_a_handshake_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "HANDSHAKE_SECONDS", 0.2)
    federation = federation_in(tmp_path)
    web = Web(federation, Connections(16))
    with web.plain() as connection:
        assert is_ended(connection)
    web.until_open(0)
    web.close()


def test_a_head_that_is_too_long_is_refused(web: Web) -> None:
    with web.encrypted() as connection, contextlib.suppress(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)
        assert not connection.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_of_strangers_push_out_each_other_and_no_site(web: Web) -> None:
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(web.encrypted())
        assert is_answered(site)
        strangers = [stack.enter_context(web.plain()) for _ in range(40)]
        web.until_open(8)
        assert is_ended(strangers[0])
        assert is_answered(site)
        newcomer = stack.enter_context(web.encrypted())
        assert is_answered(newcomer)
        assert len(web.connections) == 8


def test_where_all_connections_are_trusted_a_new_one_is_refused(web: Web) -> None:
    with contextlib.ExitStack() as stack:
        sites = [stack.enter_context(web.encrypted()) for _ in range(8)]
        assert all(is_answered(site) for site in sites)
        with web.plain() as one_more:
            assert is_ended(one_more)
        assert all(is_answered(site) for site in sites)


def test_an_address_has_half_of_the_connections() -> None:
    connections = Connections(4)
    pairs = [socket.socketpair() for _ in range(6)]
    addresses = ["a", "a", "b", "b", "c", "a"]
    peers = [
        superlink.Connection(near.detach(), (address, port), connections)
        for port, ((near, _), address) in enumerate(zip(pairs, addresses, strict=True))
    ]
    assert all(connections.admit(peer) for peer in peers[:4])
    connections.trust(("a", 0))
    connections.trust(("b", 2))
    connections.trust(("b", 3))

    assert connections.admit(peers[4]), "the one of address a that is not trusted makes room"
    assert peers[1].is_evicted
    assert connections.admit(peers[5])
    assert peers[4].is_evicted
    assert len(connections) == 4

    for peer in peers:
        peer.close()
    assert len(connections) == 0
    assert connections._of_address == {}
    assert connections._evicted == 0
    for _, far in pairs:
        far.close()


def test_too_few_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 1024, "hard": 1024}
    monkeypatch.setattr(
        superlink.resource, "getrlimit", lambda limit: (limits["soft"], limits["hard"])
    )
    raised: list[Any] = []
    monkeypatch.setattr(superlink.resource, "setrlimit", lambda limit, to: raised.append(to))
    assert superlink.allowed_connections() == 1024 - superlink.RESERVED_FILES
    limits["hard"] = 100_000
    assert superlink.allowed_connections() == superlink.MAX_CONNECTIONS
    assert raised[-1] == (superlink.MAX_CONNECTIONS + superlink.RESERVED_FILES, 100_000)
    limits.update(soft=256, hard=256)
    with pytest.raises(ConfigError, match="ulimit -n"):
        superlink.allowed_connections()


def test_strangers_cannot_fill_the_log() -> None:
    clock_time = 1000.0
    few = superlink.FewLines(lambda: clock_time)

    def lines(text: str, count: int) -> list[str]:
        records = [logging.LogRecord("x", 30, "", 0, text, ("y",), None) for _ in range(count)]
        return [record.getMessage() for record in records if few.filter(record)]

    logged = lines("refused %s", 100)
    assert len(logged) == superlink.LOG_LINES
    assert set(logged[:-1]) == {"refused y"}
    assert f"{superlink.LOG_SECONDS:g} s" in logged[-1]
    assert lines("another %s", 1) == ["another y"]
    clock_time += superlink.LOG_SECONDS + 1
    assert lines("refused %s", 1) == ["refused y"]


def test_errors_of_flowers_that_are_none_are_explained() -> None:
    def logged(text: str, *arguments: object) -> logging.LogRecord:
        record = logging.LogRecord("flwr", logging.ERROR, "", 0, text, arguments, None)
        assert superlink.explain(record)
        return record

    late = logged("Message with ID %s does not exist.", "abc")
    assert late.levelname == "WARNING"
    assert late.getMessage().startswith("Message with ID abc does not exist.")
    assert "site" in late.getMessage()
    failure = logged("[/v1/runtime/x][UnexpectedError:OSError] %s", "no space left")
    assert failure.levelname == "ERROR"
    assert failure.getMessage().endswith("no space left")
