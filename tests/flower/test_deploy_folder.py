"""A federation's folder and the commands made from it: safe by default, and refused by name where
they would not be.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import fedstill
from fedstill.cli import call
from fedstill.core.errors import ConfigError, RunExists
from fedstill.flower.deployment import certificates, folder, programs
from flowers import needs_flower
from processes import free_port

pytestmark = needs_flower


def made(path: Path, **changes: object) -> folder.Federation:
    """A federation of two clients in this folder."""
    values = {
        "clients": 2,
        "hosts": ("127.0.0.1",),
        "listen": "127.0.0.1",
        "port": 8443,
        "version": "1.0",
    }
    return folder.init(path, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line", ['port = "abc"', "port = 99999", 'clients = "3"', "clients = 2.5", "clients = 0"]
)
def test_a_number_that_is_none_is_refused_with_its_file(tmp_path: Path, line: str) -> None:
    path = made(tmp_path / "fed").folder / "federation.toml"
    key = line.partition(" ")[0]
    lines = [line if old.startswith(key) else old for old in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"federation.toml is not a valid federation: {key} = "):
        folder.load_federation(tmp_path / "fed")


def test_init_makes_what_the_commands_read(tmp_path: Path) -> None:
    federation = made(tmp_path / "fed", hosts=("fed.example.org", "10.0.0.5"), listen="0.0.0.0")
    assert folder.load_federation(tmp_path / "fed") == federation
    member = folder.membership(federation.client(1))
    assert (member.client, member.address) == (1, "fed.example.org:8443")
    assert member.key.read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    allowed = (federation.server / "allowed" / "client1.pub").read_text()
    assert allowed == member.key.with_name("client.key.pub").read_text()
    assert allowed.startswith("ecdsa-sha2-nistp384 ")


def test_secrets_are_their_owners_alone_and_leave_with_nobody_else(tmp_path: Path) -> None:
    federation = made(tmp_path / "fed")
    secrets = [
        federation.folder / "ca.key",
        federation.signing_key,
        federation.server / "server.key",
        *federation.folder.glob("*/client.key"),
    ]
    assert len(secrets) == 5
    assert {stat.S_IMODE(p.stat().st_mode) for p in secrets} == {0o600}
    theirs = sorted(p.name for p in federation.client(0).iterdir())
    files = ["ca.crt", "client.key", "client.key.pub", "client.toml", "server.pub", "site.toml"]
    assert theirs == files


def test_only_the_operator_reads_the_folders_with_secrets(tmp_path: Path) -> None:
    federation = made(tmp_path / "fed")
    folders = [federation.server, federation.client(0), federation.client(1)]
    assert {stat.S_IMODE(p.stat().st_mode) for p in folders} == {0o700}
    assert stat.S_IMODE(federation.key.stat().st_mode) == 0o600
    assert len(federation.key.read_bytes()) >= 43
    assert made(tmp_path / "other").key.read_bytes() != federation.key.read_bytes()


def test_a_federation_of_an_earlier_version_gets_keys_and_keeps_them(tmp_path: Path) -> None:
    federation = made(tmp_path / "fed")
    federation.key.unlink()
    federation.signing_key.unlink()
    folder.ensure_keys(federation)
    keys = [path.read_bytes() for path in (federation.key, federation.signing_key)]
    folder.ensure_keys(federation)
    assert [path.read_bytes() for path in (federation.key, federation.signing_key)] == keys
    assert len(keys[0]) == 43


def test_a_client_gets_a_new_key_and_keeps_its_settings(tmp_path: Path) -> None:
    federation = made(tmp_path / "fed")
    site = federation.client(1) / "site.toml"
    site.write_text("client = 1\nmemory = 'elsewhere'\n")
    former_key = (federation.server / "allowed/client1.pub").read_bytes()
    assert call(["deploy", "key", str(tmp_path / "fed"), "1"]) == 0
    assert (federation.server / "allowed/client1.pub").read_bytes() != former_key
    assert site.read_text().endswith("'elsewhere'\n")
    assert call(["deploy", "key", str(tmp_path / "fed"), "2"]) == 2


def test_what_was_never_started_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "fed")
    assert call(["deploy", "admit", str(tmp_path / "fed")]) == 1
    assert f"fedstill deploy server {tmp_path / 'fed'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "local"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.5", "10.0.0.5")]
)
def test_the_servers_certificate_names_how_its_own_machine_reaches_it(
    listen: str, local: str, tmp_path: Path
) -> None:
    federation = made(tmp_path / "fed", hosts=("fed.example.org",), listen=listen)
    assert federation.local == (f"[{local}]:8443" if ":" in local else f"{local}:8443")
    assert {"fed.example.org", local} <= certificates.named_hosts(federation.server / "server.crt")
    programs.superlink(federation, insecure=False)
    certificates.make_server(
        federation.server, certificates.authority_of(federation.folder), ["fed.example.org"], 9
    )
    with pytest.raises(ConfigError, match=f"{local}.*deploy renew"):
        programs.superlink(federation, insecure=False)


def test_an_address_of_ipv6_stands_in_brackets_wherever_a_port_follows(tmp_path: Path) -> None:
    federation = made(tmp_path / "fed", hosts=("2001:db8::5",), listen="::")
    assert federation.address == "[2001:db8::5]:8443"
    assert folder.membership(federation.client(0)).address == "[2001:db8::5]:8443"
    assert "2001:db8::5" in certificates.named_hosts(federation.server / "server.crt")


@pytest.mark.parametrize("listen", ["2001:DB8::1", "2001:db8:0:0:0:0:0:1"])
def test_an_address_of_ipv6_may_be_written_in_any_way(listen: str, tmp_path: Path) -> None:
    federation = made(tmp_path / "fed", hosts=(listen,), listen=listen)
    assert federation.local == federation.address == "[2001:db8::1]:8443"
    programs.superlink(federation, insecure=False)
    renewed = folder.renew(federation, ("2001:DB8::1", "2001:DB8::2"))
    assert renewed.hosts == ("2001:db8::1", "2001:db8::2")

    file = federation.folder / "federation.toml"
    file.write_text(file.read_text().replace("2001:db8::1", listen))
    loaded = folder.load_federation(federation.folder)
    assert loaded == renewed, "a federation of an earlier version"
    programs.superlink(loaded, insecure=False)


def test_the_servers_certificate_expires_with_the_authority_at_the_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise, nothing would warn of the authority's expiry."""
    federation = made(tmp_path / "fed")
    certificate = federation.server / "server.crt"
    authority = federation.folder / "ca.crt"
    assert certificates.last_day(certificate) < certificates.last_day(authority)
    assert call(["deploy", "renew", str(federation.folder)]) == 0
    assert str(authority) not in capsys.readouterr().out

    certificates.write_authority(federation.folder, certificates.make_authority("old", days=9))
    assert call(["deploy", "renew", str(federation.folder)]) == 0
    assert certificates.last_day(certificate) == certificates.last_day(authority)
    assert str(authority) in capsys.readouterr().out


