"""Over real processes: a certificate that expires during a run, and is renewed. Slow."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from fedstill.flower.deployment import certificates, folder
from flowers import needs_flower
from processes import Deployment, assert_same_bits, events, experiment, serial_run, start_run

pytestmark = [pytest.mark.slow, needs_flower]

CLIENTS = 2
SECONDS = 8.0
"""How long the certificate is valid with which the run goes on."""

DAY = 86_400.0


def renewed(deployment: Deployment, days: float) -> None:
    """Give the server a certificate for so many days."""
    federation = deployment.federation
    authority = certificates.authority_of(federation.folder)
    certificates.make_server(federation.server, authority, ["127.0.0.1"], days)


def gated(place: Path, **changes: Any) -> Any:
    """A run whose clients wait in round 1 until they may go on."""
    method = {"name": "toys:Gated", "folder": str(place)}
    return experiment(
        "fedavg", "parallel", method=method, topology={"clients": CLIENTS}, measure=(), **changes
    )


def test_a_run_goes_on_after_its_certificate_has_expired_and_was_renewed(tmp_path: Path) -> None:
    """The server and each site announce the end, and name it when it comes. The clients train
    meanwhile, and send their replies over new connections.
    """
    gate = tmp_path / "gate"
    gate.mkdir()
    deployment = Deployment(tmp_path, CLIENTS)
    clients = [f"client{client}" for client in range(CLIENTS)]
    renewed(deployment, days=9)
    with contextlib.closing(deployment):
        deployment.start_server()
        for client in range(CLIENTS):
            site = deployment.federation.client(client) / "site.toml"
            site.write_text(site.read_text() + 'imports = ["toys:Gated"]\n')
            deployment.start_client(client)
        start_run(deployment, gated(gate), tmp_path / "run")
        deployment.wait_until(
            lambda: all((gate / name).exists() for name in clients), "the clients to train"
        )
        for name in ("server", *clients):
            assert "expires on" in deployment.log(name)
            assert "expired" not in deployment.log(name)

        renewed(deployment, days=SECONDS / DAY)
        deployment.wait_until(
            lambda: "expired on" in deployment.log("server"), "the server to name it"
        )
        (gate / "open").touch()
        deployment.wait_until(
            lambda: all("has expired" in deployment.log(name) for name in clients),
            "the sites to name it",
        )
        assert not any(event["event"] == "round" for event in events(tmp_path / "run"))

        folder.renew(deployment.federation, ())
        deployment.wait_for_success("run")
        for name in clients:
            assert "connected again" in deployment.log(name)
    assert_same_bits(tmp_path / "run", serial_run(gated(gate), tmp_path / "serial"))
