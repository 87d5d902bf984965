"""Replays: some runs of an entry are repeated on this machine, and the journals are compared.

On the processor and with the versions that the entry names, only identical bits pass. Elsewhere
rounding differs. Then the run is repeated several times with slightly changed learning rates, and
these repetitions give the tolerances; nothing of the entry does.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
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

from fedstill.benchmark.entries import (
    CPU,
    Entry,
    code_of_entry,
    passed_checks,
    read_entry,
    run_path,
    suite_of,
)
from fedstill.benchmark.scoring import (
    Execute,
    accuracy_matrix,
    completed,
    read_events,
    score_of_events,
)
from fedstill.benchmark.suites import TEST_SEEDS, Suite
from fedstill.config.experiment import from_tree
from fedstill.core.errors import ConfigError, CorruptFile, DataAbsent, Interrupted
from fedstill.core.files import make_folder, write_whole
from fedstill.core.keys import numpy_generator, seed_for
from fedstill.core.reports import json_value
from fedstill.report.table_files import TextTable
from fedstill.running.compare import Variant, seeded
from fedstill.running.journal import JOURNAL, Event, without_times
from fedstill.running.preparation import read_data
from fedstill.running.same_run import comparable_start, processor, software

Level = Literal["bits", "tolerance", "outliers", "disagrees"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""How close a replay came, from best to worst.

``outliers``: single numbers exceed their tolerances, but the score does not.
"""

NUDGE = 2.0**-20
"""About a millionth: the relative change of a sum of 32-bit numbers in another order."""

NUDGES = ((1, -1, 2, -2), (0.5, -0.5, 1.5, -1.5, 0.75, -0.75, 1.25, -1.25))
"""The changes of the learning rates, in units of ``NUDGE``. The second group runs only if the first
one would reject the entry.
"""

MIN_COUNT_TOLERANCE = 2
MIN_TOLERANCES = {
    "loss": 1e-4,
    "correct": MIN_COUNT_TOLERANCE,
    "correct_by_class": MIN_COUNT_TOLERANCE,
}
"""The smallest tolerances of losses (relative above 1) and of counts of correct predictions.

Vector instructions change the losses of round 1 by up to 4e-5.
"""

MIN_ACCURACY_TOLERANCE = 0.005
"""The smallest tolerance of an accuracy: half a point, or two test images if that is more."""

ROUNDS_AHEAD = 2
"""Rounding errors grow earlier in one run than in another, so a round has the largest tolerance up
to this many rounds later.
"""

MAX_OUTLIERS = 0.2
"""The largest share of a run's numbers of one kind that may be outliers.

With other vector instructions, 3 of 20 clients that train alone on few examples with a high
learning rate ended at other losses.
"""


@dataclass(frozen=True)
class ReplayedRun:
    """The comparison of one run of an entry with its replay.

    ``path``: of the run within the entry. ``problems``: the numbers that lower the level.
    """

    path: str
    level: Level
    problems: Sequence[str] = ()


def worst_level(replays: Sequence[ReplayedRun]) -> Level:
    """The level of an entry: that of its worst run."""
    return max((replay.level for replay in replays), key=LEVELS.index)


def draw_runs(entry: Entry, suite: Suite, count: int, number: int = 0) -> list[tuple[str, int]]:
    """The runs to replay, (column, seed), drawn from the entry's bytes and the checker's number.

    If authors knew the number, they could modify an entry until it draws an honest run.
    """
    runs = list(itertools.product(suite.columns_of(entry.row), TEST_SEEDS))
    generator = numpy_generator(seed_for(int(entry.sha[:12], 16), number, 0, 0, "replay"))
    return [runs[index] for index in sorted(generator.permutation(len(runs))[:count])]


def was_made_here(entry: Entry) -> bool:
    """Whether an entry names this machine's processor and versions."""
    made_with = {key: value for key, value in entry.made_with.items() if key != CPU}
    return made_with == {**software(), "processor": processor(), "threads": 1}


