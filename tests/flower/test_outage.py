"""A run outlives a server that fails for a while, and a machine on which everything is slow."""

from __future__ import annotations

import pickle
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federations import federation_in

from fedstill.flower.deployment import folder, node
from fedstill.flower.deployment.node import Incoming, Outgoing, Server
from fedstill.flower.deployment.reach import EXPIRED
from fedstill.flower.deployment.tasks import OUTAGE_SECONDS, Door
from flowers import needs_flower
from processes import process_environment

pytestmark = needs_flower


@contextmanager
def answering(statuses: list[int], body: bytes) -> Iterator[str]:
    """The address of a server that answers with these statuses, and then with 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status = statuses.pop(0) if statuses else 200
            self.send_response(status)
            self.send_header("content-type", "application/protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_run_asks_again_where_the_server_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.runtime_pb2 import GetNodesRequest, GetNodesResponse
    from flwr.supercore.retry import http_retry

    monkeypatch.setattr(http_retry, "exponential", lambda **options: iter([0.01] * 99))
    federation = federation_in(tmp_path)
    answer = GetNodesResponse(nodes=[NodeInfo(node_id=7)]).SerializeToString()
    statuses = [503, 503, 502]
    with answering(statuses, answer) as address:
        client = Door(address, federation.key, federation.signing_key).client("test")
        assert client._retry_invoker.max_time == OUTAGE_SECONDS
        nodes = client.GetNodes(GetNodesRequest()).nodes
        client.close()
    assert [node.node_id for node in nodes] == [7]
    assert statuses == []


STARTS = """
import sys
from pathlib import Path
from fedstill.flower.deployment import tasks
def alive(client, parent):
    raise SystemExit("torch" in sys.modules)
tasks._alive = alive
tasks.server_task(tasks.Door("127.0.0.1:1", Path(sys.argv[1]), Path(sys.argv[2])), "token", 1, 0)
"""


def test_a_run_shows_that_it_is_there_before_it_imports_torch(tmp_path: Path) -> None:
    """On a busy machine the import takes a minute, in which Flower would give the run up."""
    federation = federation_in(tmp_path)
    keys = [str(federation.key), str(federation.signing_key)]
    command = [sys.executable, "-c", STARTS, *keys]
    process = subprocess.run(command, env=process_environment(), check=False, timeout=300)
    assert process.returncode == 0


def test_the_server_learns_that_a_run_is_there_while_its_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine Python takes a minute to start, in which Flower would hand the run out
    again.
    """
    from fedstill.flower.deployment import tasks

    noted: list[str] = []

    def client(*_: Any, interceptors: list[Any], **__: Any) -> Any:
        return SimpleNamespace(
            SendTaskHeartbeat=lambda _: noted.append(interceptors[-1]._token),
            close=lambda: noted.append("closed"),
        )

    federation = federation_in(tmp_path)
    monkeypatch.setattr("flwr.supercore.runtime.RuntimeHttpClient", client)
    starting = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(tasks.Door, "command", lambda door, pipe: starting)
    run = tasks.RunProcess.start(tasks.Door.of(federation, insecure=True), "token", {})
    assert run.is_alive()
    run.process.kill()
    run.process.wait(60)
    assert not run.is_alive()
    assert noted == ["token", "closed"]


TAKES_OVER = """
import os, sys, time
token = sys.stdin.read()
os.close(int(sys.argv[1]))
time.sleep(600)
"""


def test_only_a_runs_process_sends_heartbeats_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone knows when its token ends; the server would log a later heartbeat as an error."""
    from fedstill.flower.deployment import tasks

    federation = federation_in(tmp_path)
    program = [sys.executable, "-c", TAKES_OVER]
    monkeypatch.setattr(tasks.Door, "command", lambda door, pipe: [*program, str(pipe)])
    statuses = [401] * 9
    with answering(statuses, b"{}") as address:
        door = Door(address, federation.key, federation.signing_key)
        run = tasks.RunProcess.start(door, "token", {})
        while run.pipe.read(1) is None:  # until the process has closed its side
            time.sleep(0.05)
        assert run.is_alive()
        assert run.is_alive()
        run.process.kill()
        run.process.wait(60)
        assert not run.is_alive()
    assert len(statuses) == 9


ENDS = """
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from fedstill.flower.deployment import tasks
class Client:
    def SendTaskHeartbeat(self, request):
        print("heartbeat", flush=True)
        return SimpleNamespace(success=True)
    def PullTaskInput(self, request):
        raise NotImplementedError
    def PushTaskOutput(self, output):
        heart = [thread for thread in threading.enumerate() if thread.daemon]
        print(output, len(heart), flush=True)
    def close(self):
        print("closed", flush=True)
