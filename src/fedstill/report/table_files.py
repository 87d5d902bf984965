"""Results as files: the table of a comparison and the differences paired by seed, as CSV (with all
digits), Markdown and LaTeX; the rounds and clients of a run, as CSV and Parquet; and finished runs
for TensorBoard.

TensorBoard gets the same numbers as a tracker during a run.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import ConfigError
from fedstill.core.files import (
    RUN_TABLE,
    TABLE_KINDS,
    Target,
    check_may_overwrite,
    disk_error,
    make_folder,
    neutral,
    replace_file,
    write_whole,
)
from fedstill.metrics.ranks import Difference, paired_difference
from fedstill.report.summary import (
    NONE,
    Column,
    differing_schedule,
    measured_columns,
    ranked,
    rounds_note,
    schedule_cells,
)
from fedstill.running.frame import frame_of_clients, frame_of_events
from fedstill.running.journal import (
    JOURNAL,
    VERSIONS,
    check_journal,
    events_by_name,
    read_journal,
)
from fedstill.running.packs import readable
from fedstill.running.runs import Group, Run, Spread, find, label_runs
from fedstill.running.trackers import AboutRun, HowEnded, RoundNumbers, TensorBoard, Tracker

if TYPE_CHECKING:
    import pandas

NUMBER = r"[-+]?[\d.]+"
"""A number in a cell. LaTeX prints its sign correctly in math mode only."""


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are text. The first column is text, and the others are numbers."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]

    def csv(self) -> str:
        """The table as CSV.

        >>> print(TextTable(["a", "b"], [["1", "x, y"]]).csv(), end="")
        a,b
        1,"x, y"
        """
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self._rows("csv"))
        return out.getvalue()

    def markdown(self) -> str:
        """The table in Markdown.

        >>> print(TextTable(["", "F [%]"], [["a|b", "1.0 ± 0.2"]]).markdown(), end="")
        |  | F [%] |
        |---|---:|
        | a\\|b | 1.0 ± 0.2 |
        """
        titles, *body = [f"| {' | '.join(row)} |" for row in self._rows("markdown")]
        alignment = "|".join(["---", *["---:"] * (len(self.head) - 1)])
        return "\n".join([titles, f"|{alignment}|", *body, ""])

    def latex(self) -> str:
        """The table in LaTeX, for ``\\usepackage{booktabs}``.

        >>> print(TextTable(["", "F [%]"], [["fed_a", "1.0 ± 0.2"]]).latex(), end="")
        \\begin{tabular}{lr}
        \\toprule
         & F [\\%] \\\\
        \\midrule
        fed\\_a & $1.0 \\pm 0.2$ \\\\
        \\bottomrule
        \\end{tabular}
        """
        rows = [" & ".join(map(_in_latex, row)) for row in (self.head, *self.lines)]
        titles, *body = [rf"{row} \\" for row in rows]
        alignment = "l" + "r" * (len(self.head) - 1)
        begin = rf"\begin{{tabular}}{{{alignment}}}"
        table = [begin, r"\toprule", titles, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
        return "\n".join([*table, ""])

    def _rows(self, target: Target) -> list[list[str]]:
        """The head and the lines, without characters that have a meaning in a format."""
        return [[neutral(cell, target) for cell in row] for row in (self.head, *self.lines)]


def _in_latex(cell: str) -> str:
    if re.fullmatch(rf"{NUMBER} ± {NUMBER}", cell):
        return cell.replace("±", r"\pm").join("$$")
    if re.fullmatch(rf"{NUMBER}( to {NUMBER})?", cell):
        return re.sub(r"[-+][\d.]+", r"$\g<0>$", cell)
    text = neutral(cell, "latex")
    return text.replace("±", r"$\pm$").replace("−", "$-$").replace("–", "--")


def write_tables(compared: Sequence[Group], folder: Path, against: str = "") -> list[Path]:
    """Write the results and the differences, three files each; return their paths.

    against: the label of the group that all others are compared with; empty: the first group.
    Raises ConfigError for an unknown label, and if a file with one of these names is not such a
    table; then nothing is written.
    """
    results = results_table(compared)
    exact_results = results_in_all_digits(compared)
    paired = differences(compared, group_named(against, compared))
    rounded_differences = differences_table(paired)
    exact_differences = differences_in_all_digits(paired)
    texts = {
        "results.csv": exact_results.csv(),
        "results.md": results.markdown(),
        "results.tex": results.latex(),
        "differences.csv": exact_differences.csv(),
        "differences.md": rounded_differences.markdown(),
        "differences.tex": rounded_differences.latex(),
    }
    make_folder(folder)
    for name in texts:
        check_may_overwrite(folder / name, TABLE_KINDS[Path(name).suffix])
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


# ---- results -------------------------------------------------------------------------------------


def results_table(compared: Sequence[Group]) -> TextTable:
    """Mean ± sample standard deviation over seeds, the best group first."""
    schedule = differing_schedule(compared)
    measured = measured_columns(compared)
    lines = []
    for group in ranked(compared):
        label = group.label
        note = rounds_note(group)
        if note:
            label = f"{label} ({note})"
        numbers = [column.text(group.mean_spread(column.key)) for column in measured]
        lines.append([label, *schedule_cells(group, schedule), group.run_count_text, *numbers])
    titles = [f"{column.title} [{column.unit}]" for column in measured]
    return TextTable(["", *schedule.values(), "seeds", *titles], lines)


def results_in_all_digits(compared: Sequence[Group]) -> TextTable:
    """The results with three columns for each number: the mean, the standard deviation, and the
    number of seeds.

    The standard deviation of a single seed is an empty cell.
    """
    schedule = differing_schedule(compared)
    measured = measured_columns(compared)
    lines = []
    for group in ranked(compared):
        cells = [group.label, rounds_note(group), *schedule_cells(group, schedule)]
        for column in measured:
            cells += _digits_of_spread(group.mean_spread(column.key), column.scale)
        lines.append(cells)
    head = ["label", "note", *schedule.values()]
    for column in measured:
        head += [f"{column.title} [{column.unit}] {part}" for part in ("mean", "sd", "seeds")]
    return TextTable(head, lines)


def _digits_of_spread(spread: Spread | None, scale: float) -> list[str]:
    """Mean, standard deviation and number of seeds."""
    if spread is None:
        return ["", "", ""]
    deviation = ""
    if spread.runs > 1:
        deviation = repr(scale * spread.std)
    return [repr(scale * spread.mean), deviation, str(spread.runs)]


# ---- differences ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupDifference:
    """The difference of a group to a base group in one number, over their common seeds."""

    group: Group
    base: Group
    column: Column
    paired: Difference


def group_named(label: str, compared: Sequence[Group]) -> Group:
    """The group with a label; the first group for an empty label. Raises ConfigError for an unknown
    label.
    """
    if not label:
        return compared[0]
    for group in compared:
        if group.label == label:
            return group
    labels = ", ".join(repr(group.label) for group in compared)
    raise ConfigError(f"no group has the label {label!r}; choose one of {labels}")


def differences(compared: Sequence[Group], base: Group) -> list[GroupDifference]:
    """The differences of all other groups to the base, in all numbers with a common seed.

    Only finished runs are compared: numbers after different rounds are no pair.
    """
    measured = measured_columns(compared)
    group_differences = []
    for group in compared:
        if group is base:
            continue
        for column in measured:
            numbers = _by_seed(group, column.key)
            paired = paired_difference(numbers, _by_seed(base, column.key))
            if paired:
                group_differences.append(
                    GroupDifference(group=group, base=base, column=column, paired=paired)
                )
    return group_differences


def _by_seed(group: Group, key: str) -> dict[int, float]:
    """A number of a group's finished runs by seed; ``key`` as in a run's summary."""
    summaries = {run.seed: run.numbers.summary for run in group.started if run.finished}
    return {seed: summary[key] for seed, summary in summaries.items() if key in summary}


def differences_table(group_differences: Sequence[GroupDifference]) -> TextTable:
    """The mean of each difference, its 95 % interval, and the p value of the paired t test."""
    lines = []
    for difference in group_differences:
        paired = difference.paired
        column = difference.column
        interval = NONE
        p_value = NONE
        if paired.pairs > 1:
            interval = f"{_signed(paired.low, column)} to {_signed(paired.high, column)}"
            p_value = f"{paired.p:.3f}"
        lines.append(
            [
                f"{difference.group.label} − {difference.base.label}",
                f"{column.title} [{column.unit}]",
                _signed(paired.mean, column),
                interval,
                p_value,
                str(paired.pairs),
            ]
        )
    return TextTable(["", "number", "difference", "95 % interval", "p", "seeds"], lines)


MIN_DECIMALS = 2
"""The decimals of a difference, unless its column has more."""


def _signed(difference: float, column: Column) -> str:
    """A difference in a column with its sign; without a sign if it is rounded to 0."""
    digits = max(MIN_DECIMALS, column.digits)
    text = f"{column.scale * difference:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text


def differences_in_all_digits(group_differences: Sequence[GroupDifference]) -> TextTable:
    """The differences in all digits, with separate columns for the ends of their intervals."""
    lines = []
    for difference in group_differences:
        paired = difference.paired
        column = difference.column
        scale = column.scale
        interval = ["", "", ""]
        if paired.pairs > 1:
            interval = [repr(scale * paired.low), repr(scale * paired.high), repr(paired.p)]
        lines.append(
            [
                difference.group.label,
                difference.base.label,
                column.title,
                column.unit,
                repr(scale * paired.mean),
                *interval,
                str(paired.pairs),
            ]
        )
    head = ["compared", "with", "number", "unit", "difference", "low", "high", "p", "seeds"]
    return TextTable(head, lines)


# ---- TensorBoard ---------------------------------------------------------------------------------


def export_tensorboard(directories: Sequence[Path], out: Path) -> list[Path]:
    """Write the numbers of all runs in or below some directories for TensorBoard, one folder per
    run; return these folders.

    Raises ConfigError if there are no runs, if ``out`` is not empty (TensorBoard would show events
    twice) or cannot be written, or if TensorBoard is not installed.
    """
    return export(directories, out, TensorBoard)


def export(
    directories: Sequence[Path], out: Path, tracker: Callable[[Path], Tracker]
) -> list[Path]:
    """Send each run to a tracker of its own, which ``tracker`` creates for a folder in ``out``.

    Raises ConfigError if ``out`` is not empty or cannot be written.
    """
    runs = find(directories)
    folders = [out / name for name in _folder_names(runs)]
    try:
        if out.exists() and any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty, and TensorBoard would show events twice; choose a new "
                "directory"
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
        finished = numbers.finished_round(event)
        if finished is not None:
            tracker.log(finished.round, finished.numbers)
    state: HowEnded = "stopped"
    if run.finished:
        state = "finished"
    tracker.end(state, {})


def _folder_names(runs: Sequence[Run]) -> list[str]:
    """The name of each run's folder: the label of its group, and its seed."""
    labels = {id(run): members.label for members in label_runs(runs) for run in members.runs}
    names: list[str] = []
    for run in runs:
        label = re.sub(r"[^\w\-.=, ]", "-", labels[id(run)]).replace(", ", "_")
        name = f"{label}-seed{run.seed}"
        if name in names:
            name = f"{name}-{len(names)}"
        names.append(name)
    return names


