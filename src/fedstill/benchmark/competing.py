"""What the commands of the ranking do: fields chosen, runs done, entries written; each goes on
where it stopped. What a suite takes on this machine follows from rounds that are timed first.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.benchmark.checking import check_settings_of_file
from fedstill.benchmark.entries import Entered, portable, write_entry
from fedstill.benchmark.scoring import Do, Ended, ended, not_stopped, score_of
from fedstill.benchmark.suites import (
    CHOOSING_SEEDS,
    TEST_SEEDS,
    Choice,
    Suite,
    Try,
    load_suite,
    read_choice,
    refuse_one_folder,
    slug,
    suite_names,
    write_choices,
)
from fedstill.config.named_tables import resolved_name
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, CorruptFile, DataError, FedstillError
from fedstill.core.files import read_toml
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Stage
from fedstill.running.compare import Variant
from fedstill.running.explain import local_steps
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

# Fields chosen for the rows of a suite, on training images that clients lack and on seeds that are
# not reported.


def choice_for(suite: Suite, row: str, out: Path, do: Do) -> Choice:
    """What is chosen for a row, when its tries are done; the same call goes on where it was
    stopped.
    """
    trials = suite.trials(row, out)
    return choice_of(ended([run for one in trials for run in one], do), len(trials))


def choice_of(runs: Sequence[Ended], tries: int) -> Choice:
    """The choice from the runs of all tries, in order: a run that diverged scores 0."""
    each = len(CHOOSING_SEEDS)
    own = [runs[i * each : (i + 1) * each] for i in range(tries)]
    scores = tuple(
        tuple(0.0 if one.diverged else one.score.accuracy for one in runs) for runs in own
    )
    return Choice(scores, tuple(sum(one.score.sent for one in runs) // each for runs in own))


CHOSEN = "chosen.toml"
"""The file beside the runs of a suite that chooses, with what was chosen there."""

REHEARSED = 99
"""The seed of a rehearsal: none that chooses or is reported."""

RATES = 5
"""How many learning rates are tried of a method that names no tries: those of the suite's
FedAvg.
"""


def suite_at(suite: Suite, out: Path) -> Suite:
    """The suite with what was chosen in a folder, over what ships with it."""
    path = out / suite.chooses_in.name / CHOSEN
    if not path.is_file():
        return suite
    try:
        tree = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"what was chosen cannot be read from {path}: {error}") from error
    own = {
        row: read_choice(f"{path}, {row}", table, len(suite.tries[row]))
        for row, table in tree.items()
        if row in suite.tries
    }
    return replace(suite, chosen={**suite.chosen, **own})


def choose_fields(suite: Suite, rows: Sequence[str], out: Path, do: Do) -> Suite:
    """The suite with fields chosen for some rows; each is kept in a file as soon as it is chosen.

    First the row whose learning rate the others have. Trials and file are in the folder of the
    suite that chooses.
    """
    suite, folder = suite_at(suite, out), out / suite.chooses_in.name
    for row in sorted(rows, key=lambda one: one != suite.rate_of):
        choice = choice_for(suite, row, folder / "choosing", do)
        suite = replace(suite, chosen={**suite.chosen, row: choice})
        keep_choices(suite, folder / CHOSEN)
    return suite


def keep_choices(suite: Suite, path: Path) -> None:
    """Write what is chosen in a suite to a file."""
    own = {row: suite.chosen[row] for row in suite.tries if row in suite.chosen}
    write_choices(
        path, suite.chooses_in.version, own, {row: suite.settings_chosen(row) for row in own}
    )


def compete(
    suite: Suite, rows: Sequence[str], out: Path, do: Do, own: Path | None = None
) -> list[Entered]:
    """Do all runs of some rows, and write an entry of each to ``OUT/entries/SUITE/``.

    ``own``: the rows' file, where their method is not in the package.
    """
    each = ended([run for row in rows for run in suite.runs(row, out / suite.name / "runs")], do)
    entries = out / "entries" / suite.name
    return [write_entry(suite, row, _of(row, each), entries / slug(row), own) for row in rows]


def _of(row: str, runs: Iterable[Ended]) -> list[Ended]:
    """The runs of one row: another's name may begin alike."""
    return [one for one in runs if one.run.label.rpartition(" | ")[0] == row]


