"""The sections on what local training keeps: in-local and out-local accuracy by round and within a
client's visit, and prediction consistency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from fedstill.report.blocks import Block, Chart, Choice, Gallery, Paragraph, Section, line_key
from fedstill.report.figures import (
    HEIGHT,
    MOST_IN_LEGEND,
    PERCENT,
    SHARE,
    Figure,
    Style,
    faint,
    flat_range,
    layout,
    lines,
    measured,
    named,
    rounded,
    whole_numbers,
    y_values,
)
from fedstill.report.sections import Report
from fedstill.report.series import mean_over_seeds
from fedstill.running.runs import Group


@dataclass(frozen=True)
class Side:
    """The classes that a client's data have, or those that they lack.

    about: what is measured by round. about_epochs: the same for the chart over epochs.
    """

    name: str
    title: str
    about: str
    about_epochs: str

    @property
    def key(self) -> str:
        """The key of the accuracy in a round's event."""
        return f"{self.name}_local_accuracy"


SIDES = (
    Side(
        name="in",
        title="In-local accuracy",
        about="Local models after training, on classes in the proportions of their own client's "
        "data.",
        about_epochs="On classes in the proportions of the client's own data.",
    ),
    Side(
        name="out",
        title="Out-local accuracy",
        about="The same models on the classes that their client lacks or has little of.",
        about_epochs="On the classes that the client lacks or has little of.",
    ),
)

ABOUT_DOTTED = (
    "Dotted: the global model that those clients received, measured on the mean of their label "
    "distributions. Where a solid line is below the dotted line of its colour, local training "
    "forgot what the received model knew."
)
ABOUT_CONSISTENCY = (
    "Cosine of the class accuracies of two successive global models. 1: both are good at the same "
    "classes."
)


def knowledge(report: Report) -> Section | None:
    """In-local and out-local accuracy, and prediction consistency; None if nothing of it was
    measured.
    """
    groups, style = report.groups, report.style
    sides = [side for side in SIDES if measured(groups, side.key)]
    charts = [_side_chart(side, groups, style) for side in sides]
    if measured(groups, "consistency"):
        figure = lines(groups, style, "consistency", SHARE)
        charts.append(Chart([figure], ABOUT_CONSISTENCY, "Prediction consistency"))
    if not charts:
        return None
    blocks: list[Block | None] = []
    if sides:
        blocks.append(Paragraph(ABOUT_DOTTED))
    blocks += [line_key(groups, style), Gallery(charts, "small")]
    if measured(groups, "in_local_accuracy"):
        blocks += _last_round(groups, style)
    return Section("knowledge", "What local training keeps", blocks)


def _side_chart(side: Side, groups: Sequence[Group], style: Style) -> Chart:
    figure = lines(groups, style, side.key, PERCENT, reference=f"received_{side.key}")
    return Chart([figure], side.about, side.title)


# Bars of the last measured round


FORMS = {"in proportion to a client's labels": "", "mean over seen or unseen classes": "_seen"}
"""The two means over classes that are measured, and the suffixes of their keys."""


@dataclass(frozen=True)
class Bar:
    """One of the bars of a group: its key in the journal, its name, and how opaque it is."""

    key: str
    name: str
    opacity: float


BARS = (
    Bar("in_local_accuracy", "in-local", 1.0),
    Bar("out_local_accuracy", "out-local", 0.55),
    Bar("accuracy", "global", 0.25),
)

ABOUT_BARS = (
    "The last measured round: local models on classes that their client has (full colour) and "
    "does not have (lighter), and the new global model on all classes (lightest). Thin lines: one "
    "standard deviation over clients."
)


def _last_round(groups: Sequence[Group], style: Style) -> list[Block]:
    forms = {
        title: suffix
        for title, suffix in FORMS.items()
        if measured(groups, f"in_local_accuracy{suffix}")
    }
    figures = [_bars(groups, style, suffix) for suffix in forms.values()]
    return [
        Choice("forms", "In- and out-local accuracy", list(forms)),
        Chart(figures, ABOUT_BARS, "In-local and out-local", "forms"),
    ]


def _bars(groups: Sequence[Group], style: Style, suffix: str) -> Figure:
    traces = []
    for bar in BARS:
        key = bar.key
        if key != "accuracy":
            key += suffix
        traces.append(_bar_trace(bar, key, groups, style))
    axes = layout(
        height=HEIGHT,
        barmode="group",
        bargap=0.3,
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category"},
        yaxis={**PERCENT, "range": [0, 1]},
        uniformtext={"mode": "hide", "minsize": 9},
    )
    return Figure(traces, axes)


