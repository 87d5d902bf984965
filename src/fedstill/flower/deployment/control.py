"""The operator's requests to a federation's server: starting, stopping and watching runs, listing
sites, and admitting the sites whose keys are listed.
"""

from __future__ import annotations

import datetime
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.core.files import make_folder, read_toml, write_whole
from fedstill.flower import check_flower_installed, say
from fedstill.flower.deployment.folder import Federation, client_of_key
from fedstill.flower.deployment.gate import KEY_HEADER
from fedstill.flower.deployment.reach import bypass_proxies, host_of, is_temporary, problem

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

T = TypeVar("T")

ANSWER_SECONDS = 180.0
"""The time limit for an answer of a listening server, in seconds; a busy machine may need a minute.
"""

NOT_FOUND = 404
"""The HTTP status of answers about unknown runs."""

LINK = "fedstill"
"""The name of a federation's server in Flower's settings."""


class NoAnswer(DeployFailed):
    """The server did not answer, or failed, so it is unknown whether it executed the request."""


class NotListening(NoAnswer):
    """The server cannot be reached (yet), so it did not receive the request."""


class Unknown(DeployFailed):
    """The request refers to something that the server does not know."""


class NeverStarted(DeployFailed):
    """The server of a federation was never started."""


class OperatorKey:
    """Adds the operator's key to every request of one of Flower's clients. It is one of Flower's
    interceptors.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key.decode()

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Add the header, and continue."""
        context.request.headers[KEY_HEADER] = self._key
        return call_next(context)


@dataclass(frozen=True)
class SiteStatus:
    """The server's knowledge of a site.

    ``is_online``: whether it has recently sent a heartbeat. ``contact``: the time of the last
    contact; None: never.
    """

    name: str
    is_online: bool = False
    contact: datetime.datetime | None = None

    @staticmethod
    def of(node: Any) -> SiteStatus:
        """Read the status from Flower's description of a node."""
        from flwr.common.constant import HEARTBEAT_PATIENCE

        times = [_time(node.last_activated_at), _time(node.last_deactivated_at)]
        if node.last_activated_at and node.online_until:
            # Flower only stores the time until which the node counts as online.
            heard = node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval
            times.append(datetime.datetime.fromtimestamp(max(0.0, heard), datetime.UTC))
        contact = max((time for time in times if time is not None), default=None)
        return SiteStatus(node.name, node.status == "online", contact)


def _time(text: str) -> datetime.datetime | None:
    """Parse a time in Flower's format; None for an empty text."""
    if not text:
        return None
    return datetime.datetime.fromisoformat(text)


@dataclass(frozen=True)
class RunStatus:
    """A run that the server executes or has executed.

    ``number``: its number in Flower. ``folder``: the run's directory on the server; empty if the
    server created one. ``is_finished``: whether it has ended.
    """

    number: int
    folder: str
    is_finished: bool = False


