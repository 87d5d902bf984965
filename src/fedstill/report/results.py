"""The section with the numbers of all groups, and their differences to one group."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.report.blocks import (
    Block,
    Cell,
    ColumnHead,
    Folded,
    Legend,
    MeanCell,
    Paragraph,
    Section,
    Table,
    group_label,
)
from fedstill.report.sections import Report
from fedstill.report.summary import Column, Row, best_first, columns, rows, said_of_order
from fedstill.report.table_files import differences, differences_table
from fedstill.running.runs import Group, differing_schedule, schedule_cells

ABOUT = (
    "One line for each group of runs that differ only in their seed: mean ± one standard deviation "
    "over seeds."
)
NO_ROUND = "No run has finished a round yet."


def results(report: Report) -> Section:
    """The table of all measures, and the differences to one of the groups."""
    ordered, ranked_by = best_first(report.groups)
    lines = rows(ordered)
    measures = columns(lines)
    about = f"{ABOUT} {said_of_order(ranked_by)}".strip()
    return Section(
        "results",
        "Results",
        [
            Paragraph(about),
            _table(report, ordered, lines, measures),
            Legend(_explained(measures)),
            _differences(report),
        ],
    )


def _table(
    report: Report, ordered: Sequence[Group], lines: Sequence[Row], measures: Sequence[Column]
) -> Table:
    schedule = differing_schedule(report.groups)
    units = [ColumnHead(measure.title, measure.unit) for measure in measures]
    head: list[Cell] = ["", *schedule.values(), "seeds", *units]
    body = []
    for group, line in zip(ordered, lines, strict=True):
        label = group_label(group, report.style, line.note)
        numbers = [_cell(line.text(measure)) for measure in measures]
        body.append([label, *schedule_cells(group, schedule), line.seeds, *numbers])
    return Table(head, body, "numbers wide")


def _cell(text: str) -> Cell:
    mean, sign, deviation = text.partition(" ± ")
    if not sign:
        return mean
    return MeanCell(mean, deviation)


def _explained(measures: Sequence[Column]) -> str:
    """What each column of the table is, as a sentence."""
    if not measures:
        return NO_ROUND
    text = "; ".join(f"{measure.title}: {measure.says}" for measure in measures)
    return f"{text[0].upper()}{text[1:]}."


def _differences(report: Report) -> Block | None:
    """Differences to the baseline; None where no other group shares two seeds with it."""
    baseline = report.baseline
    if not any(_are_comparable(group, baseline) for group in report.groups):
        return None
    about = (
        f"How far each line is from {baseline.label}, paired by seed, with the 95 % interval of "
        "the mean and p of the paired t test. An interval that holds 0 does not tell two methods "
        "apart."
    )
    apart = differences_table(differences(report.groups, baseline))
    table = Table(apart.head, apart.lines, "numbers wide")
    return Folded(f"Differences to {baseline.label}", [Paragraph(about), table])


def _are_comparable(group: Group, baseline: Group) -> bool:
    if group is baseline:
        return False
    common_seeds = set(group.seeds) & set(baseline.seeds)
    return len(common_seeds) > 1
