"""The table of a run's extensions: hooks, middleware and observers, in their order; and the context
of its rounds, which is built of them.

Inner capabilities come first, then those of the outer packages in the order of the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.continual.task_test import TEST_STAGES
from fedstill.core.census import CensusChecks
from fedstill.core.class_weights import TotalsAtClient, TotalsAtServer, are_overall
from fedstill.core.extensions import (
    ClientHook,
    Engine,
    Middleware,
    NoRecorder,
    Observer,
    Recorder,
    RoundHook,
    SiteGuard,
    StageKeeper,
)
from fedstill.core.records import World
from fedstill.core.rounds import RunContext
from fedstill.engines.at_client import HeldOutTests, OwnTestSets
from fedstill.engines.client_measures import ClientMeasures
from fedstill.metrics.classification import RunMetrics
from fedstill.running.hostile_clients import hostile_middleware
from fedstill.running.kept_updates import update_keepers
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

    def __add__(self, other: Extensions) -> Extensions:
        """These extensions, followed by others."""
        return Extensions(
            round_hooks=self.round_hooks + other.round_hooks,
            middleware=self.middleware + other.middleware,
            observers=self.observers + other.observers,
            keepers=self.keepers + other.keepers,
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
    if are_overall(settings.plans):
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
    is_real_site: bool,
) -> tuple[ClientHook, ...]:
    """The hooks of a run's clients. ``measured``: the measures that clients take; ``metrics``:
    those of models on clients' own test sets.
    """
    hooks: list[ClientHook] = []
    if are_overall(settings.plans):
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
    return (*hooks, measured, OwnTestSets(metrics, _histogram_stages(settings, is_real_site)))


def _histogram_stages(settings: Settings, is_real_site: bool) -> tuple[str, ...] | None:
    """The stages after which a real site sends histograms of its scores: those that test the global
    model, or that leave the client a model of its own; none if the server may see no client's.
    """
    if not is_real_site:
        return None
    if settings.hides_client_models:
        return ()
    return tuple(sorted(settings.method.personal or TEST_STAGES))


def site_guards(prepared: PreparedRun, folder: Path) -> tuple[SiteGuard, ...]:
    """What protects a site. ``folder``: of the client in this run, where guards keep notes."""
    guards: list[SiteGuard] = []
    for part in manifest.site_guards():
        guards += part.load()(prepared, folder)
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
    )
