"""The tables of what helps over time are made from the entries that are there, which are whole."""

from __future__ import annotations

from tools.over_time import PAGE, written


def test_the_tables_are_those_of_the_entries() -> None:
    text = PAGE.read_text()
    assert written(text) == text, "python tools/over_time.py writes them anew"
