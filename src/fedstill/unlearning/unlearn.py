"""From the directory of a finished run to a new run without the forgotten data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.config.experiment import Experiment, from_tree
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings, written_plan
from fedstill.core.errors import (
    ConfigError,
    CorruptFile,
    DataError,
    IncompatibleMethod,
    RunExists,
)
from fedstill.core.fields import nfc
from fedstill.core.files import (
    in_shell,
    make_folder,
    read_file,
    read_toml,
    replaced_folder,
    write_together,
)
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset
from fedstill.data.sources import load_dataset
from fedstill.running import runner
from fedstill.running.checkpoint import UPDATE_SHA256, UPDATES, Restored, read_verified, update_file
from fedstill.running.client_data import NOISE, set_public_apart, subset, training_and_test_sets
from fedstill.running.directory import holds_run, new_directory, write_config
from fedstill.running.driver import Driver
from fedstill.running.journal import CONFIG, EMPTY_MARK, JOURNAL
from fedstill.running.preparation import Prepared, prepare, reading_options
from fedstill.running.recording import Progress, Quiet
from fedstill.running.result import Result
from fedstill.running.runs import lineage
from fedstill.unlearning.certificate import check_certificate, write_certificate
from fedstill.unlearning.request import (
    STRATEGIES,
    TABLE,
    UnlearningRequest,
    UnlearningTable,
)
from fedstill.unlearning.strategy import NewRounds, OriginalRun, StartPoint, Strategy
from fedstill.unlearning.verification import Backdoor


@dataclass(frozen=True)
class Unlearned:
    """The result of unlearning: the new run, and the certificate in its directory."""

    result: Result
    certificate: Mapping[str, Any]


@process_settings()
def unlearn(
    directory: Path,
    request: UnlearningRequest,
    strategy: Strategy,
    out: Path | None = None,
    *,
    exact: Path | None = None,
    backdoor: Backdoor | None = None,
    data: Dataset | None = None,
    watch: Progress | None = None,
) -> Unlearned:
    """Make a run's model forget, and write a new run directory with a certificate.

    If ``out`` holds the same unlearning already, it is continued where it stopped.

    exact: the directory of an exact result of the same request, to measure the distance to it.
    backdoor: a backdoor that was planted in the forgotten data, to test whether it is still there.
    data: the data set of the run, if it is in memory. Raises ConfigError or IncompatibleMethod for
    a request or a run that the strategy cannot handle, RunExists for a directory in use.
    """
    plan = UnlearningPlan.of(directory, request, strategy, data)
    return carry_out(plan, out, exact=exact, backdoor=backdoor, watch=watch)


@process_settings()
def planned(directory: Path, request: UnlearningRequest, strategy: Strategy) -> UnlearningPlan:
    """The plan of ``unlearn``, which raises the same errors."""
    return UnlearningPlan.of(directory, request, strategy)


@process_settings()
def carry_out(
    plan: UnlearningPlan,
    out: Path | None = None,
    *,
    exact: Path | None = None,
    backdoor: Backdoor | None = None,
    watch: Progress | None = None,
) -> Unlearned:
    """Unlearn as planned; the arguments are those of ``unlearn``.

    The certificate of a finished unlearning is kept, unless there is something more to measure.
    """
    folder = out or plan.default_folder
    if exact is not None:
        _check_exact(plan, exact)
    if plan.is_begun(folder):
        result = runner.resume(folder, plan.original.data, watch=watch)
        if exact is None and backdoor is None:
            # An intact certificate may have measurements that this call would not repeat.
            with suppress(CorruptFile):
                return Unlearned(result, check_certificate(folder).content)
    elif holds_run(folder):
        raise RunExists(f"{folder} holds another run; choose another --out")
    else:
        result = _begin(plan, folder, watch)
    certificate = write_certificate(
        plan.original, folder, plan.request, plan.strategy, exact=exact, backdoor=backdoor
    )
    return Unlearned(result, certificate)


COMPARED = ("seed", "rounds", "data", "partition", "topology", "model", "method", "plan")
"""The keys of a config that an exact result shares with the original run."""


def _check_exact(plan: UnlearningPlan, exact: Path) -> None:
    """Raise ConfigError if the run in ``exact`` is not an exact result of the plan's request."""
    run = OriginalRun.of(exact, plan.original.data)
    table = run.settings.package_table(UnlearningTable)
    if not (table.request.covers(plan.request) and plan.request.covers(table.request)):
        forgotten = table.request.text or "nothing"
        raise ConfigError(
            f"--exact: {exact} has forgotten {forgotten}, not {plan.request.text}; name an exact "
            "result of the same request"
        )
    if not table.rule.is_exact:
        raise ConfigError(
            f"--exact: {exact} is the result of {table.strategy}, which is not exact; name a "
            "result of retraining"
        )
    config = read_toml(exact / CONFIG)
    original_config = read_toml(plan.original.folder / CONFIG)
    for key in COMPARED:
        if config.get(key) != original_config.get(key):
            raise ConfigError(
                f"--exact: {exact} has another value of {key} than {plan.original.folder}; name an "
                "exact result of that run"
            )


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnlearningPlan:
    """An unlearning that was checked and can start.

    ``request``: with everything that the original run has already forgotten, and with the clients
    that have no examples left.
    """

    original: OriginalRun
    request: UnlearningRequest
    strategy: Strategy
    rounds: NewRounds
    experiment: Experiment
    settings: Settings

    @classmethod
    def of(
        cls,
        directory: Path,
        request: UnlearningRequest,
        strategy: Strategy,
        data: Dataset | None = None,
    ) -> UnlearningPlan:
        """Check a request, and resolve the config of the new run."""
        if not request:
            raise ConfigError("name the data to forget: --client, --examples or --class")
        original = OriginalRun.of(directory, data)
        _check_is_new(original, request, strategy)
        request = _merged(original.earlier_request, request)
        _check(original, request, strategy)
        request = request.with_emptied_clients(original.split, original.labels)
        rounds = strategy.rounds(original, request)
        experiment = _new_experiment(original, request, strategy, rounds)
        return cls(
            original=original,
            request=request,
            strategy=strategy,
            rounds=rounds,
            experiment=experiment,
            settings=resolve(experiment),
        )

    @cached_property
    def prepared(self) -> Prepared:
        """The new run with its data, ready to start."""
        return prepare(self.settings, self.original.data)

    @property
    def default_folder(self) -> Path:
        """The new run's directory beside the original one."""
        folder = self.original.folder
        slug = _slug(self.request)
        return folder.with_name(f"{folder.name}-without-{slug}-{name_of(self.strategy)}")

    def is_begun(self, folder: Path) -> bool:
        """Whether a directory holds this unlearning, finished or not."""
        config = folder / CONFIG
        if not config.is_file() or not (folder / JOURNAL).is_file():
            return False
        return read_file(config) == self.prepared.settings.toml.encode()


