"""Recipes of papers' figures draw them in the sections of the report that docs/papers.md names."""

from __future__ import annotations

from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

from fedstill.cli import call

Settings = dict[str, str]

SMALL: Settings = {
    "data.train_size": "200",
    "data.test_size": "60",
    "data.augment": "[]",
    "plan.epochs": "1",
}
PEERS = {
    **SMALL,
    "model.name": "resnet10",
    "model.norm": "group",
    "topology.clients": "4",
    "query.fewer_than": "5",
    "data.train_size": "120",
}
CHAIN = {
    **SMALL,
    "model.name": "digits_cnn",
    "topology.clients": "6",
    "topology.sampled": "3",
    "partition.min_size": "1",
}


@dataclass(frozen=True)
class FigureRecipe:
    """Some cells of a recipe, the titles on their report, and the settings with which they run."""

    name: str
    cells: str
    titles: tuple[str, ...]
    settings: Settings
    rounds: int = 2


FAST = (
    FigureRecipe(
        name="sfedkd/figure1",
        cells="*:CIFAR-10 alpha *1",
        titles=("Forgetting along the chain", "Effect of uneven data"),
        settings=CHAIN,
    ),
    FigureRecipe(
        name="sfedkd/figure3",
        cells="gamma [12]:*",
        titles=("Effect of a hyper-parameter",),
        settings=CHAIN,
    ),
    FigureRecipe(
        name="sfedkd/figure6", cells="K = 3:CIFAR*", titles=("Time to target",), settings=CHAIN
    ),
    FigureRecipe(
        name="hiper/table1",
        cells="[bH]*:alpha 1.0",
        titles=(
            "Client by client",
            "Accuracy on public data by client",
            "Accuracy of the server",
        ),
        settings={**SMALL, "model.name": "tiny_cnn", "data.public": "60"},
    ),
)
SLOW = (
    FigureRecipe(
        name="qkt/figure2",
        cells="*:*",
        titles=(
            "Queries: gain and forgetting",
            "Forgetting against gain",
            "naive_kd: accuracy by class, before the query and after each phase",
            "Decision boundaries",
            "Noise probe and label shares",
        ),
        settings=PEERS,
        rounds=1,
    ),
    FigureRecipe(
        name="qkt/figure7",
        cells="*:*",
        titles=("Accuracy by epoch",),
        settings={**PEERS, "data.public": "60"},
        rounds=1,
    ),
)


def reproduce(recipe: FigureRecipe, folder: Path) -> str:
    """The text of the report that ``fedstill reproduce`` writes for a recipe."""
    words = ["reproduce", recipe.name, "--data", "digits", "--seeds", "1", "-q"]
    words += ["--rounds", str(recipe.rounds), "--cells", recipe.cells, "--out", str(folder)]
    for key, value in recipe.settings.items():
        words += ["-s", f"{key}={value}"]
    assert call(words) == 0
    return unescape((folder / "report.html").read_text())


@pytest.mark.uses("benchmark")
@pytest.mark.parametrize(
    "recipe",
    [
        *(pytest.param(recipe, id=recipe.name) for recipe in FAST),
        *(pytest.param(recipe, id=recipe.name, marks=pytest.mark.slow) for recipe in SLOW),
    ],
)
def test_a_figure_of_a_paper_is_on_the_page_of_its_runs(
    recipe: FigureRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = reproduce(recipe, tmp_path / "runs")
    assert [title for title in recipe.titles if title not in page] == []
