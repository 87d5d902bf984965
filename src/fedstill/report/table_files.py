"""Results as files for other programs: a comparison's table and its differences paired by seed, as
CSV with all digits, Markdown and LaTeX; and finished runs for TensorBoard.

TensorBoard gets the same numbers that a tracker is told while a run goes on.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import ConfigError
from fedstill.core.files import (
    TABLE_KINDS,
    check_may_overwrite,
    disk_error,
    make_folder,
    neutral,
    write_whole,
)
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.report.summary import NONE, Column, best_first, columns, rows
from fedstill.running.journal import VERSIONS, read_journal
from fedstill.running.runs import (
    JOURNAL,
    Group,
    Run,
    Spread,
    differing_schedule,
    find,
    label_runs,
    schedule_cells,
)
from fedstill.running.trackers import AboutRun, RoundNumbers, TensorBoard, Tracker

# Tables as text.


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


def write_tables(compared: Sequence[Group], folder: Path, against: str = "") -> list[Path]:
    """Write results and differences, three files each; the paths.

    against: the label of the group that all others are compared with; empty: the first. Raises
    ConfigError if there is none of that label, and before anything is written over a file of these
    names that is no such table.
    """
    results = results_table(compared)
    results_in_full = results_in_all_digits(compared)
    paired = differences(compared, group_named(against, compared))
    apart = differences_table(paired)
    apart_in_full = differences_in_all_digits(paired)
    texts = {
        "results.csv": csv_text(results_in_full.head, results_in_full.lines),
        "results.md": markdown(results.head, results.lines),
        "results.tex": latex(results.head, results.lines),
        "differences.csv": csv_text(apart_in_full.head, apart_in_full.lines),
        "differences.md": markdown(apart.head, apart.lines),
        "differences.tex": latex(apart.head, apart.lines),
    }
    make_folder(folder)
    for name in texts:
        check_may_overwrite(folder / name, TABLE_KINDS[Path(name).suffix])
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


# The results: a line for each group.


def results_table(compared: Sequence[Group]) -> TextTable:
    """Mean ± sample standard deviation over seeds; in the order of ``best_first``."""
    ordered, _ = best_first(compared)
    schedule = differing_schedule(compared)
    summaries = rows(ordered)
    measured = columns(summaries)
    lines = []
    for group_of_line, row in zip(ordered, summaries, strict=True):
        label = f"{row.label} ({row.note})" if row.note else row.label
        numbers = [row.text(column) for column in measured]
        lines.append([label, *schedule_cells(group_of_line, schedule), row.seeds, *numbers])
    titles = [f"{column.title} [{column.unit}]" for column in measured]
    return TextTable(["", *schedule.values(), "seeds", *titles], lines)


def results_in_all_digits(compared: Sequence[Group]) -> TextTable:
    """The results with three columns for each number: the mean, the standard deviation, and how
    many seeds have it.

    A single seed has no standard deviation: its cell is empty.
    """
    ordered, _ = best_first(compared)
    schedule = differing_schedule(compared)
    summaries = rows(ordered)
    measured = columns(summaries)
    lines = []
    for group_of_line, row in zip(ordered, summaries, strict=True):
        cells = [row.label, row.note, *schedule_cells(group_of_line, schedule)]
        for column in measured:
            cells += _digits_of_spread(row.values[column.key], column.scale)
        lines.append(cells)
    head = ["label", "note", *schedule.values()]
    for column in measured:
        head += [f"{column.title} [{column.unit}] {part}" for part in ("mean", "sd", "seeds")]
    return TextTable(head, lines)


def _digits_of_spread(spread: Spread | None, scale: float) -> list[str]:
    """Mean, standard deviation and number of seeds."""
    if spread is None:
        return ["", "", ""]
    std = repr(scale * spread.std) if spread.runs > 1 else ""
    return [repr(scale * spread.mean), std, str(spread.runs)]


# The differences between groups, paired by seed.


@dataclass(frozen=True, kw_only=True)
class GroupDifference:
    """How far a group is from another one in a number, over the seeds that both have."""

    group: Group
    base: Group
    column: Column
    paired: Difference


def group_named(label: str, compared: Sequence[Group]) -> Group:
    """The group of a label, the first where it is empty; raises ConfigError if there is none."""
    if not label:
        return compared[0]
    by_label = {group.label: group for group in reversed(compared)}
    if label not in by_label:
        labels = ", ".join(group.label for group in compared)
        raise ConfigError(f"there is no {label!r} to compare with; choose one of {labels}")
    return by_label[label]


def differences(compared: Sequence[Group], base: Group) -> list[GroupDifference]:
    """Each other group's difference to the base in each number; none without a common seed."""
    measured = columns(rows(compared))
    apart = []
    for group_apart in compared:
        if group_apart is base:
            continue
        for column in measured:
            ours = _by_seed(group_apart, column.key)
            paired = paired_difference(ours, _by_seed(base, column.key))
            if paired:
                apart.append(
                    GroupDifference(group=group_apart, base=base, column=column, paired=paired)
                )
    return apart


def _by_seed(group: Group, key: str) -> dict[int, float]:
    summaries = {run.seed: run.numbers.summary for run in group.started}
    return {seed: summary[key] for seed, summary in summaries.items() if key in summary}


