"""In-local and out-local accuracy, over rounds and within local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    named,
    rounded,
    whole_numbers,
)
from fedstill.report.groups import Group
from fedstill.report.markup import Html, choice, figure, grid, key, section, sentence
from fedstill.report.numbers import spread
from fedstill.report.series import over_seeds

# What local training keeps: in-local and out-local accuracy over rounds and as bars, and prediction
# consistency.


FORMS = {"in proportion to a client's labels": "", "mean over seen or unseen classes": "_seen"}
BARS = (
    ("in_local_accuracy", "in-local", 1.0),
    ("out_local_accuracy", "out-local", 0.55),
    ("accuracy", "global", 0.25),
)


def knowledge(groups: Sequence[Group], style: Style) -> Html | None:
    """In-local and out-local accuracy, and prediction consistency; None if nothing of it was
    measured.
    """
    inside = (
        "Local models after training, on classes in the proportions of their own client's data."
    )
    outside = "The same models on the classes that their client lacks or has little of."
    steady = (
        "Cosine of the class accuracies of two successive global models. 1: both are good at the "
        "same classes."
    )
    local = (("in", inside, "In-local accuracy"), ("out", outside, "Out-local accuracy"))
    figures = [
        figure(
            [
                lines(
                    groups, style, f"{k}_local_accuracy", f"received_{k}_local_accuracy", **PERCENT
                )
            ],
            text,
            title,
        )
        for k, text, title in local
        if measured(groups, f"{k}_local_accuracy")
    ]
    dotted = (
        "Dotted: the global model that those clients received, measured on the mean of their label "
        "distributions. Where a solid line is below the dotted line of its colour, local training "
        "forgot what"
        " the received model knew."
    )
    parts = [sentence(dotted) if figures else None, key(groups, style)]
    if measured(groups, "consistency"):
        figures.append(
            figure([lines(groups, style, "consistency", **SHARE)], steady, "Prediction consistency")
        )
    if not figures:
        return None
    parts.append(grid(figures, "small"))
    if measured(groups, "in_local_accuracy"):
        says = (
            "The last measured round: local models on classes that their client has (full colour) "
            "and does not "
            "have (lighter), and the new global model on all classes (lightest). Thin lines: one "
            "standard "
            "deviation over clients."
        )
        forms = [f for f, suffix in FORMS.items() if measured(groups, f"in_local_accuracy{suffix}")]
        parts.append(choice("forms", "In- and out-local accuracy", forms))
        parts.append(
            figure(
                [_bars(groups, style, FORMS[f]) for f in forms],
                says,
                "In-local and out-local",
                "forms",
            )
        )
    return section("What local training keeps", *parts, name="knowledge")


def measured(groups: Sequence[Group], key: str) -> bool:
    """Whether any group has a number of that key in any round."""
    return any(over_seeds(g, key).rounds for g in groups)


def _bars(groups: Sequence[Group], style: Style, form: str) -> Figure:
    data = []
    for measure, name, strength in BARS:
        wanted = measure if measure == "accuracy" else measure + form
        by_group = [(g, _at_last(g, wanted), _at_last(g, f"{wanted}_std")) for g in groups]
        there = [(g, v, s) for g, v, s in by_group if v is not None]
        spreads = [rounded(s or 0.0) for _, _, s in there]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [named(g) for g, _, _ in there],
                "y": [rounded(v) for _, v, _ in there],
                "error_y": {
                    "type": "data",
                    "array": spreads,
                    "thickness": 1.2,
                    "width": 4,
                    "visible": any(spreads),
                },
                "marker": {"color": [faint(style.colour(g), strength) for g, _, _ in there]},
                "text": [name for _ in there],
                "textposition": "inside",
                "insidetextanchor": "start",
                # the page writes on faint bars as on its ground
                "meta": "faint" if strength < 1 else "full",
                "hovertemplate": f"%{{x}}: {name} %{{y:.2%}}<extra></extra>",
            }
        )
    uniform = {"mode": "hide", "minsize": 9}
    axes = {"xaxis": {"type": "category"}, "yaxis": {**PERCENT, "range": [0, 1]}}
    about = layout(
        height=HEIGHT, barmode="group", bargap=0.3, showlegend=False, hovermode="closest", **axes
    )
    return {"data": data, "layout": {**about, "uniformtext": uniform}}


def _at_last(group: Group, key: str) -> float | None:
    series = over_seeds(group, key)
    local = over_seeds(group, "in_local_accuracy").rounds
    at = dict(zip(series.rounds, series.mean, strict=True))
    return at.get(local[-1]) if local else None


# Within local training: in-local and out-local accuracy of local models, from what they received to
# what they sent.


SIDES = {
    "in": ("In-local accuracy", "On classes in the proportions of the client's own data."),
    "out": ("Out-local accuracy", "On the classes that the client lacks or has little of."),
}
BAR_SHIFT = 0.06
"""How far, in epochs, the error bars of one group stand from those of the next."""


@dataclass(frozen=True)
class Visit:
    """The last measured round of a group: by stage, what each seed's clients knew epoch by
    epoch.
    """

    group: Group
    round: int
    stages: Mapping[str, Sequence[Mapping[str, Any]]]


def epochs(groups: Sequence[Group], style: Style) -> Html | None:
    """Accuracy over the epochs of a client's visit, a figure for each stage and side; None if it
    was not measured.
    """
    visits = [v for g in groups if (v := _visit(g)) is not None]
    if not visits:
        return None
    names = list(dict.fromkeys(name for v in visits for name in v.stages))
    figures = []
    for name in names:
        for side, (title, says) in SIDES.items():
            where = f"{title}, stage {name}" if len(names) > 1 else title
            figures.append(figure([_drawn(visits, style, name, side)], says, where))
    rounds = ", ".join(map(str, sorted({v.round for v in visits})))
    says = (
        f"The clients of round {rounds} while they train. Epoch 0 is the model that they received. "
        "Means over clients "
        "and seeds; bars are one standard deviation over clients. A line that falls shows "
        "forgetting during local "
        "training."
    )
    parts = [sentence(says), key([v.group for v in visits], style), grid(figures)]
    return section("During local training", *parts, name="epochs")


def _visit(group: Group) -> Visit | None:
    measured = [
        (e["round"], e["by_epoch"]) for r in group.started for e in r.rounds if e.get("by_epoch")
    ]
    if not measured:
        return None
    last = max(number for number, _ in measured)
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for number, by_stage in measured:
        for name, curves in by_stage.items() if number == last else ():
            stages.setdefault(name, []).append(curves)
    return Visit(group, last, stages)


def _drawn(visits: Sequence[Visit], style: Style, stage: str, side: str) -> Figure:
    data, most = [], 0
    for i, visit in enumerate(visits):
        seeds = visit.stages.get(stage, [])
        means, spreads = (_over(seeds, f"{side}_local_accuracy{k}") for k in ("", "_std"))
        if not means:
            continue
        most = max(most, len(means))
        colour, shift = style.colour(visit.group), BAR_SHIFT * (i - (len(visits) - 1) / 2)
        bars = {"type": "data", "array": spreads, "thickness": 1.2, "width": 3, "color": colour}
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": named(visit.group),
                "x": [rounded(n + shift) for n in range(len(means))],
                "y": means,
                "error_y": bars,
                "customdata": list(range(len(means))),
                "hovertemplate": "%{y:.2%} after epoch %{customdata}",
                "line": {"color": colour, "width": 2, "dash": style.dash(visit.group)},
                "marker": {"size": 6, "color": colour},
            }
        )
    across = {"title": {"text": "local epoch"}, "zeroline": False, **whole_numbers(most)}
    axes = {"xaxis": across, "yaxis": PERCENT | flat_range(data, PERCENT)}
    return {
        "data": data,
        "layout": layout(hovermode="closest", showlegend=len(data) <= MOST_IN_LEGEND, **axes),
    }


def _over(seeds: Sequence[Mapping[str, Any]], key: str) -> list[float | None]:
    """The mean over seeds at each epoch; where some stopped earlier, over those that did not."""
    curves = [by_epoch[key] for by_epoch in seeds]
    out: list[float | None] = []
    for n in range(max(map(len, curves), default=0)):
        over = spread([c[n] for c in curves if n < len(c) and c[n] is not None])
        out.append(rounded(over.mean) if over else None)
    return out
