"""Why a class fell, in words, and the report's section on who contributed."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.attribution.cohorts import Cohort
from fedstill.attribution.falls import Moment, Told, of_one_model, told_of
from fedstill.attribution.teachers import Taught
from fedstill.metrics.shapley import culprits
from fedstill.report.blocks import (
    Block,
    Cell,
    Chart,
    Choice,
    Gallery,
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
    height_of,
    layout,
    new_trace,
    plain,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import Look, looks, reading
from fedstill.running.runs import Group, Run

# Why a class fell, in words: one sentence, one table, one hint.


MOST_NAMED = 3
FEW, MANY = 0.7, 1.4
"""From which share of the usual on a class was drawn rarely or often."""

PARTS = {"local training": "local training", "averaging": "averaging"}
NOBODY = "nobody: the server's own part"
"""What the model would have done in the round had all of its clients been idle."""

GAMES = {
    "idle": "the others idle: what changes if a client had changed nothing",
    "absent": "the others absent: what changes if a client had not replied",
}
RULES = {
    "path": "Aumann-Shapley along the line",
    "exact": "Shapley, all coalitions",
    "two ends": "mean of alone and left out",
}


def who(run: Run, client: int) -> str:
    """What a client is called: its name in the data, or its number."""
    names: Sequence[str] = run.start.get("client_names", ())
    return f"{names[client]} ({client})" if client < len(names) else f"client {client}"


def points(value: float) -> str:
    """A share as signed percentage points.

    >>> points(-0.314), points(0.02), points(0.0)
    ('-31.4', '+2.0', '0.0')
    """
    return f"{100 * value:+.1f}" if round(1000 * value) else "0.0"


def sentence_of(run: Run, told: Told) -> str:
    """What happened, and who contributed most of it."""
    moment = told.moment
    ends = f"from {100 * moment.before:.1f} % to {100 * moment.after:.1f} %"
    moved = f"fell {ends}" if moment.change < 0 else f"rose {ends}"
    if moment.change == 0:
        moved = f"stayed at {100 * moment.after:.1f} %"
    what = (
        f"Class {run.classes[moment.of]!r}{_of_task(run, moment)} {moved} in round {moment.round}"
        f"{_in_task(run, moment)}"
    )
    parts = ", ".join(f"{name} {points(value)}" for name, value in told.parts.items())
    return f"{what}: {parts}{_most(run, told)}."


def none_fell(run: Run, deepest: Moment, of: int | None, round: int | None) -> str:
    """That nothing fell, where the deepest fall of all classes and rounds, or those asked for, is
    none; else empty.
    """
    if deepest.change < 0:
        return ""
    said = "No class fell" if of is None else f"Class {run.classes[of]!r} did not fall"
    one = round is not None or deepest.round == 1  # which comes last, so there is no other
    return f"{said} in {f'round {deepest.round}' if one else 'any round after the first'}."


def _of_task(run: Run, moment: Moment) -> str:
    """The tasks that have the class, where tasks have classes of their own."""
    classes: Sequence[Sequence[int]] = run.start.get("stream", {}).get("classes", ())
    own = [str(t) for t, some in enumerate(classes, 1) if moment.of in some]
    return "" if len(own) == len(classes) else f" (of task {' and '.join(own)})"


def _in_task(run: Run, moment: Moment) -> str:
    """The run's task in the round of a moment, where it has tasks."""
    first: Sequence[int] = run.start.get("stream", {}).get("first_rounds", ())
    now = bisect.bisect_right(first, moment.round)
    begins = ", where it begins" if moment.round in first else ""
    return f" (task {now} of {len(first)}{begins})" if len(first) > 1 else ""


def _most(run: Run, told: Told) -> str:
    if not told.clients or told.moment.change == 0:
        return ""
    falling = told.moment.change < 0
    ordered = culprits(told.clients, max(told.error, 0.005))
    named = [
        c for c in (ordered if falling else ordered[::-1]) if (told.clients[c] < 0) == falling
    ][:MOST_NAMED]
    if not named:
        return "; no client's contribution is above its error"
    each = ", ".join(f"{who(run, c)} {points(told.clients[c])}" for c in named)
    return f"; of the clients, {each} contributed most"


