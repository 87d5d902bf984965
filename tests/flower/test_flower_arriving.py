"""On Flower's own server: a reply that is broken, slow or too large is one client's failure, and
the others' come.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

import toys
from fedstill.config.resolve import resolve
from fedstill.core.label_counts import census_stage
from fedstill.core.records import Payload, Stage
from fedstill.flower import fleet as arriving
from fedstill.flower.fleet import UNREADABLE, Fleet, Patience, unfolded
from fedstill.flower.messages import Request, SiteReply, answer_content, require_flower
from fedstill.flower.remote_runs import BYTES_OF_SHARES, ReplyLimits
from fedstill.running.preparation import prepare
from flowers import needs_flower

pytestmark = [needs_flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


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
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, self.run, 1
        self.nodes: list[int] = []
        self.sent: set[str] = set()  # the parts of replies, by their ids
        for client in range(clients):
            node = self.state.create_node(
                NOOP_FLWR_AID, "x", f"key{client}".encode(), 60, name=f"client{client}"
            )
            self.state.activate_node(node, 60)
            self.nodes.append(node)

    def grid(self) -> Any:
        from flwr.superlink.grid.http_grid import HttpGrid
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet
        from flwr.superlink.servicer.runtime import runtime_handlers as runtime

        state, task = self.state, self.state.get_task_by_token(self.token)
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

    def answer(
        self,
        client: int,
        parts: Callable[[Any], tuple[str, dict[str, bytes]]],
        pushed: bool = True,
        pause: float = 0.0,
    ) -> None:
        """What a client does with a message: it announces its reply, and pushes the parts.

        pause: seconds before each of them.
        """
        from flwr.app import RecordDict
        from flwr.common.serde import recorddict_to_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
        from flwr.proto.message_pb2 import Message as Proto
        from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
        from flwr.proto.node_pb2 import Node
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet

        node = Node(node_id=self.nodes[client])
        while not (
            got := fleet.pull_messages(
                PullMessagesRequest(node=node), self.state, self.state.object_store
            )
        ).messages_list:
            time.sleep(0.01)
        asked = got.messages_list[0].metadata
        root, contents = parts(asked)
        self.sent |= set(contents)
        reply = Proto()
        reply.metadata.CopyFrom(asked)
        told = reply.metadata
        told.message_id, told.reply_to_message_id = root, asked.message_id
        told.src_node_id, told.dst_node_id, told.created_at, told.ttl = (
            node.node_id,
            1,
            time.time(),
            remaining(asked),
        )
        reply.content.CopyFrom(recorddict_to_proto(RecordDict()))
        tree = ObjectTree(
            object_id=root, children=[ObjectTree(object_id=i) for i in contents if i != root]
        )
        taken = fleet.push_messages(
            PushMessagesRequest(node=node, messages_list=[reply], message_object_trees=[tree]),
            self.state,
        )
        for id in taken.objects_to_push if pushed else ():
            time.sleep(pause)
            one = PushObjectRequest(
                node=node,
                run_id=self.run,
                object_id=id,
                object_content=contents[id],
                session_id=taken.session_id,
            )
            assert fleet.push_object(one, self.state).stored


def remaining(asked: Any) -> float:
    """The seconds until a message expires: its answer may be valid for as long, and on a busy
    machine it takes some.
    """
    seconds: float = asked.created_at + asked.ttl - time.time() - 0.5
    return seconds


def part(kind: str, body: bytes, children: Sequence[str] = ()) -> tuple[str, bytes]:
    """An object of Flower's, by its id."""
    whole = f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body
    return hashlib.sha256(whole).hexdigest(), whole


def alone(kind: str, body: bytes) -> Callable[[Any], tuple[str, dict[str, bytes]]]:
    id, whole = part(kind, body)
    return lambda asked: (id, {id: whole})


def good(client: int, size: int = 0) -> Callable[[Any], tuple[str, dict[str, bytes]]]:
    """An answer as a site gives it."""

    def parts(asked: Any) -> tuple[str, dict[str, bytes]]:
        import torch
        from flwr.app import Message, Metadata
        from flwr.app.message import make_message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        up = Payload({"params": {"w": torch.zeros(size)}} if size else {})
        told = Metadata(
            asked.run_id,
            "",
            asked.dst_node_id,
            1,
            asked.message_id,
            "",
            time.time(),
            remaining(asked),
            "train.stage",
        )
        message: Message = make_message(
            metadata=told, content=answer_content(SiteReply(client, 1, 0, content=up))
        )
        return message.object_id, {
            id: one.deflate() for id, one in get_all_nested_objects(message).items()
        }

    return parts


