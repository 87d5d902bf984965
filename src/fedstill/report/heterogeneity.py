"""Forgetting and accuracy against how unevenly the data are split, over runs that differ in nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fedstill.report.figures import COLOURS, PERCENT, Figure, layout, plain, rounded
from fedstill.report.groups import Group, differing, labels_of
from fedstill.report.markup import Html, figure, grid, section, sentence

NOT_THAT = ("partition.seed", "partition.min_size", "partition.clients")
SAYS = {"alpha": "smaller is more uneven", "shards": "fewer classes a client is more uneven"}


def heterogeneity(groups: Sequence[Group]) -> Html | None:
    """Accuracy and forgetting over a parameter of the split; None if no such parameter varies."""
    figures = []
    for key in _varied(groups):
        series = _series(groups, key)
        if not series:
            continue
        name = key.rpartition(".")[2]
        hint = f" ({SAYS[name]})" if name in SAYS else ""
        for measure, title in (("forgetting", "Forgetting F"), ("accuracy", "Accuracy")):
            says = f"{title} after the last round over {name}{hint}; bars are one standard deviation over seeds."
            figures.append(figure([_drawn(series, measure, name)], says, f"{title} against {name}"))
    if not figures:
        return None
    says = (
        "Each line is one method on splits that differ in one number only. A method that holds against uneven data has "
        "a flat line."
    )
    return section("The more uneven the data", sentence(says), grid(figures), name="heterogeneity")


def _varied(groups: Sequence[Group]) -> list[str]:
    keys = [k for k in differing([g.settings for g in groups]) if k.startswith("partition.") and k not in NOT_THAT]
    return [k for k in keys if any(_number(g.settings.get(k)) for g in groups)]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _series(groups: Sequence[Group], key: str) -> dict[str, list[tuple[float, Group]]]:
    buckets: dict[str, list[tuple[float, Group]]] = {}
    for group in groups:
        if _number(group.settings.get(key)):
            rest = json.dumps({k: v for k, v in group.settings.items() if k != key}, sort_keys=True, default=str)
            buckets.setdefault(rest, []).append((float(group.settings[key]), group))
    kept = [b for b in buckets.values() if len(b) > 1]
    names = labels_of([{k: v for k, v in b[0][1].settings.items() if k != key} for b in kept])
    return {name: sorted(b, key=lambda pair: pair[0]) for name, b in zip(names, kept, strict=True)}


def _drawn(series: dict[str, list[tuple[float, Group]]], measure: str, name: str) -> Figure:
    data = []
    for i, (label, points) in enumerate(series.items()):
        found = [(x, s) for x, g in points if (s := g.mean_spread(measure)) is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(label),
                "x": [x for x, _ in found],
                "y": [rounded(s.mean) for _, s in found],
                "error_y": {"type": "data", "array": [rounded(s.std) for _, s in found], "thickness": 1.2, "width": 3},
                "hovertemplate": "%{y:.2%}",
                "line": {"color": COLOURS[i % len(COLOURS)], "width": 2},
                "marker": {"size": 7},
            }
        )
    values = sorted({x for points in series.values() for x, _ in points})
    axis = {"title": {"text": name}, "tickmode": "array", "tickvals": values, "ticktext": [f"{v:g}" for v in values]}
    log = {"type": "log"} if values[0] > 0 else {}
    return {"data": data, "layout": layout(xaxis={**axis, **log}, yaxis=PERCENT)}
