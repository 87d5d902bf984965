"""The world of a run: the knowledge that server and clients share before anything is sent."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import Method
from fedstill.core.records import SERVER, ModelSpec, Plan, State, Tensors, World, matches
from fedstill.core.registry import LIVE, short_name
from fedstill.core.stream import ONE_TASK, Stream
from fedstill.data.views import SiteViews
from fedstill.engines import passes, vectorised
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.reply_cache import constructors
from fedstill.engines.serial import SerialEngine
from fedstill.engines.vectorised import MAX_STACK, StageWork, VectorisedEngine
from fedstill.models import contract
from fedstill.models.building import ADDED, hold
from fedstill.models.predictors import predictor
from fedstill.running.model_files import StartModel, sent_start_model, start_model_of

T = TypeVar("T")


def first_state(method: Method, world: World) -> State:
    """The state before round 1. Random numbers are drawn from the run's seed by key, so that a
    resumed run and a replay begin with the same state.
    """
    with drawing_from(seed_for(world.seed, 0, 0, SERVER, "run")):
        return method.initial_state(world)


@dataclass(frozen=True)
class RunWorld:
    """The sizes, plans and architectures of a run. ``client_models`` are assigned to clients in
    turn; if empty, all clients have the server's architecture.

    ``public``: the number of public examples. ``stream``: the tasks and their clients over time.
    ``extensions``: records of outer packages, by their type. ``start``: the parameters from
    ``start_from``.
    """

    clients: int
    classes: int
    rounds: int
    seed: int
    plans: Mapping[str, Plan]
    server_model: ModelSpec
    client_models: tuple[ModelSpec, ...] = ()
    public: int = 0
    stream: Stream = ONE_TASK
    extensions: Mapping[type[Any], Any] = field(default_factory=dict)
    start: StartModel | None = field(default=None, compare=False, repr=False)
    _initial: dict[ModelSpec, Tensors] = field(default_factory=dict, compare=False, repr=False)

    @property
    def plans_train_norms(self) -> bool:
        """Whether a stage trains normalisation layers with the statistics of the batch."""
        return any(plan.norm != "frozen" for plan in self.plans.values())

    def get(self, kind: type[T]) -> T | None:
        """The record of a type that an outer package has added; None if there is none."""
        return self.extensions.get(kind)

    def extend(self, *records: object) -> Self:
        """A copy of the world with further records, which replace records of the same types."""
        added = {type(record): record for record in records}
        return replace(self, extensions={**self.extensions, **added})

    def model(self, client: int) -> ModelSpec:
        """The architecture of a client, or of the server."""
        if client == SERVER or not self.client_models:
            return self.server_model
        return self.client_models[client % len(self.client_models)]

    def predictor(
        self, params: Tensors, model: ModelSpec | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The predictor with these parameters; the default architecture is the server's."""
        return predictor(model or self.server_model, params)

    def initial(self, client: int) -> Tensors:
        """Initial parameters, keyed by architecture: equal architectures start with equal
        parameters, so nothing needs to be sent.
        """
        spec = self.model(client)
        if spec not in self._initial:
            self._initial[spec] = contract.initial(
                spec, seed_for(self.seed, 0, 0, SERVER, f"initial {_weights_key(spec)}")
            )
        return self._initial[spec]


def _weights_key(spec: ModelSpec) -> str:
    """The text on which a network's initial weights depend.

    These are the name and the options, without the folders of files and without the number in
    ``python:Net-2``: a notebook whose cell ``class Net`` runs again has the same network.
    """
    name = short_name(spec.name)
    if name.startswith(LIVE):
        name = name.partition("-")[0]
    return str(replace(spec, name=name, fields=_without_folders(spec.fields)))


def _without_folders(value: Any) -> Any:
    """A value of a network's options in which the names of files have no folder."""
    if isinstance(value, str):
        return short_name(value)
    if isinstance(value, tuple):
        return tuple(map(_without_folders, value))
    return value


NETWORK_CACHES = (
    contract.thread_modules,
    contract.size,
    contract.width,
    contract.draws_random_numbers,
    contract.needs_two_examples,
    passes.forward_flops,
    passes.embedding_size,
    passes.activations,
    vectorised.vmap_warning,
    vectorised.vmap_failure,
)
"""The caches of networks and of their properties."""

_constructors: dict[str, object] = {}
"""The constructors of networks in the worlds of this process, by name."""


def forget_changed_networks(specs: Iterable[ModelSpec]) -> None:
    """Empty the caches of networks if the code of a network has changed since this process last
    used it, for example in a notebook.
    """
    current: dict[str, object] = {}
    for spec in specs:
        current |= constructors(spec)
    is_changed = any(_constructors.get(name, new) is not new for name, new in current.items())
    _constructors.update(current)
    if is_changed:
        for cached in NETWORK_CACHES:
            cached.cache_clear()


def world_of(
    settings: Settings, shape: tuple[int, ...], classes: int, public: int, vocabulary: int = 0
) -> RunWorld:
    """The world, given the shape of an example and the numbers of classes, public examples and
    token ids.
    """
    if not shape or min(shape) < 1:
        raise ConfigError(f"examples must be (n, …), not (n, {', '.join(map(str, shape))})")
    model = settings.named.model

    def spec_of(name: str, fields: Mapping[str, Any]) -> ModelSpec:
        plain = contract.spec_for(name, shape, classes, fields, vocabulary)
        return replace(plain, adds=tuple(settings.method.adds.words))

    server_model = spec_of(model.name, dict(model.values))
    networks = settings.client_networks
    # Clients with the same network share one architecture object.
    distinct = {id(network): network for network in networks}
    specs = {}
    for key, network in distinct.items():
        specs[key] = server_model
        if network is not None:
            specs[key] = spec_of(network.name, network.fields)
    client_models = tuple(specs[id(network)] for network in networks)
    forget_changed_networks({server_model, *client_models})
    return RunWorld(
        clients=settings.clients,
        classes=classes,
        rounds=settings.rounds,
        seed=settings.seed,
        plans=settings.plans,
        server_model=server_model,
        client_models=client_models,
        public=public,
    )


