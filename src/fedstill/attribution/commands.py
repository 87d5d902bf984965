"""The command ``why``: who made the model forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators

from fedstill.cli.app import Flag, Quiet, say
from fedstill.core.errors import ConfigError
from fedstill.core.files import in_shell

if TYPE_CHECKING:
    from fedstill.attribution.falls import Moment
    from fedstill.running.replay import Announce, Replay


# Which options of ``fedstill why`` go together: it answers four questions.


GOES_WITH = {
    "--client": {"--round"},
    "--without": {"--class", "--round", "--from", "--rounds", "--once"},
    "--draws": {"--class", "--round"},
    "": {"--class", "--round", "--worst", "--exact", "--game", "--open"},
}
"""Which options say more of a question; the empty one is the plain command."""


def refuse_strays(given: Sequence[str]) -> None:
    """Raise ConfigError where an option does not go with what is asked.

    >>> refuse_strays(["--class", "--worst"])
    """
    asked = next((question for question in GOES_WITH if question in given), "")
    misfits = [name for name in given if name != asked and name not in GOES_WITH[asked]]
    if misfits and not asked:
        raise ConfigError(
            f"{' and '.join(misfits)}: name the client to leave out as well, with --without"
        )
    if misfits:
        raise ConfigError(f"{misfits[0]} does not go with {asked}")


# The command that answers who made the model forget.


DrawCount = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
RoundNumber = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
RoundCount = Annotated[int, Parameter(validator=validators.Number(gte=1))]


def why_command(
    directory: Path,
    *,
    class_: Annotated[str | None, Parameter(name="--class")] = None,
    round_: Annotated[RoundNumber, Parameter(name="--round")] = None,
    worst: RoundCount = 1,
    exact: Flag = False,
    game: Literal["idle", "absent"] | None = None,
    without: str | None = None,
    from_: Annotated[RoundNumber, Parameter(name="--from")] = None,
    rounds: RoundNumber = None,
    once: Flag = False,
    draws: DrawCount = None,
    client: str | None = None,
    open_: Annotated[Flag, Parameter(name="--open")] = False,
    quiet: Quiet = False,
) -> int:
    """Say who made the model forget: what a class lost in a round by local training and by
    averaging, and by client.

    Without the measure contributions in the journal, the rounds since the nearest checkpoint are
    gone through again; keep_checkpoints_every in the config makes that short. Where a method's fold
    is not a sum, contributions are computed from the two end points instead of along a path; the
    answer says so. What was found out is kept for the next time and for the report, but not what
    --exact and --game answer: they change no other answer.

    Args:
        directory: The run's directory.
        class_: The class, by number or name. Unset, the one with the deepest fall.
        round_: The round. Unset, the one with the deepest fall; with --client, round 1.
        worst: How many of the deepest falls to report; five without a number.
        exact: Ask all coalitions of the round's clients; refused above ten clients.
        game: What clients outside a coalition do: change nothing (idle), or not reply (absent).
        without: Go through rounds again without this client, by number or name, and compare: what
            would have been.
        from_: The first round without it. Unset, --round, or that of the deepest fall.
        rounds: How many rounds are gone through without it. Unset, 5.
        once: Leave it out in the first of these rounds alone.
        draws: Go through the round with so many other draws of its clients, e.g. 10: how far who
            was drawn explains it.
        client: Where clients learn from peers: what this one, by number or name, learned in
            --round, by phase and by teacher.
        open_: Write the run's page with the pictures, and open it.
        quiet: Say nothing of progress.
    """
    from fedstill.attribution.falls import the_moment
    from fedstill.running.journal import class_numbers, client_number

    given = {
        "--client": client,
        "--without": without,
        "--draws": draws or None,
        "--class": class_,
        "--game": game,
    }
    given |= {"--from": from_, "--rounds": rounds, "--once": once or None, "--open": open_ or None}
    given |= {"--worst": worst if worst > 1 else None, "--exact": exact or None}
    refuse_strays([name for name, value in given.items() if value is not None])
    if not (directory / "journal.jsonl").is_file():
        return say(f"{directory} holds no run: it has no journal.jsonl", 2)
    if client is not None:
        return _lesson(directory, client_number(directory, client), round_ or 1, quiet)
    of = class_numbers(directory, [class_])[0] if class_ is not None else None
    moment = the_moment(directory, of, round_)
    if without is not None:
        number = client_number(directory, without)
        first = from_ or moment.round
        return _without(directory, moment, number, first, rounds or 5, once, quiet)
    if draws:
        return _draws(directory, moment, draws, quiet)
    _say_if_none_fell(directory, moment, of, round_)
    for one in [moment] if worst == 1 else _deepest(directory, of, round_)[:worst]:
        _tell(directory, one, exact, game, quiet)
    if open_:
        _open(directory)
    return 0


def _deepest(directory: Path, of: int | None, round: int | None) -> list[Moment]:
    from fedstill.attribution.falls import all_falls
    from fedstill.running.journal import read_journal

    every = all_falls(read_journal(directory / "journal.jsonl"))
    return [m for m in every if of in (None, m.of) and round in (None, m.round)]


def _say_if_none_fell(directory: Path, deepest: Moment, of: int | None, round: int | None) -> None:
    from fedstill.attribution import report as why_said
    from fedstill.report import terminal
    from fedstill.running.runs import read_run

    if said := why_said.none_fell(read_run(directory), deepest, of, round):
        terminal.tell(terminal.console(sentences=True), said)


def _tell(
    directory: Path,
    moment: Moment,
    exact: bool,
    game: Literal["idle", "absent"] | None,
    quiet: bool,
) -> None:
    from fedstill.attribution import report as why_said
    from fedstill.attribution.falls import told_of
    from fedstill.attribution.replayed_rounds import check_coalitions, measured_later
    from fedstill.measures.contributions import Contributions
    from fedstill.report import terminal
    from fedstill.running.journal import add_looks, looks_of
    from fedstill.running.replay import Replay
    from fedstill.running.runs import read_run

    told = None if exact or game else told_of(moment, looks_of(directory))
    if told is None:
        known = {
            c
            for look in looks_of(directory)
            if look["round"] == moment.round
            for c in look.get("classes", ())
        }
        replay = Replay.of_round(directory, moment.round)
        if exact:
            check_coalitions(replay, moment.round)
        measure = Contributions(game, exact, sorted({moment.of, *known}))
        announce = _announcement(replay, moment.round, quiet)
        looks = measured_later(replay, moment.round, measure, announce)
        if not (exact or game):
            add_looks(directory, looks)
        told = told_of(moment, looks)
    screen, run = terminal.console(sentences=True), read_run(directory)
    if told is None:
        terminal.tell(
            screen, f"In round {moment.round} nothing is known of class {run.classes[moment.of]!r}."
        )
        return
    terminal.tell(screen, why_said.sentence_of(run, told))
    if told.clients:
        screen.print(terminal.table(*why_said.lines_of(run, told)))
        terminal.tell(screen, why_said.how_of(told))
    if hint := why_said.hint_of(told):
        terminal.tell(screen, hint)
    if taken := [
        c for c in sorted(told.clients, key=lambda c: told.clients[c]) if told.clients[c] < 0
    ]:
        command = (
            f"fedstill why {in_shell(directory)} --class {moment.of} --without {taken[0]} --from "
            f"{moment.round}"
        )
        screen.print(
            f"What would have been without {why_said.who(run, taken[0])}: {command}", soft_wrap=True
        )


def _without(
    directory: Path, moment: Moment, client: int, first: int, count: int, once: bool, quiet: bool
) -> int:
    from fedstill.attribution import report as why_said
    from fedstill.attribution.replayed_rounds import accuracies_by_round
    from fedstill.report import terminal
    from fedstill.running.replay import Replay, Without
    from fedstill.running.runs import read_run

    replay = Replay.of_round(directory, first)
    run = read_run(directory)
    settings = replay.prepared.settings
    # The run may have stopped early, or be unfinished.
    last = min(first + count - 1, len(run.rounds))
    if client >= settings.clients:
        return say(f"--without {client}: the run has clients 0 to {settings.clients - 1}", 2)
    if first > last:
        return say(f"--from {first}: the run has rounds 1 to {last}", 2)

    without_client = Without(frozenset({client}), first)
    if once:
        without_client = replace(without_client, last=first)
    announce = _announcement(replay, last, quiet)
    left_out = accuracies_by_round(replay, first, last, without_client, announce)
    was = {e["round"]: e["class_accuracy"] for e in run.rounds}
    rows = []
    for round, row in left_out.items():
        with_, without = was[round][moment.of], row[moment.of]
        if with_ is not None and without is not None:
            cells = (
                terminal.percent(with_),
                terminal.percent(without),
                why_said.points(without - with_),
            )
            rows.append((str(round), *cells))
    said = f"in round {first} alone" if once else f"from round {first} on"
    screen = terminal.console(sentences=True)
    terminal.tell(
        screen,
        f"Class {run.classes[moment.of]!r} without {why_said.who(run, client)} {said}; all else as "
        "it was, the clients "
        "of each round as drawn.",
    )
    screen.print(terminal.table(["round", "as it was", "without", "difference [points]"], rows))
    terminal.tell(
        screen,
        "This is what leaving the client out would have done, which is another question than its "
        "contribution to a "
        "round: both are shown, neither is the other.",
    )
    return 0


def _draws(directory: Path, moment: Moment, count: int, quiet: bool) -> int:
    from fedstill.attribution import report as why_said
    from fedstill.attribution.cohorts import repeated_round
    from fedstill.report import terminal
    from fedstill.running.replay import Replay
    from fedstill.running.runs import read_run

    def done(number: int) -> None:
        if not quiet:
            say(f"draw {number} of {count}" if number else f"round {moment.round} as it was", 0)

    replay = Replay.of_round(directory, moment.round)
    run = read_run(directory)
    announce = _announcement(replay, moment.round, quiet)
    cohorts = repeated_round(replay, moment.round, count, announce, done)
    screen = terminal.console(sentences=True)
    terminal.tell(screen, why_said.draws_of(run, moment, cohorts))
    screen.print(terminal.table(*why_said.lines_of_draws(moment, cohorts)))
    return 0


def _lesson(directory: Path, client: int, round: int, quiet: bool) -> int:
    from fedstill.attribution import report as why_said
    from fedstill.attribution.teachers import taught_by_peers
    from fedstill.report import terminal
    from fedstill.running.replay import Replay
    from fedstill.running.runs import read_run

    replay = Replay.of_round(directory, round)
    run = read_run(directory)
    settings = replay.prepared.settings
    if client >= settings.clients or round > len(run.rounds):
        return say(
            f"the run has clients 0 to {settings.clients - 1} and rounds 1 to {len(run.rounds)}", 2
        )

    def exchanges(count: int) -> None:
        if not quiet:
            say(
                f"then client {client}'s exchange {count} times: with all of its teachers, some, "
                "and none",
                0,
            )

    announce = _announcement(replay, round, quiet)
    taught = taught_by_peers(replay, client, round, announce, exchanges)
    screen = terminal.console(sentences=True)
    terminal.tell(screen, why_said.lesson_of(run, taught))
    screen.print(terminal.table(*why_said.lines_of_lesson(run, taught)))
    terminal.tell(screen, why_said.how_taught(taught))
    return 0


def _announcement(replay: Replay, last: int, quiet: bool) -> Announce:
    """Say which rounds are replayed, what that costs by the journal, and where it is."""
    import time

    from fedstill.running.runs import read_run

    seconds = {e["round"]: e["seconds_training"] for e in read_run(replay.folder).rounds}
    total = sum(seconds.get(round, 0.0) for round in range(replay.start, last + 1))
    last_message = time.monotonic()

    def announce(round: int, last: int) -> None:
        nonlocal last_message
        if quiet:
            return
        if round == replay.start:
            origin = "from round 1"
            if replay.restored is not None:
                origin = f"from the checkpoint before round {round}"
            rounds = f"round {round}"
            if round < last:
                rounds = f"rounds {round} to {last}"
            say(f"going through {rounds} again, {origin}: about {total:.0f} s, as then", 0)
        elif time.monotonic() - last_message > 5:
            last_message = time.monotonic()
            say(f"round {round} of {last}", 0)

    return announce


def _open(directory: Path) -> None:
    import webbrowser

    from fedstill.report.page import write_page

    path = write_page([directory], directory / "report.html")
    say(f"{path}#why", 0)
    webbrowser.open(f"{Path(path).resolve().as_uri()}#why")
