"""The command ``fedstill why``: which clients caused forgetting."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators

from fedstill.cli.app import (
    Flag,
    Quiet,
    check_contains_run,
    number_or_name,
    parse_class_numbers,
    parse_client_number,
    say,
)
from fedstill.core.errors import ConfigError
from fedstill.core.files import in_shell
from fedstill.running.journal import JOURNAL

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.attribution.class_changes import Attribution, ClassChange
    from fedstill.running.replay import Replay
    from fedstill.running.runs import Run

DrawCount = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
RoundNumber = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
RoundCount = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Game = Literal["idle", "absent"]

DEFAULT_ROUNDS = 5
"""The default number of rounds that are replayed without a client."""

OPTIONS_OF_QUESTION: Mapping[str, set[str]] = {
    "--client": {"--round"},
    "--without": {"--class", "--round", "--from", "--rounds", "--once"},
    "--draws": {"--class", "--round"},
    "": {"--class", "--round", "--worst", "--exact", "--game", "--open"},
}
"""The options that are compatible with each question; the empty text is the plain command."""


def check_options(names: Sequence[str]) -> None:
    """Raise ConfigError if an option is not compatible with the question.

    >>> check_options(["--class", "--worst"])
    """
    question = ""
    for option in OPTIONS_OF_QUESTION:
        if option in names:
            question = option
            break
    extra = [
        name for name in names if name != question and name not in OPTIONS_OF_QUESTION[question]
    ]
    if extra and not question:
        raise ConfigError(
            f"{' and '.join(extra)}: also set the client to leave out, with --without"
        )
    if extra:
        raise ConfigError(f"{extra[0]} cannot be combined with {question}")


def why_command(  # noqa: PLR0913 - the options of the command why
    directory: Path,
    *,
    class_: Annotated[str | None, Parameter(name="--class")] = None,
    round_: Annotated[str | None, Parameter(name="--round")] = None,
    worst: RoundCount = 1,
    exact: Flag = False,
    game: Game | None = None,
    without: str | None = None,
    from_: Annotated[RoundNumber, Parameter(name="--from")] = None,
    rounds: RoundNumber = None,
    once: Flag = False,
    draws: DrawCount = None,
    client: str | None = None,
    open_: Annotated[Flag, Parameter(name="--open")] = False,
    trust_code: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Show which clients caused forgetting: how much accuracy a class lost in a round by local
    training, by averaging, and by client.

    If the journal does not contain the measure contributions, the rounds since the nearest
    checkpoint are replayed; keep_checkpoints_every in the config shortens this. If a method's
    aggregation is not a sum, contributions are computed from two end points instead of along a
    path, and the output mentions it. Results are stored for later calls and for the report, except
    those of --exact and --game.

    Args:
        directory: The run's directory.
        class_: The class, by name or number. By default, the class with the largest loss.
        round_: The round: its number, or best. By default, the round with the largest loss; with
            --client, round 1.
        worst: How many of the largest losses to report.
        exact: Compute all coalitions of the round's clients; at most ten clients.
        game: What clients outside a coalition do: change nothing (idle), or not reply (absent).
        without: Replay rounds without this client, by name or number, and compare.
        from_: The first round without the client. By default, --round or the round with the largest
            loss.
        rounds: How many rounds to replay without the client. By default, 5.
        once: Leave the client out in the first of these rounds only.
        draws: Repeat the round with this many other samples of clients, e.g. 10, to see how much
            the loss depends on the sample.
        client: If clients learn from peers: show what this client, by name or number, learned in
            --round, by phase and by teacher.
        open_: Write the run's page with the charts, and open it.
        trust_code: Trust the code in the run's config, if the run was created on another machine.
        quiet: Print no progress.
    """
    from fedstill.attribution.class_changes import find_changes
    from fedstill.running.directory import trust_run
    from fedstill.running.runs import read_run

    options = {
        "--client": client is not None,
        "--without": without is not None,
        "--draws": bool(draws),
        "--class": class_ is not None,
        "--game": game is not None,
        "--from": from_ is not None,
        "--rounds": rounds is not None,
        "--once": once,
        "--open": open_,
        "--worst": worst > 1,
        "--exact": exact,
    }
    check_options([name for name, is_set in options.items() if is_set])
    check_contains_run(directory)
    if trust_code:
        trust_run(directory)
    if not read_run(directory).rounds:
        return say(
            f"{directory} has not finished a round; continue with: fedstill resume "
            f"{in_shell(directory)}",
            2,
        )
    round_number = _round_number(directory, round_)
    if client is not None:
        return _print_exchange(
            directory, parse_client_number(directory, client), round_number or 1, quiet
        )

    label = None
    if class_ is not None:
        label = parse_class_numbers(directory, [class_])[0]
    changes = find_changes(directory, label, round_number)
    largest = changes[0]
    if without is not None:
        span = ReplayedSpan(from_ or largest.round, rounds or DEFAULT_ROUNDS, once)
        number = parse_client_number(directory, without)
        return _print_without(directory, largest, number, span, quiet)
    if draws:
        return _print_samples(directory, largest, draws, quiet)

    _print_no_loss_note(directory, largest, label, round_number)
    for change in changes[:worst]:
        _print_attribution(directory, change, exact, game, quiet)
    if open_:
        _open_page(directory)
    return 0


