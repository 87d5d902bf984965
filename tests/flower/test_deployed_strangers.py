"""Over real processes: clients that a server must not admit, and servers that a client must not
trust. Slow.

Each is tried twice: with Flower's own SuperNode, which must stay outside even if no check of
fedstill runs first, and with ``fedstill deploy client``, which must report the reason in one line.
All start together, so that they wait at the same time.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedstill.flower.deployment import certificates, folder, programs
from fedstill.flower.deployment.control import write_link
from fedstill.flower.deployment.folder import Federation, Membership
from flowers import needs_flower
from processes import (
    Deployment,
    fedstill_command,
    flower_program,
    free_port,
    run_fedstill,
    running,
    wait_for_port,
)

pytestmark = [pytest.mark.slow, needs_flower]

SECONDS = 120
"""The time after which a SuperNode is ended; it never gives up on a server with a bad
certificate.
"""

REASONS = {
    "wrong CA": "is not signed by this client's ca.crt",
    "expired": "deploy renew DIR",
    "wrong host name": "is not valid for 127.0.0.1; on the server: fedstill deploy renew DIR "
    "--host 127.0.0.1",
    "unknown key": "its key is not listed",
    "plain-text client": "uses TLS: remove --insecure-for-testing",
}


@dataclass
class Attempt:
    """Both programs of a stranger; the logs ``node`` and ``ours`` are in ``folder``."""

    node: subprocess.Popen[bytes]
    ours: subprocess.Popen[bytes]
    folder: Path


@pytest.fixture(scope="module")
def attempts(
    three: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Attempt]]:
    """The attempts of all strangers, which have started."""
    place = tmp_path_factory.mktemp("strangers")
    started: dict[str, Attempt] = {}
    with contextlib.ExitStack() as stack:
        for case in REASONS:
            folder_of_case = place / case.replace(" ", "-")
            member = stranger(case, three, folder_of_case, stack)
            insecure = case == "plain-text client"
            node_command = ["timeout", str(SECONDS), *flowers_own(member, insecure)]
            arguments = ["deploy", "client", str(member.folder), "--wait", "0"]
            if insecure:
                arguments.append("--insecure-for-testing")
            client_command = fedstill_command(*arguments)
            started[case] = Attempt(
                node=stack.enter_context(logged(node_command, folder_of_case / "node")),
                ours=stack.enter_context(logged(client_command, folder_of_case / "ours")),
                folder=folder_of_case,
            )
        yield started


def flowers_own(member: Membership, insecure: bool) -> list[str]:
    """The command that starts Flower's own SuperNode as a member."""
    command = [flower_program("flower-supernode"), "--superlink", member.address]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    if insecure:
        return [*command, "--insecure"]
    return [
        *command,
        "--root-certificates",
        str(member.folder / "ca.crt"),
        "--auth-supernode-private-key",
        str(member.key),
    ]


@contextlib.contextmanager
def logged(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in a file."""
    environment = programs.environment(log.parent)
    with (
        log.open("wb") as file,
        running(command, environment, stdout=file, stderr=file) as process,
    ):
        yield process


def stranger(case: str, three: Deployment, place: Path, stack: contextlib.ExitStack) -> Membership:
    """A client's folder that a federation did not make, or made for another server."""
    theirs = folder.membership(three.federation.client(0))
    place.mkdir()
    for name in ("ca.crt", "client.key", "client.toml", "server.pub", "site.toml"):
        (place / name).write_bytes((theirs.folder / name).read_bytes())
    address = theirs.address
    match case:
        case "wrong CA":
            certificates.write_authority(place, certificates.make_authority("stranger"))
        case "unknown key":
            certificates.make_client(place / "client.key")
        case "expired" | "wrong host name":
            days = 9
            host = "elsewhere.example.org"
            if case == "expired":
                days = -1
                host = "127.0.0.1"
            other_federation = folder.init(
                place / "fed",
                1,
                ("127.0.0.1",),
                listen="127.0.0.1",
                port=free_port(),
                version="1.0",
            )
            listening(other_federation, days, host, stack)
            (place / "ca.crt").write_bytes((other_federation.server / "ca.crt").read_bytes())
            address = other_federation.address
    text = (place / "client.toml").read_text()
    (place / "client.toml").write_text(text.replace(theirs.address, address))
    return folder.membership(place)


def listening(
    other_federation: Federation, days: int, host: str, stack: contextlib.ExitStack
) -> None:
    """Start a server with a certificate for this host and so many days, without fedstill's check of
    certificates.
    """
    command = programs.superlink(other_federation, False)
    write_link(other_federation, insecure=False)
    certificates.make_server(
        other_federation.server, certificates.authority_of(other_federation.folder), [host], days
    )
    process = stack.enter_context(logged(command, other_federation.server / "log"))
    wait_for_port(other_federation, process)


@pytest.mark.parametrize("case", REASONS)
def test_a_stranger_gets_nowhere_and_learns_why(
    case: str, attempts: dict[str, Attempt], three: Deployment
) -> None:
    """Flower logs the id of a SuperNode when it is admitted. It chooses the exit status of its own
    node, which does not matter here.
    """
    attempt = attempts[case]

    assert attempt.ours.wait(600) == 1
    attempt.node.wait(600)

    last_line = (attempt.folder / "ours").read_text(errors="replace").strip().splitlines()[-1]
    print(f"\n{case}: {last_line}")
    assert last_line.startswith("fedstill: ")
    assert REASONS[case] in last_line
    assert "SuperNode ID" not in (attempt.folder / "node").read_text(errors="replace")
    if case == "unknown key":
        assert "this key is not listed" in three.log("server")


def test_without_certificates_nothing_starts(tmp_path: Path) -> None:
    federation = Deployment(tmp_path, 1).federation
    (federation.server / "server.crt").unlink()
    (federation.client(0) / "ca.crt").unlink()

    for arguments in (
        ("server", str(federation.folder)),
        ("client", str(federation.client(0))),
    ):
        process = run_fedstill("deploy", *arguments)
        print("\n" + process.stderr.strip())
        assert process.returncode == 2
        assert ".crt is missing" in process.stderr
        assert len(process.stderr.splitlines()) == 1
