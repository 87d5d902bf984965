"""What real sites say of a model at a task's end: its accuracy on their own test sets, by task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstill.topology import TASK_TEST

Row = Sequence[float | None]


@dataclass
class SiteRows:
    """Each site's row of the task under way.

    ``personal``: the stages after which a client's own model is its answer; empty: sites test the
    global model in a stage of its own.
    """

    personal: Collection[str]
    rows: dict[int, Row] = field(default_factory=dict)

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients reported."""
        stages = self.personal or (TASK_TEST,)
        said = [e for e in events if e["name"] in stages and "site_by_task" in e]
        self.rows |= {e["client"]: e["site_by_task"] for e in said}

    def end(self) -> dict[int, Row]:
        """The rows by client at the end of a task, which are then forgotten."""
        rows, self.rows = dict(sorted(self.rows.items())), {}
        return rows


def mean_row(rows: Collection[Row], tasks: int) -> list[float | None]:
    """The mean over sites of the accuracy on each task, (T,); None for one on which no site has
    tested.

    >>> mean_row([[1.0, None], [0.5, None]], 2)
    [0.75, None]
    """
    each = [[row[task] for row in rows] for task in range(tasks)]
    known = [[value for value in column if value is not None] for column in each]
    return [sum(column) / len(column) if column else None for column in known]
