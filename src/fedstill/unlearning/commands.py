"""The command ``fedstill unlearn``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedstill.cli.app import (
    Flag,
    Names,
    Quiet,
    Settings,
    parse_class_numbers,
    parse_client_numbers,
    say,
)
from fedstill.core.errors import ConfigError, Interrupted
from fedstill.core.files import in_shell

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.running.preparation import Prepared
    from fedstill.unlearning.request import UnlearningRequest
    from fedstill.unlearning.strategy import Strategy


@dataclass(frozen=True)
class ForgottenData:
    """The options of ``fedstill unlearn`` that name the data to forget."""

    client: Annotated[
        Names, Parameter(name="--client", help="The clients to forget, by name or number.")
    ] = ()
    class_: Annotated[
        Names, Parameter(name="--class", help="The classes to forget, by name or number.")
    ] = ()
    examples: Annotated[
        Path | None,
        Parameter(
            name="--examples",
            help="A text file with the examples to forget, one on each line: positions in the "
            "training set, from 0, or values of --column.",
        ),
    ] = None
    column: Annotated[
        str | None,
        Parameter(
            name="--column",
            help="The column of the data that has the values in the file, e.g. patient.",
        ),
    ] = None

    def request(self, directory: Path) -> UnlearningRequest:
        """The request. Raises ConfigError for a name or value that the run in ``directory`` lacks,
        and if nothing is named.
        """
        from fedstill.unlearning.request import UnlearningRequest

        request = UnlearningRequest(
            clients=tuple(parse_client_numbers(directory, self.client)),
            classes=tuple(parse_class_numbers(directory, self.class_)),
            examples=self._positions(directory),
        )
        if not request:
            raise ConfigError("name the data to forget: --client, --examples or --class")
        return request

    def _positions(self, directory: Path) -> tuple[int, ...]:
        """The positions of the examples in the file."""
        from fedstill.unlearning.strategy import OriginalRun
        from fedstill.unlearning.unlearn import positions_of_values, read_positions, read_values

        if self.examples is None:
            if self.column is not None:
                raise ConfigError("--column needs --examples, the file with its values")
            return ()
        if self.column is None:
            return read_positions(self.examples)
        values = read_values(self.examples)
        return positions_of_values(OriginalRun.of(directory), self.column, values)


NOTHING_FORGOTTEN = ForgottenData()


@dataclass(frozen=True)
class StrategyChoice:
    """The options of ``fedstill unlearn`` that say how the model forgets."""

    strategy: Annotated[
        str,
        Parameter(
            name="--strategy",
            help="How the model forgets: retraining (exact), federaser, gradient_ascent, "
            "subtraction, sifu (with a bound), or fine_tuning (the baseline).",
        ),
    ] = "retraining"
    set_: Annotated[
        Settings,
        Parameter(
            help="An option of the strategy, as key=value, e.g. -s repair_rounds=10. May be "
            "repeated."
        ),
    ] = ()

    def load(self) -> Strategy:
        """The strategy. Raises UnknownName, or WrongConfig for a wrong option."""
        from fedstill.config.overrides import parse_overrides
        from fedstill.unlearning.request import strategy_named

        strategy: Strategy = strategy_named(self.strategy, parse_overrides(self.set_))
        return strategy


RETRAINING = StrategyChoice()


def unlearn_command(
    directory: Path,
    *,
    forgotten: Annotated[ForgottenData, Parameter(name="*")] = NOTHING_FORGOTTEN,
    chosen: Annotated[StrategyChoice, Parameter(name="*")] = RETRAINING,
    out: Path | None = None,
    exact: Path | None = None,
    check: Flag = False,
    trust_code: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Make the model of a finished run forget clients, examples or classes.

    The result is a new run directory with journal, model and certificate.json. If the command is
    interrupted, the same command continues.

    Args:
        directory: The run's directory; with --check, the directory of an unlearned run.
        forgotten: The data to forget.
        chosen: How the model forgets.
        out: The new run's directory. By default, beside the original one.
        exact: The directory of an exact result of the same request, by --strategy retraining, to
            measure how far the new model is from it.
        check: Check the certificate of an unlearned run, and all files that it names.
        trust_code: Trust the code that the run names, if it was not made on this machine.
        quiet: Print no progress.
    """
    from fedstill.report.progress import followed
    from fedstill.running.directory import trust_run
    from fedstill.running.journal import is_finished
    from fedstill.unlearning.unlearn import carry_out, planned

    if check:
        return _check(directory)
    if trust_code:
        trust_run(directory)
    request = forgotten.request(directory)
    plan = planned(directory, request, chosen.load())
    was_finished = is_finished(out or plan.default_folder)
    with followed(plan.rounds.last, f"unlearning {request.text}", quiet) as watch:
        try:
            unlearned = carry_out(plan, out, exact=exact, watch=watch)
        except Interrupted as stopped:
            return say(
                f"stopped after a complete stage, in {in_shell(str(stopped))}; the same command "
                "continues",
                1,
            )
    _print(unlearned.result.directory, unlearned.certificate)
    if was_finished:
        return say(f"{unlearned.result.directory} was finished before, so it is reused", 0)
    return 0


