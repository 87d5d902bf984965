"""From settings to what a round loop needs: data read and split, models known, the engine ready."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.data import queries
from fedstill.data.cache_folder import cache_folder, reuse_bytes
from fedstill.data.examples import Dataset, stratified
from fedstill.data.inputs import Inputs
from fedstill.data.partition import cached
from fedstill.data.sources import load
from fedstill.data.views import SimulatedSites
from fedstill.engines.memory import Memory
from fedstill.engines.passes import ModelPasses
from fedstill.engines.reuse import Kept
from fedstill.engines.serial import SerialEngine
from fedstill.errors import ConfigError, InfeasiblePartition
from fedstill.experiment.config.checking import on_one_line
from fedstill.experiment.config.client_models import assigned
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.measures.choose import measured_rounds
from fedstill.experiment.preparing.engine_choice import ENGINES, resolved
from fedstill.experiment.preparing.misfits import refuse_misfits
from fedstill.experiment.preparing.public_data import set_apart
from fedstill.experiment.preparing.run_world import Federation
from fedstill.experiment.preparing.start_weights import weights
from fedstill.fitting import FIT
from fedstill.method import ALONE
from fedstill.models import contract
from fedstill.records import Examples


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start; its settings name the engine that ``auto`` came to."""

    settings: Settings
    dataset: Dataset
    world: Federation
    sites: SimulatedSites

    @property
    def measured(self) -> frozenset[int]:
        """The rounds in which clients measure their own models, for ``local``, ``epochs`` and ``private_public``."""
        asked = {"local", "epochs", "private_public"} & set(self.settings["measure"])
        return measured_rounds(self.settings["rounds"], self.settings["measure_every"]) if asked else frozenset()

    @property
    def kept(self) -> Kept | None:
        """Replies of other runs, for the stages of which the method says that they may serve again."""
        method = self.settings.method
        stages = method.reusable | (frozenset() if FIT in method.stages else ALONE.reusable)
        return Kept(cache_folder() / "replies", stages, reuse_bytes()) if self.settings["reuse"] else None

    def engine(self, memory: Path | None = None) -> SerialEngine:
        """The engine of this run, with client memory in a folder, or in this process."""
        kind = ENGINES.get(self.settings["engine"], SerialEngine)
        said = self.settings
        return kind(
            self.world,
            self.sites,
            Memory(memory),
            said.many_threads,
            self.measured,
            said["precision"],
            kept=self.kept,
            measures=said["measure"],
            privacy=said.privacy,
        )


def prepare(settings: Settings, dataset: Dataset | None = None) -> Prepared:
    """Read and split the data, build the models once, and check that the method gets what it needs.

    Raises DataError, InfeasiblePartition, ConfigError or IncompatibleMethod, before anything is trained.
    """
    if settings["reuse"]:
        reuse_bytes()  # refused now if it is no number
    dataset = dataset or read(settings)
    train, public = set_apart(settings, dataset, _smaller(dataset.train, settings["data"]["train_size"], "train_size"))
    test = _smaller(dataset.test, settings["data"]["test_size"], "test_size")
    classes = len(dataset.classes)
    parts = [] if settings.on_sites else split(settings, train.labels.numpy())
    shape = tuple(dataset.train.images.shape[1:])
    world = started(settings, world_of(settings, shape, classes, len(public) if public else 0))
    world = replace(world, queries=asked(settings, label_counts(train.labels, parts, classes)))
    inputs = Inputs(tuple(dataset.mean), tuple(dataset.std), tuple(settings["data"]["augment"]))
    sites = SimulatedSites(
        train=train.to(settings["device"]),
        parts=parts,
        classes=classes,
        model=world.model,
        passes=lambda spec: ModelPasses(spec, inputs),
        inputs=inputs,
        plans=dict(settings.plans),
        seed=settings["seed"],
        public=public and public.to(settings["device"]),
        common_test=test.to(settings["device"]) if len(test) else None,
        queries=world.queries,
        labelled=settings.method.labelled,
    )
    refuse_misfits(settings, world, sites)
    return Prepared(resolved(settings, world, len(train)), dataset, world, sites)


def started(settings: Settings, world: Federation) -> Federation:
    """The world in which the server's architecture has the parameters that ``start_from`` names, if it names any."""
    if not settings.start_from:
        return world
    return replace(world, _initial={world.server_model: weights(settings.start_from, world.server_model)})


