"""The commands of the ranking that do runs: rank, rank run, rank choose, rank enter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from fedstill.cli.app import Flag, Jobs, Names, Quiet, app, say

if TYPE_CHECKING:
    from fedstill.experiment.comparing.compare import Outcome
    from fedstill.experiment.comparing.variants import Variant
    from fedstill.experiment.ranking.suites import Suite

rank = App(
    name="rank",
    help="The ranking: a benchmark of forgetting that anybody can run, extend and check.",
)
app.command(rank)

Text = Annotated[str, Parameter(show_default=False)]
RUNS = Path("runs/rank")


@rank.default
def list_suites(*, tier: Text = "") -> int:
    """List the suites: rows, columns, runs, and core-minutes on this machine, for which it times a
    few rounds first.

    Args:
        tier: Only this one: digits or small. Unset, both.
    """
    from fedstill.experiment.ranking import suites
    from fedstill.experiment.ranking.costs_here import core_minutes
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
    from fedstill.experiment.ranking import competing

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

    from fedstill.experiment.ranking import competing
    from fedstill.report import terminal
    from fedstill.report.ranking_files import choice_lines

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
    from fedstill.experiment.ranking import competing

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
    from fedstill.experiment.ranking.suites import load_suite, own_suite, suite_names

    if tier.endswith(".toml"):
        return [own_suite(Path(tier))]
    return [load_suite(name) for name in suite_names(tier, track)]


@contextmanager
def doing(
    folder: Path | None, jobs: int | None, quiet: bool
) -> Iterator[Callable[[Sequence[Variant]], list[Outcome]]]:
    """What carries runs out and shows how far they are; one command at a time in a folder."""
    from contextlib import nullcontext

    from fedstill.experiment.run_directory.claim import claimed
    from fedstill.report.side_by_side import followed_outcomes

    with claimed(folder) if folder else nullcontext():
        yield lambda runs: followed_outcomes(runs, jobs, quiet=quiet)


def _print_tables(folders: Sequence[Path], shipped: bool) -> None:
    """Print the tables of some entries, beside what ships if they are only some rows."""
    from fedstill.report import terminal
    from fedstill.report.ranked import every_standing, rows_below, shipped_rows, shown_standings

    screen = terminal.console()
    rows, suites, left_out = rows_below(folders)
    there = shipped_rows() if shipped else {}
    both = {name: [*there.get(name, ()), *own] for name, own in rows.items()}
    for one in every_standing(both, suites):
        for part in shown_standings(one):
            screen.print(part, soft_wrap=isinstance(part, str))
    for line in left_out:
        say(f"left out: {line}", 0)
