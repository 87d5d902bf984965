"""Pictures of features and units: t-SNE, classes on a circle, and which class each unit stands
for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedstill.report.figures import Figure, Style, layout, plain
from fedstill.report.groups import Group
from fedstill.report.markup import (
    Html,
    choice,
    figure,
    grid,
    labelled,
    named_colour,
    section,
    sentence,
)
from fedstill.report.measured import Look, last_looks, matrix, reading

CLASSES = (
    "#4E79A7", "#F28E2B", "#59A14F", "#E15759", "#B07AA1",
    "#9C755F", "#EDC948", "#76B7B2", "#FF9DA7", "#79706E",
)  # fmt: skip
"""The colour of each class, the same in all these pictures; they repeat after ten."""

GLOBALS = {"received": "#6B7280", "aggregated": "#D7263D"}
BARE = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""}
HIDDEN_AXIS = {"visible": False}
SEEN = 0.01
"""Below this share of the highest bump nothing is drawn: there the circle is bare."""

BANDWIDTH = 8.0
"""Degrees of the Gaussian that smooths counts of angles."""


def tsne(groups: Sequence[Group], style: Style) -> Html | None:
    """Test features under the global and local models on one plane; None if it was not measured."""
    looks = last_looks(groups, "tsne")
    if not looks:
        return None
    says = (
        "Every point is a test image as one of the models sees it. Images are near each other if "
        "their "
        "features are alike (joint t-SNE; large distances mean nothing). By class: where classes "
        "mix, the "
        "models cannot tell them apart. By model: a local model whose points lie on those of the "
        "global model"
        " forgot little; a group of points of one model only has features that no other model has."
    )
    figures = [
        figure(
            [_places(look, by) for by in ("class", "model")],
            f"{look.place}: {says}",
            labelled(look.group, style, look.place),
            "tsne",
        )
        for look in looks
    ]
    parts = [choice("tsne", "Colour by", ["class", "model"]), grid(figures)]
    return section("Features of the test examples", sentence(says), *parts, name="tsne")


def sphere(groups: Sequence[Group], style: Style) -> Html | None:
    """Where the classes are on the circle, model by model; None if it was not measured."""
    looks = last_looks(groups, "sphere")
    if not looks:
        return None
    says = (
        "Features of this network are points on a circle. Each bump is a class: its position is "
        "the direction"
        " of the class's features, its height the number of test examples there. If bumps of a "
        "local model "
        "merge or move, it has forgotten those classes."
    )
    figures = [
        figure([_circles(look)], f"{look.place}: {says}", labelled(look.group, style, look.place))
        for look in looks
    ]
    return section(
        "Classes on the circle", sentence(says), _class_key(looks[0].group), *figures, name="sphere"
    )


def units(groups: Sequence[Group], style: Style) -> Html | None:
    """Which class each unit of the last hidden layer stands for, model by model; None if it was not
    measured.
    """
    looks = last_looks(groups, "units")
    if not looks:
        return None
    says = (
        "Each column is a unit of the last hidden layer. Its colour is the class for which the "
        "unit is most "
        "active. Columns are sorted by the model that clients received (top row). A model whose "
        "row has the "
        "same colours kept what it knew."
    )
    figures = [
        figure([_units(look)], f"{look.place}: {says}", labelled(look.group, style, look.place))
        for look in looks
    ]
    return section(
        "The class of each unit",
        sentence(says),
        _class_key(looks[0].group),
        grid(figures),
        name="units",
    )


def class_colour(number: int) -> str:
    """The colour of a class."""
    return CLASSES[number % len(CLASSES)]


def _places(look: Look, by: str) -> Figure:
    with reading(look) as event:
        models, labels = [str(m) for m in event["models"]], [int(v) for v in event["labels"]]
        x, y = (matrix(event[k], len(models), len(labels)) for k in ("x", "y"))
        traces = []
        if by == "class":
            for c in sorted(set(labels)):
                own = [
                    (x[m][i], y[m][i])
                    for m in range(len(models))
                    for i, v in enumerate(labels)
                    if v == c
                ]
                traces.append(dots(plain(class_name(look, c)), own, class_colour(c), 4))
        else:
            local = [m for m in models if m not in GLOBALS]
            for name in [*local, *(m for m in models if m in GLOBALS)]:
                colour = GLOBALS.get(name) or class_colour(local.index(name))
                m = models.index(name)
                traces.append(
                    dots(
                        plain(name),
                        list(zip(x[m], y[m], strict=True)),
                        colour,
                        5 if name in GLOBALS else 4,
                    )
                )
    return on_plane(traces)


def on_plane(traces: Sequence[dict[str, Any]]) -> Figure:
    """Points without axes, as t-SNE's have no units."""
    about = layout(
        height=460,
        hovermode="closest",
        xaxis=HIDDEN_AXIS,
        yaxis={**HIDDEN_AXIS, "scaleanchor": "x"},
    )
    return {
        "data": list(traces),
        "layout": {**about, "legend": {**about["legend"], "itemsizing": "constant"}},
    }


