"""Accuracy over seconds of training, and how many of them a target accuracy takes."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.report.figures import Style, over
from fedstill.report.groups import Group
from fedstill.report.markup import Cell, Html, figure, html_table, key, labelled, section, sentence
from fedstill.report.numbers import spread, three_digits
from fedstill.report.runs import Run
from fedstill.report.series import over_seeds, trained
from fedstill.report.summary import NONE

STEP, MOST = 0.05, 5


def targets(groups: Sequence[Group], style: Style) -> Html | None:
    """Accuracy by seconds of training, and the seconds to each of some targets; None if nothing was
    measured.
    """
    some = [g for g in groups if len(over_seeds(g, "accuracy").rounds) > 1 and any(trained(g).mean)]
    if not some:
        return None
    goals = _goals(some)
    head: list[Cell] = ["", "teachers", *(f"{100 * goal:.0f} %" for goal in goals)]
    body: list[list[Cell]] = [
        [labelled(g, style), _teachers(g), *(_seconds(g, goal) for goal in goals)] for g in some
    ]
    says = (
        "Seconds of training, summed over clients, whether they trained one after another or side "
        "by side. "
        "Measuring and saving are left out."
    )
    reached = (
        "Seconds of training until the accuracy first reaches a target: mean ± one standard "
        "deviation over "
        "the seeds that reach it, and how many seeds reach it if not all do. Teachers: how many "
        "models teach "
        "a client, on average."
    )
    times = (
        "A method that takes longer for a round lies further right. Both axes are means over seeds "
        "after each round."
    )
    drawn = figure(
        [over(some, style, trained, "seconds of training")],
        times,
        "Accuracy by seconds of training",
    )
    parts = [sentence(says), key(some, style), drawn]
    if goals:
        parts += [sentence(reached), html_table(head, body, "numbers wide")]
    return section("Time to target", *parts, name="targets")


def seconds_to(run: Run, goal: float) -> float | None:
    """Seconds of training until a run's accuracy first reaches a goal; None if it never does."""
    passed = 0.0
    for event in run.rounds:
        passed += event.get("seconds_clients") or 0.0
        if event.get("accuracy") is not None and event["accuracy"] >= goal:
            return passed
    return None


def _goals(groups: Sequence[Group]) -> list[float]:
    """The highest few multiples of 5 % that any run reaches."""
    best = max(
        e["accuracy"]
        for g in groups
        for r in g.started
        for e in r.rounds
        if e.get("accuracy") is not None
    )
    steps = int(best / STEP + 1e-9)
    return [STEP * n for n in range(max(1, steps - MOST + 1), steps + 1)]


def _seconds(group: Group, goal: float) -> str:
    times = [s for r in group.started if (s := seconds_to(r, goal)) is not None]
    value = spread(times)
    if value is None:
        return NONE
    text = three_digits(value.mean, *([value.std] if value.runs > 1 else []))
    return (
        text
        if len(times) == len(group.started)
        else f"{text} ({len(times)} of {len(group.started)})"
    )


def _teachers(group: Group) -> str:
    counts = [
        len(e["teachers"])
        for r in group.started
        for e in r.clients
        if isinstance(e.get("teachers"), list)
    ]
    return f"{sum(counts) / len(counts):.3g}" if counts else NONE
