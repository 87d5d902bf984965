"""The functions of measures, called: what they give is checked, and what goes wrong names the
measure.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from fedstill.engines.lent import Lent
from fedstill.engines.returned import journal_fields
from fedstill.errors import FedstillError
from fedstill.experiment.measures.base import Happened, Measure, Numbers, Reports, Room
from fedstill.experiment.measures.choose import looks_last
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.keys import drawing_from, seed_for
from fedstill.origin import reason
from fedstill.records import SERVER

log = logging.getLogger("fedstill.measuring")

EVENT = frozenset({"event", "measure", "round", "stage", "name", "seconds"})
"""Fields of an event that say what happened where: no measure gives one of these names."""


def when_they_look(
    measures: Mapping[str, Measure], prepared: Prepared
) -> dict[str, tuple[int, int]]:
    """By name, of measures that look once: the round and the stage in which they do."""
    last, world = prepared.settings.rounds, prepared.world
    stages, method = prepared.settings.topology(last, world), prepared.settings.method
    once = {n: looks_last(m, stages, method, world) for n, m in measures.items() if m.only_last}
    return {name: (last, index) for name, index in once.items() if index is not None}


def looked(name: str, measure: Measure, seen: Happened, room: Room) -> Numbers | None:
    """What a measure sees in a finished stage; raises FedstillError, with its place, if it
    fails.
    """
    world, stage, shown = room.world, seen.stage, _shown(seen)
    where = f"round {stage.round}, stage {stage.name!r}"
    try:
        with drawing_from(
            seed_for(world.seed, stage.round, stage.index, SERVER, f"measure {name}")
        ):
            given = measure.look(seen, room)
        shown.check(measure.look)
        if given is None and measure.only_last:
            log.warning("measure %s looks once, in %s, and there was nothing to see", name, where)
        return None if given is None else journal_fields(measure.look, given, EVENT)
    except FedstillError:
        raise
    except Exception as error:
        raise FedstillError(f"{where}: measure {name} failed: {reason(error, measure)}") from error


def _shown(seen: Happened) -> Lent:
    """What a measure is shown of the run's own tensors."""
    states = {"before": seen.before, "after": seen.after}
    return Lent(
        {
            **{
                name: {"params": state.params, "extra": state.extra}
                for name, state in states.items()
            },
            "replies": [reply.up for reply in seen.replies],
            "downs": seen.downs,
        }
    )


def note_silent(measures: Mapping[str, Measure], reports: Reports) -> None:
    """Say of which measures that clients take none had anything to report, as where no client has a
    model.
    """
    for name, measure in measures.items():
        theirs = type(measure).look is Measure.look and measure.gives
        if theirs and not any({*measure.gives} & event.keys() for event in reports.clients):
            log.warning("measure %s: in the last round no client had a model to measure", name)


def summed_by_measures(
    measures: Mapping[str, Measure], reports: Reports, taken: Collection[str], over_flower: bool
) -> dict[str, Any]:
    """What the measures make of the clients' reports; over Flower no client's report may end the
    run.

    taken: names of the round's own fields. No two measures may give the same one either.
    """
    made: dict[str, Any] = {}
    for name, measure in measures.items():
        try:
            made |= journal_fields(
                measure.of_round, measure.of_round(reports), {*EVENT, *taken, *made}
            )
        except Exception as error:
            said = f"measure {name} cannot sum up what clients reported: {reason(error, measure)}"
            if not over_flower:
                raise FedstillError(said) from error
            log.warning("%s", said)
    return made
