"""Maps as files, on the ranking's page and in Markdown, from one made up by hand."""

from __future__ import annotations

import html
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from tools.ranking import floor_table, gain_table, markdown_maps

from fedstill.benchmark import maps
from fedstill.benchmark.map_page import cell_table, write_map
from fedstill.benchmark.maps import (
    AXES,
    SHIPPED_METHODS,
    MapCell,
    MethodMap,
    Setting,
    map_text,
    parse_map,
    ship_map,
    shipped_maps,
)
from fedstill.benchmark.page import ranking_page
from fedstill.benchmark.scoring import Score
from fedstill.core.errors import CorruptFile


def made_up(row: str = "FedNTD", floor: float = 0.5) -> MethodMap:
    """36 cells on three seeds: a gain that grows with the epochs, and seeds that disagree where two
    take part.

    ``floor``: FedAvg's accuracy, which is lower by a tenth on the most uneven split.
    """
    cells = []
    for i, alpha in enumerate(AXES["partition.alpha"]):
        for epochs in AXES["plan.epochs"]:
            for sampled in AXES["topology.sampled"]:
                spread = 0.5 if sampled == 2 else 0.01
                theirs = {s: _score(floor - 0.1 * (i == 0)) for s in range(3)}
                ours = {
                    s: _score(theirs[s].accuracy + 0.01 * epochs - 0.02 * i + spread * (s - 1))
                    for s in range(3)
                }
                values = {
                    "partition.alpha": alpha,
                    "plan.epochs": epochs,
                    "topology.sampled": sampled,
                }
                there = {s: Setting(0.1 * i, epochs / 20, sampled / 20) for s in range(3)}
                cells.append(MapCell(values, ours, theirs, there))
    return MethodMap(row, {key: list(values) for key, values in AXES.items()}, cells)


def _score(accuracy: float) -> Score:
    return Score(accuracy, 0.9, accuracy / 0.9, 0.1, nan, nan, 10, 10, 1.5, 30)


@pytest.fixture
def ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, MethodMap]:
    """Two maps in the place of those that ship."""
    monkeypatch.setattr(maps, "_map_folder", lambda: tmp_path / "maps")
    ship_map(made_up("FedLC"), "fedlc")
    ship_map(made_up(), "fedntd")
    return shipped_maps()


def test_a_map_over_another_row_says_so_and_comes_back(tmp_path: Path) -> None:
    one = replace(made_up(), floor="Plain <b>")
    assert "points over Plain <b> at" in one.summary
    assert parse_map(map_text(one)).floor == "Plain <b>"
    write_map(one, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "Gain over Plain &lt;b&gt;" in page
    assert "FedAvg" not in page
    assert "FedAvg" not in (tmp_path / "map.md").read_text()


def test_a_map_is_read_back_as_it_was_written(ships: dict[str, MethodMap]) -> None:
    assert list(ships) == ["fedntd", "fedlc"], "in the order of the page"
    for name, row in (("fedntd", "FedNTD"), ("fedlc", "FedLC")):
        one, back = made_up(row), ships[name]
        assert (back.row, back.axes) == (row, one.axes)
        assert back.summary == one.summary
        assert [(c.values, c.gains, c.settings) for c in back.cells] == [
            (c.values, c.gains, c.settings) for c in one.cells
        ]
        assert map_text(back) == map_text(one)


def test_a_map_that_lacks_a_run_is_refused() -> None:
    lines = map_text(made_up()).splitlines(keepends=True)
    for text in (
        "".join(lines[:-1]),
        lines[0],
        "a,b\n1,2\n",
        "",
        "".join([*lines, lines[-1].replace("FedAvg", "X")]),
    ):
        with pytest.raises(CorruptFile, match="map"):
            parse_map(text)


def test_what_the_floor_kept_is_not_shown_where_its_runs_do_not_say_it() -> None:
    one = made_up()
    assert cell_table(one).lines[0][-1] != "–"
    cells = [
        replace(c, floor_scores={s: replace(own, kept=nan) for s, own in c.floor_scores.items()})
        for c in one.cells
    ]
    assert {line[-1] for line in cell_table(replace(one, cells=cells)).lines} == {"–"}


def test_the_table_has_every_cell_once(ships: dict[str, MethodMap]) -> None:
    table = gain_table(ships["fedntd"])
    head, lines = table.head, table.lines
    assert head[:4] == [
        "alpha",
        "sampled 2, epochs 1",
        "sampled 2, epochs 3",
        "sampled 2, epochs 10",
    ]
    assert lines[0] == [
        "0.05",
        "~+1.0",
        "~+3.0",
        "~+10.0",
        "~+1.0",
        "+3.0",
        "+10.0",
        "~+1.0",
        "+3.0",
        "+10.0",
    ]
    assert lines[3] == [
        "even",
        "~-5.0",
        "~-3.0",
        "~+4.0",
        "-5.0",
        "-3.0",
        "+4.0",
        "-5.0",
        "-3.0",
        "+4.0",
    ]


def test_page_and_markdown_say_the_same_and_what_is_missing(ships: dict[str, MethodMap]) -> None:
    page, text = html.unescape(ranking_page([], ships)), markdown_maps(ships)
    for one in ships.values():
        assert one.summary in page
        assert one.summary in text
    left = "FedADKD, FedProx, SCAFFOLD, FedSOL."
    assert left in text
    assert left in page
    assert page.count('class="chart"') == 2 * 3
    assert text.count("| 0.05 |") == 3, "FedAvg's own accuracy, and two maps"
    for told in (page, text):
        assert "in 9 of 36" in told


def test_fedavgs_own_accuracy_stands_once_above_the_maps_that_have_it(
    ships: dict[str, MethodMap],
) -> None:
    table = floor_table(ships["fedntd"])
    head, lines = table.head, table.lines
    assert head == gain_table(ships["fedntd"]).head
    assert lines == [
        ["0.05", *["40.0"] * 9],
        *([str(a), *["50.0"] * 9] for a in AXES["partition.alpha"][1:]),
    ]
    heads = [line for line in markdown_maps(ships).splitlines() if line.startswith("### ")]
    assert heads == ["### FedAvg", "### FedNTD", "### FedLC"]
    other = markdown_maps({**ships, "fedsol": made_up("FedSOL", 0.3)})
    assert [line for line in other.splitlines() if line.startswith("### ")] == [
        *heads,
        "### FedAvg",
        "### FedSOL",
    ]
    assert f"| 0.05 | {' | '.join(['40.0'] * 9)} |" in markdown_maps(ships)


def test_nothing_is_guessed_where_no_map_ships() -> None:
    assert "FedNTD, FedADKD, FedProx, SCAFFOLD, FedLC, FedSOL." in markdown_maps({})
    assert "|" not in markdown_maps({})
    assert "No map ships" not in markdown_maps(dict.fromkeys(SHIPPED_METHODS, made_up()))
    assert "Where a method helps" not in ranking_page([])
