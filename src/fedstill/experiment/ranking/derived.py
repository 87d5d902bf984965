"""What in a run follows from something else in it: summaries from journals, accuracies from
counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.experiment.ranking.entries import CPU
from fedstill.experiment.run_directory.journal import Event
from fedstill.experiment.running.task_ends import summed_up
from fedstill.metrics.accuracy import best_and_recent
from fedstill.records import SERVER

NEAR = 1e-9
"""Sums of the same numbers in another order are as near as this."""


def following(events: Sequence[Event]) -> dict[str, Any]:
    """The numbers of a summary that follow from a journal."""
    rounds = [e for e in events if e["event"] == "round"]
    rows = [e["row"] for e in events if e["event"] == "task" and e["task"]]
    sums = {key: sum(e[key] for e in rounds) for key in ("bytes_up", "bytes_down", CPU)}
    last = {key: rounds[-1][key] for key in ("accuracy", "forgetting")}
    return {**last, **best_and_recent([e["accuracy"] for e in rounds]), **sums, **summed_up(rows)}


def same_number(one: Any, other: Any) -> bool:
    """Whether two numbers are one, up to the rounding of a sum."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=NEAR, abs_tol=NEAR)
    return bool(one == other)


def contradiction(events: Sequence[Event]) -> str:
    """What in a journal contradicts itself: an accuracy that its classes do not have, or bytes that
    nobody sent.
    """
    counts = [int(n) for n in events[0]["test_counts"]]
    acted: list[Event] = []
    for event in events:
        why, where = "", f"round {event.get('round')}"
        if event["event"] == "client":
            acted.append(event)
        if event["event"] in ("initial", "round"):
            why = _accuracy(event, counts)
        if event["event"] == "task":
            why = _task(event, len(counts))
        if event["event"] == "round":
            why = why or _sent(event, acted) or _answers(event, events[0], len(counts))
            acted = []
        if why:
            return f"{where}: {why}"
    return ""


def _sent(event: Event, acted: Sequence[Event]) -> str:
    """Bytes of a round are those of its clients, of the census too before round 1; the server sends
    itself none.
    """
    if not any(e["round"] == event["round"] for e in acted):
        return "no client took part in it"
    for key, way in (("bytes_up", "up"), ("bytes_down", "down")):
        sent = sum(e.get(key, 0) for e in acted if e["client"] != SERVER)
        if event[key] != sent:
            return f"{event[key]} bytes {way}, and its clients' events have {sent}"
    return ""


def _accuracy(event: Mapping[str, Any], counts: Sequence[int]) -> str:
    """Class accuracies are right answers over examples; their mean, as the test set weighs them, is
    the accuracy.

    All are missing where only clients have models; of one class where it has no test example.
    """
    by_class, accuracy = event["class_accuracy"], event["accuracy"]
    if len(by_class) != len(counts):
        return f"it has accuracies of {len(by_class)} classes, and there are {len(counts)}"
    if accuracy is None and all(v is None for v in by_class):
        return ""
    if (known := [v is not None for v in by_class]) != [n > 0 for n in counts] or accuracy is None:
        return (
            f"it has accuracies of {sum(known)} classes, and {sum(n > 0 for n in counts)} have "
            "test examples"
        )
    own = [(v, n) for v, n in zip(by_class, counts, strict=True) if n]
    if strange := [v for v, n in own if abs(v * n - round(v * n)) > 1e-6 or not 0 <= v <= 1]:
        return f"a class has the accuracy {strange[0]}, which no number of its test examples gives"
    mean = sum(v * n for v, n in own) / sum(n for _, n in own)
    return (
        "" if same_number(mean, accuracy) else f"accuracy {accuracy}, and its classes have {mean}"
    )


def _answers(event: Mapping[str, Any], start: Event, classes: int) -> str:
    """What is said of clients' own models are shares, of each class, and of queries only where
    anyone asks.
    """
    personal = event.get("personal_class_accuracy") or []
    if len(personal) not in (0, classes) or not all(v is None or 0 <= v <= 1 for v in personal):
        return "clients' own accuracies by class must be one number from 0 to 1 per class"
    asked = event.get("answers") or []
    if asked and "queries" not in start:
        return "it has answers to queries, but the run has no queries"
    shares = [a[key] for a in asked for key in ("average_accuracy", "average_accuracy_before")]
    return (
        ""
        if all(v is None or 0 <= v <= 1 for v in shares)
        else "an answer's accuracy must be from 0 to 1"
    )


def _task(event: Mapping[str, Any], classes: int) -> str:
    """Right answers by test set and class are whole numbers, no more than there are test
    examples.
    """
    correct, totals = event["correct"], event["totals"]
    if len(correct) != len(totals) or any(len(own) != classes for own in (*correct, *totals)):
        return "a task's end has right answers of other classes or test sets than there are"
    pairs = [
        (c, n)
        for one, other in zip(correct, totals, strict=True)
        for c, n in zip(one, other, strict=True)
    ]
    if strange := [c for c, n in pairs if type(c) is not int or not 0 <= c <= n]:
        return (
            f"a task's end has {strange[0]} right answers of a class, more than there are or no "
            "whole number"
        )
    if len(totals) == 1:
        return ""
    rows = [sum(c) / sum(n) if sum(n) else None for c, n in zip(correct, totals, strict=True)]
    other = [
        i for i, (a, b) in enumerate(zip(rows, event["row"], strict=True)) if not same_number(a, b)
    ]
    return f"the accuracy on task {other[0] + 1} is not that of its right answers" if other else ""
