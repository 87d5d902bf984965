"""Maps as files, on the ranking's page and in Markdown, with made-up scores."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

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
    make_map,
    map_text,
    parse_map,
    ship_map,
    shipped_maps,
)
from fedstill.benchmark.page import ranking_page
from fedstill.benchmark.suites import Suite
from fedstill.core.errors import CorruptFile, Interrupted
from fedstill.running.compare import Outcome, Variant
from made_up_scores import made_up_score


def made_up(row: str = "FedNTD", floor: float = 0.5) -> MethodMap:
    """36 cells on three seeds: a gain that grows with the epochs, and seeds that disagree where two
    clients are sampled.

    ``floor``: FedAvg's accuracy, which is lower by a tenth on the most uneven split.
    """
    cells = []
    for combination in itertools.product(*AXES.values()):
        values = dict(zip(AXES, combination, strict=True))
        split_rank = list(AXES["partition.alpha"]).index(values["partition.alpha"])
        cells.append(made_up_cell(values, split_rank, floor))
    return MethodMap(row, {key: list(values) for key, values in AXES.items()}, cells)


def made_up_cell(values: dict[str, Any], split_rank: int, floor: float) -> MapCell:
    """A cell on one of the splits, which are counted from the most uneven one."""
    epochs = values["plan.epochs"]
    sampled = values["topology.sampled"]
    spread = 0.01
    if sampled == 2:
        spread = 0.5
    floor_accuracy = floor
    if split_rank == 0:
        floor_accuracy = floor - 0.1
    mean_gain = 0.01 * epochs - 0.02 * split_rank
    gains = {seed: mean_gain + spread * (seed - 1) for seed in range(3)}
    return MapCell(
        values,
        {seed: made_up_score(floor_accuracy + gain) for seed, gain in gains.items()},
        {seed: made_up_score(floor_accuracy) for seed in gains},
        dict.fromkeys(gains, Setting(0.1 * split_rank, epochs / 20, sampled / 20)),
    )


@pytest.fixture
def ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, MethodMap]:
    """Two maps in the place of those that ship."""
    monkeypatch.setattr(maps, "_map_folder", lambda: tmp_path / "maps")
    ship_map(made_up("FedLC"), "fedlc")
    ship_map(made_up(), "fedntd")
    return shipped_maps()


def test_a_map_over_another_row_says_so_and_comes_back(tmp_path: Path) -> None:
    renamed = replace(made_up(), floor="Plain <b>")
    assert "points over Plain <b> at" in renamed.summary
    assert parse_map(map_text(renamed)).floor == "Plain <b>"

    write_map(renamed, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "Gain over Plain &lt;b&gt;" in page
    assert "FedAvg" not in page
    assert "FedAvg" not in (tmp_path / "map.md").read_text()


def test_a_map_is_read_back_as_it_was_written(ships: dict[str, MethodMap]) -> None:
    assert list(ships) == ["fedntd", "fedlc"], "in the order of the page"
    for name, row in (("fedntd", "FedNTD"), ("fedlc", "FedLC")):
        original = made_up(row)
        parsed = ships[name]
        assert parsed.row == row
        assert parsed.axes == original.axes
        assert parsed.summary == original.summary
        for cell, original_cell in zip(parsed.cells, original.cells, strict=True):
            assert cell.values == original_cell.values
            assert cell.gains == original_cell.gains
            assert cell.settings == original_cell.settings
        assert map_text(parsed) == map_text(original)


def test_a_map_that_lacks_a_run_is_refused() -> None:
    head, *_ = lines = map_text(made_up()).splitlines(keepends=True)
    without_a_run = "".join(lines[:-1])
    with_another_row = "".join([*lines, lines[-1].replace("FedAvg", "X")])
    for text in (without_a_run, head, "a,b\n1,2\n", "", with_another_row):
        with pytest.raises(CorruptFile, match="map"):
            parse_map(text)


def test_the_cells_of_a_map_have_all_settings_of_the_column_in_which_fields_are_chosen(
    suite: Suite, tmp_path: Path
) -> None:
    column = {
        "partition": "iid",
        "data": {"name": "digits", "train_size": 100, "test_size": 60},
    }
    columns = {**suite.recipe.columns, suite.choosing_column: column}
    changed = replace(suite, recipe=replace(suite.recipe, columns=columns))
    sizes = set()

    def execute(runs: Sequence[Variant]) -> list[Outcome]:
        sizes.update(run.settings.data.train_size for run in runs)
        raise Interrupted("enough")

    with pytest.raises(Interrupted):
        make_map(changed, "FedNTD", {"plan.epochs": [1, 2]}, tmp_path, execute)
    assert sizes == {100}


def test_what_the_floor_kept_is_not_shown_where_its_runs_do_not_say_it() -> None:
    complete = made_up()
    assert cell_table(complete).lines[0][-1] != "–"

    cells = []
    for cell in complete.cells:
        scores = cell.floor_scores.items()
        cells.append(
            replace(cell, floor_scores={seed: replace(score, kept=nan) for seed, score in scores})
        )
    table = cell_table(replace(complete, cells=cells))
    assert {line[-1] for line in table.lines} == {"–"}


def test_the_table_has_every_cell_once(ships: dict[str, MethodMap]) -> None:
    """A tilde marks a gain about whose sign the seeds disagree."""
    table = gain_table(ships["fedntd"])
    first_columns = ["alpha", "sampled 2, epochs 1", "sampled 2, epochs 3", "sampled 2, epochs 10"]
    assert table.head[:4] == first_columns
    most_uneven = "0.05 ~+1.0 ~+3.0 ~+10.0 ~+1.0 +3.0 +10.0 ~+1.0 +3.0 +10.0"
    assert table.lines[0] == most_uneven.split()
    even = "even ~-5.0 ~-3.0 ~+4.0 -5.0 -3.0 +4.0 -5.0 -3.0 +4.0"
    assert table.lines[3] == even.split()


def test_page_and_markdown_say_the_same_and_what_is_missing(ships: dict[str, MethodMap]) -> None:
    page = html.unescape(ranking_page([], ships))
    text = markdown_maps(ships)
    missing = "FedADKD, FedProx, SCAFFOLD, FedSOL."
    for document in (page, text):
        assert ships["fedntd"].summary in document
        assert ships["fedlc"].summary in document
        assert missing in document
        assert "in 9 of 36" in document
    assert page.count('class="chart"') == 2 * 3
    assert text.count("| 0.05 |") == 3, "FedAvg's own accuracy, and two maps"


def sections(text: str) -> list[str]:
    """The headings of a Markdown text's sections."""
    return re.findall("^### (.*)", text, re.MULTILINE)


