"""A site's program: it receives the server's messages, answers each of them in a separate process,
and sends the replies.

This process needs little memory, because it computes nothing. It starts a process that has imported
torch, from which a process is forked for each message. It replaces Flower's SuperNode, and uses
Flower's interface for sites.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedstill.core.errors import (
    ConfigError,
    DeployFailed,
    FedstillError,
    Refused,
    on_one_line,
)
from fedstill.core.registry import HOMES
from fedstill.flower import MAX_REQUEST_BYTES, check_flower_installed, say
from fedstill.flower.deployment import certificates
from fedstill.flower.deployment.folder import Membership, require_own_app
from fedstill.flower.deployment.reach import (
    Problem,
    bypass_proxies,
    expiry_of,
    expiry_warning,
    is_temporary,
    problem,
    split_address,
)

if TYPE_CHECKING:
    import httpx
    from flwr.supernode.fleet_http_client import FleetHttpClient

T = TypeVar("T")

HEARTBEAT_SECONDS = 20.0
DECLARED_SECONDS = 30.0
"""The actual and the announced interval of a site's heartbeats, in seconds. Flower's server
considers a site offline after twice the announced interval.
"""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 3.0
"""The time between two requests for a message, in seconds, if the server does not hold them."""

HELD_SECONDS = 1.0
"""A request that took longer than this was held by the server."""

AGAIN_SECONDS = 30.0
"""The maximum time between two attempts to reach the server, in seconds."""

REFUSED_SECONDS = 5.0
"""The time after which a site retries if the server has refused it, in seconds."""

UNAVAILABLE = 5
"""Flower's code for an unavailable node; the server then sends the message again."""

APP_RUNS = ("flwr-serverapp", "")
"""Flower's names for runs of an app with a server part. Other runs are those of agents."""


class NotAdmitted(DeployFailed):
    """The server refuses this site."""


def serve_site(member: Membership, insecure: bool, wait: float) -> int:
    """Answer the server's messages until a signal ends this process.

    ``wait``: how long to retry if the server does not list this site's key yet, in seconds. Raises
    DeployFailed if the server refuses the site, and ConfigError for wrong settings.
    """
    host, _ = split_address(member.address, member.folder / "client.toml")
    bypass_proxies(host)
    check_flower_installed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    workers = Workers(member)
    workers.check_settings()
    with Server.of(member, insecure) as server:
        server.connect(wait)
        while True:
            try:
                message = server.next_message()
                if message is not None:
                    server.send(workers.answer(message), message)
            except NotAdmitted:
                server.connect(wait)


# Requests of a site to its server


@dataclass
class Incoming:
    """A message of the server, as Flower's unparsed parts by id.

    ``metadata``: the message without its content. ``root``: the id of the root part. ``app``: the
    app of the run. ``is_app_run``: whether the run belongs to an app with a server part, like
    fedstill's runs.
    """

    run: int
    node: int
    root: str
    metadata: bytes
    parts: dict[str, bytes]
    app: bytes
    is_app_run: bool


@dataclass
class Outgoing:
    """A reply in Flower's form: its metadata, the tree of its parts, and the parts."""

    metadata: bytes
    tree: bytes
    parts: dict[str, bytes]
    seconds: float = 0.0


