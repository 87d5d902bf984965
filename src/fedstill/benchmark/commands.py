"""The commands of the ranking: rank, rank run, choose and enter; rank check, page and map."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from fedstill.cli.app import Flag, Grid, Jobs, Names, Quiet, say

if TYPE_CHECKING:
    from fedstill.benchmark.suites import Suite
    from fedstill.running.compare import Outcome, Variant


# The commands of the ranking that do runs: rank, rank run, rank choose, rank enter.


rank = App(
    name="rank",
    help="The ranking: a benchmark of forgetting that anybody can run, extend and check.",
)

Text = Annotated[str, Parameter(show_default=False)]
RUNS = Path("runs/rank")


@rank.default
def list_suites(*, tier: Text = "") -> int:
    """List the suites: rows, columns, runs, and core-minutes on this machine, for which it times a
    few rounds first.

    Args:
        tier: Only this one: digits or small. Unset, both.
    """
    from fedstill.benchmark import suites
    from fedstill.benchmark.competing import core_minutes
    from fedstill.report import terminal

    lines = []
    for name in suites.suite_names(tier):
        suite = suites.load_suite(name)
        test, choose = core_minutes(suite)
        cells = sum(len(suite.columns(row)) for row in suite.recipe.rows)
        runs = str(cells * len(suites.TEST_SEEDS))
        minutes = ["–" if v is None else f"{v:,.0f}" for v in (test, choose)]
        todo = len([row for row in suite.competing if row not in suite.chosen])
        what = suites.TRACKS[suite.track]
        lines.append(
            [
                name,
                what,
                str(len(suite.recipe.rows)),
                str(len(suite.recipe.columns)),
                runs,
                *minutes,
                str(todo),
            ]
        )
    head = [
        "suite",
        "question",
        "rows",
        "columns",
        "runs",
        "core-minutes",
        "to choose",
        "rows without fields",
    ]
    screen = terminal.console()
    screen.print(terminal.table(head, lines, words=2))
    screen.print(
        "\nCore-minutes are estimates for this machine, from rounds of FedAvg; –: the data are not "
        "here."
    )
    screen.print(
        "fedstill rank run digits --track space    runs a track; fedstill rank page shows what "
        "ships."
    )
    return 0


@rank.command(name="run")
def rank_run(
    tier: str,
    *,
    track: Text = "",
    methods: Names = (),
    out: Path = RUNS,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> int:
    """Do all runs of a tier with the fields that were chosen, write an entry of each row, and print
    the tables.

    The same command goes on where it was stopped. Entries are in OUT/entries, one folder a suite.

    Args:
        tier: digits (seconds a run), small (minutes a run), or the file of a suite of yours, e.g.
            clinics.toml.
        track: Only this one: space, time, both, chain, public or peers. Unset, all.
        methods: Only these rows, by name or by their method's, e.g. --methods fedavg,fedntd. Unset,
            all and the bounds.
        out: The folder of runs and entries.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark import competing

    for suite in suites_of(tier, track):
        chosen = competing.suite_at(suite, out)
        rows = suite.rows_named(methods) or list(suite.recipe.rows)
        for row in rows:
            chosen.settings_chosen(row)  # refuses now what was not chosen yet
        with doing(out / suite.name, jobs, quiet) as do:
            competing.compete(chosen, rows, out, do)
        _print_tables([out / "entries" / suite.name], shipped=bool(methods))
    return 0


