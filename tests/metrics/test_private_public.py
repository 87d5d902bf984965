"""Accuracy of clients' own models, from a run's events; by network in the report, beside the
paper's numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from fedstill.benchmark import recipes
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.codec import decode
from fedstill.engines.passes import ModelPasses
from fedstill.metrics.local_models import private_public
from fedstill.report.page import write_page
from fedstill.running.preparation import prepare
from fedstill.running.runner import run
from journals import journal_events

FOUR = (
    {"name": "mlp", "hidden": (6,)},
    "logistic",
    {"name": "mlp", "hidden": (9, 5)},
    "digits_cnn",
)


def experiment(**changes: object) -> Experiment:
    """Four clients with four networks, two rounds."""
    values: dict[str, object] = {
        "data": {"public": toys.PUBLIC},
        "topology": {"clients": 4},
        "clients": {"models": FOUR},
        "measure": ("private_public",),
        "measure_every": 1,
        "rounds": 2,
    }
    return toys.toy("hiper_fedkd", **{**values, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("four") / "run"
    run(experiment(), folder, data=toys.blobs())
    return folder


def test_the_formula() -> None:
    """The last event of a client counts, and the client -1 is the server."""
    fit = {
        "client": 0,
        "private": {"counts": [4, 0], "after": [1, 0]},
        "public": {"counts": [5, 5], "after": [5, 0]},
    }
    server = {"client": -1, "public": {"counts": [5, 5], "before": [0, 0], "after": [3, 3]}}
    distil = {
        "client": 0,
        "private": {"counts": [4, 0], "before": [1, 0], "after": [3, 0]},
        "public": {"counts": [5, 5], "before": [5, 0], "after": [5, 3]},
    }
    refusal = {"client": 1, "refused": "gone"}

    assert private_public([fit, server, distil, refusal]) == {
        "private_accuracy": 0.75,
        "private_by_client": {"0": 0.75},
        "private_before_by_client": {"0": 0.25},
        "public_accuracy": 0.8,
        "public_by_client": {"0": 0.8},
        "public_before_by_client": {"0": 0.5},
        "server_public_accuracy": 0.6,
    }
    assert private_public([{"client": 0}]) == {}


def test_a_run_records_accuracies_of_every_client_before_and_after(finished: Path) -> None:
    clients = {"0", "1", "2", "3"}
    rounds = journal_events(finished, event="round")

    assert len(rounds) == 2
    for event in rounds:
        assert set(event["private_by_client"]) == clients
        assert set(event["private_before_by_client"]) == clients
        assert set(event["public_by_client"]) == clients
        assert set(event["public_before_by_client"]) == clients
        assert 0 < event["server_public_accuracy"] <= 1
        assert event["bytes_up"] > 0
        assert event["bytes_as_weights"] > 0


def test_the_numbers_are_those_of_the_models_themselves(finished: Path) -> None:
    prepared = prepare(resolve(experiment()), toys.blobs())
    last_round = journal_events(finished, event="round")[-1]
    distil = prepared.settings.schedule(2, prepared.world)[2]

    for client in range(4):
        (path,) = (finished / "memory").glob(f"client{client}-round2-stage2.safetensors")
        params = decode(path.read_bytes()).params
        view = prepared.sites.view(client, distil)
        passes = ModelPasses(view.model, prepared.sites.inputs)
        examples_by_kind = {"public": prepared.sites.public, "private": view.validation}
        for kind, examples in examples_by_kind.items():
            predicted = passes.logits(params, examples).argmax(1)
            accuracy = float((predicted == examples.labels).double().mean())
            assert last_round[f"{kind}_by_client"][str(client)] == pytest.approx(accuracy)


def test_public_data_without_labels_have_no_accuracy(tmp_path: Path) -> None:
    unlabelled = experiment(data={"public": toys.PUBLIC, "public_labels": False}, rounds=1)

    (event,) = run(unlabelled, tmp_path / "run", data=toys.blobs()).history

    assert "public_by_client" not in event
    assert "private_by_client" in event


def test_the_report_shows_accuracy_by_client_and_network(finished: Path, tmp_path: Path) -> None:
    text = write_page([finished], tmp_path / "page.html").read_text()

    assert "Client by client" in text
    for name in ("mlp(hidden=(6,)", "logistic", "mlp(hidden=(9, 5)", "digits_cnn"):
        assert name in text
    assert "weights:" in text


def test_hipers_recipe_has_the_papers_numbers_and_plans(tmp_path: Path) -> None:
    recipe = recipes.load_recipe("hiper/table1")
    cell = ("HiPer-FedKD", "alpha 0.1")

    (variant,) = recipe.variants([cell], [1], {}, tmp_path)

    plans = resolve(variant.experiment).plans
    assert recipe.published[cell].clients["private"] == [79.69, 41.64, 66.17, 43.34]
    epochs = {stage: plan.epochs for stage, plan in plans.items()}
    assert epochs == {"local": 5, "teach_server": 10, "distil": 5}
    for plan in plans.values():
        assert plan.batch == 64
        assert plan.lr == 0.01
        assert plan.momentum == 0.0
        assert plan.weight_decay == 0.0


def test_hipers_table_prints_ours_beside_the_papers_by_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line of private accuracies, each second number is ours."""
    monkeypatch.chdir(tmp_path)
    command = "reproduce hiper/table1 --data digits --rounds 1 --seeds 1 -q"
    changes = "-s data.public=50 -s model=logistic -s plan.epochs=1"

    status = call([*command.split(), *changes.split(), "--cells", "HiPer*:alpha 1.0"])

    table = capsys.readouterr().out
    assert status == 0
    assert "by client, ours (paper's)" in table
    assert "(67.2)" in table
    assert "57.0" in table
    (line,) = [
        line for line in table.splitlines() if line.startswith("HiPer-FedKD") and "private" in line
    ]
    assert all(float(number) >= 0 for number in line.split()[2::2])
