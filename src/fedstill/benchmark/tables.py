"""The standings as tables of text, for the page, the terminal, Markdown, CSV and LaTeX.

table.csv contains all runs with all digits: every other table can be computed from it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedstill.benchmark.recipes import RANKING
from fedstill.benchmark.scoring import SCORE_FIELDS, Score
from fedstill.benchmark.standings import FEDAVG, Placed, RankedRow, Standings
from fedstill.benchmark.suites import TEST_SEEDS, TIERS, TRACKS, Suite
from fedstill.core.errors import CorruptFile
from fedstill.core.files import Kind, check_may_overwrite, counted, make_folder, write_whole
from fedstill.metrics.ranks import Difference
from fedstill.report import terminal
from fedstill.report.summary import NONE, share_text
from fedstill.report.table_files import TextTable

# ---- the table of a suite ------------------------------------------------------------------------

HEAD = (
    "#",
    "method",
    "mean rank",
    "95 %",
    "accuracy [%]",
    "learned [%]",
    "kept [%]",
    "Δ [points]",
    "95 %",
    "p (Holm)",
    "share of the gap [%]",
    "wins [%]",
    "CPU",
    "MB",
    "tries",
    "replayed",
)
"""The columns of a suite's table."""


def standing_table(standings: Standings) -> TextTable:
    """A line for each ranked row, best first, then the bounds, which have no rank.

    The head names the baseline of the differences, and the row whose CPU seconds are the unit.
    """
    baseline = standings.suite.baseline
    head = []
    for title in HEAD:
        title = title.replace("Δ", f"Δ to {baseline}")
        head.append(title.replace("CPU", f"CPU × {cpu_unit(standings)}"))
    lines = [_placed_line(placed) for placed in standings.placed]
    lines += [_bound_line(standings, row) for row in standings.bounds]
    return TextTable(head, lines)


def standing_table_by_name(standings: Standings) -> TextTable:
    """The same table with the name before the rank."""
    table = standing_table(standings)
    return TextTable(_name_first(table.head), [_name_first(line) for line in table.lines])


def _name_first(line: Sequence[str]) -> list[str]:
    rank, name, *numbers = line
    return [name, rank, *numbers]


def cpu_unit(standings: Standings) -> str:
    """The row whose CPU seconds are the unit: FedAvg, or the baseline if that is not ranked."""
    names = [placed.row.name for placed in standings.placed]
    if FEDAVG in names:
        return FEDAVG
    return standings.suite.baseline


def _placed_line(placed: Placed) -> list[str]:
    difference = NONE
    p_value = NONE
    if placed.difference is not None:
        difference = f"{100 * placed.difference.mean:+.1f}"
        p_value = f"{placed.p_holm:.3f}"
    low, high = placed.rank_interval
    return [
        str(placed.place),
        marked_name(placed.row),
        f"{placed.rank:.2f}",
        _interval(low, high, ".2f"),
        _percent(placed.accuracy),
        _percent(placed.learned),
        _percent(placed.kept),
        difference,
        _difference_interval(placed.difference),
        p_value,
        _number(100 * placed.share, "+.0f"),
        _number(100 * placed.wins, ".0f"),
        _number(placed.cpu, ".2f"),
        _megabytes(placed.sent),
        str(placed.row.try_count),
        placed.row.status,
    ]


def _bound_line(standings: Standings, row: RankedRow) -> list[str]:
    """A bound has numbers over those columns in which it has a meaning."""
    columns = [column for column in standings.columns if row.column(column)]
    name = marked_name(row)
    if len(columns) < len(standings.columns):
        name += f" ({', '.join(columns)})"
    cells = {
        "method": name,
        "accuracy [%]": _percent(row.mean("accuracy", columns)),
        "learned [%]": _percent(row.mean("learned", columns)),
        "kept [%]": _percent(row.kept(columns)),
        "MB": _megabytes(row.mean("sent", columns)),
        "replayed": row.status,
    }
    return [cells.get(title, NONE) for title in HEAD]


def marked_name(row: RankedRow) -> str:
    """A row's name, marked if one of its runs diverged."""
    if row.diverged:
        return f"{row.name} †"
    return row.name


# ---- the table by column -------------------------------------------------------------------------


def cell_table(standings: Standings) -> TextTable:
    """By column: mean accuracy ± sample deviation over seeds, and the difference to the baseline
    with Student's interval.
    """
    head = ["method"]
    for column in standings.columns:
        head += [f"{column} [%]", f"Δ to {standings.suite.baseline}"]
    lines = [_cell_line(standings, placed.row) for placed in standings.placed]
    lines += [_cell_line(standings, row) for row in standings.bounds]
    return TextTable(head, lines)


