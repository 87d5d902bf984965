"""The command that measures what fedstill promises."""

from __future__ import annotations

from pathlib import Path

from fedstill.cli.app import Flag, Quiet, app, say


@app.command(name="audit")
def audit_command(*rows: str, quick: Flag = False, out: Path | None = None, quiet: Quiet = False) -> int:
    """Measure on this machine what fedstill promises: kills, damaged files, poisoned replies, privacy and others.

    Writes audit.json and audit.html. Exit code 1 if any trial fails. The whole takes hours; --quick takes minutes.

    Args:
        rows: Ids of the rows to measure, e.g. R1 S1. Unset, all of them.
        quick: A few trials of each row.
        out: The directory of the page and the numbers. Unset, one is made under runs/.
        quiet: Say nothing of progress.
    """
    from fedstill.audit.scorecard import HEAD, all_passed, audited, chosen_rows, score_lines, write_scorecard
    from fedstill.experiment.comparing.variants import new_folder
    from fedstill.report import terminal

    wanted = chosen_rows(rows)
    told = audited(wanted, quick, lambda row: None if quiet else print(f"{row.id}: {row.promise} …", flush=True))
    page = write_scorecard(told, out or new_folder("audit"))
    screen = terminal.console()
    screen.print(terminal.table(HEAD, score_lines(told)))
    for row in told["rows"]:
        for line in row["says"]:
            screen.print(f"{row['id']}: {line}", soft_wrap=True)
    screen.print(f"page: {page}", soft_wrap=True)
    return 0 if all_passed(told) else say("not all trials passed; the lines above say which", 1)
