"""The sections that list all runs: their results, costs and settings, and the refused replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedstill.report.blocks import (
    Block,
    Cell,
    Chart,
    ColumnHead,
    Folded,
    Gallery,
    Legend,
    MeanCell,
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
    measured,
    new_trace,
    over_seconds,
    plain_layout,
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
    seconds_trained,
)
from fedstill.report.summary import (
    NONE,
    Column,
    decimals_of,
    differing_schedule,
    measured_columns,
    order_note,
    ranked,
    ranking_column,
    rounds_note,
    schedule_cells,
)
from fedstill.report.table_files import differences, differences_table
from fedstill.running.numbers import ReplyOutcome
from fedstill.running.runs import UNSET, Group, Run, differing, spread, value_text

ABOUT = (
    "One line for each group of runs that differ only in their seed: mean ± one standard deviation "
    "over seeds."
)
NO_ROUND = "No run has finished a round yet."


def results(report: Report) -> Section:
    """The table of all measures, and the differences to a baseline."""
    measures = measured_columns(report.groups)
    about = f"{ABOUT} {order_note(ranking_column(report.groups))}".strip()
    return Section(
        "results",
        "Results",
        [
            Paragraph(about),
            _table(report, measures),
            Legend(_explained(measures)),
            _differences(report),
        ],
    )


def _table(report: Report, measures: Sequence[Column]) -> Table:
    schedule = differing_schedule(report.groups)
    units = [ColumnHead(measure.title, measure.unit) for measure in measures]
    head: list[Cell] = ["", *schedule.values(), "seeds", *units]
    body = []
    for group in ranked(report.groups):
        label = group_label(group, report.style, rounds_note(group))
        numbers = [_cell(measure, group) for measure in measures]
        body.append([label, *schedule_cells(group, schedule), group.run_count_text, *numbers])
    return Table(head, body, "numbers wide")


def _cell(measure: Column, group: Group) -> Cell:
    value = group.mean_spread(measure.key)
    if value is None:
        return NONE
    mean = value.mean_text(measure.scale, measure.digits)
    deviation = value.deviation_text(measure.scale, measure.digits)
    if not deviation:
        return mean
    return MeanCell(mean, deviation)


def _explained(measures: Sequence[Column]) -> str:
    """A sentence that explains each column of the table."""
    if not measures:
        return NO_ROUND
    text = "; ".join(f"{measure.title}: {measure.description}" for measure in measures)
    return f"{text[0].upper()}{text[1:]}."


def _differences(report: Report) -> Block | None:
    """Differences to the baseline; None if no other group shares two finished seeds with it."""
    baseline = report.baseline
    group_differences = differences(report.groups, baseline)
    if not any(difference.paired.pairs > 1 for difference in group_differences):
        return None
    about = (
        f"Difference of each line to {baseline.label}, paired by seed, with the 95 % confidence "
        "interval of the mean and the p-value of a paired t-test. If the interval contains 0, the "
        "difference is not significant."
    )
    if not all(group.finished for group in report.groups):
        about += " Unfinished runs are left out."
    text_table = differences_table(group_differences)
    table = Table(text_table.head, text_table.lines, "numbers wide")
    return Folded(f"Differences to {baseline.label}", [Paragraph(about), table])


MAX_REASONS = 12
"""The largest number of reasons per group with a separate line."""
MAX_IDS = 10
"""The largest number of clients, or rounds, in a line."""


def failures(report: Report) -> Section | None:
    """Replies that were refused, by reason; None if there are none."""
    lines: list[list[Cell]] = []
    for group in report.groups:
        lines.extend(_reasons(group, group_label(group, report.style)))
    if not lines:
        return None
    head = ["", "reason", "times", "clients", "rounds"]
    about = _about_failures(report.groups)
    return Section("failures", "Failures", [Paragraph(about), Table(head, lines, "wide")])


def _reasons(group: Group, label: Block) -> Iterable[list[Cell]]:
    """A line for each of the most frequent reasons of a group, and one for all others."""
    replies = [reply for run in group.runs for reply in _refused_replies(run)]
    counts = Counter(reply.refused for reply in replies)
    frequent = counts.most_common(MAX_REASONS)
    for reason, count in frequent:
        refused = [reply for reply in replies if reply.refused == reason]
        clients = _ids(reply.client for reply in refused)
        rounds = _ids(reply.round for reply in refused)
        yield [label, reason, str(count), clients, rounds]
    if len(counts) > len(frequent):
        more = f"{len(counts) - len(frequent)} more reasons"
        times = counts.total() - sum(count for _, count in frequent)
        yield [label, more, str(times), NONE, NONE]


def _about_failures(groups: Iterable[Group]) -> str:
    """A sentence on refused replies, and whether the rounds continued."""
    ended = set()
    for group in groups:
        for run in group.runs:
            finished = len(run.numbers.rounds)
            ended |= {reply.round <= finished for reply in _refused_replies(run)}
    text = "Refused replies and failed clients."
    if ended == {True}:
        return f"{text} The rounds continued without them."
    if True in ended:
        return f"{text} Finished rounds continued without them."
    return text


def _refused_replies(run: Run) -> list[ReplyOutcome]:
    return [reply for reply in run.numbers.replies if reply.refused]


def _ids(repeated: Iterable[int]) -> str:
    """The numbers of clients or rounds; if there are many, the first ones and how many."""
    ids = sorted(set(repeated))
    listed = ", ".join(map(str, ids[:MAX_IDS]))
    if len(ids) > MAX_IDS:
        listed += f" … ({len(ids)})"
    return listed


# Settings, and the directories of the runs


def settings(report: Report) -> Section:
    """The settings in which groups differ. Collapsed: the equal settings, and all runs."""
    by_group = [group.settings for group in report.groups]
    keys = differing(by_group)
    equal = [[key, value_text(value)] for key, value in by_group[0].items() if key not in keys]
    blocks: list[Block] = []
    if keys:
        head: list[Cell] = ["setting"]
        head += [group_label(group, report.style) for group in report.groups]
        body = [[key, *(value_text(values.get(key, UNSET)) for values in by_group)] for key in keys]
        blocks.append(Paragraph("The settings in which the groups differ."))
        blocks.append(Table(head, body, "settings"))
    elif len(report.groups) == 1:
        blocks.append(Paragraph("There is only one group: its runs differ at most in their seed."))
    equal_table = Table(["setting", "value"], equal, "settings")
    blocks.append(Folded(f"{len(equal)} settings that are equal in all runs", [equal_table]))
    blocks.append(Folded("All runs", [_runs(report.groups)]))
    return Section("settings", "Settings", blocks)


def _runs(groups: Iterable[Group]) -> Table:
    head = ["directory", "group", "seed", "rounds", "state"]
    body = []
    for group in groups:
        body += [_run_line(run, group, "") for run in group.runs]
        note = ", excluded: another run has this seed"
        body += [_run_line(run, group, note) for run in group.repeats]
    return Table(head, body, "settings")


def _run_line(run: Run, group: Group, note: str) -> list[str]:
    state = "unfinished"
    if run.finished:
        state = "finished"
    if run.stop_reason:
        state += f", stopped early: {run.stop_reason}"
    if run.best is not None:
        state += f", round {run.best.round} selected by {run.best.criterion}"
    rounds = f"{run.numbers.last_round} of {run.planned_rounds}"
    return [str(run.display_path), group.label, str(run.seed), rounds, f"{state}{note}"]


# Seconds and megabytes


ABOUT_COST = "Seconds depend on the machine and on its other load. Bytes do not."
ABOUT_TIMES = (
    "The longer a method takes for a round, the further right its points are. Both axes are means "
    "over seeds after each round that all seeds have."
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
    """A part of each group's bar: its name, a value for each group, and its opacity.

    is_named: whether the bar shows its name and value.
    """

    name: str
    values: Sequence[float]
    opacity: float
    is_named: bool = False


def phase_bars(groups: Sequence[Group], style: Style) -> Figure:
    """Seconds of a run by phase: one bar for each group, mean over seeds."""
    by_group = [[phases(run) for run in group.started] for group in groups]

    def means(phase: str) -> list[float]:
        return [_mean_phase(run_phases, phase) for run_phases in by_group]

    parts = [
        BarPart("training", means("training"), opacity=1.0, is_named=True),
        BarPart("measuring", means("measuring"), opacity=0.55),
        BarPart("other", means("other"), opacity=0.25),
    ]
    axes = _bar_layout(len(groups), "seconds", "stack")
    return Figure([_bar(part, groups, style, "s") for part in parts], axes)


def _mean_phase(run_phases: Sequence[Phases], phase: str) -> float:
    return fmean(getattr(phases_of_run, phase) for phases_of_run in run_phases)


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
        texts = [f"{part.name} {_three_digits(value)} {unit}" for value in part.values]
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


def _three_digits(value: float) -> str:
    """A number with at least three significant digits."""
    return f"{value:,.{decimals_of(value)}f}"


def _bar_layout(groups: int, title: str, mode: str) -> Layout:
    return plain_layout(
        barmode=mode,
        height=max(HEIGHT, 90 + 30 * groups),
        uniformtext={"mode": "hide", "minsize": 10},
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
    axes = plain_layout(
        barmode="group",
        height=max(HEIGHT, 60 + 14 * len(names) * len(groups)),
        xaxis={"title": {"text": "seconds"}},
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return Figure(traces, axes)


# Accuracy by seconds of training, and the seconds until a target accuracy


STEPS = 20
"""The number of possible targets between an accuracy of 0 and 1: multiples of 5 %."""
MAX_TARGETS = 5

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
    """Accuracy by seconds of training, and the seconds to each target; None if nothing was
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
    """Whether the group has an accuracy after a round, and recorded times of training."""
    accuracy = mean_over_seeds(group, "accuracy")
    return len(accuracy) > 1 and any(mean_seconds_trained(group).values())