def test_one_server_runs_from_a_folder_at_a_time_and_touches_nothing_of_the_others(
    tmp_path: Path,
) -> None:
    federation = made(tmp_path / "fed")
    (federation.server / "link.toml").write_text("as it was")
    original_files = {
        path: path.read_bytes() for path in federation.server.rglob("*") if path.is_file()
    }
    with programs.alone(federation.server, "a server"):
        assert call(["deploy", "server", str(federation.folder)]) == 1
    files = {path: path.read_bytes() for path in federation.server.rglob("*") if path.is_file()}
    assert {path: data for path, data in files.items() if path.name != "lock"} == original_files
    with programs.alone(federation.server, "a server"):
        pass


def test_another_program_on_the_port_is_not_taken_for_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_server:
        federation = made(tmp_path / "fed", port=other_server.getsockname()[1])
        assert call(["deploy", "server", str(federation.folder)]) == 1
    assert federation.local in capsys.readouterr().err


def test_one_client_runs_from_a_folder_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client_folder = made(tmp_path / "fed").client(0)
    with programs.alone(client_folder, "a client"):
        assert call(["deploy", "client", str(client_folder)]) == 1
    assert str(client_folder) in capsys.readouterr().err


def test_the_servers_certificate_is_for_its_hosts_and_signed_by_the_authority(
    tmp_path: Path,
) -> None:
    from cryptography import x509
    from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

    federation = made(tmp_path / "fed", hosts=("fed.example.org", "10.0.0.5"), listen="0.0.0.0")
    server = x509.load_pem_x509_certificate((federation.server / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((federation.folder / "ca.crt").read_bytes())
    builder = PolicyBuilder().store(Store([authority]))
    builder.build_server_verifier(x509.DNSName("fed.example.org")).verify(server, [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("other.example.org")).verify(server, [])
    stranger = PolicyBuilder().store(Store([certificates.make_authority("stranger").certificate]))
    with pytest.raises(VerificationError):
        stranger.build_server_verifier(x509.DNSName("fed.example.org")).verify(server, [])
    later = builder.time(
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=certificates.DAYS + 1)
    )
    with pytest.raises(VerificationError):
        later.build_server_verifier(x509.DNSName("fed.example.org")).verify(server, [])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(federation.server / "server.crt", federation.server / "server.key")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"clients": 0}, "--clients 0 must be from 1"),
        ({"hosts": ("a b",)}, "'a b' is not a host name"),
        ({"hosts": ("fed.example.org:8443",)}, "fed.example.org:8443.* a port, leave that out"),
        ({"hosts": ("0.0.0.0",)}, "--host 0.0.0.0 is not the address of a machine"),
        ({"port": 0}, "--port 0 must be from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    changes: dict[str, object], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line):
        made(tmp_path / "fed", **changes)
    assert not (tmp_path / "fed").exists()


def test_a_used_folder_is_not_touched(tmp_path: Path) -> None:
    made(tmp_path / "fed")
    certificate = (tmp_path / "fed/ca.crt").read_bytes()
    with pytest.raises(RunExists, match="is not empty"):
        made(tmp_path / "fed")
    assert (tmp_path / "fed/ca.crt").read_bytes() == certificate


def test_the_server_starts_with_tls_and_listed_keys_unless_told_otherwise(tmp_path: Path) -> None:
    command = programs.superlink(made(tmp_path / "fed"), insecure=False)
    assert {
        "--ssl-ca-certfile",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--enable-supernode-auth",
    } <= set(command)
    assert "--disable-runtime-dependency-installation" in command
    assert "--insecure" not in command


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key", "allowed/client0.pub"])
def test_the_server_does_not_start_without_certificates_or_a_list(
    name: str, tmp_path: Path
) -> None:
    federation = made(tmp_path / "fed", clients=1)
    (federation.server / name).unlink()
    with pytest.raises(ConfigError, match=name.removesuffix("/client0.pub")):
        programs.superlink(federation, insecure=False)


@pytest.mark.parametrize("name", ["ca.crt", "client.key"])
def test_a_client_does_not_start_without_its_key_or_the_authority(
    name: str, tmp_path: Path
) -> None:
    federation = made(tmp_path / "fed")
    (federation.client(0) / name).unlink()
    with pytest.raises(ConfigError, match=name):
        programs.check_client(folder.membership(federation.client(0)), insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "fed.example.org", "::"])
