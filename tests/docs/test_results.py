"""The intervals of docs/results follow from the runs in results/; ``make docs-check`` compares
its tables.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import chain, permutations, product
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
    blocks = [*paper_tables(), *comparisons()]
    return set(chain.from_iterable(block.folders for block in blocks))


def matches_in_blocks(pattern: re.Pattern[str]) -> set[tuple[str, ...]]:
    """The numbers of a pattern's matches in the blocks of the page."""
    texts = [text for _, text in BLOCK.findall(PAGE)]
    return set(chain.from_iterable(map(pattern.findall, texts)))


def test_each_interval_of_the_claims_is_a_paired_difference_of_two_rows() -> None:
    """The rows are those of one folder, or a block of the page shows their difference, which
    ``make docs-check`` compares.
    """
    claims = PAGE.partition("## Claims and verdicts")[2].partition("\n## ")[0]
    intervals = set(INTERVAL.findall(claims))
    assert len(intervals) > 20

    of_two_rows = chain.from_iterable(map(differences, folders_of_runs()))
    in_blocks = matches_in_blocks(PRINTED)
    assert sorted(intervals - set(of_two_rows) - in_blocks) == []


def test_each_interval_of_the_text_is_one_of_two_rows_or_stands_in_a_block() -> None:
    """Lines of tables of the page itself, ``| … |``, are compared by ``make docs-check``."""
    lines = BLOCK.sub("", PAGE).splitlines()
    prose = "\n".join(line for line in lines if not line.startswith("|"))
    intervals = set(ENDS.findall(prose))
    assert len(intervals) > 10

    folders = folders_of_runs() | {"results/attacks", "results/attacks-none"}
    of_two_rows = chain.from_iterable(map(differences, folders))
    computed = {(low, high) for _, low, high in of_two_rows}
    computed |= matches_in_blocks(ENDS)
    reversed_order = {(negative(high), negative(low)) for low, high in computed}
    assert sorted(intervals - computed - reversed_order) == []


def negative(number: str) -> str:
    """A printed number with the other sign."""
    return number.translate(str.maketrans("+-", "-+"))


Summary = dict[str, float]


@cache
def differences(folder: str) -> list[tuple[str, ...]]:
    """Mean and 95 % interval of all measures' differences, in points, between every two rows of one
    folder.
    """
    rows: dict[Path, dict[int, Summary]] = {}
    for path in sorted(readable(ROOT / folder).rglob("summary.json")):
        summary = json.loads(path.read_text())
        rows.setdefault(path.parents[1], {})[summary["seed"]] = summary

    intervals: list[tuple[str, ...]] = []
    for (row, reference), key in product(permutations(rows.values(), 2), MEASURES):
        difference = paired_difference(by_seed(row, key), by_seed(reference, key))
        if difference is not None and difference.pairs > 1:
            numbers = (difference.mean, difference.low, difference.high)
            intervals.append(tuple(f"{100 * number:+.1f}" for number in numbers))
    return intervals


def by_seed(row: dict[int, Summary], key: str) -> dict[int, float]:
    """The number of a measure by seed, for the seeds that have one."""
    numbers = {seed: summary.get(key) for seed, summary in row.items()}
    return {seed: number for seed, number in numbers.items() if number is not None}