def name_of(strategy: Strategy) -> str:
    """The name of a strategy."""
    target = f"{type(strategy).__module__}:{type(strategy).__name__}"
    return next(part.name for part in STRATEGIES.values() if part.target == target)


def _merged(earlier: UnlearningRequest, request: UnlearningRequest) -> UnlearningRequest:
    """Both requests in one, sorted."""
    return UnlearningRequest(
        clients=tuple(sorted({*earlier.clients, *request.clients})),
        classes=tuple(sorted({*earlier.classes, *request.classes})),
        examples=tuple(sorted({*earlier.examples, *request.examples})),
    )


MOST_IDS_IN_NAME = 20
"""The most clients, or classes, that a directory's name lists; of more, it contains their number.
"""


def _slug(request: UnlearningRequest) -> str:
    """The request as a part of a directory's name."""
    parts = []
    if request.clients:
        parts.append(_ids_in_name(request.clients, "client", "clients"))
    if request.classes:
        parts.append(_ids_in_name(request.classes, "class", "classes"))
    if request.examples:
        parts.append(f"{len(request.examples)}-examples")
    return "-".join(parts)


def _ids_in_name(ids: Sequence[int], noun: str, plural: str) -> str:
    if len(ids) > MOST_IDS_IN_NAME:
        return f"{len(ids)}-{plural}"
    return noun + "+".join(map(str, ids))


def _check_is_new(original: OriginalRun, request: UnlearningRequest, strategy: Strategy) -> None:
    """Raise ConfigError if the original run is already the result of the request."""
    table = original.settings.package_table(UnlearningTable)
    if table.request.covers(request) and table.rule == strategy:
        raise ConfigError(
            f"{original.folder} has already forgotten {request.text} by {table.strategy}; "
            f"`fedstill unlearn --check {in_shell(str(original.folder))}` shows its certificate"
        )


