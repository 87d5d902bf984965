"""Questions of sites for messages, and of runs for replies: the gate holds them while there is
none.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from fedstill.flower.deployment.exchange import PULL, PUSH
from fedstill.flower.deployment.gate import (
    CONTROL,
    KEY_HEADER,
    RUN_PULL,
    RUN_PUSH,
    START_RUN,
    TAKE_RUN,
    Gate,
)
from flowers import needs_flower
from gate_requests import Backend, SiteKey, instruction, reply, tree_of

pytestmark = needs_flower

KEY = b"k" * 43
SITES = {5: SiteKey(), 6: SiteKey()}
SOON = 0.05


class Open:
    """A connection that is open until it is closed here: the web server's side of a request."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.is_read = False
        self.closed = asyncio.Event()
        self.answers = list[dict[str, Any]]()

    async def receive(self) -> MutableMapping[str, Any]:
        if not self.is_read:
            self.is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.answers.append(dict(message))


def guarding(seconds: float = 30.0) -> tuple[Gate, Backend]:
    """A gate that holds questions for so long, and what is behind it."""
    backend = Backend()
    nodes = {key.public: node for node, key in SITES.items()}
    gate = Gate(backend, KEY, nodes.get)
    gate.held.seconds = seconds
    return gate, backend


def begin(gate: Gate, path: str, body: bytes, **headers: Any) -> tuple[Open, asyncio.Task[None]]:
    """A request under way."""
    connection = Open(body)
    pairs = [
        (name.replace("_", "-").encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in {"content_length": str(len(body)), **headers}.items()
    ]
    scope = {"type": "http", "method": "POST", "path": path, "headers": pairs, "client": None}
    return connection, asyncio.ensure_future(gate(scope, connection.receive, connection.send))


def pull(gate: Gate, node: int) -> tuple[Open, asyncio.Task[None]]:
    """Begin the question of a site for messages."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    body = PullMessagesRequest(node=Node(node_id=node)).SerializeToString()
    return begin(gate, PULL, body, **SITES[node].headers())


async def send_to(gate: Gate, *nodes: int) -> None:
    """A run sends a message to each node."""
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    messages = [instruction(f"m{node}", node) for node in nodes]
    body = PushAppMessagesRequest(messages_list=messages).SerializeToString()
    await begin(gate, RUN_PUSH, body, **{KEY_HEADER.replace("-", "_"): KEY})[1]


async def is_held(task: asyncio.Task[None]) -> bool:
    await asyncio.sleep(SOON)
    return not task.done()


def test_a_question_is_held_until_a_run_sends_this_site_a_message() -> None:
    async def scenario() -> None:
        gate, backend = guarding()
        await pull(gate, 5)[1]  # the first question of a site is never held
        assert backend.paths == [PULL]
        question, task = pull(gate, 5)
        assert await is_held(task)
        await send_to(gate, 6)
        assert await is_held(task)
        await send_to(gate, 5)
        await asyncio.wait_for(task, 5)
        assert question.answers[0]["status"] == 200
        assert backend.paths.count(PULL) == 2

    asyncio.run(scenario())


def test_a_site_that_got_a_message_is_not_held_when_it_asks_again() -> None:
    from flwr.proto.fleet_pb2 import PullMessagesResponse

    async def scenario() -> None:
        gate, backend = guarding()
        message = instruction("m", 5)
        backend.answers[PULL] = PullMessagesResponse(
            messages_list=[message], message_object_trees=[tree_of(message)]
        ).SerializeToString()
        await pull(gate, 5)[1]
        await asyncio.wait_for(pull(gate, 5)[1], 5)
        assert backend.paths == [PULL, PULL]

    asyncio.run(scenario())


def test_a_message_that_comes_while_a_site_asks_is_not_missed() -> None:
    async def scenario() -> None:
        gate, backend = guarding()

        async def meanwhile(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == PULL:
                await send_to(gate, 5)
            await backend(scope, receive, send)

        gate.app = meanwhile
        await pull(gate, 5)[1]
        await asyncio.wait_for(pull(gate, 5)[1], 5)

    asyncio.run(scenario())


def test_the_question_of_a_site_that_left_takes_no_message() -> None:
    async def scenario() -> None:
        gate, backend = guarding()
        await pull(gate, 5)[1]
        departed, task = pull(gate, 5)
        assert await is_held(task)
        departed.closed.set()
        await asyncio.wait_for(task, 5)
        assert departed.answers == []
        assert backend.paths == [PULL]

    asyncio.run(scenario())


def test_a_question_is_held_for_a_while_only() -> None:
    async def scenario() -> None:
        gate, backend = guarding(seconds=SOON)
        await pull(gate, 5)[1]
        question, task = pull(gate, 5)
        await asyncio.wait_for(task, 5)
        assert question.answers[0]["status"] == 200
        assert backend.paths == [PULL, PULL]

    asyncio.run(scenario())


def test_a_run_whose_message_is_refused_wakes_nobody() -> None:
    async def scenario() -> None:
        gate, _ = guarding()
        await pull(gate, 5)[1]
        _, task = pull(gate, 5)
        await begin(gate, RUN_PUSH, b"\xff\xff", **{KEY_HEADER.replace("-", "_"): KEY})[1]
        assert await is_held(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


# A run's questions for replies


def run_pull(gate: Gate) -> tuple[Open, asyncio.Task[None]]:
    """Begin the question of a run for a reply."""
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

    body = PullAppMessagesRequest(message_ids=["m5"]).SerializeToString()
    return begin(gate, RUN_PULL, body, **{KEY_HEADER.replace("-", "_"): KEY})


async def reply_of(gate: Gate, backend: Backend, node: int) -> None:
    """A site fetches its message, and sends its reply."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
    from flwr.proto.node_pb2 import Node

    message = instruction(f"m{node}", node)
    backend.answers[PULL] = PullMessagesResponse(
        messages_list=[message], message_object_trees=[tree_of(message)]
    ).SerializeToString()
    await pull(gate, node)[1]
    answer = reply("r", node, to=f"m{node}")
    request = PushMessagesRequest(
        node=Node(node_id=node), messages_list=[answer], message_object_trees=[tree_of(answer)]
    )
    await begin(gate, PUSH, request.SerializeToString(), **SITES[node].headers())[1]


def test_a_runs_question_is_held_until_a_site_replies() -> None:
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse

    async def scenario() -> None:
        gate, backend = guarding()
        gate.held.run_seconds = 30.0
        question, task = run_pull(gate)
        assert await is_held(task)
        content = PullAppMessagesResponse(messages_list=[reply("r", 5, to="m5")])
        backend.answers[RUN_PULL] = content.SerializeToString()
        await reply_of(gate, backend, 5)
        await asyncio.wait_for(task, 5)
        assert question.answers[-1]["body"] == content.SerializeToString()
        assert backend.paths.count(RUN_PULL) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [200, 403])
