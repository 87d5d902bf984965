"""A federation over time: sites that join and leave, what the operator sees, certificates that are
renewed while the server runs, and states that sites no longer need.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federations import federation_in

from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.core.records import Stage
from fedstill.flower import commands
from fedstill.flower.deployment import certificates, control, folder, programs, superlink
from fedstill.flower.fleet import Fleet, Patience
from fedstill.flower.messages import Request
from fedstill.flower.site import prune_states
from flowers import needs_flower

pytestmark = needs_flower


def listed(federation: folder.Federation) -> set[str]:
    """The names of the clients whose keys the server lists."""
    return set(control.listed(folder.load_federation(federation.folder)))


def test_a_site_joins_with_the_next_number_and_a_key_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = federation_in(tmp_path, 2)
    old = {path: path.read_bytes() for path in federation.client(1).iterdir()}
    assert call(["deploy", "add", str(federation.folder), "--clients", "2"]) == 0
    assert str(federation.client(3)) in capsys.readouterr().out
    assert folder.load_federation(federation.folder).clients == 4
    assert listed(federation) == {"client0", "client1", "client2", "client3"}
    member = folder.membership(federation.client(3))
    programs.check_client(member, insecure=False)
    assert (member.client, member.address) == (3, federation.address)
    assert {path: path.read_bytes() for path in federation.client(1).iterdir()} == old


@pytest.mark.parametrize("clients", [0, -1, folder.MAX_CLIENTS])
def test_a_number_of_clients_that_is_not_possible_changes_nothing(
    clients: int, tmp_path: Path
) -> None:
    federation = federation_in(tmp_path, 2)
    with pytest.raises(ConfigError, match="--clients"):
        folder.add_clients(federation, clients)
    assert folder.load_federation(federation.folder) == federation


def test_a_site_that_has_left_is_no_longer_listed_and_no_other_site_gets_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number names one site in all journals and certificates; unlearning a number concerns one
    site only.
    """
    federation = federation_in(tmp_path, clients=3)
    place = str(federation.folder)
    former_key = federation.listed_key(1).read_bytes()
    assert call(["deploy", "remove", place, "1"]) == 0
    assert listed(federation) == {"client0", "client2"}
    assert call(["deploy", "remove", place, "1"]) == 2
    capsys.readouterr()
    assert call(["deploy", "key", place, "1"]) == 2
    assert "deploy add" in capsys.readouterr().err
    assert listed(federation) == {"client0", "client2"}
    assert call(["deploy", "add", place, "--clients", "1"]) == 0
    assert listed(federation) == {"client0", "client2", "client3"}
    assert call(["deploy", "key", place, "1", "--returns"]) == 0
    assert listed(federation) == {"client0", "client1", "client2", "client3"}
    assert federation.listed_key(1).read_bytes() != former_key
    assert call(["deploy", "key", place, "1"]) == 0, "it is a member again"
    assert folder.load_federation(federation.folder).departed == ()


def test_a_federation_of_an_earlier_version_has_no_departed_clients(tmp_path: Path) -> None:
    federation = federation_in(tmp_path, 2)
    path = federation.folder / "federation.toml"
    path.write_text(path.read_text().replace("departed = []\n", ""))
    assert "departed" not in path.read_text()
    assert folder.load_federation(federation.folder) == federation


class Nodes:
    """A grid of a federation whose clients are listed, and some of them there: they get messages
    and do not answer.
    """

    def __init__(self, clients: set[int], online: tuple[int, ...] = ()) -> None:
        self.clients = clients
        self.online = online

    def members(self) -> dict[int, int]:
        return {100 + client: client for client in self.online}

    def push_messages(self, messages: list[Any]) -> list[str]:
        return [str(message.metadata.dst_node_id) for message in messages]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return []

    def registered(self) -> set[int]:
        return self.clients


FIT = Request("1", config="", sha="", run="run", client=1, stage=Stage(1, 0, "fit", (1,)))
"""A request to client 1."""


@pytest.fixture
def clock() -> SimpleNamespace:
    """A clock that advances only when a caller waits."""

    def sleep(seconds: float) -> None:
        clock.time += max(seconds, 0.1)

    clock = SimpleNamespace(time=0.0, monotonic=lambda: clock.time, sleep=sleep)
    return clock


