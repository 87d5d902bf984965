"""The sections on model weights: changes during local training, accuracy of local and global models
on different data, and the loss landscape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.report.blocks import (
    Block,
    Chart,
    Choice,
    Gallery,
    Paragraph,
    Section,
    group_label,
    line_key,
)
from fedstill.report.figures import (
    MAX_IN_LEGEND,
    PERCENT,
    Figure,
    Style,
    Trace,
    escaped,
    faint,
    group_name,
    layout,
    lines,
    measured,
    new_trace,
    plain_layout,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.rounds import RoundChart
from fedstill.report.series import Measurement, last_measurements, measurements
from fedstill.running.runs import Group

LAYERS = {"last hidden layer": "features", "classifier": "classifier"}
"""The layers whose alignment is measured, and their keys in the journal."""

ALIGNED_MODELS = {"local": "local models", "global": "the new global model"}
"""The models whose alignment is measured, by their key."""

FAINTEST = 0.15
"""The opacity of the first round's points; that of the last round is 1."""

ABOUT_SCATTER = (
    "Each point is a client in a round; later rounds are darker. Horizontal axis: distance between "
    "the client's label distribution and the global model's predictions. Vertical axis: distance "
    "between local and received weights."
)
ABOUT_DIVERGENCE = "Euclidean distance between local and received weights, averaged over clients."
ABOUT_DISTANCE = (
    "Distance between a client's label distribution and the global model's predictions, averaged "
    "over clients. It is 0 for equal distributions, and 2 for disjoint ones."
)
ABOUT_DIVERSITY = {
    "gradients": (
        "Differences between the clients' gradients at the received model, before training. At 1, "
        "all gradients agree."
    ),
    "updates": "Differences between the clients' updates. At 1, all updates agree.",
}


def weight_changes(report: Report) -> Section | None:
    """Alignment, divergence and diversity by round; None if none of them was measured."""
    groups = report.groups
    style = report.style
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
    return Section("weights", "Weight changes in local training", blocks)


