"""The gate by itself: what it passes on and what not, whatever the rest of a request claims."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import ConfigError
from fedstill.flower.deployment import folder, programs
from fedstill.flower.deployment.gate import KEY_HEADER, MAX_BODY, SITES_PATHS, Gate, check_paths
from flowers import needs_flower

KEY = b"k" * 43
PULL = "/v1/fleet/pull-messages"


class Inside:
    """What is behind the gate: it notes who came through, and answers with a status."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.came = status, list[str]()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.came.append(str(scope.get("path", scope["type"])))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def asked(
    gate: Gate, path: str, method: str = "POST", kind: str = "http", **headers: str | bytes
) -> dict[str, Any]:
    """The first message of the answer; a header's name is written with _ for -."""
    sent: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = {"content_length": "0", **headers}
    pairs = [
        (k.replace("_", "-").encode(), v if isinstance(v, bytes) else v.encode())
        for k, v in given.items()
        if v != ""
    ]
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "headers": pairs,
        "client": ("203.0.113.7", 5),
    }
    asyncio.run(gate(scope, receive, send))
    return sent[0] if sent else {}


def test_sites_pass_on_their_own_paths_and_on_no_other() -> None:
    inside = Inside()
    gate = Gate(inside, KEY)
    for path in sorted(SITES_PATHS):
        assert asked(gate, path)["status"] == 200
    assert inside.came == sorted(SITES_PATHS)


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
    inside = Inside()
    gate = Gate(inside, KEY)
    with caplog.at_level(logging.WARNING):
        assert asked(gate, path, method)["status"] == 403
    assert inside.came == []
    assert "203.0.113.7" in caplog.text
    assert "\x00" not in caplog.text
    assert asked(gate, path, method, **{KEY_HEADER.replace("-", "_"): KEY})["status"] == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_a_sites_path_by_another_method_is_refused(method: str) -> None:
    assert asked(Gate(Inside(), KEY), PULL, method)["status"] == 403


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
    assert asked(Gate(Inside(), KEY), "/v1/control/start-run", **headers)["status"] == 403


def test_a_web_socket_is_closed_and_the_start_passes() -> None:
    inside = Inside()
    assert (
        asked(Gate(inside, KEY), "/v1/fleet/pull-messages", kind="websocket")["type"]
        == "websocket.close"
    )
    asked(Gate(inside, KEY), "", kind="lifespan")
    assert inside.came == [""]


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
    inside = Inside()
    assert asked(Gate(inside, KEY), PULL, **headers)["status"] == 413
    assert inside.came == []


def signed(
    key: bytes = b"public", when: str = "2026-01-01T00:00:00.123456+00:00"
) -> dict[str, str]:
    return {
        "flwr_public_key": base64.b64encode(key).decode(),
        "flwr_timestamp": when,
        "flwr_signature": "c2ln",
    }


def test_a_signed_request_counts_once() -> None:
    inside = Inside()
    gate = Gate(inside, KEY)
    assert asked(gate, PULL, **signed())["status"] == 200
    assert asked(gate, PULL, **signed())["status"] == 401
    # of one signature another can be made that is valid, too
    other_text = signed() | {"flwr_signature": "b3RoZXI="}
    assert asked(gate, "/v1/fleet/push-messages", **other_text)["status"] == 401
    assert asked(gate, PULL, **signed(when="2026-01-01T00:00:00.123457+00:00"))["status"] == 200
    assert asked(gate, PULL, **signed(key=b"another"))["status"] == 200
    assert len(inside.came) == 3


