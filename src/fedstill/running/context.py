"""What all rounds of a run share: the one way to build it, for runs, replays, queries and tests."""

from __future__ import annotations

from fedstill.core.extensions import Engine, NoRecorder, Recorder
from fedstill.core.rounds import RunContext
from fedstill.running.extensions import Extensions, run_extensions
from fedstill.running.preparation import Prepared


def run_context(
    prepared: Prepared,
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
