"""Over real processes on loopback addresses, with TLS and listed keys: the serial engine's bits, faults, refusals.

Slow, and run by hand: ``python -m pytest -m slow tests/deploy -s``. Every number printed is measured here.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.deploy import certificates, folder, programs
from fedstill.experiment.config import Experiment, as_toml
from fedstill.experiment.journal import read, without_times
from fedstill.experiment.runner import run
from fedstill.experiment.settings import settle
from flowers import needs_flower
from processes import LIMIT, Deployment, deployed, free_port

pytestmark = [pytest.mark.slow, needs_flower]

CLIENTS = 3
METHODS = {
    "parallel": "scaffold",
    "sequential": "toys:Chain",
    "public_logits": "toys:Logits",
    "peer_to_peer": "toys:Peers",
}


def experiment(method: str, topology: str, **changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "rounds": 2,
        "seed": 3,
        "threads": 1,
        "method": method,
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "alpha": 1.0},
        "topology": {"kind": topology, "clients": CLIENTS},
        "plan": {"epochs": 1, "lr": 0.05, "batch": 50},
        "clients": {"quorum": 0.3},
    }
    return Experiment(**{**values, **changes})


def over(deployment: Deployment, what: Experiment, out: Path, **flower: Any) -> subprocess.CompletedProcess[str]:
    """`fedstill run` with the Flower engine over a deployment."""
    tree = settle(replace(what, engine="serial")).tree
    config = out.with_suffix(".toml")
    config.write_text(as_toml({**tree, "engine": "flower", "flower": {"deadline": 300.0, **flower}}))
    return fedstill_("run", str(config), "--federation", str(deployment.federation.folder), "--out", str(out), "-q")


def fedstill_(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedstill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def journal(folder: Path) -> list[dict[str, Any]]:
    return [without_times(e) for e in read(folder / "journal.jsonl")]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    began = time.monotonic()
    with deployed(tmp_path_factory.mktemp("three"), CLIENTS) as deployment:
        print(f"\nserver up after {time.monotonic() - began:.1f} s")
        for client in range(CLIENTS):
            site = deployment.federation.client(client) / "site.toml"
            site.write_text(site.read_text() + f"imports = {list(METHODS.values())[1:]}\n")
        yield deployment


def serial_of(what: Experiment, folder: Path) -> Path:
    run(replace(what, engine="serial"), folder)
    return folder


@pytest.mark.parametrize(("topology", "method"), METHODS.items())
def test_over_the_deployment_the_bits_are_the_serial_engines(
    topology: str, method: str, three: Deployment, tmp_path: Path
) -> None:
    changes = {"rounds": 1} if topology == "peer_to_peer" else {}
    public = {"name": "digits", "public": toys.PUBLIC if topology == "public_logits" else 0}
    what, began = experiment(method, topology, data=public, **changes), time.monotonic()
    done = over(three, what, tmp_path / "run")
    assert done.returncode == 0, done.stderr + three.log("server")[-3000:] + three.log("client0")[-3000:]
    serial = serial_of(what, tmp_path / "serial")
    assert (tmp_path / "run/model.safetensors").read_bytes() == (serial / "model.safetensors").read_bytes()
    assert journal(tmp_path / "run") == journal(serial)
    rounds = [e["seconds_training"] for e in read(tmp_path / "run/journal.jsonl") if e["event"] == "round"]
    print(f"\n{topology} {method}: same bits; {time.monotonic() - began:.1f} s in all, {rounds} s a round")


def test_flower_runs_the_app_by_itself(three: Deployment, tmp_path: Path) -> None:
    """As ``flwr run .`` does: with the trial that the app's own pyproject.toml holds."""
    out = tmp_path / "run"
    programs.flwr(three.federation, "run", str(three.federation.app), programs.LINK, "--run-config", f'out="{out}"')
    three.until(lambda: (out / "summary.json").is_file(), "the app to end")
    assert len([e for e in events(out) if e["event"] == "round"]) == 2


def test_a_client_killed_in_its_stage_is_waited_for_and_its_node_used_again(three: Deployment, tmp_path: Path) -> None:
    what = experiment("fedavg", "parallel", plan={"epochs": 60}, rounds=2)
    serial = serial_of(what, tmp_path / "serial")
    config = tmp_path / "run.toml"
    tree = settle(replace(what, engine="serial")).tree
    config.write_text(as_toml({**tree, "engine": "flower", "flower": {"deadline": 400.0, "retries": 2}}))
    three.start(
        "run", "run", str(config), "--federation", str(three.federation.folder), "--out", str(tmp_path / "run"), "-q"
    )
    journal_file = tmp_path / "run/journal.jsonl"
    three.until(lambda: journal_file.is_file() and len(read(journal_file)) >= 2, "the run to begin")
    time.sleep(8)
    three.kill("client1")
    three.client(1)
    three.until(lambda: (tmp_path / "run/summary.json").is_file(), "the run to end")
    assert (tmp_path / "run/model.safetensors").read_bytes() == (serial / "model.safetensors").read_bytes()
    print("\na node killed and started again: same bits")


