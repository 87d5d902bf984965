"""Standings and checked entries in a terminal and as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from fedstill.benchmark.checking import (
    Replay,
    checked_entry,
    drawn_places,
    reached,
    replayed,
    suite_of,
)
from fedstill.benchmark.entries import Entered, entries_below, read_entry, run_place
from fedstill.benchmark.recipes import RANKING
from fedstill.benchmark.scoring import Do
from fedstill.benchmark.standings import NOT_REPLAYED, RankedRow, Standings, row_of, standings
from fedstill.benchmark.suites import TEST_SEEDS, Suite, load_suite, suite_names
from fedstill.benchmark.tables import (
    about,
    cell_lines,
    joined,
    rows_from,
    standing_head,
    standing_lines,
)
from fedstill.core.errors import ConfigError, CorruptFile, DataAbsent
from fedstill.core.files import make_folder, write_whole
from fedstill.report.terminal import table
from fedstill.running.same_run import processor

# Standings from entries and from what ships, as people see them in a terminal and as files.


REPLAYED = "replayed.csv"
"""The file beside entries that says how near a replay of each came: suite, method, level, where it
was done, and of which entry, so that another one in its place counts as not replayed.
"""

NOTED = ("suite", "method", "level", "where", "entry")

SHIPPED = "shipped.csv"
"""The file in the package with the runs of the entries that ship: table.csv of them."""


def shipped_rows() -> dict[str, list[RankedRow]]:
    """The rows that ship, by suite; of suites of another version none."""
    file = resources.files("fedstill.recipes") / RANKING / SHIPPED
    return rows_from(file.read_text(encoding="utf-8")) if file.is_file() else {}


def rows_below(
    folders: Sequence[Path],
) -> tuple[dict[str, list[RankedRow]], dict[str, Suite], list[str]]:
    """The rows of all entries in some folders by suite, the suites with newcomers' rows, and what
    was left out and why.

    An entry is taken if all checks that run nothing of it find no problem.
    Raises ConfigError for a folder without an entry.
    """
    rows: dict[str, list[RankedRow]] = {}
    suites: dict[str, Suite] = {}
    left_out = []
    for folder in folders:
        levels = levels_in(folder)
        places = entries_below(folder)
        if not places:
            raise ConfigError(
                f"{folder} holds no entry; name a folder of entries, such as runs/rank/entries"
            )
        for place in places:
            try:
                entry = read_entry(place)
                for _ in checked_entry(entry):
                    pass
                suite = suite_of(entry)
                row = row_of(
                    entry, suite, levels.get((entry.suite, entry.row, entry.sha), NOT_REPLAYED)
                )
            except (ConfigError, CorruptFile) as error:
                left_out.append(f"{place.name}: {error}")
                continue
            same = suites.get(suite.name, suite)
            new = entry.row not in same.recipe.rows
            suites[suite.name] = (
                same.with_row(entry.row, entry.method, entry.tries, entry.topology) if new else same
            )
            rows.setdefault(suite.name, []).append(row)
    return rows, suites, left_out


def every_standing(
    rows: Mapping[str, Sequence[RankedRow]], suites: Mapping[str, Suite]
) -> list[Standings]:
    """The standings of all suites that have rows, in order; of two rows of one name the last
    counts.
    """
    out = []
    shipped = suite_names()
    for name in [*shipped, *(name for name in rows if name not in shipped)]:
        if own := {row.name: row for row in rows.get(name, ())}:
            suite = suites.get(name) or load_suite(name)
            order = {row: i for i, row in enumerate(suite.recipe.rows)}
            out.append(
                standings(suite, sorted(own.values(), key=lambda r: order.get(r.name, len(order))))
            )
    return out


def shown_standings(one: Standings) -> Iterator[RenderableType]:
    """A suite's tables in a terminal."""
    yield Text(f"\n{one.suite.recipe.paper}", style="bold")
    yield Text(about(one))
    bare = [[line[1], line[0], *line[2:]] for line in standing_lines(one)]
    head = standing_head(one)
    yield table([head[1], head[0], *head[2:]], bare)
    yield table(*cell_lines(one))
    if groups := joined(one):
        yield Text("cannot be told apart by rank: " + "; ".join(groups))
    if one.missing:
        yield Text(f"no entry yet: {', '.join(one.missing)}")


