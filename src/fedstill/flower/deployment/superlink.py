"""Flower's server behind the gate: ``python -m fedstill.flower.deployment.superlink FOLDER``,
with Flower's own options. FOLDER is the federation's.

Flower's own function creates its application, which is served here, behind the gate. It does not
start programs that would execute an app's code: programs need the operator's key to request work,
and fedstill's programs only execute installed code. A thread of this process requests the work. The
web server is uvicorn, with limits on connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import ConfigError, DeployFailed, DiskFull, FedstillError
from fedstill.core.files import make_folder, read_file, remove, remove_folder, write_note
from fedstill.flower import check_flower_installed
from fedstill.flower.deployment import certificates, programs
from fedstill.flower.deployment.control import admit
from fedstill.flower.deployment.folder import Federation, load_federation
from fedstill.flower.deployment.gate import Asgi, Gate, Receive, Scope, Send, check_paths
from fedstill.flower.deployment.reach import expiry_warning
from fedstill.flower.deployment.tasks import Door, carry_out_runs

if TYPE_CHECKING:
    import uvicorn

OTHER_PORTS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
"""Settings with which Flower would open ports without a gate."""


def gated(parts: Path, on_trusted: Callable[[Any], None] = lambda peer: None) -> tuple[Gate, Any]:
    """Flower's application behind the gate, and its resolved options.

    ``parts``: a folder for large parts of messages. Raises ConfigError if Flower's paths differ
    from those that the gate knows, or if the options would bypass it.
    """
    check_flower_installed()
    for name in OTHER_PORTS:
        os.environ.pop(name, None)
    try:
        from fastapi.routing import iter_route_contexts
        from flwr.common.constant import ISOLATION_MODE_PROCESS
        from flwr.superlink.main import create_app

        # its package has a function of that name
        flower = import_module("flwr.superlink.cli.flower_superlink")
        config = flower._parse_superlink_lifespan_config()
        app = create_app(config, flower.SuperLinkLifespan)
        app.user_middleware = [_where_needed(layer) for layer in app.user_middleware]
        check_paths(str(route.path) for route in iter_route_contexts(app.routes))
        state = app.state.linkstate_factory.state()
        node_of = state.get_node_id_by_public_key
        state._object_store = part_store(parts)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "this version of Flower starts its server in a way that fedstill does not know: "
            f"{error}"
        ) from error
    if config.isolation != ISOLATION_MODE_PROCESS or config.simulation:
        raise ConfigError(
            "the server does not start: with its options, it could execute an app's code"
        )
    gate = Gate(
        app=app,
        key=config.superexec_auth_secret or b"",
        node_of=node_of,
        listed=config.enable_supernode_auth,
        on_trusted=on_trusted,
    )
    return gate, config


# The storage of Flower while the server runs


DATABASE = {
    "flwr.server.superlink.linkstate.sql_linkstate": "SqlLinkState",
    "flwr.supercore.object_store.sql_object_store": "SqlObjectStore",
}
"""Flower's modules for a database in a file, and the class that is imported from each."""


