"""Checks of an entry that execute nothing of it: suite, files, choice, settings and journals.

They find mistakes, and fix which runs of which method an entry claims. Only a replay shows that a
run took place.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict

from fedstill.benchmark.entries import ENTRY, RUN_FILES, Entered, place_of, portable, run_place
from fedstill.benchmark.scoring import events_of, score_of
from fedstill.benchmark.suites import TEST_SEEDS, Suite, load_suite
from fedstill.config.earlier import as_it_began
from fedstill.config.overrides import flat
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, on_one_line
from fedstill.core.files import digest
from fedstill.core.registry import names
from fedstill.running.journal import Event
from fedstill.running.result import summary_from_journal
from fedstill.running.split_file import SPLIT
from fedstill.running.variants import Variant

NEAR = 1e-9
"""Two sums of the same numbers in different orders differ by less than this."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""The errors of files that hold something else than they should."""

Count = Annotated[int, Interval(ge=0)]
Share = Annotated[float, Interval(ge=0, le=1)]


class JournalEvent(BaseModel):
    """The fields of a journal's events that a score or a summary is computed from."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    round: Count = 0
    client: int = 0
    test_counts: list[Count] = []
    accuracy: Share | None = None
    class_accuracy: list[Share | None] = []
    personal_class_accuracy: list[Share | None] = []
    answers: list[dict[str, Any]] = []
    forgetting: float | None = None
    correct: list[list[Count]] = []
    totals: list[list[Count]] = []
    row: list[Share | None] = []
    bytes_up: Count = 0
    bytes_down: Count = 0
    seconds_cpu: Annotated[float, Interval(ge=0)] = 0.0


def suite_of(entry: Entered, method_file: Path | None = None) -> Suite:
    """The suite of an entry, with the entry's row where the suite does not have it.

    ``method_file``: where the method's own file is executed from; without it FedAvg stands in for
    the method. Raises ConfigError for another version than this fedstill has, or another method.
    """
    suite = load_suite(entry.suite)
    if entry.version != suite.version:
        raise ConfigError(
            f"{ENTRY} is of version {entry.version} of {suite.name}; this fedstill has "
            f"{suite.version}"
        )
    if entry.row in suite.recipe.rows:
        method = suite.method(entry.row)["name"]
        if entry.file or entry.method != method:
            raise ConfigError(f"{ENTRY}: {entry.row} is the method {method} in {suite.name}")
        return suite
    method = entry.method
    if entry.file:
        method = str(method_file or "fedavg")
    elif method not in names("method"):
        raise ConfigError(f"{ENTRY}: {method!r} is no method of the package, and has no file")
    return suite.with_row(entry.row, method, entry.tries)


def checked_entry(entry: Entered) -> Iterator[str]:
    """The name of each check that an entry passes.

    Raises ConfigError or CorruptFile for the first problem.
    """
    suite = suite_of(entry)
    yield "suite and version"
    _check_files(entry, suite)
    yield "all seeds and columns, and no other files"
    _check_choice(entry, suite)
    yield "fields follow from the scores of the tries"

    fields = dict(entry.fields)
    if entry.file:
        # FedAvg stands in for the method and has none of its fields.
        fields = {key: fields[key] for key in fields if not key.startswith("method.")}
    cells = [(entry.row, column) for column in suite.columns(entry.row)]
    for run in suite.recipe.variants(cells, TEST_SEEDS, fields, Path()):
        try:
            _check_run(entry, run)
        except FedstillError as error:
            raise CorruptFile(f"{place_of(run)}: {error}") from error
        except UNREADABLE as error:
            raise CorruptFile(f"{place_of(run)} cannot be read: {on_one_line(error)}") from error
    yield "settings, journals and summaries of all runs"


def _check_files(entry: Entered, suite: Suite) -> None:
    """All files of all runs, none beside them, and each with the digest that the entry gives."""
    columns = suite.columns(entry.row)
    places = [run_place(column, seed) for column in columns for seed in TEST_SEEDS]
    needed = {f"{place}/{name}" for place in places for name in RUN_FILES}
    needed -= {f"{place}/summary.json" for place in entry.diverged}
    if entry.file:
        needed.add(entry.file)

    paths = [path for path in entry.folder.rglob("*") if path.is_file() and path.name != ENTRY]
    digests = {
        path.relative_to(entry.folder).as_posix(): digest(path.read_bytes()) for path in paths
    }
    if missing := sorted(needed - digests.keys()):
        raise CorruptFile(f"{missing[0]} is missing ({len(missing)} files in all)")
    if extra := sorted(digests.keys() - needed):
        raise CorruptFile(f"{extra[0]} belongs to no run of the suite")
    for name in sorted(digests.keys() | entry.digests.keys()):
        if digests.get(name) != entry.digests.get(name):
            raise CorruptFile(f"{name} is not the file that was entered: its SHA-256 is another")


def _check_choice(entry: Entered, suite: Suite) -> None:
    """The fields are those of the best try; a reference has none.

    A newcomer's scores are believed.
    """
    if entry.row not in suite.tries:
        if entry.fields:
            raise CorruptFile(f"{entry.row} is a reference, and sets {next(iter(entry.fields))}")
        return
    tries = [dict(values) for values in suite.tries_of(entry.row)]
    if entry.choice is None or entry.tries != tries:
        raise CorruptFile(f"its tries are not those of {suite.name}")
    best = entry.choice.best
    if entry.fields != tries[best]:
        raise CorruptFile(
            f"fields are {dict(entry.fields)}, and try {best + 1} is the best: {tries[best]}"
        )
    if suite.chosen.get(entry.row, entry.choice) != entry.choice:
        raise CorruptFile("its scores are not those that ship with the suite")


def _check_run(entry: Entered, run: Variant) -> None:
    """A run has the suite's settings, its journal is complete, and its summary follows from it."""
    place = place_of(run)
    folder = entry.folder / place
    _check_settings(entry, run, (folder / "config.toml").read_text(encoding="utf-8"))

    events = events_of(folder / "journal.jsonl")
    _check_journal(events, run.settings.rounds, diverged=place in entry.diverged)
    score = score_of(folder, run.settings.rounds)
    if not (0 <= score.accuracy <= 1 and 0 <= score.learned <= 1):
        raise CorruptFile(f"journal.jsonl: accuracy {score.accuracy}, learned {score.learned}")
    if events[0]["split"]["sha256"] != digest((folder / SPLIT).read_bytes()):
        raise CorruptFile(f"{SPLIT} is not the split that journal.jsonl names")

    if place not in entry.diverged:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        _check_summary(summary, summary_from_journal(events))


