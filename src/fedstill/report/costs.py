"""What a run costs: seconds by phase, megabytes, and the time to a target accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstill.report.figures import (
    HEIGHT,
    Figure,
    Style,
    faint,
    layout,
    named,
    over,
    plain,
    rounded,
)
from fedstill.report.markup import Cell, Html, figure, html_table, key, labelled, section, sentence
from fedstill.report.series import over_seeds, phases, seconds, trained
from fedstill.report.summary import NONE, three_digits
from fedstill.running.groups import Group, spread
from fedstill.running.runs import Run

# Bars of what a run costs: seconds by phase and megabytes, as Plotly's JSON.


STRENGTHS = (1.0, 0.55, 0.25)
"""How opaque the parts of a bar are, the first first."""


def seconds_by_phase(groups: Sequence[Group], style: Style) -> Figure:
    """Seconds a run, by phase: a bar a group, mean over seeds."""
    by_group = {id(g): [phases(r) for r in g.started] for g in groups}
    parts = {
        name: [_average([getattr(p, name) for p in by_group[id(g)]]) for g in groups]
        for name in ("training", "measuring", "other")
    }
    return _bars(groups, style, parts, "s", stacked=True)


def seconds_by_measure(groups: Sequence[Group], style: Style) -> Figure:
    """Seconds a run that each measure took: a bar a measure and group, mean over seeds."""
    by_group = [seconds(g) for g in groups]
    names = list(dict.fromkeys(n for each in by_group for n in each))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": named(group),
            "y": [plain(n) for n in names],
            "x": [rounded(each.get(n, 0.0)) for n in names],
            "marker": {"color": style.colour(group)},
            "hovertemplate": f"%{{y}}, {named(group)}: %{{x:,.3~r}} s<extra></extra>",
        }
        for group, each in zip(groups, by_group, strict=True)
    ]
    about = layout(
        barmode="group",
        height=max(HEIGHT, 60 + 14 * len(names) * len(groups)),
        showlegend=False,
        hovermode="closest",
        xaxis={"title": {"text": "seconds"}},
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return {"data": data, "layout": about}


def megabytes(groups: Sequence[Group], style: Style) -> Figure:
    """Megabytes a run, up and down: two bars a group, mean over seeds."""
    parts = {}
    for name in ("up", "down"):
        means = [g.mean_spread(f"bytes_{name}") for g in groups]
        parts[name] = [m.mean / 1e6 if m else 0.0 for m in means]
    return _bars(groups, style, parts, "MB", stacked=False)


def _bars(
    groups: Sequence[Group],
    style: Style,
    parts: Mapping[str, Sequence[float]],
    unit: str,
    *,
    stacked: bool,
) -> Figure:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [named(g) for g in groups],
            "x": [rounded(v) for v in values],
            "text": [f"{name} {three_digits(v)} {unit}" for v in values] if strength == 1 else None,
            "textposition": "inside",
            "insidetextanchor": "start",
            "textangle": 0,
            "marker": {"color": [faint(style.colour(g), strength) for g in groups]},
            "hovertemplate": f"%{{y}}: {name} %{{x:,.4~r}} {unit}<extra></extra>",
        }
        for (name, values), strength in zip(parts.items(), STRENGTHS, strict=False)
    ]
    about = layout(
        barmode="stack" if stacked else "group",
        height=max(HEIGHT, 90 + 30 * len(groups)),
        uniformtext={"mode": "hide", "minsize": 10},
        showlegend=False,
        hovermode="closest",
        bargap=0.35,
        xaxis={"title": {"text": "seconds" if unit == "s" else "megabytes"}},
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return {"data": data, "layout": about}


def _average(values: Sequence[float]) -> float:
    average = spread(values)
    return average.mean if average else 0.0


# Accuracy over seconds of training, and how many of them a target accuracy takes.


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
