"""Commands for one run, and for what there is to run: run, resume, explain, list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.app import Debug, Engine, Kind, Overwrite, Quiet, Settings, Track, app, say, tracebacks
from fedstill.errors import Interrupted

if TYPE_CHECKING:
    from fedstill.experiment.explain import Cost
    from fedstill.experiment.run_directory.result import Result

OF_SERVER = (
    ("accuracy, last round", "accuracy"),
    ("accuracy, best round", "best_accuracy"),
    ("accuracy, mean of the last ten", "mean_accuracy_last_10"),
    ("forgetting", "forgetting"),
)
"""What is said of the server's model."""

DEAR = 0.25
"""From which share of training on a measure's cost is warned of."""


@app.command(name="run")
def run_command(
    config: Path,
    *,
    out: Path | None = None,
    set_: Settings = (),
    engine: Engine | None = None,
    federation: Path | None = None,
    track: Track = (),
    overwrite: Overwrite = False,
    debug: Debug = False,
    quiet: Quiet = False,
) -> int:
    """Run one experiment to its end.

    Args:
        config: The experiment, a TOML file.
        out: The run's directory, new or empty, or to overwrite. Unset, one is made under runs/.
        set_: A value over the file's, as key=value, e.g. -s method.beta=0.5. May be repeated.
        engine: How stages are carried out, over the file's.
        federation: The folder that `deploy init` made: with --engine flower, the run is done by its clients.
        track: Tell trackers of every round: tensorboard (files in the run's directory), mlflow, wandb.
        overwrite: Begin anew in OUT: delete the run that is there, if there is nothing else.
        debug: Print the traceback of what fails; a client that fails ends the run, whatever clients.failures says.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.experiment.config.experiment import load
    from fedstill.experiment.config.settle import settle
    from fedstill.experiment.running import runner
    from fedstill.report.following import followed

    experiment = load(config, set_)
    given = {"engine": engine, "flower.federation": federation and str(federation.resolve())}
    experiment = experiment.with_values({k: v for k, v in given.items() if v}, "command line")
    settings = settle(experiment)
    with tracebacks(debug), followed(settings.rounds, settings.named.method.label, quiet) as watch:
        try:
            result = runner.run(experiment, out, watch=watch, debug=debug, overwrite=overwrite, track=track)
        except Interrupted as stopped:
            return say(f"stopped after a whole stage; go on with: fedstill resume {stopped}", 1)
    return _show(result, again=settings.query.again is not None)


@app.command(name="resume")
def resume_command(directory: Path, *, track: Track = (), debug: Debug = False, quiet: Quiet = False) -> int:
    """Go on with a run that was stopped or killed, with the same bits as an uninterrupted run.

    Args:
        directory: The run's directory.
        track: Tell these trackers too, from the first round on; those that the run had go on by themselves.
        debug: Print the traceback of what fails; a client that fails ends the run, whatever clients.failures says.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.experiment.run_directory.begun import settings_of
    from fedstill.experiment.running import runner
    from fedstill.report.following import followed

    settings = settings_of(directory)
    with tracebacks(debug), followed(settings.rounds, settings.named.method.label, quiet) as watch:
        try:
            result = runner.resume(directory, watch=watch, debug=debug, track=track)
        except Interrupted as stopped:
            return say(f"stopped after a whole stage; go on with: fedstill resume {stopped}", 1)
    return _show(result, again=settings.query.again is not None)


@app.command
def explain(config: Path | None = None, *, set_: Settings = (), split: bool = True) -> int:
    """Check a config as a run would; show every value with its origin, the arithmetic of a run, and the data's split.

    Args:
        config: The experiment, a TOML file. Unset, the defaults.
        set_: A value over the file's, as key=value. May be repeated.
        split: Draw the split, clients × classes.
    """
    from fedstill.experiment import explain as explained
    from fedstill.experiment.config.experiment import load
    from fedstill.experiment.config.settle import settle
    from fedstill.experiment.preparing.prepared import prepare
    from fedstill.experiment.who_asks import who_asks
    from fedstill.report import catalogue, terminal
    from fedstill.report.drawn_data import drawn_data

    settings = settle(load(config, set_))
    screen = terminal.console(sentences=True)
    rows = [
        (key, catalogue.value(value), origin, explained.about_key(settings, key))
        for key, value, origin in explained.resolved_values(settings)
    ]
    screen.print(terminal.table(["key", "value", "origin", "what it is"], rows, words=4))
    prepared = prepare(settings)
    screen.print()
    one_round = explained.arithmetic(prepared)
    screen.print(terminal.table(["what", "how much"], one_round.lines()))
    for line in explained.told_of_examples(prepared):
        screen.print(f"data: {line}", soft_wrap=True)
    _explain_measures(explained.costs(prepared, one_round), one_round.many)
    screen.print()
    networks = [(name, f"{size:,}", able) for name, size, able in explained.models(prepared)]
    screen.print(terminal.table(["network", "parameters", "has"], networks))
    if split and prepared.sites.parts:
        screen.print()
        _explain_queries(*who_asks(prepared))
        for drawn in drawn_data(prepared, min(screen.width, 160)):
            screen.print(drawn)
    return 0


