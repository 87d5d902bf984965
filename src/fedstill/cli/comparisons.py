"""Commands for several runs, their files and tables: compare, tune, demo, report, forgetting, pack,
unpack.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators

from fedstill.cli.app import (
    ClassTasks,
    Devices,
    Flag,
    Grid,
    Jobs,
    Names,
    Numbers,
    Quiet,
    Seeds,
    Settings,
    Space,
    say,
)
from fedstill.core.files import counted, in_shell

if TYPE_CHECKING:
    from fedstill.running.compare import Outcome, Variant


def compare_command(  # noqa: PLR0913 - the options of the command compare
    config: Path | None = None,
    *,
    methods: Names = (),
    seeds: Seeds = (),
    grid: Grid = (),
    out: Path | None = None,
    jobs: Jobs = None,
    devices: Devices = (),
    set_: Settings = (),
    track: Names = (),
    overwrite: Flag = False,
    debug: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Run several methods, settings and seeds in parallel, print a table, and write a report.

    The table and the differences between methods, paired by seed, are written under OUT/tables, as
    CSV, Markdown and LaTeX.

    To continue after a stop, repeat the command with --out; finished runs are not repeated.

    Args:
        config: The config that all runs share, a TOML file. By default, the default values.
        methods: Names of methods, e.g. --methods fedavg,fedntd. By default, the config's method.
            Topologies may differ; a method with a single exchange has one round.
        seeds: Seeds, e.g. --seeds 1,2,3. By default, the config's seed.
        grid: Values of one key, e.g. --grid method.beta=0.1,1,10. May be repeated; all combinations
            are run.
        out: The directory for all runs and the report. By default, a new one under runs/.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        set_: A value that replaces the file's, as key=value. May be repeated.
        track: Report every round to these trackers: tensorboard (view with: tensorboard --logdir
            OUT), mlflow, wandb.
        overwrite: Replace runs that are damaged, or that have other settings, files or data.
        debug: Print tracebacks of errors; a failing client ends its run, regardless of
            clients.failures.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.config.experiment import load
    from fedstill.config.overrides import parse_grid, with_working_directory_paths
    from fedstill.running.compare import output_folder, variants

    experiment = load(config, set_)
    method_names = with_working_directory_paths(methods, experiment.base)
    with output_folder(out, "compare") as folder:
        runs = variants(experiment, folder, method_names, seeds, parse_grid(grid))
        return carry_out(
            runs,
            folder,
            jobs,
            devices=devices,
            quiet=quiet,
            track=track,
            debug=debug,
            overwrite=overwrite,
        )


def demo_command(
    *,
    seeds: Seeds = (1, 2, 3),
    out: Path | None = None,
    jobs: Jobs = None,
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Train FedAvg, FedProx and FedNTD on handwritten digits, unevenly distributed over 20 clients,
    and compare their forgetting.

    Args:
        seeds: Seeds of the runs. By default, 1,2,3.
        out: The directory for all runs and the report. By default, a new one under runs/.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        overwrite: Replace runs that are damaged, or that have other settings, files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from importlib import resources

    from fedstill.config.experiment import load
    from fedstill.running.compare import output_folder, variants

    with resources.as_file(resources.files("fedstill") / "recipes" / "demo.toml") as path:
        experiment = load(path)
    with output_folder(out, "demo") as folder:
        runs = variants(experiment, folder, ("fedavg", "fedprox", "fedntd"), seeds)
        return carry_out(runs, folder, jobs, quiet=quiet, overwrite=overwrite)


def report_command(
    *directories: Path,
    out: Path | None = None,
    tables: Path | None = None,
    against: str = "",
    tensorboard: Path | None = None,
) -> int:
    """Write an HTML page about runs: curves, heat maps by class, splits, different settings, cost.

    Args:
        directories: One or more directories of runs, directories that contain runs, or packs.
        out: The file of the page. By default, report.html in the first directory, or beside the
            first pack's runs.
        tables: Also write the results and differences paired by seed to this directory, as CSV,
            Markdown and LaTeX.
        against: The label of the runs that all others are compared with. By default, the first.
        tensorboard: Also write TensorBoard scalars to this directory.
    """
    from fedstill.core.errors import ConfigError
    from fedstill.report.page import write_page
    from fedstill.report.table_files import export_tensorboard, write_tables
    from fedstill.running.packs import folder_of
    from fedstill.running.runs import groups

    if not directories:
        raise ConfigError("report: name at least one directory of runs")
    first = folder_of(directories[0])
    print(write_page(directories, out or first / "report.html", against))
    if tables is not None:
        print("\n".join(map(str, write_tables(groups(directories), tables, against))))
    if tensorboard is not None:
        export_tensorboard(directories, tensorboard)
        print(tensorboard)
    return 0


def pack_command(directory: Path) -> int:
    """Pack the configs, journals, splits and summaries of all runs in a directory into one file,
    DIRECTORY.runs.tar.xz.

    `fedstill report` and `fedstill reproduce --table` can read the file instead of the directory.
    It contains no models, checkpoints or client states: keep the directory to use a model or to
    resume a run.

    Args:
        directory: A directory that contains runs.
    """
    from fedstill.running.packs import pack

    packed = pack(directory)
    kilobytes = packed.stat().st_size / 1e3
    print(
        f"{packed}: {kilobytes:,.0f} kB; `fedstill unpack {in_shell(packed)}` restores configs, "
        "journals, splits and summaries, not models"
    )
    return 0


def unpack_command(file: Path) -> int:
    """Unpack the configs, journals, splits and summaries that `fedstill pack` packed. Packs contain
    no models.

    Args:
        file: The file NAME.runs.tar.xz.
    """
    from fedstill.running.packs import unpack

    print(unpack(file))
    return 0


def carry_out(  # noqa: PLR0913 - the options of the commands that carry runs out
    runs: Sequence[Variant],
    folder: Path,
    jobs: int | None,
    *,
    devices: Sequence[int] = (),
    quiet: bool,
    track: Sequence[str] = (),
    debug: bool = False,
    overwrite: bool = False,
    show: bool = True,
) -> int:
    """Execute the runs, show their progress, print their table if ``show``, and write the report.
    Return the exit code.

    Raises RunBusy before any run if another comparison is using the folder.
    """
    from fedstill.engines.devices import check_numbers
    from fedstill.report.comparison import followed_outcomes, started_folders
    from fedstill.running.directory import claimed

    check_numbers(devices)
    _unpack_to_continue(folder)
    with claimed(folder):
        outcomes = followed_outcomes(
            runs,
            jobs,
            devices=devices,
            quiet=quiet,
            debug=debug,
            overwrite=overwrite,
            track=track,
        )
        started = started_folders(runs, outcomes)
        if started:
            _present(started, folder, show=show)
    return _report_problems(outcomes, folder, debug)


def _unpack_to_continue(folder: Path) -> None:
    """Unpack the pack of a folder if its runs are only in the pack, and say so."""
    from fedstill.running.packs import pack_of, unpack_if_packed

    if unpack_if_packed(folder):
        print(f"unpacked {pack_of(folder)} to {folder}, and continue there")


def _report_problems(outcomes: Sequence[Outcome], folder: Path, debug: bool) -> int:
    """Print a line for each failed run, with its traceback if ``debug``, and how to continue in the
    folder if runs are unfinished. Return the exit code.
    """
    codes = [0]
    for outcome in outcomes:
        if debug and outcome.trace:
            print(outcome.trace, file=sys.stderr)
        if outcome.problem:
            run = f"{outcome.variant.label}, seed {outcome.variant.seed}"
            codes.append(say(f"{run}: {outcome.problem}", outcome.exit_code))

    unfinished = sum(outcome.state in ("waiting", "stopped") for outcome in outcomes)
    if unfinished:
        remaining = f"{unfinished} of {counted(len(outcomes), 'run')}"
        # Without --out, the same command would begin a new folder.
        remedy = f"repeat the command with --out {in_shell(folder)} to continue"
        codes.append(say(f"stopped with {remaining} unfinished; {remedy}", 1))
    return max(codes)


def _present(started: Sequence[Path], folder: Path, *, show: bool) -> None:
    """Print the table of the started runs if ``show``, and write their report and table files."""
    from fedstill.report import terminal
    from fedstill.report.comparison import write_files
    from fedstill.report.summary import (
        BELOW_ZERO,
        order_note,
        package_notes,
        ranking_column,
        refusal_sentences,
    )
    from fedstill.running.runs import groups

    screen = terminal.console()
    compared = groups(started)
    if show:
        screen.print(terminal.comparison_table(compared))
        note_on_order = order_note(ranking_column(compared))
        if note_on_order:
            terminal.tell(screen, note_on_order)
        leaks = terminal.leak_table(compared)
        if leaks is not None:
            screen.print(leaks)
        if any(min(group.values("forgetting"), default=0) < 0 for group in compared):
            terminal.tell(screen, BELOW_ZERO)
        runs_by_label = {group.label: group.started for group in compared}
        for note in package_notes(runs_by_label):
            screen.print(note)
        for line in refusal_sentences(runs_by_label):
            terminal.tell(screen, f"warning: {line}")
    screen.print(f"report: {write_files(started, folder)}", soft_wrap=True)


MatrixUnit = Literal["percent", "share"]


def forgetting_command(
    *matrices: Path,
    unit: MatrixUnit | None = None,
    initial: Numbers = (),
    class_tasks: ClassTasks = (),
) -> int:
    """Compute forgetting from an accuracy matrix or a run with tasks, by the definitions of
    different papers.

    A CSV file has a row for the end of each task, and a column for the accuracy on each task; cells
    of future tasks are empty. If the first column numbers the rows, row 0 is the untrained model.

    Args:
        matrices: One or more CSV files of accuracies or directories of runs with tasks.
        unit: Whether the accuracies in files are percentages or shares. By default, percentages if
            a number is above 1.
        initial: The accuracy of the untrained model in each column, for forward transfer.
        class_tasks: If columns are classes: the task of each class, counted from 0 or from 1.
    """
    from fedstill.core.errors import ConfigError
    from fedstill.report import accuracy_matrix, terminal

    if not matrices:
        raise ConfigError(
            "forgetting: give a CSV file, a row for each task's end and a column for each task, or "
            "a run"
        )
    read = []
    for path in matrices:
        if path.is_dir():
            read += accuracy_matrix.run_matrices(path)
        else:
            read.append(accuracy_matrix.read_matrix(path, unit, initial, class_tasks))
    screen = terminal.console(sentences=True)
    for matrix in read:
        for note in matrix.notes:
            terminal.tell(screen, f"{matrix.name}: {note}")
        if rows := accuracy_matrix.matrix_rows(matrix):
            screen.print(terminal.PlainTable([matrix.name, *matrix.columns], rows))
        screen.print()
    table = accuracy_matrix.definitions_table(read)
    screen.print(terminal.PlainTable(table.head, table.lines, words=3))
    for matrix in read:
        place = ""
        if len(read) > 1:
            place = f" for {matrix.name}"
        terminal.tell(screen, f"\nBeside average_forgetting, Chaudhry's{place}:")
        for line in accuracy_matrix.how_they_differ(matrix):
            terminal.tell(screen, f"  {line}")
    return 0


# The command that searches for good values of hyper-parameters.


TrialCount = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=10_000))]


def tune_command(  # noqa: PLR0913 - the options of the command tune
    config: Path | None = None,
    *,
    space: Space = (),
    trials: TrialCount = 20,
    seeds: Seeds = (100, 101, 102),
    goal: str = "",
    out: Path | None = None,
    jobs: Jobs = None,
    devices: Devices = (),
    set_: Settings = (),
    overwrite: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Search for good values of hyper-parameters with Optuna's TPE; each trial runs all seeds.

    Then print the command that reports the best values on other seeds. Repeat the command with
    --out to continue after a stop, and with more trials to continue the search. This needs the
    extra `tune`.

    Args:
        config: The config that all runs share, a TOML file. By default, the default values.
        space: The values to search, KEY=LOW..HIGH[:log] or KEY=A,B,..., e.g. --space
            plan.lr=0.001..1:log. May be repeated.
        trials: The number of trials, including finished ones.
        seeds: Seeds of each trial's runs. By default, 100,101,102. Report results on other seeds.
        goal: The number of a run's summary to optimise: query_average_accuracy, personal_accuracy,
            mean_accuracy_last_10, accuracy, best_accuracy, forgetting, personal_forgetting, or a
            metric that the config records, such as auc, best_auc or own_test_auc. By default, the
            metric of rank_by, or else the first of these that the runs have.
        out: The directory for all trials and the page. By default, a new one under runs/.
        jobs: The number of parallel runs. By default, one per core, or fewer if memory is short.
        devices: The CUDA devices over which runs with device = "cuda" are distributed, by number.
            By default, all.
        set_: A value that replaces the file's, as key=value. May be repeated.
        overwrite: Replace another search, and runs that are damaged, or that have other settings,
            files or data.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.config.experiment import load
    from fedstill.engines.devices import check_numbers, slots_for
    from fedstill.report import setting_effects, terminal
    from fedstill.report.progress import followed_runs
    from fedstill.running import compare
    from fedstill.running.directory import claimed
    from fedstill.running.tuning import Tuning, parse_space

    experiment = load(config, set_)
    check_numbers(devices)
    finished: list[Outcome] = []
    progress = followed_runs(quiet, trials * len(seeds))

    def carry_out_trial(runs: Sequence[Variant]) -> Sequence[Outcome]:
        slots = slots_for({variant.settings.device for variant in runs}, jobs, devices)
        outcomes = compare.carry_out_runs(
            runs,
            slots.jobs,
            lambda current: progress.show([*finished, *current]),
            cards=slots.cards,
            overwrite=overwrite,
        )
        finished.extend(outcomes)
        return outcomes

    with compare.output_folder(out, "tune") as folder:
        tuning = Tuning(
            experiment,
            parse_space(space),
            seeds,
            folder,
            carry_out_trial,
            goal=goal,
            overwrite=overwrite,
        )
        _unpack_to_continue(folder)
        with claimed(folder), progress:
            for _ in tuning.run(trials):
                setting_effects.write_tuning_page(tuning, folder / "tuning.html")

    screen = terminal.console()
    if tuning.trials:
        table = setting_effects.trial_table(tuning)
        screen.print(terminal.PlainTable(table.head, table.lines))
        screen.print(setting_effects.advice(tuning, str(config or ""), set_), soft_wrap=True)
        screen.print(f"page: {folder / 'tuning.html'}", soft_wrap=True)
    if len(tuning.trials) < trials:
        return say(
            f"stopped after {len(tuning.trials)} of {counted(trials, 'trial')}; repeat the command "
            f"with --out {in_shell(folder)} to continue",
            1,
        )
    if any(trial.scores for trial in tuning.trials):
        return 0
    return 1