def _cell_line(standings: Standings, row: RankedRow) -> list[str]:
    line = [marked_name(row)]
    for column in standings.columns:
        difference = standings.difference(row, column)
        text = NONE
        if difference is not None and row not in standings.bounds:
            text = f"{100 * difference.mean:+.1f} ({_difference_interval(difference)})"
        line += [share_text(standings.cell(row, column)), text]
    return line


# ---- the table of runs, with all digits ----------------------------------------------------------

RUN_HEAD = (
    "suite",
    "version",
    "method",
    "tries",
    "fields",
    "column",
    "seed",
    *SCORE_FIELDS,
    "tasks",
    "diverged",
    "replayed",
    "processor",
)
"""The columns of table.csv."""

SHIPPED_FILE = "shipped.csv"
"""The table of runs of the entries that ship, a file of the package."""


def run_table(all_standings: Sequence[Standings]) -> TextTable:
    """A line for each run, with all digits."""
    lines = []
    for standings in all_standings:
        for row in standings.rows:
            lines += [_run_line(standings.suite, row, *key) for key in row.scores]
    return TextTable(RUN_HEAD, lines)


def _run_line(suite: Suite, row: RankedRow, column: str, seed: int) -> list[str]:
    tasks = ""
    if row.tasks.get((column, seed)):
        tasks = json.dumps(row.tasks[column, seed])
    return [
        suite.name,
        str(suite.version),
        row.name,
        str(row.try_count),
        json.dumps(dict(row.fields), sort_keys=True),
        column,
        str(seed),
        *map(in_full, row.scores[column, seed].table.values()),
        tasks,
        row.diverged.get((column, seed), ""),
        row.status,
        row.processor,
    ]


def in_full(value: float) -> str:
    """A number with all digits; NaN is empty."""
    if math.isnan(value):
        return ""
    return repr(value)


def parse_run_table(text: str) -> dict[str, list[RankedRow]]:
    """The rows of each suite, from the text of table.csv. Raises CorruptFile."""
    by_row: dict[tuple[str, str], list[dict[str, str]]] = {}
    suites: dict[str, list[RankedRow]] = {}
    try:
        for line in csv.DictReader(io.StringIO(text)):
            by_row.setdefault((line["suite"], line["method"]), []).append(line)
        for (suite, name), lines in by_row.items():
            suites.setdefault(suite, []).append(_parse_row(name, lines))
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFile(f"this is not a table of the ranking's runs: {error}") from error
    return suites


def _parse_row(name: str, lines: Sequence[Mapping[str, str]]) -> RankedRow:
    by_run = {(line["column"], int(line["seed"])): line for line in lines}
    first = lines[0]
    return RankedRow(
        name=name,
        scores={run: Score.from_texts(line) for run, line in by_run.items()},
        fields=json.loads(first["fields"]),
        try_count=int(first["tries"]),
        diverged={run: line["diverged"] for run, line in by_run.items() if line["diverged"]},
        status=first["replayed"],
        tasks={run: json.loads(line["tasks"]) for run, line in by_run.items() if line["tasks"]},
        processor=first["processor"],
    )


def shipped_rows() -> dict[str, list[RankedRow]]:
    """The rows of the entries that ship, by suite."""
    file = resources.files("fedstill") / "recipes" / RANKING / SHIPPED_FILE
    if not file.is_file():
        return {}
    return parse_run_table(file.read_text(encoding="utf-8"))


# ---- the table of choices ------------------------------------------------------------------------


def choice_table(suite: Suite, rows: Sequence[str]) -> TextTable:
    """For each row, its chosen configuration and the mean score of each try."""
    most_tries = max(len(suite.tries[row]) for row in rows)
    head = ["method", "chosen", *(f"try {number} [%]" for number in range(1, most_tries + 1))]
    lines = []
    for row in rows:
        if row in suite.choices:
            means = [_percent(fmean(scores)) for scores in suite.choices[row].scores]
            missing = [NONE] * (most_tries - len(means))
            lines.append([row, _fields(suite.chosen_fields(row)), *means, *missing])
    return TextTable(head, lines)


def _fields(fields: Mapping[str, Any]) -> str:
    if not fields:
        return "as in the suite"
    return ", ".join(f"{key} = {value}" for key, value in fields.items())


# ---- how far the tiers agree ---------------------------------------------------------------------

AGREEMENT_TITLE = "Do the tiers agree?"

