"""Figures of one measure: lines over rounds or seconds, with bands over seeds, as Plotly's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fedstill.report.series import Series, class_means, elapsed, over_seeds
from fedstill.running.groups import Group, Spread

Figure = dict[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
DASHES = ("solid", "dash", "dot", "dashdot")
PERCENT = {"tickformat": ".3~%"}
SHARE = {"tickformat": ".3~f"}
"""Ticks of an axis of shares: as many digits as tell them apart, without zeros at the end."""
DECIMALS = 5
HEIGHT = 340
MOST_IN_LEGEND = 4
"""How many groups a figure names within itself; of more, the page shows a key."""
LETTERS = 18
"""The most letters of a name on an axis."""


class Style:
    """The colour and dash of each group, the same in all figures; colours that colour-blind readers
    tell apart.

    Source: Okabe & Ito, "Color Universal Design".
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._index = {id(g): i for i, g in enumerate(groups)}

    def colour(self, group: Group) -> str:
        """A colour; they repeat after seven groups."""
        return COLOURS[self._index[id(group)] % len(COLOURS)]

    def dash(self, group: Group) -> str:
        """A dash, which changes when colours repeat."""
        return DASHES[self._index[id(group)] // len(COLOURS) % len(DASHES)]


def lines(
    groups: Sequence[Group], style: Style, key: str, reference: str = "", **axis: Any
) -> Figure:
    """A measure over rounds, a line a group, with a band of one standard deviation over seeds.

    ``reference``: a second measure, drawn dotted in the same colour. ``axis``: settings of the y
    axis.
    """
    none = Series([], [])
    by_group = [
        (g, over_seeds(g, key), over_seeds(g, reference) if reference else none) for g in groups
    ]
    return curves(by_group, style, "round", **axis)


def curves(
    by_group: Sequence[tuple[Group, Series, Series]], style: Style, unit: str, **axis: Any
) -> Figure:
    """Lines over rounds or hops, named by ``unit``: of each group a series, and one to refer it to,
    drawn dotted.

    Between hops that were measured and do not follow one another is a gap.
    """
    data = []
    for group, series, other in by_group:
        parts, others = (each.stretches if unit == "hop" else [each] for each in (series, other))
        if series.rounds:
            data += [
                *_band(group, style, parts),
                _with_gaps(_mean(group, style, series.rounds, series, axis), parts),
            ]
        if other.rounds:
            dotted = {**_mean(group, style, other.rounds, other, axis), **_dotted(group, style)}
            data.append(_with_gaps(dotted, others))
    last = max((r for _, *both in by_group for series in both for r in series.rounds), default=0)
    named_so = {"title": {"text": unit}, "unifiedhovertitle": {"text": f"{unit} %{{x}}"}}
    rounds = {**named_so, "rangemode": "tozero", **whole_numbers(last + 1)}
    return {
        "data": data,
        "layout": layout(
            xaxis=rounds,
            yaxis=axis | flat_range(data, axis),
            showlegend=len(by_group) <= MOST_IN_LEGEND,
        ),
    }


def over_seconds(groups: Sequence[Group], style: Style) -> Figure:
    """Accuracy over the seconds passed, both the mean over seeds at the end of each round."""
    return over(groups, style, elapsed, "seconds")


def over(
    groups: Sequence[Group], style: Style, clock: Callable[[Group], Series], title: str
) -> Figure:
    """Accuracy over what a clock says, both the mean over seeds at the end of each round."""
    data = []
    for group in groups:
        accuracy, times = over_seeds(group, "accuracy"), clock(group)
        seconds = dict(zip(times.rounds, times.mean, strict=True))
        if accuracy.rounds:
            trace = _mean(
                group, style, [rounded(seconds[r]) for r in accuracy.rounds], accuracy, PERCENT
            )
            data.append(
                {
                    **trace,
                    "customdata": accuracy.rounds,
                    "hovertemplate": "%{y:.2%}, round %{customdata}",
                }
            )
    axes = {"title": {"text": title}, "rangemode": "tozero", "hoverformat": ".1f"}
    up = PERCENT | flat_range(data, PERCENT)
    return {
        "data": data,
        "layout": layout(xaxis=axes, yaxis=up, showlegend=len(groups) <= MOST_IN_LEGEND),
    }


def layout(**more: Any) -> dict[str, Any]:
    """What all figures share; colours of text and grid are set by the page, for they follow the
    reader's theme.
    """
    return {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "height": HEIGHT,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        **{k: {"automargin": True, **v} if k in ("xaxis", "yaxis") else v for k, v in more.items()},
    }


def flat_range(data: Sequence[Figure], axis: Mapping[str, Any]) -> dict[str, Any]:
    """A range around the value where there is but one, for Plotly takes one up and one down; else
    nothing.
    """
    values = {y for trace in data for y in trace["y"] if y is not None}
    share = axis.get("tickformat") in (PERCENT["tickformat"], SHARE["tickformat"])
    if len(values) != 1 or (values == {0} and not share) or axis.get("type") == "log":
        return {}
    (value,) = values
    room = 0.05 if share else 0.1 * abs(value)
    low, high = value - room, value + room
    inside = share and 0 <= value <= 1
    return {"range": [max(0, low), min(1, high)] if inside else [low, high]}


def rounded(value: float) -> float:
    """A number with as many digits as a figure shows."""
    return round(value, DECIMALS)


def _with_gaps(line: Figure, parts: Sequence[Series]) -> Figure:
    """A line that is not drawn from one part to the next."""
    ends = list(accumulate(len(part.rounds) for part in parts[:-1]))
    lone = any(len(part.rounds) == 1 for part in parts)
    mode = "lines+markers" if lone and line["mode"] == "lines" else line["mode"]
    return line | {"mode": mode} | {key: _cut(line[key], ends) for key in ("x", "y", "customdata")}


def _cut(values: Sequence[Any], ends: Sequence[int]) -> list[Any]:
    return [v for i, value in enumerate(values) for v in ([None, value] if i in ends else [value])]


def _band(group: Group, style: Style, parts: Sequence[Series]) -> list[dict[str, Any]]:
    if not any(part.has_band for part in parts):
        return []
    quiet = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, "legendgroup": group.label}
    edge = {"width": 0, "color": style.colour(group)}
    fill = {"fill": "toself", "fillcolor": faint(style.colour(group), 0.16)}
    ends = list(accumulate(2 * len(part.rounds) for part in parts[:-1]))
    around = [round for part in parts for round in (*part.rounds, *reversed(part.rounds))]
    levels = [rounded(v) for part in parts for v in _around(part)]
    outline = {"x": _cut(around, ends), "y": _cut(levels, ends)}
    return [{"type": "scatter", **outline, "line": edge, **fill, **quiet}]