def differences_table(apart: Sequence[GroupDifference]) -> TextTable:
    """The mean of each difference, its 95 % interval, and the p value of the paired t test."""
    lines = []
    for one in apart:
        scale = one.column.scale
        mean = f"{scale * one.paired.mean:+.2f}"
        interval = p = NONE
        if one.paired.pairs > 1:
            interval = f"{scale * one.paired.low:+.2f} to {scale * one.paired.high:+.2f}"
            p = f"{one.paired.p:.3f}"
        names = [f"{one.group.label} − {one.base.label}", f"{one.column.title} [{one.column.unit}]"]
        lines.append([*names, mean, interval, p, str(one.paired.pairs)])
    return TextTable(["", "number", "difference", "95 % interval", "p", "seeds"], lines)


def differences_in_all_digits(apart: Sequence[GroupDifference]) -> TextTable:
    """The differences with the ends of their 95 % intervals in columns of their own."""
    lines = []
    for one in apart:
        scale = one.column.scale
        ends = ["", "", ""]
        if one.paired.pairs > 1:
            ends = [repr(scale * one.paired.low), repr(scale * one.paired.high), repr(one.paired.p)]
        names = [one.group.label, one.base.label, one.column.title, one.column.unit]
        lines.append([*names, repr(scale * one.paired.mean), *ends, str(one.paired.pairs)])
    head = ["compared", "with", "number", "unit", "difference", "low", "high", "p", "seeds"]
    return TextTable(head, lines)


# Formats of text tables.


NUMBER = r"[-+]?[\d.]+"
"""A number in a cell, whose sign LaTeX prints as such in mathematics alone."""


def csv_text(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as CSV.

    >>> print(csv_text(["a", "b"], [["1", "x, y"]]), end="")
    a,b
    1,"x, y"
    """
    out = io.StringIO()
    rows = [[neutral(cell, "csv") for cell in row] for row in (head, *lines)]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are numbers.

    >>> print(markdown(["", "F [%]"], [["a|b", "1.0 ± 0.2"]]), end="")
    |  | F [%] |
    |---|---:|
    | a\\|b | 1.0 ± 0.2 |
    """
    rows = [" | ".join(neutral(cell, "markdown") for cell in row) for row in (head, *lines)]
    titles, *body = [f"| {row} |" for row in rows]
    alignment = "|".join(["---", *["---:"] * (len(head) - 1)])
    return "\n".join([titles, f"|{alignment}|", *body, ""])


def latex(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in LaTeX, for ``\\usepackage{booktabs}``.

    >>> print(latex(["", "F [%]"], [["fed_a", "1.0 ± 0.2"]]), end="")
    \\begin{tabular}{lr}
    \\toprule
     & F [\\%] \\\\
    \\midrule
    fed\\_a & $1.0 \\pm 0.2$ \\\\
    \\bottomrule
    \\end{tabular}
    """
    rows = [" & ".join(map(_in_latex, row)) for row in (head, *lines)]
    titles, *body = [rf"{row} \\" for row in rows]
    alignment = "l" + "r" * (len(head) - 1)
    begin = rf"\begin{{tabular}}{{{alignment}}}"
    table = [begin, r"\toprule", titles, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*table, ""])


def _in_latex(cell: str) -> str:
    if re.fullmatch(rf"{NUMBER} ± {NUMBER}", cell):
        return cell.replace("±", r"\pm").join("$$")
    if re.fullmatch(rf"{NUMBER}( to {NUMBER})?", cell):
        return re.sub(r"[-+][\d.]+", r"$\g<0>$", cell)
    text = neutral(cell, "latex")
    return text.replace("±", r"$\pm$").replace("−", "$-$").replace("–", "--")


# Runs for TensorBoard.


def export_tensorboard(directories: Sequence[Path], out: Path) -> list[Path]:
    """Write the numbers of the runs in (or below) some directories as TensorBoard's, a folder a
    run; the folders.

    Raises ConfigError if there is no run, if ``out`` holds anything (events would be doubled) or
    cannot be written, or if TensorBoard is not installed.
    """
    return export(directories, out, TensorBoard)


def export(
    directories: Sequence[Path], out: Path, tracker: Callable[[Path], Tracker]
) -> list[Path]:
    """Tell each run to a tracker of its own, made for a folder under ``out``.

    Raises ConfigError for a folder that is not empty, or cannot be written.
    """
    runs = find(directories)
    folders = [out / name for name in _folder_names(runs)]
    try:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty; name a new directory, so that no event is there twice"
            )
        for run, folder in zip(runs, folders, strict=True):
            _send(run, folder.name, tracker(folder))
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from disk_error(error, out)
    return folders


def _send(run: Run, name: str, tracker: Tracker) -> None:
    versions = {key: ", ".join(run.versions(key)) for key in VERSIONS if run.versions(key)}
    tracker.ready()
    tracker.begin(AboutRun(run.folder, name, name, run.seed, run.settings, versions), {}, -1)
    numbers = RoundNumbers(run.settings)
    for event in read_journal(run.folder / JOURNAL):
        of_round = numbers.take(event)
        if of_round:
            tracker.log(*of_round)
    tracker.end("finished" if run.finished else "stopped", {})


def _folder_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run's folder: its group's label and its seed."""
    labels = {id(run): members.label for members in label_runs(runs) for run in members.runs}
    names: list[str] = []
    for run in runs:
        label = re.sub(r"[^\w\-.=, ]", "-", labels[id(run)]).replace(", ", "_")
        name = f"{label}-seed{run.seed}"
        if name in names:
            name = f"{name}-{len(names)}"
        names.append(name)
    return names