AGREEMENT_EXPLANATION = (
    "For each track, the table compares the mean ranks of the methods in both tiers. Kendall's tau"
    " is 1 for the same order and -1 for the reverse. The value p is the probability that the tau "
    "of a random order is at least as far from 0. Differences that are not significant also change"
    " tau. Further columns therefore count the pairs that differ significantly in both tiers, and"
    " those of them in the same order. The last column names the other pairs, in the order of the"
    " larger tier."
)

AGREEMENT_HEAD = (
    "track",
    "tiers",
    "methods in both",
    "Kendall's tau",
    "p",
    "pairs",
    "significant in both",
    "same order",
    "other order",
)


def agreement_lines(all_standings: Sequence[Standings]) -> list[list[str]]:
    """A line for each track in which two tiers have at least two ranked methods in common."""
    lines = []
    for track in TRACKS:
        tiers = [one for one in all_standings if one.suite.track == track and _is_ranked_tier(one)]
        for smaller, larger in itertools.pairwise(tiers):
            names_of_larger = _mean_ranks(larger)
            common = [name for name in _mean_ranks(smaller) if name in names_of_larger]
            if len(common) > 1:
                tier_names = f"{smaller.suite.tier} and {larger.suite.tier}"
                line = [track, tier_names, str(len(common)), *_tau(smaller, larger, common)]
                lines.append([*line, *_pairs(smaller, larger, common)])
    return lines


def _is_ranked_tier(standings: Standings) -> bool:
    return standings.suite.tier in TIERS and bool(standings.placed)


def _mean_ranks(standings: Standings) -> dict[str, float]:
    return {placed.row.name: placed.rank for placed in standings.placed}


def _tau(smaller: Standings, larger: Standings, common: Sequence[str]) -> tuple[str, str]:
    """Kendall's tau and its p-value; a dash if all ranks of a tier are equal."""
    ranks = _mean_ranks(smaller)
    ranks_of_larger = _mean_ranks(larger)
    # fedstill explain loads this module for the maps, and does not need SciPy.
    from scipy.stats import kendalltau

    tau, p_value = kendalltau(
        [ranks[name] for name in common], [ranks_of_larger[name] for name in common]
    )
    if math.isnan(tau):
        return NONE, NONE
    return f"{tau:.2f}", f"{p_value:.3f}"


def _pairs(smaller: Standings, larger: Standings, common: Sequence[str]) -> list[str]:
    """The number of pairs, of those that differ in both tiers, and of those in the same order; the
    others by name.
    """
    ranks = _mean_ranks(smaller)
    ranks_of_larger = _mean_ranks(larger)
    pairs = list(itertools.combinations(common, 2))
    differing = [pair for pair in pairs if _differ(smaller, *pair) and _differ(larger, *pair)]
    reversed_pairs = []
    for first, second in differing:
        if (ranks[first] < ranks[second]) != (ranks_of_larger[first] < ranks_of_larger[second]):
            above, below = sorted((first, second), key=ranks_of_larger.__getitem__)
            reversed_pairs.append(f"{above} above {below}")
    same_order = len(differing) - len(reversed_pairs)
    names = ", ".join(reversed_pairs) or NONE
    return [str(len(pairs)), str(len(differing)), str(same_order), names]


def _differ(standings: Standings, first: str, second: str) -> bool:
    """Whether two methods are on no common bar."""
    return not any(first in bar and second in bar for bar in standings.bars)


# ---- sentences -----------------------------------------------------------------------------------


def description(standings: Standings) -> str:
    """How many methods and blocks there are, where fields were chosen, and where runs were made."""
    suite = standings.suite
    blocks = f"{counted(len(standings.columns), 'column')} × {len(TEST_SEEDS)} seeds"
    text = f"{counted(len(standings.placed), 'method')}, {blocks}"
    if len(standings.placed) > 1:
        text += f"; critical difference (Nemenyi): {standings.critical_difference:.2f} ranks"
    text += f". The fields were chosen {choosing_place(suite)}."
    if suite.rate_row:
        text += f" Tries without a learning rate use the one chosen for {suite.rate_row}."
    return text + _processors(standings.rows_by_processor, cpu_unit(standings))


def choosing_place(suite: Suite) -> str:
    """Where the fields of a suite's rows were chosen."""
    place = f"on the column {suite.choosing_suite.choosing_column}"
    if suite.choices_from is None:
        return place
    return f"in {suite.choices_from.name}, {place}"


