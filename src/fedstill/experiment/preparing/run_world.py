"""The world of a run: what every side may know before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedstill.errors import ConfigError
from fedstill.experiment.config.client_models import assigned
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.start_weights import Start, start_of
from fedstill.keys import seed_for
from fedstill.models import contract
from fedstill.queries import Asking
from fedstill.records import SERVER, ModelSpec, Plan, Tensors


@dataclass(frozen=True)
class RunWorld:
    """Numbers, plans and architectures; ``client_models`` are given out in turn, or all are the server's if empty.

    ``queries``: the classes that a client asks for, by client; one that asks for none is left out.
    ``asking``: the rule by which they raise their queries in the run. ``public``: how many public images there are.
    ``start``: what ``start_from`` gave.
    """

    clients: int
    classes: int
    rounds: int
    seed: int
    plans: Mapping[str, Plan]
    server_model: ModelSpec
    client_models: tuple[ModelSpec, ...] = ()
    queries: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    public: int = 0
    asking: Asking | None = None
    start: Start | None = field(default=None, compare=False, repr=False)
    _initial: dict[ModelSpec, Tensors] = field(default_factory=dict, compare=False, repr=False)

    def with_queries(self, queries: Mapping[int, tuple[int, ...]]) -> RunWorld:
        """The same world with other queries."""
        return replace(self, queries=queries)

    def model(self, client: int) -> ModelSpec:
        """The architecture of a client, or of the server."""
        if client == SERVER or not self.client_models:
            return self.server_model
        return self.client_models[client % len(self.client_models)]

    def initial(self, client: int) -> Tensors:
        """Initial parameters, keyed by architecture: equal ones start equal, and nothing needs to be sent."""
        spec = self.model(client)
        if spec not in self._initial:
            self._initial[spec] = contract.initial(spec, seed_for(self.seed, 0, 0, SERVER, f"initial {spec}"))
        return self._initial[spec]


def world_of(settings: Settings, shape: tuple[int, ...], classes: int, public: int) -> RunWorld:
    """What every side may know, given an image's shape (channels, height, width), the classes and the public images."""
    if len(shape) != 3:
        raise ConfigError(f"images must be (n, channels, height, width), not (n, {', '.join(map(str, shape))})")
    model = settings.named.model
    server = contract.spec_for(model.name, shape, classes, dict(model.values))
    networks = assigned(settings.of_clients.models, settings.clients)
    distinct = {id(network): network for network in networks}
    specs = {key: contract.spec_for(n[0], shape, classes, n[1]) if n else server for key, n in distinct.items()}
    others = tuple(specs[id(network)] for network in networks) if any(distinct.values()) else ()
    return RunWorld(
        settings.clients, classes, settings.rounds, settings.seed, settings.plans, server, others, public=public
    )


def started(settings: Settings, world: RunWorld) -> RunWorld:
    """The world in which the server's architecture has the parameters that ``start_from`` names, if it names any."""
    if not settings.start_from:
        return world
    spec = world.server_model
    start = start_of(settings.start_from, spec, lambda: world.initial(SERVER), settings.start_from_partial)
    return replace(world, _initial={spec: start.params}, start=start)
