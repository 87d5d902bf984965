"""The sections on the classes within a network: on a circle of features, in the units of the last
hidden layer, and between decision boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedstill.methods.fit import FIT
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
    COUNT_COLOURS,
    Figure,
    Style,
    Trace,
    escaped,
    layout,
    new_trace,
    plain_layout,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import (
    Measurement,
    first_run_measurements,
    last_measurements,
    measurements,
)
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
    measured = [
        measurement
        for measurement in last_measurements(report.groups, "sphere")
        if measurement.look.names("counts")
    ]
    if not measured:
        return None
    blocks: list[Block] = [Paragraph(ABOUT_CIRCLES)]
    for comparable in _by_classes(measured):
        blocks.append(class_key(comparable[0].group))
        for measurement in comparable:
            circles = _circles(measurement)
            blocks.append(_chart(measurement, circles, ABOUT_CIRCLES, report.style))
    return Section("sphere", "Classes on the circle", blocks)


def _by_classes(measured: Iterable[Measurement]) -> list[list[Measurement]]:
    """The measurements of groups with the same classes, which share a colour key."""
    by_classes: dict[tuple[str, ...], list[Measurement]] = {}
    for measurement in measured:
        by_classes.setdefault(tuple(measurement.group.classes), []).append(measurement)
    return list(by_classes.values())


def _chart(measurement: Measurement, figure: Figure, about: str, style: Style) -> Chart:
    """The chart of a measurement, under the label of its group."""
    label = group_label(measurement.group, style, measurement.place)
    return Chart([figure], f"{measurement.place}: {about}", label, is_explained=True)


def _circles(measurement: Measurement) -> Figure:
    """A circle for each model, side by side."""
    traces: list[Trace] = []
    notes = []
    models = measurement.look.names("counts")
    for index, model in enumerate(models):
        centre = CIRCLE_DISTANCE * index
        traces += _circle(measurement, model, centre)
        notes.append({"text": escaped(model), "x": centre, "y": 0, "showarrow": False})
    last_centre = CIRCLE_DISTANCE * (len(models) - 1)
    axes = plain_layout(
        height=280,
        xaxis={**HIDDEN_AXIS, "range": [-1.6, last_centre + 1.6]},
        yaxis={**HIDDEN_AXIS, "scaleanchor": "x", "range": [-1.6, 1.6]},
        annotations=notes,
    )
    return Figure(traces, axes)


def _circle(measurement: Measurement, model: str, centre: float) -> list[Trace]:
    """The bare circle of a model, and the bumps of its classes."""
    counts = measurement.look.by_class_and_point(f"counts/{model}")
    densities = [smoothed(row) for row in counts]
    highest = max(map(max, densities), default=0.0)
    bins = len(densities[0])
    traces = [_ring(centre, [1.0] * bins, "#9aa4b0", "")]
    for number, density in enumerate(densities):
        radii = [_radius(value, highest) for value in density]
        name = escaped(class_name(measurement.group, number))
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
    measured = [
        measurement
        for measurement in last_measurements(report.groups, "units")
        if measurement.look.names("classes")
    ]
    if not measured:
        return None
    blocks: list[Block] = [Paragraph(ABOUT_UNITS)]
    for comparable in _by_classes(measured):
        charts = [
            _chart(measurement, _units(measurement), ABOUT_UNITS, report.style)
            for measurement in comparable
        ]
        blocks += [class_key(comparable[0].group), Gallery(charts)]
    return Section("units", "Class of each unit", blocks)


def _units(measurement: Measurement) -> Figure:
    """A row of units for each model, coloured by class."""
    models = measurement.look.names("classes")
    classes = [_whole(measurement.look.points(f"classes/{model}")) for model in models]
    # Units are sorted by their classes in the first row, the model that clients received.
    received = classes[0]
    order = sorted(range(len(received)), key=lambda unit: received[unit])
    rows = [[row[unit] for unit in order] for row in classes]
    names = [[escaped(class_name(measurement.group, number)) for number in row] for row in rows]
    trace = _class_map(
        rows,
        names,
        y=[escaped(model) for model in models],
        ygap=2,
        hovertemplate="%{y}: unit represents %{customdata}<extra></extra>",
    )
    axes = plain_layout(
        height=90 + 26 * len(models),
        xaxis={**BARE_AXIS, "title": {"text": f"{len(order)} units"}},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )
    return Figure([trace], axes)


def _whole(values: Sequence[float | None]) -> list[int]:
    """Numbers of classes."""
    return [int(value) for value in values if value is not None]


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


# ---- decision boundaries of a querying client, stage by stage ------------------------------------


STAGE_TITLES = {FIT: "alone", "transfer": "phase 1", "refine": "phase 2"}
PLANE_HEIGHT = 400

ABOUT_BOUNDARIES = (
    "Each point is a test example of a class that the client queried (ringed) or has. The axes "
    "are the first two principal components of the model's features. The background is the class "
    "that the model's head predicts there. Below: accuracy by class on the whole test set."
)


def boundaries(report: Report) -> Section | None:
    """For each group, the planes of its first run with any; None if they were not measured."""
    blocks: list[Block] = [Paragraph(ABOUT_BOUNDARIES)]
    for group in report.groups:
        stages = _stages(group)
        if stages:
            blocks.append(group_label(group, report.style))
            blocks.append(Gallery([_plane_chart(measurement) for measurement in stages], "small"))
    if len(blocks) == 1:
        return None
    return Section("boundaries", "Decision boundaries", blocks)


def _stages(group: Group) -> list[Measurement]:
    """The measurements of the first run with any: in the last round in which the client trained
    alone, and in the last round.
    """
    run_measurements = first_run_measurements(measurements(group, "boundaries"))
    if not run_measurements:
        return []
    alone = [measurement for measurement in run_measurements if _stage_name(measurement) == FIT]
    with_peers = [
        measurement for measurement in run_measurements if _stage_name(measurement) != FIT
    ]
    stages = []
    if alone:
        # A client that queries only once trains alone in an earlier round.
        last_round_alone = max(measurement.look.round for measurement in alone)
        stages += _in_round(alone, last_round_alone)
    stages += _in_round(with_peers, run_measurements[-1].look.round)
    return stages


def _in_round(run_measurements: Sequence[Measurement], number: int) -> list[Measurement]:
    return [measurement for measurement in run_measurements if measurement.look.round == number]


def _stage_name(measurement: Measurement) -> str:
    return str(measurement.look.texts.get("name", ""))


def _plane_chart(measurement: Measurement) -> Chart:
    """The plane of features after a stage, with test examples; below it, accuracy by class."""
    name = _stage_name(measurement)
    axes = layout(
        height=PLANE_HEIGHT,
        hovermode="closest",
        xaxis=BARE_AXIS,
        yaxis={**BARE_AXIS, "domain": [0.3, 1]},
        xaxis2={"type": "category", "anchor": "y2", "automargin": True},
        yaxis2={**BARE_AXIS, "type": "category", "domain": [0, 0.1]},
    )
    traces = [_background(measurement), *_points(measurement), _accuracies(measurement)]
    title = STAGE_TITLES.get(name, name)
    description = f"{measurement.place}, client {measurement.look.client}"
    return Chart([Figure(traces, axes)], description, title)


def _background(measurement: Measurement) -> Trace:
    """The class that the head predicts at each point of a grid over the plane."""
    class_names = [escaped(name) for name in measurement.group.classes]
    plane = [_whole(row) for row in measurement.look.rows("plane")]
    return _class_map(
        plane,
        [[class_names[number] for number in row] for row in plane],
        x=_steps(measurement.look.points("x_range"), len(plane)),
        y=_steps(measurement.look.points("y_range"), len(plane)),
        opacity=0.35,
        hovertemplate="the head predicts %{customdata}<extra></extra>",
    )


def _steps(ends: Sequence[float | None], count: int) -> list[float | None]:
    """The positions of the grid's points along an axis with these ends."""
    low, high = (end for end in ends if end is not None)
    return [rounded(low + (high - low) * step / (count - 1)) for step in range(count)]