def with_start_model(settings: Settings, world: RunWorld, sent: Tensors | None = None) -> RunWorld:
    """The world whose server architecture starts with the parameters of ``start_from``, if it is
    set.

    sent: at a client, the parameters that the server has sent; the client then reads no file.
    """
    if not settings.start_from:
        return world
    spec = world.server_model
    if sent is None:
        start = start_model_of(
            settings.start_from, spec, lambda: world.initial(SERVER), settings.start_from_partial
        )
    else:
        start = sent_start_model(sent, spec)
    if settings.train_only:
        return _holding(settings.train_only, world, start)
    return replace(world, _initial={spec: start.params}, start=start)


def with_extensions(
    settings: Settings, world: RunWorld, label_counts: Callable[[], Tensor]
) -> RunWorld:
    """The world with the records of outer packages.

    label_counts: returns the label counts (clients, C) of a simulation, or (0, C) for real sites,
    whose counts are unknown. It is only called if an outer package needs the counts.
    """
    for part in manifest.world_extensions():
        extend = part.load()
        world = extend(settings, world, label_counts)
    return world


def _holding(train_only: tuple[str, ...], world: RunWorld, start: StartModel) -> RunWorld:
    """The world in which only the given entries of the architecture are trained and sent."""
    train_only += tuple(ADDED[what] for what in world.server_model.adds)
    named = {name: value for name, value in start.params.items() if matches(name, train_only)}
    others = {name: value for name, value in start.params.items() if name not in named}
    if not others:
        raise ConfigError(
            f"train_only matches all {len(named)} entries; remove it to train the whole network"
        )
    if not named:
        some = ", ".join(list(start.params)[:6])
        raise ConfigError(
            f"train_only = {list(train_only)} matches no entry; the network has {some}, …"
        )
    missing = [name for name in start.new if name in others]
    if missing:
        raise ConfigError(
            f"start_from has no entry {missing[0]!r}, which train_only keeps fixed; add "
            f"{missing[0]!r} to train_only"
        )
    spec = replace(world.server_model, trains=train_only, held=hold(others))
    if world.plans_train_norms:
        _check_statistics(spec)
    return replace(world, server_model=spec, _initial={spec: named}, start=start)


def _check_statistics(spec: ModelSpec) -> None:
    """Raise ConfigError if training would change the statistics of a layer whose entries are kept
    fixed.
    """
    for layer in contract.module(spec).modules():
        if isinstance(layer, contract.NORMS) and layer.track_running_stats:
            raise ConfigError(
                f"train_only keeps the statistics of {type(layer).__name__}, and plan.norm = "
                "'batch' changes them; set plan.norm = 'frozen'"
            )


def local_steps(plan: Plan, examples: int) -> int:
    """The number of optimiser steps of a client with so many examples in a stage with this plan."""
    return plan.steps or plan.epochs * plan.batches_per_epoch(examples)


def examples_trained_on(plan: Plan, examples: int) -> int:
    """The number of examples on which such a client trains, counted in each epoch or step."""
    if plan.steps:
        return plan.steps * min(plan.batch, examples)
    return plan.epochs * examples


ENGINES = {"serial": SerialEngine, "pooled": PooledEngine, "vectorised": VectorisedEngine}
"""The engines by their names in a config."""


def work_of_stages(settings: Settings, world: RunWorld, sites: SiteViews) -> list[StageWork]:
    """The stages of the first and the last round in which clients train, for the cost model."""
    stages = {
        stage.name: stage
        for round in (1, settings.rounds)
        for stage in settings.schedule(round, world)
        if stage.clients != (SERVER,)
    }
    paddings = _paddings(settings, world, sites)
    return [
        StageWork(
            plan=world.plans[stage.name],
            clients=len(stage.clients),
            specs={world.model(client) for client in stage.clients},
            examples=len(sites.train) / settings.clients,
            padding=paddings.get(stage.name, 1.0),
        )
        for stage in stages.values()
        if stage.name in world.plans
    ]


PADDING_ROUNDS = 10
"""The number of rounds that are used to estimate the padding of a stage."""


def _paddings(settings: Settings, world: RunWorld, sites: SiteViews) -> dict[str, float]:
    """The padding of each stage that trains on private data, by name, averaged over some rounds."""
    if sites.split is None:
        return {}
    sizes = sites.split.sizes
    by_stage: dict[str, list[float]] = {}
    rounds = np.linspace(1, settings.rounds, PADDING_ROUNDS).astype(int)
    for round in sorted(set(rounds.tolist())):
        for stage in settings.schedule(round, world):
            is_private = stage.view == "private" and SERVER not in stage.clients
            if is_private and stage.name in world.plans and not world.plans[stage.name].steps:
                padding = _padding(sizes[list(stage.clients)])
                by_stage.setdefault(stage.name, []).append(padding)
    return {name: statistics.fmean(paddings) for name, paddings in by_stage.items()}


def _padding(sizes: NDArray[np.int64]) -> float:
    """The number of examples that stacks of clients with ``sizes`` examples process for each real
    one.
    """
    if sizes.sum() == 0:
        return 1.0
    descending = np.sort(sizes)[::-1]
    largest = descending[::MAX_STACK]
    counts = np.diff(np.arange(0, len(sizes), MAX_STACK), append=len(sizes))
    return float((largest * counts).sum() / sizes.sum())
