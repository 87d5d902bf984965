"""Which engine a run uses: the cost of a step, and what ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from fedstill.config.settings import Settings
from fedstill.core.records import SERVER, ModelSpec, Plan
from fedstill.engines.footprint import step_flops
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.serial import SerialEngine
from fedstill.engines.vectorised import VectorisedEngine, why_not
from fedstill.running.world import RunWorld

# What a client's step costs, and from that which engine suits a run: by arithmetic alone, never by
# timing.
#
# A timing would choose differently from run to run, and the engines' last bits differ.


CROSSOVER = {"cpu": 60e6}
"""Up to so many floating-point operations in a client's step, stacking clients beats training them
side by side.

``python -m benchmarks.crossover`` on two quiet cores, 16 clients, stages in turn: from 3.3 to 60
MFLOP stacks were 1.7 to 3.8 times as fast; at 105 and 110 MFLOP 1.5 times for a small network, at
112 MFLOP 0.6 times for one of 1.9 million parameters, whose numbers no longer fit into the cache;
above 500 MFLOP 0.7 to 0.8 times.
"""

FEWEST = 4
"""Clients in a stage from which stacking can pay."""


@dataclass(frozen=True)
class Work:
    """A stage as the cost model sees it: its plan, its clients, their architectures, the examples
    of the mean one.
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


def suited_engine(
    stages: Collection[Work], device: str
) -> tuple[Literal["pooled", "vectorised"], str]:
    """The engine for a run with these stages, "pooled" or "vectorised", and in words why."""
    wide = [s for s in stages if s.clients > 1]
    if not wide:
        return "pooled", "one client acts at a time, so there is nothing to stack"
    for stage in wide:
        for spec in stage.specs:
            if reason := why_not(spec, stage.plan):
                return "pooled", reason
    if device not in CROSSOVER:
        return (
            "pooled",
            f"it is not known when stacking is faster on {device}; engine = 'vectorised' tries it",
        )
    least, most, limit = min(s.clients for s in wide), max(s.flops for s in wide), CROSSOVER[device]
    said = f"{most / 1e6:.3g} MFLOP in a client's step, {least} clients in a stage"
    if least < FEWEST:
        return "pooled", f"{said}: stacking takes {FEWEST}"
    if most > limit:
        return "pooled", f"{said}: stacking pays up to {limit / 1e6:.3g} MFLOP"
    return "vectorised", f"{said}: stacking pays up to {limit / 1e6:.3g} MFLOP"


# Which engine a run uses: what a config says, what an engine cannot do, and what ``auto`` chooses.


ENGINES = {"serial": SerialEngine, "pooled": PooledEngine, "vectorised": VectorisedEngine}
"""The engines by the name they have in a config."""


def resolved(settings: Settings, world: RunWorld, examples: int) -> Settings:
    """The settings with ``auto`` replaced by the chosen engine, so that config.toml names it and a
    resume keeps it.

    examples: in the training set.
    """
    if settings.engine != "auto":
        return settings
    return replace(settings, engine=chosen(settings, world, examples)[0])


def chosen(
    settings: Settings, world: RunWorld, examples: int
) -> tuple[Literal["pooled", "vectorised"], str]:
    """What the cost model says of a run: an engine, and why."""
    return suited_engine(stages(settings, world, examples), settings.device)


def stages(settings: Settings, world: RunWorld, examples: int) -> list[Work]:
    """The stages of the first and the last round in which clients train, as the cost model sees
    them.
    """
    rounds = {1, settings.rounds}
    stages = {
        s.name: s
        for r in sorted(rounds)
        for s in settings.schedule(r, world)
        if s.clients != (SERVER,)
    }
    each = examples / settings.clients
    return [
        Work(world.plans[s.name], len(s.clients), {world.model(c) for c in s.clients}, each)
        for s in stages.values()
        if s.name in world.plans
    ]