def lines_of(run: Run, told: Told) -> tuple[list[str], list[tuple[str, ...]]]:
    """The table: each client's contribution, what it holds of the class, and the server's own part.
    Head and rows.
    """
    holds: dict[int, tuple[int, ...]] = dict(told.had)
    if not holds and run.label_counts:
        holds = {
            c: (run.label_counts[c][told.moment.of], sum(run.label_counts[c])) for c in told.clients
        }
    about = ["of the class", "examples"] if holds else []
    about = ["in task", *about] if told.had else about
    ordered = sorted(told.clients, key=lambda c: (told.clients[c], c))
    rows: list[tuple[str, ...]] = [
        (who(run, client), points(told.clients[client]), *map(str, holds.get(client, ())))
        for client in ordered
    ]
    whole = [(NOBODY, told.nobody)] if points(told.nobody) != "0.0" else []
    if told.clients:
        whole.append(("together", sum(told.clients.values()) + told.nobody))
    rows += [(name, points(value), *("" for _ in about)) for name, value in whole]
    return ["client", "contribution [points]", *about], rows


def hint_of(told: Told) -> str:
    """What acts on a fall of this kind; empty where there is none."""
    if told.moment.change >= 0:
        return ""
    if told.had and not any(own for _, own, _ in told.had.values()):
        return (
            "None of the round's clients has the class in its task. A method over tasks acts here "
            "(fedlwf), or data "
            "that are kept (stream.past)."
        )
    local, averaging = told.parts.get("local training"), told.parts.get("averaging")
    if told.drawn is not None and told.drawn < FEW:
        return (
            f"The round's clients hold {told.drawn:.2f} times the class's usual share: who was "
            "drawn explains much of "
            "it, and --draws 10 says how much; more clients a round (topology.sampled) spread it."
        )
    if local is None or averaging is None:
        in_a_chain = all(name.startswith("client ") for name in told.parts)
        links = (
            "The links above act in this order; a method with teachers (sfedkd) keeps what earlier "
            "ones taught."
        )
        return links if in_a_chain else ""
    if local <= averaging:
        return (
            "Local training took more than averaging: what clients lack, they forget. Distillation "
            "against forgetting "
            "acts here (fedntd, fedadkd), and fewer or smaller local steps (plan.epochs, plan.lr)."
        )
    return (
        "Averaging took more than local training: the local models know the class, their mean does "
        "not. Nearer local "
        "models act here (scaffold, fedprox, fewer local steps)."
    )