class NoDatabase:
    """Replaces the classes of ``DATABASE``, which the server does not use."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ConfigError("the server does not start: its options contain a database")


def leave_out_database() -> None:
    """Keep Flower's server from importing its database modules, which take 25 MB.

    Call this before Flower is imported.
    """
    for name, kind in DATABASE.items():
        module = ModuleType(name)
        setattr(module, kind, NoDatabase)
        sys.modules.setdefault(name, module)


MEMORY_BYTES = 32 << 20
"""The maximum size of parts in memory, in bytes."""


def part_store(folder: Path) -> Any:
    """A store for the parts of messages: Flower's own store in memory, with large contents in
    files.

    ``folder``: a folder that is created, empty, when the first file is needed. The files are
    temporary, because the runs end with the server.
    """
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

    class PartStore(InMemoryObjectStore):  # type: ignore[misc]
        """Keeps up to ``MEMORY_BYTES`` in memory, and all further contents in files."""

        def __init__(self) -> None:
            super().__init__()
            self._sizes: dict[str, int] = {}  # of contents in memory
            self._total = 0
            self._files: dict[str, Path] = {}

        def put(self, object_id: str, object_content: bytes) -> None:
            """Store a part, which Flower has checked against its id."""
            with self.lock_store:
                is_new = object_id in self.store and not self.store[object_id].is_available
                super().put(object_id, object_content)
                if not is_new:
                    return
                size = len(object_content)
                if self._total + size <= MEMORY_BYTES:
                    self._sizes[object_id] = size
                    self._total += size
                else:
                    entry = self.store[object_id]
                    entry.content = b""
                    # If the disk is full, the part has not arrived, and can be sent again.
                    entry.is_available = False
                    self._files[object_id] = _written(folder / object_id, object_content)
                    entry.is_available = True

        def get(self, object_id: str) -> bytes | None:
            """A part; empty if it has not arrived yet, None if it is unknown."""
            with self.lock_store:
                if object_id in self._files:
                    return read_file(self._files[object_id])
                content: bytes | None = super().get(object_id)
                return content

        def delete(self, object_id: str) -> None:
            """Delete a part, and the parts to which only it refers."""
            with self.lock_store:
                super().delete(object_id)
                if object_id in self.store:
                    return
                self._total -= self._sizes.pop(object_id, 0)
                path = self._files.pop(object_id, None)
                if path is not None:
                    remove(path)

    return PartStore()


def _written(path: Path, content: bytes) -> Path:
    """Write a new file; nothing is left of it if the disk is full."""
    make_folder(path.parent)
    try:
        write_note(path, content)
    except (OSError, DiskFull):
        remove(path)
        raise
    return path


LAYERS = {
    "ControlSensitiveResponseMiddleware": "/v1/control/",
    "ControlAuthenticationMiddleware": "/v1/control/",
    "ControlLicenseMiddleware": "/v1/control/",
    "ControlEventLogMiddleware": "/v1/control/",
    "RuntimeTracingMiddleware": "/v1/runtime/",
    "NodeAuthMiddleware": "/v1/fleet/",
    "FleetEventLogMiddleware": "/v1/fleet/",
}
"""The prefixes of the paths on which some layers of Flower's application have an effect."""


class OnSomePaths:
    """A layer of an application that is skipped for other paths, because each layer costs half a
    millisecond.
    """

    def __init__(self, app: Asgi, layer: Any, start: str) -> None:
        self.app = app
        self.layered: Asgi = layer.cls(app, *layer.args, **layer.kwargs)
        self.start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as specified by ASGI."""
        if scope.get("path", "").startswith(self.start):
            await self.layered(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _where_needed(layer: Any) -> Any:
    """A layer of Flower's application, restricted to its paths."""
    from starlette.middleware import Middleware

    start = LAYERS.get(layer.cls.__name__)
    if start is None:
        return layer
    return Middleware(OnSomePaths, layer=layer, start=start)


# Limits on connections, so that strangers cannot exhaust the server's open files


HANDSHAKE_SECONDS = 10.0
"""The time limit for the TLS handshake of a connection, in seconds."""

HEAD_SECONDS = 10.0
"""The time limit for the head of a request, in seconds, from the connection or its first byte."""

RENEWAL_SECONDS = 5.0
"""The time between two checks of the certificate, in seconds."""

END_SECONDS = 0.2
"""The time between two checks whether the server should stop, in seconds."""

SHUTDOWN_SECONDS = 2
"""The time for which a stopping server waits for pending answers, in seconds."""

MAX_CONNECTIONS = 4096
"""The maximum number of open connections, if the limit on open files permits."""

RESERVED_FILES = 256
"""The number of open files that are reserved for other purposes than connections."""

MAX_EVICTIONS = 64
"""The maximum number of evicted connections that are not closed yet."""

Peer = tuple[str, int]
"""The address and port of the other side of a connection."""


