"""The tutorials run from the first cell to the last.

Most hold no output: the site executes them when it is built. Those on data that are not everywhere
hold what they said and drew; the site shows that, and here they run where FEDSTILL_DATA has the
data.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
ON_DATA = {
    "heart_disease": "heart_disease",
    "activity": "har",
    "news": "ag_news-small",
    "blood_over_years": "pbc_blood28",
}
"""Tutorials, and the folder of FEDSTILL_DATA that each needs."""
LONG = ("activity", "blood_over_years", "news")
"""Those among them that train for longer than a fast test may."""
SHORTER = {
    "parallel_rounds": ('"rounds": 20', '"rounds": 5'),
    "chain": ('"rounds": 10', '"rounds": 3'),
    "public_logits": ("rounds=8,", "rounds=3,"),
    "peers": ('"epochs": 20', '"epochs": 5'),
}
"""By tutorial, a setting and the smaller one that is tested in its place: the site runs it whole
when it is built.
"""

pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p.stem in LONG else ()) for p in TUTORIALS],
    ids=[p.stem for p in TUTORIALS],
)
def test_a_tutorial_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ON_DATA.get(path.stem)
    if needed and not Path(os.environ.get("FEDSTILL_DATA", "nowhere"), needed).is_dir():
        pytest.skip(f"it needs the folder {needed} in FEDSTILL_DATA")
    pyplot.switch_backend("agg")
    shown: list[Any] = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    names: dict[str, Any] = {}
    code = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]
    if path.stem in SHORTER:
        whole = code
        code = [text.replace(*SHORTER[path.stem]) for text in whole]
        assert code != whole, "the tutorial has what is put shorter"
    for text in code:
        exec(compile(text, path.name, "exec"), names)
    assert capsys.readouterr().out
    assert shown, "people would rather look"
    pyplot.close("all")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_holds_output_only_where_the_site_cannot_make_it(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert code
    if path.stem not in ON_DATA:
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
        return
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], (
        "run once, from top to bottom"
    )
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output.get("name", output["output_type"]) for output in outputs} <= {
        "stdout",
        "display_data",
    }
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "/tmp" not in json.dumps(outputs)


def test_the_site_does_not_execute_what_needs_data() -> None:
    ignored = re.search(r"execute_ignore: \[(.*?)\]", (ROOT / "mkdocs.yml").read_text())
    assert ignored
    assert sorted(re.findall(r"tutorials/(\w+)\.ipynb", ignored[1])) == sorted(ON_DATA)


def cells(path: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return read