@dataclass(frozen=True)
class Control:
    """The operator's access to the server of a federation. Methods raise NoAnswer, or DeployFailed
    with the server's reason.

    ``address``: host and port. ``certificates``: the authority's certificate as PEM; None for a
    server without TLS.
    """

    address: str
    certificates: bytes | None
    key: bytes

    @staticmethod
    def of(federation: Federation) -> Control:
        """The access to a federation's server, with the settings of its last start.

        Raises NeverStarted if it was never started, and DeployFailed if the operator's key belongs
        to another user.
        """
        path = federation.server / "flwr" / "config.toml"
        try:
            link = read_toml(path)["superlink"][LINK]
            ca = None if link.get("insecure") else Path(link["root-certificates"]).read_bytes()
            return Control(str(link["address"]), ca, federation.key.read_bytes())
        except PermissionError as error:
            raise DeployFailed(
                f"{error.filename} is readable only for the operator, the user who created the "
                "federation"
            ) from error
        except (OSError, ValueError, KeyError) as error:
            reason = "the server was never started"
            if not isinstance(error, FileNotFoundError):
                reason = f"{path} cannot be read ({error})"
            how = f"start the server first: fedstill deploy server {federation.folder}"
            raise NeverStarted(f"{reason}; {how}") from error

    def start(self, app: Path, values: Mapping[str, Any]) -> int:
        """Start a run of a Flower app with values for its config, and return its number."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        from fedstill.core.files import digest

        packed = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(digest(packed), packed, {}))
        with self._client("start-run") as client:
            answer = client.StartRun(
                StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(values)))
            )
        return int(answer.run_id)

    def stop(self, run: int) -> None:
        """Stop a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        with self._client("stop-run") as client:
            client.StopRun(StopRunRequest(run_id=run))

    def ended(self, run: int) -> str | None:
        """A description of how a run ended; None if it has not ended."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            with self._client("list-runs") as client:
                status = client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        except Unknown:
            return "the server was restarted"
        if status.status != "finished":
            return None
        return " ".join(str(status.details or status.sub_status or status.status).split())

    def nodes(self) -> dict[int, tuple[str, bytes]]:
        """The registered nodes: {id: (name, public key in the server's format)}."""
        return {node.node_id: (node.name, node.public_key) for node in self._registered()}

    def sites(self) -> list[SiteStatus]:
        """The registered nodes, with the time of the last contact."""
        return list(map(SiteStatus.of, self._registered()))

    def _registered(self) -> list[Any]:
        """Flower's descriptions of the registered nodes."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._client("list-nodes") as client:
            answer = client.ListNodes(ListNodesRequest())
        return [node for node in answer.nodes_info if node.status != "unregistered"]

    def runs_under_way(self) -> list[RunStatus]:
        """The runs that have not ended."""
        return [run for run in self.runs() if not run.is_finished]

    def runs(self) -> list[RunStatus]:
        """All runs that the server knows."""
        from flwr.common.serde import user_config_from_proto
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._client("list-runs") as client:
            runs = client.ListRuns(ListRunsRequest()).run_dict.values()
        return [
            RunStatus(
                number=run.run_id,
                folder=str(user_config_from_proto(run.override_config).get("out", "")),
                is_finished=run.status.status == "finished",
            )
            for run in runs
        ]

    def register(self, name: str, key: bytes) -> None:
        """Admit a node under a name."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._client("register-node") as client:
            client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def unregister(self, node: int) -> None:
        """Revoke the admission of a node."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with self._client("unregister-node") as client:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    @contextmanager
    def _client(self, request: str) -> Iterator[ControlHttpClient]:
        """One of Flower's clients for a request, which its errors describe."""
        check_flower_installed()
        import httpx
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        # The operator's commands run on the server's own machine.
        bypass_proxies(host_of(self.address), is_local=True)
        scheme, verify = trusting(self.certificates)
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
            OperatorKey(self.key),
        ]
        client = ControlHttpClient(
            f"{scheme}://{self.address}", interceptors=interceptors, verify=verify
        )
        try:
            yield client
        except httpx.HTTPStatusError as error:
            text = " ".join(error.response.text.split())[:300]
            reason = f"the server refused {request}: {error.response.status_code} {text}"
            if error.response.status_code == NOT_FOUND:
                raise Unknown(reason) from error
            if is_temporary(error.response.status_code):
                raise NoAnswer(reason) from error
            raise DeployFailed(reason) from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            reached = problem(error, self.address, tls=scheme == "https")
            raise NotListening(
                f"the server at {self.address} cannot be reached for {request}: {reached.reason}"
            ) from error
        except httpx.HTTPError as error:
            raise NoAnswer(
                f"the server at {self.address} did not answer {request}: {error}"
            ) from error
        finally:
            client.close()


def write_link(federation: Federation, insecure: bool) -> None:
    """Write the server's address for the operator's commands, to ``server/flwr/config.toml``."""
    home = federation.server / "flwr"
    make_folder(home)
    link: dict[str, Any] = {"address": federation.local}
    if insecure:
        link["insecure"] = True
    else:
        link["root-certificates"] = str(federation.server / "ca.crt")
    settings = {"superlink": {"default": LINK, LINK: link}}
    write_whole(home / "config.toml", tomli_w.dumps(settings).encode())


NO_CHECK_TIME = 0x200000
"""OpenSSL's flag to accept expired certificates."""


def trusting(authority: bytes | None) -> tuple[str, ssl.SSLContext | bool]:
    """The URL scheme, and the TLS context that checks the server's certificate, for programs on the
    server's own machine.

    They accept expired certificates of the federation's authority, because certificates are renewed
    on this machine, and runs in progress should continue. ``authority``: the authority's
    certificate; None without TLS.
    """
    if authority is None:
        return "http", False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode("ascii"))
    context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME)
    return "https", context


