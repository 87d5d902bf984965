"""Writes the runs in ``results/`` in the form of version 0.2.0: ``python tools/migrate_results.py``.

Versions before 0.1.0 left out parts of a run's directory that later versions write. This program
adds them, so that fedstill need not read the old form:

- ``config.toml``: the fields ``method.over_teachers`` and ``method.phase1_over``, with the behaviour
  before there were such fields; and ``clients.failures = "stop"``. Earlier runs tolerated failures,
  which is the same run, since no client failed in any of them.
- ``split.safetensors``: drawn again from the data, if the first event of the journal lists label
  counts instead. The counts must be the same.
- ``inputs`` and ``test_counts`` in the first event: the shape, mean and spread of the inputs.
- ``seconds_local`` in events of clients and rounds: the time that no other measure took.
- Negative times, which a census before round 1 left behind, and malformed reports are removed.

It needs the data sets (``FEDSTILL_DATA``), prints one line for each pack that it changes, and stops
at the first run that it cannot reproduce.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.config.experiment import from_tree
from fedstill.config.resolve import settle
from fedstill.config.settings import with_old_behaviour
from fedstill.core.files import digest, write_whole
from fedstill.running.archive import SUFFIX, pack, unpack
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.recording import data_fields
from fedstill.running.split_file import StoredSplit, write_split

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TIMES = "seconds_"

Event = dict[str, Any]


class NotReproduced(Exception):
    """A run whose split is drawn differently today."""


def migrate(folder: Path) -> bool:
    """Migrate a run in its directory; whether anything has changed."""
    journal = folder / "journal.jsonl"
    old_lines = journal.read_bytes()
    events: list[Event] = read_journal(journal)
    if any(map(is_failure, events)):
        raise NotReproduced(f"{folder}: a client failed, and the run went on")
    config = migrated_config(folder)

    start = events[0]
    if "inputs" not in start or "label_counts" in start:
        complete_start(folder, config, start)
    if start.get("config_sha256"):
        start["config_sha256"] = digest(config)
    add_local_times(tomllib.loads(config.decode()), events)
    for event in events:
        if (event.get("seconds_training") or 0.0) < 0:
            del event["seconds_training"]

    lines = b"".join(map(line_of, events))
    is_changed = config != (folder / "config.toml").read_bytes() or lines != old_lines
    if is_changed:
        rewrite(folder / "config.toml", config)
        rewrite(journal, lines)
    return is_changed


def line_of(event: Event) -> bytes:
    """The line of an event in a journal."""
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def is_failure(event: Event) -> bool:
    """Whether an event tells of a client whose training raised an error."""
    return event["event"] == "client" and str(event.get("refused", "")).startswith("failed")


def migrated_config(folder: Path) -> bytes:
    """The config with keys that came later, or its own bytes if it lacks none of them."""
    text = (folder / "config.toml").read_bytes()
    tree = tomllib.loads(text.decode())
    complete = with_old_behaviour(tree)
    if complete == tree:
        return text
    if "failures" not in tree["clients"]:
        complete["clients"]["failures"] = "stop"
    return settle(from_tree(complete, {}, folder), check_device=False).toml.encode()


def complete_start(folder: Path, config: bytes, start: Event) -> None:
    """Draw the split of a run again, and add what the first event lacks."""
    settings = settle(from_tree(tomllib.loads(config.decode()), {}, folder), check_device=False)
    prepared = prepare(settings)
    today: Mapping[str, Any] = json.loads(json.dumps(data_fields(prepared, has_split=True)))
    if "label_counts" in start:
        start["split"] = drawn_split(folder, prepared, start.pop("label_counts"))
        start.pop("models", None)
    for key in ("inputs", "test_counts"):
        if key not in start and key in today:
            start[key] = today[key]
        elif key in today and start[key] != today[key] and key == "test_counts":
            raise NotReproduced(f"{folder}: {key} is {today[key]} today, was {start[key]}")


def drawn_split(
    folder: Path, prepared: Prepared, label_counts: Sequence[Sequence[int]]
) -> Mapping[str, Any]:
    """Write the split that is drawn today; its label counts must be those of the run."""
    split = StoredSplit.of_sites(prepared.sites, prepared.world.client_models)
    assert split is not None, folder
    counts = split.label_counts(prepared.world.classes).table().tolist()
    if counts != [list(row) for row in label_counts]:
        raise NotReproduced(f"{folder}: the split that is drawn today has other label counts")
    fields = write_split(folder, split)
    copy_times(folder / "config.toml", folder / "split.safetensors")
    return fields


def add_local_times(config: Mapping[str, Any], events: Sequence[Event]) -> None:
    """Add ``seconds_local`` to the events of clients, where the measure took a time of its own."""
    if "local" not in config["measure"] or any("seconds_local" in event for event in events):
        return
    names = [f"{TIMES}{name}" for name in config["measure"]]
    for event in events:
        if event["event"] == "client" and "seconds_measuring" in event:
            others = sum(event.get(name) or 0.0 for name in names)
            event["seconds_local"] = (event["seconds_measuring"] or 0.0) - others


def rewrite(path: Path, data: bytes) -> None:
    """Write a file anew, with the time at which it was changed last."""
    times = path.stat()
    write_whole(path, data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def copy_times(source: Path, target: Path) -> None:
    """Give a file the times of another, so that packs depend on their runs alone."""
    times = source.stat()
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


def packs(names: Sequence[str]) -> Iterator[Path]:
    """The packs in ``results/``, or those of some names; entries of the ranking have the new form."""
    for path in sorted(RESULTS.glob(f"*{SUFFIX}")):
        if not names or path.name.removesuffix(SUFFIX) in names:
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="the packs, without their suffix; by default all")
    logging.disable(logging.WARNING)
    for path in packs(parser.parse_args().names):
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / path.name
            shutil.copyfile(path, copy)
            folder = unpack(copy)
            copy.unlink()
            runs = sorted(config.parent for config in folder.rglob("config.toml"))
            changed = sum([migrate(run) for run in runs])
            if changed:
                path.write_bytes(pack(folder).read_bytes())
            print(f"{path.name}: {changed} of {len(runs)} runs changed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
