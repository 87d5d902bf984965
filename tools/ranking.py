"""Generates the pages below docs/ranking and the table of runs that ships.

Both come from the entries below results/rank and from the maps. ``tools.docs_check`` compares the
files with these texts and writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstill.benchmark.map_page import EXPLANATION, TITLE, missing_maps
from fedstill.benchmark.maps import MapCell, MethodMap, shipped_maps
from fedstill.benchmark.page import INTERVALS, LIMITS, PROCEDURE, config_lines
from fedstill.benchmark.recipes import Recipe, load_recipe
from fedstill.benchmark.scoring import score_of
from fedstill.benchmark.standings import Standings, all_standings, read_rows
from fedstill.benchmark.suites import suite_names
from fedstill.benchmark.tables import markdown_agreement, markdown_tables, run_table
from fedstill.report.table_files import TextTable
from fedstill.running.packs import readable

ROOT = Path(__file__).parents[1]
ENTRIES = ROOT / "results" / "rank"

HEAD = f"""# The ranking

Which methods forget, and which learn? The ranking compares methods in fixed settings. Each
track, a group of settings with one question, has a page:

{{tracks}}

[Where a method helps](maps.md) shows how the gain over FedAvg depends on the setting.

The pages are generated from the entries in `results/rank/` and the maps in
`src/fedstill/recipes/rank/maps/`.
`fedstill rank page` writes them as one HTML file, with pictures and tables to sort.
[Enter the ranking](../enter_the_ranking.md) explains how to add a method and what is checked.

## How to read the tables

The column *replayed* is the result of repeating one run of each entry:

- *bits*: the repeated run is identical.
- *tolerance*: it agrees within the rounding of another processor.
- *outliers*: it agrees within this tolerance, except for a few numbers that the ranking does not use.
- *disagrees* or *not replayed*.

