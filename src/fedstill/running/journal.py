"""The journal of a run: one JSON object a line; times are in fields named ``seconds…`` only.

What is measured after a run has ended, looks at its rounds, is kept beside the journal.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import CorruptFile, UnknownName, cut_reason
from fedstill.core.files import as_named, digest, sync_folder, write_whole
from fedstill.core.reports import (
    COUNTED,
    TAKEN,
    has_valid_form,
    is_count,
    is_number,
    json_value,
    wrong_table,
)
from fedstill.data.form import nfc

# The journal of a run: one JSON object a line, in the order of events; times are only in fields
# named ``seconds…``.


log = logging.getLogger("fedstill.journal")

Event = dict[str, Any]

RUN_EVENTS = frozenset({"start", "initial", "client", "measure", "round", "task", "resumed"})
"""The events that runs have without outer packages, whose observers may add others."""

VERSIONS = ("fedstill", "torch", "numpy", "python", "card")
"""What of the event ``start`` says with what a run was made; the card, where it trained on one."""

CONFIG_SEAL = "config_sha256"
"""What the event ``start`` calls the SHA-256 of the run's config.toml."""

DIGITS = 19
"""The most characters of a whole number that a reader can compute with."""

LONG = re.compile(rb"[-:,\[ \t\r]\d{%d}" % DIGITS)
"""Found in a line that may have a longer one, behind what may stand before a number: all others are
read at once.
"""

Mark = tuple[int, str]
"""A place in a journal: its length in bytes there, and the SHA-256 of all before it."""

START: Mark = (0, digest(b""))
"""The mark of an empty journal."""


