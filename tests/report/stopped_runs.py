"""A run that was stopped on its way."""

from __future__ import annotations

from pathlib import Path


def stop_after(folder: Path, rounds: int) -> None:
    """Make a run look as if it had been killed after some rounds, in the middle of a line."""
    lines = (folder / "journal.jsonl").read_text().splitlines()
    ends = [i for i, line in enumerate(lines) if line.startswith('{"event":"round"')]
    keep = ends[rounds - 1] + 1 if rounds else 1
    (folder / "journal.jsonl").write_text("\n".join(lines[:keep]) + '\n{"event":"cli')
    (folder / "summary.json").unlink()
