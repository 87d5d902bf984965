"""Blocks of which a page consists: paragraphs, tables, charts, and what a reader chooses with.

A block is a record. ``templates/blocks.html`` has a macro for each kind of block, which renders it
and escapes every text in it. A block in another block is rendered where the template names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedstill.report.figures import MOST_IN_LEGEND, Figure, Style, figures_json
from fedstill.running.runs import Group

SVG_DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
"""Plotly's names of dashes, as SVG's."""


@cache
def templates() -> Environment:
    """The templates of pages; all of them escape the texts that they are given."""
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
    """A headed part of a page, to which a reader may jump; blocks that are None are left out.

    name: its anchor, unique in the page.
    """

    macro: ClassVar[str] = "section"
    name: str
    title: str
    blocks: Sequence[Block | None]


@dataclass(frozen=True)
class Paragraph(Block):
    """A text, usually on how to read what follows."""

    macro: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Legend(Block):
    """The text that explains the columns of a table."""

    macro: ClassVar[str] = "legend"
    text: str


@dataclass(frozen=True)
class Notice(Block):
    """A text that a reader must not overlook."""

    macro: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Listing(Block):
    """Lines to copy, under a name."""

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
    """A value, and in small type the one before it."""

    macro: ClassVar[str] = "change_cell"
    before: str
    after: str


@dataclass(frozen=True)
class Label(Block):
    """A name beside the colour that stands for it, with a note below."""

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
    """Blocks that a reader unfolds."""

    macro: ClassVar[str] = "folded"
    title: str
    blocks: Sequence[Block]


# Charts, and what a reader chooses with


@dataclass(frozen=True)
class Chart(Block):
    """A figure with one or more variants, of which a selector of the same ``name`` shows one.

    description: what it shows and how to read it. Screen readers read it. It is printed below the
    title, unless ``is_explained``: then a paragraph of the section says the same of all its charts.
    """

    macro: ClassVar[str] = "chart"
    variants: Sequence[Figure]
    description: str
    title: Cell = ""
    name: str = ""
    is_explained: bool = False

    @property
    def height(self) -> int:
        """The height of the first variant, in pixels; it is reserved until the chart is drawn."""
        return int(self.variants[0].layout["height"])

    @property
    def json(self) -> Markup:
        """All variants as Plotly's JSON, in which nothing ends a script element."""
        return Markup(figures_json(self.variants))


@dataclass(frozen=True)
class Choice(Block):
    """A selector over the variants of all charts of a name; nothing with one option only."""

    macro: ClassVar[str] = "choice"
    name: str
    label: str
    options: Sequence[str]


@dataclass(frozen=True)
class Slider(Block):
    """A slider over the variants of all charts of a name; nothing with one option only."""

    macro: ClassVar[str] = "slider"
    name: str
    label: str
    options: Sequence[str]


@dataclass(frozen=True)
class Gallery(Block):
    """Blocks side by side where the page is wide enough.

    style: classes of ``page.css``: ``small`` for narrow columns, ``top`` for charts that are
    aligned at their top.
    """

    macro: ClassVar[str] = "gallery"
    blocks: Sequence[Block]
    style: str = ""


@dataclass(frozen=True)
class ColourScale(Block):
    """The colours of shares from 0 to 100 %.

    stops: (share, colour), as Plotly's colour scales are written. quantity: what the shares are.
    """

    macro: ClassVar[str] = "colour_scale"
    stops: Sequence[tuple[float, str]]
    quantity: str = "accuracy"


@dataclass(frozen=True)
class KeyEntry:
    """A piece of line and the group that it stands for; ``dash`` is one of Plotly's."""

    colour: str
    dash: str
    text: str

    @property
    def svg_dash(self) -> str:
        """The dash as SVG writes it."""
        return SVG_DASHES[self.dash]


@dataclass(frozen=True)
class Key(Block):
    """What the lines of several charts stand for."""

    macro: ClassVar[str] = "key"
    entries: Sequence[KeyEntry]


@dataclass(frozen=True)
class ColourKey(Block):
    """What the colours of several charts stand for."""

    macro: ClassVar[str] = "colour_key"
    labels: Sequence[Label]


def line_key(groups: Sequence[Group], style: Style) -> Key | None:
    """The lines of all groups, for charts of more groups than a legend holds; None for fewer."""
    if len(groups) <= MOST_IN_LEGEND:
        return None
    started = [group for group in groups if group.started]
    return Key([KeyEntry(style.colour(g), style.dash(g), g.display) for g in started])


def group_label(group: Group, style: Style, note: str = "") -> Label:
    """A group's name with its colour, and a note below it."""
    return Label(style.colour(group), group.label, note)