def replay_runs(
    entry: Entry, drawn: Sequence[tuple[str, int]], execute: Execute, rounds: int = 0
) -> Iterator[ReplayedRun]:
    """Replay runs, (column, seed), in a temporary folder, and compare each with the entry's.

    The file of a new method is executed if the user trusts it. ``rounds``: replay only this many;
    0: all. Raises DataAbsent if data are missing, Interrupted if a run was stopped, RunsFailed if
    one failed without diverging, and UntrustedCode for a method that the user does not trust.
    """
    with tempfile.TemporaryDirectory(prefix="fedstill-replay-") as name:
        folder = Path(name)
        method_file = None
        if entry.method_file:
            method_file = Path(shutil.copy(entry.folder / entry.method_file, folder))
        runs: list[Variant] = []
        with code_of_entry(entry.folder):
            suite = suite_of(entry, method_file)
            changes = {**entry.fields, **first_rounds(rounds, suite, entry.row)}
            for column, seed in drawn:
                runs += suite.recipe.variants([(entry.row, column)], (seed,), changes, folder)
            for run in runs:
                read_data(run.settings)
        completed(runs, execute)
        for (column, seed), run in zip(drawn, runs, strict=True):
            yield _compare_replay(entry, run_path(column, seed), run, execute)


def first_rounds(rounds: int, suite: Suite, row: str) -> dict[str, Any]:
    """The change that limits a run to its first rounds; empty if its length cannot be changed.

    It cannot if the row sets its own number of rounds, if a stage follows the last round, or if
    tasks divide the rounds among them.
    """
    settings = suite.recipe.rows[row]
    has_tasks = any("stream" in suite.recipe.columns[column] for column in suite.columns_of(row))
    last_stage = settings.get("topology", {}).get("last")
    if has_tasks or last_stage or "rounds" in settings:
        return {}
    if not 0 < rounds < suite.recipe.common["rounds"]:
        return {}
    return {"rounds": rounds}


def _compare_replay(entry: Entry, path: str, run: Variant, execute: Execute) -> ReplayedRun:
    """Compare a repeated run; on another processor, further repetitions give the tolerances."""
    rounds = run.settings.rounds
    entered = comparable_events(entry.folder / path, rounds)
    repetitions = [comparable_events(run.folder, rounds)]
    if entered == repetitions[0]:
        return ReplayedRun(path, "bits")

    replay = ReplayedRun(
        path, "disagrees", ["other bits, on this processor and with these versions"]
    )
    if was_made_here(entry):
        return replay
    for steps in NUDGES:
        nudged = [_nudged(run, step) for step in steps]
        completed(nudged, execute)
        repetitions += [comparable_events(repetition.folder, rounds) for repetition in nudged]
        replay = compare_events(path, entered, repetitions, rounds)
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
    start, *events = read_events(folder / JOURNAL)
    in_rounds = [event for event in events if event.get("round", 0) <= rounds]
    return [comparable_start(start), *map(without_times, in_rounds)]


# ---- comparing events where rounding differs -----------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """The numbers of one field of an event, which share one tolerance per round."""

    event: str
    field: str
    is_count: bool


@dataclass(frozen=True)
class _Number:
    """A number of an entry, and its range over the repetitions."""

    section: str
    name: str
    entered: float
    low: float
    high: float

    @property
    def unit(self) -> float:
        """The unit of differences: they are relative for losses above 1."""
        if isinstance(self.low, int):
            return 1.0
        return max(1.0, abs(self.low), abs(self.high))

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.unit

    @property
    def distance(self) -> float:
        """The distance of the entry's number from the range; negative inside it."""
        return max(self.low - self.entered, self.entered - self.high) / self.unit

    def __str__(self) -> str:
        return (
            f"{self.section}: {self.name} is {self.entered:.6g}, and in the replays "
            f"{self.low:.6g} to {self.high:.6g}"
        )


@dataclass(frozen=True)
class _Findings:
    """The numbers by kind that can be compared, and the events whose texts differ."""

    numbers: Mapping[_Kind, Sequence[_Number]]
    differing_texts: Sequence[str]


def compare_events(
    path: str, entered: Sequence[Event], repetitions: Sequence[Sequence[Event]], rounds: int
) -> ReplayedRun:
    """The level of a run of ``rounds`` rounds.

    The fields and texts of its events must equal those of a repetition, and its numbers must be
    within tolerance.
    """
    findings = _findings([_sections(events, rounds) for events in (entered, *repetitions)])
    rejected = list(findings.differing_texts)
    outliers: list[str] = []
    swing = _score_swing(repetitions, rounds)
    for kind, numbers in findings.numbers.items():
        tolerance = _min_tolerance(kind, repetitions[0][0]["test_counts"], swing)
        beyond = _beyond_tolerance(numbers, tolerance)
        is_exact = tolerance == 0
        if len(beyond) > MAX_OUTLIERS * len(numbers) or (is_exact and beyond):
            rejected += map(str, beyond)
        else:
            outliers += map(str, beyond)

    if rejected:
        return ReplayedRun(path, "disagrees", rejected)
    if outliers:
        return ReplayedRun(path, "outliers", outliers)
    return ReplayedRun(path, "tolerance")


