"""The commands ``fedstill reproduce`` and ``fedstill rank``, with its subcommands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from fedstill.cli.app import (
    Devices,
    Flag,
    Grid,
    Jobs,
    Names,
    Quiet,
    Rounds,
    Settings,
    say,
)
from fedstill.core.errors import ConfigError
from fedstill.core.files import in_shell

if TYPE_CHECKING:
    from fedstill.benchmark.recipes import Recipe
    from fedstill.benchmark.scoring import Execute
    from fedstill.benchmark.standings import EnteredRows, RankedRow
    from fedstill.benchmark.suites import Suite

Text = Annotated[str, Parameter(show_default=False)]
SeedCount = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1000))]
ReplayCount = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1000))]
DrawNumber = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
SuiteFiles = Annotated[
    tuple[Path, ...], Parameter(negative="", consume_multiple=False, show_default=False)
]

# ---- fedstill reproduce --------------------------------------------------------------------------


def reproduce(  # noqa: PLR0913 - the options of the command reproduce
    recipe: Text = "",
    *,
    cells: Names = (),
    rounds: int | None = None,
    seeds: SeedCount = 3,
    data: Text = "",
    out: Path | None = None,
    jobs: Jobs = None,
    devices: Devices = (),
    set_: Settings = (),
    table: Flag = False,
    against: str = "",
    beside: Path | None = None,
    at: Rounds = (),
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Run a paper's table or figure and print our numbers next to the paper's; without a name, list
    the recipes.

    Finished runs are not repeated. Pictures are in the report; docs/papers.md lists the recipe and
    the section of the report for each figure.

    Args:
        recipe: A table or figure by name, e.g. fedadkd/table2.
        cells: Only these cells, as ROW:COLUMN with * and ?, e.g. --cells "Fed*:CIFAR-10 .1". By
            default, all.
        rounds: A number of rounds in place of the paper's; for cells that start from another run's
            model, the rounds of that run.
        seeds: How many seeds: 3 stands for seeds 1, 2, 3.
        data: Another data set than the paper's, in all columns.
        out: The directory of all runs. By default, one under runs/ named after the recipe and the
            changes.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        set_: A value in place of the recipe's, as key=value, e.g. -s data.train_size=10000. May be
            repeated.
        table: Run nothing; print the table of the existing runs.
        against: Also print the difference of each row to this one, paired by seed, with a 95 %
            interval.
        beside: Other runs of this table, made with other settings: print the difference of each row
            to the same row there, or to the row --against there.
        at: Also print each row at these rounds, each as the mean of the ten rounds up to it, e.g.
            --at 50,100,200.
        overwrite: Start again where a run is damaged, or has other settings, files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark.recipes import load_recipe
    from fedstill.benchmark.reproduction import (
        OtherRuns,
        RecipeRuns,
        check_rounds,
        difference_tables,
        find_row,
        paper_tables,
    )
    from fedstill.cli.comparisons import carry_out
    from fedstill.report import terminal
    from fedstill.running.packs import readable

    if not recipe:
        return _list_recipes()
    paper_table = load_recipe(recipe)
    changes = recipe_changes(paper_table, set_, rounds, data)
    folder = out or paper_table.folder(changes)
    if table:
        folder = readable(folder)

    def runs_in(place: Path, chosen: Sequence[tuple[str, str]]) -> RecipeRuns:
        variants = paper_table.variants(chosen, range(1, seeds + 1), changes, place)
        return RecipeRuns(paper_table, chosen, variants)

    runs = runs_in(folder, paper_table.cells(cells))
    # The options of the tables are checked now, because the runs may take days.
    check_rounds(at)
    other_runs = None
    if beside is None:
        baseline = find_row(against, runs.cells, "among the cells")
    else:
        baseline = find_row(against, paper_table.cells(), "in the recipe")
        other_cells = paper_table.with_row(runs.cells, baseline)
        other_runs = OtherRuns(runs_in(readable(beside), other_cells), beside)

    screen = terminal.console()
    code = 0
    if not table:
        code = carry_out(
            runs.variants,
            folder,
            jobs,
            devices=devices,
            quiet=quiet,
            overwrite=overwrite,
            show=False,
        )
    elif not any(variant.folder.is_dir() for variant in runs.variants):
        screen.print(f"{folder} contains none of these runs; leave out --table to run them")
    for block in paper_tables(runs, changes):
        screen.print(block)
    for block in difference_tables(runs, baseline, other_runs, at):
        screen.print(block)
    return code


def recipe_changes(
    recipe: Recipe, overrides: Sequence[str], rounds: int | None, data: str
) -> dict[str, Any]:
    """The values that options set over a recipe, by dotted key.

    Raises ConfigError for a value that two options set, and for one that cells determine.
    """
    from fedstill.config.overrides import leaf_keys, parse_overrides

    changes = parse_overrides(tuple(overrides))
    keys = leaf_keys(changes)
    if "method.name" in keys:
        raise ConfigError(
            "-s method.name: the rows of a recipe are its methods; choose rows with --cells, or "
            "compare another method with fedstill compare"
        )
    if "seed" in keys:
        raise ConfigError(
            "-s seed: the seeds of a recipe are 1, 2, 3, ...; choose their number with --seeds"
        )
    if recipe.starts and "start_from" in keys:
        raise ConfigError(
            f"-s start_from: cells of {recipe.name} start from runs of their own; leave it out"
        )
    options: dict[str, tuple[str, Any]] = {}
    if rounds is not None:
        options["rounds"] = ("--rounds", rounds)
    if data:
        options["data.name"] = ("--data", data)
    for key, (option, value) in options.items():
        if key in keys:
            raise ConfigError(f"{key} is set twice, by -s and by {option}; leave one of them out")
        changes[key] = value
    return changes


def _list_recipes() -> int:
    from fedstill.benchmark.recipes import load_recipe, recipe_names
    from fedstill.report import terminal

    rows = [(name, load_recipe(name).paper) for name in recipe_names()]
    terminal.console(sentences=True).print(terminal.PlainTable(["recipe", "paper"], rows, words=2))
    return 0


# ---- fedstill rank -------------------------------------------------------------------------------

rank = App(
    name="rank",
    help="The ranking: a benchmark of forgetting that anyone can run, extend and check.",
)

RUNS = Path("runs/rank")
"""The default folder of the ranking's runs."""

