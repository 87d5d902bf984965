"""The tables of docs/results/over_time.md: one for each suite, from the entries in ``results/``.

``tools.docs_check`` compares them with the page. Entries of digits are in ``results/rank``. The
other suites and their entries are in ``results/over-time``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fedstill.benchmark.standings import Standings, all_standings, read_rows
from fedstill.benchmark.suites import read_suite
from fedstill.benchmark.tables import cell_table
from fedstill.report.table_files import TextTable

ROOT = Path(__file__).parents[1]
RANKING = ROOT / "results" / "rank"
OVER_TIME = ROOT / "results" / "over-time"
DIGITS_SUITES = ("digits-time", "digits-both")
NONE = "–"


def tables() -> str:
    """All tables, in Markdown."""
    return "\n".join(table(standings) for standings in read_standings())


def read_standings() -> list[Standings]:
    """The standings of the suites that have entries; raises ValueError for an invalid entry."""
    suites = [*DIGITS_SUITES]
    suites += [read_suite(path).name for path in sorted(OVER_TIME.glob("*.toml"))]
    paths: list[Path] = []
    for suite in DIGITS_SUITES:
        paths += RANKING.glob(f"{suite}.*")
    entries = read_rows([*paths, OVER_TIME])
    if entries.skipped:
        raise ValueError("; ".join(entries.skipped))
    rows = {suite: entries.rows[suite] for suite in suites if suite in entries.rows}
    return all_standings(rows, entries.suites)


def table(standings: Standings) -> str:
    """The table of a suite below its title."""
    title = f"**{standings.suite.title}.** "
    if any(row.diverged for row in standings.rows):
        title += "†: a run of the method diverged. "
    head = [*cell_table(standings).head, "learned [%]", "kept [%]", "forgotten [points]"]
    text = TextTable(head, list(lines(standings))).markdown()
    return f"{title}\n\n{text}"


def lines(standings: Standings) -> Iterator[list[str]]:
    """A line for each row: the accuracy in each column and its difference, and then what was
    learned, kept and forgotten over all columns.
    """
    rows = [placed.row for placed in standings.placed]
    rows += standings.bounds
    for row, cells in zip(rows, cell_table(standings).lines, strict=True):
        columns = [column for column in standings.columns if row.column(column)]
        learned = row.mean("learned", columns)
        # Accuracy is the product of what was learned and kept; that holds for the means, too.
        kept = row.mean("accuracy", columns) / learned
        forgotten = row.mean("average_forgetting", columns)
        yield [*cells, percent(learned), percent(kept), percent(forgotten)]


def percent(value: float) -> str:
    """A share in percent; a dash if it is unknown."""
    if math.isnan(value):
        return NONE
    return f"{100 * value:.1f}"
