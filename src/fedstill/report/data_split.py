"""The sections on data: their split over clients, and the form of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.data.client_split import LabelCounts
from fedstill.data.dataset import examples_text
from fedstill.report.blocks import Block, Chart, Choice, Facts, Gallery, Paragraph, Section
from fedstill.report.figures import (
    COLOURS,
    COUNT_COLOURS,
    MAX_CELLS,
    Figure,
    class_axis,
    class_names,
    escaped,
    height_of,
    layout,
    new_trace,
    plain_layout,
    short_name,
    whole_numbers,
)
from fedstill.report.page import Report
from fedstill.report.summary import split_text
from fedstill.running.runs import Group, Run

# Maps of class × client


MAX_NUMBERS = 40
"""A heat map with more clients or classes than this has no numbers. For distributions, the limit is
half as many clients.
"""


@dataclass(frozen=True)
class MapKind:
    """A kind of heat map: the values of a client's column, by its label counts (C,).

    max_numbered: the largest number of clients in a map with numbers.
    """

    title: str
    column: Callable[[Sequence[int]], Sequence[float]]
    max_numbered: int = MAX_NUMBERS // 2


def _label_counts(counts: Sequence[int]) -> Sequence[float]:
    return counts


def _in_local(counts: Sequence[int]) -> list[float]:
    return [round(share, 3) for share in _shares(counts)]


def _out_local(counts: Sequence[int]) -> list[float]:
    others = max(1, len(counts) - 1)
    return [round((1 - share) / others, 3) for share in _shares(counts)]


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts) or 1
    return [count / total for count in counts]


EXAMPLES = MapKind("examples", _label_counts, max_numbered=MAX_NUMBERS)
IN_LOCAL = MapKind("in-local p", _in_local)
OUT_LOCAL = MapKind("out-local p", _out_local)
KINDS = (EXAMPLES, IN_LOCAL, OUT_LOCAL)
"""The kinds of heat maps: numbers of examples, or one of two distributions over classes."""

FIRST = 200
"""The number of clients in a heat map if it cannot show all clients."""
MAX_NAMES = 60
"""The largest number of clients whose names are shown on an axis."""
BINS = 40
"""The largest number of bars in a histogram of clients."""

ABOUT_SPLIT = (
    "The number of training examples of each class at each client; blank cells have none. A client "
    "only trains on its own column. Its in-local distribution p is this column divided by its sum, "
    "and its out-local distribution is (1 - p) / (C - 1)."
)


@dataclass(frozen=True)
class Split:
    """A split of the data over clients: label counts (C,) by client, and the runs with it."""

    counts: LabelCounts
    classes: Sequence[str]
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """The seeds of its runs, and the partition."""
        seeds = ", ".join(map(str, sorted({run.seed for run in self.runs})))
        partition = split_text(self.runs[0].settings)
        return f"seed {seeds} ({partition}, {len(self.counts):,} clients)"

    @property
    def client_names(self) -> list[str]:
        """The names of the clients in a heat map; empty if they have no names."""
        for run in self.runs:
            if run.client_names:
                return run.client_names[: len(self.drawn)]
        return []

    @property
    def drawn(self) -> Sequence[list[int]]:
        """The label counts of the clients in a heat map: all, or the first ones."""
        if self.is_too_large:
            return self.counts[:FIRST]
        return self.counts

    @property
    def is_too_large(self) -> bool:
        """Whether a heat map of all clients would be too large for a page."""
        return len(self.counts) * len(self.classes) > MAX_CELLS


def split_maps(report: Report) -> Section | None:
    """The split of the data over clients; None if no run has started."""
    distinct = splits(report.groups)
    if not distinct:
        return None
    kinds: Sequence[MapKind] = KINDS
    if not are_small(distinct):
        kinds = [EXAMPLES]
    options = []
    maps = []
    for split in distinct:
        for kind in kinds:
            options.append(f"{split.name}, {kind.title}")
            maps.append(class_by_client(split, kind))

    blocks: list[Block] = [Paragraph(ABOUT_SPLIT), Choice("split", "Split of", options)]
    if len(distinct) == 1:
        blocks.append(Paragraph(f"The same split in all runs: {distinct[0].name}."))
    blocks.append(Chart(maps, ABOUT_SPLIT, name="split", is_explained=True))
    for split in distinct:
        if split.is_too_large:
            blocks += _in_numbers(split)
    return Section("split", "Data split", blocks)


def splits(groups: Iterable[Group]) -> list[Split]:
    """The distinct splits among all runs, in the order of their first seed."""
    runs = [run for group in groups for run in group.runs if len(run.label_counts)]
    by_split: dict[tuple[Any, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_split.setdefault((run.label_counts.key, *run.classes), []).append(run)
    return [Split(runs[0].label_counts, runs[0].classes, runs) for runs in by_split.values()]


def are_small(distinct: Iterable[Split]) -> bool:
    """Whether the heat maps of all kinds of these splits fit on a page."""
    cells = sum(len(split.drawn) * len(split.classes) for split in distinct)
    return cells * len(KINDS) <= MAX_CELLS


def class_by_client(split: Split, kind: MapKind = EXAMPLES) -> Figure:
    """A heat map of classes by client, of one of ``KINDS``; cells without examples are blank.

    If there are too many clients for a page, it shows the first ones. Source of the distributions:
    FedNTD, section 2.2 and figure 3.
    """
    columns = [kind.column(counts) for counts in split.drawn]
    client = "client %{x}"
    names = None
    if split.client_names:
        client = "%{customdata}"
        names = [[escaped(name) for name in split.client_names]] * len(split.classes)
    trace = new_trace(
        "heatmap",
        x=list(range(len(columns))),
        y=class_names(split.classes),
        z=[[value or None for value in row] for row in zip(*columns, strict=True)],
        zmin=0,
        customdata=names,
        colorscale=COUNT_COLOURS,
        colorbar={"title": {"text": kind.title}, "thickness": 12, "outlinewidth": 0},
        xgap=1,
        ygap=1,
        hoverongaps=False,
        texttemplate=_number_template(split, kind),
        hovertemplate=f"{client}, class %{{y}}: %{{z}} ({kind.title})<extra></extra>",
    )
    across = {"title": {"text": "client"}, "showgrid": False, "zeroline": False}
    axes = plain_layout(
        height=height_of(len(split.classes)),
        xaxis={**across, **_ticks(split)},
        yaxis=class_axis("class"),
    )
    return Figure([trace], axes)


def _number_template(split: Split, kind: MapKind) -> str:
    """The template for the number in each cell, if there is enough space."""
    if len(split.drawn) > kind.max_numbered or len(split.classes) > MAX_NUMBERS:
        return ""
    return "%{z}"


def _ticks(split: Split) -> dict[str, Any]:
    """The ticks of an axis of clients: shortened names if there are few clients, else numbers."""
    names = split.client_names
    if not names or len(names) > MAX_NAMES:
        return whole_numbers(len(split.drawn))
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [short_name(name) for name in names],
    }


# Splits over too many clients, in numbers


def _in_numbers(split: Split) -> list[Block]:
    """A note on a split that is too large for the heat map, and histograms of all clients."""
    sizes = split.counts.sizes
    classes = split.counts.classes_held
    about = (
        f"{split.name}: there are too many clients to show each. The map shows the first {FIRST}; "
        f"the histograms count all {len(sizes):,}. A client has {_range(sizes)} examples, of "
        f"{_range(classes)} classes."
    )
    by_size = Chart(
        [clients_by(sizes, "examples")],
        "The number of clients by their number of examples.",
        "Clients by examples",
    )
    by_classes = Chart(
        [clients_by(classes, "classes")],
        "The number of clients by the number of classes that they have.",
        "Clients by classes",
    )
    return [Paragraph(about), Gallery([by_size, by_classes], "small")]


def _range(values: NDArray[Any]) -> str:
    """The range of the values with their mean, or the common value."""
    low = int(values.min())
    high = int(values.max())
    if low == high:
        return f"{low:,}"
    return f"{low:,} to {high:,} (mean {values.mean():,.1f})"


def clients_by(values: NDArray[Any], unit: str) -> Figure:
    """A histogram of clients, with a bar for each value or for each range of values."""
    distinct, clients = np.unique(values, return_counts=True)
    names = [f"{value:,.0f}" for value in distinct]
    if len(distinct) > BINS:
        clients, edges = np.histogram(values, BINS)
        names = [f"{low:,.0f}–{high:,.0f}" for low, high in pairwise(edges)]
    bars = new_trace(
        "bar",
        x=names,
        y=clients.tolist(),
        marker={"color": COLOURS[0]},
        hovertemplate=f"%{{y:,}} clients: %{{x}} {unit}<extra></extra>",
    )
    axes = layout(
        showlegend=False,
        xaxis={"type": "category", "title": {"text": unit}},
        yaxis={"title": {"text": "clients"}, "rangemode": "tozero"},
    )
    return Figure([bars], axes)


# Notes on the form of the examples, on standardisation, and on omissions


def data_notes(report: Report) -> Section | None:
    """The notes on reading and splitting the data; None if there are no notes and the examples are
    images.
    """
    labels_by_notes: dict[tuple[str, ...], list[str]] = {}
    for group in report.groups:
        for run in group.started:
            notes = _notes(run)
            if notes:
                labels_by_notes.setdefault(notes, []).append(group.label)
    if not labels_by_notes:
        return None
    blocks: list[Block] = []
    for notes, labels in labels_by_notes.items():
        if len(labels_by_notes) > 1:
            blocks.append(Facts({"runs": ", ".join(dict.fromkeys(labels))}))
        blocks += [Paragraph(f"{note[:1].upper()}{note[1:]}.") for note in notes]
    return Section("data", "Data", blocks)


def _notes(run: Run) -> tuple[str, ...]:
    """The non-empty notes of a run."""
    inputs = run.start.get("inputs", {})
    notes = [examples_text(inputs), *map(str, run.start.get("notes", ()))]
    return tuple(note for note in notes if note)
