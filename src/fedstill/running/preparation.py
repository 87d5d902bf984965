"""Preparation of a run: from settings to data, world and engine.

``prepare`` reads, splits and scales the data, makes the world, checks that all parts are
compatible, and chooses an engine. It trains nothing (except a trial step of a stack) and writes no
file.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedstill import manifest
from fedstill.config.data_table import NO_DATA, unseen_examples
from fedstill.config.settings import Settings
from fedstill.config.stages import held_out_share
from fedstill.config.tables import DataTable
from fedstill.continual.task_test import HELD_OUT_TEST
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.fields import Share, problem
from fedstill.core.files import cache_folder, counted
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NO_TRAINING,
    NOTHING,
    SERVER,
    Examples,
    Payload,
    Plan,
    Reply,
    Stage,
    Tensors,
)
from fedstill.core.rounds import run_round
from fedstill.data.dataset import Dataset
from fedstill.data.inputs import Inputs
from fedstill.data.sources import load_dataset
from fedstill.data.views import Arrival, SiteViews
from fedstill.engines.client_measures import ClientMeasures
from fedstill.engines.devices import check_machine, make_deterministic
from fedstill.engines.hardware import ThreadCounts
from fedstill.engines.passes import ModelPasses
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.reply_cache import StoredReplies
from fedstill.engines.serial import Memory, SerialEngine
from fedstill.engines.vectorised import EngineChoice, VectorisedEngine, suited_engine
from fedstill.measures.base import EvaluationContext, at_clients
from fedstill.measures.choice import measures
from fedstill.methods.fit import FIT, ONLY_FIT, queries_of
from fedstill.metrics.classification import NO_METRICS, RunMetrics
from fedstill.running.client_data import ClientData, scale_data, split_data
from fedstill.running.compatibility import check_data, check_run
from fedstill.running.directory import code_of_run
from fedstill.running.extensions import client_extensions, hostile_clients, run_context
from fedstill.running.journal import JOURNAL, read_start
from fedstill.running.model_files import as_features
from fedstill.running.split_file import StoredSplit, stored_split
from fedstill.running.splitting import stream_of, task_data
from fedstill.running.standardisation import UNSCALED, Moments, Scaler
from fedstill.running.world import (
    ENGINES,
    RunWorld,
    first_state,
    with_extensions,
    with_start_model,
    work_of_stages,
    world_of,
)

log = logging.getLogger("fedstill.preparation")

LEAST_SPREAD = 1e-4
"""The least ``data.std`` of pixels in [0, 1]. With less, inputs are so large that networks
overflow.
"""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    settings: with the engine that ``auto`` chose. dataset: before scaling. world: the knowledge
    that server and clients share. sites: the data of clients and server. scaler: the scaler of the
    examples' values. notes: sentences on examples and values that were left out or changed.
    client_names: the names of the clients in the data. metrics: the recorded metrics in addition to
    accuracy.
    """

    settings: Settings
    dataset: Dataset
    world: RunWorld
    sites: SiteViews
    scaler: Scaler = UNSCALED
    notes: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    metrics: RunMetrics = NO_METRICS

    def engine(
        self, memory: Memory | None = None, *, site: bool = False, measured: bool = True
    ) -> SerialEngine:
        """The engine that the settings name, in this process.

        memory: the memory of the clients; a new one by default. site: whether this is a real site,
        which executes the stages of one client. It uses the serial engine and no reply cache.
        measured: whether clients measure their own models.
        """
        settings = self.settings
        kind: type[SerialEngine] = SerialEngine
        if not site:
            kind = ENGINES.get(settings.engine, SerialEngine)
        options: dict[str, Any] = {}
        if settings.device != "cpu" and issubclass(kind, PooledEngine):
            options["workers"] = 1
        reply_cache = None
        if settings.reuse and not site and not settings.live_objects:
            reply_cache = self._reply_cache()
        client_measures = ClientMeasures()
        if measured:
            client_measures = self.client_measures(site=site)
        hooks = client_extensions(
            settings,
            self.world,
            client_measures,
            self.metrics,
            has_own_tests=self.sites.has_own_tests,
            is_real_site=site and settings.on_sites,
        )
        return kind(
            world=self.world,
            sites=self.sites,
            memory=memory or Memory(),
            threads=ThreadCounts(*settings.threads),
            precision=settings.precision,
            teacher_precision=settings.precisions["teacher_precision"],
            hooks=hooks,
            reply_cache=reply_cache,
            **options,
        )

    def client_measures(self, *, site: bool = False) -> ClientMeasures:
        """The measures of clients. ``site``: whether the client is a real site."""
        settings = self.settings
        has_site_data = site and settings.on_sites
        return at_clients(measures(settings.measure), settings.measured_in, has_site_data)

    def evaluation_context(
        self, folder: Path | None, memory: Memory | None
    ) -> EvaluationContext | None:
        """The context of measures. None if there is no common test set.

        folder: the run's directory. memory: the memory of the clients.
        """
        if self.sites.common_test is None:
            return None
        remembered = None
        if memory is not None:
            remembered = memory.load
        return EvaluationContext(
            world=self.world,
            test=self.sites.common_test,
            inputs=self.sites.inputs,
            sites=self.sites,
            schedule=self.settings.schedule,
            folder=folder,
            tables=self.settings.packages,
            remembered=remembered,
        )

    def _reply_cache(self) -> StoredReplies:
        """The cache of replies of other runs, for the stages whose replies may be reused."""
        method = self.settings.method
        stages = method.reusable
        if FIT not in method.stages:
            stages |= ONLY_FIT.reusable
        return StoredReplies(cache_folder() / "replies", stages, reuse_bytes())


