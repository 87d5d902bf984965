"""Forgetting and accuracy against one number in which runs differ: of the split, or of the
method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.report.figures import COLOURS, PERCENT, Figure, flat_range, layout, plain, rounded
from fedstill.report.groups import Group, differing, group_labels, method_of
from fedstill.report.markup import Html, figure, grid, section, sentence

NOT_THAT = ("partition.seed", "partition.min_size", "partition.clients")
SHOWN = {
    False: (("forgetting", "Forgetting F"), ("accuracy", "Accuracy")),
    True: (
        ("personal_forgetting", "Forgetting at clients"),
        ("personal_accuracy", "Accuracy for the clients"),
    ),
}
"""Key and title of what is drawn; True: of runs whose clients have models of their own."""
MORE_UNEVEN = {"alpha": "smaller is more uneven", "shards": "fewer classes a client is more uneven"}


def heterogeneity(groups: Sequence[Group]) -> Html | None:
    """Accuracy and forgetting over a parameter of the split; None if no such parameter varies."""
    says = (
        "Each line is one method on splits that differ in one number only. A method that is robust "
        "to uneven "
        "data has a flat line."
    )
    return _section("heterogeneity", "Effect of uneven data", says, _figures(groups, "partition"))


def sensitivity(groups: Sequence[Group]) -> Html | None:
    """Accuracy and forgetting over a number of the method; None if none varies with all else
    equal.
    """
    says = (
        "Each line is one method on one split; its runs differ in one number only. Dotted: other "
        "methods on "
        "that split. A flat line means that the number needs no tuning."
    )
    return _section("sensitivity", "Effect of a hyper-parameter", says, _figures(groups, "method"))


def _section(name: str, title: str, says: str, figures: Sequence[Html]) -> Html | None:
    return section(title, sentence(says), grid(figures), name=name) if figures else None


def _figures(groups: Sequence[Group], table: str) -> list[Html]:
    figures = []
    for key in _varied(groups, f"{table}."):
        series = _series(groups, key)
        if not series:
            continue
        name = key.rpartition(".")[2]
        hint = f" ({MORE_UNEVEN[name]})" if name in MORE_UNEVEN and table == "partition" else ""
        measured = {g.own_models for points in series.values() for _, g in points}
        for measure, title in (shown for own in sorted(measured) for shown in SHOWN[own]):
            says = (
                f"{title} after the last round over {name}{hint}; bars are one standard deviation "
                "over seeds."
            )
            beside = _beside(groups, series) if table == "method" else []
            figures.append(
                figure([_drawn(series, measure, name, beside)], says, f"{title} against {name}")
            )
    return figures


def _varied(groups: Sequence[Group], prefix: str) -> list[str]:
    keys = [
        k
        for k in differing([g.settings for g in groups])
        if k.startswith(prefix) and k not in NOT_THAT
    ]
    return [k for k in keys if any(_number(g.settings.get(k)) for g in groups)]


def _beside(
    groups: Sequence[Group], series: Mapping[str, Sequence[tuple[float, Group]]]
) -> list[Group]:
    """Groups of other methods, on the splits and with the plans of those that are drawn."""
    drawn = [g for points in series.values() for _, g in points]
    methods, around = {method_of(g.settings) for g in drawn}, {_around(g) for g in drawn}
    return [g for g in groups if method_of(g.settings) not in methods and _around(g) in around]


def _around(group: Group) -> str:
    rest = {k: v for k, v in group.settings.items() if not k.startswith("method.")}
    return json.dumps(rest, sort_keys=True, default=str)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _series(groups: Sequence[Group], key: str) -> dict[str, list[tuple[float, Group]]]:
    buckets: dict[str, list[tuple[float, Group]]] = {}
    for group in groups:
        if _number(group.settings.get(key)):
            rest = json.dumps(
                {k: v for k, v in group.settings.items() if k != key}, sort_keys=True, default=str
            )
            buckets.setdefault(rest, []).append((float(group.settings[key]), group))
    kept = [b for b in buckets.values() if len(b) > 1]
    names = group_labels([{k: v for k, v in b[0][1].settings.items() if k != key} for b in kept])
    return {name: sorted(b, key=lambda pair: pair[0]) for name, b in zip(names, kept, strict=True)}


def _drawn(
    series: dict[str, list[tuple[float, Group]]],
    measure: str,
    name: str,
    beside: Sequence[Group] = (),
) -> Figure:
    data: list[dict[str, Any]] = []
    for i, (label, points) in enumerate(series.items()):
        values_at = [(x, s) for x, g in points if (s := g.mean_spread(measure)) is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(label),
                "x": [x for x, _ in values_at],
                "y": [rounded(s.mean) for _, s in values_at],
                "error_y": {
                    "type": "data",
                    "array": [rounded(s.std) for _, s in values_at],
                    "thickness": 1.2,
                    "width": 3,
                },
                "hovertemplate": "%{y:.2%}",
                "line": {"color": COLOURS[i % len(COLOURS)], "width": 2},
                "marker": {"size": 7},
            }
        )
    data += _dotted(series, beside, measure)
    values = sorted({x for points in series.values() for x, _ in points})
    axis = {
        "title": {"text": name},
        "tickmode": "array",
        "tickvals": values,
        "ticktext": [f"{v:g}" for v in values],
    }
    log = {"type": "log"} if values[0] > 0 else {}
    return {
        "data": data,
        "layout": layout(xaxis={**axis, **log}, yaxis=PERCENT | flat_range(data, PERCENT)),
    }


def _dotted(
    series: Mapping[str, Sequence[tuple[float, Group]]], beside: Sequence[Group], measure: str
) -> list[dict[str, Any]]:
    """A level line for each other method, in the colour of the line that it stands beside."""
    data = []
    for i, points in enumerate(series.values()):
        xs, around = [x for x, _ in points], _around(points[0][1])
        for group in (g for g in beside if _around(g) == around):
            level = group.mean_spread(measure)
            if level is not None:
                line = {"color": COLOURS[i % len(COLOURS)], "width": 1.5, "dash": "dot"}
                level_line = {"x": [min(xs), max(xs)], "y": [rounded(level.mean)] * 2, "line": line}
                about = {"name": plain(group.label), "hovertemplate": "%{y:.2%}"}
                data.append({"type": "scatter", "mode": "lines", **about, **level_line})
    return data
