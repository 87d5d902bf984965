"""Clients that the data name: their examples, their own tests, and their names in results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
import toys
from fedstill import Experiment, from_clients
from fedstill.config.data_table import resolved_data_name
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import RoundResult
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset
from fedstill.data.partition.sharding import column
from fedstill.report.data_split import class_by_client, splits
from fedstill.report.figures import short_name
from fedstill.report.page import write_page
from fedstill.running.client_evaluation import ClientTests
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runs import groups
from pages import as_plotly
from run_bits import model_bytes, stopped

TRAIN_SIZES = (20, 30, 10)
TEST_SIZES = (4, 6, 2)


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of two classes in turn, and their labels."""
    labels = torch.arange(count) % 2
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return noise + 2.0 * labels[:, None], labels


def hospitals() -> Dataset:
    """Three clients with rows of their own, each tested on a fifth as many."""
    bern = (rows(TRAIN_SIZES[0], 0), rows(TEST_SIZES[0], 1))
    chur = (rows(TRAIN_SIZES[1], 2), rows(TEST_SIZES[1], 3))
    genf = (rows(TRAIN_SIZES[2], 4), rows(TEST_SIZES[2], 5))
    return from_clients("hospitals", [bern, chur, genf], names=["bern", "chur", "genf"])


def ready(partition: dict[str, Any], **changes: Any) -> Prepared:
    """A prepared run of the hospitals."""
    table = {"kind": "column", "column": "client", **partition}
    values = {"topology": {"clients": 3}, "model": "logistic", **changes}
    return prepare(resolve(toys.toy(partition=table, **values)), hospitals())


def positions_of(owner: int, owners: torch.Tensor | None) -> torch.Tensor:
    """The positions of an owner's examples."""
    assert owners is not None
    return (owners == owner).nonzero().flatten()


def test_each_owner_is_a_client_with_its_own_examples_and_test() -> None:
    run = ready({"own_test": "column"})
    owners = hospitals().train.owners
    assert run.client_names == ("bern", "chur", "genf")

    for client in range(3):
        part = run.sites.positions(client)
        assert part.tolist() == positions_of(client, owners).tolist()
        assert len(part) == TRAIN_SIZES[client]
        assert len(run.sites.own_tests[client]) == TEST_SIZES[client]
    assert run.sites.common_test is not None

    assert len(run.sites.common_test) == 12


def test_a_domain_that_is_only_tested_is_named() -> None:
    data = hospitals()
    assert data.train.owners is not None
    without_chur = (data.train.owners != 1).nonzero().flatten()
    trained = replace(data, train=data.train.take(without_chur))
    stream = {"kind": "domains", "column": "client", "tasks": 3}
    experiment = toys.toy(stream=stream, topology={"clients": 2}, model="logistic", rounds=3)

    with pytest.raises(ConfigError, match="stream\\.column = 'client': 'chur'"):
        prepare(resolve(experiment), trained)


@pytest.mark.parametrize("take", ["random", "last"])
def test_a_share_of_each_clients_rows_is_its_test_and_not_trained_on(take: str) -> None:
    run = ready({"own_test": 0.2, "own_test_take": take}, seed=1)
    with_another_seed = ready({"own_test": 0.2, "own_test_take": take}, seed=2)
    for client, size in enumerate(TRAIN_SIZES):
        part = run.sites.positions(client)
        own_test = run.sites.own_tests[client]
        assert len(part) == size - size // 5
        assert len(own_test) == size // 5
        assert torch.equal(part, with_another_seed.sites.positions(client))
        trained_rows = {tuple(row) for row in run.sites.train.values[part].tolist()}
        assert trained_rows.isdisjoint(tuple(row) for row in own_test.values.tolist())
    if take == "last":
        assert torch.equal(run.sites.own_tests[0].values, hospitals().train.values[16:20])


def test_train_and_test_in_one_pool_give_every_owner_a_share_of_all_its_rows() -> None:
    run = ready({"own_test": 0.5, "pool": True})
    assert [len(run.sites.positions(client)) for client in range(3)] == [12, 18, 6]
    assert run.sites.common_test is not None
    assert len(run.sites.common_test) == 36, "all own tests together"
    with pytest.raises(ConfigError, match=r"partition\.pool .*partition\.own_test"):
        ready({"pool": True})
    with pytest.raises(ConfigError, match="own_test"):
        ready({"pool": True, "own_test": "column"})
    with pytest.raises(ConfigError, match=r"data\.test_size"):
        ready({"pool": True, "own_test": 0.5}, data={"test_size": 10})


