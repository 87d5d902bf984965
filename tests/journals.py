"""Selected events of a run's journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstill.running.journal import read_journal


def journal_events(folder: Path, **values: Any) -> list[dict[str, Any]]:
    """The events of a run in a folder that have these values, in the order of the journal."""
    journal = read_journal(folder / "journal.jsonl")
    return [event for event in journal if event.items() >= values.items()]


def refusals(folder: Path) -> list[dict[str, Any]]:
    """The events of clients that were refused."""
    return [event for event in journal_events(folder, event="client") if "refused" in event]