def newcomer(suite: Suite, file: Path, name: str = "") -> tuple[Suite, str]:
    """The suite with a row of a method's own file, and the row's name.

    Its tries are the class variable ``tries`` of the method, fields by name; without it, the
    learning rates of FedAvg. Raises ConfigError for a file that is no method, tries that are none,
    or a name whose folder another row has.
    """
    if not file.is_file():
        raise ConfigError(f"there is no file {file}; name the file of a method")
    name_in_config = resolved_name("method", str(file.resolve()), None)
    entry = registry.lookup("method", name_in_config)
    method = entry.build()
    if not isinstance(method, Method):
        raise ConfigError(f"{file}: {entry.name} is no fedstill.Method")
    row = name or type(method).__name__
    _check_data(suite, row, method)
    tries = _tries_of(suite, file, method)
    entered = suite.with_row(row, name_in_config, tries, topology_in(suite, method))
    refuse_one_folder(suite.name, "rows", entered.recipe.rows)
    return entered, row


def _tries_of(suite: Suite, file: Path, method: Method) -> tuple[Try, ...]:
    """What is tried of a method: what its class says, else the learning rates of FedAvg."""
    rates = next(
        (each for row, each in suite.tries.items() if suite.method(row)["name"] == "fedavg"), ({},)
    )
    tries = getattr(method, "tries", rates[:RATES])
    if isinstance(tries, (str, dict)) or not all(isinstance(one, dict) for one in tries):
        raise ConfigError(
            f"{file}: tries must be a tuple of tables, such as ({{'beta': 0.3}}, {{'beta': 1.0}})"
        )
    return tuple(tries)


def topology_in(suite: Suite, method: Method) -> dict[str, Any]:
    """The topology of a method in a suite, as far as the method says it: its kind if it is another
    than the suite's, and the stages that it adds.
    """
    own: dict[str, Any] = dict(method.schedule)
    if method.topology != suite.recipe.common["topology"]["kind"]:
        own = {"kind": method.topology, **own}
    return own


def _check_data(suite: Suite, row: str, method: Method) -> None:
    """Raise ConfigError for a method that needs data which the suite does not have."""
    has_public_data = bool(suite.recipe.common["data"].get("public"))
    if Need.PUBLIC_DATA not in method.requires() or has_public_data:
        return
    remedy = "set data.public in the suite's file"
    if suite.name in suite_names():
        remedy = "enter it with --track public"
    raise ConfigError(f"{row} needs public data, and {suite.name} has none; {remedy}")


def rehearse(suite: Suite, row: str, do: Do) -> None:
    """Two rounds of a row, twice: raises FedstillError where it cannot be run or scored, or does
    not give the same run again.
    """
    tasks = "stream" in suite.recipe.columns[suite.column]
    size = {} if tasks or suite.recipe.common["rounds"] == 1 else {"rounds": 2}
    with tempfile.TemporaryDirectory(prefix="fedstill-rehearsal-") as folder:
        cell, places = [(row, suite.column)], [Path(folder) / name for name in ("once", "again")]
        runs = [suite.recipe.variants(cell, (REHEARSED,), size, place)[0] for place in places]
        for outcome in not_stopped(runs, do):
            if outcome.problem:
                raise FedstillError(
                    f"{row} cannot be run with the settings of {suite.name}, which are the same "
                    f"for all methods: {outcome.problem}"
                )
        once, again = (
            [without_times(event) for event in read_journal(run.folder / "journal.jsonl")]
            for run in runs
        )
        if once != again:
            raise FedstillError(
                f"{row} does not give the same run twice: draw random numbers by key "
                "(fedstill.core.keys), and keep what is remembered in State and memory"
            )
        _check_rehearsed(suite, row, runs[0])
        try:
            score_of(runs[0].folder, runs[0].settings.rounds)
        except CorruptFile as error:
            raise FedstillError(
                f"{row} cannot be scored in {suite.name}: no model of the server is measured there "
                "after a round; return one from the method's predictors, or several, and from "
                "client_predictors which of them answers for each client"
            ) from error


def _check_rehearsed(suite: Suite, row: str, run: Variant) -> None:
    """Raise FedstillError for a run whose settings the check of its entry would refuse."""
    file, _, _ = str(suite.method(row)["name"]).partition(":")
    if not file.endswith(".py"):
        return
    rows = {name: table for name, table in suite.recipe.rows.items() if name != row}
    without = replace(suite, recipe=replace(suite.recipe, rows=rows), there=None)
    in_its_place = without.with_row(row, "fedavg", [{}], suite.own_topology(row))
    size = {"rounds": run.settings.rounds}
    (stand_in,) = in_its_place.recipe.variants([(row, suite.column)], (REHEARSED,), size, Path())
    config = portable((run.folder / "config.toml").read_text(encoding="utf-8"))
    try:
        check_settings_of_file(config, stand_in, Path(file).name, {})
    except CorruptFile as error:
        raise FedstillError(
            f"{row} has other settings than all methods of {suite.name}: {error}"
        ) from error


