"""Journals of runs: their events, edited copies of them, and runs that were killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedstill.running.runs import Run

Event = dict[str, Any]


def events(folder: Path) -> list[Event]:
    """The events in a run's journal."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def round_events(folder: Path) -> list[Event]:
    """The events of a run's rounds."""
    return [event for event in events(folder) if event["event"] == "round"]


def measure_events(folder: Path, measure: str) -> list[Event]:
    """The events in which a run recorded the results of a measure."""
    measured = [event for event in events(folder) if event["event"] == "measure"]
    return [event for event in measured if event["measure"] == measure]


def write_events(folder: Path, written: Iterable[Event]) -> None:
    """Replace a run's journal by one with these events."""
    lines = [json.dumps(event) + "\n" for event in written]
    (folder / "journal.jsonl").write_text("".join(lines))


def editable_copy(run: Path, folder: Path) -> Path:
    """A copy of runs whose journals may be edited.

    It has no checkpoints, because they would show that a journal was edited.
    """
    return Path(shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints")))


def run_of(written: list[Event]) -> Run:
    """A run with these events, which is in no directory."""
    first, *further = written
    kinds: dict[str, list[Event]] = {"round": [], "client": [], "task": []}
    for event in further:
        kinds[event["event"]].append(event)
    return Run(
        folder=Path(),
        settings={},
        start=first,
        initial={},
        rounds=kinds["round"],
        clients=kinds["client"],
        finished=True,
        last_written=0.0,
        task_ends=kinds["task"],
    )


def stop_after(folder: Path, rounds: int) -> None:
    """Make a run look as if it had been killed after some rounds, in the middle of a line."""
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines()
    lengths = [1]  # the first line is the start of the run
    for number, line in enumerate(lines, start=1):
        if line.startswith('{"event":"round"'):
            lengths.append(number)

    complete = lines[: lengths[rounds]]
    journal.write_text("\n".join(complete) + '\n{"event":"cli')
    (folder / "summary.json").unlink()