def _findings(runs: Sequence[Mapping[str, Sequence[Event]]]) -> _Findings:
    """Compare the sections of the entry, which come first, with those of the repetitions."""
    numbers: dict[_Kind, list[_Number]] = defaultdict(list)
    differing: list[str] = []
    # The order is a repetition's, not the entry's: tolerances depend on it.
    for section in runs[1]:
        if not all(section in run for run in runs):
            # One of the runs diverged earlier. Its score contains the number of rounds.
            continue
        for event, *repeated in itertools.zip_longest(*[run[section] for run in runs]):
            similar = [repetition for repetition in repeated if _texts(repetition) == _texts(event)]
            if not similar:
                differing.append(f"{section}: no replay has these texts: {reprlib.repr(event)}")
                continue
            for kind, number in _ranges(section, event, similar):
                numbers[kind].append(number)
    return _Findings(numbers, differing)


def _score_swing(repetitions: Sequence[Sequence[Event]], rounds: int) -> float:
    """How far the mean accuracies of the repetitions' matrices are apart, at the widest row."""
    matrices = [accuracy_matrix(events, rounds) for events in repetitions]
    means = [np.nanmean(matrix, axis=1) for matrix in matrices]
    return float(np.ptp(means, axis=0).max())


def _ranges(
    section: str, event: Event, repeated: Sequence[Event]
) -> Iterator[tuple[_Kind, _Number]]:
    """The numbers of an event, with their ranges in the same event of the repetitions."""
    repeated_numbers = [_numbers(repetition) for repetition in repeated]
    for path, entered in _numbers(event).items():
        values = [numbers[path] for numbers in repeated_numbers]
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
    score = {"event": "score", **score_of_events(events, rounds).table}
    sections["the score"] = [json_value(score)]
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
    """The numbers in an event by path.

    The numbers of a start event describe the data and must be equal, as texts must.
    """
    if event is None or event["event"] == "start":
        return {}
    return {path: value for path, value in _leaves(event) if type(value) in (int, float)}


def _texts(event: Event | None) -> dict[tuple[Any, ...], Any]:
    """Everything in an event except its numbers, and where these are."""
    return {**dict(_leaves(event)), **dict.fromkeys(_numbers(event), "a number")}


def _min_tolerance(kind: _Kind, test_counts: Sequence[int], swing: float) -> float:
    """The smallest tolerance of a kind of number; counts must be exact, except correct predictions.

    ``swing``: for the score, which is the last of the matrix's rows and may have a narrow range by
    chance.
    """
    if kind.field in MIN_TOLERANCES:
        return MIN_TOLERANCES[kind.field]
    if kind.is_count:
        return 0.0
    if kind.event == "score":
        return max(MIN_ACCURACY_TOLERANCE, swing)
    images = min(count for count in test_counts if count)
    if kind.field == "accuracy":
        images = sum(test_counts)
    return max(MIN_ACCURACY_TOLERANCE, MIN_COUNT_TOLERANCE / images)


def _beyond_tolerance(numbers: Sequence[_Number], min_tolerance: float) -> list[_Number]:
    """The numbers of one kind that exceed the tolerances of their rounds."""
    rounds = [list(group) for _, group in itertools.groupby(numbers, lambda number: number.section)]
    widths = [max(number.width for number in in_round) for in_round in rounds]
    beyond: list[_Number] = []
    for index, in_round in enumerate(rounds):
        tolerance = max(min_tolerance, *widths[: index + ROUNDS_AHEAD + 1])
        # A distance that is not a number is beyond, too.
        beyond += [number for number in in_round if not number.distance <= tolerance]
    return beyond


# ---- the recorded levels of replays --------------------------------------------------------------

REPLAYED_FILE = "replayed.csv"
"""The file in a folder of entries with the level of each entry's replay.

It names the digest of the entry: another entry of the same row counts as not replayed.
"""

REPLAYED_FIELDS = ("suite", "method", "level", "where", "entry")


def recorded_levels(folder: Path) -> dict[tuple[str, str, str], str]:
    """The recorded levels by suite, row and digest of the entry; empty without a file."""
    return {(suite, row, sha): level for suite, row, level, _, sha in _read_replayed_file(folder)}


