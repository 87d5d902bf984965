"""Over real processes: clients that a server must not let in, and servers that a client must not
trust. Slow.

Each is tried twice: with Flower's own SuperNode, which must not get in whatever fedstill says
first, and with ``fedstill deploy client``, which must say in one line why. All begin at once, so
that they wait together.
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
    fedstill_,
    fedstill_command,
    flowers_program,
    free_port,
    running,
    wait_for_port,
)

pytestmark = [pytest.mark.slow, needs_flower]

SECONDS = 120
"""How long a SuperNode is let try; it never gives up on a server whose certificate is not good."""

SAYS = {
    "wrong CA": "is not signed by this client's ca.crt",
    "expired": "deploy renew DIR",
    "wrong host name": "is not valid for 127.0.0.1; on the server: fedstill deploy renew DIR "
    "--host 127.0.0.1",
    "unknown key": "its key is not listed",
    "plain-text client": "uses TLS: remove --insecure-for-testing",
}


@dataclass
class Tried:
    """What came of a stranger: its SuperNode's log, and the last line and status of
    ``fedstill deploy client``.
    """

    node: subprocess.Popen[bytes]
    ours: subprocess.Popen[bytes]
    place: Path


@pytest.fixture(scope="module")
def tried(
    three: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Tried]]:
    place, started = tmp_path_factory.mktemp("strangers"), dict[str, Tried]()
    with contextlib.ExitStack() as stack:
        for what in SAYS:
            here = place / what.replace(" ", "-")
            member = stranger(what, three, here, stack)
            insecure = what == "plain-text client"
            command = ["timeout", str(SECONDS), *flowers_own(member, insecure)]
            more = ["--insecure-for-testing"] if insecure else []
            ours = fedstill_command("deploy", "client", str(member.folder), "--wait", "0", *more)
            both = [
                stack.enter_context(spoken(c, here / n))
                for c, n in ((command, "node"), (ours, "ours"))
            ]
            started[what] = Tried(*both, here)
        yield started


def flowers_own(member: Membership, insecure: bool) -> list[str]:
    """The command that starts Flower's own SuperNode as a member."""
    command = [flowers_program("flower-supernode"), "--superlink", member.address]
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
def spoken(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as file,
        running(command, programs.environment(log.parent), stdout=file, stderr=file) as p,
    ):
        yield p


def stranger(what: str, three: Deployment, here: Path, stack: contextlib.ExitStack) -> Membership:
    """A client's folder that a federation did not make, or made for another server."""
    theirs = folder.membership(three.federation.client(0))
    here.mkdir()
    for name in ("ca.crt", "client.key", "client.toml", "server.pub", "site.toml"):
        (here / name).write_bytes((theirs.folder / name).read_bytes())
    address = theirs.address
    match what:
        case "wrong CA":
            certificates.write_authority(here, certificates.make_authority("stranger"))
        case "unknown key":
            certificates.make_client(here / "client.key")
        case "expired" | "wrong host name":
            days, host = (-1, "127.0.0.1") if what == "expired" else (9, "elsewhere.example.org")
            other = folder.init(
                here / "fed", 1, ("127.0.0.1",), listen="127.0.0.1", port=free_port(), version="1.0"
            )
            listening(other, days, host, stack)
            (here / "ca.crt").write_bytes((other.server / "ca.crt").read_bytes())
            address = other.address
    text = (here / "client.toml").read_text()
    (here / "client.toml").write_text(text.replace(theirs.address, address))
    return folder.membership(here)


def listening(other: Federation, days: int, host: str, stack: contextlib.ExitStack) -> None:
    """A server with a certificate for this host and so many days, started past fedstill's own look
    at it.
    """
    command = programs.superlink(other, False)
    write_link(other, insecure=False)
    certificates.make_server(other.server, certificates.authority_of(other.folder), [host], days)
    process = stack.enter_context(spoken(command, other.server / "log"))
    wait_for_port(other, process)


@pytest.mark.parametrize("what", SAYS)
def test_a_stranger_gets_nowhere_and_is_told_why(
    what: str, tried: dict[str, Tried], three: Deployment
) -> None:
    it = tried[what]
    assert it.ours.wait(600) == 1
    said = (it.place / "ours").read_text(errors="replace").strip().splitlines()[-1]
    print(f"\n{what}: {said}")
    assert said.startswith("fedstill: ")
    assert SAYS[what] in said
    # Flower chooses the exit status of its own node; only that the node stays outside matters.
    it.node.wait(600)
    assert "SuperNode ID" not in (it.place / "node").read_text(errors="replace"), (
        "Flower says that when it is let in"
    )
    if what == "unknown key":
        assert "this key is not listed" in three.log("server"), "the server says so, too"


def test_without_certificates_nothing_starts(tmp_path: Path) -> None:
    made = Deployment(tmp_path, 1)
    (made.federation.server / "server.crt").unlink()
    (made.federation.client(0) / "ca.crt").unlink()
    for arguments in (
        ("server", str(made.federation.folder)),
        ("client", str(made.federation.client(0))),
    ):
        done = fedstill_("deploy", *arguments)
        assert done.returncode == 2
        assert ".crt is missing" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        print("\n" + done.stderr.strip())