def prepare(
    settings: Settings,
    dataset: Dataset | None = None,
    stored: StoredSplit | None = None,
    moments: Moments | None = None,
    *,
    start: Tensors | None = None,
) -> Prepared:
    """Prepare a run.

    dataset: in memory, instead of the one that the settings name. stored: the split of a run that
    is continued; by default, a new one is drawn. moments: the mean and standard deviation from the
    sums of real sites, if these scale the examples. Without them, examples are unscaled until the
    sites have sent their sums. start: the model that the run starts from, as a client received it
    from the server, instead of the file that the settings name. Raises DataError,
    InfeasiblePartition, ConfigError or IncompatibleMethod.
    """
    _check_machine(settings)
    dataset = _read(settings, dataset)
    check_data(settings, dataset)

    data = split_data(settings, dataset, stored)
    data = scale_data(settings, dataset, data, moments)
    world = _make_world(settings, dataset, data, start)
    sites = site_views(settings, world, _inputs(settings, dataset, data.scaler), data)

    check_run(settings, world, sites)

    prepared = Prepared(
        settings=settings,
        dataset=dataset,
        world=world,
        sites=sites,
        scaler=data.scaler,
        notes=(*dataset.about.notes, *data.scaler.notes, *_notes_on_tasks(settings, data.scaler)),
        client_names=data.client_names,
        metrics=run_metrics(settings, dataset.classes),
    )
    if settings.engine != "auto":
        return prepared
    choice = suited_engine_of(prepared)
    # The config.toml of the run has the engine and the reason, so a resumed run keeps the engine.
    chosen = replace(settings, engine=choice.engine, engine_reason=choice.reason)
    return replace(prepared, settings=chosen)


def run_metrics(settings: Settings, classes: Sequence[str]) -> RunMetrics:
    """The recorded metrics of a run. ``classes``: the names of the classes."""
    positive = len(classes) - 1
    if settings.positive_class in classes:
        positive = classes.index(settings.positive_class)
    return RunMetrics(settings.metrics, positive)


