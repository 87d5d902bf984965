"""Which engine a run uses: what a config says, what an engine cannot do, and what ``auto``
chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedstill.engines.cost import Work, suited_engine
from fedstill.engines.pooled import PooledEngine
from fedstill.engines.serial import SerialEngine
from fedstill.engines.vectorised import VectorisedEngine, why_not
from fedstill.errors import ConfigError
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.run_world import RunWorld
from fedstill.records import SERVER

ENGINES = {"serial": SerialEngine, "pooled": PooledEngine, "vectorised": VectorisedEngine}
"""The engines by the name they have in a config."""


def resolved(settings: Settings, world: RunWorld, examples: int) -> Settings:
    """The settings with ``auto`` replaced by the chosen engine, so that config.toml names it and a
    resume keeps it.

    examples: in the training set. Raises ConfigError where the vectorised engine cannot do what is
    asked.
    """
    name = settings.engine
    if name == "vectorised":
        _check_stackable(stages(settings, world, examples), settings)
    if name != "auto":
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
        for s in settings.topology(r, world)
        if s.clients != (SERVER,)
    }
    each = examples / settings.clients
    return [
        Work(world.plans[s.name], len(s.clients), {world.model(c) for c in s.clients}, each)
        for s in stages.values()
        if s.name in world.plans
    ]


def _check_stackable(work: list[Work], settings: Settings) -> None:
    if not any(w.clients > 1 for w in work):
        kind = settings.named.topology.label
        raise ConfigError(
            f"engine = 'vectorised' stacks the clients of a stage, and topology {kind} has one at "
            "a time: set 'pooled'"
        )
    for one in work:
        for spec in one.specs:
            if one.clients > 1 and (reason := why_not(spec, one.plan)):
                raise ConfigError(
                    f"engine = 'vectorised' cannot stack these clients: {reason}; set engine = "
                    "'pooled'"
                )
