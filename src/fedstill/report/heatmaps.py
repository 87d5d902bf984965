"""Heat maps of class accuracies: class × round, where forgetting shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.report.figures import Figure, layout, plain, whole_numbers
from fedstill.report.groups import Group
from fedstill.report.series import class_means

ACCURACY = (
    (0.0, "#440154"),
    (0.25, "#3b528b"),
    (0.5, "#21918c"),
    (0.75, "#5ec962"),
    (1.0, "#fde725"),
)
"""The colours of class accuracies from 0 to 100 %: viridis, whose brightness alone tells the
order.
"""

COUNTS = ((0.0, "#c6dbef"), (0.5, "#4292c6"), (1.0, "#08306b"))
"""The colours of numbers from 0 up: blues."""
MOST_CELLS = 250_000
"""More numbers than these a page does not carry in pictures of one kind."""
MEAN = "mean over seeds"


def has_class_accuracy(group: Group) -> bool:
    """Whether any class of any round has an accuracy."""
    rows = [row for run in group.started for row in run.class_accuracy().values()]
    return any(value is not None for row in rows for value in row)


def views(groups: Sequence[Group]) -> list[str]:
    """What a reader may choose: the mean, and each seed, unless that is one and the same or too
    much to carry.
    """
    seeds = sorted({s for g in groups for s in g.seeds})
    cells = sum(len(r.rounds) * len(r.classes) for g in groups for r in g.runs)
    if len(seeds) == 1:
        return [f"seed {seeds[0]}"]
    return [MEAN, *(f"seed {s}" for s in seeds)] if cells <= MOST_CELLS else [MEAN]


def class_by_round(group: Group, view: str, shares: bool = False) -> Figure:
    """Accuracy of each class in each round, for the mean over seeds or one seed; ``shares`` sum to
    1 a round.

    Source of the shares: FedNTD, appendix E, figure 10.
    """
    columns = class_means([r for r in group.started if view in (MEAN, f"seed {r.seed}")])
    if shares:
        columns = {n: _of_sum(row) for n, row in columns.items()}
    drawn = class_map(columns, group.classes, "round", f"no run with {view}")
    for trace in drawn["data"] if shares else ():
        trace["zmax"] = (
            max((v for row in trace["z"] for v in row if v is not None), default=100) or 100
        )
    return drawn


def _of_sum(row: Sequence[float | None]) -> list[float | None]:
    total = sum(v for v in row if v is not None)
    return [None if v is None or total == 0 else v / total for v in row]


def class_map(
    columns: Mapping[int, Sequence[float | None]],
    classes: Sequence[str],
    unit: str,
    absent: str = "",
) -> Figure:
    """Accuracy of each class (C,) by round or hop, which ``unit`` names; ``absent``: the text where
    there is none.
    """
    rows = [[_percent(v) for v in row] for row in zip(*columns.values(), strict=True)]
    names = class_names(classes)
    trace = {
        "type": "heatmap",
        "x": list(columns),
        "y": names,
        "z": rows,
        "zmin": 0,
        "zmax": 100,
        "colorscale": ACCURACY,
        "showscale": False,
        "hoverongaps": False,
        "hovertemplate": f"class %{{y}}, {unit} %{{x}}: %{{z:.1f}} %<extra></extra>",
    }
    about: dict[str, Any] = {} if rows else {"annotations": [absent_note(absent)]}
    # on an axis of numbers a round takes the room up to the next one that was measured; hops are
    # drawn side by side
    shown = {"type": "category"} if unit == "hop" else whole_numbers(1 + max(columns, default=0))
    axes = layout(
        height=height_of(len(names)),
        showlegend=False,
        hovermode="closest",
        xaxis={"title": {"text": unit}, "showgrid": False, "zeroline": False, **shown},
        yaxis=class_axis("class"),
    )
    return {"data": [trace] if rows else [], "layout": {**axes, **about}}


def class_axis(title: str) -> dict[str, Any]:
    """An axis of classes by name, the first at the top."""
    return {
        "type": "category",
        "autorange": "reversed",
        "showgrid": False,
        "title": {"text": title, "standoff": 12},
    }


def height_of(classes: int) -> int:
    """How high, in pixels, a map with so many classes is."""
    return 80 + max(160, min(720, 22 * classes))


def absent_note(text: str) -> dict[str, Any]:
    """What a figure says where there is nothing to draw."""
    return {"text": text, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 1)


def class_names(classes: Sequence[str]) -> list[str]:
    """The names of classes as a figure shows them, each once."""
    names = (
        list(classes)
        if len(set(classes)) == len(classes)
        else [f"{i}: {c}" for i, c in enumerate(classes)]
    )
    return [plain(name) for name in names]