def prepare_again(settings: Settings, folder: Path, dataset: Dataset | None = None) -> Prepared:
    """Prepare a run that is continued, with the split and the sums in its directory.

    Raises the errors of ``prepare``, CorruptFile for damaged files, and UntrustedCode if untrusted
    code reads the data.
    """
    stored = stored_split(folder)
    with code_of_run(folder):
        return prepare(settings, dataset, stored, moments=_noted_sums(settings, folder))


# The choice of an engine if the config has ``engine = "auto"``.


def suited_engine_of(prepared: Prepared) -> EngineChoice:
    """The engine that the cost model chooses for a run.

    Clients are only stacked if their method, hooks and caches permit it.
    """
    settings = prepared.settings
    work = work_of_stages(settings, prepared.world, prepared.sites)
    choice = suited_engine(work, settings.device)
    if choice.engine == "pooled":
        return choice
    stacking = replace(prepared, settings=replace(settings, engine="vectorised"))
    with closing(stacking.engine(measured=False)) as engine:
        obstacle = (
            _hook_obstacle(engine)
            or _cache_obstacle(prepared, engine)
            or _method_obstacle(prepared, engine)
        )
    if obstacle:
        return EngineChoice("pooled", obstacle)
    return choice


def _hook_obstacle(engine: SerialEngine) -> str:
    """A sentence on a client hook that does not support stacks; empty if there is none."""
    for hook in engine.hooks:
        if not hook.stackable:
            return f"the client hook {type(hook).__name__} cannot act on stacked clients"
    return ""


def _cache_obstacle(prepared: Prepared, engine: SerialEngine) -> str:
    """A sentence on a stage whose replies other runs may reuse; empty if there is none.

    Replies of stacked clients cannot be reused.
    """
    if engine.reply_cache is None:
        return ""
    cached = prepared.world.plans.keys() & engine.reply_cache.stages
    for stage in prepared.settings.schedule(1, prepared.world):
        if stage.name in cached:
            return f"other runs may reuse the models of stage {stage.name} (reuse = true)"
    return ""


@dataclass
class _StackTrial:
    """An engine that tries to stack the first stage in which several clients train.

    The clients are idle in that stage and in all later ones, so the rest of the round trains
    nothing. ``obstacle``: why torch cannot stack the stage; None before the trial.
    """

    engine: VectorisedEngine
    obstacle: str | None = None

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of a stage: those of the engine before the trial, idle ones from then on."""
        trains_several = stage.name in self.engine.world.plans and len(payloads) > 1
        if self.obstacle is None and trains_several:
            self.obstacle = self.engine.method_obstacle(work, stage, payloads, seed)
        if self.obstacle is None:
            return self.engine.run(work, stage, payloads, seed)
        return [Reply(client, NOTHING, examples=0, idle=True) for client in payloads]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep the new states of these clients."""
        self.engine.commit(stage, clients)


def _method_obstacle(prepared: Prepared, engine: SerialEngine) -> str:
    """The reason why torch cannot stack a method's work; empty if it can.

    A stack of the smallest client, twice, trains one step.
    """
    if not isinstance(engine, VectorisedEngine):
        return ""
    world = prepared.world
    trial = _StackTrial(engine)
    context = run_context(prepared, trial)
    try:
        state = replace(first_state(prepared.settings.method, world), round=1)
        with drawing_from(seed_for(world.seed, 0, 0, SERVER, "run")):
            run_round(state, context.schedule(1, world), context)
    # The run reports mistakes in the method, with better messages. After the trial, a method may
    # also fail because it needs the replies of clients that were idle.
    except Exception as error:
        log.debug("the trial of a stack failed", exc_info=error)
    return trial.obstacle or ""


