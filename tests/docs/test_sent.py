"""What clients of some methods send beside their models, by hand."""

from __future__ import annotations

import pytest
from tools.sent import cells


@pytest.mark.parametrize(
    ("method", "beside", "told"),
    [
        ("fedavg", "nothing", "nothing"),
        ("fedadkd", "`gini`", "`gini`"),
        ("dsfl", "`logits` (P, C)", "nothing"),
        ("feddc", "`labels` (C), `change`, in the shape of the sent parameters", "`labels`"),
    ],
)
def test_some_of_it_by_hand(method: str, beside: str, told: str) -> None:
    assert cells(method) == (beside, told)
