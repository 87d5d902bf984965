"""A client's first word with its server: a certificate that is not good is named in one line,
before Flower starts.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedstill.cli import call
from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.flower.deployment import certificates, folder, programs
from flowers import needs_flower

pytestmark = needs_flower


def made(path: Path, clients: int = 1) -> folder.Federation:
    return folder.init(path / "fed", clients, ("127.0.0.1",), "127.0.0.1", 8443, "1.0")


@contextmanager
def listening(federation: folder.Federation | None) -> Iterator[str]:
    """An address where a server with the federation's certificate listens; without one, a server
    that has no TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if federation is not None:
        context.load_cert_chain(federation.server / "server.crt", federation.server / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            there, _ = server.accept()
            with there:
                if federation is None:
                    there.recv(1000)
                    there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                try:
                    context.wrap_socket(there, server_side=True).close()
                except OSError:
                    return  # the client has left, as it should

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(30)


def greeted(
    federation: folder.Federation, server: folder.Federation | None, insecure: bool = False
) -> None:
    with listening(server) as address:
        programs.greet(replace(folder.membership(federation.client(0)), address=address), insecure)


def certified(
    federation: folder.Federation, host: str = "127.0.0.1", days: int = 9
) -> folder.Federation:
    certificates.make_server(
        federation.server, certificates.authority_of(federation.folder), [host], days
    )
    return federation


def test_a_good_certificate_is_taken(tmp_path: Path) -> None:
    federation = made(tmp_path)
    greeted(federation, federation)


def test_an_expired_certificate_is_named_with_what_to_do(tmp_path: Path) -> None:
    federation = certified(made(tmp_path), days=-1)
    with pytest.raises(DeployFailed, match=r"expired.*deploy renew"):
        greeted(federation, federation)
    with pytest.raises(ConfigError, match=r"server\.crt expired on \d{4}-\d\d-\d\d.*deploy renew"):
        programs.superlink(federation, insecure=False)
    assert call(["deploy", "renew", str(federation.folder)]) == 0
    greeted(federation, federation)
    assert "--ssl-certfile" in programs.superlink(federation, insecure=False)


def test_a_certificate_for_another_host_is_named_and_renewed_for_this_one(tmp_path: Path) -> None:
    federation = certified(made(tmp_path), host="elsewhere.example.org")
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
        greeted(made(tmp_path / "a"), made(tmp_path / "b"))


def test_one_that_speaks_tls_and_one_that_does_not_are_told_so(tmp_path: Path) -> None:
    federation = made(tmp_path)
    with pytest.raises(DeployFailed, match="--insecure-for-testing"):
        greeted(federation, federation, insecure=True)
    with pytest.raises(DeployFailed, match="does not speak TLS"):
        greeted(federation, None)
    greeted(federation, None, insecure=True)


def test_a_client_that_comes_first_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    federation, slept = made(tmp_path), list[float]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    member = replace(folder.membership(federation.client(0)), address=nobody)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise TimeoutError

    monkeypatch.setattr(programs, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(TimeoutError):
        programs.greet(member, insecure=False)
    assert nobody in capsys.readouterr().out


def test_an_authority_that_has_expired_signs_nothing(tmp_path: Path) -> None:
    federation = made(tmp_path)
    certificates.write_authority(federation.folder, certificates.make_authority("old", days=-1))
    with pytest.raises(ConfigError, match="expired"):
        folder.renew(federation, ())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", ":8443"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    member = replace(folder.membership(made(tmp_path).client(0)), address=address)
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        programs.greet(member, insecure=False)
