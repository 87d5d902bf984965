"""What ships of the ranking, from the entries below results/rank and the maps: the table of runs, docs/ranking.md.

``python tools/ranking.py``; a test compares both files with what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstill.experiment.ranking.suites import suite_names
from fedstill.report.map_file import shipped_maps
from fedstill.report.maps_shown import maps_text
from fedstill.report.ranked import every_standing, rows_below
from fedstill.report.ranking_files import run_lines, tables_text
from fedstill.report.ranking_page import HOW, INTERVALS, MEANS, copied_fields
from fedstill.report.standings import Standings
from fedstill.report.table_files import csv_text

ROOT = Path(__file__).parents[1]
ENTRIES = ROOT / "results" / "rank"
SHIPPED = ROOT / "src" / "fedstill" / "recipes" / "rank" / "shipped.csv"
PAGE = ROOT / "docs" / "ranking.md"

HEAD = f"""# The ranking

Which methods forget, and which learn? This page is made from the entries that ship (`results/rank/`) and the maps
(`src/fedstill/recipes/rank/maps/`), by `python tools/ranking.py`; a test compares it with them.
`fedstill rank page` writes the same as one HTML file, with pictures and tables to sort.
[How to enter a method, and what is checked](enter_the_ranking.md).

{MEANS}

{HOW}

{INTERVALS}
"""


def shipping() -> list[Standings]:
    """The standings of all entries that ship; raises ValueError for one that is not as it should be."""
    rows, suites, left_out = rows_below([ENTRIES])
    if left_out:
        raise ValueError("; ".join(left_out))
    return every_standing(rows, suites)


def table_of_runs(every: Sequence[Standings]) -> str:
    """The text of shipped.csv."""
    return csv_text(*run_lines(every))


def document(every: Sequence[Standings]) -> str:
    """The text of docs/ranking.md."""
    parts = [HEAD]
    for one in every:
        fields = "\n\n".join(f"{p.row.name}:\n\n```toml\n{copied_fields(one, p.row.name)}```" for p in one.placed)
        title = f"## {one.suite.tier}, {one.suite.track}"
        parts.append(f"{title}\n\n{one.suite.recipe.paper}.\n\n{tables_text(one)}")
        parts.append(f"### Fields chosen, {one.suite.name}\n\nOver the settings that all rows have.\n\n{fields}\n")
    bare = [name for name in suite_names() if name not in {one.suite.name for one in every}]
    if bare:
        parts.append(
            f"## Suites without entries\n\n{', '.join(bare)}: settings and tries are fixed, runs are to come.\n"
        )
    return "\n".join([*parts, maps_text(shipped_maps())])


def main() -> None:
    """Write both files."""
    every = shipping()
    SHIPPED.write_text(table_of_runs(every))
    PAGE.write_text(document(every))
    print(f"{SHIPPED}\n{PAGE}")


if __name__ == "__main__":
    main()
