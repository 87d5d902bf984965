"""The sections on where a network has its classes: on a circle of features, in units of its last
hidden layer, and between decision boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedstill.measures.features import STEPS
from fedstill.report.blocks import (
    Block,
    Chart,
    ColourKey,
    Gallery,
    Label,
    Paragraph,
    Section,
    group_label,
)
from fedstill.report.figures import (
    COUNTS,
    Figure,
    Style,
    Trace,
    escaped,
    layout,
    new_trace,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import Look, last_looks, looks, matrix, reading
from fedstill.running.runs import Group

CLASS_COLOURS = (
    "#4E79A7", "#F28E2B", "#59A14F", "#E15759", "#B07AA1",
    "#9C755F", "#EDC948", "#76B7B2", "#FF9DA7", "#79706E",
)  # fmt: skip
"""The colour of each class, the same in all pictures; they repeat after ten."""

BARE_AXIS = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""}
HIDDEN_AXIS = {"visible": False}


def class_colour(number: int) -> str:
    """The colour of a class."""
    return CLASS_COLOURS[number % len(CLASS_COLOURS)]


def class_name(group: Group, number: int) -> str:
    """A class's name, or its number if it has no name."""
    names = group.classes
    if number < len(names):
        return str(names[number])
    return str(number)


def class_key(group: Group) -> ColourKey:
    """The colours of the first classes of a group."""
    names = group.classes[: 2 * len(CLASS_COLOURS)]
    return ColourKey([Label(class_colour(i), name) for i, name in enumerate(names)])


def class_scale() -> list[list[Any]]:
    """A colour scale with a step for each colour of a class."""
    count = len(CLASS_COLOURS)
    scale: list[list[Any]] = []
    for index, colour in enumerate(CLASS_COLOURS):
        scale.append([index / count, colour])
        scale.append([(index + 1) / count, colour])
    return scale


# ---- classes on the circle -----------------------------------------------------------------------


CIRCLE_DISTANCE = 3.2
"""The distance between the centres of two circles, in radii."""
HIGHEST_BUMP = 0.5
"""The height of the highest bump of a circle, in radii."""
LOWEST_BUMP = 0.01
"""Densities below this share of the highest bump are not drawn."""
BANDWIDTH = 8.0
"""Degrees of the Gaussian that smooths counts of angles."""

ABOUT_CIRCLES = (
    "Features of this network are points on a circle. Each bump is a class: its position is the "
    "direction of the class's features, its height the number of test examples there. If bumps of "
    "a local model merge or move, it has forgotten those classes."
)


def sphere(report: Report) -> Section | None:
    """The classes on the circle of features, model by model; None if they were not measured."""
    group_looks = last_looks(report.groups, "sphere")
    if not group_looks:
        return None
    charts = [_chart(look, _circles(look), ABOUT_CIRCLES, report.style) for look in group_looks]
    blocks = [Paragraph(ABOUT_CIRCLES), class_key(group_looks[0].group), *charts]
    return Section("sphere", "Classes on the circle", blocks)


def _chart(look: Look, figure: Figure, about: str, style: Style) -> Chart:
    """The chart of a group's look, under the group's label."""
    label = group_label(look.group, style, look.place)
    return Chart([figure], f"{look.place}: {about}", label, is_explained=True)


def _circles(look: Look) -> Figure:
    """A circle for each model, side by side."""
    traces: list[Trace] = []
    notes = []
    with reading(look) as event:
        models = [str(model) for model in event["models"]]
        for index, (model, counts) in enumerate(zip(models, event["counts"], strict=True)):
            centre = CIRCLE_DISTANCE * index
            traces += _circle(look, counts, centre)
            notes.append({"text": escaped(model), "x": centre, "y": 0, "showarrow": False})
    last_centre = CIRCLE_DISTANCE * (len(models) - 1)
    axes = layout(
        height=280,
        hovermode="closest",
        showlegend=False,
        xaxis={**HIDDEN_AXIS, "range": [-1.6, last_centre + 1.6]},
        yaxis={**HIDDEN_AXIS, "scaleanchor": "x", "range": [-1.6, 1.6]},
        annotations=notes,
    )
    return Figure(traces, axes)


def _circle(look: Look, counts: Sequence[Sequence[float]], centre: float) -> list[Trace]:
    """The bare circle of a model, and the bumps of its classes; counts (C, bins)."""
    bins = len(counts[0])
    densities = [smoothed(row) for row in matrix(counts, len(look.group.classes), bins)]
    highest = max(map(max, densities), default=0.0)
    traces = [_ring(centre, [1.0] * bins, "#9aa4b0", "")]
    for number, density in enumerate(densities):
        radii = [_radius(value, highest) for value in density]
        name = escaped(class_name(look.group, number))
        traces.append(_ring(centre, radii, class_colour(number), name))
    return traces


