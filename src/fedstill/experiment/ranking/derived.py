"""What in a run follows from something else in it: summaries from journals, accuracies from counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.experiment.ranking.entries import CPU
from fedstill.experiment.run_directory.journal import Event
from fedstill.experiment.running.task_ends import summed_up
from fedstill.metrics.accuracy import best_and_recent

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
    """What in a journal contradicts itself: an accuracy that its classes do not have, or bytes that nobody sent."""
    counts = [int(n) for n in events[0]["test_counts"]]
    sent: dict[int, int] = {}
    for event in events:
        where = f"round {event.get('round')}"
        if event["event"] == "client" and event["client"] >= 0:
            sent[event["round"]] = sent.get(event["round"], 0) + event.get("bytes_up", 0)
        if event["event"] in ("initial", "round") and (why := _accuracy(event, counts)):
            return f"{where}: {why}"
        if event["event"] == "round" and event["round"] > 1 and event["bytes_up"] != sent.get(event["round"], 0):
            return f"{where}: {event['bytes_up']} bytes up, and its clients sent {sent.get(event['round'], 0)}"
        if event["event"] == "task" and (why := _task(event)):
            return f"{where}: {why}"
    return ""


def _accuracy(event: Mapping[str, Any], counts: Sequence[int]) -> str:
    """Class accuracies are right answers over examples; their mean, as the test set weighs them, is the accuracy."""
    known = [(v, n) for v, n in zip(event.get("class_accuracy") or (), counts, strict=False) if v is not None and n]
    if event.get("accuracy") is None or len(known) != sum(n > 0 for n in counts):
        return ""
    if strange := [v for v, n in known if abs(v * n - round(v * n)) > 1e-6 or not 0 <= v <= 1]:
        return f"a class has the accuracy {strange[0]}, which no number of its test examples gives"
    mean = sum(v * n for v, n in known) / sum(n for _, n in known)
    return "" if same_number(mean, event["accuracy"]) else f"accuracy {event['accuracy']}, and its classes have {mean}"


def _task(event: Mapping[str, Any]) -> str:
    if len(event["totals"]) == 1:
        return ""
    rows = [sum(c) / sum(n) if sum(n) else None for c, n in zip(event["correct"], event["totals"], strict=True)]
    other = [i for i, (a, b) in enumerate(zip(rows, event["row"], strict=True)) if not same_number(a, b)]
    return f"the accuracy on task {other[0] + 1} is not that of its right answers" if other else ""
