"""The gallery shows every part of the report, with a picture of each, small enough to be kept."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tools.gallery import PAGE, PICTURES, scenes

ROOT = Path(__file__).parents[2]


def sections() -> dict[str, str]:
    """{id: title} of every section that the report's code can write."""
    each = {}
    for path in (ROOT / "src/fedstill/report").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "section",
                "_section",
            ):
                words = [a.value for a in node.args if isinstance(a, ast.Constant)]
                names = [
                    k.value.value
                    for k in node.keywords
                    if k.arg == "name" and isinstance(k.value, ast.Constant)
                ]
                if node.func.id == "_section":  # type: ignore[attr-defined]
                    each[str(words[0])] = str(words[1])
                elif names:
                    each[str(names[0])] = str(words[0])
    return each


def test_every_section_of_the_report_has_its_place_and_its_pictures() -> None:
    known = sections()
    assert {"results", "rounds", "heterogeneity", "tuning"} <= set(known), (
        "the code is read as it is written"
    )
    shown = [name for kind, name, _ in scenes(PAGE.read_text()) if kind == "picture"]
    assert sorted(shown) == sorted(known)
    headed = re.findall(
        r"^### (.*)\n\n(.+)\n\n!\[.*\]\(images/gallery/(\w+)-light", PAGE.read_text(), re.MULTILINE
    )
    assert {name: title.replace("’", "'") for title, _, name in headed} == known
    assert all(question.endswith("?") for _, question, _ in headed)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_there_and_small(theme: str) -> None:
    for name in sections():
        assert 1000 < (PICTURES / f"{name}-{theme}.png").stat().st_size < 60_000, name


def test_no_picture_is_left_over() -> None:
    assert {p.stem.rpartition("-")[0] for p in PICTURES.glob("*.png")} == set(sections())