def test_a_pool_without_any_test_example_is_refused() -> None:
    values, labels = rows(3, seed=0)
    examples = Examples(values, labels, owners=torch.arange(3))
    data = replace(hospitals(), train=examples, test=examples.take(torch.arange(0)))
    table = {"kind": "column", "column": "client", "pool": True, "own_test": 0.25}
    experiment = toys.toy(partition=table, topology={"clients": 3}, model="logistic")

    with pytest.raises(ConfigError, match=r"partition\.pool and partition\.own_test"):
        prepare(resolve(experiment), data)


def test_owners_with_too_few_examples_are_left_out_and_the_number_of_clients_is_named() -> None:
    run = ready({"least": 15}, topology={"clients": 2})
    assert run.client_names == ("bern", "chur")
    with pytest.raises(ConfigError, match=r"topology\.clients"):
        ready({}, topology={"clients": 4})
    with pytest.raises(ConfigError, match=r"partition\.column = 'x'"):
        prepare(resolve(toys.toy(partition={"kind": "column", "column": "x"})), toys.blobs())
    with pytest.raises(ConfigError, match=rf"partition\.least to {max(TRAIN_SIZES)}"):
        ready({"least": 100}, topology={"clients": 3})


@pytest.mark.parametrize("mix", [{}, {"alpha": 0.5}])
def test_an_owner_without_a_class_is_absent_from_the_tasks_of_that_class(
    mix: dict[str, float],
) -> None:
    """Chur has no example of the second task's class."""
    data = hospitals()
    assert data.train.owners is not None
    is_kept = (data.train.owners != 1) | (data.train.labels == 0)
    train = data.train.take(is_kept.nonzero().flatten())
    partition = {"kind": "column", "column": "client", "least": 6, **mix}
    stream = {"kind": "classes", "tasks": 2, "order": [[0], [1]]}
    experiment = toys.toy(
        partition=partition, topology={"clients": 3}, model="logistic", rounds=2, stream=stream
    )
    run = prepare(resolve(experiment), replace(data, train=train))

    assert run.client_names == ("bern", "chur", "genf")
    assert run.world.stream.absent == {(1, 1)}
    assert run.world.stream.present(1) == [0, 1, 2]
    assert run.world.stream.present(2) == [0, 2]
    owners = run.sites.train.owners
    assert owners is not None
    for client, part in enumerate(run.sites.split.tensors()):
        assert set(owners[part].tolist()) == {client}
        if not mix:
            assert part.sort().values.tolist() == positions_of(client, owners).tolist()


def test_own_tests_are_in_every_round_the_summary_and_the_report(tmp_path: Path) -> None:
    result = fedstill.run(
        Experiment(rounds=2, measure=(), model="logistic"), tmp_path / "one", data=hospitals()
    )
    assert result.summary["clients"] == 3
    assert result.summary["partition"] == "column"
    by_client = result.summary["own_test_by_client"]
    assert result.summary["own_test_accuracy"] == pytest.approx(sum(by_client.values()) / 3)
    assert result.summary["own_test_worst"] == min(by_client.values())

    params = result.model
    assert set(params) == {"head.weight", "head.bias"}
    test = hospitals().test
    for client in range(3):
        examples = test.take(positions_of(client, test.owners))
        logits = examples.values @ params["head.weight"].T + params["head.bias"]
        is_correct = logits.argmax(1) == examples.labels
        assert by_client[str(client)] == pytest.approx(float(is_correct.double().mean()))

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


def test_a_resumed_run_of_owners_has_the_same_bits(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=3,
        measure=(),
        partition={"kind": "column", "column": "client", "own_test": 0.25},
        topology={"clients": 3},
    )
    uninterrupted = fedstill.run(experiment, tmp_path / "uninterrupted", data=hospitals())
    stopped(experiment, tmp_path / "resumed", stages=1, data=hospitals())
    resumed = fedstill.resume(tmp_path / "resumed", data=hospitals())

    assert model_bytes(tmp_path / "resumed") == model_bytes(tmp_path / "uninterrupted")
    assert resumed.summary["own_test_by_client"] == uninterrupted.summary["own_test_by_client"]


