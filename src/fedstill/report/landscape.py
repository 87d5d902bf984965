"""The section on how the loss rises around a model: contours in two planes, and curves under
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fedstill.report.blocks import (
    Chart,
    Choice,
    Gallery,
    Paragraph,
    Section,
    group_label,
    line_key,
)
from fedstill.report.figures import MOST_IN_LEGEND, Figure, Style, layout, named, plain
from fedstill.report.sections import Report
from fedstill.report.series import Look, last_looks, matrix, reading

PLANES = {"directions of highest curvature (Hessian)": "hessian", "random directions": "random"}
"""The planes in which weights are moved, and their keys in the journal."""

CLIPPED = 0.9
"""The share of all losses that have a colour of their own; those above share the last one."""

LEVELS = 12
"""Contour lines over the range of losses."""

ABOUT = (
    "Test loss when the weights are moved along two directions, away from the model (the cross in "
    "the middle). In a wide flat valley small changes of the weights, such as the mean of the next "
    "round, cost little. All figures have the same scale."
)
ABOUT_NOISE = (
    "Mean test loss when Gaussian noise is added to all weights. Solid: the new global model. "
    "Dotted: a local model."
)


@dataclass(frozen=True)
class LossRange:
    """The losses between which colours differ."""

    low: float
    high: float


def landscape(report: Report) -> Section | None:
    """The loss around the global and a local model; None if it was not measured."""
    found = last_looks(report.groups, "landscape")
    if not found:
        return None
    ranges = {plane: _range(found, plane) for plane in PLANES.values()}
    charts = []
    for look in found:
        for model in _models(look):
            contours = [_contour(look, model, plane, ranges[plane]) for plane in PLANES.values()]
            place = f"{model}, {look.place}"
            charts.append(
                Chart(
                    contours,
                    f"{look.place}, {model}: {ABOUT}",
                    group_label(look.group, report.style, place),
                    "plane",
                    is_explained=True,
                )
            )
    noise = Chart([_noise(found, report.style)], ABOUT_NOISE, "Loss under noise")
    return Section(
        "landscape",
        "The loss around the models",
        [
            Paragraph(ABOUT),
            Choice("plane", "Along", list(PLANES)),
            Gallery(charts, "small"),
            line_key(report.groups, report.style),
            Gallery([noise]),
        ],
    )


def _models(look: Look) -> list[str]:
    with reading(look) as event:
        return [str(name) for name in event["models"]]


def _range(found: Sequence[Look], plane: str) -> LossRange:
    """The range of the losses in a plane of all models, without the highest ones."""
    losses: list[float] = []
    for look in found:
        with reading(look) as event:
            size = len(event["axis"])
            for model in event["models"].values():
                for row in _losses(model[plane], size, size):
                    losses += row
    losses.sort()
    return LossRange(losses[0], losses[int(CLIPPED * (len(losses) - 1))])


def _losses(value: Any, rows: int, columns: int) -> list[list[float]]:
    """Losses; one that overflowed is shown as the largest finite one."""
    finite = [loss for row in value for loss in row if loss is not None]
    largest = max(finite, default=0.0)
    filled = [[_or_largest(loss, largest) for loss in row] for row in value]
    return matrix(filled, rows, columns)


def _or_largest(loss: float | None, largest: float) -> float:
    if loss is None:
        return largest
    return loss


def _contour(look: Look, model: str, plane: str, losses_shown: LossRange) -> Figure:
    with reading(look) as event:
        axis = [float(value) for value in event["axis"]]
        losses = _losses(event["models"][model][plane], len(axis), len(axis))
        curvature = [float(value) for value in event["models"][model]["eigenvalues"]]
    low, high = losses_shown.low, losses_shown.high
    titles = [_direction(index, value, plane) for index, value in enumerate(curvature)]
    surface = go.Contour(
        x=axis,
        y=axis,
        z=losses,
        zmin=low,
        zmax=high,
        contours={"start": low, "end": high, "size": (high - low) / LEVELS or 1.0},
        colorscale="Viridis",
        reversescale=True,
        line={"width": 0.6, "color": "rgba(255,255,255,0.6)"},
        colorbar={"thickness": 10, "outlinewidth": 0, "title": {"text": "loss"}},
        hovertemplate="%{x}, %{y}: loss %{z:.4f}<extra></extra>",
    )
    middle = go.Scatter(
        mode="markers",
        x=[0],
        y=[0],
        marker={"symbol": "x", "size": 8, "color": "#D7263D"},
        hoverinfo="skip",
    )
    axes = layout(
        hovermode="closest",
        showlegend=False,
        xaxis={"title": {"text": titles[0]}},
        yaxis={"title": {"text": titles[1]}},
    )
    return Figure([surface, middle], axes)


def _direction(index: int, curvature: float, plane: str) -> str:
    """The title of an axis; only the Hessian's directions have a curvature."""
    title = f"direction {index + 1}"
    if plane == "hessian":
        title += f", curvature {curvature:.3g}"
    return title


def _noise(found: Sequence[Look], style: Style) -> Figure:
    traces = []
    for look in found:
        with reading(look) as event:
            scales = [float(value) for value in event["scales"]]
            for model, around in event["models"].items():
                (losses,) = _losses([around["noise"]], 1, len(scales))
                traces.append(_noise_line(look, style, str(model), scales, losses))
    axes = layout(
        showlegend=len(found) <= MOST_IN_LEGEND,
        xaxis={"title": {"text": "standard deviation of the noise"}},
        yaxis={"title": {"text": "loss"}},
    )
    return Figure(traces, axes)


def _noise_line(
    look: Look, style: Style, model: str, scales: Sequence[float], losses: Sequence[float]
) -> go.Scatter:
    """The loss of a model by the noise; dotted for a local model."""
    is_global = model == "aggregated"
    name = named(look.group)
    dash = style.dash(look.group)
    if not is_global:
        name = f"{name}, {plain(model)}"
        dash = "dot"
    return go.Scatter(
        mode="lines+markers",
        name=name,
        showlegend=is_global,
        x=scales,
        y=losses,
        line={"color": style.colour(look.group), "width": 2, "dash": dash},
        hovertemplate="%{y:.3f}",
    )
