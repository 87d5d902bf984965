"""Checks of an entry. The first execute nothing of it: suite, files, choice, settings and journals.

They find mistakes, and fix which runs of which method an entry claims. Only a replay shows that a
run took place: runs of the entry are repeated here, and their journals compared.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
import shutil
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fedstill.benchmark.entries import CPU, ENTRY, RUN_FILES, Entered, place_of, portable, run_place
from fedstill.benchmark.scoring import Do, completed, events_of, matrix_of, score_from, score_of
from fedstill.benchmark.suites import TEST_SEEDS, Suite, load_suite
from fedstill.config.experiment import from_tree
from fedstill.config.overrides import flat
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, on_one_line
from fedstill.core.files import digest
from fedstill.core.keys import numpy_generator, seed_for
from fedstill.core.registry import names
from fedstill.core.reports import json_value
from fedstill.running.compare import Variant, seeded
from fedstill.running.journal import Event, without_times
from fedstill.running.preparation import read_data
from fedstill.running.result import summary_from_journal
from fedstill.running.same_run import comparable_start, processor, software
from fedstill.running.split_file import SPLIT

NEAR = 1e-9
"""Two sums of the same numbers in different orders differ by less than this."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""The errors of files that hold something else than they should."""


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
    return suite.with_row(entry.row, method, entry.tries, entry.topology)


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
    """Raise CorruptFile unless a run's config has the suite's settings."""
    if entry.file:
        check_settings_of_file(config, run, entry.file, entry.fields)
        return
    expected = flat(tomllib.loads(portable(run.settings.toml)))
    _compare_settings(flat(tomllib.loads(config)), expected)


def check_settings_of_file(config: str, run: Variant, file: str, fields: Mapping[str, Any]) -> None:
    """The config of a method with a file has the suite's settings; the file is not executed.

    ``run``: the same run with FedAvg in the method's place. Only the file says which fields and
    stages the method has, so the chosen ``fields`` are checked, and every stage has the plan of
    FedAvg's one stage. Raises CorruptFile.
    """
    found = flat(tomllib.loads(config))
    chosen = {key: fields[key] for key in fields if key.startswith("method.")}
    chosen["method.name"] = file
    found["method.name"] = Path(found["method.name"].partition(":")[0]).name
    found = {key: found[key] for key in found if key in chosen or not key.startswith("method.")}

    expected = {**flat(tomllib.loads(portable(run.settings.toml))), **chosen}
    plan = {key: value for key, value in expected.items() if key.startswith("plan.train.")}
    for key in found:
        if key.startswith("plan."):
            expected[key] = plan.get(re.sub(r"^plan\.[^.]+", "plan.train", key))
    _compare_settings(found, expected)


