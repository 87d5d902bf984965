"""What all rounds of a run share: the one place where its extensions are put together."""

from __future__ import annotations

from fedstill.core.census import CensusChecks
from fedstill.core.extensions import Engine, NoRecorder, Recorder, RoundHook
from fedstill.core.records import State, World
from fedstill.core.rounds import RunContext
from fedstill.querying.hooks import QueriesAtServer
from fedstill.running.preparation import Prepared


def run_context(prepared: Prepared, engine: Engine, recorder: Recorder | None = None) -> RunContext:
    """The context of a run's rounds with an engine, and with a recorder if there is one."""
    settings = prepared.settings
    return RunContext(
        schedule=settings.schedule,
        world=prepared.world,
        engine=engine,
        rules=settings.rules,
        recorder=recorder or NoRecorder(),
        hooks=round_hooks(prepared),
    )


def world_in(prepared: Prepared, state: State) -> World:
    """The world of a run in a state, as the run's hooks extend it."""
    world: World = prepared.world
    for hook in round_hooks(prepared):
        world = hook.extend_world(world, state)
    return world


def round_hooks(prepared: Prepared) -> tuple[RoundHook, ...]:
    """The extensions of a run's server, in their order."""
    hooks: list[RoundHook] = [CensusChecks(prepared.settings.rules.max_examples)]
    if prepared.world.asking is not None:
        hooks.append(QueriesAtServer(prepared.world.asking))
    return tuple(hooks)
