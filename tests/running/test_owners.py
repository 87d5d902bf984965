"""Clients that the data name: their parts, their own tests, what a run says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import fedstill
import toys
from fedstill import Experiment, from_clients
from fedstill.config.data_table import resolved_data_name
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, InfeasiblePartition
from fedstill.core.extensions import RoundResult
from fedstill.data.dataset import Dataset
from fedstill.data.partition.sharding import column
from fedstill.report.data_split import class_by_client, splits
from fedstill.report.figures import short_name
from fedstill.report.page import write_page
from fedstill.running.client_evaluation import ClientTests
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runs import groups
from pages import as_plotly

SIZES = ((20, 4), (30, 6), (10, 2))


def some(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % 2
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return noise + 2.0 * labels[:, None], labels


def hospitals() -> Dataset:
    pairs = [(some(train, 2 * i), some(test, 2 * i + 1)) for i, (train, test) in enumerate(SIZES)]
    return from_clients("hospitals", pairs, names=["bern", "chur", "genf"])


def ready(partition: dict[str, Any], **changes: Any) -> Prepared:
    table = {"kind": "column", "column": "client", **partition}
    values = {"topology": {"clients": 3}, "model": "logistic", **changes}
    return prepare(resolve(toys.toy(partition=table, **values)), hospitals())


def test_each_owner_is_a_client_with_its_own_examples_and_test() -> None:
    run, data = ready({"own_test": "column"}), hospitals()
    assert run.client_names == ("bern", "chur", "genf")
    for client, (train, test) in enumerate(SIZES):
        assert data.train.owners is not None
        assert (
            run.sites.positions(client).tolist()
            == (data.train.owners == client).nonzero().flatten().tolist()
        )
        assert (len(run.sites.positions(client)), len(run.sites.own_tests[client])) == (train, test)
    assert run.sites.common_test is not None
    assert len(run.sites.common_test) == 12


def test_a_domain_that_is_only_tested_is_named() -> None:
    data, stream = hospitals(), {"kind": "domains", "column": "client", "tasks": 3}
    assert data.train.owners is not None
    trained = replace(data, train=data.train.take((data.train.owners != 1).nonzero().flatten()))
    with pytest.raises(ConfigError, match="stream\\.column = 'client': 'chur'"):
        prepare(
            resolve(toys.toy(stream=stream, topology={"clients": 2}, model="logistic", rounds=3)),
            trained,
        )


@pytest.mark.parametrize("take", ["random", "last"])
def test_a_share_of_each_clients_rows_is_its_test_and_trains_nobody(take: str) -> None:
    run, seeded = (ready({"own_test": 0.2, "own_test_take": take}, seed=seed) for seed in (1, 2))
    for client, (train, _) in enumerate(SIZES):
        part, own = run.sites.positions(client), run.sites.own_tests[client]
        assert (len(part), len(own)) == (train - train // 5, train // 5)
        assert torch.equal(part, seeded.sites.positions(client)), "the same for every seed of a run"
        rows = {tuple(row) for row in run.sites.train.values[part].tolist()}
        assert rows.isdisjoint(tuple(row) for row in own.values.tolist())
    if take == "last":
        assert torch.equal(run.sites.own_tests[0].values, hospitals().train.values[16:20])


def test_train_and_test_in_one_pool_give_every_owner_a_share_of_all_its_rows() -> None:
    run = ready({"own_test": 0.5, "pool": True})
    assert [len(run.sites.positions(c)) for c in range(3)] == [12, 18, 6]
    assert run.sites.common_test is not None
    assert len(run.sites.common_test) == 36, "all own tests together"
    with pytest.raises(ConfigError, match=r"partition\.pool .*partition\.own_test"):
        ready({"pool": True})
    with pytest.raises(ConfigError, match="own_test"):
        ready({"pool": True, "own_test": "column"})


def test_owners_with_too_few_examples_are_left_out_and_the_number_of_clients_is_named() -> None:
    run = ready({"least": 15}, topology={"clients": 2})
    assert run.client_names == ("bern", "chur")
    with pytest.raises(ConfigError, match=r"topology\.clients"):
        ready({}, topology={"clients": 4})
    with pytest.raises(ConfigError, match=r"partition\.kind = 'column'"):
        prepare(resolve(toys.toy(partition={"kind": "column", "column": "x"})), toys.blobs())
    with pytest.raises((ConfigError, InfeasiblePartition)):
        ready({"least": 100}, topology={"clients": 3})


@pytest.mark.parametrize("mix", [{}, {"alpha": 0.5}])
def test_an_owner_without_a_class_is_passed_over_in_the_tasks_of_that_class(
    mix: dict[str, float],
) -> None:
    """Chur has no example of the second task's class."""
    data = hospitals()
    assert data.train.owners is not None
    keep = ((data.train.owners != 1) | (data.train.labels == 0)).nonzero().flatten()
    what = toys.toy(
        partition={"kind": "column", "column": "client", "least": 6, **mix},
        topology={"clients": 3},
        model="logistic",
        rounds=2,
        stream={"kind": "classes", "tasks": 2, "order": [[0], [1]]},
    )
    run = prepare(resolve(what), replace(data, train=data.train.take(keep)))
    assert (run.client_names, run.world.stream.absent) == (("bern", "chur", "genf"), {(1, 1)})
    assert [run.world.stream.present(round) for round in (1, 2)] == [[0, 1, 2], [0, 2]]
    owners = run.sites.train.owners
    assert owners is not None
    for client, part in enumerate(run.sites.split.tensors()):
        assert set(owners[part].tolist()) == {client}
        assert mix or part.sort().values.tolist() == (owners == client).nonzero().flatten().tolist()


