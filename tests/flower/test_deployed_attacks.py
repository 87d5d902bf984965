"""Attacks on a running federation, each refused by its line: a stranger on the port, a site, a
hostile server. Slow.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import DeployFailed
from fedstill.flower.deployment import certificates, folder, programs, superlink
from fedstill.flower.deployment.control import Control, public_key, write_link
from fedstill.flower.deployment.folder import write_app
from fedstill.flower.deployment.gate import KEY_HEADER
from fedstill.flower.deployment.programs import descendants
from fedstill.flower.messages import public_reason
from flowers import needs_flower
from gate_requests import instruction, reply, tree_of
from journals import journal_events, refusals
from processes import (
    Deployment,
    experiment,
    fedstill_command,
    flower_program,
    free_port,
    process_environment,
    run_fedstill,
    run_over,
    running,
    wait_for_port,
)

pytestmark = [
    pytest.mark.slow,
    needs_flower,
    # Flower's own, in packing an app
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]

FOREIGN = """
import pathlib
pathlib.Path({marker!r}).touch()
from flwr.{side} import {kind}
app = {kind}()
"""


def foreign(place: Path, marker: Path) -> Path:
    """A Flower app that leaves a file behind wherever its code runs."""
    write_app(place, 3, "1.0")
    for side, kind in (("clientapp", "ClientApp"), ("serverapp", "ServerApp")):
        path = place / "fedstill_app" / f"{side.removesuffix('app')}_app.py"
        path.write_text(FOREIGN.format(marker=str(marker), side=side, kind=kind))
    return place


def asked(
    three: Deployment, method: str, path: str, body: bytes | None = b"", **headers: str
) -> tuple[int, str]:
    """Status and text of the answer to a request with nothing but ca.crt; the path goes as it is
    written.
    """
    host, _, port = three.federation.address.rpartition(":")
    trust = ssl.create_default_context(cafile=str(three.federation.client(0) / "ca.crt"))
    connection = http.client.HTTPSConnection(host, int(port), context=trust, timeout=60)
    connection.putrequest(method, path, skip_host="host" in headers)
    all_headers = {
        "content_type": "application/protobuf",
        "content_length": str(len(body or b"")),
    } | headers
    for name, value in all_headers.items():
        if value:
            connection.putheader(name.replace("_", "-"), value)
    with contextlib.closing(connection):
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read(1000).decode(errors="replace")


OPERATORS = "this path is only for the operator"
STRANGERS: dict[str, tuple[Any, ...]] = {
    "start a run": ("POST", "/v1/control/start-run", {}, 403, OPERATORS),
    "stop a run": ("POST", "/v1/control/stop-run", {}, 403, OPERATORS),
    "list the sites": ("POST", "/v1/control/list-nodes", {}, 403, OPERATORS),
    "let a site in": ("POST", "/v1/control/register-node", {}, 403, OPERATORS),
    "take a task": ("POST", "/v1/runtime/acquire-task", {}, 403, OPERATORS),
    "read the documentation": ("GET", "/docs", {}, 403, OPERATORS),
    "read the interface": ("GET", "/openapi.json", {}, 403, OPERATORS),
    "two slashes": ("POST", "//v1/control/start-run", {}, 403, OPERATORS),
    "dots": ("POST", "/v1/fleet/../control/start-run", {}, 403, OPERATORS),
    "escaped dots": ("POST", "/v1/fleet/%2e%2e/control/start-run", {}, 403, OPERATORS),
    "escaped slashes": ("POST", "/v1%2Fcontrol%2Fstart-run", {}, 403, OPERATORS),
    "a whole address": ("POST", "https://127.0.0.1/v1/control/start-run", {}, 403, OPERATORS),
    "forwarded from here": (
        "POST",
        "/v1/control/start-run",
        {"x_forwarded_for": "127.0.0.1"},
        403,
        OPERATORS,
    ),
    "a forged host": (
        "POST",
        "/v1/control/start-run",
        {"host": "localhost", "x_real_ip": "::1"},
        403,
        OPERATORS,
    ),
    "a wrong key": (
        "POST",
        "/v1/control/start-run",
        {KEY_HEADER.replace("-", "_"): "k" * 43},
        403,
        OPERATORS,
    ),
    "no signature": ("POST", "/v1/fleet/pull-messages", {}, 401, "this request is not signed"),
    "another method": ("GET", "/v1/fleet/pull-messages", {}, 403, OPERATORS),
    "no length": (
        "POST",
        "/v1/fleet/push-object",
        {"content_length": ""},
        413,
        "must state its length",
    ),
    "a large length": (
        "POST",
        "/v1/fleet/push-object",
        {"content_length": str(1 << 40)},
        413,
        "at most 16777216 bytes",
    ),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger_with_the_certificate_gets_nothing(case: str, three: Deployment) -> None:
    method, path, headers, status, line = STRANGERS[case]
    answer_status, text = asked(
        three, method, path, None if "content_length" in headers else b"", **headers
    )
    print(f"\n{case}: {answer_status} {text.strip()}")
    assert answer_status == status
    assert line in text


@contextlib.contextmanager
def flooded(address: str, connections: int) -> Iterator[list[socket.socket]]:
    """Strangers that hold so many idle connections, and open new ones all the time."""
    host, _, port = address.rpartition(":")
    open_connections: list[socket.socket] = []
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            open_connections.append(socket.create_connection((host, int(port)), 30))
            if len(open_connections) > connections:
                open_connections.pop(0).close()
                is_over.wait(0.01)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield open_connections
    finally:
        is_over.set()
        thread.join()
        for connection in open_connections:
            connection.close()


def test_a_run_goes_on_while_strangers_hold_all_connections_that_they_get(
    three: Deployment, tmp_path: Path
) -> None:
    """More than the server grants to one address, which is that of the sites here, too."""
    count = superlink.MAX_CONNECTIONS // 2 + 200
    began = time.monotonic()
    with flooded(three.federation.address, count) as connections:
        three.wait_until(lambda: len(connections) >= count, "the connections of all strangers")
        process = run_over(three, experiment("fedavg", "parallel"), tmp_path / "run")
        assert len(connections) >= count
    print(f"\n{count} idle connections: two rounds in {time.monotonic() - began:.0f} s")
    assert process.returncode == 0, process.stderr
    assert len(journal_events(tmp_path / "run", event="client")) == 6
    assert not refusals(tmp_path / "run")


def test_a_plain_text_request_gets_nothing(three: Deployment) -> None:
    host, _, port = three.federation.address.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("POST", "/v1/control/start-run")
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse()


def signed(key: Path, timestamp: str) -> dict[str, str]:
    """The headers of a request that a site signs with its private key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private = load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    signature = sign_message(private, timestamp.encode())
    return {
        "flwr_public_key": base64.b64encode(public_key_to_bytes(private.public_key())).decode(),
        "flwr_timestamp": timestamp,
        "flwr_signature": base64.b64encode(signature).decode(),
    }


