"""The journal of a run, ``journal.jsonl``: one event a line, as a JSON object, in order.

Only fields whose names begin with ``seconds`` contain times; all others have the same values when a
run is repeated. ``fedstill why`` can measure rounds after a run has ended. It writes these looks at
rounds to a second file, ``why.jsonl``, and leaves the journal as it is.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core

from fedstill.core.errors import CorruptFile
from fedstill.core.files import (
    digest,
    disk_error,
    in_shell,
    open_to_append,
    open_to_read,
    read_file,
    sync_folder,
    write_whole,
)
from fedstill.core.reports import json_value
from fedstill.running.journal_schema import Event as Event
from fedstill.running.journal_schema import (
    JournalChecker,
    malformed_events,
    structure_problem,
)

log = logging.getLogger("fedstill.journal")

RUN_EVENTS = frozenset({"start", "initial", "client", "measure", "round", "task", "resumed"})
"""The names of the events that fedstill itself writes; observers of other packages may add more."""

VERSIONS = ("fedstill", "torch", "numpy", "python", "card")
"""The fields of the event ``start`` that name the software and, for a run on a GPU, the card."""

CONFIG = "config.toml"
"""The file of a run's settings in its directory."""

JOURNAL = "journal.jsonl"
"""The file of a run's events in its directory."""

SUMMARY = "summary.json"
"""The file of a run's results in its directory. A run is finished once it has a summary."""

CONFIG_SHA256 = "config_sha256"
"""The field of the event ``start`` that has the SHA-256 of the run's config.toml."""

STOP_REASON = "stopped_because"
"""The field of the last round's event that says why the run stopped before its last round."""

MAX_DIGITS = 19
"""The most characters of an integer that is read as a number; a longer one is read as None.

A signed 64-bit integer has at most 19 digits.
"""

_DIGITS_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * MAX_DIGITS
"""A line may contain an integer that is too long only if it contains this, once its digits are
replaced by zeros. Small fractions contain it, too.
"""
_LONG_INTEGER = re.compile(rb"(?<![.\d])(?:-\d{%d}|\d{%d})" % (MAX_DIGITS, MAX_DIGITS + 1))
"""An integer that is too long: no point comes before its digits."""


class JournalMark(NamedTuple):
    """A position in a journal. A checkpoint stores it as a JSON list of the two fields."""

    length: int
    """Number of bytes before the position."""
    sha256: str
    """SHA-256 of these bytes."""


EMPTY_MARK = JournalMark(0, digest(b""))
"""The mark of an empty journal."""


class Journal:
    """An append-only file of events.

    ``listener`` is called with each event after it was written.
    """

    def __init__(self, path: Path, listener: Callable[[Event], object] | None = None) -> None:
        self.path = path
        self._listener = listener
        try:
            # Unbuffered, so that a killed process loses at most the line that it was writing.
            self._file = open_to_append(path)
            sync_folder(path.parent)
            self._sum = hashlib.sha256(read_file(path))
        except OSError as error:
            raise disk_error(error, path) from error

    @property
    def is_empty(self) -> bool:
        """Whether the file has no event yet."""
        return self._file.tell() == 0

    def write(self, event: str, /, **values: Any) -> Event:
        """Append an event with this name and these fields, and return it as it is written."""
        return self.append({"event": event, **values})

    def append(self, event: Event) -> Event:
        """Append one event, whose name is in its field ``event``, and return it as it is written.

        Numbers that are not finite are written as null.
        """
        written: Event = json_value(event)
        line = json.dumps(written, separators=(",", ":"), allow_nan=False)
        data = memoryview(line.encode() + b"\n")
        self._sum.update(data)
        try:
            # An unbuffered write may write only a part.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise disk_error(error, self.path) from error
        if self._listener is not None:
            self._listener(written)
        return written

    def sync(self) -> JournalMark:
        """Flush all events to the disk and return the mark of the journal's end."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, self.path) from error
        return self.mark()

    def mark(self) -> JournalMark:
        """The mark of the journal's end, without flushing to the disk."""
        return JournalMark(self._file.tell(), self._sum.hexdigest())

    def cut(self, mark: JournalMark) -> None:
        """Remove the events after a mark, which the checkpoint to resume from does not include.

        Raises CorruptFile, and removes nothing, if the journal is shorter than the mark, or if the
        bytes before the mark have changed.
        """
        length = mark.length
        data = read_file(self.path)[:length]
        if len(data) < length:
            raise CorruptFile(
                f"{self.path} is shorter than the {length} bytes in its checkpoint; restore the "
                "file"
            )
        if digest(data) != mark.sha256:
            raise CorruptFile(
                f"{self.path} has changed since it was written: its first {length} bytes differ; "
                "restore it"
            )
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)
        self._sum = hashlib.sha256(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path, limit: int | None = None) -> list[Event]:
    """Read the events of a journal.

    A last line without a line break is left out: a run that was killed may have written half of it.

    ``limit``: the number of lines to read from the start; all by default.

    Raises CorruptFile, with the line's number, if a line is not a valid event
    (``running.journal_schema``), or if the file cannot be read.
    """
    lines = _read_lines(path, limit)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()

    with without_garbage_collection():
        events = _parse_lines(path, lines)
        malformed = malformed_events(events)
        checker = JournalChecker()
        for position, event in enumerate(events):
            problem = malformed.get(position) or checker.problem(event)
            if problem:
                raise CorruptFile(f"{path}, line {position + 1}: {problem}; restore the file")
    return events


