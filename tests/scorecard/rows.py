"""The rows, in their order; and the page and the JSON of what came of them."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedstill.core.errors import UnknownName
from fedstill.core.files import make_folder, write_whole
from fedstill.report.blocks import Paragraph, Section, Table
from fedstill.report.page import document
from fedstill.version import VERSION
from scorecard.attacks_and_privacy import epsilons, members_told, sent_by, under_attack
from scorecard.doors import strangers
from scorecard.everyday import examples, lasting, one_file
from scorecard.hostile_replies import absent, diverging, poisoned, repeated
from scorecard.malformed_files import malformed
from scorecard.secret_sums import secret_sums
from scorecard.stopping_runs import damage, kills
from scorecard.trials import PromiseRow, Trials, without_log
from scorecard.what_runs import foreign_code, unpickled

ALL = 10_000
"""More than there are, where a trial is a part of the package."""

ROWS = (
    PromiseRow(
        "R1", "a killed run resumes to the same bits", "a kill -9 at a moment drawn", kills, 4, 200
    ),
    PromiseRow(
        "R2", "a bad checkpoint is never loaded", "a damaged file, and a resume", damage, 20, 300
    ),
    PromiseRow("R3", "clients may fail", "a round at 0 to 90 % failures, twice", absent, 10, 300),
    PromiseRow(
        "R4",
        "same seed, same result",
        "a round on two engines, replies turned round",
        repeated,
        8,
        60,
    ),
    PromiseRow(
        "R5", "divergence is noticed", "a round with an absurd learning rate", diverging, 8, 20
    ),
    PromiseRow("R6", "long runs do not leak", "a hundred rounds more of a run", lasting, 2, 36),
    PromiseRow(
        "S1", "poisoned replies are refused by name", "a spoilt reply in a round", poisoned, 17, 119
    ),
    PromiseRow(
        "S2",
        "what robust means leave of an attack",
        "a run with hostile clients",
        under_attack,
        5,
        45,
    ),
    PromiseRow(
        "S3", "no file that is read can run code", "a module; a run, watched", unpickled, ALL, ALL
    ),
    PromiseRow(
        "S4",
        "a malformed file is one clear line",
        "a file changed at random",
        malformed,
        200,
        16_000,
    ),
    PromiseRow(
        "S5", "no stranger gets in", "a start, greeting or request without a key", strangers, 11, 33
    ),
    PromiseRow(
        "S6",
        "no code crosses the wire",
        "a request or an app with code of another's",
        foreign_code,
        10,
        10,
    ),
    PromiseRow("P1", "epsilon is true", "a claim against another way to it", epsilons, 20, 200),
    PromiseRow(
        "P2",
        "the server sees only the sum",
        "a sum with 0 to 60 % gone, or a refusal",
        secret_sums,
        12,
        100,
    ),
    PromiseRow(
        "P3", "how far members can be told", "a run whose uploads are attacked", members_told, 5, 60
    ),
    PromiseRow(
        "P4",
        "what is sent beside models",
        "a method's uploads, with other labels too",
        sent_by,
        10,
        ALL,
    ),
    PromiseRow(
        "Q1", "every example in the code runs", "a module with examples", examples, ALL, ALL
    ),
    PromiseRow(
        "Q2", "a method is one file", "a file: run, stopped, resumed, reported", one_file, 1, 3
    ),
)

HEAD = ["", "promise", "a trial", "trials", "passed", "seconds", "again"]


def chosen_rows(names: Sequence[str]) -> list[PromiseRow]:
    """The rows of these ids, all of them where none is named; raises UnknownName."""
    known = {row.id: row for row in ROWS}
    for name in names:
        if name.upper() not in known:
            raise UnknownName("row", name, known)
    return [known[name.upper()] for name in names] if names else list(ROWS)


def measure_rows(
    rows: Sequence[PromiseRow], quick: bool, announce: Callable[[PromiseRow], None]
) -> dict[str, Any]:
    """Measure rows, each announced first; gives the scorecard as it is written to a file."""
    measured = []
    for row in rows:
        announce(row)
        trials = row.quick if quick else row.whole
        start = time.perf_counter()
        with without_log():
            outcome = row.probe(trials)
        measured.append(_measured_row(row, outcome, time.perf_counter() - start, quick))
    return {
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "quick": quick,
        "rows": measured,
    }


def _measured_row(row: PromiseRow, outcome: Trials, seconds: float, quick: bool) -> dict[str, Any]:
    arguments = f'"{row.id} --quick"' if quick else row.id
    return {
        "id": row.id,
        "promise": row.promise,
        "trial": row.trial,
        "trials": outcome.trials,
        "passed": outcome.passed,
        "seconds": round(seconds, 1),
        "command": f"make scorecard ARGS={arguments}",
        "says": list(outcome.says),
    }


def score_lines(scorecard: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table under ``HEAD``."""
    keys = ("id", "promise", "trial", "trials", "passed", "seconds", "command")
    return [[str(row[key]) for key in keys] for row in scorecard["rows"]]


def all_passed(scorecard: Mapping[str, Any]) -> bool:
    """Whether every trial of every row passed."""
    return all(row["trials"] == row["passed"] for row in scorecard["rows"])


def write_scorecard(scorecard: Mapping[str, Any], folder: Path) -> Path:
    """Write scorecard.json and scorecard.html, which needs no network; gives the page's path."""
    make_folder(folder)
    write_whole(folder / "scorecard.json", json.dumps(scorecard, indent=2).encode())

    origin = (
        f"fedstill {scorecard['version']}, torch {scorecard['torch']}, {scorecard['machine']}, "
        f"{scorecard['date']}"
    )
    table = Table(HEAD, score_lines(scorecard))
    sections = [Section("rows", "Measured here", [Paragraph(origin), table])]
    remarks = [[row["id"], line] for row in scorecard["rows"] for line in row["says"]]
    if remarks:
        sections.append(Section("says", "What the rows say", [Table(["", "trial"], remarks)]))

    page = folder / "scorecard.html"
    write_whole(page, document("fedstill: the scorecard", [], sections).encode())
    return page
