"""A journal has one schema: every reader names file and line of an event that violates it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import changed_journals
import fedstill
from fedstill.core.errors import CorruptFile
from fedstill.measures import list_forms
from fedstill.measures.features import STEPS
from fedstill.metrics.membership import GRID
from fedstill.report.page import write_page
from fedstill.running.journal import read_journal
from fedstill.running.journal_schema import JournalChecker

CHANGES = 3
"""How many changes of each journal are tried here; by hand, thousands."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = changed_journals.make_runs(tmp_path_factory.mktemp("runs"))
    return {folder.name: folder for folder in folders}


@pytest.mark.parametrize("number", range(CHANGES))
@pytest.mark.parametrize("name", changed_journals.RUNS)
def test_every_reader_of_a_changed_journal_works_or_names_the_file(
    name: str, number: int, runs: dict[str, Path]
) -> None:
    draw = random.Random(f"{name} {number}")
    assert list(changed_journals.tried(runs[name], draw, list(changed_journals.READERS))) == []


def events_of(journal: Path) -> list[dict[str, Any]]:
    """The events of a journal, without any check."""
    return [json.loads(line) for line in journal.read_text().splitlines()]


def write(journal: Path, events: list[dict[str, Any]]) -> None:
    """Replace the events of a journal."""
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))


def index_of(kind: str, events: list[dict[str, Any]]) -> int:
    """The index of the first event of a kind."""
    return [event["event"] for event in events].index(kind)


@pytest.fixture
def journal(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the journal of a run with measures."""
    return Path(shutil.copy(runs["measured"] / "journal.jsonl", tmp_path))


WRONG: dict[str, dict[str, Any]] = {
    "start": {
        "classes": "ten",
        "split": {"file": 3},
        "sources": ["a"],
        "inputs": None,
        "stream": {"classes": [[0], [1]], "first_rounds": [1]},
    },
    "initial": {"accuracy": "0.5", "class_accuracy": [0.5]},
    "round": {
        "round": "1",
        "accuracy": 1.5,
        "class_accuracy": None,
        "bytes_up": -1,
        "bytes_as_weights": None,
        "seconds": True,
        "own_test_by_client": {"first": 0.5},
        "others": {"client 0": 0.5},
        "answers": [{"gain": 1.0}],
        "privacy": {"epsilon": 1.0},
        "by_epoch": {"train": [1.0]},
    },
    "client": {"client": -2, "stage": None, "name": 3, "probe": [2.0, 0.0]},
    "measure": {"measure": 3, "round": 1.5, "client": [1, 2]},
}
"""Fields of events with values that no version wrote."""


def wrong_fields() -> Iterator[tuple[str, str]]:
    """Each kind of event with each of its fields in ``WRONG``."""
    for kind, fields in WRONG.items():
        for field in fields:
            yield kind, field


@pytest.mark.parametrize(("kind", "field"), list(wrong_fields()))
def test_a_malformed_field_is_named_with_its_line(kind: str, field: str, journal: Path) -> None:
    events = events_of(journal)
    number = index_of(kind, events)
    events[number][field] = WRONG[kind][field]
    write(journal, events)

    with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number + 1}: .*{field}"):
        read_journal(journal)


def test_a_field_that_readers_need_must_be_there(journal: Path) -> None:
    events = events_of(journal)
    number = index_of("round", events)
    del events[number]["accuracy"]
    write(journal, events)
    with pytest.raises(CorruptFile, match=rf"line {number + 1}: .*accuracy"):
        read_journal(journal)


@pytest.mark.parametrize("order", ["start twice", "no start", "rounds swapped"])
def test_events_must_be_in_their_order(order: str, journal: Path) -> None:
    events = events_of(journal)
    rounds = [i for i, event in enumerate(events) if event["event"] == "round"]
    if order == "start twice":
        events.insert(3, events[0])
    elif order == "no start":
        del events[0]
    else:
        first, second = rounds[:2]
        events[first], events[second] = events[second], events[first]
    write(journal, events)

    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line \d+"):
        read_journal(journal)


def test_unknown_fields_and_events_are_read_unchanged(journal: Path) -> None:
    events = events_of(journal)
    for event in events:
        if event["event"] != "client":
            event["of_a_package"] = {"deep": [1, None, "text", {"er": True}]}
    events.insert(2, {"event": "of a package", "anything": [1, "two"]})
    write(journal, events)

    assert read_journal(journal) == events


@pytest.mark.parametrize("field", ["before", "after"])
@pytest.mark.parametrize("value", [[0.5], [[0.5]] * 5, "0.5", None])
def test_a_look_at_contributions_has_an_accuracy_for_each_class(
    field: str, value: Any, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["contributions"], folder)
    events = events_of(folder / "journal.jsonl")
    number = index_of("measure", events)
    events[number][field] = value
    write(folder / "journal.jsonl", events)

    with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number + 1}: .*{field}"):
        write_page([folder], tmp_path / "report.html")


def test_a_line_that_is_not_json_is_named(journal: Path) -> None:
    journal.write_text(journal.read_text() + '{"event":"round","accuracy":NaN}\n')
    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line \d+, is not JSON"):
        read_journal(journal)


def test_a_look_that_was_added_later_has_the_schema_of_a_measure(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["contributions"], folder)
    (folder / "why.jsonl").write_text('{"event":"measure","measure":"contributions","round":1}\n')
    with pytest.raises(CorruptFile, match=r"why\.jsonl, line 1: .*stage"):
        fedstill.load_runs(folder)


def test_forms_of_lists_have_the_sizes_that_measures_record() -> None:
    assert list_forms("boundaries")["plane"].axes == (STEPS, STEPS)
    assert list_forms("leakage")["*/*/roc"].axes == (len(GRID),)


def test_a_task_in_which_no_site_reported_a_test_can_be_read() -> None:
    untested = [None, None]
    stream = {"classes": [[0], [1]], "first_rounds": [1, 2]}
    start = {"event": "start", "classes": ["a", "b"], "stream": stream}
    initial = {"event": "initial", "accuracy": None, "class_accuracy": untested}
    task = {"event": "task", "task": 1, "round": 1, "row": untested, "clients": {}}
    checker = JournalChecker()

    assert [checker.problem(event) for event in (start, initial, task)] == ["", "", ""]
    assert "does not follow" in checker.problem(task), "it repeats a task"
