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

from fedstill.benchmark.entries import Entry, find_entries, passed_checks, read_entry
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest
from fedstill.running.result import summary_from_journal

SHIPPING = Path(__file__).parents[1] / "results" / "rank"

Events = list[dict[str, Any]]


def refusals(folder: Path) -> list[str]:
    """What is wrong with an entry: the first problem, or nothing."""
    try:
        list(passed_checks(read_entry(folder)))
    except (ConfigError, CorruptFile) as error:
        return [str(error)]
    return []


def told(entry: Entry, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what entry.toml says."""
    path = entry.folder / "entry.toml"
    tree = tomllib.loads(path.read_text())
    change(tree)
    path.write_text(tomli_w.dumps(tree))


def made_on(entry: Entry, processor: str) -> None:
    """Say that an entry was made on a processor."""
    told(entry, lambda tree: tree["made"].update(processor=processor))


def with_digests(entry: Entry) -> None:
    """Make the digests those of the files that are there."""
    files = [p for p in sorted(entry.folder.rglob("*")) if p.is_file() and p.name != "entry.toml"]
    digests = {p.relative_to(entry.folder).as_posix(): digest(p.read_bytes()) for p in files}
    told(entry, lambda tree: tree.__setitem__("digests", digests))


def shipped_copy(suite: str, row: str, folder: Path) -> Entry:
    """A copy of an entry that ships."""
    places = find_entries(SHIPPING / f"{suite}.runs.tar.xz")
    return read_entry(
        Path(shutil.copytree(next(p for p in places if read_entry(p).row == row), folder))
    )


def forged(entry: Entry, change: Callable[[Events], Events | None]) -> None:
    """Change the events of all runs; summaries and digests follow."""
    for path in entry.folder.rglob("journal.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        events = change(events) or events
        path.write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in events))
        if (summary := path.with_name("summary.json")).is_file():
            summary.write_text(
                json.dumps(json.loads(summary.read_text()) | summary_from_journal(events), indent=1)
            )
    with_digests(entry)


def rounds(events: Events) -> Events:
    """The events of rounds."""
    return [e for e in events if e["event"] == "round"]


def with_accuracy(events: Events, share: float, first: int = 1) -> None:
    """Invent accuracies that rise to a share from a round on; classes, forgetting and consistency
    agree with them.
    """
    counts = events[0]["test_counts"]
    for event in rounds(events)[first - 1 :]:
        correct = [round(share * count) for count in counts]
        event["class_accuracy"] = [
            right / count for right, count in zip(correct, counts, strict=True)
        ]
        event |= {"accuracy": sum(correct) / sum(counts), "forgetting": 0.0, "consistency": 0.99}


def with_losses(events: Events, factor: float) -> None:
    """Invent the losses of all clients: a share of what they were."""
    for event in events:
        if "loss" in event:
            event["loss"] = {term: factor * value for term, value in event["loss"].items()}


def invented(events: Events) -> None:
    """Losses and accuracies of nobody's run: 91.2 %."""
    with_losses(events, 0.5)
    with_accuracy(events, 0.912)


def with_outlier(events: Events) -> None:
    """One client's loss in round 1 is far away, as an unstable client's may be."""
    client = next(e for e in events if e["event"] == "client" and e["round"] == 1)
    term = next(iter(client["loss"]))
    client["loss"][term] += 0.5


def invented_with_outlier(events: Events) -> None:
    """All rounds are invented, and one loss of round 1 is far away."""
    with_accuracy(events, 0.912)
    with_outlier(events)


def with_spread(events: Events) -> None:
    """Accuracies from 81.2 to 100 %, by the first client of a run: the seeds' spread is forged
    too.
    """
    first = next(e["client"] for e in events if e["event"] == "client")
    with_accuracy(events, min(1.0, 0.812 + 0.06 * first))
    with_outlier(events)
