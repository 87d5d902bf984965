"""The gate by itself: what it passes on and what not, whatever the rest of a request claims."""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federations import federation_in

from fedstill.core.errors import ConfigError
from fedstill.flower.deployment import exchange, gate, programs
from fedstill.flower.deployment.exchange import GET_RUN, PULL, PUSH_PART, SITES, SITES_PATHS
from fedstill.flower.deployment.gate import KEY_HEADER, MAX_BODIES, MAX_BODY, Gate, check_paths
from flowers import needs_flower
from gate_requests import Backend, SiteKey, SiteSession, instruction, reply, response, tree_of

pytestmark = needs_flower

KEY = b"k" * 43
SITE_KEYS = (SiteKey(), SiteKey())
NODES = (2**63 + 5, 12)


def guarding(backend: Any, listed: bool = True) -> Gate:
    """A gate that knows two sites."""
    nodes = {key.public: node for key, node in zip(SITE_KEYS, NODES, strict=True)}
    gate = Gate(backend, KEY, nodes.get, listed)
    gate.held.seconds = gate.held.run_seconds = 0.0
    return gate


def own_pull(site: int = 0) -> bytes:
    """A request of a site for its messages."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    request: bytes = PullMessagesRequest(node=Node(node_id=NODES[site])).SerializeToString()
    return request


def sessions(backend: Backend) -> tuple[SiteSession, SiteSession]:
    """Two sites at one gate."""
    one_gate = guarding(backend)
    first, second = zip(SITE_KEYS, NODES, strict=True)
    return SiteSession(one_gate, *first), SiteSession(one_gate, *second)


# Who is let in


@pytest.fixture
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was set up in this process limits how many lines are logged."""
    monkeypatch.setattr(logging.getLogger("fedstill.gate"), "filters", [])


@pytest.mark.usefixtures("_every_line")
@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/runtime/responses",
        "/docs",
        "/openapi.json",
        "/health",
        "/",
        "",
        "//v1/control/start-run",
        "//v1/fleet/pull-messages",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages/",
        "/V1/FLEET/PULL-MESSAGES",
        "/v1/fleet/",
        "/v1/fleet/pull-messages\x00",
        "/v1/fleet/something-new",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_every_other_path_is_the_operators(
    path: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Backend()
    with caplog.at_level(logging.WARNING):
        answer = response(guarding(backend), path, method, **SITE_KEYS[0].headers())
    assert answer["status"] == 403
    assert backend.paths == []
    assert "203.0.113.7" in caplog.text
    assert "\x00" not in caplog.text
    operator = {KEY_HEADER.replace("-", "_"): KEY}
    assert response(guarding(backend), path, method, **operator)["status"] == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_a_sites_path_by_another_method_is_refused(method: str) -> None:
    answer = response(guarding(Backend()), PULL, method, body=own_pull(), **SITE_KEYS[0].headers())
    assert answer["status"] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"x_forwarded_for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1", "x_real_ip": "127.0.0.1", "host": "localhost"},
        {"x_fedstill_operator": b"k" * 42},
        {"x_fedstill_operator": b"K" * 43},
        {"x_fedstill_operator": b"\xff\xfe"},
        {"authorization": b"Bearer " + KEY},
    ],
)
def test_no_header_but_the_key_makes_an_operator(headers: dict[str, Any]) -> None:
    assert response(guarding(Backend()), "/v1/control/start-run", **headers)["status"] == 403


def test_a_web_socket_is_closed_and_the_start_passes() -> None:
    backend = Backend()
    assert response(guarding(backend), PULL, kind="websocket")["type"] == "websocket.close"
    response(guarding(backend), "", kind="lifespan")
    assert backend.paths == [""]