# ---- the rounds and clients of a run -------------------------------------------------------------


def run_frames(run: Path) -> dict[str, pandas.DataFrame]:
    """The tables ``rounds`` and ``clients`` of a run, finished or not.

    They have the columns of ``Result.rounds`` and ``Result.clients``. Raises CorruptFile if the
    journal is damaged or missing.
    """
    folder = readable(run)
    events = read_journal(folder / JOURNAL)
    check_journal(folder, events)
    classes = [str(name) for event in events[:1] for name in event.get("classes", [])]
    by_name = events_by_name(events)
    return {
        "rounds": frame_of_events(by_name.get("round", []), classes),
        "clients": frame_of_clients(by_name.get("client", []), classes),
    }


def _without_formulas(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The table, with names and texts that no spreadsheet takes for formulas."""
    safe = frame.rename(columns=lambda name: neutral(str(name), "csv"))
    for column in safe.select_dtypes(exclude="number"):
        safe[column] = safe[column].map(_without_formula)
    return safe


def _without_formula(value: Any) -> Any:
    if isinstance(value, str):
        return neutral(value, "csv")
    return value


@dataclass(frozen=True)
class WrittenTable:
    """A table in a file, with its numbers of rows and columns."""

    path: Path
    rows: int
    columns: int


def write_run_tables(run: Path, kind: str, folder: Path) -> list[WrittenTable]:
    """Write the tables of ``run_frames`` to a folder, as ``parquet`` or ``csv``, over older tables.

    Raises the errors of ``run_frames``, and ConfigError if the folder cannot be created or has
    other files with these names.
    """
    frames = run_frames(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from disk_error(
            error, folder
        )
    paths = {name: folder / f"{name}.{kind}" for name in frames}
    for path in paths.values():
        check_may_overwrite(path, RUN_TABLE)
    tables = []
    for name, frame in frames.items():
        if kind == "parquet":
            data = frame.to_parquet(index=False)
        else:
            data = _without_formulas(frame).to_csv(index=False).encode()
        replace_file(paths[name], data, RUN_TABLE)
        tables.append(WrittenTable(paths[name], len(frame), len(frame.columns)))
    return tables