def asked(server: Server, patience: Patience, reply_limit: int = 0) -> list[str]:
    """The failures of all clients, "" for an answer."""
    stage = Stage(1, 0, "train", tuple(range(len(server.nodes))))
    requests = [
        Request("v", "c", "s", "run", client, stage, reply_limit=reply_limit)
        for client in stage.clients
    ]
    return [answer.failure for answer in Fleet(server.grid(), patience).ask(requests)]


def beside(*acts: Callable[[], None]) -> None:
    for act in acts:
        threading.Thread(target=act, daemon=True).start()


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("ConfigRecord", b"", "it is not a Flower message"),
        ("Message", b"\xff\xff\xff", "DecodeError"),
        ("Message", b"", "IndexError"),
    ],
)
def test_a_reply_that_flower_cannot_read_is_one_clients_failure(
    kind: str, body: bytes, said: str
) -> None:
    server = Server(2)
    beside(lambda: server.answer(0, alone(kind, body)), lambda: server.answer(1, good(1)))
    bad, other = asked(server, Patience(deadline=20, retries=0))
    assert bad.startswith(f"{UNREADABLE}: ")
    assert said in bad
    assert other == ""


def test_a_reply_that_is_announced_and_not_sent_holds_up_nobody_and_only_until_the_deadline() -> (
    None
):
    server = Server(2)

    def late_answer() -> None:
        time.sleep(0.5)
        server.answer(1, good(1))

    beside(lambda: server.answer(0, alone("Message", b""), pushed=False), late_answer)
    begun = time.monotonic()
    never, late = asked(server, Patience(deadline=3, retries=0))
    assert never == "did not reply within the deadline of 3 s (flower.deadline)"
    assert late == ""
    assert time.monotonic() - begun < 20, "Flower's own grid waits for two hours"


class Twice:
    """A grid on which the replies to two messages with one request arrive at the same time: an
    answer, and Flower's error about the other message.
    """

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.sent: list[Any] = []
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1.0)

    def members(self) -> dict[int, int]:
        return {7: 0}

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        for message in messages:
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids: Sequence[str]) -> list[Any]:
        from flwr.app import Error, Message

        if len(self.sent) < 2:
            return []
        replies = [Message(answer_content(SiteReply(0, 1, 0)), reply_to=m) for m in self.sent]
        replies[self.lost] = Message(Error(5, "unavailable"), reply_to=self.sent[self.lost])
        return replies


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("lost", [0, 1])
def test_an_answer_counts_although_another_message_with_the_request_was_lost(lost: int) -> None:
    grid = Twice(lost)
    request = Request("v", "c", "s", "run", 0, Stage(1, 0, "train", (0,)))
    (reply,) = Fleet(cast(Any, grid), Patience(), grid).ask([request])
    assert reply.failure == ""


def trickle(asked: Any) -> tuple[str, dict[str, bytes]]:
    """A reply of eighty small parts."""
    contents = dict(part("ArrayChunk", str(number).encode()) for number in range(80))
    root, whole = part("Message", b"", list(contents))
    return root, {**contents, root: whole}


def test_a_reply_that_comes_in_drops_holds_up_nobody_and_only_until_the_deadline() -> None:
    """Its parts come, one after another, for longer than the stage may take."""
    server = Server(2)

    def send_slowly() -> None:
        # After the deadline, the server takes no more parts.
        with contextlib.suppress(AssertionError):
            server.answer(0, trickle, pause=0.1)

    slow = threading.Thread(target=send_slowly, daemon=True)
    slow.start()
    beside(lambda: server.answer(1, good(1)))
    begun = time.monotonic()
    never, other = asked(server, Patience(deadline=3, retries=0))
    assert never == "did not reply within the deadline of 3 s (flower.deadline)"
    assert other == ""
    assert time.monotonic() - begun < 20, "Flower waits for two hours"
    slow.join()