def test_own_tests_are_in_every_round_the_summary_and_the_report(tmp_path: Path) -> None:
    result = fedstill.run(
        Experiment(rounds=2, measure=(), model="logistic"), tmp_path / "one", data=hospitals()
    )
    assert result.summary["clients"] == 3
    assert result.summary["partition"] == "column"
    by_client = result.summary["own_test_by_client"]
    assert result.summary["own_test_accuracy"] == pytest.approx(sum(by_client.values()) / 3)
    assert result.summary["own_test_worst"] == min(by_client.values())
    params, data = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors"), hospitals()
    assert set(params) == {"head.weight", "head.bias"}
    for client in range(3):
        assert data.test.owners is not None
        own = data.test.owners == client
        logits = data.test.values[own] @ params["head.weight"].T + params["head.bias"]
        right = logits.argmax(1) == data.test.labels[own]
        assert by_client[str(client)] == pytest.approx(float(right.double().mean()))
    start = json.loads((tmp_path / "one" / "journal.jsonl").read_text().splitlines()[0])
    assert start["client_names"] == ["bern", "chur", "genf"]
    page = write_page([tmp_path / "one"], tmp_path / "report.html").read_text()
    assert "Client by client" in page
    assert "chur" in page
    (split,) = splits(groups([tmp_path / "one"]))
    assert split.client_names == ["bern", "chur", "genf"]
    drawn = as_plotly(class_by_client(split))
    assert drawn.layout.xaxis.ticktext == ("bern", "chur", "genf")
    assert list(drawn.data[0].customdata[0]) == ["bern", "chur", "genf"]
    assert short_name("Universitätsklinikum <Heidelberg>") == "Universitätsklini…"
    assert short_name("A & <B>") == "A &amp; &lt;B&gt;"


def test_a_run_of_owners_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=3, measure=(), partition={"kind": "column", "column": "client", "own_test": 0.25}
    )
    whole = fedstill.run(
        experiment.with_values({"topology.clients": 3}, "t"), tmp_path / "a", data=hospitals()
    )

    class Enough(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["round"] == 1:
            raise Enough

    with pytest.raises(Enough):
        fedstill.run(
            experiment.with_values({"topology.clients": 3}, "t"),
            tmp_path / "b",
            data=hospitals(),
            on_round=stop,
        )
    again = fedstill.resume(tmp_path / "b", data=hospitals())
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()
    assert again.summary["own_test_by_client"] == whole.summary["own_test_by_client"]


def test_the_answer_of_each_client_counts_where_it_has_one() -> None:
    sites = ready({"own_test": "column"}).sites
    right = {0: 1.0, 1: 0.5, 2: 0.0}

    def of(client: int) -> Any:
        own = sites.own_tests[client]

        def predict(x: torch.Tensor) -> torch.Tensor:
            rows = [int((own.values == row).all(1).nonzero()[0]) for row in x]
            hit = torch.tensor([row < right[client] * len(own) for row in rows])
            said = torch.where(hit, own.labels[rows], 1 - own.labels[rows])
            return torch.nn.functional.one_hot(said, 2).double()

        return predict

    def fields(tests: ClientTests, predictors: dict[str, Any]) -> dict[str, Any]:
        return tests.round_fields(RoundResult(1, (), {}, predictors), {})

    told = fields(ClientTests(sites, frozenset()), {f"client {c}": of(c) for c in range(3)})
    assert told["own_test_by_client"] == {"0": 1.0, "1": 0.5, "2": 0.0}
    tests = ClientTests(sites, frozenset({"train"}))
    for event in (
        {"event": "client", "name": "train", "client": 1, "site_accuracy": 0.75},
        {"event": "client", "name": "else", "client": 0, "site_accuracy": 1},
    ):
        tests.on_event(event)
    assert fields(tests, {})["own_test_by_client"] == {"1": 0.75}
    without = ClientTests(replace(sites, own_tests={}), frozenset())
    assert fields(without, {"global": of(0)}) == {}


def test_a_drawn_mix_is_the_most_that_each_owner_has_of_it() -> None:
    rng = np.random.default_rng(5)
    labels, owners = rng.integers(0, 4, 4000), rng.integers(0, 8, 4000)
    plain = column(labels, 8, owners)
    even, skewed = (column(labels, 8, owners, alpha=alpha, seed=3) for alpha in (1e6, 0.1))
    again = column(labels, 8, owners, alpha=0.1, seed=3)
    for client, (own, mixed, few) in enumerate(zip(plain, even, skewed, strict=True)):
        assert set(few) <= set(own)
        assert set(mixed) <= set(own)
        assert few.tolist() == sorted(few) == again[client].tolist()
        have, near, kept = (np.bincount(labels[part], minlength=4) for part in (own, mixed, few))
        assert np.ptp(near) <= 1, "a large alpha keeps as many of every class"
        assert near.min() == have.min()
        assert (kept == have).any(), (
            "one class is kept whole, so that more of this mix cannot be had"
        )
    largest = [np.bincount(labels[part]).max() / len(part) for part in skewed]
    assert np.mean(largest) > 0.6
    other = column(labels, 8, owners, alpha=0.1, seed=4)
    assert [len(part) for part in other] != [len(part) for part in skewed]


def test_a_runs_directory_beside_the_config_is_not_taken_for_its_data(tmp_path: Path) -> None:
    for name in ("run", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "journal.jsonl").touch()
    assert resolved_data_name("run", tmp_path, "data.name") == "run"
    assert resolved_data_name("data", tmp_path, "data.name") == str(tmp_path / "data")
