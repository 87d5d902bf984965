"""What was measured after a run had ended: looks at its rounds, kept beside the journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import CorruptFile
from fedstill.core.files import write_whole
from fedstill.running import journal as journals

LATER_LOOKS = "why.jsonl"
"""What `fedstill why` found out later, beside the journal: one event of the measure
``contributions`` a line.
"""

Look = dict[str, Any]
"""An event of the measure ``contributions``: one stage of one round."""


def looks_of(folder: Path, measures: Sequence[Look] = ()) -> list[Look]:
    """All looks of the measure in a run: its journal's, and those that were added later, which
    count for more.
    """
    own = measures or journals.read_journal(folder / "journal.jsonl")
    known = [e for e in own if e.get("measure") == "contributions"]
    added = _added(folder)
    later = {look["round"] for look in added}
    return sorted(
        [*(e for e in known if e["round"] not in later), *added],
        key=lambda e: (e["round"], e["stage"]),
    )


def with_later_looks(folder: Path, measures: Sequence[Look]) -> list[Look]:
    """A run's events of measures, with what `fedstill why` found out later."""
    added = _added(folder)
    return (
        list(measures)
        if not added
        else [
            *(e for e in measures if e["measure"] != "contributions"),
            *looks_of(folder, measures),
        ]
    )


def add_looks(folder: Path, looks: Sequence[Look]) -> None:
    """Keep looks at rounds beside the journal, in place of earlier ones at the same rounds."""
    rounds = {look["round"] for look in looks}
    every = [*(look for look in _added(folder) if look["round"] not in rounds), *looks]
    write_whole(folder / LATER_LOOKS, "".join(f"{json.dumps(look)}\n" for look in every).encode())


def _added(folder: Path) -> list[Look]:
    path = folder / LATER_LOOKS
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged; delete it, and ask again") from error
