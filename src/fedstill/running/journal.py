"""The journal of a run: one JSON object a line; times are in fields named ``seconds…`` only.

What is measured after a run has ended, looks at its rounds, is kept beside the journal.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pydantic_core

from fedstill.core.errors import CorruptFile, UnknownName
from fedstill.core.files import as_named, digest, sync_folder, write_whole
from fedstill.core.reports import json_value
from fedstill.data.dataset import nfc
from fedstill.running.journal_schema import Event as Event
from fedstill.running.journal_schema import (
    JournalChecker,
    malformed_events,
    structure_problem,
)

# The journal of a run: one JSON object a line, in the order of events; times are only in fields
# named ``seconds…``.


log = logging.getLogger("fedstill.journal")

RUN_EVENTS = frozenset({"start", "initial", "client", "measure", "round", "task", "resumed"})
"""The events that runs have without outer packages, whose observers may add others."""

VERSIONS = ("fedstill", "torch", "numpy", "python", "card")
"""What of the event ``start`` says with what a run was made; the card, where it trained on one."""

CONFIG_SEAL = "config_sha256"
"""What the event ``start`` calls the SHA-256 of the run's config.toml."""

DIGITS = 19
"""The most characters of a whole number that a reader can compute with."""

_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * DIGITS
"""Found in a line with zeros in place of its digits if it may have a longer whole number."""

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

    most: how many, from the start; all if it is left out. Raises CorruptFile, naming the line, for
    a line that is no event of a run (``running.journal_schema``).
    """
    lines = _lines(path, most)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    with without_garbage_collection():
        events = _parsed_lines(path, lines)
        malformed = malformed_events(events)
        checker = JournalChecker()
        for position, event in enumerate(events):
            problem = malformed.get(position) or checker.problem(event)
            if problem:
                raise CorruptFile(f"{path}, line {position + 1}: {problem}; restore the file")
    return events


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspends Python's search for circular references.

    Events have no circles. The search starts again and again while events are read, since they are
    many, and takes longer than reading them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _lines(path: Path, most: int | None = None) -> list[bytes]:
    """The lines of a file, or the first of them."""
    try:
        with path.open("rb") as file:
            return list(itertools.islice(file, most))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptFile(
            f"there is no journal at {path}: {error.strerror}; is this a run's directory?"
        ) from error
    except OSError as error:
        raise CorruptFile(f"cannot read {path}: {error.strerror}") from error


def _parsed_lines(path: Path, lines: Sequence[bytes]) -> list[Any]:
    """The JSON in each line; a whole number that no reader could compute with is null."""
    events = []
    for number, line in enumerate(lines, 1):
        try:
            if _LONG not in line.translate(_ZEROS):
                # It takes a quarter of the time of the standard library's parser.
                events.append(pydantic_core.from_json(line, allow_inf_nan=False))
            else:
                events.append(json.loads(line, parse_int=_whole_number))
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{path}, line {number}, is not JSON: {error}") from error
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
    """The looks that were added later; raises CorruptFile naming the line that is none."""
    path = folder / LATER_LOOKS
    if not path.is_file():
        return []
    looks = []
    for number, look in enumerate(_parsed_lines(path, _lines(path)), 1):
        problem = structure_problem(look)
        if not problem and look["event"] != "measure":
            problem = "is not an event of a measure"
        if problem:
            raise CorruptFile(f"{path}, line {number}: {problem}; delete the file, and ask again")
        looks.append(look)
    return looks