def lines_of_draws(
    moment: Moment, cohorts: Sequence[Cohort]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """The table of a round with other draws of clients: who, what they have of the class in it,
    what came of it.

    Head and rows; the first row is the round as it was.
    """
    head, rows = ["clients", "of the class", "after", "change [points]"], list[tuple[str, ...]]()
    for cohort in cohorts:
        after = cohort.after[moment.of]
        named = ", ".join(str(client) for client in cohort.clients)
        shown = (
            ("–", "–") if after is None else (f"{100 * after:.1f} %", points(after - moment.before))
        )
        rows.append(
            (
                f"{named} (as it was)" if cohort is cohorts[0] else named,
                str(cohort.has[moment.of]),
                *shown,
            )
        )
    return head, rows


def draws_of(run: Run, moment: Moment, cohorts: Sequence[Cohort]) -> str:
    """How far who was drawn explains the change of a class, in a sentence."""
    was, *others = (cohort.after[moment.of] for cohort in cohorts)
    if was is None or None in others:
        return f"Class {run.classes[moment.of]!r} has no test examples."
    changes = [after - moment.before for after in others if after is not None]
    spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
    below = sum(after < was for after in others if after is not None)
    as_deep = (
        "no other draw" if not below else "one other draw" if below == 1 else f"{below} other draws"
    )
    return (
        f"Class {run.classes[moment.of]!r} in round {moment.round}, from the same model: "
        f"{points(was - moment.before)} "
        f"points with the clients as drawn; {points(statistics.fmean(changes))} ± "
        f"{100 * spread:.1f} over "
        f"{len(changes)} other draws, from {points(min(changes))} to {points(max(changes))}. Under "
        f"{as_deep} the class "
        "ends lower."
    )


def how_of(told: Told) -> str:
    """By which rule contributions were divided, and what they are not."""
    if not told.clients:
        return ""
    return (
        f"Contributions to this round, in points of soft accuracy, ± {100 * told.error:.1f}: "
        f"{RULES[told.rule]}; "
        f"{GAMES[told.game]}. They are not the cause of the final model."
    )


def lesson_of(run: Run, taught: Taught) -> str:
    """What a client learned of the classes that it asked for, by phase and by whom, in a
    sentence.
    """
    gained = {c: _of_classes(change, taught.query) for c, change in taught.teachers.items()}
    before = _of_classes(taught.before, taught.query)
    parts = {name: _of_classes(change, taught.query) for name, change in taught.parts.items()}
    named = sorted((c for c in gained if round(1000 * gained[c]) > 0), key=lambda c: -gained[c])[
        :MOST_NAMED
    ]
    each = ", ".join(f"{who(run, c)} {points(gained[c])}" for c in named)
    asked = ", ".join(repr(run.classes[c]) for c in taught.query)
    return (
        f"{who(run, taught.client).capitalize()} asked for {asked}: from {100 * before:.1f} % to "
        f"{100 * (before + sum(parts.values())):.1f} %: "
        f"{', '.join(f'{n} {points(v)}' for n, v in parts.items())}; "
        + (
            f"of its teachers, {each} contributed most."
            if named
            else "no teacher contributed to it."
        )
    )


def how_taught(taught: Taught) -> str:
    """By which rule contributions of teachers were divided, and what they are not."""
    return (
        "In points of accuracy on the common test set, ± "
        f"{100 * float(taught.gap.nan_to_num().max()):.1f}: "
        f"{RULES[taught.rule]}; the exchange again with some of its teachers. It is not what their "
        "data are worth."
    )


def lines_of_lesson(run: Run, taught: Taught) -> tuple[list[str], list[tuple[str, str, str, str]]]:
    """The table: each teacher's contribution to the classes asked for and to the client's own. Head
    and rows.
    """
    own = [c for c, count in enumerate(taught.own.tolist()) if count and c not in taught.query]
    weights = taught.own.double()
    named = {who(run, c): change for c, change in taught.teachers.items()}
    whole = {**named, "nobody: the same phases alone": taught.alone}
    whole["together"] = torch.stack(list(whole.values())).sum(0)
    holds = {
        who(run, c): str(sum(run.label_counts[c][q] for q in taught.query)) for c in taught.teachers
    }
    rows = [
        (
            who_,
            points(_of_classes(change, taught.query)),
            points(_of_classes(change, own, weights)),
            holds.get(who_, ""),
        )
        for who_, change in whole.items()
    ]
    return [
        "teacher",
        "asked for [points]",
        "own classes [points]",
        "holds of what was asked",
    ], rows


def _of_classes(values: Tensor, classes: Sequence[int], weights: Tensor | None = None) -> float:
    """The mean over some classes with test examples, weighed by the client's examples if they are
    given.
    """
    there = [c for c in classes if not math.isnan(values[c])]
    weigh = torch.ones(len(values)) if weights is None else weights
    total = sum(float(weigh[c]) for c in there)
    return sum(float(values[c] * weigh[c]) for c in there) / total if total else 0.0


# Who made the model forget: contributions by class and client, and the moments at which classes
# fell the deepest.


MOST_MOMENTS = 10
"""How many falls are drawn."""

CHANGES = (
    (0.0, "#b2182b"),
    (0.25, "#ef8a62"),
    (0.5, "#f7f7f7"),
    (0.75, "#67a9cf"),
    (1.0, "#2166ac"),
)
"""Red where a class lost, blue where it gained."""

FELL = "#b2182b"
ROSE = "#2166ac"
ACCURACY_BAR = "#888888"
REST = "#c8c8c8"

CALM = "it moved by less than 5 points here"
NO_AXES = {"xaxis": {"visible": False}, "yaxis": {"visible": False}}

ABOUT = (
    "How far each class moved in a measured round, and who contributed: in points of accuracy on "
    "at most 100 test examples a class. A contribution is a client's share of one round's change, "
    "were the others idle. It is not the cause of the final model, and not what leaving the client "
    "out would have done: fedstill why RUN --without K asks that."
)
ABOUT_MAPS = (
    "Each column is a client of the round, each row a class. Red took from the class, blue gave."
)
ABOUT_FALLS = (
    "From the accuracy before the round to that after it. Rest: what contributions, in soft "
    "accuracy, do not follow."
)

Event = dict[str, Any]
"""What the measure ``contributions`` wrote after a stage."""


def contributors(report: Report) -> Section | None:
    """The section; None if no run measured contributions."""
    groups = [group for group in report.groups if any(looks(group, "contributions"))]
    if not groups:
        return None
    rounds = sorted({number for group in groups for number in _by_round(_looks(group.started[0]))})
    maps = [
        Chart(
            [_map(group, number) for number in rounds],
            f"{group.label}: {ABOUT_MAPS}",
            group_label(group, report.style),
            "contributors",
            is_explained=True,
        )
        for group in groups
    ]
    blocks: list[Block] = [
        Paragraph(ABOUT),
        Slider("contributors", "Measured round", [f"round {number}" for number in rounds]),
        Paragraph(ABOUT_MAPS),
        Gallery(maps),
    ]
    deepest = _deepest_falls(groups)
    if deepest:
        blocks += _falls(groups, report.style, deepest)
    return Section("why", "Who made the model forget", blocks)


def _falls(groups: Sequence[Group], style: Style, deepest: Sequence[Moment]) -> list[Block]:
    """The deepest falls, one at a time, and all of them in a table."""
    charts = [
        Chart(
            [_fall(group.started[0], moment) for moment in deepest],
            f"{group.label}: {ABOUT_FALLS}",
            group_label(group, style),
            "falls",
            is_explained=True,
        )
        for group in groups
    ]
    names = [_moment_name(groups[0].classes, moment) for moment in deepest]
    return [
        Paragraph(f"The deepest falls in measured rounds, of the first seed. {ABOUT_FALLS}"),
        Choice("falls", "Show", names),
        Gallery(charts),
        _table(groups, style, deepest),
    ]


def _moment_name(classes: Sequence[str], moment: Moment) -> str:
    return f"class {classes[moment.of]}, round {moment.round}"


def _looks(run: Run) -> list[Event]:
    """The looks of a run in the order of their rounds and stages."""
    events = [event for event in run.measures if event["measure"] == "contributions"]
    return sorted(events, key=lambda event: (event["round"], event["stage"]))


def _by_round(events: Iterable[Event]) -> dict[int, list[Event]]:
    rounds: dict[int, list[Event]] = {}
    for event in events:
        rounds.setdefault(event["round"], []).append(event)
    return rounds


def _moments(run: Run) -> list[Moment]:
    """Classes that fell in measured rounds of a run, from the deepest fall on; of the untrained
    model none.
    """
    moments = []
    for number, events in _by_round(of_one_model(_looks(run))).items():
        if number > 1:
            ends = zip(events[0]["before"], events[-1]["after"], strict=True)
            moments += [
                Moment(number, c, before, after)
                for c, (before, after) in enumerate(ends)
                if before is not None and after is not None and after < before
            ]
    return sorted(moments, key=_depth)


def _depth(moment: Moment) -> tuple[float, int, int]:
    """What to sort falls by, the deepest first."""
    return moment.change, moment.round, moment.of


def _deepest_falls(groups: Iterable[Group]) -> list[Moment]:
    """The deepest falls of all groups, each class and round once."""
    moments = [moment for group in groups for moment in _moments(group.started[0])]
    once: dict[tuple[int, int], Moment] = {}
    for moment in sorted(moments, key=_depth):
        once.setdefault((moment.round, moment.of), moment)
    return list(once.values())[:MOST_MOMENTS]


def _map(group: Group, number: int) -> Figure:
    """The contributions in a round by class and client, in points."""
    run = group.started[0]
    events = _by_round(_looks(run)).get(number, [])
    columns: dict[str, list[float | None]] = {}
    for event in events:
        with reading(Look(group, run, event)):
            columns |= _columns(run, event)
    rows = [[_in_points(value) for value in row] for row in zip(*columns.values(), strict=True)]
    names = class_names(run.classes)

    traces = []
    notes = []
    if columns:
        traces.append(_contribution_map(list(columns), names, rows))
    elif events:
        notes.append(absent_note("no class moved by 5 points"))
    else:
        notes.append(absent_note("not measured in this round"))
    axes = layout(
        height=height_of(len(names)),
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category", "showgrid": False},
        yaxis=class_axis("class"),
        annotations=notes,
    )
    return Figure(traces, axes)


def _columns(run: Run, event: Event) -> dict[str, list[float | None]]:
    """The contributions (C,) of each client, or of each part of a stage that was not divided
    between clients.
    """
    columns: dict[str, list[float | None]] = {}
    if event.get("classes"):
        for index, client in enumerate(event["clients"]):
            pairs = zip(event["classes"], event["values"], strict=True)
            by_class = {c: row[index] for c, row in pairs}
            columns[plain(who(run, client))] = [by_class.get(c) for c in range(len(run.classes))]
    elif "classes" not in event:
        for name, change in event["parts"].items():
            columns[plain(name)] = list(change)
    return columns


def _in_points(value: float | None) -> float | None:
    if value is None:
        return None
    return rounded(100 * value)


def _contribution_map(
    clients: Sequence[str], classes: Sequence[str], rows: Sequence[Sequence[float | None]]
) -> Trace:
    sizes = [abs(value) for row in rows for value in row if value is not None]
    most = max(sizes, default=0.0) or 1.0
    return new_trace(
        "heatmap",
        x=clients,
        y=classes,
        z=rows,
        zmin=-most,
        zmax=most,
        colorscale=CHANGES,
        hoverongaps=False,
        hovertemplate="class %{y}, %{x}: %{z:+.1f} points<extra></extra>",
        colorbar={"title": {"text": "points"}, "thickness": 10},
    )


@dataclass(frozen=True)
class Bar:
    """A bar of a fall: from ``base`` up by ``height``, or down where that is negative."""

    name: str
    base: float
    height: float
    colour: str

    @property
    def text(self) -> str:
        """An accuracy in percent, or a change in points."""
        if self.colour == ACCURACY_BAR:
            return f"{100 * self.height:.1f} %"
        return points(self.height)


def _fall(run: Run, moment: Moment) -> Figure:
    """Bars from what was to what is: on the left by client, on the right by local training and
    averaging.
    """
    told = _told(run, moment)
    if told is None:
        return Figure([], layout(annotations=[absent_note(CALM)], showlegend=False, **NO_AXES))
    bars = _bars(run, told)
    trace = new_trace(
        "bar",
        x=[plain(bar.name) for bar in bars],
        y=[rounded(bar.height) for bar in bars],
        base=[rounded(bar.base) for bar in bars],
        marker={"color": [bar.colour for bar in bars]},
        text=[bar.text for bar in bars],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}: %{text}<extra></extra>",
    )
    axes = layout(
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category", "showgrid": False},
        yaxis={**PERCENT, "range": [-0.12, 1.12], "tickvals": [0, 0.25, 0.5, 0.75, 1]},
    )
    return Figure([trace], axes)


