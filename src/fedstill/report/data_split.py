"""How data are split over clients, and forgetting against the heterogeneity of splits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.data.client_split import LabelCounts
from fedstill.data.inputs import examples_are
from fedstill.report.figures import (
    COLOURS,
    COUNTS,
    MOST_CELLS,
    PERCENT,
    Figure,
    class_axis,
    class_names,
    flat_range,
    height_of,
    layout,
    plain,
    rounded,
    short,
    whole_numbers,
)
from fedstill.report.markup import Html, choice, facts, figure, grid, section, sentence
from fedstill.running.groups import Group, differing, group_labels, method_of, split_of
from fedstill.running.runs import Run

# How the data are split, as pictures: class × client, and where clients are too many, how many are
# how large.


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


# Forgetting and accuracy against one number in which runs differ: of the split, or of the method.


NOT_THAT = ("partition.seed", "partition.min_size", "partition.clients")
SHOWN = {
    False: (("forgetting", "Forgetting F"), ("accuracy", "Accuracy")),
    True: (
        ("personal_forgetting", "Forgetting at clients"),
        ("personal_accuracy", "Accuracy for the clients"),
    ),
}
"""Key and title of what is drawn; True: of runs whose clients have models of their own."""
MORE_UNEVEN = {"alpha": "smaller is more uneven", "shards": "fewer classes a client is more uneven"}


def heterogeneity(groups: Sequence[Group]) -> Html | None:
    """Accuracy and forgetting over a parameter of the split; None if no such parameter varies."""
    says = (
        "Each line is one method on splits that differ in one number only. A method that is robust "
        "to uneven "
        "data has a flat line."
    )
    return _section("heterogeneity", "Effect of uneven data", says, _figures(groups, "partition"))


def sensitivity(groups: Sequence[Group]) -> Html | None:
    """Accuracy and forgetting over a number of the method; None if none varies with all else
    equal.
    """
    says = (
        "Each line is one method on one split; its runs differ in one number only. Dotted: other "
        "methods on "
        "that split. A flat line means that the number needs no tuning."
    )
    return _section("sensitivity", "Effect of a hyper-parameter", says, _figures(groups, "method"))


def _section(name: str, title: str, says: str, figures: Sequence[Html]) -> Html | None:
    return section(title, sentence(says), grid(figures), name=name) if figures else None


def _figures(groups: Sequence[Group], table: str) -> list[Html]:
    figures = []
    for key in _varied(groups, f"{table}."):
        series = _series(groups, key)
        if not series:
            continue
        name = key.rpartition(".")[2]
        hint = f" ({MORE_UNEVEN[name]})" if name in MORE_UNEVEN and table == "partition" else ""
        measured = {g.own_models for points in series.values() for _, g in points}
        for measure, title in (shown for own in sorted(measured) for shown in SHOWN[own]):
            says = (
                f"{title} after the last round over {name}{hint}; bars are one standard deviation "
                "over seeds."
            )
            beside = _beside(groups, series) if table == "method" else []
            figures.append(
                figure([_drawn(series, measure, name, beside)], says, f"{title} against {name}")
            )
    return figures


def _varied(groups: Sequence[Group], prefix: str) -> list[str]:
    keys = [
        k
        for k in differing([g.settings for g in groups])
        if k.startswith(prefix) and k not in NOT_THAT
    ]
    return [k for k in keys if any(_number(g.settings.get(k)) for g in groups)]


def _beside(
    groups: Sequence[Group], series: Mapping[str, Sequence[tuple[float, Group]]]
) -> list[Group]:
    """Groups of other methods, on the splits and with the plans of those that are drawn."""
    drawn = [g for points in series.values() for _, g in points]
    methods, around = {method_of(g.settings) for g in drawn}, {_around(g) for g in drawn}
    return [g for g in groups if method_of(g.settings) not in methods and _around(g) in around]


def _around(group: Group) -> str:
    rest = {k: v for k, v in group.settings.items() if not k.startswith("method.")}
    return json.dumps(rest, sort_keys=True, default=str)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _series(groups: Sequence[Group], key: str) -> dict[str, list[tuple[float, Group]]]:
    buckets: dict[str, list[tuple[float, Group]]] = {}
    for group in groups:
        if _number(group.settings.get(key)):
            rest = json.dumps(
                {k: v for k, v in group.settings.items() if k != key}, sort_keys=True, default=str
            )
            buckets.setdefault(rest, []).append((float(group.settings[key]), group))
    kept = [b for b in buckets.values() if len(b) > 1]
    names = group_labels([{k: v for k, v in b[0][1].settings.items() if k != key} for b in kept])
    return {name: sorted(b, key=lambda pair: pair[0]) for name, b in zip(names, kept, strict=True)}


def _drawn(
    series: dict[str, list[tuple[float, Group]]],
    measure: str,
    name: str,
    beside: Sequence[Group] = (),
) -> Figure:
    data: list[dict[str, Any]] = []
    for i, (label, points) in enumerate(series.items()):
        values_at = [(x, s) for x, g in points if (s := g.mean_spread(measure)) is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(label),
                "x": [x for x, _ in values_at],
                "y": [rounded(s.mean) for _, s in values_at],
                "error_y": {
                    "type": "data",
                    "array": [rounded(s.std) for _, s in values_at],
                    "thickness": 1.2,
                    "width": 3,
                },
                "hovertemplate": "%{y:.2%}",
                "line": {"color": COLOURS[i % len(COLOURS)], "width": 2},
                "marker": {"size": 7},
            }
        )
    data += _dotted(series, beside, measure)
    values = sorted({x for points in series.values() for x, _ in points})
    axis = {
        "title": {"text": name},
        "tickmode": "array",
        "tickvals": values,
        "ticktext": [f"{v:g}" for v in values],
    }
    log = {"type": "log"} if values[0] > 0 else {}
    return {
        "data": data,
        "layout": layout(xaxis={**axis, **log}, yaxis=PERCENT | flat_range(data, PERCENT)),
    }


def _dotted(
    series: Mapping[str, Sequence[tuple[float, Group]]], beside: Sequence[Group], measure: str
) -> list[dict[str, Any]]:
    """A level line for each other method, in the colour of the line that it stands beside."""
    data = []
    for i, points in enumerate(series.values()):
        xs, around = [x for x, _ in points], _around(points[0][1])
        for group in (g for g in beside if _around(g) == around):
            level = group.mean_spread(measure)
            if level is not None:
                line = {"color": COLOURS[i % len(COLOURS)], "width": 1.5, "dash": "dot"}
                level_line = {"x": [min(xs), max(xs)], "y": [rounded(level.mean)] * 2, "line": line}
                about = {"name": plain(group.label), "hovertemplate": "%{y:.2%}"}
                data.append({"type": "scatter", "mode": "lines", **about, **level_line})
    return data


# What the examples of runs are, whose mean and spread standardises them, and what was left out.


def data_section(groups: Sequence[Group]) -> Html | None:
    """The notes of reading and splitting the data; None where there are none and examples are
    images.
    """
    told: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        for run in group.started:
            said = examples_are(run.start.get("inputs", {}))
            lines = tuple(filter(None, (said, *map(str, run.start.get("notes", ())))))
            if lines:
                told.setdefault(lines, []).append(group.label)
    if not told:
        return None
    parts = []
    for lines, labels in told.items():
        if len(told) > 1:
            parts.append(facts({"runs": ", ".join(dict.fromkeys(labels))}))
        parts += [sentence(f"{line[:1].upper()}{line[1:]}.") for line in lines]
    return section("Data", *parts, name="data")
