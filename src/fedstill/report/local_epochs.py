"""Within local training: in-local and out-local accuracy of local models, from what they received
to what they sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.report.figures import (
    MOST_IN_LEGEND,
    PERCENT,
    Figure,
    Style,
    flat_range,
    layout,
    named,
    rounded,
    whole_numbers,
)
from fedstill.report.groups import Group
from fedstill.report.markup import Html, figure, grid, key, section, sentence
from fedstill.report.numbers import spread

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
