"""Runs at a federation's server.

``python -m fedstill.flower.deployment.tasks PIPE ADDRESS KEY SIGNING_KEY [CA]`` executes a run,
whose token it reads from standard input. It closes the pipe when it starts to send heartbeats.

Flower provides a task for every run. Its own executor would unpack and execute the app of the run.
This module never executes the app's code: it refuses apps other than fedstill's, and uses the
installed code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import on_one_line
from fedstill.flower import check_flower_installed
from fedstill.flower.deployment import certificates, programs
from fedstill.flower.deployment.control import Control, OperatorKey, trusting
from fedstill.flower.deployment.folder import Federation, client_of_key, require_own_app

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.serverapp import Grid
    from flwr.supercore.runtime import RuntimeHttpClient

POLL = 1.0
"""The time between two requests for a run, in seconds."""

AGAIN = 2.0
"""The time after which an unanswered request is repeated, in seconds."""

OUTAGE_SECONDS = 900.0
"""The time for which a run waits for a failing or unreachable server, in seconds."""

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"

SERVER = "flwr-serverapp"
"""Flower's name for the task of a run's server part."""


@dataclass(frozen=True)
class Door:
    """The address that provides tasks, and the keys for it.

    ``address``: host and port. ``key``: the file of the secret. ``signing_key``: the file of the
    key for signing instructions. ``certificates``: the file of the authority's certificate; None
    without TLS.
    """

    address: str
    key: Path
    signing_key: Path
    certificates: Path | None = None

    @staticmethod
    def of(federation: Federation, insecure: bool) -> Door:
        """The access to a federation's server for programs on its machine."""
        door = Door(federation.local, federation.key, federation.signing_key)
        if insecure:
            return door
        return replace(door, certificates=federation.server / "ca.crt")

    @property
    def authority(self) -> bytes | None:
        """The authority's certificate; None without TLS."""
        if self.certificates is None:
            return None
        return self.certificates.read_bytes()

    def client(
        self, component: str, *interceptors: Any, outage: float = OUTAGE_SECONDS
    ) -> RuntimeHttpClient:
        """One of Flower's clients for this address, with the key in each request.

        ``outage``: the time for which failing requests are repeated, in seconds. If it is 0, a
        failing request raises httpx.HTTPError immediately. Otherwise, an answer with status 401
        ends this process, because Flower's retries send it SIGINT.
        """
        check_flower_installed()
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        every_request = [
            RuntimeVersionHttpInterceptor(component_name=component),
            OperatorKey(self.key.read_bytes()),
        ]
        scheme, verify = trusting(self.authority)
        retry = None
        if outage:
            retry = make_simple_http_retry_invoker()
            retry.max_time = outage
        return RuntimeHttpClient(
            f"{scheme}://{self.address}",
            interceptors=[*every_request, *interceptors],
            verify=verify,
            retry_invoker=retry,
        )

    def tasks(self) -> RuntimeHttpClient:
        """A client that may request tasks."""
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        may_ask = SuperExecAuthHttpInterceptor(
            master_secret=self.key.read_bytes(), protected_methods={ACQUIRE}
        )
        # The caller repeats requests, and also watches whether the server still runs.
        return self.client("SuperExec", may_ask, outage=0.0)

    def command(self, pipe: int) -> list[str]:
        """The command that executes a run.

        ``pipe``: a file descriptor, which the program closes when it starts to send heartbeats.
        """
        command = [sys.executable, "-m", "fedstill.flower.deployment.tasks", str(pipe)]
        command += [self.address, str(self.key), str(self.signing_key)]
        if self.certificates is not None:
            command.append(str(self.certificates))
        return command