def levels_in(folder: Path) -> dict[tuple[str, str, str], str]:
    """How near a replay of each entry came, by suite, row and digest, as a folder's file says;
    nothing without one.
    """
    return {(suite, row, sha): level for suite, row, level, _, sha in _noted(folder)}


def note_level(folder: Path, entry: Entered, level: str, where: str) -> None:
    """Write down how near a replay came, over what was there of the same row."""
    others = [line for line in _noted(folder) if line[:2] != [entry.suite, entry.row]]
    lines = sorted([*others, [entry.suite, entry.row, level, where, entry.sha]])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([NOTED, *lines])
    make_folder(folder)
    write_whole(folder / REPLAYED, out.getvalue().encode())


def _noted(folder: Path) -> list[list[str]]:
    path = folder / REPLAYED
    if not path.is_file():
        return []
    return [
        [line.get(key) or "" for key in NOTED]
        for line in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    ]


# The verdict on an entry: a line for each check and each replayed run, and what remains unproven.


MOST_PROBLEMS = 5
"""How many problems of a replayed run are printed."""


@dataclass(frozen=True)
class ReplayRequest:
    """Which runs of an entry are replayed.

    ``runs``: how many, drawn by ``number``. ``rounds``: only the first so many of each; 0: all.
    ``note``: the folder in which the level of complete replays is written down.
    """

    runs: int = 0
    rounds: int = 0
    number: int = 0
    note: Path | None = None


@dataclass(frozen=True)
class Line:
    """A line of a verdict, and whether it says something good of the entry."""

    text: str
    good: bool = True


def check_one(place: Path, do: Do, request: ReplayRequest) -> Iterator[Line]:
    """The verdict on the entry in a folder."""
    yield Line(str(place))
    try:
        entry = read_entry(place)
        for check in checked_entry(entry):
            yield Line(f"  ok       {check}")
    except (ConfigError, CorruptFile) as error:
        yield Line(f"  REFUSED  {error}", good=False)
        return
    if not request.runs:
        yield Line("  not replayed: an entry that was invented consistently passes up to here")
        return
    try:
        yield from _replay_lines(entry, do, request)
    except DataAbsent as error:
        yield Line(f"  not replayed here: its data are missing: {error}", good=False)


def _replay_lines(entry: Entered, do: Do, request: ReplayRequest) -> Iterator[Line]:
    suite = suite_of(entry)
    drawn = drawn_places(entry, suite, request.runs, request.number)
    if entry.file:
        yield Line(f"  executing {entry.folder / entry.file}, which came with the entry")
    places = ", ".join(run_place(column, seed) for column, seed in drawn)
    yield Line(f"  runs drawn with --draw {request.number}: {places}")
    replays = list(replayed(entry, drawn, do, request.rounds))
    for replay in replays:
        yield Line(f"  {replay.level:9} {replay.place}", replay.level != "disagrees")
        for problem in replay.problems[:MOST_PROBLEMS]:
            yield Line(f"            {problem}")

    level = reached(replays)
    if request.note is not None and not request.rounds:
        note_level(request.note, entry, level, processor())
    yield Line(f"  replayed here: {level}", level != "disagrees")
    if level != "disagrees":
        for gap in _unproven(entry, replays, suite, request.rounds):
            yield Line(f"  {gap}")


def _unproven(
    entry: Entered, replays: Sequence[Replay], suite: Suite, rounds: int
) -> Iterator[str]:
    """What replays of an entry do not show."""
    if reached(replays) != "bits":
        made = entry.made.get("processor", "an unknown processor")
        yield f"made on {made} or with other versions; there, only the same bits would pass"
    if rounds:
        yield f"later rounds than {rounds} were not replayed, and the level is not noted"
    runs = len(suite.columns(entry.row)) * len(TEST_SEEDS)
    if len(replays) < runs:
        yield f"not replayed: the other {runs - len(replays)} of {runs} runs"
    yield "not replayed at all: the scores of the tries, and CPU seconds"
