"""The command line. Exit code 0: done; 2: it cannot be done as it was written; 1: it failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, CycloptsError, Parameter, Token, validators

import fedstill
from fedstill.errors import FedstillError

if TYPE_CHECKING:
    from fedstill.experiment.compare import Variant


def _comma_separated(type_: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
    """``1,2,3`` as a tuple; each part is converted, so that a wrong one is named."""
    one = get_args(type_)[0]
    return tuple(one(part.strip()) for token in tokens for part in token.value.split(",") if part.strip())


app = App(
    name="fedstill",
    help="Federated learning that does not forget: train, measure and compare methods when clients' data differ.",
    version=fedstill.__version__,
    result_action="return_value",
)

Names = Annotated[tuple[str, ...], Parameter(converter=_comma_separated, n_tokens=1, negative="")]
Seeds = Annotated[tuple[int, ...], Parameter(converter=_comma_separated, n_tokens=1, negative="")]
Grid = Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=False)]
Jobs = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
Settings = Annotated[tuple[str, ...], Parameter(name=["--set", "-s"], negative="", consume_multiple=False)]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")]


def main() -> None:
    """Run the command in ``sys.argv`` and exit."""
    sys.exit(call(sys.argv[1:]))


def call(tokens: list[str]) -> int:
    """Run one command; its exit code. What is wrong is one line on the standard error."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _say(" ".join(str(error).split()), 2)
    except FedstillError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("ended at once; what was finished is kept", 1)
    except BrokenPipeError:
        return 1
    return result if isinstance(result, int) else 0


def _say(text: str, code: int) -> int:
    print(f"fedstill: {' '.join(text.split())}", file=sys.stderr)
    return code


@app.command
def run(config: Path, *, out: Path | None = None, set_: Settings = (), quiet: Quiet = False) -> int:
    """Run one experiment to its end.

    Parameters
    ----------
    config: The experiment, a TOML file.
    out: The run's directory, new or empty. Unset, one is made under runs/.
    set_: A value over the file's, as key=value, e.g. -s method.beta=0.5. May be repeated.
    quiet: No progress bar.
    """
    from fedstill.experiment import runner
    from fedstill.experiment.config import load
    from fedstill.experiment.settings import settle
    from fedstill.report.terminal import Bar

    experiment = load(config, set_)
    settings = settle(experiment)
    with Bar(settings["rounds"], settings["method"]["name"], quiet=quiet) as bar:
        try:
            result = runner.run(experiment, out, watch=bar)
        except runner.Interrupted as stopped:
            return _say(f"stopped after a whole stage; go on with: fedstill resume {stopped}", 1)
    return _show(result)


@app.command
def resume(directory: Path, *, quiet: Quiet = False) -> int:
    """Go on with a run that was stopped or killed, to the same bits as if it had not been.

    Parameters
    ----------
    directory: The run's directory.
    quiet: No progress bar.
    """
    from fedstill.experiment import runner
    from fedstill.report.terminal import Bar

    settings = runner.settings_of(directory)
    with Bar(settings["rounds"], settings["method"]["name"], quiet=quiet) as bar:
        try:
            result = runner.resume(directory, watch=bar)
        except runner.Interrupted as stopped:
            return _say(f"stopped after a whole stage; go on with: fedstill resume {stopped}", 1)
    return _show(result)


@app.command
def explain(config: Path | None = None, *, set_: Settings = (), split: bool = True) -> int:
    """Show every resolved value with its origin, the arithmetic of a run, and how the data are split.

    Parameters
    ----------
    config: The experiment, a TOML file. Unset, the defaults.
    set_: A value over the file's, as key=value. May be repeated.
    split: Read the data, and draw clients × classes.
    """
    from fedstill.experiment import explain as explained
    from fedstill.experiment.config import load
    from fedstill.experiment.prepare import prepare
    from fedstill.experiment.settings import settle
    from fedstill.report import terminal

    settings = settle(load(config, set_))
    screen = terminal.console()
    rows = [(key, _toml(value), origin) for key, value, origin in explained.values(settings)]
    screen.print(terminal.table(["key", "value", "origin"], rows, words=3))
    if split:
        prepared = prepare(settings)
        screen.print()
        screen.print(terminal.table(["what", "how much"], explained.arithmetic(prepared).lines()))
        screen.print()
        counts = [prepared.sites.counts(c).tolist() for c in range(settings.clients)]
        screen.print(terminal.split(counts, prepared.dataset.classes, screen.width))
    return 0


@app.command(name="list")
def list_(kind: Literal["method", "dataset", "partition", "model", "topology", "measure"] | None = None) -> int:
    """Show what there is: methods, datasets, partitions, models, topologies, measures; one line each.

    Parameters
    ----------
    kind: Only this kind, with the fields that a config may set.
    """
    from fedstill import registry
    from fedstill.report import terminal

    screen = terminal.console()
    for one in [kind] if kind else list(registry.HOMES):
        rows = []
        for name in registry.names(one):
            entry = registry.lookup(one, name)
            fields = ", ".join(f"{k}={_toml(d)}" if d is not ... else k for k, (_, d) in entry.fields.items())
            rows.append((name, entry.summary, *([fields] if kind else [])))
        columns = [one, "what it is", *(["fields"] if kind else [])]
        screen.print(terminal.table(columns, rows, words=3))
        screen.print()
    return 0