def carry_out_runs(door: Door, end: threading.Event, env: Mapping[str, str]) -> None:
    """Execute each run in a separate process, until an event ends all of them."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    client = door.tasks()
    runs: list[RunProcess] = []
    try:
        while not end.wait(POLL):
            runs = [run for run in runs if run.is_alive()]
            try:
                answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[SERVER]))
            except httpx.HTTPError:
                end.wait(AGAIN)
                continue
            if answer.HasField("task") and answer.token:
                runs += _started(door, answer.token, env)
    finally:
        client.close()
        for run in runs:
            run.end()


def _started(door: Door, token: str, env: Mapping[str, str]) -> list[RunProcess]:
    """The started process of a run; empty if it cannot be started, for example without memory.

    Flower then fails the run, because it receives no heartbeats. Other runs continue.
    """
    try:
        return [RunProcess.start(door, token, env)]
    except Exception as error:
        reason = on_one_line(error)
        print(f"fedstill: a run could not be started: {reason}", file=sys.stderr, flush=True)
        return []


@dataclass
class RunProcess:
    """The process that executes a run, and the run's connection to the server.

    ``pipe``: closed when the process starts to send heartbeats, or ends.
    """

    process: subprocess.Popen[bytes]
    client: RuntimeHttpClient
    pipe: RawIOBase

    @staticmethod
    def start(door: Door, token: str, env: Mapping[str, str]) -> RunProcess:
        """Start a process. The token is not an argument, because others could read arguments."""
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        with ExitStack() as after_failure:
            reader, writer = os.pipe()
            pipe = after_failure.enter_context(os.fdopen(reader, "rb", buffering=0))
            try:
                process = subprocess.Popen(
                    door.command(writer),
                    env=dict(env),
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=[writer],
                )
            finally:
                os.close(writer)
            after_failure.callback(programs.end, process)
            os.set_blocking(reader, False)
            assert process.stdin is not None
            with process.stdin as stream:
                stream.write(token.encode())
            # The next heartbeat follows soon, so retries are not needed. They would end the server
            # if the token has become invalid.
            client = door.client("SuperExec", RuntimeTokenHttpInterceptor(token), outage=0.0)
            after_failure.pop_all()
        return RunProcess(process, client, pipe)

    def is_alive(self) -> bool:
        """Whether the process runs; if so, send a heartbeat for it.

        The process cannot send heartbeats itself before Python has started, which may take a minute
        on a busy machine; Flower would then provide the run again. Afterwards, only the process
        sends heartbeats, because only it knows when its token ends.
        """
        import httpx
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        if self.process.poll() is not None:
            self._close()
            return False
        if not self._sends_heartbeats():
            with suppress(httpx.HTTPError):
                self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    def end(self) -> None:
        """End the process, and close the connection."""
        programs.end(self.process)
        self._close()

    def _close(self) -> None:
        self.client.close()
        self.pipe.close()

    def _sends_heartbeats(self) -> bool:
        """Whether the process sends heartbeats itself: it has closed its side of the pipe."""
        return self.pipe.read(1) is not None


def server_task(door: Door, token: str, parent: int, pipe: int) -> None:
    """Execute a run; ends if the process with the id ``parent`` has ended.

    ``pipe``: a file descriptor, which is closed when this process starts to send heartbeats.
    """
    grid = federation_grid(door, token)
    client = grid._runtime_client
    try:
        with _alive(client, parent):
            os.close(pipe)
            output = _output_of(grid, client)
        # A heartbeat after the output would be rejected, because the output ends the token.
        client.PushTaskOutput(output)
    finally:
        client.close()


def _output_of(grid: Any, client: RuntimeHttpClient) -> PushTaskOutputRequest:
    """Execute a run, and return its outcome; ends this process if the run is stopped."""
    from flwr.common.config import get_fused_config_from_fab
    from flwr.common.constant import SubStatus
    from flwr.common.serde import (
        context_from_proto,
        context_to_proto,
        fab_from_proto,
        run_from_proto,
    )
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.task_identity import TaskIdentity

    task = client.PullTaskInput(PullTaskInputRequest())
    # Imported here because they import torch, and Flower ends a task without heartbeats for a
    # minute.
    from fedstill.flower.apps import server_app
    from fedstill.flower.messages import error_text

    context = context_from_proto(task.context)
    run = run_from_proto(task.run)
    fab = fab_from_proto(task.fab)
    TaskIdentity.task_id = task.task_id
    TaskIdentity.run_id = run.run_id
    TaskIdentity.node_id = context.node_id
    grid.set_run(run)
    status = SubStatus.COMPLETED
    details = ""
    try:
        require_own_app(fab.content)
        context.run_config = get_fused_config_from_fab(fab.content, run)
        server_app(grid=grid, context=context)
    except KeyboardInterrupt:
        # Flower's client interrupts this process when the token of the run becomes invalid.
        print(f"fedstill: run {run.run_id} was stopped", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception as error:
        status = SubStatus.FAILED
        details = error_text(error)
        print(f"fedstill: run {run.run_id}: {details}", file=sys.stderr, flush=True)
    return PushTaskOutputRequest(
        context=context_to_proto(context), sub_status=status, details=details
    )


def federation_grid(door: Door, token: str) -> Grid:
    """Flower's grid over a federation's server. It identifies clients by their registered keys, and
    signs messages to them.
    """
    check_flower_installed()
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.superlink.grid import HttpGrid

    key = certificates.signing_key(door.signing_key)

    class OperatorGrid(HttpGrid):  # type: ignore[misc]
        """Flower's grid with the operator's key in its requests and with signed messages."""

        def _connect(self) -> None:
            self._client = door.client("flwr-serverapp", RuntimeTokenHttpInterceptor(token))

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            """Sign and send messages."""
            from fedstill.flower.messages import sign_all

            instructions = list(messages)
            sign_all(instructions, self.run.run_id, key)
            ids: Iterable[str] = super().push_messages(instructions)
            return ids

    class FederationGrid(OperatorGrid):
        """The same grid, for nodes with listed keys."""

        def members(self) -> dict[int, int]:
            """{node id: client} of the online nodes, by the names under which their keys were
            registered.
            """
            numbers = {int(n.node_id): client_of_key(n.name) for n in self.get_nodes()}
            return {node: client for node, client in numbers.items() if client is not None}

        def registered(self) -> set[int]:
            """The clients whose keys are listed, regardless of whether they are online."""
            control = Control(door.address, door.authority, door.key.read_bytes())
            names = [name for name, _ in control.nodes().values()]
            return {client for client in map(client_of_key, names) if client is not None}

    # Without TLS, there is no list of keys.
    if door.authority is None:
        return OperatorGrid(door.address, True, None, token=token)
    return FederationGrid(door.address, False, door.authority, token=token)


@contextmanager
def _alive(client: RuntimeHttpClient, parent: int) -> Iterator[None]:
    """A context that sends heartbeats. It ends this process when the parent process or the task
    ends.
    """
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http

    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_parent_process_monitor(parent)
    heart = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heart.start()
    try:
        yield
    finally:
        heart.stop()


def main(pipe: str, address: str, key: str, signing_key: str, authority: str = "") -> None:
    """Execute the run whose token is on standard input."""
    door = Door(address, Path(key), Path(signing_key))
    if authority:
        door = replace(door, certificates=Path(authority))
    server_task(door, sys.stdin.read(), os.getppid(), int(pipe))


if __name__ == "__main__":
    main(*sys.argv[1:])