MAX_DRAW_NUMBER = 10_000
"""A random number below this is short to type, and too many to try an entry against each."""

SUITE_HEAD = (
    "suite",
    "question",
    "rows",
    "columns",
    "runs",
    "core-minutes",
    "to choose",
    "rows without fields",
)


@rank.default
def list_suites(*, tier: Text = "") -> int:
    """List the suites: rows, columns, runs, and core-minutes on this machine, which are estimated
    from a few rounds.

    Args:
        tier: Only this tier: digits or small. By default, both.
    """
    from fedstill.benchmark.suites import load_suite, suite_names
    from fedstill.report import terminal

    lines = [_suite_line(load_suite(name)) for name in suite_names(tier)]
    screen = terminal.console()
    screen.print(terminal.PlainTable(SUITE_HEAD, lines, words=2))
    screen.print(
        "\nCore-minutes are estimates for this machine, from rounds of FedAvg; –: the data are not "
        "on this machine."
    )
    screen.print(
        "fedstill rank run digits --track space    runs a track; fedstill rank page shows the "
        "entries that ship."
    )
    return 0


def _suite_line(suite: Suite) -> list[str]:
    from fedstill.benchmark.competing import estimate_core_minutes
    from fedstill.benchmark.suites import TEST_SEEDS, TRACKS

    costs = ["–", "–"]
    minutes = estimate_core_minutes(suite)
    if minutes is not None:
        costs = [f"{minutes.runs:,.0f}", f"{minutes.choosing:,.0f}"]
    run_count = len(suite.recipe.cells()) * len(TEST_SEEDS)
    without_choice = [row for row in suite.ranked_rows if row not in suite.choices]
    return [
        suite.name,
        TRACKS[suite.track],
        str(len(suite.recipe.rows)),
        str(len(suite.recipe.columns)),
        str(run_count),
        *costs,
        str(len(without_choice)),
    ]


