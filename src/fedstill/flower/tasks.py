"""The two sides as Flower's tasks: ``python -m fedstill.flower.tasks SIDE ADDRESS KEYS``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import Refused, error_text, public_reason, topic_of
from fedstill.flower.deployment import certificates
from fedstill.flower.deployment.control import OperatorKey
from fedstill.flower.deployment.folder import client_of_key, require_own_app
from fedstill.flower.fleet import Pace, fetch_soon
from fedstill.flower.messages import RAISED, InstructionCheck, require_flower, sign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flwr.app import Message
    from flwr.serverapp import Grid
    from flwr.supercore.runtime import RuntimeHttpClient


# What carries Flower's tasks out: not the code that an app brings, but what is installed here.
#
# Flower hands out a task for every run at the server and for every message at a site. Its own
# executor unpacks the app that came with it and runs that. This one starts a process of ours
# instead, from one that has imported torch already.


POLL = 0.5
"""The most seconds between two questions for a task."""

AGAIN = 2.0
"""Seconds after which one is asked again that did not answer."""

OUTAGE_SECONDS = 900.0
"""How long a run waits for a server that fails, or that cannot be reached."""

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class Door:
    """The address that hands out tasks, and the key to it.

    ``address``: host and port. ``key``: the secret. ``certificates``: the authority's, a PEM; None
    without TLS.
    """

    address: str
    key: bytes
    certificates: bytes | None = None

    def client(self, component: str, *interceptors: Any) -> RuntimeHttpClient:
        """A client of Flower's for this address, with the key in each request."""
        require_flower()
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        retry = make_simple_http_retry_invoker()
        retry.max_time = OUTAGE_SECONDS
        return RuntimeHttpClient.from_server_address(
            self.address,
            self.certificates is None,
            self.certificates,
            [
                RuntimeVersionHttpInterceptor(component_name=component),
                OperatorKey(self.key),
                *interceptors,
            ],
            retry_invoker=retry,
        )

    def tasks(self) -> RuntimeHttpClient:
        """A client that may ask for tasks."""
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        may_ask = SuperExecAuthHttpInterceptor(master_secret=self.key, protected_methods={ACQUIRE})
        return self.client("SuperExec", may_ask)


Does = Callable[[Door, str, str, int], None]
"""Does a task: at a door, of a kind, with the task's token; ends if the process with this id has
ended.
"""


def execute(
    door: Door, kinds: Collection[str], does: Does, parent: int, preload: Sequence[str]
) -> None:
    """Do every task of some kinds in a process of its own, as long as the parent process is there.

    ``preload``: the modules that the process imports from which all others are forked.
    """
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    client = door.tasks()
    under_way: list[Any] = []
    pace = Pace()
    while os.getppid() == parent:
        under_way = [process for process in under_way if process.is_alive()]
        try:
            answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=sorted(kinds)))
        except httpx.HTTPError:
            time.sleep(AGAIN)
            continue
        if answer.HasField("task") and answer.token:
            arguments = (door, answer.task.type, answer.token, os.getpid())
            under_way.append(context.Process(target=does, args=arguments))
            under_way[-1].start()
        if under_way:
            pace.worked()
        time.sleep(pace.wait(POLL))


# The two sides of fedstill as Flower's tasks: ``python -m fedstill.flower.tasks SIDE
# ADDRESS KEY OTHER_KEY [CA]``.
#
# A task brings an app. Its code is not run: if it is not the app that fedstill writes, the task is
# refused; if it is, what is installed here does the work.


CLIENT = "flwr-clientapp"
SERVER = "flwr-serverapp"
AGENT = "flwr-agentapp"
"""Flower's kinds of task. A site accepts tasks of agents only to refuse them: otherwise their
messages would wait for ever.
"""


