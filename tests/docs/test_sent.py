"""The table of what clients send says what they send."""

from __future__ import annotations

import pytest
from tools.sent import PAGE, cells, with_table


def test_the_table_is_that_of_now() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "python -m tools.sent writes it anew"


@pytest.mark.parametrize(
    ("method", "beside", "told"),
    [
        ("fedavg", "nothing", "nothing"),
        ("fedadkd", "`gini`", "`gini`"),
        ("dsfl", "`logits` (P, C)", "nothing"),
        ("feddc", "`labels` (C), `change`, as large as a model's part", "`labels`"),
    ],
)
def test_some_of_it_by_hand(method: str, beside: str, told: str) -> None:
    assert cells(method) == (beside, told)
