"""The blocks of a page: paragraphs, tables, charts and controls.

A block is a record. ``templates/blocks.html`` has a macro for each kind of block; the macro renders
the block and escapes all text in it. A nested block is rendered where the template refers to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedstill.report.figures import MAX_IN_LEGEND, Figure, Style, figures_json
from fedstill.running.runs import Group

SVG_DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
"""SVG dash patterns by Plotly's names."""


@cache
def templates() -> Environment:
    """The environment of the page templates; all of them escape text."""
    return Environment(
        loader=PackageLoader("fedstill.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _macros() -> Any:
    return templates().get_template("blocks.html").module


@dataclass(frozen=True)
class Block:
    """A part of a page."""

    macro: ClassVar[str]
    """The macro in ``templates/blocks.html`` that renders it."""

    def __html__(self) -> str:
        """The block as HTML; templates and Markup call this instead of escaping."""
        return str(getattr(_macros(), self.macro)(self))


@dataclass(frozen=True)
class Section(Block):
    """A part of a page with a heading and an anchor; blocks that are None are left out.

    name: the anchor, unique in the page.
    """

    macro: ClassVar[str] = "section"
    name: str
    title: str
    blocks: Sequence[Block | None]


@dataclass(frozen=True)
class Paragraph(Block):
    """A paragraph, usually an explanation of the next blocks."""

    macro: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Legend(Block):
    """An explanation of the columns of a table."""

    macro: ClassVar[str] = "legend"
    text: str


@dataclass(frozen=True)
class Notice(Block):
    """A highlighted warning."""

    macro: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Listing(Block):
    """Lines to copy, with a caption."""

    macro: ClassVar[str] = "listing"
    title: str
    text: str


# Cells of a table


@dataclass(frozen=True)
class ColumnHead(Block):
    """The head of a column, with its unit below."""

    macro: ClassVar[str] = "column_head"
    title: str
    unit: str


@dataclass(frozen=True)
class MeanCell(Block):
    """A mean, and its standard deviation in small type."""

    macro: ClassVar[str] = "mean_cell"
    mean: str
    deviation: str


@dataclass(frozen=True)
class ChangeCell(Block):
    """A value, and the previous value in small type."""

    macro: ClassVar[str] = "change_cell"
    before: str
    after: str


@dataclass(frozen=True)
class Label(Block):
    """A name next to its colour, with a note below."""

    macro: ClassVar[str] = "label"
    colour: str
    text: str
    note: str = ""


Cell = str | Block


@dataclass(frozen=True)
class Table(Block):
    """A table; the first cell of a row is its heading.

    style: classes of ``page.css``: ``numbers``, ``wide``, ``settings``, ``sortable``.
    """

    macro: ClassVar[str] = "table"
    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    style: str = ""


@dataclass(frozen=True)
class Facts(Block):
    """Names and their values, side by side."""

    macro: ClassVar[str] = "facts"
    values: Mapping[str, str]


@dataclass(frozen=True)
class Folded(Block):
    """Collapsed blocks, which a reader can expand."""

    macro: ClassVar[str] = "folded"
    title: str
    blocks: Sequence[Block]


# Charts and controls


@dataclass(frozen=True)
class Chart(Block):
    """A figure with one or more variants; a selector with the same ``name`` shows one of them.

    description: the content of the figure and how to read it. Screen readers use it. It is printed
    below the title, unless ``is_explained`` is set because a paragraph of the section already
    explains all its charts.
    """

    macro: ClassVar[str] = "chart"
    variants: Sequence[Figure]
    description: str
    title: Cell = ""
    name: str = ""
    is_explained: bool = False

    @property
    def height(self) -> int:
        """The height of the first variant in pixels; the page reserves it for the chart."""
        return int(self.variants[0].layout["height"])

    @property
    def json(self) -> Markup:
        """All variants as Plotly's JSON, escaped so that it cannot close a script element."""
        return Markup(figures_json(self.variants))


@dataclass(frozen=True)
class Choice(Block):
    """A selector for the variants of all charts with a name; hidden if there is only one option."""

    macro: ClassVar[str] = "choice"
    name: str
    label: str
    options: Sequence[str]


@dataclass(frozen=True)
class Slider(Block):
    """A slider for the variants of all charts with a name; hidden if there is only one option."""

    macro: ClassVar[str] = "slider"
    name: str
    label: str
    options: Sequence[str]


@dataclass(frozen=True)
class Gallery(Block):
    """Blocks side by side, if the page is wide enough.

    style: classes of ``page.css``: ``small`` for narrow columns, ``top`` for charts that are
    aligned at their top.
    """

    macro: ClassVar[str] = "gallery"
    blocks: Sequence[Block]
    style: str = ""


@dataclass(frozen=True)
class ColourScale(Block):
    """The colours of shares from 0 to 100 %.

    stops: (share, colour) pairs, as in Plotly's colour scales. quantity: the name of the quantity.
    """

    macro: ClassVar[str] = "colour_scale"
    stops: Sequence[tuple[float, str]]
    quantity: str = "accuracy"


@dataclass(frozen=True)
class KeyEntry:
    """A line sample and the group that it represents; ``dash`` is one of Plotly's names."""

    colour: str
    dash: str
    text: str

    @property
    def svg_dash(self) -> str:
        """The dash as an SVG pattern."""
        return SVG_DASHES[self.dash]


@dataclass(frozen=True)
class Key(Block):
    """A legend for the lines of several charts."""

    macro: ClassVar[str] = "key"
    entries: Sequence[KeyEntry]


@dataclass(frozen=True)
class ColourKey(Block):
    """A legend for the colours of several charts."""

    macro: ClassVar[str] = "colour_key"
    labels: Sequence[Label]


def line_key(groups: Sequence[Group], style: Style) -> Key | None:
    """A legend for all groups if there are too many for the legend of a chart; otherwise None."""
    if len(groups) <= MAX_IN_LEGEND:
        return None
    started = [group for group in groups if group.started]
    return Key([KeyEntry(style.colour(g), style.dash(g), g.display) for g in started])


def group_chart(
    group: Group,
    variants: Sequence[Figure],
    description: str,
    style: Style,
    name: str = "",
) -> Chart:
    """A chart of a group under its label, in a section that explains all its charts.

    name: as of a chart.
    """
    return Chart(
        variants,
        f"{group.label}: {description}",
        group_label(group, style),
        name,
        is_explained=True,
    )


def group_label(group: Group, style: Style, note: str = "") -> Label:
    """A group's name next to its colour, with a note below."""
    return Label(style.colour(group), group.label, note)
