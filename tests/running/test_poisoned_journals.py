"""Journals that clients poisoned before reports were checked: they are read without the poison, and
runs go on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.core import screen
from fedstill.core.errors import CorruptFile, Interrupted
from fedstill.core.records import Reply
from fedstill.engines.serial import SerialEngine
from fedstill.report.page import write_page
from fedstill.running import journal
from fedstill.running.journal import read_journal
from fedstill.running.runner import resume, run
from run_bits import StopAfter

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
    "endless seconds": {"seconds_training": 10**400},
    "endless seconds of a measure": {"seconds_local": 10**400},
    "text for seconds": {"seconds_measuring": "long"},
    "no seconds": {"seconds_training": None},
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


@pytest.fixture(autouse=True)
def _said_again() -> None:
    """A line is said once for each file; another test may have had a file of this name."""
    journal._warn.cache_clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(EXPERIMENT, folder, toys.blobs())
    return folder


def poisoned(folder: Path, poison: dict[str, Any]) -> int:
    """A run stopped in round 1, in which a version without checks took client 1's report; the line
    of its event.
    """
    honest = SerialEngine._reply

    def reply(self: SerialEngine, *given: Any) -> Reply:
        made = honest(self, *given)
        return replace(made, metrics={**made.metrics, **poison}) if made.client == 1 else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SerialEngine, "_reply", reply)
        patch.setattr(screen, "wrong_report", lambda _: "")
        patch.setattr("fedstill.privacy.budget.Budget.client_fields", lambda *_: {})
        patch.setattr("fedstill.privacy.budget.Budget.on_event", lambda *_: None)
        with pytest.raises(Interrupted):
            run(EXPERIMENT, folder, toys.blobs(), watch=StopAfter(1))
    lines = (folder / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (number,) = (i for i, e in enumerate(events, 1) if e["event"] == "client" and e["client"] == 1)
    assert all(events[number - 1][k] == v for k, v in poison.items()), "it is in the file"
    return number


@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_run_goes_on_to_the_same_bits_and_is_reported(
    name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    line = poisoned(folder, POISON[name])
    before = (folder / "journal.jsonl").read_bytes()
    resume(folder, toys.blobs())
    assert (folder / "journal.jsonl").read_bytes().startswith(before), "what was written stays"
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    write_page([folder], tmp_path / "page.html")
    (key,) = POISON[name]
    said = [r.getMessage() for r in caplog.records if "malformed" in r.getMessage()]
    assert said
    assert all(
        f"journal.jsonl, line {line}: what client 1 reported as " in s and repr(key) in s
        for s in said
    )
    (event,) = (
        e for e in read_journal(folder / "journal.jsonl")[: line + 1] if e.get("client") == 1
    )
    assert key not in event
    assert {"client", "examples", "bytes_up", "steps"} <= event.keys()


def test_a_number_that_nobody_can_compute_with_is_read_as_null(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    long = "9" * 400
    where = '"round":1,"stage":0,"name":"train"'
    path.write_text(
        '{"event":"start","classes":["a"]}\n'
        f'{{"event":"client",{where},"client":1,"mine":{long}}}\n'
        '{"event":"round","round":1,"accuracy":0.5,"class_accuracy":[0.5],"bytes_up":1,'
        f'"bytes_down":1,"seconds_clients":{long}}}\n'
    )
    _, client, round = read_journal(path)
    assert client["mine"] is None
    assert round["seconds_clients"] is None


def test_an_honest_journal_is_read_as_it_is(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.loads(line) for line in (whole / "journal.jsonl").read_text().splitlines()]
    assert read_journal(whole / "journal.jsonl") == lines
    assert "malformed" not in caplog.text


def test_a_line_that_is_no_event_is_named_with_its_number(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text((whole / "journal.jsonl").read_text() + "[1, 2]\n")
    number = len(path.read_text().splitlines())
    with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number}: is not an event"):
        read_journal(path)
