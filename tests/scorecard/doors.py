"""The row on access: nothing starts without certificates and keys, and no stranger gets in. The
connections use real TLS on loopback addresses.
"""

from __future__ import annotations

import importlib.util
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.flower.deployment import certificates, folder, node, programs
from fedstill.flower.deployment.exchange import PULL
from fedstill.flower.deployment.gate import KEY_HEADER, MAX_BODY, Gate
from fedstill.version import VERSION
from scorecard.trials import Trials, problem_unless, scratch


def strangers(trials: int) -> Trials:
    """Each trial: a start, a connection or a request without a valid certificate or key."""
    missing = [name for name in ("flwr", "cryptography") if importlib.util.find_spec(name) is None]
    if missing:
        return Trials(0, 0, (f"needs {' and '.join(missing)}: pip install 'fedstill[flower]'",))
    problems = dict[str, str]()
    names = list(DOORS)
    for trial in range(trials):
        name = names[trial % len(DOORS)]
        repetition = trial // len(DOORS) + 1
        with scratch() as place:
            problems[f"{name}, {repetition}"] = DOORS[name](place)
    return Trials.of(problems)


def _federation(place: Path, host: str = "127.0.0.1") -> folder.Federation:
    """A federation of one client, whose server listens on an address."""
    return folder.init(place / "fed", 1, (host,), listen=host, port=8443, version=VERSION)


def _stopped(act: Callable[[], object]) -> str:
    """The problem if an action is not refused by an error of fedstill."""
    try:
        act()
    except FedstillError:
        return ""
    return "it was not refused"


def _without_file(name: str) -> Callable[[Path], str]:
    """Starts a server that lacks one of its files."""

    def start(place: Path) -> str:
        federation = _federation(place)
        (federation.server / name).unlink()
        return _stopped(lambda: programs.superlink(federation, insecure=False))

    return start


def _reachable(place: Path) -> str:
    """Start a server without TLS on an address that others can reach."""
    return _stopped(lambda: programs.superlink(_federation(place, "192.0.2.1"), insecure=True))


@contextmanager
def _listening(federation: folder.Federation | None) -> Iterator[str]:
    """An address where a server with the federation's certificate listens; without one, a server
    that has no TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if federation is not None:
        context.load_cert_chain(federation.server / "server.crt", federation.server / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                try:
                    if federation is not None:
                        context.wrap_socket(connection, server_side=True).close()
                    elif connection.recv(1000):
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:
                    return  # the client has closed the connection, as it should

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(30)


def _met(client: folder.Federation, server: folder.Federation | None) -> str:
    """The problem if a client accepts a server, perhaps of another federation or without TLS."""
    with _listening(server) as address:
        member = replace(folder.membership(client.client(0)), address=address)
        return _stopped(lambda: _connected(member))


def _connected(member: folder.Membership) -> None:
    with node.Server.of(member, insecure=False) as server:
        server.connect(wait=0)


def _certified(place: Path, host: str, days: int) -> str:
    """The problem if a client accepts a certificate for a host that is valid for some days."""
    federation = _federation(place)
    certificates.make_server(
        federation.server, certificates.authority_of(federation.folder), [host], days
    )
    return _met(federation, federation)


def _of_another_authority(place: Path) -> str:
    """The problem if a client accepts the server of another federation."""
    return _met(_federation(place / "a"), _federation(place / "b"))


def _at_the_gate(path: str, status: int, headers: Mapping[str, str]) -> Callable[[Path], str]:
    """Sends a stranger's request, which the gate must refuse with a status."""

    def send(place: Path) -> str:
        from gate_requests import Backend, response

        backend = Backend()
        gate = Gate(backend, b"k" * 43, lambda key: None)
        arguments: dict[str, Any] = {k.replace("-", "_"): v for k, v in headers.items()}
        answer = response(gate, path, **arguments)
        return problem_unless(
            answer["status"] == status and not backend.paths,
            f"answered {answer['status']}, and {len(backend.paths)} got through",
        )

    return send


def _repeated(place: Path) -> str:
    """Send a request of a site twice; the gate must accept only the first one."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    from gate_requests import Backend, SiteKey, response

    backend = Backend()
    key = SiteKey()
    gate = Gate(backend, b"k" * 43, {key.public: 5}.get)
    body = PullMessagesRequest(node=Node(node_id=5)).SerializeToString()
    headers = key.headers()
    statuses = [response(gate, PULL, body=body, **headers)["status"] for _ in range(2)]
    return problem_unless(
        statuses == [200, 401] and len(backend.paths) == 1,
        f"answered {statuses}, and {len(backend.paths)} got through",
    )


DOORS: Mapping[str, Callable[[Path], str]] = {
    "a server without a certificate": _without_file("server.crt"),
    "a server without a list of keys": _without_file("allowed/client0.pub"),
    "no TLS where others can reach it": _reachable,
    "a certificate that has expired": lambda place: _certified(place, "127.0.0.1", -1),
    "a certificate for another name": lambda place: _certified(place, "elsewhere.example.org", 9),
    "a certificate of another authority": _of_another_authority,
    "a server in plain text": lambda place: _met(_federation(place), None),
    "a stranger who starts a run": _at_the_gate("/v1/control/start-run", 403, {}),
    "an operator with a wrong key": _at_the_gate(
        "/v1/control/start-run", 403, {KEY_HEADER: "x" * 43}
    ),
    "a signed request that comes again": _repeated,
    "a request that is too large": _at_the_gate(PULL, 413, {"content-length": str(MAX_BODY + 1)}),
}
"""Attempts to get in, which must all be refused: certificates and sockets are real, and the gate is
that of the server.
"""
