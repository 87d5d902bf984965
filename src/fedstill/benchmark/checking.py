"""Checks of an entry that execute nothing of it: files, settings, the journals' schema, and the
numbers that follow.

They find mistakes, and fix which runs of which method an entry claims. Only a replay shows that a
run took place.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from pydantic import BaseModel, ConfigDict

from fedstill.benchmark.entries import (
    CPU,
    ENTRY,
    RUN_FILES,
    Entered,
    portable,
    rounds_of,
    run_place,
)
from fedstill.benchmark.scoring import events_of, score_of
from fedstill.benchmark.suites import CHOOSING_SEEDS, TEST_SEEDS, Suite, load_suite
from fedstill.config.earlier import as_it_began
from fedstill.config.experiment import from_tree
from fedstill.config.overrides import flat
from fedstill.config.resolve import settle
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, on_one_line
from fedstill.core.files import digest, short_name
from fedstill.core.registry import names
from fedstill.metrics.accuracy import best_and_recent
from fedstill.running.journal import Event
from fedstill.running.split_file import SPLIT
from fedstill.running.tasks import summed_up

NEAR = 1e-9
"""Two sums of the same numbers in different orders differ by less than this."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""The errors of files that hold something else than they should."""

Count = Annotated[int, Interval(ge=0)]
Share = Annotated[float, Interval(ge=0, le=1)]


