"""The journal of a finished run that lost a line is refused, and the error names what is lost."""

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
    remaining_lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        event = json.loads(line)
        if event["event"] == name and event.get("round", 0) == round_index and count:
            count -= 1
        else:
            remaining_lines.append(line)
    assert not count
    path.write_text("".join(remaining_lines), encoding="utf-8")


@pytest.mark.parametrize("has_checkpoints", [True, False])
@pytest.mark.parametrize(
    ("name", "round_index", "lost_round"),
    [("round", 2, "round 2"), ("client", 3, "round 3"), ("round", 1, "round 1")],
)
def test_a_lost_event_is_named(
    name: str, round_index: int, lost_round: str, has_checkpoints: bool, copied: Path
) -> None:
    if not has_checkpoints:  # as in a pack
        shutil.rmtree(copied / "checkpoints")
    lose(copied, name, round_index)
    for read in (read_run, resume):
        with pytest.raises(CorruptFile, match=rf"journal\.jsonl.*{lost_round}\b"):
            read(copied)


@pytest.mark.parametrize("field", ["refused", "replies"])
def test_a_count_of_replies_that_is_missing_is_named_with_its_line(
    field: str, copied: Path
) -> None:
    path = copied / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    number = [event["event"] for event in events].index("round")
    events[number][field] = None
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")

    for read in (read_run, resume):
        with pytest.raises(CorruptFile, match=rf"journal\.jsonl, line {number + 1}, .*{field}"):
            read(copied)


@pytest.mark.parametrize(("name", "round_index"), [("measure", 2), ("initial", 0)])
def test_the_checkpoint_reveals_the_loss_of_an_event_that_is_not_counted(
    name: str, round_index: int, copied: Path
) -> None:
    lose(copied, name, round_index)
    for read in (read_run, resume):
        with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
            read(copied)


def test_the_commands_advise_to_overwrite_the_run(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(copied, "round", 2)
    for command in ("resume", "report"):
        assert call([command, str(copied)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "round 2" in error
        assert "--overwrite" in error


def test_a_complete_journal_is_read(finished: Path) -> None:
    assert len(read_run(finished).rounds) == 4
    assert resume(finished).summary["rounds"] == 4


@pytest.mark.parametrize("cut", [1, 30])
def test_an_unfinished_run_whose_journal_was_cut_at_its_end_is_resumed(
    cut: int, copied: Path
) -> None:
    """A kill may cut the journal in the middle of a line, after the last checkpoint."""
    path = copied / "journal.jsonl"
    journal = path.read_bytes()
    path.write_bytes(journal[:-cut])
    (copied / "summary.json").unlink()
    assert resume(copied, toys.blobs()).summary["rounds"] == 4