A replay proves nothing about the other runs: [what a replay proves](../enter_the_ranking.md#what-a-replay-proves).

{LIMITS}

{PROCEDURE}

{INTERVALS}
"""  # noqa: E501

TRACKS = {
    "space": "clients differ in their data",
    "time": "the data change over time",
    "both": "clients differ and the data change",
    "chain": "clients train one after another",
    "public": "clients send logits on public data",
    "peers": "clients learn from each other",
}
"""The tracks in the order of the menu, with their subjects."""


@dataclass(frozen=True)
class FullTable:
    """A column of a paper's table, whose settings are those of the tier "full"."""

    recipe: str
    column: str
    folder: str
    """The folder of its runs, below ``results``."""


FULL = (
    FullTable("fedadkd/table2", "CIFAR-10 .1", "fedadkd-table2-full"),
    FullTable("fedadkd/table1", "CIFAR-10 s=2", "fedadkd-table1-full"),
)

FULL_SEEDS = range(1, 4)

FULL_HEAD = """## full

The tier "full" has no suite yet. These tables show runs of papers' tables at its size: all of CIFAR-10, FedNTD's
network and plan, 100 clients, ten per round, and 200 rounds. Images are augmented as in the paper, and precision is
bfloat16. The fields are the paper's or our defaults, and were not chosen by tries. The methods are therefore not
ranked. [Results](../results/fedadkd.md) has the papers' numbers.
"""  # noqa: E501


@cache
def shipping() -> list[Standings]:
    """The standings of all entries that ship; raises ValueError for an invalid entry."""
    entries = read_rows([ENTRIES])
    if entries.skipped:
        raise ValueError("; ".join(entries.skipped))
    return all_standings(entries.rows, entries.suites)


def table_of_runs() -> str:
    """The text of shipped.csv."""
    return run_table(shipping()).csv()


def overview() -> str:
    """The text of docs/ranking/index.md."""
    lines = [f"- [{track}]({track}.md): {subject}" for track, subject in TRACKS.items()]
    return "\n".join([HEAD.format(tracks="\n".join(lines)), *markdown_agreement(shipping())])


def space() -> str:
    """The text of docs/ranking/space.md."""
    page = track_page("space")
    full_tables = full_size()
    if not full_tables:
        return page
    return f"{page}\n{full_tables}"


def time() -> str:
    """The text of docs/ranking/time.md."""
    return track_page("time")


def both() -> str:
    """The text of docs/ranking/both.md."""
    return track_page("both")


def chain() -> str:
    """The text of docs/ranking/chain.md."""
    return track_page("chain")


def public() -> str:
    """The text of docs/ranking/public.md."""
    return track_page("public")


def peers() -> str:
    """The text of docs/ranking/peers.md."""
    return track_page("peers")


def maps() -> str:
    """The text of docs/ranking/maps.md."""
    return markdown_maps(shipped_maps()).removeprefix("#").replace("\n### ", "\n## ")


GAIN_TABLE_NOTE = "Gains are in points, means over three seeds. ~: the seeds disagree."

FLOOR_TABLE_NOTE = (
    "FedAvg's own accuracy in %, means over three seeds. Chance is 10 with ten classes. A large "
    "gain over such an accuracy mainly shows that FedAvg collapsed."
)


def markdown_maps(maps: Mapping[str, MethodMap]) -> str:
    """The page's section of maps in Markdown, with tables in place of pictures.

    The table of FedAvg's accuracy appears once for successive maps in which it is the same.
    """
    parts = [f"## {TITLE}", EXPLANATION]
    if maps:
        parts.append(GAIN_TABLE_NOTE)
    printed_floor = ""
    for method_map in maps.values():
        floor = floor_table(method_map).markdown().rstrip()
        if floor != printed_floor:
            parts += ["### FedAvg", FLOOR_TABLE_NOTE, floor]
            printed_floor = floor
        parts += [f"### {method_map.row}", f"{method_map.summary}."]
        parts.append(gain_table(method_map).markdown().rstrip())
    return "\n\n".join([*parts, *missing_maps(maps)]) + "\n"


def gain_table(method_map: MethodMap) -> TextTable:
    """The gain in every cell."""
    return _two_way_table(method_map, lambda cell: cell.gain_text)


def floor_table(method_map: MethodMap) -> TextTable:
    """FedAvg's accuracy in every cell, in %."""
    return _two_way_table(method_map, lambda cell: f"{100 * cell.floor_accuracy:.1f}")


def _two_way_table(method_map: MethodMap, text: Callable[[MapCell], str]) -> TextTable:
    """A line for each value of the first axis, a column for each combination of the others."""
    row_key, *column_keys = method_map.axes
    # The last axis varies slowest, as panels do.
    column_keys.reverse()
    columns = list(itertools.product(*(method_map.axes[key] for key in column_keys)))
    texts = {}
    for cell in method_map.cells:
        column = tuple(cell.values[key] for key in column_keys)
        texts[cell.values[row_key], column] = text(cell)
    head = [_short(row_key), *(_combination(column_keys, column) for column in columns)]
    lines = [
        [str(value), *(texts[value, column] for column in columns)]
        for value in method_map.axes[row_key]
    ]
    return TextTable(head, lines)


def _combination(keys: Sequence[str], values: Sequence[Any]) -> str:
    pairs = zip(keys, values, strict=True)
    return ", ".join(f"{_short(key)} {value}" for key, value in pairs)


def _short(key: str) -> str:
    """A dotted key without its table."""
    return key.rpartition(".")[2]


def track_page(track: str) -> str:
    """A track's page: the tables of its suites, and the fields that were chosen."""
    standings = [entry for entry in shipping() if entry.suite.track == track]
    title = f"# {track.capitalize()}: {TRACKS[track]}"
    parts = [f"{title}\n\n[How to read the tables](index.md#how-to-read-the-tables).\n"]
    for suite_standings in standings:
        parts += suite_sections(suite_standings)
    entered = {suite_standings.suite.name for suite_standings in standings}
    missing = [name for name in suites_of_track(track) if name not in entered]
    if missing:
        parts.append(
            f"## Suites without entries\n\n{', '.join(missing)}: settings and tries are fixed, but "
            "no entry ships yet.\n"
        )
    return "\n".join(parts)


def suite_sections(standings: Standings) -> list[str]:
    """The sections on a suite: its tables, and the fields that were chosen."""
    suite = standings.suite
    tables = f"## {suite.tier}\n\n{suite.recipe.paper}.\n\n{markdown_tables(standings)}"
    fields = (
        f"### Fields chosen, {suite.name}\n\n"
        f"These fields replace the settings that all rows share.\n\n{fields_text(standings)}\n"
    )
    return [tables, fields]


def fields_text(standings: Standings) -> str:
    """The chosen fields of each row of a suite, as TOML."""
    parts = []
    for placed in standings.placed:
        name = placed.row.name
        parts.append(f"{name}:\n\n```toml\n{config_lines(standings, name)}```")
    return "\n\n".join(parts)


def suites_of_track(track: str) -> list[str]:
    """The names of a track's suites in all tiers, such as ``digits-space``."""
    return [name for name in suite_names() if name.rpartition("-")[2] == track]


def full_size() -> str:
    """The section on the tier "full": runs of papers' tables that have its settings; empty if there
    are none yet.
    """
    texts = [full_table(table) for table in FULL]
    parts = [text for text in texts if text]
    if not parts:
        return ""
    return "\n".join([FULL_HEAD, *parts])


def full_table(table: FullTable) -> str:
    """The finished runs in one column of a paper's table; empty if there are none yet."""
    recipe = load_recipe(table.recipe)
    lines = []
    for row in recipe.rows:
        line = full_line(table, recipe, row)
        if line:
            lines.append(line)
    if not lines:
        return ""
    head = ["method", "accuracy [%]", "learned [%]", "kept [%]", "forgetting F [%]", "MB", "seeds"]
    text = TextTable(head, lines).markdown()
    return f"{recipe.paper}; {table.column} (`results/{table.folder}`).\n\n{text}"


def full_line(table: FullTable, recipe: Recipe, row: str) -> list[str]:
    """The means of a row over its finished seeds; empty if there are none."""
    folder = readable(ROOT / "results" / table.folder)
    runs = recipe.variants([(row, table.column)], FULL_SEEDS, {}, folder)
    finished = [run.folder for run in runs if (run.folder / "summary.json").is_file()]
    scores = [score_of(folder, recipe.common["rounds"]) for folder in finished]
    if not scores:
        return []
    accuracy = fmean(score.accuracy for score in scores)
    learned = fmean(score.learned for score in scores)
    forgetting = fmean(score.forgetting for score in scores)
    shares = [accuracy, learned, accuracy / learned, forgetting]
    megabytes = fmean(score.sent for score in scores) / 1e6
    percentages = [f"{100 * share:.1f}" for share in shares]
    return [row, *percentages, f"{megabytes:,.0f}", str(len(scores))]
