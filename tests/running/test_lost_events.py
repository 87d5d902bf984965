"""The journal of a finished run that lost a line: the line is named, and nothing is shown of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import toys
from fedstill.cli import call
from fedstill.core.errors import CorruptFile
from fedstill.running.runner import resume, run
from fedstill.running.runs import read_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(toys.toy(rounds=4, measure=["alignment"], measure_every=1), folder, toys.blobs())
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def lose(folder: Path, name: str, round_index: int, count: int = 1) -> None:
    """Delete the first events of a name and round from a journal."""
    path = folder / "journal.jsonl"
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        event = json.loads(line)
        if event["event"] == name and event.get("round", 0) == round_index and count:
            count -= 1
        else:
            kept.append(line)
    assert not count
    path.write_text("".join(kept), encoding="utf-8")


@pytest.mark.parametrize("has_checkpoints", [True, False])
@pytest.mark.parametrize(
    ("name", "round_index", "named"),
    [("round", 2, "round 2"), ("client", 3, "round 3"), ("round", 1, "round 1")],
)
def test_a_lost_event_is_named(
    name: str, round_index: int, named: str, has_checkpoints: bool, copied: Path
) -> None:
    if not has_checkpoints:  # as in a pack
        shutil.rmtree(copied / "checkpoints")
    lose(copied, name, round_index)
    for read in (read_run, resume):
        with pytest.raises(CorruptFile, match=rf"journal\.jsonl.*{named}\b"):
            read(copied)


@pytest.mark.parametrize("field", ["refused", "replies"])
def test_a_count_of_replies_that_is_missing_is_named_with_its_line(
    field: str, copied: Path
) -> None:
    path = copied / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    number = next(n for n, event in enumerate(events) if event["event"] == "round")
    events[number][field] = None
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    for read in (read_run, resume):
        with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number + 1}, .*{field}"):
            read(copied)


@pytest.mark.parametrize("name", ["measure", "initial"])
def test_an_event_that_no_count_covers_is_known_by_the_checkpoint(name: str, copied: Path) -> None:
    lose(copied, name, 2 if name == "measure" else 0)
    for read in (read_run, resume):
        with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
            read(copied)


def test_the_commands_say_what_to_do(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lose(copied, "round", 2)
    for command in ("resume", "report"):
        assert call([command, str(copied)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "round 2" in error
        assert "--overwrite" in error


def test_a_whole_journal_is_read(finished: Path) -> None:
    assert len(read_run(finished).rounds) == 4
    assert resume(finished).summary["rounds"] == 4


@pytest.mark.parametrize("cut", [1, 30])
def test_an_unfinished_run_whose_journal_was_cut_at_its_end_goes_on(cut: int, copied: Path) -> None:
    """As a kill leaves it: events that no checkpoint knows may be lost, even in the middle of a
    line.
    """
    path = copied / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    (copied / "summary.json").unlink()
    assert resume(copied, toys.blobs()).summary["rounds"] == 4
