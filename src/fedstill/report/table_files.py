"""Results as files for other programs: a comparison's table and its differences paired by seed, as
CSV with all digits, Markdown and LaTeX; and finished runs for TensorBoard.

TensorBoard gets the same numbers that a tracker is told while a run goes on.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedstill.core.errors import ConfigError
from fedstill.core.files import OF_TABLES, as_named, make_folder, refuse_other_kind, write_whole
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.report.summary import NONE, Column, best_first, columns, rows
from fedstill.running.groups import Group, differing_schedule, group, schedule_cells
from fedstill.running.journal import VERSIONS, read_journal
from fedstill.running.runs import JOURNAL, Run, find
from fedstill.running.trackers import AboutRun, TensorBoard, Tracker
from fedstill.running.tracking import RoundNumbers

IN_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
}
"""What LaTeX reads as a command, and what it prints as the sign."""

NUMBER = r"[-+]?[\d.]+"
"""A number in a cell, whose sign LaTeX prints as such in mathematics alone."""

DIFFERENCE = ("difference", "low", "high", "p", "seeds")
"""What is said of a difference: mean, ends of its 95 % interval, p of the paired t test, how many
seeds both have.
"""


def write_tables(compared: Sequence[Group], folder: Path, against: str = "") -> list[Path]:
    """Write results and differences, three files each; the paths.

    against: the label of the group that all others are compared with; empty: the first. Raises
    ConfigError if there is none of that label, and before anything is written over a file of these
    names that is no such table.
    """
    base = group_named(against, compared)
    head, lines = result_lines(compared)
    apart = list(differences(compared, base))
    texts = {
        "results.csv": csv_text(*_wide(compared)),
        "results.md": markdown(head, lines),
        "results.tex": latex(head, lines),
        "differences.csv": csv_text(["compared", "with", "number", "unit", *DIFFERENCE], apart),
        "differences.md": markdown(*difference_lines(apart)),
        "differences.tex": latex(*difference_lines(apart)),
    }
    make_folder(folder)
    for name in texts:
        refuse_other_kind(folder / name, OF_TABLES[Path(name).suffix])
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


def group_named(label: str, compared: Sequence[Group]) -> Group:
    """The group of a label, the first where it is empty; raises ConfigError if there is none."""
    if label and label not in {g.label for g in compared}:
        raise ConfigError(
            f"there is no {label!r} to compare with; choose one of "
            f"{', '.join(g.label for g in compared)}"
        )
    return next(g for g in compared if g.label == (label or compared[0].label))


def result_lines(compared: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table: mean ± sample standard deviation over seeds; in the order of
    ``best_first``.
    """
    ordered = best_first(compared)[0]
    schedule = differing_schedule(compared)
    lines = rows(ordered)
    shown = columns(lines)
    head = ["", *schedule.values(), "seeds", *(f"{m.title} [{m.unit}]" for m in shown)]
    out = []
    for one, row in zip(ordered, lines, strict=True):
        label = _named(row.label, row.note)
        cells = [row.text(m) for m in shown]
        out.append([label, *schedule_cells(one, schedule), row.seeds, *cells])
    return head, out


def differences(compared: Sequence[Group], base: Group) -> Iterator[list[str]]:
    """Of each other group and each number: label, the base's, the number, its unit, and
    ``DIFFERENCE``, all digits.
    """
    shown = columns(rows(compared))
    for other_group in (g for g in compared if g is not base):
        for column in shown:
            if apart := difference(other_group, base, column):
                yield [
                    other_group.label,
                    base.label,
                    column.title,
                    column.unit,
                    *_digits(apart, column.scale),
                ]


def difference(group: Group, base: Group, column: Column) -> Difference | None:
    """How far a group is from another in one number, paired by seed; None without a common seed."""
    return paired_difference(_by_seed(group, column.key), _by_seed(base, column.key))


def _by_seed(group: Group, key: str) -> dict[int, float]:
    summaries = {run.seed: run.numbers.summary for run in group.started}
    return {seed: summary[key] for seed, summary in summaries.items() if key in summary}


def _digits(apart: Difference, scale: float) -> list[str]:
    ends = (
        ["", "", ""]
        if apart.pairs < 2
        else [repr(scale * apart.low), repr(scale * apart.high), repr(apart.p)]
    )
    return [repr(scale * apart.mean), *ends, str(apart.pairs)]