def _round_number(directory: Path, text: str | None) -> int | None:
    """The value of ``--round``; None if it is not set."""
    if text is None:
        return None
    if text == "best":
        from fedstill.running.journal import read_journal
        from fedstill.running.selection import best_round_of

        return best_round_of(directory, read_journal(directory / JOURNAL))
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--round {text} must be a whole number from 1, or best")
    return int(text)


# ---- attribution to clients ----------------------------------------------------------------------


def _print_no_loss_note(
    directory: Path, largest: ClassChange, label: int | None, round: int | None
) -> None:
    from fedstill.attribution.class_changes import no_loss_note
    from fedstill.report import terminal
    from fedstill.running.runs import read_run

    note = no_loss_note(read_run(directory), largest, label, round)
    if note:
        terminal.tell(terminal.console(sentences=True), note)


def _print_attribution(
    directory: Path, change: ClassChange, exact: bool, game: Game | None, quiet: bool
) -> None:
    from fedstill.attribution import class_changes
    from fedstill.report import terminal
    from fedstill.running.runs import read_run

    run = read_run(directory)
    attribution = None
    if not exact and game is None:
        looks = run.numbers.looks(class_changes.MEASURE)
        attribution = class_changes.attribute(change, looks)
    if attribution is None:
        attribution = _measure(run, change, exact, game, quiet)
    screen = terminal.console(sentences=True)
    if attribution is None:
        name = repr(run.classes[change.label])
        terminal.tell(screen, f"Round {change.round} has no contributions to class {name}.")
        return
    terminal.tell(screen, class_changes.sentence_of(run, attribution))
    if attribution.clients:
        table = class_changes.contribution_table(run, attribution)
        screen.print(terminal.PlainTable(table.head, table.lines))
        terminal.tell(screen, class_changes.method_note(attribution))
    advice = class_changes.advice(run, attribution)
    if advice:
        terminal.tell(screen, advice)
    _print_next_command(screen, directory, run, attribution)


def _measure(
    run: Run, change: ClassChange, exact: bool, game: Game | None, quiet: bool
) -> Attribution | None:
    """Replay the round to measure contributions; they are stored unless an option changes them."""
    from fedstill.attribution.class_changes import MEASURE, attribute
    from fedstill.attribution.replays import check_coalitions, measure_round
    from fedstill.measures.contributions import Contributions
    from fedstill.running.journal import add_looks
    from fedstill.running.numbers import RunNumbers
    from fedstill.running.replay import Replay

    labels = {change.label}
    for look in run.numbers.looks(MEASURE):
        if look.round == change.round:
            labels.update(look.classes)
    replay = Replay.of_round(run.folder, change.round)
    if exact:
        check_coalitions(replay, change.round)
    measure = Contributions(game, exact, sorted(labels))
    announcement = ReplayAnnouncement(replay, change.round, quiet)
    events = measure_round(replay, change.round, measure, announcement)
    if not exact and game is None:
        add_looks(run.folder, events)
    numbers = RunNumbers({"measure": events}, len(run.classes))
    return attribute(change, numbers.looks(MEASURE))


def _print_next_command(
    screen: Console, directory: Path, run: Run, attribution: Attribution
) -> None:
    """The command that replays rounds without the client with the largest loss."""
    from fedstill.attribution.class_changes import client_name

    contributions = attribution.clients
    if not contributions:
        return
    client = min(contributions, key=contributions.__getitem__)
    if contributions[client] >= 0:
        return
    change = attribution.change
    label_text = in_shell(number_or_name(change.label, run.classes))
    client_text = in_shell(number_or_name(client, run.client_names))
    command = (
        f"fedstill why {in_shell(directory)} --class {label_text} --without {client_text} "
        f"--from {change.round}"
    )
    screen.print(f"To replay without {client_name(run, client)}: {command}", soft_wrap=True)


# ---- without a client ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayedSpan:
    """The rounds that are replayed without a client.

    ``once``: whether to leave the client out in the first round only.
    """

    first: int
    count: int
    once: bool


