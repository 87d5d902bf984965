"""On Flower's own server: a reply that is broken, slow or too large is one client's failure, and
the replies of other clients arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.label_counts import census_stage
from fedstill.core.records import Payload, Stage
from fedstill.flower.fleet import UNREADABLE, Fleet, Patience, unfolded
from fedstill.flower.messages import Request, SiteReply, answer_content, require_flower
from fedstill.flower.remote_runs import BYTES_OF_SHARES, ReplyLimits
from fedstill.running.preparation import prepare
from flowers import needs_flower

pytestmark = [needs_flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@dataclass(frozen=True)
class Reply:
    """A reply as Flower sends it: objects by their ids, of which one is the message."""

    message_id: str
    parts: dict[str, bytes]


ReplyTo = Callable[[Any], Reply]
"""Makes the reply to a message with these metadata."""


@pytest.fixture
def task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of a run's process, without which Flower creates no messages."""
    require_flower()
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Server:
    """Flower's server without its port: its state and its handlers, as its own code has them."""

    def __init__(self, clients: int) -> None:
        require_flower()
        from flwr.common.constant import NOOP_FLWR_AID
        from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.config_loader import get_objectstore_linkstate_factories
        from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

        _, factory = get_objectstore_linkstate_factories(
            ":flwr-in-memory:", NoOpFederationManager()
        )
        self.state = factory.state()
        self.run = self.state.create_run(
            "a/b", "1", "h", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        task = self.state.get_run_info(run_ids=[self.run])[0].primary_task_id
        self.token = self.state.claim_task(task)
        self.state.activate_task(task)
        TaskIdentity.task_id = task
        TaskIdentity.run_id = self.run
        TaskIdentity.node_id = 1
        self.nodes: list[int] = []
        self.sent: set[str] = set()
        """The ids of the parts of replies."""
        for client in range(clients):
            node = self.state.create_node(
                NOOP_FLWR_AID, "x", f"key{client}".encode(), 60, name=f"client{client}"
            )
            self.state.activate_node(node, 60)
            self.nodes.append(node)

    def grid(self) -> Any:
        """Flower's grid, which calls the handlers of this server."""
        from flwr.superlink.grid.http_grid import HttpGrid
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet
        from flwr.superlink.servicer.runtime import runtime_handlers as runtime

        state = self.state
        task = state.get_task_by_token(self.token)
        clients = {node: client for client, node in enumerate(self.nodes)}
        client = SimpleNamespace(
            GetNodes=lambda r: runtime.get_nodes(r, state, task),
            PushMessages=lambda r: runtime.push_messages(r, state, task),
            PullMessages=lambda r: runtime.pull_messages(r, state, task),
            PushObject=lambda r: fleet.push_object(r, state),
            PullObject=lambda r: fleet.pull_object(r, state),
            ConfirmMessageReceived=lambda r: fleet.confirm_message_received(
                r, state, state.object_store
            ),
        )

        class Grid(HttpGrid):  # type: ignore[misc]
            def _connect(self) -> None:
                self._client = client

            def members(self) -> dict[int, int]:
                return clients

        grid = Grid("x", True, None, token="t")
        grid.set_run(self.state.get_run_info(run_ids=[self.run])[0])
        return grid

    def pull(self, client: int) -> Any:
        """The metadata of the next message for a client, which a client waits for."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet

        request = PullMessagesRequest(node=self.proto_node(client))
        while True:
            pulled = fleet.pull_messages(request, self.state, self.state.object_store)
            if pulled.messages_list:
                return pulled.messages_list[0].metadata
            time.sleep(0.01)

    def proto_node(self, client: int) -> Any:
        """The node of a client in Flower's protocol."""
        from flwr.proto.node_pb2 import Node

        return Node(node_id=self.nodes[client])

    def answer(
        self, client: int, reply_to: ReplyTo, pushed: bool = True, pause: float = 0.0
    ) -> None:
        """Answer the next message as a client does: announce the reply, then push its parts.

        ``pushed``: whether the parts are pushed. ``pause``: seconds before each of them.
        """
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet

        instruction = self.pull(client)
        reply = reply_to(instruction)
        self.sent |= reply.parts.keys()
        announced = self.announce(client, instruction, reply)
        if not pushed:
            return

        for part_id in announced.objects_to_push:
            time.sleep(pause)
            request = PushObjectRequest(
                node=self.proto_node(client),
                run_id=self.run,
                object_id=part_id,
                object_content=reply.parts[part_id],
                session_id=announced.session_id,
            )
            assert fleet.push_object(request, self.state).stored

    def announce(self, client: int, instruction: Any, reply: Reply) -> Any:
        """The server's answer to the announcement of a reply: the parts that it needs."""
        from flwr.app import RecordDict
        from flwr.common.serde import recorddict_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import Message as Proto
        from flwr.proto.message_pb2 import ObjectTree
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet

        message = Proto()
        message.metadata.CopyFrom(instruction)
        message.metadata.message_id = reply.message_id
        message.metadata.reply_to_message_id = instruction.message_id
        message.metadata.src_node_id = self.nodes[client]
        message.metadata.dst_node_id = 1
        message.metadata.created_at = time.time()
        message.metadata.ttl = remaining(instruction)
        message.content.CopyFrom(recorddict_to_proto(RecordDict()))

        children = [
            ObjectTree(object_id=part_id) for part_id in reply.parts if part_id != reply.message_id
        ]
        request = PushMessagesRequest(
            node=self.proto_node(client),
            messages_list=[message],
            message_object_trees=[ObjectTree(object_id=reply.message_id, children=children)],
        )
        return fleet.push_messages(request, self.state)


def remaining(instruction: Any) -> float:
    """The seconds until a message expires, less half a second: its reply must not expire later."""
    seconds: float = instruction.created_at + instruction.ttl - time.time() - 0.5
    return seconds


def encoded_part(kind: str, body: bytes, children: Sequence[str] = ()) -> bytes:
    """An object of Flower's."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


def id_of(part: bytes) -> str:
    """The id of an object."""
    return hashlib.sha256(part).hexdigest()


def single_part(kind: str, body: bytes) -> ReplyTo:
    """Replies with one object only."""
    part = encoded_part(kind, body)
    return lambda instruction: Reply(id_of(part), {id_of(part): part})


def correct_reply(client: int, size: int = 0) -> ReplyTo:
    """The reply of a site, with a model of ``size`` numbers if that is not 0."""
    content = Payload()
    if size:
        content = Payload({"params": {"w": torch.zeros(size)}})

    def reply_to(instruction: Any) -> Reply:
        from flwr.app import Message, Metadata
        from flwr.app.message import make_message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        metadata = Metadata(
            run_id=instruction.run_id,
            message_id="",
            src_node_id=instruction.dst_node_id,
            dst_node_id=1,
            reply_to_message_id=instruction.message_id,
            group_id="",
            created_at=time.time(),
            ttl=remaining(instruction),
            message_type="train.stage",
        )
        site_reply = SiteReply(client, 1, 0, content=content)
        message: Message = make_message(metadata=metadata, content=answer_content(site_reply))
        objects = get_all_nested_objects(message)
        parts = {part_id: part.deflate() for part_id, part in objects.items()}
        return Reply(message.object_id, parts)

    return reply_to


def request_of(client: int, stage: Stage, reply_limit: int = 0) -> Request:
    """A request without content."""
    return Request(
        version="v",
        config="c",
        sha="s",
        run="run",
        client=client,
        stage=stage,
        reply_limit=reply_limit,
    )


def failures(server: Server, patience: Patience, reply_limit: int = 0) -> list[str]:
    """The failures of all clients in a stage; an empty one for a correct reply."""
    stage = Stage(1, 0, "train", tuple(range(len(server.nodes))))
    requests = [request_of(client, stage, reply_limit) for client in stage.clients]
    return [reply.failure for reply in Fleet(server.grid(), patience).ask(requests)]


def in_background(*actions: Callable[[], None]) -> None:
    """Start each action in a thread."""
    for action in actions:
        threading.Thread(target=action, daemon=True).start()


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("ConfigRecord", b"", "it is not a Flower message"),
        ("Message", b"\xff\xff\xff", "DecodeError"),
        ("Message", b"", "IndexError"),
    ],
)
def test_a_reply_that_flower_cannot_read_is_one_clients_failure(
    kind: str, body: bytes, reason: str
) -> None:
    server = Server(2)
    in_background(
        lambda: server.answer(0, single_part(kind, body)),
        lambda: server.answer(1, correct_reply(1)),
    )

    unreadable, correct = failures(server, Patience(deadline=20, retries=0))

    assert unreadable.startswith(f"{UNREADABLE}: ")
    assert reason in unreadable
    assert correct == ""


def test_a_reply_that_is_announced_and_not_sent_delays_nobody_beyond_the_deadline() -> None:
    """Flower's own grid waits for two hours."""
    server = Server(2)

    def late_answer() -> None:
        time.sleep(0.5)
        server.answer(1, correct_reply(1))

    in_background(
        lambda: server.answer(0, single_part("Message", b""), pushed=False),
        late_answer,
    )
    start = time.monotonic()

    never, late = failures(server, Patience(deadline=3, retries=0))

    assert never == "did not reply within the deadline of 3 s (flower.deadline)"
    assert late == ""
    assert time.monotonic() - start < 20


class RepliesToBoth:
    """A grid on which the replies to two messages with one request arrive at the same time: an
    answer, and Flower's error about the other message.
    """

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.messages: list[Any] = []
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(seconds, 1.0)

    def members(self) -> dict[int, int]:
        return {7: 0}

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        for message in messages:
            self.messages.append(message)
            message.metadata.__dict__["_message_id"] = f"m{len(self.messages)}"
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids: Sequence[str]) -> list[Any]:
        from flwr.app import Error, Message

        if len(self.messages) < 2:
            return []
        content = answer_content(SiteReply(0, 1, 0))
        replies = [Message(content, reply_to=message) for message in self.messages]
        replies[self.lost] = Message(Error(5, "unavailable"), reply_to=self.messages[self.lost])
        return replies


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("lost", [0, 1])
def test_an_answer_counts_although_another_message_with_the_request_was_lost(lost: int) -> None:
    grid = RepliesToBoth(lost)
    request = request_of(0, Stage(1, 0, "train", (0,)))

    (reply,) = Fleet(cast(Any, grid), Patience(), grid).ask([request])

    assert reply.failure == ""


