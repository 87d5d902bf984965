"""The Flower engine, which exchanges messages with clients on other machines that execute a stage.

The server's own stages run in this process. ``LoopbackGrid`` delivers serialised messages within
this process, without sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from fedstill.core.errors import on_one_line
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Payload, Reply, Stage, Tensors
from fedstill.engines.client_measures import ClientMeasures
from fedstill.engines.serial import Memory, SerialEngine, Version
from fedstill.flower.messages import RAISED, Request, SiteReply, require_flower

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp


@dataclass(frozen=True)
class KnownCounts:
    """The server's knowledge of a client's data: the number of examples by class (C,) in its sets,
    each None if unknown.

    ``examples``: the client's examples, unknown for real sites. ``train``: the same with the labels
    on which the client trains; an attacker may have flipped them. ``test``: the common test set.
    ``public``: the public set. ``tasks``: the number of the run's tasks. ``may_be_idle``: whether a
    client may have no data, like real sites in a run with tasks.
    """

    examples: Sequence[int] | None = None
    train: Sequence[int] | None = None
    test: Sequence[int] | None = None
    public: Sequence[int] | None = None
    tasks: int = 0
    may_be_idle: bool = False


class Requester(Protocol):
    """Delivers requests to clients and collects their answers. A missing answer is replaced by a
    failed one.
    """

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        """Return one answer for each request."""


@dataclass
class FlowerEngine:
    """Sends requests for stages to clients, and checks their answers.

    ``server_engine``: executes the stages of the server. ``request``: creates a request from a
    payload and the facts about a run. ``measures``: the measures at clients. ``known_counts``:
    returns the server's knowledge of a client's data in a round. ``start``: the model that the run
    starts from, which is sent to each client with its first request. Clients store their states on
    their own disks; ``memory.index`` has the current version of each.
    """

    server_engine: SerialEngine
    fleet: Requester
    request: Callable[..., Request]
    facts: Mapping[str, Any] = field(default_factory=dict)
    measures: ClientMeasures = field(default_factory=ClientMeasures)
    known_counts: Callable[[int, int], KnownCounts] = lambda client, round: KnownCounts()
    start: Tensors = field(default_factory=dict)
    _with_start: set[int] = field(default_factory=set, init=False, repr=False)
    _held: dict[int, Version | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def memory(self) -> Memory:
        """The states of the server, and the index of the clients' states."""
        return self.server_engine.memory

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients with a payload; sites look up the work by its name."""
        if SERVER in stage.clients:
            return self.server_engine.run(work, stage, payloads, seed)
        return self.exchange(stage, payloads, remember=True)

    def exchange(
        self, stage: Stage, payloads: Mapping[int, Payload], *, remember: bool
    ) -> list[Reply]:
        """The replies of the clients with a payload, for one step of a stage.

        ``remember``: whether the client states of this step become valid with ``commit``.
        """
        requests = [
            self.request(
                client=client,
                stage=stage,
                memory=self.memory.index.get(client),
                named=self._named_memories(client),
                payload=payloads[client],
                facts=self.facts,
                start=self._start_for(client),
            )
            for client in stage.clients
            if client in payloads
        ]
        answers: Sequence[SiteReply] = ()
        if requests:
            answers = self.fleet.ask(requests)
        self._note_starts(answers)
        if remember:
            self._held = {answer.client: answer.memory for answer in answers}
        return [self._checked(answer, stage) for answer in answers]

    def _start_for(self, client: int) -> Tensors:
        """The model that the run starts from; empty if the client already has it."""
        if client in self._with_start:
            return {}
        return self.start

    def _note_starts(self, answers: Sequence[SiteReply]) -> None:
        """Update the set of clients that have the model that the run starts from.

        A failing client may have lost it, and a client without data has not stored it.
        """
        for answer in answers:
            if answer.failure or answer.idle:
                self._with_start.discard(answer.client)
            else:
                self._with_start.add(answer.client)

    def _named_memories(self, client: int) -> tuple[str, ...]:
        """The files of a client's states to which checkpoints refer."""
        return tuple(sorted(n for n in self.memory.named if n.startswith(f"client{client}-")))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Make the states of these clients after a stage valid, and discard those of others."""
        if SERVER in stage.clients:
            self.server_engine.commit(stage, clients)
            return
        for client in clients:
            version = self._held.get(client)
            if version is None:
                self.memory.index.pop(client, None)
            else:
                self.memory.index[client] = version
        self._held = {}

    def close(self) -> None:
        """Close the engine of the server's own stages."""
        self.server_engine.close()

    def _checked(self, answer: SiteReply, stage: Stage) -> Reply:
        """Convert a site's answer to a reply; it becomes a failure if its report does not belong to
        this run or cannot be true.
        """
        reply = answer.reply()
        if reply.failure:
            return reply
        try:
            failure = self.measures.refuses(answer.metrics, stage, self.server_engine.world.classes)
            known_counts = self.known_counts(answer.client, stage.round)
            failure = failure or false_claim(answer.examples, answer.metrics, known_counts)
            if answer.idle and not known_counts.may_be_idle:
                failure = "claims to have no data in this task, but the sites have no tasks"
        except Exception as error:
            failure = f"its report could not be checked: {on_one_line(error)}"
        return replace(reply, failure=failure)


# Plausibility of clients' reports.


def false_claim(examples: int, fields: Mapping[str, Any], known_counts: KnownCounts) -> str:
    """The reason why a client's number of examples or its counts cannot be true, or ""."""
    return (
        _false_own(examples, fields, known_counts.train)
        or _false_tests(fields, known_counts.test)
        or _false_tasks(fields, known_counts.tasks)
        or _false_counts("private", fields, known_counts.examples)
        or _false_counts("public", fields, known_counts.public)
    )


