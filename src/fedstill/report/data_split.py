"""How the data are split, as pictures: class × client, and where clients are too many, how many are
how large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.data.dealt_out import LabelCounts
from fedstill.report.figures import COLOURS, Figure, layout, plain, short, whole_numbers
from fedstill.report.groups import Group, split_of
from fedstill.report.heatmaps import COUNTS, MOST_CELLS, class_axis, class_names, height_of
from fedstill.report.markup import Html, choice, figure, grid, section, sentence
from fedstill.report.runs import Run

KINDS = ("examples", "in-local p", "out-local p")
FIRST = 200
"""How many clients a map shows where all are too many."""
NAMED = 60
"""The most clients whose names stand on an axis."""
MOST_TOLD = 40
"""A map of more clients or classes than these is drawn without numbers; of distributions, of half
as many clients.
"""
BINS = 40
"""The most bars of a picture that counts clients."""

SAYS = (
    "How many training examples of each class each client has. It trains on its own column only. "
    "Blank: none. Its "
    "in-local distribution p is its column divided by its sum; its out-local distribution is (1 - "
    "p) / (C - 1)."
)


@dataclass(frozen=True)
class Split:
    """One way in which the data are dealt out: label counts (C,) by client, and the runs that have
    it.
    """

    counts: LabelCounts
    classes: Sequence[str]
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """The seeds of its runs, and the partition."""
        seeds = sorted({r.seed for r in self.runs})
        return (
            f"seed {', '.join(map(str, seeds))} ({split_of(self.runs[0].settings)}, "
            f"{len(self.counts):,} clients)"
        )

    @property
    def clients(self) -> list[str]:
        """What the clients that a map shows are called in the data; empty where they have no
        names.
        """
        called: Sequence[str] = next(
            (n for r in self.runs if (n := r.start.get("client_names"))), ()
        )
        return list(map(str, called[: len(self.drawn)]))

    @property
    def drawn(self) -> Sequence[list[int]]:
        """Of the clients that a map shows, all or the first, the label counts."""
        return self.counts[: FIRST if self.too_many else len(self.counts)]

    @property
    def too_many(self) -> bool:
        """Whether a map of all clients would be too large for a page."""
        return len(self.counts) * len(self.classes) > MOST_CELLS


def splits(groups: Sequence[Group]) -> list[Split]:
    """The distinct splits among all runs, in the order of their first seed."""
    by_split: dict[tuple[Any, ...], list[Run]] = {}
    for run in sorted(
        (r for g in groups for r in g.runs if len(r.label_counts)), key=lambda r: r.seed
    ):
        by_split.setdefault((run.label_counts.key, *run.classes), []).append(run)
    return [Split(runs[0].label_counts, runs[0].classes, runs) for runs in by_split.values()]


def small(every_split: Sequence[Split]) -> bool:
    """Whether every kind of picture of these splits can be carried."""
    return sum(len(s.drawn) * len(s.classes) for s in every_split) * len(KINDS) <= MOST_CELLS


def class_by_client(split: Split, kind: str = "examples") -> Figure:
    """What each client holds of each class, as one of ``KINDS``; what a client lacks is left blank.

    Of more clients than a page can carry, the first. Source of the distributions: FedNTD, section
    2.2 and figure 3.
    """
    each: Sequence[Sequence[float]] = split.drawn
    most = MOST_TOLD if kind == KINDS[0] else MOST_TOLD // 2
    if kind != KINDS[0]:
        each = [_distribution(counts, kind) for counts in split.drawn]
    who = "%{customdata}" if split.clients else "client %{x}"
    trace = {
        "type": "heatmap",
        "x": list(range(len(each))),
        "y": class_names(split.classes),
        "z": [[v or None for v in row] for row in zip(*each, strict=True)],
        "zmin": 0,
        "colorscale": COUNTS,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "texttemplate": "%{z}" if len(each) <= most and len(split.classes) <= MOST_TOLD else "",
        "hovertemplate": f"{who}, class %{{y}}: %{{z}} ({kind})<extra></extra>",
        "colorbar": {"title": {"text": kind}, "thickness": 12, "outlinewidth": 0},
    }
    if split.clients:
        trace["customdata"] = [[plain(name) for name in split.clients]] * len(split.classes)
    axes = layout(
        height=height_of(len(split.classes)),
        showlegend=False,
        hovermode="closest",
        xaxis={"title": {"text": "client"}, "showgrid": False, "zeroline": False, **_ticks(split)},
        yaxis=class_axis("class"),
    )
    return {"data": [trace], "layout": axes}


def _ticks(split: Split) -> dict[str, Any]:
    """Clients on an axis: by their names, short ones where they are few; else by number."""
    if not split.clients or len(split.clients) > NAMED:
        return whole_numbers(len(split.drawn))
    return {
        "tickmode": "array",
        "tickvals": list(range(len(split.clients))),
        "ticktext": list(map(short, split.clients)),
    }


def split_section(groups: Sequence[Group]) -> Html | None:
    """How the data are dealt out; None if no run has started."""
    every_split = splits(groups)
    if not every_split:
        return None
    shown = [
        (s, kind) for s in every_split for kind in (KINDS if small(every_split) else KINDS[:1])
    ]
    parts = [choice("split", "Split of", [f"{s.name}, {kind}" for s, kind in shown])]
    if len(every_split) == 1:
        parts.append(sentence(f"The same split in all runs: {every_split[0].name}."))
    parts.append(figure([class_by_client(s, kind) for s, kind in shown], SAYS, name="split"))
    for large in (s for s in every_split if s.too_many):
        parts += _in_numbers(large)
    return section("How the data are split", sentence(SAYS), *parts, name="split")


def _in_numbers(split: Split) -> list[Html]:
    """Of a split over more clients than are drawn: what the map shows, and how many clients are how
    large.
    """
    sizes, held = split.counts.sizes(), split.counts.classes_held()
    examples, classes = (_range(values) for values in (sizes, held))
    says = (
        f"{split.name}: too many clients to draw each. The map shows the first {FIRST}; these "
        "pictures count all "
        f"{len(sizes):,}. A client has {examples} examples, of {classes} classes."
    )
    figures = [
        figure(
            [clients_by(sizes, "examples")],
            "How many clients have how many examples.",
            "Clients by examples",
        ),
        figure(
            [clients_by(held, "classes")],
            "How many clients have examples of how many classes.",
            "Clients by classes",
        ),
    ]
    return [sentence(says), grid(figures, "small")]


def _range(values: NDArray[Any]) -> str:
    """The smallest and the largest value with their mean, or the one that all have."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,} to {high:,} (mean {values.mean():,.1f})" if low < high else f"{low:,}"


def clients_by(values: NDArray[Any], unit: str) -> Figure:
    """How many clients have a value: a bar for each value, or for a range where they are many."""
    each, clients = np.unique(values, return_counts=True)
    names = [f"{v:,.0f}" for v in each]
    if len(each) > BINS:
        clients, edges = np.histogram(values, BINS)
        names = [f"{low:,.0f}–{high:,.0f}" for low, high in pairwise(edges)]
    bars = {
        "type": "bar",
        "x": names,
        "y": clients.tolist(),
        "marker": {"color": COLOURS[0]},
        "hovertemplate": f"%{{y:,}} clients: %{{x}} {unit}<extra></extra>",
    }
    axes = layout(
        showlegend=False,
        xaxis={"type": "category", "title": {"text": unit}},
        yaxis={"title": {"text": "clients"}, "rangemode": "tozero"},
    )
    return {"data": [bars], "layout": axes}


def _distribution(counts: Sequence[int], kind: str) -> list[float]:
    total = sum(counts) or 1
    inside = [n / total for n in counts]
    if kind == KINDS[1]:
        return [round(p, 3) for p in inside]
    return [round((1 - p) / max(1, len(counts) - 1), 3) for p in inside]