def many_parts(instruction: Any) -> Reply:
    """A reply of eighty small parts."""
    chunks = [encoded_part("ArrayChunk", str(number).encode()) for number in range(80)]
    parts = {id_of(chunk): chunk for chunk in chunks}
    message = encoded_part("Message", b"", list(parts))
    return Reply(id_of(message), {**parts, id_of(message): message})


def test_a_reply_that_arrives_slowly_delays_nobody_beyond_the_deadline() -> None:
    """Its parts come, one after another, for longer than the stage may take. Flower waits for two
    hours.
    """
    server = Server(2)

    def send_slowly() -> None:
        # After the deadline, the server takes no more parts.
        with contextlib.suppress(AssertionError):
            server.answer(0, many_parts, pause=0.1)

    slow_client = threading.Thread(target=send_slowly, daemon=True)
    slow_client.start()
    in_background(lambda: server.answer(1, correct_reply(1)))
    start = time.monotonic()

    never, correct = failures(server, Patience(deadline=3, retries=0))

    assert never == "did not reply within the deadline of 3 s (flower.deadline)"
    assert correct == ""
    assert time.monotonic() - start < 20
    slow_client.join()


def test_a_reply_over_the_limit_is_refused_before_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedstill.flower.fleet.REPLY_OVERHEAD", 1 << 16)
    server = Server(2)
    in_background(
        lambda: server.answer(0, correct_reply(0, size=100_000)),
        lambda: server.answer(1, correct_reply(1, size=100)),
    )

    large, small = failures(server, Patience(deadline=20, retries=0, max_bytes=1 << 16))

    assert large.startswith(f"{UNREADABLE}: ")
    assert "over the limit of 65536" in large
    assert small == ""


