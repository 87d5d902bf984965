"""How far who was drawn explains a round: the same round, from the same state, with other clients
drawn by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from fedstill.attribution.replay import OnAgain, TakenUp, gone_to
from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, Stage
from fedstill.core.rounds import run_round
from fedstill.running.context import run_context
from fedstill.running.evaluation import evaluated, evaluated_answers

TRIES = 20
"""How many draws are made for each other cohort, at most, before too few are said to be there."""


@dataclass(frozen=True)
class Cohort:
    """A round's clients, what they have of each class in it (C,), and the global model's class
    accuracies (C,).

    An accuracy is None where the class has no test examples.
    """

    clients: tuple[int, ...]
    has: tuple[int, ...]
    after: tuple[float | None, ...]


def round_of_others(
    kept: TakenUp,
    round: int,
    count: int,
    again: OnAgain,
    done: Callable[[int], None] = lambda number: None,
) -> list[Cohort]:
    """The cohort of a round as it was, then ``count`` others, each from the state before the round.

    They are drawn as the topology draws, by other keys, so all are different; clients that are in
    several train in each as they did, for their draws are keyed by themselves. ``done`` is called
    after each with its number, from 0. Raises ConfigError where no other clients can be drawn, or
    there is no global model on a common test set.
    """
    settings, world = kept.prepared.settings, kept.prepared.world
    drawn, counts = _drawn(kept, round, count), kept.prepared.sites.all_counts(round)
    memory = kept.memory()
    with kept.computing(), closing(kept.prepared.engine(memory, measured=False)) as made:
        engine = replace(made, kept=None)
        state = gone_to(kept, engine, round, again)
        cohorts = []
        for number, stages in enumerate(drawn):
            own = replace(engine, memory=memory.in_process())
            after = run_round(state, stages, run_context(kept.prepared, own))
            named = evaluated_answers(settings.method, after, world)
            accuracy = evaluated(named, kept.prepared.sites, world.classes)["class_accuracy"]
            clients = _clients(stages)
            cohorts.append(
                Cohort(clients, tuple(counts[list(clients)].sum(0).tolist()), tuple(accuracy))
            )
            done(number)
    if all(a is None for a in cohorts[0].after):
        raise ConfigError(f"{kept.folder} has no global model on a common test set to compare")
    return cohorts


def _drawn(kept: TakenUp, round: int, count: int) -> list[list[Stage]]:
    """The round's stages as they were, and ``count`` times with other clients. Raises ConfigError
    if there are none.
    """
    settings, world = kept.prepared.settings, kept.prepared.world
    own = list(settings.schedule(round, world))
    different = {_everybody(own): own}
    for number in range(TRIES * count):
        other = replace(world, seed=seed_for(world.seed, round, number, SERVER, "cohort"))
        stages = list(settings.schedule(round, other))
        different.setdefault(_everybody(stages), stages)
        if len(different) > count:
            return list(different.values())
    said = "every client acts in it" if len(different) == 1 else f"there are {len(different) - 1}"
    raise ConfigError(
        f"round {round} cannot be gone through with {count} other draws of clients: {said}"
    )


def _everybody(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.clients for stage in stages)


def _clients(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Who was drawn: the links of a chain in their order, or the clients side by side."""
    links = tuple(stage.clients[0] for stage in stages if stage.sequential)
    return links or min((stage.clients for stage in stages if SERVER not in stage.clients), key=len)
