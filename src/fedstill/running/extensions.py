"""The table of a run's extensions: hooks, middleware and observers, in their order; and the context
of its rounds, which is built of them.

Inner capabilities come first, then those of the outer packages in the order of the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.continual.task_test import TEST_STAGES
from fedstill.core.extensions import (
    ClientHook,
    Engine,
    Middleware,
    NoRecorder,
    Observer,
    Recorder,
    RoundHook,
    SiteGuard,
    SiteNotebook,
    StageKeeper,
)
from fedstill.core.keys import generator, seed_for
from fedstill.core.label_counts import (
    CensusChecks,
    TotalsAtClient,
    TotalsAtServer,
    needs_label_totals,
)
from fedstill.core.method import ClientWork
from fedstill.core.records import SERVER, Group, Payload, Reply, Stage, Tensors, World
from fedstill.core.rounds import RunContext
from fedstill.engines.client_measures import ClientMeasures, HeldOutTests, OwnTestSets
from fedstill.metrics.classification import RunMetrics
from fedstill.running.checkpoint import update_keepers
from fedstill.running.selection import stages_of_held_out_tests


@dataclass(frozen=True)
class Extensions:
    """What capabilities add to a run at the server.

    ``middleware``: the first is the innermost.
    """

    round_hooks: tuple[RoundHook, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    observers: tuple[Observer, ...] = ()
    keepers: tuple[StageKeeper, ...] = ()

    def __add__(self, further: Extensions) -> Extensions:
        """These extensions, followed by others."""
        return Extensions(
            round_hooks=self.round_hooks + further.round_hooks,
            middleware=self.middleware + further.middleware,
            observers=self.observers + further.observers,
            keepers=self.keepers + further.keepers,
        )

    def wrapped(self, engine: Engine) -> Engine:
        """An engine inside the middleware."""
        for wrap in self.middleware:
            engine = wrap(engine)
        return engine


class PreparedRun(Protocol):
    """A run that is ready to start, as far as this table needs it (``preparation.Prepared``)."""

    @property
    def settings(self) -> Settings: ...
    @property
    def world(self) -> World: ...


def run_extensions(prepared: PreparedRun, folder: Path | None = None) -> Extensions:
    """The extensions of a run; ``folder``: the run's directory, if it has one."""
    settings = prepared.settings
    round_hooks: list[RoundHook] = [CensusChecks(settings.rules.max_examples)]
    if needs_label_totals(settings.plans):
        round_hooks.append(TotalsAtServer())
    extensions = Extensions(
        round_hooks=tuple(round_hooks),
        middleware=hostile_middleware(settings),
        keepers=update_keepers(settings, folder),
    )
    for part in manifest.run_extensions():
        extensions += part.load()(prepared, folder)
    return extensions


def client_extensions(
    settings: Settings,
    world: World,
    measured: ClientMeasures,
    metrics: RunMetrics,
    *,
    has_own_tests: bool,
    is_real_site: bool,
) -> tuple[ClientHook, ...]:
    """The hooks of a run's clients. ``measured``: the measures that clients take; ``metrics``:
    those of models on clients' own test sets; ``has_own_tests``: whether there are such test sets.
    """
    hooks: list[ClientHook] = []
    if needs_label_totals(settings.plans):
        hooks.append(TotalsAtClient())
    for part in manifest.client_extensions():
        hooks += part.load()(settings, world, is_real_site)
    tested = stages_of_held_out_tests(settings)
    if tested:
        hooks.append(
            HeldOutTests(
                stages=tuple(sorted(tested)),
                by=settings.rank_by,
                positive=metrics.positive,
                as_histograms=settings.sites_test_rounds,
            )
        )
    if measured.named:
        hooks.append(measured)
    if has_own_tests:
        hooks.append(OwnTestSets(metrics, _histogram_stages(settings, is_real_site)))
    return tuple(hooks)