def test_a_signed_request_counts_once() -> None:
    backend = Backend()
    one_gate = guarding(backend)
    headers = SITE_KEYS[0].headers()
    assert response(one_gate, PULL, body=own_pull(), **headers)["status"] == 200
    assert response(one_gate, PULL, body=own_pull(), **headers)["status"] == 401
    # of one signature another can be made that is valid, too
    again = SITE_KEYS[0].headers(headers["flwr_timestamp"])
    assert again["flwr_signature"] != headers["flwr_signature"]
    assert response(one_gate, PULL, body=own_pull(), **again)["status"] == 401
    assert response(one_gate, PULL, body=own_pull(), **SITE_KEYS[0].headers())["status"] == 200
    assert response(one_gate, PULL, body=own_pull(1), **SITE_KEYS[1].headers())["status"] == 200
    assert backend.paths == [PULL] * 3


def never_read() -> Any:
    """Stands in for the body of a request that must not be read."""
    raise AssertionError("the body was read")


def forged(change: Callable[[dict[str, str]], object]) -> dict[str, str]:
    """Signed headers after a change."""
    headers = SITE_KEYS[0].headers()
    change(headers)
    return headers


def at(seconds: float) -> str:
    """The time in so many seconds, as headers have it."""
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return moment.isoformat()


@pytest.mark.parametrize(
    "headers_of",
    [
        dict,
        lambda: forged(lambda h: h.pop("flwr_signature")),
        lambda: forged(lambda h: h.pop("flwr_timestamp")),
        lambda: forged(lambda h: h.update(flwr_signature="c2ln")),
        lambda: forged(lambda h: h.update(flwr_signature="*")),
        lambda: forged(lambda h: h.update(flwr_public_key="bm8=")),
        lambda: forged(
            lambda h: h.update(flwr_public_key=SITE_KEYS[1].headers()["flwr_public_key"])
        ),
        lambda: forged(lambda h: h.update(flwr_timestamp=at(1))),
        lambda: forged(lambda h: h.update(flwr_public_key="k" * 4000)),
        lambda: forged(lambda h: h.update(flwr_timestamp="1" * 4000)),
        lambda: SiteKey().headers(),
        lambda: SITE_KEYS[0].headers(at(-400)),
        lambda: SITE_KEYS[0].headers(at(60)),
        lambda: SITE_KEYS[0].headers("2026-01-01T00:00:00"),
        lambda: SITE_KEYS[0].headers("yesterday"),
    ],
)
def test_nothing_is_read_of_a_request_without_a_listed_key_that_signed_it_now(
    headers_of: Callable[[], dict[str, str]],
) -> None:
    backend = Backend()
    one_gate = guarding(backend)
    long = {"content_length": str(MAX_BODIES[PUSH_PART]), **headers_of()}
    assert response(one_gate, PUSH_PART, receive=never_read, **long)["status"] == 401
    assert (backend.paths, one_gate._used) == ([], {})


def test_an_unknown_key_may_only_register_where_no_keys_are_listed() -> None:
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest

    for listed, status in ((True, 403), (False, 200)):
        stranger = SiteSession(guarding(Backend(), listed), SiteKey(), 99)
        stranger_key = stranger.key.public
        activation = ActivateNodeRequest(public_key=stranger_key)
        registration = RegisterNodeFleetRequest(public_key=stranger_key)
        foreign_registration = RegisterNodeFleetRequest(public_key=SITE_KEYS[0].public)
        assert stranger.request("activate-node", activation)[0] == 401
        assert stranger.request("register-node", registration)[0] == status
        assert stranger.request("register-node", foreign_registration)[0] == 403
        assert stranger.gate._used == {}


def test_a_site_becomes_active_by_its_own_key() -> None:
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    site, _ = sessions(Backend())
    for key, status in ((site.key.public, 200), (SITE_KEYS[1].public, 403)):
        assert site.request("activate-node", ActivateNodeRequest(public_key=key))[0] == status


