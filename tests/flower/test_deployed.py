"""Over real processes on loopback addresses, with TLS and listed keys: the serial engine's bits.

Slow, and run by hand: ``python -m pytest -m slow tests/flower -s``. Every number printed is
measured here.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from fedstill.data.sources import load_dataset
from fedstill.flower.deployment.control import Control
from fedstill.flower.deployment.gate import HOLD_SECONDS
from fedstill.flower.site import StageExecutor
from fedstill.flower.site_settings import load_site
from fedstill.running.runner import run
from flowers import executor_grid, needs_flower
from journals import journal_events
from processes import Deployment, assert_same_bits, events, experiment, run_over, serial_run
from run_bits import model_bytes

pytestmark = [pytest.mark.slow, needs_flower]

CLIENTS = 3
TASKS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]

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
    changes: dict[str, Any] = {"data": {"name": "digits", "public": 0}}
    if topology == "peer_to_peer":
        changes["rounds"] = 1
    if topology == "public_logits":
        changes["data"]["public"] = toys.PUBLIC
    trial = experiment(method, topology, **changes)
    start = time.monotonic()

    process = run_over(three, trial, tmp_path / "run")

    seconds = time.monotonic() - start
    assert process.returncode == 0, all_logs(three, process)
    assert_same_bits(tmp_path / "run", serial_run(trial, tmp_path / "serial"))
    rounds = journal_events(tmp_path / "run", event="round")
    seconds_by_round = ", ".join(f"{event['seconds_training']:.1f}" for event in rounds)
    print(
        f"\n{topology} {method}: same bits; {seconds:.1f} s in all; s a round: {seconds_by_round}"
    )


def all_logs(deployment: Deployment, process: subprocess.CompletedProcess[str]) -> str:
    """The errors of a run's process, and the ends of the logs of the server and of client 0."""
    return process.stderr + deployment.log("server")[-3000:] + deployment.log("client0")[-3000:]


def test_a_healthy_run_logs_no_error(three: Deployment, tmp_path: Path) -> None:
    """Also after its end, when the server asks for the next run."""
    names = ["server", *(f"client{client}" for client in range(CLIENTS))]
    lengths = {name: len(three.log(name)) for name in names}
    process = run_over(three, experiment("fedavg", "parallel"), tmp_path / "run")
    assert process.returncode == 0, process.stderr
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
    process = run_over(three, first, tmp_path / "first")
    assert process.returncode == 0, process.stderr + three.log("server")[-3000:]

    second = experiment("fedntd", "parallel", start_from=str(tmp_path / "first"), seed=4)
    process = run_over(three, second, tmp_path / "run")
    assert process.returncode == 0, process.stderr + three.log("server")[-3000:]
    assert_same_bits(tmp_path / "run", serial_run(second, tmp_path / "serial"))
    clients = [event for event in events(tmp_path / "run") if event["event"] == "client"]
    assert not [event for event in clients if "refused" in event]


# Flower's own, in packing an app
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_app_runs_by_itself(three: Deployment, tmp_path: Path) -> None:
    """With the trial that the app's own pyproject.toml holds."""
    out = tmp_path / "run"
    Control.of(three.federation).start(three.federation.app, {"out": str(out)})
    three.wait_until(lambda: (out / "summary.json").is_file(), "the app to end")
    assert len([e for e in events(out) if e["event"] == "round"]) == 2
    print("\nthe app by itself: the trial of the app's own pyproject.toml, two rounds")


def test_secure_sums_over_the_deployment_have_the_serial_engine_s_bits(
    three: Deployment, tmp_path: Path
) -> None:
    """Four messages a stage; what a site knows between two of them is on its disk."""
    trial = experiment("fedavg", "parallel", privacy={"secure_sum": True}, measure=())
    start = time.monotonic()

    process = run_over(three, trial, tmp_path / "run")

    seconds = time.monotonic() - start
    assert process.returncode == 0, all_logs(three, process)
    assert_same_bits(tmp_path / "run", serial_run(trial, tmp_path / "serial"))
    last_round = journal_events(tmp_path / "run", event="round")[-1]
    print(
        f"\nsecure sums: same bits; {seconds:.1f} s; {last_round['seconds_training']:.1f} s a round"
    )


# Flower's own, in packing an app
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_sites_have_tasks_of_their_own_over_the_deployment(
    three: Deployment, tmp_path: Path
) -> None:
    """A folder for each task at each site: the bits of the same sites on a loopback grid."""
    flower = {"data": "sites", "deadline": 900.0, "federation": str(three.federation.folder)}
    stream = {"kind": "sites", "tasks": 2, "order": TASKS}
    trial = experiment(
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
    files = [three.federation.client(client) / "site.toml" for client in range(CLIENTS)]
    original_texts = [file.read_text() for file in files]
    for client, file in enumerate(files):
        data = tmp_path / f"data{client}"
        file.write_text(original_texts[client] + f'data = "{data}"\ntasks = "folders"\n')
    try:
        run(trial, tmp_path / "run")
        executors = {client: StageExecutor(load_site(file)) for client, file in enumerate(files)}
    finally:
        for file, text in zip(files, original_texts, strict=True):
            file.write_text(text)
    run(trial, tmp_path / "loopback", grid=executor_grid(executors))

    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "loopback")
    rows = task_rows(tmp_path / "run")
    assert rows == task_rows(tmp_path / "loopback")
    print(f"\ntasks of sites: same bits; {rows[-1]}")


def task_rows(folder: Path) -> list[list[Any]]:
    """After each task, the accuracies at the server and at the sites."""
    ends = journal_events(folder, event="task")
    return [[event["row"], event["clients"]] for event in ends if event["task"]]


def keep_tasks(place: Path, client: int) -> None:
    """A site's digits, in a folder for each task."""
    digits = load_dataset("digits")
    for task, classes in enumerate(TASKS):
        folder = place / f"task{task + 1}"
        folder.mkdir(parents=True)
        arrays = {}
        for split, examples in {"train": digits.train, "test": digits.test}.items():
            of_task = torch.isin(examples.labels, torch.tensor(classes)).nonzero().flatten()
            of_client = examples.take(of_task[client::CLIENTS])
            arrays[f"{split}_images"] = of_client.values[:, 0].numpy()
            arrays[f"{split}_labels"] = of_client.labels.numpy()
        np.savez(folder / "data.npz", **arrays)
