"""The sections on knowledge that local training retains: in-local and out-local accuracy by round
and by local epoch, prediction consistency, and the same along a chain of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean
from typing import Any

from fedstill.metrics import consistency, forgetting
from fedstill.report.blocks import (
    Block,
    Chart,
    Choice,
    ColourScale,
    Gallery,
    Paragraph,
    Section,
    group_chart,
    line_key,
)
from fedstill.report.figures import (
    ACCURACY_COLOURS,
    HEIGHT,
    MAX_IN_LEGEND,
    PERCENT,
    SHARE,
    Figure,
    Line,
    Style,
    Trace,
    ValueAxis,
    curves,
    faint,
    group_name,
    layout,
    lines,
    measured,
    new_trace,
    plain_layout,
    rounded,
    whole_numbers,
)
from fedstill.report.page import Report
from fedstill.report.rounds import class_map
from fedstill.report.series import mean_over_seeds, of_runs
from fedstill.running.numbers import Look
from fedstill.running.runs import Group


@dataclass(frozen=True)
class Side:
    """The classes that are present in a client's data, or those that are absent.

    about: the description of the chart by round. about_epochs: the description of the chart by
    local epoch.
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
        about="Local models after training; classes are weighted as in the client's data.",
        about_epochs="Classes are weighted as in the client's data.",
    ),
    Side(
        name="out",
        title="Out-local accuracy",
        about="The same models on classes with few or no examples at the client.",
        about_epochs="Classes with few or no examples at the client.",
    ),
)

ABOUT_DOTTED = (
    "Solid: local models. Dotted: the global model that these clients received, with classes "
    "weighted by their mean label distribution. Where a solid line is below the dotted line of the "
    "same colour, knowledge of the received model was lost during local training."
)
ABOUT_CONSISTENCY = (
    "Cosine similarity of the class accuracies of successive global models. At 1, both models are "
    "good at the same classes."
)


def knowledge(report: Report) -> Section | None:
    """In-local and out-local accuracy, and prediction consistency; None if none of them was
    measured.
    """
    groups = report.groups
    style = report.style
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
    return Section("knowledge", "Knowledge kept in local training", blocks)


def _side_chart(side: Side, groups: Sequence[Group], style: Style) -> Chart:
    figure = lines(groups, style, side.key, PERCENT, reference=f"received_{side.key}")
    return Chart([figure], side.about, side.title)


# Bars of the last measured round


FORMS = {"in proportion to a client's labels": "", "mean over seen or unseen classes": "_seen"}
"""The two kinds of averages over classes, and the suffixes of their keys."""


@dataclass(frozen=True)
class AccuracyBar:
    """A bar of a group: its key in the journal, its name and its opacity."""

    key: str
    name: str
    opacity: float


BARS = (
    AccuracyBar("in_local_accuracy", "in-local", 1.0),
    AccuracyBar("out_local_accuracy", "out-local", 0.55),
    AccuracyBar("accuracy", "global", 0.25),
)

