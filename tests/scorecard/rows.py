"""The rows in their order, and the page and the JSON file of their outcomes."""

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
"""The number of trials of a row whose trials are parts of the package: more than it has."""

ROWS = (
    PromiseRow(
        id="R1",
        promise="a killed run resumes to the same bits",
        trial="a kill -9 at a moment drawn",
        probe=kills,
        quick=4,
        complete=200,
    ),
    PromiseRow(
        id="R2",
        promise="a bad checkpoint is never loaded",
        trial="a damaged file, and a resume",
        probe=damage,
        quick=20,
        complete=300,
    ),
    PromiseRow(
        id="R3",
        promise="clients may fail",
        trial="a round at 0 to 90 % failures, twice",
        probe=absent,
        quick=10,
        complete=300,
    ),
    PromiseRow(
        id="R4",
        promise="same seed, same result",
        trial="a round on two engines, replies turned round",
        probe=repeated,
        quick=8,
        complete=60,
    ),
    PromiseRow(
        id="R5",
        promise="divergence is noticed",
        trial="a round with an absurd learning rate",
        probe=diverging,
        quick=8,
        complete=20,
    ),
    PromiseRow(
        id="R6",
        promise="long runs do not leak",
        trial="a hundred rounds more of a run",
        probe=lasting,
        quick=2,
        complete=36,
    ),
    PromiseRow(
        id="S1",
        promise="poisoned replies are refused by name",
        trial="a spoilt reply in a round",
        probe=poisoned,
        quick=17,
        complete=119,
    ),
    PromiseRow(
        id="S2",
        promise="what robust means leave of an attack",
        trial="a run with hostile clients",
        probe=under_attack,
        quick=5,
        complete=45,
    ),
    PromiseRow(
        id="S3",
        promise="no file that is read can run code",
        trial="a module; a run, watched",
        probe=unpickled,
        quick=ALL,
        complete=ALL,
    ),
    PromiseRow(
        id="S4",
        promise="a malformed file is one clear line",
        trial="a file changed at random",
        probe=malformed,
        quick=200,
        complete=16_000,
    ),
    PromiseRow(
        id="S5",
        promise="no stranger gets in",
        trial="a start, greeting or request without a key",
        probe=strangers,
        quick=11,
        complete=33,
    ),
    PromiseRow(
        id="S6",
        promise="no code crosses the wire",
        trial="a request or an app with code of another's",
        probe=foreign_code,
        quick=10,
        complete=10,
    ),
    PromiseRow(
        id="P1",
        promise="epsilon is true",
        trial="a claim against another way to it",
        probe=epsilons,
        quick=20,
        complete=200,
    ),
    PromiseRow(
        id="P2",
        promise="the server sees only the sum",
        trial="a sum with 0 to 60 % gone, or a refusal",
        probe=secret_sums,
        quick=12,
        complete=100,
    ),
    PromiseRow(
        id="P3",
        promise="how far members can be told",
        trial="a run whose uploads are attacked",
        probe=members_told,
        quick=5,
        complete=60,
    ),
    PromiseRow(
        id="P4",
        promise="what is sent beside models",
        trial="a method's uploads, with other labels too",
        probe=sent_by,
        quick=10,
        complete=ALL,
    ),
    PromiseRow(
        id="Q1",
        promise="every example in the code runs",
        trial="a module with examples",
        probe=examples,
        quick=ALL,
        complete=ALL,
    ),
    PromiseRow(
        id="Q2",
        promise="a method is one file",
        trial="a file: run, stopped, resumed, reported",
        probe=one_file,
        quick=1,
        complete=3,
    ),
)

HEAD = ["", "promise", "a trial", "trials", "passed", "seconds", "again"]


def chosen_rows(names: Sequence[str]) -> list[PromiseRow]:
    """The rows of these ids, or all rows if no id is given. Raises UnknownName."""
    if not names:
        return list(ROWS)
    rows_by_id = {row.id: row for row in ROWS}
    for name in names:
        if name.upper() not in rows_by_id:
            raise UnknownName("row", name, rows_by_id)
    return [rows_by_id[name.upper()] for name in names]


def measure_rows(
    rows: Sequence[PromiseRow], quick: bool, announce: Callable[[PromiseRow], None]
) -> dict[str, Any]:
    """Measure rows, announcing each. Returns the scorecard as it is written to a file."""
    measured = []
    for row in rows:
        announce(row)
        trials = row.complete
        if quick:
            trials = row.quick
        start = time.perf_counter()
        with without_log():
            outcome = row.probe(trials)
        measured.append(_measured_row(row, outcome, time.perf_counter() - start, quick))

    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    return {
        "version": VERSION,
        "date": date,
        "machine": machine,
        "torch": torch.__version__,
        "quick": quick,
        "rows": measured,
    }


def _measured_row(row: PromiseRow, outcome: Trials, seconds: float, quick: bool) -> dict[str, Any]:
    arguments = row.id
    if quick:
        arguments = f'"{row.id} --quick"'
    return {
        "id": row.id,
        "promise": row.promise,
        "trial": row.trial,
        "trials": outcome.trials,
        "passed": outcome.passed,
        "seconds": round(seconds, 1),
        "command": f"make scorecard ARGS={arguments}",
        "says": list(outcome.remarks),
    }


def score_lines(scorecard: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table under ``HEAD``."""
    keys = ("id", "promise", "trial", "trials", "passed", "seconds", "command")
    return [[str(row[key]) for key in keys] for row in scorecard["rows"]]


def all_passed(scorecard: Mapping[str, Any]) -> bool:
    """Whether every trial of every row passed."""
    return all(row["trials"] == row["passed"] for row in scorecard["rows"])


def write_scorecard(scorecard: Mapping[str, Any], folder: Path) -> Path:
    """Write scorecard.json and scorecard.html, which needs no network. Returns the page's path."""
    make_folder(folder)
    write_whole(folder / "scorecard.json", json.dumps(scorecard, indent=2).encode())

    versions = f"fedstill {scorecard['version']}, torch {scorecard['torch']}"
    origin = f"{versions}, {scorecard['machine']}, {scorecard['date']}"
    table = Table(HEAD, score_lines(scorecard))
    sections = [Section("rows", "Measured here", [Paragraph(origin), table])]
    remarks = [[row["id"], line] for row in scorecard["rows"] for line in row["says"]]
    if remarks:
        sections.append(Section("says", "What the rows say", [Table(["", "trial"], remarks)]))

    page = folder / "scorecard.html"
    write_whole(page, document("fedstill: the scorecard", [], sections).encode())
    return page
