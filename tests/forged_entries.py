"""Entries of the ranking, changed as a forger would change them: journals, summaries and digests
alike.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.errors import CorruptFile
from fedstill.experiment.ranking.checking import checked_entry
from fedstill.experiment.ranking.derived import following
from fedstill.experiment.ranking.entries import Entered, entries_below, read_entry
from fedstill.files import digest

SHIPPING = Path(__file__).parents[1] / "results" / "rank"

Events = list[dict[str, Any]]


def refusals(folder: Path) -> list[str]:
    """What is wrong with an entry, a line each."""
    try:
        entry = read_entry(folder)
    except CorruptFile as error:
        return [str(error)]
    return [f"{line.what}: {line.wrong}" for line in checked_entry(entry) if not line.good]


def told(entry: Entered, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what entry.toml says."""
    path = entry.folder / "entry.toml"
    tree = tomllib.loads(path.read_text())
    change(tree)
    path.write_text(tomli_w.dumps(tree))


def sealed(entry: Entered) -> None:
    """Make the digests those of the files that are there."""
    files = [p for p in sorted(entry.folder.rglob("*")) if p.is_file() and p.name != "entry.toml"]
    digests = {p.relative_to(entry.folder).as_posix(): digest(p.read_bytes()) for p in files}
    told(entry, lambda tree: tree.__setitem__("digests", digests))


def shipped_copy(suite: str, row: str, folder: Path) -> Entered:
    """A copy of an entry that ships."""
    places = entries_below(SHIPPING / f"{suite}.runs.tar.xz")
    return read_entry(
        Path(shutil.copytree(next(p for p in places if read_entry(p).row == row), folder))
    )


def forged(entry: Entered, change: Callable[[Events], Events | None]) -> None:
    """Change the events of all runs; summaries and digests follow."""
    for path in entry.folder.rglob("journal.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        events = change(events) or events
        path.write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in events))
        if (summary := path.with_name("summary.json")).is_file():
            summary.write_text(
                json.dumps(json.loads(summary.read_text()) | following(events), indent=1)
            )
    sealed(entry)


def rounds(events: Events) -> Events:
    """The events of rounds."""
    return [e for e in events if e["event"] == "round"]
