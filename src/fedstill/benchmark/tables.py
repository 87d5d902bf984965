"""The standings as text: the same numbers for the page, Markdown, CSV and LaTeX; and all runs with
all digits.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fedstill.benchmark import standings as agreement
from fedstill.benchmark.scoring import NUMBERS, Score
from fedstill.benchmark.standings import Placed, RankedRow, Standings
from fedstill.benchmark.suites import TEST_SEEDS, Suite
from fedstill.core.errors import CorruptFile
from fedstill.core.files import make_folder, write_whole
from fedstill.metrics.ranks import Difference, nemenyi_width
from fedstill.report.summary import NONE
from fedstill.report.table_files import csv_text, latex, markdown

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


def standing_head(standings: Standings) -> list[str]:
    """The table's head; what the difference is to, and whose CPU seconds are 1."""
    unit = f"CPU × {cpu_unit(standings)}"
    return [h.replace("Δ", f"Δ to {standings.suite.against}").replace("CPU", unit) for h in HEAD]


def cpu_unit(standings: Standings) -> str:
    """The row over whose CPU seconds the others' are: FedAvg; where it is not ranked, what
    differences are to.
    """
    return (
        "FedAvg"
        if any(placed.row.name == "FedAvg" for placed in standings.placed)
        else standings.suite.against
    )


def chosen_where(suite: Suite) -> str:
    """Where the fields of a suite's rows were chosen."""
    other = f"in {suite.there.name}, " if suite.there else ""
    return f"{other}on the column {suite.chooses_in.column}"


def standing_lines(standings: Standings) -> list[list[str]]:
    """A line a ranked row, then the bounds, which have no rank."""
    return [_line(p) for p in standings.placed] + [
        _bound(standings, row) for row in standings.bounds
    ]


def _line(placed: Placed) -> list[str]:
    apart = placed.apart
    return [
        str(placed.place),
        marked_name(placed.row),
        f"{placed.rank:.2f}",
        _ends(*placed.rank_ends, 2),
        f"{100 * placed.accuracy:.1f}",
        f"{100 * placed.learned:.1f}",
        _or_none(100 * placed.kept, ".1f"),
        f"{100 * apart.mean:+.1f}" if apart else NONE,
        _points(apart),
        f"{placed.p_holm:.3f}" if apart else NONE,
        _or_none(100 * placed.share, "+.0f"),
        _or_none(100 * placed.wins, ".0f"),
        _or_none(placed.cpu, ".2f"),
        _or_none(placed.sent / 1e6, ".1f"),
        str(placed.row.tries),
        placed.row.status,
    ]


def _bound(standings: Standings, row: RankedRow) -> list[str]:
    columns = [c for c in standings.columns if row.column(c)]
    numbers = [*(row.mean(n, columns) for n in ("accuracy", "learned")), row.kept(columns)]
    of = "" if len(columns) == len(standings.columns) else f" ({', '.join(columns)})"
    shown = [
        NONE,
        f"{marked_name(row)}{of}",
        NONE,
        NONE,
        *(_or_none(100 * v, ".1f") for v in numbers),
    ]
    return [
        *shown,
        *[NONE] * (len(HEAD) - 10),
        _or_none(row.mean("sent", columns) / 1e6, ".1f"),
        NONE,
        row.status,
    ]


def marked_name(row: RankedRow) -> str:
    """A row's name, marked if a run of it diverged."""
    return f"{row.name} †" if row.diverged else row.name


def cell_lines(standings: Standings) -> tuple[list[str], list[list[str]]]:
    """By column: accuracy as mean ± sample sd over seeds, and the difference with Student's
    interval.
    """
    head = [
        "method",
        *(h for c in standings.columns for h in (f"{c} [%]", f"Δ to {standings.suite.against}")),
    ]
    rows = [p.row for p in standings.placed] + list(standings.bounds)
    return head, [
        [marked_name(row), *(x for c in standings.columns for x in _cell(standings, row, c))]
        for row in rows
    ]


def _cell(standings: Standings, row: RankedRow, column: str) -> tuple[str, str]:
    value, apart = standings.cell(row, column), standings.difference(row, column)
    if apart is None or row in standings.bounds:
        return (value.text(100, 1) if value else NONE), NONE
    return (value.text(100, 1) if value else NONE), f"{100 * apart.mean:+.1f} ({_points(apart)})"


def run_lines(every: Sequence[Standings]) -> tuple[list[str], list[list[str]]]:
    """A line a run with all digits: from these everything else can be computed anew."""
    head = [
        "suite",
        "version",
        "method",
        "tries",
        "fields",
        "column",
        "seed",
        *NUMBERS,
        "tasks",
        "diverged",
        "replayed",
        "processor",
    ]
    lines = []
    for one in every:
        for row in one.rows:
            fields = json.dumps(dict(row.fields), sort_keys=True)
            where = [one.suite.name, str(one.suite.version), row.name, str(row.tries), fields]
            for (column, seed), score in row.scores.items():
                numbers = ["" if v != v else repr(v) for v in score.table.values()]
                own, why = row.tasks.get((column, seed)), row.diverged.get((column, seed), "")
                told = [json.dumps(own) if own else "", why, row.status, row.processor]
                lines.append([*where, column, str(seed), *numbers, *told])
    return head, lines