def _histogram_stages(settings: Settings, is_real_site: bool) -> tuple[str, ...] | None:
    """The stages after which a real site sends histograms of its scores: those that test the global
    model, or that leave the client a model of its own; none if the server may see no client's.
    """
    if not is_real_site:
        return None
    if settings.hides_client_models:
        return ()
    return tuple(sorted(settings.method.personal or TEST_STAGES))


def site_guards(prepared: PreparedRun, notebook: SiteNotebook) -> tuple[SiteGuard, ...]:
    """The guards of a site. ``notebook``: the place where guards store their notes."""
    guards: list[SiteGuard] = []
    for part in manifest.site_guards():
        guards += part.load()(prepared, notebook)
    return tuple(guards)


def run_context(
    prepared: PreparedRun,
    engine: Engine,
    recorder: Recorder | None = None,
    extensions: Extensions | None = None,
) -> RunContext:
    """The context of a run's rounds.

    ``engine``: without the run's middleware. ``extensions``: those of ``run_extensions`` if they
    are left out.
    """
    settings = prepared.settings
    if extensions is None:
        extensions = run_extensions(prepared)
    return RunContext(
        schedule=settings.schedule,
        world=prepared.world,
        engine=extensions.wrapped(engine),
        rules=settings.rules,
        recorder=recorder or NoRecorder(),
        hooks=extensions.round_hooks,
        is_remote=settings.engine == "flower",
    )


# Hostile clients, planted in a simulation: which clients are hostile, and what they send.


FACTORS = {"sign_flip": -1.0, "scaled": 10.0}
"""What an attack multiplies a client's change by."""


def hostile_clients(settings: Settings) -> frozenset[int]:
    """The hostile clients of a simulation, drawn by key; at least one where an attack is set, none
    without.
    """
    if settings.clients_table.attack is None:
        return frozenset()
    share = settings.clients_table.attackers or 0.1
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "hostile"))
    order: list[int] = torch.randperm(settings.clients, generator=draw).tolist()
    return frozenset(order[: max(1, round(share * settings.clients))])


@dataclass(frozen=True)
class Hostile:
    """An engine of whose clients some send something else than they trained.

    What was sent down counts as 0: a model comes back ``factor`` times as far from it, a change
    ``factor`` times as large, and so does every other real tensor.
    """

    engine: Engine
    clients: frozenset[int]
    factor: float

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of all clients; hostile clients change theirs."""
        replies = self.engine.run(work, stage, payloads, seed)
        return [self._hostile_reply(reply, payloads) for reply in replies]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Store the states of clients. Hostile clients, too, store what they trained."""
        self.engine.commit(stage, clients)

    def _hostile_reply(self, reply: Reply, payloads: Mapping[int, Payload]) -> Reply:
        if reply.client not in self.clients or reply.failure:
            return reply
        payload = payloads[reply.client]
        content = Payload(
            {name: self._group(group, payload.get(name)) for name, group in reply.content.items()}
        )
        return replace(reply, content=content)

    def _group(self, group: Group, start: Group | None) -> Group:
        if isinstance(group, Mapping):
            return self._tensors(group, start)
        if isinstance(group, Tensor):
            start_tensor = None
            if isinstance(start, Tensor):
                start_tensor = start
            return self._tensor(group, start_tensor)
        return group

    def _tensors(self, tensors: Tensors, start: Group | None) -> Tensors:
        start_tensors: Tensors = {}
        if isinstance(start, Mapping):
            start_tensors = start
        return {
            name: self._tensor(value, start_tensors.get(name)) for name, value in tensors.items()
        }

    def _tensor(self, value: Tensor, start: Tensor | None) -> Tensor:
        if not value.is_floating_point():
            return value
        if start is None:
            return value * self.factor
        return start + self.factor * (value - start)


def hostile_middleware(settings: Settings) -> tuple[Middleware, ...]:
    """The middleware for hostile clients that change their replies; empty if there are none."""
    factor = FACTORS.get(settings.clients_table.attack or "")
    if factor is None:
        return ()
    clients = hostile_clients(settings)
    return (lambda engine: Hostile(engine, clients, factor),)
