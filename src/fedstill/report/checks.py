"""What a reader of journals relies on, checked once: an event that lacks it is named, with its
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.errors import CorruptFile
from fedstill.experiment.run_directory.journal import Event

ROUND = (
    "accuracy",
    "forgetting",
    "personal_accuracy",
    "personal_forgetting",
    "personal_clients",
    "own_test_accuracy",
    "own_test_worst",
    "consistency",
    "in_local_accuracy",
    "out_local_accuracy",
    "received_in_local_accuracy",
    "received_out_local_accuracy",
    "seconds",
    "seconds_training",
    "seconds_measuring",
    "bytes_up",
    "bytes_down",
    "bytes_as_weights",
)
"""What is read of a round; each a number, or null."""

EPOCHS = tuple(f"{side}_local_accuracy{k}" for side in ("in", "out") for k in ("", "_std"))
"""What is read of a stage that was measured epoch by epoch; each a list of numbers."""

CLIENT = ("seconds", "seconds_training", "seconds_measuring", "client", "round")
"""What is read of a client's event; each a number, or null."""


def check_events(
    path: Path, start: Event, initial: Event, rounds: Sequence[Event], clients: Sequence[Event]
) -> None:
    """Raises CorruptFile naming the journal and the first event that is not what the reader relies
    on.
    """
    if (rounds or clients) and not start:
        raise CorruptFile(f"{path} has rounds but no start event; restore the file")
    _check_start(path, start)
    classes, before = len(start.get("classes", [])), 0
    _check_measures(path, initial, "the initial event", classes)
    for event in rounds:
        number = event.get("round")
        if type(number) is not int or number <= before:
            raise CorruptFile(f"{path}: round {number!r} does not follow round {before}")
        if "accuracy" not in event:
            raise CorruptFile(f"{path}: round {number} has no accuracy")
        _check_measures(path, event, f"round {number}", classes)
        _check_by_client(path, event, f"round {number}")
        _check_by_epoch(path, event, f"round {number}")
        before = number
    for event in clients:
        _check_numbers(path, event, f"an event of client {event.get('client')!r}", CLIENT)


def check_looks(path: Path, looks: Sequence[Event]) -> None:
    """Raises CorruptFile for an event of a measure without its name and round."""
    for event in looks:
        if not isinstance(event.get("measure"), str) or type(event.get("round")) is not int:
            raise CorruptFile(
                f"{path}: an event of a measure lacks the measure's name or its round"
            )
        _check_numbers(path, event, f"an event of measure {event['measure']}", ("seconds",))


def check_resumed(path: Path, events: Sequence[Event]) -> None:
    """Raises CorruptFile for an event of a resume that does not say the versions."""
    if not all(isinstance(event.get("versions"), dict) for event in events):
        raise CorruptFile(f"{path}: an event of a resume lacks its versions")


def checked_ends(path: Path, start: Event, ends: Sequence[Event]) -> Sequence[Event]:
    """The events of task ends, the untrained model's first; raises CorruptFile for one that is
    none.
    """
    told, classes = start.get("stream"), len(start.get("classes", []))
    by_task = told.get("classes") if isinstance(told, dict) else None
    if not isinstance(by_task, list) or not all(isinstance(own, list) for own in by_task):
        by_task = []
    if ends and (
        not by_task
        or any(type(c) is not int or not 0 <= c < classes for own in by_task for c in own)
    ):
        raise CorruptFile(f"{path}: the start event does not say the classes of each task")
    # without a model of the server before round 1 there is no 0
    first = 1 if ends and ends[0].get("task") == 1 else 0
    for number, event in enumerate(ends, first):
        if event.get("task") != number or type(event.get("round")) is not int:
            raise CorruptFile(
                f"{path}: the end of task {event.get('task')!r} does not follow that of "
                f"{number - 1}"
            )
        counts = [event.get(key) for key in ("correct", "totals")]
        told_by_sites = counts == [None, None] and "clients" in event
        counted = all(
            isinstance(c, list) and c and all(_are_numbers(row, classes) for row in c)
            for c in counts
        )
        if not (counted or told_by_sites) or not _are_numbers(event.get("row"), len(by_task)):
            raise CorruptFile(
                f"{path}: the end of task {number} has no accuracies of {len(by_task)} tasks"
            )
    return ends


def _check_start(path: Path, start: Event) -> None:
    classes, counts = start.get("classes", []), start.get("label_counts", [])
    if not isinstance(classes, list) or not isinstance(counts, list):
        raise CorruptFile(f"{path}: the start event's classes and label counts are not lists")
    if not isinstance(start.get("split", {}), dict):
        raise CorruptFile(f"{path}: the start event's split is not a table")
    if not isinstance(start.get("sources", {}), dict):
        raise CorruptFile(f"{path}: the start event's sources are not a table")
    if any(not _are_numbers(row, len(classes)) or None in row for row in counts):
        raise CorruptFile(
            f"{path}: the start event's label counts are not clients × {len(classes)} classes"
        )


def _check_measures(path: Path, event: Event, where: str, classes: int) -> None:
    for key in ("class_accuracy", "personal_class_accuracy"):
        if event.get(key) is not None and not _are_numbers(event[key], classes):
            raise CorruptFile(f"{path}: {where} does not hold the accuracy of {classes} classes")
    _check_numbers(path, event, where, ROUND)


def _check_by_client(path: Path, event: Event, where: str) -> None:
    for key in (k for k in event if k.endswith("_by_client")):
        by_client = event[key]
        ids = isinstance(by_client, dict) and all(str(c).isdecimal() for c in by_client)
        if not ids or not all(_is_number(v) and v is not None for v in by_client.values()):
            raise CorruptFile(f"{path}: {where} has {key} that is not a number for each client")


def _check_by_epoch(path: Path, event: Event, where: str) -> None:
    stages = event.get("by_epoch", {})
    for lists in stages.values() if isinstance(stages, dict) else [stages]:
        curves = [lists.get(k) for k in EPOCHS] if isinstance(lists, dict) else [None]
        count = len(curves[0]) if isinstance(curves[0], list) else 0
        if not count or not all(_are_numbers(c, count) for c in curves):
            raise CorruptFile(
                f"{path}: {where} has by_epoch that is not lists of numbers of one length"
            )


def _check_numbers(path: Path, event: Event, where: str, keys: Sequence[str]) -> None:
    for key in keys:
        if not _is_number(event.get(key)):
            raise CorruptFile(f"{path}: {where} has {key} = {event[key]!r}, which is not a number")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))
