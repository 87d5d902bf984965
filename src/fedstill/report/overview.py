"""The sections that list all runs: their results, the refused replies, and their settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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
from fedstill.report.page import Report
from fedstill.report.summary import NONE, Column, Row, best_first, columns, order_note, rows
from fedstill.report.table_files import differences, differences_table
from fedstill.running.journal import Event
from fedstill.running.runs import (
    UNSET,
    Group,
    Run,
    differing,
    differing_schedule,
    schedule_cells,
    value_text,
)

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
    about = f"{ABOUT} {order_note(ranked_by)}".strip()
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
    text = "; ".join(f"{measure.title}: {measure.description}" for measure in measures)
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


MOST_REASONS = 12
"""How many reasons of a group have a line of their own."""
MOST_IDS = 10
"""How many clients, or rounds, a line names."""


def failures(report: Report) -> Section | None:
    """Replies that were refused, by reason; None if there are none."""
    lines: list[list[Cell]] = []
    for group in report.groups:
        lines.extend(_reasons(group, group_label(group, report.style)))
    if not lines:
        return None
    head = ["", "reason", "times", "clients", "rounds"]
    about = _about_failures(report.groups)
    return Section("failures", "Failures", [Paragraph(about), Table(head, lines, "wide")])


def _reasons(group: Group, label: Block) -> Iterable[list[Cell]]:
    """A line for each of the most frequent reasons of a group, and one for all others."""
    events = [event for run in group.runs for event in _refused_events(run)]
    counts = Counter(str(event["refused"]) for event in events)
    frequent = counts.most_common(MOST_REASONS)
    for reason, count in frequent:
        of_reason = [event for event in events if str(event["refused"]) == reason]
        clients = _ids(of_reason, "client")
        rounds = _ids(of_reason, "round")
        yield [label, reason, str(count), clients, rounds]
    if len(counts) > len(frequent):
        more = f"{len(counts) - len(frequent)} more reasons"
        times = counts.total() - sum(count for _, count in frequent)
        yield [label, more, str(times), NONE, NONE]


def _about_failures(groups: Iterable[Group]) -> str:
    """That replies were refused, and whether the rounds went on."""
    ended = set()
    for group in groups:
        for run in group.runs:
            ended |= {event["round"] <= len(run.rounds) for event in _refused_events(run)}
    text = "Replies that were refused, and clients that failed."
    if ended == {True}:
        return f"{text} The rounds went on without them."
    if True in ended:
        return f"{text} The rounds that ended went on without them."
    return text


def _refused_events(run: Run) -> list[Event]:
    return [event for event in run.clients if "refused" in event]


def _ids(events: Iterable[Event], key: str) -> str:
    """The clients, or the rounds, of some events; of many the first, and their number."""
    ids = sorted({int(event.get(key, -1)) for event in events})
    listed = ", ".join(map(str, ids[:MOST_IDS]))
    if len(ids) > MOST_IDS:
        listed += f" … ({len(ids)})"
    return listed


# Settings, and where the runs are


def settings(report: Report) -> Section:
    """The settings in which groups differ; folded, those that are equal, and all runs."""
    by_group = [group.settings for group in report.groups]
    keys = differing(by_group)
    equal = [[key, value_text(value)] for key, value in by_group[0].items() if key not in keys]
    blocks: list[Block] = []
    if keys:
        head: list[Cell] = ["setting"]
        head += [group_label(group, report.style) for group in report.groups]
        body = [[key, *(value_text(values.get(key, UNSET)) for values in by_group)] for key in keys]
        blocks.append(Paragraph("The settings in which the groups differ."))
        blocks.append(Table(head, body, "settings"))
    elif len(report.groups) == 1:
        blocks.append(Paragraph("There is one group only: its runs differ at most in their seed."))
    equal_table = Table(["setting", "value"], equal, "settings")
    blocks.append(Folded(f"{len(equal)} settings that are equal in all runs", [equal_table]))
    blocks.append(Folded("All runs", [_runs(report.groups)]))
    return Section("settings", "Settings", blocks)


def _runs(groups: Iterable[Group]) -> Table:
    head = ["directory", "group", "seed", "rounds", "state"]
    body = []
    for group in groups:
        body += [_run_line(run, group, "") for run in group.runs]
        note = ", left out: another run has this seed"
        body += [_run_line(run, group, note) for run in group.repeats]
    return Table(head, body, "settings")


def _run_line(run: Run, group: Group, note: str) -> list[str]:
    state = "unfinished"
    if run.finished:
        state = "finished"
    if run.stop_reason:
        state += f", stopped early: {run.stop_reason}"
    if run.best is not None:
        state += f", round {run.best.round} selected by {run.best.criterion}"
    reached = 0
    if run.rounds:
        reached = run.rounds[-1]["round"]
    rounds = f"{reached} of {run.planned_rounds}"
    return [str(run.display_path), group.label, str(run.seed), rounds, f"{state}{note}"]