def _bar_trace(bar: Bar, key: str, groups: Sequence[Group], style: Style) -> go.Bar:
    names = []
    means = []
    deviations = []
    colours = []
    for group in groups:
        mean = _at_last(group, key)
        if mean is not None:
            names.append(named(group))
            means.append(rounded(mean))
            deviations.append(rounded(_at_last(group, f"{key}_std") or 0.0))
            colours.append(faint(style.colour(group), bar.opacity))
    # the page writes on faint bars as on its ground
    shade = "full"
    if bar.opacity < 1:
        shade = "faint"
    return go.Bar(
        name=bar.name,
        x=names,
        y=means,
        error_y={
            "type": "data",
            "array": deviations,
            "thickness": 1.2,
            "width": 4,
            "visible": any(deviations),
        },
        marker={"color": colours},
        text=[bar.name] * len(names),
        textposition="inside",
        insidetextanchor="start",
        meta=shade,
        hovertemplate=f"%{{x}}: {bar.name} %{{y:.2%}}<extra></extra>",
    )


def _at_last(group: Group, key: str) -> float | None:
    """A measure in the last round in which local models were measured."""
    rounds = mean_over_seeds(group, "in_local_accuracy")
    if not rounds:
        return None
    return mean_over_seeds(group, key).get(max(rounds))


# Within local training: local models from the one that they received to the one that they send


BAR_SHIFT = 0.06
"""How far, in epochs, the error bars of one group stand from those of the next."""

Epochs = Mapping[str, Sequence[float | None]]
"""What clients knew after each epoch, mean over them, by key; from epoch 0, the received model."""


@dataclass(frozen=True)
class Visit:
    """The last measured round of a group: by stage, the epochs of each seed."""

    group: Group
    number: int
    stages: Mapping[str, Sequence[Epochs]]


def epochs(report: Report) -> Section | None:
    """Accuracy over the epochs of a client's visit, a chart for each stage and side; None if it was
    not measured.
    """
    visits = [visit for group in report.groups if (visit := _visit(group)) is not None]
    if not visits:
        return None
    stages = list(dict.fromkeys(stage for visit in visits for stage in visit.stages))
    charts = []
    for stage in stages:
        place = ""
        if len(stages) > 1:
            place = f", stage {stage}"
        for side in SIDES:
            figure = _epoch_figure(visits, report.style, stage, side.key)
            charts.append(Chart([figure], side.about_epochs, f"{side.title}{place}"))
    rounds = ", ".join(map(str, sorted({visit.number for visit in visits})))
    about = (
        f"The clients of round {rounds} while they train. Epoch 0 is the model that they received. "
        "Means over clients and seeds; bars are one standard deviation over clients. A line that "
        "falls shows forgetting during local training."
    )
    key = line_key([visit.group for visit in visits], report.style)
    return Section("epochs", "During local training", [Paragraph(about), key, Gallery(charts)])


def _visit(group: Group) -> Visit | None:
    """The last round of any seed that was measured epoch by epoch; None if there is none."""
    events = [event for run in group.started for event in run.rounds if event.get("by_epoch")]
    if not events:
        return None
    last = max(event["round"] for event in events)
    stages: dict[str, list[Epochs]] = {}
    for event in events:
        if event["round"] == last:
            for stage, by_epoch in event["by_epoch"].items():
                stages.setdefault(stage, []).append(by_epoch)
    return Visit(group, last, stages)


def _epoch_figure(visits: Sequence[Visit], style: Style, stage: str, key: str) -> Figure:
    middle = (len(visits) - 1) / 2
    traces = []
    most = 0
    for index, visit in enumerate(visits):
        seeds = visit.stages.get(stage, [])
        means = _over_seeds(seeds, key)
        if means:
            most = max(most, len(means))
            deviations = _over_seeds(seeds, f"{key}_std")
            shift = BAR_SHIFT * (index - middle)
            traces.append(_epoch_line(visit.group, style, means, deviations, shift))
    across = {"title": {"text": "local epoch"}, "zeroline": False, **whole_numbers(most)}
    axes = layout(
        hovermode="closest",
        showlegend=len(traces) <= MOST_IN_LEGEND,
        xaxis=across,
        yaxis={**PERCENT, **flat_range(y_values(traces), PERCENT)},
    )
    return Figure(traces, axes)


def _epoch_line(
    group: Group,
    style: Style,
    means: Sequence[float | None],
    deviations: Sequence[float | None],
    shift: float,
) -> go.Scatter:
    colour = style.colour(group)
    numbers = list(range(len(means)))
    error_bars: dict[str, Any] = {"type": "data", "array": deviations, "color": colour}
    return go.Scatter(
        mode="lines+markers",
        name=named(group),
        x=[rounded(number + shift) for number in numbers],
        y=means,
        error_y={**error_bars, "thickness": 1.2, "width": 3},
        customdata=numbers,
        hovertemplate="%{y:.2%} after epoch %{customdata}",
        line={"color": colour, "width": 2, "dash": style.dash(group)},
        marker={"size": 6, "color": colour},
    )


def _over_seeds(seeds: Sequence[Epochs], key: str) -> list[float | None]:
    """The mean over seeds after each epoch; where some stopped earlier, over those that did not."""
    means: list[float | None] = []
    for of_epoch in zip_longest(*(by_epoch[key] for by_epoch in seeds)):
        values = [value for value in of_epoch if value is not None]
        mean = None
        if values:
            mean = rounded(fmean(values))
        means.append(mean)
    return means