def rows_from(text: str) -> dict[str, list[RankedRow]]:
    """The rows of each suite, from the text of table.csv; raises CorruptFile for one that is no
    such table.
    """
    by_row: dict[tuple[str, str], list[dict[str, str]]] = {}
    try:
        for line in csv.DictReader(io.StringIO(text)):
            by_row.setdefault((line["suite"], line["method"]), []).append(line)
        suites: dict[str, list[RankedRow]] = {}
        for (suite, name), lines in by_row.items():
            of = {(line["column"], int(line["seed"])): line for line in lines}
            scores = {run: Score.of({k: line[k] for k in NUMBERS}) for run, line in of.items()}
            diverged = {run: line["diverged"] for run, line in of.items() if line["diverged"]}
            tasks = {run: json.loads(line["tasks"]) for run, line in of.items() if line["tasks"]}
            fields, tries, status = (lines[0][key] for key in ("fields", "tries", "replayed"))
            made_on = lines[0]["processor"]
            row = RankedRow(
                name, scores, json.loads(fields), int(tries), diverged, status, tasks, made_on
            )
            suites.setdefault(suite, []).append(row)
        return suites
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFile(f"this is no table of the ranking's runs: {error}") from error


def choice_lines(suite: Suite, rows: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of what was tried for some rows: the mean score of each try, and the fields
    that were chosen.
    """
    head = [
        "method",
        "chosen",
        *(f"try {i + 1} [%]" for i in range(max(len(suite.tries[row]) for row in rows))),
    ]
    lines = []
    for row in (r for r in rows if r in suite.chosen):
        means = [f"{100 * fmean(own):.1f}" for own in suite.chosen[row].scores]
        fields = (
            ", ".join(f"{k} = {v}" for k, v in suite.settings_chosen(row).items())
            or "as in the suite"
        )
        lines.append([row, fields, *means, *[NONE] * (len(head) - 2 - len(means))])
    return head, lines


def about(standings: Standings) -> str:
    """How many methods and blocks, how wide Nemenyi's intervals would be, where fields were chosen
    and whose learning rate tries have, and where the rows were made.
    """
    s, many = standings, len(standings.placed)
    wide = f"; Nemenyi's width is {nemenyi_width(many, s.blocks):.2f} ranks" if many > 1 else ""
    n = len(s.columns)
    columns = f"{n} column{'s' * (n > 1)} × {len(TEST_SEEDS)} seeds"
    rate = (
        f" A try that sets no learning rate has the one that {s.suite.rate_of} chose."
        if s.suite.rate_of
        else ""
    )
    chosen = f" Fields were chosen {chosen_where(s.suite)}."
    return (
        f"{many} method{'s' * (many != 1)}, "
        f"{columns}{wide}.{chosen}{rate}{_made_on(s.processors, cpu_unit(s))}"
    )


def _made_on(processors: Mapping[str, Sequence[str]], unit: str) -> str:
    """A sentence on the processors, and which rows are not of the usual one."""
    (usual, _), *others = processors.items()
    if not others:
        return f" Made on {usual}." if usual else ""
    each = "; ".join(
        f"on {name or 'one that is not known'}: {', '.join(rows)}" for name, rows in others
    )
    return (
        f" Made on {usual or 'a processor that is not known'}; {each}. Processors round "
        "differently, which can change a"
        f" run as much as another seed does. CPU seconds are compared only with those of {unit} on "
        "the same processor."
    )


def joined(standings: Standings) -> list[str]:
    """The groups of methods of which no two can be told apart by rank."""
    return [", ".join(group) for group in standings.bars]


def write_ranking_files(every: Sequence[Standings], folder: Path) -> list[Path]:
    """Write table.csv, standings.csv, table.md and table.tex; the paths."""
    make_folder(folder)
    head, lines = run_lines(every)
    listed = [
        ["suite", *HEAD],
        *([s.suite.name, *line] for s in every for line in standing_lines(s)),
    ]
    texts = {
        "table.csv": csv_text(head, lines),
        "standings.csv": csv_text(listed[0], listed[1:]),
        "table.md": "\n".join(
            [*agreement_text(every), *(f"## {s.suite.name}\n\n{tables_text(s)}" for s in every)]
        ),
        "table.tex": "\n".join(
            f"% {s.suite.name}\n{latex(standing_head(s), standing_lines(s))}" for s in every
        ),
    }
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


def agreement_text(every: Sequence[Standings]) -> list[str]:
    """A section in Markdown on how far the tiers agree; none where no track has two."""
    lines = agreement.agreement_lines(every)
    return (
        [f"## {agreement.TITLE}\n\n{agreement.MEANS}\n\n{markdown(agreement.HEAD, lines)}"]
        if lines
        else []
    )


def tables_text(standings: Standings) -> str:
    """A suite's tables in Markdown."""
    parts = [
        about(standings),
        markdown(standing_head(standings), standing_lines(standings)).rstrip(),
    ]
    if len(standings.columns) > 1 or any(p.apart for p in standings.placed):
        parts.append(markdown(*cell_lines(standings)).rstrip())
    if groups := joined(standings):
        parts.append(
            "Cannot be told apart by rank:\n\n" + "\n".join(f"- {group}" for group in groups)
        )
    if standings.missing:
        parts.append(f"No entry yet: {', '.join(standings.missing)}.")
    return "\n\n".join(parts) + "\n"


def _points(apart: Difference | None) -> str:
    return (
        NONE
        if apart is None or apart.pairs < 2
        else _ends(100 * apart.low, 100 * apart.high, 1, "+")
    )


def _ends(low: float, high: float, digits: int, sign: str = "") -> str:
    return NONE if math.isnan(low) else f"{low:{sign}.{digits}f} to {high:{sign}.{digits}f}"


def _or_none(value: float, form: str) -> str:
    return NONE if math.isnan(value) else f"{value:{form}}"