def partly_correct_predictor(examples: Examples, correct: int) -> Callable[..., torch.Tensor]:
    """A predictor that knows the labels of the first examples, and is wrong on the others."""

    def predict(x: torch.Tensor) -> torch.Tensor:
        positions = [int((examples.values == row).all(1).nonzero()[0]) for row in x]
        labels = examples.labels[positions]
        predictions = torch.where(torch.tensor(positions) < correct, labels, 1 - labels)
        return torch.nn.functional.one_hot(predictions, 2).double()

    return predict


def round_fields(tests: ClientTests, predictors: dict[str, Any]) -> dict[str, Any]:
    """The fields that own tests add to the event of a round with these predictors."""
    return tests.round_fields(RoundResult(1, (), {}, predictors), {})


def test_the_predictor_of_each_client_is_tested_on_the_clients_own_test() -> None:
    """Without predictors, the accuracies are those that clients report."""
    sites = ready({"own_test": "column"}).sites
    own_tests = sites.own_tests
    predictors = {
        "client 0": partly_correct_predictor(own_tests[0], correct=4),
        "client 1": partly_correct_predictor(own_tests[1], correct=3),
        "client 2": partly_correct_predictor(own_tests[2], correct=0),
    }
    fields = round_fields(ClientTests(sites, frozenset()), predictors)
    assert fields["own_test_by_client"] == {"0": 4 / 4, "1": 3 / 6, "2": 0 / 2}

    reported = ClientTests(sites, frozenset({"train"}))
    report = {"event": "client", "name": "train", "client": 1, "site_accuracy": 0.75}
    of_another_stage = {"event": "client", "name": "else", "client": 0, "site_accuracy": 1}
    reported.on_event(report)
    reported.on_event(of_another_stage)
    assert round_fields(reported, {})["own_test_by_client"] == {"1": 0.75}

    without_tests = ClientTests(replace(sites, own_tests={}), frozenset())
    assert round_fields(without_tests, {"global": predictors["client 0"]}) == {}


def test_a_drawn_mix_keeps_as_many_examples_of_each_owner_as_possible() -> None:
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 4, 4000)
    owners = rng.integers(0, 8, 4000)
    all_parts = column(labels, 8, owners)
    even_parts = column(labels, 8, owners, alpha=1e6, seed=3)
    skewed_parts = column(labels, 8, owners, alpha=0.1, seed=3)
    skewed_again = column(labels, 8, owners, alpha=0.1, seed=3)

    largest_shares = []
    for client, part in enumerate(all_parts):
        available = np.bincount(labels[part], minlength=4)

        even = even_parts[client]
        assert set(even) <= set(part)
        even_counts = np.bincount(labels[even], minlength=4)
        assert np.ptp(even_counts) <= 1, "a large alpha keeps as many of every class"
        assert even_counts.min() == available.min()

        skewed = skewed_parts[client]
        assert set(skewed) <= set(part)
        assert skewed.tolist() == sorted(skewed) == skewed_again[client].tolist()
        skewed_counts = np.bincount(labels[skewed], minlength=4)
        assert (skewed_counts == available).any(), "all of one class: no larger part has this mix"
        largest_shares.append(skewed_counts.max() / len(skewed))

    assert np.mean(largest_shares) > 0.6
    with_another_seed = column(labels, 8, owners, alpha=0.1, seed=4)
    assert [len(part) for part in with_another_seed] != [len(part) for part in skewed_parts]


def test_a_run_directory_beside_the_config_is_not_taken_for_its_data(tmp_path: Path) -> None:
    for name in ("run", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "journal.jsonl").touch()
    assert resolved_data_name("run", tmp_path, "data.name") == "run"
    assert resolved_data_name("data", tmp_path, "data.name") == str(tmp_path / "data")


def test_a_known_data_set_beside_the_config_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are known by its name, whatever the working directory is."""
    name = "heart_disease"
    (tmp_path / name).mkdir()
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    assert resolved_data_name(name, tmp_path, "data.name") == name
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path / "elsewhere"))
    assert resolved_data_name(name, tmp_path, "data.name") == str(tmp_path / name)
    assert resolved_data_name(name, tmp_path, "data.name", str(tmp_path)) == name
