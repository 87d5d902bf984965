"""The tutorials run from the first cell to the last.

Most contain no output, because the site executes them when it is built. Those on data that not
every machine has contain their output, which the site shows. The tests execute them if
FEDSTILL_DATA has the data.
"""

from __future__ import annotations

import json
import os
import re
from itertools import chain
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
"""Those of them that train for longer than a fast test may."""

SHORTER = {
    "parallel_rounds": ('"rounds": 20', '"rounds": 5'),
    "chain": ('"rounds": 10', '"rounds": 3'),
    "public_logits": ("rounds=8,", "rounds=3,"),
    "peers": ('"epochs": 20', '"epochs": 5'),
}
"""By tutorial, a setting and the smaller one that is tested instead. The site runs the original."""

pyplot = pytest.importorskip("matplotlib.pyplot")


def tutorial_parameters() -> list[Any]:
    """A parameter for each tutorial, in which those that train for long are marked as slow."""
    parameters = []
    for path in TUTORIALS:
        marks = []
        if path.stem in LONG:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(path, marks=marks, id=path.stem))
    return parameters


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that contain code."""
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def code_to_execute(path: Path) -> list[str]:
    """The code of each cell of a tutorial, with the smaller setting if there is one."""
    original = ["".join(cell["source"]) for cell in code_cells(path)]
    if path.stem not in SHORTER:
        return original
    shorter = [text.replace(*SHORTER[path.stem]) for text in original]
    assert shorter != original, "the tutorial does not contain the setting"
    return shorter


@pytest.mark.parametrize("path", tutorial_parameters())
def test_a_tutorial_runs_prints_and_draws(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ON_DATA.get(path.stem)
    if folder and not Path(os.environ.get("FEDSTILL_DATA", "nowhere"), folder).is_dir():
        pytest.skip(f"it needs the folder {folder} in FEDSTILL_DATA")
    figures: list[Any] = []
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", lambda: figures.append(pyplot.gcf()))

    namespace: dict[str, Any] = {}
    for text in code_to_execute(path):
        exec(compile(text, path.name, "exec"), namespace)
    pyplot.close("all")

    assert capsys.readouterr().out
    assert figures


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_contains_output_only_if_the_site_cannot_make_it(path: Path) -> None:
    cells = code_cells(path)
    assert cells
    executions = [cell["execution_count"] for cell in cells]
    outputs = list(chain.from_iterable(cell["outputs"] for cell in cells))
    if path.stem not in ON_DATA:
        assert outputs == []
        assert executions == [None] * len(cells)
        return

    assert executions == list(range(1, len(cells) + 1)), "executed once, from top to bottom"
    kinds = {output.get("name", output["output_type"]) for output in outputs}
    assert kinds <= {"stdout", "display_data"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "/tmp" not in json.dumps(outputs)


def test_the_site_does_not_execute_tutorials_on_such_data() -> None:
    ignored = re.search(r"execute_ignore: \[(.*?)\]", (ROOT / "mkdocs.yml").read_text())
    assert ignored
    assert sorted(re.findall(r"tutorials/(\w+)\.ipynb", ignored[1])) == sorted(ON_DATA)
