"""What a client learned from its peers: the parts of phases and teachers sum to its change."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from announcements import no_announcement
from torch import Tensor

import fedstill
import toys
from fedstill.attribution.replays import (
    ALONE_ROW,
    ExchangeEffect,
    exchange_effect,
    exchange_sentence,
    teacher_table,
)
from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.core.files import digest
from fedstill.core.records import State, Tensors
from fedstill.engines.passes import correct_by_class
from fedstill.methods.fit import fitted_models, student_models
from fedstill.models.predictors import predictor
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.directory import settings_of
from fedstill.running.replay import Replay
from fedstill.running.runs import read_run


def trained(folder: Path, method: Any, **changes: object) -> Path:
    """The folder, with a run of one round on digits in it; four clients query their peers."""
    values: dict[str, object] = {
        "topology": {"clients": 4},
        "query": {"draw": "single", "fewer_than": 5},
        **changes,
    }
    experiment = toys.toy(method, rounds=1, data="digits", **values)
    sizes = {"data.train_size": 200, "data.test_size": 100}
    fedstill.run(experiment.with_values(sizes, "test"), folder)
    return folder


def last_state(folder: Path) -> State:
    """The state in a run's last checkpoint."""
    config = digest((folder / "config.toml").read_bytes())
    checkpoints = Checkpoints(folder / "checkpoints", config, folder / "memory")
    restored = checkpoints.before(99)
    assert restored is not None
    return restored.state


def class_accuracies(folder: Path, params: Tensors, client: int) -> Tensor:
    """The accuracy of each class of a client's model with these parameters."""
    prepared = Replay.of_round(folder, 1).prepared
    test = prepared.sites.common_test
    assert test is not None
    model = predictor(prepared.world.model(client), params)
    classes = prepared.world.classes
    correct = correct_by_class(model, test, prepared.sites.inputs, classes)
    return correct.double() / torch.bincount(test.labels, minlength=classes)


def change_of(folder: Path, client: int) -> Tensor:
    """How much a client's class accuracies changed from its own fit to the end of the run."""
    state = last_state(folder)
    fitted = class_accuracies(folder, fitted_models(state)[client], client)
    final = class_accuracies(folder, student_models(state)[client], client)
    return final - fitted


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """The sum of the parts of a change."""
    return torch.stack(list(parts)).sum(0)


def querying_client(folder: Path) -> int:
    """The first client that queries its peers."""
    return min(map(int, read_run(folder).start["queries"]))


def effect_on(folder: Path, client: int) -> ExchangeEffect:
    """The effect of round 1's exchange on a client."""
    return exchange_effect(Replay.of_round(folder, 1), client, 1, no_announcement)


@dataclass(frozen=True)
class Exchange:
    """A run with naive_kd, one of its clients that queried peers, and the effect on this client."""

    folder: Path
    client: int
    effect: ExchangeEffect


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    """The exchange of four clients; tests do not change its run."""
    folder = trained(tmp_path_factory.mktemp("exchange") / "run", "naive_kd")
    client = querying_client(folder)
    return Exchange(folder, client, effect_on(folder, client))


def assert_parts_sum(folder: Path, client: int, effect: ExchangeEffect) -> None:
    """The phases, and the teachers with the client itself, sum to the change of the run."""
    fitted = class_accuracies(folder, fitted_models(last_state(folder))[client], client)
    assert torch.equal(effect.before, fitted)
    change = change_of(folder, client)
    assert torch.allclose(sum_of(effect.parts.values()), change, atol=1e-12)
    by_teacher = sum_of([effect.alone, *effect.teachers.values()])
    assert torch.allclose(by_teacher, change, atol=1e-12)
    assert effect.rule == "exact"
    assert client not in effect.teachers


def test_phases_and_teachers_sum_to_the_change_of_the_run(exchange: Exchange) -> None:
    assert_parts_sum(exchange.folder, exchange.client, exchange.effect)


