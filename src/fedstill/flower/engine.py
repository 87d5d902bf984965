"""The Flower engine: clients on other machines execute a stage, and the engine exchanges messages
with them.

The server's own stages run in this process. ``LoopbackGrid`` delivers the messages within this
process, without sockets, and serialises each of them.
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
class Truth:
    """The server's knowledge of a client's data: examples by class (C,) of three sets.

    ``train``: of the client. ``test``: of the common test set. ``public``: of the public set. None
    where the server does not know, as for real sites. ``tasks``: the number of the run's tasks.
    ``may_be_idle``: whether a client may lack data, as real sites in a run with tasks.
    """

    train: Sequence[int] | None = None
    test: Sequence[int] | None = None
    public: Sequence[int] | None = None
    tasks: int = 0
    may_be_idle: bool = False


class Asks(Protocol):
    """Brings requests to clients and their answers back; a client that gives none is a failed
    answer.
    """

    def ask(self, requests: Sequence[Request]) -> list[SiteReply]:
        """One answer for each request."""


@dataclass
class FlowerEngine:
    """Sends requests for stages to clients, and checks their answers.

    ``server_engine``: does the stages of the server. ``request``: makes a request of a payload and
    the facts about a run. ``measures``: those that clients take. ``truth``: gives the server's
    knowledge of a client's data in a round. ``start``: the model that the run starts from, which
    goes to each client with its first request. Clients keep their states on their own disks;
    ``memory.index`` has the current version of each.
    """

    server_engine: SerialEngine
    fleet: Asks
    request: Callable[..., Request]
    facts: Mapping[str, Any] = field(default_factory=dict)
    measures: ClientMeasures = field(default_factory=ClientMeasures)
    truth: Callable[[int, int], Truth] = lambda client, round: Truth()
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
        """The replies of the clients that got a payload; sites look the work up by its name."""
        if SERVER in stage.clients:
            return self.server_engine.run(work, stage, payloads, seed)
        return self.exchange(stage, payloads, remember=True)

    def exchange(
        self, stage: Stage, payloads: Mapping[int, Payload], *, remember: bool
    ) -> list[Reply]:
        """The replies of the clients that got a payload, to one step of a stage.

        ``remember``: whether the memories that this step leaves count after ``commit``.
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
        """The model that the run starts from, unless the client has it."""
        if client in self._with_start:
            return {}
        return self.start

    def _note_starts(self, answers: Sequence[SiteReply]) -> None:
        """Note which clients have the model that the run starts from.

        A client that fails may have lost it, and one without data has not stored it.
        """
        for answer in answers:
            if answer.failure or answer.idle:
                self._with_start.discard(answer.client)
            else:
                self._with_start.add(answer.client)

    def _named_memories(self, client: int) -> tuple[str, ...]:
        """The files of a client's memories that checkpoints name."""
        return tuple(sorted(n for n in self.memory.named if n.startswith(f"client{client}-")))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """From now on these clients' memories of the stage count; those of other clients do not."""
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
        """End the engine of the server's own stages."""
        self.server_engine.close()

    def _checked(self, answer: SiteReply, stage: Stage) -> Reply:
        """A site's answer as a reply; a failure if its report is not of this run or cannot be
        true.
        """
        reply = answer.reply()
        if reply.failure:
            return reply
        try:
            failure = self.measures.refuses(answer.metrics, stage, self.server_engine.world.classes)
            truth = self.truth(answer.client, stage.round)
            failure = failure or untrue(answer.examples, answer.metrics, truth)
            if answer.idle and not truth.may_be_idle:
                failure = "claims to have no data in this task, and the sites have no tasks"
        except Exception as error:
            failure = f"its report could not be checked: {on_one_line(error)}"
        return replace(reply, failure=failure)


# Whether the claims of a client can be true.


def untrue(examples: int, fields: Mapping[str, Any], truth: Truth) -> str:
    """Why a client's number of examples and its counts cannot be true; empty if they can."""
    return (
        _untrue_own(examples, fields, truth.train)
        or _untrue_tests(fields, truth.test)
        or _untrue_tasks(fields, truth.tasks)
        or _untrue_counts("private", fields, truth.train)
        or _untrue_counts("public", fields, truth.public)
    )


def _untrue_own(examples: int, fields: Mapping[str, Any], train: Sequence[int] | None) -> str:
    if train is None:
        return ""
    if examples > sum(train):
        return f"claims {examples} examples, and has {sum(train)}"
    if "label_counts" in fields and list(fields["label_counts"]) != list(train):
        return "its report 'label_counts' is not what it has"
    return ""


def _untrue_tests(fields: Mapping[str, Any], test: Sequence[int] | None) -> str:
    if test is None:
        return ""
    rows = [fields.get("correct_by_class", ()), *fields.get("correct_by_epoch", ())]
    if any(len(row) not in (0, len(test)) or _exceeds(row, test) for row in rows):
        return "its report has more right answers than there are test examples"
    return ""


def _untrue_tasks(fields: Mapping[str, Any], tasks: int) -> str:
    numbers = fields.get("site_by_task", ())
    if tasks == 0 or len(numbers) in (0, tasks):
        return ""
    return f"its report 'site_by_task' has {len(numbers)} numbers for {tasks} tasks"


def _untrue_counts(name: str, fields: Mapping[str, Any], existing: Sequence[int] | None) -> str:
    """Whether a table of answers by class counts more examples than there are."""
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
    """Calls a ClientApp where a SuperLink would: one virtual node for each client, and bytes in
    between.

    Node ids are large numbers in no order and replies come last first, as in a deployment: nothing
    may depend on them. ``bytes_down``, ``bytes_up`` count whole serialised messages, ``sent`` the
    messages. It leans on names of Flower's that are not public (how a message is serialised and
    gets its id), which a test watches. Its time passes only by waiting: a reply that is not there
    at once never comes, so no caller needs to wait for it.
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
        """The time, in seconds."""
        return self.time

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
        self.time += seconds

    def get_node_ids(self) -> list[int]:
        """The nodes that are there."""
        return sorted(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages at once, and keep the replies until they are pulled."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are there, last first."""
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
        """A node's answer to a message: its reply, or Flower's error reply if its app raises; None:
        no reply.
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
    """A message as it travels over a loopback grid: its protobuf without the data of its arrays.

    ``arrays``: these data, by the names of the record and the array. They are bytes, which nobody
    can change, so they are not copied.
    """

    message: bytes
    arrays: Mapping[tuple[str, str], bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.message) + sum(map(len, self.arrays.values()))


def serialised(message: Message) -> Parcel:
    """A message as bytes, by Flower's own serialisation."""
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
    """The message in a parcel."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as Proto

    message = message_from_proto(Proto.FromString(parcel.message))
    for (name, key), data in parcel.arrays.items():
        message.content[name][key].data = data
    return message