def _alignment_charts(groups: Sequence[Group], style: Style) -> list[Chart]:
    charts = []
    for side, models in ALIGNED_MODELS.items():
        about = (
            f"Share of units that represent the same class in {models} as in the received model. "
            "Higher is better."
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
    """The distance between a client's labels and the global model's predictions, and the distance
    between its local and received weights.
    """

    distance: float
    moved: float
    client: int
    round: int


def _scatter(groups: Sequence[Group], style: Style) -> Figure:
    last = max(
        measurement.look.round
        for group in groups
        for measurement in measurements(group, "divergence")
    )
    traces = []
    for group in groups:
        points = _divergences(group)
        if points:
            traces.append(_point_trace(points, last, group, style))
    axes = layout(
        hovermode="closest",
        showlegend=len(groups) <= MAX_IN_LEGEND,
        xaxis={"title": {"text": "distribution distance"}},
        yaxis={"title": {"text": "change of weights (L2)"}},
    )
    return Figure(traces, axes)


def _divergences(group: Group) -> list[Divergence]:
    """The points of a group, starting with the last round, whose colour is shown in the legend."""
    points = []
    for measurement in measurements(group, "divergence"):
        distances = measurement.look.by_client("distance")
        for client, moved in measurement.look.by_client("l2").items():
            if client in distances:
                point = Divergence(
                    distance=distances[client],
                    moved=moved,
                    client=client,
                    round=measurement.look.round,
                )
                points.append(point)
    return sorted(points, key=lambda point: -point.round)


def _point_trace(points: Sequence[Divergence], last: int, group: Group, style: Style) -> Trace:
    opacities = [FAINTEST + (1 - FAINTEST) * (point.round / last) ** 2 for point in points]
    colours = [faint(style.colour(group), opacity) for opacity in opacities]
    return new_trace(
        "scatter",
        mode="markers",
        name=group_name(group),
        x=[rounded(point.distance) for point in points],
        y=[rounded(point.moved) for point in points],
        customdata=[[point.client, point.round] for point in points],
        marker={"size": 8, "color": colours, "line": {"width": 0}},
        hovertemplate="client %{customdata[0]}, round %{customdata[1]}: %{x:.2f}, %{y:.3g}",
    )


# Accuracy of local and global models on different data


PERSONAL_CHARTS = (
    RoundChart(
        "local_train_accuracy",
        "Local train",
        "Local models on the data they were trained on.",
    ),
    RoundChart(
        "personalised_accuracy",
        "Personalised",
        "Local models on test examples in their client's class proportions.",
    ),
    RoundChart("accuracy", "Server", "The global model on the whole test set."),
)

ABOUT_PERSONAL = (
    "Local models on their training data and on test examples of the same class proportions, and "
    "the global model on all test examples. If the first is high and the last is low, clients "
    "learn, but the global model gains little from it."
)


def personal(report: Report) -> Section | None:
    """Local train, personalised and server accuracy by round; None if they were not measured."""
    groups = report.groups
    style = report.style
    if not measured(groups, "local_train_accuracy"):
        return None
    charts = [chart.drawn(report) for chart in PERSONAL_CHARTS]
    return Section(
        "personal",
        "Local, personalised and server accuracy",
        [Paragraph(ABOUT_PERSONAL), line_key(groups, style), Gallery(charts, "small")],
    )


# The loss landscape: contours in two planes, and curves under noise


PLANES = {"directions of highest curvature (Hessian)": "hessian", "random directions": "random"}
"""The planes along which weights are perturbed, and their keys in the journal."""

CLIPPED = 0.9
"""The share of losses with distinct colours; all higher losses have the last colour."""

LEVELS = 12
"""The number of contour lines over the range of losses."""

ABOUT_LANDSCAPE = (
    "Test loss when the weights are moved along two directions, starting from the model (the cross "
    "in the middle). In a wide, flat valley, small changes of the weights, such as averaging in "
    "the next round, increase the loss little. All figures have the same scale."
)
ABOUT_NOISE = (
    "Mean test loss when Gaussian noise is added to all weights. Solid: the new global model. "
    "Dotted: a local model."
)


@dataclass(frozen=True)
class LossRange:
    """The range of losses that is mapped to colours."""

    low: float
    high: float


def landscape(report: Report) -> Section | None:
    """The loss landscape of the global model and of a local one; None if it was not measured."""
    found = [
        measurement
        for measurement in last_measurements(report.groups, "landscape")
        if _models(measurement)
    ]
    if not found:
        return None
    ranges = {plane: _range(found, plane) for plane in PLANES.values()}
    charts = []
    for measurement in found:
        for model in _models(measurement):
            contours = [_contour(measurement, model, plane, ranges[plane]) for plane in ranges]
            place = f"{model}, {measurement.place}"
            charts.append(
                Chart(
                    contours,
                    f"{measurement.place}, {model}: {ABOUT_LANDSCAPE}",
                    group_label(measurement.group, report.style, place),
                    "plane",
                    is_explained=True,
                )
            )
    noise = Chart([_noise(found, report.style)], ABOUT_NOISE, "Loss under noise")
    return Section(
        "landscape",
        "Loss landscape",
        [
            Paragraph(ABOUT_LANDSCAPE),
            Choice("plane", "Along", list(PLANES)),
            Gallery(charts, "small"),
            line_key(report.groups, report.style),
            Gallery([noise]),
        ],
    )


def _models(measurement: Measurement) -> list[str]:
    """The names of the models whose landscape was measured."""
    return measurement.look.names("models")


def _range(found: Sequence[Measurement], plane: str) -> LossRange:
    """The range of the losses of all models in a plane, without the highest ones."""
    losses: list[float] = []
    for measurement in found:
        for model in _models(measurement):
            for row in _surface(measurement, model, plane):
                losses += row
    losses.sort()
    if not losses:
        return LossRange(0.0, 0.0)
    return LossRange(losses[0], losses[int(CLIPPED * (len(losses) - 1))])


def _surface(measurement: Measurement, model: str, plane: str) -> list[list[float]]:
    """The losses of a model in a plane, as rows and columns."""
    columns = len(measurement.look.points("axis"))
    rows = [
        measurement.look.points(f"models/{model}/{plane}/{row}", length=columns)
        for row in range(columns)
    ]
    return _finite(rows)


def _finite(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Losses; infinite ones, which a journal does not have, are replaced by the largest loss."""
    largest = max((loss for row in rows for loss in row if loss is not None), default=0.0)
    return [[_or_largest(loss, largest) for loss in row] for row in rows]


def _or_largest(loss: float | None, largest: float) -> float:
    if loss is None:
        return largest
    return loss


def _contour(measurement: Measurement, model: str, plane: str, losses_shown: LossRange) -> Figure:
    axis = measurement.look.points("axis")
    curvature = measurement.look.points(f"models/{model}/eigenvalues", length=2)
    low = losses_shown.low
    high = losses_shown.high
    titles = [_direction(index, value, plane) for index, value in enumerate(curvature)]
    surface = new_trace(
        "contour",
        x=axis,
        y=axis,
        z=_surface(measurement, model, plane),
        zmin=low,
        zmax=high,
        contours={"start": low, "end": high, "size": (high - low) / LEVELS or 1.0},
        colorscale="Viridis",
        reversescale=True,
        line={"width": 0.6, "color": "rgba(255,255,255,0.6)"},
        # Above the bar, the title would touch the highest number.
        colorbar={"thickness": 10, "outlinewidth": 0, "title": {"text": "loss", "side": "right"}},
        hovertemplate="%{x}, %{y}: loss %{z:.4f}<extra></extra>",
    )
    middle = new_trace(
        "scatter",
        mode="markers",
        x=[0],
        y=[0],
        marker={"symbol": "x", "size": 8, "color": "#D7263D"},
        hoverinfo="skip",
    )
    axes = plain_layout(
        xaxis={"title": {"text": titles[0]}},
        yaxis={"title": {"text": titles[1]}},
    )
    return Figure([surface, middle], axes)


def _direction(index: int, curvature: float | None, plane: str) -> str:
    """The title of an axis; only the Hessian's directions have a curvature."""
    title = f"direction {index + 1}"
    if plane == "hessian" and curvature is not None:
        title += f", curvature {curvature:.3g}"
    return title


def _noise(found: Sequence[Measurement], style: Style) -> Figure:
    traces = []
    for measurement in found:
        scales = measurement.look.points("scales")
        for model in _models(measurement):
            losses = measurement.look.points(f"models/{model}/noise", length=len(scales))
            traces.append(_noise_line(measurement, style, model, scales, _finite([losses])[0]))
    axes = layout(
        showlegend=len(found) <= MAX_IN_LEGEND,
        xaxis={"title": {"text": "standard deviation of the noise"}},
        yaxis={"title": {"text": "loss"}},
    )
    return Figure(traces, axes)


def _noise_line(
    measurement: Measurement,
    style: Style,
    model: str,
    scales: Sequence[float | None],
    losses: Sequence[float],
) -> Trace:
    """The loss of a model against the noise; dotted for a local model."""
    is_global = model == "aggregated"
    name = group_name(measurement.group)
    dash = style.dash(measurement.group)
    if not is_global:
        name = f"{name}, {escaped(model)}"
        dash = "dot"
    return new_trace(
        "scatter",
        mode="lines+markers",
        name=name,
        showlegend=is_global,
        x=scales,
        y=losses,
        line={"color": style.colour(measurement.group), "width": 2, "dash": dash},
        hovertemplate="%{y:.3f}",
    )
