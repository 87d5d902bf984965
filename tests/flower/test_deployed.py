"""Over real processes on loopback addresses, with TLS and listed keys: the serial engine's bits.

Slow, and run by hand: ``python -m pytest -m slow tests/flower -s``. Every number printed is
measured here.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from fedstill.data.sources import load_dataset
from fedstill.flower.deployment.control import Control
from fedstill.flower.deployment.gate import HOLD_SECONDS
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.site import StageExecutor, client_app
from fedstill.flower.site_settings import load_site
from fedstill.running.journal import read_journal
from fedstill.running.runner import run
from flowers import needs_flower
from processes import Deployment, events, experiment, over, same_bits, serial_of

pytestmark = [pytest.mark.slow, needs_flower]

CLIENTS, TASKS = 3, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]

METHODS = {
    "parallel": "scaffold",
    "sequential": "toys:Chain",
    "public_logits": "toys:Logits",
    "peer_to_peer": "toys:Peers",
}


@pytest.mark.parametrize(("topology", "method"), METHODS.items())
def test_over_the_deployment_the_bits_are_the_serial_engines(
    topology: str, method: str, three: Deployment, tmp_path: Path
) -> None:
    """Two rounds; among peers one, which is all there is."""
    changes = {"rounds": 1} if topology == "peer_to_peer" else {}
    public = {"name": "digits", "public": toys.PUBLIC if topology == "public_logits" else 0}
    what, began = experiment(method, topology, data=public, **changes), time.monotonic()
    done = over(three, what, tmp_path / "run")
    assert done.returncode == 0, (
        done.stderr + three.log("server")[-3000:] + three.log("client0")[-3000:]
    )
    same_bits(tmp_path / "run", serial_of(what, tmp_path / "serial"))
    rounds = [
        f"{e['seconds_training']:.1f}"
        for e in read_journal(tmp_path / "run/journal.jsonl")
        if e["event"] == "round"
    ]
    print(
        f"\n{topology} {method}: same bits; {time.monotonic() - began:.1f} s in all; s a round: "
        f"{', '.join(rounds)}"
    )


def test_a_healthy_run_logs_no_error(three: Deployment, tmp_path: Path) -> None:
    """Also after its end, when the server asks for the next run."""
    names = ["server", *(f"client{client}" for client in range(CLIENTS))]
    lengths = {name: len(three.log(name)) for name in names}
    done = over(three, experiment("fedavg", "parallel"), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    time.sleep(HOLD_SECONDS + 5)
    for name, length in lengths.items():
        log = three.log(name)[length:]
        assert log
        assert "ERROR" not in log, log
        assert "Traceback" not in log, log


def test_a_run_starts_from_the_model_of_the_run_before_it(
    three: Deployment, tmp_path: Path
) -> None:
    """The server sends the model to the sites. FedNTD distils from it in the first round."""
    first = experiment("fedavg", "parallel", measure=())
    done = over(three, first, tmp_path / "first")
    assert done.returncode == 0, done.stderr + three.log("server")[-3000:]

    second = experiment("fedntd", "parallel", start_from=str(tmp_path / "first"), seed=4)
    done = over(three, second, tmp_path / "run")
    assert done.returncode == 0, done.stderr + three.log("server")[-3000:]
    same_bits(tmp_path / "run", serial_of(second, tmp_path / "serial"))
    clients = [event for event in events(tmp_path / "run") if event["event"] == "client"]
    assert not [event for event in clients if "refused" in event]


# Flower's own, in packing an app
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_app_runs_by_itself(three: Deployment, tmp_path: Path) -> None:
    """With the trial that the app's own pyproject.toml holds."""
    out = tmp_path / "run"
    Control.of(three.federation).start(three.federation.app, {"out": str(out)})
    three.until(lambda: (out / "summary.json").is_file(), "the app to end")
    assert len([e for e in events(out) if e["event"] == "round"]) == 2
    print("\nthe app by itself: the trial of the app's own pyproject.toml, two rounds")


def test_secure_sums_over_the_deployment_have_the_serial_engine_s_bits(
    three: Deployment, tmp_path: Path
) -> None:
    """Four messages a stage; what a site knows between two of them is on its disk."""
    what, began = (
        experiment("fedavg", "parallel", privacy={"secure_sum": True}, measure=()),
        time.monotonic(),
    )
    done = over(three, what, tmp_path / "run")
    assert done.returncode == 0, (
        done.stderr + three.log("server")[-3000:] + three.log("client0")[-3000:]
    )
    same_bits(tmp_path / "run", serial_of(what, tmp_path / "serial"))
    rounds = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "round"]
    print(
        f"\nsecure sums: same bits; {time.monotonic() - began:.1f} s; "
        f"{rounds[-1]['seconds_training']:.1f} s a round"
    )


# Flower's own, in packing an app
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_sites_have_tasks_of_their_own_over_the_deployment(
    three: Deployment, tmp_path: Path
) -> None:
    """A folder for each task at each site: the bits of the same sites on a loopback grid."""
    flower = {"data": "sites", "deadline": 900.0, "federation": str(three.federation.folder)}
    stream = {"kind": "sites", "tasks": 2, "order": TASKS}
    what = experiment(
        "replay",
        "parallel",
        partition={},
        measure=(),
        stream=stream,
        engine="flower",
        flower=flower,
    )
    for client in range(CLIENTS):
        keep_tasks(tmp_path / f"data{client}", client)
    sites = [three.federation.client(c) / "site.toml" for c in range(CLIENTS)]
    before = [site.read_text() for site in sites]
    for client, (site, text) in enumerate(zip(sites, before, strict=True)):
        site.write_text(text + f'data = "{tmp_path / f"data{client}"}"\ntasks = "folders"\n')
    try:
        run(what, tmp_path / "run")
        there = {c: StageExecutor(load_site(site)) for c, site in enumerate(sites)}
    finally:
        for site, text in zip(sites, before, strict=True):
            site.write_text(text)
    app = client_app(
        lambda c: (c.node_config["partition-id"], there[c.node_config["partition-id"]]), 1 << 30
    )
    run(what, tmp_path / "loopback", grid=LoopbackGrid(app, range(CLIENTS)))
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "loopback")]
    assert models[0] == models[1]
    rows = [
        [e["row"], e["clients"]]
        for e in events(tmp_path / "run")
        if e["event"] == "task" and e["task"]
    ]
    assert rows == [
        [e["row"], e["clients"]]
        for e in events(tmp_path / "loopback")
        if e["event"] == "task" and e["task"]
    ]
    print(f"\ntasks of sites: same bits; {rows[-1]}")


def keep_tasks(place: Path, client: int) -> None:
    """A site's digits, in a folder for each task."""
    digits = load_dataset("digits")
    for t, classes in enumerate(TASKS):
        arrays = {}
        for split, examples in (("train", digits.train), ("test", digits.test)):
            own = (
                torch.isin(examples.labels, torch.tensor(classes))
                .nonzero()
                .flatten()[client::CLIENTS]
            )
            arrays |= {
                f"{split}_images": examples.values[own, 0].numpy(),
                f"{split}_labels": examples.labels[own].numpy(),
            }
        (place / f"task{t + 1}").mkdir(parents=True)
        np.savez(place / f"task{t + 1}" / "data.npz", **arrays)
