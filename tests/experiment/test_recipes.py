"""Every cell of every recipe can be run, and a table is run, resumed and printed beside the paper's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.cli import call
from fedstill.errors import UnknownName
from fedstill.experiment import recipes
from fedstill.experiment.settings import settle


@pytest.mark.parametrize("name", recipes.names())
def test_every_cell_resolves(name: str, tmp_path: Path) -> None:
    recipe = recipes.load(name)
    assert set(recipe.published) <= set(recipe.cells())
    for variant in recipe.variants(recipe.cells(), [1], {}, tmp_path):
        assert settle(variant.experiment)["rounds"] == recipe.common["rounds"]


def test_cells_are_chosen_by_pattern() -> None:
    recipe = recipes.load("fedadkd/table2")
    assert recipe.cells(["fedn*:*.1"]) == [
        ("FedNTD", "CIFAR-10 .1"),
        ("FedNTD+ASD", "CIFAR-10 .1"),
        ("FedNova", "CIFAR-10 .1"),
    ]
    with pytest.raises(UnknownName, match="FedXYZ"):
        recipe.cells(["FedXYZ:*"])
    with pytest.raises(UnknownName, match="fedadkd/table2"):
        recipes.load("fedadkd/tabel2")


def test_a_reduced_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    smaller = ["-s", "topology.clients=10", "-s", "topology.sampled=3", "-s", "plan.epochs=1", "-s", "data.augment=[]"]
    words = ["reproduce", "fedadkd/figure7", "--data", "digits", "--rounds", "2", "--seeds", "2", "-q", *smaller]
    assert call([*words, "--cells", "full:*"]) == 0
    said = capsys.readouterr().out
    assert "REDUCED OR CHANGED" in said
    assert "55.8" in said
    assert call([*words, "--table"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("full", "without"))]
    assert [row[-1] for row in rows] == ["2", "0", "0"], "two seeds of one row are there, of the others none"
