"""Along a chain: classes known after every client, how alike successive models are, what the next
client keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstill.metrics import consistency, forgetting
from fedstill.report.figures import ACCURACY, PERCENT, SHARE, Figure, Style, class_map, curves
from fedstill.report.groups import Group
from fedstill.report.markup import Html, figure, grid, key, labelled, section, sentence
from fedstill.report.series import Look, Series, looks, of_runs, reading

ABOUT_HOPS = (
    "A hop is one client's training: its model goes to the next client. Only hops of measured "
    "rounds are drawn."
)
MAP = (
    "Each column is a hop, each row a class. The colour is the accuracy of the model after that "
    "client (first seed)."
)
ALIKE = (
    "Cosine of the class accuracies of two successive models. 1: both are good at the same classes."
)
LOST = (
    "How far the classes are below the best accuracy after any earlier client, on average. Lower "
    "is better."
)
ABOUT_DRIFT = (
    "Accuracy on a client's training data: of the model after this client (solid), and of the "
    "model after"
    " the next client (dotted). The gap is what the next client's training made the model forget."
)


@dataclass
class Hops:
    """What a run's chain measured, by the number of the hop, counted from 1 through all rounds."""

    links: int  # a round's hops
    # (C,), None for a class without test examples
    accuracy: dict[int, list[Any]] = field(default_factory=dict)
    handed_over: dict[int, float] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)

    @property
    def columns(self) -> dict[int, list[Any]]:
        """Accuracies (C,) of every hop of a measured round; those of a client that failed are
        None.
        """
        blank = [None] * len(next(iter(self.accuracy.values()), []))
        rounds = sorted({(hop - 1) // self.links for hop in self.accuracy})
        hops = [r * self.links + i + 1 for r in rounds for i in range(self.links)]
        return {hop: self.accuracy.get(hop, blank) for hop in hops if hop <= max(self.accuracy)}

    @property
    def alike(self) -> dict[int, float]:
        """Cosine with the hop before, where that was measured."""
        rows = self.accuracy
        return _there(
            {hop: consistency(rows[hop - 1], row) for hop, row in rows.items() if hop - 1 in rows}
        )

    @property
    def lost(self) -> dict[int, float]:
        """Forgetting over the hops so far."""
        rows = list(self.accuracy.values())
        return _there({hop: forgetting(rows[: i + 1]) for i, hop in enumerate(self.accuracy)})


def chain(groups: Sequence[Group], style: Style) -> Html | None:
    """Class accuracy, consistency, forgetting and drift by hop; None if no run measured a chain."""
    measured = [(g, hops) for g in groups if (hops := read_hops(g))]
    if not measured:
        return None

    def series(hops: Sequence[Hops], of: Callable[[Hops], dict[int, float]]) -> Series:
        return of_runs([of(h) for h in hops])

    def drawn(
        of: Callable[[Hops], dict[int, float]], axis: dict[str, str], to: Any = lambda h: {}
    ) -> Figure:
        return curves(
            [(g, series(h, of), series(h, to)) for g, h in measured], style, "hop", **axis
        )

    figures = [
        figure([drawn(lambda h: h.alike, SHARE)], ALIKE, "Consistency of successive models"),
        figure([drawn(lambda h: h.lost, PERCENT)], LOST, "Forgetting F along the chain"),
        figure(
            [drawn(lambda h: h.handed_over, PERCENT, lambda h: h.kept)], ABOUT_DRIFT, "Model drift"
        ),
    ]
    maps = [
        figure(
            [class_map(hops[0].columns, g.classes, "hop")], f"{g.label}: {MAP}", labelled(g, style)
        )
        for g, hops in measured
    ]
    stops = ", ".join(f"{c} {100 * p:.0f}%" for p, c in ACCURACY)
    scale = Html(
        f'<p class="scale">0 % <i style="background:linear-gradient(90deg, {stops})"></i> 100 % '
        "accuracy</p>"
    )
    names = key([g for g, _ in measured], style)
    parts = [
        sentence(ABOUT_HOPS),
        names,
        grid(figures, "small"),
        sentence(MAP),
        scale,
        grid(maps, "small"),
    ]
    return section("Along the chain of clients", *parts, name="chain")


def read_hops(group: Group) -> list[Hops]:
    """The hops of each of a group's runs that measured any."""
    by_run: dict[int, Hops] = {}
    for look in looks(group, "chain"):
        _take(look, by_run)
    return list(by_run.values())


def _take(look: Look, by_run: dict[int, Hops]) -> None:
    with reading(look) as event:
        if id(look.run) not in by_run:
            by_run[id(look.run)] = Hops(
                1 + max(int(e["stage"]) for e in look.run.clients if e["round"] > 0)
            )
        into = by_run[id(look.run)]
        hop = (event["round"] - 1) * into.links + int(event["stage"]) + 1
        into.accuracy[hop] = [None if v is None else float(v) for v in event["class_accuracy"]]
        if len(into.accuracy[hop]) != len(look.run.classes):
            raise ValueError(f"class_accuracy must have {len(look.run.classes)} numbers")
        if event.get("kept") is not None:  # a client without examples knows none of its own
            into.handed_over[hop], into.kept[hop] = (
                float(event["handed_over"]),
                float(event["kept"]),
            )


def _there(values: dict[int, float]) -> dict[int, float]:
    return {hop: value for hop, value in values.items() if not math.isnan(value)}
