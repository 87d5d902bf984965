"""Heat maps: class × round, where forgetting shows, and class × client, which is the split of the data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.report.figures import Figure, layout, plain
from fedstill.report.groups import Group
from fedstill.report.runs import Run
from fedstill.report.series import class_means

ACCURACY = ((0.0, "#440154"), (0.25, "#3b528b"), (0.5, "#21918c"), (0.75, "#5ec962"), (1.0, "#fde725"))
"""The colours of class accuracies from 0 to 100 %: viridis, whose brightness alone tells the order."""

COUNTS = ((0.0, "#c6dbef"), (0.5, "#4292c6"), (1.0, "#08306b"))
MOST_CELLS = 250_000
KINDS = ("examples", "in-local p", "out-local p")
MEAN = "mean over seeds"


@dataclass(frozen=True)
class Split:
    """One way in which the data are dealt out: (clients, C) counts, and the runs that have it."""

    counts: Sequence[Sequence[int]]
    classes: Sequence[str]
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """The seeds of its runs, and the partition."""
        seeds = sorted({r.seed for r in self.runs})
        kind = self.runs[0].settings.get("partition.kind", "")
        return f"seed {', '.join(map(str, seeds))} ({kind}, {len(self.counts)} clients)"


def has_class_accuracy(group: Group) -> bool:
    """Whether any class of any round has an accuracy."""
    rows = [row for run in group.started for row in run.class_accuracy().values()]
    return any(value is not None for row in rows for value in row)


def views(groups: Sequence[Group]) -> list[str]:
    """What a reader may choose: the mean, and each seed, unless that is one and the same or too much to carry."""
    seeds = sorted({s for g in groups for s in g.seeds})
    cells = sum(len(r.rounds) * len(r.classes) for g in groups for r in g.runs)
    if len(seeds) == 1:
        return [f"seed {seeds[0]}"]
    return [MEAN, *(f"seed {s}" for s in seeds)] if cells <= MOST_CELLS else [MEAN]


def class_by_round(group: Group, view: str, shares: bool = False) -> Figure:
    """Accuracy of each class in each round, for the mean over seeds or one seed; ``shares`` sum to 1 a round.

    Source of the shares: FedNTD, appendix E, figure 10.
    """
    columns = class_means([r for r in group.started if view in (MEAN, f"seed {r.seed}")])
    if shares:
        columns = {n: _of_sum(row) for n, row in columns.items()}
    drawn = class_map(columns, group.classes, "round", f"no run with {view}")
    for trace in drawn["data"] if shares else ():
        trace["zmax"] = max((v for row in trace["z"] for v in row if v is not None), default=100) or 100
    return drawn


def _of_sum(row: Sequence[float | None]) -> list[float | None]:
    total = sum(v for v in row if v is not None)
    return [None if v is None or total == 0 else v / total for v in row]


def class_map(
    columns: Mapping[int, Sequence[float | None]], classes: Sequence[str], unit: str, absent: str = ""
) -> Figure:
    """Accuracy of each class (C,) by round or hop, which ``unit`` names; ``absent``: the text where there is none."""
    rows = [[_percent(v) for v in row] for row in zip(*columns.values(), strict=True)]
    names = _names(classes)
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
    about: dict[str, Any] = {} if rows else {"annotations": [_absent(absent)]}
    axes = layout(
        height=_height(len(names)),
        showlegend=False,
        hovermode="closest",
        xaxis={"title": {"text": unit}, "showgrid": False, "zeroline": False},
        yaxis=_class_axis("class"),
    )
    return {"data": [trace] if rows else [], "layout": {**axes, **about}}


def splits(groups: Sequence[Group]) -> list[Split]:
    """The distinct splits among all runs, in the order of their first seed."""
    by_split: dict[str, list[Run]] = {}
    for run in sorted((r for g in groups for r in g.runs if r.start.get("label_counts")), key=lambda r: r.seed):
        by_split.setdefault(json.dumps([run.start["label_counts"], run.classes]), []).append(run)
    return [Split(runs[0].start["label_counts"], runs[0].classes, runs) for runs in by_split.values()]


def small(every_split: Sequence[Split]) -> bool:
    """Whether every kind of picture of these splits can be carried."""
    return sum(len(s.counts) * len(s.classes) for s in every_split) * len(KINDS) <= MOST_CELLS


def class_by_client(split: Split, kind: str = "examples") -> Figure:
    """What each client holds of each class, as one of ``KINDS``; what a client lacks is left blank.

    Source of the distributions: FedNTD, section 2.2 and figure 3.
    """
    rows: list[list[float | None]] = [[n or None for n in row] for row in zip(*split.counts, strict=True)]
    if kind != KINDS[0]:
        rows = [[v or None for v in row] for row in zip(*(_distribution(c, kind) for c in split.counts), strict=True)]
    trace = {
        "type": "heatmap",
        "x": list(range(len(split.counts))),
        "y": _names(split.classes),
        "z": rows,
        "zmin": 0,
        "colorscale": COUNTS,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "texttemplate": "%{z}" if len(split.counts) <= (40 if kind == KINDS[0] else 20) else "",
        "hovertemplate": f"client %{{x}}, class %{{y}}: %{{z}} ({kind})<extra></extra>",
        "colorbar": {"title": {"text": kind}, "thickness": 12, "outlinewidth": 0},
    }
    axes = layout(
        height=_height(len(split.classes)),
        showlegend=False,
        hovermode="closest",
        xaxis={"title": {"text": "client"}, "showgrid": False, "zeroline": False},
        yaxis=_class_axis("class"),
    )
    return {"data": [trace], "layout": axes}


def _distribution(counts: Sequence[int], kind: str) -> list[float]:
    total = sum(counts) or 1
    inside = [n / total for n in counts]
    if kind == KINDS[1]:
        return [round(p, 3) for p in inside]
    return [round((1 - p) / max(1, len(counts) - 1), 3) for p in inside]


def _class_axis(title: str) -> dict[str, Any]:
    return {"type": "category", "autorange": "reversed", "showgrid": False, "title": {"text": title, "standoff": 12}}


def _height(classes: int) -> int:
    return 80 + max(160, min(720, 22 * classes))


def _absent(text: str) -> dict[str, Any]:
    return {"text": text, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 1)


def _names(classes: Sequence[str]) -> list[str]:
    names = list(classes) if len(set(classes)) == len(classes) else [f"{i}: {c}" for i, c in enumerate(classes)]
    return [plain(name) for name in names]
