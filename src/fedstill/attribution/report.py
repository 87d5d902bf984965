"""The report's section on the clients' contributions to changes in class accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedstill.attribution.class_changes import (
    MEASURE,
    SERVER_ROW,
    Attribution,
    ClassChange,
    attribute,
    changes_between,
    client_name,
    is_divided,
    of_global_model,
    points,
    sentence_of,
)
from fedstill.report.blocks import (
    Block,
    Cell,
    Chart,
    Choice,
    Gallery,
    Label,
    Paragraph,
    Section,
    Slider,
    Table,
    group_label,
)
from fedstill.report.figures import (
    PERCENT,
    Figure,
    Style,
    Trace,
    absent_note,
    class_axis,
    class_names,
    escaped,
    height_of,
    layout,
    new_trace,
    plain_layout,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import measurements
from fedstill.running.numbers import Look
from fedstill.running.runs import Group, Run

MAX_CHANGES = 10
"""The number of the largest losses that have a chart."""

CONTRIBUTION_COLOURS = (
    (0.0, "#b2182b"),
    (0.25, "#ef8a62"),
    (0.5, "#f7f7f7"),
    (0.75, "#67a9cf"),
    (1.0, "#2166ac"),
)
"""Red for losses, blue for gains."""

LOSS_COLOUR = "#b2182b"
GAIN_COLOUR = "#2166ac"
ACCURACY_COLOUR = "#888888"
REST_COLOUR = "#c8c8c8"

NO_AXES = {"xaxis": {"visible": False}, "yaxis": {"visible": False}}

SMALL_CHANGE = "it changed by less than 5 points"

EXPLANATION = (
    "Changes of each class in a measured round, and the clients' contributions, in points of "
    "accuracy on at most 100 test examples per class. A contribution is a client's share of the "
    "change in one round, compared with a client that returns the model without training. It does "
    "not explain the final model. The effect of leaving client K out is another number, which "
    "fedstill why RUN --without K computes."
)
MAP_EXPLANATION = (
    "Each column is a client of the round, and each row is a class. Red is a loss of accuracy, "
    "blue a gain."
)
ABOUT_LOSSES = "The largest losses in measured rounds. Each group shows its first measured seed."
CHANGE_EXPLANATION = (
    "From the accuracy before the round to the accuracy after it. Rest: the difference between the "
    "change in accuracy and the contributions, which are in soft accuracy."
)


def contributors(report: Report) -> Section | None:
    """Return the section; None if no run measured contributions."""
    measured = _measured_runs(report.groups)
    if not measured:
        return None
    measured_rounds: set[int] = set()
    for group_run in measured:
        measured_rounds.update(_by_round(_looks(group_run.run)))
    rounds = sorted(measured_rounds)
    maps = [
        Chart(
            [_contribution_map(group_run.run, number) for number in rounds],
            f"{group_run.group.label}: {MAP_EXPLANATION}",
            group_run.label(report.style),
            "contributors",
            is_explained=True,
        )
        for group_run in measured
    ]
    blocks: list[Block] = [
        Paragraph(EXPLANATION),
        Slider("contributors", "Measured round", [f"round {number}" for number in rounds]),
        Paragraph(MAP_EXPLANATION),
        Gallery(maps),
    ]
    blocks += _losses_by_classes(measured, report.style)
    return Section("why", "Which clients caused forgetting", blocks)


@dataclass(frozen=True)
class MeasuredRun:
    """The first run of a group that measured contributions; the section shows no other run."""

    group: Group
    run: Run

    def label(self, style: Style) -> Label:
        """The name of the group, with the seed of the run."""
        return group_label(self.group, style, f"seed {self.run.seed}")


def _measured_runs(groups: Iterable[Group]) -> list[MeasuredRun]:
    """The first run with contributions of each group that has one."""
    measured = []
    for group in groups:
        group_measurements = measurements(group, MEASURE)
        if group_measurements:
            measured.append(MeasuredRun(group, group_measurements[0].run))
    return measured


def _looks(run: Run) -> list[Look]:
    """What the measure recorded in a run, in the order of rounds and stages."""
    return sorted(run.numbers.looks(MEASURE), key=lambda look: (look.round, look.stage))


def _by_round(looks: Iterable[Look]) -> dict[int, list[Look]]:
    rounds: dict[int, list[Look]] = {}
    for look in looks:
        rounds.setdefault(look.round, []).append(look)
    return rounds


# ---- contributions by class and client -----------------------------------------------------------


def _contribution_map(run: Run, number: int) -> Figure:
    """The contributions in a round by class and client, in points."""
    round_looks = _by_round(_looks(run)).get(number, [])
    columns: dict[str, list[float | None]] = {}
    for look in round_looks:
        columns |= _columns(run, look)
    rows = [[_in_points(value) for value in row] for row in zip(*columns.values(), strict=True)]
    names = class_names(run.classes)

    traces = []
    notes = []
    if columns:
        traces.append(_heat_map(list(columns), names, rows))
    elif round_looks:
        notes.append(absent_note("no class changed by 5 points"))
    else:
        notes.append(absent_note("not measured in this round"))
    axes = plain_layout(
        height=height_of(len(names)),
        xaxis={"type": "category", "showgrid": False},
        yaxis=class_axis("class"),
        annotations=notes,
    )
    return Figure(traces, axes)


def _columns(run: Run, look: Look) -> dict[str, list[float | None]]:
    """The contributions (C,) of each client, or of each part of a stage that was not divided among
    clients.
    """
    if not is_divided(look):
        return {escaped(name): look.by_class(f"parts/{name}") for name in look.names("parts")}
    if "values" not in look.names():
        return {}  # no class has changed enough
    columns = {}
    for client in look.clients:
        by_class = look.of_client("values", client)
        column = [by_class.get(label) for label in range(len(run.classes))]
        columns[escaped(client_name(run, client))] = column
    return columns


def _in_points(value: float | None) -> float | None:
    if value is None:
        return None
    return rounded(100 * value)


def _heat_map(
    clients: Sequence[str], classes: Sequence[str], rows: Sequence[Sequence[float | None]]
) -> Trace:
    largest = 0.0
    for row in rows:
        sizes = [abs(value) for value in row if value is not None]
        largest = max([largest, *sizes])
    largest = largest or 1.0
    return new_trace(
        "heatmap",
        x=clients,
        y=classes,
        z=rows,
        zmin=-largest,
        zmax=largest,
        colorscale=CONTRIBUTION_COLOURS,
        hoverongaps=False,
        hovertemplate="class %{y}, %{x}: %{z:+.1f} points<extra></extra>",
        colorbar={"title": {"text": "points"}, "thickness": 10},
    )


# ---- the largest losses --------------------------------------------------------------------------


def _losses(run: Run) -> list[ClassChange]:
    """The losses of classes in measured rounds of a run, largest first; without round 1, which
    starts from an untrained model.
    """
    losses: list[ClassChange] = []
    for number, round_looks in _by_round(of_global_model(_looks(run))).items():
        accuracies_before = round_looks[0].by_class("before")
        accuracies_after = round_looks[-1].by_class("after")
        changes = changes_between(number, accuracies_before, accuracies_after)
        losses += [change for change in changes if number > 1 and change.change < 0]
    return sorted(losses, key=_size)


def _size(loss: ClassChange) -> tuple[float, int, int]:
    """The key that sorts losses, largest first."""
    return loss.change, loss.round, loss.label


def _largest_losses(measured: Iterable[MeasuredRun]) -> list[ClassChange]:
    """The largest losses of runs with the same classes, with each pair of class and round once."""
    losses: list[ClassChange] = []
    for group_run in measured:
        losses += _losses(group_run.run)
    distinct: dict[tuple[int, int], ClassChange] = {}
    for loss in sorted(losses, key=_size):
        distinct.setdefault((loss.round, loss.label), loss)
    return list(distinct.values())[:MAX_CHANGES]


def _losses_by_classes(measured: Iterable[MeasuredRun], style: Style) -> list[Block]:
    """The largest losses, with a selector of their own for each distinct list of classes."""
    by_classes: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for group_run in measured:
        by_classes.setdefault(tuple(group_run.run.classes), []).append(group_run)

    blocks: list[Block] = []
    for number, comparable in enumerate(by_classes.values()):
        losses = _largest_losses(comparable)
        if losses:
            blocks += _loss_blocks(comparable, style, losses, _selector_name(number))
    if blocks:
        blocks.insert(0, Paragraph(f"{ABOUT_LOSSES} {CHANGE_EXPLANATION}"))
    return blocks


def _selector_name(number: int) -> str:
    """The name of a selector of losses and its charts, unique in the page."""
    if number == 0:
        return "falls"
    return f"falls {number}"


def _loss_blocks(
    measured: Sequence[MeasuredRun], style: Style, losses: Sequence[ClassChange], name: str
) -> list[Block]:
    """Charts with a selector for the largest losses, and a table of all of them.

    The runs have the same classes. name: that of the selector.
    """
    charts = [
        Chart(
            [_loss_figure(group_run.run, loss) for loss in losses],
            f"{group_run.group.label}: {CHANGE_EXPLANATION}",
            group_run.label(style),
            name,
            is_explained=True,
        )
        for group_run in measured
    ]
    options = [_loss_name(measured[0].run.classes, loss) for loss in losses]
    return [
        Choice(name, "Show", options),
        Gallery(charts),
        _loss_table(measured, style, losses),
    ]


def _loss_name(classes: Sequence[str], loss: ClassChange) -> str:
    return f"class {classes[loss.label]}, round {loss.round}"


def _attribution(run: Run, loss: ClassChange) -> Attribution | None:
    """The attribution of a class's change in a run, with the accuracies of this run.

    None if the round was not measured, or the change was not divided.
    """
    round_looks = _by_round(of_global_model(_looks(run))).get(loss.round, [])
    if not round_looks:
        return None
    accuracy_before = round_looks[0].by_class("before")[loss.label] or 0.0
    accuracy_after = round_looks[-1].by_class("after")[loss.label] or 0.0
    change = ClassChange(loss.round, loss.label, accuracy_before, accuracy_after)
    return attribute(change, round_looks)


def _loss_table(
    measured: Sequence[MeasuredRun], style: Style, losses: Sequence[ClassChange]
) -> Table:
    has_labels = len(measured) > 1
    head = ["moment", "what happened"]
    if has_labels:
        head.insert(1, "")
    rows: list[list[Cell]] = []
    for loss in losses:
        for group_run in measured:
            run = group_run.run
            attribution = _attribution(run, loss)
            if attribution is not None:
                row: list[Cell] = [_loss_name(run.classes, loss), sentence_of(run, attribution)]
                if has_labels:
                    row.insert(1, group_run.label(style))
                rows.append(row)
    return Table(head, rows, "wide")


@dataclass(frozen=True)
class Bar:
    """A bar from ``base`` to ``base + height``; the height may be negative."""

    name: str
    base: float
    height: float
    colour: str

    @property
    def text(self) -> str:
        """The label of the bar: an accuracy in percent, or a change in points."""
        if self.colour == ACCURACY_COLOUR:
            return f"{100 * self.height:.1f} %"
        return points(self.height)


def _loss_figure(run: Run, loss: ClassChange) -> Figure:
    """Bars from the accuracy before the round to the accuracy after it: by client on the left, and
    by local training and averaging on the right.
    """
    attribution = _attribution(run, loss)
    if attribution is None:
        note = absent_note(SMALL_CHANGE)
        return Figure([], layout(annotations=[note], showlegend=False, **NO_AXES))
    bars = _bars(run, attribution)
    trace = new_trace(
        "bar",
        x=[escaped(bar.name) for bar in bars],
        y=[rounded(bar.height) for bar in bars],
        base=[rounded(bar.base) for bar in bars],
        marker={"color": [bar.colour for bar in bars]},
        text=[bar.text for bar in bars],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}: %{text}<extra></extra>",
    )
    axes = plain_layout(
        xaxis={"type": "category", "showgrid": False},
        yaxis={**PERCENT.ticks, "range": [-0.12, 1.12], "tickvals": [0, 0.25, 0.5, 0.75, 1]},
    )
    return Figure([trace], axes)


def _bars(run: Run, attribution: Attribution) -> list[Bar]:
    """The accuracy before, the steps by client, the accuracy after, and the steps by part."""
    start = attribution.change.accuracy_before
    end = attribution.change.accuracy_after
    contributions = sorted(attribution.clients.items(), key=lambda item: item[1])
    steps = {client_name(run, client): value for client, value in contributions}
    if points(attribution.server) != "0.0":
        steps[SERVER_ROW] = attribution.server
    bars = [Bar("before", 0.0, start, ACCURACY_COLOUR), *_steps(start, steps)]
    if steps:
        total = sum(steps.values())
        bars.append(Bar("rest", start + total, end - start - total, REST_COLOUR))
    bars.append(Bar("after", 0.0, end, ACCURACY_COLOUR))
    return [*bars, *_steps(start, attribution.parts)]


def _steps(start: float, steps: Mapping[str, float]) -> list[Bar]:
    """Steps as bars; each bar starts at the end of the previous one."""
    bars = []
    base = start
    for name, height in steps.items():
        colour = GAIN_COLOUR
        if height < 0:
            colour = LOSS_COLOUR
        bars.append(Bar(name, base, height, colour))
        base += height
    return bars
