"""Bars of what a run costs: seconds by phase and megabytes, as Plotly's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstill.report.figures import HEIGHT, Figure, Style, faint, layout, named, plain, rounded
from fedstill.report.groups import Group
from fedstill.report.measured import seconds
from fedstill.report.numbers import spread, three_digits
from fedstill.report.series import phases

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
