"""What models know of classes: in-local and out-local accuracy, over rounds and within local
training; and along a chain, after every client, how alike successive models are and what the next
client keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstill.metrics import consistency, forgetting
from fedstill.report.figures import (
    ACCURACY,
    HEIGHT,
    MOST_IN_LEGEND,
    PERCENT,
    SHARE,
    Figure,
    Style,
    class_map,
    curves,
    faint,
    flat_range,
    layout,
    lines,
    named,
    rounded,
    whole_numbers,
)
from fedstill.report.markup import Html, choice, figure, grid, key, labelled, section, sentence
from fedstill.report.series import Look, Series, looks, of_runs, over_seeds, reading
from fedstill.running.groups import Group, spread

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
        for name, by_epoch in by_stage.items() if number == last else ():
            stages.setdefault(name, []).append(by_epoch)
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
    series = [by_epoch[key] for by_epoch in seeds]
    out: list[float | None] = []
    for n in range(max(map(len, series), default=0)):
        over = spread([c[n] for c in series if n < len(c) and c[n] is not None])
        out.append(rounded(over.mean) if over else None)
    return out


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
