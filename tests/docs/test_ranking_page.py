"""What ships of the ranking is made from its entries: the package's table of runs, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import ranking

from fedstill.data.sources.loader import load_dataset
from fedstill.errors import DataError
from fedstill.experiment.ranking.checking import checked_entry, suite_of
from fedstill.experiment.ranking.entries import Entered, entries_below, read_entry
from fedstill.report.standings import Standings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def every() -> list[Standings]:
    return ranking.shipping()


def test_the_table_of_runs_in_the_package_is_that_of_the_entries(every: list[Standings]) -> None:
    assert ranking.SHIPPED.read_text() == ranking.table_of_runs(every)


def test_the_page_is_made_from_the_entries(every: list[Standings]) -> None:
    assert ranking.PAGE.read_text() == ranking.document(every)


def test_one_entry_of_every_track_agrees_with_what_is_drawn_here() -> None:
    """Of suites whose data are here: the digits always are."""
    first = {place.parent.name: place for place in reversed(entries_below(ROOT / "results" / "rank"))}
    drawn = [entry for entry in map(read_entry, first.values()) if data_are_here(entry)]
    assert {entry.suite for entry in drawn} >= {name for name in first if name.startswith("digits")}
    for entry in drawn:
        assert [line.wrong for line in checked_entry(entry) if not line.good] == []


def data_are_here(entry: Entered) -> bool:
    try:
        load_dataset(suite_of(entry).recipe.common["data"]["name"])
    except DataError:
        return False
    return True