def _around(series: Series) -> Iterator[float]:
    """One standard deviation above a series, forwards, and one below it, back again."""
    yield from (v.mean + v.std for v in series.values)
    yield from (v.mean - v.std for v in reversed(series.values))


def _mean(
    group: Group, style: Style, x: Sequence[float], series: Series, axis: Mapping[str, Any]
) -> dict[str, Any]:
    percent = axis.get("tickformat") == PERCENT["tickformat"]
    return {
        "type": "scatter",
        "mode": "lines+markers" if 1 < len(x) <= 60 else "lines" if len(x) > 1 else "markers",
        "name": named(group),
        "legendgroup": group.label,
        "x": list(x),
        "y": [rounded(v) for v in series.mean],
        "customdata": [_seeds(v, 100 if percent else 1) for v in series.values],
        "hovertemplate": f"%{{y:{'.2%' if percent else '.2f'}}}%{{customdata}}",
        "line": {"color": style.colour(group), "width": 2, "dash": style.dash(group)},
        "marker": {"size": 5, "color": style.colour(group)},
    }


def named(group: Group) -> str:
    """A group's label in a figure, which says whether it is unfinished."""
    return plain(group.display)


def plain(name: str) -> str:
    """A name whose markup Plotly prints as text."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(name: str) -> str:
    """A name as an axis has room for: a long one is cut."""
    return plain(name if len(name) <= LETTERS else f"{name[: LETTERS - 1].rstrip()}…")


def whole_numbers(count: int) -> dict[str, Any]:
    """Ticks of an axis from 0 on with so many whole numbers: none between them."""
    return {"tickmode": "linear", "dtick": 1} if count <= 12 else {}


def _dotted(group: Group, style: Style) -> dict[str, Any]:
    return {
        "mode": "lines",
        "name": f"{named(group)}, received model",
        "showlegend": False,
        "line": {"color": style.colour(group), "width": 1.5, "dash": "dot"},
    }


def faint(colour: str, alpha: float) -> str:
    """A colour that lets others through: ``alpha`` in [0, 1]."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _seeds(value: Spread, scale: int) -> str:
    return f" ± {scale * value.std:.2f} ({value.runs} seeds)" if value.runs > 1 else ""


# Heat maps of class accuracies: class × round, where forgetting shows.


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
