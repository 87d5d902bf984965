"""Journals of runs: their events, and what a run looks like that was killed on its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedstill.running.runs import Run


def events(folder: Path) -> list[dict[str, Any]]:
    """The events in a run's journal."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def run_of(written: list[dict[str, Any]]) -> Run:
    """A run with these events, which is in no directory."""
    first, *rest = written
    kinds: dict[str, list[dict[str, Any]]] = {"round": [], "client": [], "task": []}
    for event in rest:
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
    lines = (folder / "journal.jsonl").read_text().splitlines()
    ends = [i for i, line in enumerate(lines) if line.startswith('{"event":"round"')]
    keep = ends[rounds - 1] + 1 if rounds else 1
    (folder / "journal.jsonl").write_text("\n".join(lines[:keep]) + '\n{"event":"cli')
    (folder / "summary.json").unlink()