def test_a_body_is_cut_off_where_it_is_too_large_whatever_length_was_said() -> None:
    came: list[str] = []

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            came.append(message["type"])
        came.append(message["type"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(MAX_BODY // 4), "more_body": True}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": PULL, "headers": [(b"content-length", b"0")]}
    asyncio.run(Gate(reads, KEY)(scope, receive, send))
    assert came == ["http.request"] * 4 + ["http.disconnect"]


@pytest.mark.parametrize(
    "headers", [{}, {"flwr_public_key": "bm8="}, {"flwr_public_key": "*", "flwr_timestamp": "1"}]
)
def test_where_sites_have_listed_keys_nothing_is_read_of_a_request_that_is_not_signed(
    headers: dict[str, str],
) -> None:
    inside = Inside()
    assert asked(Gate(inside, KEY, listed=True), PULL, **headers)["status"] == 401
    assert inside.came == []
    assert asked(Gate(inside, KEY, listed=True), PULL, **signed())["status"] == 200


@needs_flower
def test_a_sites_own_key_is_short_enough(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    federation = folder.init(tmp_path / "fed", 1, ("127.0.0.1",), "127.0.0.1", 8443, "1.0")
    private: Any = load_ssh_private_key((federation.client(0) / "client.key").read_bytes(), None)
    own = signed(key=public_key_to_bytes(private.public_key()))
    assert asked(Gate(Inside(), KEY, listed=True), PULL, **own)["status"] == 200


def test_long_headers_are_no_signature() -> None:
    gate = Gate(Inside(), KEY, listed=True)
    for long in (signed(key=b"k" * 4000), signed(when="1" * 4000)):
        assert asked(gate, PULL, **long)["status"] == 401
    assert gate._signed == {}


@pytest.mark.parametrize("status", [400, 401, 413, 415, 422])
def test_a_stranger_cannot_use_up_a_sites_time_nor_memory(status: int) -> None:
    inside = Inside(status)
    gate = Gate(inside, KEY)
    assert asked(gate, PULL, **signed())["status"] == status
    assert gate._signed == {}
    inside.status = 200
    assert asked(gate, PULL, **signed())["status"] == 200


def test_old_signatures_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, now = Gate(Inside(), KEY), 1000.0
    monkeypatch.setattr("fedstill.flower.deployment.gate.time.monotonic", lambda: now)
    for second in range(400):
        now = 1000.0 + second
        asked(gate, PULL, **signed(when=str(second)))
    assert len(gate._signed) < 340


def test_a_short_key_opens_nothing() -> None:
    with pytest.raises(ConfigError, match="shorter than 32 bytes"):
        Gate(Inside(), b"")


def test_other_paths_than_those_known_are_refused() -> None:
    check_paths([*SITES_PATHS, "/docs"])
    for paths in ({*SITES_PATHS, "/v1/fleet/run-this"}, SITES_PATHS - {PULL}):
        with pytest.raises(ConfigError, match="paths"):
            check_paths(paths)


@needs_flower
# Flower's database, SQLAlchemy's and Alembic's
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_installed_flower_is_served_inside_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's application has the paths that the gate knows; without the operator's key it does
    not start.
    """
    from fedstill.flower.deployment import superlink

    federation = folder.init(tmp_path / "fed", 1, ("127.0.0.1",), "127.0.0.1", 8443, "1.0")
    command = programs.superlink(federation, insecure=False)
    assert command[:3] == [sys.executable, "-m", "fedstill.flower.deployment.superlink"]
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setattr(sys, "argv", command[2:])
    gate, config = superlink.gated()
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in os.environ
    assert (gate.key, config.enable_supernode_auth) == (federation.key.read_bytes(), True)
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
        assert asked(gate, path)["status"] == 403
    assert asked(gate, PULL)["status"] not in (403, 404)
    without = [a for a in command[2:] if a not in ("--isolation", "process")]
    monkeypatch.setattr(sys, "argv", without)
    with pytest.raises(ConfigError, match="let it run the code of an app"):
        superlink.gated()


@needs_flower
# Flower's database, SQLAlchemy's and Alembic's
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_flower_that_changed_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import flwr.superlink.main

    from fedstill.flower.deployment import superlink

    federation = folder.init(tmp_path / "fed", 1, ("127.0.0.1",), "127.0.0.1", 8443, "1.0")
    monkeypatch.setattr(sys, "argv", programs.superlink(federation, insecure=False)[2:])
    monkeypatch.setattr("fedstill.flower.deployment.gate.SITES_PATHS", SITES_PATHS - {PULL})
    assert superlink.serve() == 1
    assert (
        "other paths for sites than fedstill knows (/v1/fleet/pull-messages)"
        in capsys.readouterr().err
    )
    monkeypatch.delattr(flwr.superlink.main, "create_app")
    assert superlink.serve() == 1
    assert "starts its server otherwise than fedstill knows" in capsys.readouterr().err