def _print_without(
    directory: Path, change: ClassChange, client: int, span: ReplayedSpan, quiet: bool
) -> int:
    from fedstill.attribution import class_changes
    from fedstill.attribution.replays import accuracies_by_round
    from fedstill.report import terminal
    from fedstill.running.replay import Replay, Without
    from fedstill.running.runs import read_run

    replay = Replay.of_round(directory, span.first)
    run = read_run(directory)
    settings = replay.prepared.settings
    # The run may have stopped early, or be unfinished.
    last = min(span.first + span.count - 1, len(run.rounds))
    if client >= settings.clients:
        return say(f"--without {client}: the run has clients 0 to {settings.clients - 1}", 2)
    if span.first > last:
        return say(f"--from {span.first}: the run has rounds 1 to {last}", 2)

    without_client = Without(frozenset({client}), span.first)
    period = f"from round {span.first} on"
    if span.once:
        without_client = replace(without_client, last=span.first)
        period = f"in round {span.first} only"
    announcement = ReplayAnnouncement(replay, last, quiet)
    replayed = accuracies_by_round(replay, span.first, last, without_client, announcement)

    original = run.numbers.by_class("class_accuracy")
    lines = []
    for round, accuracies in replayed.items():
        with_client = None
        if round in original:
            with_client = original[round][change.label]
        without = accuracies[change.label]
        if with_client is not None and without is not None:
            difference = class_changes.points(without - with_client)
            cells = [terminal.percent(with_client), terminal.percent(without), difference]
            lines.append([str(round), *cells])
    screen = terminal.console(sentences=True)
    terminal.tell(
        screen,
        f"Class {run.classes[change.label]!r} without {class_changes.client_name(run, client)} "
        f"{period}; everything else is unchanged, including the samples of clients.",
    )
    screen.print(
        terminal.PlainTable(["round", "original", "without", "difference [points]"], lines)
    )
    terminal.tell(
        screen,
        "This is the effect of leaving the client out, which differs from its contribution to a "
        "round.",
    )
    return 0


# ---- other samples of clients --------------------------------------------------------------------


def _print_samples(directory: Path, change: ClassChange, count: int, quiet: bool) -> int:
    from fedstill.attribution.replays import repeat_round, sample_sentence, sample_table
    from fedstill.report import terminal
    from fedstill.running.replay import Replay
    from fedstill.running.runs import read_run

    def progress(number: int) -> None:
        if quiet:
            return
        if number:
            say(f"sample {number} of {count}", 0)
        else:
            say(f"round {change.round} with the original clients", 0)

    replay = Replay.of_round(directory, change.round)
    announcement = ReplayAnnouncement(replay, change.round, quiet)
    rounds = repeat_round(replay, change.round, count, announcement, progress)
    screen = terminal.console(sentences=True)
    terminal.tell(screen, sample_sentence(read_run(directory), change, rounds))
    table = sample_table(change, rounds)
    screen.print(terminal.PlainTable(table.head, table.lines))
    return 0


# ---- learning from peers -------------------------------------------------------------------------


def _print_exchange(directory: Path, client: int, round: int, quiet: bool) -> int:
    from fedstill.attribution import replays
    from fedstill.report import terminal
    from fedstill.running.replay import Replay
    from fedstill.running.runs import read_run

    replay = Replay.of_round(directory, round)
    run = read_run(directory)
    clients = replay.prepared.settings.clients
    if client >= clients or round > len(run.rounds):
        return say(f"the run has clients 0 to {clients - 1} and rounds 1 to {len(run.rounds)}", 2)

    def announce_exchanges(count: int) -> None:
        if not quiet:
            say(
                f"then replaying client {client}'s exchange {count} times: with all, some and none "
                "of its teachers",
                0,
            )

    announcement = ReplayAnnouncement(replay, round, quiet)
    effect = replays.exchange_effect(replay, client, round, announcement, announce_exchanges)
    screen = terminal.console(sentences=True)
    terminal.tell(screen, replays.exchange_sentence(run, effect))
    table = replays.teacher_table(run, effect)
    screen.print(terminal.PlainTable(table.head, table.lines))
    terminal.tell(screen, replays.exchange_note(effect))
    return 0


# ---- progress and page ---------------------------------------------------------------------------

SECONDS_BETWEEN_MESSAGES = 5.0


@dataclass
class ReplayAnnouncement:
    """Prints which rounds are replayed, their estimated time, and the progress."""

    replay: Replay
    last_round: int
    quiet: bool
    _last_message: float = field(default_factory=time.monotonic)

    def __call__(self, round: int, last: int) -> None:
        """Announce a round (``running.replay.Announce``)."""
        if self.quiet:
            return
        if round == self.replay.start:
            self._announce_start(round, last)
        elif time.monotonic() - self._last_message > SECONDS_BETWEEN_MESSAGES:
            self._last_message = time.monotonic()
            say(f"round {round} of {last}", 0)

    def _announce_start(self, round: int, last: int) -> None:
        origin = "from round 1"
        if self.replay.restored is not None:
            origin = f"from the checkpoint before round {round}"
        rounds = f"round {round}"
        if round < last:
            rounds = f"rounds {round} to {last}"
        say(f"replaying {rounds}, {origin}: about {self._seconds():.0f} s, as in the run", 0)

    def _seconds(self) -> float:
        """The time that the rounds took in the run."""
        from fedstill.running.runs import read_run

        seconds = read_run(self.replay.folder).numbers.by_round("seconds_training")
        replayed = range(self.replay.start, self.last_round + 1)
        return sum(seconds.get(round, 0.0) for round in replayed)


def _open_page(directory: Path) -> None:
    import webbrowser

    from fedstill.report.page import write_page

    path = write_page([directory], directory / "report.html")
    say(f"{path}#why", 0)
    webbrowser.open(f"{Path(path).resolve().as_uri()}#why")