def _check(directory: Path) -> int:
    """Check a certificate, and print it."""
    from fedstill.unlearning.certificate import check_certificate

    checked = check_certificate(directory)
    _print(directory, checked.content)
    if checked.original_checked:
        return say("the certificate and all files of both runs agree", 0)
    folder = checked.content["original"]["folder"]
    return say(
        f"the certificate and the files of the new run agree; the original run is not in {folder}, "
        "so its files were not checked",
        0,
    )


def _print(directory: Path, certificate: Mapping[str, Any]) -> None:
    """The request, the strategy, the rounds, and a table of measurements."""
    from fedstill.report import terminal
    from fedstill.unlearning.report import verification_table
    from fedstill.unlearning.request import UnlearningRequest

    request = UnlearningRequest(**{key: tuple(ids) for key, ids in certificate["request"].items()})
    rounds = certificate["rounds"]
    screen = terminal.console(sentences=True)
    trained = "no client trained anew"
    if rounds["first"] <= rounds["last"]:
        trained = (
            f"rounds {rounds['first']} to {rounds['last']} were trained without the forgotten data"
        )
    terminal.tell(
        screen,
        f"{directory}: {request.text} forgotten by {certificate['strategy']['name']}; {trained}.",
    )
    table = verification_table([certificate])
    if not table.rows:
        return
    rows = [[title, *texts] for title, *texts in zip(table.head, *table.rows.values(), strict=True)]
    screen.print(terminal.PlainTable(["", *table.rows], rows))


def explain_kept(screen: Console, prepared: Prepared) -> None:
    """Print what ``fedstill explain`` says of unlearning: what strategies need of the run, in
    bytes. Nothing is printed for a run that keeps no updates and no checkpoints.
    """
    from fedstill.report import terminal

    settings = prepared.settings
    if settings.keep_updates or settings.keep_checkpoints_every:
        terminal.tell(screen, kept_sentence(prepared))


def kept_sentence(prepared: Prepared) -> str:
    """Which files of the run strategies of unlearning need, and how many bytes these have."""
    from fedstill.cli.explain import bytes_text, kept_update_bytes
    from fedstill.core.records import SERVER, Payload

    settings = prepared.settings
    updates = "keep_updates = true, which this run does not set"
    if settings.keep_updates:
        size = kept_update_bytes(prepared)
        updates = f"all updates of clients, {size:,} bytes ({bytes_text(size)})"
    checkpoints = "keep_checkpoints_every, which this run does not set"
    if settings.keep_checkpoints_every:
        count = settings.rounds // settings.keep_checkpoints_every
        model = Payload(params=prepared.world.initial(SERVER)).nbytes
        size = count * model
        checkpoints = f"{count} checkpoints with models of {size:,} bytes ({bytes_text(size)})"
    return (
        "To unlearn a client later: retraining and fine-tuning need no kept files; federaser, "
        f"gradient_ascent, subtraction and sifu need {updates}. Retraining is shorter, and sifu "
        f"can go back to a later round, with {checkpoints}."
    )
