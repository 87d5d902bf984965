"""The command that measures what fedstill promises: ``python -m scorecard``, which
``make scorecard`` runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedstill.core.errors import UnknownName
from fedstill.report import terminal
from fedstill.running.compare import output_folder
from scorecard.rows import HEAD, all_passed, chosen_rows, measure_rows, score_lines, write_scorecard
from scorecard.trials import PromiseRow

DESCRIPTION = """
Measure on this machine what fedstill promises: kills, damaged files, poisoned replies, privacy and others.
Writes scorecard.json and scorecard.html. Exit code 1 if any trial fails. The whole takes hours; --quick takes minutes.
"""  # noqa: E501


def main(words: Sequence[str] | None = None) -> int:
    """Measure the rows that the command line names; the exit code."""
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        rows = chosen_rows(arguments.rows)
    except UnknownName as error:
        parser.error(str(error))

    announce: Callable[[PromiseRow], None] = _announce
    if arguments.quiet:
        announce = _silent
    scorecard = measure_rows(rows, arguments.quick, announce)
    with output_folder(arguments.out, "scorecard") as folder:
        page = write_scorecard(scorecard, folder)

    screen = terminal.console()
    screen.print(terminal.PlainTable(HEAD, score_lines(scorecard)))
    for row in scorecard["rows"]:
        for line in row["says"]:
            screen.print(f"{row['id']}: {line}", soft_wrap=True)
    screen.print(f"page: {page}", soft_wrap=True)

    if all_passed(scorecard):
        return 0
    print("scorecard: not all trials passed; the lines above say which", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scorecard", description=DESCRIPTION)
    parser.add_argument(
        "rows", nargs="*", help="ids of the rows to measure, e.g. R1 S1; by default all of them"
    )
    parser.add_argument("--quick", action="store_true", help="a few trials of each row")
    parser.add_argument(
        "--out",
        type=Path,
        help="the directory of the page and the numbers; by default a new one under runs/",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print no progress")
    return parser


def _announce(row: PromiseRow) -> None:
    print(f"{row.id}: {row.promise} …", flush=True)


def _silent(_: PromiseRow) -> None:
    """Print nothing."""


if __name__ == "__main__":
    sys.exit(main())