def test_the_operator_alone_registers_sites_that_have_listed_keys() -> None:
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, UnregisterNodeFleetRequest

    for name, request in (
        ("register-node", RegisterNodeFleetRequest(public_key=SITE_KEYS[0].public)),
        ("unregister-node", UnregisterNodeFleetRequest(node_id=NODES[0])),
    ):
        for listed, status in ((True, 403), (False, 200)):
            session = SiteSession(guarding(Backend(), listed), SITE_KEYS[0], NODES[0])
            assert session.request(name, request)[0] == status


def test_old_signatures_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gate = guarding(Backend())
    clock_time = 1000.0
    monkeypatch.setattr("fedstill.flower.deployment.gate.time.monotonic", lambda: clock_time)
    for second in range(0, 4000, 100):
        clock_time = 1000.0 + second
        assert response(one_gate, PULL, body=own_pull(), **SITE_KEYS[0].headers())["status"] == 200
    assert len(one_gate._used) == 4


# Sizes and times


@pytest.mark.parametrize(
    "headers",
    [
        {"content_length": ""},
        {"content_length": str(MAX_BODY + 1)},
        {"content_length": "9" * 400},
        {"content_length": "-1"},
        # its first digits are no length, the web server reads all
        {"content_length": "00000000000000000000209715200"},
        {"content_length": "007"},
        {"content_length": "1e3"},
        {"content_length": "5", "transfer_encoding": "chunked"},
    ],
)
def test_a_request_of_a_site_has_a_length_that_is_not_too_large(headers: dict[str, Any]) -> None:
    signed = SITE_KEYS[0].headers()
    answer = response(guarding(Backend()), PULL, receive=never_read, **signed, **headers)
    assert answer["status"] == 413


def test_a_body_is_cut_off_where_it_is_too_large_whatever_length_was_said() -> None:
    backend = Backend()
    count = 0

    async def receive() -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"type": "http.request", "body": bytes(MAX_BODY // 4), "more_body": True}

    answer = response(guarding(backend), PULL, receive=receive, **SITE_KEYS[0].headers())
    assert (answer["status"], backend.paths, count) == (413, [], 5)


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.05)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"", "more_body": True}

    answer = response(guarding(Backend()), PULL, receive=receive, **SITE_KEYS[0].headers())
    assert answer["status"] == 408


def test_a_site_has_few_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_AT_ONCE", 1)
    one_gate = guarding(Backend())

    async def receive() -> dict[str, Any]:
        body = own_pull()
        headers = SITE_KEYS[0].headers()
        second = await asyncio.to_thread(response, one_gate, PULL, body=body, **headers)
        assert second["status"] == 429
        return {"type": "http.request", "body": body, "more_body": False}

    for _ in range(2):
        answer = response(one_gate, PULL, receive=receive, **SITE_KEYS[0].headers())
        assert answer["status"] == 200


def test_a_connection_that_ends_within_a_body_is_no_request() -> None:
    backend = Backend()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert response(guarding(backend), PULL, receive=receive, **SITE_KEYS[0].headers()) == {}
    assert backend.paths == []


@pytest.mark.parametrize(("status", "passed"), [(500, 503), (404, 404), (200, 200)])
def test_a_failure_of_flowers_server_is_one_to_ask_again_after(status: int, passed: int) -> None:
    one_gate = guarding(Backend(status))
    assert response(one_gate, PULL, body=own_pull(), **SITE_KEYS[0].headers())["status"] == passed
    operator = {KEY_HEADER.replace("-", "_"): KEY}
    assert response(one_gate, "/v1/runtime/push-messages", **operator)["status"] == passed


def test_a_request_with_a_valid_key_makes_its_connection_trusted() -> None:
    trusted: list[Any] = []
    one_gate = guarding(Backend())
    one_gate.on_trusted = trusted.append
    response(one_gate, PULL, body=own_pull(), **SiteKey().headers())
    response(one_gate, "/docs")
    assert trusted == []
    response(one_gate, PULL, body=own_pull(), **SITE_KEYS[0].headers())
    response(one_gate, "/docs", **{KEY_HEADER.replace("-", "_"): KEY})
    assert trusted == [("203.0.113.7", 5)] * 2


