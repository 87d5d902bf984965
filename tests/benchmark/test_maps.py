"""Maps as files, on the ranking's page and in Markdown, from one made up by hand."""

from __future__ import annotations

import html
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from fedstill.benchmark import maps
from fedstill.benchmark.map_page import cell_table, floor_table, gain_table, maps_text, write_map
from fedstill.benchmark.maps import (
    AXES,
    MAPPED,
    Grid,
    MapCell,
    Setting,
    keep_map,
    map_from,
    map_text,
    shipped_maps,
)
from fedstill.benchmark.page import ranking_page
from fedstill.benchmark.scoring import Score
from fedstill.core.errors import CorruptFile


def made_up(row: str = "FedNTD", floor: float = 0.5) -> Grid:
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
    return Grid(row, {key: list(values) for key, values in AXES.items()}, cells)


def _score(accuracy: float) -> Score:
    return Score(accuracy, 0.9, accuracy / 0.9, 0.1, nan, nan, 10, 10, 1.5, 30)


@pytest.fixture
def ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Grid]:
    """Two maps in the place of those that ship."""
    monkeypatch.setattr(maps, "_folder", lambda: tmp_path / "maps")
    keep_map(made_up("FedLC"), "fedlc")
    keep_map(made_up(), "fedntd")
    return shipped_maps()


def test_a_map_over_another_row_says_so_and_comes_back(tmp_path: Path) -> None:
    one = replace(made_up(), against="Plain <b>")
    assert "points over Plain <b> at" in one.summary
    assert map_from(map_text(one)).against == "Plain <b>"
    write_map(one, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "Gain over Plain &lt;b&gt;" in page
    assert "FedAvg" not in page
    assert "FedAvg" not in (tmp_path / "map.md").read_text()


def test_a_map_is_read_back_as_it_was_written(ships: dict[str, Grid]) -> None:
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
        with pytest.raises(CorruptFile, match="no map's table"):
            map_from(text)


def test_what_the_floor_kept_is_not_shown_where_its_runs_do_not_say_it() -> None:
    one = made_up()
    assert cell_table(one)[1][0][-1] != "–"
    cells = [
        replace(c, theirs={s: replace(own, kept=nan) for s, own in c.theirs.items()})
        for c in one.cells
    ]
    assert {line[-1] for line in cell_table(replace(one, cells=cells))[1]} == {"–"}


def test_the_table_has_every_cell_once(ships: dict[str, Grid]) -> None:
    head, lines = gain_table(ships["fedntd"])
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


def test_page_and_markdown_say_the_same_and_what_is_missing(ships: dict[str, Grid]) -> None:
    page, text = html.unescape(ranking_page([], ships)), maps_text(ships)
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
    ships: dict[str, Grid],
) -> None:
    head, lines = floor_table(ships["fedntd"])
    assert head == gain_table(ships["fedntd"])[0]
    assert lines == [
        ["0.05", *["40.0"] * 9],
        *([str(a), *["50.0"] * 9] for a in AXES["partition.alpha"][1:]),
    ]
    heads = [line for line in maps_text(ships).splitlines() if line.startswith("### ")]
    assert heads == ["### FedAvg", "### FedNTD", "### FedLC"]
    other = maps_text({**ships, "fedsol": made_up("FedSOL", 0.3)})
    assert [line for line in other.splitlines() if line.startswith("### ")] == [
        *heads,
        "### FedAvg",
        "### FedSOL",
    ]
    assert f"| 0.05 | {' | '.join(['40.0'] * 9)} |" in maps_text(ships)


def test_nothing_is_guessed_where_no_map_ships() -> None:
    assert "FedNTD, FedADKD, FedProx, SCAFFOLD, FedLC, FedSOL." in maps_text({})
    assert "|" not in maps_text({})
    assert "No map ships" not in maps_text(dict.fromkeys(MAPPED, made_up()))
    assert "Where a method helps" not in ranking_page([])