class _Event(BaseModel):
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


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, and the problem it found; empty if there is none."""

    check: str
    problem: str = ""


def suite_of(entry: Entered, file: Path | None = None) -> Suite:
    """The suite of an entry, with the entry's own row where the suite does not have it.

    ``file``: where the method's own file is to be executed from; without it FedAvg stands in for
    such a method. Raises CorruptFile for another suite or version than this fedstill has, or a row
    that the suite has otherwise.
    """
    try:
        suite = load_suite(entry.suite)
        if entry.version != suite.version:
            raise ConfigError(
                f"it is of version {entry.version} of {suite.name}; this fedstill has "
                f"{suite.version}"
            )
        if entry.row in suite.recipe.rows:
            known = suite.method(entry.row)["name"]
            if entry.file or entry.method != known:
                raise ConfigError(f"{entry.row} is the method {known} in {suite.name}")
            return suite
        method = entry.method
        if entry.file:
            method = str(file or "fedavg")
        elif method not in names("method"):
            raise ConfigError(f"{method!r} is no method of the package, and has no file")
        return suite.with_row(entry.row, method, entry.tries)
    except ConfigError as error:
        raise CorruptFile(f"{entry.folder / ENTRY}: {error}") from error


def checked_entry(entry: Entered) -> Iterator[Finding]:
    """The result of each check, in order, up to the first that finds a problem; nothing is
    executed.
    """
    try:
        suite = suite_of(entry)
    except CorruptFile as error:
        yield Finding("suite and version", str(error))
        return
    yield Finding("suite and version")
    checks = {
        "all seeds and columns, and no other files": _check_files,
        "fields follow from the scores of the tries": _check_choice,
        "settings are the suite's": _check_settings,
        "journals": _check_journals,
        "summaries follow from the journals": _check_summaries,
    }
    for name, check in checks.items():
        try:
            check(entry, suite)
        except FedstillError as error:
            yield Finding(name, str(error))
            return
        except UNREADABLE as error:
            yield Finding(name, f"a file cannot be read: {type(error).__name__}: {error}")
            return
        yield Finding(name)


def _places(entry: Entered, suite: Suite) -> list[str]:
    return [run_place(column, seed) for column in suite.columns(entry.row) for seed in TEST_SEEDS]


def _check_files(entry: Entered, suite: Suite) -> None:
    """All files of all runs, none beside them, and each with the digest that the entry gives."""
    needed = {f"{place}/{name}" for place in _places(entry, suite) for name in RUN_FILES}
    needed -= {f"{place}/summary.json" for place in entry.diverged}
    if entry.file:
        needed.add(entry.file)
    paths = [
        path for path in entry.folder.rglob("*") if path.is_file() and path != entry.folder / ENTRY
    ]
    files = {path.relative_to(entry.folder).as_posix(): path for path in paths}
    if missing := sorted(needed - files.keys()):
        raise CorruptFile(f"{missing[0]} is missing ({len(missing)} files in all)")
    if extra := sorted(files.keys() - needed):
        raise CorruptFile(f"{extra[0]} belongs to no run of the suite")
    if unlisted := sorted(files.keys() ^ entry.digests.keys()):
        raise CorruptFile(f"{unlisted[0]} has no digest, or no file")
    for name, path in files.items():
        if digest(path.read_bytes()) != entry.digests[name]:
            raise CorruptFile(f"{name} is not the file that was entered: its SHA-256 is another")


def _check_settings(entry: Entered, suite: Suite) -> None:
    """Every run has the suite's settings and the chosen fields; a method's own file is not executed
    for that.
    """
    fields = {
        key: value
        for key, value in entry.fields.items()
        if not (entry.file and key.startswith("method."))
    }
    cells = [(entry.row, column) for column in suite.columns(entry.row)]
    for run in suite.recipe.variants(cells, TEST_SEEDS, fields, Path()):
        config = f"{run_place(run.label.rpartition(' | ')[2], run.seed)}/config.toml"
        text = (entry.folder / config).read_text(encoding="utf-8")
        expected = portable(run.settings.toml)
        if text == expected:
            continue
        tree = as_it_began(tomllib.loads(text))
        if entry.file:
            tree = _without_own_method(entry, config, tree)
        resolved = settle(from_tree(tree, {}, None), here=False).toml
        found = flat(tomllib.loads(portable(resolved)))
        wanted = flat(tomllib.loads(expected))
        # all engines have the same bits
        for key in sorted((found.keys() | wanted.keys()) - {"engine"}):
            if found.get(key) != wanted.get(key):
                raise CorruptFile(
                    f"{config} has {key} = {found.get(key)!r}, and the suite {wanted.get(key)!r}"
                )


def _without_own_method(entry: Entered, config: str, tree: dict[str, Any]) -> dict[str, Any]:
    """A config with FedAvg in the place of a method of its own file, which must have the chosen
    fields.
    """
    method, plans = tree["method"], list(tree["plan"].values())
    if short_name(str(method["name"]).partition(":")[0]).rpartition("/")[2] != entry.file:
        raise CorruptFile(
            f"{config} has the method {method['name']!r}, and the entry's file is {entry.file}"
        )
    for key, value in entry.fields.items():
        table, _, name = key.partition(".")
        if table == "method" and method.get(name) != value:
            raise CorruptFile(f"{config} has {key} = {method.get(name)!r}, and not what was chosen")
    if any(plan != plans[0] for plan in plans):
        raise CorruptFile(f"{config} has stages with different plans")
    return {**tree, "method": {"name": "fedavg"}, "plan": {"train": plans[0]}}


def _check_choice(entry: Entered, suite: Suite) -> None:
    """The fields are those of the best try; a reference has none. A newcomer's scores are
    believed.
    """
    choice = entry.choice
    if entry.row not in suite.tries:
        if entry.fields:
            raise CorruptFile(f"{entry.row} is a reference, and sets {next(iter(entry.fields))}")
        return
    tries = [dict(values) for values in suite.tries_of(entry.row)]
    if tries != [dict(values) for values in entry.tries] or choice is None:
        raise CorruptFile(f"its tries are not those of {suite.name}")
    scores = np.array(choice.scores)
    if (
        scores.shape[1] != len(CHOOSING_SEEDS)
        or not ((scores >= 0) & (scores <= 1)).all()
        or min(choice.sent) < 0
    ):
        raise CorruptFile(
            f"a try needs {len(CHOOSING_SEEDS)} scores from 0 to 1, and bytes that are not negative"
        )
    if tries[choice.best] != dict(entry.fields):
        raise CorruptFile(
            f"fields are {dict(entry.fields)}, and try {choice.best + 1} is the best: "
            f"{tries[choice.best]}"
        )
    if suite.chosen.get(entry.row, choice) != choice:
        raise CorruptFile("its scores are not those that ship with the suite")


def _check_journals(entry: Entered, suite: Suite) -> None:
    """Fields have their types, rounds are complete, and a score can be computed."""
    for place in _places(entry, suite):
        folder = entry.folder / place
        events = events_of(folder / "journal.jsonl")
        try:
            for event in events:
                _Event.model_validate(event)
            _check_rounds(events, rounds_of(folder), place in entry.diverged)
            score = score_of(folder, rounds_of(folder))
            if not (0 <= score.accuracy <= 1 and 0 <= score.learned <= 1):
                raise CorruptFile(f"accuracy {score.accuracy}, learned {score.learned}")
            if events[0]["split"]["sha256"] != digest((folder / SPLIT).read_bytes()):
                raise CorruptFile(f"{SPLIT} is not the split that it names")
        except (FedstillError, *UNREADABLE) as error:
            raise CorruptFile(f"{place}/journal.jsonl: {on_one_line(error)}") from error


def _check_rounds(events: Sequence[Event], expected: int, diverged: bool) -> None:
    """All rounds, each once; a run that diverged ends within one of them."""
    rounds = [event["round"] for event in events if event["event"] == "round"]
    clients = [event["round"] for event in events if event["event"] == "client"]
    complete = len(rounds) == expected
    if diverged:
        complete = len(rounds) < expected and clients[-1:] == [len(rounds) + 1]
    if not complete or rounds != list(range(1, len(rounds) + 1)):
        raise CorruptFile(
            f"it has {len(rounds)} of {expected} rounds, or not each once, or does not end as it "
            "should"
        )


def _check_summaries(entry: Entered, suite: Suite) -> None:
    for place in _places(entry, suite):
        if place in entry.diverged:
            continue
        summary = json.loads((entry.folder / place / "summary.json").read_text(encoding="utf-8"))
        for key, value in summary_from(events_of(entry.folder / place / "journal.jsonl")).items():
            if not same_number(summary.get(key), value):
                raise CorruptFile(
                    f"{place}/summary.json has {key} = {summary.get(key)!r}, and its journal "
                    f"{value!r}"
                )


def summary_from(events: Sequence[Event]) -> dict[str, Any]:
    """The numbers of a run's summary that follow from its journal."""
    rounds = [event for event in events if event["event"] == "round"]
    rows = [event["row"] for event in events if event["event"] == "task" and event["task"]]
    sums = {key: sum(event[key] for event in rounds) for key in ("bytes_up", "bytes_down", CPU)}
    last = {key: rounds[-1][key] for key in ("accuracy", "forgetting")}
    return {
        **last,
        **best_and_recent([event["accuracy"] for event in rounds]),
        **sums,
        **summed_up(rows),
    }


def same_number(first: Any, second: Any) -> bool:
    """Whether two numbers are equal up to the rounding of a sum."""
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=NEAR, abs_tol=NEAR)
    return bool(first == second)
