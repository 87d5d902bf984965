"""The command that runs a paper's table and prints ours beside the paper's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from fedstill.cli.app import Flag, Jobs, Names, Overwrite, Quiet, Rounds, Settings
from fedstill.cli.comparisons import carry_out

Text = Annotated[str, Parameter(show_default=False)]
SeedCount = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1000))]


def reproduce(
    recipe: Text = "",
    *,
    cells: Names = (),
    rounds: int | None = None,
    seeds: SeedCount = 3,
    data: Text = "",
    out: Path | None = None,
    jobs: Jobs = None,
    set_: Settings = (),
    table: Flag = False,
    against: str = "",
    beside: Path | None = None,
    at: Rounds = (),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> int:
    """Run a paper's table or figure, going on where it stopped, and print ours beside the paper's;
    no name: list them.

    Pictures are in the report that it writes; docs/papers.md says which recipe and which section is
    which figure.

    Args:
        recipe: A table or figure by name, e.g. fedadkd/table2.
        cells: Only these, as ROW:COLUMN with * and ?, e.g. --cells "Fed*:CIFAR-10 .1". Unset, all.
        rounds: Other than the paper's; where cells start from another run's model, the rounds of
            that run.
        seeds: A count: 3 stands for seeds 1, 2, 3.
        data: Another data set than the paper's, in all columns.
        out: The directory of all runs. Unset, one under runs/ named after the recipe and what was
            changed.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        set_: A value over the recipe's, as key=value, e.g. -s data.train_size=10000. May be
            repeated.
        table: Run nothing; print the table of what is there.
        against: Also print how far each row is from this one, paired by seed, with a 95 % interval.
        beside: Other runs of this table, made with other settings: print how far each row is from
            the row of its name there, or from the row --against there.
        at: Also print each row at these rounds, as the mean of the ten that end there, e.g. --at
            50,100,200.
        overwrite: Begin anew where a run is in the way: damaged, of other settings, or of other
            files or data.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.benchmark import recipes
    from fedstill.benchmark import reproduction as reproduced
    from fedstill.benchmark import reproduction as row_differences
    from fedstill.config.overrides import parse_overrides
    from fedstill.report import terminal
    from fedstill.running.archive import readable

    if not recipe:
        return _list_recipes()
    screen = terminal.console()
    paper_table = recipes.load_recipe(recipe)
    changes = parse_overrides(set_) | ({"rounds": rounds} if rounds is not None else {})
    changes |= {"data.name": data} if data else {}
    folder = out or paper_table.folder(changes)
    folder = readable(folder) if table else folder
    chosen = paper_table.cells(cells)
    runs_of = partial(paper_table.variants, seeds=range(1, seeds + 1), changes=changes)
    runs = runs_of(chosen, out=folder)
    code = (
        0 if table else carry_out(runs, folder, jobs, quiet=quiet, overwrite=overwrite, show=False)
    )
    if table and not any(run.folder.is_dir() for run in runs):
        screen.print(f"{folder} holds none of these runs; without --table they are done.")
    others = (
        ()
        if beside is None
        else runs_of(paper_table.with_row(chosen, against), out=readable(beside))
    )
    apart = row_differences.asked_for(paper_table, chosen, runs, against, beside, others, at)
    for line in (*reproduced.paper_tables(paper_table, chosen, runs, changes), *apart):
        screen.print(line)
    return code


def _list_recipes() -> int:
    from fedstill.benchmark.recipes import load_recipe, recipe_names
    from fedstill.report import terminal

    rows = [(name, load_recipe(name).paper) for name in recipe_names()]
    terminal.console(sentences=True).print(terminal.table(["recipe", "what it is"], rows, words=2))
    return 0
