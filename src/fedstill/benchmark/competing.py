"""The work behind the ranking's commands: choosing configurations, adding methods, writing entries,
and estimating the costs of a suite.

Each step continues where it was stopped.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.benchmark.entries import (
    Entry,
    check_settings_of_new_method,
    with_relative_paths,
    write_entry,
)
from fedstill.benchmark.recipes import Cell
from fedstill.benchmark.scoring import Execute, ScoredRun, executed, score_of, scored_runs
from fedstill.benchmark.suites import (
    CHOOSING_SEEDS,
    TEST_SEEDS,
    Choice,
    Suite,
    SuiteRow,
    Try,
    check_printable,
    check_run_folders,
    check_slugs,
    load_suite,
    read_choice,
    slug,
    suite_names,
    write_choices,
)
from fedstill.config.named_tables import resolved_name
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, CorruptFile, DataError, FedstillError
from fedstill.core.files import parse_toml, read_file, read_toml
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Stage
from fedstill.core.user_modules import split_name
from fedstill.running.compare import Variant
from fedstill.running.journal import CONFIG, JOURNAL, Event, read_journal, without_times
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from fedstill.running.world import examples_trained_on, local_steps

# ---- choosing configurations ---------------------------------------------------------------------

CHOICES_FILE = "chosen.toml"
"""The file with the choices of a suite, next to its runs."""


def choose_fields(suite: Suite, rows: Sequence[str], out: Path, execute: Execute) -> Suite:
    """The suite with configurations chosen for some rows; each choice is written at once.

    The row whose learning rate the others use comes first. Trials and choices are in the folder of
    the suite that chooses. Stored choices that are invalid now are left out. For all other rows,
    the choices that ship count, as in ``with_stored_choices``. Raises ConfigError for a bound.
    """
    for row in rows:
        if row not in suite.tries:
            raise ConfigError(
                f"{suite.name}: {row} is a bound, so it has no fields to choose; leave it out"
            )
    folder = out / suite.choosing_suite.name
    suite = _with_valid_choices(suite, folder / CHOICES_FILE)
    for row in _rate_row_first(suite, rows):
        trials = suite.trials(row, folder / "choosing")
        runs = scored_runs(list(itertools.chain.from_iterable(trials)), execute)
        suite = _with_new_choice(suite, row, choice_of(runs, len(trials)))
        store_choices(suite, folder / CHOICES_FILE)
    return suite


def _rate_row_first(suite: Suite, rows: Iterable[str]) -> list[str]:
    """Rows in the order in which they can be chosen: the others use the rate of ``rate_row``."""
    return sorted(rows, key=lambda row: row != suite.rate_row)


def _with_new_choice(suite: Suite, row: str, choice: Choice) -> Suite:
    """The suite with a choice for a row. A new choice for ``rate_row`` changes the tries of all
    other rows, so their choices are dropped.
    """
    changed = replace(suite, choices={**suite.choices, row: choice})
    if row != suite.rate_row:
        return changed
    if row in suite.choices and suite.chosen_fields(row) == changed.chosen_fields(row):
        return changed
    return replace(suite, choices={row: choice})


def choice_of(runs: Sequence[ScoredRun], try_count: int) -> Choice:
    """The choice that follows from the runs of all tries, in order; a diverged run scores 0."""
    seed_count = len(CHOOSING_SEEDS)
    scores = []
    sent = []
    for number in range(try_count):
        try_runs = runs[number * seed_count : (number + 1) * seed_count]
        scores.append(tuple(map(_choosing_score, try_runs)))
        sent.append(sum(item.score.sent for item in try_runs) // seed_count)
    return Choice(tuple(scores), tuple(sent))


def _choosing_score(item: ScoredRun) -> float:
    if item.diverged:
        return 0.0
    return item.score.accuracy


@dataclass(frozen=True)
class StoredChoices:
    """The content of a file of choices: the version of its suite, and the table of each row."""

    path: Path
    version: int
    tables: Mapping[str, Any]


def with_stored_choices(suite: Suite, out: Path) -> Suite:
    """The suite with the choices stored in a folder of runs, for rows whose choices do not ship.

    Choices that ship are part of the suite: an entry with others could not be checked. Raises
    ConfigError for choices of another version of the suite, and for scores of other tries.
    """
    stored = _read_choices(out / suite.choosing_suite.name / CHOICES_FILE)
    if stored is None:
        return suite
    _check_version(suite, stored)
    for row in _rate_row_first(suite, stored.tables):
        suite = _with_stored_choice(suite, stored, row)
    return suite


def _with_valid_choices(suite: Suite, path: Path) -> Suite:
    """The suite with those choices in a file that belong to its version and its tries."""
    stored = _read_choices(path)
    if stored is None or stored.version != suite.choosing_suite.version:
        return suite
    for row in _rate_row_first(suite, stored.tables):
        with suppress(ConfigError):
            suite = _with_stored_choice(suite, stored, row)
    return suite


def _read_choices(path: Path) -> StoredChoices | None:
    """The content of a file of choices; None if there is no file."""
    if not path.is_file():
        return None
    try:
        tables = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the choices in {path}: {error}") from error
    version = tables.pop("version", 0)
    return StoredChoices(path, version, tables)


def _check_version(suite: Suite, stored: StoredChoices) -> None:
    version = suite.choosing_suite.version
    if stored.version != version:
        raise ConfigError(
            f"{stored.path} belongs to another version of the suite {suite.choosing_suite.name}, "
            f"which now has version {version}; run `{suite.choose_command}` again"
        )


def _with_stored_choice(suite: Suite, stored: StoredChoices, row: str) -> Suite:
    """The suite with the stored choice of a row; unchanged if the row has no tries, or has a
    choice already.

    Raises ConfigError if the scores select other fields now than when they were stored, because
    they belong to other tries.
    """
    if row not in suite.tries or row in suite.choices:
        return suite
    table = stored.tables[row]
    source = f"{stored.path}, {row}"
    choice = read_choice(source, table, len(suite.tries[row]))
    suite = replace(suite, choices={**suite.choices, row: choice})
    # As in the file, where tuples are lists.
    fields = parse_toml(tomli_w.dumps(suite.chosen_fields(row)).encode())
    if table.get("fields") != fields:
        raise ConfigError(
            f"{source}: the scores belong to other tries, because they would now choose {fields} "
            f"and not {table.get('fields')}; run `{suite.choose_command}` again"
        )
    return suite


def store_choices(suite: Suite, path: Path) -> None:
    """Write the choices of a suite to a file."""
    choices = {row: suite.choices[row] for row in suite.tries if row in suite.choices}
    fields = {row: suite.chosen_fields(row) for row in choices}
    write_choices(path, suite.choosing_suite.version, choices, fields)


# ---- writing entries -----------------------------------------------------------------------------


def enter_rows(
    suite: Suite,
    rows: Sequence[str],
    out: Path,
    execute: Execute,
    method_file: Path | None = None,
) -> list[Entry]:
    """Execute all runs of some rows, and write their entries to ``OUT/entries/SUITE/``.

    ``method_file``: the file of the rows' method, if it is not in the package.
    """
    variants: list[Variant] = []
    for row in rows:
        variants += suite.runs(row, out / suite.name / "runs")
    runs = scored_runs(variants, execute)
    folder = out / "entries" / suite.name
    return [
        write_entry(suite, row, _runs_of(row, runs), folder / slug(row), method_file)
        for row in rows
    ]


def _runs_of(row: str, runs: Iterable[ScoredRun]) -> list[ScoredRun]:
    """The runs of one row; the label is compared up to its column, as names may start alike."""
    return [item for item in runs if item.variant.label.partition(" | ")[0] == row]


# ---- adding a method -----------------------------------------------------------------------------

MAX_DEFAULT_TRIES = 5
"""How many of FedAvg's tries are used for a method that defines none."""

