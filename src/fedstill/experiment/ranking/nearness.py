"""How near two journals of one run are: the same bits, or within what rounding does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedstill.experiment.run_directory.journal import VERSIONS, Event, read_journal, without_times
from fedstill.records import SERVER

Level = Literal["bits", "tolerance", "disagrees"]

EARLY = 3
"""In so many rounds rounding has not grown yet: they are compared one by one."""

IMAGES, POINTS = 2, 0.005
"""By how many test images, or which share of them, whichever is more, the accuracy of an early
round may differ.
"""

LOSS = (1e-3, 1e-2, 5e-2)
"""By how much a loss of rounds 1, 2 and 3 may differ: of itself, or as a number where it is
below 1.

Measured on digits with other vector instructions (none, AVX2): 4e-5, 2e-3 and 7e-3; the difference
grows tenfold with each round, while no image's answer changed in three rounds.
"""

STEPS = 70
"""As many steps of one client after another, and no more, those bounds hold for; then a run is as
another seed's is.

Measured on digits with AVX2: 71 steps a round (joint training) have losses 0.011 apart in round 2,
accuracies up to eleven images of 360 in round 3; 175 steps in round 1 at a high rate (FedMD's) 18
images, and losses 0.4 in round 2.
"""

STRAYS = 0.2
"""The share of a round's clients whose losses may be further apart all the same: what trains on few
examples at a high rate can be unstable, and then the last bit decides. From such a round on a run
is as another seed's is.

Measured on digits on another processor (AVX2), five runs of twenty clients that train alone for 38
to 342 steps: one to three a run have losses 0.004 to 0.6 apart, in three runs one of them after no
more than 38; all others are within 5e-4.
"""

SENT = 0.1
"""By which share what a client sent and was sent may differ: networks that are matched (PFNM) are
as wide as training makes them. Measured on digits with AVX2: 0.018 of PFNM, below 0.01 of every
other method.
"""

NOT_SAME = ("versions", *VERSIONS, "sources", "split", "examples_sha256")
"""What of the event ``start`` is not compared: the split's format may change, its draws are checked
elsewhere, and the settings; entries of earlier versions say nothing of the examples, and where
these are others no round has the same bits.
"""


@dataclass(frozen=True)
class Replayed:
    """One run done again: where it stands in the entry, the level that it reached, and what is
    beyond it.
    """

    place: str
    level: Level
    beyond: str = ""


def compared(place: str, theirs: Path, ours: Path, whole: bool = True) -> Replayed:
    """One run beside another: all of it, or, where it is not ``whole`` here, as many rounds as both
    have.
    """
    here, there = (_rounds(folder) for folder in (ours, theirs))
    both = [
        n
        for n in sorted(here.keys() & there.keys())
        if all(_is_done(events[n]) for events in (here, there))
    ]
    if not whole and both == [0]:
        return Replayed(place, "disagrees", "it has no round here")
    if all(here[n] == there[n] for n in both) and _start(ours) == _start(theirs):
        if whole and here != there:
            last = max(both, default=0)
            return Replayed(
                place,
                "disagrees",
                f"after round {last} it goes on otherwise, with the same bits before",
            )
        return Replayed(place, "bits")
    behind = 0.0
    for number in (n for n in both if n <= EARLY):
        why, strays = _apart(number, there[number], here[number], _images(theirs), behind)
        if why:
            return Replayed(place, "disagrees", why)
        behind += math.inf if strays else _steps(there[number])
    return Replayed(place, "tolerance")


def _is_done(events: Sequence[Event]) -> bool:
    return any(e["event"] in ("initial", "round") for e in events)


def _steps(events: Sequence[Event]) -> float:
    """The mean number of steps that a client did in some events of a round."""
    done: dict[int, int] = {}
    for event in events:
        if event.get("steps"):
            done[event["client"]] = done.get(event["client"], 0) + event["steps"]
    return statistics.fmean(done.values()) if done else 0.0


def _led_to(events: Sequence[Event], at: int) -> float:
    """How many steps of one client after another led to an event, of its round: its own, and those
    of stages before.
    """
    one = events[at]
    before = [
        e for e in events[:at] if one["event"] == "round" or e.get("stage") != one.get("stage")
    ]
    return float(one.get("steps") or 0) + _steps(before)


def _apart(
    number: int, theirs: Sequence[Event], ours: Sequence[Event], images: int, behind: float
) -> tuple[str, set[int]]:
    """What of a round is further apart than rounding makes it, with so many steps behind it; and
    whose losses are.
    """
    if len(theirs) != len(ours):
        return f"round {number} has {len(theirs)} events there, and {len(ours)} here", set()
    strays, clients = set[int](), {e["client"] for e in theirs if "client" in e}
    for at, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        who = f"client {one['client']} in round {number}" if "client" in one else f"round {number}"
        for key in ("event", "client", "stage", "examples", "steps", "totals"):
            if one.get(key) != other.get(key):
                return f"{who} has {key} {one.get(key)} there, and {other.get(key)} here", strays
        for key in ("bytes_up", "bytes_down"):
            if not math.isclose(one.get(key, 0), other.get(key, 0), rel_tol=SENT):
                return f"{who} has {key} {one.get(key)} there, and {other.get(key)} here", strays
        if behind + _led_to(theirs, at) > STEPS:
            continue
        if beyond := _losses_apart(one, other, LOSS[min(number, len(LOSS)) - 1]):
            strays.add(one.get("client", SERVER))
            if len(strays) > STRAYS * len(clients):
                return (
                    f"the loss {beyond[0]} of {who} is {beyond[1]:.6g} there, and {beyond[2]} here",
                    strays,
                )
        for what, has, wants, of in () if strays else _accuracies(one, other, images):
            if abs(has - wants) > max(IMAGES / max(of, 1), POINTS) + 1e-12:
                return (
                    f"the accuracy {what} {number} is {has:.4f} there, and {wants:.4f} here",
                    strays,
                )
    return "", strays


def _accuracies(one: Event, other: Event, images: int) -> Iterator[tuple[str, float, float, int]]:
    """Accuracies of a round, or of a task's end by test set: what of, there, here, and of how many
    images.
    """
    if one["event"] in ("initial", "round"):
        yield "of round", one["accuracy"] or 0, other["accuracy"] or 0, images
    if one["event"] == "task":
        for has, wants, totals in zip(one["correct"], other["correct"], one["totals"], strict=True):
            of = max(sum(totals), 1)
            yield "at the task's end after round", sum(has) / of, sum(wants) / of, of


def _losses_apart(
    one: Event, other: Event, within: float
) -> tuple[str, float, float | None] | None:
    """A term of a client's loss that is further apart than that: its name, and both values."""
    for term, value in one.get("loss", {}).items():
        here = other.get("loss", {}).get(term)
        if not math.isclose(
            value, math.nan if here is None else here, rel_tol=within, abs_tol=within
        ):
            return term, value, here
    return None


def _rounds(folder: Path) -> dict[int, list[Event]]:
    """A journal's events by round, without times: 0 is before round 1; a run that diverged ends in
    a part of one.
    """
    events: dict[int, list[Event]] = {0: []}
    for event in read_journal(folder / "journal.jsonl")[1:]:
        events.setdefault(event.get("round", 0), []).append(without_times(event))
    return events


def _start(folder: Path) -> Event:
    start = read_journal(folder / "journal.jsonl", 1)[0]
    return {k: v for k, v in without_times(start).items() if k not in NOT_SAME}


def _images(folder: Path) -> int:
    counts = read_journal(folder / "journal.jsonl", 1)[0].get("test_counts", [])
    return int(sum(counts))
