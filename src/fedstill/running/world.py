"""The world of a run: what every side may know before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from torch import Tensor

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, ModelSpec, Plan, Tensors
from fedstill.core.stream import ONE_TASK, Stream
from fedstill.models import contract
from fedstill.models.parameters import ADDED, hold, matches
from fedstill.running.start_weights import Start, start_of

T = TypeVar("T")


@dataclass(frozen=True)
class RunWorld:
    """Numbers, plans and architectures; ``client_models`` are given out in turn, or all are the
    server's if empty.

    ``public``: how many public examples there are. ``stream``: which tasks there are, and who is in
    which when. ``extensions``: records of capabilities, by their kind. ``start``: what
    ``start_from`` gave.
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
    start: Start | None = field(default=None, compare=False, repr=False)
    _initial: dict[ModelSpec, Tensors] = field(default_factory=dict, compare=False, repr=False)

    @property
    def plans_train_norms(self) -> bool:
        """Whether a stage trains normalisation layers with the statistics of the batch."""
        return any(plan.norm != "frozen" for plan in self.plans.values())

    def get(self, kind: type[T]) -> T | None:
        """The record of a kind that a capability has added; None without such a record."""
        return self.extensions.get(kind)

    def extend(self, *records: object) -> Self:
        """The same world with further records, in place of those of the same kinds."""
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
        """What these parameters answer, of the server's architecture or of another."""
        return contract.predictor(model or self.server_model, params)

    def initial(self, client: int) -> Tensors:
        """Initial parameters, keyed by architecture: equal ones start equal, and nothing needs to
        be sent.
        """
        spec = self.model(client)
        if spec not in self._initial:
            self._initial[spec] = contract.initial(
                spec, seed_for(self.seed, 0, 0, SERVER, f"initial {spec}")
            )
        return self._initial[spec]


def world_of(
    settings: Settings, shape: tuple[int, ...], classes: int, public: int, vocabulary: int = 0
) -> RunWorld:
    """What every side may know, given an example's shape and the numbers of classes, public
    examples and token ids.
    """
    if not shape or min(shape) < 1:
        raise ConfigError(f"examples must be (n, …), not (n, {', '.join(map(str, shape))})")
    model = settings.named.model

    def spec_of(name: str, fields: Mapping[str, Any]) -> ModelSpec:
        plain = contract.spec_for(name, shape, classes, fields, vocabulary)
        return replace(plain, adds=tuple(settings.method.adds.words))

    server_model = spec_of(model.name, dict(model.values))
    networks = settings.client_networks
    # Many clients share one network, of which the architecture is made once.
    distinct = {id(network): network for network in networks}
    specs = {}
    for key, network in distinct.items():
        specs[key] = server_model
        if network is not None:
            specs[key] = spec_of(network.name, network.fields)
    client_models = tuple(specs[id(network)] for network in networks)
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


def started(settings: Settings, world: RunWorld) -> RunWorld:
    """The world in which the server's architecture has the parameters that ``start_from`` names, if
    it names any.
    """
    if not settings.start_from:
        return world
    spec = world.server_model
    start = start_of(
        settings.start_from, spec, lambda: world.initial(SERVER), settings.start_from_partial
    )
    if settings.train_only:
        return _holding(settings.train_only, world, start)
    return replace(world, _initial={spec: start.params}, start=start)


def extended(settings: Settings, world: RunWorld, label_counts: Callable[[], Tensor]) -> RunWorld:
    """The world with what outer packages add to it.

    label_counts: gives the label counts (clients, C) of a simulation; (0, C) of real sites, which
    are unknown. It is called only where they are needed.
    """
    for part in manifest.world_extensions():
        extend = part.load()
        world = extend(settings, world, label_counts)
    return world


def _holding(train_only: tuple[str, ...], world: RunWorld, start: Start) -> RunWorld:
    """The world in whose architecture only the entries that are named are trained and sent."""
    train_only += tuple(ADDED[what] for what in world.server_model.adds)
    named = {name: value for name, value in start.params.items() if matches(name, train_only)}
    others = {name: value for name, value in start.params.items() if name not in named}
    if not others:
        raise ConfigError(
            f"train_only names all {len(named)} entries; leave it out to train the whole network"
        )
    if not named:
        some = ", ".join(list(start.params)[:6])
        raise ConfigError(
            f"train_only = {list(train_only)} matches no entry; the network has {some}, …"
        )
    missing = [name for name in start.new if name in others]
    if missing:
        raise ConfigError(
            f"start_from has no entry {missing[0]!r}, so it cannot be kept from there; add "
            f"{missing[0]!r} to train_only"
        )
    spec = replace(world.server_model, trains=train_only, held=hold(others))
    if world.plans_train_norms:
        _check_statistics(spec)
    return replace(world, server_model=spec, _initial={spec: named}, start=start)


def _check_statistics(spec: ModelSpec) -> None:
    """Raise ConfigError for a layer whose statistics would change in training, though its entries
    are kept.
    """
    for layer in contract.module(spec).modules():
        if isinstance(layer, contract.NORMS) and layer.track_running_stats:
            raise ConfigError(
                f"train_only keeps the statistics of {type(layer).__name__}, and plan.norm = "
                "'batch' changes them; set plan.norm = 'frozen'"
            )
