"""The order of a comparison's lines: as asked for, or best first where some methods leave each
client its own model.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.report.groups import Group
from fedstill.report.numbers import COLUMNS, Column

BY = ("own_test_accuracy", "personal_accuracy")
"""What such methods are ranked by: accuracy on the clients' own tests, or else on test examples in
their own mix.
"""


def best_first(compared: Sequence[Group]) -> tuple[list[Group], Column | None]:
    """The groups in the order of their lines, and the number by which they are ranked; None where
    they are as asked.

    Groups of which nobody has that number come last. Equal ones stay in the order asked for.
    """
    column = next(
        (m for key in BY for m in COLUMNS if m.key == key and any(g.values(key) for g in compared)),
        None,
    )
    if column is None or not any(g.own_models for g in compared):
        return list(compared), None

    def mean(group: Group) -> float:
        value = group.mean_spread(column.key)
        return value.mean if value else float("-inf")

    return sorted(compared, key=mean, reverse=True), column


def said_of_order(column: Column | None) -> str:
    """How the lines are ordered, in a sentence; empty where they are as asked for."""
    if column is None:
        return ""
    why = "Some of these methods leave each client a model of its own, so lines are ranked by"
    return f'{why} "{column.title}": {column.says}.'