def pulling(three: Deployment, key: Path, node: int, timestamp: str = "") -> tuple[int, str]:
    """What comes of asking for a node's messages with a key."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.date import now

    body = PullMessagesRequest(node=Node(node_id=node)).SerializeToString()
    headers = signed(key, timestamp or now().isoformat())
    return asked(three, "POST", "/v1/fleet/pull-messages", body, **headers)


def node_of(three: Deployment, client: int) -> int:
    """The node of a client."""
    nodes = Control.of(three.federation).nodes()
    return next(node for node, (name, _) in nodes.items() if name == f"client{client}")


def test_a_sites_key_opens_its_own_messages_only_and_a_request_once(
    three: Deployment, tmp_path: Path
) -> None:
    from flwr.supercore.date import now

    site_key, other_key = (three.federation.client(c) / "client.key" for c in (0, 1))
    node = node_of(three, 0)
    timestamp = now().isoformat()
    assert pulling(three, site_key, node, timestamp)[0] == 200
    again = pulling(three, site_key, node, timestamp)
    assert again == (401, "fedstill: this request was already sent\n")
    assert pulling(three, other_key, node)[0] == 403, "client 1's key, client 0's node"
    certificates.make_client(tmp_path / "unknown.key")
    assert pulling(three, tmp_path / "unknown.key", node)[0] == 401
    assert pulling(three, site_key, node, "2020-01-01T00:00:00+00:00")[0] == 401
    print(f"\nreplayed: {again[1].strip()}")


def test_a_sites_key_sends_no_instruction_and_no_answer_of_another(three: Deployment) -> None:
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.date import now

    key = three.federation.client(0) / "client.key"
    node = node_of(three, 0)
    victim = node_of(three, 1)
    forged = {
        "an instruction of the server": instruction("x", victim),
        "another site's answer": reply("x", victim, to="y"),
        "an answer to nothing": reply("x", node, to="y"),
    }
    for forgery, message in forged.items():
        body = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message],
            message_object_trees=[tree_of(message)],
        ).SerializeToString()
        path = "/v1/fleet/push-messages"
        status, text = asked(three, "POST", path, body, **signed(key, now().isoformat()))
        print(f"\n{forgery}: {status} {text.strip()}")
        assert status == 403


def test_a_site_listens_on_no_port(three: Deployment) -> None:
    import psutil

    three.wait_until(lambda: "connected" in three.log("client0"), "client 0 to be there")
    pid = three.processes["client0"].pid
    listening = [
        connection
        for process in [psutil.Process(pid), *descendants(pid)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == []


def test_a_foreign_app_through_the_operators_own_door_does_not_run(
    three: Deployment, tmp_path: Path
) -> None:
    control = Control.of(three.federation)
    marker = tmp_path / "it-ran"
    run = control.start(foreign(tmp_path / "foreign", marker), {})
    three.wait_until(lambda: control.ended(run) is not None, "the run to end")
    print(f"\nthe operator's foreign app: {control.ended(run)}")
    assert "the app is not fedstill's" in str(control.ended(run))
    assert not marker.exists()


def test_a_stranger_cannot_start_a_run_with_flowers_own_client(
    three: Deployment, tmp_path: Path
) -> None:
    control = Control.of(three.federation)
    stranger = Control(control.address, control.certificates, b"x" * 43)
    for ask in (
        lambda: stranger.start(foreign(tmp_path / "foreign", tmp_path / "it-ran"), {}),
        stranger.nodes,
    ):
        with pytest.raises(DeployFailed, match="403 fedstill"):
            ask()


@contextlib.contextmanager
def hostile(place: Path, client: Path) -> Iterator[tuple[Control, folder.Federation]]:
    """A server of Flower's own, without gate and without our programs, which has the federation's
    certificates.
    """
    port = free_port()
    federation = folder.init(
        place / "hostile", 1, ("127.0.0.1",), listen="127.0.0.1", port=port, version="1.0"
    )
    command = [flower_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    for option, name in {"ca-cert": "ca.crt", "cert": "server.crt", "key": "server.key"}.items():
        command += [f"--ssl-{option}file", str(federation.server / name)]
    command += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    write_link(federation, insecure=False)
    control = Control.of(federation)
    with (place / "hostile.log").open("wb") as log:
        env = programs.server_environment(federation)
        with running(command, env, stdout=log, stderr=log) as process:
            wait_for_port(federation, process)
            control.register("client0", public_key(client / "client.key.pub"))
            yield control, federation


def until(true: Callable[[], Any], event: str, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:g} s for {event}"
        time.sleep(0.5)


SENDS = """
import pathlib, sys, time
pathlib.Path({marker!r}).touch()
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while not list(grid.get_node_ids()):
        time.sleep(0.5)
    (node,) = grid.get_node_ids()
    said = pathlib.Path({said!r}).open("a")
    for kind in ("train.stage", "query.whoami", "train"):
        message = Message(RecordDict({{"ask": ConfigRecord()}}), node, kind, ttl=600)
        (answer,) = grid.send_and_receive([message], timeout=300)
        print(kind, answer.error if answer.has_error() else answer.content, file=said, flush=True)