def _noted_sums(settings: Settings, folder: Path) -> Moments | None:
    """The mean and standard deviation from the sums of real sites, according to the journal.

    None if sites send no sums, or have not sent them yet. Raises CorruptFile if the first event
    lacks them.
    """
    if settings.data.standardise != "summed" or not settings.on_sites:
        return None
    start = read_start(folder)
    if not start:
        return None
    try:
        inputs = start["inputs"]
        mean = tuple(map(float, inputs["mean"]))
        std = tuple(map(float, inputs["std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"{folder / JOURNAL}: the start event's inputs are malformed: {error}"
        ) from error
    if mean:
        return Moments(mean, std)
    return None


REUSE_GB = "FEDSTILL_REUSE_GB"
"""The environment variable for the size of the cache of replies, in gigabytes."""


def reuse_bytes() -> int:
    """The maximum size of the cache of replies in bytes: ``FEDSTILL_REUSE_GB``, or 10 GB; 0
    disables it.

    Raises ConfigError if the variable is not a number of at least 0.
    """
    text = os.environ.get(REUSE_GB) or "10"
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise ConfigError(f"{REUSE_GB} = {text!r} must be a number of gigabytes, at least 0")
    return int(gigabytes * 1e9)


def _check_machine(settings: Settings) -> None:
    """Raise ConfigError if this machine cannot execute the run; make its arithmetic repeatable."""
    check_machine(settings.precisions, settings.device)
    make_deterministic(settings.device)
    if settings.reuse:
        reuse_bytes()  # raises if the environment variable is not a number


def _read(settings: Settings, dataset: Dataset | None) -> Dataset:
    """The run's data set, in the form that the network takes. It is read unless it is given."""
    dataset = with_pixels(dataset or read_data(settings), settings.data)
    return as_features(settings, dataset)


def _make_world(
    settings: Settings, dataset: Dataset, data: ClientData, start: Tensors | None
) -> RunWorld:
    """The knowledge that server and clients share: sizes, architectures, tasks and queries."""
    classes = len(dataset.classes)
    public = len(data.public or ())
    world = world_of(settings, dataset.input_shape, classes, public, dataset.vocabulary)
    world = with_start_model(settings, world, start)
    if data.tasks is not None:
        world = replace(world, stream=stream_of(settings, data.tasks, data.full_split))
    return with_extensions(settings, world, lambda: data.label_table(classes))


def _inputs(settings: Settings, dataset: Dataset, scaler: Scaler) -> Inputs:
    """The conversion of stored values to inputs.

    Pixels are normalised with the moments of the data set, other numbers with those of the scaler.
    """
    mean = scaler.mean
    std = scaler.std
    if dataset.about.kind == "image":
        mean = dataset.mean
        std = dataset.std
    return Inputs(tuple(mean), tuple(std), tuple(settings.data.augment), dataset.about)


def _arrival(settings: Settings) -> Arrival | None:
    """The schedule by which clients' data grow; None if they have all data from the start."""
    for part in manifest.arrivals():
        arrival_of = part.load()
        arrival: Arrival | None = arrival_of(settings)
        if arrival is not None:
            return arrival
    return None


def site_views(settings: Settings, world: RunWorld, inputs: Inputs, data: ClientData) -> SiteViews:
    """The data of clients and server, on the run's device."""
    device = settings.device
    tasks = None
    if data.tasks is not None:
        task_tests = {task: tests.to(device) for task, tests in data.task_tests.items()}
        tasks = task_data(world.stream, data.tasks, task_tests)
    flipped: frozenset[int] = frozenset()
    if settings.clients_table.attack == "label_flip":
        flipped = hostile_clients(settings)
    return SiteViews(
        train=data.train.to(device),
        split=data.split,
        classes=world.classes,
        model=world.model,
        passes=lambda spec: ModelPasses(spec, inputs),
        inputs=inputs,
        plans=_plans_of_views(settings),
        seed=settings.seed,
        public=_on_device(data.public, device),
        common_test=_on_device(data.test, device),
        own_tests={client: tests.to(device) for client, tests in data.client_tests.items()},
        queries=queries_of(world),
        labelled=settings.method.labelled,
        held_out=settings.data.held_out,
        arrival=_arrival(settings),
        tasks=tasks,
        flipped=flipped,
    )


def _plans_of_views(settings: Settings) -> dict[str, Plan]:
    """The plans of the stages in which clients hold out data."""
    plans = dict(settings.plans)
    if settings.sites_test_rounds:
        share = held_out_share(settings.plans)
        plans[HELD_OUT_TEST] = replace(NO_TRAINING, validation=share)
    return plans


def _on_device(examples: Examples | None, device: str) -> Examples | None:
    if examples is None:
        return None
    return examples.to(device)


def _notes_on_tasks(settings: Settings, scaler: Scaler) -> list[str]:
    """A note if a simulation takes the mean and standard deviation also from later tasks."""
    from_rows = scaler.origin in ("pooled", "summed", "own")
    if settings.on_sites or settings.stream.tasks == 1 or not from_rows:
        return []
    return [
        "mean and standard deviation are those of the rows of all tasks, including later ones; "
        "set data.mean and data.std instead"
    ]


# The step "read": the data set that the settings name.


def read_data(settings: Settings) -> Dataset:
    """Read the data set that the settings name.

    If they name none because the sites have the data, the data set has no examples.
    """
    if settings.on_sites and settings.data.name == NO_DATA:
        return _without_examples(settings)
    return load_dataset(settings.data.name, **reading_options(settings))


def reading_options(settings: Settings) -> dict[str, Any]:
    """The keywords of ``load_dataset`` according to the settings."""
    data = settings.data
    options: dict[str, Any] = {"folder": data.folder or None}
    for key in ("image_column", "label_column"):
        if value := getattr(data, key):
            options[key] = value
    options |= data.images
    options |= data.form
    partition_column = settings.named.partition.values.get("column")
    owner = partition_column or settings.named.stream.values.get("column")
    if owner:
        options["owner"] = owner
    return options


def with_pixels(dataset: Dataset, data: DataTable) -> Dataset:
    """The data set with the moments of pixels in ``data.mean`` and ``data.std``.

    Data sets without images are unchanged. Raises ConfigError for invalid values.
    """
    if dataset.about.kind != "image":
        return dataset
    mean = tuple(dataset.mean)
    if data.mean is not None:
        mean = _by_channel("mean", data.mean, dataset)
    std = tuple(dataset.std)
    if data.std is not None:
        std = _by_channel("std", data.std, dataset)
    return replace(dataset, mean=mean, std=std)


def _by_channel(key: str, values: tuple[float, ...], dataset: Dataset) -> tuple[float, ...]:
    """A number for each channel of images, from a list with one number or one per channel."""
    for value in values:
        if reason := problem(Share, value):
            raise ConfigError(f"data.{key} = {reason}: pixels are numbers in [0, 1] here")
    if key == "std" and min(values) < LEAST_SPREAD:
        raise ConfigError(
            f"data.std = {min(values):g}: pixels are numbers in [0, 1] here; give "
            f"{LEAST_SPREAD:g} or more"
        )
    channels = dataset.input_shape[0]
    if len(values) not in (1, channels):
        allowed_counts = " or ".join(sorted({"1", str(channels)}))
        raise ConfigError(
            f"data.{key} has {counted(len(values), 'number')}, and images of "
            f"{dataset.name} have {counted(channels, 'channel')}; give {allowed_counts}"
        )
    numbers = tuple(float(value) for value in values)
    if len(numbers) == 1:
        return numbers * channels
    return numbers


def _without_examples(settings: Settings) -> Dataset:
    """A data set without examples, with the classes and the shape of an example."""
    shape, about = unseen_examples(settings.data, settings.flower)
    dtype = {"image": torch.uint8, "text": torch.int64}.get(about.kind, torch.float32)
    pixel_level: tuple[float, ...] = ()
    if about.kind == "image":
        pixel_level = (0.5,) * shape[0]
    empty = Examples(torch.zeros(0, *shape, dtype=dtype), torch.zeros(0, dtype=torch.int64))
    return Dataset(
        name=NO_DATA,
        train=empty,
        test=empty,
        validation=None,
        classes=settings.flower.classes,
        mean=pixel_level,
        std=pixel_level,
        about=about,
    )
