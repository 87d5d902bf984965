"""Pieces of HTML: escaped text, tables, figures and their data."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstill.report.figures import MOST_IN_LEGEND, Figure, Style
from fedstill.running.groups import Group


@dataclass(frozen=True)
class Html:
    """Text that is HTML already and is not escaped again."""

    text: str


Cell = str | Html

SVG_DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
"""Plotly's names of dashes, as SVG's."""


def escape(value: object) -> str:
    """A value as text that holds no markup."""
    return value.text if isinstance(value, Html) else html.escape(str(value))


def section(title: str, *parts: Html | None, name: str) -> Html:
    """A headed part of the page; what is None is left out."""
    inner = "\n".join(p.text for p in parts if p is not None)
    return Html(f'<section id="{escape(name)}">\n<h2>{escape(title)}</h2>\n{inner}\n</section>')


def sentence(text: str) -> Html:
    """A paragraph that says how to read what follows."""
    return Html(f'<p class="how">{escape(text)}</p>')


def html_table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], kind: str = "") -> Html:
    """A table; the first cell of a row is its heading."""
    top = "".join(f'<th scope="col">{escape(c)}</th>' for c in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(c)}</td>" for c in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    body = "\n".join(lines)
    return Html(
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(pairs: Mapping[str, str]) -> Html:
    """Names and what they are, side by side."""
    return Html(
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs.items())
        + "</dl>"
    )


def folded(title: str, *parts: Html) -> Html:
    """Content that is folded away."""
    inner = "\n".join(p.text for p in parts)
    return Html(f"<details><summary>{escape(title)}</summary>\n{inner}\n</details>")


def choice(name: str, label: str, options: Sequence[str]) -> Html | None:
    """A selector over the figures of this name; None if there is nothing to choose."""
    if len(options) < 2:
        return None
    items = "".join(f'<option value="{i}">{escape(o)}</option>' for i, o in enumerate(options))
    return Html(
        f'<p class="choice"><label>{escape(label)} <select '
        f'data-controls="{escape(name)}">{items}</select></label></p>'
    )


def slider(name: str, label: str, options: Sequence[str]) -> Html | None:
    """A slider over the figures of this name, in the order of the options; None if there is nothing
    to choose.
    """
    if len(options) < 2:
        return None
    said = escape(json.dumps(list(options)))
    move = (
        f'<input type="range" min="0" max="{len(options) - 1}" value="0" '
        f'data-controls="{escape(name)}"'
    )
    shown = f"<output>{escape(options[0])}</output>"
    return Html(
        f'<p class="choice"><label>{escape(label)} {move} data-options="{said}"></label> '
        f"{shown}</p>"
    )


def figure(variants: Sequence[Figure], says: str, title: Cell = "", name: str = "") -> Html:
    """A figure with one or more variants, of which a selector of this ``name`` shows one.

    ``says``: what it shows and how to read it; printed below a title that is text, and always read
    by screen readers.
    """
    above = f"<figcaption>{escape(title)}</figcaption>"
    if isinstance(title, str) and title:
        above += f'<p class="says">{escape(says)}</p>'
    data = f'<script type="application/json">{as_json(list(variants))}</script>'
    room = f'style="min-height:{variants[0]["layout"]["height"]}px"'
    plot = (
        f'<div class="chart" data-name="{escape(name)}" role="img" aria-label="{escape(says)}" '
        f"{room}>{data}</div>"
    )
    save = '<button class="save" type="button" title="Save this figure as SVG">SVG</button>'
    return Html(f"<figure>{above}{save}{plot}</figure>")


def stroke(colour: str, dash: str, label: str) -> Html:
    """An entry of a key: a piece of line and what it stands for."""
    drawn = f'stroke="{colour}" stroke-width="2.5" stroke-dasharray="{SVG_DASHES[dash]}"'
    line = f'<line x1="0" y1="5" x2="28" y2="5" {drawn}/>'
    return Html(
        '<span class="name"><svg width="28" height="10" '
        f'aria-hidden="true">{line}</svg>{escape(label)}</span>'
    )


def key(groups: Sequence[Group], style: Style) -> Html | None:
    """The lines of all groups, for figures of more than a legend holds; None for fewer."""
    if len(groups) <= MOST_IN_LEGEND:
        return None
    entries = [stroke(style.colour(g), style.dash(g), g.display) for g in groups if g.started]
    return Html(f'<p class="key">{" ".join(e.text for e in entries)}</p>')


def labelled(group: Group, style: Style, note: str = "") -> Html:
    """A group's name with its colour, and a note below it."""
    small = f"<br><small>{escape(note)}</small>" if note else ""
    return named_colour(style.colour(group), Html(f"{escape(group.label)}{small}"))


def named_colour(colour: str, name: Cell) -> Html:
    """A name and the colour that stands for it."""
    swatch = f'<span class="swatch" style="background:{colour}"></span>'
    return Html(f'<span class="name">{swatch}<span>{escape(name)}</span></span>')


def grid(figures: Sequence[Html], kind: str = "") -> Html:
    """Figures side by side where the page is wide enough."""
    return Html(f'<div class="grid {kind}">' + "\n".join(f.text for f in figures) + "</div>")


def as_json(value: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
