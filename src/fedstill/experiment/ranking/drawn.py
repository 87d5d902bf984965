"""What every machine finds alike in a run: who has which examples and acts when, and what follows
from what it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from fedstill.data.examples import Dataset
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import Prepared, prepare
from fedstill.experiment.ranking.derived import same_number
from fedstill.experiment.run_directory.journal import Event, without_times
from fedstill.experiment.run_directory.split_file import split_told
from fedstill.experiment.running.measuring import Measuring
from fedstill.wire.reports import json_value

TOLD = ("classes", "test_counts", "split", "stream", "queries")
"""What the event ``start`` says of them."""

MODELS = ("accuracy", "class_accuracy", "others")
"""What a round's event says of the server's models, from a pass over the test set: what else it
says follows.
"""

TASKS = ("task", "accuracy_seen")
"""What it says of tasks."""

ANSWERS = ("answers", "personal_class_accuracy")
"""What a score is taken from where clients have models of their own."""


def other_draws(
    settings: Settings, events: Sequence[Event], data: Dataset, own: bool = False
) -> str:
    """What in a journal is not what these settings draw of the data here, or does not follow; empty
    where all does.

    ``own``: the method is the entry's own, whose file is not executed: another one stands in for
    it.
    """
    ready = prepare(settings, data)
    measuring = Measuring(ready)
    told = measuring.about(seals=False) | (
        {"split": split_told(measuring.dealt_out)} if measuring.dealt_out else {}
    )
    for key in TOLD:
        has, draws = (json.loads(json.dumps(of.get(key))) for of in (events[0], told))
        if has != draws:
            return f"its {key} is {_short(has)}, and here {_short(draws)} is drawn"
    return (
        _other_clients(ready, events)
        or _other_task_ends(measuring, events)
        or _other_rounds(ready, events, own)
    )


def _other_clients(ready: Prepared, events: Sequence[Event]) -> str:
    """The first stage in which other clients took part than its schedule has."""
    acted: dict[int, dict[int, list[int]]] = {
        e["round"]: {} for e in events if e["event"] == "round"
    }
    done = set(acted)
    for event in events:
        if event["event"] == "client" and event["round"] > 0:
            acted.setdefault(event["round"], {}).setdefault(event["stage"], []).append(
                event["client"]
            )
    for number, stages in acted.items():
        drawn = {
            stage.index: stage.clients for stage in ready.settings.topology(number, ready.world)
        }
        for index in sorted(drawn.keys() | stages.keys() if number in done else stages.keys()):
            has, draws = sorted(stages.get(index, ())), sorted(drawn.get(index, ()))
            if has != draws:
                return (
                    f"in round {number} clients {has} took part in stage {index}, and here {draws} "
                    "are drawn"
                )
    return ""


def _other_task_ends(measuring: Measuring, events: Sequence[Event]) -> str:
    """The first task's end that is not there, or does not follow from its right answers and its
    round's.
    """
    ends = {e["round"]: e for e in events if e["event"] == "task"}
    rounds = {e["round"]: e for e in events if e["event"] == "round"}
    stream = measuring.prepared.world.stream
    due = (
        {0, *(number for number in rounds if stream.ends(number))} if measuring.tasks.on else set()
    )
    if ends.keys() != due or len(ends) != sum(e["event"] == "task" for e in events):
        return (
            f"it has task ends after rounds {sorted(ends)}, and here tasks end after {sorted(due)}"
        )
    for number, event in ends.items():
        told = measuring.tasks.told(number, torch.tensor(event["correct"], dtype=torch.int64))
        if key := _other_key(event, told):
            return f"the task's end after round {number} has {_beside(key, event, told)}"
        if number and (why := _other_answers(measuring, event, rounds[number])):
            return f"the task's end after round {number}: {why}"
    return ""


def _other_answers(measuring: Measuring, end: Event, round: Event) -> str:
    """Where there is one test set, the round's pass over it gave the task end's numbers too."""
    if len(end["totals"]) > 1:
        return ""
    (correct,), (totals,) = end["correct"], end["totals"]
    seen = set(measuring.prepared.world.stream.seen(end["task"] - 1))
    among = sum(correct[c] for c in seen) / max(sum(totals[c] for c in seen), 1)
    if not same_number(among, round["accuracy_seen"]):
        return (
            f"{among} of the examples of classes seen are right, and its round has "
            f"{round['accuracy_seen']}"
        )
    alike = range(len(totals)) if len(seen) == len(totals) else set(range(len(totals))) - seen
    other = [
        c
        for c in alike
        if totals[c] and not same_number(correct[c] / totals[c], round["class_accuracy"][c])
    ]
    return f"class {other[0]} has other right answers than in its round" if other else ""


def _other_rounds(ready: Prepared, events: Sequence[Event], own: bool) -> str:
    """The first round of which something does not follow from its accuracies and the events of its
    clients.
    """
    why = ""
    for personal in _personal_stages(events) if own else [None]:
        why = next(_not_following(Measuring(ready), events, personal), "")
        if not why:
            return ""
    return why


def _personal_stages(events: Sequence[Event]) -> Iterator[frozenset[str]]:
    """After which stages a client's own model may be its answer, in a method of which that is not
    known.
    """
    names = sorted(
        {e["name"] for e in events if e["event"] == "client" and "correct_by_class" in e}
    )
    for count in range(len(names) + 1):
        yield from map(frozenset, combinations(names, count))


def _not_following(
    measuring: Measuring, events: Sequence[Event], personal: frozenset[str] | None
) -> Iterator[str]:
    """``personal``: the method's own stages, where another one stands in for it; then only answers
    are looked at.
    """
    if personal is not None:
        measuring.own.stages = measuring.queried.personal = personal
    for event in events:
        measuring.replay([event] if event["event"] in ("initial", "client") else [])
        if event["event"] != "round":
            continue
        measured = {key: event[key] for key in MODELS if key in event}
        told = measuring.told(
            event["round"], measured, {key: event[key] for key in TASKS if key in event}
        )
        looked = event if personal is None else {k: event[k] for k in ANSWERS if k in event}
        if key := _other_key(looked, told):
            yield f"round {event['round']} has {_beside(key, event, told)}"


def _other_key(event: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """The first field of an event that is another than what follows; a field that came later may be
    missing.
    """
    follows = {
        "event": event.get("event"),
        **json.loads(json.dumps(json_value(without_times(told)))),
    }
    return next(
        (
            k
            for k, v in without_times(event).items()
            if k not in follows or not _same(v, follows[k])
        ),
        "",
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return same_number(one, other)


def _beside(key: str, event: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    if key not in told:
        return f"{key}, which does not follow from its clients' events"
    return f"{key} = {_short(event[key])}, and {_short(json_value(told[key]))} follows"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
