"""What ships of the ranking is made from its entries: the package's table of runs, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import ranking

from fedstill.experiment.ranking.checking import checked_entry
from fedstill.experiment.ranking.entries import entries_below, read_entry
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
    first = {
        place.parent.name: place for place in reversed(entries_below(ROOT / "results" / "rank"))
    }
    for entry in map(read_entry, first.values()):
        lines = list(checked_entry(entry))
        assert [line.wrong for line in lines if not line.good] == []
        assert not (entry.suite.startswith("digits") and any(line.absent for line in lines)), (
            entry.suite
        )