MEAN_METHOD = {"space": 1.2, "time": 1.1, "both": 1.2, "chain": 1.5, "public": 1.0, "peers": 1.3}
"""What a step of the mean row takes, where FedAvg's takes 1, by track: of the entries that ship,
the mean over tiers.

On public data it is not more: a teacher's logits are there before the training begins.
"""

START = 1.0
"""Core-seconds that a run takes beside its rounds."""

LARGER = 4
"""By how much larger the second batch is that is timed: so a step's cost is told from an
example's.
"""


class Seconds(NamedTuple):
    """Core-seconds of a step, of each example in it, and of a round beside its training (testing,
    for the most).
    """

    step: float
    example: float
    rest: float


class Timed(NamedTuple):
    """Some rounds that were run: the steps and examples trained on, core-seconds of training, and
    the rest a round.
    """

    steps: int
    examples: int
    training: float
    rest: float


def core_minutes(suite: Suite) -> tuple[float | None, float | None]:
    """(core-minutes of all runs, core-minutes of choosing all rows) here; None where the data are
    not here.
    """
    try:
        each = seconds_here(suite.tier)
        runs = [_of_run(suite, cell, each) for cell in suite.recipe.cells()]
        own = () if suite.there else suite.competing
        trials = [
            len(suite.tries[row]) * _of_run(suite, (row, suite.column), each, True) for row in own
        ]
    except DataError:
        return None, None
    return len(TEST_SEEDS) * sum(runs) / 60, len(CHOOSING_SEEDS) * sum(trials) / 60


def _of_run(suite: Suite, cell: tuple[str, str], each: Seconds, trial: bool = False) -> float:
    """Core-seconds of a run of a row in a column, or of a trial, by the steps and examples of all
    its rounds.
    """
    changes = suite.trial_settings(cell[0]) if trial else {}
    (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], changes, Path())
    prepared = prepare(variant.settings)
    stages = [
        s
        for n in range(1, variant.settings.rounds + 1)
        for s in prepared.settings.schedule(n, prepared.world)
    ]
    steps, examples = map(sum, zip(*(trained_in(prepared, stage) for stage in stages), strict=True))
    training = each.step * steps + each.example * examples
    return START + MEAN_METHOD[suite.track] * training + variant.settings.rounds * each.rest


def trained_in(prepared: Prepared, stage: Stage) -> tuple[int, int]:
    """The steps of all clients of a stage, and the examples in them: each epoch counts.

    A suite's plan is one for all stages: where nothing is trained, only the method's own says so.
    The method is not asked whom it addresses, as that may follow from what clients sent before:
    students from their peers' models.
    """
    plan, own = prepared.world.plans.get(stage.name), prepared.settings.method.plans.get(stage.name)
    if plan is None or (own is not None and not (own.epochs or own.steps)):
        return 0, 0
    steps = examples = 0
    for client in stage.clients:
        public = stage.view == "public" or client == SERVER
        there = (
            len(prepared.sites.public or ())
            if public
            else int(prepared.sites.counts(client, stage.round).sum())
        )
        more = local_steps(prepared, stage, there)
        steps += more
        examples += more * min(plan.batch, there) if plan.steps else plan.epochs * there
    return steps, examples


@functools.cache
def seconds_here(tier: str) -> Seconds:
    """What FedAvg takes here, from some rounds with two sizes of batch; raises DataError where data
    are missing.
    """
    suite = load_suite(f"{tier}-space")
    batch = suite.recipe.common["plan"]["batch"]
    small, large = (_timed(suite, size) for size in (batch, LARGER * batch))
    step = max(0.0, (small.training - large.training) / max(1, small.steps - large.steps))
    example = max(0.0, small.training - step * small.steps) / max(1, small.examples)
    return Seconds(step, example, small.rest)


def _timed(suite: Suite, batch: int) -> Timed:
    """Three rounds after a slower first."""
    cell = ("FedAvg", next(iter(suite.recipe.columns)))
    with tempfile.TemporaryDirectory(prefix="fedstill-timed-") as folder:
        (variant,) = suite.recipe.variants(
            [cell], TEST_SEEDS[:1], {"rounds": 4, "plan.batch": batch}, Path(folder)
        )
        run(variant.experiment, variant.folder)
        events = [
            e for e in read_journal(variant.folder / "journal.jsonl") if e.get("round", 0) > 1
        ]
    rounds = [e for e in events if e["event"] == "round"]
    clients = [e for e in events if e["event"] == "client"]
    training = [e["seconds_cpu"] * e["seconds_training"] / e["seconds"] for e in rounds]
    rest = [e["seconds_cpu"] - own for e, own in zip(rounds, training, strict=True)]
    return Timed(
        sum(e["steps"] for e in clients),
        sum(e["examples"] * e["epochs"] for e in clients),
        sum(training),
        statistics.median(rest),
    )