REHEARSAL_SEED = 99
"""The seed of a rehearsal; no other run of the ranking has it."""


def add_method(suite: Suite, file: Path, name: str = "") -> SuiteRow:
    """The suite with a row for the method in a file.

    The tries are the method's class variable ``tries``: tables of its fields. Without it, they are
    FedAvg's learning rates. Raises ConfigError for a file without a method, for malformed tries,
    for names that tables cannot show, and for a name whose folders another row has.
    """
    if split_name(file.name).attribute:
        raise ConfigError(
            f"{file}: an entry is a file with one method; write @method(NAME) above its class and "
            "enter the file"
        )
    if not file.is_file():
        raise ConfigError(f"there is no file {file}; name the file of a method")
    config_name = resolved_name("method", str(file.resolve()), None)
    entry = registry.lookup("method", config_name)
    method = entry.build()
    if not isinstance(method, Method):
        raise ConfigError(f"{file}: {entry.name} is not a fedstill.Method")
    row = name or type(method).__name__
    for text in (row, file.name):
        check_printable(text)
    _check_data(suite, row, method)
    tries = _tries_of(suite, file, method)
    extended = suite.with_row(row, config_name, tries, topology_in(suite, method))
    check_slugs(suite.name, "rows", extended.recipe.rows)
    check_run_folders(suite.name, extended.recipe)
    return SuiteRow(extended, row)