def _processors(rows_by_processor: Mapping[str, Sequence[str]], unit: str) -> str:
    """A sentence on the processors, and on the rows that were made on a different one."""
    (usual, _), *others = rows_by_processor.items()
    if not others:
        return f" Processor: {usual}." if usual else ""
    exceptions = "; ".join(
        f"{', '.join(rows)} on {name or 'an unknown processor'}" for name, rows in others
    )
    return (
        f" Processor: {usual or 'unknown'}; {exceptions}. Processors round differently, which can "
        f"change a run as much as another seed. CPU times are relative to {unit} on the same "
        "processor."
    )


GROUPS_EXPLANATION = (
    "Groups of methods that do not differ significantly, because their mean ranks are less than "
    "the critical difference apart"
)


def bar_texts(standings: Standings) -> list[str]:
    """The groups of methods whose mean ranks differ by less than the critical difference."""
    return [", ".join(names) for names in standings.bars]


# ---- output --------------------------------------------------------------------------------------


def terminal_tables(standings: Standings) -> Iterator[RenderableType]:
    """A suite's tables in a terminal."""
    yield Text(f"\n{standings.suite.recipe.paper}", style="bold")
    yield Text(description(standings))
    for table in (standing_table_by_name(standings), cell_table(standings)):
        yield terminal.PlainTable(table.head, table.lines)
    if standings.bars:
        groups = "; ".join(bar_texts(standings))
        yield Text(f"mean ranks less than the critical difference apart: {groups}")
    if standings.missing:
        yield Text(f"no entry yet: {', '.join(standings.missing)}")


def markdown_tables(standings: Standings) -> str:
    """A suite's tables in Markdown."""
    parts = [description(standings), standing_table(standings).markdown().rstrip()]
    has_difference = any(placed.difference for placed in standings.placed)
    if len(standings.columns) > 1 or has_difference:
        parts.append(cell_table(standings).markdown().rstrip())
    if standings.bars:
        bullets = "\n".join(f"- {text}" for text in bar_texts(standings))
        parts.append(f"{GROUPS_EXPLANATION}:\n\n{bullets}")
    if standings.missing:
        parts.append(f"No entry yet: {', '.join(standings.missing)}.")
    return "\n\n".join(parts) + "\n"


def markdown_agreement(all_standings: Sequence[Standings]) -> list[str]:
    """A Markdown section on how far the tiers agree; empty if no track has two tiers."""
    lines = agreement_lines(all_standings)
    if not lines:
        return []
    table = TextTable(AGREEMENT_HEAD, lines).markdown()
    return [f"## {AGREEMENT_TITLE}\n\n{AGREEMENT_EXPLANATION}\n\n{table}"]


FILE_MARKS = {
    "table.csv": re.compile(rb"\Asuite,version,"),
    "standings.csv": re.compile(rb"\Asuite,#,"),
    "table.md": re.compile(rb"\A## .*mean rank", re.DOTALL),
    "table.tex": re.compile(rb"\A% .*mean rank", re.DOTALL),
}
"""The names of the files, and what all such files contain."""


def write_ranking_files(all_standings: Sequence[Standings], folder: Path) -> list[Path]:
    """Write table.csv, standings.csv, table.md and table.tex; the paths.

    Raises ConfigError if another file has one of these names; then nothing is written.
    """
    make_folder(folder)
    for name, mark in FILE_MARKS.items():
        check_may_overwrite(folder / name, Kind("a table of the ranking", "", mark))
    runs = run_table(all_standings)
    lines: list[list[str]] = []
    sections = markdown_agreement(all_standings)
    latex_tables = []
    for standings in all_standings:
        name = standings.suite.name
        table = standing_table(standings)
        lines += [[name, *line] for line in table.lines]
        sections.append(f"## {name}\n\n{markdown_tables(standings)}")
        latex_tables.append(f"% {name}\n{table.latex()}")
    texts = {
        "table.csv": runs.csv(),
        "standings.csv": TextTable(["suite", *HEAD], lines).csv(),
        "table.md": "\n".join(sections),
        "table.tex": "\n".join(latex_tables),
    }
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


# ---- numbers as text -----------------------------------------------------------------------------


def _difference_interval(difference: Difference | None) -> str:
    if difference is None or difference.pairs < 2:
        return NONE
    return _interval(100 * difference.low, 100 * difference.high, "+.1f")


def _interval(low: float, high: float, number_format: str) -> str:
    if math.isnan(low):
        return NONE
    return f"{low:{number_format}} to {high:{number_format}}"


def _percent(share: float) -> str:
    return _number(100 * share, ".1f")


def _megabytes(size: float) -> str:
    return _number(size / 1e6, ".1f")


def _number(value: float, number_format: str) -> str:
    if math.isnan(value):
        return NONE
    return f"{value:{number_format}}"