tasks.federation_grid = lambda door, token: SimpleNamespace(_runtime_client=Client())
tasks._output_of = lambda grid, client: "output"
import flwr.supercore.app_utils as utils
utils.start_parent_process_monitor = lambda parent: None
door = tasks.Door("127.0.0.1:1", Path(), Path())
tasks.server_task(door, "token", os.getppid(), os.dup(0))
"""


def test_a_run_sends_no_heartbeat_after_its_output() -> None:
    """The output ends its token."""
    command = [sys.executable, "-c", ENDS]
    process = subprocess.run(
        command, env=process_environment(), check=False, timeout=300, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-2:] == ["output 0", "closed"]


def test_a_run_that_is_stopped_ends_without_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its token is not valid any more: Flower's client then interrupts the process."""
    from flwr.proto.runtime_pb2 import PullTaskInputResponse
    from flwr.supercore.task_identity import TaskIdentity

    from fedstill.flower.deployment import tasks

    def interrupt(packed: bytes) -> None:
        raise KeyboardInterrupt

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(tasks, "require_own_app", interrupt)
    grid = SimpleNamespace(set_run=lambda run: None)
    client: Any = SimpleNamespace(PullTaskInput=lambda request: PullTaskInputResponse())
    with pytest.raises(SystemExit):
        tasks._output_of(grid, client)
    (line,) = capsys.readouterr().err.splitlines()
    assert "stopped" in line


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_server_survives_a_run_whose_token_is_no_longer_valid(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator has stopped it, before its process has started. Flower's retries would then send
    SIGINT to the process that asks, which is the server.
    """
    from fedstill.flower.deployment import tasks

    federation = federation_in(tmp_path)
    ending = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(tasks.Door, "command", lambda door, pipe: ending)
    statuses = [status] * 3
    with answering(statuses, b"{}") as address:
        door = Door(address, federation.key, federation.signing_key)
        run = tasks.RunProcess.start(door, "token", {})
        assert run.is_alive()
        assert run.is_alive()
        run.process.kill()
        run.process.wait(60)
        assert not run.is_alive()
    assert statuses == [status]


def test_a_site_whose_reply_is_refused_prints_the_reason_and_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import httpx
    from flwr.proto.node_pb2 import Node

    reason = "fedstill: the request names an instruction that has expired\n"
    hostile = "\x1b[2J\u202e"
    request = httpx.Request("POST", "https://fed")
    response = httpx.Response(403, text=f"{reason}{hostile}", request=request)

    def refuse(request: object) -> None:
        response.raise_for_status()

    client: Any = SimpleNamespace(PushMessages=refuse)
    server = Server("fed:8443", client, b"", node=Node(node_id=5))
    message = Incoming(run=7, node=5, root="m", metadata=b"", parts={}, app=b"", is_app_run=True)
    server.send(Outgoing(metadata=b"", tree=b"", parts={}), message)
    (line,) = capsys.readouterr().out.splitlines()
    assert "403" in line
    assert reason.strip() in line
    assert not set(line) & set(hostile[0] + hostile[-1])


def test_a_site_sends_all_parts_and_prints_that_the_server_did_not_store_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk of the server is full, or has been full for a while."""
    from flwr.proto.message_pb2 import PushObjectResponse
    from flwr.proto.node_pb2 import Node

    pushed: list[str] = []

    def push(request: Any) -> Any:
        pushed.append(request.object_id)
        return PushObjectResponse(stored=request.object_id == "stored")

    announced = SimpleNamespace(objects_to_push=["not stored", "stored"], session_id="s")
    client: Any = SimpleNamespace(PushMessages=lambda request: announced, PushObject=push)
    server = Server("fed:8443", client, b"", node=Node(node_id=5))
    message = Incoming(run=7, node=5, root="m", metadata=b"", parts={}, app=b"", is_app_run=True)
    server.send(Outgoing(b"", b"", {"not stored": b"a", "stored": b"b"}), message)
    assert pushed == ["not stored", "stored"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "not accept the reply" in line


def test_a_site_has_a_request_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker process receives the parts one by one, and not also with its arguments."""
    parts = {"first": b"1" * 1000, "second": b"2" * 1000}
    messages: list[bytes] = []
    sizes: list[int] = []
    answered = iter([b"metadata", b"tree", b""])
    connection = SimpleNamespace(
        send_bytes=messages.append, poll=lambda seconds: True, recv_bytes=lambda: next(answered)
    )

    @contextmanager
    def started(workers: node.Workers, target: Any, *arguments: Any) -> Iterator[Any]:
        sizes.append(len(pickle.dumps(arguments)))
        yield connection

    monkeypatch.setattr(node.Workers, "_started", started)
    workers = node.Workers(folder.Membership(Path("client0"), 0, "fed:8443"))
    message = Incoming(7, 5, "m", b"", dict(parts), b"", is_app_run=True)
    assert workers.answer(message).metadata == b"metadata"
    assert dict(zip(messages[::2], messages[1::2], strict=False)) == {
        id.encode(): part for id, part in parts.items()
    }
    assert sizes[0] < 1000, "the arguments contain no parts"


def test_a_site_names_an_expired_certificate_while_it_still_gets_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its questions go on over a connection from before; the server takes it for absent."""
    import httpx
    from flwr.proto.node_pb2 import Node

    refusal = ssl.SSLCertVerificationError(1, "certificate verify failed")
    refusal.verify_code = EXPIRED
    beats: list[object] = []
    is_enough = threading.Event()

    def refuse(request: object) -> None:
        beats.append(request)
        if len(beats) > 3:
            is_enough.set()
        raise httpx.ConnectError("no handshake") from refusal

    monkeypatch.setattr(node, "HEARTBEAT_SECONDS", 0.01)
    client: Any = SimpleNamespace(SendNodeHeartbeat=refuse)
    server = node.Server("fed:8443", client, b"", node=Node(node_id=5))
    thread = threading.Thread(target=server._beat)
    thread.start()
    assert is_enough.wait(30)
    server._end.set()
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "deploy renew" in lines[0]