# What a site may ask for: the attacks of a site with a listed key


def test_a_site_fetches_and_answers_its_own_instructions() -> None:
    from flwr.proto.fab_pb2 import GetFabRequest
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        PullObjectRequest,
        PushObjectRequest,
    )
    from flwr.proto.node_pb2 import Node
    from flwr.proto.run_pb2 import GetRunRequest

    backend = Backend()
    site, _ = sessions(backend)
    node = Node(node_id=site.node)
    assert site.pull(backend, instruction("i1", site.node))[0] == 200
    part = PullObjectRequest(node=node, run_id=7, object_id="part of i1")
    received = ConfirmMessageReceivedRequest(node=node, run_id=7, message_object_id="i1")
    upload = PushObjectRequest(node=node, run_id=7, object_id="part of r1")
    assert site.request("get-run", GetRunRequest(node=node, run_id=7))[0] == 200
    assert site.request("get-fab", GetFabRequest(node=node, run_id=7))[0] == 200
    assert site.request("pull-object", part)[0] == 200
    assert site.request("confirm-message-received", received)[0] == 200
    assert site.push(reply("r1", site.node, to="i1"))[0] == 200
    # as Flower does where nothing came back
    assert site.push(reply("r1", site.node, to="i1"))[0] == 200
    assert site.request("push-object", upload)[0] == 200
    assert len(backend.paths) == 8


def other(session: SiteSession) -> int:
    """Another node than that of the session."""
    return next(node for node in NODES if node != session.node)


FORGED_MESSAGES: dict[str, Callable[[SiteSession], Any]] = {
    "an instruction as the server": lambda s: instruction("x", other(s)),
    "an instruction as itself": lambda s: instruction("x", other(s), src_node_id=s.node),
    "an instruction to itself": lambda s: instruction("x", s.node),
    "the other's answer": lambda s: reply("x", other(s), to="theirs"),
    "its answer to the other's": lambda s: reply("x", s.node, to="theirs"),
    "an answer to nothing": lambda s: reply("x", s.node, to="unknown"),
    "an answer to the other": lambda s: reply("x", s.node, to="own", dst_node_id=other(s)),
    "an answer in another run": lambda s: reply("x", s.node, to="own", run_id=8),
    "an answer of another kind": lambda s: reply("x", s.node, to="own", message_type="train"),
    "an answer in the place of the instruction": lambda s: reply("own", s.node, to="own"),
    "a second answer": lambda s: reply("x", s.node, to="answered"),
}


@pytest.mark.parametrize("forgery", FORGED_MESSAGES)
def test_a_site_sends_nothing_but_its_answers(forgery: str) -> None:
    backend = Backend()
    site, victim = sessions(backend)
    site.pull(backend, instruction("own", site.node))
    site.pull(backend, instruction("answered", site.node))
    victim.pull(backend, instruction("theirs", victim.node))
    assert site.push(reply("r", site.node, to="answered"))[0] == 200
    arrived = len(backend.paths)
    status, text = site.push(FORGED_MESSAGES[forgery](site))
    assert (status, len(backend.paths)) == (403, arrived), text


def test_a_site_that_was_removed_answers_no_more() -> None:
    """Also an instruction that it has fetched before, and the parts of an announced reply."""
    from flwr.proto.message_pb2 import PushObjectRequest
    from flwr.proto.node_pb2 import Node

    backend = Backend()
    site, remaining = sessions(backend)
    nodes = {SITE_KEYS[0].public: NODES[0], SITE_KEYS[1].public: NODES[1]}
    site.gate.node_of = nodes.get
    for session in (site, remaining):
        session.pull(backend, instruction("first", session.node), instruction("own", session.node))
        assert session.push(reply("r", session.node, to="first"))[0] == 200
    arrived = len(backend.paths)

    del nodes[site.key.public]
    operator = {KEY_HEADER.replace("-", "_"): KEY}
    response(site.gate, "/v1/control/unregister-node", **operator)
    part = PushObjectRequest(node=Node(node_id=site.node), run_id=7, object_id="part of r")
    assert site.push(reply("x", site.node, to="own"))[0] == 401
    assert site.push(reply("r", site.node, to="first"))[0] == 401
    assert site.request("push-object", part)[0] == 401
    assert len(backend.paths) == arrived + 1
    assert remaining.push(reply("x", remaining.node, to="own"))[0] == 200