@pytest.mark.parametrize("method", ["qkt", "qkt_light", {"name": "qkt", "teachers": "all"}])
def test_so_do_the_teachers_that_the_client_selected(method: Any, tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", method)
    client = querying_client(folder)

    effect = effect_on(folder, client)

    assert_parts_sum(folder, client, effect)
    transfers = [event for event in read_run(folder).clients if event["name"] == "transfer"]
    recorded = [event["teachers"] for event in transfers if event["client"] == client]
    assert sorted(effect.teachers) == sorted(map(int, recorded[0]))


def test_a_single_teacher_contributes_all_that_the_client_did_not_learn_alone(
    tmp_path: Path,
) -> None:
    folder = trained(tmp_path / "run", "naive_kd", topology={"clients": 2})
    client = querying_client(folder)

    effect = effect_on(folder, client)

    (contribution,) = effect.teachers.values()
    student = student_models(last_state(folder))[client]
    change = class_accuracies(folder, student, client) - effect.before
    assert torch.allclose(contribution, change - effect.alone, atol=1e-12)


def test_with_many_teachers_contributions_are_estimated_and_the_gap_is_recorded(
    tmp_path: Path,
) -> None:
    """The estimate adds each teacher to no teacher and to all others: the two ends."""
    folder = trained(tmp_path / "run", "naive_kd", topology={"clients": 6})
    client = querying_client(folder)
    counts: list[int] = []

    replay = Replay.of_round(folder, 1)
    effect = exchange_effect(replay, client, 1, no_announcement, counts.append)

    assert effect.rule == "two ends"
    assert counts == [12]
    by_teacher = sum_of([effect.alone, *effect.teachers.values()])
    gap = (by_teacher - sum_of(effect.parts.values())).abs()
    assert torch.allclose(gap, effect.gap, atol=1e-12)


def test_a_run_without_an_exchange_or_a_teacher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "alone", "local_only")
    with pytest.raises(ConfigError, match="exchange"):
        effect_on(folder, 0)

    folder = trained(tmp_path / "untaught", {"name": "qkt", "threshold": 1.0})
    with pytest.raises(ConfigError, match="round 1"):
        effect_on(folder, querying_client(folder))

    assert call(["why", str(folder), "--client", "9"]) == 2
    assert "clients 0 to 3" in capsys.readouterr().err


def test_the_command_prints_a_sentence_and_a_table(
    exchange: Exchange, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(exchange.folder)
    client = exchange.client

    assert call(["why", str(exchange.folder), "--client", str(client)]) == 0

    printed = capsys.readouterr()
    assert printed.out.startswith(exchange_sentence(run, exchange.effect))
    assert f"client {client}'s exchange 8 times" in printed.err

    *rows, last = teacher_table(run, exchange.effect).lines
    assert rows[-1][0] == ALONE_ROW
    assert last[0] == "together"
    total = sum(float(row[1]) for row in rows)
    assert abs(total - float(last[1])) < 0.25
    assert settings_of(exchange.folder).clients == 4


def test_without_a_query_the_effect_is_on_the_clients_own_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "run", "naive_kd", topology={"clients": 3}, query={})
    effect = effect_on(folder, 0)
    assert not effect.query
    weights = effect.examples.double() / effect.examples.sum()
    initial = effect.before.nan_to_num()
    final = (effect.before + sum_of(effect.parts.values())).nan_to_num()
    initial_percent = 100 * float(weights @ initial)
    final_percent = 100 * float(weights @ final)

    assert call(["why", str(folder), "--client", "0", "-q"]) == 0

    words = capsys.readouterr().out.split()
    assert f"from {initial_percent:.1f} % to {final_percent:.1f} %" in " ".join(words)
    table = teacher_table(read_run(folder), effect)
    assert not [title for title in table.head if "quer" in title]
    assert {len(line) for line in table.lines} == {len(table.head)}


def test_a_sentence_does_not_change_a_clients_name(exchange: Exchange) -> None:
    run = read_run(exchange.folder)
    client = exchange.client
    assert exchange_sentence(run, exchange.effect).startswith(f"Client {client} ")

    names = ["uMC-West", "KBC Zagreb", "Split", "Pula"]
    run_with_names = replace(run, start={**run.start, "client_names": names})
    sentence = exchange_sentence(run_with_names, exchange.effect)
    assert sentence.startswith(f"{names[client]} ({client}) ")


@pytest.mark.parametrize("arguments", [["--client", "0"], []])
def test_a_run_without_a_finished_round_is_to_be_resumed(
    arguments: list[str], exchange: Exchange, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(exchange.folder, folder)
    journal = folder / "journal.jsonl"
    start = journal.read_text().splitlines(keepends=True)[0]
    journal.write_text(start)
    (folder / "summary.json").unlink()

    assert call(["why", str(folder), *arguments]) == 2
    assert "fedstill resume" in capsys.readouterr().err