def _shown_classes(measurement: Measurement) -> list[int]:
    """The classes that the client queried, and then those that it has."""
    look = measurement.look
    return _whole([*look.points("query"), *look.points("own")])


def _points(measurement: Measurement) -> list[Trace]:
    """The test examples of each class that the client queried, or has."""
    look = measurement.look
    labels = look.points("labels")
    x = look.points("x")
    y = look.points("y")
    traces = []
    for number in _shown_classes(measurement):
        name = escaped(measurement.group.classes[number])
        ring: dict[str, Any] = {"width": 0}
        if number in look.points("query"):
            ring = {"width": 1.5, "color": "black"}
        indices = [index for index, label in enumerate(labels) if label == number]
        trace = new_trace(
            "scatter",
            mode="markers",
            name=name,
            x=[x[index] for index in indices],
            y=[y[index] for index in indices],
            marker={"size": 6, "color": class_colour(number), "line": ring},
            hovertemplate=f"{name}<extra></extra>",
        )
        traces.append(trace)
    return traces


def _accuracies(measurement: Measurement) -> Trace:
    """The accuracy of each class as a row of cells, on axes of its own below the plane."""
    accuracies = measurement.look.by_class("accuracy")
    names = []
    values = []
    texts = []
    for number in _shown_classes(measurement):
        name = escaped(measurement.group.classes[number])
        if number in measurement.look.points("query"):
            name = f"{name} (queried)"
        value = rounded(accuracies[number])
        text = ""
        if value is not None:
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
        colorscale=COUNT_COLOURS,
        showscale=False,
        hovertemplate="%{x}: %{z:.1%}<extra></extra>",
    )