def _check_data(suite: Suite, row: str, method: Method) -> None:
    """Raise ConfigError for a method that needs data which the suite does not have."""
    has_public_data = bool(suite.recipe.common["data"].get("public"))
    if Need.PUBLIC_DATA not in method.requires() or has_public_data:
        return
    remedy = "set data.public in the suite's file"
    if suite.name in suite_names():
        remedy = "enter it with --track public"
    raise ConfigError(f"{row} needs public data, and {suite.name} has none; {remedy}")


def _tries_of(suite: Suite, file: Path, method: Method) -> tuple[Try, ...]:
    tries = getattr(method, "tries", _default_tries(suite))
    is_sequence = isinstance(tries, (tuple, list))
    if not is_sequence or not all(isinstance(values, dict) for values in tries):
        raise ConfigError(
            f"{file}: tries must be a tuple of tables, such as ({{'beta': 0.3}}, {{'beta': 1.0}})"
        )
    return tuple(tries)


def _default_tries(suite: Suite) -> Sequence[Try]:
    """The tries of the suite's first row with the method FedAvg; one empty try without it."""
    for row, tries in suite.tries.items():
        if suite.method_of(row)["name"] == "fedavg":
            return tries[:MAX_DEFAULT_TRIES]
    return ({},)


def topology_in(suite: Suite, method: Method) -> dict[str, Any]:
    """The topology options that a method determines: the kind, if it differs from the suite's, and
    the stages that it adds.
    """
    stages: dict[str, Any] = dict(method.schedule)
    if method.topology == suite.recipe.common["topology"]["kind"]:
        return stages
    return {"kind": method.topology, **stages}


def rehearse(suite: Suite, row: str, execute: Execute) -> None:
    """Run two rounds of a row, twice.

    Raises FedstillError if it cannot be run or scored, if the two runs differ, or if the checks of
    its entry would refuse its settings.
    """
    changes: dict[str, Any] = {"rounds": 2}
    has_tasks = "stream" in suite.recipe.columns[suite.choosing_column]
    if has_tasks or suite.recipe.common["rounds"] == 1:
        # The rounds of tasks cannot be changed.
        changes = {}
    with tempfile.TemporaryDirectory(prefix="fedstill-rehearsal-") as name:
        variants = [
            _rehearsal(suite, row, changes, Path(name) / folder) for folder in ("first", "second")
        ]
        _execute_rehearsals(suite, row, variants, execute)
        first, second = map(_comparable_journal, variants)
        if first != second:
            raise FedstillError(
                f"{row} gives different results when it is repeated: draw random numbers by key "
                "(fedstill.core.keys), and store everything in State and in the clients' state"
            )
        _check_rehearsed_settings(suite, row, variants[0])
        _check_scorable(suite, row, variants[0])


