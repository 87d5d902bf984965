"""A run that is ready to start: data read and split, models known, conflicts refused. Engines are
built only here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.config.settings import Settings
from fedstill.config.tables import DataTable
from fedstill.config.unseen_data import NO_DATA, unseen_examples
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import ClientHook
from fedstill.core.fields import Share, problem
from fedstill.core.records import Examples
from fedstill.data.cache import cache_folder, reuse_bytes
from fedstill.data.client_split import DealtOut
from fedstill.data.dataset import Dataset
from fedstill.data.inputs import Inputs
from fedstill.data.sources import load_dataset
from fedstill.data.views import SiteViews
from fedstill.engines.client_measures import ClientMeasures, OwnTestSets
from fedstill.engines.client_memory import Memory
from fedstill.engines.passes import ModelPasses
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.precision import check_machine, steady
from fedstill.engines.reply_cache import KeptReplies
from fedstill.engines.serial import SerialEngine
from fedstill.measures.base import Room, at_clients
from fedstill.measures.choice import measures
from fedstill.methods.fit import FIT, ONLY_FIT
from fedstill.privacy.compatibility import refuse_unmaskable, refuse_unprivate
from fedstill.privacy.noise import NoisedLogits
from fedstill.privacy.private_training import Private, PrivateTraining
from fedstill.querying.hooks import QueriesAtClient
from fedstill.querying.rules import arrival_of, with_asking
from fedstill.running.client_data import Shared, divided, stream_of, task_data
from fedstill.running.compatibility import (
    refuse_misfits,
    refuse_other_kinds,
    refuse_untrained_domain,
)
from fedstill.running.data_sums import Moments
from fedstill.running.engine_choice import ENGINES, resolved
from fedstill.running.hostile_clients import hostile_clients, refuse_hostile
from fedstill.running.standardisation import PLAIN, Standard
from fedstill.running.start_weights import as_features
from fedstill.running.world import RunWorld, started, world_of

LEAST_SPREAD = 1e-4
"""The least ``data.std`` of pixels in [0, 1]; with less a network sees nothing but overflow."""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start; its settings name the engine that ``auto`` has chosen.

    ``notes``: what reading and splitting the data left out or took as it was, a sentence
    each; ``names``: what clients are called in the data. ``by``: whose mean and spread standardises
    examples.
    """

    settings: Settings
    dataset: Dataset
    world: RunWorld
    sites: SiteViews
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    by: Standard = PLAIN

    def engine(
        self, memory: Memory | None = None, *, site: bool = False, measured: bool = True
    ) -> SerialEngine:
        """The engine that carries stages out in this process, as the settings name it.

        ``memory``: what clients remember; in this process if it is left out. ``site``: of one site,
        which does one client's stages: the serial engine, without replies that other runs have
        kept. ``measured``: whether clients measure their own models.
        """
        settings = self.settings
        kind = SerialEngine if site else ENGINES.get(settings.engine, SerialEngine)
        alone: dict[str, Any] = (
            {"workers": 1} if settings.device == "cuda" and issubclass(kind, PooledEngine) else {}
        )
        return kind(
            self.world,
            self.sites,
            memory or Memory(),
            settings.threads,
            settings.precision,
            client_hooks(self, site=site, measured=measured),
            kept=self._kept() if settings.reuse and not site and not settings.lives else None,
            **alone,
        )

    def client_measures(self, *, site: bool = False) -> ClientMeasures:
        """The run's measures that clients take; ``site``: those that a client takes which is
        reached over Flower.
        """
        settings = self.settings
        return at_clients(
            measures(settings.measure), settings.measured_in, site and settings.on_sites
        )

    def room(self, folder: Path | None, memory: Memory | None) -> Room | None:
        """What measures may use: the run's directory, what clients remember; None without a common
        test set.
        """
        settings, sites = self.settings, self.sites
        if sites.common_test is None:
            return None
        return Room(
            world=self.world,
            test=sites.common_test,
            inputs=sites.inputs,
            sites=sites,
            schedule=settings.schedule,
            folder=folder,
            privacy=settings.privacy,
            remembered=memory.load if memory is not None else None,
        )

    def _kept(self) -> KeptReplies:
        """Replies of other runs, for the stages of which the method says that they may serve
        again.
        """
        method = self.settings.method
        stages = method.reusable | (frozenset() if FIT in method.stages else ONLY_FIT.reusable)
        return KeptReplies(cache_folder() / "replies", stages, reuse_bytes())


def client_hooks(prepared: Prepared, *, site: bool, measured: bool) -> tuple[ClientHook, ...]:
    """The extensions of what a run's clients do, in their order.

    ``site``: of a client that is reached over Flower. ``measured``: whether clients measure their
    own models.
    """
    settings, asking = prepared.settings, prepared.world.asking
    secret = site and settings.on_sites
    hooks: list[ClientHook] = []
    if asking is not None:
        hooks.append(QueriesAtClient(asking))
    rule = Private.of(settings.privacy, secret)
    if rule is not None:
        hooks.append(PrivateTraining(rule))
    if settings.privacy.protects_logits:
        hooks.append(NoisedLogits(settings.privacy, secret))
    if measured:
        hooks.append(prepared.client_measures(site=site))
    hooks.append(OwnTestSets())
    return tuple(hooks)


