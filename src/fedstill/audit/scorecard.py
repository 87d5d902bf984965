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

from fedstill.audit.attacks_and_privacy import epsilons, members_told, under_attack
from fedstill.audit.doors import strangers
from fedstill.audit.everyday import examples, lasting, one_file
from fedstill.audit.hostile_replies import absent, diverging, poisoned, repeated
from fedstill.audit.malformed_files import malformed
from fedstill.audit.secret_sums import secret_sums
from fedstill.audit.stopping_runs import damage, kills
from fedstill.audit.trials import PromiseRow, Trials, without_log
from fedstill.audit.what_is_sent import sent_by
from fedstill.audit.what_runs import foreign_code, unpickled
from fedstill.errors import UnknownName
from fedstill.files import make_folder, write_whole
from fedstill.report.markup import html_table, section, sentence
from fedstill.report.page import document
from fedstill.version import VERSION

ALL = 10_000
"""More than there are, where a trial is a part of the package."""

ROWS = (
    PromiseRow("R1", "a killed run resumes to the same bits", "a kill -9 at a moment drawn", kills, 4, 200),
    PromiseRow("R2", "a bad checkpoint is never loaded", "a damaged file, and a resume", damage, 20, 300),
    PromiseRow("R3", "clients may fail", "a round at 0 to 90 % failures, twice", absent, 10, 300),
    PromiseRow("R4", "same seed, same result", "a round on two engines, replies turned round", repeated, 8, 60),
    PromiseRow("R5", "divergence is noticed", "a round with an absurd learning rate", diverging, 8, 20),
    PromiseRow("R6", "long runs do not leak", "a hundred rounds more of a run", lasting, 2, 36),
    PromiseRow("S1", "poisoned replies are refused by name", "a spoilt reply in a round", poisoned, 17, 119),
    PromiseRow("S2", "what robust means leave of an attack", "a run with hostile clients", under_attack, 5, 45),
    PromiseRow("S3", "no file that is read can run code", "a module; a run, watched", unpickled, ALL, ALL),
    PromiseRow("S4", "a malformed file is one clear line", "a file changed at random", malformed, 200, 16_000),
    PromiseRow("S5", "no stranger gets in", "a start, greeting or request without a key", strangers, 11, 33),
    PromiseRow("S6", "no code crosses the wire", "a request or an app with code of another's", foreign_code, 10, 10),
    PromiseRow("P1", "epsilon is true", "a claim against another way to it", epsilons, 20, 200),
    PromiseRow("P2", "the server sees only the sum", "a sum with 0 to 60 % gone, or a refusal", secret_sums, 12, 100),
    PromiseRow("P3", "how far members can be told", "a run whose uploads are attacked", members_told, 5, 60),
    PromiseRow("P4", "what is sent beside models", "a method's uploads, with other labels too", sent_by, 10, ALL),
    PromiseRow("Q1", "every example in the code runs", "a module with examples", examples, ALL, ALL),
    PromiseRow("Q2", "a method is one file", "a file: run, stopped, resumed, reported", one_file, 1, 3),
)

HEAD = ["", "promise", "a trial", "trials", "passed", "seconds", "again"]

Said = Callable[[PromiseRow], None]


def chosen_rows(names: Sequence[str]) -> list[PromiseRow]:
    """The rows of these ids, all of them where none is named; raises UnknownName."""
    known = {row.id: row for row in ROWS}
    for name in names:
        if name.upper() not in known:
            raise UnknownName("row", name, known)
    return [known[name.upper()] for name in names] if names else list(ROWS)


def audited(rows: Sequence[PromiseRow], quick: bool, before: Said) -> dict[str, Any]:
    """What measuring the rows gave, as it is written to a file; ``before``: called before each row."""
    measured = []
    for row in rows:
        before(row)
        trials, began = row.quick if quick else row.whole, time.perf_counter()
        with without_log():
            outcome = row.probe(trials)
        measured.append(_told(row, outcome, time.perf_counter() - began, quick))
    return {
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "quick": quick,
        "rows": measured,
    }


def _told(row: PromiseRow, outcome: Trials, seconds: float, quick: bool) -> dict[str, Any]:
    return {
        "id": row.id,
        "promise": row.promise,
        "trial": row.trial,
        "trials": outcome.trials,
        "passed": outcome.passed,
        "seconds": round(seconds, 1),
        "command": f"fedstill audit {row.id}{' --quick' * quick}",
        "says": list(outcome.says),
    }


def score_lines(told: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table under ``HEAD``."""
    keys = ("id", "promise", "trial", "trials", "passed", "seconds", "command")
    return [[str(row[key]) for key in keys] for row in told["rows"]]


def all_passed(told: Mapping[str, Any]) -> bool:
    """Whether every trial of every row passed."""
    return all(row["trials"] == row["passed"] for row in told["rows"])


def write_scorecard(told: Mapping[str, Any], folder: Path) -> Path:
    """Write audit.json and audit.html, which needs no network; gives the page's path."""
    make_folder(folder)
    write_whole(folder / "audit.json", json.dumps(told, indent=2).encode())
    said = [[row["id"], line] for row in told["rows"] for line in row["says"]]
    where = f"fedstill {told['version']}, torch {told['torch']}, {told['machine']}, {told['date']}"
    parts = [section("Measured here", sentence(where), html_table(HEAD, score_lines(told)), name="rows")]
    if said:
        parts.append(section("What the rows say", html_table(["", "trial"], said), name="says"))
    page = folder / "audit.html"
    write_whole(page, document("fedstill: the scorecard", "".join(map(str, parts))).encode())
    return page