def difference_lines(lines: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table that people read, from those of ``differences``."""
    head = ["", "number", "difference", "95 % interval", "p", "seeds"]
    out = []
    for one, base, number, unit, mean, low, high, p, seeds in lines:
        interval = f"{float(low):+.2f} to {float(high):+.2f}" if low else NONE
        shown = f"{float(mean):+.2f}", interval, f"{float(p):.3f}" if p else NONE
        out.append([f"{one} − {base}", f"{number} [{unit}]", *shown, seeds])
    return head, out


def _wide(compared: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """The results with a column for each number: means, standard deviations and how many seeds have
    it, all digits.

    A single seed has no standard deviation: its cell is empty.
    """
    ordered = best_first(compared)[0]
    schedule = differing_schedule(compared)
    lines = rows(ordered)
    shown = columns(lines)
    head = [
        "label",
        "note",
        *schedule.values(),
        *(f"{m.title} [{m.unit}] {what}" for m in shown for what in ("mean", "sd", "seeds")),
    ]
    out = []
    for one, row in zip(ordered, lines, strict=True):
        cells = [row.label, row.note, *schedule_cells(one, schedule)]
        for m in shown:
            value = row.values[m.key]
            sd = repr(m.scale * value.std) if value and value.runs > 1 else ""
            cells += [repr(m.scale * value.mean), sd, str(value.runs)] if value else [""] * 3
        out.append(cells)
    return head, out


def _named(label: str, note: str) -> str:
    return f"{label} ({note})" if note else label


def csv_text(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as CSV.

    >>> print(csv_text(["a", "b"], [["1", "x, y"]]), end="")
    a,b
    1,"x, y"
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *lines])
    return out.getvalue()


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are numbers.

    >>> print(markdown(["", "F [%]"], [["a|b", "1.0 ± 0.2"]]), end="")
    |  | F [%] |
    |---|---:|
    | a\\|b | 1.0 ± 0.2 |
    """
    marks = ["---", *("---:" for _ in head[1:])]
    table = [head, *lines]
    shown = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in table]
    return (
        "\n".join([f"| {shown[0]} |", f"|{'|'.join(marks)}|", *(f"| {row} |" for row in shown[1:])])
        + "\n"
    )


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
    shown = [" & ".join(_in_latex(cell) for cell in row) + r" \\" for row in (head, *lines)]
    body = [r"\toprule", shown[0], r"\midrule", *shown[1:], r"\bottomrule"]
    return (
        "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", *body, r"\end{tabular}"])
        + "\n"
    )


def _in_latex(cell: str) -> str:
    if re.fullmatch(rf"{NUMBER} ± {NUMBER}", cell):
        return cell.replace("±", r"\pm").join("$$")
    if re.fullmatch(rf"{NUMBER}( to {NUMBER})?", cell):
        return re.sub(r"[-+][\d.]+", r"$\g<0>$", cell)
    text = "".join(IN_LATEX.get(c, c) for c in cell)
    return text.replace("±", r"$\pm$").replace("−", "$-$").replace("–", "--")


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
    labels = _labels(runs)
    folders = [out / name for name in labels]
    try:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty; name a new directory, so that no event is there twice"
            )
        for run, folder in zip(runs, folders, strict=True):
            _tell(run, folder.name, tracker(folder))
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from as_named(error, out)
    return folders


def _tell(run: Run, name: str, tracker: Tracker) -> None:
    said = {key: ", ".join(run.versions(key)) for key in VERSIONS}
    versions = {key: versions for key, versions in said.items() if versions}
    tracker.ready()
    tracker.begin(AboutRun(run.folder, name, name, run.seed, run.settings, versions), {}, -1)
    gathered = RoundNumbers(run.settings)
    for event in read_journal(run.folder / JOURNAL):
        if done := gathered.take(event):
            tracker.log(*done)
    tracker.end("finished" if run.finished else "stopped", {})


def _labels(runs: Sequence[Run]) -> list[str]:
    labels = {id(r): g.label for g in group(runs) for r in (*g.runs, *g.repeats)}
    names: list[str] = []
    for run in runs:
        label = "".join(
            c if c.isalnum() or c in "-_.=, " else "-" for c in labels[id(run)]
        ).replace(", ", "_")
        name = f"{label}-seed{run.seed}"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names