def test_a_site_sends_one_message_with_its_own_parts_at_a_time() -> None:
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.node_pb2 import Node

    backend = Backend()
    site, _ = sessions(backend)
    site.pull(backend, instruction("own", site.node))
    answer = reply("r", site.node, to="own")
    assert site.push(answer, answer)[0] == 403
    assert site.push()[0] == 403
    assert site.push(answer, tree=ObjectTree(object_id="another"))[0] == 403
    late = PushMessagesRequest(
        node=Node(node_id=site.node),
        messages_list=[answer],
        message_object_trees=[tree_of(answer)],
        clientapp_runtime_list=[float("nan")],
    )
    assert site.request("push-messages", late)[0] == 403
    assert backend.paths == [PULL]


def test_a_message_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    site, _ = sessions(backend)
    site.pull(backend, instruction("own", site.node))
    monkeypatch.setattr(exchange, "MAX_PARTS", 1)
    assert site.push(reply("r", site.node, to="own"))[0] == 413


def test_a_site_reaches_no_other_sites_runs_and_parts() -> None:
    from flwr.proto.fab_pb2 import GetFabRequest
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        PullObjectRequest,
        PushObjectRequest,
    )
    from flwr.proto.node_pb2 import Node
    from flwr.proto.run_pb2 import GetRunRequest

    backend = Backend()
    site, victim = sessions(backend)
    site.pull(backend, instruction("own", site.node))
    victim.pull(backend, instruction("theirs", victim.node, run_id=8))
    assert victim.push(reply("r", victim.node, to="theirs", run_id=8))[0] == 200
    arrived = len(backend.paths)
    node = Node(node_id=site.node)
    for name, request in (
        ("get-run", GetRunRequest(node=node, run_id=8)),
        ("get-fab", GetFabRequest(node=node, run_id=8)),
        ("pull-object", PullObjectRequest(node=node, run_id=8, object_id="part of theirs")),
        ("pull-object", PullObjectRequest(node=node, run_id=7, object_id="part of theirs")),
        ("pull-object", PullObjectRequest(node=node, run_id=8, object_id="part of own")),
        ("push-object", PushObjectRequest(node=node, run_id=8, object_id="part of r")),
        ("push-object", PushObjectRequest(node=node, run_id=7, object_id="unannounced")),
        (
            "confirm-message-received",
            ConfirmMessageReceivedRequest(node=node, run_id=8, message_object_id="theirs"),
        ),
        (
            "confirm-message-received",
            ConfirmMessageReceivedRequest(node=node, run_id=7, message_object_id="r"),
        ),
    ):
        assert site.request(name, request)[0] == 403, name
    assert len(backend.paths) == arrived


def test_a_site_learns_no_folder_of_the_server_from_a_run() -> None:
    from flwr.proto.node_pb2 import Node
    from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse, Run
    from flwr.proto.transport_pb2 import Scalar

    backend = Backend()
    site, _ = sessions(backend)
    site.pull(backend, instruction("own", site.node))
    out = {"out": Scalar(string="/home/operator/runs/secret")}
    run = Run(run_id=7, fab_hash="f", primary_task_type="t", override_config=out, bytes_recv=99)
    backend.answers[GET_RUN] = GetRunResponse(run=run).SerializeToString()
    body = GetRunRequest(node=Node(node_id=site.node), run_id=7).SerializeToString()
    answer = response(site.gate, GET_RUN, body=body, **site.key.headers())
    expected = Run(run_id=7, fab_hash="f", primary_task_type="t")
    assert GetRunResponse.FromString(answer["body"]).run == expected
    assert dict(answer["headers"])[b"content-length"] == str(len(answer["body"])).encode()


