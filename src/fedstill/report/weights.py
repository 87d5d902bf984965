"""Weights: alignment, divergence, diversity, and the loss around a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstill.report.figures import (
    MOST_IN_LEGEND,
    PERCENT,
    Figure,
    Style,
    faint,
    layout,
    lines,
    named,
    plain,
    rounded,
)
from fedstill.report.knowledge import measured
from fedstill.report.markup import Html, choice, figure, grid, key, labelled, section, sentence
from fedstill.report.series import Look, last_looks, looks, matrix, reading
from fedstill.running.groups import Group

# What training does to weights: alignment, divergence and diversity; and on which data local models
# are good.


LAYERS = {"last hidden layer": "features", "classifier": "classifier"}
FAINTEST = 0.15


def weight_changes(groups: Sequence[Group], style: Style) -> Html | None:
    """Alignment, divergence and diversity by round; None if none of them was measured."""
    figures, parts = [], [key(groups, style)]
    if measured(groups, "alignment/layers/features/local"):
        parts.append(choice("layer", "Alignment of the", list(LAYERS)))
        for side, who in (("local", "local models"), ("global", "the new global model")):
            says = (
                f"Share of units that stand for the same class in {who} as in the received model. "
                "Higher: more is kept."
            )
            drawn = [
                lines(groups, style, f"alignment/layers/{k}/{side}", **PERCENT)
                for k in LAYERS.values()
            ]
            figures.append(figure(drawn, says, f"Alignment, {who}", "layer"))
    if measured(groups, "divergence/mean_l2"):
        says = (
            "Each point is a client in a round; later rounds are darker. Horizontal: how far the "
            "client's labels "
            "are from what the global model predicts. Vertical: how far training moved its weights."
        )
        figures.append(
            figure(
                [_scatter(groups, style)], says, "Weight divergence against distribution distance"
            )
        )
        says = "Euclidean distance between local and received weights, mean over clients."
        figures.append(
            figure([lines(groups, style, "divergence/mean_l2")], says, "Weight divergence by round")
        )
        says = (
            "Distance between a client's labels and what the global model predicts, mean over "
            "clients. 0: equal. "
            "2: nothing in common."
        )
        figures.append(
            figure(
                [lines(groups, style, "divergence/mean_distance")],
                says,
                "Distribution distance by round",
            )
        )
    for name, says in (
        (
            "gradients",
            "How far the clients' gradients at the received model differ, before training. 1: all "
            "agree.",
        ),
        ("updates", "How far the updates that clients sent differ. 1: all agree."),
    ):
        if measured(groups, f"diversity/{name}"):
            figures.append(
                figure([lines(groups, style, f"diversity/{name}")], says, f"Diversity of {name}")
            )
    if not figures:
        return None
    return section(
        "What training does to the weights", *parts, grid(figures, "small"), name="weights"
    )


def personal(groups: Sequence[Group], style: Style) -> Html | None:
    """Local train, personalised and server accuracy by round; None if they were not measured."""
    if not measured(groups, "personal/local_train_accuracy"):
        return None
    curves = (
        (
            "personal/local_train_accuracy",
            "Local train",
            "Local models on the data they were trained on.",
        ),
        (
            "personal/personalised_accuracy",
            "Personalised",
            "Local models on test examples in their client's class proportions.",
        ),
        ("accuracy", "Server", "The global model on the whole test set."),
    )
    figures = [
        figure([lines(groups, style, k, **PERCENT)], says, title) for k, title, says in curves
    ]
    says = (
        "Three accuracies of one training. If local train accuracy is high and server accuracy is "
        "low, "
        "clients learn for themselves and the global model gains little."
    )
    return section(
        "Local, personalised and server accuracy",
        sentence(says),
        key(groups, style),
        grid(figures, "small"),
        name="personal",
    )


def _scatter(groups: Sequence[Group], style: Style) -> Figure:
    data = []
    last = max(look.event["round"] for g in groups for look in looks(g, "divergence"))
    for group in groups:
        points = []
        for look in looks(group, "divergence"):
            with reading(look) as event:
                number = event["round"]
                rows = zip(event["distance"], event["l2"], event["clients"], strict=True)
                points += [
                    (float(d), float(w), int(c), number) for d, w, c in rows if d is not None
                ]
        # the darkest first: its colour stands in the legend
        points.sort(key=lambda point: -point[3])
        if points:
            shades = [
                faint(style.colour(group), rounded(FAINTEST + (1 - FAINTEST) * (r / last) ** 2))
                for *_, r in points
            ]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": named(group),
                    "x": [rounded(d) for d, *_ in points],
                    "y": [rounded(w) for _, w, *_ in points],
                    "customdata": [[c, r] for _, _, c, r in points],
                    "marker": {"size": 8, "color": shades, "line": {"width": 0}},
                    "hovertemplate": "client %{customdata[0]}, round %{customdata[1]}: %{x:.2f}, "
                    "%{y:.3g}",
                }
            )
    axes = {
        "xaxis": {"title": {"text": "distribution distance"}},
        "yaxis": {"title": {"text": "weights moved (L2)"}},
    }
    return {
        "data": data,
        "layout": layout(hovermode="closest", showlegend=len(groups) <= MOST_IN_LEGEND, **axes),
    }


# How the loss rises around a model: contours in two planes, and curves under noise.


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
