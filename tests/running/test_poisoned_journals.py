"""Malformed reports of clients in a journal, which no version of fedstill accepts or writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.core.errors import CorruptFile
from fedstill.running.journal import read_journal
from fedstill.running.numbers import RunNumbers
from fedstill.running.runner import run

C = toys.CLASSES
EXPERIMENT = toys.toy(
    rounds=2,
    engine="serial",
    topology={"clients": 3, "sampled": 3},
    plan={"epochs": 1, "batch": 10},
    measure=("local", "epochs", "private_public"),
    data={"public": toys.PUBLIC},
    measure_every=1,
)

POISON: dict[str, dict[str, Any]] = {
    "text for seconds": {"seconds_measuring": "long"},
    "text for counts": {"correct_by_class": "many"},
    "too few counts": {"correct_by_class": [1, 2]},
    "too few label counts": {"label_counts": [1]},
    "endless counts": {"label_counts": [10**400] * C},
    "epochs of another length": {"correct_by_epoch": [[1] * C, [1]]},
    "private text": {"private": "mine"},
    "private of another length": {"private": {"counts": [1], "after": [2]}},
    "text for a loss": {"loss": "low"},
    "rows": {"noised_rows": "all"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(EXPERIMENT, folder, toys.blobs())
    return folder


@pytest.mark.parametrize("name", POISON)
def test_a_malformed_report_is_named_with_its_line(
    name: str, finished: Path, tmp_path: Path
) -> None:
    lines = (finished / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    is_of_client_1 = [event["event"] == "client" and event["client"] == 1 for event in events]
    number = is_of_client_1.index(True)
    events[number].update(POISON[name])
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))

    (field,) = POISON[name]
    with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number + 1}: .*{field}"):
        read_journal(path)


def test_a_number_that_is_too_long_is_read_as_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    long = "9" * 400
    place = '"round":1,"stage":0,"name":"train"'
    path.write_text(
        '{"event":"start","classes":["a"]}\n'
        f'{{"event":"client",{place},"client":1,"mine":{long}}}\n'
        '{"event":"round","round":1,"accuracy":0.5,"class_accuracy":[0.5],"bytes_up":1,'
        f'"bytes_down":1,"seconds_clients":{long}}}\n'
    )
    _, client, round = read_journal(path)

    assert client["mine"] is None
    assert round["seconds_clients"] is None


def test_an_honest_journal_is_read_as_it_is(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "journal.jsonl").read_text().splitlines()]
    assert read_journal(finished / "journal.jsonl") == lines


def test_a_line_that_is_no_event_is_named_with_its_number(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text((finished / "journal.jsonl").read_text() + "[1, 2]\n")
    number = len(path.read_text().splitlines())
    with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number}: is not an event"):
        read_journal(path)


def test_a_huge_round_of_a_client_takes_no_memory(finished: Path) -> None:
    """An array up to this round would have 16 GB."""
    events = read_journal(finished / "journal.jsonl")
    last_client = [event for event in events if "loss" in event][-1]
    huge_round = 2**31 - 1
    numbers = RunNumbers.of([*events, {**last_client, "round": huge_round}])
    term = next(iter(last_client["loss"]))
    assert list(numbers.by_round(f"loss/{term}")) == [1, 2, huge_round]