def test_a_reply_over_the_limit_is_refused_before_all_of_it_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving, "REPLY_OVERHEAD", 1 << 16)
    server = Server(2)
    beside(
        lambda: server.answer(0, good(0, size=100_000)), lambda: server.answer(1, good(1, size=100))
    )
    large, small = asked(server, Patience(deadline=20, retries=0, max_bytes=1 << 16))
    assert large.startswith(f"{UNREADABLE}: ")
    assert "over the limit of 65536" in large
    assert small == ""


def test_a_reply_over_the_limit_of_its_request_is_refused() -> None:
    server = Server(2)
    beside(
        lambda: server.answer(0, good(0, size=1_000_000)),
        lambda: server.answer(1, good(1, size=100)),
    )
    large, small = asked(server, Patience(deadline=20, retries=0), reply_limit=1 << 16)
    assert "over the limit of 65536" in large
    assert small == ""


def test_the_limit_of_a_reply_follows_from_its_expected_content() -> None:
    small = prepare(resolve(toys.toy()), toys.blobs())
    large = prepare(resolve(toys.toy(model={"name": "mlp", "hidden": (20000,)})), toys.blobs())
    stage = Stage(1, 0, "train", (0, 1))
    assert 1 << 16 < ReplyLimits(small).of(0, stage) < 1 << 18
    model = Payload(params=large.world.initial(0)).nbytes
    assert model < ReplyLimits(large).of(0, stage) < 3 * model
    assert ReplyLimits(small).of(0, census_stage(small.world)) < 1 << 18


def test_the_limit_of_a_reply_grows_with_the_clients_of_its_round() -> None:
    limits = ReplyLimits(prepare(resolve(toys.toy()), toys.blobs()))
    few = limits.of(0, Stage(1, 0, "train", (0, 1)))
    many = limits.of(0, Stage(2, 0, "train", tuple(range(500))))
    assert many - few == 498 * BYTES_OF_SHARES


def test_a_part_that_stands_in_an_array_many_times_counts_as_often() -> None:
    chunk, content_ = part("ArrayChunk", b"0" * 1000)
    body = json.dumps(
        {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": [0] * 500}
    ).encode()
    array, whole = part("Array", body, [chunk])
    assert unfolded({chunk: content_, array: whole}) == 500 * len(content_)


def test_many_parts_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "MAX_PARTS", 2)
    server = Server(1)
    beside(lambda: server.answer(0, good(0, size=10)))
    (said,) = asked(server, Patience(deadline=20, retries=0))
    assert "limit of 2" in said


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
    beside(lambda: server.answer(0, good(0, size=10)))
    assert asked(server, Patience(deadline=20, retries=0)) == [""]


def test_a_failed_confirmation_does_not_hide_that_a_reply_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import httpx

    def fail(request: object) -> None:
        raise httpx.ReadError("no part")

    server = Server(1)
    unconfirmed(server, monkeypatch, PullObject=fail)
    beside(lambda: server.answer(0, good(0, size=10)))
    (failure,) = asked(server, Patience(deadline=20, retries=0))
    assert failure.startswith("the reply could not be fetched")
    assert "no part" in failure


def test_what_was_fetched_is_kept_at_the_server_no_longer() -> None:
    server = Server(1)
    beside(lambda: server.answer(0, good(0, size=10)))
    assert asked(server, Patience(deadline=20, retries=0)) == [""]
    assert server.sent
    assert not [id for id in server.sent if id in server.state.object_store]


def test_a_reply_that_comes_after_its_stage_is_kept_at_the_server_no_longer() -> None:
    """Such as the second reply of a site that was asked twice, because it was slow."""
    server = Server(2)
    fleet = Fleet(server.grid(), Patience(deadline=1, ttl=60, retries=0))
    requests = [Request("v", "c", "s", "run", c, Stage(1, 0, "train", (0, 1))) for c in (0, 1)]
    beside(lambda: server.answer(1, good(1)))
    first, second = fleet.ask(requests)
    assert "deadline" in first.failure
    assert second.failure == ""
    server.sent.clear()
    server.answer(0, good(0, size=10))
    kept = set(server.sent)
    assert [id for id in kept if id in server.state.object_store]
    beside(lambda: server.answer(1, good(1)))
    (again,) = fleet.ask([Request("v", "c", "s", "run", 1, Stage(2, 0, "train", (1,)))])
    assert again.failure == ""
    assert not [id for id in kept if id in server.state.object_store]