@app.command
def compare(
    config: Path | None = None,
    *,
    methods: Names = (),
    seeds: Seeds = (),
    grid: Grid = (),
    out: Path | None = None,
    jobs: Jobs = None,
    set_: Settings = (),
    tensorboard: bool = False,
    quiet: Quiet = False,
) -> int:
    """Run several methods, settings and seeds side by side, print one table, and write a report.

    The same command goes on where it was stopped; finished runs are left alone.

    Parameters
    ----------
    config: What all runs have in common, a TOML file. Unset, the defaults.
    methods: Methods by name, e.g. --methods fedavg,fedntd. Unset, the config's.
    seeds: Seeds, e.g. --seeds 1,2,3. Unset, the config's.
    grid: Values of one key to cross with all others, e.g. --grid method.beta=0.1,1,10. May be repeated.
    out: The directory of all runs and the report. Unset, one is made under runs/.
    jobs: How many runs at once. Unset, one a core, as far as memory goes.
    set_: A value over the file's, as key=value. May be repeated.
    tensorboard: Also write TensorBoard scalars, under OUT/tensorboard.
    quiet: No progress bar.
    """
    from fedstill.experiment import compare as compared
    from fedstill.experiment.config import load, parse_grid

    experiment = load(config, set_)
    folder = out or compared.new_folder("compare")
    runs = compared.variants(experiment, folder, methods, seeds, parse_grid(grid))
    return _compare(runs, folder, jobs, quiet=quiet, tensorboard=tensorboard)


@app.command
def demo(*, seeds: Seeds = (1, 2, 3), out: Path | None = None, jobs: Jobs = None, quiet: Quiet = False) -> int:
    """Train FedAvg, FedProx and FedNTD on handwritten digits, unevenly spread over 20 clients, and show who forgets.

    Parameters
    ----------
    seeds: Seeds of the runs.
    out: The directory of all runs and the report. Unset, one is made under runs/.
    jobs: How many runs at once. Unset, one a core, as far as memory goes.
    quiet: No progress bar.
    """
    from importlib import resources

    from fedstill.experiment import compare as compared
    from fedstill.experiment.config import load

    with resources.as_file(resources.files("fedstill.recipes") / "demo.toml") as path:
        experiment = load(path)
    folder = out or compared.new_folder("demo")
    runs = compared.variants(experiment, folder, ("fedavg", "fedprox", "fedntd"), seeds)
    return _compare(runs, folder, jobs, quiet=quiet)


@app.command
def report(*directories: Path, out: Path | None = None, tensorboard: Path | None = None) -> int:
    """Write one HTML page from runs: curves, class-wise heat maps, splits, settings that differ, cost.

    Parameters
    ----------
    directories: Directories of runs, or with runs below them.
    out: The page. Unset, report.html in the first directory.
    tensorboard: Also write TensorBoard scalars to this directory.
    """
    from fedstill.errors import ConfigError
    from fedstill.report.page import write_page
    from fedstill.report.trackers import export_tensorboard

    if not directories:
        raise ConfigError("report: name at least one directory of runs")
    print(write_page(directories, out or directories[0] / "report.html"))
    if tensorboard is not None:
        export_tensorboard(directories, tensorboard)
        print(tensorboard)
    return 0


def _compare(runs: Sequence[Variant], folder: Path, jobs: int | None, *, quiet: bool, tensorboard: bool = False) -> int:
    from fedstill.experiment import compare as compared
    from fedstill.report import terminal

    with terminal.CompareBar(sum(compared.rounds_of(v) for v in runs), quiet=quiet) as bar:
        outcomes = compared.compare(runs, jobs or compared.jobs_that_fit(), bar.show)
    screen = terminal.console()
    begun = [o.variant.folder for o in outcomes if o.done]
    if begun:
        from fedstill.report.groups import groups
        from fedstill.report.page import write_page

        screen.print(terminal.results(groups(begun)))
        screen.print(f"report: {write_page(begun, folder / 'report.html')}", soft_wrap=True)
        if tensorboard:
            from fedstill.report.trackers import export_tensorboard

            export_tensorboard(begun, folder / "tensorboard")
            screen.print(f"tensorboard: {folder / 'tensorboard'}", soft_wrap=True)
    worst = 0
    for o in outcomes:
        if o.problem:
            worst = max(worst, _say(f"{o.variant.label}, seed {o.variant.seed}: {o.problem}", o.exit_code))
        elif o.state == "waiting":
            worst = max(worst, 1)
    return worst


def _show(result: fedstill.Result) -> int:
    from fedstill.report import terminal

    s = result.summary
    rows = [
        ("accuracy, last round", terminal.percent(s["accuracy"])),
        ("accuracy, best round", terminal.percent(s["best_accuracy"])),
        ("accuracy, mean of the last ten", terminal.percent(s["mean_accuracy_last_10"])),
        ("forgetting", f"{s['forgetting']:.4f}"),
        ("seconds", f"{s['seconds']:.1f}"),
        ("directory", str(result.directory)),
    ]
    screen = terminal.console()
    screen.print(terminal.table([s["method"], f"{s['dataset']}, seed {s['seed']}"], rows))
    return 0


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return "unset" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
