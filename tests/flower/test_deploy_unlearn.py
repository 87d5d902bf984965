"""A hospital leaves a federation: its runs are trained again without it, and its files deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("cryptography")

from federations import federation_in

from fedstill.cli import call
from fedstill.config.experiment import Experiment, from_tree
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, CorruptFile, DiskFull
from fedstill.flower.deployment import folder
from fedstill.flower.deployment.folder import Federation
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.remote_runs import FlowerRuns
from fedstill.flower.site_settings import Site
from fedstill.running.directory import settings_of
from fedstill.running.journal import read_journal
from fedstill.running.recording import Progress
from fedstill.running.result import Result
from fedstill.running.runner import run
from flowers import needs_flower, site_grid
from journals import journal_events, refusals
from processes import assert_same_bits, deployed, events, run_fedstill, run_over, serial_run
from processes import experiment as digits
from run_bits import model_bytes

pytestmark = [needs_flower, pytest.mark.uses("unlearning")]

CLIENTS = 3
LEAVING = 2
CLASSES = ["healthy", "ill"]
TABLE = {"columns": ["age", "pressure"], "standardise": "summed"}
METHODS: dict[str, dict[str, Any]] = {
    "sums of columns": {"method": "fedavg"},
    "label counts": {"method": "fedlc"},
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test's data and runs, with a cache of its own."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    return tmp_path


@pytest.fixture
def federation(place: Path) -> Federation:
    """A federation of all hospitals."""
    return federation_in(place, CLIENTS)


def patients(client: int) -> pd.DataFrame:
    """40 rows of a hospital."""
    draw = np.random.default_rng(client)
    age = draw.normal(50 + 10 * client, 8, 40).round(1)
    pressure = draw.normal(130, 15, 40).round(0)
    ill = (age + draw.normal(0, 5, 40) > 50 + 10 * client).astype(int)
    return pd.DataFrame({"age": age, "pressure": pressure, "label": np.array(CLASSES)[ill]})


def written(folder: Path, rows: pd.DataFrame) -> str:
    """A folder with these rows; the last quarter of each hospital is for tests."""
    folder.mkdir(parents=True)
    is_test = rows.index % 40 >= 30
    rows[~is_test].to_csv(folder / "train.csv", index=False)
    rows[is_test].to_csv(folder / "test.csv", index=False)
    return str(folder)


def site(place: Path, client: int) -> Site:
    """A hospital, whose data are written once."""
    data = place / f"own{client}"
    if not data.is_dir():
        written(data, patients(client))
    return Site(client, place / f"memory{client}", data=str(data))


def grid(place: Path, clients: list[int]) -> LoopbackGrid:
    """A grid of some hospitals."""
    return site_grid([site(place, client) for client in clients])


def experiment(data: dict[str, Any], **changes: Any) -> Experiment:
    """Two rounds of all hospitals with a small network."""
    return Experiment(
        rounds=2,
        model={"name": "logistic"},
        plan={"epochs": 1, "batch": 8, "lr": 0.1},
        topology={"clients": CLIENTS},
        data={**TABLE, **data},
        measure=(),
        **changes,
    )


def federated(federation: Federation, name: str, **changes: Any) -> Path:
    """The directory of a finished run at the three sites."""
    place = federation.folder.parent
    flower = {
        "deadline": 30,
        "poll": 1,
        "data": "sites",
        "federation": str(federation.folder),
        "classes": CLASSES,
    }
    over_sites = experiment(
        {"name": "none"}, engine="flower", flower=flower, keep_updates=True, **changes
    )
    run(over_sites, place / name, grid=grid(place, list(range(CLIENTS))))
    return place / name


@pytest.fixture
def server(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a server, a loopback grid of the sites that remain."""

    def submit(
        self: FlowerRuns, settings: Settings, folder: Path, resume: bool, watch: Progress
    ) -> Result:
        sites = [client for client in range(CLIENTS) if client != LEAVING]
        return run(from_tree(settings.tree, {}, place), folder, grid=grid(place, sites))

    monkeypatch.setattr(FlowerRuns, "submit", submit)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", METHODS)
