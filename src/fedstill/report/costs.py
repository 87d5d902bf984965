"""The sections on what a run costs: seconds and megabytes, and the time to a target accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedstill.report.blocks import (
    Block,
    Cell,
    Chart,
    Gallery,
    Paragraph,
    Section,
    Table,
    group_label,
    line_key,
)
from fedstill.report.figures import (
    HEIGHT,
    Figure,
    Layout,
    Style,
    Trace,
    escaped,
    faint,
    group_name,
    layout,
    measured,
    new_trace,
    over_seconds,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import (
    Phases,
    mean_over_seeds,
    mean_seconds_elapsed,
    mean_seconds_trained,
    phases,
    seconds_by_measure,
)
from fedstill.report.summary import NONE, three_digits
from fedstill.running.runs import Group, Run, spread

ABOUT_COST = "Seconds depend on the machine and on its other load. Bytes do not."
ABOUT_TIMES = (
    "The longer a method takes for a round, the further right its points are. Both axes are means "
    "over seeds after each round."
)
ABOUT_PHASES = (
    "Seconds of a run, mean over seeds: training at the clients (full colour), measuring "
    "(lighter), and the rest, such as aggregation and checkpoints (lightest)."
)
ABOUT_BYTES = (
    "Megabytes of a run, mean over seeds: sent by clients (up, full colour) and received by them "
    "(down, lighter)."
)
ABOUT_MEASURES = (
    "Seconds of each measure in a run, mean over seeds. Clients measure their local models "
    "themselves."
)


def cost(report: Report) -> Section | None:
    """Seconds and bytes; None if no round is finished."""
    groups = [group for group in report.groups if group.started]
    if not groups:
        return None
    style = report.style
    charts = [
        Chart([phase_bars(groups, style)], ABOUT_PHASES, "Seconds by phase"),
        Chart([megabyte_bars(groups, style)], ABOUT_BYTES, "Megabytes sent"),
    ]
    if measured(groups, "accuracy"):
        by_seconds = over_seconds(groups, style, mean_seconds_elapsed, "seconds")
        charts.insert(0, Chart([by_seconds], ABOUT_TIMES, "Accuracy by seconds"))
    if any(seconds_by_measure(group) for group in groups):
        by_measure = measure_bars(groups, style)
        charts.append(Chart([by_measure], ABOUT_MEASURES, "Seconds by measure"))
    return Section(
        "cost",
        "Costs",
        [Paragraph(ABOUT_COST), line_key(groups, style), Gallery(charts, "small top")],
    )


# Bars of seconds and megabytes


@dataclass(frozen=True)
class BarPart:
    """One part of every group's bar: its name, a value for each group, and how opaque it is.

    is_named: whether its name and value stand on the bar.
    """

    name: str
    values: Sequence[float]
    opacity: float
    is_named: bool = False


def phase_bars(groups: Sequence[Group], style: Style) -> Figure:
    """Seconds of a run by phase: one bar for each group, mean over seeds."""
    by_group = [[phases(run) for run in group.started] for group in groups]

    def means(phase: str) -> list[float]:
        return [_mean_phase(of_runs, phase) for of_runs in by_group]

    parts = [
        BarPart("training", means("training"), opacity=1.0, is_named=True),
        BarPart("measuring", means("measuring"), opacity=0.55),
        BarPart("other", means("other"), opacity=0.25),
    ]
    axes = _bar_layout(len(groups), "seconds", "stack")
    return Figure([_bar(part, groups, style, "s") for part in parts], axes)


def _mean_phase(of_runs: Sequence[Phases], phase: str) -> float:
    return fmean(getattr(of_run, phase) for of_run in of_runs)


def megabyte_bars(groups: Sequence[Group], style: Style) -> Figure:
    """Megabytes of a run, up and down: two bars for each group, mean over seeds."""
    up = [_mean_megabytes(group, "bytes_up") for group in groups]
    down = [_mean_megabytes(group, "bytes_down") for group in groups]
    parts = [
        BarPart("up", up, opacity=1.0, is_named=True),
        BarPart("down", down, opacity=0.55),
    ]
    axes = _bar_layout(len(groups), "megabytes", "group")
    return Figure([_bar(part, groups, style, "MB") for part in parts], axes)


def _mean_megabytes(group: Group, key: str) -> float:
    value = group.mean_spread(key)
    if value is None:
        return 0.0
    return value.mean / 1e6


def _bar(part: BarPart, groups: Sequence[Group], style: Style, unit: str) -> Trace:
    texts = None
    if part.is_named:
        texts = [f"{part.name} {three_digits(value)} {unit}" for value in part.values]
    return new_trace(
        "bar",
        orientation="h",
        name=part.name,
        y=[group_name(group) for group in groups],
        x=[rounded(value) for value in part.values],
        text=texts,
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        marker={"color": [faint(style.colour(group), part.opacity) for group in groups]},
        hovertemplate=f"%{{y}}: {part.name} %{{x:,.4~r}} {unit}<extra></extra>",
    )


def _bar_layout(groups: int, title: str, mode: str) -> Layout:
    return layout(
        barmode=mode,
        height=max(HEIGHT, 90 + 30 * groups),
        uniformtext={"mode": "hide", "minsize": 10},
        showlegend=False,
        hovermode="closest",
        bargap=0.35,
        xaxis={"title": {"text": title}},
        yaxis={"autorange": "reversed", "type": "category"},
    )


def measure_bars(groups: Sequence[Group], style: Style) -> Figure:
    """Seconds of a run that each measure took: a bar for each measure and group, mean over
    seeds.
    """
    by_group = [seconds_by_measure(group) for group in groups]
    names = list(dict.fromkeys(name for by_measure in by_group for name in by_measure))
    traces = []
    for group, by_measure in zip(groups, by_group, strict=True):
        traces.append(
            new_trace(
                "bar",
                orientation="h",
                name=group_name(group),
                y=[escaped(name) for name in names],
                x=[rounded(by_measure.get(name, 0.0)) for name in names],
                marker={"color": style.colour(group)},
                hovertemplate=f"%{{y}}, {group_name(group)}: %{{x:,.3~r}} s<extra></extra>",
            )
        )
    axes = layout(
        barmode="group",
        height=max(HEIGHT, 60 + 14 * len(names) * len(groups)),
        showlegend=False,
        hovermode="closest",
        xaxis={"title": {"text": "seconds"}},
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return Figure(traces, axes)


# Accuracy over seconds of training, and how many of them a target accuracy takes


STEP = 0.05
"""Targets are multiples of this accuracy."""
MOST_TARGETS = 5

ABOUT_TARGETS = (
    "Seconds of training, summed over clients, whether these train one after another or in "
    "parallel. Measuring and saving are not included."
)
ABOUT_REACHED = (
    "Seconds of training until the accuracy first reaches a target: mean ± one standard deviation "
    "over the seeds that reach it, with their number if some seeds do not. Teachers: the mean "
    "number of models that teach a client."
)


def targets(report: Report) -> Section | None:
    """Accuracy by seconds of training, and the seconds to each of some targets; None if nothing was
    measured.
    """
    groups = [group for group in report.groups if _has_times(group)]
    if not groups:
        return None
    chart = Chart(
        [over_seconds(groups, report.style, mean_seconds_trained, "seconds of training")],
        ABOUT_TIMES,
        "Accuracy by seconds of training",
    )
    blocks: list[Block | None] = [
        Paragraph(ABOUT_TARGETS),
        line_key(groups, report.style),
        chart,
    ]
    goals = _goals(groups)
    if goals:
        blocks += [Paragraph(ABOUT_REACHED), _target_table(groups, report.style, goals)]
    return Section("targets", "Time to target", blocks)


def _has_times(group: Group) -> bool:
    """Whether there is an accuracy after a round, and training took time that was recorded."""
    accuracy = mean_over_seeds(group, "accuracy")
    return len(accuracy) > 1 and any(mean_seconds_trained(group).values())


def _goals(groups: Sequence[Group]) -> list[float]:
    """The highest few multiples of 5 % that any run reaches."""
    best = 0.0
    for group in groups:
        for run in group.started:
            best = max([best, *_accuracies(run)])
    # a best accuracy of 0.15 is three steps, though the quotient is a little below 3
    highest = int(best / STEP + 1e-9)
    lowest = max(1, highest - MOST_TARGETS + 1)
    return [STEP * step for step in range(lowest, highest + 1)]


def _accuracies(run: Run) -> list[float]:
    return [event["accuracy"] for event in run.rounds if event.get("accuracy") is not None]


def _target_table(groups: Sequence[Group], style: Style, goals: Sequence[float]) -> Table:
    head = ["", "teachers", *(f"{100 * goal:.0f} %" for goal in goals)]
    rows: list[list[Cell]] = []
    for group in groups:
        times = [_times_to(group, goal) for goal in goals]
        rows.append([group_label(group, style), _mean_teachers(group), *times])
    return Table(head, rows, "numbers wide")


def seconds_to(run: Run, goal: float) -> float | None:
    """Seconds of training until a run's accuracy first reaches a goal; None if it never does."""
    passed = 0.0
    for event in run.rounds:
        passed += event.get("seconds_clients") or 0.0
        accuracy = event.get("accuracy")
        if accuracy is not None and accuracy >= goal:
            return passed
    return None


def _times_to(group: Group, goal: float) -> str:
    """The seconds to a goal over the seeds that reach it, and how many do if not all do."""
    by_run = [seconds_to(run, goal) for run in group.started]
    reached = [passed for passed in by_run if passed is not None]
    value = spread(reached)
    if value is None:
        return NONE
    text = three_digits(value.mean)
    if value.runs > 1:
        text = three_digits(value.mean, value.std)
    if len(reached) < len(by_run):
        text += f" ({len(reached)} of {len(by_run)})"
    return text


def _mean_teachers(group: Group) -> str:
    """How many models taught a client, on average; a dash where methods have no teachers."""
    lists = [event.get("teachers") for run in group.started for event in run.clients]
    counts = [len(teachers) for teachers in lists if isinstance(teachers, list)]
    if not counts:
        return NONE
    return f"{sum(counts) / len(counts):.3g}"