def client_task(door: Door, kind: str, token: str, parent: int, check: InstructionCheck) -> None:
    """Answer a message at a site; a refusal is an answer. Nothing is done for a message that the
    server has not signed.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import SubStatus
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    from fedstill.flower.apps import client_app

    fetch_soon()
    client = door.client("flwr-clientapp", RuntimeTokenHttpInterceptor(token))
    with _alive(client, parent):
        message, context, _, fab = pull_task_input(client)
        status = SubStatus.COMPLETED
        details = ""
        try:
            check(message, context.node_id)
            if kind != CLIENT:
                raise Refused(f"this site does no task of the kind {kind!r}", "app")
            require_own_app(fab.content)
            reply = client_app(message=message, context=context)
        except Exception as error:
            status = SubStatus.FAILED
            details = public_reason(topic_of(error))
            print(f"fedstill: refused or failed: {error_text(error)}", file=sys.stderr, flush=True)
            reply = Message(Error(RAISED, details), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, status, details)


def server_task(door: Door, kind: str, token: str, parent: int, signing_key: Path) -> None:
    """Do a run at the server."""
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

    from fedstill.flower.apps import server_app

    fetch_soon()
    grid = federation_grid(door, token, signing_key)
    client = grid._runtime_client
    with _alive(client, parent):
        task = client.PullTaskInput(PullTaskInputRequest())
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
        except (Exception, KeyboardInterrupt) as error:
            status = SubStatus.FAILED
            details = error_text(error)
            print(f"fedstill: run {run.run_id}: {details}", file=sys.stderr, flush=True)
        output = PushTaskOutputRequest(
            context=context_to_proto(context), sub_status=status, details=details
        )
        client.PushTaskOutput(output)


def federation_grid(door: Door, token: str, signing_key: Path) -> Grid:
    """Flower's grid over a federation's server, which knows clients by the keys that they are
    registered with, and signs what it sends to them.
    """
    require_flower()
    key = certificates.signing_key(signing_key)
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.superlink.grid import HttpGrid

    class OperatorGrid(HttpGrid):  # type: ignore[misc]
        """Flower's grid, with the operator's key in its requests, and signed messages."""

        def _connect(self) -> None:
            self._client = door.client("flwr-serverapp", RuntimeTokenHttpInterceptor(token))

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            """Sign messages, and send them."""
            instructions = list(messages)
            for message in instructions:
                sign(message, self.run.run_id, key)
            ids: Iterable[str] = super().push_messages(instructions)
            return ids

    class FederationGrid(OperatorGrid):
        """The same, where nodes have listed keys."""

        def members(self) -> dict[int, int]:
            """{node id: client} of the nodes that are there, by the names that their keys were
            registered under.
            """
            numbers = {int(n.node_id): client_of_key(n.name) for n in self.get_nodes()}
            return {node: client for node, client in numbers.items() if client is not None}

    # Without TLS there are no listed keys.
    if door.certificates is None:
        return OperatorGrid(door.address, True, None, token=token)
    return FederationGrid(door.address, False, door.certificates, token=token)


@contextmanager
def _alive(client: RuntimeHttpClient, parent: int) -> Iterator[None]:
    """Say so as long as the block runs; end with the process that started this one, or with the
    task.
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
        client.close()


WARM = ("fedstill.flower.warm",)
"""What the process has imported from which all tasks are forked."""


def side_of_flower(side: str, address: str, key: str, other_key: str, authority: str = "") -> None:
    """Do a side's tasks until the process that started this one has ended.

    key: the file with the secret for tasks. other_key: the file with the key by which the server
    signs instructions; at a client, with its public half. authority: a file with certificates.
    """
    door = Door(address, Path(key).read_bytes())
    if authority:
        door = replace(door, certificates=Path(authority).read_bytes())
    if side == "client":
        server_key = Path(other_key)
        check = InstructionCheck(server_key, server_key.with_name("instructions"))
        execute(door, (CLIENT, AGENT), partial(client_task, check=check), os.getppid(), WARM)
    else:
        does = partial(server_task, signing_key=Path(other_key))
        execute(door, (SERVER,), does, os.getppid(), WARM)


if __name__ == "__main__":
    side_of_flower(*sys.argv[1:])
    # tasks under way end by themselves when they see that this process has; a usual exit waits for
    # them
    os._exit(0)
