"""What carries Flower's tasks out: not the code that an app brings, but what is installed here.

Flower hands out a task for every run at the server and for every message at a site. Its own
executor unpacks the app that came with it and runs that. This one starts a process of ours instead,
from one that has imported torch already.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstill.deploy.control import OperatorKey
from fedstill.engines.flower.messages import require_flower
from fedstill.engines.flower.waiting import Pace

if TYPE_CHECKING:
    from flwr.supercore.runtime import RuntimeHttpClient

POLL = 0.5
"""The most seconds between two questions for a task."""

AGAIN = 2.0
"""Seconds after which one is asked again that did not answer."""

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class Door:
    """Where tasks are to be had, and what opens it.

    ``address``: host and port. ``key``: the secret. ``certificates``: the authority's, a PEM; None
    without TLS.
    """

    address: str
    key: bytes
    certificates: bytes | None = None

    def client(self, component: str, *more: Any) -> RuntimeHttpClient:
        """A client of Flower's for this address, with the key in each request."""
        require_flower()
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            self.address,
            self.certificates is None,
            self.certificates,
            [RuntimeVersionHttpInterceptor(component_name=component), OperatorKey(self.key), *more],
            retry_invoker=make_simple_http_retry_invoker(),
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
    client, under_way, pace = door.tasks(), list[Any](), Pace()
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