class Journal:
    """An append-only file of events; ``told``: called with each that was appended."""

    def __init__(self, path: Path, told: Callable[[Event], object] | None = None) -> None:
        self.path, self._told = path, told
        try:
            self._file = path.open("ab", buffering=0)
            sync_folder(path.parent)
            self._sum = hashlib.sha256(path.read_bytes())
        except OSError as error:
            raise as_named(error, path) from error

    @property
    def is_empty(self) -> bool:
        """Whether it has no event yet."""
        return self._file.tell() == 0

    def write(self, event: str, /, **values: Any) -> None:
        """Append an event of this name."""
        self.append({"event": event, **values})

    def append(self, event: Event) -> None:
        """Append one event, with its name under ``event``; a number that is not finite is written
        as null.
        """
        written = json_value(event)
        line = json.dumps(written, separators=(",", ":"), allow_nan=False)
        data = memoryview(line.encode() + b"\n")
        self._sum.update(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise as_named(error, self.path) from error
        if self._told is not None:
            self._told(written)

    def sync(self) -> Mark:
        """Make all events durable; the journal's mark."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise as_named(error, self.path) from error
        return self.mark()

    def mark(self) -> Mark:
        """Where it ends now; what is before need not be durable yet."""
        return self._file.tell(), self._sum.hexdigest()

    def cut(self, mark: Mark) -> None:
        """Drop what was written after a mark: events that the checkpoint does not know.

        Raises CorruptFile, and drops nothing, if the journal is shorter than that, or is not the
        one that was written.
        """
        length, sha = mark
        data = self.path.read_bytes()[:length]
        if len(data) < length:
            raise CorruptFile(
                f"{self.path} is shorter than the {length} bytes its checkpoint knows; restore the "
                "file"
            )
        if digest(data) != sha:
            raise CorruptFile(
                f"{self.path} is not what was written: its first {length} bytes changed; restore it"
            )
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)
        self._sum = hashlib.sha256(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path, most: int | None = None) -> list[Event]:
    """The events in a journal, whole lines only (a run that was killed may have left half a line).

    ``most``: how many, from the start; all if it is left out. What a client reported and no version
    would write now is left out, and a warning names the line: versions before reports were checked
    wrote it. The file stays as it is. Raises CorruptFile naming the line that is not an event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptFile(
            f"there is no journal at {path}: {error.strerror}; is this a run's directory?"
        ) from error
    except OSError as error:
        raise CorruptFile(f"cannot read {path}: {error.strerror}") from error
    events: list[Event] = []
    for number, line in enumerate(lines[:-1][:most], 1):
        try:
            event = (
                json.loads(line)
                if LONG.search(line) is None
                else json.loads(line, parse_int=_whole_number)
            )
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise CorruptFile(f"{path}, line {number}, is not an event")
        if event["event"] == "client":
            event, left_out = without_malformed(event, _classes(events))
            _warn(path, number, str(event.get("client")), tuple(left_out))
        events.append(event)
    return events


def class_numbers(folder: Path, names: Sequence[str]) -> list[int]:
    """Classes by number or by name, as numbers; raises UnknownName for one that the run does not
    have.
    """
    known = _names_at_start(folder, "classes")
    return [_number("class", name, known) for name in names]


def client_number(folder: Path, name: str) -> int:
    """A client by number or by its name in the data, as a number; raises UnknownName for a name
    that the run does not have.
    """
    return _number("client", name, _names_at_start(folder, "client_names"))


def number_of_client(name: str, start: Event) -> int | None:
    """The number of a client by its name in the data, given a run's first event; None for any other
    name.
    """
    known = [nfc(str(other)) for other in start.get("client_names", ())]
    return known.index(nfc(name)) if nfc(name) in known else None


def _names_at_start(folder: Path, key: str) -> list[str]:
    """Names that a run's first event lists."""
    events = read_journal(folder / "journal.jsonl", 1) if folder.is_dir() else []
    return [nfc(str(name)) for event in events[:1] for name in event.get(key, ())]


def _number(kind: str, name: str, known: Sequence[str]) -> int:
    """A thing by number or by name, as a number."""
    if name.isdecimal():
        return int(name)
    if nfc(name) not in known:
        todo = "" if known else "the run has no names; give a number, from 0"
        raise UnknownName(kind, name, known, todo=todo)
    return known.index(nfc(name))


def _whole_number(text: str) -> int | None:
    """A whole number, or None for one that no reader could compute with."""
    return int(text) if len(text) <= DIGITS else None


def _classes(events: Sequence[Event]) -> int:
    """How many classes there are, as the first event says; 0 if it does not."""
    names = events[0].get("classes") if events else None
    return len(names) if isinstance(names, list) else 0


@functools.cache
def _warn(path: Path, line: int, client: str, left_out: tuple[str, ...]) -> None:
    """Say, once, what of a client's event is not used."""
    if left_out:
        names = cut_reason(", ".join(map(repr, left_out)))
        log.warning(
            "%s, line %d: what client %s reported as %s is malformed, and not used",
            path,
            line,
            client,
            names,
        )


def without_times(value: Any) -> Any:
    """An event without its times and its config's seal: what has the same bits after a resume, and
    by every engine.
    """
    if isinstance(value, Mapping):
        return {
            k: without_times(v)
            for k, v in value.items()
            if not str(k).startswith("seconds") and k != CONFIG_SEAL
        }
    return [without_times(v) for v in value] if isinstance(value, list) else value


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
    own = measures or read_journal(folder / "journal.jsonl")
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


# Journals of earlier versions: before reports were checked, a client could write anything there,
# and the run could not go on.


def without_malformed(event: Event, classes: int) -> tuple[Event, list[str]]:
    """A client's event without its malformed fields, and the names of what was left out."""
    malformed = {
        name
        for name, value in event.items()
        if name not in TAKEN and not _is_readable(name, value, classes)
    }
    # These fields are read together.
    if malformed & COUNTED.keys():
        malformed |= COUNTED.keys() & event.keys()
    if not is_count(event.get("noised_rows", 0)):
        malformed.add("noised_rows")
    if not is_count(event.get("private_steps", 0)) or not 0 <= event.get("private_rate", 0.0) <= 1:
        malformed |= {"private_steps", "private_rate"}
    fields = {name: value for name, value in event.items() if name not in malformed}
    return fields, sorted(malformed)


def _is_readable(name: str, value: Any, classes: int) -> bool:
    if not has_valid_form(name, value, depth=100, word=1 << 20):
        return False
    if name in ("private", "public") and not is_number(value):
        return value == {} or not wrong_table(name, value, classes)
    rows: list[Any] = []
    if name == "correct_by_epoch":
        rows = value
    elif name in COUNTED:
        rows = [value]
    return classes == 0 or all(len(row) == classes for row in rows)
