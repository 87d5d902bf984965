"""The table of what clients send says what they send."""

from __future__ import annotations

import pytest
from tools.sent import PAGE, cells, sent_table, with_table


def test_the_table_is_that_of_now() -> None:
    text = PAGE.read_text()
    assert sent_table() in text, "python -m tools.sent"
    assert with_table(text) == text


@pytest.mark.parametrize(
    ("method", "beside", "told", "summed"),
    [
        ("fedavg", "nothing", "nothing", "yes"),
        ("fedadkd", "`gini`", "`gini`", "no"),
        ("dsfl", "`logits` (P, C)", "nothing", "no"),
        ("feddc", "`labels` (C), `change`, as large as a model's part", "`labels`", "no"),
    ],
)
def test_some_of_it_by_hand(method: str, beside: str, told: str, summed: str) -> None:
    assert cells(method) == (beside, told, summed)