def prepare(
    settings: Settings,
    dataset: Dataset | None = None,
    begun: DealtOut | None = None,
    sent: Moments | None = None,
) -> Prepared:
    """Read and split the data, build the models once, and check that the method gets what it needs.

    ``begun``: the split that a run began with; without it, one is drawn. ``sent``: the mean and
    spread that the sums of real sites came to, where they are standardised by these; without it,
    examples are left as they are until then. Raises DataError, InfeasiblePartition, ConfigError or
    IncompatibleMethod, before anything is trained.
    """
    check_machine(settings.precision, settings.device)
    steady(settings.device)
    if settings.reuse:
        reuse_bytes()  # raises now if it is not a number
    dataset = as_features(settings, with_pixels(dataset or read_data(settings), settings.data))
    refuse_other_kinds(settings, dataset)
    refuse_untrained_domain(settings, dataset)
    classes = len(dataset.classes)
    shared = divided(settings, dataset, begun, sent)
    world = started(settings, _world(settings, dataset, shared))
    if shared.cut is not None:
        world = replace(world, stream=stream_of(settings, shared.cut, shared.parts))
    world = with_asking(settings, world, lambda: shared.counts(classes))
    mean, std = (
        (dataset.mean, dataset.std)
        if dataset.about.kind == "image"
        else (shared.by.mean, shared.by.std)
    )
    inputs = Inputs(tuple(mean), tuple(std), tuple(settings.data.augment), dataset.about)
    sites = sites_of(settings, world, inputs, shared)
    refuse_misfits(settings, world, sites)
    refuse_hostile(settings, world)
    refuse_unprivate(settings, world)
    refuse_unmaskable(settings, world)
    how = resolved(settings, world, len(shared.train))
    return Prepared(how, dataset, world, sites, shared.notes, shared.names, shared.by)


def _world(settings: Settings, dataset: Dataset, shared: Shared) -> RunWorld:
    public = len(shared.public) if shared.public else 0
    return world_of(settings, dataset.input_shape, len(dataset.classes), public, dataset.vocabulary)


def sites_of(settings: Settings, world: RunWorld, inputs: Inputs, shared: Shared) -> SiteViews:
    """Where a run's data are, on its device: each client's part, the public set, the common and the
    clients' tests.
    """

    def there(examples: Examples | None) -> Examples | None:
        return None if examples is None else examples.to(settings.device)

    by_task = {task: own.to(settings.device) for task, own in shared.tests_by_task.items()}
    return SiteViews(
        train=shared.train.to(settings.device),
        parts=shared.parts,
        classes=world.classes,
        model=world.model,
        passes=lambda spec: ModelPasses(spec, inputs),
        inputs=inputs,
        plans=dict(settings.plans),
        seed=settings.seed,
        public=there(shared.public),
        common_test=there(shared.test),
        own_tests={client: own.to(settings.device) for client, own in shared.own_tests.items()},
        queries=world.queries,
        labelled=settings.method.labelled,
        held_out=settings.data.held_out,
        arrival=arrival_of(settings),
        tasks=None if shared.cut is None else task_data(world.stream, shared.cut, by_task),
        flipped=hostile_clients(settings)
        if settings.of_clients.attack == "label_flip"
        else frozenset(),
    )


def read_data(settings: Settings) -> Dataset:
    """The data set that the settings name; ``"none"`` is a server without data, which knows classes
    and shape only.
    """
    data = settings.data
    if settings.on_sites and data.name == NO_DATA:
        return _no_data(settings)
    return load_dataset(data.name, **how_read(settings))


def how_read(settings: Settings) -> dict[str, Any]:
    """How the settings have their data set read, beside its name: keywords of ``load_dataset``."""
    data = settings.data
    columns = {k: v for k in ("image_column", "label_column", "size") if (v := getattr(data, k))}
    owner = settings.named.partition.values.get("column") or settings.named.stream.values.get(
        "column"
    )
    return {
        "folder": data.folder or None,
        **columns,
        **data.form,
        **({"owner": owner} if owner else {}),
    }


def with_pixels(dataset: Dataset, data: DataTable) -> Dataset:
    """The data set; of images, the pixels as ``data.mean`` and ``data.std`` say. Raises ConfigError
    for wrong ones.
    """
    if dataset.about.kind != "image":
        return dataset
    channels = dataset.input_shape[0]
    mean, std = (_by_channel(k, getattr(data, k), channels, dataset) for k in ("mean", "std"))
    return replace(dataset, mean=mean, std=std)


def _by_channel(
    key: str, values: tuple[float, ...] | None, channels: int, dataset: Dataset
) -> tuple[float, ...]:
    if values is None:
        return tuple(getattr(dataset, key))
    if why := next((why for value in values if (why := problem(Share, value))), ""):
        raise ConfigError(f"data.{key} = {why}: pixels are numbers in [0, 1] here")
    if key == "std" and (low := min(values)) < LEAST_SPREAD:
        raise ConfigError(
            f"data.std = {low:g}: pixels are numbers in [0, 1] here; give {LEAST_SPREAD:g} or more"
        )
    if len(values) not in (1, channels):
        raise ConfigError(
            f"data.{key} has {len(values)} numbers, and images of {dataset.name} have {channels} "
            "channel(s); "
            f"give {' or '.join(sorted({'1', str(channels)}))}"
        )
    own = tuple(float(v) for v in values)
    return own * channels if len(own) == 1 else own


def _no_data(settings: Settings) -> Dataset:
    shape, about = unseen_examples(settings.data, settings.flower)
    image = about.kind == "image"
    dtype = torch.uint8 if image else torch.int64 if about.kind == "text" else torch.float32
    empty = Examples(torch.zeros(0, *shape, dtype=dtype), torch.zeros(0, dtype=torch.int64))
    half = (0.5,) * shape[0] if image else ()
    return Dataset(NO_DATA, empty, empty, None, settings.flower.classes, half, half, about)
