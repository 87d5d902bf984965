"""What an entry says of itself, checked without a run: settings, completeness, digests, draws,
sums, and the choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstill.data.examples import Dataset
from fedstill.errors import ConfigError, CorruptFile, DataAbsent, FedstillError
from fedstill.experiment.preparing.prepared import read_data
from fedstill.experiment.ranking.derived import contradiction, following, same_number
from fedstill.experiment.ranking.drawn import other_draws
from fedstill.experiment.ranking.entries import ENTRY, RUN_FILES, Entered, rounds_of
from fedstill.experiment.ranking.same_settings import places_of, settings_told, unlike_suite
from fedstill.experiment.ranking.scoring import events_of
from fedstill.experiment.ranking.suites import CHOOSING_SEEDS, Suite, load_suite
from fedstill.experiment.run_directory.journal import Event
from fedstill.experiment.run_directory.split_file import SPLIT
from fedstill.files import digest
from fedstill.registry import names

NOT_FINITE = re.compile(rb"[:,\[]\s*(-?Infinity|NaN)\b")
"""A number in a line of JSON that no journal holds."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: what, and what is wrong with it, empty where nothing is.

    absent: why it could not be looked at here, as the data are not on this machine.
    """

    what: str
    wrong: str = ""
    absent: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong


def suite_of(entry: Entered, file: Path | None = None) -> Suite:
    """The suite of an entry, with the entry's own row where the suite does not have it.

    ``file``: where the method's own file is to be executed from; without it FedAvg stands in for
    such a method. Raises CorruptFile for another suite or version than this fedstill has, or a row
    that the suite has otherwise.
    """
    try:
        suite = load_suite(entry.suite)
    except ConfigError as error:
        raise CorruptFile(f"{entry.folder / ENTRY}: {error}") from error
    if entry.version != suite.version:
        raise CorruptFile(
            f"{entry.folder / ENTRY} is of version {entry.version} of {suite.name}; this fedstill "
            f"has {suite.version}"
        )
    if entry.row in suite.recipe.rows:
        if entry.file or entry.method != suite.method(entry.row)["name"]:
            known = suite.method(entry.row)["name"]
            raise CorruptFile(
                f"{entry.folder / ENTRY}: {entry.row} is the method {known} in {suite.name}"
            )
        return suite
    if not entry.file and entry.method not in names("method"):
        raise CorruptFile(
            f"{entry.folder / ENTRY}: {entry.method!r} is no method of the package, and has no file"
        )
    method = "fedavg" if entry.file and file is None else str(file or entry.method)
    try:
        return suite.with_row(entry.row, method, entry.tries)
    except ConfigError as error:
        raise CorruptFile(f"{entry.folder / ENTRY}: {error}") from error


def checked_entry(entry: Entered, draws: bool = True) -> Iterator[Finding]:
    """What was checked of an entry, a line each, without running anything; ``draws``: also against
    what is drawn here.

    A check that needs what another one has refused is left out.
    """
    try:
        suite = suite_of(entry)
    except CorruptFile as error:
        yield Finding("suite and version", str(error))
        return
    yield Finding("suite and version")
    checks: list[tuple[str, Callable[[Entered, Suite], str]]] = [
        ("seeds and columns are complete", _incomplete),
        ("files are those of entry.toml", _other_files),
        ("settings are the suite's", unlike_suite),
        ("journals are whole and do not contradict themselves", _broken_journals),
        ("summaries follow from the journals", _other_summaries),
        ("the fields follow from the tries", _other_choice),
    ]
    for what, check in checks:
        line = _line(what, entry, suite, check)
        yield line
        if not line.good and check in (_incomplete, _other_files, unlike_suite, _broken_journals):
            return
    if draws:
        yield _line(
            "splits, tasks and clients of rounds are what is drawn here", entry, suite, _other_draws
        )


def _line(
    what: str, entry: Entered, suite: Suite, check: Callable[[Entered, Suite], str]
) -> Finding:
    try:
        return Finding(what, check(entry, suite))
    except DataAbsent as error:
        return Finding(what, absent=str(error))
    except FedstillError as error:
        return Finding(what, str(error))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        return Finding(what, f"a file cannot be read: {type(error).__name__}: {error}")


def _incomplete(entry: Entered, suite: Suite) -> str:
    places = places_of(entry, suite)
    needed = {f"{place}/{name}" for place in places for name in RUN_FILES}
    needed -= {f"{place}/summary.json" for place in entry.diverged}
    needed |= {entry.file} if entry.file else set()
    there = {
        p.relative_to(entry.folder).as_posix() for p in entry.folder.rglob("*") if p.is_file()
    } - {ENTRY}
    there -= {f"{place}/summary.json" for place in entry.diverged}
    if missing := sorted(needed - there):
        return f"{missing[0]} is missing ({len(missing)} files in all)"
    return f"{extra[0]} belongs to no run of the suite" if (extra := sorted(there - needed)) else ""


def _other_files(entry: Entered, suite: Suite) -> str:
    paths = sorted(p for p in entry.folder.rglob("*") if p.is_file() and p.name != ENTRY)
    named = {p.relative_to(entry.folder).as_posix(): p for p in paths}
    if unlisted := sorted(named.keys() ^ entry.digests.keys()):
        return f"{unlisted[0]} has no digest, or no file"
    other = [
        name for name, path in named.items() if digest(path.read_bytes()) != entry.digests[name]
    ]
    return f"{other[0]} is not the file that was entered: its SHA-256 is another" if other else ""


def _broken_journals(entry: Entered, suite: Suite) -> str:
    for place in places_of(entry, suite):
        path = entry.folder / place / "journal.jsonl"
        events, asked = events_of(path), rounds_of(entry.folder / place)
        if not path.read_bytes().endswith(b"\n") or not events or events[0]["event"] != "start":
            return (
                f"{place}/journal.jsonl does not begin with its start, or ends in the middle of a "
                "line"
            )
        if NOT_FINITE.search(path.read_bytes()):
            return f"{place}/journal.jsonl holds a number that is not finite"
        if events[0]["split"]["sha256"] != digest((entry.folder / place / SPLIT).read_bytes()):
            return f"{place}/{SPLIT} is not the split that the journal names"
        numbers = [e["round"] for e in events if e["event"] == "round"]
        if numbers != list(range(1, len(numbers) + 1)) or (
            len(numbers) != asked and place not in entry.diverged
        ):
            return f"{place}/journal.jsonl has not the rounds 1 to {asked}, each once"
        if place in entry.diverged and not _diverges(events, len(numbers), asked):
            return f"{place}/journal.jsonl does not end in a round that diverged"
        if why := contradiction(events):
            return f"{place}/journal.jsonl, {why}"
    return ""


def _diverges(events: Sequence[Event], done: int, asked: int) -> bool:
    """Whether a journal ends in what clients did in a round that was not completed."""
    last = [e for e in events if e["event"] == "client"][-1:]
    return done < asked and bool(last) and last[0]["round"] == done + 1


def _other_summaries(entry: Entered, suite: Suite) -> str:
    for place in (p for p in places_of(entry, suite) if p not in entry.diverged):
        summary = json.loads((entry.folder / place / "summary.json").read_text(encoding="utf-8"))
        for key, value in following(events_of(entry.folder / place / "journal.jsonl")).items():
            if not same_number(summary.get(key), value):
                return (
                    f"{place}/summary.json has {key} = {summary.get(key)!r}, and its journal "
                    f"{value!r}"
                )
    return ""


def _other_choice(entry: Entered, suite: Suite) -> str:
    if entry.choice is None:
        return f"{entry.row} has no scores of its tries" if entry.row in suite.tries else ""
    scores = [score for own in entry.choice.scores for score in own]
    if {len(own) for own in entry.choice.scores} != {len(CHOOSING_SEEDS)} or not all(
        0 <= s <= 1 for s in scores
    ):
        return (
            f"its tries need {len(CHOOSING_SEEDS)} scores each, one a seed of choosing, from 0 to 1"
        )
    if min(entry.choice.sent) < 0:
        return "a try has a negative number of bytes"
    tries = suite.tries_of(entry.row) if entry.row in suite.tries else ()
    if [dict(t) for t in tries] != [dict(t) for t in entry.tries]:
        return f"its tries are not those of {suite.name}"
    best = dict(tries[entry.choice.best])
    if best != dict(entry.fields):
        return (
            f"its fields are {dict(entry.fields)}, and by its scores try {entry.choice.best + 1} "
            f"is the best: {best}"
        )
    shipped = suite.chosen.get(entry.row)
    return (
        "its scores are not those that ship with the suite"
        if shipped not in (None, entry.choice)
        else ""
    )


def _other_draws(entry: Entered, suite: Suite) -> str:
    data: dict[str, Dataset] = {}
    for place in places_of(entry, suite):
        settings, events = (
            settings_told(entry, place),
            events_of(entry.folder / place / "journal.jsonl"),
        )
        name = settings.data.name
        data |= {} if name in data else {name: read_data(settings)}
        if why := other_draws(settings, events, data[name], bool(entry.file)):
            return f"{place}: {why}"
    return ""
