"""Pages as tests read them: blocks as HTML, figures as the JSON that a browser gets."""

from __future__ import annotations

import json
import re
from typing import Any

import plotly.graph_objects as go

from fedstill.report.blocks import Block
from fedstill.report.figures import Figure, figures_json


def as_html(block: Block | None) -> str:
    """A block as HTML; it must be there."""
    assert block is not None
    return block.__html__()


def as_json(figure: Figure) -> dict[str, Any]:
    """A figure's traces, ``data``, and its ``layout``."""
    (drawn,) = json.loads(figures_json([figure]))
    return dict(drawn)


def as_plotly(figure: Figure) -> go.Figure:
    """A figure as plotly's own object, which checks every setting and number."""
    return go.Figure(as_json(figure))


def charts_in(text: str) -> list[list[dict[str, Any]]]:
    """The variants of each chart of a page, or of a part of it."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return [json.loads(variants) for variants in found]


def figures_in(text: str) -> list[dict[str, Any]]:
    """All figures of a page, or of a part of it."""
    return [figure for variants in charts_in(text) for figure in variants]


def sections_of(text: str) -> list[str]:
    """The names of a page's sections."""
    return re.findall(r'<section id="([\w-]+)"', text)