_TEST_COUNTS = ("correct_by_class", "tested_right", "correct_before", "correct_after")
"""Fields of reports with correct predictions by class on the common test set."""


def _false_own(examples: int, fields: Mapping[str, Any], train: Sequence[int] | None) -> str:
    if train is None:
        return ""
    if examples > sum(train):
        return f"claims {examples} examples, but has {sum(train)}"
    if "label_counts" in fields and list(fields["label_counts"]) != list(train):
        return "its report 'label_counts' differs from its data"
    if _exceeds(fields.get("trained_counts", ()), train):
        return "its report 'trained_counts' counts more examples than there are"
    return ""


def _false_tests(fields: Mapping[str, Any], test: Sequence[int] | None) -> str:
    if test is None:
        return ""
    rows = [fields.get(name, ()) for name in _TEST_COUNTS]
    rows += fields.get("correct_by_epoch", ())
    if any(len(row) not in (0, len(test)) or _exceeds(row, test) for row in rows):
        return "its report has more correct predictions than there are test examples"
    return ""


def _false_tasks(fields: Mapping[str, Any], tasks: int) -> str:
    numbers = fields.get("site_by_task", ())
    if tasks == 0 or len(numbers) in (0, tasks):
        return ""
    return f"its report 'site_by_task' has {len(numbers)} numbers for {tasks} tasks"


def _false_counts(name: str, fields: Mapping[str, Any], existing: Sequence[int] | None) -> str:
    """The reason if a table of predictions by class counts more examples than exist; else empty."""
    table = fields.get(name)
    if existing is None or not isinstance(table, Mapping):
        return ""
    if _exceeds(table.get("counts", ()), existing):
        return f"its report {name!r} counts more examples than there are"
    return ""


def _exceeds(counts: Sequence[int], limits: Sequence[int]) -> bool:
    """Whether any count is above its limit."""
    return any(count > limit for count, limit in zip(counts, limits, strict=False))


class LoopbackGrid:
    """Calls a ClientApp in place of a SuperLink, with a virtual node for each client and serialised
    messages.

    As in a deployment, callers must not depend on node ids, which are large and unordered, or on
    the order of replies, which is reversed. ``bytes_down`` and ``bytes_up`` count the bytes of
    whole serialised messages, and ``sent`` counts the messages. The class uses private names of
    Flower for the serialisation and the ids of messages; a test watches them. Its clock only
    advances when a caller waits: a reply that is not available at once never comes, so callers need
    not wait for it.
    """

    def __init__(self, app: ClientApp, clients: Sequence[int]) -> None:
        require_flower()
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.app = app
        ids = {c: (c * 0x9E3779B97F4A7C15 + 12345) % 2**63 for c in clients}
        self.nodes = {
            ids[c]: Context(1, ids[c], {"partition-id": c}, RecordDict(), {}) for c in clients
        }
        self.bytes_down = self.bytes_up = self.sent = 0
        self.time = 0.0
        self._replies: dict[str, Parcel] = {}

    def monotonic(self) -> float:
        """The time in seconds."""
        return self.time

    def sleep(self, seconds: float, /) -> None:
        """Advance the time."""
        self.time += seconds

    def get_node_ids(self) -> list[int]:
        """The available nodes."""
        return sorted(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages at once, and keep the replies until they are pulled."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The available replies, last one first."""
        there = [i for i in message_ids if i in self._replies]
        return [parsed(self._replies.pop(i)) for i in reversed(there)]

    def _push(self, message: Message) -> str:
        self.sent += 1
        message.metadata.__dict__["_message_id"] = str(self.sent)
        data = serialised(message)
        self.bytes_down += len(data)
        reply = self.deliver(message.metadata.dst_node_id, data)
        if reply is not None:
            self.bytes_up += len(reply)
            self._replies[str(self.sent)] = reply
        return str(self.sent)

    def deliver(self, node: int, data: Parcel) -> Parcel | None:
        """A node's answer to a message: its reply, or Flower's error reply if its app raises an
        exception; None if there is no reply.
        """
        from flwr.app import Error, Message

        message = parsed(data)
        try:
            reply = self.app(message, self.nodes[node])
        except Exception as error:
            reply = Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
        return serialised(reply)


@dataclass(frozen=True)
class Parcel:
    """A message on a loopback grid: its protobuf without the data of its arrays.

    ``arrays``: the data, by the names of the record and the array. They are immutable bytes, so
    they are not copied.
    """

    message: bytes
    arrays: Mapping[tuple[str, str], bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.message) + sum(map(len, self.arrays.values()))


def serialised(message: Message) -> Parcel:
    """Serialise a message with Flower's own functions."""
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.app.message import make_message
    from flwr.common.serde import message_to_proto

    if not message.has_content():
        return Parcel(message_to_proto(message).SerializeToString())
    arrays: dict[tuple[str, str], bytes] = {}
    records = RecordDict()
    for name, record in message.content.items():
        records[name] = record
        if isinstance(record, ArrayRecord):
            records[name] = without_data = ArrayRecord()
            for key, array in record.items():
                without_data[key] = Array(array.dtype, tuple(array.shape), array.stype, b"")
                arrays[name, key] = array.data
    light = make_message(message.metadata, content=records)
    return Parcel(message_to_proto(light).SerializeToString(), arrays)


def parsed(parcel: Parcel) -> Message:
    """Parse the message in a parcel."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as Proto

    message = message_from_proto(Proto.FromString(parcel.message))
    for (name, key), data in parcel.arrays.items():
        message.content[name][key].data = data
    return message
