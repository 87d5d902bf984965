"""The sections on metrics beside accuracy: by round, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from fedstill.metrics.classification import METRICS, Metric
from fedstill.metrics.values import Values
from fedstill.report.blocks import (
    Chart,
    ColourScale,
    Gallery,
    Paragraph,
    Section,
    group_label,
    line_key,
)
from fedstill.report.figures import (
    ACCURACY,
    PERCENT,
    Figure,
    class_axis,
    class_names,
    height_of,
    layout,
    lines,
    measured,
)
from fedstill.report.sections import Report
from fedstill.running.runs import Group

MODELS = {
    "": "The server's model on the common test set.",
    "own_test_": "Each client's answer on the client's own test set; mean over clients.",
}
"""By the beginning of a metric's key, which model is tested on which data."""

ABOUT_LINES = (
    "Each line is the mean over seeds; its band is one standard deviation above and below."
)

ABOUT_CONFUSION = (
    "Each row is a class, each column the class that the model predicts in the last round. The "
    "colour is the share of the row's test examples, over all seeds; the diagonal is right."
)


def metrics_by_round(report: Report) -> Section | None:
    """The metrics that the runs record, by round; None if they record none."""
    charts = []
    for prefix, model in MODELS.items():
        for name, metric in METRICS.items():
            if measured(report.groups, f"{prefix}{name}"):
                charts.append(_chart(report, metric, prefix, model))
    if not charts:
        return None
    key = line_key(report.groups, report.style)
    return Section("metrics", "Metrics", [Paragraph(ABOUT_LINES), key, Gallery(charts)])


def _chart(report: Report, metric: Metric, prefix: str, model: str) -> Chart:
    direction = "Higher" if metric.larger_is_better else "Lower"
    title = metric.title[0].upper() + metric.title[1:]
    if prefix:
        title = f"{title} on own tests"
    axis: Mapping[str, object] = PERCENT if metric.unit == "%" else {}
    return Chart(
        [lines(report.groups, report.style, f"{prefix}{metric.name}", axis)],
        f"{metric.description}. {model} {direction} is better.",
        f"{title} by round",
    )


def confusion(report: Report) -> Section | None:
    """The confusion matrix of each group in the last round; None if no run records it."""
    charts = []
    for group in report.groups:
        counts = _confusion_counts(group)
        if counts is not None:
            chart = Chart(
                [_confusion_map(counts, group.classes)],
                f"{group.label}: {ABOUT_CONFUSION}",
                group_label(group, report.style),
                is_explained=True,
            )
            charts.append(chart)
    if not charts:
        return None
    return Section(
        "confusion",
        "Confusion matrix",
        [
            Paragraph(ABOUT_CONFUSION),
            ColourScale(ACCURACY, "of the class"),
            Gallery(charts, "small"),
        ],
    )


def _confusion_counts(group: Group) -> Values | None:
    """The sum of a group's confusion matrices, (C, C); None without any."""
    matrices = [run.numbers.confusion() for run in group.started]
    counts = [np.array(matrix, np.float64) for matrix in matrices if matrix]
    if not counts:
        return None
    total: Values = np.sum(counts, axis=0)
    return total


def _confusion_map(counts: Values, classes: Sequence[str]) -> Figure:
    names = class_names(classes)
    totals = counts.sum(1, keepdims=True)
    shares = np.divide(100 * counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    trace = go.Heatmap(
        x=names,
        y=names,
        z=[[None if np.isnan(share) else round(share, 1) for share in row] for row in shares],
        customdata=counts,
        zmin=0,
        zmax=100,
        colorscale=ACCURACY,
        showscale=False,
        hoverongaps=False,
        hovertemplate="class %{y}, predicted %{x}: %{z:.1f} %, %{customdata} examples"
        "<extra></extra>",
    )
    axes = layout(
        height=height_of(len(names)),
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category", "showgrid": False, "title": {"text": "predicted class"}},
        yaxis=class_axis("class"),
    )
    return Figure([trace], axes)