def test_no_run_waits_for_a_site_that_was_removed(clock: SimpleNamespace) -> None:
    """An absent site delays a stage until its deadline, and no longer."""
    removed = Fleet(Nodes({0, 2}), Patience(deadline=60), clock)  # type: ignore[arg-type]
    (answer,) = removed.ask([FIT])
    assert answer.failure
    assert clock.time == 0.0

    absent = Fleet(Nodes({0, 1, 2}), Patience(deadline=60), clock)  # type: ignore[arg-type]
    (answer,) = absent.ask([FIT])
    assert answer.failure
    assert 60 <= clock.time < 70


def test_a_site_that_is_removed_while_it_works_is_not_waited_for(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    nodes = Nodes({0, 1}, online=(0, 1))

    def pull(ids: list[str]) -> list[Any]:
        if clock.time > 30:
            nodes.clients = {0}
            nodes.online = (0,)
        return []

    nodes.pull_messages = pull  # type: ignore[method-assign]
    working = Fleet(nodes, Patience(deadline=600), clock)  # type: ignore[arg-type]
    (answer,) = working.ask([FIT])
    assert "not in the federation" in answer.failure
    assert 30 < clock.time < 45


def test_a_run_survives_a_server_that_does_not_list_its_clients_for_a_while(
    clock: SimpleNamespace,
) -> None:
    nodes = Nodes({0})
    attempts: list[float] = []

    def registered() -> set[int]:
        attempts.append(clock.time)
        if clock.time < 30:
            raise control.NotListening("the server cannot be reached")
        return nodes.clients

    nodes.registered = registered  # type: ignore[method-assign]
    fleet = Fleet(nodes, Patience(deadline=600), clock)  # type: ignore[arg-type]
    (answer,) = fleet.ask([FIT])
    assert "not in the federation" in answer.failure
    assert len(attempts) == 4
    assert 30 <= clock.time < 45


# What the operator sees


def node(**changes: Any) -> Any:
    """A node as the server reports it: client 0, online for ten minutes."""
    from flwr.proto.node_pb2 import NodeInfo

    time_now = time.time()
    activated = datetime.datetime.fromtimestamp(time_now - 600, datetime.UTC).isoformat()
    values = {
        "name": "client0",
        "status": "online",
        "last_activated_at": activated,
        "online_until": time_now + 50,
        "heartbeat_interval": 30,
    }
    return NodeInfo(**{**values, **changes})


def test_the_last_contact_is_the_last_sign_of_life() -> None:
    time_now = datetime.datetime.now(datetime.UTC)
    site = control.SiteStatus.of(node())
    assert site.is_online
    assert site.contact is not None
    assert abs((time_now - site.contact).total_seconds() - 10) < 5
    departure = (time_now - datetime.timedelta(hours=1)).isoformat()
    gone = control.SiteStatus.of(
        node(
            status="offline",
            last_deactivated_at=departure,
            online_until=0,
            last_activated_at=departure,
        )
    )
    assert not gone.is_online
    assert gone.contact is not None
    assert abs((time_now - gone.contact).total_seconds() - 3600) < 5
    fresh = node(status="registered", last_activated_at="", online_until=0)
    assert control.SiteStatus.of(fresh).contact is None


def test_status_shows_sites_the_run_and_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import toys
    from fedstill.running.runner import run

    run(toys.toy(rounds=2), tmp_path / "run", data=toys.blobs())
    federation = federation_in(tmp_path, 2)
    sites = [control.SiteStatus.of(node()), control.SiteStatus("client1", False, None)]
    under_way = control.RunStatus(number=7, folder=str(tmp_path / "run"))
    server = SimpleNamespace(
        sites=lambda: sites, runs_under_way=lambda: [under_way], certificates=b""
    )
    monkeypatch.setattr(control.Control, "of", staticmethod(lambda federation: server))
    assert call(["deploy", "status", str(federation.folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "online" in printed[0]
    assert "not connected" in printed[1]
    assert printed[2].endswith("rounds: 2")
    certificates.make_server(
        federation.server, certificates.authority_of(federation.folder), ["127.0.0.1"], 13
    )
    assert call(["deploy", "status", str(federation.folder)]) == 0
    assert f"deploy renew {federation.folder}" in capsys.readouterr().out


def test_status_lists_the_sites_that_a_server_does_not_know_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directly after its start, and also a site that the server still knows and that has left."""
    federation = federation_in(tmp_path, clients=11)
    folder.remove_client(federation, 4)
    statuses = [control.SiteStatus("client4", True), control.SiteStatus("client10", True)]
    server = SimpleNamespace(sites=lambda: statuses, runs_under_way=list, certificates=None)
    monkeypatch.setattr(control.Control, "of", staticmethod(lambda federation: server))
    assert call(["deploy", "status", str(federation.folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:11]] == [f"client{n}" for n in range(11)]
    assert ["not connected" in line for line in printed[:11]].count(True) == 11


def test_a_run_without_a_round_has_none(tmp_path: Path) -> None:
    state = commands.run_state(control.RunStatus(1, str(tmp_path)))
    assert str(tmp_path) in state


# Certificates


def test_a_running_server_takes_a_renewed_certificate(tmp_path: Path) -> None:
    federation = federation_in(tmp_path, 2)
    loaded_files = list[str]()
    context = SimpleNamespace(
        load_cert_chain=lambda *files: loaded_files.append(Path(files[0]).name)
    )
    files = {"ssl_certfile": federation.server / "server.crt"}
    files["ssl_keyfile"] = federation.server / "server.key"
    config = SimpleNamespace(ssl=context, **{name: str(path) for name, path in files.items()})

    async def scenario() -> None:
        watch = asyncio.ensure_future(superlink.watch_certificate(config, 0.01))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert loaded_files == []
        certificate = files["ssl_certfile"].read_bytes()
        other_federation = federation_in(tmp_path / "other", 2)
        files["ssl_certfile"].write_bytes((other_federation.server / "server.crt").read_bytes())
        await asyncio.sleep(0.05)
        assert loaded_files == [], "the key is still that of the old one"
        files["ssl_certfile"].write_bytes(certificate)
        await asyncio.sleep(0.05)
        folder.renew(federation, ())
        await asyncio.sleep(0.1)
        watch.cancel()

    asyncio.run(scenario())
    assert loaded_files == ["server.crt"]


def test_a_server_names_the_end_of_its_certificate_when_it_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on the day on which it was announced."""
    federation = federation_in(tmp_path, 2)
    authority = certificates.authority_of(federation.folder)
    certificates.make_server(federation.server, authority, ["127.0.0.1"], 3 / 86_400)
    config = SimpleNamespace(ssl=object(), ssl_certfile=str(federation.server / "server.crt"))

    printed = ""

    async def scenario() -> None:
        nonlocal printed
        watch = asyncio.ensure_future(superlink.watch_certificate(config, 0.02))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while "expired" not in printed:
                await asyncio.sleep(0.05)
                printed += capsys.readouterr().out
        watch.cancel()

    asyncio.run(scenario())
    lines = printed.splitlines()
    assert ["expires on" in line for line in lines] == [True, False]
    assert "expired on" in lines[1]
    assert f"deploy renew {federation.folder}" in lines[1]


def test_programs_on_the_servers_machine_take_an_expired_certificate_of_its_authority(
    tmp_path: Path,
) -> None:
    federation = federation_in(tmp_path, 2)
    authority = certificates.authority_of(federation.folder)
    certificates.make_server(federation.server, authority, ["127.0.0.1"], -1)
    assert shakes_hands(federation, federation)
    stranger = federation_in(tmp_path / "other", 2)
    assert not shakes_hands(stranger, federation)


def shakes_hands(client: folder.Federation, server: folder.Federation) -> bool:
    """Whether a program beside one server trusts the certificate of another."""
    _, trust = control.trusting((client.folder / "ca.crt").read_bytes())
    assert isinstance(trust, ssl.SSLContext)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(server.server / "server.crt", server.server / "server.key")
    pipes = [ssl.MemoryBIO() for _ in range(2)]
    near = trust.wrap_bio(pipes[0], pipes[1], server_hostname="127.0.0.1")
    far = served.wrap_bio(pipes[1], pipes[0], server_side=True)
    for _ in range(4):
        for side in (near, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return near.version() is not None


# States


def test_states_of_old_runs_are_deleted_and_what_guards_noted_stays(tmp_path: Path) -> None:
    old, recent = (tmp_path / run / "client0" for run in ("old", "recent"))
    for place in (old, recent):
        place.mkdir(parents=True)
        for name in ("0000001-0000000.reply", "client0-round1-stage0.safetensors", "noised"):
            (place / name).write_bytes(b"x")
    long_ago = time.time() - 91 * 86_400
    for path in old.iterdir():
        os.utime(path, (long_ago, long_ago))
    prune_states(tmp_path, days=0)
    assert len(list(old.iterdir())) == 3
    prune_states(tmp_path, days=90)
    assert [path.name for path in old.iterdir()] == ["noised"]
    assert len(list(recent.iterdir())) == 3
    prune_states(tmp_path / "nothing", days=90)