"""


def test_a_site_does_nothing_for_a_hostile_server_without_the_signing_key(tmp_path: Path) -> None:
    """The server runs the app's server half, and has the federation's certificates. The site
    refuses its messages, and runs none of the app's code.
    """
    site = tmp_path / "site"
    with hostile(tmp_path, tmp_path / "hostile/client0") as (control, federation):
        shutil.copytree(federation.client(0), site)
        app = foreign(tmp_path / "foreign", tmp_path / "site-ran-it")
        server_half = SENDS.format(
            marker=str(tmp_path / "server-ran-it"), said=str(tmp_path / "said")
        )
        (app / "fedstill_app/server_app.py").write_text(server_half)
        command = fedstill_command("deploy", "client", str(site))
        with (
            (tmp_path / "site.log").open("wb") as log,
            running(command, process_environment(), stdout=log, stderr=log),
        ):
            run = control.start(app, {})
            until(lambda: control.ended(run) is not None, "the hostile run to end")
    answers = (tmp_path / "said").read_text()
    print("\n" + answers)
    assert (tmp_path / "server-ran-it").exists(), "the hostile server ran its own half"
    assert answers.count(public_reason("signature")) == 3
    assert not (tmp_path / "site-ran-it").exists()
    assert "refused or failed" in (tmp_path / "site.log").read_text()


def test_a_site_that_poses_as_another_is_known_by_its_key(
    three: Deployment, tmp_path: Path
) -> None:
    """Client 1 claims to be client 0. It is asked as client 1 and refuses; the round continues with
    the other clients.
    """
    site = three.federation.client(1) / "site.toml"
    original_text = site.read_text()
    site.write_text(original_text.replace("client = 1", "client = 0"))
    try:
        process = run_over(three, experiment("fedavg", "parallel", rounds=1), tmp_path / "run")
    finally:
        site.write_text(original_text)
    assert process.returncode == 0, process.stderr
    clients = journal_events(tmp_path / "run", event="client")
    reasons = {event["client"]: event.get("refused", "") for event in clients}
    print(f"\n{reasons}")
    assert reasons == {0: "", 1: f"failed: {public_reason('request')}", 2: ""}


def test_a_revoked_key_opens_nothing_from_then_on(three: Deployment, tmp_path: Path) -> None:
    place = str(three.federation.folder)
    listed = three.federation.server / "allowed" / "client2.pub"
    text = listed.read_bytes()
    node = node_of(three, 2)
    key = tmp_path / "client.key"
    key.write_bytes((three.federation.client(2) / "client.key").read_bytes())
    assert pulling(three, key, node)[0] == 200
    listed.unlink()
    process = run_fedstill("deploy", "admit", place)
    print("\n" + process.stdout.strip())
    assert "client2" in process.stdout
    assert pulling(three, key, node)[0] == 401
    listed.write_bytes(text)
    again = run_fedstill("deploy", "admit", place)
    assert f"fedstill deploy key {place} 2" in again.stderr
    assert "client2 can connect from now on" in run_fedstill("deploy", "key", place, "2").stdout
    assert pulling(three, key, node)[0] == 401
    three.kill("client2")
    three.start_client(2)
    assert pulling(three, three.federation.client(2) / "client.key", node_of(three, 2))[0] == 200
