"""The command that says what a run will do before it starts: explain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill import manifest
from fedstill.cli.app import Engine, Settings, experiment_of

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.running.explain import Cost

DEAR = 0.25
"""From which share of training on a measure's cost is warned of."""


def explain(
    config: Path | None = None,
    *,
    set_: Settings = (),
    engine: Engine | None = None,
    federation: Path | None = None,
    split: bool = True,
) -> int:
    """Check a config as a run would; show every value that counts, its origin, a run's arithmetic,
    the data's split.

    Where the ranking's maps (fedstill rank map) have a cell near this setting, and data are images
    as theirs, it says what they found there.

    Args:
        config: The experiment, a TOML file. Unset, the defaults.
        set_: A value over the file's, as key=value. May be repeated.
        engine: How stages are carried out, over the file's.
        federation: The folder that `deploy init` made, as for `run`. Nothing is sent to its
            clients.
        split: Draw the split, clients × classes.
    """
    from fedstill.config.resolve import settle
    from fedstill.report import catalogue, terminal
    from fedstill.report.terminal import drawn_data
    from fedstill.running import explain as explained
    from fedstill.running.cautions import cautions
    from fedstill.running.preparation import prepare

    settings = settle(experiment_of(config, set_, engine, federation))
    screen = terminal.console(sentences=True)
    rows = [
        (key, catalogue.value(value), origin, explained.about_key(settings, key))
        for key, value, origin in explained.resolved_values(settings)
    ]
    _explain_values(screen, rows)
    prepared = prepare(settings)
    screen.print()
    arithmetic = explained.arithmetic(prepared)
    screen.print(terminal.table(["what", "how much"], arithmetic.lines()))
    for line in explained.data_sentences(prepared):
        terminal.tell(screen, f"data: {line}")
    for caution in cautions(prepared):
        terminal.tell(screen, caution)
    _explain_measures(explained.costs(prepared, arithmetic), arithmetic.many)
    screen.print()
    networks = [(name, f"{size:,}", able) for name, size, able in explained.models(prepared)]
    screen.print(terminal.table(["network", "parameters", "has"], networks))
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
    """Prints a row for each value with its origin and its description. In a narrow terminal the
    description has a line of its own.
    """
    from rich.padding import Padding

    from fedstill.report import terminal

    if screen.width >= terminal.SENTENCES_WIDTH:
        screen.print(terminal.table(["key", "value", "origin", "what it is"], rows, words=4))
        return
    screen.print("key = value (origin)", style="bold")
    for key, value, origin, description in rows:
        screen.print(f"{key} = {value} ({origin})")
        screen.print(Padding(description, (0, 0, 0, 4)))


def _explain_measures(costs: Sequence[Cost], unit: str) -> None:
    """Prints what each measure costs in a round, and a warning for an expensive one."""
    from fedstill.report import terminal

    screen = terminal.console(sentences=True)
    if costs:
        head = ["measure", "what it is", "rounds", f"{unit} a round", "of training"]
        screen.print()
        screen.print(terminal.table(head, [c.row for c in costs], words=2))
    for cost in costs:
        if cost.share is not None and cost.share > DEAR:
            terminal.tell(screen, _cost_warning(cost, cost.share))


def _cost_warning(cost: Cost, share: float) -> str:
    """A warning of an expensive measure; ``share``: of the cost of training."""
    amount = f"{100 * share:.0f} % of what training costs"
    if share > 1:
        amount = "more than training itself"
    remedy = "leave it out if you do not need it"
    if cost.rounds > 1:
        remedy = "raise measure_every, or leave it out"
    return f"warning: measure {cost.name} costs {amount}; {remedy}"