@dataclass
class Server:
    """A site's connection to its federation's server. Each request is signed with the site's key.

    ``address``: host and port. Requests are repeated until the server can be reached; the reason
    is printed once.
    """

    address: str
    client: FleetHttpClient
    public_key: bytes
    tls: bool = True
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    node: Any = None
    _was_connected: bool = False
    _reason: str = ""
    _pause: float = SHORTEST_PAUSE
    _apps: dict[int, tuple[bytes, bool]] = field(default_factory=dict, repr=False)
    _end: threading.Event = field(default_factory=threading.Event, repr=False)

    @staticmethod
    @contextmanager
    def of(member: Membership, insecure: bool) -> Iterator[Server]:
        """A context with the server of a site's federation, from which the site signs off at the
        end.
        """
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient

        private = _private_key(member, insecure)
        public = private.public_key()
        authority = None
        if not insecure:
            authority = certificates.trusted_pem(member.folder / "ca.crt")
        client = FleetHttpClient.from_server_address(
            member.address, insecure, authority, _interceptors(private, public)
        )
        server = Server(member.address, client, public_key_to_bytes(public), tls=not insecure)
        beat = threading.Thread(target=server._beat, daemon=True)
        try:
            beat.start()
            yield server
        finally:
            server._end.set()
            server._leave()
            client.close()

    def connect(self, wait: float) -> None:
        """Register this site with the server; retries without a time limit.

        Raises NotAdmitted if the server has refused this site for ``wait`` seconds, and
        DeployFailed for problems that only a person can solve.
        """
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node

        self.node = None
        request = ActivateNodeRequest(
            public_key=self.public_key, heartbeat_interval=DECLARED_SECONDS
        )
        until = 0.0
        while self.node is None:
            try:
                if not (self.tls or self._was_connected):
                    registration = RegisterNodeFleetRequest(public_key=self.public_key)
                    self._ask(self.client.RegisterNode, registration)
                answer = self._ask(self.client.ActivateNode, request)
                self.node = Node(node_id=answer.node_id)
            except NotAdmitted as error:
                if not until:
                    until = self.clock() + wait
                if self.clock() >= until:
                    raise
                self._note(f"{error}; trying again for {until - self.clock():.0f} s")
                self.sleep(min(REFUSED_SECONDS, max(0.0, until - self.clock())))
        self._was_connected = True
        self._reason = ""
        say(f"connected to the server at {self.address}")

    def next_message(self) -> Incoming | None:
        """The next message for this site; None if there is none yet."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        began = self.clock()
        try:
            answer = self._ask(self.client.PullMessages, PullMessagesRequest(node=self.node))
        except _Dropped as error:
            raise NotAdmitted(
                f"the server does not accept this client's request: {error}"
            ) from error
        if not answer.messages_list:
            if self.clock() - began > HELD_SECONDS:
                self._pause = SHORTEST_PAUSE
            self.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return None
        self._pause = SHORTEST_PAUSE
        try:
            return self._fetched(answer.messages_list[0], answer.message_object_trees[0])
        except _Dropped as error:
            say(f"a message was not accepted: {error}")
            return None

    def send(self, reply: Outgoing, message: Incoming) -> None:
        """Send the reply to a message; a reply that the server does not accept is dropped."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import Message, ObjectTree, PushObjectRequest

        request = PushMessagesRequest(
            node=self.node,
            messages_list=[Message.FromString(reply.metadata)],
            message_object_trees=[ObjectTree.FromString(reply.tree)],
            clientapp_runtime_list=[reply.seconds],
        )
        try:
            answer = self._ask(self.client.PushMessages, request)
            missing = 0
            for id in answer.objects_to_push:
                part = PushObjectRequest(
                    node=self.node,
                    run_id=message.run,
                    object_id=id,
                    object_content=reply.parts[id],
                    session_id=answer.session_id,
                )
                if not self._ask(self.client.PushObject, part).stored:
                    missing += 1
            # All parts are sent first: a part that is sent again after a lost answer counts as
            # not stored, although the server has it.
            if missing:
                raise _Dropped(f"it did not store {missing} of the parts; is its disk full?")
        except _Dropped as error:
            say(f"the server did not accept the reply: {error}")

    def _fetched(self, metadata: Any, tree: Any) -> Incoming:
        """Fetch all parts of a message, and acknowledge its receipt."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        run = metadata.metadata.run_id
        app, is_app_run = self._app(run)
        parts = self._parts(run, tree)
        received = ConfirmMessageReceivedRequest(
            node=self.node, run_id=run, message_object_id=metadata.metadata.message_id
        )
        self._ask(self.client.ConfirmMessageReceived, received)
        return Incoming(
            run=run,
            node=self.node.node_id,
            root=metadata.metadata.message_id,
            metadata=metadata.SerializeToString(),
            parts=parts,
            app=app,
            is_app_run=is_app_run,
        )

    def _app(self, run: int) -> tuple[bytes, bool]:
        """The app of a run, and whether the run belongs to an app with a server part; cached."""
        from flwr.proto.fab_pb2 import GetFabRequest
        from flwr.proto.run_pb2 import GetRunRequest

        if run not in self._apps:
            about = self._ask(self.client.GetRun, GetRunRequest(node=self.node, run_id=run)).run
            request = GetFabRequest(node=self.node, hash_str=about.fab_hash, run_id=run)
            app = self._ask(self.client.GetFab, request).fab
            # Only the latest app is cached, because a site answers one run at a time.
            self._apps = {run: (app.content, about.primary_task_type in APP_RUNS)}
        return self._apps[run]

    def _parts(self, run: int, tree: Any) -> dict[str, bytes]:
        """The parts of a message by id; raises _Dropped if they are too large or do not arrive."""
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        parts: dict[str, bytes] = {}
        size = 0
        for id in dict.fromkeys(part.object_id for part in iterate_object_tree(tree)):
            request = PullObjectRequest(node=self.node, run_id=run, object_id=id)
            pause = SHORTEST_PAUSE
            while True:
                answer = self._ask(self.client.PullObject, request)
                if not answer.object_found:
                    raise _Dropped("it was not sent completely")
                if answer.object_available:
                    break
                self.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            parts[id] = answer.object_content
            size += len(answer.object_content)
            if size > MAX_REQUEST_BYTES:
                raise _Dropped(f"it has over {MAX_REQUEST_BYTES} bytes")
        return parts

    def _ask(self, call: Callable[[Any], T], request: Any) -> T:
        """The answer to a request, which is repeated while the server cannot be reached."""
        import httpx

        pause = 1.0
        while True:
            try:
                answer = call(request)
            except httpx.HTTPStatusError as error:
                self._check_status(error)
                self._note(f"the server is busy ({error.response.status_code}); trying again")
            except httpx.TransportError as error:
                self._note_problem(problem(error, self.address, tls=self.tls))
            else:
                self._note_reached()
                return answer
            self.sleep(pause)
            pause = min(2 * pause, AGAIN_SECONDS)

    def _check_status(self, error: httpx.HTTPStatusError) -> None:
        """Raise the error of an HTTP status; return normally if the request may be repeated."""
        status = error.response.status_code
        text = " ".join(error.response.text.split())[:300]
        if is_temporary(status):
            return
        if status in (401, 412):
            raise NotAdmitted(
                "the server refuses this client: either its key is not listed in the server's "
                "folder `allowed`, or another machine uses its key, or this machine's clock is "
                "wrong"
            ) from error
        if self.node is None:
            raise DeployFailed(f"the server at {self.address} answered {status}: {text}") from error
        raise _Dropped(f"the server answered {status}: {text}") from error

    def _note_problem(self, problem_met: Problem) -> None:
        """Print the reason why the server cannot be reached. Before the first connection, raise an
        error if only a person can solve the problem.
        """
        if problem_met.is_final and not self._was_connected:
            raise DeployFailed(problem_met.reason)
        state = "waiting for"
        if self._was_connected:
            state = "no connection to"
        self._note(f"{state} the server at {self.address}: {problem_met.reason}")

    def _note(self, reason: str) -> None:
        """Print a reason, unless it was the last printed one."""
        if reason.partition(";")[0] != self._reason:
            self._reason = reason.partition(";")[0]
            say(reason)

    def _note_reached(self) -> None:
        if self._reason and self._was_connected:
            say("connected again")
            self._reason = ""

    def _beat(self) -> None:
        """Send heartbeats to the server, also during training."""
        import httpx
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        printed = ""
        while not self._end.wait(HEARTBEAT_SECONDS):
            if self.node is None:
                continue
            request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=DECLARED_SECONDS)
            try:
                self.client.SendNodeHeartbeat(request)
                printed = ""
            except httpx.TransportError as error:
                met = problem(error, self.address, tls=self.tls)
                # Requests for messages print other reasons. They may use a connection from before
                # the certificate expired, while the server considers this site offline.
                if met.is_final and met.reason != printed:
                    printed = met.reason
                    say(f"the server does not receive this site's heartbeats: {met.reason}")
            except httpx.HTTPError:
                continue

    def _leave(self) -> None:
        """Sign off from the server, if it can be reached."""
        import httpx
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest, UnregisterNodeFleetRequest

        if self.node is None:
            return
        id = self.node.node_id
        with suppress(httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=id))
            if not self.tls:
                self.client.UnregisterNode(UnregisterNodeFleetRequest(node_id=id))


class _Dropped(Exception):
    """A message that cannot be accepted, or a reply that the server does not accept."""


@dataclass
class _Watch:
    """Checks the server's certificate at each handshake, and warns once a day before it expires. It
    is one of Flower's interceptors.
    """

    warned: str = ""

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Pass on the request, and watch the handshake if it opens a connection."""
        context.request.extensions["trace"] = self._trace
        return call_next(context)

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event != "connection.start_tls.complete":
            return
        warning = expiry_warning(expiry_of(info["return_value"]))
        today = time.strftime("%Y-%m-%d")
        if warning and self.warned != today:
            self.warned = today
            say(warning)