def _rehearsal(suite: Suite, row: str, changes: Try, folder: Path) -> Variant:
    cells = [(row, suite.choosing_column)]
    (variant,) = suite.recipe.variants(cells, (REHEARSAL_SEED,), changes, folder)
    return variant


def _execute_rehearsals(
    suite: Suite, row: str, variants: Sequence[Variant], execute: Execute
) -> None:
    for outcome in executed(variants, execute):
        if outcome.problem:
            raise FedstillError(
                f"{row} cannot be run with the settings of {suite.name}, which are the same for "
                f"all methods: {outcome.problem}"
            )


def _comparable_journal(variant: Variant) -> list[Event]:
    return [without_times(event) for event in read_journal(variant.folder / JOURNAL)]


def _check_rehearsed_settings(suite: Suite, row: str, variant: Variant) -> None:
    """Raise FedstillError for a run whose settings the check of its entry would refuse."""
    method = split_name(str(suite.method_of(row)["name"]))
    if not method.is_file:
        return
    rows = {name: table for name, table in suite.recipe.rows.items() if name != row}
    without_row = replace(suite, recipe=replace(suite.recipe, rows=rows), choices_from=None)
    stand_in_suite = without_row.with_row(row, "fedavg", [{}], suite.added_topology(row))
    stand_in = _rehearsal(stand_in_suite, row, {"rounds": variant.settings.rounds}, Path())
    config = with_relative_paths(read_file(variant.folder / CONFIG).decode())
    try:
        check_settings_of_new_method(config, stand_in, Path(method.path).name, {})
    except CorruptFile as error:
        raise FedstillError(
            f"{row} changes settings that are the same for all methods of {suite.name}: {error}"
        ) from error


def _check_scorable(suite: Suite, row: str, variant: Variant) -> None:
    try:
        score_of(variant.folder, variant.settings.rounds)
    except CorruptFile as error:
        raise FedstillError(
            f"{row} cannot be scored in {suite.name}, which evaluates a model of the server after "
            "each round: return one from the method's predictors; or return several, and let "
            "client_predictors assign one of them to each client"
        ) from error


# ---- the costs of a suite on this machine --------------------------------------------------------

RELATIVE_COST = {"space": 1.2, "time": 1.1, "both": 1.2, "chain": 1.5, "public": 1.0, "peers": 1.3}
"""The mean cost of a training step of all rows relative to FedAvg, by track, from the entries that
ship, over both tiers.

On public data it is 1: the teachers' logits are computed before the training begins.
"""

START_SECONDS = 1.0
"""Core-seconds of a run besides its rounds."""

LARGE_BATCH = 4
"""The factor between the two batch sizes that are timed, to separate the costs of a step from those
of its examples.
"""


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """Core-seconds of a training step, of each example in it, and of a round besides its training
    (mostly evaluation).
    """

    step: float
    example: float
    round: float


