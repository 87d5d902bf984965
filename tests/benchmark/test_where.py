"""Where a method helps: the gains of its cells, and their summary."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import tiny_ranking
from fedstill.benchmark.map_page import cell_table, write_map
from fedstill.benchmark.maps import AXES, EVEN, MapCell, MethodMap, make_map, row_to_map
from fedstill.benchmark.suites import Suite
from fedstill.core.errors import ConfigError, UnknownName
from made_up_scores import made_up_cell


def cell(alpha: float, *gains: float) -> MapCell:
    """A made-up cell with the gains of its seeds."""
    return made_up_cell({"partition.alpha": alpha, "plan.epochs": 1}, gains)


def test_a_method_helps_where_all_seeds_gain() -> None:
    cells = [cell(0.1, 0.1, 0.2, 0.3), cell(0.5, -0.1, -0.2, -0.1), cell(1.0, 0.1, -0.1, 0.3)]
    assert [cell.sign for cell in cells] == [1, -1, 0]

    axes = {"partition.alpha": (0.1, 0.5, 1.0), "plan.epochs": (1,)}
    method_map = MethodMap("FedNTD", axes, cells)
    assert "1 of 3 cells" in method_map.summary
    assert "alpha 0.1, epochs 1: +20.0 points over FedAvg at 50.0 %" in method_map.summary
    first_line = cell_table(method_map).lines[0]
    assert first_line == ["0.1", "1", "+20.0", "+10.0 to +30.0", "50.0", "55.6"]


def test_a_cell_whose_seeds_all_gain_nothing_has_no_sign() -> None:
    """Both methods may be at chance with every seed."""
    without_gain = cell(0.1, 0.0, 0.0, 0.0)
    assert without_gain.sign == 0
    assert without_gain.gain_text == "~+0.0"


def test_a_map_is_run_resumed_and_written(suite: Suite, tmp_path: Path) -> None:
    axes = {"partition.alpha": (0.5, EVEN), "plan.epochs": (1, 2), "topology.sampled": (1, 4)}

    method_map = make_map(suite, "FedNTD", axes, tmp_path / "runs", tiny_ranking.do)

    assert len(method_map.cells) == 8
    configs = [path.read_text() for path in (tmp_path / "runs").rglob("config.toml")]
    assert len(configs) == 8 * 2 * 3
    assert sum('kind = "iid"' in text for text in configs) == len(configs) / 2
    assert sum("epochs = 2" in text for text in configs) == len(configs) / 2
    assert all("lr = 0.1" in text for text in configs), "FedAvg's, for both"

    page, table, text = write_map(method_map, tmp_path / "map")
    assert [page.name, table.name, text.name] == ["index.html", "map.csv", "map.md"]
    runs = list(csv.DictReader(io.StringIO(table.read_text())))
    assert len(runs) == len(configs)
    assert page.read_text().count('class="chart"') == 2
    assert "one cell of four" in page.read_text()
    assert "one cell of four" in text.read_text()

    again = make_map(suite, "FedNTD", axes, tmp_path / "runs", tiny_ranking.do)
    assert [cell.gains for cell in again.cells] == [cell.gains for cell in method_map.cells]


def test_what_cannot_be_mapped_is_refused(suite: Suite, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedAvg"):
        make_map(suite, "FedAvg", AXES, tmp_path, tiny_ranking.do)
    with pytest.raises(ConfigError, match="1000 cells"):
        make_map(suite, "FedNTD", {"rounds": range(1, 1001)}, tmp_path, tiny_ranking.do)


@pytest.mark.parametrize(
    "key", ["seed", "method", "method.name", "method.beta", "rounds.many", "topology.kind.x"]
)
def test_an_axis_that_has_no_effect_is_refused(key: str, suite: Suite, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        make_map(suite, "FedNTD", {key: (1, 2)}, tmp_path, tiny_ranking.do)


def test_an_axis_replaces_the_chosen_value(suite: Suite, tmp_path: Path) -> None:
    make_map(suite, "FedNTD", {"plan.lr": (0.2, 0.3)}, tmp_path, tiny_ranking.do)
    texts = [path.read_text() for path in tmp_path.rglob("config.toml")]
    assert sum("lr = 0.2" in text for text in texts) == len(texts) / 2
    assert sum("lr = 0.3" in text for text in texts) == len(texts) / 2


@pytest.mark.parametrize(
    ("name", "row", "method"),
    [
        ("fedntd", "FedNTD", "fedntd"),
        ("fedlc", "FedLC", "fedlc"),
        ("FedSOL", "FedSOL", "fedsol"),
        ("kd", "kd", "kd"),
    ],
)
def test_a_method_without_a_row_has_its_documented_defaults(
    suite: Suite, name: str, row: str, method: str
) -> None:
    mapped = row_to_map(suite, name)
    wider = mapped.suite
    assert mapped.name == row
    assert wider.method_of(row)["name"] == method
    if row != "FedNTD":
        assert wider.method_of(row) == {"name": method}
        assert wider.chosen_fields(row) == {}
        assert row not in wider.ranked_rows


def test_a_method_of_a_file_is_mapped(suite: Suite, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        'from fedstill.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    """Own."""\n'
    )
    name = f"{file}:Mine"
    mapped = row_to_map(suite, name)
    assert mapped.name == "Mine"
    assert mapped.suite.method_of("Mine") == {"name": name}
    with pytest.raises(UnknownName, match=r"'fedlcc'.*'fedlc'"):
        row_to_map(suite, "fedlcc")
