"""The world of a run: what server and clients know before anything is sent."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, ModelSpec, Plan, Tensors, matches
from fedstill.core.stream import ONE_TASK, Stream
from fedstill.data.views import SiteViews
from fedstill.engines.passes import step_flops
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.serial import SerialEngine
from fedstill.engines.vectorised import MAX_STACK, VectorisedEngine, stacking_obstacle
from fedstill.models import contract
from fedstill.models.building import ADDED, hold
from fedstill.running.model_files import Start, sent_start, start_of

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
        """The predictor with these parameters, of the server's architecture or of another one."""
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


def started(settings: Settings, world: RunWorld, sent: Tensors | None = None) -> RunWorld:
    """The world in which the server's architecture has the parameters that ``start_from`` names, if
    it names any.

    sent: the parameters that the server has sent to a client, which reads no file.
    """
    if not settings.start_from:
        return world
    spec = world.server_model
    if sent is None:
        start = start_of(
            settings.start_from, spec, lambda: world.initial(SERVER), settings.start_from_partial
        )
    else:
        start = sent_start(sent, spec)
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
    """The world in which only the named entries of the architecture are trained and sent."""
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


# Which engine a run uses: the cost of a step, and what ``auto`` chooses.


# What a client's step costs, and from that which engine suits a run: by arithmetic alone, never by
# timing.
#
# A timing would choose differently from run to run, and the engines' last bits differ.


CROSSOVER = {"cpu": 30e6}
"""Up to so many floating-point operations in a client's step, stacking clients beats training them
side by side on a few cores.

A stack has one torch thread, as everything has unless ``threads`` says otherwise. In CPU seconds,
16 clients one after another took 1.7 to 3.5 times as long as their stack from 3.3 to 28 MFLOP; 1.2
to 1.5 times from 60 to 112 MFLOP, less than a second core gains; 0.9 to 1.1 times above 500 MFLOP.
``python -m benchmarks.crossover`` compares stages of the two engines in wall-clock seconds.
"""

FEWEST = 4
"""Clients in a stage from which stacking can pay."""

LITTLE_PADDING = 1.25
"""Padding up to which the reason for a choice does not mention it."""


@dataclass(frozen=True)
class StageWork:
    """A stage as the cost model sees it: its plan, how many clients it has, their architectures,
    and the examples of an average client.

    ``padding``: how many examples a stack of these clients computes on for each real example,
    because it trains as long as its largest client; 1 if all have equally many.
    """

    plan: Plan
    clients: int
    specs: Collection[ModelSpec]
    examples: float
    padding: float = 1.0

    @property
    def flops(self) -> float:
        """Floating-point operations in a step of the costliest client, forward and backward,
        without teachers.
        """
        batch = max(1.0, min(self.plan.batch, self.examples))
        return max(step_flops(spec, batch) for spec in self.specs)

    def crossover(self, kind: str) -> float:
        """Up to so many operations in a step, stacking these clients pays on a kind of device.

        The gain of a stack falls with about the cube root of the operations of a step, and padding
        divides it.
        """
        return CROSSOVER[kind] / self.padding**3


class EngineChoice(NamedTuple):
    """The engine that suits a run, and the reason in words."""

    engine: Literal["pooled", "vectorised"]
    reason: str


def suited_engine(work: Collection[StageWork], device: str) -> EngineChoice:
    """The engine for a run with these stages."""
    side_by_side = [stage for stage in work if stage.clients > 1]
    if not side_by_side:
        reason = "one client acts at a time, so there is nothing to stack"
        return EngineChoice("pooled", reason)
    for stage in side_by_side:
        for spec in stage.specs:
            if reason := stacking_obstacle(spec, stage.plan):
                return EngineChoice("pooled", reason)
    kind = device.partition(":")[0]
    if kind not in CROSSOVER:
        reason = (
            f"it is not known when stacking is faster on {kind}; engine = 'vectorised' tries it"
        )
        return EngineChoice("pooled", reason)

    clients = min(stage.clients for stage in side_by_side)
    costliest = max(side_by_side, key=lambda stage: stage.flops * stage.padding**3)
    limit = costliest.crossover(kind)
    reason = (
        f"{_mflop(costliest.flops)} in a client's step, {clients} clients in a stage: "
        f"stacking pays up to {_mflop(limit)}"
    )
    if costliest.padding > LITTLE_PADDING:
        reason += " for clients of such unequal size"
    if clients < FEWEST:
        return EngineChoice("pooled", f"{clients} clients in a stage: stacking takes {FEWEST}")
    if costliest.flops > limit:
        return EngineChoice("pooled", reason)
    return EngineChoice("vectorised", reason)


def _mflop(flops: float) -> str:
    return f"{flops / 1e6:.3g} MFLOP"


ENGINES = {"serial": SerialEngine, "pooled": PooledEngine, "vectorised": VectorisedEngine}
"""The engines by the name they have in a config."""


def work_of_stages(settings: Settings, world: RunWorld, sites: SiteViews) -> list[StageWork]:
    """The stages of the first and the last round in which clients train, as the cost model sees
    them.
    """
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
"""Rounds whose clients tell how unequal the clients of a stage are."""


def _paddings(settings: Settings, world: RunWorld, sites: SiteViews) -> dict[str, float]:
    """The padding of each stage on private data, by name: the mean over some rounds."""
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
    """How many examples stacks of clients with ``sizes`` examples compute on for each real one."""
    if sizes.sum() == 0:
        return 1.0
    descending = np.sort(sizes)[::-1]
    largest = descending[::MAX_STACK]
    counts = np.diff(np.arange(0, len(sizes), MAX_STACK), append=len(sizes))
    return float((largest * counts).sum() / sizes.sum())
