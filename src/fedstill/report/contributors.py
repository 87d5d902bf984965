"""Who made the model forget: contributions by class and client, and the moments at which classes
fell the deepest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstill.experiment.why.falls import Moment, Told, of_one_model, told_of
from fedstill.report.figures import PERCENT, Figure, Style, layout, plain, rounded
from fedstill.report.groups import Group
from fedstill.report.heatmaps import absent_note, class_axis, class_names, height_of
from fedstill.report.markup import (
    Cell,
    Html,
    choice,
    figure,
    grid,
    html_table,
    labelled,
    section,
    sentence,
    slider,
)
from fedstill.report.measured import Look, looks, reading
from fedstill.report.runs import Run
from fedstill.report.why_said import NOBODY, points, sentence_of, who

MOMENTS = 10
CHANGES = (
    (0.0, "#b2182b"),
    (0.25, "#ef8a62"),
    (0.5, "#f7f7f7"),
    (0.75, "#67a9cf"),
    (1.0, "#2166ac"),
)
"""Red where a class lost, blue where it gained."""
Bar = tuple[str, float, float, str]
"""Name, base, height, colour."""

FELL, ROSE, WHOLE, REST = "#b2182b", "#2166ac", "#888888", "#c8c8c8"
CALM = "it moved by less than 5 points here"
NO_AXES = {"xaxis": {"visible": False}, "yaxis": {"visible": False}}

ABOUT = (
    "How far each class moved in a measured round, and who contributed: in points of accuracy on "
    "at most 100 test "
    "examples a class. A contribution is a client's share of one round's change, were the others "
    "idle. It is not the "
    "cause of the final model, and not what leaving the client out would have done: fedstill why "
    "RUN --without K asks "
    "that."
)
MAP = "Each column is a client of the round, each row a class. Red took from the class, blue gave."
FALL = (
    "From the accuracy before the round to that after it. Rest: what contributions, in soft "
    "accuracy, do not follow."
)


def contributors(groups: Sequence[Group], style: Style) -> Html | None:
    """The section; None if no run measured contributions."""
    measured = [g for g in groups if any(True for _ in looks(g, "contributions"))]
    if not measured:
        return None
    seen = sorted({round for g in measured for round in _by_round(_looks(g.started[0]))})
    maps = [
        figure(
            [_map(g, round) for round in seen],
            f"{g.label}: {MAP}",
            labelled(g, style),
            "contributors",
        )
        for g in measured
    ]
    worst = _worst(measured)
    names = [f"class {g.classes[m.of]}, round {m.round}" for g in measured[:1] for m in worst]
    falls = [
        figure(
            [_fall(g.started[0], m) for m in worst],
            f"{g.label}: {FALL}",
            labelled(g, style),
            "falls",
        )
        for g in measured
        if worst
    ]
    parts: list[Html | None] = [
        sentence(ABOUT),
        slider("contributors", "Measured round", [f"round {round}" for round in seen]),
        sentence(MAP),
        grid(maps),
    ]
    if worst:
        parts += [
            sentence(f"The deepest falls in measured rounds, of the first seed. {FALL}"),
            choice("falls", "Show", names),
            grid(falls),
            _table(measured, style, worst),
        ]
    return section("Who made the model forget", *parts, name="why")


def _looks(run: Run) -> list[dict[str, Any]]:
    """The looks of a run in the order of their rounds and stages."""
    own = [e for e in run.measures if e["measure"] == "contributions"]
    return sorted(own, key=lambda e: (e["round"], e["stage"]))


def _by_round(events: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    rounds: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        rounds.setdefault(event["round"], []).append(event)
    return rounds


def _moments(run: Run) -> list[Moment]:
    """Classes that fell in measured rounds of a run, from the deepest fall on; of the untrained
    model none.
    """
    every = []
    for round, own in _by_round(of_one_model(_looks(run))).items():
        ends = zip(own[0]["before"], own[-1]["after"], strict=True)
        every += [
            Moment(round, c, b, a)
            for c, (b, a) in enumerate(ends)
            if b is not None and a is not None and a < b
        ]
    return sorted((m for m in every if m.round > 1), key=lambda m: (m.change, m.round, m.of))


def _worst(groups: Sequence[Group]) -> list[Moment]:
    """The deepest falls of all groups, each class and round once."""
    every = sorted(
        (m for g in groups for m in _moments(g.started[0])), key=lambda m: (m.change, m.round, m.of)
    )
    once: dict[tuple[int, int], Moment] = {}
    for moment in every:
        once.setdefault((moment.round, moment.of), moment)
    return list(once.values())[:MOMENTS]


def _map(group: Group, round: int) -> Figure:
    run = group.started[0]
    here = _by_round(_looks(run)).get(round, [])
    columns: dict[str, list[float | None]] = {}
    with_classes = range(len(run.classes))
    for event in here:
        with reading(Look(group, run, event)):
            if event.get("classes"):
                for at, client in enumerate(event["clients"]):
                    own = {
                        c: row[at] for c, row in zip(event["classes"], event["values"], strict=True)
                    }
                    columns[plain(who(run, client))] = [own.get(c) for c in with_classes]
            elif "classes" not in event:
                for name, change in event["parts"].items():
                    columns[plain(name)] = [None if v is None else v for v in change]
    rows = [
        [None if v is None else rounded(100 * v) for v in row]
        for row in zip(*columns.values(), strict=True)
    ]
    most = max((abs(v) for row in rows for v in row if v is not None), default=1.0) or 1.0
    names = class_names(run.classes)
    trace = {
        "type": "heatmap",
        "x": list(columns),
        "y": names,
        "z": rows,
        "zmin": -most,
        "zmax": most,
        "colorscale": CHANGES,
        "hoverongaps": False,
        "hovertemplate": "class %{y}, %{x}: %{z:+.1f} points<extra></extra>",
        "colorbar": {"title": {"text": "points"}, "thickness": 10},
    }
    absent = "no class moved by 5 points" if here else "not measured in this round"
    about: dict[str, Any] = {} if columns else {"annotations": [absent_note(absent)]}
    axes = {"xaxis": {"type": "category", "showgrid": False}, "yaxis": class_axis("class")}
    shape = layout(
        height=height_of(len(names)), showlegend=False, hovermode="closest", **axes, **about
    )
    return {"data": [trace] if columns else [], "layout": shape}


def _fall(run: Run, moment: Moment) -> Figure:
    """Bars from what was to what is: on the left by client, on the right by local training and
    averaging.
    """
    told = _told(run, moment)
    if told is None:
        return {
            "data": [],
            "layout": layout(annotations=[absent_note(CALM)], showlegend=False, **NO_AXES),
        }
    before, after = told.moment.before, told.moment.after
    steps = [(who(run, c), v) for c, v in sorted(told.clients.items(), key=lambda pair: pair[1])]
    if points(told.nobody) != "0.0":
        steps.append((NOBODY, told.nobody))
    if steps:
        rest = (
            "rest",
            before + sum(v for _, v in steps),
            after - before - sum(v for _, v in steps),
            REST,
        )
    bars = [("before", 0.0, before, WHOLE), *_running(before, steps), *([rest] if steps else [])]
    bars += [("after", 0.0, after, WHOLE), *_running(before, list(told.parts.items()))]
    names, bases, heights, colours = zip(*bars, strict=True)
    trace = {
        "type": "bar",
        "x": [plain(name) for name in names],
        "y": [rounded(h) for h in heights],
        "base": [rounded(b) for b in bases],
        "marker": {"color": list(colours)},
        "text": [
            f"{100 * h:.1f} %" if c == WHOLE else points(h)
            for h, c in zip(heights, colours, strict=True)
        ],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{x}: %{text}<extra></extra>",
    }
    axes = {
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {**PERCENT, "range": [-0.12, 1.12], "tickvals": [0, 0.25, 0.5, 0.75, 1]},
    }
    return {"data": [trace], "layout": layout(showlegend=False, hovermode="closest", **axes)}


def _running(
    start: float, steps: Sequence[tuple[str, float]]
) -> list[tuple[str, float, float, str]]:
    """Steps as bars, each from where the one before ended."""
    bars, at = [], start
    for name, value in steps:
        bars.append((name, at, value, FELL if value < 0 else ROSE))
        at += value
    return bars


def _told(run: Run, moment: Moment) -> Told | None:
    own = next((m for m in _moments(run) if (m.round, m.of) == (moment.round, moment.of)), None)
    events = _by_round(of_one_model(_looks(run))).get(moment.round, [])
    if own is None and events:
        own = Moment(
            moment.round,
            moment.of,
            *(events[i][k][moment.of] or 0.0 for i, k in ((0, "before"), (-1, "after"))),
        )
    return told_of(own, events) if own is not None else None


def _table(groups: Sequence[Group], style: Style, worst: Sequence[Moment]) -> Html:
    head: list[Cell] = ["moment", *([""] if len(groups) > 1 else []), "what happened"]
    rows: list[list[Cell]] = []
    for moment in worst:
        for group in groups:
            run = group.started[0]
            told = _told(run, moment)
            name = [labelled(group, style)] if len(groups) > 1 else []
            if told is not None:
                of = f"class {run.classes[moment.of]}, round {moment.round}"
                rows.append([of, *name, sentence_of(run, told)])
    return html_table(head, rows, "wide")