def test_the_new_model_is_that_of_a_simulation_without_the_hospital(
    name: str, federation: Federation, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = federated(federation, "run", **METHODS[name])
    assert call(["deploy", "unlearn", str(federation.folder), "2", str(original)]) == 0
    new = place / "run-without-client2-retraining"

    rows = [patients(client).assign(hospital=client) for client in range(CLIENTS)]
    together = written(place / "all", pd.concat(rows))
    simulated = experiment(
        {"name": together},
        engine="serial",
        partition={"kind": "column", "column": "hospital"},
        unlearning={"clients": [LEAVING]},
        **METHODS[name],
    )
    run(simulated, place / "simulated")

    assert model_bytes(new) == model_bytes(place / "simulated")
    clients = journal_events(new, event="client")
    assert {event["client"] for event in clients} == {0, 1}
    assert not refusals(new)
    assert call(["unlearn", str(new), "--check"]) == 0
    assert "client 2" in capsys.readouterr().out


@pytest.mark.usefixtures("server")
def test_its_files_are_deleted_and_what_is_left_is_listed(
    federation: Federation, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = federated(federation, "run")
    assert list((original / "updates").glob("client2-*"))
    assert call(["deploy", "unlearn", str(federation.folder), "2", str(original)]) == 0
    printed = capsys.readouterr().out
    assert not federation.listed_key(LEAVING).exists()
    assert not federation.client(LEAVING).exists()
    assert federation.client(0).is_dir()
    assert not list((original / "updates").glob("client2-*"))
    assert list((original / "updates").glob("client1-*"))
    assert (original / "model.safetensors").is_file()
    assert f"not deleted: {original}" in printed

    # The command can be repeated: it trains nothing again.
    new = place / "run-without-client2-retraining"
    journal = (new / "journal.jsonl").read_bytes()
    assert call(["deploy", "unlearn", str(federation.folder), "2", str(original)]) == 0
    assert (new / "journal.jsonl").read_bytes() == journal


@pytest.mark.usefixtures("server")
def test_a_run_that_started_from_the_models_of_its_runs_is_trained_again_from_the_new_one(
    federation: Federation, place: Path
) -> None:
    """Also if the client was already absent from the later run."""
    from fedstill.unlearning.certificate import check_certificate

    first = federated(federation, "first")
    later = federated(federation, "later", start_from=str(first), unlearning={"clients": [LEAVING]})
    assert call(["deploy", "unlearn", str(federation.folder), "2", str(later)]) == 0
    new = place / "later-without-client2-retraining"

    expected = federated(federation, "never", unlearning={"clients": [LEAVING]})
    restarted = federated(
        federation, "again", start_from=str(expected), unlearning={"clients": [LEAVING]}
    )
    assert model_bytes(new) == model_bytes(restarted)
    assert model_bytes(new) != model_bytes(later)
    assert (place / "first-without-client2-retraining" / "certificate.json").is_file()
    assert not list((first / "updates").glob("client2-*"))
    assert check_certificate(new).original_checked


def test_a_certificate_of_a_run_that_started_from_an_old_model_is_refused(
    federation: Federation, place: Path
) -> None:
    from fedstill.unlearning.certificate import check_certificate, write_certificate
    from fedstill.unlearning.request import UnlearningRequest
    from fedstill.unlearning.retraining import Retraining
    from fedstill.unlearning.strategy import OriginalRun

    first = federated(federation, "first")
    later = federated(federation, "later", start_from=str(first), unlearning={"clients": [LEAVING]})
    events = read_journal(first / "journal.jsonl")
    original = OriginalRun(first, settings_of(first), events)
    write_certificate(original, later, UnlearningRequest(clients=(LEAVING,)), Retraining())
    with pytest.raises(CorruptFile, match="first"):
        check_certificate(later)


@pytest.mark.parametrize("linked", ["updates", "memory", "sites", "sites/run"])
def test_nothing_is_deleted_behind_a_link(linked: str, federation: Federation, place: Path) -> None:
    elsewhere = place / "elsewhere"
    victims = [elsewhere / "client2-round1-stage0.safetensors", elsewhere / "client2" / "state"]
    victims.append(elsewhere / "run" / "client2" / "state")
    for victim in victims:
        victim.parent.mkdir(parents=True, exist_ok=True)
        victim.write_bytes(b"")
    link = place / "planted" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises((ConfigError, DiskFull), match=linked):
        folder.delete_traces(federation, LEAVING, [place / "planted"])
    assert all(victim.is_file() for victim in victims)
    assert federation.client(LEAVING).is_dir()


def test_a_client_that_took_part_in_no_run_stays_in_the_federation(
    federation: Federation, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["deploy", "unlearn", str(federation.folder), "2", str(place / "nothing")]) == 2
    assert "client 2" in capsys.readouterr().err
    assert federation.listed_key(LEAVING).is_file()


def test_an_unfinished_run_is_refused(federation: Federation) -> None:
    from fedstill.unlearning.retraining import retrain_in_federation

    original = federated(federation, "run")
    (original / "summary.json").unlink()
    with pytest.raises(ConfigError, match="run"):
        retrain_in_federation(original, LEAVING)
    with pytest.raises(ConfigError, match="client 7"):
        retrain_in_federation(federated(federation, "another"), 7)


@pytest.mark.slow
def test_a_client_leaves_a_federation_of_processes(tmp_path: Path) -> None:
    """Over TLS, with listed keys: the server names the run itself, and the client's process, which
    still runs, no longer gets in.
    """
    original = tmp_path / "run"
    new = tmp_path / "run-without-client2-retraining"
    trained = digits("fedavg", "parallel", keep_updates=True)
    with deployed(tmp_path, CLIENTS) as deployment:
        federation = deployment.federation
        finished = run_over(deployment, trained, original)
        assert finished.returncode == 0, finished.stderr + deployment.log("server")[-3000:]
        assert list((original / "updates").glob("client2-*"))

        unlearned = run_fedstill("deploy", "unlearn", str(federation.folder), str(LEAVING))
        assert unlearned.returncode == 0, unlearned.stderr + deployment.log("server")[-3000:]

    without = replace(trained, unlearning={"clients": [LEAVING]})
    assert_same_bits(new, serial_run(without, tmp_path / "serial"))
    assert {event["client"] for event in events(new) if event["event"] == "client"} == {0, 1}
    assert not federation.listed_key(LEAVING).exists()
    assert not list((original / "updates").glob("client2-*"))
    assert f"not deleted: {original}" in unlearned.stdout
    checked = run_fedstill("unlearn", str(new), "--check")
    assert checked.returncode == 0, checked.stderr
    model = bytearray((new / "model.safetensors").read_bytes())
    model[-1] ^= 1
    (new / "model.safetensors").write_bytes(model)
    assert run_fedstill("unlearn", str(new), "--check").returncode == 1
