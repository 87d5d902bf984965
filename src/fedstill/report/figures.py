"""Figures made of Plotly's traces: layouts, colours, and lines by round with bands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fedstill.core.files import neutral
from fedstill.report.series import (
    ByRound,
    Series,
    common_rounds,
    mean_over_seeds,
    over_seeds,
)
from fedstill.running.runs import Group, Spread

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
DASHES = ("solid", "dash", "dot", "dashdot")
NOT_DOTTED = ("solid", "dash", "dashdot")
"""The dashes of lines in figures whose dotted lines have a meaning of their own."""

ACCURACY_COLOURS = (
    (0.0, "#440154"),
    (0.25, "#3b528b"),
    (0.5, "#21918c"),
    (0.75, "#5ec962"),
    (1.0, "#fde725"),
)
"""The colours of accuracies from 0 to 100 %: viridis, which is ordered by brightness."""

COUNT_COLOURS = ((0.0, "#c6dbef"), (0.5, "#4292c6"), (1.0, "#08306b"))
"""The colours of non-negative numbers: shades of blue."""

DECIMALS = 5
HEIGHT = 340
MAX_IN_LEGEND = 4
"""The largest number of groups in a figure's own legend; for more, the page has a separate key."""
MAX_WITH_MARKERS = 60
"""A line with more points than this is drawn without markers."""
MAX_TICKS = 12
"""An axis with at most this many whole numbers has a tick at each."""
MAX_CELLS = 250_000
"""The largest number of cells in all heat maps of one kind on a page."""
MAX_NAME_LENGTH = 18
"""The largest number of characters of a name on an axis."""


Trace = dict[str, Any]
"""A trace in the format of plotly.js: its type and its settings."""

Layout = dict[str, Any]
"""A layout in the format of plotly.js."""


@dataclass(frozen=True)
class Figure:
    """Traces and their layout in the format of plotly.js. Figures may share a layout.

    Traces and layouts are plain dictionaries, because Plotly's classes check every number and would
    take most of the time of a page. Tests check figures with these classes.
    """

    traces: Sequence[Trace]
    layout: Layout


def new_trace(kind: str, /, **settings: Any) -> Trace:
    """A trace of a type of plotly.js, such as "scatter", without settings that are None."""
    given = {name: value for name, value in settings.items() if value is not None}
    return {"type": kind, **given}


def figures_json(figures: Sequence[Figure]) -> str:
    """Figures as JSON for the page's script. Numbers that are not finite become null.

    No text in it can end a script element or change the direction of other text, because < and >
    are escaped, and control characters are escaped or replaced.
    """
    plain_figures = [{"data": figure.traces, "layout": figure.layout} for figure in figures]
    try:
        text = _json(plain_figures)
    except ValueError:
        text = _json(_finite(plain_figures))
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def _json(value: Any) -> str:
    # `neutral` would not recognise an escaped character.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return neutral(text, "html")


def _finite(value: Any) -> Any:
    """The same value with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Style:
    """The colour and dash of each group, the same in all figures. Colour-blind readers can
    distinguish the colours.

    Source: Okabe & Ito, "Color Universal Design".
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._index = {id(group): i for i, group in enumerate(groups)}

    def colour(self, group: Group) -> str:
        """The colour of a group. Colours repeat after seven groups."""
        return line_colour(self._index[id(group)])

    def dash(self, group: Group) -> str:
        """The dash of a group. It changes when colours repeat."""
        return line_dash(self._index[id(group)])


def line_colour(index: int) -> str:
    """The colour of a line by its index in a figure. Colours repeat after seven lines."""
    return COLOURS[index % len(COLOURS)]


