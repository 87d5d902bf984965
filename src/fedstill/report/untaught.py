"""Queries that nobody answered: no peer's model reached the threshold on noise, so the client had
no teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstill.report.runs import Run


def untaught(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence on them, by what the runs are called; empty if every query had a teacher."""
    told = []
    for name, own in runs.items():
        without, asked = (
            (sum(numbers) for numbers in zip(*(r.untaught for r in own), strict=True))
            if own
            else (0, 0)
        )
        if without:
            told.append(f"{name}, {without} of {asked}")
    return (
        f"Queries that had no teacher, and count in all numbers: {'; '.join(told)}." if told else ""
    )
