"""What clients of some methods send beside their models, by hand."""

from __future__ import annotations

import pytest
from tools.sent import SentGroups, sent_groups


@pytest.mark.parametrize(
    ("method", "groups", "from_labels"),
    [
        ("fedavg", "nothing", "nothing"),
        ("fedadkd", "`gini`", "`gini`"),
        ("dsfl", "`logits` (P, C)", "nothing"),
        ("feddc", "`labels` (C), `change`, in the shape of the sent parameters", "`labels`"),
    ],
)
def test_some_of_it_by_hand(method: str, groups: str, from_labels: str) -> None:
    assert sent_groups(method) == SentGroups(groups, from_labels)