def line_dash(index: int, dashes: Sequence[str] = DASHES) -> str:
    """The dash of a line by its index in a figure. It changes when colours repeat."""
    return dashes[index // len(COLOURS) % len(dashes)]


# Layouts and axes


def layout(**settings: Any) -> Layout:
    """A layout with the common settings of all figures, and additional ones.

    The page sets the colours of text and grid, which depend on the reader's theme.
    """
    for axis in ("xaxis", "yaxis"):
        if axis in settings:
            settings[axis] = {"automargin": True, **settings[axis]}
    shared = {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "height": HEIGHT,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
    return {**shared, **settings}


def plain_layout(**settings: Any) -> Layout:
    """A layout without a legend, in which the pointer selects one cell, bar or point."""
    return layout(hovermode="closest", showlegend=False, **settings)


@dataclass(frozen=True)
class ValueAxis:
    """An axis of values. ``ticks``: the settings of its ticks.

    is_share: whether values are shares, usually in [0, 1]. is_percent: whether texts show them in
    percent.
    """

    ticks: Mapping[str, Any] = field(default_factory=dict)
    is_share: bool = False
    is_percent: bool = False

    def fitted(self, traces: Iterable[Trace]) -> dict[str, Any]:
        """The settings of a y axis for some traces."""
        values = [value for trace in traces for value in trace.get("y", ())]
        return {**self.ticks, **self.flat_range(values)}

    def flat_range(self, values: Iterable[float | None]) -> dict[str, Any]:
        """The range of an axis on which all values are equal, which Plotly would extend by 1 in
        both directions; empty if values differ.
        """
        distinct = {value for value in values if value is not None}
        if len(distinct) != 1:
            return {}
        (value,) = distinct
        if self.is_share:
            return {"range": _share_range(value)}
        if value == 0:
            return {}
        margin = 0.1 * abs(value)
        return {"range": [value - margin, value + margin]}


def _share_range(share: float) -> list[float]:
    """A range around a share, within [0, 1] if the share is."""
    low = share - 0.05
    high = share + 0.05
    if 0 <= share <= 1:
        return [max(0, low), min(1, high)]
    return [low, high]


NUMBER = ValueAxis()

# Enough digits to distinguish ticks, and no trailing zeros.
SHARE = ValueAxis({"tickformat": ".3~f"}, is_share=True)
PERCENT = ValueAxis({"tickformat": ".3~%"}, is_share=True, is_percent=True)


def whole_numbers(count: int) -> dict[str, Any]:
    """The ticks of an axis with ``count`` whole numbers from 0: at whole numbers only."""
    if count > MAX_TICKS:
        return {}
    return {"tickmode": "linear", "dtick": 1}


def class_axis(title: str) -> dict[str, Any]:
    """An axis of class names, with the first class at the top."""
    return {
        "type": "category",
        "autorange": "reversed",
        "showgrid": False,
        "title": {"text": title, "standoff": 12},
    }


def height_of(classes: int) -> int:
    """The height of a heat map with this number of classes, in pixels."""
    return 80 + max(160, min(720, 22 * classes))


def absent_note(text: str) -> dict[str, Any]:
    """The annotation of an empty figure."""
    return {"text": text, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}


# Names, numbers and colours


def rounded(value: float | None, decimals: int = DECIMALS) -> float | None:
    """A number rounded to the digits that a figure shows; None for None and NaN."""
    if value is None or math.isnan(value):
        return None
    return round(value, decimals)


def percentage(share: float | None) -> float | None:
    """A share in percent, rounded to the digits that a heat map shows; None for None and NaN."""
    if share is None:
        return None
    return rounded(100 * share, 1)


def escaped(name: str) -> str:
    """A name with escaped markup, so that Plotly prints it as text."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short_name(name: str) -> str:
    """A name for an axis; a long name is cut."""
    if len(name) > MAX_NAME_LENGTH:
        name = f"{name[: MAX_NAME_LENGTH - 1].rstrip()}…"
    return escaped(name)


def group_name(group: Group) -> str:
    """A group's label in a figure, with a note if the group is unfinished."""
    return escaped(group.display)


def class_names(classes: Sequence[str]) -> list[str]:
    """The names of classes in a figure, made unique."""
    names = list(classes)
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(classes)]
    return [escaped(name) for name in names]


def faint(colour: str, alpha: float) -> str:
    """A transparent colour; ``alpha``: its opacity in [0, 1]."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return f"rgba({red},{green},{blue},{round(alpha, DECIMALS)})"


# Heat maps


def heat_map(
    x: Sequence[Any],
    y: Sequence[Any],
    z: Sequence[Sequence[float | None]],
    *,
    largest: float = 100,
    **settings: Any,
) -> Trace:
    """A heat map in the colours of accuracies, from 0 to ``largest``; empty cells are blank."""
    return new_trace(
        "heatmap",
        x=x,
        y=y,
        z=z,
        zmin=0,
        zmax=largest,
        colorscale=ACCURACY_COLOURS,
        showscale=False,
        hoverongaps=False,
        **settings,
    )


# Lines over rounds, hops or seconds, with bands over seeds


def measured(groups: Sequence[Group], key: str) -> bool:
    """Whether any group has a value of a metric in any round."""
    return any(run.curve(key) for group in groups for run in group.started)


@dataclass(frozen=True)
class Line:
    """The series of a group, and a reference series, which is drawn dotted in the same colour."""

    group: Group
    series: Series
    reference: Series | None = None


def lines(
    groups: Sequence[Group],
    style: Style,
    key: str,
    axis: ValueAxis = NUMBER,
    *,
    reference: str = "",
    shapes: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """A measure by round: a line for each group, with a band of one standard deviation over seeds.

    axis: the y axis. reference: a second measure, drawn dotted in the same colour. shapes: lines
    across the figure.
    """
    drawn = []
    for group in groups:
        reference_series = None
        if reference:
            reference_series = over_seeds(group, reference)
        drawn.append(Line(group, over_seeds(group, key), reference_series))
    return curves(drawn, style, "round", axis, shapes)


def curves(
    drawn: Sequence[Line],
    style: Style,
    unit: str,
    axis: ValueAxis = NUMBER,
    shapes: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """Lines by round or hop. ``unit``: "round" or "hop".

    A line has a gap between measured hops that are not consecutive.
    """
    traces: list[Trace] = []
    last = 0
    for line in drawn:
        pen = _Pen(line.group, style, axis)
        parts = _parts(line.series, unit)
        bands = list(chain.from_iterable(part.bands for part in parts))
        if bands:
            traces.append(pen.band(bands))
        if line.series.rounds:
            traces.append(pen.mean(parts))
        last = max([last, *line.series.rounds])
        if line.reference is not None and line.reference.rounds:
            traces.append(pen.reference(_parts(line.reference, unit)))
            last = max([last, *line.reference.rounds])

    across = {
        "title": {"text": unit},
        "unifiedhovertitle": {"text": f"{unit} %{{x}}"},
        "rangemode": "tozero",
        **whole_numbers(last + 1),
    }
    axes = layout(xaxis=across, yaxis=axis.fitted(traces), showlegend=len(drawn) <= MAX_IN_LEGEND)
    if shapes:
        axes["shapes"] = shapes
    return Figure(traces, axes)


def over_seconds(
    groups: Sequence[Group], style: Style, clock: Callable[[Group], ByRound], title: str
) -> Figure:
    """Accuracy by the seconds of a clock. Both are means over seeds at the end of each round.

    A line ends with the first seed. Otherwise, it would run backwards if the faster seeds continue.
    """
    traces = []
    for group in groups:
        means = mean_over_seeds(group, "accuracy")
        accuracy = {number: means[number] for number in common_rounds(group, "accuracy")}
        seconds = clock(group)
        if accuracy:
            traces.append(
                new_trace(
                    "scatter",
                    mode=_mode(len(accuracy)),
                    name=group_name(group),
                    legendgroup=group.label,
                    x=[rounded(seconds[number]) for number in accuracy],
                    y=[rounded(mean) for mean in accuracy.values()],
                    customdata=list(accuracy),
                    hovertemplate="%{y:.2%}, round %{customdata}",
                    line={
                        "color": style.colour(group),
                        "width": 2,
                        "dash": style.dash(group),
                    },
                    marker={"size": 5, "color": style.colour(group)},
                )
            )
    across = {"title": {"text": title}, "rangemode": "tozero", "hoverformat": ".1f"}
    has_legend = len(groups) <= MAX_IN_LEGEND
    axes = layout(xaxis=across, yaxis=PERCENT.fitted(traces), showlegend=has_legend)
    return Figure(traces, axes)


@dataclass(frozen=True)
class _Pen:
    """Draws the lines of a group."""

    group: Group
    style: Style
    axis: ValueAxis

    def band(self, parts: Sequence[Series]) -> Trace:
        """One standard deviation above and below the mean."""
        colour = self.style.colour(self.group)
        return new_trace(
            "scatter",
            x=_joined([*part.rounds, *reversed(part.rounds)] for part in parts),
            y=_joined(_outline(part) for part in parts),
            mode="lines",
            line={"width": 0, "color": colour},
            fill="toself",
            fillcolor=faint(colour, 0.16),
            legendgroup=self.group.label,
            showlegend=False,
            hoverinfo="skip",
        )

    def mean(self, parts: Sequence[Series]) -> Trace:
        """The mean over seeds. The hover text also contains the standard deviation."""
        dash = self.style.dash(self.group)
        mode = _mode(sum(len(part.rounds) for part in parts))
        if mode == "lines" and _has_lone_point(parts):
            mode = "lines+markers"
        return self._line(
            parts,
            name=group_name(self.group),
            mode=mode,
            line={"color": self.style.colour(self.group), "width": 2, "dash": dash},
        )

    def reference(self, parts: Sequence[Series]) -> Trace:
        """The mean of the reference series."""
        mode = "lines"
        if _has_lone_point(parts):
            mode = "lines+markers"
        return self._line(
            parts,
            name=f"{group_name(self.group)}, received model",
            mode=mode,
            showlegend=False,
            line={"color": self.style.colour(self.group), "width": 1.5, "dash": "dot"},
        )

    def _line(self, parts: Sequence[Series], **settings: Any) -> Trace:
        number = ".2f"
        scale = 1
        if self.axis.is_percent:
            number = ".2%"
            scale = 100
        return new_trace(
            "scatter",
            legendgroup=self.group.label,
            x=_joined(part.rounds for part in parts),
            y=_joined([rounded(mean) for mean in part.mean] for part in parts),
            customdata=_joined([_deviation(v, scale) for v in part.values] for part in parts),
            hovertemplate=f"%{{y:{number}}}%{{customdata}}",
            marker={"size": 5, "color": self.style.colour(self.group)},
            **settings,
        )


def _parts(series: Series, unit: str) -> Sequence[Series]:
    """The parts of a series that are drawn without a gap."""
    if unit == "hop":
        return series.stretches
    return [series]


def _joined(parts: Iterable[Sequence[Any]]) -> list[Any]:
    """The values of all parts, with None between parts, where Plotly draws no line."""
    values: list[Any] = []
    for part in parts:
        if values:
            values.append(None)
        values.extend(part)
    return values


def _outline(series: Series) -> list[float | None]:
    """The outline of a band: its upper edge forwards, then its lower edge backwards."""
    above = [rounded(value.mean + value.std) for value in series.values]
    below = [rounded(value.mean - value.std) for value in series.values]
    return [*above, *reversed(below)]


def _mode(points: int) -> str:
    """The mode of a trace: a single point needs a marker, but many markers would hide the line."""
    if points == 1:
        return "markers"
    if points > MAX_WITH_MARKERS:
        return "lines"
    return "lines+markers"


def _has_lone_point(parts: Sequence[Series]) -> bool:
    return any(len(part.rounds) == 1 for part in parts)


def _deviation(value: Spread, scale: int) -> str:
    """The standard deviation over seeds in a hover text; empty for a single run."""
    if value.runs == 1:
        return ""
    return f" ± {scale * value.std:.2f} ({value.runs} seeds)"