def test_a_runs_question_is_answered_after_a_while_and_an_error_at_once(status: int) -> None:
    async def scenario() -> None:
        gate, backend = guarding()
        gate.held.run_seconds = SOON if status == 200 else 30.0
        backend.status = status
        question, task = run_pull(gate)
        await asyncio.wait_for(task, 5)
        assert question.answers[0]["status"] == status
        assert backend.paths == [RUN_PULL]

    asyncio.run(scenario())


def take_run(gate: Gate) -> tuple[Open, asyncio.Task[None]]:
    """Begin the question for a run to start."""
    return begin(gate, TAKE_RUN, b"", **{KEY_HEADER.replace("-", "_"): KEY})


def test_the_question_for_a_run_is_held_until_the_operator_starts_one() -> None:
    """And it is passed on once, since Flower takes no signature twice."""

    async def scenario() -> None:
        gate, backend = guarding()
        await take_run(gate)[1]
        _, task = take_run(gate)
        assert await is_held(task)
        assert backend.paths.count(TAKE_RUN) == 1
        await begin(gate, START_RUN, b"", **{KEY_HEADER.replace("-", "_"): KEY})[1]
        await asyncio.wait_for(task, 5)
        assert backend.paths.count(TAKE_RUN) == 2
        _, task = take_run(gate)
        assert await is_held(task)
        gate.held.close()
        await asyncio.wait_for(task, 5)

    asyncio.run(scenario())


def test_a_server_that_ends_holds_nothing() -> None:
    async def scenario() -> None:
        gate, _ = guarding()
        gate.held.run_seconds = 30.0
        await pull(gate, 5)[1]
        tasks = [pull(gate, 5)[1], run_pull(gate)[1]]
        assert await is_held(tasks[0])
        assert await is_held(tasks[1])
        gate.held.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    asyncio.run(scenario())


def test_a_key_is_looked_up_again_once_the_operator_has_changed_something() -> None:
    async def scenario() -> None:
        looked_up = list[bytes]()

        def node_of(key: bytes) -> int | None:
            looked_up.append(key)
            return 5 if len(looked_up) == 1 else None

        gate = Gate(Backend(), KEY, node_of)
        for _ in range(2):
            first, task = pull(gate, 5)
            await task
            assert first.answers[0]["status"] == 200
            gate.held.seconds = 0
        assert len(looked_up) == 1
        path = CONTROL + "unregister-node"
        await begin(gate, path, b"", **{KEY_HEADER.replace("-", "_"): KEY})[1]
        revoked, task = pull(gate, 5)
        await task
        assert revoked.answers[0]["status"] == 401

    asyncio.run(scenario())