@dataclass(frozen=True)
class TrainingSize:
    """The amount of training: optimiser steps of all clients, and examples in them; an epoch counts
    all of its examples.
    """

    steps: int = 0
    examples: int = 0

    def __add__(self, added: TrainingSize) -> TrainingSize:
        return TrainingSize(self.steps + added.steps, self.examples + added.examples)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Some rounds that were timed: their size, core-seconds of all training, and core-seconds of a
    round besides training.
    """

    size: TrainingSize
    training: float
    round: float


@dataclass(frozen=True, kw_only=True)
class CoreMinutes:
    """Estimated core-minutes of a suite: of the runs that are reported, and of all trials."""

    runs: float
    choosing: float


def estimate_core_minutes(suite: Suite) -> CoreMinutes | None:
    """The costs of a suite on this machine, from some rounds that are timed first.

    None if the data are not on this machine.
    """
    try:
        costs = unit_costs(suite.tier)
        runs = sum(_run_seconds(suite, cell, costs, {}) for cell in suite.recipe.cells())
        choosing = 0.0
        if suite.choices_from is None:
            choosing = sum(_trial_seconds(suite, row, costs) for row in suite.ranked_rows)
    except DataError:
        return None
    return CoreMinutes(
        runs=len(TEST_SEEDS) * runs / 60, choosing=len(CHOOSING_SEEDS) * choosing / 60
    )


def _trial_seconds(suite: Suite, row: str, costs: UnitCosts) -> float:
    """Core-seconds of all tries of a row with one seed."""
    cell = (row, suite.choosing_column)
    return len(suite.tries[row]) * _run_seconds(suite, cell, costs, suite.trial_settings(row))


def _run_seconds(suite: Suite, cell: Cell, costs: UnitCosts, changes: Try) -> float:
    """Core-seconds of a run, from the steps and examples of all its rounds."""
    (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], changes, Path())
    prepared = prepare(variant.settings)
    rounds = variant.settings.rounds
    size = TrainingSize()
    for number in range(1, rounds + 1):
        for stage in prepared.settings.schedule(number, prepared.world):
            size += training_size(prepared, stage)
    training = costs.step * size.steps + costs.example * size.examples
    return START_SECONDS + RELATIVE_COST[suite.track] * training + rounds * costs.round


def training_size(prepared: Prepared, stage: Stage) -> TrainingSize:
    """The training in a stage, if all of its clients act.

    Whether a method leaves out clients can depend on what they send, so it is not considered.
    """
    plan = prepared.world.plans.get(stage.name)
    # A suite has one plan for all stages; only the method's own plan shows that a stage does not
    # train.
    method_plan = prepared.settings.method.plans.get(stage.name)
    if plan is None:
        return TrainingSize()
    if method_plan is not None and not (method_plan.epochs or method_plan.steps):
        return TrainingSize()
    size = TrainingSize()
    for client in stage.clients:
        count = _example_count(prepared, stage, client)
        size += TrainingSize(local_steps(plan, count), examples_trained_on(plan, count))
    return size


def _example_count(prepared: Prepared, stage: Stage, client: int) -> int:
    """The number of examples that a client trains on in a stage."""
    if stage.view == "public" or client == SERVER:
        return len(prepared.sites.public or ())
    return int(prepared.sites.label_counts(client, stage.round).sum())


@functools.cache
def unit_costs(tier: str) -> UnitCosts:
    """The costs of FedAvg on this machine, from some rounds with two batch sizes.

    Raises DataError if data are missing.
    """
    suite = load_suite(f"{tier}-space")
    batch = suite.recipe.common["plan"]["batch"]
    small = _time_rounds(suite, batch)
    large = _time_rounds(suite, LARGE_BATCH * batch)
    # Both batch sizes train on the same examples, in different numbers of steps.
    extra_steps = max(1, small.size.steps - large.size.steps)
    step = max(0.0, (small.training - large.training) / extra_steps)
    all_examples = max(0.0, small.training - step * small.size.steps)
    example = all_examples / max(1, small.size.examples)
    return UnitCosts(step=step, example=example, round=small.round)


def _time_rounds(suite: Suite, batch: int) -> Timing:
    """Time three rounds; the first one, which is slower, does not count."""
    cell = ("FedAvg", next(iter(suite.recipe.columns)))
    changes = {"rounds": 4, "plan.batch": batch}
    with tempfile.TemporaryDirectory(prefix="fedstill-timed-") as folder:
        (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], changes, Path(folder))
        run(variant.experiment, variant.folder)
        events = read_journal(variant.folder / JOURNAL)
    timed = [event for event in events if event.get("round", 0) > 1]
    rounds = [event for event in timed if event["event"] == "round"]
    training = [_training_seconds(event) for event in rounds]
    other_seconds = [
        event["seconds_cpu"] - seconds for event, seconds in zip(rounds, training, strict=True)
    ]
    size = TrainingSize()
    for event in timed:
        if event["event"] == "client":
            size += TrainingSize(event["steps"], event["examples"] * event["epochs"])
    return Timing(size=size, training=sum(training), round=statistics.median(other_seconds))


def _training_seconds(event: Event) -> float:
    """The core-seconds of a round's training, by its share of the round's time."""
    return float(event["seconds_cpu"] * event["seconds_training"] / event["seconds"])