@app.command(name="list")
def list_(
    kind: Kind | None = None,
    name: str | None = None,
) -> int:
    """Show what there is: methods, datasets, partitions, models, topologies, measures, streams.

    Args:
        kind: Only this kind, with the fields that a config may set; the plural is understood, too.
        name: Only this one, with all that is declared of it; a file of yours is possible, too.
    """
    from fedstill import registry
    from fedstill.report import catalogue, terminal

    screen = terminal.console(sentences=True)
    if kind and name:
        screen.print(catalogue.card(registry.lookup(kind, name)))
        return 0
    for one in [kind] if kind else list(registry.HOMES):
        entries = [registry.lookup(one, n) for n in registry.names(one)]
        if kind:
            screen.print(*catalogue.overview(entries))
        else:
            screen.print(terminal.table([one, "what it is"], [(e.name, e.summary) for e in entries], words=3))
            screen.print()
    return 0


def _explain_measures(costs: Sequence[Cost], many: str) -> None:
    from fedstill.report import terminal

    screen = terminal.console(sentences=True)
    if costs:
        head = ["measure", "what it is", "rounds", f"{many} a round", "of training"]
        screen.print()
        screen.print(terminal.table(head, [c.row for c in costs], words=2))
    for cost in costs:
        if cost.share > DEAR:
            more = "more than training itself" if cost.share > 1 else f"{100 * cost.share:.0f} % of what training costs"
            todo = "raise measure_every, or leave it out" if cost.rounds > 1 else "leave it out if you do not need it"
            screen.print(f"warning: measure {cost.name} costs {more}; {todo}", soft_wrap=True)


def _explain_queries(said: str, rows: Sequence[tuple[str, str, str]]) -> None:
    from fedstill.report import terminal

    screen = terminal.console(sentences=True)
    if rows:
        screen.print(terminal.table(["client", "asks for", "why"], rows, words=3))
    if said:
        screen.print(said, soft_wrap=True)
    if rows or said:
        screen.print()


def _last_seen(result: Result, key: str) -> float | None:
    """A number of the last measured round; None if no measure gave it."""
    from fedstill.report.runs import seen_by_round

    return next(reversed(seen_by_round(result.measures, key).values()), None)


def _for_the_clients(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the clients' own models can do, where they are the answer."""
    from fedstill.report.numbers import PERSONAL
    from fedstill.report.terminal import percent

    if summary.get("answer") != "clients":
        return []
    measured = f"{summary['personal_clients']} of {summary['clients']}"
    return [*((m.title, percent(summary[m.key])) for m in PERSONAL), ("clients that were measured", measured)]


def _by_query(history: Sequence[Mapping[str, Any]], key: str) -> str:
    """A number of each round in which clients asked, in order."""
    from fedstill.report import terminal

    return " → ".join(terminal.percent(e[key]) for e in history if key in e)


def _show(result: Result, again: bool) -> int:
    from fedstill.metrics.answers import UNTAUGHT
    from fedstill.report import terminal
    from fedstill.report.numbers import BELOW_ZERO, COLUMNS, over_time

    s = result.summary
    rows = [
        *_for_the_clients(s),
        *(((what, terminal.percent(s[key])) for what, key in OF_SERVER) if s["accuracy"] is not None else ()),
        *(
            (m.title, terminal.percent(s[m.key]))
            for m in COLUMNS
            if m.key.startswith(("query_", "own_test")) and m.key in s
        ),
        *(
            (m.title, terminal.percent(v))
            for m in COLUMNS
            if "/" in m.key and (v := _last_seen(result, m.key)) is not None
        ),
        *([("gain, query after query", _by_query(result.history, "query_gain"))] if again else []),
        *over_time(s),
        *([("queries without a teacher", str(s[UNTAUGHT]))] if s.get(UNTAUGHT) else []),
        ("seconds", f"{s['seconds']:.1f}"),
        *((f"of these, measure {name}", f"{spent:.1f}") for name, spent in s.get("seconds_measures", {}).items()),
        ("directory", str(result.directory)),
    ]
    screen = terminal.console()
    screen.print(terminal.table([s["method"], f"{s['dataset']}, seed {s['seed']}"], rows))
    if (s["forgetting"] or 0) < 0:
        screen.print(BELOW_ZERO, soft_wrap=True)
    if s.get("refusals"):
        screen.print(f"warning: {s['refusals']}", soft_wrap=True)
    return 0