def read(settings: Settings) -> Dataset:
    """The data set that the settings name; ``"none"`` is a server without data, which knows classes and shape only."""
    data = settings["data"]
    if settings.on_sites and data["name"] == NO_DATA:
        return _no_data(settings)
    columns = {k: data[k] for k in ("image_column", "label_column") if data[k]}
    return load(data["name"], folder=data["folder"] or None, **columns)


NO_DATA = "none"
"""The data set's name for a server that has neither a test set nor a public set."""


def _no_data(settings: Settings) -> Dataset:
    classes, shape = settings["flower"]["classes"], settings["flower"]["shape"]
    if len(classes) < 2 or not shape:
        raise ConfigError(
            "data.name = 'none' needs flower.classes, the names of the classes, and flower.shape, an image's "
            "channels, height and width"
        )
    empty = Examples(torch.zeros(0, *shape, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    half = (0.5,) * shape[0]
    return Dataset(NO_DATA, empty, empty, None, classes, half, half)


def split(settings: Settings, labels: np.ndarray[Any, np.dtype[np.int64]]) -> list[torch.Tensor]:
    """Positions of each client's examples; raises InfeasiblePartition if a client would have none."""
    entry, fields = settings.named("partition")
    wanted = inspect.signature(entry.target).parameters
    own = fields.pop("seed", None)
    if "seed" in wanted:
        fields["seed"] = settings["seed"] if own is None else own
    try:
        parts = [np.asarray(part) for part in cached(entry.target, labels, clients=settings.clients, **fields)]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"partition {entry.name} failed: {on_one_line(error)}") from error
    if len(parts) != settings.clients:
        raise ConfigError(f"partition {entry.name} gave {len(parts)} parts for {settings.clients} clients")
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise InfeasiblePartition(f"partition {entry.name}: client {client} gets no examples; use fewer clients")
        if part.ndim != 1 or part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= len(labels):
            raise ConfigError(f"partition {entry.name}: client {client} must get positions from 0 to {len(labels) - 1}")
    if np.bincount(np.concatenate(parts)).max() > 1:
        raise ConfigError(f"partition {entry.name} gives an example to two clients; each example goes to one at most")
    return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts]


def label_counts(labels: torch.Tensor, parts: Sequence[torch.Tensor], classes: int) -> torch.Tensor:
    """Label counts (clients, C) of a split."""
    if not parts:
        return torch.zeros(0, classes, dtype=torch.int64)
    return torch.stack([torch.bincount(labels[part], minlength=classes) for part in parts])


def asked(settings: Settings, counts: torch.Tensor) -> queries.Queries:
    """The classes that each client asks for, written or drawn; raises ConfigError for a query nobody can answer."""
    table = settings["query"]
    if table["draw"] == "none":
        written = {int(client): classes for client, classes in table["classes"].items()}
        if settings.on_sites:
            return {client: tuple(sorted(set(classes))) for client, classes in written.items()}
        return queries.check(written, counts, table["fewer_than"])
    if settings.on_sites:
        raise ConfigError("query.draw: nobody sees what sites hold; write [query.classes]")
    seed = settings["seed"] if table.get("seed") is None else table["seed"]
    return queries.draw(counts, table["draw"], seed, table["fewer_than"], table["least"], table["most"])


def _smaller(examples: Examples, size: int, key: str) -> Examples:
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(f"data.{key} = {size} is more than the {len(examples.labels)} examples there are")
    keep = stratified(examples.labels, size, seed=0)
    return examples.take(keep)


def world_of(settings: Settings, shape: tuple[int, ...], classes: int, public: int) -> Federation:
    """What every side may know, given an image's shape (channels, height, width), the classes and the public images."""
    if len(shape) != 3:
        raise ConfigError(f"images must be (n, channels, height, width), not (n, {', '.join(map(str, shape))})")
    values = dict(settings["model"])
    server = contract.spec_for(values.pop("name"), shape, classes, values)
    networks = assigned(settings["clients"]["models"], settings.clients)
    others = [contract.spec_for(n[0], shape, classes, n[1]) if n else server for n in networks]
    plans = settings.plans
    numbers = (settings.clients, classes, settings["rounds"], settings["seed"])
    return Federation(*numbers, plans, server, tuple(others), public=public)