def dots(
    name: str, points: Sequence[tuple[float, float]], colour: str, size: int
) -> dict[str, Any]:
    """Points of one kind."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [p[0] for p in points],
        "y": [p[1] for p in points],
        "marker": {"size": size, "color": colour, "opacity": 0.75, "line": {"width": 0}},
        "hovertemplate": f"{name}<extra></extra>",
    }


def _circles(look: Look) -> Figure:
    traces: list[dict[str, Any]] = []
    notes = []
    with reading(look) as event:
        models, classes = [str(m) for m in event["models"]], len(look.group.classes)
        bins = len(event["counts"][0][0])
        for i, (name, by_class) in enumerate(zip(models, event["counts"], strict=True)):
            densities = [smoothed(row) for row in matrix(by_class, classes, bins)]
            top = max((max(d) for d in densities), default=0.0) or 1.0
            traces.append(_ring(3.2 * i, [1.0] * bins, "#9aa4b0", ""))
            for c, density in enumerate(densities):
                radius = [1 + 0.5 * d / top if d > SEEN * top else None for d in density]
                traces.append(_ring(3.2 * i, radius, class_colour(c), plain(class_name(look, c))))
            notes.append({"text": plain(name), "x": 3.2 * i, "y": 0, "showarrow": False})
    span = [-1.6, 3.2 * (len(models) - 1) + 1.6]
    axes = {
        "xaxis": {**HIDDEN_AXIS, "range": span},
        "yaxis": {**HIDDEN_AXIS, "scaleanchor": "x", "range": [-1.6, 1.6]},
    }
    return {
        "data": traces,
        "layout": {
            **layout(height=280, hovermode="closest", showlegend=False, **axes),
            "annotations": notes,
        },
    }


def _ring(centre: float, radius: Sequence[float | None], colour: str, name: str) -> dict[str, Any]:
    steps = len(radius)
    angles = [-math.pi + 2 * math.pi * (k + 0.5) / steps for k in range(steps)]
    x = [
        None if r is None else round(centre + r * math.cos(a), 4)
        for a, r in zip(angles, radius, strict=True)
    ]
    y = [
        None if r is None else round(r * math.sin(a), 4)
        for a, r in zip(angles, radius, strict=True)
    ]
    line = {"color": colour, "width": 2 if name else 1}
    hover = {"hovertemplate": f"{name}<extra></extra>"} if name else {"hoverinfo": "skip"}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [*x, x[0]],
        "y": [*y, y[0]],
        "line": line,
        **hover,
    }


def smoothed(counts: Sequence[float], bandwidth: float = BANDWIDTH) -> list[float]:
    """Counts around a circle as a density: each is spread by a Gaussian of so many degrees; the sum
    stays.
    """
    bins = len(counts)
    step = 360 / bins
    kernel = [math.exp(-0.5 * (min(k, bins - k) * step / bandwidth) ** 2) for k in range(bins)]
    total = sum(kernel)
    return [
        sum(counts[j] * kernel[(i - j) % bins] for j in range(bins)) / total for i in range(bins)
    ]


def _units(look: Look) -> Figure:
    with reading(look) as event:
        models = [str(m) for m in event["models"]]
        rows = matrix(event["classes"], len(models), len(event["classes"][0]))
        order = sorted(range(len(rows[0])), key=lambda u: rows[0][u])
        shown = [[int(row[u]) % len(CLASSES) for u in order] for row in rows]
        names = [[plain(class_name(look, int(row[u]))) for u in order] for row in rows]
    steps = [(i + j) / len(CLASSES) for i in range(len(CLASSES)) for j in (0, 1)]
    colours = [CLASSES[i] for i in range(len(CLASSES)) for _ in (0, 1)]
    trace = {
        "type": "heatmap",
        "y": [plain(m) for m in models],
        "z": shown,
        "customdata": names,
        "zmin": 0,
        "zmax": len(CLASSES),
        "colorscale": [list(pair) for pair in zip(steps, colours, strict=True)],
        "showscale": False,
        "ygap": 2,
        "hovertemplate": "%{y}: unit stands for %{customdata}<extra></extra>",
    }
    axes = {
        "xaxis": {**BARE, "title": {"text": f"{len(order)} units"}},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    return {
        "data": [trace],
        "layout": layout(
            height=90 + 26 * len(models), hovermode="closest", showlegend=False, **axes
        ),
    }


def class_name(look: Look, number: int) -> str:
    """A class's name, or its number where it has none."""
    names = look.group.classes
    return str(names[number]) if number < len(names) else str(number)


def _class_key(group: Group) -> Html:
    names = [
        named_colour(class_colour(i), n) for i, n in enumerate(group.classes[: 2 * len(CLASSES)])
    ]
    return Html(f'<div class="key">{"".join(n.text for n in names)}</div>')