def test_fedavgs_own_accuracy_stands_once_above_the_maps_that_have_it(
    ships: dict[str, MethodMap],
) -> None:
    table = floor_table(ships["fedntd"])
    assert table.head == gain_table(ships["fedntd"]).head
    most_uneven, *further_alphas = AXES["partition.alpha"]
    expected = [[str(most_uneven), *["40.0"] * 9]]
    expected += [[str(alpha), *["50.0"] * 9] for alpha in further_alphas]
    assert table.lines == expected

    text = markdown_maps(ships)
    assert sections(text) == ["FedAvg", "FedNTD", "FedLC"]
    assert f"| 0.05 | {' | '.join(['40.0'] * 9)} |" in text

    with_lower_floor = markdown_maps({**ships, "fedsol": made_up("FedSOL", 0.3)})
    assert sections(with_lower_floor) == ["FedAvg", "FedNTD", "FedLC", "FedAvg", "FedSOL"]


def test_nothing_is_guessed_where_no_map_ships() -> None:
    assert "FedNTD, FedADKD, FedProx, SCAFFOLD, FedLC, FedSOL." in markdown_maps({})
    assert "|" not in markdown_maps({})
    assert "No map ships" not in markdown_maps(dict.fromkeys(SHIPPED_METHODS, made_up()))
    assert "Where a method helps" not in ranking_page([])
