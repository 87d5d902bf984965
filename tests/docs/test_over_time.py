"""The tables of what helps over time are made from the entries that are there."""

from __future__ import annotations

from tools.over_time import OWN, PAGE, written

from fedstill.experiment.ranking.checking import checked_entry
from fedstill.experiment.ranking.entries import entries_below, read_entry
from fedstill.experiment.ranking.suites import own_suite


def test_the_tables_are_those_of_the_entries() -> None:
    text = PAGE.read_text()
    assert written(text) == text, "python tools/over_time.py writes them anew"


def test_every_entry_is_whole() -> None:
    for file in OWN.glob("*.toml"):
        own_suite(file)
    places = entries_below(OWN)
    assert places
    for place in places:
        lines = checked_entry(read_entry(place), draws=False)
        assert [line.wrong for line in lines if not line.good] == []
