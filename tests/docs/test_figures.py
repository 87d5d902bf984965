"""The tables of docs/papers.md that say where each figure of a paper is: all figures, in recipes
and sections there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedstill.cli import call
from fedstill.experiment.comparing import recipes

ROOT = Path(__file__).parents[2]
FIGURES = {"FedNTD": 21, "FedADKD": 7, "SFedKD": 7, "HiPer-FedKD": 3, "QKT": 7}
FOLDERS = {
    "FedNTD": "fedntd",
    "FedADKD": "fedadkd",
    "SFedKD": "sfedkd",
    "HiPer-FedKD": "hiper",
    "QKT": "qkt",
}


def rows(paper: str) -> list[list[str]]:
    """The rows of a paper's table: what is shown, in which recipes, in which sections."""
    _, found, rest = (
        (ROOT / "docs/papers.md")
        .read_text()
        .partition(f"\n| {paper} | recipe | section of the report |\n")
    )
    assert found
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(shown: str) -> list[int]:
    """The figures that a row is about: "11: this; 12: that"."""
    heads = [re.match(r"(\d+(?:, \d+)*)(?:: |$)", part) for part in shown.split("; ")]
    return [int(n) for head in heads if head for n in head[1].split(", ")]


def titles() -> set[str]:
    """The titles of the report's sections, in small letters."""
    text = "".join(p.read_text() for p in (ROOT / "src/fedstill/report").glob("*.py"))
    return {t.lower() for t in re.findall(r'\b_?section\(\s*(?:"\w+", )?"([^"]+)"', text)}


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_of_a_paper_has_one_row(paper: str) -> None:
    assert sorted(n for row in rows(paper) for n in numbers(row[0])) == list(
        range(1, FIGURES[paper] + 1)
    )


@pytest.mark.parametrize("paper", FIGURES)
def test_recipes_and_sections_that_a_row_names_are_there(paper: str) -> None:
    for _, named, sections in rows(paper):
        found = re.findall(r"`([^`]+)`", named)
        assert set(found) <= set(recipes.recipe_names()), named
        assert all(name.startswith(f"{FOLDERS[paper]}/") for name in found)
        there = titles() if found else {"diagram", "diagrams"}
        for place in sections.split("; "):
            assert any(place == title or place.startswith(f"{title}, ") for title in there), place


@pytest.mark.parametrize("paper", ["SFedKD", "QKT"])
def test_every_recipe_of_a_figure_has_a_row(paper: str) -> None:
    made = {n for n in recipes.recipe_names() if n.startswith(f"{FOLDERS[paper]}/figure")}
    assert made <= {name for row in rows(paper) for name in re.findall(r"`([^`]+)`", row[1])}


PEERS = ("model.name=resnet10", "model.norm=group", "topology.clients=4", "query.fewer_than=5")
CHAIN = (
    "model.name=digits_cnn",
    "topology.clients=6",
    "topology.sampled=3",
    "partition.min_size=1",
)


@pytest.mark.parametrize(
    ("name", "cells", "titles", "changes"),
    [
        (
            "sfedkd/figure1",
            "*:CIFAR-10 alpha *1",
            ["Along the chain of clients", "Effect of uneven data"],
            CHAIN,
        ),
        ("sfedkd/figure3", "gamma [12]:*", ["Effect of a hyper-parameter"], CHAIN),
        ("sfedkd/figure6", "K = 3:CIFAR*", ["Time to target"], CHAIN),
        (
            "hiper/table1",
            "[bH]*:alpha 1.0",
            ["Client by client", "Accuracy on public data by client", "Accuracy of the server"],
            ("model.name=tiny_cnn", "data.public=60"),
        ),
        (
            "qkt/figure2",
            "*:*",
            [
                "Queries: what clients gained and forgot",
                "Forgetting against gain",
                "naive_kd: accuracy by class, alone and after each phase",
                "Decision boundaries",
                "The noise probe and the label shares",
            ],
            PEERS,
        ),
        ("qkt/figure7", "*:*", ["Phases, epoch by epoch"], (*PEERS, "data.public=60")),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_figures_picture_is_where_its_row_says(
    name: str,
    cells: str,
    titles: list[str],
    changes: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    small = (
        "data.train_size=200",
        "data.test_size=60",
        "data.augment=[]",
        "plan.epochs=1",
        *changes,
    )
    rounds = "1" if name.startswith("qkt/") else "2"
    words = [
        "reproduce",
        name,
        "--data",
        "digits",
        "--rounds",
        rounds,
        "--seeds",
        "1",
        "-q",
        "--cells",
        cells,
    ]
    assert call([*words, "--out", "r", *(word for change in small for word in ("-s", change))]) == 0
    page = (tmp_path / "r" / "report.html").read_text().replace("&#x27;", "'").replace("&#39;", "'")
    assert [title for title in titles if title not in page] == []
