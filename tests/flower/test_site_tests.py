"""Real sites test the global model on their own test sets, and the result is shown everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.records import NOTHING, Reply, Stage
from fedstill.core.screen import MAX_EXAMPLES, Rules, screen
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.site import StageExecutor, client_app
from fedstill.flower.site_settings import Site
from fedstill.report.page import page
from fedstill.report.terminal import percent
from fedstill.running.journal import read_journal
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.running.runs import groups
from flowers import needs_flower

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

CLIENTS = 3
CLASSES = ["ill", "well"]
SIZES = {0: 10, 1: 20, 2: 5}
"""The test examples of each site."""

DATA = {"name": "none", "columns": ["age", "chol"], "mean": [50.0, 200.0], "std": [10.0, 20.0]}


def patients(client: int, size: int) -> pd.DataFrame:
    draw = torch.Generator().manual_seed(client)
    age = 50 + 10 * torch.randn(size, generator=draw)
    chol = 200 + 20 * torch.randn(size, generator=draw)
    ill = age + 5 * torch.randn(size, generator=draw) > 50 + 3 * client
    labels = [CLASSES[not bool(is_ill)] for is_ill in ill]
    return pd.DataFrame({"age": age.numpy(), "chol": chol.numpy(), "label": labels})


def hospitals(place: Path, **keys: Any) -> list[Site]:
    sites = []
    for client, size in SIZES.items():
        folder = place / f"own{client}"
        folder.mkdir(parents=True)
        patients(client, 40).to_csv(folder / "train.csv", index=False)
        patients(10 + client, size).to_csv(folder / "test.csv", index=False)
        sites.append(Site(client, place / f"memory{client}", data=str(folder), **keys))
    return sites


def grid_of(sites: Sequence[Site]) -> LoopbackGrid:
    executors = {site.client: StageExecutor(site, shows_reasons=True) for site in sites}
    app = client_app(
        lambda c: (c.node_config["partition-id"], executors[c.node_config["partition-id"]]), 1 << 30
    )
    return LoopbackGrid(app, range(CLIENTS))


def experiment(method: str = "fedavg", rounds: int = 2, **changes: Any) -> Experiment:
    flower = {
        "deadline": 30,
        "poll": 1,
        "data": "sites",
        "federation": "/federation",
        "classes": CLASSES,
        **changes.pop("flower", {}),
    }
    return Experiment(
        engine="flower",
        flower=flower,
        method={"name": method},
        model={"name": "logistic"},
        topology={"clients": CLIENTS},
        data=DATA,
        rounds=rounds,
        measure=(),
        plan={"epochs": 2, "batch": 8, "lr": 0.1},
        **changes,
    )


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "round"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    place = tmp_path_factory.mktemp("shown")
    return place, run(experiment(), place / "run", grid=grid_of(hospitals(place)))


def test_sites_test_the_global_model_after_every_round(shown: tuple[Path, Result]) -> None:
    place, _ = shown
    events = rounds_of(place / "run")
    assert all(event["accuracy"] is None for event in events), "the server has no data"
    for event in events:
        by_client = event["own_test_by_client"]
        assert set(by_client) == {"0", "1", "2"}
        right = sum(by_client[str(client)] * size for client, size in SIZES.items())
        assert event["own_test_weighted"] == pytest.approx(right / sum(SIZES.values()))
        assert event["own_test_accuracy"] == pytest.approx(sum(by_client.values()) / CLIENTS)

    model = fedstill.load_model(place / "run")
    for client, size in SIZES.items():
        rows = patients(10 + client, size)
        predicted = model(model.encode(rows[["age", "chol"]])).argmax(1).tolist()
        labels = [CLASSES.index(label) for label in rows["label"]]
        accuracy = sum(p == label for p, label in zip(predicted, labels, strict=True)) / size
        assert events[-1]["own_test_by_client"][str(client)] == pytest.approx(accuracy)


def test_terminal_summary_table_and_page_show_each_site_and_the_weighted_result(
    shown: tuple[Path, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    from fedstill.cli.run import _rows
    from fedstill.report.progress import Lines

    place, result = shown
    last = rounds_of(place / "run")[-1]
    weighted = percent(last["own_test_weighted"])
    assert result.summary["own_test_weighted"] == last["own_test_weighted"]
    rows = dict(_rows(result, has_queries_each_round=False))
    assert weighted in rows.values()
    for client in range(CLIENTS):
        (shown_for_client,) = [v for k, v in rows.items() if k.endswith(f"client {client}")]
        assert shown_for_client == percent(last["own_test_by_client"][str(client)])

    lines = Lines(2, "run")
    lines.begin()
    lines.round(last, 2)
    assert weighted in capsys.readouterr().err
    html = page(groups([place / "run"]))
    assert "own tests, weighted" in html
    assert 'id="clients"' in html


@pytest.mark.parametrize(
    ("every", "tested"), [(0, []), (1, [1, 2, 3]), (2, [2, 3]), (3, [3]), (9, [3])]
)
def test_they_test_every_few_rounds_and_after_the_last(
    every: int, tested: list[int], tmp_path: Path
) -> None:
    asked = experiment(rounds=3, flower={"test_every": every})
    run(asked, tmp_path / "run", grid=grid_of(hospitals(tmp_path)))
    events = rounds_of(tmp_path / "run")
    assert [e["round"] for e in events if "own_test_by_client" in e] == tested


def test_tests_do_not_change_the_model(shown: tuple[Path, Result], tmp_path: Path) -> None:
    asked = experiment(flower={"test_every": 0})
    run(asked, tmp_path / "run", grid=grid_of(hospitals(tmp_path)))
    models = [folder / "run/model.safetensors" for folder in (shown[0], tmp_path)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_site_can_refuse_to_test_and_takes_part_all_the_same(tmp_path: Path) -> None:
    sites = hospitals(tmp_path)
    sites[1] = replace(sites[1], evaluate=False)
    run(experiment(), tmp_path / "run", grid=grid_of(sites))
    for event in rounds_of(tmp_path / "run"):
        assert set(event["own_test_by_client"]) == {"0", "2"}
    clients = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "client"]
    assert not [e for e in clients if "refused" in e]
    assert not [e for e in clients if e["client"] == 1 and "site_accuracy" in e]
    assert [e["name"] for e in clients if e["client"] == 1].count("train") == 2


@pytest.mark.uses("privacy")
def test_under_secure_sums_sites_report_nothing(tmp_path: Path) -> None:
    asked = experiment(privacy={"secure_sum": True})
    run(asked, tmp_path / "run", grid=grid_of(hospitals(tmp_path)))
    assert not any("own_test_by_client" in event for event in rounds_of(tmp_path / "run"))


def test_models_of_clients_are_tested_by_their_sites(tmp_path: Path) -> None:
    run(experiment("fedrep"), tmp_path / "run", grid=grid_of(hospitals(tmp_path)))
    assert set(rounds_of(tmp_path / "run")[-1]["own_test_by_client"]) == {"0", "1", "2"}


def test_a_claim_of_many_test_examples_is_refused() -> None:
    stage = Stage(1, 0, "site_test", (0, 1))
    replies = [
        Reply(client, NOTHING, 1, {"site_accuracy": 1.0, "site_test_examples": count}, 1, 0)
        for client, count in enumerate((MAX_EXAMPLES, MAX_EXAMPLES + 1))
    ]
    accepted, refused = screen(
        lambda client: NOTHING, stage, {0: NOTHING, 1: NOTHING}, replies, Rules()
    )
    assert [reply.client for reply in accepted] == [0]
    assert [refusal.client for refusal in refused] == [1]


def test_the_key_is_for_sites_with_data_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"flower\.test_every"):
        resolve(toys.toy(engine="flower", flower={"test_every": 2}))
    with pytest.raises(ConfigError, match=r"flower\.test_every"):
        resolve(experiment(flower={"test_every": 0}, metrics=("auc",)))