@rank.command(name="choose")
def rank_choose(
    tier: str,
    *,
    track: Text = "",
    methods: Names = (),
    out: Path = RUNS,
    jobs: Jobs = None,
    into_suite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Choose each row's fields among the suite's tries, on training images that clients lack and on
    seeds 100 to 102.

    Shipped suites have their fields already, but for small-public and small-peers. Of a track whose
    fields another one chooses (both: time) it says so. The same command goes on where it was
    stopped.

    Args:
        tier: digits, small, or the file of a suite of yours.
        track: Only this one. Unset, all.
        methods: Only these rows, by name or by their method's. Unset, all.
        out: The folder of the runs; what is chosen is written to OUT/SUITE/chosen.toml, which rank
            run reads.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        into_suite: Also write it into the package, as who keeps the suites does.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from importlib import resources

    from fedstill.benchmark import competing
    from fedstill.benchmark.tables import choice_lines
    from fedstill.report import terminal

    for suite in suites_of(tier, track):
        if suite.there:
            print(
                f"{suite.name} has the fields that are chosen in {suite.there.name}: "
                f"{suite.choosing}"
            )
            continue
        rows = suite.rows_named(methods) or suite.competing
        with doing(out / suite.name, jobs, quiet) as do:
            chosen = competing.choose_fields(suite, rows, out, do)
        print(suite.recipe.paper)
        terminal.console().print(terminal.table(*choice_lines(chosen, rows), words=2))
        if into_suite:
            folder = resources.files("fedstill.recipes") / "rank" / "chosen"
            competing.keep_choices(chosen, Path(str(folder)) / f"{suite.name}.toml")
    return 0


@rank.command(name="enter")
def rank_enter(
    method: Path,
    *,
    tier: str = "digits",
    track: str = "space",
    name: Text = "",
    out: Path = RUNS,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> int:
    """Enter a method of yours: check it, choose its fields, do its runs, write its entry, and print
    its row.

    Its tries are the class variable `tries` of the method: at most five tables of its fields.
    Without it the tries of the suite's FedAvg are taken: five learning rates (time, both: heads and
    rates; peers: the defaults alone). The same command goes on where it was stopped.

    Args:
        method: The method's file, as docs/add_a_method.md says how to write one.
        tier: digits, small, or the file of a suite of yours.
        track: Which question: space, time, both, chain, public or peers.
        name: What its row is called. Unset, the name of its class.
        out: The folder of runs and entries.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark import competing

    for suite in suites_of(tier, track):
        entered, row = competing.newcomer(suite, method, name)
        with doing(out / suite.chooses_in.name, jobs, quiet) as do:
            competing.rehearse(entered, row, do)
            chosen = competing.choose_fields(entered, [row], out, do)
        with doing(out / suite.name, jobs, quiet) as do:
            (entry,) = competing.compete(chosen, [row], out, do, method.resolve())
        # of a suite of yours nothing ships
        beside = entry.folder.parent if tier.endswith(".toml") else entry.folder
        _print_tables([beside], shipped=True)
        print(f"entry: {entry.folder}\ncheck it: fedstill rank check {entry.folder} --replay 1")
    return 0


def suites_of(tier: str, track: str) -> list[Suite]:
    """The suites of a tier, or the one of a file."""
    from fedstill.benchmark.suites import load_suite, own_suite, suite_names

    if tier.endswith(".toml"):
        return [own_suite(Path(tier))]
    return [load_suite(name) for name in suite_names(tier, track)]


@contextmanager
def doing(
    folder: Path | None, jobs: int | None, quiet: bool
) -> Iterator[Callable[[Sequence[Variant]], list[Outcome]]]:
    """What carries runs out and shows how far they are; one command at a time in a folder."""
    from contextlib import nullcontext

    from fedstill.report.comparison import followed_outcomes
    from fedstill.running.directory import claimed

    with claimed(folder) if folder else nullcontext():
        yield lambda runs: followed_outcomes(runs, jobs, quiet=quiet)


def _print_tables(folders: Sequence[Path], shipped: bool) -> None:
    """Print the tables of some entries, beside what ships if they are only some rows."""
    from fedstill.benchmark.terminal import (
        every_standing,
        rows_below,
        shipped_rows,
        shown_standings,
    )
    from fedstill.report import terminal

    screen = terminal.console()
    rows, suites, left_out = rows_below(folders)
    there = shipped_rows() if shipped else {}
    both = {name: [*there.get(name, ()), *own] for name, own in rows.items()}
    for one in every_standing(both, suites):
        for part in shown_standings(one):
            screen.print(part, soft_wrap=isinstance(part, str))
    for line in left_out:
        say(f"left out: {line}", 0)


# The commands of the ranking that read entries, and the map of a method: rank check, rank page,
# rank map.


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

    from fedstill.benchmark.entries import entries_below
    from fedstill.benchmark.suites import own_suite
    from fedstill.benchmark.terminal import ReplayRequest, check_one
    from fedstill.core.errors import ConfigError

    for file in suite:
        own_suite(file)
    places = [place for folder in entries for place in entries_below(folder)]
    if not places:
        raise ConfigError(
            "rank check: name at least one folder of an entry, e.g. "
            "runs/rank/entries/digits-space/fedgap"
        )
    number = draw
    if number is None:
        number = secrets.randbelow(MOST_DRAWS)
    request = ReplayRequest(runs=replay, rounds=rounds, number=number, note=note)
    good = True
    with doing(None, jobs, quiet) as do:
        for place in places:
            for line in check_one(place, do, request):
                print(line.text)
                good = good and line.good
    return int(not good)


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
    from fedstill.benchmark.maps import shipped_maps
    from fedstill.benchmark.page import write_ranking_page
    from fedstill.benchmark.suites import own_suite
    from fedstill.benchmark.tables import write_ranking_files
    from fedstill.benchmark.terminal import every_standing, rows_below, shipped_rows

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
    from fedstill.benchmark.competing import suite_at
    from fedstill.benchmark.map_page import cell_table, write_map
    from fedstill.benchmark.maps import AXES, grid_of, keep_map, row_to_map
    from fedstill.benchmark.suites import slug
    from fedstill.config.overrides import parse_grid
    from fedstill.core.errors import ConfigError
    from fedstill.report import terminal

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
