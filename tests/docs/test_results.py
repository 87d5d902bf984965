"""The intervals of docs/results follow from the runs in results/; ``make docs-check`` compares
its tables.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from pathlib import Path

from tools.results_page import BLOCK, comparisons, paper_tables, text_of_pages

from fedstill.metrics.ranks import paired_difference
from fedstill.running.packs import readable

ROOT = Path(__file__).parents[2]
PAGE = text_of_pages()
MEASURES = (
    "accuracy",
    "mean_accuracy_last_10",
    "forgetting",
    "query_gain",
    "query_forgetting",
    "query_average_accuracy",
)
INTERVAL = re.compile(r"([+-]\d+\.\d), ([+-]\d+\.\d) to ([+-]\d+\.\d)")
PRINTED = re.compile(r"([+-]\d+\.\d) +([+-]\d+\.\d) to ([+-]\d+\.\d)")
ENDS = re.compile(r"([+-]\d+\.\d) to ([+-]\d+\.\d)")


def folders_of_runs() -> set[str]:
    """The folders of the runs that the page's tables and comparisons show."""
    return {folder for block in (*paper_tables(), *comparisons()) for folder in block.folders}


def test_each_interval_of_the_claims_is_a_paired_difference_of_two_rows() -> None:
    """The rows are those of one folder, or a block of the page shows their difference, which
    ``make docs-check`` compares.
    """
    claims = PAGE.partition("## Claims and verdicts")[2].partition("\n## ")[0]
    intervals = set(INTERVAL.findall(claims))
    assert len(intervals) > 20
    known = {d for folder in folders_of_runs() for d in differences(folder)}
    known |= {found for _, block in BLOCK.findall(PAGE) for found in PRINTED.findall(block)}
    assert sorted(intervals - known) == []


def test_each_interval_of_the_text_is_one_of_two_rows_or_stands_in_a_block() -> None:
    """Lines of tables of the page itself, ``| … |``, are compared by ``make docs-check``."""
    prose = "\n".join(line for line in BLOCK.sub("", PAGE).splitlines() if not line.startswith("|"))
    said = set(ENDS.findall(prose))
    folders = folders_of_runs() | {"results/attacks", "results/attacks-none"}
    known = {(low, high) for folder in folders for _, low, high in differences(folder)}
    known |= {ends for _, block in BLOCK.findall(PAGE) for ends in ENDS.findall(block)}
    known |= {(negative(high), negative(low)) for low, high in known}
    assert len(said) > 10
    assert sorted(said - known) == []


def negative(number: str) -> str:
    return number.translate(str.maketrans("+-", "-+"))


@cache
def differences(folder: str) -> list[tuple[str, ...]]:
    """Mean and 95 % interval of all measures' differences, in points, between every two rows of one
    folder.
    """
    rows: dict[Path, dict[int, dict[str, float]]] = {}
    for path in sorted(readable(ROOT / folder).rglob("summary.json")):
        summary = json.loads(path.read_text())
        rows.setdefault(path.parents[1], {})[summary["seed"]] = summary
    found: list[tuple[str, ...]] = []
    for one, other in itertools.permutations(rows.values(), 2):
        for key in MEASURES:
            apart = paired_difference(
                *(
                    {s: r[key] for s, r in row.items() if r.get(key) is not None}
                    for row in (one, other)
                )
            )
            if apart is not None and apart.pairs > 1:
                found.append(tuple(f"{100 * v:+.1f}" for v in (apart.mean, apart.low, apart.high)))
    return found
