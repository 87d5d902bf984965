"""What a client learned from its peers: phases and teachers add up to what the run did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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


def quiet(round: int, last: int) -> None:
    pass


def made(folder: Path, method: Any, clients: int = 4) -> Path:
    asked = toys.toy(
        method,
        rounds=1,
        topology={"clients": clients},
        query={"draw": "single", "fewer_than": 5},
        data="digits",
    )
    fedstill.run(asked.with_values({"data.train_size": 200, "data.test_size": 100}, "test"), folder)
    return folder


def last_state(folder: Path) -> State:
    config = digest((folder / "config.toml").read_bytes())
    restored = Checkpoints(folder / "checkpoints", config, folder / "memory").before(99)
    assert restored is not None
    return restored.state


def known(folder: Path, params: Tensors, client: int) -> Tensor:
    kept = Replay.of_round(folder, 1)
    sites, world = kept.prepared.sites, kept.prepared.world
    assert sites.common_test is not None
    right = correct_by_class(
        predictor(world.model(client), params), sites.common_test, sites.inputs, world.classes
    )
    return right.double() / torch.bincount(sites.common_test.labels, minlength=world.classes)


def asker(folder: Path) -> int:
    return min(map(int, read_run(folder).start["queries"]))


def taught(folder: Path, client: int) -> ExchangeEffect:
    return exchange_effect(Replay.of_round(folder, 1), client, 1, quiet)


@pytest.mark.parametrize(
    "method", ["naive_kd", "qkt", "qkt_light", {"name": "qkt", "teachers": "all"}]
)
def test_phases_and_teachers_sum_to_what_the_run_did(method: Any, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", method)
    client, state = asker(folder), last_state(folder)
    lesson = taught(folder, client)
    before, after = (
        known(folder, models[client], client)
        for models in (fitted_models(state), student_models(state))
    )
    assert torch.equal(lesson.before, before)
    assert torch.allclose(sum(lesson.parts.values()), after - before, atol=1e-12)  # type: ignore[arg-type]
    together = torch.stack([lesson.alone, *lesson.teachers.values()]).sum(0)
    assert torch.allclose(together, after - before, atol=1e-12)
    assert lesson.rule == "exact"
    assert client not in lesson.teachers
    journaled = [
        e["teachers"]
        for e in read_run(folder).clients
        if e["name"] == "transfer" and e["client"] == client
    ]
    if method != "naive_kd":
        assert sorted(lesson.teachers) == sorted(map(int, journaled[0]))


def test_with_one_teacher_it_is_what_the_exchange_adds(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "naive_kd", clients=2)
    client = asker(folder)
    lesson = taught(folder, client)
    (only,) = lesson.teachers.values()
    change = known(folder, student_models(last_state(folder))[client], client) - lesson.before
    assert torch.allclose(only, change - lesson.alone, atol=1e-12)


def test_many_teachers_are_asked_at_two_ends(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "naive_kd", clients=6)
    told: list[int] = []
    lesson = exchange_effect(Replay.of_round(folder, 1), asker(folder), 1, quiet, told.append)
    assert (lesson.rule, told) == ("two ends", [12])
    change = torch.stack(list(lesson.parts.values())).sum(0)
    miss = (torch.stack([lesson.alone, *lesson.teachers.values()]).sum(0) - change).abs()
    assert torch.allclose(miss, lesson.gap, atol=1e-12)


def test_without_an_exchange_or_a_teacher_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "alone", "local_only")
    with pytest.raises(ConfigError, match="exchange"):
        taught(folder, 0)
    folder = made(tmp_path / "vain", {"name": "qkt", "threshold": 1.0})
    with pytest.raises(ConfigError, match="round 1"):
        taught(folder, asker(folder))
    assert call(["why", str(folder), "--client", "9"]) == 2
    assert "clients 0 to 3" in capsys.readouterr().err


def test_the_command_says_it_in_a_sentence_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "run", "naive_kd")
    client = asker(folder)
    assert call(["why", str(folder), "--client", str(client)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(exchange_sentence(read_run(folder), taught(folder, client)))
    assert f"client {client}'s exchange 8 times" in err
    rows = teacher_table(read_run(folder), taught(folder, client)).lines
    assert [row[0] for row in rows][-2:] == [ALONE_ROW, "together"]
    assert abs(sum(float(row[1]) for row in rows[:-1]) - float(rows[-1][1])) < 0.25
    assert settings_of(folder).clients == 4


def test_without_a_query_the_effect_is_on_the_clients_own_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    fedstill.run(
        toys.toy("naive_kd", rounds=1, data="digits", topology={"clients": 3}).with_values(
            {"data.train_size": 200, "data.test_size": 100}, "test"
        ),
        folder,
    )
    effect = taught(folder, 0)
    assert not effect.query
    weights = effect.examples.double() / effect.examples.sum()
    before, after = (
        100 * float((weights * accuracies.nan_to_num()).sum())
        for accuracies in (effect.before, effect.before + sum(effect.parts.values()))
    )
    assert call(["why", str(folder), "--client", "0", "-q"]) == 0
    out = capsys.readouterr().out
    assert f"from {before:.1f} % to {after:.1f} %" in " ".join(out.split())
    table = teacher_table(read_run(folder), effect)
    assert not [title for title in table.head if "quer" in title]
    assert {len(line) for line in table.lines} == {len(table.head)}


def test_a_sentence_does_not_change_a_clients_name(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "naive_kd")
    client = asker(folder)
    effect = taught(folder, client)
    run = read_run(folder)
    assert exchange_sentence(run, effect).startswith(f"Client {client} ")
    names = ["uMC-West", "KBC Zagreb", "Split", "Pula"]
    named = replace(run, start={**run.start, "client_names": names})
    assert exchange_sentence(named, effect).startswith(f"{names[client]} ({client}) ")


def test_a_run_without_a_finished_round_is_to_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "run", "naive_kd")
    journal = folder / "journal.jsonl"
    start = journal.read_text().splitlines(keepends=True)[0]
    journal.write_text(start)
    (folder / "summary.json").unlink()
    for words in (["--client", "0"], []):
        assert call(["why", str(folder), *words]) == 2
        assert "fedstill resume" in capsys.readouterr().err