def _compare_settings(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in found.items():
        # all engines have the same bits
        if key != "engine" and expected.get(key) != value:
            raise CorruptFile(
                f"config.toml has {key} = {value!r}, and the suite {expected.get(key)!r}"
            )


def _check_journal(events: Sequence[Event], expected: int, *, diverged: bool) -> None:
    """All rounds are there; a run that diverged ends within one."""
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


Level = Literal["bits", "tolerance", "outliers", "disagrees"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From best to worst. ``outliers``: single numbers are beyond their tolerances, and the score is
not.
"""

NUDGE = 2.0**-20
"""About a millionth: what a few additions of 32-bit numbers in another order change."""

NUDGES = ((1, -1, 2, -2), (0.5, -0.5, 1.5, -1.5, 0.75, -0.75, 1.25, -1.25))
"""The changes of the repetitions' learning rates, in units of ``NUDGE``; the second ones only
confirm a rejection.
"""

LEAST_IMAGES = 2
LEAST = {"loss": 1e-4, "correct": LEAST_IMAGES, "correct_by_class": LEAST_IMAGES}
"""The least tolerances of losses, relative to them above 1, and of counts of right answers.

Vector instructions make up to 4e-5 in the losses of round 1.
"""

LEAST_SHARE = 0.005
"""The least tolerance of an accuracy: two test images or half a point, whichever is more."""

ROUNDS_AHEAD = 2
"""Rounding takes off in one run earlier than in another: a round has the tolerance of so many
rounds later.
"""

MOST_OUTLIERS = 0.2
"""The share of a run's numbers of one kind that may be outliers.

With other vector instructions, 3 of 20 clients that train alone on few examples at a high rate
ended at other losses.
"""


@dataclass(frozen=True)
class Replay:
    """The comparison of one run of an entry with its replay: its place, its level, and the numbers
    that lower it.
    """

    place: str
    level: Level
    problems: Sequence[str] = ()


def reached(replays: Sequence[Replay]) -> Level:
    """The level of an entry: that of its worst run."""
    return max((replay.level for replay in replays), key=LEVELS.index)


def drawn_places(
    entry: Entered, suite: Suite, count: int, number: int = 0
) -> list[tuple[str, int]]:
    """The runs to replay, (column, seed), drawn by the entry's own bytes and a number of the person
    who checks it.

    If authors knew the number, they could change an entry until it draws an honest run.
    """
    runs = [(column, seed) for column in suite.columns(entry.row) for seed in TEST_SEEDS]
    draw = numpy_generator(seed_for(int(entry.sha[:12], 16), number, 0, 0, "replay"))
    return [runs[index] for index in sorted(draw.permutation(len(runs))[:count])]


def made_here(entry: Entered) -> bool:
    """Whether an entry names this machine's processor and versions."""
    made = {key: value for key, value in entry.made.items() if key != CPU}
    return made == {**software(), "processor": processor(), "threads": 1}


def replayed(
    entry: Entered, places: Sequence[tuple[str, int]], do: Do, rounds: int = 0
) -> Iterator[Replay]:
    """Replay runs in a folder that is then deleted, and compare each with the entry's. A method's
    file is executed.

    ``rounds``: only the first so many of each; 0: all. Raises DataAbsent, Interrupted where a run
    was stopped, and RunsFailed where one failed but did not diverge.
    """
    with tempfile.TemporaryDirectory(prefix="fedstill-replay-") as name:
        folder = Path(name)
        method_file = None
        if entry.file:
            method_file = Path(shutil.copy(entry.folder / entry.file, folder))
        suite = suite_of(entry, method_file)
        changes = {**entry.fields, **_first_rounds(rounds, suite, entry.row)}
        runs = [
            run
            for column, seed in places
            for run in suite.recipe.variants([(entry.row, column)], (seed,), changes, folder)
        ]
        for run in runs:
            read_data(run.settings)
        completed(runs, do)
        for place, run in zip(places, runs, strict=True):
            yield _replay(entry, run_place(*place), run, do)


def _first_rounds(rounds: int, suite: Suite, row: str) -> dict[str, Any]:
    """Fewer rounds, unless the row has a number of its own, or a stage after the last, or tasks
    share them.
    """
    settings = suite.recipe.rows[row]
    tasks = any("stream" in suite.recipe.columns[column] for column in suite.columns(row))
    last_stage = settings.get("topology", {}).get("last")
    if tasks or last_stage or "rounds" in settings:
        return {}
    if not 0 < rounds < suite.recipe.common["rounds"]:
        return {}
    return {"rounds": rounds}


def _replay(entry: Entered, place: str, run: Variant, do: Do) -> Replay:
    """Compare a repeated run; on another processor, further repetitions give the tolerances."""
    rounds = run.settings.rounds
    entered = comparable_events(entry.folder / place, rounds)
    repetitions = [comparable_events(run.folder, rounds)]
    if entered == repetitions[0]:
        return Replay(place, "bits")

    replay = Replay(place, "disagrees", ["other bits, on this processor and with these versions"])
    if made_here(entry):
        return replay
    for steps in NUDGES:
        nudged = [_nudged(run, step) for step in steps]
        completed(nudged, do)
        repetitions += [comparable_events(repetition.folder, rounds) for repetition in nudged]
        replay = compared(place, entered, repetitions, rounds)
        if replay.level != "disagrees":
            break
    return replay


def _nudged(run: Variant, step: float) -> Variant:
    """The same run with all learning rates changed by a rounding error."""
    tree = tomllib.loads(run.settings.toml)
    rates = {f"plan.{stage}.lr": plan["lr"] for stage, plan in tree["plan"].items() if "lr" in plan}
    nudged = {key: rate * (1 + step * NUDGE) for key, rate in rates.items()}
    experiment = from_tree(tree, {}, None).with_values(nudged, "replay")
    return seeded(run.label, experiment, run.seed, run.folder.parent / f"nudged {step}")


def comparable_events(folder: Path, rounds: int) -> list[Event]:
    """The events of a run's first rounds in order, without times and versions."""
    start, *events = events_of(folder / "journal.jsonl")
    in_rounds = [event for event in events if event.get("round", 0) <= rounds]
    return [comparable_start(start), *map(without_times, in_rounds)]


# An entry's events beside those of repetitions of its run, where rounding differs. Tolerances come
# from the repetitions alone.


@dataclass(frozen=True)
class _Kind:
    """The numbers of one field of an event, which have one tolerance in a round."""

    event: str
    field: str
    is_count: bool


@dataclass(frozen=True)
class _Number:
    """A number of an entry, and the range that it has in the repetitions."""

    section: str
    name: str
    entered: float
    low: float
    high: float

    @property
    def unit(self) -> float:
        """What differences are measured in: they are relative for losses above 1."""
        if isinstance(self.low, int):
            return 1.0
        return max(1.0, abs(self.low), abs(self.high))

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.unit

    @property
    def distance(self) -> float:
        """How far outside the range the entry's is; negative within."""
        return max(self.low - self.entered, self.entered - self.high) / self.unit

    def __str__(self) -> str:
        return (
            f"{self.section}: {self.name} is {self.entered:.6g}, and in the replays "
            f"{self.low:.6g} to {self.high:.6g}"
        )


def compared(
    place: str, entered: Sequence[Event], repetitions: Sequence[Sequence[Event]], rounds: int
) -> Replay:
    """The level of a run of so many rounds: the fields and texts of its events must be those of a
    repetition, and numbers within tolerance.
    """
    rejected: list[str] = []
    outliers: list[str] = []
    numbers: dict[_Kind, list[_Number]] = defaultdict(list)
    sections = [_sections(events, rounds) for events in (entered, *repetitions)]
    # Not in the entry's order: tolerances depend on it.
    for section in sections[1]:
        if not all(section in of_run for of_run in sections):
            # A run diverged before: the score has the number of rounds.
            continue
        for event, *repeated in itertools.zip_longest(*[of_run[section] for of_run in sections]):
            similar = [repetition for repetition in repeated if _texts(repetition) == _texts(event)]
            if not similar:
                rejected.append(f"{section}: no replay has these texts: {reprlib.repr(event)}")
                continue
            for kind, number in _ranges(section, event, similar):
                numbers[kind].append(number)

    matrices = [matrix_of(events, rounds) for events in repetitions]
    swing = float(np.ptp([np.nanmean(matrix, axis=1) for matrix in matrices], axis=0).max())
    for kind, of_kind in numbers.items():
        least = _least_tolerance(kind, repetitions[0][0]["test_counts"], swing)
        beyond = _beyond(of_kind, least)
        exact = least == 0
        if len(beyond) > MOST_OUTLIERS * len(of_kind) or (exact and beyond):
            rejected += map(str, beyond)
        else:
            outliers += map(str, beyond)

    if rejected:
        return Replay(place, "disagrees", rejected)
    if outliers:
        return Replay(place, "outliers", outliers)
    return Replay(place, "tolerance")


def _ranges(
    section: str, event: Event, repeated: Sequence[Event]
) -> Iterator[tuple[_Kind, _Number]]:
    """The numbers of an event, with their ranges in the same event of repetitions."""
    of_repetitions = [_numbers(repetition) for repetition in repeated]
    for path, entered in _numbers(event).items():
        values = [numbers[path] for numbers in of_repetitions]
        kind = _Kind(event["event"], path[0], is_count=isinstance(values[0], int))
        name = ".".join(map(str, path))
        yield kind, _Number(section, name, entered, min(values), max(values))


def _sections(events: Sequence[Event], rounds: int) -> dict[str, list[Event]]:
    """The events by completed round, 0 before the first; the last section is the score."""
    completed_rounds = {event["round"] for event in events if event["event"] == "round"}
    sections: dict[str, list[Event]] = {}
    for event in events:
        number = event.get("round", 0)
        if number == 0 or number in completed_rounds:
            sections.setdefault(f"round {number}", []).append(event)
    sections["the score"] = [json_value({"event": "score", **score_from(events, rounds).table})]
    return sections


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values within tables and lists, each with the keys and indices that lead to it."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


def _numbers(event: Event | None) -> dict[tuple[Any, ...], float]:
    """The numbers in an event by path; those of a start are data, and must be equal like texts."""
    if event is None or event["event"] == "start":
        return {}
    return {path: value for path, value in _leaves(event) if type(value) in (int, float)}


def _texts(event: Event | None) -> dict[tuple[Any, ...], Any]:
    """Everything in an event but its numbers, and where these are."""
    return {**dict(_leaves(event)), **dict.fromkeys(_numbers(event), "a number")}


def _least_tolerance(kind: _Kind, test_counts: Sequence[int], swing: float) -> float:
    """The least tolerance of a kind of number; counts have none, but those of right answers.

    ``swing``: the width of the means of the matrix's rows, the last of which is the score: it may
    be narrow by chance.
    """
    if kind.field in LEAST:
        return LEAST[kind.field]
    if kind.is_count:
        return 0.0
    if kind.event == "score":
        return max(LEAST_SHARE, swing)
    images = min(count for count in test_counts if count)
    if kind.field == "accuracy":
        images = sum(test_counts)
    return max(LEAST_SHARE, LEAST_IMAGES / images)


def _beyond(numbers: Sequence[_Number], least: float) -> list[_Number]:
    """The numbers of one kind that are beyond the tolerances of their rounds."""
    rounds = [list(group) for _, group in itertools.groupby(numbers, lambda one: one.section)]
    widths = [max(number.width for number in of_round) for of_round in rounds]
    beyond: list[_Number] = []
    for index, of_round in enumerate(rounds):
        tolerance = max(least, *widths[: index + ROUNDS_AHEAD + 1])
        # A distance that is not a number is beyond, too.
        beyond += [number for number in of_round if not number.distance <= tolerance]
    return beyond
