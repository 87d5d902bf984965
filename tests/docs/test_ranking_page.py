"""What ships of the ranking is made from its entries: the package's table of runs, and the page."""

from __future__ import annotations

import pytest
from tools import ranking

from fedstill.report.standings import Standings


@pytest.fixture(scope="module")
def every() -> list[Standings]:
    return ranking.shipping()


def test_the_table_of_runs_in_the_package_is_that_of_the_entries(every: list[Standings]) -> None:
    assert ranking.SHIPPED.read_text() == ranking.table_of_runs(every)


def test_the_page_is_made_from_the_entries(every: list[Standings]) -> None:
    assert ranking.PAGE.read_text() == ranking.document(every)
