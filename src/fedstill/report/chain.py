"""The section on a chain of clients: after each of them, how alike successive models are and what
the next client keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstill.metrics import consistency, forgetting
from fedstill.report.blocks import (
    Chart,
    ColourScale,
    Gallery,
    Paragraph,
    Section,
    group_label,
    line_key,
)
from fedstill.report.figures import ACCURACY, PERCENT, SHARE, Figure, Line, Style, curves
from fedstill.report.rounds import class_map
from fedstill.report.sections import Report
from fedstill.report.series import Look, looks, of_runs, reading
from fedstill.running.runs import Group

ABOUT_HOPS = (
    "A hop is one client's training: its model goes to the next client. Only hops of measured "
    "rounds are drawn."
)
ABOUT_MAPS = (
    "Each column is a hop, each row a class. The colour is the accuracy of the model after that "
    "client (first seed)."
)
ABOUT_ALIKE = (
    "Cosine of the class accuracies of two successive models. 1: both are good at the same classes."
)
ABOUT_LOST = (
    "How far the classes are below the best accuracy after any earlier client, on average. Lower "
    "is better."
)
ABOUT_DRIFT = (
    "Accuracy on a client's training data: of the model after this client (solid), and of the "
    "model after the next client (dotted). The gap is what the next client's training made the "
    "model forget."
)

ByHop = dict[int, float]
"""A number by hop."""


@dataclass
class Hops:
    """What a run's chain measured, by the number of the hop, counted from 1 through all rounds.

    links: hops of a round. accuracy: by class (C,), None for a class without test examples.
    handed_over, kept: on the training data of a hop's client, after it and after the next one.
    """

    links: int
    accuracy: dict[int, list[Any]] = field(default_factory=dict)
    handed_over: ByHop = field(default_factory=dict)
    kept: ByHop = field(default_factory=dict)

    @property
    def columns(self) -> dict[int, list[Any]]:
        """Accuracies (C,) of every hop of a measured round; those of a client that failed are
        None.
        """
        if not self.accuracy:
            return {}
        blank = [None] * len(next(iter(self.accuracy.values())))
        rounds = sorted({(hop - 1) // self.links for hop in self.accuracy})
        hops = [number * self.links + link + 1 for number in rounds for link in range(self.links)]
        last = max(self.accuracy)
        return {hop: self.accuracy.get(hop, blank) for hop in hops if hop <= last}

    @property
    def alike(self) -> ByHop:
        """Cosine with the hop before, where that was measured."""
        rows = self.accuracy
        return _defined(
            {hop: consistency(rows[hop - 1], row) for hop, row in rows.items() if hop - 1 in rows}
        )

    @property
    def lost(self) -> ByHop:
        """Forgetting over the hops so far."""
        rows = list(self.accuracy.values())
        return _defined(
            {hop: forgetting(rows[: index + 1]) for index, hop in enumerate(self.accuracy)}
        )


@dataclass(frozen=True)
class MeasuredChain:
    """A group, and the hops of each of its runs that measured any."""

    group: Group
    runs: Sequence[Hops]


def chain(report: Report) -> Section | None:
    """Class accuracy, consistency, forgetting and drift by hop; None if no run measured a chain."""
    measured = [MeasuredChain(group, read_hops(group)) for group in report.groups]
    measured = [one_chain for one_chain in measured if one_chain.runs]
    if not measured:
        return None
    style = report.style
    alike = _figure(measured, style, SHARE, lambda hops: hops.alike)
    lost = _figure(measured, style, PERCENT, lambda hops: hops.lost)
    drift = _figure(
        measured, style, PERCENT, lambda hops: hops.handed_over, reference=lambda hops: hops.kept
    )
    charts = [
        Chart([alike], ABOUT_ALIKE, "Consistency of successive models"),
        Chart([lost], ABOUT_LOST, "Forgetting F along the chain"),
        Chart([drift], ABOUT_DRIFT, "Model drift"),
    ]
    return Section(
        "chain",
        "Along the chain of clients",
        [
            Paragraph(ABOUT_HOPS),
            line_key([one_chain.group for one_chain in measured], style),
            Gallery(charts, "small"),
            Paragraph(ABOUT_MAPS),
            ColourScale(ACCURACY),
            Gallery([_map_chart(one_chain, style) for one_chain in measured], "small"),
        ],
    )


def _figure(
    measured: Sequence[MeasuredChain],
    style: Style,
    axis: Mapping[str, str],
    numbers: Callable[[Hops], ByHop],
    reference: Callable[[Hops], ByHop] | None = None,
) -> Figure:
    """A number by hop, and one to compare it with."""
    drawn = []
    for one_chain in measured:
        series = of_runs([numbers(hops) for hops in one_chain.runs])
        line = Line(one_chain.group, series)
        if reference is not None:
            compared_with = of_runs([reference(hops) for hops in one_chain.runs])
            line = Line(one_chain.group, series, compared_with)
        drawn.append(line)
    return curves(drawn, style, "hop", axis)


def _map_chart(one_chain: MeasuredChain, style: Style) -> Chart:
    group = one_chain.group
    first_run = one_chain.runs[0]
    return Chart(
        [class_map(first_run.columns, group.classes, "hop")],
        f"{group.label}: {ABOUT_MAPS}",
        group_label(group, style),
        is_explained=True,
    )


def read_hops(group: Group) -> list[Hops]:
    """The hops of each of a group's runs that measured any."""
    by_run: dict[int, Hops] = {}
    for look in looks(group, "chain"):
        with reading(look):
            if id(look.run) not in by_run:
                by_run[id(look.run)] = Hops(_links(look))
            _add(look, by_run[id(look.run)])
    return list(by_run.values())


def _links(look: Look) -> int:
    """How many hops a round of the look's run has."""
    return 1 + max(int(event["stage"]) for event in look.run.clients if event["round"] > 0)


def _add(look: Look, hops: Hops) -> None:
    """Add what a look saw to the hops of its run; raises ValueError for another number of
    classes.
    """
    event = look.event
    hop = (event["round"] - 1) * hops.links + int(event["stage"]) + 1
    accuracy = [_number(value) for value in event["class_accuracy"]]
    if len(accuracy) != len(look.run.classes):
        raise ValueError(f"class_accuracy must have {len(look.run.classes)} numbers")
    hops.accuracy[hop] = accuracy
    # a client without examples knows none of its own
    if event.get("kept") is not None:
        hops.handed_over[hop] = float(event["handed_over"])
        hops.kept[hop] = float(event["kept"])


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value)


def _defined(values: ByHop) -> ByHop:
    return {hop: value for hop, value in values.items() if not math.isnan(value)}
