"""The command line. Exit code 0: done; 2: it cannot be done as it was written; 1: it failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

import fedstill
from fedstill.errors import FedstillError

app = App(
    name="fedstill",
    help="Federated learning that does not forget: train, measure and compare methods when clients' data differ.",
    version=fedstill.__version__,
    result_action="return_value",
)

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
    screen.print(terminal.table("", ["key", "value", "origin"], rows))
    if split:
        prepared = prepare(settings)
        screen.print()
        screen.print(terminal.table("", ["what", "how much"], explained.arithmetic(prepared).lines()))
        screen.print()
        counts = [prepared.sites.counts(c).tolist() for c in range(settings.clients)]
        screen.print(terminal.split(counts, prepared.dataset.classes))
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
        screen.print(terminal.table("", columns, rows))
        screen.print()
    return 0


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
    screen.print(terminal.table("", [s["method"], f"{s['dataset']}, seed {s['seed']}"], rows))
    return 0


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return "unset" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
