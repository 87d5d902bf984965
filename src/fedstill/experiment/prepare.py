"""From settings to what a round loop needs: data read and split, models known, the engine ready."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill import registry
from fedstill.data.examples import Dataset, Split
from fedstill.data.sources import load
from fedstill.data.views import SimulatedSites
from fedstill.engines.inputs import Inputs
from fedstill.engines.memory import Memory
from fedstill.engines.serial import SerialEngine
from fedstill.errors import ConfigError, IncompatibleMethod, InfeasiblePartition
from fedstill.experiment.settings import Settings
from fedstill.experiment.world import Federation
from fedstill.keys import generator, seed_for
from fedstill.models import contract
from fedstill.records import SERVER, Examples, ModelSpec


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    settings: Settings
    dataset: Dataset
    world: Federation
    sites: SimulatedSites

    @property
    def measured(self) -> frozenset[int]:
        """The rounds in which local models are measured: every ``measure_every``, and the last."""
        every, last = self.settings["measure_every"], self.settings["rounds"]
        return frozenset({*range(every, last + 1, every), last}) if self.settings["measure"] else frozenset()

    def engine(self, memory: Path | None = None) -> SerialEngine:
        """The engine of this run, with client memory in a folder, or in this process."""
        return SerialEngine(self.world, self.sites, Memory(memory), self.settings.many_threads, self.measured)


def prepare(settings: Settings, dataset: Dataset | None = None) -> Prepared:
    """Read and split the data, build the models once, and check that the method gets what it needs.

    Raises DataError, InfeasiblePartition, ConfigError or IncompatibleMethod, before anything is trained.
    """
    dataset = dataset or read(settings)
    train, public = _set_public_apart(settings, _smaller(dataset.train, settings["data"]["train_size"], "train_size"))
    test = _smaller(dataset.test, settings["data"]["test_size"], "test_size")
    classes = len(dataset.classes)
    parts = split(settings, train.labels.numpy())
    world = _world(settings, dataset, classes)
    augment = tuple(settings["data"]["augment"])
    sites = SimulatedSites(
        train=Examples(train.images, train.labels),
        parts=parts,
        classes=classes,
        model=world.model,
        inputs=Inputs(tuple(dataset.mean), tuple(dataset.std), augment),
        plans=dict(settings.plans),
        seed=settings["seed"],
        public=public,
        common_test=Examples(test.images, test.labels),
    )
    prepared = Prepared(settings, dataset, world, sites)
    _check_fit(prepared)
    return prepared


def read(settings: Settings) -> Dataset:
    """The data set that the settings name."""
    data = settings["data"]
    columns = {k: data[k] for k in ("image_column", "label_column") if data[k]}
    return load(data["name"], folder=data["folder"] or None, **columns)


def split(settings: Settings, labels: np.ndarray[Any, np.dtype[np.int64]]) -> list[torch.Tensor]:
    """Positions of each client's examples; raises InfeasiblePartition if a client would have none."""
    entry, fields = settings.named("partition")
    wanted = inspect.signature(entry.target).parameters
    own = fields.pop("seed")
    if "seed" in wanted:
        fields["seed"] = settings["seed"] if own is None else own
    parts = entry.build(labels, settings.clients, **fields)
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise InfeasiblePartition(f"partition {entry.name}: client {client} gets no examples; use fewer clients")
    if len(parts) != settings.clients:
        raise ConfigError(f"partition {entry.name} gave {len(parts)} parts for {settings.clients} clients")
    return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts]


def _smaller(examples: Split, size: int, key: str) -> Split:
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(f"data.{key} = {size} is more than the {len(examples.labels)} examples there are")
    keep = stratified(examples.labels, size, seed=0)
    return Split(examples.images[keep], examples.labels[keep])


def stratified(labels: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Positions of ``size`` examples, in order, with the classes' shares kept as near as whole numbers allow."""
    draw = generator(seed_for(seed, 0, 0, SERVER, "stratified"))
    counts = torch.bincount(labels)
    exact = counts.double() * size / len(labels)
    take = exact.floor().long()
    short = size - int(take.sum())
    take[(exact - take).argsort(descending=True, stable=True)[:short]] += 1
    picked = []
    for c, k in enumerate(take.tolist()):
        own = (labels == c).nonzero().flatten()
        picked.append(own[torch.randperm(len(own), generator=draw)[:k]])
    return torch.cat(picked).sort().values


def _set_public_apart(settings: Settings, train: Split) -> tuple[Split, Examples | None]:
    size = settings["data"]["public"]
    if size == 0:
        return train, None
    if size >= len(train.labels):
        raise ConfigError(f"data.public = {size} leaves nothing of {len(train.labels)} training examples")
    public = stratified(train.labels, size, settings["seed"])
    rest = torch.ones(len(train.labels), dtype=torch.bool)
    rest[public] = False
    return Split(train.images[rest], train.labels[rest]), Examples(train.images[public], train.labels[public])


def _world(settings: Settings, dataset: Dataset, classes: int) -> Federation:
    shape = tuple(dataset.train.images.shape[1:])
    if len(shape) != 3:
        raise ConfigError(f"images must be (n, channels, height, width), not {tuple(dataset.train.images.shape)}")
    values = dict(settings["model"])
    server = contract.spec_for(values.pop("name"), shape, classes, values)
    others = []
    for name in settings["clients"]["models"]:
        defaults = {k: d for k, (_, d) in registry.lookup("model", name).fields.items() if d is not ...}
        others.append(contract.spec_for(name, shape, classes, defaults))
    plans = settings.plans
    return Federation(settings.clients, classes, settings["rounds"], settings["seed"], plans, server, tuple(others))


def _check_fit(prepared: Prepared) -> None:
    """Refuse what cannot run, by name, before round 1."""
    method, world, settings = prepared.settings.method, prepared.world, prepared.settings
    name, kind = settings["method"]["name"], settings["topology"]["kind"]
    schedule = [*settings.topology(1, world), *settings.topology(settings["rounds"], world)]
    unknown = sorted({s.name for s in schedule} - method.stages)
    if unknown:
        raise IncompatibleMethod(
            f"method {name} does not know stage {unknown[0]!r} of topology {kind}; "
            f"leave topology.kind out to get its own, {method.topology}"
        )
    models = {world.model(c) for c in (SERVER, *range(min(world.clients, len(world.client_models) or 1)))}
    for spec in models:
        _check_runs(spec, prepared)
        missing = sorted(method.needs & {"features", "head"} - contract.capabilities(spec))
        if missing:
            raise IncompatibleMethod(
                f"method {name} needs a model with {missing[0]}, and {spec} has none: give it submodules body and head"
            )
    if "same_shapes" in method.needs and len(models) > 1:
        raise IncompatibleMethod(
            f"method {name} averages weights, so all models must be one: leave clients.models out, "
            "or choose a method whose clients exchange logits"
        )
    if "public_data" in method.needs and prepared.sites.public is None:
        raise IncompatibleMethod(f"method {name} needs public data: set data.public to a number of images")


def _check_runs(spec: ModelSpec, prepared: Prepared) -> None:
    """Build a model and show it two images, so that a misfit is one clear line now and not a failed client later."""
    images = prepared.sites.inputs.plain(prepared.sites.train.images[:2])
    try:
        out = contract.predictor(spec, contract.initial(spec, 0))(images)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model {spec} cannot take images of shape {tuple(images.shape[1:])}: {reason}") from error
    if out.shape != (len(images), spec.classes):
        raise ConfigError(f"model {spec} gives shape {tuple(out.shape)}, not {(len(images), spec.classes)}")