@rank.command(name="run")
def rank_run(
    tier: str,
    *,
    track: Text = "",
    methods: Names = (),
    out: Path = RUNS,
    jobs: Jobs = None,
    devices: Devices = (),
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Execute all runs of a tier with the chosen fields, write an entry for each row, and print the
    tables.

    The same command continues where it was stopped. Entries are in OUT/entries, one folder per
    suite. The exit code is 1 if a table leaves out an entry, because it fails a check.

    Args:
        tier: digits (seconds per run), small (minutes per run), or the file of your own suite, e.g.
            clinics.toml.
        track: Only this one: space, time, both, chain, public or peers. By default, all.
        methods: Only these rows, by name or by method, e.g. --methods fedavg,fedntd; all chosen
            tracks must have them. By default, all rows and the bounds.
        out: The folder of runs and entries.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        overwrite: Replace runs that are damaged, or that have other settings, files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark import competing

    suites = [competing.with_stored_choices(suite, out) for suite in suites_of(tier, track, out)]
    # What is wrong with a row is an error now, not after the runs of other rows and suites.
    rows_by_suite = {suite.name: _rows_to_run(suite, methods) for suite in suites}
    skipped: list[str] = []
    for suite in suites:
        rows = rows_by_suite[suite.name]
        with executing(out / suite.name, jobs, quiet, devices, overwrite=overwrite) as execute:
            competing.enter_rows(suite, rows, out, execute)
        entered = _print_tables(out / "entries" / suite.name, with_shipped=bool(methods))
        skipped += entered.skipped
    return int(bool(skipped))


def _rows_to_run(suite: Suite, methods: Names) -> list[str]:
    """The rows that an option names, or all rows.

    Raises UnknownName for an unknown row, and ConfigError for a row without a choice.
    """
    rows = suite.find_rows(methods) or list(suite.recipe.rows)
    for row in rows:
        suite.chosen_fields(row)
    return rows


@rank.command(name="choose")
def rank_choose(  # noqa: PLR0913 - the options of the command rank choose
    tier: str,
    *,
    track: Text = "",
    methods: Names = (),
    out: Path = RUNS,
    jobs: Jobs = None,
    devices: Devices = (),
    into_suite: Flag = False,
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Choose each row's fields among the suite's tries, on training images that no client holds and
    with seeds 100 to 102.

    All suites that ship have their fields, except small-public and small-peers. These fields are
    part of the suite: choosing them again only shows whether they are the same on this machine. If
    another track chooses a track's fields (both: time), the command names it. The same command
    continues where it was stopped.

    Args:
        tier: digits, small, or the file of your own suite.
        track: Only this one. By default, all.
        methods: Only these rows, by name or by method; all chosen tracks must have them. By
            default, all.
        out: The folder of the runs. The choices are written to OUT/SUITE/chosen.toml, from which
            rank run takes those that do not ship.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        into_suite: Also write the choices into the package; for maintainers of the suites.
        overwrite: Replace runs that are damaged, or that have other settings, files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from importlib import resources

    from fedstill.benchmark import competing
    from fedstill.benchmark.tables import choice_table
    from fedstill.report import terminal

    suites = suites_of(tier, track, out)
    # An unknown row is an error now, not after the runs of other suites.
    rows_by_suite = {suite.name: suite.find_rows(methods) or suite.ranked_rows for suite in suites}
    for suite in suites:
        if suite.choices_from:
            print(
                f"{suite.name} has the fields that are chosen in {suite.choices_from.name}: "
                f"{suite.choose_command}"
            )
            continue
        rows = rows_by_suite[suite.name]
        with executing(out / suite.name, jobs, quiet, devices, overwrite=overwrite) as execute:
            with_choices = competing.choose_fields(suite, rows, out, execute)
        print(suite.recipe.paper)
        choices = choice_table(with_choices, rows)
        terminal.console().print(terminal.PlainTable(choices.head, choices.lines, words=2))
        shipped = [row for row in rows if row in suite.choices]
        if shipped and not into_suite:
            print(_comparison_with_shipped(suite, with_choices, shipped))
        if into_suite:
            folder = Path(str(resources.files("fedstill") / "recipes")) / "rank" / "chosen"
            competing.store_choices(with_choices, folder / f"{suite.name}.toml")
    return 0


def _comparison_with_shipped(suite: Suite, with_choices: Suite, rows: Sequence[str]) -> str:
    """A sentence that compares the new choices of rows with those that ship, which stay in use."""
    differing = [row for row in rows if suite.chosen_fields(row) != with_choices.chosen_fields(row)]
    comparison = "they are the same"
    if differing:
        comparison = f"they differ for {', '.join(differing)}"
    return f"rank run uses the fields that ship with {suite.name}; {comparison}"


@rank.command(name="enter")
def rank_enter(  # noqa: PLR0913 - the options of the command rank enter
    method: Path,
    *,
    tier: str = "digits",
    track: Text = "",
    name: Text = "",
    out: Path = RUNS,
    jobs: Jobs = None,
    devices: Devices = (),
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Enter your own method: check it, choose its fields, run it, write its entry, and print its
    row.

    Its tries are the class variable `tries` of the method: at most five tables of its fields.
    Without it, the tries of the suite's FedAvg are used: five learning rates (time, both: heads and
    rates; peers: only the defaults). The same command continues where it was stopped.

    Args:
        method: The method's file; docs/add_a_method.md describes how to write one.
        tier: digits, small, or the file of your own suite.
        track: Which question: space, time, both, chain, public or peers. By default, space.
        name: The name of its row. By default, the name of its class.
        out: The folder of runs and entries.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        overwrite: Replace runs that are damaged, or that have other settings, files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark import competing

    suite = _suite_of_track(tier, track, out)
    added = competing.add_method(suite, method, name)
    choosing_folder = out / suite.choosing_suite.name
    with executing(choosing_folder, jobs, quiet, devices, overwrite=overwrite) as execute:
        competing.rehearse(added.suite, added.name, execute)
        with_choices = competing.choose_fields(added.suite, [added.name], out, execute)
    with executing(out / suite.name, jobs, quiet, devices, overwrite=overwrite) as execute:
        (entry,) = competing.enter_rows(with_choices, [added.name], out, execute, method.resolve())

    folder = entry.folder
    check = f"fedstill rank check {in_shell(entry.folder)} --replay 1"
    if suite.file is not None:
        # No entries ship for a user's suite, so the table has all entries made here.
        folder = entry.folder.parent
        check += f" --suite {in_shell(suite.file)}"
    entered = _print_tables(folder, with_shipped=True)
    print(f"entry: {entry.folder}\ncheck it: {check}")
    return int(bool(entered.skipped))


@rank.command(name="check")
def rank_check(  # noqa: PLR0913 - the options of the command rank check
    *entries: Path,
    replay: ReplayCount = 0,
    rounds: ReplayCount = 0,
    draw: DrawNumber = None,
    note: Path | None = None,
    suite: SuiteFiles = (),
    jobs: Jobs = None,
    devices: Devices = (),
    trust_code: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Check entries: files, settings, fields, journals and summaries; with --replay, repeat some of
    their runs.

    The exit code is 1 if an entry is refused, or if it cannot be replayed because its data are
    missing. Without --replay, nothing of an entry is executed, and a consistently invented entry
    passes. With --replay, the method's file is executed, if the entry has one and you trust it.

    Args:
        entries: At least one: folders of entries, or folders or packs that contain entries.
        replay: Repeat this many of each entry's runs and compare every event. On the processor and
            with the versions that the entry names, only identical bits pass.
        rounds: Repeat only this many rounds of each run; 0: all. Where tasks share the rounds, all
            are repeated.
        draw: The number that draws these runs. By default it is random, so authors of entries
            cannot know it; it is printed, and draws the same runs again.
        note: Record the level of a replay of whole runs in replayed.csv in this folder, which rank
            page reads.
        suite: The file of your own suite, if an entry belongs to it. May be repeated.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        trust_code: Trust the methods' files of these entries, if others made them.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    import secrets

    from fedstill.benchmark.entries import trust_entry
    from fedstill.benchmark.replays import ReplayRequest, check_can_record, verdict
    from fedstill.benchmark.standings import places_of_entries

    if not replay:
        _check_replay_options(rounds, draw, note)
    if note is not None:
        check_can_record(note)
    _read_suites(suite)
    places = [place for _, place in places_of_entries(entries)]
    if not places:
        raise ConfigError(
            "rank check: name at least one folder of an entry, e.g. "
            "runs/rank/entries/digits-space/fedgap"
        )
    number = draw
    if number is None:
        number = secrets.randbelow(MAX_DRAW_NUMBER)
    request = ReplayRequest(runs=replay, rounds=rounds, number=number, note=note)
    if trust_code:
        for place in places:
            trust_entry(place)
    passed = True
    with executing(None, jobs, quiet, devices) as execute:
        for place in places:
            for line in verdict(place, execute, request):
                print(line.text)
                passed = passed and line.passed
    return int(not passed)


def _check_replay_options(rounds: int, draw: int | None, note: Path | None) -> None:
    """Raise ConfigError for an option that has no effect without a replay."""
    is_set = {"--rounds": rounds > 0, "--draw": draw is not None, "--note": note is not None}
    for option, is_used in is_set.items():
        if is_used:
            raise ConfigError(f"rank check: {option} needs --replay, e.g. --replay 1")


@rank.command(name="page")
def rank_page(
    *entries: Path,
    out: Path = RUNS / "page",
    shipped: Annotated[bool, Parameter()] = True,
    suite: SuiteFiles = (),
) -> int:
    """Write the page of the ranking, and its tables as Markdown, CSV and LaTeX.

    Args:
        entries: Folders or packs of entries, to add to those that ship.
        out: The folder for index.html (one file, no network), table.md, table.csv (a line for each
            run), standings.csv and table.tex.
        shipped: Whether to include the entries and maps that ship.
        suite: The file of your own suite, if an entry belongs to it. May be repeated.
    """
    from fedstill.benchmark.maps import shipped_maps
    from fedstill.benchmark.page import write_ranking_page
    from fedstill.benchmark.standings import all_standings, read_rows
    from fedstill.benchmark.tables import shipped_rows, write_ranking_files

    _read_suites(suite)
    entered = read_rows(entries)
    _print_skipped(entered)
    rows: dict[str, list[RankedRow]] = {}
    maps = None
    if shipped:
        rows = shipped_rows()
        maps = shipped_maps()
    for name, entered_rows in entered.rows.items():
        rows.setdefault(name, []).extend(entered_rows)
    standings = all_standings(rows, entered.suites)
    print(write_ranking_page(standings, out / "index.html", maps))
    for path in write_ranking_files(standings, out):
        print(path)
    return int(bool(entered.skipped))


@rank.command(name="map")
def rank_map(  # noqa: PLR0913 - the options of the command rank map
    method: str,
    *,
    tier: str = "digits",
    grid: Grid = (),
    out: Path = RUNS,
    jobs: Jobs = None,
    devices: Devices = (),
    into_package: Flag = False,
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Show where a method helps: its gain over FedAvg in many cells, with the settings of the suite
    TIER-space.

    A row of the suite has the fields chosen there; any other method has its defaults. Cells are
    four partitions x three numbers of local epochs x three numbers of clients per round, with three
    seeds. The same command continues where it was stopped.

    Args:
        method: A row of the suite or any method, e.g. fedntd or fedlc (fedstill list method), or a
            method's file.
        tier: digits (minutes per method), small (hours), or the file of your own suite.
        grid: Other axes: a key and its values, e.g. --grid topology.sampled=2,5. May be repeated.
        out: The folder in which rank choose stored its choices. The runs, index.html, map.csv (a
            line for each run) and map.md are in OUT/map-TIER.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        into_package: Also add the map to those that ship, for maintainers: tier digits, the usual
            axes.
        overwrite: Replace runs that are damaged, or that have other settings, files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark.competing import with_stored_choices
    from fedstill.benchmark.map_page import cell_table, write_map
    from fedstill.benchmark.maps import AXES, make_map, row_to_map, ship_map
    from fedstill.benchmark.suites import slug
    from fedstill.config.overrides import parse_grid
    from fedstill.report import terminal

    suite = _suite_of_track(tier, "", out)
    mapped = row_to_map(with_stored_choices(suite, out), method)
    name = str(mapped.suite.method_of(mapped.name)["name"])
    if into_package and (tier != "digits" or grid or ".py" in name):
        raise ConfigError(
            "--into-package: only methods of fedstill in the tier digits, without --grid, have "
            "maps that ship"
        )
    settings = suite.tier
    if suite.file is not None:
        settings = suite.name
    folder = out / f"map-{settings}"
    axes: Mapping[str, Sequence[Any]] = parse_grid(grid) or AXES
    with executing(folder, jobs, quiet, devices, overwrite=overwrite) as execute:
        method_map = make_map(mapped.suite, mapped.name, axes, folder / "runs", execute)
    cells = cell_table(method_map)
    terminal.console().print(terminal.PlainTable(cells.head, cells.lines, words=1))
    print(f"\n{method_map.summary}")
    for path in write_map(method_map, folder / slug(mapped.name)):
        print(path)
    if into_package:
        print(ship_map(method_map, name))
    return 0


# ---- shared by the commands ----------------------------------------------------------------------


def suites_of(tier: str, track: str, out: Path = RUNS) -> list[Suite]:
    """The suites of a tier, or the suite of a file, with their runs in a folder.

    Raises ConfigError for a track of a file.
    """
    from fedstill.benchmark.suites import load_suite, read_suite, suite_names

    if not _is_file(tier):
        suites = [load_suite(name) for name in suite_names(tier, track)]
    elif track:
        raise ConfigError(f"--track {track}: {tier} is one suite, without tracks; leave it out")
    else:
        suites = [read_suite(Path(tier))]
    if out == RUNS:
        return suites
    return [replace(suite, out=out) for suite in suites]


def _suite_of_track(tier: str, track: str, out: Path) -> Suite:
    """The suite of a track in a tier, by default of the track space, or the suite of a file."""
    if not _is_file(tier):
        track = track or "space"
    (suite,) = suites_of(tier, track, out)
    return suite


def _is_file(tier: str) -> bool:
    return tier.endswith(".toml")


def _read_suites(files: Sequence[Path]) -> None:
    """Read users' suites, so that ``load_suite`` finds them."""
    from fedstill.benchmark.suites import read_suite

    for file in files:
        read_suite(file)


@contextmanager
def executing(
    folder: Path | None,
    jobs: int | None,
    quiet: bool,
    devices: Sequence[int] = (),
    *,
    overwrite: bool = False,
) -> Iterator[Execute]:
    """A function that executes runs and shows their progress.

    Only one command at a time may use a folder. ``overwrite``: replace other and damaged runs.
    """
    from contextlib import ExitStack

    from fedstill.engines.devices import check_numbers
    from fedstill.report.comparison import followed_outcomes
    from fedstill.running.directory import claimed

    check_numbers(devices)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(claimed(folder))
        yield lambda variants: followed_outcomes(
            variants, jobs, devices=devices, quiet=quiet, overwrite=overwrite
        )


def _print_tables(folder: Path, with_shipped: bool) -> EnteredRows:
    """Print the tables of the entries in a folder, together with those that ship if wanted. Return
    the rows of these entries.
    """
    from fedstill.benchmark.standings import all_standings, read_rows
    from fedstill.benchmark.tables import shipped_rows, terminal_tables
    from fedstill.report import terminal

    entered = read_rows([folder])
    shipped: Mapping[str, Sequence[RankedRow]] = {}
    if with_shipped:
        shipped = shipped_rows()
    rows = {name: [*shipped.get(name, ()), *added] for name, added in entered.rows.items()}
    screen = terminal.console()
    for standings in all_standings(rows, entered.suites):
        for block in terminal_tables(standings):
            screen.print(block)
    _print_skipped(entered)
    return entered


def _print_skipped(entered: EnteredRows) -> None:
    for line in entered.skipped:
        say(f"left out: {line}", 0)