class Connections:
    """The open connections of a server: at most ``limit``, and half as many from one address.

    At a limit, a new connection replaces the oldest untrusted one. A connection is trusted after a
    request with a valid key. Therefore, strangers can only displace each other, but neither sites
    nor the operator.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.per_address = max(1, limit // 2)
        self._untrusted: dict[Peer, Connection] = {}  # the oldest first
        self._trusted: set[Peer] = set()
        self._of_address: Counter[str] = Counter()
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._untrusted) + len(self._trusted)

    def admit(self, connection: Connection) -> bool:
        """Whether a new connection is accepted."""
        address, _ = connection.peer
        if self._of_address[address] >= self.per_address:
            has_room = self._evict(address)
        elif len(self) >= self.limit:
            has_room = self._evict("")
        else:
            has_room = True
        if not has_room:
            return False
        self._untrusted[connection.peer] = connection
        self._of_address[address] += 1
        return True

    def trust(self, peer: Any) -> None:
        """Mark a connection as trusted, after a request with a valid key."""
        if self._untrusted.pop(tuple(peer or ()), None) is not None:
            self._trusted.add(tuple(peer))

    def closed(self, connection: Connection) -> None:
        """Remove a closed connection."""
        if connection.is_evicted:
            self._evicted -= 1
        elif self._untrusted.get(connection.peer) is connection or connection.peer in self._trusted:
            self._remove(connection.peer)

    def _evict(self, address: str) -> bool:
        """Close the oldest untrusted connection, optionally of an address; returns whether there
        was one.
        """
        oldest = next((peer for peer in self._untrusted if address in ("", peer[0])), None)
        if oldest is None or self._evicted >= MAX_EVICTIONS:
            return False
        connection = self._untrusted[oldest]
        self._remove(oldest)
        self._evicted += 1
        connection.evict()
        return True

    def _remove(self, peer: Peer) -> None:
        self._untrusted.pop(peer, None)
        self._trusted.discard(peer)
        self._of_address[peer[0]] -= 1
        if not self._of_address[peer[0]]:
            del self._of_address[peer[0]]


class Connection(socket.socket):
    """An accepted connection, which notifies ``connections`` when it is closed."""

    def __init__(self, descriptor: int, peer: Peer, connections: Connections) -> None:
        super().__init__(fileno=descriptor)
        self.peer = peer
        self.is_evicted = False
        self._is_noted = False
        self._connections = connections

    def close(self) -> None:
        """Close the connection."""
        super().close()
        if not self._is_noted:
            self._is_noted = True
            self._connections.closed(self)

    def evict(self) -> None:
        """Shut down the connection for both sides; its owner then closes it."""
        self.is_evicted = True
        try:
            self.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side has already closed it


class Listener(socket.socket):
    """A listening socket whose connections are limited."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raises ConnectionAbortedError above the limits."""
        accepted, peer = super().accept()
        other_side = (str(peer[0]), int(peer[1]))
        connection = Connection(accepted.detach(), other_side, self.connections)
        if not self.connections.admit(connection):
            connection.close()
            raise ConnectionAbortedError("too many connections")
        return connection, peer