def _goals(groups: Sequence[Group]) -> list[float]:
    """The highest targets that any run reaches."""
    best = 0.0
    for group in groups:
        for run in group.started:
            best = max([best, *_accuracies(run)])
    # A quotient equals an accuracy of the same value; a product with 0.05 may be slightly larger.
    possible = [step / STEPS for step in range(1, STEPS + 1)]
    reached = [goal for goal in possible if goal <= best]
    return reached[-MAX_TARGETS:]


def _accuracies(run: Run) -> list[float]:
    """The accuracies after each round; the accuracy before training is left out."""
    return [accuracy for number, accuracy in run.curve("accuracy").items() if number > 0]


def _target_table(groups: Sequence[Group], style: Style, goals: Sequence[float]) -> Table:
    head = ["", "teachers", *(f"{100 * goal:.0f} %" for goal in goals)]
    rows: list[list[Cell]] = []
    for group in groups:
        times = [_times_to(group, goal) for goal in goals]
        rows.append([group_label(group, style), _mean_teachers(group), *times])
    return Table(head, rows, "numbers wide")


def seconds_to(run: Run, goal: float) -> float | None:
    """Seconds of training until a run's accuracy first reaches a goal; None if it never does."""
    seconds = seconds_trained(run)
    for number, accuracy in run.curve("accuracy").items():
        if number > 0 and accuracy >= goal:
            return seconds[number]
    return None


def _times_to(group: Group, goal: float) -> str:
    """The seconds to a goal over the seeds that reach it, with their number if some do not."""
    by_run = [seconds_to(run, goal) for run in group.started]
    reached = [passed for passed in by_run if passed is not None]
    value = spread(reached)
    if value is None:
        return NONE
    text = _three_digits(value.mean)
    if value.runs > 1:
        text += f" ± {value.std:,.{decimals_of(value.mean)}f}"
    if len(reached) < len(by_run):
        text += f" ({len(reached)} of {len(by_run)})"
    return text


def _mean_teachers(group: Group) -> str:
    """The mean number of models that taught a client; a dash for methods without teachers."""
    counts = [count for run in group.started for count in run.numbers.client_values("teachers")]
    if not counts:
        return NONE
    return f"{sum(counts) / len(counts):.3g}"