def _bars(run: Run, told: Told) -> list[Bar]:
    """The accuracy before, the steps by client, the accuracy after, and the steps by part."""
    before, after = told.moment.before, told.moment.after
    ordered = sorted(told.clients.items(), key=lambda pair: pair[1])
    steps = {who(run, client): value for client, value in ordered}
    if points(told.nobody) != "0.0":
        steps[NOBODY] = told.nobody
    bars = [Bar("before", 0.0, before, ACCURACY_BAR), *_steps(before, steps)]
    if steps:
        total = sum(steps.values())
        bars.append(Bar("rest", before + total, after - before - total, REST))
    bars.append(Bar("after", 0.0, after, ACCURACY_BAR))
    return [*bars, *_steps(before, told.parts)]


def _steps(start: float, steps: Mapping[str, float]) -> list[Bar]:
    """Steps as bars, each from where the one before ended."""
    bars = []
    base = start
    for name, height in steps.items():
        colour = ROSE
        if height < 0:
            colour = FELL
        bars.append(Bar(name, base, height, colour))
        base += height
    return bars


def _told(run: Run, moment: Moment) -> Told | None:
    """What the run says of a class in a round; None where the round was not measured."""
    events = _by_round(of_one_model(_looks(run))).get(moment.round, [])
    for fall in _moments(run):
        if (fall.round, fall.of) == (moment.round, moment.of):
            return told_of(fall, events)
    if not events:
        return None
    before = events[0]["before"][moment.of] or 0.0
    after = events[-1]["after"][moment.of] or 0.0
    return told_of(Moment(moment.round, moment.of, before, after), events)


def _table(groups: Sequence[Group], style: Style, deepest: Sequence[Moment]) -> Table:
    several = len(groups) > 1
    head = ["moment", "what happened"]
    if several:
        head.insert(1, "")
    rows: list[list[Cell]] = []
    for moment in deepest:
        for group in groups:
            run = group.started[0]
            told = _told(run, moment)
            if told is not None:
                row: list[Cell] = [_moment_name(run.classes, moment), sentence_of(run, told)]
                if several:
                    row.insert(1, group_label(group, style))
                rows.append(row)
    return Table(head, rows, "wide")
