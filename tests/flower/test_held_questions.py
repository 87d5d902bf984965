"""Questions of sites for messages: the gate holds them while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from fedstill.flower.deployment.gate import KEY_HEADER, PULL, RUN_PUSH, Gate
from flowers import needs_flower
from gate_requests import Inside, SiteKey, instruction

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


def guarding(seconds: float = 30.0) -> tuple[Gate, Inside]:
    inside = Inside()
    nodes = {key.public: node for node, key in SITES.items()}
    gate = Gate(inside, KEY, nodes.get)
    gate.mail.seconds = seconds
    return gate, inside


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
        gate, inside = guarding()
        await pull(gate, 5)[1]  # the first question of a site is never held
        assert inside.came == [PULL]
        held, task = pull(gate, 5)
        assert await is_held(task)
        await send_to(gate, 6)
        assert await is_held(task)
        await send_to(gate, 5)
        await asyncio.wait_for(task, 5)
        assert held.answers[0]["status"] == 200
        assert inside.came.count(PULL) == 2

    asyncio.run(scenario())


def test_a_site_that_got_a_message_is_not_held_when_it_asks_again() -> None:
    from flwr.proto.fleet_pb2 import PullMessagesResponse

    from gate_requests import tree_of

    async def scenario() -> None:
        gate, inside = guarding()
        message = instruction("m", 5)
        inside.answers[PULL] = PullMessagesResponse(
            messages_list=[message], message_object_trees=[tree_of(message)]
        ).SerializeToString()
        await pull(gate, 5)[1]
        await asyncio.wait_for(pull(gate, 5)[1], 5)
        assert inside.came == [PULL, PULL]

    asyncio.run(scenario())


def test_a_message_that_comes_while_a_site_asks_is_not_missed() -> None:
    async def scenario() -> None:
        gate, inside = guarding()

        async def meanwhile(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == PULL:
                await send_to(gate, 5)
            await inside(scope, receive, send)

        gate.app = meanwhile
        await pull(gate, 5)[1]
        await asyncio.wait_for(pull(gate, 5)[1], 5)

    asyncio.run(scenario())


def test_the_question_of_a_site_that_left_takes_no_message() -> None:
    async def scenario() -> None:
        gate, inside = guarding()
        await pull(gate, 5)[1]
        left, task = pull(gate, 5)
        assert await is_held(task)
        left.closed.set()
        await asyncio.wait_for(task, 5)
        assert left.answers == []
        assert inside.came == [PULL]

    asyncio.run(scenario())


def test_a_question_is_held_for_a_while_only() -> None:
    async def scenario() -> None:
        gate, inside = guarding(seconds=SOON)
        await pull(gate, 5)[1]
        held, task = pull(gate, 5)
        await asyncio.wait_for(task, 5)
        assert held.answers[0]["status"] == 200
        assert inside.came == [PULL, PULL]

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