def test_a_killed_server_is_resumed_to_the_bits_of_the_uninterrupted_run(three: Deployment, tmp_path: Path) -> None:
    what = experiment("scaffold", "parallel", plan={"epochs": 2}, rounds=3)
    serial = serial_of(what, tmp_path / "serial")
    tree = settle(replace(what, engine="serial")).tree
    config = tmp_path / "run.toml"
    config.write_text(as_toml({**tree, "engine": "flower", "flower": {"deadline": 300.0}}))
    arguments = ("run", str(config), "--federation", str(three.federation.folder), "--out", str(tmp_path / "run"), "-q")
    three.start("run", *arguments)
    three.until(lambda: any(e["event"] == "round" for e in events(tmp_path / "run")), "the first round")
    three.kill("server")
    three.kill("run", signal.SIGKILL)
    three.server()
    done = fedstill_("resume", str(tmp_path / "run"), "-q")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/model.safetensors").read_bytes() == (serial / "model.safetensors").read_bytes()
    assert journal(tmp_path / "run") == journal(serial)
    print("\nserver killed and resumed: same bits")


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    return read(path) if path.is_file() else []


def test_a_client_without_the_method_is_refused_by_name_and_the_run_stops(three: Deployment, tmp_path: Path) -> None:
    """Each site pins another configuration, so that each refuses this one, by name."""
    for client in range(CLIENTS):
        site = three.federation.client(client) / "site.toml"
        site.write_text(site.read_text() + f'accept = ["{"0" * 64}"]\n')
    done = over(three, experiment("fedavg", "parallel"), tmp_path / "run")
    for client in range(CLIENTS):
        site = three.federation.client(client) / "site.toml"
        site.write_text(site.read_text().rpartition("accept = ")[0])
    assert done.returncode == 1
    assert "this site has not accepted the configuration" in done.stderr, done.stderr
    print("\n" + done.stderr.strip())


REFUSALS = ("wrong CA", "expired", "wrong host name", "unknown key", "plain-text client")


@pytest.mark.parametrize("what", REFUSALS)
def test_a_stranger_is_refused(what: str, three: Deployment, tmp_path: Path) -> None:
    member = folder.membership(three.federation.client(0))
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for name in ("ca.crt", "client.key", "site.toml"):
        (stranger / name).write_bytes((member.folder / name).read_bytes())
    member, said = replace(member, folder=stranger, port=free_port()), three.log("server")
    deployment, insecure = three, what == "plain-text client"
    other: Deployment | None = None
    match what:
        case "wrong CA":
            certificates.write_authority(stranger, certificates.make_authority("stranger"))
        case "unknown key":
            certificates.make_client(stranger / "client.key")
        case "expired" | "wrong host name":
            other = Deployment(tmp_path / "other", 1)
            deployment = other
            days, host = (-1, "127.0.0.1") if what == "expired" else (9, "elsewhere.example.org")
            authority = certificates.authority_of(other.federation.folder)
            certificates.make_server(other.federation.server, authority, [host], days)
            (stranger / "ca.crt").write_bytes((other.federation.server / "ca.crt").read_bytes())
            member = replace(member, address=other.federation.address)
            env = programs.environment(other.federation.server / "flwr")
            other.processes["server"] = subprocess.Popen(
                ["timeout", "200", *programs.superlink(other.federation, False)],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            other.until(lambda: listening(other.federation.port), "the other server")
    try:
        command = [*programs.supernode(member, insecure), "--max-retries", "1", "--max-wait-time", "15"]
        with (tmp_path / "log").open("wb") as log:
            node = subprocess.Popen(
                ["timeout", "90", *command],
                env=programs.environment(tmp_path),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            deployment.processes["stranger"] = node
            node.wait(120)
        text = (tmp_path / "log").read_text(errors="replace")
        news = three.log("server").removeprefix(said)
        line = next((ln.strip() for ln in text.splitlines() if "rror" in ln or "failed" in ln.lower()), text[-300:])
        print(f"\n{what}: status {node.returncode}: {line[:160]}")
        assert node.returncode != 0
        assert "ctivated" not in text.replace("Failed to activate", "")
        if what == "unknown key":
            assert "ApiError:2004" in news, "the server says so too, with the key"
    finally:
        deployment.kill("stranger")
        if other is not None:
            other.close()


def listening(port: int) -> bool:
    import socket

    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def test_without_certificates_nothing_starts(tmp_path: Path) -> None:
    made = Deployment(tmp_path, 1)
    (made.federation.server / "server.crt").unlink()
    (made.federation.client(0) / "ca.crt").unlink()
    for arguments in (("server", str(made.federation.folder)), ("client", str(made.federation.client(0)))):
        done = fedstill_("deploy", *arguments)
        assert done.returncode == 2
        assert "is missing: without" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    made.close()


def test_an_oversized_answer_and_a_payload_that_fails_the_screen_are_refused_by_name(
    three: Deployment, tmp_path: Path
) -> None:
    wide = experiment("fedavg", "parallel", rounds=1, model={"name": "mlp", "hidden": (6000,)})
    done = over(three, wide, tmp_path / "wide", max_mb=1)
    assert done.returncode == 1
    assert "over the limit of 1048576" in done.stderr, done.stderr
    wild = experiment("fedavg", "parallel", rounds=1, plan={"epochs": 1, "lr": 1000.0}, clients={"quorum": 0.3})
    wild_done = over(three, wild, tmp_path / "wild")
    assert wild_done.returncode == 1
    assert "Diverged" in wild_done.stderr or "not finite" in wild_done.stderr or "norm" in wild_done.stderr
    print("\n" + done.stderr.strip() + "\n" + wild_done.stderr.strip())