def _check(original: OriginalRun, request: UnlearningRequest, strategy: Strategy) -> None:
    """Raise ConfigError or IncompatibleMethod for a request that the strategy cannot fulfil."""
    clients = original.settings.clients
    unknown = [client for client in request.clients if client >= clients]
    if unknown:
        raise ConfigError(f"--client {unknown[0]}: the run has clients 0 to {clients - 1}")
    classes = len(original.prepared.dataset.classes)
    unknown = [label for label in request.classes if label >= classes]
    if unknown:
        raise ConfigError(f"--class {unknown[0]}: the run has classes 0 to {classes - 1}")
    examples = len(original.prepared.sites.train)
    unknown = [position for position in request.examples if position >= examples]
    if unknown:
        raise ConfigError(
            f"--examples: {unknown[0]} is no position in the training set, which has positions 0 "
            f"to {examples - 1}"
        )
    name = name_of(strategy)
    if strategy.whole_clients_only and (request.classes or request.examples):
        raise IncompatibleMethod(
            f"{name} forgets whole clients; use --client, or another --strategy such as retraining"
        )
    if not strategy.is_exact and original.earlier_request:
        raise IncompatibleMethod(
            f"{original.folder} has already unlearned something, and {name} needs a run that has "
            "not; name both requests for the original run, or use retraining"
        )
    sites = original.prepared.sites
    may_be_public = sites.public is not None and original.settings.data.public_from != NOISE
    if request.classes and may_be_public and not strategy.is_exact:
        raise IncompatibleMethod(
            f"the public set may have examples of class {request.classes[0]}, and {name} continues "
            "with the same public set; use --strategy retraining, which removes them"
        )
    _check_start_models(original, request)
    strategy.check(original, request)


def _check_start_models(original: OriginalRun, request: UnlearningRequest) -> None:
    """Raise ConfigError if the run started from a model that may know the forgotten data: that of a
    run on the same data, which has not forgotten them.
    """
    for folder in lineage(original.folder)[1:]:
        tree = read_toml(folder / CONFIG)
        forgotten = UnlearningRequest(
            **{
                field.name: tuple(tree.get(TABLE, {}).get(field.name, ()))
                for field in fields(request)
            }
        )
        is_same_data = tree["data"]["name"] == original.settings.data.name
        if is_same_data and not forgotten.covers(request):
            raise ConfigError(
                f"{original.folder} started from the model of {folder}, which knows the data to "
                "forget; unlearn from that run first, then train this one again with start_from = "
                "the directory of the new model"
            )


def _new_experiment(
    original: OriginalRun, request: UnlearningRequest, strategy: Strategy, rounds: NewRounds
) -> Experiment:
    """The config of the new run: that of the original run, with the table ``[unlearning]``."""
    tree = read_toml(original.folder / CONFIG)
    table: dict[str, Any] = {key: list(ids) for key, ids in asdict(request).items() if ids}
    table["strategy"] = name_of(strategy)
    table["first_round"] = rounds.first
    options = {field.name: getattr(strategy, field.name) for field in fields(strategy)}  # type: ignore[arg-type]
    if options:
        table["options"] = options
    tree[TABLE] = table
    tree["rounds"] = rounds.last
    for stage, plan in strategy.plans(original).items():
        tree["plan"][stage] = written_plan(plan)
    if not strategy.is_exact:
        # The best round of the original run could be one that knows the forgotten data.
        tree.pop("stop", None)
        tree.pop("select_on", None)
    if original.settings.engine == "flower":
        # A simulation over Flower has the bits of one in this process.
        tree["engine"] = "auto"
        tree.pop("flower", None)
    return from_tree(tree, {}, original.folder)


# ---- the beginning of the new run ----------------------------------------------------------------


def _begin(plan: UnlearningPlan, folder: Path, watch: Progress | None) -> Result:
    """Run a plan that has not begun yet."""
    data = plan.original.data
    prepared = plan.prepared
    start = plan.strategy.start(plan.original, plan.request, prepared)
    if start is None:
        return runner.run(plan.experiment, folder, data, watch=watch)
    start = start.without_clients(plan.request.clients)
    new_directory(prepared.settings, folder)
    # The directory gets its name when it is complete: a process that was killed leaves nothing that
    # could be resumed as another run.
    with replaced_folder(folder) as temporary:
        _write_start(plan, temporary, start)
    return runner.resume(folder, data, watch=watch)


def _write_start(plan: UnlearningPlan, folder: Path, start: StartPoint) -> None:
    """Write a directory from which ``resume`` continues at a start point."""
    _copy_memory(plan.original, folder, start)
    _copy_updates(plan, folder, start)
    write_config(folder, plan.prepared.settings)
    restored = Restored(start.state, dict(start.state_files), EMPTY_MARK)
    with closing(Driver(plan.prepared, folder, Quiet())) as driver:
        driver.begin_from(restored, start.events)


