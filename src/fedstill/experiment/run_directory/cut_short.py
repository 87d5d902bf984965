"""Whether the journal of a finished run is still all that its summary was made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedstill.errors import CorruptFile
from fedstill.experiment.run_directory.journal import Event


def refuse_cut(folder: Path, events: Sequence[Event]) -> None:
    """Raise CorruptFile for the journal of a finished run that lacks its end; nothing of one that
    is not finished.

    events: what it has; an unfinished run may end in half a line, and a finished one in its last
    round or task.
    """
    path, journal = folder / "summary.json", folder / "journal.jsonl"
    if not path.is_file():
        return
    try:
        summary = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is damaged: {error}; delete it, then `fedstill resume` the run"
        ) from error
    rounds = [event for event in events if event["event"] == "round"]
    accuracy = rounds[-1].get("accuracy") if rounds else None
    last, end = (
        events[-1]["event"] if events else "nothing",
        "task" if "final_accuracy" in summary else "round",
    )
    why = ""
    if len(rounds) != summary.get("rounds", len(rounds)):
        why = f"it has {len(rounds)} rounds, and summary.json {summary['rounds']}"
    elif accuracy != summary.get("accuracy", accuracy):
        why = f"its last round has accuracy {accuracy}, and summary.json {summary['accuracy']}"
    elif rounds and last != end:
        why = f"it ends in the event {last!r}, and not in {end!r}"
    elif not journal.read_bytes().endswith(b"\n"):
        why = "it ends in half a line"
    if why:
        raise CorruptFile(f"{journal} is not what was written: {why}; restore the file")
