"""Which engine a run uses: the cost of a step, and what ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fedstill.config.settings import Settings
from fedstill.core.records import SERVER, ModelSpec, Plan
from fedstill.engines.footprint import step_flops
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.serial import SerialEngine
from fedstill.engines.vectorised import VectorisedEngine, stacking_obstacle
from fedstill.running.world import RunWorld

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


@dataclass(frozen=True)
class StageWork:
    """A stage as the cost model sees it: its plan, how many clients it has, their architectures,
    and the examples of an average client.
    """

    plan: Plan
    clients: int
    specs: Collection[ModelSpec]
    examples: float

    @property
    def flops(self) -> float:
        """Floating-point operations in a step of the costliest client, forward and backward,
        without teachers.
        """
        batch = max(1.0, min(self.plan.batch, self.examples))
        return max(step_flops(spec, batch) for spec in self.specs)


class EngineChoice(NamedTuple):
    """The engine that suits a run, and in words why."""

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
    if device not in CROSSOVER:
        reason = (
            f"it is not known when stacking is faster on {device}; engine = 'vectorised' tries it"
        )
        return EngineChoice("pooled", reason)

    clients = min(stage.clients for stage in side_by_side)
    flops = max(stage.flops for stage in side_by_side)
    limit = CROSSOVER[device]
    costs = f"{flops / 1e6:.3g} MFLOP in a client's step, {clients} clients in a stage"
    if clients < FEWEST:
        return EngineChoice("pooled", f"{costs}: stacking takes {FEWEST}")
    reason = f"{costs}: stacking pays up to {limit / 1e6:.3g} MFLOP"
    if flops > limit:
        return EngineChoice("pooled", reason)
    return EngineChoice("vectorised", reason)


# Which engine a run uses: what its config says, or what ``auto`` chooses.


ENGINES = {"serial": SerialEngine, "pooled": PooledEngine, "vectorised": VectorisedEngine}
"""The engines by the name they have in a config."""


def with_engine(settings: Settings, world: RunWorld, examples: int) -> Settings:
    """The settings with the chosen engine in place of ``auto``, so that config.toml names it and a
    resume keeps it.

    examples: in the training set.
    """
    if settings.engine != "auto":
        return settings
    return replace(settings, engine=choose_engine(settings, world, examples).engine)


def choose_engine(settings: Settings, world: RunWorld, examples: int) -> EngineChoice:
    """The engine that the cost model chooses for a run."""
    return suited_engine(work_of_stages(settings, world, examples), settings.device)


def work_of_stages(settings: Settings, world: RunWorld, examples: int) -> list[StageWork]:
    """The stages of the first and the last round in which clients train, as the cost model sees
    them.
    """
    stages = {
        stage.name: stage
        for round in (1, settings.rounds)
        for stage in settings.schedule(round, world)
        if stage.clients != (SERVER,)
    }
    return [
        StageWork(
            plan=world.plans[stage.name],
            clients=len(stage.clients),
            specs={world.model(client) for client in stage.clients},
            examples=examples / settings.clients,
        )
        for stage in stages.values()
        if stage.name in world.plans
    ]