def listeners(host: str, port: int, connections: Connections) -> list[Listener]:
    """Sockets that listen on a port, one for each address of a host; raises OSError on failure."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening = []
    for family, kind, protocol, _, address in dict.fromkeys(infos):
        listener = Listener(family, kind, protocol)
        listener.connections = connections
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listening.append(listener)
    return listening


def allowed_connections() -> int:
    """The maximum number of connections of this process. Increases the limit on open files as far
    as possible.

    Raises ConfigError if the number is too small.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + RESERVED_FILES
    if files < needed:
        if most != resource.RLIM_INFINITY:
            needed = min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
        files = needed
    connections = min(MAX_CONNECTIONS, files - RESERVED_FILES)
    if connections < 64:
        raise ConfigError(
            f"the server may only open {files} files, but needs {64 + RESERVED_FILES}: increase "
            "the limit, for example with ulimit -n 4096"
        )
    return connections


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop with a time limit for handshakes, because uvicorn has no setting for it."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """Create a server, as in asyncio."""
        if options.get("ssl") is not None:
            options = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, **options}
            options = {"ssl_shutdown_timeout": HANDSHAKE_SECONDS, **options}
        return await super().create_server(*args, **options)


def timed_protocol() -> Any:
    """uvicorn's HTTP protocol with a time limit for the head of a request.

    It is based on h11, which also limits the size of heads.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        """Closes a connection if the head of its next request is not complete in time."""

        _limit: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Called when a connection was opened."""
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            """Called when bytes of a request have arrived."""
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """Called when a connection was closed."""
            self._stop_watching()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop_watching()
            elif self._limit is None:
                self._limit = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

        def _stop_watching(self) -> None:
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

    return TimedProtocol


LOG_SECONDS = 60.0
LOG_LINES = 20
"""In so many seconds, so many lines with one text are logged."""

LOGGERS = ("fedstill.gate", "uvicorn.error", "asyncio")
"""The loggers to which strangers can cause output."""


class FewLines(logging.Filter):
    """Limits the number of log lines, so that strangers cannot fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began = clock()
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is logged; the last permitted line announces that others are omitted."""
        if self._clock() - self._began > LOG_SECONDS:
            self._began = self._clock()
            self._counts.clear()
        text = str(record.msg)
        self._counts[text] += 1
        if self._counts[text] == LOG_LINES:
            record.msg = f"{text} (further lines like this are omitted for {LOG_SECONDS:g} s)"
        return self._counts[text] <= LOG_LINES


def web_server(app: Any, config: Any) -> uvicorn.Server:
    """A uvicorn server for an application, with the options of Flower's server."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler

    settings = uvicorn.Config(
        app,
        http=timed_protocol(),
        ws="none",
        interface="asgi3",
        log_config=get_uvicorn_log_config(console_handler.level),
        access_log=False,
        proxy_headers=False,
        # Requests of sites are held for longer.
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    # The settings have created the loggers.
    for name in LOGGERS:
        logging.getLogger(name).addFilter(FewLines())
    return uvicorn.Server(settings)


MEANINGS = {
    "does not exist": "a site answered after the server had given the message up; the run asks "
    "again, or continues without this site",
    "task-token authentication failed": "the run has ended, or was stopped",
}
"""What some errors of Flower's mean in a federation, by a part of their text. They are expected
after a site was away, and after an operator has stopped a run.
"""


def explain(record: logging.LogRecord) -> bool:
    """Add to a line of Flower's log what it means, and make it a warning; True: it is logged."""
    for part, meaning in MEANINGS.items():
        if record.levelno == logging.ERROR and part in str(record.msg):
            record.msg = f"{record.msg} ({meaning})"
            record.levelno = logging.WARNING
            record.levelname = "WARNING"
    return True


def _without_colours() -> None:
    """Make Flower log plain text, without its warning about a setting that fedstill uses."""
    check_flower_installed()
    from flwr.supercore.logger import console_handler

    console_handler.colored = False
    console_handler.addFilter(explain)
    console_handler.addFilter(lambda record: "SuperExec authentication is" not in str(record.msg))


def serve() -> int:
    """Serve until a signal ends the process; return the exit status."""
    _without_colours()
    try:
        # Flower reads the other arguments.
        federation = load_federation(Path(sys.argv.pop(1)))
        with programs.alone(federation.server, "a server"):
            return _served(federation)
    except FedstillError as error:
        print(f"fedstill: {error}", file=sys.stderr)
        return 1


def _served(federation: Federation) -> int:
    """Serve a federation and execute its runs until a signal; return the exit status."""
    parts = federation.server / "parts"
    remove_folder(parts)
    connections = Connections(allowed_connections())
    gate, config = gated(parts, connections.trust)
    try:
        listening = listeners(config.host, config.port, connections)
    except OSError as error:
        raise DeployFailed(f"{config.host}:{config.port}: {error.strerror}") from error
    server = web_server(gate, config)
    operator = Operator(federation, server)
    try:
        operator.start()
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(_serve(server, listening, gate))
    finally:
        operator.end.set()
        operator.join()
        remove_folder(parts)
    return int(operator.failed)


class Operator(threading.Thread):
    """Performs the operator's tasks at a server: it admits the listed sites, and executes runs.

    ``end``: an event that ends the thread and all runs. ``failed``: whether the server ends because
    sites could not be admitted, or because of an error in this thread.
    """

    def __init__(self, federation: Federation, server: uvicorn.Server) -> None:
        super().__init__(name="operator", daemon=True)
        self.end = threading.Event()
        self.failed = False
        self._federation = federation
        self._server = server

    def run(self) -> None:
        """Wait for the server, and perform the tasks until it ends. An error ends the server,
        because new runs would otherwise wait forever.
        """
        try:
            self._perform()
        except FedstillError as error:
            print(f"fedstill: {error}", file=sys.stderr, flush=True)
            self._fail()
        except Exception:
            traceback.print_exc()
            self._fail()

    def _fail(self) -> None:
        self.failed = True
        self._server.should_exit = True

    def _perform(self) -> None:
        while not self._server.started:
            if self.end.wait(END_SECONDS):
                return
        insecure = not self._server.config.is_ssl
        federation = self._federation
        if not insecure:
            for line in admit(federation):
                print(line, flush=True)
        print(
            f"the server listens on {federation.listen}:{federation.port}; Ctrl-C ends it",
            flush=True,
        )
        carry_out_runs(Door.of(federation, insecure), self.end, os.environ)


async def _serve(server: uvicorn.Server, listening: Sequence[socket.socket], gate: Gate) -> None:
    """Serve until a signal, and reload the certificate when it is renewed."""
    server.config.load()
    renewal = asyncio.ensure_future(watch_certificate(server.config))
    release = asyncio.ensure_future(_release_at_end(server, gate))
    try:
        await server.serve(sockets=list(listening))
    finally:
        renewal.cancel()
        release.cancel()


async def _release_at_end(server: uvicorn.Server, gate: Gate) -> None:
    """Release all requests that the gate holds when the server is stopping."""
    while not server.should_exit:
        await asyncio.sleep(END_SECONDS)
    gate.held.close()


async def watch_certificate(config: uvicorn.Config, seconds: float = RENEWAL_SECONDS) -> None:
    """Reload a renewed certificate; warn once a day before the certificate expires, and when it has
    expired.
    """
    if config.ssl is None or config.ssl_certfile is None:
        return
    path = Path(config.ssl_certfile)
    folder = str(path.parent.parent)
    loaded = path.read_bytes()
    until = certificates.last_day(path)
    printed = ""
    while True:
        warning = expiry_warning(until, folder)
        line = f"{time.strftime('%Y-%m-%d')} {warning}"
        if warning and printed != line:
            printed = line
            print(f"fedstill: {warning}", flush=True)
        await asyncio.sleep(seconds)
        with contextlib.suppress(OSError, ConfigError):  # while it is being replaced
            if path.read_bytes() != loaded and _reload(config):
                loaded = path.read_bytes()
                until = certificates.last_day(path)
                print("fedstill: the certificate has been renewed", flush=True)


def _reload(config: uvicorn.Config) -> bool:
    """Load the certificate and its key for new connections; returns whether they match.

    They do not match while one of the files is being written.
    """
    files = (str(config.ssl_certfile), str(config.ssl_keyfile))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
    except (OSError, ssl.SSLError):
        return False
    assert config.ssl is not None
    config.ssl.load_cert_chain(*files)
    return True


def _exit(*_: object) -> None:
    """End this process in an orderly way, together with the runs that it has started."""
    sys.exit(1)


if __name__ == "__main__":
    leave_out_database()
    signal.signal(signal.SIGTERM, _exit)
    try:
        sys.exit(serve())
    except KeyboardInterrupt:
        sys.exit(130)