def _check_settings(entry: Entered, run: Variant, config: str) -> None:
    """A run's config has the suite's settings; keys that came after it was made are not in it."""
    found = flat(as_it_began(tomllib.loads(config)))
    expected = flat(tomllib.loads(portable(run.settings.toml)))
    if entry.file:
        # Only its file says which fields and stages the method has, and it is not executed here:
        # the chosen fields are checked, and every stage has the plan of FedAvg's one stage.
        chosen = {key: entry.fields[key] for key in entry.fields if key.startswith("method.")}
        chosen["method.name"] = entry.file
        expected |= chosen
        found["method.name"] = Path(found["method.name"].partition(":")[0]).name
        found = {key: found[key] for key in found if key in chosen or not key.startswith("method.")}
    for key, value in found.items():
        suite_key = key
        if entry.file:
            suite_key = re.sub(r"^plan\.[^.]+", "plan.train", key)
        # all engines have the same bits
        if key != "engine" and expected.get(suite_key) != value:
            raise CorruptFile(
                f"config.toml has {key} = {value!r}, and the suite {expected.get(suite_key)!r}"
            )


def _check_journal(events: Sequence[Event], expected: int, *, diverged: bool) -> None:
    """Events have their types, and all rounds are there; a run that diverged ends within one."""
    for event in events:
        JournalEvent.model_validate(event)
    rounds = [event["round"] for event in events if event["event"] == "round"]
    clients = [event["round"] for event in events if event["event"] == "client"]
    complete = len(rounds) == expected
    if diverged:
        complete = len(rounds) < expected and clients[-1:] == [len(rounds) + 1]
    if not complete or rounds != list(range(1, len(rounds) + 1)):
        raise CorruptFile(
            f"journal.jsonl has {len(rounds)} of {expected} rounds, or not each once, or does not "
            "end as it should"
        )


def _check_summary(summary: dict[str, Any], derived: dict[str, Any]) -> None:
    for key, value in derived.items():
        found = summary.get(key)
        same = found == value
        if isinstance(found, float) and isinstance(value, float):
            same = math.isclose(found, value, rel_tol=NEAR, abs_tol=NEAR)
        if not same:
            raise CorruptFile(f"summary.json has {key} = {found!r}, and its journal {value!r}")