def test_a_site_speaks_for_no_other_site() -> None:
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node

    backend = Backend()
    site, _ = sessions(backend)
    node = Node(node_id=other(site))
    for name, request in (
        ("deactivate-node", DeactivateNodeRequest(node_id=other(site))),
        ("send-node-heartbeat", SendNodeHeartbeatRequest(node=node, heartbeat_interval=30)),
        ("pull-messages", PullMessagesRequest(node=node)),
        ("pull-messages", PullMessagesRequest()),
    ):
        assert site.request(name, request)[0] == 403, name
    unreadable = response(site.gate, PULL, body=b"\xff\xff", **site.key.headers())
    assert unreadable["status"] == 400
    assert backend.paths == []


def test_instructions_are_forgotten_when_they_have_expired() -> None:
    backend = Backend()
    site, _ = sessions(backend)
    site.pull(backend, instruction("old", site.node, created_at=1000.0))
    assert site.push(reply("r", site.node, to="old"))[0] == 403
    for number in range(exchange.MAX_INSTRUCTIONS + 5):
        site.pull(backend, instruction(f"i{number}", site.node))
    traffic = site.gate.exchange._of(site.node)
    assert len(traffic.instructions) == exchange.MAX_INSTRUCTIONS


def test_a_reply_passes_until_flower_counts_its_instruction_as_expired() -> None:
    from flwr.server.superlink.linkstate.utils import message_ttl_has_expired

    message = instruction("own", NODES[0], created_at=1000.0, ttl=60.0)
    for clock_time in (1000.0, 1059.9, 1060.0, 1060.1):
        backend = Backend()
        site, _ = sessions(backend)
        site.gate.exchange.clock = lambda clock_time=clock_time: clock_time
        site.pull(backend, message)
        status, _ = site.push(reply("r", site.node, to="own"))
        assert (status == 403) == message_ttl_has_expired(message.metadata, clock_time), clock_time


# Flower's server backend the gate


def test_a_short_key_opens_nothing() -> None:
    with pytest.raises(ConfigError, match="shorter than 32 bytes"):
        Gate(Backend(), b"", lambda key: None)


def test_other_paths_than_those_known_are_refused() -> None:
    check_paths([*SITES_PATHS, "/docs"])
    for paths in ({*SITES_PATHS, "/v1/fleet/run-this"}, SITES_PATHS - {PULL}):
        with pytest.raises(ConfigError, match="paths"):
            check_paths(paths)


# Flower's database, SQLAlchemy's and Alembic's
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_installed_flower_is_served_inside_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's application has the paths that the gate knows; without the operator's key it does
    not start.
    """
    from fedstill.flower.deployment import superlink

    federation = federation_in(tmp_path)
    command = programs.superlink(federation, insecure=False)
    assert command[:3] == [sys.executable, "-m", "fedstill.flower.deployment.superlink"]
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    options = command[4:]
    monkeypatch.setattr(sys, "argv", ["superlink", *options])
    installed, config = superlink.gated(tmp_path / "parts")
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in os.environ
    assert (installed.key, config.enable_supernode_auth) == (federation.key.read_bytes(), True)
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
        assert response(installed, path)["status"] == 403

    site_key = certificate_key(federation.client(0))
    protobuf = {"content_type": "application/protobuf"}
    assert response(installed, PULL, **site_key.headers(), **protobuf)["status"] == 401
    state = installed.app.state.linkstate_factory.state()  # type: ignore[attr-defined]
    node = state.create_node("", "client0", site_key.public, 0)
    session = SiteSession(installed, site_key, node)
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    activate = ActivateNodeRequest(public_key=site_key.public, heartbeat_interval=30)
    for name, request in (
        ("activate-node", activate),
        ("pull-messages", PullMessagesRequest(node=Node(node_id=node))),
    ):
        headers = site_key.headers() | protobuf
        body = request.SerializeToString()
        assert response(installed, SITES + name, body=body, **headers)["status"] == 200, name
    assert session.push(instruction("x", node))[0] == 403
    without = [option for option in options if option not in ("--isolation", "process")]
    monkeypatch.setattr(sys, "argv", ["superlink", *without])
    with pytest.raises(ConfigError, match="it could execute an app's code"):
        superlink.gated(tmp_path / "parts")


def certificate_key(client: Path) -> SiteKey:
    """The key in a client's folder."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key = SiteKey()
    private: Any = load_ssh_private_key((client / "client.key").read_bytes(), None)
    key.private = private
    key.public = public_key_to_bytes(private.public_key())
    return key