def _radius(density: float, highest: float) -> float | None:
    """The distance of a bump's line from the centre; None if the density is too low to draw."""
    if density <= LOWEST_BUMP * highest:
        return None
    return 1 + HIGHEST_BUMP * density / highest


def _ring(centre: float, radii: Sequence[float | None], colour: str, name: str) -> Trace:
    """A closed line around a centre. Without a name, it is thin and has no hover text."""
    x: list[float | None] = []
    y: list[float | None] = []
    for step, radius in enumerate(radii):
        angle = -math.pi + 2 * math.pi * (step + 0.5) / len(radii)
        if radius is None:
            x.append(None)
            y.append(None)
        else:
            x.append(round(centre + radius * math.cos(angle), 4))
            y.append(round(radius * math.sin(angle), 4))
    hover: dict[str, Any] = {"hoverinfo": "skip"}
    width = 1
    if name:
        hover = {"hovertemplate": f"{name}<extra></extra>"}
        width = 2
    return new_trace(
        "scatter",
        mode="lines",
        name=name,
        x=[*x, x[0]],
        y=[*y, y[0]],
        line={"color": colour, "width": width},
        **hover,
    )


def smoothed(counts: Sequence[float], bandwidth: float = BANDWIDTH) -> list[float]:
    """Smooth counts around a circle by a Gaussian kernel; the sum stays the same.

    bandwidth: the standard deviation of the kernel in degrees.
    """
    bins = len(counts)
    bin_width = 360 / bins
    degrees = [min(step, bins - step) * bin_width for step in range(bins)]
    kernel = [_gaussian(angle / bandwidth) for angle in degrees]
    total = sum(kernel)
    densities = []
    for centre in range(bins):
        weighted = [count * kernel[(centre - index) % bins] for index, count in enumerate(counts)]
        densities.append(sum(weighted) / total)
    return densities


def _gaussian(z: float) -> float:
    return math.exp(-0.5 * z**2)


# ---- the class of each unit ----------------------------------------------------------------------


ABOUT_UNITS = (
    "Each column is a unit of the last hidden layer. Its colour is the class for which the unit is "
    "most active. Columns are sorted by the model that clients received (top row). A model whose "
    "row has the same colours has not forgotten these classes."
)


def units(report: Report) -> Section | None:
    """The class of each unit of the last hidden layer, model by model; None if it was not
    measured.
    """
    group_looks = last_looks(report.groups, "units")
    if not group_looks:
        return None
    charts = [_chart(look, _units(look), ABOUT_UNITS, report.style) for look in group_looks]
    blocks = [Paragraph(ABOUT_UNITS), class_key(group_looks[0].group), Gallery(charts)]
    return Section("units", "Class of each unit", blocks)


def _units(look: Look) -> Figure:
    """A row of units for each model, coloured by class."""
    with reading(look) as event:
        models = [str(model) for model in event["models"]]
        classes = matrix(event["classes"], len(models), len(event["classes"][0]))
        # Units are sorted by their classes in the first row, the model that clients received.
        received = classes[0]
        order = sorted(range(len(received)), key=lambda unit: received[unit])
        rows = [[int(row[unit]) for unit in order] for row in classes]
        names = [[escaped(class_name(look.group, number)) for number in row] for row in rows]
    trace = _class_map(
        rows,
        names,
        y=[escaped(model) for model in models],
        ygap=2,
        hovertemplate="%{y}: unit stands for %{customdata}<extra></extra>",
    )
    axes = layout(
        height=90 + 26 * len(models),
        hovermode="closest",
        showlegend=False,
        xaxis={**BARE_AXIS, "title": {"text": f"{len(order)} units"}},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )
    return Figure([trace], axes)


def _class_map(
    classes: Sequence[Sequence[int]], names: Sequence[Sequence[str]], **options: Any
) -> Trace:
    """A map of cells in the colours of their classes; names: the class names of the cells."""
    return new_trace(
        "heatmap",
        z=[[number % len(CLASS_COLOURS) for number in row] for row in classes],
        customdata=names,
        zmin=0,
        zmax=len(CLASS_COLOURS),
        colorscale=class_scale(),
        showscale=False,
        **options,
    )


# ---- decision boundaries of a client that asked, stage by stage ----------------------------------


STAGE_TITLES = {"fit": "alone", "transfer": "phase 1", "refine": "phase 2"}
PLANE_HEIGHT = 400

ABOUT_BOUNDARIES = (
    "Each point is a test example of a class that the client asked for (ringed) or has. The axes "
    "are the first two principal components of the model's features. The background is the class "
    "that the model's head predicts there. Below: accuracy by class on the whole test set."
)