def record_level(folder: Path, entry: Entry, level: str) -> None:
    """Record the level of an entry's replay on this machine, in place of an earlier one."""
    row = [entry.suite, entry.row]
    lines = [line for line in _read_replayed_file(folder) if line[:2] != row]
    lines.append([*row, level, processor(), entry.sha])
    make_folder(folder)
    text = TextTable(REPLAYED_FIELDS, sorted(lines)).csv()
    write_whole(folder / REPLAYED_FILE, text.encode())


def check_can_record(folder: Path) -> None:
    """Raise ConfigError if no level can be recorded in a folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"{folder} cannot hold {REPLAYED_FILE}: {existing} is not a folder you may write to"
        )


def _read_replayed_file(folder: Path) -> list[list[str]]:
    path = folder / REPLAYED_FILE
    if not path.is_file():
        return []
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return [[line.get(name) or "" for name in REPLAYED_FIELDS] for line in reader]


# ---- the verdict on an entry ---------------------------------------------------------------------

MAX_PROBLEMS = 5
"""How many problems of a replayed run are printed."""


@dataclass(frozen=True)
class ReplayRequest:
    """Which runs of an entry to replay.

    ``runs``: how many; ``number`` draws them. ``rounds``: replay only the first ones; 0: all.
    ``note``: the folder in which the level of a replay of whole runs is recorded.
    """

    runs: int = 0
    rounds: int = 0
    number: int = 0
    note: Path | None = None


@dataclass(frozen=True)
class VerdictLine:
    """A line of a verdict. ``passed``: False for a problem."""

    text: str
    passed: bool = True


def verdict(place: Path, execute: Execute, request: ReplayRequest) -> Iterator[VerdictLine]:
    """The lines of the verdict on the entry in a folder: its checks, then its replayed runs.

    Raises Interrupted if a replay was stopped.
    """
    yield VerdictLine(str(place))
    try:
        entry = read_entry(place)
        for check in passed_checks(entry):
            yield VerdictLine(f"  ok       {check}")
    except (ConfigError, CorruptFile) as error:
        yield VerdictLine(f"  REFUSED  {error}", passed=False)
        return
    if not request.runs:
        yield VerdictLine("  not replayed: a consistently invented entry would pass these checks")
        return
    try:
        yield from _replay_lines(entry, execute, request)
    except DataAbsent as error:
        yield VerdictLine(f"  not replayed: data are missing here: {error}", passed=False)
    except Interrupted as error:
        # Replays are in a temporary folder.
        raise Interrupted(
            f"stopped; nothing of this replay is kept, and --draw {request.number} draws the same "
            "runs again"
        ) from error


def _replay_lines(entry: Entry, execute: Execute, request: ReplayRequest) -> Iterator[VerdictLine]:
    suite = suite_of(entry)
    drawn = draw_runs(entry, suite, request.runs, request.number)
    if entry.method_file:
        yield VerdictLine(
            f"  executing {entry.folder / entry.method_file}, which is part of the entry"
        )
    rounds = first_rounds(request.rounds, suite, entry.row).get("rounds", 0)
    paths = ", ".join(run_path(column, seed) for column, seed in drawn)
    yield VerdictLine(f"  runs drawn with --draw {request.number}: {paths}")
    replays = list(replay_runs(entry, drawn, execute, rounds))
    for replay in replays:
        yield VerdictLine(f"  {replay.level:9} {replay.path}", replay.level != "disagrees")
        for problem in replay.problems[:MAX_PROBLEMS]:
            yield VerdictLine(f"            {problem}")

    level = worst_level(replays)
    if request.note is not None and not rounds:
        record_level(request.note, entry, level)
    yield VerdictLine(f"  replayed here: {level}", level != "disagrees")
    if level != "disagrees":
        for limitation in _limitations(entry, replays, suite, rounds):
            yield VerdictLine(f"  {limitation}")


def _limitations(
    entry: Entry, replays: Sequence[ReplayedRun], suite: Suite, rounds: int
) -> Iterator[str]:
    """Sentences about what the replays of an entry do not prove.

    ``rounds``: how many rounds were replayed; 0: all.
    """
    if worst_level(replays) != "bits":
        made_on = entry.made_with.get("processor", "an unknown processor")
        yield f"made on {made_on} or with other versions; there, only identical bits would pass"
    if rounds:
        yield f"rounds after {rounds} were not replayed, so the level is not recorded"
    run_count = len(suite.columns_of(entry.row)) * len(TEST_SEEDS)
    if len(replays) < run_count:
        yield f"not replayed: {run_count - len(replays)} of {run_count} runs"
    yield "never replayed: the scores of the tries, and CPU seconds"