def test_a_reply_over_the_limit_of_its_request_is_refused() -> None:
    server = Server(2)
    in_background(
        lambda: server.answer(0, correct_reply(0, size=1_000_000)),
        lambda: server.answer(1, correct_reply(1, size=100)),
    )

    large, small = failures(server, Patience(deadline=20, retries=0), reply_limit=1 << 16)

    assert "over the limit of 65536" in large
    assert small == ""


def test_the_limit_of_a_reply_follows_from_its_expected_content() -> None:
    small = prepare(resolve(toys.toy()), toys.blobs())
    large = prepare(resolve(toys.toy(model={"name": "mlp", "hidden": (20000,)})), toys.blobs())
    stage = Stage(1, 0, "train", (0, 1))
    large_model_bytes = Payload(params=large.world.initial(0)).nbytes

    assert 1 << 16 < ReplyLimits(small).of(0, stage) < 1 << 18
    assert large_model_bytes < ReplyLimits(large).of(0, stage) < 3 * large_model_bytes
    assert ReplyLimits(small).of(0, census_stage(small.world)) < 1 << 18


def test_the_limit_of_a_reply_grows_with_the_clients_of_its_round() -> None:
    limits = ReplyLimits(prepare(resolve(toys.toy()), toys.blobs()))

    limit_of_2 = limits.of(0, Stage(1, 0, "train", (0, 1)))
    limit_of_500 = limits.of(0, Stage(2, 0, "train", tuple(range(500))))

    assert limit_of_500 - limit_of_2 == 498 * BYTES_OF_SHARES