def _copy_memory(original: OriginalRun, folder: Path, start: StartPoint) -> None:
    """Copy what clients remember at the start point."""
    if not start.state_files:
        return
    make_folder(folder / "memory")
    write_together(
        (folder / "memory" / name, read_verified(original.folder / "memory" / name, sha))
        for name, sha in start.state_files.values()
    )


def _copy_updates(plan: UnlearningPlan, folder: Path, start: StartPoint) -> None:
    """Copy the kept updates that the events before the start point name, except those of forgotten
    clients.
    """
    events = [event for event in start.events if UPDATE_SHA256 in event]
    events = [event for event in events if event["client"] not in plan.request.clients]
    if not events:
        return
    make_folder(folder / UPDATES)
    updates = plan.original.folder / UPDATES
    write_together(
        (
            update_file(folder / UPDATES, event),
            read_verified(update_file(updates, event), event[UPDATE_SHA256]),
        )
        for event in events
    )


# ---- the examples that a file names -------------------------------------------------------------

MOST_DIGITS = 18
"""The most digits of a position."""


def read_positions(path: Path) -> tuple[int, ...]:
    """The positions in a file, one on each line; raises ConfigError for a line that is none."""
    positions = []
    for number, line in _lines(path):
        if not line.isdecimal() or len(line) > MOST_DIGITS:
            raise ConfigError(
                f"{path}, line {number}: {line[:40]!r} is no position, a whole number from 0; name "
                "the column of such values with --column"
            )
        positions.append(int(line))
    return tuple(sorted(set(positions)))


def read_values(path: Path) -> tuple[str, ...]:
    """The values in a file, one on each line."""
    return tuple(dict.fromkeys(nfc(line) for _, line in _lines(path)))


def _lines(path: Path) -> Sequence[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--examples: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--examples: {path} is no UTF-8 text; save it as UTF-8") from error
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in numbered if line]
    if not lines:
        raise ConfigError(f"--examples: {path} has no line with an example")
    return lines


def positions_of_values(
    original: OriginalRun, column: str, values: Collection[str]
) -> tuple[int, ...]:
    """The positions, in the training set of a run, of the examples with these values of a column.

    The data are read once more, with the column. Raises ConfigError for a value that no training
    example has, and for data without columns.
    """
    settings = original.settings
    if original.data is not None:
        raise ConfigError("--column: the data of this run are in memory; name positions")
    if column in (settings.data.columns or ()):
        raise ConfigError(f"--column: {column!r} is an input of the model; name positions")
    options = {**reading_options(settings), "owner": column}
    try:
        dataset = load_dataset(settings.data.name, **options)
    except DataError as error:
        # Its advice names keys of the config.
        problem = str(error).rpartition("; ")[0] or str(error)
        raise ConfigError(f"--column {column}: {problem}") from error
    trainable, _ = training_and_test_sets(settings, dataset)
    trainable = subset(trainable, settings.data.train_size, "train_size")
    train = set_public_apart(settings, dataset, trainable).train
    _check_same(original, train, column)
    assert train.owners is not None  # they have been asked for
    assert trainable.owners is not None

    # Names can be in another Unicode form, and tables can have spaces around them.
    names = [nfc(name).strip() for name in dataset.about.owners]
    known_names = set(names)
    unknown = [value for value in values if value not in known_names]
    if unknown:
        raise ConfigError(f"--examples: column {column!r} has no value {unknown[0]!r}")
    wanted_names = set(values)
    wanted = torch.tensor([code for code, name in enumerate(names) if name in wanted_names])
    positions: list[int] = torch.isin(train.owners, wanted).nonzero().flatten().tolist()
    if not positions:
        raise ConfigError(
            f"--examples: no training example has one of these values of column {column!r}"
        )
    public = int(torch.isin(trainable.owners, wanted).sum()) - len(positions)
    if public:
        raise ConfigError(
            f"--examples: the public set, which data.public took from the training set, has "
            f"{public} of the examples with these values of column {column!r}, and no strategy "
            "removes them; train again with a public set from another source"
        )
    return tuple(positions)


def _check_same(original: OriginalRun, train: Examples, column: str) -> None:
    """Raise ConfigError if the data have other rows when they are read with the column."""
    labels: Tensor = original.prepared.sites.train.labels.cpu()
    if not torch.equal(labels, train.labels):
        raise ConfigError(
            f"--column {column}: with this column the data have other rows, for example because "
            "it has missing values; name positions"
        )
