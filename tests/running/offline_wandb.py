"""Reads what Weights & Biases keeps on disk for a later ``wandb sync``."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

BLOCK, HEAD, FILE_HEAD = 32768, 7, 7
FULL, FIRST, LAST = 1, 2, 4
PATIENCE = 60


def records(path: Path) -> list[bytes]:
    """The records of a log of LevelDB's format, which begins with seven bytes of W&B's own."""
    data, at, parts, out = path.read_bytes(), FILE_HEAD, b"", []
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEAD])
        at += HEAD
        if at + length > len(data):
            break  # half written
        parts = data[at : at + length] if kind in (FULL, FIRST) else parts + data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            out.append(parts)
    return out


def offline_runs(folder: Path) -> list[dict[str, Any]]:
    """Each offline run in a folder, the oldest first: id, name, group, config, exit code; history
    and summary.

    W&B's service writes the files, in a process of its own, and may be at it when ``finish``
    has returned: so this waits for the record that ends a file.
    """
    paths = list(folder.glob("wandb/offline-run-*/*.wandb"))
    until = time.monotonic() + PATIENCE
    while (runs := [offline_run(path) for path in paths]) and any(
        run["exit"] is None for run in runs
    ):
        if time.monotonic() > until:
            raise TimeoutError(
                f"after {PATIENCE} s there is a file in {folder / 'wandb'} that no record ends"
            )
        time.sleep(0.05)
    return sorted(runs, key=lambda run: run["ended"])


def offline_run(path: Path) -> dict[str, Any]:
    """What one file holds: history as {step: numbers}, the last summary, and when it was written
    last.
    """
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {
        "history": {},
        "summary": {},
        "exit": None,
        "ended": path.stat().st_mtime_ns,
    }
    for data in records(path):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run |= {
                "id": record.run.run_id,
                "name": record.run.display_name,
                "group": record.run.run_group,
            }
            run["config"] = {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif kind == "history":
            items = {
                "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                for i in record.history.item
            }
            run["history"][items.pop("_step")] = items
        elif kind == "summary":
            changed = record.summary.update
            run["summary"] |= {
                "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in changed
            }
        elif kind == "exit":
            run["exit"] = record.exit.exit_code
    return run
