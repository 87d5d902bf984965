"""The documents of the repository: Markdown pages and notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATTERNS = ("*.md", "docs/*.md", "docs/*/*.md", "docs/tutorials/*.ipynb", "results/README.md")


@dataclass(frozen=True)
class Cell:
    """A Markdown cell of a notebook, or a whole page."""

    number: int
    """Its position in the notebook, from 1; 0 for a page."""
    text: str


def documents(root: Path) -> list[Path]:
    """All pages and notebooks, sorted by path."""
    return sorted({path for pattern in PATTERNS for path in root.glob(pattern)})


def cells(path: Path) -> Iterator[Cell]:
    """The Markdown cells of a notebook, or a page as one cell."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        yield Cell(0, text)
        return
    for number, cell in enumerate(json.loads(text)["cells"], start=1):
        if cell["cell_type"] == "markdown":
            yield Cell(number, "".join(cell["source"]))
