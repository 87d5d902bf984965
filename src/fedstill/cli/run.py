"""Commands for a single run: explain, run and resume; and list, which lists methods and so on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill import manifest
from fedstill.cli.app import (
    Engine,
    Flag,
    Kind,
    Names,
    Quiet,
    Settings,
    experiment_of,
    first_imports,
    say,
    tracebacks,
)
from fedstill.core.errors import ConfigError, Interrupted
from fedstill.core.files import in_shell

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.cli.explain import MeasureCost
    from fedstill.report.terminal import PlainTable
    from fedstill.running.result import Result

SERVER_ROWS = (
    ("accuracy, last round", "accuracy"),
    ("accuracy, best round", "best_accuracy"),
    ("accuracy, mean of the last ten", "mean_accuracy_last_10"),
    ("forgetting", "forgetting"),
)
"""The rows about the server's model: titles and keys of a summary."""

MAX_CONFUSION_CLASSES = 12
"""With more classes than these, the confusion matrix is not printed."""


def run_command(  # noqa: PLR0913 - the options of the command run
    config: Path,
    *,
    out: Path | None = None,
    set_: Settings = (),
    engine: Engine | None = None,
    federation: Path | None = None,
    track: Names = (),
    overwrite: Flag = False,
    debug: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Run one experiment.

    Args:
        config: The config, a TOML file.
        out: The run's directory, which must be new or empty, or --overwrite. By default, a new one
            under runs/.
        set_: A value that replaces the file's, as key=value, e.g. -s method.beta=0.5. May be
            repeated.
        engine: The engine that executes the stages; replaces the file's.
        federation: The folder that `deploy init` created. With --engine flower, its clients execute
            the run.
        track: Report every round to these trackers: tensorboard (files in the run's directory),
            mlflow, wandb.
        overwrite: Delete the run in OUT and start again; refused if OUT contains other files.
        debug: Print tracebacks of errors; a failing client ends the run, regardless of
            clients.failures.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    with first_imports():
        from fedstill.config.resolve import resolve
        from fedstill.report.progress import followed
        from fedstill.running import runner

    experiment = experiment_of(config, set_, engine, federation)
    settings = resolve(experiment)  # for progress and the table; the runner resolves it again
    with tracebacks(debug), followed(settings.rounds, settings.named.method.label, quiet) as watch:
        try:
            result = runner.run(
                experiment, out, watch=watch, debug=debug, overwrite=overwrite, track=track
            )
        except Interrupted as stopped:
            return _say_stopped(stopped)
    return _show(result, has_queries_each_round=settings.exchange_each_round)


def resume_command(
    directory: Path,
    *,
    track: Names = (),
    trust_code: Flag = False,
    debug: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Continue a run that was stopped or killed; the result has the same bits as that of an
    uninterrupted run.

    Args:
        directory: The run's directory.
        track: Also report to these trackers, from the first round on. The run's own trackers
            continue by themselves.
        trust_code: Trust the code that the run names, if it was not made on this machine.
        debug: Print tracebacks of errors; a failing client ends the run, regardless of
            clients.failures.
        quiet: Print no progress: no bar in a terminal, no lines elsewhere.
    """
    with first_imports():
        from fedstill.report.progress import followed
        from fedstill.running import runner
        from fedstill.running.directory import settings_of, trust_run
        from fedstill.running.journal import check_config

    check_config(directory)
    if trust_code:
        trust_run(directory)
    settings = settings_of(directory)
    with tracebacks(debug), followed(settings.rounds, settings.named.method.label, quiet) as watch:
        try:
            result = runner.resume(directory, watch=watch, debug=debug, track=track)
        except Interrupted as stopped:
            return _say_stopped(stopped)
    return _show(result, has_queries_each_round=settings.exchange_each_round)


def _say_stopped(run: Interrupted) -> int:
    """Print the command that continues a run that was interrupted. Return the exit code."""
    directory = in_shell(str(run))
    return say(f"stopped after a complete stage; continue with: fedstill resume {directory}", 1)


def list_command(kind: Kind | None = None, name: str | None = None) -> int:
    """List all methods, datasets, partitions, models, topologies, measures and streams.

    Args:
        kind: Only this kind, with the fields that a config can set. The plural works, too.
        name: Only this entry, with everything that it declares. Your own file works, too.
    """
    from fedstill.core import descriptions, registry
    from fedstill.report import catalogue, terminal

    if name and not kind:
        raise ConfigError(f"list: give the kind, too, e.g. fedstill list method {in_shell(name)}")
    screen = terminal.console(sentences=True)
    if kind and name:
        screen.print(catalogue.card(registry.lookup(kind, name)))
        return 0
    if kind:
        entries = [registry.lookup(kind, entry) for entry in registry.names(kind)]
        screen.print(*catalogue.overview(entries))
        return 0
    for home in registry.HOMES:
        entries = [registry.lookup(home, entry) for entry in registry.names(home)]
        rows = [(entry.name, descriptions.summary(entry)) for entry in entries]
        screen.print(terminal.PlainTable([home, "description"], rows, words=3))
        screen.print()
    return 0


def _personal_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows about the clients' answers, if they are not the server's only model."""
    from fedstill.report.summary import PERSONAL
    from fedstill.report.terminal import percent

    if "personal_clients" not in summary:
        return
    for metric in PERSONAL:
        yield metric.title, percent(summary[metric.key])
    yield "clients that were measured", f"{summary['personal_clients']} of {summary['clients']}"


def _metric_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The metrics that the run has recorded, in the last round and in the best round."""
    from fedstill.metrics.classification import METRICS

    for name, metric in METRICS.items():
        for key, place in ((name, "last round"), (f"best_{name}", "best round")):
            if summary.get(key) is not None:
                yield f"{metric.title}, {place}", metric.text(summary[key])


def _selection_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows about the selected round and the early stop, if there are any."""
    from fedstill.report.terminal import percent
    from fedstill.running.journal import STOP_REASON
    from fedstill.running.selection import BestRound

    best = BestRound.of_summary(summary)
    if best is not None:
        yield "selected round", f"{best.round}, by {best.criterion} ({best.score:.4g})"
        if best.accuracy is not None and best.on != "test":
            yield "accuracy, selected round", percent(best.accuracy)
    if STOP_REASON in summary:
        place = f"in round {summary['stopped_in_round']} of {summary['rounds']}"
        yield "stopped early", f"{place}: {summary[STOP_REASON]}"


def _confusion_table(classes: Sequence[str], matrix: Sequence[Sequence[int]]) -> PlainTable:
    """The confusion matrix of the last round: rows are classes, columns are predictions."""
    from fedstill.report import terminal

    head = ["class", *(f"predicted {name}" for name in classes)]
    rows = [[name, *map(str, row)] for name, row in zip(classes, matrix, strict=True)]
    return terminal.PlainTable(head, rows)


def _show(result: Result, has_queries_each_round: bool) -> int:
    """Print the table of a finished run, and its warnings. Return the exit code."""
    from fedstill.report import terminal
    from fedstill.report.summary import BELOW_ZERO

    summary = result.summary
    screen = terminal.console()
    head = [summary["method"], f"{summary['dataset']}, seed {summary['seed']}"]
    screen.print(terminal.PlainTable(head, list(_rows(result, has_queries_each_round))))
    if "confusion" in summary and len(result.classes) <= MAX_CONFUSION_CLASSES:
        screen.print(_confusion_table(result.classes, summary["confusion"]))
    if (summary["forgetting"] or 0) < 0:
        terminal.tell(screen, BELOW_ZERO)
    for warning in ("frequent_class", "refusals"):
        if summary.get(warning):
            terminal.tell(screen, f"warning: {summary[warning]}")
    return 0


def _rows(result: Result, has_queries_each_round: bool) -> Iterator[tuple[str, str]]:
    """The rows of a finished run's table: a title and a number."""
    from fedstill.metrics.local_models import UNTAUGHT
    from fedstill.report.summary import over_time
    from fedstill.report.terminal import percent

    summary = result.summary
    yield from _personal_rows(summary)
    if summary["accuracy"] is not None:
        for title, key in SERVER_ROWS:
            yield title, percent(summary[key])
    yield from _metric_rows(summary)
    yield from _column_rows(result)
    yield from _site_rows(summary)
    if has_queries_each_round:
        gains = [event["query_gain"] for event in result.history if "query_gain" in event]
        yield "gain by round", " → ".join(map(percent, gains))
    yield from over_time(summary)
    yield from _selection_rows(summary)
    if summary.get(UNTAUGHT):
        yield "queries without a teacher", str(summary[UNTAUGHT])

    yield from _privacy_rows(summary)
    yield "seconds", f"{summary['seconds']:.1f}"
    for name, seconds in summary.get("seconds_measures", {}).items():
        yield f"of these, for the measure {name}", f"{seconds:.1f}"
    yield "directory", str(result.directory)


def _privacy_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The largest privacy loss of any client; empty if a client has no bound."""
    epsilons = summary.get("privacy", {}).get("epsilon")
    if epsilons and None not in epsilons:
        yield "epsilon, largest of any client", f"{max(epsilons):.2f}"


MAX_LISTED_SITES = 12
"""With more sites, their accuracies are not listed."""


def _site_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The accuracy of the last model on each real site's own test set; empty for simulations."""
    from fedstill.report.terminal import percent

    by_client = summary.get("own_test_by_client", {})
    if "own_test_weighted" in summary and len(by_client) <= MAX_LISTED_SITES:
        for client, accuracy in by_client.items():
            yield f"own tests, client {client}", percent(accuracy)


def _column_rows(result: Result) -> Iterator[tuple[str, str]]:
    """Rows for columns of a comparison's table: queries, own tests, and the latest numbers of
    measures.
    """
    from fedstill.report.summary import COLUMNS, own_column
    from fedstill.report.terminal import percent
    from fedstill.running.numbers import RunNumbers

    for column in COLUMNS:
        value = result.summary.get(column.key)
        if column.key.startswith(("query_", "own_test")) and value is not None:
            yield column.title, f"{column.scale * value:.{column.digits}f} {column.unit}"
    events = {"round": result.history, "measure": result.measures}
    numbers = RunNumbers(events, len(result.classes))
    for column in COLUMNS:
        if "/" in column.key and column.key in numbers.summary:
            yield column.title, percent(numbers.summary[column.key])
    for metric in numbers.user_metrics:
        value = numbers.summary[metric]
        yield metric, f"{value:.{own_column(metric, [value]).digits}f}"


def explain_command(
    config: Path | None = None,
    *,
    set_: Settings = (),
    engine: Engine | None = None,
    federation: Path | None = None,
    split: bool = True,
) -> int:
    """Check a config before a run: show every value and its origin, the cost, and the data of each
    client.

    If a cell of the ranking's maps (`fedstill rank map`) is near this setting and the data are
    images, it also prints the result of that cell.

    Args:
        config: The config, a TOML file. By default, the default values.
        set_: A value that replaces the file's, as key=value. May be repeated.
        engine: The engine that executes the stages; replaces the file's.
        federation: The folder that `deploy init` created, as for `run`. Nothing is sent to its
            clients.
        split: Draw the number of examples of each client by class.
    """
    from fedstill.cli import explain
    from fedstill.config.resolve import resolve
    from fedstill.report import catalogue, terminal
    from fedstill.report.terminal import drawn_data
    from fedstill.running.preparation import prepare
    from fedstill.running.setting_warnings import setting_warnings

    settings = resolve(experiment_of(config, set_, engine, federation))
    screen = terminal.console(sentences=True)
    rows = [
        (resolved.key, catalogue.value(resolved.value), resolved.origin, resolved.description)
        for resolved in explain.resolved_values(settings)
    ]
    _explain_values(screen, rows)
    prepared = prepare(settings)
    screen.print()
    estimate = explain.run_estimate(prepared)
    screen.print(terminal.PlainTable(["quantity", "value"], estimate.lines()))
    for line in explain.data_sentences(prepared):
        terminal.tell(screen, f"data: {line}")
    for warning in setting_warnings(prepared):
        terminal.tell(screen, warning)
    costs = explain.measure_costs(prepared, estimate)
    _explain_measures(screen, costs, estimate.examples_noun)
    screen.print()
    networks = [
        (network.label, f"{network.parameters:,}", network.capabilities)
        for network in explain.network_summaries(prepared)
    ]
    screen.print(terminal.PlainTable(["network", "parameters", "has"], networks))
    if split and prepared.sites.split is not None:
        screen.print()
        for part in manifest.split_explanations():
            explain_part = part.load()
            explain_part(screen, prepared)
        for drawn in drawn_data(prepared, min(screen.width, 160)):
            screen.print(drawn)
    for part in manifest.explanations():
        explain_part = part.load()
        explain_part(screen, prepared)
    return 0


def _explain_values(screen: Console, rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Print a row for each value with its origin and its description. In a narrow terminal, the
    description is on the next line.
    """
    from rich.padding import Padding

    from fedstill.report import terminal

    if screen.width >= terminal.SENTENCES_WIDTH:
        screen.print(terminal.PlainTable(["key", "value", "origin", "description"], rows, words=4))
        return
    screen.print("key = value (origin)", style="bold")
    for key, value, origin, description in rows:
        screen.print(f"{key} = {value} ({origin})")
        screen.print(Padding(description, (0, 0, 0, 4)))


def _explain_measures(screen: Console, costs: Sequence[MeasureCost], unit: str) -> None:
    """Print the cost of each measure, and a warning for each expensive measure."""
    from fedstill.report import terminal

    if costs:
        head = ["measure", "description", "rounds", f"{unit} per round", "of training cost"]
        screen.print()
        screen.print(terminal.PlainTable(head, [cost.row for cost in costs], words=2))
    for cost in costs:
        if cost.warning:
            terminal.tell(screen, cost.warning)