ABOUT_BARS = (
    "Last measured round: local models on classes that their client has (in-local, full colour), "
    "local models on classes that their client lacks (out-local, lighter), and the new global "
    "model on all classes (lightest). Thin lines: one standard deviation over clients."
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
    axes = plain_layout(
        height=HEIGHT,
        barmode="group",
        bargap=0.3,
        xaxis={"type": "category"},
        yaxis={**PERCENT.ticks, "range": [0, 1]},
        uniformtext={"mode": "hide", "minsize": 9},
    )
    return Figure(traces, axes)


ROOM_FOR_NAME = 0.1
"""The height of a bar that its name needs, as an accuracy. An error bar that ends lower would cross
the name.
"""


def _bar_trace(bar: AccuracyBar, key: str, groups: Sequence[Group], style: Style) -> Trace:
    names = []
    means = []
    deviations = []
    colours = []
    texts = []
    for group in groups:
        mean = _at_last(group, key)
        if mean is None:
            continue
        deviation = _at_last(group, f"{key}_std") or 0.0
        names.append(group_name(group))
        means.append(rounded(mean))
        deviations.append(rounded(deviation))
        colours.append(faint(style.colour(group), bar.opacity))
        text = ""
        if mean - deviation > ROOM_FOR_NAME:
            text = bar.name
        texts.append(text)
    # text on faint bars has the colour of text on the page
    shade = "full"
    if bar.opacity < 1:
        shade = "faint"
    return new_trace(
        "bar",
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
        text=texts,
        textangle=0,
        textposition="inside",
        insidetextanchor="start",
        meta=shade,
        hovertemplate=f"%{{x}}: {bar.name} %{{y:.2%}}<extra></extra>",
    )


def _at_last(group: Group, key: str) -> float | None:
    """The value of a measure in the last round that measured local models."""
    rounds = mean_over_seeds(group, "in_local_accuracy")
    if not rounds:
        return None
    return mean_over_seeds(group, key).get(max(rounds))


# Within local training: from the received model to the model that is sent


BAR_SHIFT = 0.06
"""The distance, in epochs, between the error bars of neighbouring groups."""

Epochs = Mapping[str, Sequence[float | None]]
"""Accuracies after each epoch, averaged over clients, by key; epoch 0 is the received model."""


@dataclass(frozen=True)
class Visit:
    """The last measured round of a group; stages: by name, the epochs of each seed."""

    group: Group
    number: int
    stages: Mapping[str, Sequence[Epochs]]


def epochs(report: Report) -> Section | None:
    """Accuracy by local epoch, with a chart for each stage and side; None if it was not
    measured.
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
        f"Local models of round {rounds} after each local epoch. Epoch 0 is the received model. "
        "Lines are means over clients and seeds; bars are one standard deviation over clients. A "
        "falling line shows forgetting during local training."
    )
    key = line_key([visit.group for visit in visits], report.style)
    return Section("epochs", "Accuracy by local epoch", [Paragraph(about), key, Gallery(charts)])


def _visit(group: Group) -> Visit | None:
    """The last round in which any seed was measured after each epoch; None if there is none."""
    visited = [numbers for run in group.started for numbers in run.numbers.by_epoch()]
    if not visited:
        return None
    last = max(numbers.round for numbers in visited)
    stages: dict[str, list[Epochs]] = {}
    for numbers in visited:
        if numbers.round == last:
            stages.setdefault(numbers.stage, []).append(numbers.by_key)
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
        showlegend=len(traces) <= MAX_IN_LEGEND,
        xaxis=across,
        yaxis=PERCENT.fitted(traces),
    )
    return Figure(traces, axes)


def _epoch_line(
    group: Group,
    style: Style,
    means: Sequence[float | None],
    deviations: Sequence[float | None],
    shift: float,
) -> Trace:
    colour = style.colour(group)
    numbers = list(range(len(means)))
    error_bars: dict[str, Any] = {"type": "data", "array": deviations, "color": colour}
    return new_trace(
        "scatter",
        mode="lines+markers",
        name=group_name(group),
        x=[rounded(number + shift) for number in numbers],
        y=means,
        error_y={**error_bars, "thickness": 1.2, "width": 3},
        customdata=numbers,
        hovertemplate="%{y:.2%} after epoch %{customdata}",
        line={"color": colour, "width": 2, "dash": style.dash(group)},
        marker={"size": 6, "color": colour},
    )


def _over_seeds(seeds: Sequence[Epochs], key: str) -> list[float | None]:
    """The mean over seeds after each epoch; seeds that stopped earlier are left out."""
    means: list[float | None] = []
    for epoch_values in zip_longest(*(by_epoch.get(key, ()) for by_epoch in seeds)):
        values = [value for value in epoch_values if value is not None]
        mean = None
        if values:
            mean = rounded(fmean(values))
        means.append(mean)
    return means


# Along a chain of clients: how much of a model is retained while the next client trains


ABOUT_HOPS = (
    "A hop is the training of one client, which passes its model on to the next client. Only hops "
    "of measured rounds are shown."
)
ABOUT_MAPS = (
    "Each column is a hop, and each row is a class. Colours show the accuracy of the model after "
    "that hop (first seed)."
)
ABOUT_ALIKE = (
    "Cosine similarity of the class accuracies of successive models. At 1, both are good at the "
    "same classes."
)
ABOUT_LOST = (
    "The mean drop in accuracy over classes since the best earlier hop of each class. Lower is "
    "better."
)
ABOUT_DRIFT = (
    "Accuracy on a client's training data, after this client (solid) and after the next client "
    "(dotted). The gap is the forgetting during the next client's training."
)

ByHop = dict[int, float]
"""A value for each hop."""


@dataclass
class Hops:
    """The measurements along a run's chain, by the number of the hop; all hops of a run are
    numbered from 1.

    links: the number of hops in a round. accuracy: by class (C,), None for a class without test
    examples. handed_over, kept: accuracy on the training data of a hop's client, after this client
    and after the next one.
    """

    links: int
    accuracy: dict[int, list[Any]] = field(default_factory=dict)
    handed_over: ByHop = field(default_factory=dict)
    kept: ByHop = field(default_factory=dict)

    @property
    def columns(self) -> dict[int, list[Any]]:
        """The accuracies (C,) of every hop of a measured round; None for a client that failed."""
        if not self.accuracy:
            return {}
        blank: list[Any] = [None] * len(next(iter(self.accuracy.values())))
        rounds = sorted({(hop - 1) // self.links for hop in self.accuracy})
        hops = [number * self.links + link + 1 for number in rounds for link in range(self.links)]
        last = max(self.accuracy)
        return {hop: self.accuracy.get(hop, blank) for hop in hops if hop <= last}

    @property
    def alike(self) -> ByHop:
        """Cosine similarity with the previous hop, if that hop was measured."""
        rows = self.accuracy
        return _defined(
            {hop: consistency(rows[hop - 1], row) for hop, row in rows.items() if hop - 1 in rows}
        )

    @property
    def lost(self) -> ByHop:
        """Forgetting over the hops so far."""
        rows = list(self.accuracy.values())
        return _defined(
            {hop: forgetting(rows[: index + 1]) for index, hop in enumerate(self.accuracy)}
        )


@dataclass(frozen=True)
class MeasuredChain:
    """A group, and the hops of each of its runs that measured the chain."""

    group: Group
    runs: Sequence[Hops]


def chain(report: Report) -> Section | None:
    """Class accuracy, consistency, forgetting and drift by hop; None if no run measured them."""
    chains = [MeasuredChain(group, read_hops(group)) for group in report.groups]
    chains = [measured_chain for measured_chain in chains if measured_chain.runs]
    if not chains:
        return None
    style = report.style
    alike = _hop_figure(chains, style, SHARE, lambda hops: hops.alike)
    lost = _hop_figure(chains, style, PERCENT, lambda hops: hops.lost)
    drift = _hop_figure(
        chains, style, PERCENT, lambda hops: hops.handed_over, reference=lambda hops: hops.kept
    )
    charts = [
        Chart([alike], ABOUT_ALIKE, "Consistency of successive models"),
        Chart([lost], ABOUT_LOST, "Forgetting F along the chain"),
        Chart([drift], ABOUT_DRIFT, "Model drift"),
    ]
    return Section(
        "chain",
        "Forgetting along the chain",
        [
            Paragraph(ABOUT_HOPS),
            line_key([measured_chain.group for measured_chain in chains], style),
            Gallery(charts, "small"),
            Paragraph(ABOUT_MAPS),
            ColourScale(ACCURACY_COLOURS),
            Gallery([_map_chart(measured_chain, style) for measured_chain in chains], "small"),
        ],
    )


def _hop_figure(
    chains: Sequence[MeasuredChain],
    style: Style,
    axis: ValueAxis,
    numbers: Callable[[Hops], ByHop],
    reference: Callable[[Hops], ByHop] | None = None,
) -> Figure:
    """A chart of a value by hop, with an optional reference value as a dotted line."""
    drawn = []
    for measured_chain in chains:
        series = of_runs([numbers(hops) for hops in measured_chain.runs])
        reference_series = None
        if reference is not None:
            reference_series = of_runs([reference(hops) for hops in measured_chain.runs])
        drawn.append(Line(measured_chain.group, series, reference_series))
    return curves(drawn, style, "hop", axis)


def _map_chart(measured_chain: MeasuredChain, style: Style) -> Chart:
    group = measured_chain.group
    first_run = measured_chain.runs[0]
    figure = class_map(first_run.columns, group.classes, "hop")
    return group_chart(group, [figure], ABOUT_MAPS, style)


def read_hops(group: Group) -> list[Hops]:
    """The hops of each of a group's runs that measured the chain."""
    hops_of_runs = []
    for run in group.started:
        run_looks = run.numbers.looks("chain")
        if run_looks:
            hops = Hops(run.numbers.stages_in_round)
            for look in run_looks:
                _add(look, hops)
            hops_of_runs.append(hops)
    return hops_of_runs


def _add(look: Look, hops: Hops) -> None:
    """Add a measurement to the hops of its run."""
    links_of_earlier_rounds = (look.round - 1) * hops.links
    hop = links_of_earlier_rounds + look.stage + 1
    hops.accuracy[hop] = look.by_class("class_accuracy")
    handed_over = look.number("handed_over")
    kept = look.number("kept")
    # Both are undefined if the previous client has no examples.
    if handed_over is not None and kept is not None:
        hops.handed_over[hop] = handed_over
        hops.kept[hop] = kept


def _defined(values: ByHop) -> ByHop:
    return {hop: value for hop, value in values.items() if not math.isnan(value)}
