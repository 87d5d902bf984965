"""The table of what goes together says what preparing such runs says."""

from __future__ import annotations

from tools.combinations import PAGE, table, written


def test_the_table_is_that_of_now() -> None:
    text = PAGE.read_text()
    assert table() in text, "python -m tools.combinations"
    assert written(text) == text