def test_without_tls_nothing_starts_that_others_can_reach(host: str, tmp_path: Path) -> None:
    federation = replace(made(tmp_path / "fed"), listen=host)
    with pytest.raises(ConfigError, match="this machine"):
        programs.superlink(federation, insecure=True)


@pytest.mark.parametrize("host", ["192.168.1.4", "fed.example.org", "2001:db8::1"])
def test_without_tls_no_client_reaches_another_machine(host: str, tmp_path: Path) -> None:
    federation = made(tmp_path / "fed", hosts=(host,))
    with pytest.raises(ConfigError, match="this machine"):
        programs.check_client(folder.membership(federation.client(0)), insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_without_tls_it_starts_on_a_loopback_address_when_told(host: str, tmp_path: Path) -> None:
    federation = replace(made(tmp_path / "fed"), listen=host)
    assert programs.superlink(federation, insecure=True)[-1] == "--insecure"


def test_programs_report_to_nobody_and_install_nothing(tmp_path: Path) -> None:
    env = programs.environment(tmp_path)
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert (
        env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"],
        env["RAY_USAGE_STATS_ENABLED"],
    ) == ("1", "0")


def test_the_app_is_a_flower_app_of_two_imports(tmp_path: Path) -> None:
    from flwr.cli.config_utils import load_and_validate

    federation = made(tmp_path / "fed", clients=3)
    config, *_ = load_and_validate(federation.app / "pyproject.toml", check_module=True)
    assert config["tool"]["flwr"]["app"]["components"]["clientapp"] == "fedstill_app.client_app:app"
    trial = tomllib.loads(config["tool"]["flwr"]["app"]["config"]["config"])
    assert trial["topology"]["clients"] == 3
    lines = [p.read_text() for p in (federation.app / "fedstill_app").glob("*_app.py")]
    assert all(len(text.splitlines()) <= 6 for text in lines)


def test_the_command_line_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port is free, so that a server of this machine does not matter."""
    place = str(tmp_path / "fed")
    command = ["deploy", "init", place, "--clients", "3", "--port", str(free_port())]

    assert call([*command, "--host", "fed.example.org", "--listen", "0.0.0.0"]) == 0

    output = capsys.readouterr().out
    assert f"fedstill deploy server {place}" in output
    assert f"fedstill deploy client {place}/client2" in output
    assert call(["deploy", "server", place, "--insecure-for-testing"]) == 2
    assert call(["deploy", "client", str(tmp_path)]) == 2
    assert "deploy init" in capsys.readouterr().err


def test_nothing_of_flower_is_imported_before_it_is_needed() -> None:
    import subprocess
    import sys

    code = (
        "import fedstill, sys; from fedstill.cli import call; call(['--help']); call(['run', "
        "'--help']);"
    )
    code += "print([m for m in ('flwr', 'ray', 'cryptography', 'torch') if m in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines()[-1] == "[]"


SUPERNODES = 2
"""So many virtual clients Flower's simulation has if nobody says otherwise."""


def test_the_app_in_this_repository_is_what_init_writes(tmp_path: Path) -> None:
    ours = Path(__file__).parents[2] / "deploy" / "flower-app"
    written = tmp_path / "flower-app"
    folder.write_app(written, SUPERNODES, fedstill.__version__)
    for path in (p.relative_to(written) for p in written.rglob("*") if p.is_file()):
        assert (ours / path).read_text() == (written / path).read_text(), f"write {path} anew"