def _interceptors(private: Any, public: Any) -> list[Any]:
    """Interceptors that add Flower's version to requests, sign them, and check the certificate."""
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    return [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, public),
        _Watch(),
    ]


def _private_key(member: Membership, insecure: bool) -> Any:
    """The site's private key; a new one without TLS."""
    from cryptography.hazmat.primitives.asymmetric import ec

    if insecure:
        return ec.generate_private_key(ec.SECP384R1())
    return certificates.client_key(member.key)


# Worker processes


def preloaded() -> list[str]:
    """The modules of the process from which all worker processes are forked."""
    names = ["fedstill.flower.apps", "fedstill.running.driver"]
    for home in HOMES.values():
        spec = find_spec(home)
        if spec is not None and spec.submodule_search_locations:
            modules = pkgutil.iter_modules(spec.submodule_search_locations)
            names += [f"{home}.{module.name}" for module in modules]
    return names


@dataclass
class Workers:
    """Processes with torch, one for each message."""

    member: Membership

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preloaded())

    def check_settings(self) -> None:
        """Raise ConfigError if ``site.toml`` is wrong."""
        with self._started(_check_site, str(self.member.folder / "site.toml")) as connection:
            reason = _received(connection).decode()
        if reason:
            raise ConfigError(reason)

    def answer(self, message: Incoming) -> Outgoing:
        """The reply to a message; an error reply if the worker process ends unexpectedly."""
        began = time.monotonic()
        try:
            description = replace(message, parts={})
            with self._started(_answer, description, self.member) as connection:
                _send_parts(connection, message.parts)
                reply = _receive_reply(connection)
        except (EOFError, OSError) as error:
            say(f"the process that worked on a message ended: {on_one_line(error)}")
            return error_reply(message, UNAVAILABLE, "the process that trains has ended")
        reply.seconds = time.monotonic() - began
        return reply

    @contextmanager
    def _started(self, target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
        """A context with a connection to a process that calls ``target``, which ends
        with it.
        """
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, os.getpid(), *arguments))
        process.start()
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()


