"""What local training keeps: in-local and out-local accuracy over rounds and as bars, and
prediction consistency.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.report.figures import (
    HEIGHT,
    PERCENT,
    SHARE,
    Figure,
    Style,
    faint,
    layout,
    lines,
    named,
    rounded,
)
from fedstill.report.groups import Group
from fedstill.report.markup import Html, choice, figure, grid, key, section, sentence
from fedstill.report.series import over_seeds

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
