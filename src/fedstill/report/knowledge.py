"""The sections on what training keeps: in-local and out-local accuracy by round and within a
client's visit, prediction consistency, and the same along a chain of clients.
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
    group_label,
    line_key,
)
from fedstill.report.figures import (
    ACCURACY,
    HEIGHT,
    MOST_IN_LEGEND,
    PERCENT,
    SHARE,
    Figure,
    Line,
    Style,
    Trace,
    curves,
    faint,
    flat_range,
    group_name,
    layout,
    lines,
    measured,
    new_trace,
    rounded,
    whole_numbers,
    y_values,
)
from fedstill.report.page import Report
from fedstill.report.rounds import class_map
from fedstill.report.series import Look, looks, mean_over_seeds, of_runs, reading
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
        about="Local models after training; classes are weighted as in the client's own data.",
        about_epochs="Classes are weighted as in the client's own data.",
    ),
    Side(
        name="out",
        title="Out-local accuracy",
        about="The same models on classes of which their client has few examples or none.",
        about_epochs="On classes of which the client has few examples or none.",
    ),
)

ABOUT_DOTTED = (
    "Solid: local models. Dotted: the global model that these clients received, with classes "
    "weighted by the mean of their label distributions. Where a solid line is below the dotted "
    "line of its colour, local training forgot what the received model knew."
)
ABOUT_CONSISTENCY = (
    "Cosine of the class accuracies of two successive global models. At 1, both are good at the "
    "same classes."
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
    "Last measured round: local models on classes that their client has (in-local, full colour) "
    "and lacks (out-local, lighter), and the new global model on all classes (lightest). Thin "
    "lines: one standard deviation over clients."
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


ROOM_FOR_NAME = 0.1
"""The accuracy up to which a bar holds its name. An error bar that reaches below would cross it."""


def _bar_trace(bar: Bar, key: str, groups: Sequence[Group], style: Style) -> Trace:
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
        has_room = mean - deviation > ROOM_FOR_NAME
        texts.append(bar.name if has_room else "")
    # the page writes on faint bars as on its ground
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
    """The mean over seeds after each epoch; where some stopped earlier, over those that did not."""
    means: list[float | None] = []
    for of_epoch in zip_longest(*(by_epoch[key] for by_epoch in seeds)):
        values = [value for value in of_epoch if value is not None]
        mean = None
        if values:
            mean = rounded(fmean(values))
        means.append(mean)
    return means


# Along a chain of clients: what the next client keeps of a model


ABOUT_HOPS = (
    "A hop is one client's training: its model goes to the next client. Only hops of measured "
    "rounds are drawn."
)
ABOUT_MAPS = (
    "Each column is a hop, each row a class. The colour is the accuracy of the model after that "
    "client (first seed)."
)
ABOUT_ALIKE = (
    "Cosine of the class accuracies of two successive models. At 1, both are good at the same "
    "classes."
)
ABOUT_LOST = (
    "The mean drop of the classes from their best accuracy after any earlier client. Lower is "
    "better."
)
ABOUT_DRIFT = (
    "Accuracy on a client's training data: the model after this client (solid), and after the next "
    "client (dotted). The gap is what the model forgot while the next client trained."
)

ByHop = dict[int, float]
"""A number by hop."""


@dataclass
class Hops:
    """What a run's chain measured, by the number of the hop, counted from 1 through all rounds.

    links: hops of a round. accuracy: by class (C,), None for a class without test examples.
    handed_over, kept: on the training data of a hop's client, after it and after the next one.
    """

    links: int
    accuracy: dict[int, list[Any]] = field(default_factory=dict)
    handed_over: ByHop = field(default_factory=dict)
    kept: ByHop = field(default_factory=dict)

    @property
    def columns(self) -> dict[int, list[Any]]:
        """Accuracies (C,) of every hop of a measured round; those of a client that failed are
        None.
        """
        if not self.accuracy:
            return {}
        blank = [None] * len(next(iter(self.accuracy.values())))
        rounds = sorted({(hop - 1) // self.links for hop in self.accuracy})
        hops = [number * self.links + link + 1 for number in rounds for link in range(self.links)]
        last = max(self.accuracy)
        return {hop: self.accuracy.get(hop, blank) for hop in hops if hop <= last}

    @property
    def alike(self) -> ByHop:
        """Cosine with the hop before, where that was measured."""
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
    """A group, and the hops of each of its runs that measured any."""

    group: Group
    runs: Sequence[Hops]


def chain(report: Report) -> Section | None:
    """Class accuracy, consistency, forgetting and drift by hop; None if no run measured a chain."""
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
        "Along the chain of clients",
        [
            Paragraph(ABOUT_HOPS),
            line_key([measured_chain.group for measured_chain in chains], style),
            Gallery(charts, "small"),
            Paragraph(ABOUT_MAPS),
            ColourScale(ACCURACY),
            Gallery([_map_chart(measured_chain, style) for measured_chain in chains], "small"),
        ],
    )


def _hop_figure(
    chains: Sequence[MeasuredChain],
    style: Style,
    axis: Mapping[str, str],
    numbers: Callable[[Hops], ByHop],
    reference: Callable[[Hops], ByHop] | None = None,
) -> Figure:
    """A number by hop, and one to compare it with."""
    drawn = []
    for measured_chain in chains:
        series = of_runs([numbers(hops) for hops in measured_chain.runs])
        line = Line(measured_chain.group, series)
        if reference is not None:
            compared_with = of_runs([reference(hops) for hops in measured_chain.runs])
            line = Line(measured_chain.group, series, compared_with)
        drawn.append(line)
    return curves(drawn, style, "hop", axis)


def _map_chart(measured_chain: MeasuredChain, style: Style) -> Chart:
    group = measured_chain.group
    first_run = measured_chain.runs[0]
    return Chart(
        [class_map(first_run.columns, group.classes, "hop")],
        f"{group.label}: {ABOUT_MAPS}",
        group_label(group, style),
        is_explained=True,
    )


def read_hops(group: Group) -> list[Hops]:
    """The hops of each of a group's runs that measured any."""
    by_run: dict[int, Hops] = {}
    for look in looks(group, "chain"):
        with reading(look):
            if id(look.run) not in by_run:
                by_run[id(look.run)] = Hops(_links(look))
            _add(look, by_run[id(look.run)])
    return list(by_run.values())


def _links(look: Look) -> int:
    """How many hops a round of the look's run has."""
    return 1 + max(int(event["stage"]) for event in look.run.clients if event["round"] > 0)


def _add(look: Look, hops: Hops) -> None:
    """Add what a look saw to the hops of its run; raises ValueError for another number of
    classes.
    """
    event = look.event
    links_of_earlier_rounds = (event["round"] - 1) * hops.links
    hop = links_of_earlier_rounds + int(event["stage"]) + 1
    accuracy = [_number(value) for value in event["class_accuracy"]]
    if len(accuracy) != len(look.run.classes):
        raise ValueError(f"class_accuracy must have {len(look.run.classes)} numbers")
    hops.accuracy[hop] = accuracy
    # a client without examples knows none of its own
    if event.get("kept") is not None:
        hops.handed_over[hop] = float(event["handed_over"])
        hops.kept[hop] = float(event["kept"])


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value)


def _defined(values: ByHop) -> ByHop:
    return {hop: value for hop, value in values.items() if not math.isnan(value)}
