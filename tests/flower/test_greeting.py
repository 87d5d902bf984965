"""A client's first word with its server: what is in the way is named in one line: a name, a port, a
proxy, a certificate.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federations import federation_in

from fedstill.cli import call
from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.flower.deployment import certificates, folder, node, programs
from fedstill.flower.deployment.control import Control
from fedstill.flower.deployment.reach import Proxy, bypass_proxies, proxy_of, split_address
from fedstill.flower.deployment.tasks import Door
from flowers import needs_flower

pytestmark = needs_flower


@contextmanager
def listening(federation: folder.Federation | None, status: int = 200) -> Iterator[str]:
    """An address where a server with the federation's certificate admits each site, or answers
    with another status; without a federation, a server that has no TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if federation is not None:
        context.load_cert_chain(federation.server / "server.crt", federation.server / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:  # a client that leaves, as it should
                if federation is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                request = connection.recv(100_000)
                connection.sendall(admitted(status if request.startswith(b"POST") else 400))
                connection.close()

        def serve() -> None:
            with contextlib.suppress(OSError):  # the end
                while True:
                    answer(server.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def admitted(status: int) -> bytes:
    """An answer of a server that admits a node, with this HTTP status."""
    from flwr.proto.fleet_pb2 import ActivateNodeResponse

    body = ActivateNodeResponse(node_id=5).SerializeToString()
    head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def greeted(
    federation: folder.Federation,
    server: folder.Federation | None,
    insecure: bool = False,
    status: int = 200,
) -> None:
    """Connect client 0 of a federation to a server of another one."""
    with listening(server, status) as address:
        member = replace(folder.membership(federation.client(0)), address=address)
        connected(member, insecure)


def connected(member: folder.Membership, insecure: bool = False, **changes: Any) -> None:
    """What a client does first: it has the server note that it is there."""
    split_address(member.address, member.folder / "client.toml")
    with node.Server.of(member, insecure) as server:
        for name, value in changes.items():
            setattr(server, name, value)
        server.connect(wait=0)


def certified(
    federation: folder.Federation, host: str = "127.0.0.1", days: int = 9
) -> folder.Federation:
    """The federation with a certificate for this host and so many days."""
    certificates.make_server(
        federation.server, certificates.authority_of(federation.folder), [host], days
    )
    return federation


def test_a_good_certificate_is_taken(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    greeted(federation, federation)


def test_an_expired_certificate_is_named_with_what_to_do(tmp_path: Path) -> None:
    federation = certified(federation_in(tmp_path), days=-1)
    with pytest.raises(DeployFailed, match=r"expired.*deploy renew"):
        greeted(federation, federation)
    with pytest.raises(ConfigError, match=r"server\.crt expired on \d{4}-\d\d-\d\d.*deploy renew"):
        programs.superlink(federation, insecure=False)
    assert call(["deploy", "renew", str(federation.folder)]) == 0
    greeted(federation, federation)
    assert "--ssl-certfile" in programs.superlink(federation, insecure=False)


def test_a_certificate_for_another_host_is_named_and_renewed_for_this_one(tmp_path: Path) -> None:
    federation = certified(federation_in(tmp_path), host="elsewhere.example.org")
    with pytest.raises(
        DeployFailed,
        match=r"127\.0\.0\.1.*renew DIR --host 127\.0\.0\.1",
    ):
        greeted(federation, federation)
    assert call(["deploy", "renew", str(federation.folder), "--host", "fed.example.org"]) == 0
    assert folder.load_federation(federation.folder).hosts == ("127.0.0.1", "fed.example.org")
    greeted(federation, federation)


def test_a_certificate_of_another_authority_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeployFailed, match=r"ca\.crt"):
        greeted(federation_in(tmp_path / "a"), federation_in(tmp_path / "b"))


def test_one_that_speaks_tls_and_one_that_does_not_are_told_so(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    with pytest.raises(DeployFailed, match="--insecure-for-testing"):
        greeted(federation, federation, insecure=True)
    with pytest.raises(DeployFailed, match="does not use TLS"):
        greeted(federation, None)
    greeted(federation, None, insecure=True)


class Stop(Exception):
    """Ends a wait that would go on for ever."""


def waited(
    monkeypatch: pytest.MonkeyPatch, member: folder.Membership, error: Exception | None = None
) -> None:
    """Have a client try three times to reach its server; with an error, each attempt ends so."""
    if error is not None:

        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(socket, "create_connection", fail)
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise Stop

    with pytest.raises(Stop):
        connected(member, sleep=sleep)


def member_at(
    tmp_path: Path, address: str, federation: folder.Federation | None = None
) -> folder.Membership:
    """Client 0 of a federation, whose server has this address."""
    federation = federation or federation_in(tmp_path)
    return replace(folder.membership(federation.client(0)), address=address)


def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_client_that_comes_first_waits_and_prints_the_reason_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = nobody()
    waited(monkeypatch, member_at(tmp_path, address))
    (line,) = capsys.readouterr().out.splitlines()
    assert address in line
    assert "refused" in line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(-2, "Name or service not known"), "no such host"),
        (TimeoutError("timed out"), "firewall"),
        (OSError(113, "No route to host"), "No route to host"),
        (ConnectionRefusedError(111, "Connection refused"), "refused"),
    ],
)
def test_the_reason_of_a_wait_is_printed(
    error: Exception,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waited(monkeypatch, member_at(tmp_path, "fed.example.invalid:18443"), error)
    (line,) = capsys.readouterr().out.splitlines()
    assert "fed.example.invalid:18443" in line
    assert reason in line


@pytest.mark.parametrize("status", [401, 412])
def test_a_client_that_is_refused_is_told_both_reasons(status: int, tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    with pytest.raises(DeployFailed, match=r"not listed.*another machine"):
        greeted(federation, federation, status=status)


def test_a_certificate_that_expires_soon_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = certified(federation_in(tmp_path), days=15)
    greeted(federation, federation)
    assert "expires" not in capsys.readouterr().out
    certified(federation, days=13)
    greeted(federation, federation)
    assert "deploy renew" in capsys.readouterr().out


# Proxies


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A proxy in the environment; it answers every request with the status that is last in the
    list, and adds the request's first line.
    """
    request_lines = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = proxy.accept()
                    with connection:
                        request_lines.append(connection.recv(10_000).decode().splitlines()[0])
                        connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        url = f"http://user:secret@127.0.0.1:{proxy.getsockname()[1]}"
        monkeypatch.setenv("https_proxy", url)
        monkeypatch.setenv("http_proxy", url)
        yield request_lines


def test_loopback_is_never_reached_through_a_proxy(tmp_path: Path, proxied: list[str]) -> None:
    bypass_proxies()
    federation = federation_in(tmp_path)
    greeted(federation, federation)
    authority = (federation.server / "ca.crt").read_bytes()
    with listening(federation) as address, contextlib.suppress(ValueError):  # no list of nodes
        Control(address, authority, b"k" * 43).nodes()
    assert proxied == []


def test_the_servers_own_programs_reach_it_without_a_proxy(
    tmp_path: Path, proxied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A federation may listen on any address of its machine."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.control import ControlHttpClient

    federation = replace(federation_in(tmp_path), listen="192.0.2.7")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    assert proxy_of("192.0.2.7", tls=False) is not None
    with monkeypatch.context() as server:
        for name, value in programs.server_environment(federation).items():
            server.setenv(name, value)
        assert proxy_of("192.0.2.7", tls=False) is None
        with listening(None, status=503) as address:
            client = Door(address, federation.key, federation.signing_key).tasks()
            with pytest.raises(httpx.HTTPStatusError, match="503"):
                client.AcquireTask(AcquireTaskRequest())
            client.close()

    proxies: list[Proxy | None] = []
    monkeypatch.setattr(
        ControlHttpClient, "StopRun", lambda *_: proxies.append(proxy_of("192.0.2.7", tls=False))
    )
    Control(federation.local, None, b"k" * 43).stop(7)
    assert proxies == [None]
    assert proxied == []


def test_what_no_proxy_lists_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    bypass_proxies("127.0.0.5")
    listed = os.environ["no_proxy"].split(",")
    assert {"example.org", "127.0.0.1", "localhost", "127.0.0.5"} <= set(listed)
    monkeypatch.setenv("no_proxy", "*")
    bypass_proxies()
    assert os.environ["no_proxy"] == "*"


def test_a_proxy_that_interferes_is_named_without_its_password(
    tmp_path: Path,
    proxied: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waited(monkeypatch, member_at(tmp_path, "fed.example.invalid:18443"))
    (line,) = capsys.readouterr().out.splitlines()
    assert "https_proxy" in line
    assert "403" in line
    assert "no_proxy=fed.example.invalid" in line
    assert "secret" not in line
    assert set(proxied) == {"CONNECT fed.example.invalid:18443 HTTP/1.1"}


def test_a_proxy_that_is_not_there_is_named(
    tmp_path: Path,
    proxied: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("https_proxy", f"http://{nobody()}")
    waited(monkeypatch, member_at(tmp_path, "fed.example.invalid:18443"))
    (line,) = capsys.readouterr().out.splitlines()
    assert "https_proxy" in line
    assert "refused" in line


def test_a_server_that_only_a_proxy_reaches_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy knows the server's name; this machine does not."""
    federation = certified(federation_in(tmp_path), host="fed.example.invalid")
    with listening(federation) as address, tunnel(address) as (proxy, opened):
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        connected(member_at(tmp_path / "site", "fed.example.invalid:18443", federation))
    assert "CONNECT fed.example.invalid:18443 HTTP/1.1" in opened


@contextmanager
def tunnel(address: str) -> Iterator[tuple[str, list[str]]]:
    """A proxy that leads every connection to one address, and the requests that it got."""
    opened = list[str]()
    ends = contextlib.ExitStack()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with ends, socket.create_server(("127.0.0.1", 0)) as proxy:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = proxy.accept()
                    ends.enter_context(near)
                    opened.append(near.recv(10_000).decode().splitlines()[0])
                    near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    host, _, port = address.rpartition(":")
                    far = ends.enter_context(socket.create_connection((host, int(port))))
                    for source, target in ((near, far), (far, near)):
                        threading.Thread(target=pump, args=(source, target), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{proxy.getsockname()[1]}", opened


def test_an_authority_that_has_expired_signs_nothing(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    certificates.write_authority(federation.folder, certificates.make_authority("old", days=-1))
    with pytest.raises(ConfigError, match="expired"):
        folder.renew(federation, ())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", ":8443", "here:0", "here:99999"])
def test_an_invalid_address_is_refused_before_a_connection(address: str, tmp_path: Path) -> None:
    member = replace(folder.membership(federation_in(tmp_path).client(0)), address=address)

    with pytest.raises(ConfigError, match=f"address = {address!r}"):
        connected(member)