def read_start(folder: Path) -> Event:
    """The event ``start`` of the run in a directory; empty if the run has not written it.

    Raises CorruptFile if it is malformed.
    """
    path = folder / JOURNAL
    if not path.is_file():
        return {}
    for start in read_journal(path, limit=1):
        return start
    return {}


def events_by_name(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Group events by their names, each group in the order of the journal."""
    by_name: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_name[event["event"]].append(event)
    return dict(by_name)


def first_event(by_name: Mapping[str, Sequence[Event]], name: str) -> Event:
    """The first event of a name; empty if there is none."""
    for event in by_name.get(name, ()):
        return event
    return {}


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend Python's search for circular references.

    Events contain none. While many events are read, the search starts again and again, and takes
    longer than the reading.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_lines(path: Path, limit: int | None = None) -> list[bytes]:
    """The lines of a file, at most ``limit``."""
    try:
        with open_to_read(path) as file:
            return list(itertools.islice(file, limit))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptFile(
            f"there is no journal at {path}: {error.strerror}; is this a run's directory?"
        ) from error
    except OSError as error:
        raise CorruptFile(f"cannot read {path}: {error.strerror}") from error


def _parse_lines(path: Path, lines: Sequence[bytes]) -> list[Any]:
    """Parse the JSON of each line. Integers with too many digits become None."""
    with_long_integers = _with_long_integers(lines)
    events = []
    for index, line in enumerate(lines):
        try:
            if index in with_long_integers:
                events.append(json.loads(line, parse_int=_integer))
            else:
                # Four times as fast as the standard library, but without ``parse_int``.
                events.append(pydantic_core.from_json(line, allow_inf_nan=False))
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{path}, line {index + 1}, is not JSON: {error}") from error
    return events


def _with_long_integers(lines: Sequence[bytes]) -> set[int]:
    """The positions of the lines that contain an integer with too many digits."""
    # The first test is far faster than the second, and few lines pass it.
    zeroed_lines = b"".join(lines).translate(_DIGITS_TO_ZEROS).split(b"\n")
    return {
        index
        for index, zeroed in enumerate(zeroed_lines)
        if _MANY_DIGITS in zeroed and _LONG_INTEGER.search(lines[index])
    }


def _integer(digits: str) -> int | None:
    if len(digits) > MAX_DIGITS:
        return None
    return int(digits)


def without_times(value: Any) -> Any:
    """An event without its times and the checksum of the config.

    The remaining fields have the same bits after a resume, and with every engine.
    """
    if isinstance(value, list):
        return [without_times(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: without_times(field) for key, field in value.items() if not _varies(str(key))}


def _varies(key: str) -> bool:
    """Whether a field may differ between runs that have the same bits."""
    return key.startswith("seconds") or key == CONFIG_SHA256


def start_of_journal(folder: Path) -> Mapping[str, Any]:
    """The event ``start`` of the run in a folder; empty if it has not started or is damaged."""
    try:
        with open_to_read(folder / JOURNAL) as journal:
            start = json.loads(journal.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(start, Mapping):
        return start
    return {}


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder is finished."""
    return (folder / SUMMARY).is_file()


# Looks at rounds: measurements that `fedstill why` makes after a run.


LATER_LOOKS = "why.jsonl"
"""The file of later looks, in the run's directory."""


def with_later_looks(folder: Path, measures: Sequence[Event], classes: int) -> list[Event]:
    """A run's events of measures, in which later looks replace those of the journal at the same
    rounds.

    Without later looks, the events keep their order; otherwise the looks come last, by round and
    stage.

    ``classes``: the number of the run's classes; 0 if unknown.
    """
    later = _read_later_looks(folder, classes)
    if not later:
        return list(measures)

    later_rounds = {look["round"] for look in later}
    earlier = [event for event in measures if _is_look(event)]
    remaining = [look for look in earlier if look["round"] not in later_rounds]
    looks = sorted([*remaining, *later], key=lambda look: (look["round"], look["stage"]))
    other_measures = [event for event in measures if not _is_look(event)]
    return [*other_measures, *looks]


def add_looks(folder: Path, looks: Sequence[Event]) -> None:
    """Write later looks; they replace earlier later looks at the same rounds."""
    rounds = {look["round"] for look in looks}
    earlier = [look for look in _read_later_looks(folder) if look["round"] not in rounds]
    lines = [f"{json.dumps(look)}\n" for look in (*earlier, *looks)]
    write_whole(folder / LATER_LOOKS, "".join(lines).encode())


def _is_look(event: Event) -> bool:
    """Whether an event is of the measure ``contributions``, about one stage of one round."""
    return bool(event.get("measure") == "contributions")


def _read_later_looks(folder: Path, classes: int = 0) -> list[Event]:
    """Read the later looks; raises CorruptFile, with the line's number, if a line is malformed."""
    path = folder / LATER_LOOKS
    if not path.is_file():
        return []
    looks = []
    for number, look in enumerate(_parse_lines(path, _read_lines(path)), 1):
        problem = structure_problem(look, classes)
        if not problem and look["event"] != "measure":
            problem = "is not an event of a measure"
        if problem:
            raise CorruptFile(
                f"{path}, line {number}: {problem}; delete the file, and run the command again"
            )
        looks.append(look)
    return looks


# Checks that the files of a run have not changed.


def check_config(folder: Path) -> None:
    """Raise CorruptFile if config.toml has changed since the run began.

    Its SHA-256 is in the journal's first event.
    """
    path = folder / CONFIG
    try:
        noted = read_start(folder).get(CONFIG_SHA256)
        same = not noted or noted == digest(read_file(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CorruptFile):
        return  # the run has not begun; or it is damaged, and the reader of the file reports it
    if not same:
        config = in_shell(path.resolve())
        raise CorruptFile(
            f"{path} has changed since the run began, and a run can only continue with the same "
            "settings: restore the file. To use other settings, such as more rounds, start a new "
            f"run from this run's model: fedstill run {config} --out NEW -s "
            f"start_from={in_shell(folder.resolve())}"
        )


def check_checkpoints(folder: Path) -> None:
    """Raise CorruptFile for an unfinished run that has rounds in its journal but no checkpoint.

    Without this check, it would start again from round 1.
    """
    journal = folder / JOURNAL
    has_checkpoint = any((folder / "checkpoints").glob("*.json"))
    if is_finished(folder) or has_checkpoint or not journal.is_file():
        return
    last = max((event.get("round") or 0 for event in read_journal(journal)), default=0)
    if last:
        text = (
            f"{folder} reached round {last}, but has no checkpoint to continue from (a pack "
            "contains none): restore its folder checkpoints, or start again with"
        )
        raise CorruptFile(f"{text} fedstill.run(..., overwrite=True)", f"{text} --overwrite")


def check_journal(folder: Path, events: Sequence[Event]) -> None:
    """Raise CorruptFile if the journal of a finished run lacks events or has changed.

    A finished journal ends with the last round or task, possibly followed by events of observers.
    Each round event contains the number of its replies, and the last checkpoint contains the
    SHA-256 up to its position. The journal of an unfinished run may end anywhere, even in the
    middle of a line.

    events: the events of the journal.
    """
    if not is_finished(folder):
        return
    path = folder / SUMMARY
    try:
        summary = dict(json.loads(read_file(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is damaged: {error}; delete it, then continue with `fedstill resume`"
        ) from error
    journal = folder / JOURNAL
    data = read_file(journal)
    damage = _gap(events) or _damage_at_end(events, summary)
    if damage is None and not data.endswith(b"\n"):
        damage = Damage(data.count(b"\n") + 1, "it ends in half a line")
    if damage is None:
        damage = _change_before_checkpoint(folder, data)
    if damage is not None:
        config = in_shell(folder / CONFIG)
        raise CorruptFile(
            f"{journal}, line {damage.line}, is not what was written: {damage.problem}; restore "
            f"the file, or begin the run anew: fedstill run {config} --out {in_shell(folder)} "
            "--overwrite"
        )


class Damage(NamedTuple):
    """What is wrong with a journal, and the line in which it shows."""

    line: int
    problem: str


def _gap(events: Sequence[Event]) -> Damage | None:
    """The first round or reply that a journal lacks; None if it is complete."""
    number = 0
    replies = 0
    refused = 0
    for line, event in enumerate(events, 1):
        if event["event"] == "client":
            refused += "refused" in event
            replies += "refused" not in event and "idle" not in event
        if event["event"] != "round":
            continue
        number += 1
        if event.get("round") != number:
            return Damage(line, f"round {number} is missing")
        counts = {"replies": replies, "refused": refused}
        for key, count in counts.items():
            noted = event.get(key, count)
            if noted != count:
                return Damage(line, _missing_events(number, key, count, noted))
        replies = 0
        refused = 0
    return None


def _missing_events(number: int, key: str, count: int, noted: int | None) -> str:
    """That a round has another number of events of clients than it notes."""
    if noted is None:
        return f"round {number} does not say how many replies were {key}"
    events_of = "refused clients"
    if key == "replies":
        events_of = "clients' replies"
    return f"round {number} has events for {count} of its {noted} {events_of}"


def _change_before_checkpoint(folder: Path, data: bytes) -> Damage | None:
    """How a journal's bytes differ from those that the newest checkpoint knows; None if they do
    not, or without a checkpoint.
    """
    newest = max((folder / "checkpoints").glob("*.json"), default=None)
    if newest is None:
        return None
    try:
        manifest = json.loads(read_file(newest))["manifest"]
        length, sha = manifest["journal"]
        number = manifest["round"]
        known = data[:length]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # whoever reads the checkpoint will say that it is damaged
    if digest(known) == sha:
        return None
    line = max(1, known.count(b"\n"))
    return Damage(line, f"an event up to round {number} is missing or has changed")


def _damage_at_end(events: Sequence[Event], summary: Mapping[str, Any]) -> Damage | None:
    """How the events of a journal contradict a summary; None if they do not."""
    last_line = max(1, len(events))
    rounds = [event for event in events if event["event"] == "round"]
    expected = summary.get("stopped_in_round", summary.get("rounds", len(rounds)))
    if len(rounds) != expected:
        return Damage(last_line, f"it has {len(rounds)} rounds, and summary.json {expected}")
    accuracy = None
    if rounds:
        accuracy = rounds[-1].get("accuracy")
    if accuracy != summary.get("accuracy", accuracy):
        line = events.index(rounds[-1]) + 1
        text = f"its last round has accuracy {accuracy}, and summary.json {summary['accuracy']}"
        return Damage(line, text)
    # Observers of outer packages may add events after a round event.
    run_events = [event["event"] for event in events if event["event"] in RUN_EVENTS]
    end = "round"
    if "final_accuracy" in summary:
        end = "task"
    if rounds and run_events[-1] != end:
        return Damage(last_line, f"it ends in the event {run_events[-1]!r}, and not in {end!r}")
    return None