def when_it_listens(
    ask: Callable[[], T], seconds: float, is_stopped: Callable[[], bool] = lambda: False
) -> T:
    """The answer to a request, which is repeated for some seconds if the server cannot be reached
    (yet). The reason is printed once.

    A request that may have arrived is not repeated, because the server could start a run twice.
    ``is_stopped``: whether to stop waiting, by KeyboardInterrupt.
    """
    until = time.monotonic() + seconds
    is_waiting = False
    while True:
        try:
            return ask()
        except NotListening as error:
            if time.monotonic() >= until:
                raise
            if not is_waiting:
                say(f"{error}; trying again for {seconds:.0f} s")
        if is_stopped():
            raise KeyboardInterrupt
        is_waiting = True
        time.sleep(1.0)


def site_states(federation: Federation, control: Control) -> list[SiteStatus]:
    """The sites whose keys are listed, and all others that the server knows, sorted by name.

    A server that has just started does not know the listed sites yet.
    """
    states = {name: SiteStatus(name) for name in listed(federation)}
    for site in control.sites():
        states[site.name] = site
    # client2 before client10
    return sorted(states.values(), key=lambda site: (len(site.name), site.name))


def run_folders(federation: Federation) -> list[Path]:
    """The distinct directories of all runs that a federation's server knows.

    Raises NotListening if the server is not running.
    """
    folders = (run.folder for run in Control.of(federation).runs())
    return [Path(name) for name in dict.fromkeys(folders) if name]


# Admission of clients


def public_key(path: Path) -> bytes:
    """The public key in an OpenSSH ``.pub`` file, in the format of Flower's server; raises
    ConfigError if the file is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(key):
        raise ConfigError(
            f"{path} has an unsupported type: Flower accepts keys of a NIST curve, as `deploy "
            "init` makes"
        )
    return bytes(public_key_to_bytes(key))


def listed(federation: Federation) -> dict[str, bytes]:
    """{name: public key} of the admitted clients; raises ConfigError for a file without the name of
    a client.
    """
    keys: dict[str, bytes] = {}
    for path in sorted((federation.server / "allowed").glob("*.pub")):
        client = client_of_key(path.stem)
        if client is None or client >= federation.clients:
            last = f"client{federation.clients - 1}"
            raise ConfigError(
                f"{path}: the file must be named after the client with this key: from client0.pub "
                f"to {last}.pub"
            )
        keys[path.stem] = public_key(path)
        twice = [name for name, key in keys.items() if key == keys[path.stem] and name != path.stem]
        if twice:
            raise ConfigError(
                f"{path} is also the key of {twice[0]}: each client needs its own key"
            )
    return keys


def admit(federation: Federation, seconds: float = ANSWER_SECONDS) -> Iterator[str]:
    """Admit exactly the clients whose keys are listed; yields a line for each change.

    Raises DeployFailed for a key that was revoked.
    """
    control = Control.of(federation)
    keys = listed(federation)
    nodes = when_it_listens(control.nodes, seconds)
    admitted = set()
    for node, (name, key) in nodes.items():
        if keys.get(name) == key:
            admitted.add(name)
        else:
            control.unregister(node)
            yield f"{name or node} is no longer admitted: its key is not listed"
    for name in sorted(keys.keys() - admitted):
        try:
            control.register(name, keys[name])
        except DeployFailed as error:
            if "already in use" not in str(error):
                raise
            number = client_of_key(name)
            remedy = (
                f"create a new key for client {number} with `fedstill deploy key "
                f"{federation.folder} {number}`"
            )
            raise DeployFailed(
                f"{name}.pub was revoked, and the server does not accept a key twice: {remedy}"
            ) from error
        yield f"{name} can connect from now on"