def _received(connection: Connection) -> bytes:
    """Receive the next bytes from a process; raises EOFError if it has ended."""
    while not connection.poll(1.0):
        continue
    return connection.recv_bytes()


def _receive_reply(connection: Connection) -> Outgoing:
    metadata = _received(connection)
    tree = _received(connection)
    return Outgoing(metadata, tree, _receive_parts(connection))


def _receive_parts(connection: Connection) -> dict[str, bytes]:
    """Receive the parts of a message, each preceded by its id, until an empty id."""
    parts: dict[str, bytes] = {}
    while id := _received(connection):
        parts[id.decode()] = _received(connection)
    return parts


def _send_reply(connection: Connection, reply: Outgoing) -> None:
    connection.send_bytes(reply.metadata)
    connection.send_bytes(reply.tree)
    _send_parts(connection, reply.parts)


def _send_parts(connection: Connection, parts: dict[str, bytes]) -> None:
    """Send the parts of a message, each preceded by its id, and an empty id.

    They are removed one by one, so that each of them is in memory only once.
    """
    while parts:
        id, part = parts.popitem()
        connection.send_bytes(id.encode())
        connection.send_bytes(part)
    connection.send_bytes(b"")


def _check_site(connection: Connection, parent: int, path: str) -> None:
    """In a worker process: send the error in a ``site.toml``; empty if it is valid."""
    from fedstill.flower.site_settings import load_site

    reason = ""
    try:
        load_site(Path(path))
    except FedstillError as error:
        reason = str(error)
    connection.send_bytes(reason.encode())


def _answer(connection: Connection, parent: int, message: Incoming, member: Membership) -> None:
    """In a worker process: answer a message."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.task_identity import TaskIdentity

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start_parent_process_monitor(parent)
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = message.run
    TaskIdentity.node_id = message.node
    parts = _receive_parts(connection)
    question: Any = inflate_object_from_contents(message.root, parts)
    question.metadata.__dict__["_message_id"] = message.root
    _send_reply(connection, outgoing(reply_to(question, message, member)))


def reply_to(question: Any, message: Incoming, member: Membership) -> Any:
    """Flower's reply to a message; refusals are replies, too. Messages without the server's
    signature are refused.
    """
    from flwr.app import Context, Error, Message, RecordDict

    from fedstill.flower.apps import client_app
    from fedstill.flower.messages import (
        RAISED,
        InstructionCheck,
        error_text,
        public_reason,
        topic_of,
    )

    config = {"partition-id": member.client, "site": str(member.folder / "site.toml")}
    context = Context(message.run, message.node, config, RecordDict(), {})
    check = InstructionCheck(member.server_key, member.server_key.with_name("instructions"))
    try:
        check(question, message.node)
        if not message.is_app_run:
            raise Refused("this site only answers runs of an app with a server part", "app")
        require_own_app(message.app)
        return client_app(message=question, context=context)
    except Exception as error:
        say(f"refused or failed: {error_text(error)}")
        reason = public_reason(topic_of(error))
        return Message(Error(RAISED, reason), reply_to=question)


def outgoing(reply: Any) -> Outgoing:
    """Split one of Flower's replies into parts."""
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )

    reply.metadata.__dict__["_message_id"] = reply.object_id
    metadata = reply
    if reply.has_content():
        metadata = remove_content_from_message(reply)
    with no_object_id_recompute():
        tree = get_object_tree(reply)
        parts = {id: part.deflate() for id, part in get_all_nested_objects(reply).items()}
    return Outgoing(message_to_proto(metadata).SerializeToString(), tree.SerializeToString(), parts)


def error_reply(message: Incoming, code: int, reason: str) -> Outgoing:
    """The reply to a message that a site could not answer."""
    from flwr.app import Error, Message
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as Proto

    question = message_from_proto(Proto.FromString(message.metadata))
    return outgoing(Message(Error(code, reason), reply_to=question))
