"""How the loss rises around a model: contours in two planes, and curves under noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstill.report.figures import MOST_IN_LEGEND, Figure, Style, layout, named, plain
from fedstill.report.groups import Group
from fedstill.report.markup import Html, choice, figure, grid, key, labelled, section, sentence
from fedstill.report.measured import Look, last_looks, matrix, reading

PLANES = {"directions of highest curvature (Hessian)": "hessian", "random directions": "random"}
CLIPPED = 0.9
"""The share of all losses that have a colour of their own; those above share the last one."""


def landscape(groups: Sequence[Group], style: Style) -> Html | None:
    """The loss around the global and a local model; None if it was not measured."""
    looks = last_looks(groups, "landscape")
    if not looks:
        return None
    says = (
        "Test loss when the weights are moved along two directions, away from the model (the cross "
        "in the "
        "middle). In a wide flat valley small changes of the weights, such as the mean of the next "
        "round, "
        "cost little. All figures have the same scale."
    )
    ranges = {plane: _range(looks, plane) for plane in PLANES.values()}
    figures = [
        figure(
            [_contour(look, name, plane, *ranges[plane]) for plane in PLANES.values()],
            f"{look.place}, {name}: {says}",
            labelled(look.group, style, f"{name}, {look.place}"),
            "plane",
        )
        for look in looks
        for name in _models(look)
    ]
    noise = (
        "Mean test loss when Gaussian noise is added to all weights. Solid: the new global model. "
        "Dotted: a "
        "local model."
    )
    parts = [choice("plane", "Along", list(PLANES)), grid(figures, "small")]
    curves = grid([figure([_noise(looks, style)], noise, "Loss under noise")])
    return section(
        "The loss around the models",
        sentence(says),
        *parts,
        key(groups, style),
        curves,
        name="landscape",
    )


def _models(look: Look) -> list[str]:
    with reading(look) as event:
        return [str(name) for name in event["models"]]


def _range(looks: Sequence[Look], plane: str) -> tuple[float, float]:
    every: list[float] = []
    for look in looks:
        with reading(look) as event:
            size = len(event["axis"])
            for around in event["models"].values():
                every += [v for row in _losses(around[plane], size, size) for v in row]
    every.sort()
    return every[0], every[int(CLIPPED * (len(every) - 1))]


def _losses(value: Any, rows: int, columns: int) -> list[list[float]]:
    """Losses; one that overflowed is shown as the largest finite one."""
    top = max((v for row in value for v in row if v is not None), default=0.0)
    return matrix([[top if v is None else v for v in row] for row in value], rows, columns)


def _contour(look: Look, name: str, plane: str, low: float, high: float) -> Figure:
    with reading(look) as event:
        around, axis = event["models"][name], [float(v) for v in event["axis"]]
        losses = _losses(around[plane], len(axis), len(axis))
        curvature = [float(v) for v in around["eigenvalues"]]
    step = (high - low) / 12 or 1.0
    titles = [
        f"direction {i + 1}" + (f", curvature {c:.3g}" if plane == "hessian" else "")
        for i, c in enumerate(curvature)
    ]
    surface: dict[str, Any] = {
        "type": "contour",
        "x": axis,
        "y": axis,
        "z": losses,
        "zmin": low,
        "zmax": high,
        "contours": {"start": low, "end": high, "size": step},
        "colorscale": "Viridis",
        "reversescale": True,
        "line": {"width": 0.6, "color": "rgba(255,255,255,0.6)"},
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "loss"}},
        "hovertemplate": "%{x}, %{y}: loss %{z:.4f}<extra></extra>",
    }
    middle = {
        "type": "scatter",
        "mode": "markers",
        "x": [0],
        "y": [0],
        "marker": {"symbol": "x", "size": 8, "color": "#D7263D"},
        "hoverinfo": "skip",
    }
    axes = {"xaxis": {"title": {"text": titles[0]}}, "yaxis": {"title": {"text": titles[1]}}}
    return {
        "data": [surface, middle],
        "layout": layout(hovermode="closest", showlegend=False, **axes),
    }


def _noise(looks: Sequence[Look], style: Style) -> Figure:
    data = []
    for look in looks:
        with reading(look) as event:
            scales = [float(v) for v in event["scales"]]
            for name, around in event["models"].items():
                (losses,) = _losses([around["noise"]], 1, len(scales))
                own = name == "aggregated"
                data.append(
                    {
                        "type": "scatter",
                        "mode": "lines+markers",
                        "name": named(look.group)
                        if own
                        else f"{named(look.group)}, {plain(str(name))}",
                        "showlegend": own,
                        "x": scales,
                        "y": losses,
                        "line": {
                            "color": style.colour(look.group),
                            "width": 2,
                            "dash": style.dash(look.group) if own else "dot",
                        },
                        "hovertemplate": "%{y:.3f}",
                    }
                )
    axes = {
        "xaxis": {"title": {"text": "standard deviation of the noise"}},
        "yaxis": {"title": {"text": "loss"}},
    }
    return {"data": data, "layout": layout(showlegend=len(looks) <= MOST_IN_LEGEND, **axes)}
