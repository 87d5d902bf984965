"""What ships of the ranking, from the entries below results/rank and the maps: the table of runs,
docs/ranking.md.

``tools.docs_check`` compares both files with these texts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean

from fedstill.benchmark.map_page import maps_text
from fedstill.benchmark.maps import shipped_maps
from fedstill.benchmark.page import HOW, INTERVALS, MEANS, copied_fields
from fedstill.benchmark.recipes import load_recipe
from fedstill.benchmark.scoring import score_of
from fedstill.benchmark.standings import Standings
from fedstill.benchmark.suites import suite_names
from fedstill.benchmark.tables import agreement_text, run_lines, tables_text
from fedstill.benchmark.terminal import every_standing, rows_below
from fedstill.report.table_files import csv_text, markdown
from fedstill.running.archive import readable

ROOT = Path(__file__).parents[1]
ENTRIES = ROOT / "results" / "rank"

HEAD = f"""# The ranking

Which methods forget, and which learn? This page is made from the entries that ship (`results/rank/`) and the maps
(`src/fedstill/recipes/rank/maps/`), by
`python -m tools.docs_check --write ranking`; `make docs-check` compares it with them.
`fedstill rank page` writes the same as one HTML file, with pictures and tables to sort.
[How to enter a method, and what is checked](enter_the_ranking.md).

The column *replayed* says how one repeated run of each entry compared: *bits* (identical), *tolerance* (within what
rounding changes on another processor), *outliers* (the same, but for single numbers), *disagrees*, or *not replayed*.
A replay proves nothing about runs that were not repeated:
[what a replay proves, and what not](enter_the_ranking.md#what-a-replay-proves).

{MEANS}

{HOW}

{INTERVALS}
"""  # noqa: E501

FULL = (
    ("fedadkd/table2", "CIFAR-10 .1", "fedadkd-table2-full"),
    ("fedadkd/table1", "CIFAR-10 s=2", "fedadkd-table1-full"),
)
"""Tables of papers whose settings are those of the tier full: the recipe, its column, the folder of
its runs.
"""

FULL_SEEDS = range(1, 4)

FULL_HEAD = """## full, space

The tier "full" has no suite yet. These are runs of papers' tables whose settings are its: all of CIFAR-10, FedNTD's
network and plan, 100 clients, ten a round, 200 rounds. Images are varied as in the paper, precision is bfloat16, and
the fields are the paper's or ours by default, not chosen. So nothing is ranked. [What the papers have](results.md).
"""  # noqa: E501


@cache
def shipping() -> list[Standings]:
    """The standings of all entries that ship; raises ValueError for one that is not as it should
    be.
    """
    rows, suites, left_out = rows_below([ENTRIES])
    if left_out:
        raise ValueError("; ".join(left_out))
    return every_standing(rows, suites)


def table_of_runs() -> str:
    """The text of shipped.csv."""
    return csv_text(*run_lines(shipping()))


def document() -> str:
    """The text of docs/ranking.md."""
    every = shipping()
    parts = [HEAD, *agreement_text(every)]
    for one in every:
        fields = "\n\n".join(
            f"{p.row.name}:\n\n```toml\n{copied_fields(one, p.row.name)}```" for p in one.placed
        )
        title = f"## {one.suite.tier}, {one.suite.track}"
        parts.append(f"{title}\n\n{one.suite.recipe.paper}.\n\n{tables_text(one)}")
        parts.append(
            f"### Fields chosen, {one.suite.name}\n\nOver the settings that all rows have.\n\n"
            f"{fields}\n"
        )
    bare = [name for name in suite_names() if name not in {one.suite.name for one in every}]
    if bare:
        parts.append(
            f"## Suites without entries\n\n{', '.join(bare)}: settings and tries are fixed, runs "
            "are to come.\n"
        )
    return "\n".join([*parts, *filter(None, [full_size()]), maps_text(shipped_maps())])


def full_size() -> str:
    """The section on the tier "full": runs of papers' tables that have its settings; empty where
    there are none yet.
    """
    parts = [text for one in FULL if (text := _of_table(*one))]
    return "\n".join([FULL_HEAD, *parts]) if parts else ""


def _of_table(table: str, column: str, name: str) -> str:
    """One table's runs of a column: a line of each row, means over the seeds that are finished."""
    recipe, folder = load_recipe(table), readable(ROOT / "results" / name)
    lines = []
    for row in recipe.rows:
        runs = recipe.variants([(row, column)], FULL_SEEDS, {}, folder)
        done = [run.folder for run in runs if (run.folder / "summary.json").is_file()]
        scores = [score_of(place, recipe.common["rounds"]) for place in done]
        if scores:
            accuracy, learned, f = (
                fmean(getattr(s, k) for s in scores) for k in ("accuracy", "learned", "forgetting")
            )
            numbers = [accuracy, learned, accuracy / learned, f]
            sent = fmean(s.sent for s in scores) / 1e6
            lines.append(
                [row, *(f"{100 * v:.1f}" for v in numbers), f"{sent:,.0f}", str(len(scores))]
            )
    head = ["method", "accuracy [%]", "learned [%]", "kept [%]", "forgetting F [%]", "MB", "seeds"]
    return (
        f"{recipe.paper}; {column} (`results/{name}`).\n\n{markdown(head, lines)}" if lines else ""
    )
