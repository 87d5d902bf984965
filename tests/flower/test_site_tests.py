"""Real sites test the global model on their own test sets, and the result is shown everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from fedstill.flower.site_settings import Site
from fedstill.report.page import page
from fedstill.report.terminal import percent
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.running.runs import groups
from flowers import needs_flower, site_grid
from journals import journal_events, refusals
from run_bits import model_bytes

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

CLIENTS = 3
CLASSES = ["ill", "well"]
SIZES = {0: 10, 1: 20, 2: 5}
"""The test examples of each site."""

DATA = {"name": "none", "columns": ["age", "chol"], "mean": [50.0, 200.0], "std": [10.0, 20.0]}


def patients(client: int, size: int) -> pd.DataFrame:
    """Rows of a hospital; whether a patient is ill depends on the age."""
    draw = torch.Generator().manual_seed(client)
    age = 50 + 10 * torch.randn(size, generator=draw)
    chol = 200 + 20 * torch.randn(size, generator=draw)
    ill = age + 5 * torch.randn(size, generator=draw) > 50 + 3 * client
    labels = np.where(ill.numpy(), "ill", "well")
    return pd.DataFrame({"age": age.numpy(), "chol": chol.numpy(), "label": labels})


def hospitals(place: Path) -> list[Site]:
    """Three sites with test sets of different sizes."""
    sites = []
    for client, size in SIZES.items():
        folder = place / f"own{client}"
        folder.mkdir(parents=True)
        patients(client, 40).to_csv(folder / "train.csv", index=False)
        patients(10 + client, size).to_csv(folder / "test.csv", index=False)
        sites.append(Site(client, place / f"memory{client}", data=str(folder)))
    return sites


def experiment(method: str = "fedavg", rounds: int = 2, **changes: Any) -> Experiment:
    """Three sites, and a server without data."""
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
    """The events of rounds."""
    return journal_events(folder, event="round")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result of a run whose sites test the model after both rounds."""
    place = tmp_path_factory.mktemp("tested")
    return run(experiment(), place / "run", grid=site_grid(hospitals(place)))


def test_sites_test_the_global_model_after_every_round(result: Result) -> None:
    for event in result.history:
        assert event["accuracy"] is None, "the server has no data"
        accuracies = event["own_test_by_client"]
        assert set(accuracies) == {"0", "1", "2"}
        correct = sum(accuracies[str(client)] * size for client, size in SIZES.items())
        assert event["own_test_weighted"] == pytest.approx(correct / sum(SIZES.values()))
        assert event["own_test_accuracy"] == pytest.approx(sum(accuracies.values()) / CLIENTS)

    model = fedstill.load_model(result.directory)
    for client, size in SIZES.items():
        rows = patients(10 + client, size)
        classes = model(model.encode(rows[["age", "chol"]])).argmax(1).numpy()
        accuracy = (np.array(CLASSES)[classes] == rows["label"]).mean()
        final_accuracies = result.history[-1]["own_test_by_client"]
        assert final_accuracies[str(client)] == pytest.approx(accuracy)


def test_terminal_summary_table_and_page_show_each_site_and_the_weighted_result(
    result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedstill.cli.run import _rows
    from fedstill.report.progress import Lines

    last_round = rounds_of(result.directory)[-1]
    weighted = percent(last_round["own_test_weighted"])

    assert result.summary["own_test_weighted"] == last_round["own_test_weighted"]
    rows = dict(_rows(result, has_queries_each_round=False))
    assert weighted in rows.values()
    for client in range(CLIENTS):
        (text,) = [rows[heading] for heading in rows if heading.endswith(f"client {client}")]
        assert text == percent(last_round["own_test_by_client"][str(client)])

    lines = Lines(2, "run")
    lines.begin()
    lines.round(last_round, 2)
    assert weighted in capsys.readouterr().err

    html = page(groups([result.directory]))
    assert "own tests, weighted" in html
    assert 'id="clients"' in html


@pytest.mark.parametrize(
    ("test_every", "test_rounds"), [(0, []), (1, [1, 2, 3]), (2, [2, 3]), (3, [3]), (9, [3])]
)
def test_sites_test_every_few_rounds_and_after_the_last(
    test_every: int, test_rounds: list[int], tmp_path: Path
) -> None:
    federation = experiment(rounds=3, flower={"test_every": test_every})

    run(federation, tmp_path / "run", grid=site_grid(hospitals(tmp_path)))

    events = [event for event in rounds_of(tmp_path / "run") if "own_test_by_client" in event]
    assert [event["round"] for event in events] == test_rounds


def test_tests_do_not_change_the_model(result: Result, tmp_path: Path) -> None:
    untested = experiment(flower={"test_every": 0})

    run(untested, tmp_path / "run", grid=site_grid(hospitals(tmp_path)))

    assert model_bytes(tmp_path / "run") == model_bytes(result.directory)


def test_a_site_that_refuses_to_test_still_trains(tmp_path: Path) -> None:
    sites = hospitals(tmp_path)
    sites[1] = replace(sites[1], evaluate=False)

    run(experiment(), tmp_path / "run", grid=site_grid(sites))

    for event in rounds_of(tmp_path / "run"):
        assert set(event["own_test_by_client"]) == {"0", "2"}
    assert not refusals(tmp_path / "run")
    events = journal_events(tmp_path / "run", event="client", client=1)
    assert not any("site_accuracy" in event for event in events)
    assert [event["name"] for event in events].count("train") == 2


@pytest.mark.uses("privacy")
def test_under_secure_sums_sites_report_no_tests(tmp_path: Path) -> None:
    federation = experiment(privacy={"secure_sum": True})

    run(federation, tmp_path / "run", grid=site_grid(hospitals(tmp_path)))

    assert not any("own_test_by_client" in event for event in rounds_of(tmp_path / "run"))


def test_models_of_clients_are_tested_by_their_sites(tmp_path: Path) -> None:
    run(experiment("fedrep"), tmp_path / "run", grid=site_grid(hospitals(tmp_path)))

    assert set(rounds_of(tmp_path / "run")[-1]["own_test_by_client"]) == {"0", "1", "2"}


def test_a_claim_of_many_test_examples_is_refused() -> None:
    """The metrics of two replies that differ in the number of test examples."""
    stage = Stage(1, 0, "site_test", (0, 1))
    possible = {"site_accuracy": 1.0, "site_test_examples": MAX_EXAMPLES}
    implausible = {"site_accuracy": 1.0, "site_test_examples": MAX_EXAMPLES + 1}
    replies = [
        Reply(client=0, content=NOTHING, examples=1, metrics=possible, round=1, stage=0),
        Reply(client=1, content=NOTHING, examples=1, metrics=implausible, round=1, stage=0),
    ]

    accepted, refused = screen(
        lambda client: NOTHING, stage, {0: NOTHING, 1: NOTHING}, replies, Rules()
    )

    assert [reply.client for reply in accepted] == [0]
    assert [refusal.client for refusal in refused] == [1]


def test_the_key_test_every_is_for_sites_with_data_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"flower\.test_every"):
        resolve(toys.toy(engine="flower", flower={"test_every": 2}))
    with pytest.raises(ConfigError, match=r"flower\.test_every"):
        resolve(experiment(flower={"test_every": 0}, metrics=("auc",)))
