"""The sections on what training does to weights: alignment, divergence and diversity; and on which
data local models are good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from fedstill.report.blocks import Block, Chart, Choice, Gallery, Paragraph, Section, line_key
from fedstill.report.figures import (
    MOST_IN_LEGEND,
    PERCENT,
    Figure,
    Style,
    faint,
    layout,
    lines,
    measured,
    named,
    rounded,
)
from fedstill.report.sections import Report
from fedstill.report.series import looks, reading
from fedstill.running.runs import Group

LAYERS = {"last hidden layer": "features", "classifier": "classifier"}
"""The layers whose alignment is measured, and their keys in the journal."""

ALIGNED_MODELS = {"local": "local models", "global": "the new global model"}
"""The models whose alignment is measured, by their key."""

FAINTEST = 0.15
"""The opacity of points of the first rounds; those of the last one have 1."""

ABOUT_SCATTER = (
    "Each point is a client in a round; later rounds are darker. Horizontal: how far the client's "
    "labels are from what the global model predicts. Vertical: how far training moved its weights."
)
ABOUT_DIVERGENCE = "Euclidean distance between local and received weights, mean over clients."
ABOUT_DISTANCE = (
    "Distance between a client's labels and what the global model predicts, mean over clients. 0: "
    "equal. 2: nothing in common."
)
ABOUT_DIVERSITY = {
    "gradients": "How far the clients' gradients at the received model differ, before training. 1: "
    "all agree.",
    "updates": "How far the updates that clients sent differ. 1: all agree.",
}


def weight_changes(report: Report) -> Section | None:
    """Alignment, divergence and diversity by round; None if none of them was measured."""
    groups, style = report.groups, report.style
    blocks: list[Block | None] = [line_key(groups, style)]
    charts = []
    if measured(groups, "alignment/layers/features/local"):
        blocks.append(Choice("layer", "Alignment of the", list(LAYERS)))
        charts += _alignment_charts(groups, style)
    if measured(groups, "divergence/mean_l2"):
        charts += _divergence_charts(groups, style)
    for name, about in ABOUT_DIVERSITY.items():
        if measured(groups, f"diversity/{name}"):
            figure = lines(groups, style, f"diversity/{name}")
            charts.append(Chart([figure], about, f"Diversity of {name}"))
    if not charts:
        return None
    blocks.append(Gallery(charts, "small"))
    return Section("weights", "What training does to the weights", blocks)


def _alignment_charts(groups: Sequence[Group], style: Style) -> list[Chart]:
    charts = []
    for side, models in ALIGNED_MODELS.items():
        about = (
            f"Share of units that stand for the same class in {models} as in the received model. "
            "Higher: more is kept."
        )
        figures = [
            lines(groups, style, f"alignment/layers/{layer}/{side}", PERCENT)
            for layer in LAYERS.values()
        ]
        charts.append(Chart(figures, about, f"Alignment, {models}", "layer"))
    return charts


def _divergence_charts(groups: Sequence[Group], style: Style) -> list[Chart]:
    scatter = _scatter(groups, style)
    moved = lines(groups, style, "divergence/mean_l2")
    distance = lines(groups, style, "divergence/mean_distance")
    return [
        Chart([scatter], ABOUT_SCATTER, "Weight divergence against distribution distance"),
        Chart([moved], ABOUT_DIVERGENCE, "Weight divergence by round"),
        Chart([distance], ABOUT_DISTANCE, "Distribution distance by round"),
    ]


# Weight divergence against distribution distance


@dataclass(frozen=True)
class Divergence:
    """How far a client's labels are from what the global model predicts, and how far training moved
    its weights.
    """

    distance: float
    moved: float
    client: int
    number: int
    """The round."""


def _scatter(groups: Sequence[Group], style: Style) -> Figure:
    last = max(look.event["round"] for group in groups for look in looks(group, "divergence"))
    traces = []
    for group in groups:
        points = _divergences(group)
        if points:
            traces.append(_point_trace(points, last, group, style))
    axes = layout(
        hovermode="closest",
        showlegend=len(groups) <= MOST_IN_LEGEND,
        xaxis={"title": {"text": "distribution distance"}},
        yaxis={"title": {"text": "weights moved (L2)"}},
    )
    return Figure(traces, axes)


def _divergences(group: Group) -> list[Divergence]:
    """The points of a group, the last round first: its colour stands in the legend."""
    points = []
    for look in looks(group, "divergence"):
        with reading(look) as event:
            rows = zip(event["distance"], event["l2"], event["clients"], strict=True)
            for distance, moved, client in rows:
                if distance is not None:
                    point = Divergence(
                        distance=float(distance),
                        moved=float(moved),
                        client=int(client),
                        number=event["round"],
                    )
                    points.append(point)
    return sorted(points, key=lambda point: -point.number)


def _point_trace(points: Sequence[Divergence], last: int, group: Group, style: Style) -> go.Scatter:
    opacities = [FAINTEST + (1 - FAINTEST) * (point.number / last) ** 2 for point in points]
    colours = [faint(style.colour(group), rounded(opacity)) for opacity in opacities]
    return go.Scatter(
        mode="markers",
        name=named(group),
        x=[rounded(point.distance) for point in points],
        y=[rounded(point.moved) for point in points],
        customdata=[[point.client, point.number] for point in points],
        marker={"size": 8, "color": colours, "line": {"width": 0}},
        hovertemplate="client %{customdata[0]}, round %{customdata[1]}: %{x:.2f}, %{y:.3g}",
    )


# On which data local models are good


@dataclass(frozen=True)
class PersonalChart:
    """An accuracy of one training: its key, the chart's title and its description."""

    key: str
    title: str
    description: str


PERSONAL_CHARTS = (
    PersonalChart(
        "personal/local_train_accuracy",
        "Local train",
        "Local models on the data they were trained on.",
    ),
    PersonalChart(
        "personal/personalised_accuracy",
        "Personalised",
        "Local models on test examples in their client's class proportions.",
    ),
    PersonalChart("accuracy", "Server", "The global model on the whole test set."),
)

ABOUT_PERSONAL = (
    "Three accuracies of one training. If local train accuracy is high and server accuracy is low, "
    "clients learn for themselves and the global model gains little."
)


def personal(report: Report) -> Section | None:
    """Local train, personalised and server accuracy by round; None if they were not measured."""
    groups, style = report.groups, report.style
    if not measured(groups, "personal/local_train_accuracy"):
        return None
    charts = [
        Chart([lines(groups, style, chart.key, PERCENT)], chart.description, chart.title)
        for chart in PERSONAL_CHARTS
    ]
    return Section(
        "personal",
        "Local, personalised and server accuracy",
        [Paragraph(ABOUT_PERSONAL), line_key(groups, style), Gallery(charts, "small")],
    )