def test_a_part_that_is_many_times_in_an_array_counts_as_often() -> None:
    chunk = encoded_part("ArrayChunk", b"0" * 1000)
    description = {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": [0] * 500}
    array = encoded_part("Array", json.dumps(description).encode(), [id_of(chunk)])

    assert unfolded({id_of(chunk): chunk, id_of(array): array}) == 500 * len(chunk)


def test_many_parts_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.flower.fleet.MAX_PARTS", 2)
    server = Server(1)
    in_background(lambda: server.answer(0, correct_reply(0, size=10)))

    (failure,) = failures(server, Patience(deadline=20, retries=0))

    assert "limit of 2" in failure


def unconfirmed(server: Server, monkeypatch: pytest.MonkeyPatch, **handlers: Any) -> None:
    """Let confirmations to a server fail, and replace other handlers."""
    import httpx

    def fail(request: object) -> None:
        raise httpx.ConnectError("no confirmation")

    grid = server.grid()
    client = grid._runtime_client
    client.ConfirmMessageReceived = fail
    for name, handler in handlers.items():
        setattr(client, name, handler)
    monkeypatch.setattr(server, "grid", lambda: grid)


def test_a_complete_reply_needs_no_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(1)
    unconfirmed(server, monkeypatch)
    in_background(lambda: server.answer(0, correct_reply(0, size=10)))

    assert failures(server, Patience(deadline=20, retries=0)) == [""]


def test_a_failed_confirmation_does_not_hide_that_a_reply_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import httpx

    def fail(request: object) -> None:
        raise httpx.ReadError("no part")

    server = Server(1)
    unconfirmed(server, monkeypatch, PullObject=fail)
    in_background(lambda: server.answer(0, correct_reply(0, size=10)))

    (failure,) = failures(server, Patience(deadline=20, retries=0))

    assert failure.startswith("the reply could not be fetched")
    assert "no part" in failure


def test_the_server_deletes_a_reply_that_was_fetched() -> None:
    server = Server(1)
    in_background(lambda: server.answer(0, correct_reply(0, size=10)))

    assert failures(server, Patience(deadline=20, retries=0)) == [""]

    assert server.sent
    assert stored_parts(server, server.sent) == []


def stored_parts(server: Server, parts: Iterable[str]) -> list[str]:
    """Those of the parts that are at the server."""
    return [part_id for part_id in parts if part_id in server.state.object_store]


def test_the_server_deletes_a_reply_that_arrives_after_its_stage() -> None:
    """Such as the second reply of a site that was asked twice, because it was slow."""
    server = Server(2)
    patient_fleet = Fleet(server.grid(), Patience(deadline=1, ttl=60, retries=0))
    first_stage = Stage(1, 0, "train", (0, 1))
    in_background(lambda: server.answer(1, correct_reply(1)))
    late, punctual = patient_fleet.ask([request_of(0, first_stage), request_of(1, first_stage)])
    assert "deadline" in late.failure
    assert punctual.failure == ""

    server.sent.clear()
    server.answer(0, correct_reply(0, size=10))
    late_parts = set(server.sent)
    assert stored_parts(server, late_parts)

    in_background(lambda: server.answer(1, correct_reply(1)))
    (reply,) = patient_fleet.ask([request_of(1, Stage(2, 0, "train", (1,)))])
    assert reply.failure == ""
    assert stored_parts(server, late_parts) == []
