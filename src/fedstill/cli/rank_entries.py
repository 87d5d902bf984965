"""The commands of the ranking that read entries, and the map of a method: rank check, rank page,
rank map.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from fedstill.cli.app import Flag, Grid, Jobs, Quiet, say
from fedstill.cli.rank import RUNS, doing, rank, suites_of

Suites = Annotated[tuple[Path, ...], Parameter(consume_multiple=False)]
MOST_DRAWS = 10_000
"""A number below this is easily typed again, and too many to try an entry against each."""
Times = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1000))]


@rank.command(name="check")
def rank_check(
    *entries: Path,
    replay: Times = 0,
    rounds: Times = 0,
    draw: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    note: Path | None = None,
    suite: Suites = (),
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> int:
    """Check entries: files, settings, fields, journals and summaries; with --replay, repeat some of
    their runs.

    Exit code 1 if an entry is refused, or if its data are missing here, so that it cannot be
    replayed. Without --replay nothing of an entry is executed, and an entry that was invented
    consistently passes. With --replay the method's own file is executed, if it has one.

    Args:
        entries: At least one: folders of entries, or folders or packs with entries below them.
        replay: Repeat so many of each entry's runs and compare every event. On the processor and
            with the versions that the entry names, only identical bits pass.
        rounds: Only the first so many rounds of each; 0: all. Where tasks share the rounds, all are
            done.
        draw: The number by which these runs are drawn. Unset, one by chance, which nobody who makes
            an entry knows; it is printed, and draws the same runs again.
        note: Write the level that a replay of whole runs reached to replayed.csv in this folder,
            which rank page reads.
        suite: The file of a suite of yours, of which entries are. May be repeated.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    import secrets

    from fedstill.errors import ConfigError
    from fedstill.experiment.ranking.entries import entries_below
    from fedstill.experiment.ranking.suites import own_suite
    from fedstill.report.checked_entries import check_one

    for file in suite:
        own_suite(file)
    places = [place for folder in entries for place in entries_below(folder)]
    if not places:
        raise ConfigError(
            "rank check: name at least one folder of an entry, e.g. "
            "runs/rank/entries/digits-space/fedgap"
        )
    number = secrets.randbelow(MOST_DRAWS) if draw is None else draw
    with doing(None, jobs, quiet) as do:
        return max(say_all(check_one(place, do, replay, rounds, note, number)) for place in places)


def say_all(lines: Iterator[tuple[str, bool]]) -> int:
    """Print lines; 1 where one of them is of something that is wrong."""
    worst = 0
    for text, good in lines:
        print(text)
        worst = max(worst, int(not good))
    return worst


@rank.command(name="page")
def rank_page(
    *entries: Path,
    out: Path = RUNS / "page",
    shipped: Annotated[bool, Parameter()] = True,
    suite: Suites = (),
) -> int:
    """Write the page of the ranking, and its tables as Markdown, CSV and LaTeX.

    Args:
        entries: Folders or packs of entries, beside what ships.
        out: The folder for index.html (one file, no network), table.md, table.csv (a line a run),
            standings.csv and table.tex.
        shipped: Whether what ships is in it, maps too.
        suite: The file of a suite of yours, of which entries are. May be repeated.
    """
    from fedstill.experiment.ranking.suites import own_suite
    from fedstill.report.map_file import shipped_maps
    from fedstill.report.ranked import every_standing, rows_below, shipped_rows
    from fedstill.report.ranking_files import write_ranking_files
    from fedstill.report.ranking_page import write_ranking_page

    for file in suite:
        own_suite(file)
    rows, suites, left_out = rows_below(entries)
    there = shipped_rows() if shipped else {}
    both = {name: [*there.get(name, ()), *rows.get(name, ())] for name in {**there, **rows}}
    standing = every_standing(both, suites)
    for line in left_out:
        say(f"left out: {line}", 0)
    print(write_ranking_page(standing, out / "index.html", shipped_maps() if shipped else None))
    print("\n".join(map(str, write_ranking_files(standing, out))))
    return int(bool(left_out))


@rank.command(name="map")
def rank_map(
    method: str,
    *,
    tier: str = "digits",
    grid: Grid = (),
    out: Path | None = None,
    jobs: Jobs = None,
    into_package: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Show where a method helps: its gain over FedAvg, cell by cell, on the settings of the suite
    TIER-space.

    A row of the suite has the fields chosen there; any other method its documented ones. Cells are
    four splits x three numbers of local epochs x three numbers of clients a round, on three seeds.
    The same command goes on where it was stopped.

    Args:
        method: A row of the suite or any method, e.g. fedntd or fedlc (fedstill list method), or a
            method's file.
        tier: digits (minutes a method), small (hours), or the file of a suite of yours.
        grid: Other axes: a key and its values, e.g. --grid topology.sampled=2,5. May be repeated.
        out: The folder of the runs, and of index.html, map.csv (a line a run) and map.md. Unset,
            one under runs/rank.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        into_package: Also put it among the maps that ship, as who keeps the suites does: tier
            digits, the usual axes.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.errors import ConfigError
    from fedstill.experiment.config.overrides import parse_grid
    from fedstill.experiment.ranking.competing import suite_at
    from fedstill.experiment.ranking.folder_names import slug
    from fedstill.experiment.ranking.where import AXES, grid_of, row_to_map
    from fedstill.report import terminal
    from fedstill.report.map_file import keep_map
    from fedstill.report.where_it_helps import cell_table, write_map

    (suite,) = [suite_at(one, RUNS) for one in suites_of(tier, "space")]
    suite, row = row_to_map(suite, method)
    name = str(suite.method(row)["name"])
    if into_package and (tier != "digits" or grid or ".py" in name):
        raise ConfigError(
            "a map that ships is of a method of fedstill on the tier digits, without --grid"
        )
    folder = out or RUNS / f"map-{tier}"
    with doing(folder, jobs, quiet) as do:
        drawn = grid_of(suite, row, parse_grid(grid) or AXES, folder / "runs", do)
    terminal.console().print(terminal.table(*cell_table(drawn), words=1))
    print(f"\n{drawn.summary}")
    print("\n".join(map(str, write_map(drawn, folder / slug(row)))))
    if into_package:
        print(keep_map(drawn, name))
    return 0