# Flower's database, SQLAlchemy's and Alembic's
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_flower_that_changed_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import flwr.superlink.main

    from fedstill.flower.deployment import superlink

    federation = federation_in(tmp_path)
    arguments = programs.superlink(federation, insecure=False)[2:]
    monkeypatch.setattr(sys, "argv", list(arguments))
    monkeypatch.setattr("fedstill.flower.deployment.gate.SITES_PATHS", SITES_PATHS - {PULL})
    assert superlink.serve() == 1
    assert "/v1/fleet/pull-messages" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", list(arguments))
    monkeypatch.delattr(flwr.superlink.main, "create_app")
    assert superlink.serve() == 1
    assert "create_app" in capsys.readouterr().err


def test_large_parts_of_messages_are_in_files_until_they_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that sends much does not fill the server's memory."""
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.proto.message_pb2 import ObjectTree

    from fedstill.flower.deployment import superlink

    monkeypatch.setattr(superlink, "MEMORY_BYTES", 2500)
    parts = tmp_path / "parts"
    store = superlink.part_store(parts)
    chunks = [ArrayChunk(memoryview(bytes([number]) * 1000)) for number in range(4)]
    contents = {chunk.object_id: chunk.deflate() for chunk in chunks}
    for id in contents:
        store.preregister(7, ObjectTree(object_id=id))
        assert store.get(id) == b""
    for id, content in contents.items():
        store.put(id, content)
        store.put(id, content)  # a part that is sent twice
    in_files = list(contents)[2:]
    assert sorted(path.name for path in parts.iterdir()) == sorted(in_files)
    assert {id: store.get(id) for id in contents} == contents

    with pytest.raises(ValueError, match="hash"):
        store.put(in_files[0], b"another")
    store.delete(in_files[0])
    assert store.get(in_files[0]) is None
    assert [path.name for path in parts.iterdir()] == [in_files[1]]
    store.delete_objects_in_run(7)
    assert list(parts.iterdir()) == []
    assert len(store) == 0
    store.preregister(8, ObjectTree(object_id=in_files[0]))
    store.put(in_files[0], contents[in_files[0]])
    assert list(parts.iterdir()) == [], "there is room in memory again"


def test_a_part_for_which_the_disk_has_no_room_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.proto.message_pb2 import ObjectTree

    from fedstill.flower.deployment import superlink

    monkeypatch.setattr(superlink, "MEMORY_BYTES", 0)
    parts = tmp_path / "parts"
    store = superlink.part_store(parts)
    chunk = ArrayChunk(memoryview(bytes(1000)))
    content = chunk.deflate()
    store.preregister(7, ObjectTree(object_id=chunk.object_id))

    def write_a_part(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(superlink, "write_note", write_a_part)
        with pytest.raises(OSError, match="No space"):
            store.put(chunk.object_id, content)
    assert list(parts.iterdir()) == []
    assert store.get(chunk.object_id) == b"", "it has not arrived"
    assert store.preregister(7, ObjectTree(object_id=chunk.object_id)) == [chunk.object_id]

    store.put(chunk.object_id, content)
    assert store.get(chunk.object_id) == content
    assert len(list(parts.iterdir())) == 1