def boundaries(report: Report) -> Section | None:
    """For each group, the planes of its first run with any; None if they were not measured."""
    blocks: list[Block] = [Paragraph(ABOUT_BOUNDARIES)]
    for group in report.groups:
        stage_looks = _stage_looks(group)
        if stage_looks:
            blocks.append(group_label(group, report.style))
            blocks.append(Gallery([_stage(look) for look in stage_looks], "small"))
    if len(blocks) == 1:
        return None
    return Section("boundaries", "Decision boundaries", blocks)


def _stage_looks(group: Group) -> list[Look]:
    """The looks of the first run with any: in the last round in which the client trained alone, and
    in the last round.
    """
    all_looks = list(looks(group, "boundaries"))
    if not all_looks:
        return []
    first_run = all_looks[0].run
    run_looks = [look for look in all_looks if look.run is first_run]
    alone = [look for look in run_looks if look.event["name"] == "fit"]
    with_peers = [look for look in run_looks if look.event["name"] != "fit"]

    last_round = run_looks[-1].event["round"]
    stage_looks = []
    if alone:
        # A client that asks only once trains alone in an earlier round.
        last_round_alone = max(look.event["round"] for look in alone)
        stage_looks += [look for look in alone if look.event["round"] == last_round_alone]
    stage_looks += [look for look in with_peers if look.event["round"] == last_round]
    return stage_looks


def _stage(look: Look) -> Chart:
    """The plane of features after a stage, with test examples; below it, accuracy by class."""
    name = str(look.event["name"])
    with reading(look):
        axes = layout(
            height=PLANE_HEIGHT,
            hovermode="closest",
            xaxis=BARE_AXIS,
            yaxis={**BARE_AXIS, "domain": [0.3, 1]},
            xaxis2={"type": "category", "anchor": "y2", "automargin": True},
            yaxis2={**BARE_AXIS, "type": "category", "domain": [0, 0.1]},
        )
        traces = [_background(look), *_points(look), _accuracies(look)]
        client = look.event["client"]
    title = STAGE_TITLES.get(name, name)
    return Chart([Figure(traces, axes)], f"{look.place}, client {client}", title)


def _background(look: Look) -> Trace:
    """The class that the head predicts at each point of a grid over the plane."""
    event = look.event
    class_names = [escaped(name) for name in look.group.classes]
    plane = []
    plane_names = []
    for row in matrix(event["plane"], STEPS, STEPS):
        numbers = [int(number) for number in row]
        plane.append(numbers)
        plane_names.append([class_names[number] for number in numbers])
    return _class_map(
        plane,
        plane_names,
        x=_steps(*event["x_range"]),
        y=_steps(*event["y_range"]),
        opacity=0.35,
        hovertemplate="the head says %{customdata}<extra></extra>",
    )


def _steps(low: float, high: float) -> list[float]:
    """The positions of the grid's points along an axis."""
    return [rounded(low + (high - low) * step / (STEPS - 1)) for step in range(STEPS)]


def _points(look: Look) -> list[Trace]:
    """The test examples of each class that the client asked for, or has."""
    event = look.event
    traces = []
    for number in [*event["query"], *event["own"]]:
        name = escaped(look.group.classes[number])
        ring: dict[str, Any] = {"width": 0}
        if number in event["query"]:
            ring = {"width": 1.5, "color": "black"}
        indices = [index for index, label in enumerate(event["labels"]) if label == number]
        trace = new_trace(
            "scatter",
            mode="markers",
            name=name,
            x=[event["x"][index] for index in indices],
            y=[event["y"][index] for index in indices],
            marker={"size": 6, "color": class_colour(number), "line": ring},
            hovertemplate=f"{name}<extra></extra>",
        )
        traces.append(trace)
    return traces


def _accuracies(look: Look) -> Trace:
    """The accuracy of each class as a row of cells, on axes of its own below the plane."""
    event = look.event
    names = []
    values = []
    texts = []
    for number in [*event["query"], *event["own"]]:
        name = escaped(look.group.classes[number])
        if number in event["query"]:
            name = f"{name} (asked for)"
        accuracy = event["accuracy"][number]
        value = None
        text = ""
        if accuracy is not None:
            value = rounded(float(accuracy))
            text = f"{value:.0%}"
        names.append(name)
        values.append(value)
        texts.append(text)
    return new_trace(
        "heatmap",
        xaxis="x2",
        yaxis="y2",
        x=names,
        y=["accuracy"],
        z=[values],
        text=[texts],
        texttemplate="%{text}",
        zmin=0,
        zmax=1,
        colorscale=COUNTS,
        showscale=False,
        hovertemplate="%{x}: %{z:.1%}<extra></extra>",
    )
