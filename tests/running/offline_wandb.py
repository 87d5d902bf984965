"""Reads the files that Weights & Biases writes for a later ``wandb sync``."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32768
HEADER_BYTES = 7
"""Bytes before each fragment of a record: checksum, length and kind."""
FILE_HEADER_BYTES = 7
"""Bytes of W&B's own at the beginning of a file."""

FULL = 1
FIRST = 2
LAST = 4
"""Kinds of fragments: a complete record, the first and the last part of one."""

PATIENCE_SECONDS = 60


def records(path: Path) -> list[bytes]:
    """The complete records of a log in LevelDB's format."""
    log = path.read_bytes()
    position = FILE_HEADER_BYTES
    record = b""
    complete_records = []
    while position + HEADER_BYTES <= len(log):
        block_remainder = BLOCK_BYTES - position % BLOCK_BYTES
        if block_remainder < HEADER_BYTES:
            position += block_remainder
            continue

        _, length, kind = struct.unpack("<IHB", log[position : position + HEADER_BYTES])
        position += HEADER_BYTES
        fragment = log[position : position + length]
        if len(fragment) < length:
            break  # W&B has not written all of it yet

        if kind in (FULL, FIRST):
            record = b""
        record += fragment
        position += length
        if kind in (FULL, LAST):
            complete_records.append(record)
    return complete_records


def offline_runs(folder: Path) -> list[dict[str, Any]]:
    """The offline runs in a folder, the oldest first, as ``offline_run`` returns them.

    W&B writes the files in a process of its own, which may still write when ``finish`` has
    returned. So this function waits for the record that ends a file.
    """
    paths = list(folder.glob("wandb/offline-run-*/*.wandb"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    runs = [offline_run(path) for path in paths]
    while any(run["exit"] is None for run in runs):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"after {PATIENCE_SECONDS} s, a file in {folder / 'wandb'} has no last record"
            )
        time.sleep(0.05)
        runs = [offline_run(path) for path in paths]
    return sorted(runs, key=lambda run: run["ended"])


def offline_run(path: Path) -> dict[str, Any]:
    """The contents of one file: id, name, group, config, exit code, the history as
    {step: numbers}, the last summary, and the time at which the file was last written.
    """
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {
        "history": {},
        "summary": {},
        "exit": None,
        "ended": path.stat().st_mtime_ns,
    }
    for serialised in records(path):
        record = wandb_internal_pb2.Record.FromString(serialised)
        match record.WhichOneof("record_type"):
            case "run":
                run["id"] = record.run.run_id
                run["name"] = record.run.display_name
                run["group"] = record.run.run_group
                config = record.run.config.update
                run["config"] = {item.key: json.loads(item.value_json) for item in config}
            case "history":
                numbers = _numbers(record.history.item)
                run["history"][numbers.pop("_step")] = numbers
            case "summary":
                run["summary"] |= _numbers(record.summary.update)
            case "exit":
                run["exit"] = record.exit.exit_code
    return run


def _numbers(items: Iterable[Any]) -> dict[str, Any]:
    """The values of a record's items by name; a nested name is joined by slashes."""
    numbers = {}
    for item in items:
        name = "/".join(item.nested_key) or item.key
        numbers[name] = json.loads(item.value_json)
    return numbers
