"""The journal of a run: one JSON object a line, in the order of events; times stand only in fields named ``seconds…``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.errors import CorruptFile
from fedstill.files import as_named

Event = dict[str, Any]


class Journal:
    """An append-only file of events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab")

    def write(self, event: str, **values: Any) -> None:
        """Append one event; a number that is not finite is written as null."""
        line = json.dumps({"event": event, **_plain(values)}, separators=(",", ":"), allow_nan=False)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise as_named(error, self.path) from error

    def sync(self) -> int:
        """Make all events durable; the length of the file in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def cut(self, length: int) -> None:
        """Drop what was written after a length: events that the checkpoint does not know."""
        if self.path.stat().st_size < length:
            raise CorruptFile(f"{self.path} is shorter than the {length} bytes its checkpoint knows; restore the file")
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[Event]:
    """The events in a journal, whole lines only (a run that was killed may have left half a line).

    Raises CorruptFile naming the line that is not an event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CorruptFile(f"there is no journal at {path}: {error.strerror}; is this a run's directory?") from error
    events = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise CorruptFile(f"{path}, line {number}, is not an event")
        events.append(event)
    return events


def without_times(value: Any) -> Any:
    """An event without its times: what must be the same bits after a resume."""
    if isinstance(value, Mapping):
        return {k: without_times(v) for k, v in value.items() if not str(k).startswith("seconds")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
