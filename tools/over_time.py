"""The tables of docs/results/over_time.md on forgetting over time, made from entries.

``tools.docs_check`` compares them with the page. There is one for each suite: of digits from
``results/rank``, of the others from ``results/over-time``, where the suites are, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fedstill.benchmark.standings import RankedRow, Standings, all_standings, read_rows
from fedstill.benchmark.suites import read_suite
from fedstill.benchmark.tables import cell_table
from fedstill.report.table_files import TextTable

ROOT = Path(__file__).parents[1]
SHIPPED, OWN = ROOT / "results" / "rank", ROOT / "results" / "over-time"
DIGITS = ("digits-time", "digits-both")
NONE = "–"


def compared() -> list[Standings]:
    """The standings of suites over time that have entries; raises ValueError for one that is not as
    it should be.
    """
    own = [read_suite(file).name for file in sorted(OWN.glob("*.toml"))]
    shipped = [file for name in DIGITS for file in SHIPPED.glob(f"{name}.*")]
    entered = read_rows([*shipped, OWN])
    if entered.skipped:
        raise ValueError("; ".join(entered.skipped))
    names = [name for name in (*DIGITS, *own) if name in entered.rows]
    return all_standings({name: entered.rows[name] for name in names}, entered.suites)


def lines(one: Standings) -> Iterator[list[str]]:
    """A line of each row: accuracy by column and its difference, then learned, kept and forgotten,
    over all columns.
    """
    rows = [p.row for p in one.placed] + list(one.bounds)
    for row, line in zip(rows, cell_table(one).lines, strict=True):
        columns = [c for c in one.columns if row.column(c)]
        yield [
            *line,
            *(_over(row, number, columns) for number in ("learned", "kept", "average_forgetting")),
        ]


def _over(row: RankedRow, number: str, columns: list[str]) -> str:
    if number == "kept":  # as accuracy is learned x kept, of means too
        value = row.mean("accuracy", columns) / row.mean("learned", columns)
    else:
        value = row.mean(number, columns)
    return NONE if math.isnan(value) else f"{100 * value:.1f}"


def tables() -> str:
    """All tables, in Markdown."""
    parts = []
    for one in compared():
        head = [*cell_table(one).head, "learned [%]", "kept [%]", "forgotten [points]"]
        diverged = any(row.diverged for row in one.rows)
        parts.append(
            f"**{one.suite.title}.** {'†: a run of the method diverged. ' if diverged else ''}\n\n"
            f"{TextTable(head, list(lines(one))).markdown()}"
        )
    return "\n".join(parts)
