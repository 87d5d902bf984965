"""Accuracy of clients' own models, from a run's events; by network in the report, beside the
paper's numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from fedstill.benchmark import recipes
from fedstill.cli import call
from fedstill.config.resolve import resolve
from fedstill.engines.passes import ModelPasses
from fedstill.metrics.local_models import private_public
from fedstill.report.page import write_page
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

FOUR = (
    {"name": "mlp", "hidden": (6,)},
    "logistic",
    {"name": "mlp", "hidden": (9, 5)},
    "digits_cnn",
)


def experiment(**changes: object):
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
    folder = tmp_path_factory.mktemp("four") / "run"
    run(experiment(), folder, data=toys.blobs())
    return folder


def event(client: int, private=None, public=None) -> dict[str, object]:
    found = {k: v for k, v in (("private", private), ("public", public)) if v}
    return {"client": client, **found}


def test_the_formula() -> None:
    events = [
        event(
            0,
            private={"counts": [4, 0], "after": [1, 0]},
            public={"counts": [5, 5], "after": [5, 0]},
        ),
        event(-1, public={"counts": [5, 5], "before": [0, 0], "after": [3, 3]}),
        event(
            0,
            private={"counts": [4, 0], "before": [1, 0], "after": [3, 0]},
            public={"counts": [5, 5], "before": [5, 0], "after": [5, 3]},
        ),
        {"client": 1, "refused": "gone"},
    ]
    assert private_public(events) == {
        "private_accuracy": 0.75,
        "private_by_client": {"0": 0.75},
        "private_before_by_client": {"0": 0.25},
        "public_accuracy": 0.8,
        "public_by_client": {"0": 0.8},
        "public_before_by_client": {"0": 0.5},
        "server_public_accuracy": 0.6,
    }
    assert private_public([{"client": 0}]) == {}


def test_a_run_says_what_every_client_knows_before_and_after(finished: Path) -> None:
    rounds = [e for e in read_journal(finished / "journal.jsonl") if e["event"] == "round"]
    assert len(rounds) == 2
    for r in rounds:
        for kind in ("private", "public"):
            assert (
                set(r[f"{kind}_by_client"])
                == set(r[f"{kind}_before_by_client"])
                == {"0", "1", "2", "3"}
            )
        assert 0 < r["server_public_accuracy"] <= 1
        assert r["bytes_up"] > 0
        assert r["bytes_as_weights"] > 0


def test_the_numbers_are_those_of_the_models_themselves(finished: Path) -> None:
    prepared = prepare(resolve(experiment()), toys.blobs())
    from fedstill.core.codec import decode

    last = [e for e in read_journal(finished / "journal.jsonl") if e["event"] == "round"][-1]
    public, stage = prepared.sites.public, prepared.settings.schedule(2, prepared.world)[2]
    for client in range(4):
        (path,) = (finished / "memory").glob(f"client{client}-round2-stage2.safetensors")
        params = decode(path.read_bytes()).params
        view = prepared.sites.view(client, stage)
        for kind, data in (("public", public), ("private", view.validation)):
            logits = ModelPasses(view.model, prepared.sites.inputs).logits(params, data)
            accuracy = float((logits.argmax(1) == data.labels).double().mean())
            assert last[f"{kind}_by_client"][str(client)] == pytest.approx(accuracy)


def test_public_data_without_labels_have_no_accuracy(tmp_path: Path) -> None:
    blind = experiment(data={"public": toys.PUBLIC, "public_labels": False}, rounds=1)
    (last,) = run(blind, tmp_path / "run", data=toys.blobs()).history
    assert "public_by_client" not in last
    assert "private_by_client" in last


def test_the_report_shows_accuracy_by_client_and_network(finished: Path, tmp_path: Path) -> None:
    text = write_page([finished], tmp_path / "page.html").read_text()
    assert "Client by client" in text
    for name in ("mlp(hidden=(6,)", "logistic", "mlp(hidden=(9, 5)", "digits_cnn"):
        assert name in text
    assert "weights:" in text


def test_hipers_table_prints_ours_beside_the_papers_by_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipes.load_recipe("hiper/table1")
    assert recipe.published["HiPer-FedKD", "alpha 0.1"].clients["private"] == [
        79.69,
        41.64,
        66.17,
        43.34,
    ]
    settings = resolve(
        recipe.variants([("HiPer-FedKD", "alpha 0.1")], [1], {}, tmp_path)[0].experiment
    )
    assert {k: p.epochs for k, p in settings.plans.items()} == {
        "local": 5,
        "teach_server": 10,
        "distil": 5,
    }
    assert {(p.batch, p.lr, p.momentum, p.weight_decay) for p in settings.plans.values()} == {
        (64, 0.01, 0.0, 0.0)
    }
    words = [
        "reproduce",
        "hiper/table1",
        "--data",
        "digits",
        "--rounds",
        "1",
        "--seeds",
        "1",
        "-q",
        "-s",
        "data.public=50",
    ]
    words += ["-s", "model=logistic", "-s", "plan.epochs=1", "--cells", "HiPer*:alpha 1.0"]
    assert call(words) == 0
    said = capsys.readouterr().out
    assert "by client, ours (paper's)" in said
    assert "(67.2)" in said
    assert "57.0" in said
    lines = [
        line.split()
        for line in said.splitlines()
        if line.startswith("HiPer-FedKD") and "private" in line
    ]
    assert len(lines) == 1
    assert all(float(v) >= 0 for v in lines[0][2::2]), "ours are numbers"
